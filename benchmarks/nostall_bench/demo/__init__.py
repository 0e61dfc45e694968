"""``nostall demo``: the same training twice on slow storage, with torch's loader and this one."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``nostall demo``; imports nothing heavy."""
    from nostall_bench.demo.experiment import add_arguments as add

    add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; the exit status."""
    from nostall_bench.demo.experiment import run as run_demo

    return run_demo(arguments)
