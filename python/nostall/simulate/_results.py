"""Results as text, JSON, CSV and one self-contained HTML page with plots."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nostall.errors import IoError
from nostall.simulate._plots import drawings
from nostall.simulate._run import Outcome
from nostall.simulate._scenario import Scenario
from nostall.simulate._sweep import Point, with_values
from nostall.simulate._tables import Curve

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em;
       color: #1d2733 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .25em .9em; text-align: right;
       border-bottom: 1px solid #dde3ea } th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto }
"""
_HEADINGS = (
    "policy",
    "mode",
    "run time, s",
    "ratio",
    "stall, s",
    "before, s",
    "source, GB",
    "local",
    "order",
)


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The table's cells, one row per outcome."""
    cells: list[tuple[str, ...]] = []
    for o in outcomes:
        if math.isnan(o.seconds):
            cells.append((o.title, o.mode, "N/A", "", "", "", "", "", o.order))
            continue
        cells.append(
            (
                o.title,
                o.mode,
                f"{o.seconds:.2f}",
                f"{o.ratio:.4f}",
                f"{o.stall_seconds:.2f}",
                f"{o.initial_seconds:.2f}",
                f"{o.source_mb / 1e3:.2f}",
                f"{o.local_share:.2f}",
                o.order,
            )
        )
    return cells


