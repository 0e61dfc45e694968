"""The plots of a run's report, each with a table of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.observe.report._digest import CAUSES, FETCHING, Digest
from nostall.observe.report._run import CAUSE_NAMES, Run, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours; hatches distinguish the bars without colour.
COLOURS = {
    "source": "#D55E00", "peer": "#0072B2", "tier": "#56B4E9", "others": "#CC79A7",
    "decode": "#E69F00", "other": "#999999", "peers": "#F0E442", "checkpoint": "#009E73",
}  # fmt: skip
HATCHES = {
    "source": "", "peer": "//", "tier": "\\\\", "others": "xx", "decode": "..", "other": "",
    "peers": "++", "checkpoint": "oo",
}  # fmt: skip
# All waits of a rank: for data by cause, for the other ranks, and for checkpoints.
WAITS = {**{c: CAUSE_NAMES[c] for c in CAUSES}, "peers": "other ranks", "checkpoint": "checkpoints"}
_SLOTS = 60
_TABLE = 24


@dataclass
class Plot:
    """A figure, what it shows, and its table."""

    title: str
    figure: Figure
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def _axes(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, height), constrained_layout=True)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def plots(run: Run) -> list[Plot]:
    """All plots that the run has data for."""
    made = [causes(run)]
    digests = [r.digest for r in run.ranks if r.digest is not None]
    if digests:
        made += [heat(run), activity(digests)]
        made += phases(digests)
    if run.timeline is not None and run.timeline.ranks:
        made.append(imbalance(run))
    return made


def causes(run: Run) -> Plot:
    """Waits by cause, one bar per rank."""
    shares = []
    for r in run.ranks:
        waits = {
            **r.waits(), "peers": run.peer_seconds(r), "checkpoint": r.phase("checkpoint") or 0.0
        }  # fmt: skip
        shares.append({c: w / r.seconds if r.seconds else 0.0 for c, w in waits.items()})
    figure, axis = _axes(1.9 + 0.3 * min(len(run.ranks), 64))
    base = np.zeros(len(shares))
    place = np.arange(len(shares))
    for cause, name in WAITS.items():
        width = np.array([100 * s[cause] for s in shares])
        if width.max(initial=0) > 0:
            axis.barh(
                place, width, 0.7, left=base, color=COLOURS[cause], hatch=HATCHES[cause],
                edgecolor="white", linewidth=0, label=name,
            )  # fmt: skip
        base += width
    # A run that hardly waited must look like that.
    most = max(10.0, 1.05 * float(base.max(initial=0)))
    axis.set(xlabel="% of the run", yticks=place, ylim=(len(shares) - 0.4, -0.6), xlim=(0.0, most))
    axis.set_yticklabels([f"rank {r.rank}" for r in run.ranks])
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    rows = [
        (str(r.rank), *(percent(s[c]) for c in WAITS), percent(sum(s.values())))
        for r, s in zip(run.ranks, shares, strict=True)
    ]
    headings = ("rank", *WAITS.values(), "together")
    return Plot("What each rank waited for", figure, headings, rows)


def _slots(digests: list[Digest]) -> tuple[Any, float]:
    """Edges of equal slots over all ranks, in seconds since the first rank's first event."""
    zero = min(d.origin for d in digests)
    end = max(d.origin - zero + d.seconds for d in digests)
    return np.linspace(0.0, max(end, 1e-6), _SLOTS + 1), zero


