"""``nostall run -- mpirun ...``: an unmodified MPI program with nostall's collectives, and a profile.

Loads libnostall_mpi.so into the program (LD_PRELOAD): MPI_Allreduce, MPI_Reduce, MPI_Bcast,
MPI_Barrier, MPI_Allgather(v) and MPI_Reduce_scatter(_block) go over shared memory, everything else
goes to the MPI. The library belongs to one MPI.
Where nostall was installed without it, or with --build, it is compiled at first use, for the MPI of
the launcher.

    nostall run --build     # compiles it for the MPI in PATH, and prints where it is
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nostall.base._table import TABLE
from nostall.cli import _mpi_library as mpi_library
from nostall.errors import UsageError
from nostall.observe.report import _arrivals as arrivals

INSTALLED = Path(__file__).parents[1] / "libnostall_mpi.so"
# Options of launchers that pass a variable on.
_PASSING = ("-x", "--x", "-genv", "--genv")
# The variables that the library reads.
SETTINGS = tuple(row.variable for row in TABLE if "libnostall_mpi.so" in row.reader)


def library(launcher: str | None = None) -> Path:
    """libnostall_mpi.so of this installation, else one for the launcher's MPI, compiled at first use.

    Raises:
        UsageError: there is no MPI to compile it for, or it cannot be compiled.
        IoError: it cannot be kept.
    """
    return INSTALLED if INSTALLED.exists() else built_for(launcher)


def built_for(launcher: str | None, mpicxx: str | None = None) -> Path:
    """The library compiled for the MPI of the launcher or of `mpicxx`, at first use.

    Raises:
        UsageError: there is no such MPI, the two are not of one MPI, or it cannot be compiled.
        IoError: it cannot be kept.
    """
    mpi = mpi_library.at_hand(launcher, mpicxx)
    if launcher:
        mpi_library.check_of(mpi, launcher)
    return mpi_library.build(mpi)


def environment(
    library: Path, profile: str | None = None, replace: bool = True, verbose: bool = False
) -> dict[str, str]:
    """The variables that load the library into a program and configure it.

    Settings of the library in this process's environment are among them: ranks of other hosts get
    them from nowhere else. Libraries that LD_PRELOAD names already stay first, as allocators and
    sanitizers need it.
    """
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    variables = {"LD_PRELOAD": preload}
    variables |= {name: os.environ[name] for name in SETTINGS if name in os.environ}
    if not replace:
        variables["NOSTALL_MPI"] = "off"
    if profile is not None:
        variables["NOSTALL_MPI_PROFILE"] = str(Path(profile).absolute())
    if verbose:
        variables["NOSTALL_MPI_VERBOSE"] = "1"
    return variables


def command(words: list[str], variables: Mapping[str, str]) -> list[str]:
    """The launcher's command line with the variables passed on to its ranks.

    Open MPI's launcher passes no variables by itself (-x). MPICH's passes all, but must not load the
    library itself (-genv). srun passes all. Of a variable that the line has twice the launcher takes
    the first, or none: a setting of the environment that `words` give too is left to them, and what
    they preload is joined by the library.
    """
    if not mpi_library.is_launcher(words[0]):
        return ["env", *(f"{k}={v}" for k, v in variables.items()), *words]
    given = _passed(words).keys() & SETTINGS
    variables = {k: v for k, v in variables.items() if k not in given or os.environ.get(k) != v}
    words, variables = _joined(words, variables)
    if _family(words[0]) == "Open MPI":
        options = [word for k, v in variables.items() for word in ("-x", f"{k}={v}")]
    else:
        options = [word for k, v in variables.items() for word in ("-genv", k, v)]
    return [words[0], *options, *words[1:]]


def passes(words: Sequence[str], name: str) -> bool:
    """Whether `command` can pass a variable on: its line does not yet, and the launcher is known."""
    known = mpi_library.is_launcher(words[0]) and _family(words[0]) is not None
    return known and name not in _passed(words)


def _family(launcher: str) -> str | None:
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    return mpi_library.family(said.stdout)


def _passed(words: Sequence[str]) -> dict[str, int]:
    """The variables that the launcher's line gives to its first program: where it names them."""
    first = itertools.takewhile(lambda word: word != ":", words)
    pairs = enumerate(itertools.pairwise(first), 1)
    return {name.partition("=")[0]: at for at, (option, name) in pairs if option in _PASSING}


def _joined(words: list[str], variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """With the one LD_PRELOAD of the launcher's line, where it has one, and of the variables."""
    at = _passed(words).get("LD_PRELOAD")
    if at is None or "LD_PRELOAD" not in variables:
        return words, variables
    words, variables = list(words), dict(variables)
    both = variables.pop("LD_PRELOAD")
    library = both.rpartition(" ")[2]
    if words[at - 1].endswith("genv"):
        words[at + 1] += f" {library}"
    else:  # without a value it stands for that of the environment
        words[at] = f"{words[at]} {library}" if "=" in words[at] else f"LD_PRELOAD={both}"
    return words, variables


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
        "--build",
        action="store_true",
        help="use the library compiled for the launcher's MPI, compile it if it is not there yet; "
        "without a program, print where it is",
    )
    parser.add_argument(
        "--mpicxx",
        metavar="COMPILER",
        help="the MPI's compiler for --build, by default the launcher's, else the first in PATH",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print at the end which calls were replaced"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- mpirun ...")


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by the program."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if arguments.library and (arguments.build or arguments.mpicxx):
        raise UsageError("--library names a library that is built: leave out --build and --mpicxx")
    launcher = words[0] if words else None
    if arguments.build or arguments.mpicxx:
        chosen = built_for(launcher, arguments.mpicxx)
        if not words:
            print(chosen)
            return 0
    elif launcher is None:
        raise UsageError("there is no program to run: nostall run -- mpirun -n 4 ./program")
    else:
        chosen = Path(arguments.library).absolute() if arguments.library else library(launcher)
    if not chosen.exists():
        raise UsageError(f"{chosen} does not exist")
    if shutil.which(words[0]) is None:
        raise UsageError(f"cannot run {words[0]}: there is no such program")
    used = arguments.profile and Path(arguments.profile).is_dir()
    if used and (left := arrivals.find([arguments.profile])):
        raise UsageError(
            f"{arguments.profile} holds a profile already ({left[0].name}): give another directory "
            "with --profile"
        )
    variables = environment(
        chosen, arguments.profile, not arguments.keep_mpi, verbose=arguments.verbose
    )
    line = command(words, variables)
    # Python ignores these, and what is ignored stays so in the program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(line[0], line)
    except OSError as error:
        raise UsageError(f"cannot run {line[0]}: {error}") from error
