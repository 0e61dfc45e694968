"""The page of ``nostall report``: each run's stall and origins over time, epochs, bytes, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nostall.report.chart import Axis, bars, columns
from nostall.stats import Stats, merge

_ORIGINS = (("ram", "RAM tier"), ("file", "file tier"), ("source", "source"))
_MEMORY = {
    "ram_tier": "RAM tier",
    "file_tier": "file tier",
    "staging": "staging",
    "io_buffers": "reads under way",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #68717f; --line: #d9dde3; --paper: #fff;
  --ram: #3b7dd8; --file: #58a55c; --source: #d9822b; --stall: #c0392b; --bound: #8a93a1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #323a46;
  --paper: #161a20; --ram: #6aa5f0; --file: #7cc47f; --source: #efa555; --stall: #ec6a5c; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; font-size: 1.2rem; } h3 { font-size: 1rem; }
.facts { display: flex; flex-wrap: wrap; gap: 1.5rem; margin: 1rem 0; padding: 0;
  list-style: none; }
.facts b { display: block; font-size: 1.4rem; } .facts li, .note, caption { color: var(--soft); }
.facts b { color: var(--ink); } table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; } th { color: var(--soft); font-weight: 500; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .grid { stroke: var(--line); }
.mark { stroke: var(--soft); stroke-dasharray: 2 3; } .ram { fill: var(--ram); }
.file { fill: var(--file); } .source { fill: var(--source); } .stall { fill: var(--stall); }
.bound { fill: var(--bound); } .key i { display: inline-block; width: .8em; height: .8em;
  margin: 0 .3em 0 1em; background: var(--c); }
"""


@dataclass(frozen=True)
class Run:
    """The ranks of one job, and what to call it."""

    name: str
    ranks: list[Stats]

    @property
    def total(self) -> Stats:
        """All ranks together."""
        return merge(self.ranks)


def group(named: Sequence[tuple[str, Stats]]) -> list[Run]:
    """Puts the ranks of one job together: files of one folder that agree about the job."""
    runs: list[tuple[tuple[object, ...], Run]] = []
    for name, stats in named:
        key = (str(Path(name).parent), stats.world_size, stats.lower_bound_bytes)
        for known, run in runs:
            if known == key and stats.rank not in {s.rank for s in run.ranks}:
                run.ranks.append(stats)
                break
        else:
            runs.append((key, Run(name, [stats])))
    for _, run in runs:
        run.ranks.sort(key=lambda s: s.rank)
    return [run for _, run in runs]


def render(runs: Sequence[Run], *, title: str = "What the training waited for") -> str:
    """The page as HTML text, complete in itself."""
    body = "".join(_section(run) for run in runs)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _section(run: Run) -> str:
    total = run.total
    present = len(run.ranks)
    all_here = present == total.world_size
    ranks = f"{present} of {total.world_size} ranks" if not all_here else f"{present} rank(s)"
    seconds, stall = total.seconds, total.stall_seconds
    facts = [
        (f"{100 * stall / seconds if seconds else 0:.1f} %", "of the time stalled (slowest rank)"),
        (f"{stall:.2f} s", f"stalled in {seconds:.2f} s"),
        (f"{total.samples / seconds if seconds else 0:,.0f}", "samples a second"),
        (_size(total.source_bytes), "read from the source"),
    ]
    if all_here and total.lower_bound_bytes:
        facts.append((f"{total.excess:.3f}", "times the lower bound"))
    items = "".join(f"<li><b>{a}</b>{escape(b)}</li>" for a, b in facts)
    parts = [f'<section><h2>{escape(run.name)}</h2><p class="note">{ranks}</p>']
    parts.append(f'<ul class="facts">{items}</ul>')
    parts += [_over_time(stats, present > 1) for stats in run.ranks if stats.batches.time]
    parts += [_epochs(total), _bytes_read(total, all_here), _memory(total), "</section>"]
    return "".join(parts)


