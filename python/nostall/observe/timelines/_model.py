"""The result of analysing a timeline: five metrics, and which of them were not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

FORMAT = 2


@dataclass(frozen=True)
class Spread:
    """Nearest-rank percentiles of one quantity over tensors; `inf` counts as the largest value."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """The spread of `values`, None for none."""
        known = [v for v in values if not math.isnan(v)]
        if not known:
            return None
        p50, p90, p99, top = np.percentile(known, [50, 90, 99, 100], method="inverted_cdf")
        return cls(float(p50), float(p90), float(p99), float(top))


@dataclass(frozen=True)
class TensorMetrics:
    """One tensor (or bucket), averaged over the rounds that reduce it.

    Seconds and bytes per second; None where the file does not say how large the tensor is, `inf`
    for a bandwidth over a window of no length.
    """

    name: str
    bytes: int | None
    rounds: int
    window: float
    reaction: float | None
    immutable_worst: float | None
    immutable_best: float | None
    immutable_average: float | None


@dataclass(frozen=True)
class RoundMetrics:
    """One round: its start on the file's clock and its length, in seconds; None: not measured."""

    round: int
    start: float
    seconds: float
    feed_forward: float
    negotiation_average: float | None
    negotiation_max: float | None
    window_average: float
    window_max: float


@dataclass(frozen=True)
class RankMetrics:
    """Negotiation delay of one rank, in seconds per round."""

    rank: int
    average: float
    max: float
    rounds: int


@dataclass(frozen=True)
class DeviceMetrics:
    """What a rank's device waited for, as in `Stats.device`; `stream` is the one that computes."""

    rank: int
    device: int
    stream: int
    waits: dict[str, float]


@dataclass(frozen=True)
class Analysis:
    """The five metrics of a training's timeline (docs/guide/timeline.md), times in seconds.

    `feed_forward_at_most`: the file records no negotiations in some rounds, so feed-forward is
    counted to the first reduction there. `negotiation_missing` says why there are no negotiation
    delays; then `ranks` is empty and the two numbers are None. `devices` are those whose kernels a
    profiler's trace holds. `notes` are sentences about what was
    damaged, left out, or assumed.
    """

    files: list[str]
    dialect: str
    rounds: list[RoundMetrics]
    tensors: list[TensorMetrics]
    ranks: list[RankMetrics]
    feed_forward: float | None
    feed_forward_at_most: bool
    negotiation_average: float | None
    negotiation_max: float | None
    negotiation_missing: str | None
    window_average: float | None
    window_max: float | None
    reaction: Spread | None
    immutable_worst: Spread | None
    immutable_best: Spread | None
    immutable_average: Spread | None
    unbounded: int
    notes: list[str] = field(default_factory=list)
    devices: list[DeviceMetrics] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is infinite there is the string "unbounded"."""
        out: dict[str, Any] = _plain({"format": FORMAT, "kind": "timeline", **asdict(self)})
        return out


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and math.isinf(value):
        return "unbounded"
    return value
