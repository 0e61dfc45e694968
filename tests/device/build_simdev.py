"""Builds the library of the simulated accelerator; as a program, before tests with limits of time.

It does not load the library: a process that has loaded it has no other accelerator.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent / "simdev"
BUILD = HERE.parents[2] / "build" / "simdev"
SOURCES = ("runtime.cc", "backend.cc", "profiler.cc", "gil.cc")


def _command(source: str, to: Path) -> list[str]:
    where = Path(torch.__file__).parent
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    include = where / "include"
    includes = [include, include / "torch" / "csrc" / "api" / "include", include / "kineto"]
    return [
        *("nice", "-n", "5"),
        *compiler,
        *("-std=c++20", "-O1", "-fPIC", "-Wall", "-c", str(HERE / source), "-o", str(to)),
        *(word for path in includes for word in ("-isystem", str(path))),
        "-DUSE_KINETO",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]


@functools.cache
def built() -> Path:
    """The library, which test processes build once between them for these sources and this torch."""
    stamp = hashlib.sha256(f"{torch.__version__} {sysconfig.get_platform()}".encode())
    for name in (*SOURCES, "runtime.h", "gil.h", "../build_simdev.py"):
        stamp.update((HERE / name).read_bytes())
    library = BUILD / f"libsimdev-{stamp.hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        objects = [BUILD / f"{source}.o" for source in SOURCES]
        compiling = [
            subprocess.Popen(_command(source, to))
            for source, to in zip(SOURCES, objects, strict=True)
        ]
        if sum([process.wait() for process in compiling]):
            raise RuntimeError("the simulated accelerator does not compile")
        lib = Path(torch.__file__).parent / "lib"
        unfinished = library.with_suffix(".new")
        link = [*_command("", unfinished)[:4], "-shared", *map(str, objects), "-o", str(unfinished)]
        link += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(link, check=True)
        unfinished.replace(library)
    return library


if __name__ == "__main__":
    built()
