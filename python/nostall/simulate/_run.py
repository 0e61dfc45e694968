"""Runs policies on a scenario and returns their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.errors import UsageError
from nostall.plan import Plan
from nostall.simulate._policies import Job, LowerBound, NotApplicable, Policy
from nostall.simulate._scenario import Scenario

Mode = Literal["as-published", "consistent"]
MODES: tuple[Mode, ...] = ("as-published", "consistent")


@dataclass(frozen=True)
class Shuffle:
    """How a policy's order compares with the plan's.

    Attributes:
        batches: share of the global batches that hold the same samples as the plan's.
        coverage: share of the data set that is read in the training at all.
        mobility: mean number of nodes that read a sample over that of the plan's order.
    """

    batches: float
    coverage: float
    mobility: float


@dataclass(frozen=True)
class Outcome:
    """One policy in one mode. Seconds and MB.

    Attributes:
        seconds: run time, from the start; NaN if the policy cannot run (`why` gives the reason).
        ratio: to the lower bound.
        staged: MB into the staging buffers of all nodes by origin: the storage classes by name,
            "other nodes", "source".
        kept_from_source: MB that were fetched from the source to be kept, in addition.
        warm_seconds: when the last sample was put where it is kept.
        node_stall: seconds that each node waited for its own samples.
        batch_seconds: of each batch; shape (batches,).
        compute_seconds: of the slowest node, of each batch.
        shuffle: set if the policy changes the order.
    """

    policy: str
    title: str
    mode: Mode
    follows: str
    order: str
    seconds: float = float("nan")
    ratio: float = float("nan")
    initial_seconds: float = 0.0
    warm_seconds: float = 0.0
    epoch_seconds: tuple[float, ...] = ()
    node_stall: tuple[float, ...] = ()
    staged: tuple[tuple[str, float], ...] = ()
    kept_from_nodes: float = 0.0
    kept_from_source: float = 0.0
    epoch_source: tuple[float, ...] = ()
    batch_seconds: NDArray[np.float64] | None = None
    compute_seconds: NDArray[np.float64] | None = None
    shuffle: Shuffle | None = None
    why: str = ""
    cost: float = 0.0

    @property
    def source_mb(self) -> float:
        """MB from the file system in all."""
        return dict(self.staged).get("source", 0.0) + self.kept_from_source

    @property
    def local_share(self) -> float:
        """The part of what was staged that came from the node's own storage classes; 0 of nothing."""
        origins = dict(self.staged)
        total = sum(origins.values())
        away = origins.get("other nodes", 0.0) + origins.get("source", 0.0)
        return 1 - away / total if total else 0.0

    @property
    def stall_seconds(self) -> float:
        """Seconds of the run in which the slowest node did not compute."""
        if self.compute_seconds is None:
            return float("nan")
        return self.seconds - float(self.compute_seconds.sum())

    def to_dict(self, batches: bool = False) -> dict[str, Any]:
        """Plain data; `batches` adds the seconds of every batch."""
        data = asdict(replace(self, batch_seconds=None, compute_seconds=None))
        data.pop("batch_seconds")
        data.pop("compute_seconds")
        data["staged"] = dict(self.staged)
        data["source_mb"] = self.source_mb
        data["local_share"] = self.local_share
        data["stall_seconds"] = self.stall_seconds
        if batches and self.batch_seconds is not None and self.compute_seconds is not None:
            data["batch_seconds"] = self.batch_seconds.tolist()
            data["batch_stall"] = (self.batch_seconds - self.compute_seconds).tolist()
        return data


def job_of(scenario: Scenario) -> Job:
    """The scenario's job, as policies see it."""
    plan = scenario.training.plan(len(scenario.dataset), scenario.environment.N)
    return Job(scenario.environment, plan, scenario.dataset.sizes)


def model_of(scenario: Scenario) -> _native.Model:
    """The scenario's machine, as the engines take it.

    Raises:
        UsageError: values that do not go together; the message names them.
    """
    return scenario.environment.native(scenario.step.seconds(scenario.environment.N))


