"""A recorded run: where each rank waited, in numbers and in words.

`read` takes a directory that `nostall.trace` wrote. Horovod timelines and traces of the PyTorch
profiler in the same directory show how long ranks waited for each other.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from nostall.errors import CorruptionError, Error, UsageError
from nostall.observe import _values as values
from nostall.observe._held import Held
from nostall.observe._processors import Processors
from nostall.observe._stats import POOLS, BatchRecords, Stats, by_loader, device_lines
from nostall.observe.report import _digest as digest
from nostall.observe.report._digest import CAUSES, Digest, Spans
from nostall.observe.report._mpi_trace import MPI
from nostall.observe.timelines import Analysis, analyze, is_trace
from nostall.observe.timelines._stream import Source

CAUSE_NAMES = {
    "source": "the source",
    "peer": "other nodes' tiers",
    "tier": "this node's tiers",
    "others": "samples that other ranks read",
    "decode": "decoding",
    "other": "threads that stood idle",
}
_IDLE = (
    "Threads that stood idle neither read for the batch nor decoded: so it is while a loader or an "
    "epoch starts, when a batch is handed over, and while other work has the cores."
)


# What a report takes of a loader's settings.
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("host", "command", "began", "storage", "dataset"), str),
    **dict.fromkeys(("threads", "fetchers", "rank_cores", "world_size", "local_world_size"), int),
    **dict.fromkeys(("samples", "dataset_bytes", "batch_size"), int),
    **dict.fromkeys(("memory_bytes", "memory_left", "staging_bytes"), int),
    "epochs": int | None,
    "exchange": bool,
    "versions": dict[str, str],
    "tiers": list[tuple[str, int, str]],
    "held": Held,
    "processors": Processors,
}
_RECORD = ".run.json"
_AT_LEAST_ONE = ("threads", "fetchers", "world_size", "local_world_size")


@dataclass
class Loader:
    """One loader of one rank: its settings and its statistics, so far if it has not ended."""

    settings: dict[str, Any]
    stats: Stats
    ended: bool = True


@dataclass
class Rank:
    """Everything that one rank recorded."""

    rank: int
    loaders: list[Loader] = field(default_factory=list)
    digest: Digest | None = None

    @property
    def world(self) -> int:
        """Ranks of the training; the launcher's job may have more processes."""
        worlds = [x.stats.world_size for x in self.loaders]
        return max(worlds or [self.digest.world if self.digest is not None else 1])

    @property
    def threads(self) -> int:
        """Threads that transform, of the loaders that were waited for longest together: others take
        turns with them, and events do not say whose they are."""
        groups = _used_together([x.stats for x in self.loaders])
        most = max(groups, key=lambda g: sum(s.stall_seconds for s in g), default=[])
        return sum(s.threads for s in most) or 1

    @property
    def seconds(self) -> float:
        """The rank's part of the run; without a trace the time in which any loader had an epoch."""
        if self.digest is not None:
            return self.digest.seconds
        return _together([x.stats for x in self.loaders])

    @property
    def began(self) -> float:
        """When it did, in seconds since 1970, by its own host; 0 if that is not known."""
        if self.digest is not None:
            return self.digest.origin
        moments = []
        for settings in (x.settings for x in self.loaders):
            with suppress(ValueError):
                moments.append(
                    datetime.strptime(settings.get("began", ""), values.MOMENT).timestamp()
                )
        return min(moments, default=0.0)

    def waits(self) -> dict[str, float]:
        """Seconds of waiting for batches, by cause; without a trace, from sums of the statistics."""
        if self.digest is not None:
            finished = any(x.settings.get("works_after_core", True) for x in self.loaders)
            return self.digest.causes(
                self.threads, alone=self.world == 1, finished=finished or not self.loaders
            )
        out = dict.fromkeys(CAUSES, 0.0)
        for loader in self.loaders:
            threads, fetchers = max(1, loader.stats.threads), max(1, loader.stats.fetchers)
            for epoch in loader.stats.epochs:
                work = {
                    "source": epoch.origins["source"].seconds / fetchers,
                    "peer": epoch.origins["peer"].seconds / fetchers,
                    "tier": (epoch.origins["ram"].seconds + epoch.origins["file"].seconds)
                    / fetchers,
                    "decode": epoch.decode_seconds / threads,
                }
                total = sum(work.values())
                if total <= 0:
                    out["other"] += epoch.stall_seconds
                    continue
                for cause, seconds in work.items():
                    out[cause] += epoch.stall_seconds * seconds / total
        # Two loaders may be waited for at the same time.
        most = min(1.0, self.seconds / max(sum(out.values()), 1e-12))
        return {cause: most * seconds for cause, seconds in out.items()}

    def phase(self, category: str) -> float | None:
        """Seconds in spans of a category; None if nothing was recorded."""
        return self.digest.busy(category) if self.digest is not None else None


