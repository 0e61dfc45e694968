"""``nostall bench storage``: what memory, a disk and a shared file system give to more readers.

Figures 5.1 to 5.3 of [Böhringer 2020]: memory by threads, a disk by threads, a parallel file system
by nodes, each median of several runs with its 95 % nonparametric confidence interval (equation 5.1).
Memory and disk are read as `nostall calibrate` reads tiers; the file system is emulated, each node a
mount of its own (`SlowFS`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from math import comb
from pathlib import Path
from typing import Any

from nostall.base._sizes import TierSpec
from nostall.cli._calibrate import _Source, tier_curves
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.slowfs import SlowFS

_FILE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench storage``."""
    parser.add_argument("--disk", default="nostall-bench", help="a directory on the disk")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=8, help="mounts of the emulated file system")
    parser.add_argument("--bandwidth", type=float, default=18, help="of a node, MB/s")
    parser.add_argument("--aggregate", type=float, default=120, help="of all nodes, MB/s")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="per point measured")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of a read")
    harness.add_files(parser, plot="the three curves")


def interval(runs: int) -> tuple[int, int]:
    """The ranks j and k of equation 5.1: the narrowest that hold the median with 95 %.

    The first and the last of fewer than six runs, which hold it with less.
    """

    def below(k: int) -> float:
        return sum(comb(runs, i) for i in range(k + 1)) / float(2**runs)

    for j in range(runs // 2, 0, -1):
        if below(runs - j) - below(j - 1) >= 0.95:
            return j, runs + 1 - j
    return 1, runs


def run(arguments: argparse.Namespace) -> int:
    """Measures; prints a table, writes JSON, draws."""
    counts = (arguments.threads, arguments.nodes, arguments.runs, arguments.size)
    if min(counts) < 1 or arguments.seconds <= 0:
        raise UsageError(
            "--threads, --nodes, --runs and --size must be at least 1, --seconds above 0"
        )
    os.makedirs(arguments.disk, exist_ok=True)
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        for name, tier in {
            "memory, threads": TierSpec("ram", 64 << 20),
            "disk, threads": TierSpec("file", 64 << 20, folder),
        }.items():
            runs = [
                tier_curves(tier, arguments.size, arguments.threads, arguments.seconds)[0]
                for _ in range(arguments.runs)
            ]
            curves[name] = [list(point) for point in zip(*runs, strict=True)]
        curves["file system, nodes"] = _shared(arguments, Path(folder))
    _print(curves, arguments.runs)
    harness.write(arguments.json, curves=curves)
    if arguments.plot:
        _draw(arguments.plot, curves)
    return 0


def _shared(arguments: argparse.Namespace, folder: Path) -> list[list[float]]:
    backing, mount = folder / "backing", folder / "mount"
    backing.mkdir()
    names = [f"{i:04d}" for i in range(64)]
    for name in names:
        (backing / name).write_bytes(os.urandom(_FILE))
    with SlowFS(
        backing, mount, bandwidth=arguments.bandwidth * 1e6, aggregate=arguments.aggregate * 1e6,
        latency=0.5e-3, clients=arguments.nodes,
    ) as storage:  # fmt: skip
        points = []
        for nodes in range(1, arguments.nodes + 1):
            # Each thread reads every `nodes`-th file: all from one mount, which is its own.
            files = [str(m / name) for name in names for m in storage.mounts[:nodes]]
            source = _Source(files)
            points.append([source.read(nodes, arguments.seconds) for _ in range(arguments.runs)])
    return points


def _bounds(point: list[float]) -> tuple[float, float, float]:
    ordered, (j, k) = sorted(point), interval(len(point))
    return statistics.median(ordered), ordered[j - 1], ordered[k - 1]


def _print(curves: dict[str, list[list[float]]], runs: int) -> None:
    j, k = interval(runs)
    table = harness.table(
        f"MB/s read, median [{j}. to {k}. of {runs} runs]",
        "readers",
        *curves,
        left=0,
    )
    for n in range(max(len(points) for points in curves.values())):
        cells = []
        for points in curves.values():
            cells.append(
                "{:.0f} [{:.0f}-{:.0f}]".format(*(v / 1e6 for v in _bounds(points[n])))
                if n < len(points)
                else ""
            )
        table.add_row(str(n + 1), *cells)
    harness.console().print(table)


def _draw(path: str, curves: dict[str, list[list[float]]]) -> None:
    with harness.figure(path, 1, 3, (12.0, 3.6)) as (_, axes):
        for axis, (name, points) in zip(axes[0], curves.items(), strict=True):
            what, _, readers = name.partition(", ")
            bounds = [[v / 1e6 for v in _bounds(point)] for point in points]
            errors: list[Any] = [
                [m - low for m, low, _ in bounds],
                [high - m for m, _, high in bounds],
            ]
            axis.errorbar(
                range(1, len(points) + 1), [b[0] for b in bounds], errors, marker="o", capsize=3
            )
            axis.set(title=what, xlabel=readers, ylabel="MB/s")
            axis.set_ylim(bottom=0)
