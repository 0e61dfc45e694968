"""Which rank arrives when at the collectives of an MPI program: analyses profiles of libnostall_mpi.so.

The metrics are those of [Mohammadalizadehbakhtevari 2021, sec. 2.3]. All ranks arrive at one call at
times a_0 .. a_n-1. The worst-case imbalance time is max a - min a (eq. 2.1), the average-case
imbalance time is the mean of |a_i - mean a| (eq. 2.2 and 2.3). Both are divided by alpha, the time of
one message of the call's size, which the program's MPI measured at its end.
"""

from __future__ import annotations

import bisect
import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.base._words import counted
from nostall.errors import UNREADABLE, CorruptionError, IoError, UsageError

_RECORD = np.dtype(
    [
        ("arrived", "<i8"),
        ("left", "<i8"),
        ("bytes", "<u8"),
        ("count", "<u8"),
        ("communicator", "<u4"),
        ("call", "u1"),
        ("ours", "u1"),
        ("flags", "<u2"),
    ]
)
NONBLOCKING = 1
# As records number them (mpi/calls.h).
CALLS = (
    *("allreduce", "reduce", "bcast", "barrier", "allgather", "allgatherv", "gather", "gatherv"),
    *("scatter", "scatterv", "alltoall", "alltoallv", "alltoallw", "reduce_scatter"),
    *("reduce_scatter_block", "scan", "exscan"),
)
# Ranks may give different amounts.
_UNEVEN = ("allgatherv", "gatherv", "scatterv", "alltoallv", "alltoallw")
# The size classes of [Mohammadalizadehbakhtevari 2021, sec. 3.2], by their upper ends in bytes.
CLASSES = {"0-1 KB": 1 << 10, "1 KB-1 MB": 1 << 20, "1-64 MB": 1 << 26, "more": 1 << 63}
_MOST_RANKS = 1 << 24
Times = NDArray[np.int64]


@dataclass(frozen=True)
class Call:
    """One collective call of all ranks of a communicator; times in ns on rank 0's clock."""

    operation: str
    bytes: int
    arrived: Times
    left: Times
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]  # in the job, in the order of all else

    @property
    def worst(self) -> int:
        """The worst-case imbalance time in ns."""
        return int(self.arrived.max() - self.arrived.min())

    @property
    def average(self) -> float:
        """The average-case imbalance time in ns."""
        return float(np.abs(self.arrived - self.arrived.mean()).mean())


@dataclass(frozen=True)
class Row:
    """Calls of one operation and size class; times in seconds, summed over calls, of one rank.

    The shares of all sizes are of all operations' calls and time, those of a size class are of the
    operation's.
    """

    operation: str
    size: str
    calls: int
    call_share: float
    bytes: int
    seconds: float
    time_share: float
    worst_factor: float
    average_factor: float
    node_worst_factor: float
    node_average_factor: float


@dataclass(frozen=True)
class Alpha:
    """The time of one message: straight lines between measured (bytes, ns), the last one going on; 1 us
    and 10 GB/s where nothing was measured."""

    measured: tuple[tuple[int, int], ...] = ()

    def __call__(self, size: int) -> float:
        if not self.measured:
            return 1000 + size / 10
        places = [p for p, _ in self.measured]
        after = min(max(bisect.bisect(places, size), 1), len(places) - 1)
        (small, short), (large, long) = self.measured[after - 1], self.measured[after]
        return max(short + (size - small) * max(long - short, 0) / (large - small), short)

    def __str__(self) -> str:
        if not self.measured:
            return "1 us + bytes / 10 GB/s, assumed"
        times = ", ".join(f"{ns / 1e3:.3g} us at {_size(size)}" for size, ns in self.measured)
        return f"{times}, measured"


