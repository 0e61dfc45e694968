"""Traces of the PyTorch profiler (Kineto) of DistributedDataParallel, one file per rank.

Such a trace holds no negotiation: a rank is ready when it launches the all-reduce of a bucket
(``c10d::allreduce_``). docs/guide/timeline.md says how that maps to the definitions.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nostall import _native
from nostall.errors import UNREADABLE, CorruptionError, UsageError
from nostall.observe.timelines._devices import CATEGORIES, Activity, activity, devices_of
from nostall.observe.timelines._metrics import NO_TIME, Metrics, Operations
from nostall.observe.timelines._model import Analysis, DeviceMetrics
from nostall.observe.timelines._stream import (
    Source,
    began,
    bounded,
    damage_notes,
    lasts,
    left_out,
)

ONE_RANK = (
    "not available: the traces of all ranks are needed to see which rank waits for which; "
    "pass one file per rank"
)
_LAUNCH = "c10d::allreduce_"
_FORWARD = "DistributedDataParallel.forward"
_STEP = "ProfilerStep#"
_RUNS = ("gloo:all_reduce", "nccl")
_SIZES = {
    "float": 4, "double": 8, "int": 4, "long int": 8, "long": 8, "half": 2, "bfloat16": 2,
    "c10::half": 2, "c10::bfloat16": 2, "signed char": 1, "unsigned char": 1, "short": 2, "bool": 1,
}  # fmt: skip


_MOST_ELEMENTS = 2.0**48  # of one all-reduce: a round's bytes fit in 64 bits


@dataclass
class _Reduction:
    """One all-reduce on one rank, nanoseconds of the rank's clock."""

    launch: int
    begin: int
    end: int
    elements: int | None
    bytes: int | None


@dataclass
class _Round:
    start: int
    reductions: list[_Reduction] = field(default_factory=list)


@dataclass
class _Trace:
    path: str
    rank: int
    world: int
    host: str
    rounds: list[_Round]
    devices: list[DeviceMetrics]
    notes: list[str]


def head_of(text: str) -> dict[str, Any]:
    """The fields before "traceEvents"; what cannot be read is empty."""
    cut = text.rfind('"traceEvents"')
    try:
        found = json.loads(text[:cut].rstrip().rstrip(",") + "}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _elements(dims: Any) -> int | None:
    """Elements of the tensors in Kineto's "Input Dims": nested lists whose innermost are shapes."""
    if not isinstance(dims, list):
        return None
    if dims and all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in dims):
        return math.prod(dims)
    inner = [n for n in (_elements(d) for d in dims) if n is not None]
    return sum(inner) if inner else None


def _size(args: dict[str, Any]) -> tuple[int | None, int | None]:
    """Elements and bytes of the event's tensors, as far as it says.

    Raises:
        OverflowError: they are beyond all bounds.
    """
    elements = _elements(args.get("Input Dims"))
    if elements is None and isinstance(args.get("In msg nelems"), int):
        elements = int(args["In msg nelems"])
    if elements is not None:
        bounded(elements, _MOST_ELEMENTS)
    kinds = args.get("Input type")
    kind = kinds[0] if isinstance(kinds, list) and kinds else args.get("dtype")
    each = _SIZES.get(str(kind).lower())
    return elements, elements * each if elements is not None and each else None


@dataclass
class _Event:
    begin: int
    end: int
    elements: int | None
    bytes: int | None


@dataclass
class _Events:
    """Those that matter, by kind, in order of time; the trace's head; notes."""

    kinds: dict[str, list[_Event]]
    activities: list[Activity]
    head: dict[str, Any]
    notes: list[str]


