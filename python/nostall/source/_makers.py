"""Processes that make the items of a data set in Python, and hand over their records.

Each maker is a process with a copy of the data set, a pipe from which it reads numbers of samples, and
a memory file to which it writes the record of each. A thread that needs an item takes a free maker and
waits without the GIL; the main thread, which a signal may interrupt, lets another one do that. A maker
ends on request, and with this process, however that ends. Forked children, and daemons of
multiprocessing, which may not start processes, make items themselves, one at a time: a data set need
not be safe for threads.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, reduction
from typing import TYPE_CHECKING, Any

from nostall.base import _children as children
from nostall.errors import UsageError
from nostall.source._item_writer import encode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# What a maker answers: whether the item was made, the length of its record or of the error's text.
_ANSWER = struct.Struct("<?Q")
# A process that is forked while another one starts would hold open the pipe that shows its end.
_starting = threading.Lock()
# Seconds after a process could not be started until another start is tried: at first, doubled each
# time, and at most.
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# Seconds between two looks for a maker that works, while a dead one is not replaced.
_LOOK = 0.05

_log = logging.getLogger("nostall")


class MakeError(Exception):
    """An item was not made, and why."""


def _write(file: int, data: bytes) -> None:
    view, at = memoryview(data), 0
    while at < len(view):
        at += os.pwrite(file, view[at:], at)


def _read(file: int, size: int) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < size:
        part = os.pread(file, size - at, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _said(error: Exception) -> str:
    """An exception, and the line that raised it."""
    if isinstance(error, UsageError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}, in {frame.name})"
    )


def _make(handed: children.Handed, pickles: Iterable[str], asked: Connection, memory: Any) -> None:
    """What a maker does."""
    # Other makers may hold this process's pipe open, so that its end alone would not be enough.
    children.begin()
    file = memory if isinstance(memory, int) else memory.detach()
    children.compute_alone()
    dataset = handed.take()
    while True:
        try:
            sample = asked.recv()
        except (EOFError, OSError):
            return
        if sample is None:
            return
        try:
            record, made = encode(dataset[sample], pickles), True
        except Exception as error:
            record, made = _said(error).encode("utf-8", "replace"), False
        _write(file, record)
        try:
            asked.send_bytes(_ANSWER.pack(made, len(record)))
        except OSError:
            return


class _Maker:
    """One process, and this process's ends of its pipe and its memory.

    Attributes:
        unanswered: it was asked for an item and did not answer: what it says next is of that one.
    """

    def __init__(self, context: Any, dataset: Any, pickles: tuple[str, ...], fewer: str) -> None:
        self.unanswered = self._busy = False
        self._fewer = fewer
        self._file = os.memfd_create("nostall-items", os.MFD_CLOEXEC)
        try:
            self._pipe, theirs = context.Pipe()
            fork = context.get_start_method() == "fork"
            memory = self._file if fork else reduction.DupFd(self._file)
            self._process = context.Process(
                target=_make,
                args=(children.Handed(dataset), pickles, theirs, memory),
                name=children.name("maker"),
                daemon=True,
            )
            with children.started(context.get_start_method()):
                self._process.start()
            self._process.terminate = self._process.kill
        except BaseException:
            os.close(self._file)
            raise
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def lives(self) -> bool:
        """Whether it makes an item, or can be asked for one."""
        lost = self.unanswered and not self._busy
        return not lost and not connection.wait([self._process.sentinel], 0)

    def make(self, sample: Any) -> bytes:
        self.unanswered = self._busy = True
        try:
            return self._made(sample)
        finally:
            self._busy = False

    def _made(self, sample: Any) -> bytes:
        try:
            self._pipe.send(sample)
            # Another maker may hold the pipe's other end open, so that it outlives the process.
            if self._pipe not in connection.wait([self._pipe, self._process.sentinel]):
                raise EOFError
            made, size = _ANSWER.unpack(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(children.SECONDS_TO_END)
            code = self._process.exitcode
            killed = code == -signal.SIGKILL
            if killed:
                why = (
                    "most often memory ran out and the system killed it (dmesg says so); give "
                    f"{self._fewer}, or the job more memory"
                )
            elif code == children.UNGUARDED:
                why = children.WHY_UNGUARDED
            else:
                why = "most often a library in it crashed"
            told = f"the process that made it {children.ended_by(code)}: {why}"
            raise (_Killed if killed else _Died)(told) from error
        self.unanswered = False
        record = _read(self._file, size)
        if made:
            return record
        raise MakeError(record.decode("utf-8", "replace"))

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Only while no thread makes an item with it."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(children.SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(children.SECONDS_TO_END)
        os.close(self._file)


class _Died(MakeError):
    pass


class _Killed(_Died):
    """By another program or the system, which may refuse a process too: not the item's fault."""


