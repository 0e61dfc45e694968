"""The five metrics of [Li 2019, sec. III], round by round; docs/guide/timeline.md defines them.

All times are int64 nanoseconds until they are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.observe.timelines._model import (
    Analysis,
    RankMetrics,
    RoundMetrics,
    Spread,
    TensorMetrics,
)

NO_TIME = np.iinfo(np.int64).min
# A delay is reported if it was measured in at least this share of the rounds.
MEASURED = 0.9
# Elements of a matrix of operations and ranks that are evaluated at a time.
_BLOCK = 1 << 22

Int = NDArray[np.int64]


@dataclass
class Operations:
    """The operations of one round, one row each.

    Shapes: [n] for columns, [n, ranks] for `ready`, with NO_TIME where nothing was recorded;
    `reduces` is False for operations that combine no gradients (a broadcast).
    """

    tensor: Int
    reduces: NDArray[np.bool_]
    negotiate: Int
    begin: Int
    end: Int
    bytes: Int
    ready: Int


def idle(ops: Operations, first: int, last: int) -> NDArray[np.float64]:
    """Nanoseconds of [first, last] in which each rank is in no negotiation and in no reduction.

    A rank is in a negotiation from its start until the rank has reported, in a reduction from start
    to end. NaN for ranks without a report in one of the negotiations.
    """
    ranks = ops.ready.shape[1]
    out = np.full(ranks, np.nan)
    if not len(ops.tensor) or not ranks or np.any(ops.negotiate == NO_TIME):
        return out
    starts = np.concatenate([ops.negotiate, ops.begin])
    order = np.argsort(starts, kind="stable")
    starts = np.clip(starts[order], first, last)
    block = max(1, _BLOCK // len(starts))
    for low in range(0, ranks, block):
        ready = ops.ready[:, low : low + block]
        complete = np.all(ready != NO_TIME, axis=0)
        ends = np.concatenate([ready, np.broadcast_to(ops.end[:, None], ready.shape)])[order]
        busy_until = np.maximum.accumulate(np.clip(ends, first, last), axis=0)
        gaps = np.maximum(0, starts[1:, None] - busy_until[:-1]).sum(axis=0)
        total = (starts[0] - first) + gaps + (last - busy_until[-1])
        out[low : low + block][complete] = total[complete]
    return out


class Metrics:
    """Takes rounds in order and keeps sums: memory grows by one entry per round, tensor and rank."""

    def __init__(self, ranks: int = 0) -> None:
        self._windows = np.zeros(0)
        self._until_reduced = np.zeros(0)
        self._counts = np.zeros(0, np.int64)
        self._bytes = np.zeros(0, np.int64)
        self._rank_sum = np.zeros(ranks)
        self._rank_max = np.zeros(ranks)
        self._rank_rounds = np.zeros(ranks, np.int64)
        self._rounds: list[RoundMetrics] = []
        self.backwards = 0
        self.overlapping = 0
        self.unnegotiated = 0

    def _grow(self, tensors: int, ranks: int) -> None:
        if tensors > len(self._counts):
            more = max(tensors, 2 * len(self._counts)) - len(self._counts)
            self._windows = np.pad(self._windows, (0, more))
            self._until_reduced = np.pad(self._until_reduced, (0, more))
            self._counts = np.pad(self._counts, (0, more))
            self._bytes = np.pad(self._bytes, (0, more), constant_values=-1)
        if ranks > len(self._rank_sum):
            more = ranks - len(self._rank_sum)
            self._rank_sum = np.pad(self._rank_sum, (0, more))
            self._rank_max = np.pad(self._rank_max, (0, more))
            self._rank_rounds = np.pad(self._rank_rounds, (0, more))

    def add(self, number: int, start: int, next_start: int, ops: Operations) -> None:
        """Counts the round [start, next_start)."""
        if next_start < start:
            self.backwards += 1
            return
        reduced = ops.reduces
        tensors = ops.tensor[reduced]
        self._grow(int(tensors.max()) + 1 if len(tensors) else 0, ops.ready.shape[1])
        begun = np.where(ops.negotiate == NO_TIME, ops.begin, ops.negotiate)
        first = int(begun.min())
        if np.all(ops.negotiate[begun == first] == NO_TIME):
            self.unnegotiated += 1
        if first < start:
            self.overlapping += 1
            first = start
        window = np.maximum(0, next_start - ops.end[reduced])
        np.add.at(self._windows, tensors, window)
        np.add.at(self._until_reduced, tensors, np.maximum(0, ops.end[reduced] - start))
        np.add.at(self._counts, tensors, 1)
        np.maximum.at(self._bytes, tensors, ops.bytes[reduced])
        delays = idle(ops, first, max(first, next_start))
        known = ~np.isnan(delays)
        measured = bool(known.any())
        self._rank_sum[: len(delays)][known] += delays[known]
        np.maximum.at(self._rank_max, np.flatnonzero(known), delays[known])
        self._rank_rounds[: len(delays)] += known
        self._rounds.append(
            RoundMetrics(
                round=number,
                start=start / 1e9,
                seconds=(next_start - start) / 1e9,
                feed_forward=(first - start) / 1e9,
                negotiation_average=float(delays[known].mean()) / 1e9 if measured else None,
                negotiation_max=float(delays[known].max()) / 1e9 if measured else None,
                window_average=float(window.mean()) / 1e9 if len(window) else 0.0,
                window_max=float(window.max()) / 1e9 if len(window) else 0.0,
            )
        )

    @property
    def rounds(self) -> int:
        """Rounds counted."""
        return len(self._rounds)

    def result(
        self,
        files: Sequence[str],
        dialect: str,
        names: Sequence[str],
        ranks: Sequence[int],
        missing: str,
        notes: Sequence[str],
    ) -> Analysis:
        """The analysis: `names` and `ranks` belong to the columns, `missing` is the sentence for
        negotiation delays that the files do not hold."""
        self._grow(0, len(ranks))
        tensors = [self._tensor(i, names[i]) for i in np.flatnonzero(self._counts).tolist()]
        total = len(self._rounds)
        per_rank = [
            RankMetrics(
                rank,
                float(self._rank_sum[i] / self._rank_rounds[i]) / 1e9,
                float(self._rank_max[i]) / 1e9,
                int(self._rank_rounds[i]),
            )
            for i, rank in enumerate(ranks)
            if self._rank_rounds[i] and self._rank_rounds[i] >= MEASURED * total
        ]
        said = list(notes)
        lacking = len(ranks) - len(per_rank)
        if per_rank and lacking:
            said.append(f"{lacking} of {len(ranks)} ranks have no complete record of their waits")
        if self.backwards:
            said.append(f"{self.backwards} rounds are left out: the clock went back in them")
        if self.overlapping:
            said.append(
                f"{self.overlapping} rounds begin before the last reduction of the round before has "
                "ended; their feed-forward counts as zero"
            )
        if self.unnegotiated:
            said.append(
                f"{self.unnegotiated} rounds begin with a reduction whose negotiation is not in the "
                "file; their feed-forward is counted to that reduction, so it is an upper bound"
            )
        rows = self._rounds
        if not per_rank:
            rows = [_without_delays(r) for r in rows]
        windows = [t.window for t in tensors]
        reaction = [t.reaction for t in tensors if t.reaction is not None]
        return Analysis(
            files=list(files),
            dialect=dialect,
            rounds=rows,
            tensors=tensors,
            ranks=sorted(per_rank, key=lambda r: r.rank),
            feed_forward=float(np.mean([r.feed_forward for r in rows])) if rows else None,
            feed_forward_at_most=self.unnegotiated > 0,
            negotiation_average=(
                float(
                    np.average([r.average for r in per_rank], weights=[r.rounds for r in per_rank])
                )
                if per_rank
                else None
            ),
            negotiation_max=max((r.max for r in per_rank), default=None),
            negotiation_missing=None if per_rank else missing,
            window_average=float(np.mean(windows)) if windows else None,
            window_max=max(windows, default=None),
            reaction=Spread.of(reaction),
            immutable_worst=_spread([t.immutable_worst for t in tensors]),
            immutable_best=_spread([t.immutable_best for t in tensors]),
            immutable_average=_spread([t.immutable_average for t in tensors]),
            unbounded=sum(r == float("inf") for r in reaction),
            notes=said,
        )

    def _tensor(self, index: int, name: str) -> TensorMetrics:
        rounds = int(self._counts[index])
        size = int(self._bytes[index])
        window = float(self._windows[index]) / rounds / 1e9
        worst = float(self._until_reduced[index]) / rounds / 1e9
        best = worst + window

        def over(seconds: float) -> float | None:
            if size < 0:
                return None
            if seconds <= 0:
                return float("inf") if size else 0.0
            return size / seconds

        return TensorMetrics(
            name=name,
            bytes=size if size >= 0 else None,
            rounds=rounds,
            window=window,
            reaction=over(window),
            immutable_worst=over(worst),
            immutable_best=over(best),
            immutable_average=over((worst + best) / 2),
        )


def _without_delays(row: RoundMetrics) -> RoundMetrics:
    return RoundMetrics(
        row.round,
        row.start,
        row.seconds,
        row.feed_forward,
        None,
        None,
        row.window_average,
        row.window_max,
    )


def _spread(values: Sequence[float | None]) -> Spread | None:
    return Spread.of([v for v in values if v is not None])
