"""The plan of a job: which rank reads which sample when, and what follows from it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base import _checks as checks
from nostall.errors import UsageError

__all__ = [
    "Buckets",
    "ClassBalanced",
    "Mixed",
    "Plan",
    "RepeatedAugmentation",
    "SubBatches",
    "Weighted",
]


@dataclass(frozen=True)
class SubBatches:
    """The order that uses data several times while it is in memory [Pumma 2020, sec. 8.4.1].

    `resident` global batches at a time are used `reuse` times: first in their own order, then as new
    batches, recombined from their sub-batches (the parts of a batch that one rank takes). The length
    of an epoch stays the same, but an epoch reads only one `reuse`-th of the samples; `reuse` epochs
    use every sample `reuse` times. Between two uses of a sample lie `resident` batches instead of an
    epoch; `nostall bench reuse` measures what this costs in convergence.

    Attributes:
        resident: global batches that are in memory together.
        reuse: uses of a sample before it leaves; 1 is the order "torch".
        together: ranks that exchange sub-batches: 1 within processes, the ranks of a node for per
            node, all of them for the whole machine. It divides the world.
    """

    resident: int
    reuse: int = 2
    together: int = 1

    def __post_init__(self) -> None:
        for name in ("resident", "reuse", "together"):
            object.__setattr__(self, name, _whole(name, getattr(self, name), 1, 2**31))

    def __str__(self) -> str:
        return f"sub_batch resident={self.resident} reuse={self.reuse} together={self.together}"


class Weighted:
    """The order that draws samples by weights, anew for every epoch.

    With replacement each place of an epoch has sample i with the probability of its weight among all.
    Without it no sample comes twice in an epoch: each next one is drawn by weight from those that are
    left. Draws depend on (seed, epoch) alone.

    Args:
        weights: one number per sample, not negative.
        samples: draws in an epoch. If None, with replacement as many as there are weights, without
            it as many as have a weight above 0.
        replacement: whether a sample may come several times in an epoch; each time it is augmented
            in another way.

    Raises:
        UsageError: weights are negative, infinite, NaN, all 0, or not one per sample; too many draws.
    """

    def __init__(
        self,
        weights: Sequence[float] | NDArray[Any],
        samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        found = _array(weights)
        if found.ndim != 1 or found.dtype.kind not in "biuf":
            raise UsageError(
                f"weights must be one number per sample, not {found.dtype} of shape {found.shape}"
            )
        self.weights = np.array(found, np.float64)
        self.weights.setflags(write=False)
        wrong = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)))
        if wrong.size:
            raise UsageError(
                f"the weight of sample {wrong[0]} is {self.weights[wrong[0]]}: weights are finite and "
                "not negative"
            )
        positive = int((self.weights > 0).sum())
        if not positive:
            raise UsageError("all weights are 0: no sample can be drawn")
        _check_draws(samples)
        self.replacement = checks.flag("replacement", replacement)
        usual = len(self.weights) if self.replacement else positive
        self.samples: int = usual if samples is None else int(samples)
        if not self.replacement and self.samples > positive:
            raise UsageError(
                f"{self.samples} samples cannot be drawn without replacement from {positive} that have "
                "a weight: pass a smaller samples=, or replacement=True"
            )

    def __str__(self) -> str:
        how = "with" if self.replacement else "without"
        crc = zlib.crc32(self.weights.tobytes())
        return f"weighted {crc:08x} samples={self.samples} {how} replacement"

    def __repr__(self) -> str:
        return f"<{self}>"


class ClassBalanced:
    """The order in which every label has the same share on average.

    It is `Weighted`, with replacement and for each sample the weight 1 / (samples with its label).

    Args:
        labels: integers, one per sample; those of the loader's data set if None.
        samples: draws in an epoch; as many as there are samples if None.

    Raises:
        UsageError: labels are not integers.
    """

    def __init__(
        self, labels: Sequence[int] | NDArray[Any] | None = None, samples: int | None = None
    ) -> None:
        self.labels = None if labels is None else _array(labels)
        self.samples = samples
        _check_draws(samples)
        if self.labels is not None:
            self.weighted()

    def weighted(self, labels: NDArray[Any] | None = None) -> Weighted:
        """The weights; `labels` are used where the order was made without.

        Raises:
            UsageError: there are no labels, or they are not integers.
        """
        labels = labels if self.labels is None else self.labels
        if labels is None:
            raise UsageError(
                "ClassBalanced() takes the labels of a loader's data set: pass labels="
            )
        if labels.ndim != 1 or labels.dtype.kind not in "biu" or not labels.size:
            raise UsageError(
                f"classes are balanced by integers, one per sample, not by {labels.dtype} of shape "
                f"{labels.shape}"
            )
        _, kinds, counts = np.unique(labels, return_inverse=True, return_counts=True)
        return Weighted(1.0 / counts[kinds], self.samples)

    def __str__(self) -> str:
        return "class-balanced"


@dataclass(frozen=True)
class RepeatedAugmentation:
    """The order of repeated augmentation: that of the RASampler of DeiT and timm.

    Each sample of the shuffled order comes `times` times running, so on different ranks, each time
    augmented in another way. An epoch is not longer for it: of a data set of n samples it takes the
    first ``n // 256 * 256`` places, cut to a multiple of the ranks (all n of fewer than 256), so about
    one `times`-th of the samples. The shuffled order is "torch", which with seed 0 gives each rank what
    RASampler gives it.

    Attributes:
        times: how often a sample comes in an epoch that has it.
    """

    times: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", _whole("times", self.times, 1, 2**31))

    def __str__(self) -> str:
        return f"repeated times={self.times}"


class Buckets:
    """The order whose global batches have samples of like length, each of one bucket.

    All ranks take from the same bucket at each step, so that none waits for longer samples of another,
    and little is padded. Samples are shuffled within their bucket and batches among each other, anew
    for every epoch, which has every sample once. What buckets have beyond whole batches makes batches
    of neighbouring buckets.

    Args:
        lengths: one number per sample; the bytes of the records of a loader's data set if None.
        bounds: the greatest length of each bucket but the last, rising; or the number of buckets, which
            then have about as many samples each.

    Raises:
        UsageError: lengths are not numbers, or bounds do not rise.
    """

    def __init__(
        self,
        lengths: Sequence[float] | NDArray[Any] | None = None,
        bounds: int | Sequence[float] = 16,
    ) -> None:
        self._bounds: Any = bounds
        if checks.is_whole(bounds):
            if not 1 <= bounds <= 2**16:
                raise UsageError(f"bounds= must be 1 to {2**16} buckets, or a sequence: {bounds}")
        else:
            self._bounds = _rising(bounds)
        self._numbers = None if lengths is None else _numbers_of(_array(lengths), self._bounds)

    def of(self, sizes: NDArray[Any]) -> Buckets:
        """These buckets, of `sizes` where no lengths were given."""
        return self if self._numbers is not None else Buckets(sizes, self._bounds)

    @property
    def numbers(self) -> NDArray[np.uint32]:
        """The bucket of each sample, the shortest first.

        Raises:
            UsageError: there are no lengths.
        """
        if self._numbers is None:
            raise UsageError("Buckets() takes the sizes of a loader's data set: pass lengths=")
        return self._numbers

    def __str__(self) -> str:
        return f"bucketed {zlib.crc32(self.numbers.tobytes()):08x}"


def _rising(bounds: Any) -> NDArray[Any]:
    try:
        found = _array(bounds)
    except ValueError:  # of sequences of unlike lengths
        found = np.zeros(0, object)
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise UsageError(
            f"bounds= must be a number of buckets, or a sequence of numbers: {bounds!r}"
        )
    if np.isnan(found).any() or not (found[:-1] < found[1:]).all() or len(found) >= 2**16:
        raise UsageError(f"the bounds of buckets must rise: {found[:20].tolist()}")
    return found


def _numbers_of(lengths: NDArray[Any], bounds: Any) -> NDArray[np.uint32]:
    if lengths.ndim != 1 or lengths.dtype.kind not in "biuf" or not lengths.size:
        raise UsageError(
            f"lengths must be one number per sample, not {lengths.dtype} of shape {lengths.shape}"
        )
    if np.isnan(lengths).any():
        raise UsageError(f"lengths[{int(np.isnan(lengths).argmax())}] is no number")
    if isinstance(bounds, (int, np.integer)):
        at = np.arange(1, bounds) * len(lengths) // bounds
        bounds = np.unique(np.partition(lengths, at)[at]) if len(at) else []
    numbers = np.searchsorted(bounds, lengths).astype(np.uint32)
    numbers.setflags(write=False)
    return numbers


@dataclass(frozen=True)
class Mixed:
    """The order of `nostall.Mixture`: sources end to end, each with its share of every prefix.

    Attributes:
        sources: the number of samples of each source.
        schedule: the weights, one for each source, from a global batch on; the first are for batch 0.
        at_end: what happens when a source has no samples left: "repeat", "stop" or "reweight".
        samples: places of an epoch of a mixture that repeats, rounded up to whole global batches; as
            many as there are samples if None.
    """

    sources: tuple[int, ...]
    schedule: tuple[tuple[int, tuple[float, ...]], ...]
    at_end: Literal["repeat", "stop", "reweight"] = "repeat"
    samples: int | None = None

    def __post_init__(self) -> None:
        _check_draws(self.samples)
        if self.at_end not in ("repeat", "stop", "reweight"):
            raise UsageError(f'at_end must be "repeat", "stop" or "reweight", not {self.at_end!r}')
        if self.samples is not None and self.at_end != "repeat":
            raise UsageError(
                f'samples={self.samples} does not go with at_end="{self.at_end}", which says how long '
                "an epoch is"
            )

    def to_native(self, global_batch: int) -> _native.Mixture:
        """The places of the mixture, of batches of this size."""
        changes = [(step * global_batch, list(weights)) for step, weights in self.schedule]
        return _native.Mixture(list(self.sources), changes, getattr(_native.AtEnd, self.at_end))

    def __str__(self) -> str:
        return f"mixture {self.at_end}" + (f" {self.samples}" if self.samples else "")


def _whole(name: str, value: Any, least: int, beyond: int) -> int:
    if not checks.is_whole(value) or not least <= value < beyond:
        raise UsageError(f"{name} must be an integer from {least} to {beyond - 1}: {value!r}")
    return int(value)


def whole_of_state(owner: str, state: Mapping[str, Any], *names: str) -> list[int]:
    """Numbers of a state that was saved.

    Raises:
        UsageError: one is missing, or is no whole number from 0 on; it names the state of `owner`.
    """
    for name in names:
        if not checks.is_whole(state.get(name)) or state[name] < 0:
            raise UsageError(
                f"the {owner}'s state has {name}={state.get(name)!r}, which is no whole number from 0 "
                "on"
            )
    return [int(state[name]) for name in names]


def refuse_other_state(
    owner: str,
    state: Mapping[str, Any],
    mine: Mapping[str, Any],
    names: Sequence[str],
    hint: Callable[[str], str] = lambda name: "",
) -> None:
    """Raises UsageError if a saved state differs from that of `owner` in one of `names`, with all."""
    if differ := [name for name in names if state.get(name) != mine[name]]:
        theirs = ", ".join(f"{name}={state.get(name)}" for name in differ)
        ours = ", ".join(f"{name}={mine[name]}" for name in differ)
        hints = "; ".join(filter(None, map(hint, differ)))
        raise UsageError(
            f"the {owner}'s state was saved with {theirs}, but this {owner} has {ours}"
            + (f": {hints}" if hints else "")
        )


def _array(values: Any) -> NDArray[Any]:
    """Numbers as an array; also of a tensor on a device, with a gradient, or of a type NumPy lacks."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.double()
    return np.asarray(values)


