"""What a campaign is asked and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """One run of a campaign: its seed and how much of it is run."""

    seed: int = 0
    # 1.0 is the size whose figures docs/guide/reliability.md shows.
    scale: float = 1.0

    def count(self, full: int, least: int = 1) -> int:
        """How many cases of `full` this task runs, at least `least`."""
        return max(least, round(full * self.scale))

    def patience(self, promised: float) -> float:
        """Seconds to wait for what is promised within `promised`: a minute more at small scales, which
        run beside other tests, on machines that do much else.
        """
        return promised if self.scale >= 1 else promised + 60


@dataclass
class Outcome:
    """The figure of a campaign: cases run, those that broke the promise, and other numbers."""

    cases: int = 0
    # One sentence for each case that failed, with what repeats it (seed, case).
    failures: list[str] = field(default_factory=list)
    figures: dict[str, float | int | str] = field(default_factory=dict)
    # The component whose absence kept the campaign from running; empty if it ran.
    missing: str = ""
