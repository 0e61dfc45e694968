"""Closes what is left to the garbage collector.

The collector runs in the middle of any code of any thread: of a worker of a loader, or of one that
holds a lock of Python's `threading`. What waits there for threads may wait for ever. So what the
collector finds is closed by another thread. What ends with its last reference is closed at once, and
at the end of the program what is left.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

_closing: deque[_thread.LockType] = deque()  # of threads that close, until they have


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
        if gone is not None and _is_collecting():
            apart(super().__call__, gone)
            return None
        return super().__call__(gone)


def apart(close: Callable[..., object], *args: object) -> None:
    """Calls ``close(*args)`` in a thread of its own, for which the end of the program waits."""
    done = _thread.allocate_lock()
    done.acquire()
    _closing.append(done)
    call: list[Callable[[], object]] = [partial(close, *args)]
    try:
        _thread.start_new_thread(_run, (call, done))  # threading's own locks may be held here
    except RuntimeError:  # a limit of processes
        _run(call, done)


def _run(call: list[Callable[[], object]], done: _thread.LockType) -> None:
    try:
        call[0]()
    finally:
        call.clear()  # before the interpreter may go: to be dropped can take time, too
        done.release()


class _Probe:
    itself: _Probe


def _is_collecting() -> bool:
    """Whether the collector runs: within a collection another one takes nothing."""
    probe = _Probe()
    probe.itself = probe
    there = weakref.ref(probe)
    del probe
    gc.collect(0)
    return there() is not None


def await_all() -> None:
    """Returns once all is closed that has been found."""
    while _closing:
        with _closing.popleft():
            pass


atexit.register(await_all)
os.register_at_fork(after_in_child=_closing.clear)
