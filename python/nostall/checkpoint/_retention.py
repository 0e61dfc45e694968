"""Which checkpoints stay: of each branch the last ones, every nth, the best ones. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from nostall.checkpoint._format import Manifest
from nostall.checkpoint._lineage import Record, branches
from nostall.errors import UsageError


@dataclass(frozen=True)
class Keep:
    """The newest `last` stay, every step that `every` divides, and the `best` by metric.

    `best` counts checkpoints saved with a metric; `mode` says whether the least or the greatest is
    the best. The rule holds for each branch by itself. Of a superseded branch only the newest
    `superseded` stay (None: those that the rule keeps).
    """

    last: int = 5
    every: int | None = None
    best: int = 0
    mode: Literal["min", "max"] = "min"
    superseded: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best", "superseded"):
            value = getattr(self, name)
            if value is None and name in ("every", "superseded"):
                continue
            if type(value) is not int:
                raise UsageError(f"{name} of Keep is a whole number, not {value!r}")
        if self.last < 1:
            raise UsageError(f"keep at least the last checkpoint, not {self.last}")
        if self.every is not None and self.every < 1:
            raise UsageError(f"every {self.every} steps cannot be kept")
        if self.best < 0 or self.mode not in ("min", "max"):
            raise UsageError(f'best is a count and mode "min" or "max": {self.best}, {self.mode!r}')
        if self.superseded is not None and self.superseded < 0:
            raise UsageError(f"superseded is a count, not {self.superseded}")


def decide(
    found: Iterable[Manifest],
    keep: Keep,
    begin: Record | None = None,
    damaged: Collection[str] = (),
) -> dict[str, str]:
    """The ids of the saves that stay, each with the reason.

    `begin` is the newest begin of a branch, as for `branches`. Damaged checkpoints show branches,
    but do not count among those that are kept.
    """
    stay: dict[str, str] = {}
    current: set[str] = set()
    for i, line in enumerate(branches(found, begin)):
        chosen = _of_branch([m for m in line if m.id not in damaged], keep)
        if i == 0:
            current = {m.id for m in line}
        elif keep.superseded is not None:
            own = [m.id for m in line if m.id in chosen and m.id not in current]
            chosen = {id: chosen[id] for id in own[: keep.superseded]}
        for id, reason in chosen.items():
            stay.setdefault(id, reason if i == 0 else f"{reason} of a superseded branch")
    return stay


def _of_branch(line: Sequence[Manifest], keep: Keep) -> dict[str, str]:
    """The saves that stay of one branch, newest first; a step that was saved again counts once."""
    steps: dict[int, Manifest] = {}
    for manifest in line:
        steps.setdefault(manifest.step, manifest)
    saves = list(steps.values())
    stay = {m.id: "last" for m in saves[: keep.last]}
    if keep.every is not None:
        for m in saves:
            if m.step % keep.every == 0:
                stay.setdefault(m.id, f"every {keep.every}")
    if keep.best:
        sign = 1 if keep.mode == "min" else -1
        rated = [
            (sign * m.metric, -i, m.id)
            for i, m in enumerate(reversed(saves))
            if m.metric is not None and m.metric == m.metric
        ]
        for _, _, id in sorted(rated)[: keep.best]:
            stay.setdefault(id, "best")
    return stay
