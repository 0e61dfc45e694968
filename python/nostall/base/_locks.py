"""Locks of files, which processes of all nodes see where the file system has them."""

from __future__ import annotations

import fcntl


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
