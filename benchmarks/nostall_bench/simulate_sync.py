"""The cost of agreement on gradients at scale: the gradient engine's protocols, cycle by cycle.

Discrete events without arithmetic: every rank has a training that produces groups of gradients, and
a progress thread that sleeps, wakes late, agrees and reduces, as native/sync does
([Pumma 2020, sec. 6.2.2 and 6.3]). All ranks of a cycle are one array, so 24,576 of them take
seconds. The deciding costs are measured (`Costs`, from ``nostall bench sync --json``): the time of an
agreement, and how late a sleeping thread wakes while other threads have the cores.

A thread that waits inside a blocking agreement occupies a core; while the input pipeline has the
others, the training loses `contention` of that time ([Pumma 2020, sec. 6.2.4]). This repeats itself: a
late thread makes the others wait, so they do not sleep in the next cycle, but the late one does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UsageError

Floats = NDArray[np.float64]
Mode = Literal["negotiated", "GS", "NBCS", "SCP", "TOPO", "SCP-TOPO"]
MODES: tuple[Mode, ...] = ("negotiated", "GS", "NBCS", "SCP", "TOPO", "SCP-TOPO")
#: their names in ``nostall bench sync``
_WAYS: dict[str, Mode] = {
    "negotiated": "negotiated",
    "negotiated GS": "GS",
    "negotiated NBCS": "NBCS",
    "negotiated, own core": "SCP",
    "planned": "TOPO",
    "planned, own core": "SCP-TOPO",
}
_MEASURED = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Costs:
    """Measured costs of the engine. Times are seconds.

    Attributes:
        agree: one agreement among ranks of a node that have all arrived.
        late: by mode, how late the thread woke beside training and input pipeline; entry i counts
            [2**i, 2**(i+1)) microseconds, entry 0 less than 2. It differs by mode: a thread that spins
            has used up its time slice when it wakes. A mode that is missing counts as negotiated;
            a mode without counts wakes in time.
    """

    agree: float
    late: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        if self.agree < 0 or any(n < 0 for counts in self.late.values() for n in counts):
            raise UsageError("times and counts of a measured engine must be from 0 on")

    def late_in(self, mode: Mode) -> tuple[float, ...]:
        """The histogram for `mode`."""
        return self.late.get(mode, self.late.get("negotiated", ()))


@dataclass(frozen=True)
class Training:
    """The work of the ranks in an iteration, and the settings of the engine. Times are seconds.

    Attributes:
        compute: forward and backward pass. jitter: standard deviation of it, as a part of it.
        groups: number of groups of gradients that are reduced together. first: when the first group is
            complete, as a part of `compute`; the last one is complete at its end, the others evenly
            between.
        reduce: reduction of all groups, on one node. hop: what each doubling of the ranks adds to every
            reduction and agreement.
        window: the part of an iteration in which the input pipeline is active, too.
        contention: the part of a spinning thread's time that the training loses inside the window.
        partition: how much slower the training is without the progress thread's core.
        cycle: HOROVOD_CYCLE_TIME. test_sleep: between two tests of a nonblocking agreement.
    """

    compute: float = 0.055
    jitter: float = 0.01
    groups: int = 2
    first: float = 0.95
    reduce: float = 0.012
    hop: float = 4e-6
    window: float = 0.48
    contention: float = 0.5
    partition: float = 0.0
    cycle: float = 0.005
    test_sleep: float = 0.0002

    def __post_init__(self) -> None:
        if self.compute <= 0 or self.groups < 1 or self.cycle <= 0 or self.test_sleep <= 0:
            raise UsageError("compute, groups, cycle and test_sleep must be positive")
        if not 0 < self.first <= 1 or not 0 <= self.window <= 1 or not 0 <= self.contention <= 1:
            raise UsageError("first, window and contention are parts: from 0 to 1")
        if min(self.jitter, self.reduce, self.hop, self.partition) < 0:
            raise UsageError("jitter, reduce, hop and partition must be from 0 on")


@dataclass(frozen=True)
class Outcome:
    """Means over ranks and iterations: seconds of an iteration, and parts of the run.

    `busy` is the progress thread on its core [Pumma 2020, fig. 6.10 and 6.18], `spin` the part of it
    that only waits for other ranks, `latency` gradients that wait for the thread to wake, `lost`
    compute time that contention took.
    """

    mode: Mode
    ranks: int
    iteration: float
    busy: float
    spin: float
    latency: float
    lost: float
    cycles: float


def measured(path: str | os.PathLike[str] | None = None) -> Costs:
    """Costs from the JSON of ``nostall bench sync --input loader``.

    None: those that come with nostall-bench.

    Raises:
        UsageError: not such a file, or it has no negotiated runs.
    """
    try:
        data = json.loads(Path(path or _MEASURED).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no measurement of nostall bench sync: {error}") from error
    if isinstance(data, dict) and "agree" in data:
        return Costs(float(data["agree"]), {m: tuple(c) for m, c in data["late"].items()})
    late: dict[str, tuple[float, ...]] = {}
    agree = []
    for run in data.get("runs", []) if isinstance(data, dict) else []:
        mode = _WAYS.get(run.get("way"))
        for rank in run["ranks"] if mode else []:
            counts = rank.get("oversleeps") or ()
            sums = late.setdefault(str(mode), (0.0,) * len(counts))
            late[str(mode)] = tuple(a + b for a, b in zip(sums, counts, strict=True))
            if mode == "negotiated":
                own = rank["engine_order_ns"] - rank["engine_order_wait_ns"]
                agree.append(own / 1e9 / rank["engine_cycles"])
    if not agree:
        raise UsageError(f'{path} has no runs of "negotiated" with the engine\'s counters')
    return Costs(sorted(agree)[len(agree) // 2], late)


def sampler(counts: Sequence[float], rng: np.random.Generator) -> Callable[[int], Floats]:
    """Draws times, seconds, from a histogram of `Costs`; evenly in the logarithm within an entry."""
    weights = np.array(counts, float)
    if weights.sum() <= 0:
        return lambda n: np.zeros(n)
    ends = np.cumsum(weights) / weights.sum()

    def draw(n: int) -> Floats:
        entry = np.searchsorted(ends, rng.random(n), side="right")
        within = rng.random(n)
        micros = np.where(entry == 0, 2 * within, np.exp2(entry + within))
        return np.asarray(micros * 1e-6)

    return draw


class _Cluster:
    """The ranks of one run; times are arrays of shape (ranks,)."""

    def __init__(
        self,
        training: Training,
        costs: Costs,
        ranks: int,
        mode: Mode,
        rng: np.random.Generator,
        late: Callable[[int], Floats] | None = None,
    ) -> None:
        self.training, self.ranks, self.mode, self.rng = training, ranks, mode, rng
        own_core = mode.startswith("SCP")
        self.late = late or sampler(costs.late_in(mode), rng)
        self.contention = 0.0 if own_core else training.contention
        self.compute = training.compute * (1 + training.partition * own_core)
        doublings = math.log2(ranks) if ranks > 1 else 0.0
        self.agree = costs.agree + 2 * training.hop * doublings
        self.reduce = training.reduce / training.groups + training.hop * doublings
        self.free = np.zeros(ranks)  # when each thread has ended its last cycle
        self.previous = np.zeros(ranks)  # T_previous of each rank
        self.cycles = 0
        self.spin = self.working = self.latency = self.lost = 0.0
        #: waits on the core in the last cycle: (begin on each rank, end)
        self.spun: list[tuple[Floats, float]] = []
        #: (sleep from, awake, done) of every cycle, for timelines
        self.history: list[tuple[Floats, Floats, Floats]] | None = None

    def ready_times(self, begin: float) -> Floats:
        """When each group is complete on each rank, shape (groups, ranks), undisturbed."""
        t = self.training
        took = self.compute * np.maximum(0.0, 1 + t.jitter * self.rng.standard_normal(self.ranks))
        parts = np.linspace(t.first, 1.0, t.groups) if t.groups > 1 else np.ones(1)
        return np.asarray(begin + parts[:, None] * took[None, :])

    def cycle(self) -> Floats:
        """Sleeps, wakes and agrees; returns when each thread woke."""
        t, n = self.training, self.ranks
        sleep = np.maximum(0.0, t.cycle - self.previous)
        begin = self.free
        self.spun = []
        if self.mode == "GS":
            self.spun.append((begin, float(begin.max())))
            together = float(begin.max()) + self.agree
            self.working += self.agree * n
            sleep = np.full(n, sleep.min())
            begin = np.full(n, together)
        awake = begin + sleep + np.where(sleep > 0, self.late(n), 0.0)
        met = float(awake.max()) + self.agree
        if self.mode == "NBCS":
            # Tests at every test_sleep from its own start; each test may be late as well.
            tests = np.maximum(1, np.ceil((met - awake) / t.test_sleep))
            done = awake + tests * t.test_sleep + self.late(n)
            done = np.maximum(done, met)
        else:
            done = np.full(n, met)
            self.spun.append((awake, met - self.agree))
        self.working += self.agree * n
        self.cycles += 1
        if self.history is not None:
            self.history.append((begin, awake, done))
        self.previous = done - awake
        self.free = done
        return awake

    def negotiated(self, ready: Floats, begin: float) -> float:
        """Runs one iteration; returns when its last group is reduced."""
        t = self.training
        open_groups = list(range(t.groups))
        delay = np.zeros(self.ranks)  # lost to the training by threads that spun beside it
        window = begin + t.window * self.compute
        end = begin
        while open_groups:
            awake = self.cycle()
            here = [g for g in open_groups if bool((ready[g] + delay <= awake).all())]
            for since, until in self.spun:
                self.spin += float((until - since).sum())
                stop = np.minimum(until, np.minimum(window, ready[-1] + delay))
                taken = self.contention * np.maximum(0.0, stop - np.maximum(since, begin))
                delay += taken
                self.lost += float(taken.sum())
            if not here:
                continue
            for g in here:
                came = ready[g] + delay
                self.latency += float(np.maximum(0.0, awake - came).sum()) / t.groups
            open_groups = [g for g in open_groups if g not in here]
            took = self.reduce * len(here)
            end = float(self.free.max()) + took
            self.previous = self.previous + (end - self.free)
            self.working += took * self.ranks
            self.free = np.full(self.ranks, end)
        return end

    def planned(self, ready: Floats) -> float:
        """Runs an iteration without agreements: each thread wakes for its next complete group."""
        end = self.free
        for g in range(self.training.groups):
            asleep = ready[g] > end
            awake = np.where(asleep, ready[g] + self.late(self.ranks), end)
            self.latency += float((awake - np.maximum(ready[g], end)).sum()) / self.training.groups
            end = np.full(self.ranks, float(awake.max()) + self.reduce)
            self.working += self.reduce * self.ranks
        self.free = end
        return float(end.max())


def simulate_sync(
    mode: Mode,
    ranks: int,
    training: Training,
    costs: Costs,
    *,
    iterations: int = 30,
    seed: int = 0,
) -> Outcome:
    """One run of `iterations` iterations of synchronous training.

    Raises:
        UsageError: an unknown mode, or nothing to simulate.
    """
    if mode not in MODES:
        raise UsageError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if ranks < 1 or iterations < 1:
        raise UsageError("ranks and iterations must be at least 1")
    cluster = _Cluster(training, costs, ranks, mode, np.random.default_rng(seed))
    now = 0.0
    for _ in range(iterations):
        ready = cluster.ready_times(now)
        now = cluster.planned(ready) if "TOPO" in mode else cluster.negotiated(ready, now)
    whole = now * ranks
    return Outcome(
        mode,
        ranks,
        now / iterations,
        (cluster.spin + cluster.working) / whole,
        cluster.spin / whole,
        cluster.latency / whole,
        cluster.lost / whole,
        cluster.cycles / iterations,
    )


@dataclass(frozen=True)
class Point:
    """All modes at one number of ranks, with the spread over random seeds (least, median, most).

    `improvement` is percent of samples/s above negotiated, in the run of the same seed.
    """

    ranks: int
    outcomes: dict[str, Outcome]
    improvement: dict[str, tuple[float, float, float]]


def sweep(
    ranks: Sequence[int],
    training: Training,
    costs: Costs,
    *,
    modes: Sequence[Mode] = MODES,
    iterations: int = 30,
    seeds: int = 3,
) -> list[Point]:
    """Weak scaling: every mode at every number of ranks; the outcome is the median seed's."""
    points = []
    for n in ranks:
        runs = {
            m: [
                simulate_sync(m, n, training, costs, iterations=iterations, seed=s)
                for s in range(seeds)
            ]
            for m in dict.fromkeys(("negotiated", *modes))
        }
        better = {
            m: sorted(
                100 * (base.iteration / o.iteration - 1)
                for base, o in zip(runs["negotiated"], runs[m], strict=True)
            )
            for m in modes
        }
        points.append(
            Point(
                n,
                {m: sorted(runs[m], key=lambda o: o.iteration)[seeds // 2] for m in modes},
                {m: (b[0], b[seeds // 2], b[-1]) for m, b in better.items()},
            )
        )
    return points


def timeline(mode: Mode, training: Training, oversleep: float, cycles: int = 5) -> list[Any]:
    """Two ranks of which rank 1 oversleeps in the first cycle: (sleep from, awake, done) of each.

    [Pumma 2020, fig. 6.8 (oversleep 0), 6.9, 6.11 and 6.12]: the agreement takes 0.2 ms, and nothing
    else takes time.
    """
    calls = iter(range(10**9))

    def late(n: int) -> Floats:
        return np.array([0.0, oversleep]) if next(calls) == 0 else np.zeros(n)

    costs = Costs(0.0002, {})
    still = replace(training, hop=0.0)
    cluster = _Cluster(still, costs, 2, mode, np.random.default_rng(0), late)
    cluster.history = []
    for _ in range(cycles):
        cluster.cycle()
    return cluster.history
