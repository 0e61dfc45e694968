"""The picture of ``nostall bench sync``: speed by way, and where the progress thread's time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nostall_bench import harness

_COLOURS = ("#dfe7ec", "#e76f51", "#e9c46a", "#8ab17d", "#2a9d8f")
_PARTS = ("latency", "stalling", "ordering", "copies", "reduction")
Runs = list[dict[str, Any]]


def draw(rows: Runs, split: Callable[[Runs], Sequence[float]], path: Path) -> None:
    """A row of two plots for every network, as PNG, SVG or PDF by the path's ending.

    Args:
        rows: the runs of all networks, as in the benchmark's JSON.
        split: ms a step of the thread's parts, of the ranks of a way; empty where it has none.
    """
    networks = list(dict.fromkeys(r["network"] for r in rows))
    ways = list(dict.fromkeys(r["way"] for r in rows))
    size = (12, (0.4 * len(ways) + 1.2) * len(networks))
    with harness.figure(path, len(networks), 2, size) as (_, axes):
        for (speed, time), network in zip(axes, networks, strict=True):
            _draw(speed, time, [r for r in rows if r["network"] == network], ways, split)
            speed.set(title=network, xlabel="samples/s of all ranks: median, least, most")
            time.set(title=network, xlabel="progress thread, ms a step")
            speed.set_yticks(range(len(ways)), ways)
            time.set_yticks(range(len(ways)), [""] * len(ways))
            for axis in (speed, time):
                axis.invert_yaxis()
                axis.spines[["top", "right"]].set_visible(False)
        handles, labels = axes[0][1].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        axes[0][1].legend(named.values(), named.keys(), frameon=False, loc="best")


def _draw(
    speed: Any, time: Any, rows: Runs, ways: list[str], split: Callable[[Runs], Sequence[float]]
) -> None:
    """One network."""
    for i, way in enumerate(ways):
        own = [r["ranks"] for r in rows if r["way"] == way]
        rates = [sum(k["samples_per_second"] for k in ranks) for ranks in own]
        (middle,), ends = harness.error_bars([rates])
        speed.barh(i, middle, 0.6, xerr=ends, color="#457b9d", ecolor="#1d2733", capsize=3)
        left = 0.0
        of_ranks = split([k for ranks in own for k in ranks])
        for part, colour, ms in zip(_PARTS, _COLOURS, of_ranks, strict=False):
            time.barh(i, ms, 0.6, left=left, color=colour, label=part)
            left += ms
