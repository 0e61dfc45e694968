"""What is left to the garbage collector is closed, whatever the thread holds in which it runs."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prefork
import pytest

import nostall
from nostall.base import _garbage

# The collector runs with the locks that a closing needs, of threads that start and of all that run
# ("locks"), or in the worker ("worker") that the closing waits for.
PROGRAM = """
import contextlib, gc, sys, threading, time

import numpy as np

import nostall
from nostall import convert

kind, where, folder = sys.argv[1:]
dropped, collected = threading.Event(), threading.Event()


class Items:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return np.full(4, i)


def slow(sample):
    if where == "worker" and sample["x"] >= 4:  # of the second batch, or a later one
        assert dropped.wait(250)
        gc.collect()
        collected.set()
    time.sleep(0.02)
    return sample


def refuse(phase, done):
    raise ValueError(phase)


def loader(**options):
    return nostall.DataLoader(
        nostall.Arrays({"x": np.arange(4000)}), 4, tiers=[], shuffle=False, **options
    )


def begun(loader):
    batches = iter(loader)
    next(batches)
    return loader, batches


def of_its_own():
    with loader(transforms=slow) as made:
        yield from made


def make():
    if kind == "loader":
        return begun(loader())
    if kind == "callables":
        return begun(loader(transforms=slow))
    if kind == "device":
        return begun(loader(transforms=slow, output="jax"))
    if kind == "generator":
        batches = of_its_own()
        next(batches)
        return batches
    if kind == "cached":
        return begun(nostall.DataLoader(nostall.Cached(Items(), makers=2, then=slow), 4))
    if kind == "checkpointer":
        ckpt = nostall.Checkpointer("fast", "durable")
        ckpt.save({"w": np.zeros(1 << 20)}, 1)
        return ckpt
    if kind == "conversion":
        try:
            convert.to_tar(nostall.ImageFolder(folder, index=False), "out", progress=refuse)
        except ValueError as error:
            return error  # which has the frames of what was going on


class Cycle:
    def __init__(self):
        self.me, self.made = self, make()


gc.disable()
Cycle()
if where == "worker":
    dropped.set()
    assert collected.wait(250)
else:
    with contextlib.ExitStack() as held:
        for name in ("_active_limbo_lock", "_shutdown_locks_lock"):  # the last one until Python 3.12
            if hasattr(threading, name):
                held.enter_context(getattr(threading, name))
        gc.collect()
print("collected", flush=True)
"""
KINDS = ["loader", "callables", "device", "generator", "cached", "checkpointer", "conversion"]
CASES = [(kind, "locks") for kind in KINDS]


@pytest.mark.parametrize(("kind", "where"), [*CASES, ("device", "worker")])
def test_the_collector_waits_for_no_thread(
    image_folder: Path, tmp_path: Path, kind: str, where: str
) -> None:
    program = ["-c", PROGRAM, kind, where, str(image_folder)]
    done = prefork.run(program, cwd=tmp_path, timeout=300, whole=True)
    assert (done.returncode, done.stdout) == (0, "collected\n"), done.stderr
    if kind == "checkpointer":  # and the end of the program waits for what is closed
        assert list(tmp_path.glob("fast/step-*/manifest.json"))


def drop(folder: Path) -> None:
    """Leaves a checkpointer with a save of some time to the collector."""
    ckpt = nostall.Checkpointer(durable=folder)
    ckpt.save({"w": np.zeros(1 << 24, np.uint8)}, 1)
    cycle: list[Any] = [ckpt]
    cycle.append(cycle)
    del ckpt, cycle
    gc.collect()


def test_the_directory_of_a_checkpointer_that_is_being_closed_is_waited_for(tmp_path: Path) -> None:
    drop(tmp_path)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        found = ckpt.restore()
    assert found is not None and found.step == 1


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_of_multiprocessing_saves_what_it_has_dropped(
    tmp_path: Path, method: str
) -> None:
    process = multiprocessing.get_context(method).Process(target=drop, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [path.name for path in tmp_path.glob("step-*/manifest.json")] == ["manifest.json"]


def test_what_no_thread_can_close_is_closed_when_it_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    closed: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(_garbage._thread, "start_new_thread", refuse)  # type: ignore[attr-defined]
        _garbage.apart(closed.append, 1)
    assert closed == []
    _garbage.await_all(None)
    _garbage.await_all(None)
    assert closed == [1]


def test_awaiting_ends_after_its_time(caplog: pytest.LogCaptureFixture) -> None:
    gone = threading.Event()

    def fail() -> None:
        gone.wait(60)
        raise ValueError("closing failed")

    _garbage.apart(fail)
    began = time.monotonic()
    _garbage.await_all(0.05)
    assert time.monotonic() - began < 30
    gone.set()
    _garbage.await_all(None)
    assert "cannot be closed" in caplog.text and "closing failed" in caplog.text


def test_a_collection_beside_is_not_taken_for_one_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It makes what it does not find older."""
    for count in range(3):

        def reference(thing: object, count: int = count) -> Any:
            for generation in range(count):
                gc.collect(generation)
            return weakref.ref(thing)

        monkeypatch.setattr(_garbage, "weakref", SimpleNamespace(ref=reference))
        assert not _garbage._is_collecting()
