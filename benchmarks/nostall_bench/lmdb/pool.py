"""The ranks: real processes that stay from run to run, with barriers, tokens and shared memory."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import resource
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UsageError

if TYPE_CHECKING:
    from nostall_bench.lmdb.training import Training

_PATIENCE = 300.0  # seconds
# Fields of `Counters`: what a rank's time goes to.
PARTS = ("seek", "read", "skew", "compute", "sync")


@dataclass
class Task:
    """One run, the same for all ranks. `order` is (iterations, global batch): rank r of R gets the
    r-th of R equal parts of each row."""

    strategy: str
    paths: list[str]  # of the database's folder, by node
    order: NDArray[np.int64]
    offset: NDArray[np.uint64]  # of every record of the database
    length: NDArray[np.uint64]
    index_file: str
    nodes: int
    window: int  # bytes that coalescing and staging may use
    stagger: int
    depth: int
    roots: int = 1  # processes of a node that read for it (dio, prov, coal, stag)
    train: bool = False  # each iteration ends with a step of a training
    workers: int = 0  # processes of torch's DataLoader, a rank


@dataclass
class Counters:
    """Where a rank's time went, in seconds, and what it cost."""

    seek: float = 0.0
    read: float = 0.0
    skew: float = 0.0
    compute: float = 0.0  # of a training
    sync: float = 0.0
    wall: float = 0.0
    # Of seek and read: the rank's thread did not run, and it could have run but had no core.
    asleep: float = 0.0
    queued: float = 0.0
    switches: int = 0
    faults: int = 0
    read_bytes: int = 0
    cpu: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


