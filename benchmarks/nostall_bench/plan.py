"""``nostall bench plan``: what planning a large job costs, on one core, in time and memory."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall_bench.programs import child_environment

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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one small job")
    parser.add_argument("--json", help="write the numbers to this file")


def run(arguments: argparse.Namespace) -> int:
    """Measures each job in fresh processes; prints a table."""
    from rich.console import Console
    from rich.table import Table

    jobs = QUICK if arguments.quick else {name: JOBS[name] for name in arguments.jobs}
    table = Table(title="planning on one core")
    for heading in ("job", "order", "a node's tiers, s", "every owner, s", "grown by, MB"):
        table.add_column(heading, justify="left" if heading in ("job", "order") else "right")
    rows = []
    for name, job in jobs.items():
        for order in arguments.orders:
            runs = [_measure({"job": job, "order": order}) for _ in range(arguments.repeats)]
            rows.append({"job": name, "order": order, "runs": runs})
            cells = (_spread([r[key] for r in runs]) for key in ("node", "owners", "megabytes"))
            table.add_row(name, order, *cells)
    Console().print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    return 0


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _measure(settings: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "nostall_bench.plan", json.dumps(settings)],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    if done.returncode:
        raise UsageError(f"the measurement failed: {done.stderr.strip()}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


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
    print(json.dumps(_work(json.loads(sys.argv[1]))))
