"""What a loader remembers of its batches, over more of them than it keeps."""

from __future__ import annotations

import json
import logging
import sys
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nostall
from nostall.observe import _recorder as record
from nostall.observe import metrics, trace
from nostall.observe._stats import Stats, merge
from nostall.observe.report import _run as runs


@pytest.fixture
def loader(tmp_path: Path) -> Callable[[int], nostall.DataLoader]:
    """Makes loaders of 3 batches of two samples, one of which is damaged."""
    for i in range(6):
        np.full((2, 2, 3), i, np.uint8).tofile(tmp_path / f"{i}.raw")
    (tmp_path / "3.raw").write_bytes(b"short")

    def make(epochs: int) -> nostall.DataLoader:
        source = nostall.FileList(sorted(tmp_path.iterdir()))
        source.pixels = nostall.Pixels(2, 2)
        steps = [nostall.transforms.ToTensor()]
        return nostall.DataLoader(
            source, 2, epochs=epochs, transforms=steps, tiers=[], threads=1, on_error="substitute"
        )

    return make


def test_an_epoch_with_substituted_samples_ends_in_one_warning(
    loader: Callable[[int], nostall.DataLoader], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "1.raw").write_bytes(b"short too")
    with loader(2) as source:
        first, second = source.epochs()
        batches = iter(first)
        for _ in range(2):
            next(batches)
        assert not caplog.messages
        for _ in batches:
            pass
        (told,) = caplog.messages
        of = source.stats().epochs[0].substituted
        assert sorted(of) == [1, 3]
        assert told.startswith("epoch 0: 2 of 6 samples could not be used, and others took")
        assert f"the first one is {tmp_path / f'{of[0]}.raw'} (sample {of[0]})" in told
        next(iter(second))  # and is left
    assert len(caplog.messages) == 1 + bool(source.stats().epochs[1].substituted)