class Rank:
    """What a strategy sees of its process and of the others."""

    def __init__(self, rank: int, ranks: int, shared: dict[str, Any], room: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.tokens: list[Any] = shared["tokens"]
        self.mail_in: Connection = shared["pipes"][rank][0]
        self.mail_out: Connection = shared["pipes"][(rank + 1) % ranks][1]
        self._barrier = shared["barrier"]
        self._room = room
        self.counters = Counters()
        self.training: Training | None = None
        self._harness_switches = 0
        self._mark = self._ran = self._queued = 0.0
        self._schedule = -1
        # Absent from kernels without CONFIG_SCHED_INFO, where waiting for a core counts as sleep.
        with contextlib.suppress(FileNotFoundError):
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def room(self, node: int, bytes_: int) -> NDArray[np.uint8]:
        """Memory shared by the ranks of `node`, page-aligned, of at least so many bytes."""
        path = f"{self._room}/{node}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < bytes_:
                os.truncate(path, bytes_)
            view = np.frombuffer(mmap.mmap(descriptor, bytes_), np.uint8)
            view[::4096].sum()  # mapped now, not while it is measured
            return view
        finally:
            os.close(descriptor)

    def lap(self, part: str) -> None:
        """Adds the time since the last call to `part`, a field of `Counters`."""
        mark, ran, queued = self._mark, self._ran, self._queued
        self._look()
        passed = self._mark - mark
        setattr(self.counters, part, getattr(self.counters, part) + passed)
        if part in ("seek", "read"):
            self.counters.queued += self._queued - queued
            self.counters.asleep += passed - (self._ran - ran) - (self._queued - queued)

    def _look(self) -> None:
        """Takes the time, and how much of it this thread ran and waited for a core."""
        while True:
            self._queued = self._waited()
            self._mark, self._ran = time.perf_counter(), time.thread_time()
            if self._queued == self._waited():
                return  # else it lost its core between the clocks

    def _waited(self) -> float:
        return int(os.pread(self._schedule, 128, 0).split()[1]) / 1e9 if self._schedule >= 0 else 0

    def wait(self) -> None:
        """Until all ranks are here; their lateness is skew, and the switches are nobody's."""
        before = _switches(resource.RUSAGE_THREAD)
        self._barrier.wait(_PATIENCE)
        self._harness_switches += _switches(resource.RUSAGE_THREAD) - before
        self.lap("skew")

    def step(
        self, records: NDArray[np.int64], buffer: NDArray[np.uint8], places: NDArray[np.int64]
    ) -> None:
        """The end of an iteration, `records` lie in `buffer` at `places`: all ranks meet, and make a
        step of the training if there is one."""
        if self.training is None:
            self.wait()
            return
        first = np.arange(self.training.pixels)
        self.train(buffer[places[:, None] + first], records)

    def train(self, pixels: NDArray[np.uint8], records: NDArray[np.int64]) -> None:
        """All ranks meet and make a step of the training."""
        assert self.training is not None
        self.wait()
        self.training.compute(pixels, records)
        self.lap("compute")
        self.training.update()
        self.lap("sync")

    def prepare(self, task: Task) -> None:
        """Makes the training of a task, the same on all ranks, if it has one."""
        self.training = None
        if task.train:
            from nostall_bench.lmdb import training

            training.join(self.rank, self.ranks, self._room)
            side = training.side_of(int(task.length.min()))
            self.training = training.Training(side, task.order.shape[1])

    def begin(self) -> None:
        """Starts the measurement, on all ranks at once."""
        self._barrier.wait(_PATIENCE)
        self.counters = Counters()
        self._harness_switches = 0
        self._before = (_switches(resource.RUSAGE_SELF), _read_bytes(), _faults(), _cpu())
        self._look()
        self._began = self._mark

    def end(self) -> None:
        """Ends it."""
        self.counters.wall = time.perf_counter() - self._began
        switches, read_bytes, faults, cpu = self._before
        self.counters.switches = _switches(resource.RUSAGE_SELF) - switches - self._harness_switches
        self.counters.read_bytes = _read_bytes() - read_bytes
        self.counters.faults = _faults() - faults
        self.counters.cpu = _cpu() - cpu


def aligned(bytes_: int) -> NDArray[np.uint8]:
    """Private memory that begins on a page."""
    view = np.frombuffer(mmap.mmap(-1, max(1, bytes_)), np.uint8)
    view[::4096] = 0  # mapped now, not while it is measured
    return view


def _switches(who: int) -> int:
    usage = resource.getrusage(who)
    return usage.ru_nvcsw + usage.ru_nivcsw


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _read_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def _main(rank: int, ranks: int, shared: dict[str, Any], room: str, orders: Connection) -> None:
    from nostall_bench.lmdb.strategies import STRATEGIES

    me = Rank(rank, ranks, shared, room)
    while True:
        try:
            task = orders.recv()
        except EOFError:
            return
        if task is None:
            return
        try:
            me.prepare(task)
            STRATEGIES[task.strategy](me, task)
            if me.training is not None:
                me.counters.extra["loss"] = me.training.loss
            orders.send(me.counters)
        except BaseException:
            orders.send(traceback.format_exc())
            shared["barrier"].abort()


class Pool:
    """`ranks` processes that wait for tasks; a context manager."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> Pool:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._room = tempfile.TemporaryDirectory(prefix="nostall-bench-", dir=memory)
        self._start()
        return self

    def _start(self) -> None:
        shared = {
            "barrier": self._context.Barrier(self.ranks),
            "tokens": [self._context.Semaphore(0) for _ in range(self.ranks)],
            "pipes": [self._context.Pipe(duplex=False) for _ in range(self.ranks)],
        }
        self._shared = shared  # semaphores live as long as they are held here
        self._orders, self._processes = [], []
        for rank in range(self.ranks):
            ours, theirs = self._context.Pipe()
            # Not a daemon: those may not start the workers of torch's DataLoader.
            process = self._context.Process(
                target=_main, args=(rank, self.ranks, shared, self._room.name, theirs)
            )
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)

    def run(self, task: Task) -> list[Counters]:
        """The counters of every rank.

        Raises:
            UsageError: a rank failed, with its traceback.
        """
        for orders in self._orders:
            orders.send(task)
        results = []
        for orders in self._orders:
            if not orders.poll(_PATIENCE):
                raise UsageError(f"a rank of strategy {task.strategy} does not answer")
            try:
                results.append(orders.recv())
            except EOFError:
                raise UsageError(f"a rank died in strategy {task.strategy}") from None
        failed = [r for r in results if isinstance(r, str)]
        if failed:
            # The cause, not the barriers that broke because of it.
            cause = next((f for f in failed if "BrokenBarrierError" not in f), failed[0])
            raise UsageError(f"strategy {task.strategy} failed:\n{cause}")
        return results

    def __exit__(self, *_: object) -> None:
        for orders in self._orders:
            try:
                orders.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._room.cleanup()
