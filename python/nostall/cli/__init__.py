"""The command ``nostall``. Each subcommand is imported when it is chosen, so that --help is instant."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import nostall
from nostall.errors import Error

_COMMANDS = {
    "demo": ("nostall_bench.demo", "train on slow storage with torch's loader and with nostall"),
    "index": ("nostall.cli._index", "build, check or show what is kept about a dataset"),
    "convert": ("nostall.cli._convert", "write a dataset as an LMDB database or as tar shards"),
    "report": ("nostall.cli._report", "where a training waited, from its traces and statistics"),
    "profile": ("nostall.cli._profile", "run a command, record it and report where it waited"),
    "top": ("nostall.cli._top", "what the ranks of a recorded run are doing, live"),
    "checkpoints": ("nostall.cli._checkpoints", "list, verify, remove or drain checkpoints"),
    "calibrate": ("nostall.cli._calibrate", "measure this cluster's tiers, network and storage"),
    "simulate": (
        "nostall.cli._simulate",
        "predict what a training costs; sync: what agreeing does",
    ),
    "run": ("nostall.cli._run", "run an MPI program with our collectives, or profile its own"),
    "doctor": ("nostall.cli._doctor", "what this machine offers, and the ranks that are found"),
}

# Subcommands of subcommands, chosen by the next word.
_NESTED = {("simulate", "collectives"): "nostall_bench.simulated_collectives"}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line; knows the names of subcommands, not their options."""
    top = argparse.ArgumentParser(prog="nostall", description="Training that does not wait.")
    top.add_argument("--version", action="version", version=f"nostall {nostall.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text, description=text, add_help=False)
    from nostall_bench import SUBCOMMANDS

    bench = commands.add_parser("bench", help="measure: " + ", ".join(SUBCOMMANDS))
    bench.add_argument("name", choices=list(SUBCOMMANDS), help="what to measure")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; its exit status: 0, an Error's `exit_code`, 130 for Ctrl-C, 141 for
    output that nobody reads."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen, rest = parser().parse_known_args(words[: 2 if words[:1] == ["bench"] else 1])
    if chosen.command == "bench":
        from nostall_bench import SUBCOMMANDS

        module, label = SUBCOMMANDS[chosen.name], f"bench {chosen.name}"
        rest += words[2:]
    elif words[:2] == ["simulate", "sync"]:
        module, label = "nostall.cli._simulate_sync", "simulate sync"
        rest += words[2:]
    else:
        module, label = _COMMANDS[chosen.command][0], chosen.command
        rest += words[1:]
        if (label, *rest[:1]) in _NESTED:
            module = _NESTED[(label, rest[0])]
            label = f"{label} {rest.pop(0)}"
    try:
        command = importlib.import_module(module)
        options = argparse.ArgumentParser(prog=f"nostall {label}", description=command.__doc__)
        command.add_arguments(options)
        status = int(command.run(options.parse_args(rest)))
        sys.stdout.flush()
        return status
    except Error as error:
        print(f"nostall: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "nostall":
            raise
        print(
            f"nostall: this command needs {error.name}: pip install 'nostall[demo]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output went away (`nostall doctor | head`); without a place to flush to,
        # the interpreter would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
