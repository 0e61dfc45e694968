"""The policies [Böhringer 2020, sec. 4.1.4]: each decides what is kept where, how it gets there, and
what is read.

A policy is a class with a `decide` method. `register` makes it known to scenario files, and
`policy.py:Class` names a policy of the user's own. See examples/simulate-own-policy.py.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from nostall._native import (
    CopyRule,
    Decision,
    Filling,
    Loading,
    Scheme,
    first_readers,
    keep_frequent,
    keep_owned,
    read_local_first,
    read_own_only,
)
from nostall.errors import UsageError
from nostall.plan import Plan
from nostall.simulate._environment import MB, Environment

NO_NODE = 2**32 - 1

# What a policy does to the order of the samples: nothing; deals a global batch to other nodes, so that
# sums over the batch stay the same, but not statistics over a node's part; trains on other samples.
Order = Literal["same", "same batches", "changed"]


class NotApplicable(UsageError):
    """The policy cannot run this training; shown as N/A."""


@dataclass(frozen=True)
class Job:
    """Everything that a policy may know.

    Attributes:
        plan: the loader's own plan of the training, with one rank per node.
        sizes: MB of every sample, shape (F,).
    """

    environment: Environment
    plan: Plan
    sizes: NDArray[np.float64]

    @property
    def nodes(self) -> int:
        """N."""
        return self.environment.N

    @property
    def samples(self) -> int:
        """F."""
        return len(self.sizes)

    @cached_property
    def bytes(self) -> NDArray[np.uint64]:
        """Bytes of every sample, shape (F,), as the plan counts them."""
        return np.ascontiguousarray(np.rint(self.sizes * MB), dtype=np.uint64)

    @property
    def capacities(self) -> list[int]:
        """Bytes of each storage class of a node but the staging buffer; no more than of all samples."""
        most = int(self.bytes.sum())
        return [min(int(c.capacity * MB), most) for c in self.environment.classes[1:]]

    def shares(self, classes: int) -> list[list[NDArray[np.uint32]]]:
        """``keep[node][class - 1]``: places sample k on node k mod N, into the first `classes` storage
        classes in turn, as far as it fits."""
        keep = []
        for node in range(self.nodes):
            mine = np.arange(node, self.samples, self.nodes, dtype=np.uint32)
            ends = np.cumsum(self.sizes[mine])
            lists, begin, used = [], 0, 0.0
            for c in self.environment.classes[1 : classes + 1]:
                end = int(np.searchsorted(ends, used + c.capacity, side="right"))
                lists.append(mine[begin:end])
                used, begin = (float(ends[end - 1]) if end else 0.0), end
            keep.append(lists)
        return keep

    def last_class_shares(self) -> list[list[NDArray[np.uint32]]]:
        """``keep[node][class - 1]``: sample k on node k mod N in the last class, as far as it fits."""
        ids = np.arange(self.samples, dtype=np.uint32)
        none = np.empty(0, dtype=np.uint32)
        between = [none] * (len(self.environment.classes) - 2)
        room = self.environment.classes[-1].capacity
        shares = [ids[node :: self.nodes] for node in range(self.nodes)]
        fits = [int(np.searchsorted(np.cumsum(self.sizes[s]), room, "right")) for s in shares]
        return [[*between, share[:fit]] for share, fit in zip(shares, fits, strict=True)]


class Policy(ABC):
    """Base of all policies; override `decide`.

    Attributes:
        name: in scenario files and on the command line.
        title: in tables and plots.
        follows: the publication that it follows, and where it is simpler.
        order: what it does to the order of the samples.
    """

    name: ClassVar[str] = ""
    title: str = ""
    follows: ClassVar[str] = ""
    order: Order = "same"

    @abstractmethod
    def decide(self, job: Job) -> Decision:
        """What the policy decides for this job.

        Raises:
            NotApplicable: it cannot run such a job.
        """

    def decide_as_published(self, job: Job) -> Decision:
        """What the published program decides, where that is something else; for mode as-published.

        Raises:
            NotApplicable: it cannot run such a job.
        """
        return self.decide(job)


_POLICIES: dict[str, Callable[..., Policy]] = {}
# The checksum of a policy's file, as it was when it was loaded.
_code: weakref.WeakKeyDictionary[type[Policy], str] = weakref.WeakKeyDictionary()


def register(policy: type[Policy]) -> type[Policy]:
    """Registers a policy by its name; a decorator."""
    _POLICIES[policy.name] = policy
    return policy


def policies() -> dict[str, Callable[..., Policy]]:
    """All registered policies, by name."""
    return dict(_POLICIES)


def make_policy(name: str, options: dict[str, Any] | None = None) -> Policy:
    """The policy of that name ("hdmlp"), or of a file ("my_policy.py:MyPolicy").

    Raises:
        UsageError: there is none, or it does not take these options.
    """
    kind = _from_file(name) if ":" in name else _POLICIES.get(name)
    if kind is None:
        close = difflib.get_close_matches(name, _POLICIES, 1)
        hint = f'did you mean "{close[0]}"?' if close else ", ".join(_POLICIES)
        raise UsageError(f'there is no policy "{name}": {hint}')
    given = options or {}
    known = [p for p in inspect.signature(kind).parameters if p not in ("args", "kwargs")]
    for key in given:
        if key not in known:
            raise UsageError(
                f'policy "{name}" has no option {key}'
                + (f": {', '.join(known)}" if known else ": it has none")
            )
    return kind(**given)


def _from_file(name: str) -> type[Policy]:
    path, _, attribute = name.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f'policy "{name}": there is no file {path}')
    code = _checksum(path)
    # Registered, once for each file and what is in it: so its policies can be sent to other processes.
    place = hashlib.sha256(f"{Path(path).resolve()} {code}".encode()).hexdigest()
    module = sys.modules.get(module_name := f"nostall_policy_{place}")
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise UsageError(f'policy "{name}": {path} is not a Python file')
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    kind = getattr(module, attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UsageError(f'policy "{name}": {path} has no policy {attribute}')
    if missing := ", ".join(sorted(kind.__abstractmethods__)):
        raise UsageError(f'policy "{name}": {attribute} in {path} must define {missing}')
    _code[kind] = code
    return kind


def code_of(policy: Policy) -> str:
    """A checksum of the file that defines a user's policy; "" for nostall's own, and for one that was
    typed in."""
    kind = type(policy)
    if kind.__module__.partition(".")[0] == "nostall":
        return ""
    if kind not in _code:
        try:
            _code[kind] = _checksum(inspect.getfile(kind))
        except (OSError, TypeError):
            _code[kind] = ""
    return _code[kind]


def _checksum(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _memory_only(job: Job, what: str) -> None:
    if len(job.environment.classes) < 2:
        raise NotApplicable(f"{what} keeps samples in memory, and there is no storage class 1")


@register
class LowerBound(Policy):
    name = "lower-bound"
    title = "Lower bound"
    follows = "PerfectPrefetcher: every sample is available at once; only computing takes time"

    def decide(self, job: Job) -> Decision:
        decision = Decision()
        decision.loading = Loading.perfect
        return decision


@register
class Naive(Policy):
    name = "naive"
    title = "Naive"
    follows = "BasePolicy: each sample is read from the file system when it is wanted"

    def decide(self, job: Job) -> Decision:
        decision = Decision()
        decision.loading = Loading.on_demand
        return decision


@register
class StagingPool(Policy):
    name = "staging-pool"
    title = "Staging pool"
    follows = "StagingPoolPrefetcher: double buffering, tf.data; reads ahead, keeps nothing"

    def decide(self, job: Job) -> Decision:
        return Decision()


@register
class DeepIO(Policy):
    name = "deepio"
    follows = (
        "DeepIO (Zhu et al.): memory holds the nodes' shares from the start and is read remotely; "
        "opportunistic mode draws each node's batches from its own memory"
    )

    def __init__(self, opportunistic: bool = False) -> None:
        self.opportunistic = opportunistic
        self.title = f"DeepIO ({'opportunistic' if opportunistic else 'ordered'})"
        self.order = "changed" if opportunistic else "same"

    def decide(self, job: Job) -> Decision:
        _memory_only(job, self.title)
        decision = Decision()
        decision.filling = Filling.before
        decision.stage_source = False
        decision.set_kept(job.shares(1))
        if self.opportunistic:
            read_own_only(job.plan.native, decision)
        return decision


@register
class ParallelStaging(Policy):
    name = "parallel-staging"
    title = "Parallel data staging"
    follows = (
        "Kurth et al.: disjoint shares are staged to all local storage before the training; each node "
        "trains on its own; as published, the last storage class alone is used, and filled up from "
        "the other nodes"
    )
    order: Order = "changed"

    def decide(self, job: Job) -> Decision:
        if len(job.environment.classes) < 2:
            raise NotApplicable("parallel staging needs local storage")
        return self._reading_own(job, job.shares(len(job.environment.classes) - 1))

    def decide_as_published(self, job: Job) -> Decision:
        if len(job.environment.classes) < 2:
            raise NotApplicable("parallel staging needs local storage")
        keep = job.last_class_shares()
        room = job.environment.classes[-1].capacity
        for node, lists in enumerate(keep):
            others = np.flatnonzero(np.arange(job.samples) % job.nodes != node).astype(np.uint32)
            held = job.sizes[lists[-1]].sum() + np.cumsum(job.sizes[others])
            fits = int(np.searchsorted(held, room, side="right"))
            lists[-1] = np.concatenate([lists[-1], others[:fits]])
        decision = self._reading_own(job, keep)
        decision.stage_source = False
        decision.set_owner(np.arange(job.samples, dtype=np.uint32) % job.nodes)
        return decision

    def _reading_own(self, job: Job, keep: list[list[NDArray[np.uint32]]]) -> Decision:
        decision = Decision()
        decision.filling = Filling.before
        decision.set_kept(keep)
        read_own_only(job.plan.native, decision)
        return decision


@register
class Lbann(Policy):
    name = "lbann"
    follows = (
        "LBANN's data store (Jacobs et al.): memory alone holds all samples, kept by their first "
        "reader (dynamic) or loaded before (preloading); refuses data sets that do not fit"
    )

    def __init__(self, preloading: bool = False) -> None:
        self.preloading = preloading
        self.title = f"LBANN store ({'preloading' if preloading else 'dynamic'})"

    def decide(self, job: Job) -> Decision:
        _memory_only(job, self.title)
        room = job.nodes * job.environment.classes[1].capacity
        if job.sizes.sum() > room:
            raise NotApplicable(
                f"the data set ({job.sizes.sum():.0f} MB) is larger than the memory of all nodes "
                f"({room:.0f} MB)"
            )
        decision = Decision()
        decision.stage_source = False
        if self.preloading:
            decision.filling = Filling.before
            decision.set_kept(job.shares(1))
            return decision
        owner = _within_room(first_readers(job.plan.native), job.sizes, room / job.nodes)
        ids = np.arange(job.samples, dtype=np.uint32)
        decision.filling = Filling.reading
        decision.set_owner(owner)
        decision.set_kept([[ids[owner == node]] for node in range(job.nodes)])
        return decision

    def decide_as_published(self, job: Job) -> Decision:
        decision = self.decide(job)
        if not self.preloading:
            # Each node's part of the first epoch, by threads of the store, beside the training.
            decision.filling = Filling.prefetch
            kept = [decision.kept(node, 1) for node in range(job.nodes)]
            first = [job.plan.node_access(node, 1)[1] for node in range(job.nodes)]
            decision.set_kept(
                [[k[np.argsort(f[k], kind="stable")]] for k, f in zip(kept, first, strict=True)]
            )
        return decision


def _within_room(
    owner: NDArray[np.uint32], sizes: NDArray[np.float64], room: float
) -> NDArray[np.uint32]:
    """The owners; what overfills a node goes to the node with the most room; shape (F,)."""
    nodes = int(owner[owner != NO_NODE].max()) + 1 if (owner != NO_NODE).any() else 0
    held = np.array([sizes[owner == node].sum() for node in range(nodes)])
    for node in range(nodes):
        for sample in np.flatnonzero(owner == node)[::-1]:
            if held[node] <= room:
                break
            other = int(held.argmin())
            fits = held[other] + sizes[sample] <= room
            owner[sample] = other if fits else NO_NODE
            held[node] -= sizes[sample]
            held[other] += sizes[sample] if fits else 0.0
    return owner


@register
class LocalityAware(Policy):
    name = "locality-aware"
    title = "Locality-aware loading"
    follows = (
        "Yang and Cong: memory holds the nodes' shares from the start; samples of a global batch "
        "go to the nodes that hold them first; as published, the last storage class holds the "
        "shares, and no sample goes to another node"
    )
    order: Order = "same batches"

    def decide(self, job: Job) -> Decision:
        _memory_only(job, self.title)
        if job.plan.native.scheme == Scheme.whole:
            raise NotApplicable("every node reads the whole batch: there is nothing to deal")
        decision = Decision()
        decision.filling = Filling.before
        decision.set_kept(job.shares(1))
        read_local_first(job.plan.native, decision)
        return decision

    def decide_as_published(self, job: Job) -> Decision:
        self.decide(job)
        decision = Decision()
        decision.filling = Filling.before
        decision.set_kept(job.last_class_shares())
        return decision


@register
class Hdmlp(Policy):
    name = "hdmlp"
    follows = (
        "FrequencyPrefetcher: each node's threads fetch what it reads most often, in the "
        "order of first access; a sample may so be read twice from the file system"
    )

    def __init__(self, in_order: bool = True, cleanup_read: bool = False) -> None:
        self.in_order = in_order
        self.cleanup_read = cleanup_read
        details = [] if in_order else ["by frequency"]
        details += ["cleanup"] if cleanup_read else []
        self.title = "HDMLP" + (f" ({', '.join(details)})" if details else "")

    def decide(self, job: Job) -> Decision:
        decision = keep_frequent(job.plan.native, job.bytes, job.capacities, self.in_order)
        decision.cleanup = self.cleanup_read
        if self.cleanup_read:
            _append_rest(job, decision)
        return decision

    def decide_as_published(self, job: Job) -> Decision:
        if self.cleanup_read:
            decision = self.decide(job)
        else:
            decision = Decision()
            decision.filling = Filling.prefetch
            rooms = [c.capacity for c in job.environment.classes]
            decision.set_kept([self._fill_order(job, n, rooms) for n in range(job.nodes)])
        decision.stage_remote = False
        return decision

    def _fill_order(self, job: Job, node: int, rooms: list[float]) -> list[NDArray[np.uint32]]:
        """[class - 1]: all samples by frequency, cut at the capacities of all classes, that of the
        staging buffer too; each part by first access; then into the classes from the first on."""
        frequency, first = job.plan.node_access(node, 1)
        order = np.argsort(-frequency.astype(np.int64), kind="stable").astype(np.uint32)
        if self.in_order:
            begin = 0
            for room in rooms:
                held = np.cumsum(job.sizes[order[begin:]])
                end = begin + int(np.searchsorted(held, room, side="right")) + 1
                part = order[begin:end]
                order[begin:end] = part[np.argsort(first[part], kind="stable")]
                begin = end
        lists = []
        for room in rooms[1:]:
            fits = int(np.searchsorted(np.cumsum(job.sizes[order]), room, side="right"))
            lists.append(order[:fits])
            order = order[fits:]
        return lists


def _append_rest(job: Job, decision: Decision) -> None:
    """Appends samples without a place, by first access, for room that becomes free."""
    classes = len(job.capacities)
    keep = []
    for node in range(job.nodes):
        lists = [decision.kept(node, j + 1) for j in range(classes)]
        frequency, first = job.plan.node_access(node, 1)
        rest = frequency > 0
        rest[np.concatenate(lists) if lists else []] = False
        later = np.flatnonzero(rest).astype(np.uint32)
        later = later[np.argsort(first[later], kind="stable")]
        # Dealt to the classes in proportion to their room.
        total = max(1, sum(job.capacities))
        marks = np.cumsum([0, *job.capacities]) / total * len(later)
        turn = np.random.default_rng(node).permutation(len(later))
        for j in range(classes):
            mine = np.sort(turn[(turn >= marks[j]) & (turn < marks[j + 1])])
            lists[j] = np.concatenate([lists[j], later[mine]])
        keep.append(lists)
    decision.set_kept(keep)


@register
class Nostall(Policy):
    name = "nostall"
    follows = (
        "this loader: the node that needs a sample first reads it, for itself and for the node "
        "that keeps it, so that the file system is read once by all nodes together; copies by next-use "
        "are of what others own, and the node needs soonest; evicting, what the loader does not do: "
        "each node keeps what it reads and drops what it needs last, of what another node has too"
    )

    def __init__(self, copies: str = "fixed", evict: bool = False) -> None:
        rules = {"none": CopyRule.none, "fixed": CopyRule.fixed, "next-use": CopyRule.next_use}
        if copies not in rules:
            raise UsageError(f'copies is "none", "fixed" or "next-use", not {copies!r}')
        if evict and copies != "fixed":
            raise UsageError(f"evict=true makes copies of its own: leave copies={copies} out")
        self.copies = rules[copies]
        self.evict = evict
        words = {"none": " (no copies)", "fixed": "", "next-use": " (copies by next use)"}
        self.title = "nostall" + (" (evicting)" if evict else words[copies])

    def decide(self, job: Job) -> Decision:
        if self.evict:
            decision = Decision()
            decision.filling = Filling.evicting
            return decision
        return keep_owned(job.plan.native, job.bytes, job.capacities, self.copies)

    def decide_as_published(self, job: Job) -> Decision:
        if self.evict or self.copies == CopyRule.next_use:
            raise NotApplicable("eviction is simulated in mode consistent alone")
        return self.decide(job)