def _together(stats: Sequence[Stats]) -> float:
    """Seconds in which a process's loaders were in epochs, of which several may lie in one another.

    An epoch of which no batch is recorded counts as one by itself.
    """
    alone, spans = 0.0, [(0.0, 0.0)]
    zero = min((s.made for s in stats if s.made is not None), default=0.0)
    for one in stats:
        left = len(one.batches.time)
        for epoch in reversed(one.epochs):
            left -= epoch.batches
            if one.made is None or left < 0 or epoch.batches == 0:
                alone += epoch.seconds
                continue
            began = one.made - zero + one.batches.time[left] - one.batches.wait[left]
            spans.append((began, began + epoch.seconds))
    begin, end = np.array(spans).T
    nothing = np.zeros_like(begin)
    return alone + Spans(begin, end, nothing, nothing).merged().seconds


def _used_together(stats: Sequence[Stats]) -> list[list[Stats]]:
    """Groups a process's loaders: most batches of a loader come right after one of another's, and not
    few of that one's after it, as of two that are zipped. Validation inside an epoch takes many in a
    row, or few."""
    n = len(stats)
    times = [np.asarray(s.batches.time, np.float64) + (s.made or 0.0) for s in stats]
    order = np.repeat(np.arange(n), [len(t) for t in times])
    order = order[np.argsort(np.concatenate([*times, np.zeros(0)]), kind="stable")]
    after = np.bincount(order[1:] * n + order[:-1], minlength=n * n).reshape(n, n)
    np.fill_diagonal(after, 0)
    group = np.arange(n)
    for i in range(n):
        other = after[i].argmax()
        if after[i].sum() > len(times[i]) / 2 and after[other].sum() > len(times[other]) / 20:
            group[group == group[i]] = group[other]
    return [[s for s, g in zip(stats, group, strict=True) if g == one] for one in np.unique(group)]


