"""The analysis of timelines of other tools as a table, JSON, CSV, a plot, or a page."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nostall.base._sizes import format_bytes
from nostall.base._words import counted
from nostall.errors import IoError, UsageError
from nostall.observe._stats import device_lines
from nostall.observe.report._parts import document, svg, table
from nostall.observe.timelines import Analysis, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".json", ".csv", ".html", ".svg", ".png", ".pdf")
_SHOWN = 12


def seconds(value: float | None) -> str:
    """A duration as text."""
    if value is None:
        return "not available"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.3f} {unit}"
    return f"{value / 1e-6:.3f} µs"


def rate(value: float | None) -> str:
    """A bandwidth as text, in decimal units."""
    if value is None:
        return "not available"
    if math.isinf(value):
        return "unbounded"
    return format_bytes(float(value), 2, "/s")


def _size(count: int | None) -> str:
    return "not available" if count is None else format_bytes(count, 2)


def timing_rows(found: Analysis) -> list[tuple[str, str, str]]:
    """As [Li 2019, fig. 6]: metric, average, maximum."""
    forward = max((r.feed_forward for r in found.rounds), default=None)
    delays = (
        ("not available", "not available")
        if found.negotiation_missing
        else (seconds(found.negotiation_average), seconds(found.negotiation_max))
    )
    return [
        (
            "feed-forward" + (", at most" if found.feed_forward_at_most else ""),
            seconds(found.feed_forward),
            seconds(forward),
        ),
        ("negotiation delay", *delays),
        ("back-propagation window", seconds(found.window_average), seconds(found.window_max)),
    ]


def bandwidth_rows(found: Analysis) -> list[tuple[str, ...]]:
    """As [Li 2019, fig. 7], with percentiles over tensors beside the maximum."""

    def row(name: str, spread: Spread | None) -> tuple[str, ...]:
        if spread is None:
            return (name, *["not available"] * 4)
        return (name, rate(spread.p50), rate(spread.p90), rate(spread.p99), rate(spread.max))

    return [
        row("reaction bandwidth", found.reaction),
        row("immutable bandwidth, worst case", found.immutable_worst),
        row("immutable bandwidth, best case", found.immutable_best),
        row("immutable bandwidth, average", found.immutable_average),
    ]


TENSOR_HEADINGS = (
    "tensor",
    "size",
    "rounds",
    "window",
    "reaction",
    "immutable, worst",
    "immutable, best",
    "immutable, average",
)


def tensor_rows(found: Analysis) -> list[tuple[str, ...]]:
    """One row per tensor, in order of the first appearance in the file."""
    return [
        (
            t.name,
            _size(t.bytes),
            str(t.rounds),
            seconds(t.window),
            rate(t.reaction),
            rate(t.immutable_worst),
            rate(t.immutable_best),
            rate(t.immutable_average),
        )
        for t in found.tensors
    ]


def _largest_bounded(found: Analysis) -> str:
    known = [t for t in found.tensors if t.reaction is not None and math.isfinite(t.reaction)]
    if not known:
        return "that of none"
    most = max(known, key=lambda t: t.reaction or 0.0)
    return f"{rate(most.reaction)} ({_visible(most.name)})"


def _columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [headings, *rows]
    widths = [max(len(r[i]) for r in cells) for i in range(len(headings))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in cells
    ]


def _visible(text: str) -> str:
    """Removes control characters from a name, because it comes from a file."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


_LEGEND = (
    "round: from the end of one exchange of all gradients to that of the next",
    "feed-forward: from a round's start to its first negotiation",
    "negotiation delay: time in the rest of a round without negotiation or reduction on a rank",
    "(back-propagation) window: from the end of a tensor's reduction to that of its round",
    "reaction bandwidth: size / window; immutable: size / the time from the round's start to the end",
    "of the reduction (worst), that and the window (best), the mean of both times (average)",
    "p50, p90, p99: percentiles over tensors; kB, MB, GB: powers of 1000 bytes",
)


def device_words(found: Analysis) -> list[str]:
    """A line for each device: its steps, and without each wait."""
    return [
        f"rank {d.rank}, device {d.device}, stream {d.stream}: {line}"
        for d in found.devices
        for line in device_lines(d.waits)
    ]


