"""Prints a script that completes commands and options in bash, zsh or fish.

`command -v nostall >/dev/null && eval "$(nostall completion bash)"` in ~/.bashrc, the same with zsh in
~/.zshrc after compinit, or `nostall completion fish | source` in ~/.config/fish/config.fish.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from dataclasses import dataclass, field
from importlib import metadata


@dataclass
class _Words:
    """What may follow a command: names and options, and the values of options that have a choice."""

    text: str
    follow: list[str] = field(default_factory=list)
    no_files: bool = False  # one of the names in `follow` comes next, not a file
    values: dict[str, list[str]] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall completion``."""
    parser.add_argument("shell", choices=list(_SCRIPTS))


def _read(parser: argparse.ArgumentParser, name: str, text: str, found: dict[str, _Words]) -> None:
    """Enters a command and the commands under it."""
    words = found[name] = _Words(text)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.follow += action.choices
            words.no_files = True
            for inner, below in action.choices.items():
                _read(below, f"{name} {inner}", below.description or "", found)
            continue
        words.follow += action.option_strings
        choices = [str(c) for c in action.choices or ()]
        if action.option_strings:
            words.values |= {option: choices for option in action.option_strings if choices}
        else:
            words.follow += choices
            words.no_files = words.no_files or bool(choices)


def commands() -> dict[str, _Words]:
    """By name, of one or two words; commands of nostall-bench without their options."""
    from nostall import cli

    found: dict[str, _Words] = {}
    for name, (module, text) in cli._COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        _read(parser, name, text, found)
    there = cli.of_benchmarks()
    for name, text in cli._OF_BENCHMARKS.items():
        found[name] = _Words(text if name in there else f"{text} {cli._LACKING}")
    for point in metadata.entry_points(group=cli._GROUP):
        first, _, second = point.name.partition(".")
        if (words := found.get(first)) is None:
            continue  # no command has this name
        words.no_files = words.no_files or bool(second and first in there)
        if second:
            words.follow.append(second)
            found[f"{first} {second}"] = _Words("")
    return found


def _bash(found: dict[str, _Words]) -> str:
    from nostall import cli

    def line(pattern: str, words: list[str]) -> str:
        return f'    {pattern}) may="{" ".join(words)}" ;;'

    # Without descriptions: a command that lacks its package would look like any other.
    top = [n for n, words in found.items() if " " not in n and cli._LACKING not in words.text]
    # The longer names first: a pattern of one word takes every second one.
    ordered = sorted(found.items(), key=lambda item: -item[0].count(" "))
    follow = [
        line(f'"{name}"' if " " in name else f'"{name} "*', words.follow)
        for name, words in ordered
        if words.follow
    ]
    values = [
        line(f'"{name} "*" {option}"' if " " not in name else f'"{name} {option}"', choices)
        for name, words in ordered
        for option, choices in words.values.items()
    ]
    return "\n".join(
        [
            "_nostall() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" last="${COMP_WORDS[COMP_CWORD-1]}" may=""',
            '  local first="${COMP_WORDS[1]}" second="${COMP_WORDS[2]}"',
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    may="{" ".join([*top, "--help", "--version"])}"',
            "  else",
            '    case "$first $second" in',
            *follow,
            "    esac",
            '    case "$first $second $last" in',
            *values,
            "    esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$may" -- "$word"))',
            "}",
            "complete -o default -F _nostall nostall",
        ]
    )


def _zsh(found: dict[str, _Words]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(found)


def _fish(found: dict[str, _Words]) -> str:
    lines = [
        "complete -c nostall -n __fish_use_subcommand -l help",
        "complete -c nostall -n __fish_use_subcommand -l version",
    ]
    for name, words in found.items():
        first, _, second = name.partition(" ")
        if not second:
            lines.append(
                f"complete -c nostall -f -n __fish_use_subcommand -a {first} "
                f"-d {shlex.quote(words.text)}"
            )
        seen = f"__fish_seen_subcommand_from {first}"
        names = [word for word in words.follow if not word.startswith("-")]
        if second:
            seen += f"; and __fish_seen_subcommand_from {second}"
        for word in words.follow:
            if word in names:
                # Once: after it come files.
                once = f"{seen}; and not __fish_seen_subcommand_from {' '.join(names)}"
                files = " -f" if words.no_files else ""
                lines.append(f"complete -c nostall{files} -n '{once}' -a {word}")
                continue
            values = words.values.get(word)
            given = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"
            lines.append(f"complete -c nostall -n '{seen}' {kind}{given}")
    return "\n".join(lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    print(_SCRIPTS[arguments.shell](commands()))
    return 0
