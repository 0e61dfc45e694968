"""Side-by-side measurements; every subcommand prints a table and writes JSON and a plot."""

from __future__ import annotations

# Subcommand of ``nostall bench`` -> module with add_arguments(parser) and run(namespace).
SUBCOMMANDS: dict[str, str] = {
    "loader": "nostall_bench.loader",
    "plan": "nostall_bench.plan",
    "reuse": "nostall_bench.reuse",
    "observation-2": "nostall_bench.observation2",
    "stall": "nostall_bench.stall",
    "nodes": "nostall_bench.nodes",
    "lmdb": "nostall_bench.lmdb",
    "checkpoint": "nostall_bench.checkpoint",
    "sync": "nostall_bench.sync",
    "io": "nostall_bench.io",
    "app": "nostall_bench.app",
    "accelerator": "nostall_bench.accelerator",
    "trace": "nostall_bench.trace",
    "allreduce": "nostall_bench.allreduce",
}