def _events(source: Source) -> _Events:
    scanner = _native.TraceFilter([_LAUNCH, _FORWARD, _STEP, *_RUNS], list(CATEGORIES))
    activities: list[Activity] = []
    kinds: dict[str, list[_Event]] = {"launch": [], "run": [], "forward": [], "step": []}
    odd = 0
    first_odd = -1

    def place(event: Any) -> None:
        name, (begin, end) = event["name"], lasts(event["ts"], event.get("dur", 0))
        args = event.get("args")
        size = _size(args if isinstance(args, dict) else {})
        made = _Event(round(begin * 1e3), round(end * 1e3), *size)
        if name == _LAUNCH:
            kinds["launch"].append(made)
        elif name == _FORWARD:
            kinds["forward"].append(made)
        elif name.startswith(_STEP) and event.get("cat") != "gpu_user_annotation":
            kinds["step"].append(made)
        elif name == "gloo:all_reduce" or (event.get("cat") == "kernel" and "AllReduce" in name):
            kinds["run"].append(made)
        if found := activity(event, begin / 1e6, end / 1e6):
            activities.append(found)

    def take() -> None:
        nonlocal odd, first_odd
        for offset, raw in scanner.take():
            try:
                place(json.loads(raw))
            except UNREADABLE:
                odd += 1
                first_odd = offset if first_odd < 0 else first_odd

    for chunk in source.chunks():
        scanner.feed(chunk)
        take()
    scanner.finish()
    take()
    for events in kinds.values():
        events.sort(key=lambda e: e.begin)
    report = scanner.report
    notes = [
        *source.notes(),
        *damage_notes(source.path, report),
        *left_out(source.path, odd, first_odd),
    ]
    return _Events(kinds, activities, head_of(report["head"]), notes)


def _reductions(launches: list[_Event], runs: list[_Event]) -> tuple[list[_Reduction], int]:
    """Each launch with the execution it caused; the count of launches without one.

    Executions are queued in the order of launches, but threads may begin them in another order. Of
    those that begin after the launch, the first of the same size is taken.
    """
    free = list(runs)
    out = []
    lost = 0
    for launch in launches:
        first = next((i for i, r in enumerate(free) if r.begin >= launch.begin), len(free))
        chosen = first
        for i in range(first, min(first + 64, len(free))):
            if launch.elements is None or free[i].elements in (None, launch.elements):
                chosen = i
                break
        if chosen >= len(free):
            lost += 1
            continue
        run = free.pop(chosen)
        out.append(
            _Reduction(
                launch.begin,
                run.begin,
                run.end,
                launch.elements if launch.elements is not None else run.elements,
                launch.bytes if launch.bytes is not None else run.bytes,
            )
        )
    return out, lost


def _read(source: Source) -> _Trace:
    events = _events(source)
    kinds, head, notes = events.kinds, events.head, events.notes
    reductions, lost = _reductions(kinds["launch"], kinds["run"])
    marks = kinds["forward"] or kinds["step"]
    info = head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = info["rank"] if isinstance(info.get("rank"), int) else -1
    steps = [(m.begin / 1e9, m.end / 1e9) for m in kinds["step"]]
    devices = devices_of(max(rank, 0), events.activities, steps)
    if (not reductions or not marks) and not devices:
        lacking = f"'{_LAUNCH}' events" if not reductions else f"'{_FORWARD}' and '{_STEP}' events"
        raise CorruptionError(
            f"{source.path} has no {lacking}: profile a DistributedDataParallel module on the CPU "
            "(ProfilerActivity.CPU, also on a GPU) for some whole steps"
        )
    if lost:
        notes.append(f"{source.path}: {lost} all-reduces do not end in the trace and are left out")
    if reductions and not kinds["forward"]:
        notes.append(f"{source.path}: no '{_FORWARD}'; rounds begin with the profiler's steps")
    return _Trace(
        path=source.path,
        rank=rank,
        world=info["world_size"] if isinstance(info.get("world_size"), int) else 1,
        host=str(head.get("host_name", "")),
        rounds=_rounds([m.begin for m in marks], reductions, began(head)) if marks else [],
        devices=devices,
        notes=notes,
    )


def _rounds(marks: list[int], reductions: list[_Reduction], shift: int) -> list[_Round]:
    """A round begins at the first mark behind the last launch of the round before."""
    out: list[_Round] = []
    for reduction in reductions:
        place = bisect.bisect_right(marks, reduction.launch) - 1
        if place < 0:
            continue  # its round begins before the trace
        if not out or marks[place] > out[-1].reductions[-1].launch - shift:
            # Several forward passes may precede (gradient accumulation): the first one counts.
            start = bisect.bisect_right(marks, out[-1].reductions[-1].launch - shift) if out else 0
            out.append(_Round(marks[start] + shift))
        out[-1].reductions.append(
            _Reduction(
                reduction.launch + shift,
                reduction.begin + shift,
                reduction.end + shift,
                reduction.elements,
                reduction.bytes,
            )
        )
    return out


