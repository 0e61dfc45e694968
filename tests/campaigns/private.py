"""Storage that a campaign has to itself, so that all that is on it is of its jobs."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

SHM = Path("/dev/shm")


def private_storage(places: Sequence[Path], *, network: bool = False) -> str:
    """Empty file systems at `places`, and sockets, of this process and its children alone.

    What is missing if that cannot be.
    """
    new_mounts, new_user, new_network = 0x20000, 0x10000000, 0x40000000 if network else 0
    libc = ctypes.CDLL(None, use_errno=True)
    uid = os.geteuid()
    if libc.unshare(new_mounts | new_network | (new_user if uid != 0 else 0)) != 0:
        return "namespaces of mounts and networks (root, or namespaces of users)"
    if uid != 0:
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    mounts = [["--make-rprivate", "/"]]
    mounts += [["-t", "tmpfs", "-o", "size=512m", "tmpfs", str(place)] for place in places]
    for mount in mounts:
        done = subprocess.run(["mount", *mount], check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return f"leave to mount file systems ({done.stderr.strip()})"
    return ""


def bytes_in(place: Path) -> int:
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