@dataclass
class Run:
    """All ranks of a run, and how long ranks waited for each other if a timeline shows it."""

    path: str
    ranks: list[Rank]
    timeline: Analysis | None
    notes: list[str]

    @property
    def stats(self) -> list[Stats]:
        """The statistics of all loaders."""
        return [x.stats for r in self.ranks for x in r.loaders]

    def loaders(self) -> list[list[Loader]]:
        """The records of each loader of the job, for example of training and of validation."""
        return by_loader(((r.rank, x) for r in self.ranks for x in r.loaders), lambda x: x.stats)

    @property
    def begun(self) -> bool:
        """Whether there is anything to say of its time: not before the first batch of all loaders."""
        loaders = [x for r in self.ranks for x in r.loaders]
        waits = all(x.ended for x in loaders) or any(x.stats.epochs for x in loaders)
        return waits and self.seconds > 0

    @property
    def modelled(self) -> bool:
        """Whether loaders left what the model of the advice is made of."""
        return any(x.settings and x.stats.epochs for r in self.ranks for x in r.loaders)

    @property
    def alone(self) -> bool:
        """Whether one rank trained: nothing is said of ranks then."""
        return len(self.ranks) == 1 and self.ranks[0].world == 1

    @property
    def seconds(self) -> float:
        """Seconds of the run, on average over ranks."""
        return sum(r.seconds for r in self.ranks) / len(self.ranks)

    def causes(self) -> dict[str, float]:
        """Share of the run in which ranks waited for data, by cause, on average."""
        total = sum(r.seconds for r in self.ranks)
        waits = [r.waits() for r in self.ranks]
        return {c: sum(w[c] for w in waits) / total if total else 0.0 for c in CAUSES}

    @property
    def data(self) -> float:
        """Share of the run in which ranks waited for data."""
        return sum(self.causes().values())

    def _phase(self, category: str) -> float | None:
        traced = [(r.phase(category), r.seconds) for r in self.ranks if r.digest is not None]
        total = sum(t for _, t in traced)
        if not total or all(p is None for p, _ in traced):
            return None
        return sum(p or 0.0 for p, _ in traced) / total

    @property
    def peers(self) -> float | None:
        """Share of the run in which ranks waited for each other; None if that was not recorded."""
        spans = self._phase("peers")
        if spans is not None or self.timeline is None or not self.timeline.rounds:
            return spans
        if self.timeline.negotiation_average is None:
            return None
        lengths = [r.seconds for r in self.timeline.rounds]
        mean = sum(lengths) / len(lengths)
        return self.timeline.negotiation_average / mean if mean else None

    def peer_seconds(self, rank: Rank) -> float | None:
        """Seconds that one rank waited for the others; None if that was not recorded."""
        if rank.phase("peers") is None and self.timeline is not None:
            found = [r.average * r.rounds for r in self.timeline.ranks if r.rank == rank.rank]
            if found:
                return sum(found)
        return self.phase(rank, "peers")

    def phase(self, rank: Rank, category: str) -> float | None:
        """Seconds of a rank in spans of a category; 0 of one whose trace lacks what others have."""
        seconds = rank.phase(category)
        if seconds is None and rank.digest is not None and self._phase(category) is not None:
            return 0.0
        return seconds

    @property
    def checkpoints(self) -> float | None:
        """Share of the run in which ranks waited for checkpoints; None if none was recorded."""
        return self._phase("checkpoint")

    @property
    def device(self) -> dict[str, float]:
        """Steps of the ranks' devices and their waits; loaders of one rank share its device."""
        ranks = [
            next((x.stats.device for x in r.loaders if x.stats.device), {}) for r in self.ranks
        ]
        return {n: sum(d[n] for d in ranks if d) for d in ranks for n in d}

    @property
    def waited(self) -> float:
        """Share of the run in which ranks waited for anything that was recorded."""
        return self.data + (self.peers or 0.0) + (self.checkpoints or 0.0)

    def most(self) -> tuple[str, float]:
        """What was waited for longest, of `CAUSES`, "peers" and "checkpoint", and its share."""
        shares = self.causes() | {"peers": self.peers or 0.0, "checkpoint": self.checkpoints or 0.0}
        cause = max(shares, key=lambda c: shares[c])
        return cause, shares[cause]


def files_of(directory: Path) -> list[Path]:
    """The records of a run's directory."""
    return sorted([*directory.glob(f"*{_RECORD}"), *directory.glob("*.trace.json*")])


