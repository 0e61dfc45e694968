"""Samples and results of worker processes: their arrays travel in shared memory."""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nostall
from nostall.loader import _processes

_kept: list[tuple[bytes, Any]] = []


def made(raw: Any, context: nostall.Context) -> dict[str, Any]:
    """Arrays of each kind; they differ in size from sample to sample, and later ones are larger.

    Samples that it keeps must stay what they were.
    """
    assert all(one.tobytes() == before for before, one in _kept)
    _kept.append((raw.tobytes(), raw))
    size = 1000 + 10 * context.sample + (5000 if context.epoch else 0)
    image = np.full((3, size, 4), context.sample, np.float32)
    return {"image": image, "turned": image.transpose(1, 2, 0), "raw": raw[:8], "i": context.sample}


def is_shared(array: Any) -> bool:
    while array is not None:
        if isinstance(array, memoryview):
            array = array.obj
        elif isinstance(array, mmap.mmap):
            return True
        else:
            array = getattr(array, "base", None)
    return False


@pytest.mark.multi
def test_arrays_of_results_are_views_of_shared_memory(image_folder: Path) -> None:
    data = nostall.ImageFolder(image_folder, index=False)
    held: list[Any] = []
    with nostall.DataLoader(
        data, 8, epochs=2, seed=1, transforms=made, workers="processes", threads=1, tiers=[],
        collate=list, output="numpy",
    ) as loader:  # fmt: skip
        for epoch in loader.epochs():
            for results, _ in epoch:
                held.append((epoch.index, results))
    # Held all the time, and no batch lies in the place of another.
    samples = []
    for epoch_number, results in held:
        for one in results:
            size = 1000 + 10 * one["i"] + (5000 if epoch_number else 0)
            assert one["image"].shape == (3, size, 4) and one["turned"].shape == (size, 4, 3)
            assert (one["image"] == one["i"]).all() and (one["turned"] == one["i"]).all()
            assert one["raw"].tobytes() == Path(data.describe(one["i"])).read_bytes()[:8]
            assert one["image"].flags.writeable
        samples += [one["i"] for one in results]
    assert sorted(samples) == sorted([*range(len(data))] * 2)
    # The room that results need is known when the first ones have come, and grows with them.
    shared = [all(is_shared(one["image"]) for one in results) for _, results in held]
    assert shared[-1] and sum(shared) >= len(shared) - 8


def test_slots_are_used_again_when_no_array_is_in_them() -> None:
    memory = _processes._Memory()
    first, array = memory.take(100_000)
    second, other = memory.take(100_000)
    assert second != first
    part = array[5:9]
    del array, other
    third, held = memory.take(100_000)
    assert third == second  # the first is in use still
    del part
    again, _ = memory.take(70_000)
    assert again == first
    assert memory.take(200_000)[0].size == 2**18 and len(held) == 2**17


def test_free_slots_of_other_sizes_hold_no_memory() -> None:
    memory = _processes._Memory()
    with contextlib.closing(os.fdopen(os.memfd_create("probe"), "wb")) as file:
        file.truncate(mmap.PAGESIZE)
        try:
            mmap.mmap(file.fileno(), mmap.PAGESIZE).madvise(mmap.MADV_REMOVE)
        except OSError as error:
            pytest.skip(f"MADV_REMOVE takes no memory back here: {error}")

    sizes = [1 << 22, 1 << 23, 1 << 24]
    for size in sizes:
        array = memory.take(size)[1]
        array[:] = 1
        # Huge pages may hold some more. Where none is given back, it is 1.5 of the second size.
        assert os.fstat(memory._descriptor).st_blocks * 512 < 1.5 * size
        del array
    again, array = memory.take(sizes[0])
    assert again.offset == 0 and not array.any()


def test_slots_that_two_threads_take_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _processes._Memory()
    taken = []
    truncate = os.ftruncate
    other = threading.Thread(target=lambda: taken.append(memory.take(1)))

    def while_another_takes_one(descriptor: int, size: int) -> None:
        truncate(descriptor, size)
        if threading.current_thread() is not other:
            other.start()
            other.join(0.2)

    monkeypatch.setattr(os, "ftruncate", while_another_takes_one)
    taken.append(memory.take(1))
    other.join()
    assert len({slot.offset for slot, _ in taken}) == 2