@dataclass(frozen=True)
class Profile:
    """The calls of a job that all their ranks recorded, in the order of the first arrival.

    `dropped` counts records that ranks had no memory for, `incomplete` the calls that other ranks have
    records of then. `differing` counts calls of whole communicators that are not in `calls` because
    the ranks' records contradict each other. `early` and `persistent` are calls of a rank that no
    profile has.
    """

    ranks: int
    calls: list[Call]
    dropped: int
    differing: int = 0
    incomplete: int = 0
    early: int = 0
    persistent: int = 0
    alpha: Alpha = Alpha()

    @property
    def left_out(self) -> dict[str, int]:
        """How many calls are not in `calls`, by the reason."""
        reasons = {
            "records without memory, of all ranks: raise NOSTALL_MPI_PROFILE_RECORDS": self.dropped,
            "calls that not all ranks had memory for": self.incomplete,
            "calls from where the ranks of a communicator recorded different operations or sizes": (
                self.differing
            ),
            "nonblocking calls on communicators without a blocking call before": self.early,
            "persistent calls that were set up, with all their starts": self.persistent,
        }
        return {reason: many for reason, many in reasons.items() if many}


def find(paths: Sequence[str]) -> list[Path]:
    """The profile files among `paths`, or in the directory that is the only one of them."""
    if len(paths) == 1 and Path(paths[0]).is_dir():
        return sorted(Path(paths[0]).glob("mpi-*.profile"))
    files = [Path(p) for p in paths]
    return files if all(f.suffix == ".profile" for f in files) else []


def read(files: Sequence[Path]) -> Profile:
    """Reads the files of all ranks and finds the calls that belong together.

    Raises:
        CorruptionError: a file is not a profile or ends too early.
        UsageError: files of some ranks are missing, or they are of several jobs.
    """
    sides: dict[tuple[int, int], list[tuple[int, str, Any]]] = {}
    sizes: dict[int, int] = {}
    ranks, dropped, seen = 0, 0, set()
    early = persistent = 0
    alpha = Alpha()
    for file in files:
        header, records = read_file(file)
        if ranks not in (0, header["ranks"]):
            raise UsageError(
                f"{file} is of a job of {counted(header['ranks'], 'rank')}, and {files[0]} of one of "
                f"{ranks}: record each job into a directory of its own"
            )
        ranks = int(header["ranks"])
        dropped += int(header["dropped"])
        seen.add(int(header["rank"]))
        early = max(early, header["unrecorded"]["early"])
        persistent = max(persistent, header["unrecorded"]["persistent"])
        if header["alpha"]:
            alpha = Alpha(tuple((size, ns) for size, ns in header["alpha"]))
        for number, (name, size, _) in header["communicators"].items():
            mine = records[records["communicator"] == int(number)]
            sizes[name] = size
            for i, record in enumerate(mine):
                sides.setdefault((name, i), []).append((header["rank"], header["node"], record))
    missing = sorted(set(range(ranks)) - seen)
    if missing:
        raise UsageError(f"the profiles of ranks {missing} are missing; pass the whole directory")
    calls = []
    differing = incomplete = 0
    apart: set[int] = set()  # communicators with calls whose records contradict each other
    for (name, _), parts in sorted(sides.items(), key=lambda item: item[0]):
        if len(parts) != sizes[name]:
            incomplete += 1
            continue
        if name in apart or not _fit(parts):
            apart.add(name)
            differing += 1
            continue
        parts.sort(key=lambda part: part[0])
        first = parts[0][2]
        calls.append(
            Call(
                operation_of(first),
                int(max(part[2]["bytes"] for part in parts)),
                np.array([part[2]["arrived"] for part in parts], np.int64),
                np.array([part[2]["left"] for part in parts], np.int64),
                tuple(part[1] for part in parts),
                tuple(part[0] for part in parts),
            )
        )
    calls.sort(key=lambda call: int(call.arrived.min()))
    return Profile(ranks, calls, dropped, differing, incomplete, early, persistent, alpha)


def operation_of(record: Any) -> str:
    """The name of a record's call, as in MPI."""
    return ("i" if record["flags"] & NONBLOCKING else "") + CALLS[int(record["call"])]


def _fit(parts: list[tuple[int, str, Any]]) -> bool:
    """Whether the records of all ranks can be of one call: one operation and, where MPI asks for it,
    one size. The counts of a bcast may differ with its types; ranks that take no part in one between
    two groups give 0."""
    operations = {(int(part[2]["call"]), int(part[2]["flags"])) for part in parts}
    if len(operations) != 1:
        return False
    uneven = CALLS[int(parts[0][2]["call"])] in _UNEVEN
    return uneven or len({int(part[2]["bytes"]) for part in parts} - {0}) <= 1