def _check_draws(samples: Any) -> None:
    if samples is not None and (not checks.is_whole(samples) or not 1 <= samples < 2**63):
        raise UsageError(f"samples must be an integer from 1 on, or None: {samples!r}")


#: orders that are described, not named or written out
DESCRIBED = (SubBatches, Weighted, ClassBalanced, RepeatedAugmentation, Buckets, Mixed)
Described = SubBatches | Weighted | ClassBalanced | RepeatedAugmentation | Buckets | Mixed
#: an order's name, its description, or the user's own sample ids
Order = str | Described | Sequence[int] | NDArray[np.integer[Any]]


class Plan:
    """A pure function of its arguments; every process computes the same one.

    Args:
        samples: F, the size of the data set.
        batch_size: samples per rank and batch.
        world_size: ranks.
        epochs: E.
        seed: fixes the order.
        drop_last: drop the samples that do not divide among all ranks, then the last partial batch.
        order: "torch" (identical to DistributedSampler), "keyed" (a keyed permutation), "sequential",
            `SubBatches`, `Weighted`, `ClassBalanced`, `RepeatedAugmentation`, `Buckets`, `Mixed`, or a
            sequence of sample ids used in every epoch.
        steps: global batches of the job, instead of `epochs`: the last epoch ends with them.
        scheme: how a global batch is divided [Böhringer 2020, sec. 4.1.3].
        order_world: the ranks that padding and dropping follow; 1 pads nothing. `world_size` if None.
        global_batch_size: samples of a batch over all ranks; `batch_size` has no effect then.

    Attributes:
        order: as it was given; of a sequence of sample ids a copy that cannot be written.

    Raises:
        UsageError: arguments that cannot be planned, named with their value.
    """

    def __init__(
        self,
        *,
        samples: int,
        batch_size: int = 1,
        world_size: int = 1,
        epochs: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        order: Order = "torch",
        scheme: Literal["uniform", "whole", "imbalanced"] = "uniform",
        order_world: int | None = None,
        steps: int | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        for name, value, least, beyond in (
            ("samples", samples, 0, 2**63),
            ("batch_size", batch_size, 1, 2**31),
            ("world_size", world_size, 1, 2**31),
            ("epochs", epochs, 1, 2**31),
            ("seed", seed, 0, 2**64),
            ("order_world", world_size if order_world is None else order_world, 1, 2**31),
            ("steps", 1 if steps is None else steps, 1, 2**63),
            ("global_batch_size", 1 if global_batch_size is None else global_batch_size, 1, 2**63),
        ):
            _whole(name, value, least, beyond)
        if not isinstance(drop_last, (bool, np.bool_)):
            raise UsageError(f"drop_last must be True or False, not {drop_last!r}")
        spec = _native.JobSpec()
        spec.samples = samples
        spec.global_batch = (
            batch_size * world_size if global_batch_size is None else global_batch_size
        )
        spec.epochs = epochs
        spec.world = world_size
        spec.order_world = world_size if order_world is None else order_world
        spec.seed = seed
        spec.drop_last = bool(drop_last)
        if scheme not in ("uniform", "whole", "imbalanced"):
            raise UsageError(f'scheme must be "uniform", "whole" or "imbalanced", not {scheme!r}')
        spec.scheme = getattr(_native.Scheme, scheme)
        if isinstance(order, DESCRIBED):
            _describe(spec, order)
        elif not isinstance(order, str):
            spec.order = _native.OrderKind.user
            spec.user_order = sample_ids(order)
        elif order in ("torch", "keyed", "sequential"):
            spec.order = getattr(_native.OrderKind, order)
        else:
            raise UsageError(
                'order must be "torch", "keyed", "sequential", SubBatches, Weighted, ClassBalanced, '
                f"RepeatedAugmentation, Buckets, Mixed or sample ids, not {order!r}"
            )
        _native.validate(spec)
        if steps is not None:
            spec.steps = steps
            spec.epochs = _epochs_of(steps, int(_native.batches_per_epoch(spec)))
        self.native = spec
        # Of the caller's own sequence the ids that the core holds: it may change, and is not kept.
        self.order = spec.user_order if spec.order == _native.OrderKind.user else order

    def __len__(self) -> int:
        """Global batches in one epoch."""
        return int(_native.batches_per_epoch(self.native))

    def batches_in(self, epoch: int) -> int:
        """Global batches in this epoch: fewer than in others if `steps` end in it, 0 after the job."""
        inside = 0 <= epoch < self.native.epochs
        return int(_native.batches_in(self.native, epoch)) if inside else 0

    @property
    def epoch_length(self) -> int:
        """Samples in one epoch, after padding or dropping."""
        return int(_native.epoch_length(self.native))

    @property
    def reuses(self) -> bool:
        """Whether the order is `SubBatches`."""
        return bool(self.native.order == _native.OrderKind.sub_batch)

    @property
    def fingerprint(self) -> int:
        """64 bits over everything that decides the order."""
        return int(_native.plan_fingerprint(self.native))

    def epoch_order(self, epoch: int) -> NDArray[np.uint64]:
        """All sample ids of an epoch in order, shape (epoch_length,).

        Raises:
            UsageError: the plan has no such epoch.
        """
        return _native.epoch_order(self.native, self.checked_epoch(epoch))

    def rank_epoch(self, epoch: int, rank: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """One rank's samples of an epoch in order, and where each of its batches ends.

        Raises:
            UsageError: the plan has no such epoch, or no such rank.
        """
        self._check_ranks(rank, 1)
        return _native.rank_epoch(self.native, self.checked_epoch(epoch), rank)

    def pass_of(self, epoch: int, batch: int) -> tuple[int, int, int, int]:
        """For a global batch of `SubBatches`: its chunk, which pass over it (0 is the first), its place
        in the pass, and how many batches the chunk has. For other orders (0, 0, 0, 1)."""
        return _native.pass_of(self.native, epoch, batch)

    def consumed(self, epoch: int, batch: int) -> NDArray[np.uint64]:
        """Of the order `Mixed`: the samples that each source gave before this global batch.

        Of epochs that are padded it counts what they have without.

        Raises:
            UsageError: the order is another one.
        """
        mixture, whole = self._mixture(), self.epoch_length
        place = batch * self.native.global_batch
        if mixture.end is None:
            return mixture.counts(epoch * whole + place)
        ended = min(mixture.end, whole)
        return epoch * mixture.counts(ended) + mixture.counts(min(place, ended))

    def mixed_before(self, epoch: int, batch: int) -> int:
        """Of the order `Mixed`: 32 bits over all that decides what comes before this global batch.

        Raises:
            UsageError: the order is another one.
        """
        mixture = self._mixture()
        if mixture.end is not None:
            return int(mixture.fingerprint()) % 2**32
        place = epoch * self.epoch_length + batch * self.native.global_batch
        return int(mixture.fingerprint(place)) % 2**32

    def reuse_distances(self, first_epoch: int = 0, epochs: int | None = None) -> NDArray[np.int64]:
        """Samples between two uses of a sample, over all ranks, for every use but each first one.

        The reuse distance of [Pumma 2020, sec. 8.4.1]: on average an epoch's length for full shuffles.
        Memory: O(samples).
        """
        last = np.full(self.native.samples, -1, np.int64)
        found = []
        end = self.native.epochs if epochs is None else first_epoch + epochs
        for epoch in range(first_epoch, end):
            order = self.epoch_order(epoch).astype(np.int64)
            at = np.arange(len(order), dtype=np.int64) + (epoch - first_epoch) * len(order)
            # Within the epoch: a sample's uses in order, each after the one before it.
            by_sample = np.argsort(order, kind="stable")
            ids, times = order[by_sample], at[by_sample]
            again = (
                np.concatenate(([False], ids[1:] == ids[:-1])) if len(ids) else np.zeros(0, bool)
            )
            before = np.where(again, np.concatenate(([0], times[:-1])), last[ids])
            found.append((times - before)[before >= 0] - 1)
            last[ids] = times  # a sample's last use is written last
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def node_access(
        self, first_rank: int, ranks: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """How often the node reads each sample, and its first access (2**64 - 1: never).

        Raises:
            UsageError: not all of its ranks are in the world.
        """
        self._check_ranks(first_rank, ranks)
        return _native.node_access(self.native, first_rank, ranks)

    def place(
        self, sizes: NDArray[np.uint64], capacities: Sequence[int], *, first_rank: int, ranks: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64], list[int]]:
        """The rule of [Böhringer 2020, sec. 3.2.2]: tier (255: none) and offset of each sample, and the
        bytes used by tier.

        Raises:
            UsageError: there is not one size for each sample, or not all ranks are in the world.
        """
        self._check_ranks(first_rank, ranks)
        return _native.place(
            self._sizes(sizes),
            self.native,
            first_rank,
            ranks,
            list(capacities),
        )

    def owners(
        self, sizes: NDArray[np.uint64], capacities: Sequence[int], *, ranks_per_node: int
    ) -> NDArray[np.uint32]:
        """The node that keeps each sample, 2**32 - 1 where none has room; shape (samples,).

        Raises:
            UsageError: there is not one size for each sample.
        """
        return _native.owners(
            self.native,
            self._sizes(sizes),
            list(capacities),
            ranks_per_node,
        )

    def lower_bound(
        self,
        sizes: NDArray[np.uint64],
        capacity: int,
        *,
        first_epoch: int = 0,
        first_batch: int = 0,
    ) -> int:
        """The fewest bytes that must leave the source when `capacity` bytes can be kept in all.

        Of a job that begins with global batch `first_batch` of epoch `first_epoch`.

        Raises:
            UsageError: there is not one size for each sample.
        """
        return int(
            _native.source_bytes_lower_bound(
                self.native,
                self._sizes(sizes),
                capacity,
                first_epoch,
                first_batch,
            )
        )

    def _mixture(self) -> _native.Mixture:
        if self.native.mixture is None:
            raise UsageError(f"the order is {self.order!r}, which is no Mixed")
        return self.native.mixture

    def checked_epoch(self, epoch: int) -> int:
        """The epoch, also of one of NumPy's integers.

        Raises:
            UsageError: the plan has no such epoch.
        """
        if not checks.is_whole(epoch) or not 0 <= epoch < self.native.epochs:
            raise UsageError(
                f"epoch {epoch!r} is not among the {self.native.epochs} epochs of the job"
            )
        return int(epoch)

    def _check_ranks(self, first: int, ranks: int) -> None:
        whole = checks.is_whole(first) and checks.is_whole(ranks)
        if not whole or not (first >= 0 and 1 <= ranks <= self.native.world - first):
            which = f"rank {first!r} is" if ranks == 1 else f"{ranks!r} ranks from {first!r} on are"
            raise UsageError(f"{which} not in a world of {self.native.world}")

    def _sizes(self, sizes: Any) -> NDArray[np.uint64]:
        found = np.asarray(sizes)
        if found.shape != (self.native.samples,) or found.dtype.kind not in "iu":
            raise UsageError(
                f"sizes must be one integer for each of the {self.native.samples} samples, not "
                f"{found.dtype} of shape {found.shape}"
            )
        if found.dtype.kind == "i" and (found < 0).any():
            raise UsageError(f"sizes must not be negative: {found.min()}")
        return np.ascontiguousarray(found, dtype=np.uint64)


def _describe(spec: _native.JobSpec, order: Described) -> None:
    if isinstance(order, ClassBalanced):
        order = order.weighted()
    if isinstance(order, SubBatches):
        spec.order = _native.OrderKind.sub_batch
        spec.sub_batches = (order.reuse, order.resident, order.together)
    elif isinstance(order, Weighted):
        spec.order = _native.OrderKind.weighted
        spec.weights, spec.draws = order.weights, order.samples
        spec.replacement = order.replacement
    elif isinstance(order, Buckets):
        spec.order = _native.OrderKind.bucketed
        spec.buckets = order.numbers
    elif isinstance(order, Mixed):
        spec.order = _native.OrderKind.mixture
        spec.mixture = order.to_native(spec.global_batch)
        spec.draws = sum(order.sources) if order.samples is None else order.samples
    else:
        spec.order = _native.OrderKind.repeated
        spec.times = order.times


def _epochs_of(steps: int, batches: int) -> int:
    if batches == 0:
        raise UsageError("steps= counts batches, and an epoch has none: pass drop_last=False")
    epochs = -(-steps // batches)
    if epochs >= 2**31:
        raise UsageError(f"steps={steps} are {epochs} epochs, more than a plan counts")
    return epochs


def sample_ids(order: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A user's order as ids, shape (n,).

    Raises:
        UsageError: it is not a sequence of integers from 0 on.
    """
    if any(kind.__module__ == "torch.utils.data.sampler" for kind in type(order).__mro__):
        raise UsageError(
            f"order= is a {type(order).__name__} of torch, which draws while a training runs: pass "
            "nostall.Weighted(weights), another order of nostall, or list(sampler), the same samples "
            "in every epoch"
        )
    ids = _array(order)
    if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0)):
        raise UsageError(
            "order must be one sequence of sample ids, integers from 0 on, not "
            f"{ids.dtype} of shape {ids.shape}"
            + (f" with {ids.min()}" if ids.size and ids.dtype.kind == "i" else "")
        )
    return np.ascontiguousarray(ids, dtype=np.uint64)


def order_name(order: Order) -> str:
    """The name of the order in a state; a user's own order is identified by its ids."""
    if isinstance(order, (str, *DESCRIBED)):
        return str(order)
    return f"user {zlib.crc32(sample_ids(order).tobytes()):08x}"