def simulate(
    scenario: Scenario,
    modes: Sequence[Mode] = MODES,
    *,
    progress: Callable[[str], None] | None = None,
    shuffle: bool = True,
) -> list[Outcome]:
    """All policies of the scenario in the modes given, in the scenario's order.

    `progress` is called with the name of the next run. Cost: seconds for millions of accesses.

    Raises:
        UsageError: an unknown mode, or none, or values that cannot be.
    """
    if not modes:
        raise UsageError(f"modes must be one or more of {', '.join(MODES)}, not {modes!r}")
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    job, model = job_of(scenario), model_of(scenario)
    bound = run_decision(model, job, LowerBound().decide(job), modes[0]).seconds
    if not bound:
        raise UsageError(
            "the training takes no time: it has samples of size 0 alone, and its steps take none"
        )
    outcomes = []
    names = [c.name for c in scenario.environment.classes[1:]]
    for policy in scenario.policies:
        decision = quality = None
        for mode in modes:
            if progress:
                progress(f"{policy.title}, {mode}")
            began = time.perf_counter()
            try:
                if decision is None or decides_by_mode(policy):
                    decision = decide(policy, job, mode)
                    quality = shuffle_of(job.plan, decision, job.nodes) if shuffle else None
            except NotApplicable as error:
                outcomes.append(_outcome(policy, mode, why=str(error)))
                continue
            result = run_decision(model, job, decision, mode)
            outcomes.append(
                _outcome(
                    policy,
                    mode,
                    seconds=result.seconds,
                    ratio=result.seconds / bound,
                    initial_seconds=result.initial_seconds,
                    warm_seconds=result.warm_seconds,
                    epoch_seconds=tuple(result.epoch_seconds),
                    node_stall=tuple(result.node_stall),
                    staged=tuple(
                        zip((*names, "other nodes", "source"), result.staged, strict=True)
                    ),
                    kept_from_nodes=result.kept_from_nodes,
                    kept_from_source=result.kept_from_source,
                    epoch_source=tuple(result.epoch_source),
                    batch_seconds=result.batch_seconds,
                    compute_seconds=result.compute_seconds,
                    shuffle=quality,
                    cost=time.perf_counter() - began,
                )
            )
    return outcomes


def decides_by_mode(policy: Policy) -> bool:
    """Whether the policy decides something else in mode as-published."""
    return type(policy).decide_as_published is not Policy.decide_as_published


def decide(policy: Policy, job: Job, mode: Mode) -> _native.Decision:
    """What the policy decides in that mode.

    Raises:
        NotApplicable: it cannot run such a job.
    """
    return policy.decide_as_published(job) if mode == "as-published" else policy.decide(job)


def run_decision(
    model: _native.Model, job: Job, decision: _native.Decision, mode: Mode
) -> _native.SimulationResult:
    """One decision through one engine, without the GIL."""
    engine = _native.simulate_published if mode == "as-published" else _native.simulate_consistent
    return engine(model, job.plan.native, job.sizes, decision)


def _outcome(policy: Policy, mode: Mode, **values: Any) -> Outcome:
    return Outcome(
        policy=policy.name,
        title=policy.title or policy.name,
        mode=mode,
        follows=policy.follows,
        order=policy.order,
        **values,
    )


def read_once_bound(scenario: Scenario) -> float:
    """Seconds that all policies take that conserve bandwidth and keep the order, at least.

    An epoch ends no sooner than its computing after the one before, and not before all bytes up to it
    have left the source at its best rate; what is staged for an epoch may be read in those before.
    The bytes are the read-once minimum: all of S in the first epoch, then what the nodes together
    cannot keep. The rate is t(gamma) at its best for up to N clients, or what their links carry.
    """
    job = job_of(scenario)
    environment, model = scenario.environment, model_of(scenario)
    computing = run_decision(model, job, LowerBound().decide(job), "consistent").epoch_seconds
    clients = range(1, environment.N + 1)
    rate = max(min(environment.throughput(g), g * environment.b_fs) for g in clients)
    room = environment.N * environment.local_capacity
    seconds = there = 0.0
    for epoch, compute in enumerate(computing):
        # Once each: an order may repeat samples to fill its last batch.
        seen = np.zeros(len(scenario.dataset), dtype=bool)
        seen[job.plan.epoch_order(epoch)] = True
        read = float(scenario.dataset.sizes[seen].sum())
        there += (read if epoch == 0 else max(0.0, read - room)) / rate
        seconds = max(seconds + compute, there)
    return seconds


def shuffle_of(plan: Plan, decision: _native.Decision, nodes: int) -> Shuffle | None:
    """How the decision's own order compares with the plan's; None if it is the plan's."""
    epochs = plan.native.epochs
    try:
        decision.order(0)
    except IndexError:
        return None
    samples, batch = plan.native.samples, plan.native.global_batch
    same = 0
    seen = np.zeros((2, nodes, samples), dtype=bool)
    for epoch in range(epochs):
        order = plan.epoch_order(epoch)
        labels = np.full(samples, -1, dtype=np.int64)
        labels[order] = np.arange(len(order)) // batch
        matched = np.ones(len(plan), dtype=bool)
        for node in range(nodes):
            planned, ends = plan.rank_epoch(epoch, node)
            mine = decision.order(epoch * nodes + node)
            seen[0, node, planned] = True
            seen[1, node, mine] = True
            at = np.searchsorted(ends, np.arange(len(mine)), side="right")
            np.logical_and.at(matched, at, labels[mine] == at)
        same += int(matched.sum())
    read = seen.sum(axis=1)
    return Shuffle(
        batches=same / (epochs * len(plan)),
        coverage=float((read[1] > 0).mean()),
        mobility=float(read[1][read[1] > 0].mean() / read[0][read[0] > 0].mean()),
    )
