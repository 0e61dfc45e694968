"""Killed processes, power cuts, full and hanging storage, flipped bits, mixed files."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import campaign
import numpy as np
import prefork
import pytest
from limits import refuse_threads

import nostall
from nostall.checkpoint._saved import Saved
from nostall.checkpoint._store import Store
from nostall.errors import CorruptionError

HERE = Path(__file__).parent


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(20_000, step, np.float64), "step": step}


@pytest.mark.multi
@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power-cut"])
@pytest.mark.parametrize(("ranks", "nodes"), [(1, False), (2, False), (2, True)])
def test_a_killed_job_leaves_the_newest_checkpoint_and_no_rubbish(
    ranks: int, nodes: bool, power_cut: bool
) -> None:
    points = [(i % ranks, share) for i, share in enumerate((0.5, 0.0, 0.75, 0.25))]
    result = campaign.run(
        points, ranks=ranks, power_cut=power_cut, seed=7, timeout=280, nodes=nodes
    )
    assert result["failures"] == []
    assert result["counts"]["killed"] == len(points)


def run_storage(scenario: str, home: Path, shim: Path) -> tuple[list[dict[str, Any]], str]:
    hanging = home / "durable"
    done = subprocess.run(
        [sys.executable, str(HERE / "storage.py"), scenario, str(home)],
        env={
            **os.environ,
            "LD_PRELOAD": str(shim),
            "NOSTALL_FAULT_HANG": str(hanging),
            "NOSTALL_FAULT_FULL": str(home / ("fast" if scenario == "full-fast" else "durable")),
            **({"NOSTALL_FAULT_FULL": str(home)} if scenario == "full-everywhere" else {}),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return campaign.build_shim(tmp_path_factory.mktemp("shim"))


def test_a_full_fast_tier_falls_to_the_durable_one(tmp_path: Path, shim: Path) -> None:
    (result,), words = run_storage("full-fast", tmp_path, shim)
    assert [s["level"] for s in result["saves"]] == ["durable"] * 5
    assert [bool(s["problems"]) for s in result["saves"]] == [False, True, True, True, False]
    assert "No space left" in words and f"writing to {tmp_path / 'durable'} directly" in words
    assert result["restored"] == [5, "fast", True]


def test_a_full_durable_tier_keeps_the_fast_ones(tmp_path: Path, shim: Path) -> None:
    (result,), words = run_storage("full-durable", tmp_path, shim)
    assert "stays in" in words and "No space left" in words
    assert result["restored"] == [5, "fast", True]
    # Once there is room again, what waited is drained.
    durable = [e.step for e in Store(tmp_path / "durable", "durable").entries()]
    assert durable == [1, 2, 3, 4, 5]


def test_a_save_that_no_storage_takes_is_an_error_and_the_old_one_stays(
    tmp_path: Path, shim: Path
) -> None:
    (result,), _ = run_storage("full-everywhere", tmp_path, shim)
    first, at_the_end = result["errors"]
    assert "step 2" in first and "fast" in first
    assert "of step 2, is safe nowhere" in at_the_end
    assert result["restored"] == [1, "fast", True]


def test_hanging_durable_storage_does_not_stop_the_training(tmp_path: Path, shim: Path) -> None:
    (tmp_path / "durable").mkdir()
    (result, end), words = run_storage("hang", tmp_path, shim)
    # Neither a save nor the end waited for the storage, which hangs as long as the flag is there.
    assert end == "closed"
    assert [s["level"] for s in result["saves"][1:]] == ["fast"] * 5
    assert result["restored"] == [5, "fast", True]
    assert "drained by the next start" in words
    (tmp_path / "durable.hang").unlink()
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep=2) as ckpt:
        ckpt.wait(60)
        found = ckpt.restore()
    assert found is not None and found.step == 5
    durable = [e.step for e in Store(tmp_path / "durable", "durable").entries()]
    assert 5 in durable


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_anywhere_is_found_and_passed_over(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
    for trial in range(5):
        path = rng.choice(sorted((tmp_path / "step-000000000002").iterdir()))
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        caplog.clear()
        with nostall.Checkpointer(durable=tmp_path) as ckpt:
            found = ckpt.restore()
        assert found is not None and (found.step, found.state["step"]) == (1, 1), trial
        assert str(path) in caplog.text and "damaged" in caplog.text
        path.write_bytes(good)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        found = ckpt.restore()
    assert found is not None and found.step == 2


def test_a_damaged_fast_copy_falls_to_the_durable_one_and_is_not_drained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast, durable, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
    with nostall.Checkpointer(fast, level="fast", keep=3) as ckpt:
        ckpt.save(state_of(2), 2)
    for path in fast.glob("step-*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with nostall.Checkpointer(fast, durable) as ckpt:
        ckpt.wait(60)
        found = ckpt.restore()
        assert found is not None and (found.step, found.tier) == (1, "durable")
    assert [e.step for e in Store(durable, "durable").entries()] == [1]
    assert "stays in" in caplog.text and "(in them: the header, w)" in caplog.text


def test_damaged_checkpoints_do_not_push_good_ones_out(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable", keep=1) as ckpt:
        ckpt.save(state_of(5), 5)
    with nostall.Checkpointer(durable=tmp_path, level="durable", keep=2) as ckpt:
        ckpt.save(state_of(9), 9)
    for path in tmp_path.glob("step-000000000009/*.safetensors"):
        path.write_bytes(b"\0" * path.stat().st_size)
    with nostall.Checkpointer(durable=tmp_path, level="durable", keep=1) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.step == 5
        ckpt.save(state_of(6), 6)
        found = ckpt.restore()
        assert found is not None and found.step == 6


def test_a_file_from_a_newer_save_is_never_mixed_in(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
    (newer,) = tmp_path.glob("step-000000000002/*.safetensors")
    (older,) = tmp_path.glob("step-000000000001/*.safetensors")
    older.write_bytes(newer.read_bytes())
    with nostall.Checkpointer(durable=tmp_path) as ckpt, pytest.raises(CorruptionError):
        for step in (1,):
            ckpt.restore(step)


def test_a_part_that_is_gone_or_cut_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step)
    next(tmp_path.glob("step-000000000003/*.safetensors")).unlink()
    os.truncate(next(tmp_path.glob("step-000000000002/*.safetensors")), 100)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        found = ckpt.restore()
    assert found is not None and found.step == 1
    assert "does not exist" in caplog.text and "has 100 bytes" in caplog.text


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    with nostall.Checkpointer(durable=tmp_path / "c", level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        for path in (tmp_path / "c").glob("step-*/*"):
            path.write_bytes(pickle.dumps(Evil()))
        with pytest.raises(CorruptionError):
            ckpt.restore()
    assert not (tmp_path / "owned").exists()


@pytest.mark.multi
def test_a_killed_training_ends_with_the_same_weights(image_folder: Path, tmp_path: Path) -> None:
    def train(home: Path, kill_after: int | None) -> str | None:
        words = [str(HERE / "training.py"), str(image_folder), str(home), "3"]
        with prefork.Process(words, stdout=prefork.PIPE, torch=True) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                last = line
                if kill_after is not None and line.split() == ["step", str(kill_after)]:
                    time.sleep(0.005)  # or wherever it is by then
                    process.send_signal(signal.SIGKILL)
                    return None
            assert process.wait() == 0
            return last

    undisturbed = train(tmp_path / "a", None)
    assert undisturbed is not None and undisturbed.split()[0::2] == ["weights", "24"]
    for at in (5, 17):
        train(tmp_path / "b", at)
    assert train(tmp_path / "b", None) == undisturbed


def test_a_caller_waits_for_no_copy_of_its_own_where_no_thread_can_be_started(
    tmp_path: Path,
) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ckpt = nostall.Checkpointer(tmp_path)
            ckpt.save(state_of(1), 1, level="fast")  # starts the writer
            refuse_threads()
            saved = ckpt.save(state_of(2), 2, window=True)
            assert saved is not None
            saved.wait("fast", 60)
            assert saved.copying == "lazily: no thread can be started to copy it"
            found = ckpt.restore()
            assert found is not None and (found.state["w"] == 2).all()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_durable_storage_takes_what_the_fast_one_did_not_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ckpt = nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable")
            ckpt.save(state_of(1), 1, level="durable")  # starts the threads
            background, failed = ckpt._background, threading.Event()
            write, remember = background._write_file, ckpt._remember

            def fail_at_the_end(store: Store, *args: Any) -> Any:
                written = write(store, *args)
                if store is not background.fast:
                    return written
                failed.set()
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            def remember_late(saved: Saved) -> None:
                remember(saved)
                failed.wait(1)  # a writer that waits for no copy comes first

            monkeypatch.setattr(background, "_write_file", fail_at_the_end)
            monkeypatch.setattr(ckpt, "_remember", remember_late)
            refuse_threads()
            saved = ckpt.save(state_of(2), 2, level="durable")
            assert saved is not None and saved.level == "durable"
            found = ckpt.restore()
            assert found is not None and (found.state["w"] == 2).all()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
