"""Runs allreduce on simulated clusters (SimGrid's SMPI): ours, the textbook's and the selections of
three MPIs, with all ranks on time or some late; see docs/reproduce/arrival-simulation.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from nostall.base._sizes import parse_size
from nostall.errors import UsageError
from nostall_bench import harness


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall simulate collectives``."""
    from nostall_bench.simulate_collectives import ENGINES, PATTERNS

    parser.add_argument("--ranks", type=int, nargs="+", default=[32], help="8 to 1024")
    parser.add_argument("--per-node", type=int, nargs="+", default=[4])
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "1MiB", "16MiB"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument(
        "--patterns", nargs="+", default=["balanced", "listing 4.2", "one node"],
        choices=list(PATTERNS),
    )  # fmt: skip
    parser.add_argument("--calls", type=int, default=1, help="of each; they repeat unless --redraw")
    parser.add_argument("--redraw", action="store_true", help="new delays in every call")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="carry real data and verify the sums")
    parser.add_argument("--latency", type=float, default=0.5e-6, help="seconds a hop")
    harness.add_files(parser, plot="a row for each cluster")
    parser.add_argument("--csv", help="write all calls to this file")


def run(arguments: argparse.Namespace) -> int:
    """Simulates, prints the table, writes files. 1 if a sum was wrong."""
    from nostall_bench.simulate_collectives import (
        SimulatedCluster,
        draw,
        gains,
        simulate,
        table,
        to_csv,
    )

    sizes = [parse_size(size) for size in arguments.sizes]
    if any(size < 4 or size % 4 for size in sizes):
        raise UsageError("messages are of float32: sizes must be multiples of 4 bytes")
    rows = []
    for ranks in arguments.ranks:
        for per_node in arguments.per_node:
            if ranks % per_node:
                raise UsageError(f"{ranks} ranks do not fill nodes of {per_node}")
            cluster = SimulatedCluster(ranks // per_node, per_node, latency=arguments.latency)
            for pattern in arguments.patterns:
                for engine in arguments.engines:
                    rows += simulate(
                        cluster, engine, pattern, sizes, calls=arguments.calls,
                        seed=arguments.seed, redraw=arguments.redraw, check=arguments.check,
                    )  # fmt: skip
                    if sys.stderr.isatty():
                        print(f"{ranks} ranks, {pattern}, {engine}: done", file=sys.stderr)
    print(table(rows) + gains(rows))
    harness.write(arguments.json, rows=[asdict(r) for r in rows])
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            file.write(to_csv(rows))
    if arguments.plot:
        draw(rows, arguments.plot)
    return 0 if all(r.right for r in rows) else 1
