"""Which checkpoints continue which: the order of saves, and branches. Pure functions but `Lineage`.

A sequence number orders all saves of a directory: a clock may jump, and a step may be saved again by
a training that went back. A manifest lists the sequence numbers that were given up on the way to it
(`abandoned`); all else of a lower number is its own past. So a branch is known from the newest of its
manifests alone, even if retention has removed others.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

# Closed ranges of sequence numbers, in order, apart from each other.
Ranges = tuple[tuple[int, int], ...]

# A job's first save takes the next multiple of it, which is noted when the job begins. So saves of an
# earlier job that this job does not see (on a node that is gone) come before its own.
STRIDE = 1 << 20
# Manifests of version 1 have no number: theirs are negative, by their step.
LEGACY = -(10**12)
# From this many ranges on, ranges are joined or dropped if possible.
_MOST_RANGES = 100
# The number of saves of a process that are remembered.
_MOST_KNOWN = 10_000
_WITHIN = 8  # saves that handlers of signals make within each other


class Record(Protocol):
    """A member of the order: a manifest, or the note of a branch's begin."""

    @property
    def sequence(self) -> int: ...
    @property
    def abandoned(self) -> Ranges: ...


class Saved(Record, Protocol):
    """A checkpoint, as far as its branch matters."""

    @property
    def id(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def order(self) -> tuple[int, float, str]: ...


S = TypeVar("S", bound=Saved)


def add(ranges: Ranges, first: int, last: int, known: Iterable[int] = ()) -> Ranges:
    """The ranges with the numbers from `first` to `last`.

    Too many ranges are reduced without a change for the saves `known`: ranges below all of these are
    dropped, then the oldest are joined if no save is between them.
    """
    if last < first:
        return ranges
    joined: list[tuple[int, int]] = []
    for begin, end in sorted([*ranges, (first, last)]):
        if joined and begin <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    if len(joined) <= _MOST_RANGES:
        return tuple(joined)
    numbers = sorted(known)
    if numbers:
        joined = [r for r in joined if r[1] >= numbers[0]]
    extra = len(joined) - _MOST_RANGES
    fewer: list[tuple[int, int]] = []
    for begin, end in joined:
        if extra > 0 and fewer:
            after = bisect.bisect_right(numbers, fewer[-1][1])
            if after == len(numbers) or numbers[after] >= begin:
                fewer[-1] = (fewer[-1][0], end)
                extra -= 1
                continue
        fewer.append((begin, end))
    return tuple(fewer)


def checked(values: object) -> Ranges:
    """Ranges from JSON; ValueError or TypeError for anything else."""
    ranges: list[tuple[int, int]] = []
    for first, last in values:  # type: ignore[attr-defined]
        if type(first) is not int or type(last) is not int or first > last:
            raise ValueError(f"{first!r} to {last!r} is not a range of sequence numbers")
        if ranges and first <= ranges[-1][1]:
            raise ValueError("ranges of sequence numbers overlap")
        ranges.append((first, last))
    return tuple(ranges)


def is_past(sequence: int, last: int, abandoned: Ranges) -> bool:
    """Whether a save is the one of number `last`, which gave up `abandoned`, or one before it."""
    return sequence <= last and not any(a <= sequence <= b for a, b in abandoned)


def branches(found: Iterable[S], begin: Record | None = None) -> list[list[S]]:
    """The saves of each branch, newest first; the current branch first. Branches share their past.

    `begin` is a branch without saves of its own yet; it counts where it is newer than all saves.
    """
    saves = sorted(found, key=lambda s: s.order, reverse=True)
    tips: list[Record] = []
    if begin is not None and (not saves or saves[0].sequence < begin.sequence):
        tips.append(begin)
    for save in saves:
        if not any(is_past(save.sequence, tip.sequence, tip.abandoned) for tip in tips):
            tips.append(save)
    return [[s for s in saves if is_past(s.sequence, t.sequence, t.abandoned)] for t in tips]


def newest(records: Iterable[Record | None]) -> Record | None:
    """The one with the highest number."""
    return max((r for r in records if r is not None), key=lambda r: r.sequence, default=None)


class Lineage:
    """The numbers of this process's saves, from `first`, and what they continue.

    Args:
        found: the checkpoints that are there.
        begin: the newest begin of a branch that is there.
        seen: the highest number that any rank of the job sees.
    """

    def __init__(self, found: Sequence[S], begin: Record | None, seen: int) -> None:
        top = newest([*found, begin])
        self._abandoned: Ranges = top.abandoned if top is not None else ()
        # All saves that are known, as (sequence, step), and those that the next save continues.
        self._known = deque(((s.sequence, s.step) for s in found), maxlen=_MOST_KNOWN)
        self._line = self._past(top.sequence) if top is not None else []
        # Of the last saves, which may be within each other: what undoes them.
        self._undone: deque[tuple[int, Ranges, list[tuple[int, int]]]] = deque(maxlen=_WITHIN)
        self._highest = seen
        self.first = self._next = (max(seen, 0) // STRIDE + 1) * STRIDE

    @property
    def newest(self) -> int:
        """The number of the newest save that the next one continues; -1: there is none."""
        return self._line[-1][0] if self._line else -1

    def _past(self, last: int) -> list[tuple[int, int]]:
        """The saves that number `last`, a save or a branch's begin, continues, by rising step."""
        line: list[tuple[int, int]] = []
        for number, step in sorted(self._known):
            if is_past(number, last, self._abandoned):
                while line and line[-1][1] >= step:
                    line.pop()
                line.append((number, step))
        return line

    def _drop(self, step: int) -> list[tuple[int, int]]:
        """Removes the saves from `step` on from the current line."""
        keep = len(self._line)
        while keep and self._line[keep - 1][1] >= step:
            keep -= 1
        dropped, self._line = self._line[keep:], self._line[:keep]
        return dropped

    def _take(self) -> int:
        number, self._next = self._next, self._next + 1
        self._highest = number
        return number

    def _give_up(self, ranges: Ranges, first: int) -> Ranges:
        return add(ranges, first, self._highest, (number for number, _ in self._known))

    def save(self, step: int) -> tuple[int, Ranges]:
        """The number of a save, and the numbers that it does not continue.

        A step below the newest one begins a branch; the newest step again replaces it.
        """
        before, dropped = self._abandoned, self._drop(step)
        if dropped and dropped[-1][1] > step:
            self._abandoned = self._give_up(self._abandoned, dropped[0][0])
        number = self._take()
        self._line.append((number, step))
        self._known.append((number, step))
        self._undone.append((number, before, dropped))
        return number, self._abandoned

    def take_back(self, number: int) -> None:
        """Lets a save not have been, if it is the last one that is left; its number stays taken."""
        if self._undone and self._undone[-1][0] == number:
            _, self._abandoned, dropped = self._undone.pop()
            self._known.pop()
            self._line.pop()
            self._line += dropped

    def restored(self, saved: Saved) -> bool:
        """Lets the next save continue this one; returns whether that gives up any other save."""
        self._undone.clear()
        behind = not self._line or self._line[-1][0] != saved.sequence
        self._abandoned = self._give_up(saved.abandoned, saved.sequence + 1)
        self._line = self._past(saved.sequence)
        return behind

    def begin(self) -> tuple[int, Ranges]:
        """The number of the begin of a branch after `restored`, and what it gives up."""
        abandoned = self._abandoned
        return self._take(), abandoned
