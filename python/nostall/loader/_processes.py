"""Worker processes that get the arrays of samples, and give those of results, in shared memory."""

from __future__ import annotations

import collections
import contextlib
import mmap
import multiprocessing
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Future,
    InvalidStateError,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from io import BytesIO
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall.base import _children as children
from nostall.base._garbage import Closer
from nostall.base._tensors import octets_of, tensor_of
from nostall.errors import UsageError

_ALIGNED = 64
_LEAST = 1 << 16  # bytes of a slot
_SECONDS = 1.0  # between two looks whether anything still gives an answer
_Work = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def _same(value: Any) -> Any:
    return value


class _Pickler(pickle.Pickler):
    """Leaves the bytes of arrays and tensors out, for `buffer_callback`."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            flags = value.flags
            if flags.c_contiguous or flags.f_contiguous or value.dtype.hasobject:
                return NotImplemented
            return _same, (np.ascontiguousarray(value),)
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        plain = value.device.type == "cpu" and value.layout is torch.strided
        if not plain or value.requires_grad or value.is_conj() or value.is_neg():
            return NotImplemented
        if value.is_quantized:
            return NotImplemented
        data = octets_of(value.contiguous())
        return tensor_of, (data.numpy(), value.dtype, tuple(value.shape))


class _Packed(NamedTuple):
    """An object: its pickle, and the bytes of its arrays."""

    data: bytes
    buffers: list[memoryview]

    @property
    def room(self) -> int:
        return sum(_rounded(buffer.nbytes) for buffer in self.buffers)

    def lay(self, memory: NDArray[np.uint8], begin: int) -> list[tuple[int, int]]:
        """Copies the arrays to a place of a slot; gives the beginning and the size of each."""
        spans = []
        for buffer in self.buffers:
            size = buffer.nbytes
            if size:
                np.copyto(memory[begin : begin + size], np.frombuffer(buffer, np.uint8))
            spans.append((begin, size))
            begin += _rounded(size)
        return spans


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _packed(value: Any, apart: bool = True) -> _Packed:
    """With `apart` the bytes of arrays are not in the pickle."""
    out, buffers = BytesIO(), list[memoryview]()
    keep = (lambda each: buffers.append(each.raw())) if apart else None
    _Pickler(out, 5, buffer_callback=keep).dump(value)
    return _Packed(out.getvalue(), buffers)


def _unpacked(data: bytes, spans: Sequence[tuple[int, int]], memory: NDArray[np.uint8]) -> Any:
    """What was packed; its arrays are views of the slot, and keep `memory` alive."""
    view = memory.data
    return pickle.loads(data, buffers=[view[begin : begin + size] for begin, size in spans])


class _Slot(NamedTuple):
    """A part of the shared file."""

    offset: int
    size: int

    def mapped(self, descriptor: int) -> mmap.mmap:
        return mmap.mmap(descriptor, self.size, offset=self.offset)


class _Memory:
    """Slots of a file without a name, which processes share; one without an array in it is free."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("nostall-batches", os.MFD_CLOEXEC)
        self._lock = (
            threading.Lock()
        )  # where slots are taken; a finalizer may give one back any time
        self._size = 0
        self._free: dict[int, collections.deque[tuple[_Slot, mmap.mmap]]] = {}  # by size
        weakref.finalize(self, os.close, self._descriptor)

    def take(self, size: int) -> tuple[_Slot, NDArray[np.uint8]]:
        """A slot of at least `size` bytes: it is taken as long as the array, or a view of it, lives."""
        size = max(_LEAST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(size, collections.deque())
            if free:
                slot, mapping = free.popleft()
            else:
                self._give_back()
                slot = _Slot(self._size, size)
                os.ftruncate(self._descriptor, slot.offset + slot.size)
                self._size += slot.size
                mapping = slot.mapped(self._descriptor)
        memory = np.frombuffer(mapping, np.uint8)
        weakref.finalize(memory, free.append, (slot, mapping))
        return slot, memory

    def _give_back(self) -> None:
        """The memory of free slots: where batches grow, those of other sizes are not taken again."""
        for slots in self._free.values():
            for _, mapping in slots.copy():
                with contextlib.suppress(OSError):  # a kernel that cannot
                    mapping.madvise(mmap.MADV_REMOVE)

    def __reduce__(self) -> Any:
        return _received, (DupFd(self._descriptor),)  # in a process that is being spawned


def _received(descriptor: Any) -> int:
    return int(descriptor.detach())


class _Reply(NamedTuple):
    """What a process gives: `spans` are in the slot, or nothing is, as it had no room."""

    data: bytes
    spans: list[tuple[int, int]]
    room: int  # that the arrays need


class _Side:
    """What a worker process has of the memory."""

    def __init__(self) -> None:
        self.work: _Work | None = None
        self.descriptor = -1
        self._mapped: dict[_Slot, mmap.mmap] = {}

    def memory(self, slot: _Slot) -> NDArray[np.uint8]:
        if slot not in self._mapped:
            self._mapped[slot] = slot.mapped(self.descriptor)
        return np.frombuffer(self._mapped[slot], np.uint8)


_side = _Side()


def _begin(handed: children.Handed, memory: Any) -> None:
    children.begin()  # idle, it waits for a pipe whose other end it has too
    children.compute_alone()
    # Which was a _Memory where it came from.
    _side.work, _side.descriptor = handed.take(), int(memory)


def _copied(
    spans: list[tuple[int, int]], memory: NDArray[np.uint8]
) -> tuple[list[tuple[int, int]], NDArray[np.uint8]]:
    """Arrays apart from their slot, which is used again: the work may keep what it is given."""
    if not spans:
        return spans, memory
    first, (begin, size) = spans[0][0], spans[-1]
    return [(at - first, of) for at, of in spans], memory[first : begin + size].copy()


def _mark_of(memory: NDArray[np.uint8], task: int) -> NDArray[np.int64]:
    """Which process works on a task, and on the how-manyth of its samples; 0 of none."""
    return memory[task * _ALIGNED :][:16].view(np.int64)


def _do(
    data: bytes,
    spans: list[tuple[int, int]],
    given: _Slot,
    out: _Slot,
    task: int,
    begin: int,
    room: int,
) -> _Reply:
    """Works on some samples in a worker process; results go to `room` bytes of a slot."""
    assert _side.work is not None
    samples, contexts = _unpacked(data, *_copied(spans, _side.memory(given)))
    mark = _mark_of(_side.memory(out), task)
    mark[0] = os.getpid()
    results = []
    for i in range(len(samples)):
        mark[1] = i + 1
        results += _side.work(samples[i : i + 1], contexts[i : i + 1])
    mark[1] = 0
    packed = _packed(results)
    if packed.room > room:
        return _Reply(_packed(results, apart=False).data, [], packed.room)
    return _Reply(packed.data, packed.lay(_side.memory(out), begin), packed.room)


class _Task(Future[_Reply]):
    """Stays cancelled where its pool breaks, which would end the thread of the pool (Python 3.11)."""

    def set_exception(self, exception: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):
            super().set_exception(exception)


class Answer:
    """The results of some samples, as a future has them."""

    def __init__(
        self,
        future: Future[_Reply],
        task: int,
        places: range,
        memory: NDArray[np.uint8],
        owner: Processes,
    ) -> None:
        self.future = future
        self._task = task
        self._places = places
        self._memory = memory
        self._owner = owner

    def worked_on(self, pids: Collection[int]) -> tuple[int, int] | None:
        """Which of these processes has begun with a sample here and not ended, and its place."""
        pid, sample = _mark_of(self._memory, self._task).tolist()
        return (pid, self._places[sample - 1]) if sample > 0 and pid in pids else None

    def wait(self, seconds: float) -> bool:
        """Whether there are results, or an error, after so many seconds at most."""
        if not self.future.done() and not wait([self.future], seconds).done:
            self._owner.end_forgotten(self.future)
        return self.future.done()

    def result(self) -> list[Any]:
        while not self.wait(_SECONDS):
            continue
        reply = self.future.result()
        self._owner.learn(-(-reply.room // len(self._places)))
        results: list[Any] = _unpacked(reply.data, reply.spans, self._memory)
        return results

    def cancel(self) -> bool:
        return self.future.cancel()

    def done(self) -> bool:
        return self.future.done()


class _Process(SpawnProcess):
    """Ends by SIGKILL, and in bounded time when it is waited for."""

    killed = False  # by this process

    def start(self) -> None:
        with children.started("spawn"):
            super().start()

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        # Its end shows here before the system says so elsewhere.
        if self.pid is not None and not connection.wait([self.sentinel], 0):
            self.killed = True
            super().kill()

    def join(self, timeout: float | None = None) -> None:
        if self.pid is None:  # it could not be started
            return
        super().join(children.SECONDS_TO_END if timeout is None else timeout)
        if timeout is None:
            self.kill()
            super().join()


class _Spawn(SpawnContext):
    """Keeps the processes that it started, and the tasks of theirs that are not done."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.pool: Callable[[], ProcessPoolExecutor | None] = lambda: None
        self._tasks: set[Future[_Reply]] = set()
        self._owner = os.getpid()
        self.ended = False
        children.at_end(_end_all)
        _every.add(self)

    def Process(self, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        self.processes.append(_Process(*args, **more))
        self.processes[-1].name = children.name("worker")
        return self.processes[-1]

    def keep(self, task: Future[_Reply]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)  # so that this lives as long as its tasks
        # Another thread has submitted it after the end began.
        if self.ended and not task.cancel() and wait([task], children.SECONDS_TO_END).not_done:
            self._kill()

    def _done(self, task: Future[_Reply]) -> None:
        self._tasks.discard(task)

    def end_tasks(self) -> None:
        """Gives those that have begun some seconds to end, then kills the processes."""
        if os.getpid() != self._owner:
            return
        self.ended = True
        running = [task for task in list(self._tasks) if not task.cancel()]
        if wait(running, children.SECONDS_TO_END).not_done:
            self._kill()

    def _kill(self) -> None:
        # It is to take no more tasks, also before it knows of the end.
        if (pool := self.pool()) is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.kill()

    def end_processes(self) -> None:
        """Ends those that are left where the thread of the pool has ended before them."""
        if os.getpid() != self._owner:
            return
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_every: weakref.WeakSet[_Spawn] = weakref.WeakSet()


def _end_all() -> None:
    for spawn in list(_every):
        spawn.end_tasks()


def _let_go(pool: ProcessPoolExecutor, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has neither its thread nor its locks
        pool.shutdown(wait=False, cancel_futures=True)


class Processes:
    """A pool of spawned processes, each of which has `work` from the start.

    Results of the first batches come by pickle: only then is known how much room they need.

    Raises:
        UsageError: multiprocessing lets this process have none.
    """

    def __init__(self, count: int, work: _Work) -> None:
        process = multiprocessing.current_process()
        if process.daemon:
            raise UsageError(
                f"{process.name} is a daemon of multiprocessing, which can have no "
                'workers="processes": pass workers="threads", or start it with daemon=False'
            )
        children.end_if_importing("spawn")
        self._memory = _Memory()
        self._room = 0  # bytes that the arrays of a sample's result need
        self._spawn = _Spawn()
        self._pool = ProcessPoolExecutor(
            count,
            self._spawn,
            initializer=_begin,
            initargs=(children.Handed(work), self._memory),
        )
        self._spawn.pool = weakref.ref(self._pool)
        # The thread of the pool: kept, it would complain when the interpreter takes its modules apart.
        self._manager: Callable[[], Any] = lambda: None
        # A pool that is still there when the interpreter takes its modules apart complains.
        Closer(self, _let_go, self._pool, os.getpid())

    def learn(self, room: int) -> None:
        self._room = max(self._room, _rounded(room))

    def submit(self, samples: Sequence[Any], contexts: Sequence[Any], share: int) -> list[Answer]:
        """Starts the work on the samples of a batch, `share` of them at a time.

        Where a process has died, also meanwhile, those that come too late have the error.
        """
        each = self._room  # another thread may learn of more meanwhile
        places = range(0, len(samples), share)
        parcels = [_packed((samples[i : i + share], contexts[i : i + share])) for i in places]
        given, memory = self._memory.take(sum(parcel.room for parcel in parcels) or 1)
        marks = len(places) * _ALIGNED
        out, results = self._memory.take(marks + each * len(samples))
        results[:marks] = 0
        answers, begin = [], 0
        for task, (place, parcel) in enumerate(zip(places, parcels, strict=True)):
            spans = parcel.lay(memory, begin)
            begin += parcel.room
            of_task = range(place, min(place + share, len(samples)))
            at, room = marks + each * place, each * len(of_task)
            future = self._sent(parcel.data, spans, given, out, task, at, room)
            self._spawn.keep(future)
            future.add_done_callback(_Held(memory, results))
            answers.append(Answer(future, task, of_task, results, self))
        return answers

    def _sent(self, *task: Any) -> Future[_Reply]:
        try:
            future = self._pool.submit(_do, *task)
        except BrokenExecutor as error:
            future = _Task()
            future.set_exception(error.with_traceback(None))  # whose frames refer to it
            return future
        future.__class__ = _Task
        if (manager := self._pool._executor_manager_thread) is not None:
            self._manager = weakref.ref(manager)
        return future

    def close(self) -> None:
        """Ends the processes; tasks that have begun have some seconds to end."""
        self._spawn.end_tasks()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if (manager := self._manager()) is not None:  # the pool forgot it where tasks were killed
            manager.join()
        self._spawn.end_processes()

    @property
    def ended(self) -> bool:
        """Whether tasks are done no more, as this is closed or the program ends."""
        return self._spawn.ended

    def end_forgotten(self, task: Future[_Reply]) -> None:
        """Gives a task its error if the thread of the pool has ended without it: the task came as the
        pool broke.
        """
        if (manager := self._manager()) is None or not manager.is_alive():
            with contextlib.suppress(InvalidStateError):  # it is done meanwhile
                task.set_exception(BrokenProcessPool("a process ended as the task came"))

    def crashed(self) -> dict[int, int]:
        """Exit codes by pid of processes that ended by themselves, after `close`."""
        ended = {p.pid: p.exitcode for p in self._spawn.processes if not p.killed}
        return {pid: code for pid, code in ended.items() if pid is not None and code}


class _Held:
    """Keeps the slots of a task until it is done, also if nothing waits for it any more."""

    def __init__(self, *memory: NDArray[np.uint8]) -> None:
        self._memory: tuple[NDArray[np.uint8], ...] = memory

    def __call__(self, _: Future[Any]) -> None:
        self._memory = ()
