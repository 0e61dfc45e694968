"""What /proc says of processes, and what they leave in shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def open_links(pid: int) -> set[str]:
    """What the descriptors of a process stand for; it may open and close others meanwhile."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(link))
    return found


def abstract_sockets(pid: int) -> set[str]:
    """The names of a process's sockets in the abstract space."""
    links = open_links(pid)
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {name for *_, inode, name in lines if f"socket:[{inode}]" in links and name[0] == "@"}


def shared_memory() -> set[str]:
    """The names in shared memory of nostall, of any program of this user."""
    return {path.name for path in Path("/dev/shm").glob(f"nostall-{os.getuid()}-*")}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Names that have come and stay. Those of another program go when its ranks have joined."""
    left = shared_memory() - before
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= shared_memory()
    return left
