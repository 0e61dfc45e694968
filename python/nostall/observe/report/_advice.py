"""What to change so that a run waits less, each with the gain that a model of the run expects.

The model, epoch by epoch and on average over ranks:

    time = max(compute, bytes from the source / B, decoding / threads)

The compute time (the epoch without its waits), the bytes, the decoding time and the source's bandwidth
B are those that this run measured. A change replaces a term. Its gain is the difference of the two
times, so that time which the model does not explain cancels out, and at most what the epoch waited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nostall.base._sizes import format_bytes
from nostall.base._words import counted
from nostall.observe._processors import Processors
from nostall.observe._stats import alike
from nostall.observe.report._run import Loader, Run, percent

# Of the staging buffer's bytes, at the most: beyond this it counts as full. A batch may not fit in the
# rest.
_FULL = 0.75
# Of the memory that is left, at the most, for a tier: the training needs some too.
_OF_MEMORY = 0.8
# Of the cores, at the least that other programs took and at the most that nobody did, where the run
# waited for them; of the periods of a CPU limit, at the least in which it held the run back.
_TAKEN, _IDLE, _THROTTLED = 0.2, 0.2, 0.2


@dataclass(frozen=True)
class Advice:
    """One change, and `remedy` as a noun in a sentence; `gain` in seconds of this run, `share` of it.

    With `at_most` the gain is a bound.
    """

    change: str
    remedy: str
    why: str
    gain: float
    share: float
    at_most: bool = False


@dataclass(frozen=True)
class Term:
    """One epoch of one rank, on average: seconds of each term, and of `read` those of the job's first
    epoch."""

    epoch: int
    actual: float
    compute: float
    read: float
    decode: float
    first: float

    @property
    def time(self) -> float:
        """What the model expects."""
        return max(self.compute, self.read, self.decode)


def bandwidth(run: Run) -> float:
    """Bytes per second that the source gave all ranks together while they read; 0 if none read."""
    total = 0.0
    for rank in run.ranks:
        if rank.digest is not None:
            reads = rank.digest.of("data", "read source")
            busy = reads.merged().seconds
            total += float(reads.bytes.sum()) / busy if busy else 0.0
            continue
        size = busy = 0.0  # of loaders that read in turn
        for stats in (x.stats for x in rank.loaders):
            origins = [e.origins["source"] for e in stats.epochs]
            size += sum(o.bytes for o in origins)
            busy += sum(o.seconds for o in origins) / max(1, stats.fetchers)
        total += size / busy if busy else 0.0
    return total


def terms(run: Run, ranks: Sequence[Loader]) -> list[Term]:
    """The model's terms of each epoch of one loader; `ranks` holds the record of each rank."""
    rate = bandwidth(run)
    by_epoch: dict[int, list[tuple[float, float, float, float]]] = {}
    for loader, epochs in zip(ranks, alike([x.stats for x in ranks]), strict=True):
        for e in epochs:
            by_epoch.setdefault(e.epoch, []).append(
                (
                    e.seconds,
                    e.seconds - e.stall_seconds,
                    e.origins["source"].bytes,
                    e.decode_seconds / max(1, loader.stats.threads),
                )
            )
    size_once = max((int(x.settings.get("dataset_bytes", 0)) for x in ranks), default=0)
    out: list[Term] = []
    for epoch, rows in sorted(by_epoch.items()):
        n = len(rows)
        seconds, compute, size, decode = (sum(r[i] for r in rows) for i in range(4))
        read = size / rate if rate else 0.0
        first = 0.0 if out else read
        if epoch < 0 and size_once and rate:  # of several epochs, the first of which read all once
            first = min(first, size_once / rate)
        out.append(Term(epoch, seconds / n, compute / n, read, decode / n, first))
    return out


def _size(count: float) -> str:
    return f"{max(1, math.ceil(count / (1 << 30)))}GiB" if count > 1 << 29 else (
        f"{max(1, math.ceil(count / (1 << 20)))}MiB"
    )  # fmt: skip


