"""Files that one process at a time makes, and the others wait for."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from nostall.base._locks import free_lock, is_named, take_lock

_log = logging.getLogger("nostall")
_T = TypeVar("_T")
_PAUSE = 0.05
_DONE = b"1"


def made_once(
    file: str,
    load: Callable[[], _T | None],
    make: Callable[[], _T],
    patience: float,
    *,
    directory: int | None = None,
    waits: Callable[[], None] | None = None,
) -> _T:
    """What `load` finds in `file`, or what `make` returns, which stores it there.

    One process at a time makes it, of all that see the folder and its locks. When it ends, however it
    ends, the next one looks, and makes it if it is not there. After `patience` seconds, and where there
    can be no locks, a process waits for no other.

    Args:
        directory: a descriptor of the folder of `file`, which is a name in it then.
        waits: is called once if another process makes it; the log says so if None.
    """
    with _turn(_Lock(f"{file}.lock", directory), file, patience, waits):
        found = load()
        return make() if found is None else found


class _Lock:
    """The file that has the lock. It is there while a process makes something, and after a kill."""

    def __init__(self, path: str, directory: int | None) -> None:
        self._path, self._directory = path, directory
        self._file: int | None = None

    def open(self) -> bool:
        """Whether it can be there, and is this user's."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(self._path, flags, 0o600, dir_fd=self._directory)
        except OSError:  # a folder that is read-only, or the lock of another user
            return False
        self.close()
        self._file = file
        # A process that can open a file can hold its lock: another user's says nothing of this job.
        return os.fstat(file).st_uid == os.geteuid()

    def take(self) -> bool | None:
        """Whether this process has it now; None where there can be no locks."""
        assert self._file is not None
        return take_lock(self._file)

    def is_named(self) -> bool:
        assert self._file is not None
        return is_named(self._file, self._path, self._directory)

    def mark(self, done: bool) -> None:
        """Tells those that wait whether it has been made."""
        assert self._file is not None
        with contextlib.suppress(OSError):  # the disk is full: they make it one after the other
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, _DONE if done else b"", 0)

    def is_marked(self) -> bool:
        assert self._file is not None
        return os.pread(self._file, 1, 0) == _DONE

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path, dir_fd=self._directory)

    def close(self) -> None:
        if self._file is None:
            return
        free_lock(self._file)
        os.close(self._file)
        self._file = None


@contextlib.contextmanager
def _turn(
    lock: _Lock, file: str, patience: float, waits: Callable[[], None] | None
) -> Iterator[None]:
    held = False
    try:
        held = lock.open() and _wait(lock, file, patience, waits)
        yield
        if held:
            lock.mark(True)
    finally:
        if held:
            lock.unlink()
        lock.close()


def _wait(lock: _Lock, file: str, patience: float, waits: Callable[[], None] | None) -> bool:
    """Whether this process has its turn."""
    deadline, told = time.monotonic() + patience, False
    while True:
        had = lock.take()
        if had is None:
            lock.unlink()
            return False
        if not lock.is_named():
            # A process that came to its end took the file away. What it made is there, or cannot be
            # kept, and then the others do not make it one after the other. If it failed, they try so;
            # one of them may have made the next file already.
            if lock.is_marked() or not lock.open():
                return False
            continue
        if had:
            lock.mark(False)  # by a process that was killed before it took the file away
            return True
        if time.monotonic() > deadline:
            _log.warning("%s: another process makes it for too long; waiting no more", file)
            return False
        if not told:
            told = True
            if waits is None:
                _log.info("%s: another process makes it; waiting for it", file)
            else:
                waits()
        time.sleep(_PAUSE)
