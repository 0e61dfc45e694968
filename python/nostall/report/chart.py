"""Charts as SVG text: columns over time, and bars. Colours are classes, so that the page's style
sheet sets them for light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 64, 12, 10, 34
_COLUMNS = 300


@dataclass(frozen=True)
class Axis:
    """Time in seconds from `begin` to `end`, in columns of equal width."""

    begin: float
    end: float
    columns: int

    @classmethod
    def over(cls, times: NDArray[np.float64], per_column: int = 1) -> Axis:
        """Spans all times; a column has about `per_column` entries or more."""
        begin = min(0.0, float(times.min())) if len(times) else 0.0
        end = float(times.max()) if len(times) else 1.0
        return cls(
            begin,
            end if end > begin else begin + 1.0,
            max(1, min(_COLUMNS, len(times) // per_column)),
        )

    def column(self, times: NDArray[np.float64]) -> NDArray[np.intp]:
        """The column of each time."""
        place = (times - self.begin) / (self.end - self.begin) * self.columns
        return np.clip(place.astype(np.intp), 0, self.columns - 1)

    def x(self, time: float) -> float:
        """Where a time lies, in pixels."""
        share = (time - self.begin) / (self.end - self.begin)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def columns(
    axis: Axis,
    series: Sequence[tuple[str, str, NDArray[np.float64]]],
    *,
    marks: Sequence[tuple[float, str]],
    unit: str,
    title: str,
    height: int = 190,
) -> str:
    """Stacked columns over time.

    Args:
        axis: the time axis.
        series: (name, CSS class, value of each column, shape (axis.columns,)), lowest first.
        marks: (time, label) of vertical lines: where epochs begin.
        unit: what the values count.
        title: read out by screen readers.
    """
    tops = np.cumsum([values for _, _, values in series], axis=0)
    highest, step = _scale(float(tops[-1].max()) if len(tops) else 0.0)
    plot = height - _TOP - _BOTTOM
    width = (_WIDTH - _LEFT - _RIGHT) / axis.columns
    parts = [_open(height, title)]
    for tick in np.arange(0.0, highest + step / 2, step):
        y = _TOP + plot * (1 - tick / highest)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="end">{tick:.4g}</text>')
    below = np.zeros(axis.columns)
    for (name, css, values), top in zip(series, tops, strict=True):
        bars = []
        for i in np.nonzero(values > 0)[0]:
            y = _TOP + plot * (1 - top[i] / highest)
            size = plot * (top[i] - below[i]) / highest
            x = _LEFT + i * width
            bars.append(f"M{x:.2f} {y:.2f}h{width:.2f}v{size:.2f}h{-width:.2f}z")
        parts.append(
            f'<path class="{css}" d="{"".join(bars)}"><title>{escape(name)}</title></path>'
        )
        below = top
    for time, label in marks:
        at = axis.x(time)
        parts.append(f'<path class="mark" d="M{at:.1f} {_TOP}V{_TOP + plot}"/>')
        parts.append(f'<text x="{at + 4:.1f}" y="{_TOP + 11}">{escape(label)}</text>')
    parts.append(_time_labels(axis, height))
    parts.append(
        f'<text class="middle" transform="translate(14 {_TOP + plot / 2:.0f}) rotate(-90)">'
        f"{escape(unit)}</text></svg>"
    )
    return "".join(parts)


def bars(rows: Sequence[tuple[str, str, float, str]], *, title: str) -> str:
    """Horizontal bars from zero: (name, CSS class, value, the value as text)."""
    height = 26 * len(rows) + 8
    highest = max((value for _, _, value, _ in rows), default=0.0) or 1.0
    left, room = 190, _WIDTH - 190 - 110
    parts = [_open(height, title)]
    for i, (name, css, value, text) in enumerate(rows):
        y, width = 4 + 26 * i, max(1.0, room * value / highest)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" class="end">{escape(name)}</text>')
        parts.append(f'<path class="{css}" d="M{left} {y}h{width:.1f}v20h{-width:.1f}z"/>')
        parts.append(f'<text x="{left + width + 6:.1f}" y="{y + 15}">{escape(text)}</text>')
    return "".join(parts) + "</svg>"


def _open(height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title, True)}">'
        f"<title>{escape(title)}</title>"
    )


def _time_labels(axis: Axis, height: int) -> str:
    span, step = _scale(axis.end - axis.begin)
    parts = []
    for tick in np.arange(axis.begin, axis.begin + span + step / 2, step):
        if tick <= axis.end:
            parts.append(
                f'<text x="{axis.x(float(tick)):.1f}" y="{height - 17}" class="middle">'
                f"{tick:.4g}</text>"
            )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return "".join(parts) + (
        f'<text x="{middle:.0f}" y="{height - 2}" class="middle">seconds since the start</text>'
    )


def _scale(highest: float) -> tuple[float, float]:
    """A round number not below `highest`, and the step between its four to seven ticks."""
    if highest <= 0:
        return 1.0, 0.5
    power = 10.0 ** np.floor(np.log10(highest / 6))
    step = next(power * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if power * m * 6 >= highest)
    return float(step * np.ceil(highest / step - 1e-9)), float(step)