def _over_time(stats: Stats, several: bool) -> str:
    records = stats.batches
    time = np.asarray(records.time, dtype=np.float64)
    axis = Axis.over(time)
    # Counts of few batches would show how batches fall on columns, not where samples came from.
    coarse = Axis.over(time, per_column=8)

    def rate(values: Sequence[float]) -> NDArray[np.float64]:
        counts = np.bincount(coarse.column(time), values, coarse.columns)
        return counts * coarse.columns / (coarse.end - coarse.begin)

    longest = np.zeros(axis.columns)
    np.maximum.at(longest, axis.column(time), np.asarray(records.wait, dtype=np.float64))
    epoch = np.asarray(records.epoch)
    first = np.nonzero(np.diff(epoch, prepend=np.nan))[0]
    starts = [(float(time[i] - records.wait[i]), f"epoch {int(epoch[i])}") for i in first]
    if len(starts) > 24:
        starts = starts[:: -(-len(starts) // 24)]
    who = f", rank {stats.rank}" if several else ""
    key = "".join(f'<i style="--c: var(--{css})"></i>{name}' for css, name in _ORIGINS)
    wait = columns(
        axis,
        [("longest wait", "stall", longest * 1e3)],
        marks=starts,
        unit="ms",
        title=f"Longest wait for a batch over time{who}",
    )
    origins = columns(
        coarse,
        [(name, css, rate(getattr(records, css))) for css, name in _ORIGINS],
        marks=starts,
        unit="samples/s",
        title=f"Origins of samples over time{who}",
    )
    bin_width = (axis.end - axis.begin) / axis.columns
    return (
        f"<h3>Wait for a batch{who}</h3><p class='note'>the longest in each column of "
        f"{bin_width:.3g} s</p>{wait}<h3>Where samples came from{who}</h3>"
        f'<p class="note key">samples a second, from{key}</p>{origins}'
    )


def _epochs(total: Stats) -> str:
    heads = ("epoch", "seconds", "stalled, s", "stalled, %", "samples", "RAM", "file", "source")
    rows = []
    for e in total.epochs:
        cells = [str(e.epoch), f"{e.seconds:.2f}", f"{e.stall_seconds:.2f}"]
        cells += [f"{100 * e.stall_fraction:.1f}", f"{e.samples:,}"]
        cells += [f"{e.origins[name].samples:,}" for name, _ in _ORIGINS]
        cells += [_size(e.origins["source"].bytes), f"{e.decode_seconds:.2f}"]
        cells.append(str(len(e.substituted)))
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    more = ("from source", "decode, s", "substituted")
    head = "".join(f"<th>{h}</th>" for h in (*heads, *more))
    ids = sorted({i for e in total.epochs for i in e.substituted})
    note = ""
    if ids:
        shown = ", ".join(map(str, ids[:50])) + (" ..." if len(ids) > 50 else "")
        note = f'<p class="note">samples that could not be used: {shown}</p>'
    return (
        "<h3>Epochs</h3><table><caption>samples by origin; seconds are the slowest rank's, decode "
        f"is summed over threads</caption><tr>{head}</tr>{''.join(rows)}</table>{note}"
    )


def _bytes_read(total: Stats, all_here: bool) -> str:
    rows = [("read from the source", "source", total.source_bytes)]
    rows.append(("lower bound", "bound", total.lower_bound_bytes))
    note = "the least that any policy can read with these tiers, all ranks and epochs together"
    if not all_here:
        note += "; statistics of some ranks are missing, so these two cannot be compared"
    chart = bars(
        [(name, css, float(n), _size(n)) for name, css, n in rows],
        title="Bytes read from the source and the lower bound",
    )
    return f'<h3>Bytes from the source</h3><p class="note">lower bound: {note}</p>{chart}'


def _memory(total: Stats) -> str:
    chart = bars(
        [
            (_MEMORY.get(name, name), "file" if name == "file_tier" else "ram", float(n), _size(n))
            for name, n in total.memory.items()
        ],
        title="Most bytes held, by pool",
    )
    return f'<h3>Most bytes held</h3><p class="note">the file tier is on disk</p>{chart}'


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