class Makers:
    """The makers of one data set; any thread may call. They start here.

    `fewer` says how the user gives fewer of them, after "give".
    """

    def __init__(
        self,
        dataset: Any,
        *,
        count: int,
        pickles: Sequence[str],
        start_method: str | None,
        fewer: str,
    ) -> None:
        self._context = multiprocessing.get_context(start_method)
        children.end_if_importing(self._context.get_start_method())
        self._dataset, self._pickles, self._fewer = dataset, tuple(pickles), fewer
        self._owner = os.getpid()
        self._free: queue.SimpleQueue[_Maker | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._all: list[_Maker] = []
        # Why no process could be started, and until when none is.
        self._refused, self._pause = ("", 0.0), _PAUSE
        # Items that were not made as processes were killed or refused.
        self._killed: set[Any] = set()
        self._closed = False
        self.count = count
        self._alone = multiprocessing.current_process().daemon
        self.begin_anew()
        _every.add(self)
        children.at_end(_close_all)
        try:
            for _ in range(0 if self._alone else count):
                self._free.put(self._start())
        except BaseException:
            self.close()
            raise
        self._threads = ThreadPoolExecutor(count, "nostall-makers")

    def _start(self) -> _Maker:
        maker = self._new()
        with self._lock:
            self._all.append(maker)
        return maker

    def _new(self) -> _Maker:
        with _starting:
            return _Maker(self._context, self._dataset, self._pickles, self._fewer)

    def make(self, sample: Any) -> bytes:
        """The record of an item, `sample` being its number, or what the data set takes.

        A process may be killed for what is not the item's fault, so another one tries once more.

        Raises:
            MakeError: the data set raised, gave what cannot be stored, two processes died of it, or
                none could be started in the place of one that died.
        """
        if self._makes_here():
            with self._here:
                try:
                    return encode(self._dataset[sample], self._pickles)
                except Exception as error:
                    raise MakeError(_said(error)) from error
        if threading.get_ident() != threading.main_thread().ident:
            return self._make_elsewhere(sample)
        self._refuse_closed()
        # What a handler of a signal raises here must not part a question from its answer.
        future = self._threads.submit(self._make_elsewhere, sample)
        try:
            return future.result()
        finally:
            future.cancel()

    def _make_elsewhere(self, sample: Any) -> bytes:
        try:
            return self._ask(sample)
        except _Died:
            if self._closed:  # which kills what takes long
                raise
        try:
            return self._ask(sample)
        except _Killed:
            self._killed.add(sample)
            raise

    def were_killed(self, sample: Any) -> bool:
        """Whether an item was not made, if only for a time, as processes were killed or refused."""
        return sample in self._killed

    def _ask(self, sample: Any) -> bytes:
        maker = self._free.get()
        try:
            while True:
                self._refuse_closed()
                assert maker is not None
                if not maker.unanswered:
                    break
                try:
                    maker = self._instead_of(maker)
                    break
                except _Killed:
                    if not self._others_live(maker):
                        raise
                self._free.put(maker)
                maker = self._free.get()
                if maker is not None and maker.unanswered:
                    time.sleep(_LOOK)  # one that works is soon free
            return maker.make(sample)
        finally:
            self._free.put(maker)

    def _others_live(self, dead: _Maker) -> bool:
        """Whether another maker can be waited for, as none can be started."""
        with self._lock:
            others = [maker for maker in self._all if maker is not dead]
        return any(maker.lives() for maker in others)

    def _refuse_closed(self) -> None:
        if self._closed:  # which waits for every maker
            raise MakeError("the data set is closed")

    def begin_anew(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self._here = threading.RLock()  # an item may be made of others

    def _makes_here(self) -> bool:
        return self._alone or os.getpid() != self._owner

    def _instead_of(self, old: _Maker) -> _Maker:
        # Python leaks descriptors of each start that fails, so there are few of these.
        with self._lock:
            refused, until = self._refused
        if time.monotonic() < until:
            raise _Killed(refused)
        try:
            new = self._new()
        except Exception as error:  # what a start method raises has no common base
            if time.monotonic() < self._refused[1]:  # to another thread meanwhile
                raise _Killed(self._refused[0]) from error
            refused = (
                f"a process that made items has ended, and no other can be started: {error}; give the "
                f"job more processes, memory or open files (ulimit -a), or {self._fewer}"
            )
            with self._lock:
                self._refused = refused, time.monotonic() + self._pause
                self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
            _log.warning("%s", refused)
            raise _Killed(refused) from error
        with self._lock:
            self._refused, self._pause, closed = ("", 0.0), _PAUSE, self._closed
            if not closed:
                self._all[self._all.index(old)] = new
        ended = new if closed else old
        ended.kill()
        ended.close()
        if closed:
            self._refuse_closed()
        return new  # which a close that begins now waits for

    def make_all(self, samples: Sequence[int]) -> list[bytes | MakeError]:
        """The records of some items, made side by side; in the place of one that was not, why."""
        if len(samples) == 1 or self._makes_here():
            return [self._attempt(sample) for sample in samples]
        return list(self._threads.map(self._attempt, samples))

    def _attempt(self, sample: int) -> bytes | MakeError:
        try:
            return self.make(sample)
        except MakeError as error:
            return error

    def pids(self) -> list[int]:
        with self._lock:
            return [maker.pid for maker in self._all]

    def close(self) -> None:
        """Ends the processes; items that are being made have some seconds to be finished."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            everyone = list(self._all)
        deadline = time.monotonic() + children.SECONDS_TO_END
        for _ in everyone:
            try:
                maker = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for busy in everyone:
                    busy.kill()
                maker = self._free.get()  # its thread is notified at once
            if maker is not None:
                maker.close()
        self._free.put(None)


_every: weakref.WeakSet[Makers] = weakref.WeakSet()


def _close_all() -> None:
    for makers in list(_every):
        makers.close()


def _begin_anew() -> None:
    for makers in _every:
        makers.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)
