"""What is left to the garbage collector is closed, whatever the thread holds in which it runs."""

from __future__ import annotations

import threading
from pathlib import Path

import prefork
import pytest

# The collector runs with a lock that the closing needs: of threads that start, or of all that run.
PROGRAM = """
import gc, sys, threading, time

import numpy as np

import nostall
from nostall import convert

kind, name, folder = sys.argv[1:]


class Items:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return np.full(4, i)


def slow(batch):
    time.sleep(0.02)
    return batch


def refuse(phase, done):
    raise ValueError(phase)


def begun(loader):
    batches = iter(loader)
    next(batches)
    return loader, batches


def make():
    if kind == "loader":
        return begun(nostall.DataLoader(nostall.Arrays({"x": np.arange(400)}), 4))
    if kind == "callables":
        data = nostall.Arrays({"x": np.arange(400)})
        return begun(nostall.DataLoader(data, 4, transforms=slow, tiers=[]))
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
with getattr(threading, name):
    gc.collect()
print("collected", flush=True)
"""
LOCKS = [
    name for name in ("_active_limbo_lock", "_shutdown_locks_lock") if hasattr(threading, name)
]


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("kind", ["loader", "callables", "cached", "checkpointer", "conversion"])
def test_the_collector_waits_for_no_thread(
    image_folder: Path, tmp_path: Path, kind: str, lock: str
) -> None:
    program = ["-c", PROGRAM, kind, lock, str(image_folder)]
    done = prefork.run(program, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (0, "collected\n"), done.stderr
    if kind == "checkpointer":  # and the end of the program waits for what is closed
        assert list(tmp_path.glob("fast/step-*/*manifest*"))