def read_file(file: Path) -> tuple[dict[str, Any], NDArray[Any]]:
    """One rank's header and records, their times on rank 0's clock.

    Raises:
        CorruptionError: the file is not a profile or ends too early. IoError: it cannot be read.
    """
    try:
        line, _, data = file.read_bytes().partition(b"\n")
    except OSError as error:
        raise IoError(f"cannot read {file}: {error.strerror}") from error
    try:
        header = json.loads(line)
        if header["nostall"] != "mpi profile" or header["version"] != 2:
            raise ValueError("another kind or version")
        expected = int(header["records"]) * _RECORD.itemsize
        if len(data) != expected:
            raise ValueError(f"{len(data)} bytes of records instead of {expected}")
        (begin, first), (end, last) = [map(_whole, pair) for pair in header["clock"]]
        _whole(header["rank"])
        _whole(header["dropped"])
        if not 0 < _whole(header["ranks"]) <= _MOST_RANKS or not isinstance(header["node"], str):
            raise ValueError(f"{header['ranks']} ranks on node {header['node']!r}")
        for number, (name, size, _) in header["communicators"].items():
            _whole(int(number)), _whole(name, 1 << 64), _whole(size)
        _whole(header["unrecorded"]["early"]), _whole(header["unrecorded"]["persistent"])
        messages = [(_whole(size), _whole(ns)) for size, ns in header["alpha"]]
        places = [size for size, _ in messages]
        if places != sorted(set(places)) or len(places) == 1 or any(ns < 1 for _, ns in messages):
            raise ValueError(f"messages of (bytes, ns) {messages}")
    except UNREADABLE as error:
        raise CorruptionError(f"{file} is not a whole profile: {error}; record it again") from error
    records = np.frombuffer(data, _RECORD).copy()
    if records["call"].size and records["call"].max() >= len(CALLS):
        raise CorruptionError(f"{file} has calls that this release does not know")
    drift = (last - first) / max(end - begin, 1)
    with np.errstate(all="ignore"):  # times that cannot be
        for name in ("arrived", "left"):
            offset = first + drift * (records[name] - begin)
            records[name] += offset.astype(np.int64)
    return header, records


def _whole(value: Any, below: int = 1 << 63) -> int:
    """A number of a header; ValueError for anything else."""
    if type(value) is not int or not -(1 << 63) <= value < below:
        raise ValueError(f"{value!r} is not a whole number of 64 bits")
    return value


def size_class(size: int) -> str:
    """The size class that a message belongs to."""
    return next(name for name, end in CLASSES.items() if size <= end)


def table(profile: Profile) -> list[Row]:
    """Rows by operation and size class, and one of each operation over all sizes."""
    alpha = profile.alpha
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in profile.calls:
        groups.setdefault((call.operation, "all"), []).append(call)
        if call.operation != "barrier":
            groups.setdefault((call.operation, size_class(call.bytes)), []).append(call)
    order = ["all", *CLASSES]
    names = [name for call in CALLS for name in (call, f"i{call}")]
    keys = sorted(groups, key=lambda key: (names.index(key[0]), order.index(key[1])))
    seconds = {
        key: sum(float((c.left - c.arrived).mean()) for c in calls) / 1e9
        for key, calls in groups.items()
    }
    everything = sum(s for (_, size), s in seconds.items() if size == "all")
    rows = []
    for operation, size in keys:
        calls = groups[operation, size]
        nodes = [_node_wide(call, alpha) for call in calls]
        whole = (operation, "all")
        of_calls = len(profile.calls) if size == "all" else len(groups[whole])
        of_seconds = everything if size == "all" else seconds[whole]
        rows.append(
            Row(
                operation,
                size,
                len(calls),
                len(calls) / of_calls,
                sum(c.bytes for c in calls),
                seconds[operation, size],
                seconds[operation, size] / of_seconds if of_seconds else 0.0,
                float(np.mean([c.worst / alpha(c.bytes) for c in calls])),
                float(np.mean([c.average / alpha(c.bytes) for c in calls])),
                float(np.mean([worst for worst, _ in nodes])),
                float(np.mean([average for _, average in nodes])),
            )
        )
    return rows


