"""Predicts how the ways of synchronising gradients scale: negotiated as Horovod does, GS, NBCS, SCP,
TOPO (planned) and SCP with TOPO [Pumma 2020, fig. 6.16]. The protocols are simulated, not the
arithmetic; their costs come from ``nostall bench sync --json``, or else from a measurement that comes
with nostall-bench. Improvements are percent of samples/s over negotiated, median [least-most] over the
random seeds; "thread" is the share of the run that the progress thread spends on its core, "spin" the
share in which it only waits."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.simulate_sync import MODES, Point, Training, measured, sweep
from nostall_bench.simulate_sync_plots import draw_scaling, draw_timeline

_RANKS = (96, 192, 384, 768, 1536, 3072, 6144, 12288, 24576)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall simulate sync``."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(_RANKS),
        help="the largest take minutes",
    )  # fmt: skip
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="only these")
    parser.add_argument("--measured", metavar="JSON", help="of nostall bench sync, on your machine")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="compute, jitter, groups, first, reduce, hop, window, contention, partition, cycle, "
        "test_sleep; seconds and parts",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    harness.add_files(parser, plot="improvement and CPU share")
    parser.add_argument("--timeline", help="draw the cycles of a few ranks to this image")
    parser.add_argument("--oversleep-ms", type=float, default=6.0, help="in that timeline")


def run(arguments: argparse.Namespace) -> int:
    """Simulates, prints the table, writes files."""
    from rich.console import Console
    from rich.progress import track

    modes = list(MODES)
    if arguments.modes:
        unknown = [m for m in arguments.modes if m not in MODES]
        if unknown:
            raise UsageError(f"modes are {', '.join(MODES)}, not {unknown[0]!r}")
        modes = arguments.modes
    if arguments.seeds < 1 or arguments.iterations < 1 or min(arguments.ranks) < 1:
        raise UsageError("--ranks, --seeds and --iterations must be at least 1")
    training, costs = _training(arguments.set), measured(arguments.measured)
    points = []
    progress = Console(stderr=True)
    for ranks in track(arguments.ranks, "simulating", console=progress, transient=True):
        points += sweep(
            [ranks], training, costs,
            modes=modes, iterations=arguments.iterations, seeds=arguments.seeds,
        )  # fmt: skip
    harness.console().print(_table(points))
    harness.write(
        arguments.json,
        training=asdict(training),
        costs=asdict(costs),
        points=[asdict(p) for p in points],
    )
    if arguments.plot:
        draw_scaling(points, arguments.plot)
    if arguments.timeline:
        draw_timeline(training, arguments.oversleep_ms / 1000, arguments.timeline)
    return 0


def _training(words: list[str]) -> Training:
    known = {f.name: f.type for f in fields(Training)}
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if key not in known or not equals:
            raise UsageError(f'"{word}" is not KEY=VALUE with KEY of {", ".join(known)}')
        try:
            values[key] = int(text) if known[key] == "int" else float(text)
        except ValueError as error:
            raise UsageError(f"{key} must be a number, not {text!r}") from error
    return Training(**values)


def _table(points: list[Point]) -> Any:
    table = harness.table(
        "Ways of synchronising gradients",
        *("way", "ranks", "ms a step", "faster", "thread", "spin"),
        caption="faster: samples/s over negotiated, median of the seeds (and range)\n"
        "thread: the progress thread's part of the run on its core\n"
        "spin: the part of the run in which that thread only waits",
    )
    for p in points:
        for i, (mode, o) in enumerate(p.outcomes.items()):
            low, middle, high = p.improvement[mode]
            table.add_row(
                mode,
                "" if i else f"{p.ranks:,}",
                f"{1000 * o.iteration:.1f}",
                "" if mode == "negotiated" else f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})",
                f"{o.busy:.0%}",
                f"{o.spin:.0%}",
                end_section=i + 1 == len(p.outcomes),
            )
    return table