def _align(traces: list[_Trace]) -> list[str]:
    """Moves the clocks of other hosts to the first trace's: an all-reduce ends everywhere at once."""
    notes = []
    first = traces[0]
    for other in traces[1:]:
        if other.host == first.host:
            continue
        ends = [
            a.end - b.end
            for mine, theirs in zip(first.rounds, other.rounds, strict=False)
            for a, b in zip(mine.reductions, theirs.reductions, strict=False)
        ]
        offset = int(np.median(ends)) if ends else 0
        for r in other.rounds:
            r.start += offset
            for x in r.reductions:
                x.launch, x.begin, x.end = x.launch + offset, x.begin + offset, x.end + offset
        notes.append(
            f"{other.path}: the clock of {other.host or 'its host'} was moved by "
            f"{offset / 1e6:.3f} ms, so that all-reduces end together"
        )
    return notes


def analyze(sources: Sequence[Source]) -> Analysis:
    """The metrics of one training.

    Raises:
        CorruptionError: a trace without rounds of all-reduces.
        UsageError: two traces of one rank.
    """
    traces = sorted((_read(s) for s in sources), key=lambda t: t.rank)
    notes = [n for t in traces for n in t.notes]
    numbers = [t.rank for t in traces]
    for a, b in itertools.pairwise(traces):
        if a.rank == b.rank:
            raise UsageError(
                f"{a.path} and {b.path} are both of rank {a.rank}: pass one file per rank"
            )
    world = max(t.world for t in traces)
    if len(traces) < world:
        some = ", ".join(str(r) for r in range(min(world, 4096)) if r not in numbers)
        notes.append(f"traces of ranks {some[:60]} are missing: waits for these ranks are not seen")
    notes += _align(traces)
    counts = [len(t.rounds) for t in traces]
    if min(counts) != max(counts):
        notes.append(f"the traces hold {min(counts)} to {max(counts)} rounds: the first are used")
    names: dict[tuple[int, int | None], int] = {}
    metrics = Metrics()
    uneven = 0
    for number in range(1, min(counts) - 1):
        rounds = [t.rounds[number] for t in traces]
        if len({len(r.reductions) for r in rounds}) != 1:
            uneven += 1
            continue
        start = min(r.start for r in rounds)
        following = min(t.rounds[number + 1].start for t in traces)
        try:
            metrics.add(number, start, following, _operations(rounds, names, len(traces) > 1))
        except OverflowError as error:
            raise CorruptionError(
                f"{traces[0].path}: the clocks of its hosts are centuries apart"
            ) from error
    if uneven:
        notes.append(f"{uneven} rounds have not as many all-reduces on every rank and are left out")
    devices = [d for t in traces for d in t.devices]
    if not metrics.rounds and (max(counts) or not devices):
        notes.append(
            "there is no complete round between the first, which is warm-up, and the last, whose end "
            "is not in the trace: profile at least three steps"
        )
    labels = [
        f"bucket {place}" + (f" ({elements} elements)" if elements is not None else "")
        for place, elements in names
    ]
    found = metrics.result(
        [t.path for t in traces],
        "PyTorch profiler",
        labels,
        numbers if len(traces) > 1 else [],
        ONE_RANK,
        notes,
    )
    return replace(found, devices=devices)


def _operations(
    rounds: list[_Round], names: dict[tuple[int, int | None], int], several: bool
) -> Operations:
    """Bucket k of all ranks is one operation: launched first .. last, run by all, ended by all."""
    rows = list(zip(*(r.reductions for r in rounds), strict=True))
    launch = np.array([[x.launch for x in row] for row in rows], np.int64)
    begin = np.array([max(max(x.begin for x in row), max(x.launch for x in row)) for row in rows])
    end = np.array([max(x.end for x in row) for row in rows], np.int64)
    tensors = [
        names.setdefault((place, row[0].elements), len(names)) for place, row in enumerate(rows)
    ]
    return Operations(
        tensor=np.array(tensors, np.int64),
        reduces=np.ones(len(rows), bool),
        negotiate=launch.min(axis=1),
        begin=np.minimum(begin, end).astype(np.int64),
        end=end,
        bytes=np.array([-1 if row[0].bytes is None else row[0].bytes for row in rows], np.int64),
        ready=launch if several else np.full((len(rows), 0), NO_TIME, np.int64),
    )
