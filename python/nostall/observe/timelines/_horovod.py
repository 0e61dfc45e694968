"""Horovod timelines of all three dialects, streamed through the native scanner."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.observe.timelines._metrics import NO_TIME, Metrics, Operations
from nostall.observe.timelines._model import Analysis
from nostall.observe.timelines._stream import Source, damage_notes

NO_TICKS = (
    "not available: the file has no ready ticks of the ranks in every round (the response cache of "
    "Horovod 0.16.2 and later leaves them out); trace with HOROVOD_CACHE_CAPACITY=0"
)
_MOST_RANKS = 1 << 16
# A reduction that is not a gradient's is of a few numbers: a loss, an accuracy, a small table.
_MOST_METRIC_BYTES = 4096

Rows = dict[str, Any]


class _Rounds:
    """Collects rows by round, and evaluates each round once no more rows of it can follow."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.ranks: dict[int, int] = {}
        self.late = 0
        self.invalid = 0
        self._waiting: dict[int, list[Rows]] = {}
        self._carried: list[
            Rows
        ] = []  # operations without a reduction that began after their round
        self._next = 0
        self._start = NO_TIME
        self._always: set[int] | None = None  # reduced in every round so far
        self.dropped_last = False
        self._number = 0  # of rounds with reductions
        self._times: Counter[int] = Counter()  # rounds that reduce a tensor
        self._amid: set[int] = (
            set()
        )  # reduced, in some round, before those of every round had ended
        self._bytes: dict[int, int] = {}  # the largest, of tensors that are not in every round

    def add(self, taken: Rows) -> None:
        if not len(taken["tensor"]):
            return
        rounds = taken["round"]
        round_of_tick = np.repeat(rounds, taken["ticks"])
        for number in np.unique(rounds):
            rows = np.flatnonzero(rounds == number)
            if number < self._next:
                self.late += len(rows)
                continue
            part: Rows = {k: v[rows] for k, v in taken.items() if not k.startswith("tick_")}
            chosen = round_of_tick == number
            part["tick_rank"] = taken["tick_rank"][chosen]
            part["tick_time"] = taken["tick_time"][chosen]
            self._waiting.setdefault(int(number), []).append(part)

    def close(self, below: int) -> None:
        """Evaluates the rounds below `below`."""
        for number in sorted(n for n in self._waiting if n < below):
            self._evaluate(number, last=False)

    def finish(self) -> None:
        numbers = sorted(self._waiting)
        for number in numbers:
            self._evaluate(number, last=number == numbers[-1])

    def _evaluate(self, number: int, last: bool) -> None:
        parts = [*self._carried, *self._waiting.pop(number)]
        self._next = number + 1
        ops = self._operations(parts)
        reduced = ops.reduces
        if not reduced.any():
            self._carried = []
            return
        tensors = set(ops.tensor[reduced].tolist())
        end = int(ops.end[reduced].max())
        begun = np.where(ops.negotiate == NO_TIME, ops.begin, ops.negotiate)
        later = ~reduced & (begun >= end)
        self._carried = [self._rows(ops, later)] if later.any() else []
        start, self._start = self._start, end
        always = self._always
        self._always = tensors if always is None else always & tensors
        self._note_rare(ops, tensors, begun)
        if start == NO_TIME or always is None:
            return  # the first round is warm-up, and its start is not in the file
        if last and not always <= tensors:
            self.dropped_last = True
            return
        self.metrics.add(number, start, end, _only(ops, ~later))

    def _note_rare(self, ops: Operations, tensors: set[int], begun: Any) -> None:
        self._number += 1
        self._times.update(tensors)
        if self._always is None or tensors <= self._always:
            return
        common = ops.reduces & np.isin(ops.tensor, list(self._always))
        done = int(ops.end[common].max()) if common.any() else None
        for row in np.flatnonzero(ops.reduces & ~common):
            tensor = int(ops.tensor[row])
            if done is None or begun[row] < done:
                self._amid.add(tensor)
            self._bytes[tensor] = max(self._bytes.get(tensor, -1), int(ops.bytes[row]))

    def metrics_reduced(self) -> set[int]:
        """Tensors that are small, that less than half of the rounds reduce, and these after all that
        every round reduces: a loss that is averaged once an epoch."""
        return {
            tensor
            for tensor, size in self._bytes.items()
            if 2 * self._times[tensor] < self._number
            and tensor not in self._amid
            and size <= _MOST_METRIC_BYTES
        }

    def _rows(self, ops: Operations, chosen: Any) -> Rows:
        ranks = np.array(list(self.ranks), np.int64)
        ready = ops.ready[chosen]
        present = ready != NO_TIME
        which = np.broadcast_to(ranks[: ready.shape[1]], ready.shape)
        return {
            "tensor": ops.tensor[chosen],
            "reduces": ops.reduces[chosen],
            "ticks": present.sum(axis=1),
            "negotiate_begin": ops.negotiate[chosen],
            "reduce_begin": ops.begin[chosen],
            "reduce_end": ops.end[chosen],
            "bytes": ops.bytes[chosen],
            "tick_rank": which[present],
            "tick_time": ready[present],
        }

    def _operations(self, parts: Sequence[Rows]) -> Operations:
        def column(name: str) -> Any:
            return np.concatenate([p[name] for p in parts])

        rank = column("tick_rank")
        for value in np.unique(rank):
            if len(self.ranks) < _MOST_RANKS:
                self.ranks.setdefault(int(value), len(self.ranks))
        begin, end = column("reduce_begin"), column("reduce_end")
        ready = np.full((len(begin), len(self.ranks)), NO_TIME, np.int64)
        if len(rank):
            places = np.array([self.ranks.get(int(r), -1) for r in range(int(rank.max()) + 1)])
            row = np.repeat(np.arange(len(begin)), column("ticks"))
            known = places[rank] >= 0
            ready[row[known], places[rank[known]]] = column("tick_time")[known]
        negotiate = np.minimum(column("negotiate_begin"), begin)
        ops = Operations(
            tensor=column("tensor").astype(np.int64),
            reduces=column("reduces").astype(bool),
            negotiate=negotiate,
            begin=begin,
            end=end,
            bytes=column("bytes"),
            ready=ready,
        )
        valid = end >= begin
        if valid.all():
            return ops
        self.invalid += int((~valid).sum())
        return _only(ops, valid)