def read(directory: str | os.PathLike[str]) -> Run:
    """Reads a run. What cannot be read is left out, and noted.

    Raises:
        UsageError: the directory holds no run.
    """
    home = Path(directory)
    processes: dict[str, Rank] = {}
    notes: list[str] = []
    others: list[Path] = []
    of_mpi: list[Digest] = []
    for path in sorted(p for p in home.iterdir() if p.is_file()):
        try:
            if path.name.endswith(_RECORD):
                loader, stem = _loader(path), path.name.removesuffix(_RECORD).rpartition(".")[0]
                # Loaders of one process may have other ranks than its own, as one that validates alone.
                named = re.match(r"rank(\d+)", stem)
                rank = int(named[1]) if named else loader.stats.rank
                processes.setdefault(stem, Rank(rank)).loaders.append(loader)
            elif digest.is_ours(source := Source(path)):
                found = digest.read(source)
                notes += found.notes
                if MPI in path.suffixes:
                    of_mpi.append(found)
                    continue
                stem = path.name.partition(".trace.json")[0]
                process = processes.setdefault(stem, Rank(found.rank))
                process.rank, process.digest = found.rank, found
            elif path.suffix in (".json", ".gz") and is_trace(path):
                others.append(path)
        except Error as error:
            notes.append(f"left out: {error}")
    for process in processes.values():
        process.rank = _rank_of(process)
    ranks, said = _one_of_each(list(processes.values()))
    notes += said
    for found in of_mpi:
        rank_of = ranks.setdefault(found.rank, Rank(found.rank))
        rank_of.digest = rank_of.digest.joined(found) if rank_of.digest is not None else found
    timeline = None
    if others:
        try:
            timeline = analyze(others)
            notes += timeline.notes
        except Error as error:
            notes.append(f"left out: {error}")
    if not ranks:
        raise UsageError(
            f"{home} holds no recorded run: run with NOSTALL_TRACE={home}, or by "
            f"'nostall profile -o {home} -- command'"
        )
    world = max(r.world for r in ranks.values())
    lacking = (Rank(r) for r in range(min(world, 4096)) if r not in ranks)
    notes += _of_ranks(lacking, "left no record")
    notes += lacks(list(ranks.values()))
    return Run(str(home), [ranks[r] for r in sorted(ranks)], timeline, notes)


def _rank_of(process: Rank) -> int:
    """Its rank in the training. Without a launcher its files have that of its first loader, which may
    validate alone."""
    widest = max((x.stats for x in process.loaders), key=lambda s: s.world_size, default=None)
    known = process.digest.world if process.digest is not None else 1
    return widest.rank if widest is not None and widest.world_size > known else process.rank


def _one_of_each(processes: Sequence[Rank]) -> tuple[dict[int, Rank], list[str]]:
    """A process of each rank, all of one attempt, and what is left out."""
    counts = Counter(p.rank for p in processes)
    if len(counts) == len(processes):
        return {p.rank: p for p in processes}, []
    attempts = _attempts(processes)
    longest = max(attempts, key=lambda a: sum(p.seconds for p in a))
    notes = []
    if len(attempts) > 1:
        number = 1 + next(i for i, a in enumerate(attempts) if a is longest)
        notes.append(
            f"the directory holds {len(attempts)} attempts, as after restarts: number {number}, which "
            "has most of the time, is reported, the others are left out"
        )
    ranks = {p.rank: p for p in sorted(longest, key=lambda p: p.seconds)}
    notes += _of_ranks(
        (ranks[r] for r, count in Counter(p.rank for p in longest).items() if count > 1),
        "left records of several processes: the longest is reported, the others are left out",
    )
    return ranks, notes


def _attempts(processes: Sequence[Rank]) -> list[list[Rank]]:
    """Groups processes by the time in which they ran: an attempt ends before the next one begins."""
    found: list[list[Rank]] = []
    end = -math.inf
    for process in sorted(processes, key=lambda p: p.began):
        if process.began > end:
            found.append([])
        found[-1].append(process)
        end = max(end, process.began + process.seconds)
    return found


def _of_ranks(ranks: Iterable[Rank], words: str) -> list[str]:
    """A note of these ranks; none if there are none."""
    numbers = [str(number) for number in sorted(r.rank for r in ranks)]
    if "-1" in numbers:  # of statistics that are merged
        return [f"all ranks {words}"]
    several = "s" if len(numbers) > 1 else ""
    return [f"rank{several} {', '.join(numbers)[:80]} {words}"] if numbers else []


def lacks(ranks: Sequence[Rank]) -> list[str]:
    """What is missing in the records, and what follows from that."""
    return [
        *_of_ranks(
            (r for r in ranks if r.digest is None),
            "left no trace: waits are divided by sums",
        ),
        *_of_ranks(
            (r for r in ranks if not r.loaders and r.digest and r.digest.category("data")),
            "left no settings of loaders: one thread is taken to decode, and what to change is not "
            "known",
        ),
        *_of_ranks(
            (r for r in ranks if not all(x.ended for x in r.loaders)),
            "did not come to end all loaders, as after a kill: their statistics end at most a second "
            "before the last batch, and lack single batches and samples that were replaced",
        ),
    ]