def _node_wide(call: Call, alpha: Alpha) -> tuple[float, float]:
    """Both factors among the ranks of each node, averaged over nodes."""
    worst, average = [], []
    for node in dict.fromkeys(call.nodes):
        part = call.arrived[[n == node for n in call.nodes]]
        worst.append(part.max() - part.min())
        average.append(np.abs(part - part.mean()).mean())
    return float(np.mean(worst)) / alpha(call.bytes), float(np.mean(average)) / alpha(call.bytes)


def late_ranks(profile: Profile) -> list[tuple[int, float, float]]:
    """By rank, over calls of all ranks: how often it is last, and its mean lateness in s."""
    whole = [call for call in profile.calls if len(call.arrived) == profile.ranks]
    last = np.zeros(profile.ranks)
    late = np.zeros(profile.ranks)
    for call in whole:
        last[int(call.arrived.argmax())] += 1
        late += call.arrived - call.arrived.min()
    many = max(len(whole), 1)
    return [(r, float(last[r]) / many, float(late[r]) / many / 1e9) for r in range(profile.ranks)]


_HEADINGS = (
    "operation",
    "size",
    "calls",
    "share",
    "MB",
    "time, s",
    "share",
    "worst / alpha",
    "average / alpha",
    "worst / alpha, node",
    "average / alpha, node",
)


def _cells(row: Row) -> list[str]:
    factors = (row.worst_factor, row.average_factor)
    in_node = (row.node_worst_factor, row.node_average_factor)
    calls = [str(row.calls), f"{row.call_share:.1%}", f"{row.bytes / (1 << 20):.1f}"]
    time = [f"{row.seconds:.4f}", f"{row.time_share:.1%}"]
    return [row.operation, row.size, *calls, *time, *(f"{f:.1f}" for f in (*factors, *in_node))]


def _size(size: int) -> str:
    """Bytes in a unit that leaves a whole number."""
    unit = next((u for u in (1 << 20, 1 << 10) if size and size % u == 0), 1)
    return f"{size // unit} {({1 << 20: 'MB', 1 << 10: 'KB'}).get(unit, 'B')}"


def _legend(alpha: Alpha) -> list[str]:
    return [
        "share: of a row of all sizes among all operations, of a size class in its operation",
        "MB: what a rank gives to a call, the largest of the ranks, summed over calls",
        "time: from a rank's arrival at a call until it left, mean over ranks, summed over calls; of",
        "nonblocking ones (iallreduce) until the wait for it returned, the program's work included",
        "worst: from the first rank's arrival to the last one's; average: mean distance of arrivals",
        "from their mean; both over alpha, the time of one message of the call's size, and averaged",
        f"over calls: alpha = {alpha}",
        "node: the same among the ranks of each node, averaged over nodes",
        "size: KB = 1024 bytes, MB = 1024 KB; lateness: after the first rank's arrival",
    ]


def _notes(profile: Profile) -> list[str]:
    return [f"left out: {many} {reason}" for reason, many in profile.left_out.items()]


def text(profile: Profile) -> str:
    """The tables and the meaning of their columns, for a terminal."""
    lines = [list(_HEADINGS), *(_cells(row) for row in table(profile))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS))]
    out = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    out += ["", "rank  last to arrive  mean lateness"]
    for rank, share, late in late_ranks(profile):
        out.append(f"{rank:4d}  {100 * share:12.1f} %  {1e6 * late:10.1f} us")
    out += ["", *_legend(profile.alpha), *_notes(profile)]
    return "\n".join(out)


