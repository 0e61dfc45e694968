"""What a loader remembers of its batches, over more of them than it keeps."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nostall.observe import _recorder as record
from nostall.observe._recorder import Recorder
from nostall.observe._stats import Stats, merge


def play(recorder: Recorder, epochs: range, batches: int, bad: int | None = None) -> None:
    for epoch in epochs:
        running = recorder.begin_epoch(epoch)
        for index in range(batches):
            substitutions = [] if bad is None else [(bad, 0, "broken")]
            batch: Any = SimpleNamespace(
                epoch=epoch, index=index,
                origins=[(1, 10, 0.5), (0, 0, 0.0), (0, 0, 0.0), (1, 5, 0.25)],
                queue=3, transform_seconds=0.125, substitutions=substitutions,
            )  # fmt: skip
            recorder.batch(cast(Any, Sized(batch)), 0.5, (1, 2, 3, 4, 5 + index), [])
        recorder.end_epoch(running)


class Sized:
    """A batch of two samples."""

    def __init__(self, batch: Any) -> None:
        self.__dict__.update(batch.__dict__)

    def __len__(self) -> int:
        return 2


def test_the_last_batches_and_epochs_are_whole_and_sums_are_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "_BATCHES", 20)
    monkeypatch.setattr(record, "_EPOCHS", 5)
    recorder = Recorder(0, 1)
    play(recorder, range(100), 3, bad=7)
    stats = recorder.stats("loader 0", lambda: 10)
    assert stats.samples == 600 and stats.source_bytes == 1500 and stats.stall_seconds == 150
    assert recorder.totals()[0].batches == 300
    earlier, *whole = stats.epochs
    assert earlier.epoch == -1 and earlier.batches == 3 * (100 - len(whole))
    assert earlier.substituted == [7], "it does not grow with the epochs"
    assert [e.epoch for e in whole] == list(range(100 - len(whole), 100)) and 5 <= len(whole) <= 10
    rows = list(zip(stats.batches.epoch, stats.batches.batch, strict=True))
    assert rows == [(b // 3, b % 3) for b in range(300)][-len(rows) :] and 20 <= len(rows) <= 40
    assert stats.memory["decoding"] == 7
    assert "earlier" in str(stats) and Stats.from_dict(stats.to_dict()) == stats
    assert merge([stats, replace(stats, rank=1)]).samples == 1200


def test_memory_does_not_grow_with_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_BATCHES", 50)
    monkeypatch.setattr(record, "_EPOCHS", 5)
    recorder = Recorder(0, 1)
    tracemalloc.start()
    try:
        play(recorder, range(100), 3)
        before = tracemalloc.take_snapshot()
        play(recorder, range(100, 1100), 3)
        grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    finally:
        tracemalloc.stop()
    assert sum(d.size_diff for d in grown if d.traceback[0].filename == record.__file__) < 16384