def test_tensors_go_as_arrays_do() -> None:
    torch = pytest.importorskip("torch")
    values = [
        torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T,
        torch.tensor(2.5),
        torch.empty(0, 3, dtype=torch.int64),
        torch.from_numpy(np.zeros(1, np.float32)[:0].copy()),  # of stride 0
        torch.arange(10)[::10],
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        np.array([{"a": 1}], object),
        torch.ones(2, requires_grad=True),
        "text",
    ]
    packed = _processes._packed(values)
    assert len(packed.buffers) == 6 and len(packed.data) < 2000
    memory = np.full(packed.room + 64, 255, np.uint8)
    found = _processes._unpacked(packed.data, packed.lay(memory, 64), memory)
    assert (memory[:64] == 255).all()
    for before, after in zip(values, found, strict=True):
        if isinstance(before, torch.Tensor):
            assert before.dtype == after.dtype and before.shape == after.shape
            assert torch.equal(before, after) and before.requires_grad == after.requires_grad
        elif isinstance(before, np.ndarray):
            assert before.dtype == after.dtype and (before == after).all()
        else:
            assert before == after


PROGRAM = """
import sys
import nostall

def same(raw):
    return raw[:4]

if __name__ == "__main__":
    data = nostall.ImageFolder(sys.argv[1], index=False)
    more = {"transforms": same, "workers": "processes", "threads": 1, "tiers": []}
    loader = nostall.DataLoader(data, 8, epochs=1, output="numpy", **more)
    print(sum(len(labels) for _, labels in loader))
"""


def test_a_task_that_its_pool_has_forgotten_is_not_waited_for() -> None:
    processes = _processes.Processes(1, lambda samples, contexts: samples)  # has no thread yet
    task: Future[Any] = Future()
    assert task.set_running_or_notify_cancel()
    memory = np.zeros(64, np.uint8)
    with pytest.raises(BrokenExecutor, match="a process ended as the task came"):
        _processes.Answer(task, 0, range(1), memory, processes).result()
    processes.close()


@pytest.mark.multi
def test_a_close_ends_the_processes_that_a_pool_without_its_thread_leaves() -> None:
    processes = _processes.Processes(1, operator.add)
    (answer,) = processes.submit([1], [2], 1)
    assert answer.result() == [1, 2]
    processes._manager = lambda: None
    processes._pool.shutdown = lambda **more: None  # type: ignore[method-assign]
    processes.close()
    (process,) = processes._spawn.processes
    while (
        process.exitcode is None
    ):  # the pool's thread was first to hear of the end, and tells next
        time.sleep(0.01)
    assert process.exitcode == -signal.SIGKILL
    assert processes.crashed() == {}


def _ends(samples: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


@pytest.mark.multi
def test_a_process_may_end_before_all_of_a_batch_is_sent() -> None:
    processes = _processes.Processes(1, _ends)
    send, sent = processes._pool.submit, list[Future[Any]]()

    def behind_its_end(*given: Any) -> Future[Any]:
        if sent:
            with pytest.raises(BrokenExecutor):
                sent[0].result()
        sent.append(send(*given))
        return sent[-1]

    processes._pool.submit = behind_its_end  # type: ignore[method-assign, assignment]
    answers = processes.submit([1, 2], [3, 4], 1)
    for answer in answers:
        with pytest.raises(BrokenExecutor):
            answer.result()
    processes.close()
    assert len(sent) == 1
    ((pid, code),) = processes.crashed().items()
    assert code == -signal.SIGKILL
    assert [answer.worked_on([pid]) for answer in answers] == [(pid, 0), None]


@pytest.mark.multi
def test_a_program_that_closes_nothing_ends_without_a_word(
    image_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(image_folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    samples = len(nostall.ImageFolder(image_folder, index=False))
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{samples}\n", "")