def text(found: Analysis) -> str:
    """The table for the terminal."""
    devices = device_words(found)
    if devices and not found.rounds:
        return "\n".join([*devices, *(f"note: {_visible(n)}" for n in found.notes)])
    lines = [
        *devices,
        f"{found.dialect}: {len(found.rounds)} rounds after the first, {len(found.tensors)} tensors",
        "",
        *_columns(("time", "average", "maximum"), timing_rows(found)),
        "",
        *_columns(
            ("bandwidth over tensors", "p50", "p90", "p99", "maximum"), bandwidth_rows(found)
        ),
    ]
    if found.unbounded:
        lines.append(
            f"{found.unbounded} tensors end their round, so their window is zero and their reaction "
            f"bandwidth unbounded; the largest bounded one is {_largest_bounded(found)}"
        )
    if found.negotiation_missing:
        lines += ["", f"negotiation delays are {found.negotiation_missing}"]
    elif found.ranks:
        rows = [(str(r.rank), seconds(r.average), seconds(r.max)) for r in found.ranks]
        longest = sorted(found.ranks, key=lambda r: -r.average)[:_SHOWN]
        if len(rows) > _SHOWN:
            rows = [(str(r.rank), seconds(r.average), seconds(r.max)) for r in longest]
        lines += ["", *_columns(("negotiation delay of rank", "average", "maximum"), rows)]
        if len(found.ranks) > _SHOWN:
            lines.append(
                f"... and {counted(len(found.ranks) - _SHOWN, 'rank')} whose delay is less"
            )
    by_reaction = sorted(
        zip(tensor_rows(found), found.tensors, strict=True), key=lambda p: -(p[1].reaction or 0.0)
    )
    rows_of_tensors = [(_visible(row[0]), *row[1:]) for row, _ in by_reaction]
    lines += ["", *_columns(TENSOR_HEADINGS, rows_of_tensors[:_SHOWN])]
    if len(rows_of_tensors) > _SHOWN:
        lines.append(
            f"... and {len(rows_of_tensors) - _SHOWN} tensors of lower reaction bandwidth "
            "(-o FILE.csv has all)"
        )
    lines += ["", *_LEGEND]
    lines += [f"note: {_visible(n)}" for n in found.notes]
    return "\n".join(lines)


_FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # how what a spreadsheet reads as one begins


