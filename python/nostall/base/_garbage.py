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
from typing import Any, TypeVar

_T = TypeVar("_T")

_collecting = 0  # the thread in which the collector runs
_closing: deque[_thread.LockType] = deque()  # of threads that close, until they have


def when_garbage(
    owner: _T, close: Callable[..., object], *args: object
) -> weakref.finalize[..., _T]:
    """Calls ``close(*args)`` once: as soon as `owner` is gone, or at the end of the program.

    Neither may refer to `owner`. What is returned closes at once when it is called.
    """
    return weakref.finalize(owner, _close, close, *args)


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


def _close(close: Callable[..., object], *args: object) -> None:
    if _collecting == _thread.get_ident():
        apart(close, *args)
    else:
        close(*args)


def _note(phase: str, _: dict[str, Any]) -> None:
    global _collecting
    _collecting = _thread.get_ident() if phase == "start" else 0


def await_all() -> None:
    """Returns once all is closed that has been found."""
    while _closing:
        with _closing.popleft():
            pass


gc.callbacks.append(_note)
atexit.register(await_all)
os.register_at_fork(after_in_child=_closing.clear)