def _spaced(count: float) -> str:
    """As people write it, where `_size` is as options take it."""
    return re.sub(r"(\d)([A-Z])", r"\1 \2", _size(count))


def advise(run: Run, most: int = 2) -> list[Advice]:
    """The changes that gain most, the best first; none that gains less than a hundredth."""
    total = run.seconds
    groups = run.loaders()
    found = [a for g in groups for a in _of_loader(run, g, named=len(groups) > 1)]
    waits = {r.rank: s for r in run.ranks if (s := run.peer_seconds(r)) is not None}
    # A rank that is in no round with the others is not late.
    meet = {r.rank for r in run.ranks if r.phase("peers") is not None}
    if run.timeline is not None:
        waits |= {r.rank: r.average * r.rounds for r in run.timeline.ranks}
        meet |= {r.rank for r in run.timeline.ranks}
    if run.peers and len(meet) > 1:
        late = min(meet, key=lambda r: waits[r])
        mean = sum(waits.values()) / len(waits)
        found.append(
            _advice(
                f"look at rank {late}",
                f"a rank {late} as fast as the others",
                f"the others wait for it: it waits {waits[late]:.1f} s for them, the average rank "
                f"{mean:.1f} s",
                mean - waits[late],
                total,
            )
        )
    if run.checkpoints:
        recorded = {kind for r in run.ranks if r.digest is not None for kind in r.digest.spans}
        windowed = ("checkpoint", "copy before an update") in recorded
        change, remedy, why = (
            ("a larger every=",
             "fewer checkpoints",
             "training stood still although its state is copied meanwhile (window=True)")
            if windowed
            else ("save(..., window=True), or a larger every=",
                  "copying the state of checkpoints meanwhile (window=True)",
                  "training stood still while its state was copied; it is written in the background")
            if ("background", "write checkpoint") in recorded
            else ("write checkpoints in the background, by nostall.Checkpointer",
                  "writing checkpoints in the background",
                  "training stood still while they were written")
        )  # fmt: skip
        found.append(_advice(change, remedy, why, run.checkpoints * total, total, windowed))
    worth = [a for a in found if a.share >= 0.01]
    return sorted(worth, key=lambda a: -a.gain)[:most]


def reason(run: Run) -> list[str]:
    """Why no change is advised although the run waited: what holds it, and what would help if that is
    known. By what the run waited for longest; nothing if its record does not say."""
    cause = run.most()[0]
    if cause == "peers" and len(run.ranks) > 1:
        return ["no rank is late: each waits about as long for the others"]
    groups = [g for g in run.loaders() if any(x.stats.epochs for x in g)]
    if cause in ("peers", "checkpoint") or not groups:
        return []
    # Of several loaders the one that was waited for.
    ranks = max(groups, key=lambda g: sum(e.stall_seconds for x in g for e in x.stats.epochs))
    rows = terms(run, ranks)
    if cause == "decode":
        return _reason_of_cores(ranks) or _reason_to_decode(run, rows, ranks)
    if cause == "source":
        return _reason_to_read(rows)
    if cause == "peer":
        return ["the samples come from other nodes' tiers already"]
    if cause == "tier":
        return ["the samples come from this node's tiers already"]
    if cause == "others":
        return ["each sample is read once in the whole job, and another rank was reading it"]
    causes = run.causes()
    rest = percent(sum(causes.values()) - causes["other"])
    return [
        f"only {rest} of the time is due to reading and decoding, all that a change could shorten"
    ]


def _reason_of_cores(ranks: Sequence[Loader]) -> list[str]:
    """What kept the run from its cores, if that was much; nothing if its record does not say."""
    taken = max((taken for taken, idle in _shares(ranks) if idle <= _IDLE), default=0.0)
    if taken >= _TAKEN:
        return [
            f"other programs took about {100 * taken:.0f} % of the cores",
            "running alone, or on cores of its own, would help",
        ]
    most = max(map(_processors, ranks), key=lambda p: p.throttled / max(1, p.periods))
    if most.throttled > _THROTTLED * most.periods:
        share = percent(most.throttled / most.periods)
        return [
            f"the limit of {most.limit:g} CPUs held the run back in {share} of its periods",
            "a higher limit, smaller images or cheaper transforms would help",
        ]
    return []


