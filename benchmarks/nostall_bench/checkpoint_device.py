"""How near a save and a restore come to the device: each beside plain direct input and output.

In one process, in turns, on the same bytes and the same directory: one new file of that size, written
in blocks with several requests in flight and synced, and read again past the page cache.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import nostall
from nostall import _native
from nostall_bench import harness

_BLOCK = 4 << 20
_IN_FLIGHT = (1, 2, 4, 8)
_THREADS = 4  # as a restore reads with


def measure(directory: Path, size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, `repeats` of each.

    Device write and read (of the best number in flight), a save at level fast, a verification (reading
    with checksums), a restore, the device's read into memory that is new as a restore's is, and one
    copy of the state in memory.
    """
    from nostall_bench.checkpoint_worker import tensors

    size = size // _BLOCK * _BLOCK
    state = tensors(size)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    rows: dict[str, list[float]] = {}

    def time_of(name: str, work: Callable[[], Any]) -> None:
        os.sync()
        began = time.perf_counter()
        work()
        rows.setdefault(name, []).append(time.perf_counter() - began)

    path = directory / "device"
    with (
        nostall.Checkpointer(
            fast=directory / "checkpoints", keep=1, level="fast", rank=0, world_size=1
        ) as checkpointer,
        ThreadPoolExecutor(max(_IN_FLIGHT)) as pool,
        mmap.mmap(-1, _BLOCK) as block,
    ):
        block.write(np.random.default_rng(0).bytes(_BLOCK))
        buffers = [mmap.mmap(-1, _BLOCK) for _ in range(max(_IN_FLIGHT))]
        checkpointer.prepare(state)
        checkpointer.save(state, 0)
        for i in range(repeats):
            for n in _IN_FLIGHT:
                time_of(f"write {n}", lambda n=n: _write(path, size, n, pool, block))  # type: ignore[misc]
            time_of("save", lambda i=i: checkpointer.save(state, i + 1))  # type: ignore[misc]
            for n in _IN_FLIGHT:
                time_of(f"read {n}", lambda n=n: _read(path, size, n, pool, buffers))  # type: ignore[misc]
            time_of("device read, new memory", lambda: _read_new(path, size, pool))
            time_of("restore", checkpointer.restore)
            time_of("verify", lambda: _verify(checkpointer.fast))
            path.unlink()
            time_of("copy", lambda: [copy[name].copy_(tensor) for name, tensor in state.items()])
    for kind in ("write", "read"):
        ways = [rows.pop(f"{kind} {n}") for n in _IN_FLIGHT]
        rows[f"device {kind}"] = min(ways, key=statistics.median)
    return rows


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:  # a file system without direct input and output
        return os.open(path, flags, 0o644)


def _verify(store: Any) -> None:
    """Reads the newest checkpoint and compares its checksums."""
    entry = store.entries()[-1]
    for part in entry.manifest.parts:
        path = str(entry.path / part.name)
        assert not _native.check_file(path, part.size, list(part.crcs), _THREADS)


def _write(path: Path, size: int, in_flight: int, pool: ThreadPoolExecutor, block: Any) -> None:
    path.unlink(missing_ok=True)
    fd = _open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, size)

        def some(first: int) -> None:
            for at in range(first * _BLOCK, size, in_flight * _BLOCK):
                os.pwritev(fd, [block], at)

        list(pool.map(some, range(in_flight)))
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, size: int, in_flight: int, pool: ThreadPoolExecutor, buffers: Any) -> None:
    fd = _open(path, os.O_RDONLY)
    try:

        def some(first: int) -> None:
            for at in range(first * _BLOCK, size, in_flight * _BLOCK):
                os.preadv(fd, [buffers[first]], at)

        list(pool.map(some, range(in_flight)))
    finally:
        os.close(fd)


def _read_new(path: Path, size: int, pool: ThreadPoolExecutor) -> None:
    """Into memory of its own: a machine may have to find it first."""
    in_flight = _IN_FLIGHT[-1]
    with mmap.mmap(-1, size) as memory:
        fd = _open(path, os.O_RDONLY)
        view = memoryview(memory)
        try:

            def some(first: int) -> None:
                for at in range(first * _BLOCK, size, in_flight * _BLOCK):
                    with view[at : at + _BLOCK] as place:
                        os.preadv(fd, [place], at)

            list(pool.map(some, range(in_flight)))
        finally:
            os.close(fd)
            view.release()


def table(rows: dict[str, list[float]], size: int) -> Any:
    """Medians and spreads; each beside the device's own."""
    result = harness.table(
        f"{size / 1e6:.0f} MB on the device; {len(rows['save'])} runs",
        *("what", "seconds", "MB/s", "of the device"),
    )
    new = "device read, new memory"
    beside = {"save": "device write", "verify": "device read", "restore": new}
    for name in ("device write", "save", "device read", "verify", new, "restore", "copy"):
        seconds = rows[name]
        middle = statistics.median(seconds)
        share = statistics.median(rows[beside[name]]) / middle if name in beside else None
        result.add_row(
            f"nostall {name}" if name in beside else name,
            harness.spread(seconds, "{:.3f}"),
            f"{size / middle / 1e6:.0f}",
            f"{share:.2f}" if share is not None else "",
        )
    return result
