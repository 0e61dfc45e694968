"""Drawings of a report as inline SVG, which a browser scales, colours light or dark, and prints.

A drawing is 1000 units wide, but for a bar, which is as wide as the page. Its colours are the classes
of the page's style (`_parts.STYLE`), so that they follow the reader's theme. What a mark shows is its
title, for pointers and screen readers.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 1000.0
_LEFT = 132.0  # of names of lanes and numbers of an axis
_RIGHT = 8.0
_INSIDE = WIDTH - _LEFT - _RIGHT


class Part(NamedTuple):
    """Something of a whole: its class of colour, its name, how much it is."""

    colour: str
    name: str
    amount: float


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def mark(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """A rectangle."""
    return (
        f'<rect class="{colour}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{html.escape(text)}</text>'


def drawing(label: str, height: float, content: str) -> str:
    """The whole drawing; `label` is read out in its place."""
    return (
        f'<figure class="wide"><svg role="img" aria-label="{html.escape(label, quote=True)}" '
        f'viewBox="0 0 {_n(WIDTH)} {_n(height)}">{content}</svg></figure>'
    )


def legend(parts: Sequence[tuple[str, str]]) -> str:
    """Names of colours, as HTML."""
    return '<p class="legend">' + " ".join(
        f'<span><i class="{colour}"></i>{html.escape(name)}</span>' for colour, name in parts
    ) + "</p>"  # fmt: skip


def bar(parts: Sequence[Part], label: str, height: float = 34.0) -> str:
    """One bar whose whole width is the sum of its parts: all of it is seen on a phone too."""
    whole = sum(p.amount for p in parts) or 1.0
    x, out = 0.0, []
    for p in parts:
        width = 100 * p.amount / whole
        share = f"{width:.1f} %"
        out.append(
            f'<rect class="{p.colour}" x="{_n(x)}%" width="{_n(width)}%" height="{_n(height)}">'
            f"<title>{html.escape(p.name)}: {share}</title></rect>"
        )
        if width > 15:  # of a phone's width as well
            out.append(
                f'<text class="on {p.colour}" x="{_n(x + width / 2)}%" y="{_n(height / 2 + 5)}" '
                f'text-anchor="middle">{share}</text>'
            )
        x += width
    return (
        f'<figure class="bar"><svg role="img" aria-label="{html.escape(label, quote=True)}" '
        f'style="height: {_n(height)}px">{"".join(out)}</svg></figure>'
    )


def ticks(most: float, count: int = 6) -> list[float]:
    """Round numbers from 0 to at most `most`."""
    if not most > 0 or not math.isfinite(most):
        return [0.0]
    raw = most / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= raw * 0.999)
    return [i * step for i in range(int(most / step * 1.000001) + 1)]


def _time_axis(seconds: float, y: float) -> str:
    out = []
    for t in ticks(seconds, 8):
        x = _LEFT + _INSIDE * t / max(seconds, 1e-9)
        anchor = "end" if x > WIDTH - 30 else "middle"
        out.append(f'<line class="grid" x1="{_n(x)}" x2="{_n(x)}" y1="0" y2="{_n(y)}"/>')
        out.append(_text(x, y + 16, f"{t:g} s", anchor))
    return "".join(out)


def _cut(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "\N{HORIZONTAL ELLIPSIS}"


def stacks(
    label: str,
    lanes: Sequence[tuple[str, Sequence[Sequence[Part]]]],
    seconds: float,
    height: float = 26.0,
) -> str:
    """Lanes over time; each slot of a lane is a column whose parts are shares of 1."""
    out = [_time_axis(seconds, len(lanes) * (height + 6))]
    for line, (name, slots) in enumerate(lanes):
        top = line * (height + 6)
        out.append(_text(_LEFT - 8, top + height / 2 + 5, _cut(name), "end"))
        width = _INSIDE / max(1, len(slots))
        for i, parts in enumerate(slots):
            y = top + height
            begin = seconds * i / max(1, len(slots))
            for p in parts:
                tall = height * min(1.0, p.amount)
                if tall > 0.05:
                    y -= tall
                    out.append(
                        mark(_LEFT + i * width, y, width + 0.4, tall, p.colour,
                             f"{name}, {begin:.1f} s: {p.name} {100 * p.amount:.0f} %")
                    )  # fmt: skip
    return drawing(label, len(lanes) * (height + 6) + 22, "".join(out))


def spans(
    label: str,
    lanes: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    seconds: float,
    height: float = 16.0,
) -> str:
    """Lanes over time of a name, a colour, and intervals."""
    out = [_time_axis(seconds, len(lanes) * (height + 6))]
    for line, (name, colour, intervals) in enumerate(lanes):
        top = line * (height + 6)
        out.append(_text(_LEFT - 8, top + height / 2 + 5, _cut(name), "end"))
        for begin, end in intervals:
            x = _LEFT + _INSIDE * begin / max(seconds, 1e-9)
            width = max(0.6, _INSIDE * (end - begin) / max(seconds, 1e-9))
            title = f"{name}: {begin:.3f} to {end:.3f} s"
            out.append(mark(x, top, width, height, colour, title))
    return drawing(label, len(lanes) * (height + 6) + 22, "".join(out))


class Line(NamedTuple):
    """A curve: its class of colour, its name, its points in seconds and in the axis' unit."""

    colour: str
    name: str
    points: Sequence[tuple[float, float]]


def lines(
    label: str,
    curves: Sequence[Line],
    seconds: float,
    unit: str,
    marks: Sequence[tuple[float, str]] = (),
    axis: str = "s",
    height: float = 150.0,
) -> str:
    """Curves over time (or over rounds, with another `axis`) from 0 up; `marks` are moments."""
    top = 18.0 if marks else 6.0
    most = max((y for c in curves for _, y in c.points), default=0.0)
    steps = ticks(most, 4)
    if len(steps) > 1 and most > steps[-1]:
        steps.append(steps[-1] + steps[1])
    most = steps[-1] or 1.0
    out = []
    for value in steps:
        y = top + height * (1 - value / most)
        out.append(
            f'<line class="grid" x1="{_n(_LEFT)}" x2="{_n(WIDTH)}" y1="{_n(y)}" y2="{_n(y)}"/>'
        )
        out.append(_text(_LEFT - 8, y + 4, f"{value:,g} {unit}", "end"))
    for t in ticks(seconds, 8):
        x = _LEFT + _INSIDE * t / max(seconds, 1e-9)
        anchor = "end" if x > WIDTH - 30 else "middle"
        out.append(_text(x, top + height + 18, f"{t:g} {axis}", anchor))
    free = 0.0  # where the last name ends
    for moment, name in marks:
        x = _LEFT + _INSIDE * min(1.0, moment / max(seconds, 1e-9))
        out.append(
            f'<line class="moment" x1="{_n(x)}" x2="{_n(x)}" y1="{_n(top)}" y2="{_n(top + height)}"/>'
        )
        if x >= free and x < WIDTH - 7.0 * len(name):
            out.append(_text(x, 12, name))
            free = x + 7.5 * len(name)
    for curve in curves:
        path = " ".join(
            f"{_n(_LEFT + _INSIDE * x / max(seconds, 1e-9))},{_n(top + height * (1 - y / most))}"
            for x, y in curve.points
        )
        out.append(
            f'<polyline class="line {curve.colour}" points="{path}">'
            f"<title>{html.escape(curve.name)}</title></polyline>"
        )
    return drawing(label, top + height + 24, "".join(out))
