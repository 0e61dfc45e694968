"""``nostall doctor``: what nostall finds on this machine, and what it would do with it."""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib.util
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from nostall.errors import Error
from nostall.world import find_world

_PACKAGES = ("numpy", "torch", "torchvision", "pillow", "rich", "matplotlib")
# The same number on every architecture that has io_uring.
_IO_URING_SETUP = 425


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``nostall doctor`` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """Prints one finding a line; 1 if something that nostall needs is missing."""
    findings = [
        ("python", platform.python_version()),
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("core", _core()),
        *((name, _version(name)) for name in _PACKAGES),
        ("processor cores", str(len(os.sched_getaffinity(0)))),
        ("io_uring", _io_uring()),
        ("/dev/shm", _shared_memory()),
        ("fuse", _fuse()),
        ("rank", _world()),
    ]
    width = max(len(name) for name, _ in findings)
    for name, finding in findings:
        print(f"{name:<{width}}  {finding}")
    return 0 if importlib.util.find_spec("nostall._native") else 1


def _core() -> str:
    spec = importlib.util.find_spec("nostall._native")
    return spec.origin or "built in" if spec else "missing: pip install . builds it"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _io_uring() -> str:
    """Asks the kernel with arguments that it must refuse: the error tells if it would serve."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(0), ctypes.c_void_p(None))
    code = ctypes.get_errno()
    if code == errno.ENOSYS:
        return "the kernel has none: reads go through pread"
    if code == errno.EPERM:
        return "not permitted here: reads go through pread"
    return "usable"


def _shared_memory() -> str:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return f"{error.strerror}: RAM tiers are impossible"
    free = status.f_bavail * status.f_frsize / 2**30
    return f"{free:.1f} GiB free of {status.f_blocks * status.f_frsize / 2**30:.1f} GiB"


def _fuse() -> str:
    if not Path("/dev/fuse").exists():
        return "no /dev/fuse: the slowed file system of demo and benchmark is impossible"
    if shutil.which("fusermount3") is None:
        return "no fusermount3: install fuse3 for the demo"
    return "usable"


def _world() -> str:
    try:
        world = find_world()
    except Error as error:
        return str(error)
    return (
        f"{world.rank} of {world.world_size}, on this node {world.local_rank} of "
        f"{world.local_world_size}"
    )
