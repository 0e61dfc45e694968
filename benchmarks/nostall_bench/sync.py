"""``nostall bench sync``: gradient synchronisation in all its modes, and DDP, on real networks.

Every run is a training of real processes on CPU, each network in each way, in turns, so that what
else the machine does falls on all alike. Columns: CPU is the progress thread's share of the run, as
are agree (on an order), copy (into and out of buckets; planned it is the thread that trains which
copies) and reduce; involuntary and voluntary context switches (invol., vol.) are the process's, per
step: what contention looks like [Pumma 2020, sec. 6.2.5]. "no reduction" trains each rank for itself:
what switches there are without any engine. The ranks' processes are the same for all runs of a
network. With --input loader the batches are decoded from JPEG files meanwhile. --delay-ms makes rank
0 late in every step [Pumma 2020, fig. 6.8 to 6.12]. A second table splits the engine's time into
cycle latency (gradients are there, the thread sleeps), stalling (other ranks are not there),
ordering, copies and reduction (sec. 6.2.3), and context switches by component.

Horovod is a peer where it is built for this torch, with its own defaults; "negotiated 1 ms" is our
engine's negotiation with the same cycle and the same fusion. In every run the ranks must end with the
same weights, bit for bit, and all ways of a network with nearly the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nostall.errors import BugError, UsageError
from nostall_bench import harness, sync_horovod
from nostall_bench.launch import environment

_NETWORKS = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "googlenet", "inception",
    "alexnet", "vgg11", "vgg16", "transformer", "mlp",
)  # fmt: skip
_WAYS = (
    "planned",
    "negotiated",
    "negotiated GS",
    "negotiated NBCS",
    "planned, own core",
    "negotiated, own core",
    "DDP gloo",
    "DDP nostall",
    "negotiated 1 ms",
    sync_horovod.WAY,
    "no reduction",
)
_TIMEOUT = 600.0  # between two runs
_ALIKE = 1e-3  # relative, of the weights' magnitudes: ways round in different orders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench sync``."""
    parser.add_argument("--networks", nargs="+", choices=_NETWORKS, default=["resnet18"])
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS[:-1]))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="samples a rank and step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=4, help="steps before those that are measured")
    harness.add_repeats(parser, 5)
    parser.add_argument("--input", choices=("synthetic", "loader"), default="synthetic")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of rank 0, in every step")
    harness.add_files(parser, plot="speeds and the thread's time")


def run(arguments: argparse.Namespace) -> int:
    """Runs all ways in turns and prints the table."""
    from rich.progress import Progress

    if arguments.ranks < 1 or arguments.steps < 1:
        raise UsageError("--ranks and --steps must be at least 1")
    rows: list[dict[str, Any]] = []
    console = harness.console()
    ways, skipped = available(arguments.ways)
    for way, reason in skipped.items():
        console.print(f"{way} is skipped: {reason}", markup=False)
    total = len(arguments.networks) * len(ways) * arguments.repeats
    with (
        tempfile.TemporaryDirectory(prefix="nostall-sync-") as folder,
        Progress(console=console, transient=True) as progress,
    ):
        data = _images(Path(folder) / "data") if arguments.input == "loader" else ""
        task = progress.add_task("training", total=total)
        for network in arguments.networks:
            turns = list(harness.turns(ways, arguments.repeats))
            settings = [
                {
                    "network": network,
                    "way": way,
                    "batch": arguments.batch,
                    "steps": arguments.steps,
                    "warm": arguments.warm,
                    "delay": arguments.delay_ms / 1000,
                    "data": data,
                    "store": f"{folder}/store-{uuid.uuid4().hex}",
                }
                for way in turns
            ]
            results = measure(settings, arguments.ranks, lambda: progress.advance(task))
            check(network, turns, results)
            rows += [
                {
                    "network": network,
                    "way": way,
                    "repeat": number // len(ways),
                    "input": arguments.input,
                    "ranks": ranks,
                }
                for number, (way, ranks) in enumerate(zip(turns, results, strict=True))
            ]
    for network in arguments.networks:
        own = [r for r in rows if r["network"] == network]
        console.print(_table(network, own, arguments.steps))
        console.print(_split(network, own, arguments.steps))
    harness.write(arguments.json, skipped=skipped, runs=rows)
    if arguments.plot:
        from nostall_bench.sync_plots import draw

        draw(rows, lambda runs: split(runs, arguments.steps), Path(arguments.plot))
        console.print(f"drawn: {arguments.plot}")
    return 0


