"""Making a file cold, and proving it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from nostall.errors import UsageError

_PROBES = 64
# Pages that a read still holds, or a process is about to unmap, stay for a moment.
_MOMENT = 2.0


def make_cold(path: Path) -> str:
    """Takes the file out of the page cache; how, in words.

    posix_fadvise concerns this one file; dropping all caches of the machine, which needs root, is
    the way where pages stay.

    Raises:
        UsageError: pages stay all the same.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        last = time.monotonic() + _MOMENT
        while True:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if not _resident(descriptor):
                return "posix_fadvise(DONTNEED)"
            if time.monotonic() > last:
                break
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")
        if not _resident(descriptor):
            return "drop_caches"
    finally:
        os.close(descriptor)
    raise UsageError(f"{path} stays in the page cache: some process has it mapped")


def _resident(descriptor: int) -> bool:
    """Whether one of many pages over the file is in memory; none is read to find out."""
    size = os.fstat(descriptor).st_size
    buffer = bytearray(1)
    for i in range(_PROBES):
        try:
            if os.preadv(descriptor, [buffer], size * i // _PROBES, os.RWF_NOWAIT) == 1:
                return True
        except BlockingIOError:
            continue
        except OSError:
            return False  # a file system that does not tell: taken at its word
    return False
