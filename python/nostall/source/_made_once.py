"""Files that one process of a job makes, and the others wait for."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

_log = logging.getLogger("nostall")
_T = TypeVar("_T")
_PAUSE = 0.05


def made_once(
    file: str, load: Callable[[], _T | None], make: Callable[[], _T], patience: float
) -> _T:
    """What `load` finds in `file`, or what `make` returns, which stores it there.

    One process at a time makes it, of all that see the folder and its locks. When it ends, however it
    ends, the next one looks, and makes it if it is not there. After `patience` seconds, and where there
    can be no locks, a process waits for no other.
    """
    with _turn(f"{file}.lock", file, patience):
        found = load()
        return make() if found is None else found


@contextlib.contextmanager
def _turn(path: str, file: str, patience: float) -> Iterator[None]:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # a folder that is read-only, or the lock of another user
        yield
        return
    held = False
    try:
        # A process that can open a file can hold its lock: another user's says nothing of this job.
        held = os.fstat(lock).st_uid == os.geteuid() and _wait(path, lock, file, patience)
        yield
        # After an error it stays: the next one has its turn.
        if held:
            with contextlib.suppress(OSError):
                os.unlink(path)
    finally:
        # A child that was forked meanwhile has the lock too, and keeps it over a close.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _wait(path: str, lock: int, file: str, patience: float) -> bool:
    """Whether this process has its turn."""
    deadline, logged = time.monotonic() + patience, False
    while True:
        had = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            had = False
        except OSError:  # no locks in this file system
            with contextlib.suppress(OSError):
                os.unlink(path)
            return False
        # A process that came to its end took the file away: what it made is there, or cannot be kept,
        # and then the others do not make it one after the other.
        if not _names(path, lock):
            return False
        if had:
            return True
        if time.monotonic() > deadline:
            _log.warning("%s: another process makes it for too long; waiting no more", file)
            return False
        if not logged:
            logged = True
            _log.info("%s: another process makes it; waiting for it", file)
        time.sleep(_PAUSE)


def _names(path: str, lock: int) -> bool:
    try:
        there, here = os.stat(path), os.fstat(lock)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
