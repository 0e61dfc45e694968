"""Runs a command with recording on, then writes the report of the run.

    nostall profile -o run -- torchrun --nproc-per-node 4 train.py

Every process of the command that uses nostall's loaders records into the directory. With --mpi
libnostall_mpi.so records the collectives of an unmodified MPI program too, without replacing any;
`nostall report run/mpi` then shows which ranks arrive late. The command gets the signals that its
launcher sends (SIGHUP, SIGTERM, SIGUSR1, SIGUSR2), and the report of what it recorded is written
when it has ended, also by Ctrl-C.

    nostall profile --mpi -o run -- mpirun -n 4 ./program     # then: nostall report run/mpi
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from nostall.cli import _run as mpi
from nostall.errors import Error, UsageError
from nostall.observe import trace
from nostall.observe.report import (
    _arrivals as arrivals,
)
from nostall.observe.report import (
    _mpi_trace as mpi_trace,
)
from nostall.observe.report import _run as runs
from nostall.observe.report import (
    _run_page as run_page,
)

_PASSED_ON = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall profile``."""
    parser.add_argument("-o", "--output", default="nostall-run", help="directory of the run")
    parser.add_argument(
        "--mpi", action="store_true", help="trace the collectives of any MPI program"
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- command")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    command = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
    if not command:
        raise UsageError("there is no command to profile: nostall profile -- python train.py")
    home = Path(arguments.output).absolute()
    left = [*runs.files_of(home), *arrivals.find([str(home / "mpi")])] if home.is_dir() else []
    if left:
        raise UsageError(
            f"{home} holds a run already ({left[0].name}): give another directory with -o"
        )
    words, calls, variables = command, home / "mpi", {trace.VARIABLE: str(home)}
    if arguments.mpi:
        try:
            calls.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"nostall: {calls} cannot be made: {error.strerror}", file=sys.stderr)
        else:
            library = mpi.library(command[0])
            variables |= mpi.environment(library, profile=str(calls), replace=False)
    elif not (above := next(path for path in (home, *home.parents) if path.exists())).is_dir():
        # Which ends no training: it may be one of many in a script.
        print(
            f"nostall: {home} cannot be a directory, as {above} is none: {command[0]} runs without "
            "being recorded; end it and give another one with -o if it shall be",
            file=sys.stderr,
        )
    try:
        if len(variables) > 1 or mpi.passes(command, trace.VARIABLE):
            words = mpi.command(command, variables)
        status = _call(words, {**os.environ, trace.VARIABLE: str(home)})
    except OSError as error:
        remedy = f"nostall profile -- python {' '.join(command)}"
        hint = f"; for a program of Python: {remedy}" if command[0].endswith(".py") else ""
        raise UsageError(f"cannot run {command[0]}: {error.strerror}{hint}") from error
    if arguments.mpi:
        for wrong in mpi_trace.convert(arrivals.find([str(calls)]), home):
            print(f"nostall: {wrong}", file=sys.stderr)
    if not (home.is_dir() and runs.files_of(home)):
        print(f"nostall: {_why_nothing(command[0], status, home, arguments.mpi)}", file=sys.stderr)
        return status
    try:
        found = runs.read(home)
        print(run_page.text(found))
        page = home / "report.html"
        run_page.save([found], page)
        print(f"written to {page}")
    except (Error, OSError) as error:
        # The result of the command is returned all the same.
        print(f"nostall: {error}", file=sys.stderr)
    return status


def _why_nothing(program: str, status: int, home: Path, mpi: bool) -> str:
    there = home
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return f"{home} cannot be written: nothing recorded; give another directory with -o"
    if status != 0:
        what = "a collective" if mpi else "a loader of nostall"
        return f"{program} ended with status {status}, and left no record of {what}"
    lacked = "called no collective" if mpi else "used no loader of nostall"
    return f"{program} {lacked}: nothing recorded"


def _call(words: list[str], environment: dict[str, str]) -> int:
    """Runs a command to its end; its exit status, as a shell has it.

    Signals are for the command, and leave this process to write the report. The terminal sends that of
    Ctrl-C to both; those of launchers and batch systems are passed on.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # Functions: the command would begin with SIG_IGN too. What is ignored already stays so.
    wanted: dict[int, Any] = {signal.SIGINT: lambda *_: None, **dict.fromkeys(_PASSED_ON, pass_on)}
    ignored = [number for number in wanted if signal.getsignal(number) == signal.SIG_IGN]
    before = {n: signal.signal(n, do) for n, do in wanted.items() if n not in ignored}
    try:
        child = subprocess.Popen(words, env=environment)
        for number in early:
            child.send_signal(number)
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
