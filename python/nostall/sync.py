"""The gradient engine for any framework: named arrays in, their mean over all ranks out.

    nostall.sync.reduce_gradients({"w": grad_w, "b": grad_b})      # NumPy, or anything np.asarray takes

For PyTorch use ``nostall.torch.DistributedOptimizer``, which reduces while the backward pass runs.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from nostall import _native
from nostall.base._options import check_fields, document, in_force
from nostall.errors import UsageError
from nostall.job._world import World, find_world

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GradientReducer", "Ranks", "SyncOptions", "find_ranks", "reduce_gradients"]

Mode = Literal["planned", "negotiated"]
WIRES = {"fp16": "float16", "bf16": "bfloat16"}

# A number beside the gradients, with check_finite: a rank that refused to go on alone would leave the
# others waiting.
NOT_FINITE = "(rank has gradients that are not finite)"

#: (name, elements, type, type on the wire)
Spec = tuple[str, int, str, str]

# Engines of the same ranks are numbered; those ranks make them in the same order.
_made: Counter[tuple[int, ...]] = Counter()
_timelines = itertools.count()
# Engines whose threads call Python, for a network of Python's.
_calling: weakref.WeakSet[_native.GradientEngine] = weakref.WeakSet()


@atexit.register
def _end_with_program() -> None:
    """A thread that calls Python later never returns, and its end would be waited for.

    A thread that waits for ranks which do not come is told to end after a second.
    """
    for engine in list(_calling):
        engine.stop()


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are reduced; the same on all ranks.

    Raises:
        UsageError: an impossible value, with its option.
    """

    mode: Mode = in_force("sync.mode")
    nonblocking: bool = in_force("sync.nonblocking")
    global_sleep_every: int = in_force("sync.global_sleep_every")
    cores: tuple[int, ...] = in_force("sync.cores")
    threshold: int = in_force("sync.threshold")
    compression: Literal["fp16", "bf16"] | None = in_force("sync.compression")
    mean: bool = in_force("sync.mean")
    fixed_order: bool = in_force("sync.fixed_order")
    views: bool = in_force("sync.views")
    check_finite: bool = in_force("sync.check_finite")
    cycle: float = in_force("sync.cycle")
    test_sleep: float = in_force("sync.test_sleep")
    warn: float = in_force("sync.warn")
    timeout: float = in_force("sync.timeout")
    timeline: str = in_force("sync.timeline")

    def __post_init__(self) -> None:
        check_fields(self, "sync")
        if self.mode == "planned" and (self.nonblocking or self.global_sleep_every):
            raise UsageError(
                "nonblocking and global_sleep_every are about agreement: mode='negotiated' has it"
            )


document(SyncOptions, "sync")


