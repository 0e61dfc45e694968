"""``nostall bench plan``: what planning a large job costs, on one core, in time and memory."""

from __future__ import annotations

import argparse
import os
import resource
import time
from typing import Any

from nostall_bench import harness

# name: samples, epochs, nodes, ranks of a node, samples per rank and batch
JOBS = {
    "ImageNet-1k": (1_281_167, 90, 256, 4, 32),
    "ImageNet-22k": (14_197_122, 90, 1024, 1, 32),
}
QUICK = {"quick": (20_000, 10, 16, 4, 8)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench plan``."""
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=["ImageNet-1k"])
    parser.add_argument(
        "--orders", nargs="+", choices=["torch", "keyed"], default=["torch", "keyed"]
    )
    harness.add_repeats(parser, 5)
    parser.add_argument("--quick", action="store_true", help="one small job")
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures each job in fresh processes; prints a table."""
    jobs = QUICK if arguments.quick else {name: JOBS[name] for name in arguments.jobs}
    runs: dict[tuple[str, str], list[dict[str, float]]] = {
        (name, order): [] for name in jobs for order in arguments.orders
    }
    for name, order in harness.turns(runs, arguments.repeats):
        settings = {"job": jobs[name], "order": order}
        runs[name, order].append(harness.child("nostall_bench.plan", settings))
    headings = ("job", "order", "a node's tiers, s", "every owner, s", "grown by, MB")
    table = harness.table("planning on one core", *headings, left=2)
    for names, found in runs.items():
        cells = (harness.spread(r[key] for r in found) for key in ("node", "owners", "megabytes"))
        table.add_row(*names, *cells)
    harness.console().print(table)
    rows = [{"job": name, "order": order, "runs": found} for (name, order), found in runs.items()]
    harness.write(arguments.json, rows=rows)
    return 0


def _work(settings: dict[str, Any]) -> dict[str, float]:
    """One measurement: the tiers of node 0, then the owner of every sample among all nodes."""
    import numpy as np

    from nostall.plan import Plan

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    samples, epochs, nodes, ranks, batch = settings["job"]
    sizes = np.full(samples, 110_000, dtype=np.uint64)
    capacity = int(sizes.sum()) // nodes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    plan = Plan(
        samples=samples,
        batch_size=batch,
        world_size=nodes * ranks,
        epochs=epochs,
        order=settings["order"],
    )
    plan.place(sizes, [capacity // 4, capacity], first_rank=0, ranks=ranks)
    middle = time.perf_counter()
    plan.owners(sizes, [2 * capacity] * nodes, ranks_per_node=ranks)
    end = time.perf_counter()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"node": middle - began, "owners": end - middle, "megabytes": grown * 1024 / 1e6}


if __name__ == "__main__":
    harness.answer(_work)