def _only(ops: Operations, chosen: Any) -> Operations:
    return Operations(
        ops.tensor[chosen],
        ops.reduces[chosen],
        ops.negotiate[chosen],
        ops.begin[chosen],
        ops.end[chosen],
        ops.bytes[chosen],
        ops.ready[chosen],
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


def _scan(source: Source, is_left_out: Callable[[int, str], bool] | None) -> tuple[Any, _Rounds]:
    """The scanner at the file's end, and the rounds without tensors of these numbers and names."""
    scanner = _native.HorovodTimeline()
    rounds = _Rounds()

    def take() -> None:
        rows = scanner.take()
        if is_left_out is not None:
            named = enumerate(scanner.tensors)
            counted = np.array([not is_left_out(number, name) for number, name in named], bool)
            rows["reduces"] &= counted[rows["tensor"]]
        rounds.add(rows)

    for chunk in source.chunks():
        scanner.feed(chunk)
        take()
        rounds.close(scanner.closed_rounds)
    scanner.finish()
    take()
    rounds.finish()
    return scanner, rounds


def analyze(source: Source, exclude: Sequence[str] | None = None) -> Analysis:
    """The metrics of one Horovod timeline.

    Tensors whose names match a pattern of `exclude` do not count as gradients. If it is None those do
    not that few rounds reduce, after all others; the file is read twice then.

    Raises:
        CorruptionError: the file holds no finished reduction.
        UsageError: `exclude` leaves no tensor.
    """
    name = source.path
    patterns = exclude or ()
    scanner, rounds = _scan(
        source, (lambda _, tensor: _matches(tensor, patterns)) if patterns else None
    )
    rare = rounds.metrics_reduced() if exclude is None else set()
    if rare:
        scanner, rounds = _scan(source, lambda number, _: number in rare)
    report = scanner.report
    if patterns and scanner.tensors and all(_matches(t, patterns) for t in scanner.tensors):
        raise UsageError(
            f"--exclude {' '.join(patterns)} leaves no tensor of {name}: give other patterns"
        )
    if not report["events"] or rounds._start == NO_TIME:
        raise CorruptionError(
            f"{name} holds no finished reduction among {report['events']} events in "
            f"{report['bytes']} bytes: is it a Horovod timeline (HOROVOD_TIMELINE)?"
        )
    notes = [*source.notes(), *damage_notes(name, report)]
    if rare:
        shown = sorted(scanner.tensors[number] for number in rare)
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        notes.append(
            f"{name}: {', '.join(shown[:5])}{more} {'are' if len(shown) > 1 else 'is'} taken for no "
            "gradient: small, in less than half of the rounds, and after all others; --exclude '' "
            "counts every tensor"
        )
    if report["abandoned"]:
        notes.append(
            f"{name}: {report['abandoned']} operations do not end and are left out, the first begins "
            f"at byte {report['first_abandoned']}"
        )
    if report["untimed"]:
        notes.append(
            f"{name}: {report['untimed']} events have no usable time, the first at byte "
            f"{report['first_untimed']}"
        )
    if report["jumps"]:
        notes.append(
            f"{name}: the clock goes back by more than a second {report['jumps']} times, first at "
            f"byte {report['first_jump']}"
        )
    if rounds.late:
        notes.append(f"{name}: {rounds.late} operations ended two rounds late and are left out")
    if rounds.invalid:
        notes.append(f"{name}: {rounds.invalid} reductions end before they begin and are left out")
    if rounds.dropped_last:
        notes.append(f"{name}: the last round is incomplete and left out")
    if not rounds.metrics.rounds:
        notes.append(
            f"{name}: there is no complete round after the first, which is warm-up: train longer"
        )
    dialect = "closed array" if report["closed"] else "open array"
    return rounds.metrics.result(
        [name],
        f"Horovod timeline, {dialect}",
        scanner.tensors,
        list(rounds.ranks),
        NO_TICKS,
        notes,
    )
