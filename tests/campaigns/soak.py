"""One job of two ranks that loads batches, reduces and saves checkpoints for a long time.

The promise: nothing grows with the number of batches, collectives and checkpoints. Each rank counts
its descriptors, threads, Python objects and private memory at equal distances. In the second half
threads and descriptors must not grow, and objects and memory must grow by no more than a few a thousand
batches. At scale 1 the slope of the memory over time, by least squares with its error, must be below
1 MB an hour.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from campaigns.outcome import Outcome, Task

FULL = "2 ranks, 2 h, 1,000,000 batches, 100,000 collectives and 1,000 checkpoints of each"
SMALL = 0.02

RANKS = 2
SAMPLES = 64
COUNTS = 40
BYTES_PER_BATCH = 20
OBJECTS_PER_THOUSAND_BATCHES = 20
MEGABYTES_PER_HOUR = 1.0
RANK = Path(__file__).parent / "soak_rank.py"


def slope(times: list[float], values: list[float]) -> tuple[float, float]:
    """Of the line of least squares, and the standard error of it."""
    n = len(times)
    t, v = sum(times) / n, sum(values) / n
    spread = sum((x - t) ** 2 for x in times)
    rise = sum((x - t) * (y - v) for x, y in zip(times, values, strict=True)) / spread
    rest = sum((y - v - rise * (x - t)) ** 2 for x, y in zip(times, values, strict=True))
    return rise, math.sqrt(rest / max(1, n - 2) / spread)


def judge(rank: int, counts: list[dict[str, Any]], long: bool) -> tuple[list[str], dict[str, Any]]:
    """What grew, and the figures of the second half, when all that is made once has been made."""
    half = counts[len(counts) // 2 :]
    last = half[-1]
    wrong = []
    # One thread comes and goes: it plans the next epoch, once in each.
    threads = sorted({c["threads"] for c in half})
    if threads[-1] - threads[0] > 1:
        wrong.append(f"rank {rank}: threads were {' and '.join(map(str, threads))}")
    # The least of the later counts: what comes and goes between two of them, as the files that a tier
    # reads the limits of memory from, is no growth.
    quarter = len(half) // 2
    batches = half[quarter]["batches"] - half[0]["batches"]
    grown = {
        what: min(c[what] for c in half[quarter:]) - min(c[what] for c in half[:quarter])
        for what in ("threads", "descriptors", "objects", "bytes")
    }
    for what in ("threads", "descriptors"):
        if grown[what] > 0:
            wrong.append(f"rank {rank}: {grown[what]} {what} more after {batches} batches")
    if grown["objects"] > OBJECTS_PER_THOUSAND_BATCHES * batches / 1000:
        wrong.append(f"rank {rank}: {grown['objects']} objects more after {batches} batches")
    if grown["bytes"] > BYTES_PER_BATCH * batches:
        wrong.append(f"rank {rank}: {grown['bytes']} bytes more after {batches} batches")
    rise, error = slope([c["seconds"] for c in half], [c["bytes"] for c in half])
    figures = {
        f"rank {rank}: bytes per batch": round(grown["bytes"] / batches, 2),
        f"rank {rank}: objects": grown["objects"],
        f"rank {rank}: descriptors": last["descriptors"],
        f"rank {rank}: threads": last["threads"],
    }
    if long:  # in a short run it is the noise of a page or two
        figures[f"rank {rank}: MB an hour"] = f"{rise * 3600 / 1e6:.3f} +- {error * 3600 / 1e6:.3f}"
    if long and rise * 3600 / 1e6 >= MEGABYTES_PER_HOUR:
        wrong.append(f"rank {rank}: memory grows by {rise * 3600 / 1e6:.2f} MB an hour")
    return wrong, figures


def run(task: Task) -> Outcome:
    batches = task.count(1_000_000, 2000)
    settings = {
        "batches": batches,
        "per_collective": 10,
        "per_checkpoint": max(1, batches // task.count(1000, 8)),
        "counts": COUNTS,
        "seconds": 7200 * task.scale if task.scale >= 0.1 else 0,
        "ranks": RANKS,
        "epochs": batches * RANKS // SAMPLES + 1,
        "kept_batches": min(1 << 15, batches // 20),
        "kept_epochs": min(500, batches * RANKS // SAMPLES // 20),
    }
    outcome = Outcome(cases=RANKS)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        for i in range(SAMPLES):
            path = base / "data" / f"class{i % 2}" / f"{i:03}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes([i]) * 512)
        (base / "settings").write_text(json.dumps(settings))
        ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(base), str(rank)], stderr=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        for rank, process in enumerate(ranks):
            _, complaint = process.communicate()
            if process.returncode != 0:
                last = (complaint.strip().splitlines() or [""])[-1]
                outcome.failures.append(f"rank {rank} ended with {process.returncode}: {last}")
        if outcome.failures:
            return outcome
        for rank in range(RANKS):
            counts = json.loads((base / f"{rank}.json").read_text())
            wrong, figures = judge(rank, counts, task.scale >= 1)
            outcome.failures += wrong
            outcome.figures |= figures
        outcome.figures |= {k: counts[-1][k] for k in ("batches", "collectives", "checkpoints")}
    return outcome
