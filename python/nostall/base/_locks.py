"""Locks of files, which processes of all nodes see where the file system has them."""

from __future__ import annotations

import contextlib
import fcntl
import os


def take_lock(file: int) -> bool | None:
    """Whether this process has the lock of an open file now; None where there can be no locks.

    The lock of a process that ends is free.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOSYS, ENOLCK, EOPNOTSUPP: a mount without them, or a server
        return None
    return True


def free_lock(file: int) -> None:
    """Frees the lock of an open file that this process may have.

    A child that was forked meanwhile has it too, and keeps it over a close.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def is_named(file: int, path: str | os.PathLike[str], directory: int | None = None) -> bool:
    """Whether an open file still has its name: who comes next will open this one."""
    try:
        there = os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(file))
