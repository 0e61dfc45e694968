"""The command line: ``nostall demo | bench | report | index | doctor``.

Every subcommand is a module with ``add_arguments(parser)`` and ``run(namespace) -> exit status``,
imported when it is chosen and not before, so that ``nostall --help`` is instant.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata

from nostall.errors import Error, UsageError

# Subcommand -> (module, one line for --help). "bench" has subcommands of its own.
_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("nostall.demo", "train on a slow file system, with and without nostall"),
    "bench": ("nostall.bench", "measure side by side with other loaders"),
    "report": ("nostall.report.command", "draw saved statistics into one HTML file"),
    "index": ("nostall.cli.index", "build, check or show the stored listing of an image folder"),
    "doctor": ("nostall.cli.doctor", "show what nostall finds on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status (an error's own, 2 for wrong usage, 130 for Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, module = _parser_for(words)
        arguments = parser.parse_args(words)
        if module is None:
            parser.print_help()
            return UsageError.exit_code
        return int(importlib.import_module(module).run(arguments))
    except Error as error:
        print(f"nostall: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("nostall: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output went away (`nostall index show | head`): not a failure, but
        # the interpreter would complain once more when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parser_for(words: Sequence[str]) -> tuple[argparse.ArgumentParser, str | None]:
    """The parser with the options of the chosen command only, and the module that runs it."""
    parser = argparse.ArgumentParser(
        prog="nostall", description="Deep-learning training that does not wait for its data."
    )
    parser.add_argument("--version", action="version", version=f"nostall {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    module = None
    for name, (target, help_line) in _COMMANDS.items():
        sub = commands.add_parser(name, help=help_line, description=help_line)
        if name != chosen:
            continue
        if name == "bench":
            module = _add_benchmarks(sub, words[words.index(name) + 1 :])
        else:
            importlib.import_module(target).add_arguments(sub)
            module = target
    return parser, module


def _add_benchmarks(parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    known: dict[str, str] = importlib.import_module("nostall.bench").SUBCOMMANDS
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, target in known.items():
        sub = benchmarks.add_parser(name)
        if name == chosen:
            importlib.import_module(target).add_arguments(sub)
    return known.get(chosen) if chosen else None


def _version() -> str:
    try:
        return metadata.version("nostall")
    except metadata.PackageNotFoundError:  # run from the sources, not installed
        from nostall import __version__

        return __version__
