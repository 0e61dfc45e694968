"""Statistics: what a training waited for, and the origins of its samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nostall.base._sizes import format_bytes
from nostall.base._words import counted
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.observe._values import read

if TYPE_CHECKING:
    import os

    from rich.table import Table

FORMAT = 8
_WITHOUT_THREADS = 7  # the format before, without `threads` and `fetchers`

T = TypeVar("T")

# Where a sample can come from, nearest first, as the native loader counts them.
ORIGINS = ("ram", "file", "peer", "source")

# Pools of memory: those of the node, and those of each rank.
SHARED_POOLS = ("ram_tier", "file_tier")
OWN_POOLS = ("staging", "io_buffers", "decoding")
POOLS = SHARED_POOLS + OWN_POOLS


@dataclass(frozen=True)
class OriginStats:
    """Samples and bytes from one origin; seconds are summed over the threads that fetched.

    Bytes that the source gave for a tier alone count there, and at the tier when a batch has them.
    """

    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class EpochStats:
    """One epoch of one rank, or of several ranks together (then seconds are the slowest's).

    `seconds` are those up to the end of the last step. Where the consumer asks for no more after the
    last batch that is not known, and a step is taken to last as long as the longest before.
    Of a job of very many epochs the oldest are one entry, whose `epoch` is -1.
    """

    epoch: int
    seconds: float
    stall_seconds: float
    batches: int
    samples: int
    bytes: int
    origins: dict[str, OriginStats]
    decode_seconds: float
    substituted: list[int] = field(default_factory=list)

    @property
    def stall_fraction(self) -> float:
        """Share of the epoch in which the consumer waited."""
        return self.stall_seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class BatchRecords:
    """Columns with one entry for each of the last batches: when it was handed out, the wait for it,
    its origins.

    `time` is in seconds since the loader was made, `wait` in seconds; `ram`, `file`, `peer` and
    `source` count samples; `queue` counts the finished batches behind this one.
    """

    epoch: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    ram: list[float] = field(default_factory=list)
    file: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    source: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stats:
    """All epochs of one rank; `merge` adds ranks up.

    `lower_bound_bytes` is the fewest bytes that all ranks together must read from the source with
    these tiers, for the whole job (or for the epochs so far, if it has no end); 0 if it was not
    computed. `loader` is the name
    of the loader within its process. `memory` holds the greatest number of bytes by pool, `peers` what
    was exchanged with other nodes (nothing on one node). `sources` has, for each source of a mixture,
    the "samples" that all ranks together took of it in the whole job, and the "epoch" of the source.
    `seed` is the loader's, given or drawn. `device` has, of a recorded run, the "steps" of the loader's
    device, their "seconds" together on its own clock, and the seconds of them that it waited for
    "input", "copy", "gradient" and "checkpoint". `made` is when the loader was made, in seconds since
    1970; None if that is not known, or of several ranks. `threads` transform and `fetchers` fetch;
    0 if that is not known.
    """

    rank: int
    world_size: int
    epochs: list[EpochStats]
    batches: BatchRecords
    lower_bound_bytes: int
    memory: dict[str, int]
    peers: dict[str, int] = field(default_factory=dict)
    loader: str = ""
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    seed: int | None = None
    device: dict[str, float] = field(default_factory=dict)
    made: float | None = None
    threads: int = 0
    fetchers: int = 0

    @property
    def seconds(self) -> float:
        """Seconds in all epochs, the consumer's own work included."""
        return sum(e.seconds for e in self.epochs)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the consumer waited for batches."""
        return sum(e.stall_seconds for e in self.epochs)

    @property
    def samples(self) -> int:
        """Samples handed out."""
        return sum(e.samples for e in self.epochs)

    @property
    def source_bytes(self) -> int:
        """Bytes read from the source."""
        return sum(e.origins["source"].bytes for e in self.epochs)

    @property
    def excess(self) -> float:
        """Bytes read from the source over the lower bound; of all ranks only after `merge`."""
        return self.source_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as written by `save`."""
        return {
            "format": FORMAT,
            **asdict(self),
            "source_bytes": self.source_bytes,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Stats:
        """The inverse of `to_dict`.

        Raises:
            CorruptionError: the data is not of this format.
        """
        if data.get("format") == _WITHOUT_THREADS:
            data = {**data, "threads": 0, "fetchers": 0}
        elif "format" not in data:
            raise CorruptionError("these are no statistics of nostall: they name no format")
        elif data["format"] != FORMAT:
            raise CorruptionError(
                f"these are statistics of format {data['format']!r}, this release reads "
                f"{_WITHOUT_THREADS} and {FORMAT}"
            )
        found: Stats = read(cls, data, "statistics")
        parts: list[tuple[str, dict[str, Any], Iterable[str]]] = [("memory", found.memory, POOLS)]
        parts += [(f"epoch {e.epoch}", e.origins, ORIGINS) for e in found.epochs]
        parts += [(name, counts, ("samples", "epoch")) for name, counts in found.sources.items()]
        if found.device:
            parts.append(("device", found.device, ("steps", "seconds", *DEVICE_CAUSES)))
        for place, has, names in parts:
            if lacking := [name for name in names if name not in has]:
                raise CorruptionError(f"statistics: {place} lacks {lacking[0]}")
        if len({len(column) for column in vars(found.batches).values()}) > 1:
            raise CorruptionError("statistics: the columns of batches differ in length")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON that `nostall report` reads."""
        Path(path).write_text(json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Stats:
        """Reads what `save` wrote.

        Raises:
            IoError: the file cannot be read.
            CorruptionError: the file is not such JSON.
            UsageError: it is another kind of file of nostall.
        """
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise IoError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"{path} is not statistics of nostall: {error}") from error
        if not isinstance(data, dict):
            raise CorruptionError(f"{path} is not statistics of nostall")
        if data.get("kind") == "run":
            raise UsageError(
                f"{path} is what one loader of a recorded run left: give the run's directory"
            )
        try:
            return cls.from_dict(data)
        except CorruptionError as error:
            raise CorruptionError(f"{path}: {error}") from error

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells, a row per epoch and one for the total."""
        rows = [_row(str(e.epoch) if e.epoch >= 0 else "earlier", e) for e in self.epochs]
        if len(self.epochs) > 1:
            rows.append(_row("all", add_up(self.epochs)))
        return rows

    def table(self) -> Table:
        """A rich table of the epochs."""
        from rich.table import Table

        table = Table(title=f"{_who(self)}: waiting, and where samples came from")
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if i == 0 else "right")
        for row in self.rows():
            table.add_row(*row)
        table.caption = self._bound_line()
        return table

    def _bound_line(self) -> str:
        line = f"read from the source {format_bytes(self.source_bytes)}"
        if self.rank >= 0 and self.world_size > 1:
            # The bound is that of all ranks together.
            line += f" by rank {self.rank} of {self.world_size}"
        else:
            line += f", lower bound of the job {format_bytes(self.lower_bound_bytes)}"
        bad = replaced(self.epochs)
        if bad:
            some = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            line += (
                f"\nreplaced, because they cannot be used: {counted(len(bad), 'sample')} ({some})"
            )
        return "\n".join([line, *device_lines(self.device)])

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        from nostall.base import _html as html

        return html.table(_who(self), self.rows(), HEADINGS, self._bound_line())

    def __str__(self) -> str:
        rows = [HEADINGS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join([*lines, self._bound_line()])


# Cause of a wait of a device -> what is waited for.
DEVICE_CAUSES = {
    "input": "input",
    "copy": "copies of batches",
    "gradient": "gradients",
    "checkpoint": "checkpoints",
}


def device_lines(device: dict[str, float]) -> list[str]:
    """What a step takes on the device, and what it would take without each of its waits."""
    steps = device.get("steps", 0)
    if not steps:
        return []

    def per_step(seconds: float) -> str:
        return f"{1e3 * seconds / steps:.3f} ms"

    waits = {words: device[cause] for cause, words in DEVICE_CAUSES.items() if device[cause] > 0}
    whole = device["seconds"]
    parts = [f"without waits for {words} {per_step(whole - s)}" for words, s in waits.items()]
    if len(waits) > 1:
        parts.append(f"without any {per_step(whole - sum(waits.values()))}")
    return [f"a step on the device takes {per_step(whole)}" + "".join(f", {p}" for p in parts)]


# Columns of `Stats.rows`.
HEADINGS = (
    "epoch",
    "seconds",
    "stalled",
    "%",
    "samples",
    "RAM",
    "file",
    "peers",
    "source",
    "from source",
)


def _row(name: str, e: EpochStats) -> tuple[str, ...]:
    return (
        name,
        f"{e.seconds:.2f}",
        f"{e.stall_seconds:.2f}",
        f"{100 * e.stall_fraction:.1f}",
        str(e.samples),
        *(str(e.origins[o].samples) for o in ORIGINS),
        format_bytes(e.origins["source"].bytes),
    )


def _who(stats: Stats) -> str:
    return "all ranks" if stats.rank < 0 else f"rank {stats.rank} of {stats.world_size}"


def add_up(epochs: Sequence[EpochStats]) -> EpochStats:
    """One rank's epochs as one, without samples that were replaced: many epochs have many."""
    return EpochStats(
        epoch=-1,
        seconds=sum(e.seconds for e in epochs),
        stall_seconds=sum(e.stall_seconds for e in epochs),
        batches=sum(e.batches for e in epochs),
        samples=sum(e.samples for e in epochs),
        bytes=sum(e.bytes for e in epochs),
        origins=_sum_origins(epochs),
        decode_seconds=sum(e.decode_seconds for e in epochs),
    )


def replaced(epochs: Iterable[EpochStats]) -> list[int]:
    """The samples whose place others took, each once."""
    return sorted({s for e in epochs for s in e.substituted})


def as_one(epochs: Sequence[EpochStats]) -> EpochStats:
    """Epochs as one, whose size does not grow with their number."""
    return replace(add_up(epochs), substituted=replaced(epochs))


def subtract(now: EpochStats, before: EpochStats) -> EpochStats:
    """What `now` has beside `before`, of sums of one rank; without samples that were replaced."""
    return EpochStats(
        epoch=-1,
        seconds=now.seconds - before.seconds,
        stall_seconds=now.stall_seconds - before.stall_seconds,
        batches=now.batches - before.batches,
        samples=now.samples - before.samples,
        bytes=now.bytes - before.bytes,
        origins={
            name: OriginStats(
                samples=origin.samples - before.origins[name].samples,
                bytes=origin.bytes - before.origins[name].bytes,
                seconds=origin.seconds - before.origins[name].seconds,
            )
            for name, origin in now.origins.items()
        },
        decode_seconds=now.decode_seconds - before.decode_seconds,
    )


def _sum_origins(epochs: Sequence[EpochStats]) -> dict[str, OriginStats]:
    return {
        name: OriginStats(
            samples=sum(e.origins[name].samples for e in epochs),
            bytes=sum(e.origins[name].bytes for e in epochs),
            seconds=sum(e.origins[name].seconds for e in epochs),
        )
        for name in ORIGINS
    }


def by_loader(found: Iterable[tuple[int, T]], stats: Callable[[T], Stats]) -> list[list[T]]:
    """Groups statistics by loader, one of each process, which are numbered; a loader is identified by
    its name.

    A process that has a name twice, as after a restart, begins another group.
    """
    groups: dict[tuple[tuple[str, int], int, int], list[T]] = {}
    times: Counter[tuple[int, str, int]] = Counter()
    for process, item in found:
        name, world = stats(item).loader, stats(item).world_size
        times[process, name, world] += 1
        key = _number_last(name), world, times[process, name, world]
        groups.setdefault(key, []).append(item)
    return [groups[key] for key in sorted(groups)]


def alike(ranks: Sequence[Stats]) -> list[list[EpochStats]]:
    """The epochs of each; where one of them has the oldest as one entry, so have the others."""
    summed = [s.epochs for s in ranks if s.epochs and s.epochs[0].epoch < 0]
    first = max((max(e.epoch for e in epochs[:2]) for epochs in summed), default=-1)
    found = []
    for s in ranks:
        earlier = [e for e in s.epochs if e.epoch < first]
        later = [e for e in s.epochs if e.epoch >= first]
        found.append([*([as_one(earlier)] if earlier else []), *later])
    return found


def _number_last(name: str) -> tuple[str, int]:
    word, _, number = name.rpartition(" ")
    return (word, int(number)) if number.isdigit() else (name, 0)


def merge(ranks: Sequence[Stats]) -> Stats:
    """The ranks of one loader together: samples and bytes add up, the slowest rank's seconds count.

    Raises:
        UsageError: no statistics, or of different jobs, or of several loaders of a rank.
    """
    if not ranks:
        raise UsageError("there are no statistics to merge")
    if len({s.world_size for s in ranks}) != 1 or len({s.rank for s in ranks}) != len(ranks):
        raise UsageError(
            "these statistics are of different jobs or loaders: merge takes one of each rank"
        )
    everyones = alike(ranks)
    epochs = []
    for number in sorted({e.epoch for of_rank in everyones for e in of_rank}):
        # An epoch has several entries of a rank where it was left and resumed, or set again.
        entries = [[e for e in of_rank if e.epoch == number] for of_rank in everyones]
        parts = [as_one(of_rank) for of_rank in entries if of_rank]
        total = add_up(parts)
        epochs.append(
            EpochStats(
                epoch=number,
                seconds=max(e.seconds for e in parts),
                stall_seconds=max(e.stall_seconds for e in parts),
                batches=max(e.batches for e in parts),
                samples=total.samples,
                bytes=total.bytes,
                origins=total.origins,
                decode_seconds=total.decode_seconds,
                substituted=replaced(parts),
            )
        )
    columns = {
        name: [value for s in ranks for value in getattr(s.batches, name)]
        for name in BatchRecords.__dataclass_fields__
    }
    shared = {name: max(s.memory[name] for s in ranks) for name in SHARED_POOLS}
    own = {name: sum(s.memory[name] for s in ranks) for name in OWN_POOLS}
    return Stats(
        rank=-1,
        world_size=ranks[0].world_size,
        epochs=epochs,
        batches=BatchRecords(**columns),
        # Ranks of a job without an end may have been asked at different epochs.
        lower_bound_bytes=max(s.lower_bound_bytes for s in ranks),
        memory={**shared, **own},
        peers={
            name: sum(s.peers.get(name, 0) for s in ranks)
            for name in dict.fromkeys(name for s in ranks for name in s.peers)
        },
        loader=ranks[0].loader,
        # Of all ranks together, as each of them has it.
        sources=max(
            (s.sources for s in ranks),
            key=lambda counts: sum(c["samples"] for c in counts.values()),
        ),
        seed=ranks[0].seed,
        device={
            name: sum(s.device.get(name, 0) for s in ranks)
            for name in dict.fromkeys(name for s in ranks for name in s.device)
        },
        threads=sum(s.threads for s in ranks),
        fetchers=sum(s.fetchers for s in ranks),
    )
