"""Starts programs under the MPIs of the tests: Open MPI of the environment, MPICH of build/mpich."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nostall.cli import _run as mpi

BUILD = Path(__file__).parents[3] / "build"
MPICH = BUILD / "mpich"
MPIS = ("openmpi", "mpich")
# What Open MPI wants of root.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def library(which: str) -> Path:
    """libnostall_mpi.so for an MPI; skips the test where that for MPICH is not there."""
    if which == "openmpi":
        return mpi.library()
    path = mpi.library().with_name("libnostall_mpi_mpich.so")
    if not path.exists():
        pytest.skip(f"MPICH: {path} is missing; make test makes it")
    return path


def launcher(which: str) -> list[str]:
    """The first words of its command; skips the test where MPICH is not there."""
    if which == "mpich":
        if not (MPICH / "bin" / "mpiexec").exists():
            pytest.skip(f"MPICH: {MPICH} is missing; scripts/mpi-suite makes it")
        return [str(MPICH / "bin" / "mpiexec")]
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    assert mpiexec, "the test extra installs openmpi"
    # The tests have more ranks than the machine has cores.
    return [mpiexec, "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]


def environment(which: str) -> dict[str, str]:
    """Variables of the ranks, by which mpi4py finds the MPI."""
    if which == "openmpi":
        return {}
    return {
        "MPI4PY_MPIABI": "mpich",
        "MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12"),
        # As installed, the library finds its MPI where the program does.
        "LD_LIBRARY_PATH": str(MPICH / "lib"),
    }


def run(
    which: str,
    ranks: int,
    program: list[str],
    directory: Path | None = None,
    timeout: float = 800,
    launched: tuple[str, ...] = (),
    within: Sequence[str] = (),
    **settings: str,
) -> subprocess.CompletedProcess[str]:
    """The program on `ranks` ranks with our library.

    `settings` are variables of its ranks, `launched` words of the launcher,
    `within` what the launcher's command is a part of.
    """
    variables = {**mpi.environment(library(which), verbose=True), **settings, **environment(which)}
    return subprocess.run(
        mpi.command([*within, *launcher(which), *launched, "-n", str(ranks), *program], variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=directory,
        env={**os.environ, **AS_ROOT},
    )


def counted(stderr: str) -> dict[str, int]:
    """What rank 0 reports at the end, by name."""
    line = next(line for line in stderr.splitlines() if "nostall: rank 0:" in line)
    words = line.replace(";", " ").replace("left to the MPI:", " ").split("rank 0:")[1].split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))