def _so_far(record: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What a record lacks whose loader has not ended: from what it told ``nostall top``."""

    def told(kind: str, names: Sequence[str], otherwise: dict[str, Any]) -> dict[str, Any]:
        path = record.with_name(record.name.replace(_RECORD, f".{kind}.json"))
        try:
            data = json.loads(path.read_text())
            return {name: data[name] for name in names}
        except (OSError, ValueError, RecursionError, LookupError, TypeError):  # of no batch yet
            return otherwise

    nothing = Stats(0, 1, [], BatchRecords(), 0, dict.fromkeys(POOLS, 0)).to_dict()
    given = {n: settings.get(n) for n in ("rank", "world_size", "seed", "threads", "fetchers")}
    found = told("live", ("epochs", "pools"), {"epochs": [], "pools": nothing["memory"]})
    stats = {"epochs": found["epochs"], "memory": found["pools"], "loader": settings.get("name")}
    return {
        "held": told("held", list(vars(Held())), vars(Held())),
        "stats": {**nothing, **given, **stats},
    }


def _loader(path: Path) -> Loader:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{path} is not a record of a run: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("stats", {}), dict):
        raise CorruptionError(f"{path} is not a record of a run")
    ended = "stats" in data
    if not ended:
        data |= _so_far(path, data)
    try:
        stats = Stats.from_dict(data.pop("stats"))
        settings = {k: values.read(_SETTINGS.get(k, Any), v, k) for k, v in data.items()}
        known = {k: getattr(stats, k) or settings.get(k, 0) for k in ("threads", "fetchers")}
        stats = replace(stats, **known)
    except CorruptionError as error:
        raise CorruptionError(f"{path}: {error}") from error
    for name in _AT_LEAST_ONE:
        if settings.get(name, 1) < 1:
            raise CorruptionError(f"{path}: {name} must be at least 1, not {settings[name]}")
    held = settings.get("held", Held())
    if not len(held.time) == len(held.own) == len(held.shared):
        raise CorruptionError(f"{path}: the columns of held differ in length")
    return Loader(settings, stats, ended)


def percent(share: float | None) -> str:
    """A share as text."""
    return "not recorded" if share is None else f"{100 * share:.1f} %"


def words(run: Run) -> str:
    """Where the run waited, in one paragraph."""
    if not run.begun:
        return "Waits are recorded as they end, so that nothing is known of how it waited."
    causes = run.causes()
    parts = sorted(
        ((share, cause) for cause, share in causes.items() if share >= 0.001), reverse=True
    )
    storage = next(
        (str(x.settings["storage"]) for r in run.ranks for x in r.loaders
         if x.settings.get("storage")), ""
    )  # fmt: skip
    detail = ", ".join(
        f"{percent(share)} for {CAUSE_NAMES[cause]}"
        + (f" ({storage})" if cause == "source" and storage else "")
        for share, cause in parts
    )
    digits = 1 if run.seconds >= 10 else 3
    text = (
        f"This run waited {percent(run.waited)} of its time, {run.waited * run.seconds:.{digits}f} of "
        f"{run.seconds:.{digits}f} s{'' if run.alone else ' per rank'}: {percent(run.data)} for data"
        + (f" ({detail})" if detail else "")
    )
    for name, share in (("peers", run.peers), ("checkpoints", run.checkpoints)):
        text += f", {percent(share)} for {name}" if share is not None else ""
    absent = ["peers"] if run.peers is None and not run.alone else []
    absent += ["checkpoints"] if run.checkpoints is None else []
    text += "."
    if absent:
        text += f" Waits for {' and '.join(absent)} were not recorded."
    if causes["other"] >= 0.001:
        text += f" {_IDLE}"
    if len(run.ranks) > 1:
        shares = {r.rank: sum(r.waits().values()) / r.seconds for r in run.ranks if r.seconds}
        most = max(shares, key=lambda r: shares[r])
        text += f" Rank {most} waited longest for data: {percent(shares[most])}."
    return " ".join(
        [text, *(f"{line[:1].upper()}{line[1:]}." for line in device_lines(run.device))]
    )
