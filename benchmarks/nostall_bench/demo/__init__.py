"""``nostall demo``: the same training twice on slow storage, with torch's loader and this one."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``nostall demo``; imports nothing heavy."""
    from nostall_bench.demo.experiment import add_arguments as add

    parser.add_argument(
        "kind", nargs="?", choices=("images", "tokens"), default="images", help="what is loaded"
    )
    parser.add_argument("--steps", type=int, default=300, help="of the training on tokens")
    add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; the exit status."""
    from nostall_bench.demo import experiment, tokens

    run_demo = tokens.run if arguments.kind == "tokens" else experiment.run
    return run_demo(arguments)
