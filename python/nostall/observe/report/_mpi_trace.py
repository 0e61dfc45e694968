"""Profiles of unmodified MPI programs as traces: one file of Chrome's format per rank."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nostall.errors import Error
from nostall.observe.report._arrivals import NONBLOCKING, operation_of, read_file

# Of the names of these traces: a rank may have left one of its loaders too.
MPI = ".mpi"


def convert(files: Sequence[Path], directory: Path) -> list[str]:
    """Writes ``rank<r>.mpi.trace.json.gz`` for each profile of libnostall_mpi.so; returns what is wrong
    with those for which it cannot, as where a rank was killed while it wrote.

    A call is an event of category "peers", from this rank's arrival to its end, with its bytes,
    elements, communicator, number in the communicator, and whether nostall answered it. A nonblocking
    one is of category "background": until its end the program may compute. All times are
    on rank 0's clock, since 1970 by the clock of this host, which should be rank 0's.
    """
    base = time.time_ns() - time.monotonic_ns()
    wrong = []
    for file in files:
        try:
            _convert(file, directory, base)
        except (Error, OSError) as error:
            wrong.append(str(error))
    return wrong


def _convert(file: Path, directory: Path, base: int) -> None:
    header, records = read_file(file)
    rank = int(header["rank"])
    head = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nostall", "rank": rank, "world_size": int(header["ranks"])
        },
        "host_name": str(header["node"]),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
    }  # fmt: skip
    (begin, offset), _ = header["clock"]
    events: list[dict[str, Any]] = [
        _named("clock_offset", rank, monotonic_ns=begin, to_rank_0_ns=offset),
        _named("process_name", rank, name=f"rank {rank}"),
        _named("process_sort_index", rank, sort_index=rank),
    ]
    numbers: Counter[int] = Counter()
    for record in records:
        communicator = int(record["communicator"])
        events.append(
            {
                "ph": "X", "cat": "background" if record["flags"] & NONBLOCKING else "peers",
                "name": f"MPI_{operation_of(record).capitalize()}",
                "pid": rank, "tid": 0, "ts": int(record["arrived"]) / 1000,
                "dur": max(0, int(record["left"]) - int(record["arrived"])) / 1000,
                "args": {
                    "bytes": int(record["bytes"]), "elements": int(record["count"]),
                    "communicator": communicator, "seq": numbers[communicator],
                    "by nostall": int(record["ours"]),
                },
            }
        )  # fmt: skip
        numbers[communicator] += 1
    events.append(_named("recorded", rank, events=len(records), dropped=int(header["dropped"])))
    path = directory / f"rank{rank}{MPI}.trace.json.gz"
    text = json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(map(json.dumps, events))
    path.write_bytes(gzip.compress((text + "\n]}\n").encode()))


def _named(name: str, rank: int, /, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "args": arguments}
