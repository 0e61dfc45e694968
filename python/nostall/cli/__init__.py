"""The command ``nostall``. A subcommand is imported only when it is chosen, so that --help is fast."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import nostall
from nostall.base._options import suggestion
from nostall.base._words import print_any_name
from nostall.errors import Error, IoError, UsageError

__all__ = ["main"]

_COMMANDS = {
    "index": ("nostall.cli._index", "build, check or show the index of a dataset"),
    "convert": ("nostall.cli._convert", "write a dataset as an LMDB database or as tar shards"),
    "report": (
        "nostall.cli._report",
        "show where a training waited, from its traces and statistics",
    ),
    "profile": ("nostall.cli._profile", "run a command, record it, and report where it waited"),
    "top": (
        "nostall.cli._top",
        "show live what trainings on this machine do, or the ranks of a recorded run",
    ),
    "checkpoints": ("nostall.cli._checkpoints", "list, verify, remove or drain checkpoints"),
    "calibrate": ("nostall.cli._calibrate", "measure this cluster's tiers, network and storage"),
    "simulate": (
        "nostall.cli._simulate",
        "predict the time of a training on a given machine",
    ),
    "run": (
        "nostall.cli._run",
        "run an MPI program with nostall's collectives, or profile them",
    ),
    "doctor": ("nostall.cli._doctor", "show what this machine offers, and the rank that is found"),
    "completion": ("nostall.cli._completion", "print what completes commands in bash, zsh or fish"),
}

# Commands of the package nostall-bench: entry points of this group, two words joined by a dot.
_GROUP = "nostall.commands"
_OF_BENCHMARKS = {
    "demo": "train on slow storage, with torch's loader and with nostall",
    "bench": "measure nostall and its peers, side by side",
}
_LACKING = "(needs nostall-bench)"
BENCHMARKS_FROM = (
    "pip install the wheel nostall_bench-*.whl beside that of nostall in dist/, or in a checkout "
    "pip install ./benchmarks"
)
_NESTED_OF_BENCHMARKS = {
    ("simulate", "sync"),
    ("simulate", "collectives"),
    ("simulate", "staggering"),
    ("simulate", "servers"),
    ("calibrate", "collectives"),
}


class _Help(argparse.HelpFormatter):
    """Ends the text of an option with its default, unless the text has it; keeps lines of commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if part.startswith("    ") else super(_Help, self)._fill_text(part, width, indent)
            for part in text.replace("``", "").split("\n\n")
        )

    def add_argument(self, action: argparse.Action) -> None:
        # The default of an option without a text would not be asked for.
        if action.help is None and (default := _default_of(action)):
            action.help = f"(default: {default})"
        super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = _default_of(action), action.help or ""
        if not default or re.search(rf"(?<![\w.-]){re.escape(default)}(?!\w|[.-]\w)", text):
            return action.help
        return f"{text} (default: {default})"


def _default_of(action: argparse.Action) -> str:
    """The default of an option as its help shows it; empty if there is none to show."""
    default = action.default
    none = default is False or default in (None, argparse.SUPPRESS, [], "")
    if none or not action.option_strings:
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
    return shown.replace("%", "%%")  # of a text that is formatted


