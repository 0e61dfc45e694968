"""Digests one rank's trace: its waits, what its threads did meanwhile, its phases.

Reads the files that `nostall.trace` writes, also those of a killed job.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.errors import UNREADABLE, CorruptionError
from nostall.observe.timelines._profiler import head_of
from nostall.observe.timelines._stream import (
    LATEST,
    Source,
    began,
    bounded,
    damage_notes,
    lasts,
    left_out,
)

Float = NDArray[np.float64]

# Name of an event of a fetch thread -> what a wait is for while it lasts.
FETCHING = {
    "read source": "source",
    "fetch from peers": "peer",
    "take from tiers": "tier",
    "read file tier": "tier",
    "wait for others": "others",
}
CAUSES = ("source", "peer", "tier", "others", "decode", "other")
_VALUES = ("samples", "bytes")
_MOST = 2.0**64  # of each


@dataclass
class Spans:
    """Columns of one kind of event: seconds since the trace's first event, and two of its values."""

    begin: Float
    end: Float
    samples: Float
    bytes: Float

    @property
    def seconds(self) -> float:
        """Summed over threads."""
        return float((self.end - self.begin).sum())

    def merged(self) -> Spans:
        """The times in which at least one event lasts, with the sums of their values."""
        if not len(self.begin):
            return self
        order = np.argsort(self.begin, kind="stable")
        begin, end = self.begin[order], np.maximum.accumulate(self.end[order])
        first = np.flatnonzero(np.append(True, begin[1:] > end[:-1]))
        last = np.append(first[1:], len(end)) - 1
        samples, size = (np.add.reduceat(v[order], first) for v in (self.samples, self.bytes))
        return Spans(begin[first], end[last], samples, size)

    def once(self) -> Spans:
        """The times in which at least one event lasts, cut where one begins or ends; without values."""
        edges = np.unique(np.concatenate([self.begin, self.end]))
        begun = np.searchsorted(np.sort(self.begin), edges[:-1], "right")
        ended = np.searchsorted(np.sort(self.end), edges[:-1], "right")
        begin, end = edges[:-1][begun > ended], edges[1:][begun > ended]
        return Spans(begin, end, np.zeros_like(begin), np.zeros_like(begin))

    def active(self, begin: Float, end: Float) -> Float:
        """How many events last, on average, in each of the intervals [begin, end)."""
        length = np.maximum(end - begin, 1e-12)
        return (self._integral(end) - self._integral(begin)) / length

    def _integral(self, moment: Float) -> Float:
        """The integral over time of the number of events that last, up to each moment."""

        def ramps(edges: Float) -> Float:
            edges = np.sort(edges)
            sums = np.concatenate([[0.0], np.cumsum(edges)])
            below = np.searchsorted(edges, moment)
            out: Float = moment * below - sums[below]
            return out

        return ramps(self.begin) - ramps(self.end)


@dataclass
class Digest:
    """One trace. `origin` is when its first event began, in seconds since 1970, of which `base` is the
    time at which its clock began; that clock is `to_rank_0` ahead of its own host's."""

    path: str
    rank: int
    world: int
    host: str
    origin: float
    spans: dict[tuple[str, str], Spans]
    dropped: int
    notes: list[str] = field(default_factory=list)
    base: float = 0.0
    to_rank_0: float = 0.0

    def of(self, category: str, name: str) -> Spans:
        """The events of that kind; none if it has none."""
        nothing = np.zeros(0)
        return self.spans.get((category, name), Spans(nothing, nothing, nothing, nothing))

    def category(self, category: str) -> dict[str, Spans]:
        """All kinds of a category."""
        return {name: s for (c, name), s in self.spans.items() if c == category}

    def merged(self, *categories: str) -> Spans:
        """The times in which at least one event of these categories, which has some, lasts."""
        return _joined([s for (c, _), s in self.spans.items() if c in categories]).merged()

    def busy(self, category: str) -> float | None:
        """Seconds in which at least one event of a category lasts; None if it has none."""
        return self.merged(category).seconds if self.category(category) else None

    def joined(self, other: Digest) -> Digest:
        """With the events of another trace of the same rank, which may be on another host's clock."""
        theirs = other.origin - other.base - other.to_rank_0 + self.base + self.to_rank_0
        origin = min(self.origin, theirs)
        parts: dict[tuple[str, str], list[Spans]] = {}
        for digest, begin in ((self, self.origin), (other, theirs)):
            later = begin - origin
            for key, s in digest.spans.items():
                moved = Spans(s.begin + later, s.end + later, s.samples, s.bytes)
                parts.setdefault(key, []).append(moved)
        return replace(
            self,
            world=max(self.world, other.world),
            origin=origin,
            spans={key: _joined(spans) for key, spans in parts.items()},
            dropped=self.dropped + other.dropped,
            notes=self.notes + other.notes,
        )

    def devices(self) -> list[str]:
        """Those whose waits were recorded."""
        return sorted({c.removeprefix("device ") for c, _ in self.spans if c.startswith("device ")})

    @property
    def seconds(self) -> float:
        """From the first event to the last one's end."""
        return max((float(s.end.max()) for s in self.spans.values()), default=0.0)

    def waits(self) -> Spans:
        """When consumers of loaders waited, once where several did in their threads; when the core did
        where nobody else recorded any."""
        waits = self.of("data", "get batch")
        return (waits if len(waits.begin) else self.of("data", "wait for batch")).once()

    def causes(
        self, threads: int, *, alone: bool = False, finished: bool = True
    ) -> dict[str, float]:
        """Seconds of all waits for batches by cause (see docs/guide/diagnose.md).

        In each wait, the busy share of the `threads` that transform counts as "decode", and so does the
        time after the core has given the batch where it is `finished` by callables or a device; else
        that is "other", the handing over. The rest is divided among what the fetch threads were doing,
        or is "other" if they did nothing. A rank that trains `alone` has no others to wait for.
        """
        waits = self.waits()
        length = waits.end - waits.begin
        called = self.of("data", "wait for callables").active(waits.begin, waits.end)
        # The core may be waited for, for a later batch, while callables work on this one.
        given = np.minimum(
            self.of("data", "wait for batch").active(waits.begin, waits.end), 1 - called
        )
        after = length * np.clip(1 - given, 0, 1)
        length = length - after
        decode = np.clip(
            self.of("data", "decode").active(waits.begin, waits.end) / max(1, threads), 0, 1
        )
        active = {
            cause: np.maximum(0.0, self.of("data", name).active(waits.begin, waits.end))
            for name, cause in FETCHING.items()
        }
        total = np.sum(list(active.values()), axis=0)
        # A cause counts only if some thread was busy with it for a tenth of the wait.
        quiet = total < 0.1
        rest = length * (1 - decode)
        share = np.divide(rest, total, out=np.zeros_like(rest), where=~quiet)
        out = {cause: float((share * a).sum()) for cause, a in active.items()}
        out["decode"] = float((length * decode).sum())
        out["other"] = float(rest[quiet].sum())
        out["decode" if finished else "other"] += float(after.sum())
        if alone:  # then these are its own other threads, which read the source
            out["source"] += out["others"]
            out["others"] = 0.0
        return out


