"""What processes hold, as /proc says it, and what they leave in shared memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest


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


def mapped_files(pid: int) -> set[str]:
    """The files that a process has mapped; their descriptors may be closed."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.count("/")}


def shared_memory(pid: int) -> set[str]:
    """The files in shared memory that a process has open or mapped."""
    files = open_links(pid) | mapped_files(pid)
    return {file for file in files if file.startswith("/dev/shm/")}


class OwnSharedMemory:
    """A /dev/shm of the processes that join `holder`'s mounts, so that all that is on it is theirs."""

    def __init__(self, size: str = "512m") -> None:
        self._size = size

    def __enter__(self) -> OwnSharedMemory:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        mount = f"mount -t tmpfs -o size={self._size} tmpfs /dev/shm && echo there && exec cat"
        self._holding = subprocess.Popen(
            ["unshare", *user, "--mount", "--propagation", "private", "sh", "-c", mount],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holding.stdout is not None
        if self._holding.stdout.readline() != "there\n":
            _, why = self._holding.communicate()
            pytest.skip(f"a /dev/shm of a test's own: {why.strip()}")
        self.holder = self._holding.pid
        self._seen = Path(f"/proc/{self.holder}/root/dev/shm")
        namespaces = ["--mount", *(["--user", "--preserve-credentials"] if user else [])]
        # What starts a command there. It would begin in the root directory.
        here = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
        self.within = ["nsenter", f"--target={self.holder}", *namespaces, *here]
        return self

    def __exit__(self, *_: object) -> None:
        self._holding.communicate()

    def names(self) -> set[str]:
        return {path.name for path in self._seen.iterdir()}

    def unnamed_bytes(self) -> int:
        """Of files that have no name, which processes still hold."""
        status = os.statvfs(self._seen)
        named = sum(512 * path.stat().st_blocks for path in self._seen.iterdir())
        return (status.f_blocks - status.f_bfree) * status.f_frsize - named

    def unnamed_bytes_that_stay(self) -> int:
        """Of processes that have ended: the kernel takes down an io_uring of theirs a moment later."""
        deadline = time.monotonic() + 60
        while (held := self.unnamed_bytes()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return held

    def await_end_of_processes(self) -> None:
        """Of all that joined, and of their children."""
        deadline = time.monotonic() + 60
        mine = os.readlink(f"/proc/{self.holder}/ns/mnt")
        while left := [pid for pid in self._others() if _link(f"/proc/{pid}/ns/mnt") == mine]:
            assert time.monotonic() < deadline, f"processes {left} do not end"
            time.sleep(0.01)

    def _others(self) -> set[int]:
        return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()} - {self.holder}


def _link(path: str) -> str:
    """Of a process that has ended: nothing."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
