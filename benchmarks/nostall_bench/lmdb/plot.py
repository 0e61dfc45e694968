"""Plots like [Pumma 2020, fig. 3.6, 4.6 and 5.5 to 5.16]: records/s by ranks, and where time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nostall_bench import harness

_COLOURS = {
    **{"seek": "#c44e52", "read": "#4c72b0", "skew": "#cccccc"},
    **{"compute": "#55a868", "sync": "#dd8452"},
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """One column of plots for each storage, size and order found in `rows`."""
    rows = [r for r in rows if "order" in r]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["storage"], row["size"], row["order"]), []).append(row)
    names = list(dict.fromkeys(r["strategy"] for r in rows))
    with harness.figure(path, 2, len(groups), (1 + 4.2 * len(groups), 7.5)) as (figure, axes):
        from matplotlib import pyplot

        colours = {n: pyplot.get_cmap("tab20")(i % 20) for i, n in enumerate(names)}
        for column, (group, found) in enumerate(groups.items()):
            _rates(axes[0][column], found, colours)
            axes[0][column].set_title(f"{group[1]}, {group[2]}, {group[0]}", fontsize=9)
            _split(axes[1][column], found)
        axes[0][0].set_ylabel("records/s")
        axes[1][0].set_ylabel("share of the time")
        labels = {
            text: line
            for a in axes[0]
            for line, text in zip(*a.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels.keys(), loc="outside right upper", fontsize=8)
        shares = axes[1][0].get_legend_handles_labels()
        figure.legend(*shares, loc="outside right lower", fontsize=8)


def _rates(axes: Any, rows: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    for name in dict.fromkeys(r["strategy"] for r in rows):
        mine = sorted((r for r in rows if r["strategy"] == name), key=lambda r: r["ranks"])
        rates = [[r["records"] / x["seconds"] for x in r["runs"]] for r in mine]
        middle, ends = harness.error_bars(rates)
        axes.errorbar(
            [r["ranks"] for r in mine],
            middle,
            yerr=ends,
            marker="o",
            markersize=3,
            linewidth=2 if name.startswith("nostall") else 1,
            linestyle="--" if name in ("fio", "raw") else "-",
            label=name,
            color=colours[name],
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.3)


def _split(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Of the largest number of ranks."""
    most = max(r["ranks"] for r in rows)
    mine = [r for r in rows if r["ranks"] == most and "seek" in r["runs"][0]]
    bottom = [0.0] * len(mine)
    for part, colour in _COLOURS.items():
        values = []
        for row in mine:
            whole = sum(harness.median(row["runs"], k) for k in _COLOURS)
            values.append(harness.median(row["runs"], part) / whole)
        axes.bar(range(len(mine)), values, bottom=bottom, label=part, color=colour)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.set_xticks(range(len(mine)), [r["strategy"] for r in mine], rotation=60, fontsize=8)
    axes.set_title(f"{most} rank(s)", fontsize=9)
