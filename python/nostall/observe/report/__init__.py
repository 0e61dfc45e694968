"""Writes one self-contained HTML page: what a training waited for, and the origins of its samples."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.errors import UsageError
from nostall.observe._stats import HEADINGS, Stats, by_loader, merge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "page", "write"]

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = {"ram": "#009E73", "file": "#F0E442", "peer": "#0072B2", "source": "#D55E00"}
_NAMES = {"ram": "RAM tier", "file": "file tier", "peer": "other nodes", "source": "source"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em;
       color: #1d2733 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .25em .9em; text-align: right;
       border-bottom: 1px solid #dde3ea } th:first-child, td:first-child { text-align: left }
.key { font-size: 1.2em } svg { max-width: 100%; height: auto }
"""


def figure(stats: Sequence[Stats]) -> Figure:
    """Stall and origins of every batch over time, all ranks in one time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: Figure
    drawn, (waits, origins) = pyplot.subplots(
        2, 1, figsize=(10, 6), sharex=True, constrained_layout=True
    )
    for rank in stats:
        label = f"rank {rank.rank}" if len(stats) > 1 else None
        waits.plot(
            rank.batches.time,
            [1e3 * w for w in rank.batches.wait],
            ".",
            markersize=3,
            label=label,
        )
    waits.set(ylabel="wait for the batch, ms", title="What the training waited for")
    if len(stats) > 1:
        waits.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, markerscale=3)
    _draw_origins(origins, stats)
    origins.set(
        xlabel="seconds since the loader was made",
        ylabel="share of samples",
        ylim=(0, 1),
        title="Where its samples came from",
    )
    for axis in (waits, origins):
        axis.spines[["top", "right"]].set_visible(False)
        for moment, epoch in _epoch_starts(stats):
            axis.axvline(moment, color="#9aa5b1", linewidth=0.8, linestyle=":")
            if axis is waits:
                place = axis.get_xaxis_transform()
                axis.text(
                    moment, 0.98, f" epoch {epoch}", transform=place, va="top", color="#52606d"
                )
    return drawn


def _epoch_starts(stats: Sequence[Stats]) -> list[tuple[float, int]]:
    first: dict[int, float] = {}
    for rank in stats:
        for epoch, moment in zip(rank.batches.epoch, rank.batches.time, strict=True):
            number = int(epoch)
            first[number] = min(moment, first.get(number, moment))
    return [(moment, epoch) for epoch, moment in sorted(first.items())]


def _draw_origins(axis: Any, stats: Sequence[Stats]) -> None:
    """Stacked shares in equal slots of time, few enough that every one holds batches."""
    rows = [
        row
        for s in stats
        for row in zip(s.batches.time, *(getattr(s.batches, o) for o in _COLOURS), strict=True)
    ]
    if not rows:
        return
    slots = max(1, min(120, len(rows) // (3 * len(stats))))
    begin, end = min(r[0] for r in rows), max(r[0] for r in rows)
    width = max((end - begin) / slots, 1e-9)
    sums = [[0.0] * slots for _ in _COLOURS]
    for moment, *counts in rows:
        slot = min(slots - 1, int((moment - begin) / width))
        for origin, count in enumerate(counts):
            sums[origin][slot] += count
    moments = [begin + (i + 0.5) * width for i in range(slots)]
    base = [0.0] * slots
    totals = [sum(s[i] for s in sums) for i in range(slots)]
    for origin, name in enumerate(_COLOURS):
        if not any(sums[origin]):
            continue  # leaves out of the legend what never occurred
        shares = [sums[origin][i] / t if t else 0.0 for i, t in enumerate(totals)]
        axis.bar(moments, shares, width, bottom=base, color=_COLOURS[name], label=_NAMES[name])
        base = [b + s for b, s in zip(base, shares, strict=True)]
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def page(stats: Sequence[Stats]) -> str:
    """The HTML text.

    Raises:
        UsageError: no statistics, or of different jobs.
    """
    if not stats:
        raise UsageError("there are no statistics to report")
    groups = by_loader(stats, lambda s: s)
    sections = "".join(_section(g, named=len(groups) > 1) for g in groups)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>nostall report</title><style>{_STYLE}</style>
<h1>nostall: where training waited</h1>
{sections}</html>
"""


def _section(stats: Sequence[Stats], named: bool) -> str:
    """The section of one loader."""
    whole = merge(stats)
    svg = io.StringIO()
    drawn = figure(stats)
    drawn.savefig(svg, format="svg")
    from matplotlib import pyplot

    pyplot.close(drawn)
    picture = svg.getvalue()
    picture = picture[picture.index("<svg") :]
    share = whole.stall_seconds / whole.seconds if whole.seconds else 0.0
    return f"""{f"<h1>{html.escape(whole.loader)}</h1>" if named else ""}
<p class="key">Stalled {whole.stall_seconds:.2f} s of {whole.seconds:.2f} s ({share:.1%});
{read_line(whole, len(stats))}</p>
{picture}
<h2>By epoch, all ranks</h2>
{_table(whole)}
<h2>Memory, most seen</h2>
{_memory(whole)}
{_substituted(whole)}
"""


def read_line(whole: Stats, ranks: int) -> str:
    """What was read from the source, compared with the bound if all ranks are present."""
    line = f"read {whole.source_bytes / 1e6:.1f} MB from the source"
    if ranks == whole.world_size:
        line += f", lower bound {whole.lower_bound_bytes / 1e6:.1f} MB"
    return f"{line}; {ranks} of {whole.world_size} ranks."


def _table(stats: Stats) -> str:
    head = "".join(f"<th>{h}</th>" for h in HEADINGS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
        for row in stats.rows()
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _memory(stats: Stats) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{size / 1e6:.1f} MB</td></tr>"
        for name, size in stats.memory.items()
    )
    return f"<table>{rows}</table>"


def _substituted(stats: Stats) -> str:
    bad = sorted({s for e in stats.epochs for s in e.substituted})
    if not bad:
        return ""
    return f"<h2>Samples that could not be used</h2><p>{', '.join(map(str, bad))}</p>"


def write(stats: Sequence[Stats], path: str | os.PathLike[str]) -> None:
    """Writes the page."""
    Path(path).write_text(page(stats))