def heat(run: Run) -> Plot:
    """Share of each slot of time that each rank waited for data."""
    digests = [r.digest for r in run.ranks if r.digest is not None]
    edges, zero = _slots(digests)
    shares = np.array(
        [
            d.of("data", "wait for batch").active(edges[:-1] + zero - d.origin,
                                                  edges[1:] + zero - d.origin)
            for d in digests
        ]
    )  # fmt: skip
    figure, axis = _axes(1.6 + 0.25 * min(len(digests), 64))
    image = axis.imshow(
        100 * np.clip(shares, 0, 1), aspect="auto", vmin=0, vmax=100, cmap="cividis",
        extent=(0.0, edges[-1], len(digests) - 0.5, -0.5), interpolation="nearest",
    )  # fmt: skip
    axis.set(xlabel="seconds", yticks=range(len(digests)))
    axis.set_yticklabels([f"rank {d.rank}" for d in digests])
    figure.colorbar(image, ax=axis, label="% waiting")
    step = max(1, _SLOTS // 12)
    headings = ("rank", *(f"{edges[i]:.1f} s" for i in range(0, _SLOTS, step)))
    rows = [
        (str(d.rank), *(percent(float(s[i : i + step].mean())) for i in range(0, _SLOTS, step)))
        for d, s in zip(digests, np.clip(shares, 0, 1), strict=True)
    ]
    return Plot("When each rank waited for data", figure, headings, rows)


def activity(digests: list[Digest]) -> Plot:
    """How many threads of all ranks were busy, by kind of work."""
    edges, zero = _slots(digests)
    lines = {}
    for name, cause in (*FETCHING.items(), ("decode", "decode")):
        sums = np.sum(
            [
                d.of("data", name).active(edges[:-1] + zero - d.origin, edges[1:] + zero - d.origin)
                for d in digests
            ],
            axis=0,
        )
        if sums.max(initial=0) > 0.001:
            lines[name] = (sums, cause)
    figure, axis = _axes(3)
    middle = (edges[1:] + edges[:-1]) / 2
    for style, (name, (sums, cause)) in zip(
        ("-", "--", "-.", ":", "-"), lines.items(), strict=False
    ):
        axis.plot(middle, sums, style, color=COLOURS[cause], label=name)
    axis.set(xlabel="seconds", ylabel="threads busy", ylim=(0, None))
    if lines:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    rows = [
        (
            name,
            f"{float(sums.mean()):.2f}",
            f"{float(sums.max()):.2f}",
            f"{sum(d.of('data', name).seconds for d in digests):.2f} s",
            f"{sum(float(d.of('data', name).bytes.sum()) for d in digests) / 1e6:.1f} MB",
        )
        for name, (sums, _) in lines.items()
    ]
    headings = ("work", "threads, average", "threads, most", "thread seconds", "bytes")
    return Plot("What the loaders' threads did", figure, headings, rows)


def phases(digests: list[Digest]) -> list[Plot]:
    """Spans that the program named: compute, peers, checkpoint windows."""
    kinds: dict[tuple[str, str], float] = {}
    for d in digests:
        for (category, name), spans in d.spans.items():
            if category != "data":
                kinds[category, name] = kinds.get((category, name), 0.0) + spans.seconds
    if not kinds:
        return []
    order = sorted(kinds, key=lambda k: -kinds[k])[:12]
    edges, zero = _slots(digests)
    figure, axis = _axes(1.2 + 0.35 * len(order))
    colours = {
        "compute": "#009E73",
        "peers": "#0072B2",
        "checkpoint": "#CC79A7",
        "background": "#56B4E9",
    }
    rows = []
    for line, key in enumerate(order):
        for d in digests:
            if key not in d.spans:
                continue
            spans = d.spans[key]
            # The picture has no room for more.
            begin, end = spans.begin[:2000] + d.origin - zero, spans.end[:2000] + d.origin - zero
            axis.broken_barh(
                list(zip(begin, end - begin, strict=True)), (line - 0.4, 0.8),
                color=colours.get(key[0], "#999999"),
            )  # fmt: skip
        count = sum(len(d.spans[key].begin) for d in digests if key in d.spans)
        each = kinds[key] / max(1, count)
        rows.append((key[0], key[1], str(count), f"{kinds[key]:.2f} s", f"{1e3 * each:.2f} ms"))
    axis.set(xlabel="seconds", yticks=range(len(order)), ylim=(len(order) - 0.5, -0.5))
    axis.set_xlim(0, edges[-1])
    axis.set_yticklabels([_plain(f"{c}: {n}") for c, n in order])
    title = "Phases that the program named, and checkpoint windows"
    return [Plot(title, figure, ("category", "phase", "times", "together", "each"), rows)]


def _plain(text: str) -> str:
    """A label that matplotlib does not read as mathematics."""
    return text[:40].replace("$", r"\$")


def imbalance(run: Run) -> Plot:
    """Negotiation delays: how long ranks waited for the last to arrive."""
    found = run.timeline
    assert found is not None
    figure, axis = _axes(3)
    step = max(1, len(found.rounds) // 1000)
    rounds = found.rounds[::step]
    for field, style, label in (
        ("negotiation_max", "-", "longest of a rank"),
        ("negotiation_average", "--", "average over ranks"),
    ):
        values = [1e3 * (getattr(r, field) or 0.0) for r in rounds]
        axis.plot([r.round for r in rounds], values, style, label=label,
                  color="#D55E00" if style == "-" else "#0072B2")  # fmt: skip
    axis.set(xlabel="round", ylabel="waiting for others, ms", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    rows = [
        (str(r.rank), f"{1e3 * r.average:.3f} ms", f"{1e3 * r.max:.3f} ms", str(r.rounds))
        for r in found.ranks[:_TABLE]
    ]
    headings = ("rank", "average a round", "longest", "rounds")
    return Plot("How long each rank waited for the others", figure, headings, rows)