class _Parser(argparse.ArgumentParser):
    """The parser of a command; those of its actions, which have its class, show defaults too."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **given})

    def error(self, message: str) -> NoReturn:
        """Names the option that an unknown one looks like."""
        if unknown := re.search(r"^unrecognized arguments:.*? (--[\w-]+)", message):
            message += suggestion(unknown[1], _options_of(self))
        super().error(message)


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The long options of a parser and of its actions."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from _options_of(below)


def _empty_names(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Iterator[str]:
    """Arguments that are empty, as a variable that is not set: one would stand for the working
    directory."""
    for action in parser._actions:
        value = getattr(given, action.dest, None)
        if isinstance(action, argparse._SubParsersAction) and value in action.choices:
            yield from _empty_names(action.choices[value], given)
        elif action.option_strings or action.nargs == argparse.REMAINDER:
            continue
        elif "" in (value if isinstance(value, list) else [value]):
            yield action.dest


def parser(helps: bool = False) -> argparse.ArgumentParser:
    """The parser of the command line: the names of subcommands, without their options.

    Where it `helps` it says which are not installed, for which it has to look.
    """
    top = argparse.ArgumentParser(prog="nostall", description="Training that does not wait.")
    top.add_argument("--version", action="version", version=f"nostall {nostall.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    texts = _OF_BENCHMARKS | {name: text for name, (_, text) in _COMMANDS.items()}
    for name, text in texts.items():
        lacking = helps and name in _OF_BENCHMARKS and name not in of_benchmarks()
        shown = f"{text} {_LACKING}" if lacking else text
        commands.add_parser(name, help=shown, description=text, add_help=False)
    return top


def of_benchmarks() -> dict[str, str]:
    """The first words of the commands that nostall-bench brings, with what they do; none without it."""
    from importlib import metadata

    points = metadata.entry_points(group=_GROUP)
    names = dict.fromkeys(point.name.partition(".")[0] for point in points)
    return {name: text for name, text in _OF_BENCHMARKS.items() if name in names}


def _of_benchmarks(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Module, label and remaining words of a command that nostall-bench brings."""
    from importlib import metadata

    found = {point.name: point.value for point in metadata.entry_points(group=_GROUP)}
    if not found:
        named = " ".join(w for w in words[:2] if not w.startswith("-"))
        raise UsageError(f"nostall {named} is a command of nostall-bench: {BENCHMARKS_FROM}")
    if words[0] in found:
        return found[words[0]], words[0], list(words[1:])
    prefix = f"{words[0]}."
    nested = {n.removeprefix(prefix): m for n, m in sorted(found.items()) if n.startswith(prefix)}
    second = argparse.ArgumentParser(
        prog=f"nostall {words[0]}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    second.add_argument("name", choices=nested, metavar="NAME", help="one of those below")
    if len(words) < 2 or words[1] in ("-h", "--help"):
        lines = (f"  {name:16} {_summary(module)}" for name, module in nested.items())
        second.epilog = "\n".join(["names:", *lines])
        second.print_help()
        raise SystemExit(0)
    name = second.parse_args(words[1:2]).name
    return found[prefix + name], f"{words[0]} {name}", list(words[2:])


def _summary(module: str) -> str:
    """The first line of a module's docstring, without the command's name."""
    text = importlib.import_module(module).__doc__ or ""
    first = text.partition("\n")[0]
    return (first.partition("``: ")[2] or first).rstrip(".,")


def _refuse_unknown(words: Sequence[str]) -> None:
    known = (*_COMMANDS, *_OF_BENCHMARKS)
    for word in words:
        if not word.startswith("-") and word not in known:
            near = suggestion(word, known) or ": nostall --help lists all"
            raise UsageError(f"there is no command {word}{near}")


def _choose(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Module, label and remaining words of a subcommand."""
    if words[0] in _OF_BENCHMARKS or tuple(words[:2]) in _NESTED_OF_BENCHMARKS:
        return _of_benchmarks(words)
    return _COMMANDS[words[0]][0], words[0], list(words[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; its exit status: 0, 1 where what was asked does not hold, an Error's
    `exit_code`, 3 for any other OSError, 130 for Ctrl-C, 141 if the reader of the output has gone."""
    _fill_standard_streams()
    print_any_name()
    words = list(sys.argv[1:] if argv is None else argv)
    label = " ".join(words[:1])
    try:
        _refuse_unknown(words[:1])
        parser(helps=words[:1] in (["-h"], ["--help"])).parse_known_args(words[:1])
        module, label, rest = _choose(words)
        command = importlib.import_module(module)
        options = _Parser(prog=f"nostall {label}", description=command.__doc__)
        command.add_arguments(options)
        arguments = options.parse_args(rest)
        if empty := next(_empty_names(options, arguments), None):
            options.error(f"argument {empty}: the name is empty")
        benchmark = module.partition(".")[0] != "nostall"
        with _leaving_nothing() if benchmark else contextlib.nullcontext():
            status = int(command.run(arguments))
        sys.stdout.flush()
        return status
    except Error as error:
        # Of an OSError of ours strerror is the sentence; what stands before it is a number.
        sentence = isinstance(error, OSError) and error.filename is None and error.strerror
        print(f"nostall: {sentence or error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("nostall", "nostall_bench"):
            raise
        print(
            f"nostall: {label} needs {error.name}: pip install {_package(error.name)}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            _print_nowhere()
            return 141
        files = [str(f) for f in (error.filename, error.filename2) if f is not None]
        if not files and _cannot_print():
            files = ["standard output"]
        print(f"nostall: {' -> '.join(files) or label}: {error.strerror or error}", file=sys.stderr)
        return IoError.exit_code


@contextlib.contextmanager
def _leaving_nothing() -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs inside as Ctrl-C does: benchmarks mount file systems, fill
    memory, and make namespaces and control groups, which they remove as they end."""
    ended = False

    def end(number: int, _: object) -> None:
        nonlocal ended
        if not ended:  # a second one does not interrupt the removal
            ended = True
            sys.exit(128 + number)

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reader_has_gone() -> bool:
    """Whether nobody reads the standard output any more (`nostall doctor | head`)."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except OSError:  # it is no file
        return False
    return bool(poll.poll(0))


def _cannot_print() -> bool:
    """Whether the standard output takes no more, as on a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        _print_nowhere()
        return True
    return False


def _print_nowhere() -> None:
    """Without a place to flush to, the interpreter would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fill_standard_streams() -> None:
    """Opens those that are closed: else a file that is opened later would be one of them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free number: the stream's own
            setattr(sys, name, os.fdopen(nowhere, mode))


def _package(module: str) -> str:
    """What to install for a module that is missing: an extra of nostall where one brings it."""
    extras = {
        "stores": ("h5py", "pyarrow"),
        "objects": ("obstore",),
        "lmdb": ("lmdb",),
        "cli": ("rich", "matplotlib", "scipy"),
        "torch": ("torch",),
    }
    name = module.split(".")[0]
    return next((f"'nostall[{extra}]'" for extra, names in extras.items() if name in names), name)