class Network(Protocol):
    """What connects ranks of several nodes beside their shared memory.

    With allreduce(address, elements, type), all_and(bytes) and all_min(int) it connects ranks that
    share none (bindings/sync.cc). end(), from any thread, ends this rank's calls that wait, and those
    of ranks that wait for it, by an exception there; without it an engine that is stopped amid a
    reduction waits for its end.
    """

    rank: int
    ranks: int
    #: this node's ranks in ascending order, of which the first is the local leader
    node: list[int]
    #: nodes that take part
    nodes: int
    #: the same on this node's ranks, different for any other engine
    job: str

    def set_timeout(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """The ranks that take part, this rank's place, and their network (None: shared memory).

    `numbers` tells whose numbers errors have, where ranks have others in the job.
    """

    rank: int
    ranks: int
    job: str
    network: Network | None = field(default=None, compare=False)
    numbers: str = ""


#: From the engine's name, the same on all its ranks, this rank and the number of ranks.
Connect = Callable[[str, int, int], Network]
_connect: Connect | None = None


def connect_nodes_by(connect: Connect) -> None:
    """Registers what connects ranks of several nodes; nostall.torch does it when it is imported."""
    global _connect
    _connect = connect


def find_ranks(process_set: Sequence[int] | None = None, world: World | None = None) -> Ranks:
    """All ranks of the job, or those of `process_set`, which must include this one.

    Ranks of one node meet in shared memory; local leaders of several nodes through
    torch.distributed.

    Raises:
        UsageError: the ranks span nodes, and nostall.torch is not imported or torch.distributed not
            initialised.
    """
    world = world or find_world()
    members = members_of(process_set, world)
    number = _made[tuple(members)]
    _made[tuple(members)] += 1
    name = f"gradients {number} {'-'.join(map(str, members))}"
    rank, ranks = members.index(world.rank), len(members)
    network = _network_of(name, rank, ranks) if world.local_world_size < world.world_size else None
    numbers = ""
    if members != list(range(ranks)):
        listed = ", ".join(map(str, members))
        numbers = f" (in numbers of this process_set, whose ranks are {listed} of the job)"
    return Ranks(rank, ranks, f"{world.job} {name}", network, numbers)


def members_of(process_set: Sequence[int] | None, world: World) -> list[int]:
    """The ranks that take part, in ascending order; this one must be among them."""
    members = list(range(world.world_size)) if process_set is None else sorted(process_set)
    if len(set(members)) != len(members) or any(not 0 <= m < world.world_size for m in members):
        raise UsageError(f"process_set {members} is not a set of ranks below {world.world_size}")
    if world.rank not in members:
        raise UsageError(f"rank {world.rank} is not in process_set {members}")
    return members


def _network_of(name: str, rank: int, ranks: int) -> Network | None:
    if _connect is None:
        raise UsageError(
            "the ranks span several nodes: import nostall.torch and call "
            "torch.distributed.init_process_group first, the gradient engine goes through it between "
            "nodes"
        )
    network = _connect(name, rank, ranks)
    return network if network.nodes > 1 else None


def make_engine(
    tensors: Sequence[tuple[str, int, str]],
    options: SyncOptions,
    ranks: Ranks,
    shapes: Sequence[Sequence[int]] = (),
) -> tuple[_native.GradientEngine, list[Spec]]:
    """The engine for tensors of (name, elements, type), and their full description.

    The timeline holds the `shapes` of the first tensors, and the elements of the others.

    Raises:
        PeerError: ranks have other tensors, with the first difference, or do not arrive.
    """
    wire = WIRES.get(options.compression or "")
    specs: list[Spec] = [
        (name, count, kind, wire if wire and kind in ("float32", "float64") else kind)
        for name, count, kind in tensors
    ]
    native = _native.GradientOptions()
    native.mode = _native.SyncMode[options.mode]
    native.nonblocking = options.nonblocking
    native.global_sleep_every = options.global_sleep_every
    native.cores = options.cores
    native.cycle = options.cycle
    native.test_sleep = options.test_sleep
    native.threshold = options.threshold
    native.warn = options.warn
    native.timeout = options.timeout
    native.mean = options.mean
    native.check_finite = options.check_finite
    native.timeline = _timeline_file(options) if ranks.rank == 0 else ""
    native.shapes = [str(list(shape)) for shape in shapes]
    native.numbers = ranks.numbers
    job, rank, size, network = ranks.job, ranks.rank, ranks.ranks, ranks.network
    if network is not None:
        network.set_timeout(options.timeout)
        job, rank, size = network.job, network.node.index(rank), len(network.node)
    engine = _native.GradientEngine(
        tensors=specs,
        options=native,
        job=job,
        rank=rank,
        ranks=size,
        network=network,
        fixed_order=options.fixed_order,
    )
    if network is not None:
        _calling.add(engine)
    return engine, specs


def _timeline_file(options: SyncOptions) -> str:
    """Where this process's next engine writes its timeline; empty for nowhere."""
    if not options.timeline:
        return ""
    path, number, rank = Path(options.timeline), next(_timelines), find_world().rank
    marks = (f".rank{rank}" if rank else "") + (f".{number}" if number else "")
    return str(path.with_name(path.stem + marks + path.suffix))


class GradientReducer:
    """Reduces the same set of named arrays in every step.

    Args:
        example: arrays of the names, shapes and types to come.
        options: how; the defaults if None.
        process_set: ranks that take part; all if None.
    """

    def __init__(
        self,
        example: Mapping[str, Any],
        options: SyncOptions | None = None,
        *,
        process_set: Sequence[int] | None = None,
    ) -> None:
        arrays = {name: np.asarray(value) for name, value in example.items()}
        self._shapes = {name: (a.shape, a.dtype) for name, a in arrays.items()}
        options, ranks = options or SyncOptions(), find_ranks(process_set)
        self._rank, self._ranks = find_world().rank, ranks.ranks
        self._checks = options.check_finite
        self._compression = options.compression
        self._sign = np.zeros(1, np.float32)
        tensors = [(name, a.size, _type_name(name, a.dtype)) for name, a in arrays.items()]
        self._engine, _ = make_engine(
            [*tensors, (NOT_FINITE, 1, "float32")] if self._checks else tensors,
            replace(options, check_finite=False),
            ranks,
            [a.shape for a in arrays.values()],
        )

    def __call__(self, gradients: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """The mean (or sum) of each array over the ranks; names that are left out count as zeros.

        Raises:
            UsageError: an unknown name, or another shape or type than at the start, after which a
                reducer of several ranks is closed; with check_finite, on all ranks: an array of one of
                them is not finite.
            PeerError: a rank is gone, too late, or has closed its reducer.
        """
        engine = self._engine
        try:
            out = self._copies(gradients)
        except BaseException:
            if self._ranks > 1:  # the others would take this rank's next call for this one
                engine.stop()
            raise
        found = self._not_finite(out) if self._checks else ""
        for i, (name, array) in enumerate(out.items()):
            engine.submit(i, array.ctypes.data, name in gradients)
        if self._checks:
            engine.submit(len(out), self._sign.ctypes.data, bool(found))
        engine.wait()
        if self._checks and engine.contributors()[len(out)]:
            raise UsageError(
                found or "a gradient of another rank is not finite: the error of that rank names it"
            )
        if self._checks and self._compression == "fp16":  # finite ones may be too large for it
            for name, array in out.items():
                if not np.isfinite(array).all():
                    raise UsageError(
                        f"gradient {name} is too large for fp16: pass another compression="
                    )
        return out

    def _copies(self, gradients: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """All arrays in order; zeros for those that are left out."""
        unknown = set(gradients) - set(self._shapes)
        if unknown:
            raise UsageError(
                f"gradients that were not in the example: {', '.join(sorted(map(str, unknown)))}"
            )
        out: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in self._shapes.items():
            value = gradients.get(name)
            if value is None:
                out[name] = np.zeros(shape, dtype)
                continue
            array = np.array(value, copy=True, order="C")
            if (array.shape, array.dtype) != (shape, dtype):
                raise UsageError(
                    f"gradient {name} has shape {array.shape} and type {array.dtype}, but had "
                    f"{shape} and {dtype}"
                )
            out[name] = array
        return out

    def _not_finite(self, arrays: Mapping[str, NDArray[Any]]) -> str:
        """What is wrong with the first of them that is not finite."""
        for name, array in arrays.items():
            finite = np.isfinite(array)
            if not finite.all():
                return (
                    f"gradient {name} of rank {self._rank} is not finite at element "
                    f"{int(np.argmin(finite))}"
                )
        return ""


# Those of `reduce_gradients` by names, shapes and types, the last one used at the end. All ranks have
# the same ones, and close the same ones: they make the same calls, and none of these is under way
# when a later one has begun.
_reducers: OrderedDict[tuple[Any, ...], GradientReducer] = OrderedDict()
_KEPT = 64


def reduce_gradients(gradients: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The mean of every array over all ranks; all ranks call it with the same names and shapes.

    The first call with other names, shapes or types than those of the last 64 such sets makes an engine
    for them, for which all ranks meet: pass all arrays of a step in one call, and pad those whose
    shapes change in every step.

    Raises:
        UsageError: a type that is not floating point, or in another byte order.
        PeerError: ranks differ in names, shapes or types, or one is gone.
    """
    arrays = {name: np.asarray(value) for name, value in gradients.items()}
    key = tuple((name, a.shape, a.dtype.str) for name, a in arrays.items())
    if key not in _reducers:
        while len(_reducers) >= _KEPT:
            _, oldest = _reducers.popitem(last=False)
            oldest._engine.stop()
        _reducers[key] = GradientReducer(arrays)
    _reducers.move_to_end(key)
    return _reducers[key](arrays)


def _type_name(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise UsageError(f"gradient {name} has type {dtype}: it must be floating point")
    if not dtype.isnative:
        raise UsageError(
            f"gradient {name} has type {dtype.str}, whose byte order is not this machine's: convert it "
            f"by astype({dtype.name!r})"
        )
    return dtype.name
