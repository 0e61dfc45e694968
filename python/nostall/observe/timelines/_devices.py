"""What a device waited for, from the activities of its streams in a trace of the PyTorch profiler.

Kineto writes one event for each kernel and each copy, with device and stream, whatever the device is
(CUDA, or one of torch's other backends). docs/guide/timeline.md defines the causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.observe.timelines._model import DeviceMetrics

CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_REDUCES = ("nccl", "allreduce", "all_reduce", "reduce_scatter", "all_gather", "allgather")

Intervals = NDArray[np.float64]  # rows of begin and end, in order, apart from each other


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy; moments in seconds of the trace's clock."""

    name: str
    copies: bool
    device: int
    stream: int
    begin: float
    end: float


def activity(event: dict[str, Any], begin: float, end: float) -> Activity | None:
    """What an event of `CATEGORIES` says; None without device and stream."""
    args = event.get("args")
    if event.get("cat") not in CATEGORIES or not isinstance(args, dict):
        return None
    device, stream = args.get("device"), args.get("stream")
    if not isinstance(device, int) or not isinstance(stream, int):
        return None
    copies = event["cat"] == "gpu_memcpy"
    return Activity(str(event["name"]), copies, device, stream, begin, end)


def devices_of(
    rank: int, activities: Sequence[Activity], marks: Sequence[tuple[float, float]]
) -> list[DeviceMetrics]:
    """The devices that compute; `marks` are the steps, else everything counts as one."""
    found = []
    for device in sorted({a.device for a in activities}):
        here = [a for a in activities if a.device == device]
        streams: dict[int, float] = {}
        for a in here:
            if not _cause(a):
                streams[a.stream] = streams.get(a.stream, 0.0) + a.end - a.begin
        if not streams:
            continue
        stream = max(streams, key=lambda s: streams[s])
        first, last = min(a.begin for a in here), max(a.end for a in here)
        if marks:
            first, last = min(b for b, _ in marks), max(e for _, e in marks)
        found.append(DeviceMetrics(rank, device, stream, _waits(here, stream, first, last, marks)))
    return found


def _cause(a: Activity) -> str:
    """What a device waits for while this runs and nothing computes; empty: it computes."""
    name = a.name.lower()
    if a.copies and ("dtod" in name or "ptop" in name):
        return ""  # of tensors that lie on devices already
    if a.copies:
        return "checkpoint" if "dtoh" in name else "copy"
    return "gradient" if any(word in name for word in _REDUCES) else ""


def _waits(
    here: Sequence[Activity], stream: int, first: float, last: float, marks: Sequence[Any]
) -> dict[str, float]:
    idle = np.array([[first, last]])
    idle = _without(idle, _union(a for a in here if a.stream == stream and not _cause(a)))
    waits = {}
    for cause in ("gradient", "copy", "checkpoint"):
        # Kernels beside those that compute prepare what was copied.
        of = _union(a for a in here if (_cause(a) or "copy") == cause)
        rest = _without(idle, of)
        waits[cause] = _length(idle) - _length(rest)
        idle = rest
    return {"steps": len(marks) or 1, "seconds": last - first, "input": _length(idle), **waits}


def _union(activities: Iterable[Activity]) -> Intervals:
    rows = np.array(sorted((a.begin, a.end) for a in activities), np.float64).reshape(-1, 2)
    if not len(rows):
        return rows
    ends = np.maximum.accumulate(rows[:, 1])
    first = np.flatnonzero(np.append(True, rows[1:, 0] > ends[:-1]))
    return np.stack([rows[first, 0], ends[np.append(first[1:], len(rows)) - 1]], axis=1)


def _without(rows: Intervals, others: Intervals) -> Intervals:
    """The parts of `rows` that lie in none of the others."""
    moments = np.unique(np.concatenate([rows.ravel(), others.ravel()]))
    middle = (moments[1:] + moments[:-1]) / 2
    keep = _inside(middle, rows) & ~_inside(middle, others)
    return np.stack([moments[:-1][keep], moments[1:][keep]], axis=1)


def _inside(moments: NDArray[np.float64], rows: Intervals) -> NDArray[np.bool_]:
    if not len(rows):
        return np.zeros(len(moments), bool)
    place = np.searchsorted(rows[:, 0], moments, "right") - 1
    found: NDArray[np.bool_] = (place >= 0) & (moments < rows[np.maximum(place, 0), 1])
    return found


def _length(rows: Intervals) -> float:
    return float((rows[:, 1] - rows[:, 0]).sum())
