"""Which checkpoints stay: the last ones, every nth, the best ones. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nostall.errors import UsageError


@dataclass(frozen=True)
class Keep:
    """The newest `last` stay, every step that `every` divides, and the `best` by metric.

    `best` counts checkpoints saved with a metric; `mode` says whether the least or the greatest is
    the best.
    """

    last: int = 5
    every: int | None = None
    best: int = 0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(f"keep at least the last checkpoint, not {self.last}")
        if self.every is not None and self.every < 1:
            raise UsageError(f"every {self.every} steps cannot be kept")
        if self.best < 0 or self.mode not in ("min", "max"):
            raise UsageError(f'best is a count and mode "min" or "max": {self.best}, {self.mode!r}')


def decide(found: Iterable[tuple[int, float | None]], keep: Keep) -> dict[int, str]:
    """Of (step, metric): the steps that stay, each with the reason."""
    steps = dict(found)
    stay = dict.fromkeys(sorted(steps)[-keep.last :], "last")
    if keep.every is not None:
        for step in steps:
            if step % keep.every == 0:
                stay.setdefault(step, f"every {keep.every}")
    if keep.best:
        sign = 1 if keep.mode == "min" else -1
        rated = [(sign * m, -step) for step, m in steps.items() if m is not None and m == m]
        for _, negative in sorted(rated)[: keep.best]:
            stay.setdefault(-negative, "best")
    return stay
