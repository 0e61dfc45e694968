"""What a loader offers to traces and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nostall.job._world import World
from nostall.observe._recorder import Recorder
from nostall.observe._stats import EpochStats, Stats


class Observed(Protocol):
    """A running loader."""

    @property
    def name(self) -> str:
        """Unique among the loaders of the process."""

    @property
    def world(self) -> World: ...

    @property
    def dataset(self) -> Any: ...

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and batch after the last batch handed out."""

    def settings(self) -> dict[str, Any]:
        """The loader's settings, as far as a report needs them."""

    def stats(self) -> Stats: ...

    def lasting_stats(self) -> Callable[[], Stats]:
        """A function for the statistics that does not hold the loader."""

    def totals(self) -> tuple[EpochStats, dict[str, int]]:
        """The sum over all epochs, and the bytes of memory by pool."""

    def on_batch(self, live: Callable[[Recorder, int, int, int], None]) -> None:
        """`live` is called after every batch: with the recorder, epoch, batch and queue length."""