def _joined(parts: list[Spans]) -> Spans:
    names = [part.name for part in fields(Spans)]
    return Spans(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def is_ours(source: Source) -> bool:
    """Whether the file is a trace that nostall wrote."""
    return b'"backend": "nostall"' in source.head(4096)


def read(source: Source) -> Digest:
    """Digests the file.

    Raises:
        CorruptionError: it holds no event.
        IoError: it cannot be read.
    """
    scanner = _native.TraceFilter([""], [])
    columns: dict[tuple[str, str], list[array[float]]] = {}
    dropped, to_rank_0 = 0, 0.0
    odd, first_odd = 0, -1

    def take() -> None:
        nonlocal dropped, to_rank_0, odd, first_odd
        for offset, raw in scanner.take():
            try:
                event = json.loads(raw)
                phase, args = event.get("ph"), event.get("args") or {}
                if phase == "M":
                    if event["name"] == "recorded":
                        dropped = int(bounded(args["dropped"], _MOST))
                    elif event["name"] == "clock_offset":
                        to_rank_0 = bounded(args.get("to_rank_0_ns", 0), LATEST * 1e3) / 1e9
                if phase != "X":
                    continue
                begin, end = lasts(event["ts"], event["dur"])
                values = [bounded(args.get(v, 0), _MOST) for v in _VALUES]
                key = (str(event["cat"]), str(event["name"]))
            except UNREADABLE:
                odd += 1
                first_odd = offset if first_odd < 0 else first_odd
                continue
            row = [begin * 1e-6, end * 1e-6, *values]
            if key not in columns:
                columns[key] = [array("d") for _ in row]
            for column, value in zip(columns[key], row, strict=True):
                column.append(value)

    for chunk in source.chunks():
        scanner.feed(chunk)
        take()
    scanner.finish()
    take()
    report = scanner.report
    if not columns:
        raise CorruptionError(
            f"{source.path} holds no event of nostall among {report['events']} in "
            f"{report['bytes']} bytes"
        )
    head = head_of(report["head"])
    info: Any = head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    base = began(head) / 1e9
    # Small numbers: sums of many moments must keep their microseconds.
    first = min(min(cols[0]) for cols in columns.values())
    spans = {}
    for key, cols in columns.items():
        begin, end, samples, size = (np.array(c, np.float64) for c in cols)
        spans[key] = Spans(begin - first, end - first, samples, size)
    notes = [
        *source.notes(),
        *damage_notes(source.path, report),
        *left_out(source.path, odd, first_odd),
    ]
    if dropped:
        notes.append(f"{source.path}: {dropped} events were dropped, because rings were full")
    return Digest(
        path=source.path,
        rank=info["rank"] if isinstance(info.get("rank"), int) else 0,
        world=info["world_size"] if isinstance(info.get("world_size"), int) else 1,
        host=str(head.get("host_name", "")),
        origin=base + first,
        spans=spans,
        dropped=dropped,
        notes=notes,
        base=base,
        to_rank_0=to_rank_0,
    )