def test_a_source_that_cannot_name_a_sample_does_not_undo_the_epoch(
    loader: Callable[[int], nostall.DataLoader],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(sample: int) -> str:
        raise KeyError(sample)

    with loader(2) as source:
        monkeypatch.setattr(source._recorder, "_describe", fails)
        assert len(list(source)) == 3
        assert source.position == (1, 0)
    (told,) = caplog.messages
    assert "the first one is one of the source (sample 3)" in told


def test_an_epoch_without_substituted_samples_ends_in_no_warning(
    loader: Callable[[int], nostall.DataLoader], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "3.raw").write_bytes(bytes(12))
    with loader(1) as source:
        assert len(list(source)) == 3
    assert not caplog.messages


def test_the_last_batches_and_epochs_are_whole_and_sums_are_of_all(
    monkeypatch: pytest.MonkeyPatch, loader: Callable[[int], nostall.DataLoader]
) -> None:
    monkeypatch.setattr(record, "_BATCHES", 20)
    monkeypatch.setattr(record, "_EPOCHS", 5)
    with loader(100) as source:
        given = [len(batch[1]) for epoch in source.epochs() for batch in epoch]
        assert given == [2] * 300
        stats = source.stats()
        total = source.totals()[0]
    assert stats.samples == 600 and total.batches == 300
    assert stats.source_bytes >= 100 * 5 * 12 and total.origins["source"].samples >= 500
    assert total.decode_seconds > 0
    assert stats.stall_seconds == pytest.approx(total.stall_seconds) and stats.stall_seconds > 0
    earlier, *whole = stats.epochs
    assert earlier.epoch == -1 and earlier.batches == 3 * (100 - len(whole))
    assert earlier.substituted == [3], "it does not grow with the epochs"
    assert [e.epoch for e in whole] == list(range(100 - len(whole), 100)) and 5 <= len(whole) <= 10
    assert all(e.substituted == [3] and e.samples == 6 and e.stall_seconds > 0 for e in whole)
    rows = list(zip(stats.batches.epoch, stats.batches.batch, strict=True))
    assert rows == [(b // 3, b % 3) for b in range(300)][-len(rows) :] and 20 <= len(rows) <= 40
    assert stats.batches.time == sorted(stats.batches.time) and max(stats.batches.source) == 2
    assert stats.memory["staging"] > 0
    assert "earlier" in str(stats) and Stats.from_dict(stats.to_dict()) == stats
    assert merge([stats, replace(stats, rank=1)]).samples == 1200


def test_what_is_written_each_second_does_not_grow_with_samples_that_were_replaced(
    loader: Callable[[int], nostall.DataLoader],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path_factory.mktemp("run")
    monkeypatch.setattr(metrics, "LIVE_SECONDS", 0.0)
    trace.start(home, rank=0)
    with loader(4) as source:
        assert [len(list(epoch)) for epoch in source.epochs()] == [3] * 4
        told = json.loads((home / "rank0.0.live.json").read_text())
        stats = source.stats()
    trace.stop()
    assert [(e["epoch"], e["samples"], e["substituted"]) for e in told["epochs"]] == [
        (-1, 18, []),
        (3, 6, []),
    ]
    # Its record has them.
    (kept,) = runs.read(home).stats
    assert [e.substituted for e in kept.epochs] == [e.substituted for e in stats.epochs]
    assert [e.substituted for e in kept.epochs] == [[3]] * 4


def test_sums_never_fall_while_another_thread_asks_for_them(
    loader: Callable[[int], nostall.DataLoader],
) -> None:
    with loader(3) as source:
        recorder = source._recorder
        freeze = recorder._frozen

        def late(running: record._Running) -> record.EpochStats:
            # The consumer would go on to its next epoch before this thread has read the sums.
            monkeypatch.undo()
            consumer.start()
            consumer.join(0.05)
            assert consumer.is_alive()
            return freeze(running)

        consumer = threading.Thread(target=recorder.begin_epoch, args=(2, 3))
        list(source)
        batches = iter(source)
        next(batches), next(batches)
        before, _ = source.totals()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(recorder, "_frozen", late)
            total, _ = recorder.totals()
        consumer.join()
    assert (before.batches, before.samples) == (total.batches, total.samples) == (5, 10)


def test_a_wait_that_goes_on_counts(
    loader: Callable[[int], nostall.DataLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader(3) as source:
        batches = iter(source)
        next(batches)
        before = source.totals()[0].stall_seconds
        began = source._recorder.wait()
        with monkeypatch.context() as patched:
            patched.setattr(record.time, "perf_counter", lambda: began + 7)
            assert source.totals()[0].stall_seconds == pytest.approx(before + 7)
        next(batches)
        taken = source.totals()[0]
        assert taken.batches == 2  # as long as the consumer has it nothing is waited for
        assert source.totals()[0].stall_seconds == taken.stall_seconds


def test_a_wait_that_failed_counts_as_it_did_while_it_went_on(
    loader: Callable[[int], nostall.DataLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader(3) as source:
        batches = iter(source)
        next(batches)
        began = source._recorder.wait()
        monkeypatch.setattr(record.time, "perf_counter", lambda: began + 7)
        seen = source.totals()[0]
        batches.close()
        ended = source.totals()[0]
        assert (ended.stall_seconds, ended.seconds) == (seen.stall_seconds, seen.seconds)
        monkeypatch.undo()
        next(iter(source))  # of the next epoch, which waits for itself
        assert source.stats().epochs[-1].stall_seconds < 7


def test_memory_does_not_grow_with_the_batches(
    monkeypatch: pytest.MonkeyPatch, loader: Callable[[int], nostall.DataLoader]
) -> None:
    monkeypatch.setattr(record, "_BATCHES", 50)
    monkeypatch.setattr(record, "_EPOCHS", 5)
    monkeypatch.setattr(
        logging.getLogger("nostall"), "disabled", True
    )  # pytest keeps what is logged
    try:
        with loader(600) as source:
            epochs = source.epochs()
            for _ in range(100):
                list(next(epochs))
            tracemalloc.start()
            before = tracemalloc.take_snapshot()
            for epoch in epochs:
                list(epoch)
            grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    finally:
        # After the loader's threads: one that takes the GIL meanwhile crashes CPython (issue 128679).
        tracemalloc.stop()
    assert sum(d.size_diff for d in grown if d.traceback[0].filename == record.__file__) < 16384


@pytest.mark.parametrize(
    ("started", "words", "shown"),
    [
        (["/bin/python", "a.py", "-c", "b"], ["a.py", "-c", "b"], "a.py -c b"),
        (["python", "-u", "-c", "pass", "-c", "a"], ["-c", "-c", "a"], "-u -c ... -c a"),
        (["python", "-uc", "pass"], ["-c"], "-uc ..."),
        (["python", "-c", "pass", "a"], ["-c", "a", "more", "words"], "-c ... a"),
        (["python", "-Wd", "-cpass", "a"], ["-c"], "-Wd -c ... a"),
    ],
)  # fmt: skip
def test_a_command_is_shown_without_a_program_after_c(
    monkeypatch: pytest.MonkeyPatch, started: list[str], words: list[str], shown: str
) -> None:
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(sys, "argv", words)
    assert trace._command() == f"python {shown}"
