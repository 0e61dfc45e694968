"""Side-by-side measurements; every subcommand prints a table and writes JSON and a plot."""

from __future__ import annotations

# Subcommand of ``nostall bench`` -> module with add_arguments(parser) and run(namespace).
SUBCOMMANDS: dict[str, str] = {
    "loader": "nostall.bench.loader",
    "plan": "nostall.bench.plan",
    "observation-2": "nostall.bench.observation2",
    "stall": "nostall.bench.stall",
    "nodes": "nostall.bench.nodes",
    "allreduce": "nostall.bench.allreduce",
}