def _processors(loader: Loader) -> Processors:
    found: Processors = loader.settings.get("processors", Processors())
    return found


def _shares(ranks: Sequence[Loader]) -> list[tuple[float, float]]:
    """Of each set of cores the share that none of these ranks had, and the share that nobody had;
    nothing if that is not known of all ranks."""
    sets: dict[tuple[str, tuple[int, ...]], list[Processors]] = {}
    for x in ranks:
        p = _processors(x)
        sets.setdefault((str(x.settings.get("host", "")), tuple(p.cores)), []).append(p)
    named = [(host, core) for host, cores in sets for core in cores]
    # Of sets that overlap, as of ranks that are bound in part, it is not known whose time it was.
    if len(set(named)) < len(named) or not all(p.whole > 0 for g in sets.values() for p in g):
        return []
    shares = []
    for group in sets.values():
        busy = sum(p.busy / p.whole for p in group) / len(group)
        shares.append((busy - sum(p.own / p.whole for p in group), 1 - busy))
    return shares


def _reason_to_decode(run: Run, rows: Sequence[Term], ranks: Sequence[Loader]) -> list[str]:
    settings = next((x.settings for x in ranks if x.settings), {})
    threads = int(settings.get("threads", 0))
    cores = int(settings.get("rank_cores", 0))
    if 0 < cores <= threads:
        whose = "" if run.alone else " of each rank"
        held = f"all {cores} cores{whose} decode" if cores > 1 else f"the only core{whose} decodes"
        left = "" if _shares(ranks) else ", as far as other programs leave them"
        return [
            f"{held} already{left}",
            "more cores, smaller images or cheaper transforms would help",
        ]
    if threads and sum(t.decode for t in rows) < sum(max(t.compute, t.read) for t in rows):
        return ["decoding is fast enough on average, yet single batches came late"]
    return []


def _reason_to_read(rows: Sequence[Term]) -> list[str]:
    if sum(t.first for t in rows) > 0.9 * sum(t.read for t in rows):
        return ["the first epoch must read everything once"]
    if sum(t.read for t in rows) < sum(max(t.compute, t.decode) for t in rows):
        return ["the source is fast enough on average, yet single batches came late"]
    return []


def _advice(
    change: str, remedy: str, why: str, gain: float, total: float, at_most: bool = False
) -> Advice:
    bound = " (at most this gain)" if at_most else ""
    return Advice(change + bound, remedy, why, gain, gain / total if total > 0 else 0.0, at_most)


def _memory_left(ranks: Sequence[Loader]) -> float:
    """What the tightest limit of memory left on the host with least, when its first rank began."""
    hosts: dict[str, float] = {}
    for settings in (x.settings for x in ranks):
        # Older records have the machine's memory alone, of which the system and the training take some.
        left = settings.get("memory_left", 0.75 * settings.get("memory_bytes", math.inf))
        host = str(settings.get("host", ""))
        hosts[host] = max(hosts.get(host, 0.0), left)
    return min(hosts.values(), default=math.inf)


def _tiers_for(size: float, memory: float) -> tuple[str, str]:
    """The tiers of a node that hold `size` bytes where so much memory is left, as `Advice` has them."""
    ram = size if size <= _OF_MEMORY * memory else memory / 2
    tiers = [("ram", "a RAM tier", ram)] if ram > 0.01 * size else []
    tiers += [("/local/disk", "a file tier", size)] if ram < size else []
    return (
        "tiers=[" + ", ".join(f'"{where}:{_size(n)}"' for where, _, n in tiers) + "]",
        " and ".join(f"{what} of {_spaced(n)}" for _, what, n in tiers),
    )