def available(ways: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The ways that this environment can run, and why it cannot run the others.

    Raises:
        UsageError: none is left.
    """
    reason = sync_horovod.lacking() if sync_horovod.WAY in ways else None
    if reason is None:
        return list(ways), {}
    left = [way for way in ways if way != sync_horovod.WAY]
    if not left:
        raise UsageError(f"--ways {sync_horovod.WAY}: {reason}")
    return left, {sync_horovod.WAY: reason}


def check(network: str, ways: Sequence[str], results: Sequence[list[dict[str, Any]]]) -> None:
    """All ranks of a run have the same weights, and all ways nearly the same.

    Raises:
        BugError: they have not; names network, way and rank.
    """
    first: tuple[str, float] | None = None
    for way, ranks in zip(ways, results, strict=True):
        if way == "no reduction":
            continue
        for rank, measured in enumerate(ranks):
            if measured["weights"] != ranks[0]["weights"]:
                raise BugError(
                    f"{network}, {way}: rank {rank} ended with other weights than rank 0"
                )
        size = ranks[0]["weights_size"]
        first = first or (way, size)
        if not abs(size - first[1]) <= _ALIKE * first[1]:
            raise BugError(
                f"{network}: the weights' mean magnitude is {size:.6g} with {way} and {first[1]:.6g} "
                f"with {first[0]}, from the same data"
            )


def measure(
    runs: list[dict[str, Any]], ranks: int, tell: Callable[[], Any] = lambda: None
) -> list[list[dict[str, Any]]]:
    """All runs, one after the other in the same processes; what each rank measured in each.

    Calls `tell` after each run.

    Raises:
        UsageError: a rank failed, with its last words.
    """
    job = uuid.uuid4().hex
    started = []
    meeting: contextlib.AbstractContextManager[list[dict[str, str]]]
    meeting = contextlib.nullcontext([{}] * ranks)
    if any(settings["way"] == sync_horovod.WAY for settings in runs):
        meeting = sync_horovod.rendezvous(ranks)
    with tempfile.TemporaryDirectory(prefix="nostall-sync-runs-") as folder, meeting as met:
        errors = [Path(folder) / f"{rank}.errors" for rank in range(ranks)]
        results = [Path(folder) / f"{rank}.results" for rank in range(ranks)]
        plan = Path(folder) / "runs.json"
        plan.write_text(json.dumps(runs))
        try:
            for rank in range(ranks):
                # A caller's settings of Horovod would change what is compared.
                mine = environment(rank, ranks, job)
                env = {k: v for k, v in mine.items() if not k.startswith("HOROVOD_")} | met[rank]
                command = [sys.executable, "-m", "nostall_bench.sync_rank", str(plan)]
                with results[rank].open("w") as out, errors[rank].open("w") as err:
                    started.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
            _follow(started, runs, results, errors, tell)
        finally:
            for process in started:
                process.kill()
                process.wait()
        lines = [_lines(path) for path in results]
    return [[json.loads(rank[i]) for rank in lines] for i in range(len(runs))]


def _follow(
    started: list[subprocess.Popen[bytes]],
    runs: list[dict[str, Any]],
    results: list[Path],
    errors: list[Path],
    tell: Callable[[], Any],
) -> None:
    """Until all processes have ended; raises for the first that failed or took too long."""
    told, last = 0, time.monotonic()
    while True:
        states = [process.poll() for process in started]
        done = [len(_lines(path)) for path in results]
        while told < min(done):
            told, last = told + 1, time.monotonic()
            tell()
        for rank, state in enumerate(states):
            if state or (state == 0 and len(_lines(results[rank])) < len(runs)):
                words = (
                    errors[rank].read_text().strip().splitlines() or [f"it ended with {state}"]
                )[-1]
                way = runs[min(done[rank], len(runs) - 1)]["way"]
                raise UsageError(f"{way}, rank {rank} failed: {words.splitlines()[-1]}")
        if all(state == 0 for state in states):
            return
        if time.monotonic() - last > _TIMEOUT:
            raise UsageError(f"{runs[told]['way']} took more than {_TIMEOUT:.0f} s")
        time.sleep(0.05)


def _lines(results: Path) -> list[str]:
    """What a rank has printed of its runs so far; a line that is being written does not count."""
    text = results.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [x.removeprefix("RESULT ") for x in lines if x.startswith("RESULT ")]


def _images(folder: Path) -> str:
    """640 JPEG files of 100 classes."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for i in range(640):
        target = folder / f"{i % 100:03}"
        target.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 255, (12, 12, 3), np.uint8)
        Image.fromarray(small).resize((256, 256)).save(target / f"{i}.jpg", quality=90)
    return str(folder)


