"""What /proc says of processes."""

from __future__ import annotations

import contextlib
import os
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
