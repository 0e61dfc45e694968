"""Draws saved statistics, one file per rank of a job, into one self-contained HTML file."""

from __future__ import annotations

import argparse

from nostall.errors import IoError
from nostall.report import write
from nostall.stats import Stats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall report``."""
    parser.add_argument("files", nargs="+", help="written by loader.stats().save(file)")
    parser.add_argument("-o", "--output", default="nostall-report.html")


def run(arguments: argparse.Namespace) -> int:
    """Writes the report."""
    stats = [Stats.load(f) for f in arguments.files]
    try:
        write(stats, arguments.output)
    except OSError as error:
        raise IoError(
            f"cannot write the report to {arguments.output}: {error.strerror}; pass another file "
            "with -o"
        ) from error
    print(arguments.output)
    return 0