def _table(network: str, rows: list[dict[str, Any]], steps: int) -> Any:
    ways = list(dict.fromkeys(r["way"] for r in rows))
    bases = {"x nego": "negotiated", "x DDP": "DDP gloo"}
    if sync_horovod.WAY in ways:
        bases["x hvd"] = sync_horovod.WAY
    columns = ("CPU", "invol.", "vol.", "agree", "copy", "reduce")
    table = harness.table(network, "way", "samples/s", *bases, *columns)
    speed = {
        w: [sum(k["samples_per_second"] for k in r["ranks"]) for r in rows if r["way"] == w]
        for w in ways
    }
    analysis = ""
    for way in ways:
        runs = [k for r in rows if r["way"] == way for k in r["ranks"]]

        def share(*keys: str, runs: list[dict[str, Any]] = runs) -> str:
            if keys[0] not in runs[0]:
                return "-"
            values = [sum(k[key] for key in keys) / 1e9 / k["seconds"] for k in runs]
            return f"{statistics.median(values):.1%}"

        def each(key: str, runs: list[dict[str, Any]] = runs) -> str:
            return f"{harness.median(runs, key) / steps:.1f}"

        table.add_row(
            way,
            harness.spread(speed[way], "{:.0f}"),
            *(_ratio(speed[way], speed.get(base)) for base in bases.values()),
            share("engine_user_ns", "engine_system_ns")
            if "engine_user_ns" in runs[0]
            else share("engine_cpu_ns"),
            each("involuntary"),
            each("voluntary"),
            share("engine_order_ns"),
            share("engine_copy_ns", "engine_submit_copy_ns"),
            share("engine_reduce_ns"),
        )
        if "analysis" in runs[0]:
            took = harness.median(runs, "analysis") * 1000
            first = 100 * harness.median(runs, "seconds") / steps
            analysis = (
                f"{runs[0]['nodes']} nodes, {runs[0]['edges']} edges, {took:.1f} ms, "
                f"{took / 10 / first:.2f} % of a hundred steps"
            )
    if analysis:
        table.caption = f"graph: {analysis}"
    return table


def _split(network: str, rows: list[dict[str, Any]], steps: int) -> Any:
    """Where the progress thread's time went, and who was switched off the cores."""
    table = harness.table(
        f"{network}: ms a step, and context switches a step (voluntary / involuntary)",
        *("way", "latency", "stalling", "ordering", "copies", "reduction"),
        *("training", "engine", "input"),
    )
    for way in dict.fromkeys(r["way"] for r in rows):
        runs = [k for r in rows if r["way"] == way for k in r["ranks"]]
        table.add_row(way, *(f"{v:.2f}" for v in split(runs, steps)), *_switched(runs, steps))
    return table


def split(runs: list[dict[str, Any]], steps: int) -> list[float]:
    """Medians, ms a step: cycle latency, stalling, ordering, fusion copies, reduction (6.2.3).

    Latency: gradients are there and the thread sleeps. Stalling: they are there and other ranks are
    not. None overlap; nothing for ways without our engine.
    """
    if "engine_order_ns" not in runs[0]:
        return []
    parts = [
        (
            k["engine_latency_ns"],
            k["engine_order_wait_ns"] + k["engine_reduce_wait_ns"],
            k["engine_order_ns"] - k["engine_order_wait_ns"],
            k["engine_copy_ns"] + k["engine_submit_copy_ns"],
            k["engine_reduce_ns"] - k["engine_reduce_wait_ns"],
        )
        for k in runs
    ]
    return [statistics.median(column) / 1e6 / steps for column in zip(*parts, strict=True)]


def _switched(runs: list[dict[str, Any]], steps: int) -> list[str]:
    cells = [] if "engine_order_ns" in runs[0] else ["-"] * 5
    for component in ("training", "engine", "input"):
        voluntary, involuntary = (
            harness.median(runs, f"{component}_{kind}") / steps
            for kind in ("voluntary", "involuntary")
        )
        cells.append(f"{voluntary:.1f} / {involuntary:.1f}")
    return cells


def _ratio(values: list[float], base: list[float] | None) -> str:
    if not base:
        return "-"
    return harness.spread(a / b for a, b in zip(values, base, strict=True))
