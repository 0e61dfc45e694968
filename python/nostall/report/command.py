"""``nostall report FILE...``."""

from __future__ import annotations

import argparse
from pathlib import Path

from nostall.errors import IoError
from nostall.report.page import group, render
from nostall.stats import Stats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``nostall report``."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="what Stats.save wrote, one file per rank"
    )
    parser.add_argument(
        "-o", "--output", default="nostall-report.html", help="default: %(default)s"
    )
    parser.add_argument("--title", default="What the training waited for")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and prints each run's table."""
    runs = group([(name, _load(name)) for name in arguments.files])
    text = render(runs, title=arguments.title)
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise IoError(f"cannot write {arguments.output}: {error.strerror}") from error
    for one in runs:
        print(one.name)
        print(one.total)
    print(f"wrote {arguments.output}")
    return 0


def _load(name: str) -> Stats:
    try:
        return Stats.load(name)
    except OSError as error:
        raise IoError(f"cannot read {name}: {error.strerror}") from error
