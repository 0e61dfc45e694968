"""Side-by-side measurements; every subcommand prints a table and writes JSON and a plot."""

from __future__ import annotations

# Subcommand of ``nostall bench`` -> module with add_arguments(parser) and run(namespace).
SUBCOMMANDS: dict[str, str] = {
    "loader": "nostall.bench.loader",
    "plan": "nostall.bench.plan",
    "reuse": "nostall.bench.reuse",
    "observation-2": "nostall.bench.observation2",
    "stall": "nostall.bench.stall",
    "nodes": "nostall.bench.nodes",
    "lmdb": "nostall.bench.lmdb",
    "checkpoint": "nostall.bench.checkpoint",
    "sync": "nostall.bench.sync",
    "io": "nostall.bench.io",
    "app": "nostall.bench.app",
    "accelerator": "nostall.bench.accelerator",
    "trace": "nostall.bench.trace",
    "allreduce": "nostall.bench.allreduce",
}
