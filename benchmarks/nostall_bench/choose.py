"""``nostall calibrate collectives``: which algorithm of allreduce is fastest here, and when.

Measures every algorithm for numbers of ranks and sizes, with ranks that arrive together and apart
([Mohammadalizadehbakhtevari 2021, listings 4.1 and 4.2]), in turns, and writes the table that
nostall.collective, the torch backend and libnostall_mpi.so read (docs/formats/collectives.md).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nostall.base._sizes import parse_size
from nostall.errors import IoError
from nostall_bench import allreduce

# Engine of the benchmark -> algorithm.
_ALGORITHMS = {"nostall": "cooperative"} | {
    name: name
    for name in ("arrival_leader", "arrival_chain", "leader", "recursive_doubling", "ring", "rsa")
}
# Messages up to 4 KiB are always exchanged among all.
SIZES = [8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
# An algorithm has to be so much faster than the default to take its place, and its slowest repeat
# faster than the default's fastest: noise is not.
_WORTH = 0.9


@dataclass(frozen=True)
class Choice:
    """The algorithm for messages of up to `up_to` bytes."""

    ranks: int
    apart: bool
    up_to: int
    algorithm: str

    def __str__(self) -> str:
        arrival = "apart" if self.apart else "together"
        return f"{self.ranks} {arrival} {self.up_to} {self.algorithm}"


def default_path() -> Path:
    """Where the table is looked for if NOSTALL_COLLECTIVES names no file."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "nostall" / "collectives.json"


def choose(rows: Iterable[allreduce.Row]) -> list[Choice]:
    """The table's rows, from measurements: ranks together by their time in the call, ranks apart by
    the time from the last arrival to the last completion."""
    # Median, least and most.
    cells: dict[tuple[int, bool, int], dict[str, tuple[float, float, float]]] = {}
    for row in rows:
        apart = row.mif > 0
        times = (
            (row.after_last, *row.after_last_range) if apart else (row.in_call, *row.in_call_range)
        )
        cells.setdefault((row.ranks, apart, row.size), {})[_ALGORITHMS[row.engine]] = times
    choices: list[Choice] = []
    for (ranks, apart, size), found in sorted(cells.items()):
        median, least, _ = found["cooperative"]
        better = {
            name: times[0]
            for name, times in found.items()
            if times[0] <= _WORTH * median and times[2] < least
        }
        best = min(better, key=better.__getitem__, default="cooperative")
        last = choices[-1] if choices else None
        if last and (last.ranks, last.apart, last.algorithm) == (ranks, apart, best):
            choices[-1] = Choice(ranks, apart, size, best)
        else:
            choices.append(Choice(ranks, apart, size, best))
    return choices


def write(choices: list[Choice], path: Path) -> None:
    """Replaces the table.

    Raises:
        IoError: it cannot be written.
    """
    table = {
        "version": 1,
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "table": [str(c) for c in choices],
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(table, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise IoError(f"cannot write the table of collectives {path}: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall calibrate collectives``."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--sizes", nargs="+", help=f"in bytes; by default {SIZES[0]} to {SIZES[-1]}"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="per point measured")
    parser.add_argument("--out", help="the file to write, instead of the table that is looked for")


def run(chosen: argparse.Namespace) -> int:
    """Measures, writes the table and prints it."""
    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    arguments = parser.parse_args(["--seconds", str(chosen.seconds)])
    before = os.environ.get("NOSTALL_COLLECTIVES")
    os.environ["NOSTALL_COLLECTIVES"] = "off"
    try:
        measured = [parse_size(s) for s in chosen.sizes] if chosen.sizes else SIZES
        rows = [
            row
            for n in chosen.ranks
            for row in allreduce.measure(arguments, list(_ALGORITHMS), measured, n)
        ]
    finally:
        if before is None:
            del os.environ["NOSTALL_COLLECTIVES"]
        else:
            os.environ["NOSTALL_COLLECTIVES"] = before
    choices = choose(rows)
    path = Path(chosen.out) if chosen.out else default_path()
    write(choices, path)
    print("\n".join(map(str, choices)))
    print(f"wrote {path}")
    return 0
