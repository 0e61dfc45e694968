"""Horovod timelines made to measure, in the three dialects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Op:
    """One operation, times in microseconds; `ready` holds each rank's tick."""

    tensor: int
    negotiate: int
    ready: Sequence[int]
    begin: int
    end: int
    shape: str = "[250]"
    dtype: str = "float32"
    kind: str = "ALLREDUCE"
    activities: Sequence[str] = field(default_factory=lambda: ("MPI_ALLREDUCE",))


def names(tensors: Sequence[str]) -> list[dict[str, Any]]:
    """Metadata: pids count from 1."""
    out: list[dict[str, Any]] = []
    for pid, name in enumerate(tensors, 1):
        out.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        out.append(
            {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
        )
    return out


def events(op: Op, negotiated: bool = True) -> list[dict[str, Any]]:
    """The events of one operation, in their order of time."""
    pid = op.tensor + 1
    out: list[dict[str, Any]] = []
    if negotiated:
        out.append({"ph": "B", "name": f"NEGOTIATE_{op.kind}", "ts": op.negotiate, "pid": pid})
        for rank, time in sorted(enumerate(op.ready), key=lambda r: r[1]):
            out.append({"ph": "X", "name": str(rank), "ts": time, "pid": pid, "dur": 0})
        out.append({"ph": "E", "ts": max(op.ready), "pid": pid})
    out.append({"ph": "B", "name": op.kind, "ts": op.begin, "pid": pid})
    for name in op.activities:
        out.append({"ph": "B", "name": name, "ts": op.begin, "pid": pid})
        out.append({"ph": "E", "ts": op.end, "pid": pid})
    args = {"dtype": op.dtype, "shape": op.shape}
    out.append({"ph": "E", "ts": op.end, "pid": pid, "args": args})
    return out


def timeline(
    tensors: Sequence[str],
    rounds: Sequence[Sequence[Op]],
    dialect: str = "old",
    negotiated: Sequence[int] = (0,),
) -> str:
    """The file: "old" (to 0.16.1), "cached" (from 0.16.2: no negotiation of tensors that the response
    cache holds, so in `negotiated` rounds only), "new" (cached, closed, several events a line, an
    epoch)."""
    rows = names(tensors)
    for number, ops in enumerate(rounds):
        made = [
            e for op in ops for e in events(op, negotiated=dialect == "old" or number in negotiated)
        ]
        rows += sorted(made, key=lambda e: e["ts"])
    if dialect == "new":
        start = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "metadata"}}
        epoch = {
            "name": "start_time_since_epoch_in_micros",
            "ph": "M",
            "pid": 0,
            "args": {"start_time_since_epoch_in_micros": 1700000000000000},
        }
        lines = [start, epoch, *rows]
        pairs = [lines[i : i + 2] for i in range(0, len(lines), 2)]
        text = ",\n".join(", ".join(json.dumps(e) for e in pair) for pair in pairs)
        return f"[{text}\n]\n"
    return "[\n" + "".join(json.dumps(e) + ",\n" for e in rows)


def known() -> tuple[list[str], list[list[Op]]]:
    """Three rounds of two ranks, answers in docs/guide/timeline.md.

    Round 0 is warm-up and ends at 1000. Rounds 1 and 2 begin at 1000 and 2000.
    """
    first = [Op(0, 100, (100, 200), 300, 900), Op(1, 150, (150, 400), 900, 1000, "[500]")]
    second = [
        Op(0, 1400, (1400, 1450), 1460, 1600),
        Op(1, 1500, (1500, 1900), 1910, 2000, "[500]"),
    ]
    third = [
        Op(0, 2300, (2350, 2300), 2360, 2500),
        Op(1, 2400, (2600, 2400), 2700, 3000, "[500]"),
    ]
    return ["dense/bias", "dense/kernel"], [first, second, third]
