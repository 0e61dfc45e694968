"""``nostall bench trace``: what recording costs the loader, on against off in interleaved runs.

Each run of the loader is a fresh process (`nostall_bench.worker`) on files in memory, where it is
fastest and records most; of the gradient engine two ranks that reduce 48 gradients of 256 KB a step, in
groups of 1 MB, with nothing between steps. "timeline" is that engine with and without its timeline.
Pairs alternate which comes first, so that drift of the machine hits both. The CPU time a sample (or
step) is the steadier number: it counts every thread, the one that writes the trace included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from nostall import sync, trace
from nostall.base import _options as options
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.launch import environment

ENGINE = ("engine", "timeline")
MODES = ("read", "transform", *ENGINE)
_RANKS, _GRADIENTS, _ELEMENTS, _GROUP = 2, 48, 64 << 10, 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench trace``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the dataset goes")
    parser.add_argument("--files", type=int, default=2000, help="synthetic files (95 KB each)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--epochs", type=int, help="measured ones: 100 of reading, 4 of transforming"
    )
    parser.add_argument("--steps", type=int, default=400, help="of the gradient engine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scale", type=float, default=1.0, help="of the synthetic images")
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table."""
    data = Path()
    if any(m not in ENGINE for m in arguments.modes):
        data = harness.dataset(arguments.dir, arguments.files, scale=arguments.scale)
    table = harness.table(
        f"recording on / off, {arguments.pairs} pairs",
        *("work", "a second, off", "rate on / off", "CPU time on / off", "trace"),
    )
    modes: dict[str, Any] = {}
    for mode in arguments.modes:
        runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for on in harness.turns(runs, arguments.pairs):
            runs[on].append(
                _reduce(mode, arguments.steps, on)
                if mode in ENGINE
                else _measure(mode, data, arguments, on)
            )
        pairs = list(zip(runs[False], runs[True], strict=True))
        rates = [on["samples_per_s"] / off["samples_per_s"] for off, on in pairs]
        cpu = [on["cpu"] / off["cpu"] for off, on in pairs]
        size = statistics.median(on["trace_bytes"] / on["samples"] for on in runs[True])
        table.add_row(
            mode,
            f"{harness.median(runs[False], 'samples_per_s'):.0f}",
            harness.spread(rates, "{:.4f}"),
            harness.spread(cpu, "{:.4f}"),
            f"{size:.1f} B a {'step' if mode in ENGINE else 'sample'}",
        )
        modes[mode] = {"pairs": pairs, "rate": rates, "cpu": cpu}
    harness.console().print(table)
    harness.write(arguments.json, modes=modes)
    return 0


def _measure(mode: str, data: Path, arguments: argparse.Namespace, on: bool) -> dict[str, float]:
    epochs = arguments.epochs or {"read": 100, "transform": 4}[mode]
    settings = {
        "loader": "nostall", "mode": mode, "data": str(data), "prepared": str(data),
        "threads": arguments.threads, "tiers": [], "warm": 1, "measured": epochs, "ahead": 1,
    }  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="nostall-trace-") as scratch:
        if on:
            environment[trace.VARIABLE] = scratch
        rows = harness.child(
            "nostall_bench.worker", settings, name="a run", timeout=600, **environment
        )
        written = sum(f.stat().st_size for f in Path(scratch).iterdir())
    samples = sum(r["samples"] for r in rows)
    if on and not written:
        raise UsageError("the run recorded nothing")
    return {
        "samples": samples,
        "samples_per_s": samples / sum(r["seconds"] for r in rows),
        "cpu": sum(r["cpu_seconds"] for r in rows) / samples,
        "trace_bytes": written,
    }


def _reduce(mode: str, steps: int, on: bool) -> dict[str, float]:
    """The gradient engine alone, between processes of this node."""
    with tempfile.TemporaryDirectory(prefix="nostall-trace-") as scratch:
        common: dict[str, str] = {}
        if on and mode == "engine":
            common[trace.VARIABLE] = scratch
        if on and mode == "timeline":
            common[options.row("sync.timeline").variable] = str(Path(scratch, "timeline.json"))
        rows = harness.children(
            "nostall_bench.trace",
            [{"steps": steps}] * _RANKS,
            environments=[{**environment(r, _RANKS, scratch), **common} for r in range(_RANKS)],
        )
        written = sum(f.stat().st_size for f in Path(scratch).iterdir())
    if on and not written:
        raise UsageError("the run recorded nothing")
    return {
        "samples": steps,
        "samples_per_s": steps / max(r["seconds"] for r in rows),
        "cpu": sum(r["cpu"] for r in rows) / steps,
        "trace_bytes": written,
    }


def _work(settings: dict[str, Any]) -> dict[str, float]:
    """One rank: all reductions of all gradients, after a few that warm up."""
    import time

    import numpy as np

    if trace.VARIABLE in os.environ:
        trace.start(os.environ[trace.VARIABLE])
    specs = [(f"gradient {i}", _ELEMENTS, "float32") for i in range(_GRADIENTS)]
    engine, _ = sync.make_engine(specs, sync.SyncOptions(threshold=_GROUP), sync.find_ranks())
    arrays = [np.ones(_ELEMENTS, np.float32) for _ in specs]

    def step() -> None:
        for i, array in enumerate(arrays):
            engine.submit(i, array.ctypes.data, True)
        engine.wait()

    for _ in range(10):
        step()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(settings["steps"]):
        step()
    # The trace is written out within the time that counts.
    trace.stop()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used}


if __name__ == "__main__":
    harness.answer(_work)