def _aligned(table: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def text(scenario: Scenario, outcomes: Sequence[Outcome], bound: float | None = None) -> str:
    """The table, how the ranking differs between the modes, and why policies cannot run."""
    e, t = scenario.environment, scenario.training
    lines = [
        f"{scenario.name}: {scenario.description}".rstrip(": "),
        f"S = {scenario.dataset.total / 1e3:.2f} GB in F = {len(scenario.dataset)} samples, "
        f"E = {t.E}, B = {t.B}, N = {e.N}, D = {e.local_capacity / 1e3:.1f} GB per node",
    ]
    if scenario.dataset.clipped:
        lines.append(f"{scenario.dataset.clipped} sizes were outside their bounds and were clipped")
    lines += ["", *_aligned([_HEADINGS, *rows(outcomes)], left=2)]
    lines += assumed(scenario, [{}])
    if bound is not None:
        lines.append(f"bound of policies that conserve bandwidth and keep the order: {bound:.2f} s")
    lines += _ranking(outcomes)
    for o in outcomes:
        if o.shuffle is not None and o.mode == outcomes[0].mode:
            lines.append(
                f"{o.title}: {o.shuffle.batches:.0%} of the global batches as planned, "
                f"{o.shuffle.coverage:.0%} of the data read, a sample meets "
                f"{o.shuffle.mobility:.0%} of the nodes that it would"
            )
    for title, why in dict.fromkeys((o.title, o.why) for o in outcomes if o.why):
        lines.append(f"{title}: N/A, {why}")
    return "\n".join(lines)


def assumed(scenario: Scenario, machines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the results take for granted of file systems that were measured with fewer nodes.

    `machines` has what is set for each, as `with_values` takes it.
    """
    most: dict[Curve, int] = {}
    for values in machines:
        e = with_values(scenario, values).environment
        most[e.t] = max(most.get(e.t, 0), e.N)
    return [
        f"t is known up to N = {known:g}: {nodes} nodes are taken to get no more from the file system, "
        f"{speed:g} MB/s together"
        for t, nodes in most.items()
        for known, speed in t[-1:]
        if known < nodes
    ]


def _ranking(outcomes: Sequence[Outcome]) -> list[str]:
    modes = list(dict.fromkeys(o.mode for o in outcomes))
    if len(modes) < 2:
        return []
    lines = []
    for mode in modes:
        ranked = sorted(
            (o for o in outcomes if o.mode == mode and not math.isnan(o.seconds)),
            key=lambda o: o.seconds,
        )
        lines.append(f"fastest first, {mode}: " + ", ".join(o.title for o in ranked))
    return lines


def to_json(scenario: Scenario, outcomes: Sequence[Outcome], points: Sequence[Point] = ()) -> str:
    """Everything, batches included."""
    data = {
        "format": 1,
        "name": scenario.name,
        "environment": asdict(scenario.environment),
        "dataset": {
            "samples": len(scenario.dataset),
            "megabytes": scenario.dataset.total,
            "clipped": scenario.dataset.clipped,
        },
        "training": asdict(scenario.training),
        "outcomes": [o.to_dict(batches=True) for o in outcomes],
        "points": [asdict(p) for p in points],
        "assumed": assumed(scenario, [p.values for p in points] or [{}]),
    }
    return json.dumps(_without_nan(data), indent=1)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return value


def to_csv(outcomes: Sequence[Outcome], points: Sequence[Point] = ()) -> str:
    """A row per outcome, or per point of a sweep."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if points:
        keys = list(dict.fromkeys(k for p in points for k in p.values))
        columns = list(points[0].seconds)
        writer.writerow([*keys, *columns, "lower bound", "read-once bound"])
        for p in points:
            writer.writerow(
                [
                    *(p.values.get(k, "") for k in keys),
                    *(p.seconds[c] for c in columns),
                    p.lower_bound,
                    p.read_once_bound,
                ]
            )
        return out.getvalue()
    origins = [name for o in outcomes for name, _ in o.staged]
    origins = list(dict.fromkeys(origins))
    writer.writerow(
        ["policy", "mode", "seconds", "ratio", "stall_seconds", "initial_seconds", "warm_seconds"]
        + [f"MB from {name}" for name in origins]
        + ["MB kept from source", "MB kept from other nodes", "order"]
    )
    for o in outcomes:
        staged = dict(o.staged)
        times = (o.seconds, o.ratio, o.stall_seconds, o.initial_seconds, o.warm_seconds)
        origin = (staged.get(name, "") for name in origins)
        kept = (o.kept_from_source, o.kept_from_nodes)
        writer.writerow([o.title, o.mode, *times, *origin, *kept, o.order])
    return out.getvalue()


def points_text(points: Sequence[Point]) -> str:
    """A row per point of a sweep: its variables, the seconds of each policy, the bounds."""
    if not points:
        return "no points"
    keys = list(dict.fromkeys(k for p in points for k in p.values))
    columns = list(points[0].seconds)
    table = [[*keys, *columns, "lower bound", "read-once bound"]]
    for p in points:
        row = [str(p.values.get(k, "")) for k in keys]
        row += ["N/A" if math.isnan(p.seconds[c]) else f"{p.seconds[c]:.1f}" for c in columns]
        table.append([*row, f"{p.lower_bound:.1f}", f"{p.read_once_bound:.1f}"])
    return "\n".join(_aligned(table, left=0))


def scaling_text(found: Mapping[int, Sequence[Outcome]]) -> str:
    """Seconds and speed-up of every policy by the number of nodes."""
    counts = list(found)
    table = [["policy", "mode", *(f"N = {n}" for n in counts), "speed-up"]]
    for i, first in enumerate(found[counts[0]]):
        times = [found[n][i].seconds for n in counts]
        row = [first.title, first.mode]
        row += ["N/A" if math.isnan(t) else f"{t:.2f}" for t in times]
        speedup = times[0] / times[-1]
        table.append([*row, "" if math.isnan(speedup) else f"{speedup:.2f}"])
    return "\n".join(_aligned(table, left=2))


def page(
    scenario: Scenario,
    outcomes: Sequence[Outcome],
    points: Sequence[Point] = (),
    bound: float | None = None,
) -> str:
    """The HTML text with all plots inside."""
    body = [f"<h1>{html.escape(scenario.name)}</h1>"]
    body.append(f"<p>{html.escape(scenario.description)}</p>")
    if outcomes:
        body.append(_html_table([_HEADINGS, *rows(outcomes)]))
        body.append(f"<pre>{html.escape(text(scenario, outcomes, bound))}</pre>")
    if points:
        lines = [points_text(points), *assumed(scenario, [p.values for p in points])]
        body.append(f"<pre>{html.escape(chr(10).join(lines))}</pre>")
    body += [f"<p>{drawing}</p>" for drawing in drawings(outcomes, points)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(scenario.name)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _html_table(table: Sequence[Sequence[str]]) -> str:
    lines = []
    for i, row in enumerate(table):
        tag = "th" if i == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>")
    return "<table>" + "".join(lines) + "</table>"


def write(path: str | os.PathLike[str], content: str) -> None:
    """Writes a file of results.

    Raises:
        IoError: it cannot be written.
    """
    try:
        Path(path).write_text(content)
    except OSError as error:
        raise IoError(f"cannot write {path}: {error.strerror}") from error
