"""Closes what is left to the garbage collector.

The collector runs in the middle of any code of any thread: of a worker of a loader, or of one that
holds a lock of Python's `threading`. What waits there for threads may wait for ever. So what the
collector finds is closed by another thread. What ends with its last reference is closed at once, and
at the end of the program what is left.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

_Call = list[Callable[[], object]]  # none once somebody makes it

_SECONDS = 10.0

_log = logging.getLogger("nostall")
_closing: dict[_thread.LockType, _Call] = {}  # held until what is called has ended
_before_end: dict[Callable[[], None], int] = {}  # the process before whose end it is called
_ended = False


class Closer(weakref.finalize):  # type: ignore[type-arg] # at run time it has none
    """Calls ``close(*args)`` once: as soon as `owner` is gone, at the end of the program, or when it is
    called itself.

    Args:
        owner: an object to which `close` and `args` do not refer.
        close: the function.
        args: its arguments.
    """

    __slots__ = ()

    def __call__(self, gone: Any = None) -> Any:
        if gone is None:
            return super().__call__()
        return close_safely(super().__call__, gone)


def close_safely(close: Callable[..., object], *args: object) -> None:
    """Calls ``close(*args)`` here, or in a thread of its own while the collector runs."""
    if _is_collecting():
        apart(close, *args)
    else:
        close(*args)


def end_with(kind: type[BaseException] | None, close: Callable[[], object]) -> None:
    """Closes at the end of a ``with`` that was left by an exception of this kind, or by none.

    A generator is left by GeneratorExit, also when the collector finds it.
    """
    if kind is GeneratorExit:
        close_safely(close)
    else:
        close()


def apart(close: Callable[..., object], *args: object) -> None:
    """Calls ``close(*args)`` in a thread of its own, for which the end of the process waits."""
    call: _Call = [partial(close, *args)]
    if _ended:
        call.pop()()
        return
    before_child_ends(_end, 100)
    done = _thread.allocate_lock()
    done.acquire()
    _closing[done] = call
    # At a limit of processes, and at the end of the program, whoever awaits it closes it.
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(_run, (done, call))  # threading's own locks may be held here


def _run(done: _thread.LockType, call: _Call) -> None:
    try:
        close = call.pop()
    except IndexError:  # another thread is at it
        return
    try:
        close()
    except Exception:
        _log.exception("what the garbage collector found cannot be closed")
    del close  # which can take time, too
    _closing.pop(done, None)
    done.release()


class _Probe:
    itself: _Probe


def _is_collecting() -> bool:
    """Whether the collector runs, in any thread: within a collection another one takes nothing."""
    probe = _Probe()
    probe.itself = probe
    there = weakref.ref(probe)
    del probe
    for generation in range(3):  # a collection of another thread meanwhile makes it older
        gc.collect(generation)
        if there() is None:
            return False
    return True


def await_all(seconds: float | None = _SECONDS) -> None:
    """Returns once all is closed that the collector has found, or after so many seconds for each."""
    for done, call in list(_closing.items()):
        if seconds is None:
            _run(done, call)
        if done.acquire(timeout=-1 if seconds is None else seconds):
            done.release()


def before_child_ends(call: Callable[[], None], priority: int) -> None:
    """Has it called before this process ends, if multiprocessing has started it.

    Such a process may end without the functions of atexit. Its other threads may still run then.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or _before_end.get(call) == os.getpid():
        return
    _before_end[call] = os.getpid()
    sys.modules["multiprocessing.util"].Finalize(None, call, exitpriority=priority)


def _end() -> None:
    global _ended
    await_all(None)
    _ended = True


atexit.register(_end)
os.register_at_fork(after_in_child=_closing.clear)
