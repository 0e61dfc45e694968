"""Which process a number names: it is given again once its process has ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the state on: 1 is the parent, 19 the start in clock ticks."""
    # The name before the bracket is cut after 15 bytes, which may be within a character.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def began() -> float:
    """Seconds from the boot to the start of this process at the latest, as CLOCK_BOOTTIME counts them.

    The kernel tells the tick in which it started: that is 10 ms long.
    """
    return (int(stat("self")[19]) + 1) / os.sysconf("SC_CLK_TCK")


def ancestors() -> Iterator[int]:
    """The processes that this one descends from, the nearest first, as far as /proc shows them."""
    pid = os.getppid()
    with contextlib.suppress(OSError):  # ended meanwhile
        while pid:
            yield pid
            pid = int(stat(pid)[1])


def environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with and that are not empty; of another user's, none."""
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    variables = (os.fsdecode(v).partition("=") for v in found.split(b"\0"))
    return {name: value for name, _, value in variables if value}


def children(pid: int) -> list[int]:
    """The processes that a process has started, as far as /proc shows them."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += [int(child) for child in file.read_text().split()]
    return found


def mark() -> dict[str, str]:
    """What tells this process from all others, with its number; `has_ended` reads it."""
    try:
        return {"numbers": _numbers(), "start": stat(os.getpid())[19]}
    except OSError:  # no /proc
        return {}


def has_ended(pid: int, mark: dict[str, str]) -> bool:
    """Whether the process is known to have ended; of another machine or container nothing is known."""
    try:
        here = _numbers()
    except OSError:  # no /proc, or not all of it
        return False
    if mark.get("numbers") != here:
        return False
    try:
        fields = stat(pid)
    except OSError:
        # /proc may hide the processes of other users (hidepid); a signal of 0 is sent to nobody.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False
    return fields[0] in ("Z", "X") or fields[19] != mark.get("start", fields[19])


def _numbers() -> str:
    """Where numbers of processes mean the same: since this boot, in this namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
