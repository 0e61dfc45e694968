"""Plots of results, like [Böhringer 2020, fig. 5.4 to 5.8]."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.simulate._run import Outcome
from nostall.simulate._sweep import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#2a9d8f", "#e9c46a", "#8ab17d", "#b5838d", "#457b9d", "#e76f51")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def runtime_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Run times of all policies by mode, as bars, with the lower bound."""
    shown = [o for o in outcomes if not math.isnan(o.seconds)]
    titles = list(dict.fromkeys(o.title for o in shown))
    modes = list(dict.fromkeys(o.mode for o in shown))
    figure: Figure
    figure, axis = _pyplot().subplots(
        figsize=(10, 0.45 * len(titles) * len(modes) ** 0.5 + 1.2), constrained_layout=True
    )
    height = 0.8 / len(modes)
    for m, mode in enumerate(modes):
        found = {o.title: o for o in shown if o.mode == mode}
        at = [i + (m - (len(modes) - 1) / 2) * height for i, t in enumerate(titles) if t in found]
        axis.barh(
            at,
            [found[t].seconds for t in titles if t in found],
            height * 0.92,
            color=_COLOURS[-1 - m],
            label=mode,
        )
    axis.axvline(shown[0].seconds / shown[0].ratio, color="#1d2733", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(titles)), titles)
    axis.invert_yaxis()
    axis.set(xlabel="run time, s (dashed: the lower bound)")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def origin_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Where the bytes of the staging buffers came from, as stacked bars."""
    shown = [o for o in outcomes if not math.isnan(o.seconds) and sum(v for _, v in o.staged) > 0]
    figure: Figure
    figure, axis = _pyplot().subplots(
        figsize=(10, 0.32 * len(shown) + 1.2), constrained_layout=True
    )
    labels = [f"{o.title}, {o.mode}" for o in shown]
    base = [0.0] * len(shown)
    for i, name in enumerate(dict.fromkeys(n for o in shown for n, _ in o.staged)):
        values = [dict(o.staged).get(name, 0.0) / 1e3 for o in shown]
        colour = _COLOURS[-1] if name == "source" else _COLOURS[i % (len(_COLOURS) - 1)]
        axis.barh(labels, values, left=base, color=colour, label=name)
        base = [b + v for b, v in zip(base, values, strict=True)]
    axis.barh(
        labels,
        [o.kept_from_source / 1e3 for o in shown],
        left=base,
        color="none",
        edgecolor=_COLOURS[-1],
        hatch="///",
        label="source, to be kept",
    )
    axis.invert_yaxis()
    axis.set(xlabel="GB")
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def batch_figure(outcomes: Sequence[Outcome], mode: str) -> Figure:
    """Seconds per batch over the run of every policy, averaged in slots."""
    figure: Figure
    figure, axis = _pyplot().subplots(figsize=(10, 4), constrained_layout=True)
    for o in outcomes:
        if o.mode != mode or o.batch_seconds is None or math.isnan(o.seconds):
            continue
        slots = np.array_split(o.batch_seconds, min(100, len(o.batch_seconds)))
        means = [float(s.mean()) for s in slots]
        at = np.linspace(0, len(o.batch_seconds), len(means), endpoint=False)
        # Ten colours, then the same with dashes.
        style = "-" if len(axis.lines) < 10 else "--"
        axis.plot(at, means, style, label=o.title, linewidth=1.2)
    axis.set(xlabel="batch", ylabel="s per batch", title=mode, ylim=(0, None))
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def heat_map(points: Sequence[Point], column: str, across: str, down: str) -> Figure:
    """Run time over two variables of a sweep, other variables at their last value."""
    fixed = {k: v for p in points for k, v in p.values.items() if k not in (across, down)}
    shown = [p for p in points if all(p.values.get(k) == v for k, v in fixed.items())]
    columns = sorted({p.values[across] for p in shown if across in p.values})
    lines = sorted({p.values[down] for p in shown if down in p.values})
    values = [[math.nan] * len(columns) for _ in lines]
    for p in shown:
        if across in p.values and down in p.values:
            at = lines.index(p.values[down]), columns.index(p.values[across])
            values[at[0]][at[1]] = p.seconds[column]
    figure: Figure
    figure, axis = _pyplot().subplots(
        figsize=(1.4 * len(columns) + 2.5, 0.8 * len(lines) + 1.6), constrained_layout=True
    )
    image = axis.imshow(values, cmap="viridis_r", aspect="auto")
    middle = (image.norm.vmin + image.norm.vmax) / 2
    for i, line in enumerate(values):
        for j, seconds in enumerate(line):
            if not math.isnan(seconds):
                colour = "white" if seconds > middle else "black"
                axis.text(j, i, f"{seconds:.0f}", ha="center", va="center", color=colour)
    axis.set_xticks(range(len(columns)), [str(c) for c in columns])
    axis.set_yticks(range(len(lines)), [str(v) for v in lines])
    axis.set(xlabel=across, ylabel=down, title=f"run time, s: {column}")
    figure.colorbar(image, ax=axis)
    return figure


def drawings(outcomes: Sequence[Outcome], points: Sequence[Point] = ()) -> list[str]:
    """All plots of a page, as SVG."""
    figures: list[Figure] = []
    if any(not math.isnan(o.seconds) for o in outcomes):
        figures += [runtime_figure(outcomes), origin_figure(outcomes)]
        figures += [batch_figure(outcomes, m) for m in dict.fromkeys(o.mode for o in outcomes)]
    if points:
        varied = [
            k for k in points[0].values if len({json.dumps(p.values.get(k)) for p in points}) > 1
        ]
        if len(varied) >= 2:
            figures += [heat_map(points, c, varied[-2], varied[-1]) for c in points[0].seconds]
    found = []
    for figure in figures:
        svg = io.StringIO()
        figure.savefig(svg, format="svg")
        _pyplot().close(figure)
        found.append("<svg" + svg.getvalue().partition("<svg")[2])
    return found