def save(profile: Profile, path: str) -> None:
    """Writes .html (tables and plots), .csv (a line per call, and one per reason for which calls are
    left out), .json (the tables) or .png, .svg and
    .pdf (both factors of every allreduce, one panel per size class, as in
    [Mohammadalizadehbakhtevari 2021, fig. 3.9 to 3.13])."""
    suffix = Path(path).suffix
    if suffix in (".png", ".svg", ".pdf"):
        _draw(profile, path)
        return
    if suffix == ".json":
        late = [dict(zip(("rank", "last", "late"), r, strict=True)) for r in late_ranks(profile)]
        content = json.dumps(
            {
                "rows": [asdict(r) for r in table(profile)],
                "ranks": late,
                "left_out": profile.left_out,
                "alpha": [list(point) for point in profile.alpha.measured],
            },
            indent=1,
        )
    elif suffix == ".csv":
        out = io.StringIO()
        writer = csv.writer(out)
        times = ("first_ns", "worst_ns", "average_ns", "seconds", "last_rank")
        writer.writerow(["operation", "bytes", "calls", *times])
        for c in profile.calls:
            last = c.ranks[int(c.arrived.argmax())]
            first = int(c.arrived.min())
            seconds = f"{float((c.left - c.arrived).mean()) / 1e9:.9f}"
            what = [c.operation, c.bytes, 1]
            writer.writerow([*what, first, c.worst, f"{c.average:.0f}", seconds, last])
        for reason, many in profile.left_out.items():
            writer.writerow([f"left out: {reason}", "", many, *[""] * len(times)])
        content = out.getvalue()
    elif suffix == ".html":
        content = _page(profile)
    else:
        raise UsageError(f"{path}: name a file that ends in .html, .csv, .json, .png, .svg or .pdf")
    try:
        Path(path).write_text(content)
    except OSError as error:
        raise IoError(f"cannot write {path}: {error.strerror}") from error


def _page(profile: Profile) -> str:
    def rows(lines: Sequence[Sequence[str]], tag: str) -> str:
        return "".join(
            "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in line) + "</tr>"
            for line in lines
        )

    late = [[str(r), f"{100 * s:.1f} %", f"{1e6 * t:.1f}"] for r, s, t in late_ranks(profile)]
    return (
        "<!doctype html><meta charset=utf-8><title>Arrivals at collectives</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse}td,th{padding:.25em .9em;text-align:right;"
        "border-bottom:1px solid #dde3ea}svg{max-width:100%;height:auto}</style>"
        f"<h1>Arrivals at the collectives of {counted(profile.ranks, 'rank')}</h1>"
        f"<p>alpha = {html.escape(str(profile.alpha))}</p>"
        f"{''.join(f'<p>{note}</p>' for note in _notes(profile))}"
        f"<table>{rows([_HEADINGS], 'th')}"
        f"{rows([_cells(r) for r in table(profile)], 'td')}</table>"
        f"<h2>Which ranks are late</h2><table>{rows([['rank', 'last', 'mean lateness, us']], 'th')}"
        f"{rows(late, 'td')}</table><h2>Imbalance over the run</h2>{_plot(profile)}"
    )


def _draw(profile: Profile, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    alpha = profile.alpha
    calls = [c for c in profile.calls if c.operation == "allreduce"]
    classes = ["all", *dict.fromkeys(size_class(c.bytes) for c in sorted(calls, key=_bytes_of))]
    drawn, axes = pyplot.subplots(
        1, len(classes), figsize=(4 * len(classes), 3.6), squeeze=False, constrained_layout=True
    )
    for axis, name in zip(axes[0], classes, strict=True):
        mine = [c for c in calls if name in ("all", size_class(c.bytes))]
        for label, values in (
            ("worst case", [c.worst / alpha(c.bytes) for c in mine]),
            ("average case", [c.average / alpha(c.bytes) for c in mine]),
        ):
            axis.plot(values, ".", markersize=3, label=label)
        axis.set(xlabel="allreduce, in order", title=name, yscale="symlog")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("imbalance factor")
    axes[0][0].legend(fontsize=8)
    try:
        drawn.savefig(path, dpi=110)
    except OSError as error:
        raise IoError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(drawn)


def _bytes_of(call: Call) -> int:
    return call.bytes


def _plot(profile: Profile) -> str:
    """Both factors of every allreduce, as inline SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axis = pyplot.subplots(figsize=(10, 4), constrained_layout=True)
    alpha = profile.alpha
    calls = [c for c in profile.calls if c.operation == "allreduce"]
    for label, values in (
        ("worst case", [c.worst / alpha(c.bytes) for c in calls]),
        ("average case", [c.average / alpha(c.bytes) for c in calls]),
    ):
        axis.plot(values, ".", markersize=3, label=label)
    axis.set(xlabel="allreduce, in order", ylabel="imbalance factor", yscale="symlog")
    axis.legend(loc="upper right")
    out = io.StringIO()
    drawn.savefig(out, format="svg")
    pyplot.close(drawn)
    return out.getvalue()[out.getvalue().index("<svg") :]
