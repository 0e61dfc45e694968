"""Plots of the simulated protocols, of the kind of [Pumma 2020, fig. 6.8 to 6.12 and 6.16]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nostall_bench import harness
from nostall_bench.simulate_sync import Mode, Point, Training, timeline

_COLOURS = ("#2a9d8f", "#e9c46a", "#8ab17d", "#b5838d", "#457b9d", "#e76f51")
_MARKS = ("o", "s", "^", "D", "v", "P")


def draw_scaling(points: Sequence[Point], path: str) -> None:
    """Improvement over negotiated, and the share of its time that the thread is on a core."""
    with harness.figure(path, 1, 2, (12, 4)) as (_, ((left, right),)):
        _draw_scaling(points, left, right)


def _draw_scaling(points: Sequence[Point], left: Any, right: Any) -> None:
    ranks = [p.ranks for p in points]
    for i, mode in enumerate(points[0].outcomes):
        colour, mark = _COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]
        right.plot(
            ranks, [100 * p.outcomes[mode].busy for p in points], mark + "-", c=colour, label=mode
        )
        if mode == "negotiated":
            continue
        low, middle, high = zip(*(p.improvement[mode] for p in points), strict=True)
        left.plot(ranks, middle, mark + "-", c=colour, label=mode)
        left.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
    left.set(xlabel="ranks", ylabel="samples/s more than negotiated, %")
    right.set(xlabel="ranks", ylabel="progress thread on its core, % of the run", ylim=(0, 100))
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [f"{r:,}" for r in ranks], rotation=45)
        axis.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))


def draw_timeline(training: Training, oversleep: float, path: str) -> None:
    """Two threads, one of which oversleeps once: in step, the cascade, GS and NBCS."""
    rows: tuple[tuple[str, Mode, float], ...] = (
        ("in step (6.8)", "negotiated", 0.0),
        ("one oversleeps (6.9)", "negotiated", oversleep),
        ("GS (6.11)", "GS", oversleep),
        ("NBCS (6.12)", "NBCS", oversleep),
    )
    with harness.figure(path, 4, 1, (10, 6), sharex=True) as (_, axes):
        for axis, (title, mode, late) in zip(axes[:, 0], rows, strict=True):
            for begin, awake, done in timeline(mode, training, late):
                for r in range(2):
                    asleep, waits = 1e3 * (awake[r] - begin[r]), 1e3 * (done[r] - awake[r])
                    axis.barh(1 - r, asleep, 0.6, left=1e3 * begin[r], color="#dfe7ec")
                    polls = mode == "NBCS"
                    axis.barh(
                        1 - r, waits, 0.6, left=1e3 * awake[r],
                        color="#8ab17d" if polls else "#e76f51", edgecolor="white", linewidth=0.3,
                    )  # fmt: skip
            axis.set_yticks([1, 0], ["thread 0", "thread 1"])
            axis.set_title(title, loc="left", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1][0].set_xlabel(
            "ms (grey: asleep; red: in the agreement, on a core; green: asleep between tests)"
        )