def as_csv(found: Analysis) -> str:
    """Long form: scope, name, metric, value (seconds, bytes, bytes per second)."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("scope", "name", "metric", "value"))

    def put(scope: str, name: object, metric: str, value: float | None) -> None:
        cell = "" if value is None else "unbounded" if math.isinf(value) else repr(value)
        # A spreadsheet must not read a name as a formula.
        label = str(name)
        rows.writerow((scope, "'" + label if label.startswith(_FORMULAS) else label, metric, cell))

    for metric in (
        "feed_forward",
        "negotiation_average",
        "negotiation_max",
        "window_average",
        "window_max",
    ):
        put("run", "", metric, getattr(found, metric))
    for metric in ("reaction", "immutable_worst", "immutable_best", "immutable_average"):
        spread: Spread | None = getattr(found, metric)
        for part in ("p50", "p90", "p99", "max"):
            put("run", "", f"{metric}_{part}", getattr(spread, part) if spread else None)
    for r in found.rounds:
        for metric in (
            "start",
            "seconds",
            "feed_forward",
            "negotiation_average",
            "negotiation_max",
            "window_average",
            "window_max",
        ):
            put("round", r.round, metric, getattr(r, metric))
    for rank in found.ranks:
        put("rank", rank.rank, "negotiation_average", rank.average)
        put("rank", rank.rank, "negotiation_max", rank.max)
    for d in found.devices:
        for metric, value in d.waits.items():
            put("device", f"{d.rank}:{d.device}", metric, value)
    for t in found.tensors:
        for metric in (
            "bytes",
            "rounds",
            "window",
            "reaction",
            "immutable_worst",
            "immutable_best",
            "immutable_average",
        ):
            put("tensor", t.name, metric, getattr(t, metric))
    return out.getvalue()


def figure(found: Analysis) -> Figure:
    """Times by round, and reaction and immutable bandwidth by tensor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: Figure
    drawn, (times, rates) = pyplot.subplots(2, 1, figsize=(10, 7), constrained_layout=True)
    step = max(1, len(found.rounds) // 2000)
    rounds = found.rounds[::step]
    number = [r.round for r in rounds]
    # Okabe and Ito's colours, with a marker each, so that they differ without colour as well.
    times.plot(number, [r.feed_forward for r in rounds], "-", color="#0072B2", label="feed-forward")
    times.plot(
        number, [r.window_average for r in rounds], "--", color="#009E73", label="window, average"
    )
    times.plot(
        number, [r.window_max for r in rounds], ":", color="#009E73", label="window, maximum"
    )
    if not found.negotiation_missing:
        delays = [math.nan if r.negotiation_max is None else r.negotiation_max for r in rounds]
        times.plot(number, delays, "-.", color="#D55E00", label="negotiation delay, maximum")
    times.set(xlabel="round", ylabel="seconds", title="Time in each round", ylim=(0, None))
    order = sorted(found.tensors, key=lambda t: -(t.bytes or 0))[:400]
    place = range(len(order))
    for label, marker, colour, field in (
        ("reaction", "o", "#D55E00", "reaction"),
        ("immutable, worst case", "v", "#0072B2", "immutable_worst"),
        ("immutable, best case", "^", "#56B4E9", "immutable_best"),
    ):
        values = [getattr(t, field) for t in order]
        known = [math.nan if v is None or math.isinf(v) or v <= 0 else v / 1e6 for v in values]
        rates.plot(place, known, marker, markersize=4, color=colour, label=label)
        if any(not math.isnan(v) for v in known):
            rates.set_yscale("log")
    rates.set(
        xlabel="tensors, largest first", ylabel="MB/s", title="Bandwidth that delays no round"
    )
    for axis in (times, rates):
        axis.spines[["top", "right"]].set_visible(False)
        if axis.has_data():
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return drawn


def page(found: Analysis) -> str:
    """One self-contained HTML page."""
    notes = "".join(f"<li>{html.escape(n)}</li>" for n in found.notes)
    ranks = [(str(r.rank), seconds(r.average), seconds(r.max)) for r in found.ranks]
    per_round = [
        (
            str(r.round),
            seconds(r.seconds),
            seconds(r.feed_forward),
            seconds(r.negotiation_max),
            seconds(r.window_average),
            seconds(r.window_max),
        )
        for r in found.rounds[:1000]
    ]
    delays = (
        f"<p>{html.escape(found.negotiation_missing)}</p>"
        if found.negotiation_missing
        else table(("rank", "average", "maximum"), ranks)
    )
    body = f"""<h1>nostall: a training's timeline</h1>
<p class="key">{html.escape(_summary(found))}</p>
{"".join(f"<p>{html.escape(line)}</p>" for line in device_words(found))}
{svg(figure(found), "Times in each round; bandwidths by tensor")}
<h2>Times</h2>{table(("time", "average", "maximum"), timing_rows(found))}
<h2>Bandwidths over tensors</h2>
{table(("bandwidth", "p50", "p90", "p99", "maximum"), bandwidth_rows(found))}
<h2>Negotiation delay by rank</h2>{delays}
<h2>Tensors</h2>{table(TENSOR_HEADINGS, tensor_rows(found))}
<h2>Rounds</h2>{
        table(
            ("round", "length", "feed-forward", "delay, max", "window, average", "window, max"),
            per_round,
        )
    }
<h2>Notes</h2><ul>{notes or "<li>nothing was left out</li>"}</ul>
"""
    return document("nostall: timeline", body)


def _summary(found: Analysis) -> str:
    if not found.rounds or found.feed_forward is None:
        return "There is no complete round after the first."
    length = sum(r.seconds for r in found.rounds) / len(found.rounds)
    share = found.feed_forward / length if length else 0.0
    words = (
        f"{len(found.rounds)} rounds of {seconds(length)} on average. In {share:.0%} of it no rank "
        f"needs another: storage and network idle for {seconds(found.feed_forward)} per round."
    )
    if found.negotiation_average is not None and length:
        words += (
            f" Ranks then wait {seconds(found.negotiation_average)} per round for others "
            f"({found.negotiation_average / length:.0%})."
        )
    return words


def save(found: Analysis, path: str) -> None:
    """Writes the analysis in the format that the file's suffix names.

    Raises:
        UsageError: the suffix names no format.
        IoError: the file cannot be written.
    """
    kind = Path(path).suffix.lower()
    if kind not in SUFFIXES:
        raise UsageError(f"cannot write {path}: its name must end with {', '.join(SUFFIXES)}")
    try:
        if kind in (".svg", ".png", ".pdf"):
            from matplotlib import pyplot

            drawn = figure(found)
            drawn.savefig(path, dpi=150)
            pyplot.close(drawn)
            return
        content = {
            ".json": lambda: json.dumps(found.to_dict(), indent=1) + "\n",
            ".csv": lambda: as_csv(found),
            ".html": lambda: page(found),
        }[kind]()
        Path(path).write_text(content)
    except OSError as error:
        raise IoError(
            f"cannot write the report to {path}: {error.strerror}; pass another file with -o"
        ) from error