def _why_tiers(held: int, size: int, nodes: int, together: bool) -> str:
    whose = f"the tiers of {counted(nodes, 'node')} hold"
    effect = "epochs after the first would read nothing from it"
    if not together:
        whose = "each node reads for itself, and its tiers hold"
        effect = "each node would read a sample only once"
    return (
        f"{whose} {format_bytes(float(held))} of {format_bytes(float(size))}, "
        f"so every epoch reads the source again; {effect}"
    )


def _of_loader(run: Run, ranks: Sequence[Loader], named: bool) -> list[Advice]:
    rows = terms(run, ranks)
    settings = next((x.settings for x in ranks if x.settings), {})
    name = f"{ranks[0].stats.loader}: " if named else ""
    found: list[Advice] = []

    def offer(change: str, remedy: str, why: str, gain: float, at_most: bool = False) -> None:
        of = f" for {ranks[0].stats.loader}" if named else ""
        found.append(_advice(name + change, remedy + of, why, gain, run.seconds, at_most))

    def gain(changed: list[Term]) -> float:
        # What was read and decoded beside the training did not delay it.
        return sum(
            min(max(0.0, a.time - b.time), a.actual - a.compute)
            for a, b in zip(rows, changed, strict=True)
        )

    local = int(settings.get("local_world_size", 1))
    nodes = max(1, -(-int(settings.get("world_size", 1)) // local))
    size = int(settings.get("dataset_bytes", 0))
    # Nodes that exchange samples hold the data together; so they do in records that do not say.
    shares = nodes if settings.get("exchange", True) else 1
    held = shares * sum(int(t[1]) for t in settings.get("tiers", []))
    if size and held < size:
        offer(
            *_tiers_for(size / shares, _memory_left(ranks)),
            _why_tiers(held, size, nodes, together=shares == nodes),
            gain([replace(t, read=t.first) for t in rows]),
            # The rest then comes from other nodes, or each node has yet to read it once.
            at_most=nodes > 1,
        )
    sorts = {t[0] for t in settings.get("tiers", [])}
    if size and rows and "kept file" not in sorts:
        offer(
            "a file tier that is kept for the next job: " + (
                'mark it ":keep"' if "file" in sorts
                else f'tiers=[..., "/local/disk:{_size(size / shares)}:keep"]'
            ),
            "a file tier kept from the job before",
            "the next job on the same data finds it, and its first epoch reads " + (
                "nothing from the source" if shares == nodes
                else "from the source only what each node has not read before"
            ),
            gain([replace(t, read=t.read - t.first) for t in rows]),
            at_most=nodes > 1,
        )  # fmt: skip
    threads = int(settings.get("threads", 0))
    cores = int(settings.get("rank_cores", 0))
    if 0 < threads < cores:
        offer(
            f"threads={cores}",
            f"decoding with {cores} threads",
            f"{threads} of {cores} cores of each rank decode",
            gain([replace(t, decode=t.decode * threads / cores) for t in rows]),
        )
    if settings.get("called_steps"):
        waited = sum(e.stall_seconds for x in ranks for e in x.stats.epochs) / len(ranks)
        offer(
            'more threads=, workers="processes", or steps of nostall.transforms',
            "making what callables of Python make faster",
            "batches were waited for while callables of Python made them",
            min(waited, run.causes()["decode"] * run.seconds),
            at_most=True,
        )
    # Decoding may run on the cores that compute; then the sum of both takes the time.
    unexplained = sum(max(0.0, t.actual - max(t.read, t.compute + t.decode)) for t in rows)
    if rows and unexplained > 0.1 * sum(t.actual for t in rows):
        staging = int(settings.get("staging_bytes", 256 << 20))
        used = max((x.stats.memory["staging"] for x in ranks), default=0)
        # More of what was never full would stay empty too.
        if used > _FULL * staging:
            offer(
                f'staging="{_size(2 * staging)}"',
                f"a staging buffer of {_spaced(2 * staging)}",
                "reading and decoding are fast enough on average, yet batches were waited for: a "
                "larger staging buffer smooths bursts",
                unexplained,
                at_most=True,
            )
    return found
