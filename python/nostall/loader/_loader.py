"""The data loader: batches in the order of the random seed, staged before the consumer needs them."""

from __future__ import annotations

import atexit
import collections
import contextlib
import enum
import functools
import itertools
import keyword
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base._garbage import Closer, await_all, before_child_ends, close_safely, end_with
from nostall.base._options import checked, value
from nostall.base._sizes import (
    defaults,
    native_tiers,
    parse_size,
)
from nostall.base._words import counted
from nostall.errors import PeerError, StoppedError, UsageError
from nostall.job._cores import cores_of_rank
from nostall.job._place import find_place
from nostall.job._world import World, refuse_late_group
from nostall.loader._ahead import Ahead, Made
from nostall.loader._options import LoaderArguments, LoaderOptions, with_arguments
from nostall.loader._recipe import Recipe, Transforms
from nostall.loader._tiers import TierList, Tiers, held_twice, in_words, planned, warn_of_second
from nostall.observe import metrics, trace
from nostall.observe._recorder import Recorder
from nostall.plan import (
    DESCRIBED,
    Buckets,
    ClassBalanced,
    Mixed,
    Order,
    Plan,
    RepeatedAugmentation,
    SubBatches,
    order_name,
    refuse_other_state,
    whole_of_state,
)
from nostall.source._source import Source, way_from

if TYPE_CHECKING:
    from nostall.job._cluster import Cluster
    from nostall.loader._calibration import Calibration
    from nostall.observe._stats import EpochStats, Stats
    from nostall.source._mixture import Mixing

_STATE_VERSION = 1
_READS_IN_FLIGHT = 16
# Of an object store: a thread hands over its reads when the last of them is there, so that many
# threads wait for few answers that are late. How many requests are made at once is not their number
# (source/_flight.py), which never is above all these reads.
_NETWORK_FETCHERS, _NETWORK_READS = 16, 32
_SEED_BYTES = 4  # of a drawn seed: short enough to be typed again
_LIGHT_STAGING = 16 << 20  # of what is as quickly unpacked as read: it stays in a cache
_ENDLESS = 2**31 - 1  # epochs of a plan without an end
_BOUNDED = 1024  # the lower bound is that of the whole job up to so many epochs

_log = logging.getLogger("nostall")

_made = itertools.count()
# Those that began, with tiers of their own; a forked child has none of its parent.
_with_tiers: weakref.WeakValueDictionary[str, DataLoader] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_with_tiers.clear)
# Ranks make the loaders of a world in the same order; those of other worlds, which only some ranks
# make, do not shift the numbers. A job= may be of a node alone, so ranks meet by numbers without it.
_made_in: dict[tuple[int, int], Iterator[int]] = collections.defaultdict(itertools.count)
_made_of: dict[tuple[int, int, str], Iterator[int]] = collections.defaultdict(itertools.count)


# Attributes of torch's loader that other programs look for, and their replacements here.
_SKIP = (
    "its plan has the order, and set_epoch() is the loader's own. To go on in the middle of an epoch, "
    "give it its load_state_dict() instead of skipping batches"
)
_OF_TORCH = {
    "sampler": _SKIP,
    "collate_fn": "pass collate= to it",
    "worker_init_fn": "it has threads, and no workers",
    "num_workers": "it has threads=, and no workers",
}


def _several(world: World) -> str:
    return (
        f"rank {world.rank} of {world.world_size} was passed in a job of {world.processes} processes, "
        "so that several of these may have one rank"
    )


def _with_node(job: str) -> str:
    """Nodes on one machine, by NOSTALL_NODE, do not share memory."""
    name = value("job.node")
    return f"{job} node {name}" if name else job


def _spans_nodes(world: World) -> bool:
    """Whether processes of other nodes have a part of the ranks, as far as the launcher says."""
    return (world.processes or 0) > world.local_world_size or bool(value("job.node"))


def _order_of(mixing: Mixing, order: Order) -> Mixed:
    if not isinstance(order, str) or order != "torch":
        raise UsageError("a Mixture has an order of its own: leave order= and shuffle= out")
    return Mixed(mixing.sources, mixing.schedule, mixing.at_end, mixing.samples)


def _chosen_order(order: Order, shuffle: bool | None) -> Order:
    named = isinstance(order, (str, *DESCRIBED))
    if named and order == "torch" and shuffle is False:
        return "sequential"
    shuffles = named and order != "sequential"
    if shuffle is not None and shuffle != shuffles:
        name = f'"{order}"' if named else "a sequence of sample ids"
        raise UsageError(
            f"shuffle={shuffle} does not go with order= {name}, which says all: leave shuffle= out"
        )
    return order


def _refuse_subscript() -> NoReturn:
    raise UsageError(
        "batches have no numbers to ask for: iterate, as in `for epoch in loader.epochs(): for batch "
        "in epoch:`; nostall.torch.Dataset(source)[i] gives a sample; a trainer takes the loader by "
        "nostall.plugins: hugging_face.FromLoader, torch_loader.TorchLoader and others "
        "(docs/guide/frameworks.md)"
    )


def _no_source(dataset: object) -> str:
    from nostall.source._tokens import Tokens

    way = way_from(dataset)
    if isinstance(dataset, Tokens):
        way = "divide the tokens into samples, for example by nostall.Windows(tokens, length)"
    return f"the first argument is {type(dataset).__name__}, not a dataset of nostall: {way}"


def _calibration(path: str | os.PathLike[str] | None) -> Calibration | None:
    if not path:
        return None
    from nostall.loader._calibration import Calibration

    return Calibration.load(path)


def _lower_bound(
    planned: dict[str, Any],
    sizes: NDArray[np.uint64],
    capacity: int,
    begin: tuple[int, int],
    recorder: Recorder,
) -> int:
    spec = Plan(**planned).native
    epochs = None
    if spec.epochs > _BOUNDED:
        epochs = list(itertools.chain.from_iterable(recorder.epochs_begun)) or [begin[0]]
    return int(_native.source_bytes_lower_bound(spec, sizes, capacity, *begin, epochs))


def _named(kind: type[enum.Enum], value: str) -> Any:
    """The native enumerator of a value as people write it."""
    name = value.replace("-", "_")
    return kind[f"{name}_" if keyword.iskeyword(name) else name]


_running: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


@atexit.register
def _end_with_program() -> None:
    """Ends iterations while there still are the modules that their ends use."""
    for batches in list(_running):
        with contextlib.suppress(ValueError):  # another thread is in it
            batches.close()


_started: weakref.WeakSet[DataLoader] = weakref.WeakSet()  # those that have begun, in this process
os.register_at_fork(after_in_child=_started.clear)


def _end_with_child() -> None:
    """Closes what the other ranks of the node would take for that of a rank that was killed.

    A thread for which the process still waits may go on with its loader.
    """
    with contextlib.ExitStack() as stack:
        for loader in list(_started):
            taker = loader._taker()
            if taker in (None, threading.current_thread()) or taker.daemon or not taker.is_alive():
                stack.callback(loader.close)


def _end(loader: _native.Loader, learned: Source | None, unobserve: Callable[[], None]) -> None:
    """Closes; `learned` is the source whose checksums this rank keeps for the next job."""
    loader.close()
    unobserve()
    if learned is not None:
        learned.keep_sums()


class Epoch:
    """One epoch of a loader: an iterable of its batches, with its number as `index`."""

    def __init__(self, loader: DataLoader, index: int) -> None:
        self._loader = loader
        self._loads = loader._loads
        self.index = index

    def __len__(self) -> int:
        return self._loader.plan.batches_in(self.index)

    def __iter__(self) -> Iterator[Any]:
        self._loader._refuse_before_load(self._loads)
        return self._loader._iterate_epoch(self.index)

    def __getitem__(self, batch: int) -> NoReturn:
        _refuse_subscript()


class _Told:
    """The newest iteration of a loader, and whether an epoch was set through the sampler before it."""

    def __init__(self) -> None:
        self._newest: Callable[[], object] = lambda: None
        self.begun = True
        self._set = self._set_before = False
        self.counts_itself = False  # the loader, whatever epochs are set through the sampler

    def make(self, batches: Generator[Any, None, None]) -> None:
        """An iteration that has not begun."""
        self._newest, self.begun = weakref.ref(batches), False
        self._set_before, self._set = self._set, False

    def is_awaited(self) -> bool:
        """Notes that an epoch is set; whether it is for an iteration that was made already."""
        early = not self.begun and not self._set_before
        self.counts_itself |= early
        self._set = True
        return early and self._newest() is not None


class _Epochs:
    """The batch sampler, and its sampler, whose epoch loops and frameworks set."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self.batch_size = loader.batch_size

    @property
    def sampler(self) -> _Epochs:
        return self

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next one, by the rule of `DataLoader.batch_sampler`.

        Lightning loads no state into a loader at the end of an epoch, nor into one that it makes
        anew. With a state, and max_steps=, it counts an epoch twice.
        """
        loader = self._loader
        if loader._options.steps is not None:
            return
        awaited = loader._told.is_awaited()
        if not loader._told.counts_itself:
            there = loader._position == (epoch, 0)  # which may be the end of the job
            ended = loader._resumed and epoch == loader._ended
            follows = ended or (epoch >= loader._position[0] and not there)
        else:
            takes = loader._loads == 0 and (awaited or loader.epochs_total is None)
            follows = takes and epoch > loader._next_epoch()
        if follows:
            loader.set_epoch(epoch)


class DataLoader:
    """Loads a source for data-parallel training, from the nearest place that has each sample.

    The order is that of ``torch.utils.data.DataLoader(dataset, batch_size, sampler=
    DistributedSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last),
    drop_last=drop_last)`` with ``set_epoch`` called, bit for bit, independent of caches, threads and
    failures; with `global_batch_size`, that of one rank, whose batches the ranks share. Native
    transforms draw from (seed, epoch, sample, occurrence), so they repeat exactly too. So do those
    of Python callables that use their `Context`.

    Args:
        dataset: where samples come from, for example ``nostall.ImageFolder(path)``.
        batch_size: samples per rank and batch; or pass `global_batch_size`, those of all ranks: then a
            rank may have no sample in the last batch of an epoch.
        epochs: how many epochs the job has; None if it has no end: then each iteration of the loader
            gives the next epoch. Many epochs cost no more than few.
        seed: fixes order and augmentation. If None, rank 0 draws one and all ranks take it, for which
            they meet here; `state_dict` and `stats` have it, and a loaded state brings its own.
        transforms: a list from ``nostall.transforms`` (run natively), any callable (given the raw
            bytes of a sample as a uint8 array of shape (bytes,), or the decoded image if `decode`),
            a list of both, or None for batches of raw bytes (`RawBatch`).
        shuffle: False gives samples in the order of the source; True if None, but a user's `order`
            is kept as it is.
        drop_last: drop samples that do not divide among all ranks, then the last partial batch.
        tiers: storage classes of this node, fastest first, shared by all its ranks, for example
            ``["ram:20GiB", "/nvme/cache:400GiB"]``; a `Tier` of your own among them; ``"auto"`` or
            ``[]``. If None, those of nostall.toml, else ``"auto"``. `Tiers` that other loaders of
            the same data share; nodes do not exchange samples then.
        order: ``"torch"``, ``"keyed"`` (O(1) memory), `SubBatches` (data used several times while
            it is in memory), `Weighted`, `ClassBalanced`, `RepeatedAugmentation`, or the user's own
            sequence of sample ids. Where a sample occurs again in an epoch, every occurrence has
            random draws of its own.
        on_error: what happens if a sample cannot be read or decoded: ``"raise"``, or
            ``"substitute"`` (another sample takes its place, the same on every rank; a warning at the
            epoch's end has their count and the first path, and `stats` has all).
            This is about damage; an exception of a user's callable ends the iteration.
        options: all other options, a `LoaderOptions`.
        rare: fields of `LoaderOptions`, which replace those of `options`.

    Raises:
        UsageError: arguments that contradict each other, named with their value.
        PeerError: another rank of the node has a different plan, or died.
        CorruptionError: while iterating, a sample is unusable and on_error is ``"raise"``.
        TransformError: while iterating, a callable failed for a sample that is not damaged.
    """

    def __init__(
        self,
        dataset: Source,
        batch_size: int | None = None,
        *,
        epochs: int | None = None,
        seed: int | None = 0,
        transforms: Transforms = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        tiers: Tiers | TierList | None = None,
        order: Order = "torch",
        on_error: Literal["raise", "substitute"] = "raise",
        options: LoaderOptions | None = None,
        **rare: Unpack[LoaderArguments],
    ) -> None:
        if not isinstance(dataset, Source):
            raise UsageError(_no_source(dataset))
        chosen = self._options = with_arguments(options, rare)
        self.dataset = dataset if chosen.fields is None else dataset.select(chosen.fields)
        self.epochs_total: int | None = checked("loader.epochs", epochs)
        if chosen.steps is not None and epochs is not None:
            raise UsageError(
                f"epochs={epochs} and steps={chosen.steps} both say how long the job is: pass one"
            )
        given: int | None = checked("loader.seed", seed)
        self.drop_last: bool = checked("loader.drop_last", drop_last)
        self._on_error = checked("loader.on_error", on_error)
        self._order = _chosen_order(order, checked("loader.shuffle", shuffle))
        if isinstance(self._order, ClassBalanced):
            # Before fields= leaves the labels out.
            labels = dataset.labels if self._order.labels is None else None
            self._order = self._order.weighted(labels)
        if isinstance(self._order, Buckets):
            self._order = self._order.of(dataset.sizes)
        if dataset.mixing is not None:
            self._order = _order_of(dataset.mixing, self._order)
        self._order_name = order_name(self._order)
        self._shared = tiers if isinstance(tiers, Tiers) else None
        self._find_place()
        self._size_batches(batch_size)
        self._seed_drawn = given is None
        self.seed = self._drawn_seed() if given is None else given
        self._calibration = _calibration(chosen.calibration)
        self._take_memory(tiers)
        self._recipe = Recipe(
            self.dataset,
            transforms,
            chosen,
            shift=self._order.times if isinstance(self._order, RepeatedAugmentation) else 1,
            on_error=self._on_error,
            threads=self._threads,
        )
        self._bound_staging()
        self._recipe.refuse_idle(rare, transforms)
        if self.world.rank == 0:
            self._recipe.tell_steps()
        self._plan_job()
        if self._batches == 0 and self.world.rank == 0:
            _log.warning(
                "an epoch has no batch: %s cannot fill a batch of %s on %s, and "
                "drop_last=True drops what does not",
                counted(self._spec.samples, "sample"), self.batch_size,
                counted(self.world.world_size, "rank"),
            )  # fmt: skip
        self._begin = self._position = (0, 0)  # of the placement; of the last batch
        self._samples_taken = 0  # in the last batch handed out
        self._resumed = self._closed = False
        self._loads = 0  # of states: iterations that began before are over
        self._ended: int | None = None  # the epoch that the loaded state had just ended
        self._turn: int | None = None  # of epochs(), behind turns of which nothing was taken
        self._loader: _native.Loader | None = None
        self._ahead: Ahead | None = None  # of the last iteration
        self._taker = weakref.ref(threading.current_thread())  # of the last batch
        self._told = _Told()
        self._recorder = Recorder(self.world.rank, self.world.world_size, self.dataset.describe)
        if self._recipe.place is not None:
            self._recorder.device = self._recipe.place.waits
        self._finalizer = weakref.finalize(self, lambda: None)

    def _find_place(self) -> None:
        """This rank's place in the job, and the names of the loader."""
        chosen = self._options
        self.world = find_place(
            rank=chosen.rank,
            world_size=chosen.world_size,
            local_rank=chosen.local_rank,
            local_world_size=chosen.local_world_size,
            job=chosen.job,
            one_each=callable(chosen.peers),  # it has one entry for each rank
        )
        self._name = f"loader {next(_made)}"
        rank, size, job = self.world.rank, self.world.world_size, chosen.job or ""
        self._meets = f"loader {next(_made_in[rank, size])} of {size}"
        number = next(_made_of[rank, size, job])
        self._twins = f"{job} loader {number}"
        self._job = f"{job or self.world.job} loader {number} of {size}"
        self._process = os.getpid()  # that made it, or its first batch
        self._compared = False
        self._cluster: Cluster | None = None
        self._joins = 0  # a resumed loader meets the others again
        self._peer_counts: dict[str, int] = {}

    def _size_batches(self, given: int | None) -> None:
        """Sizes of batches, and the ranks that padding follows."""
        whole, ranks = self._options.global_batch_size, self.world.world_size
        if (given is None) == (whole is None):
            raise UsageError(
                f"batch_size={given} and global_batch_size={whole}: pass one of them, the samples of a "
                "batch for each rank or for all ranks together"
            )
        if whole is None:
            self._batch_size: int = checked("loader.batch_size", given)
            self._global_batch = self._batch_size * ranks
        elif whole < ranks:
            raise UsageError(
                f"global_batch_size={whole} is less than a sample for each of {ranks} ranks"
            )
        else:
            whole_array = getattr(self._options.device, "is_fully_addressable", True)
            if not whole_array and (whole % ranks or not self.drop_last):
                raise UsageError(
                    f"global_batch_size={whole} on {ranks} ranks with drop_last={self.drop_last} gives "
                    f"them parts of several sizes, which no array over {self._options.device} can be "
                    "made of: pass a multiple of the ranks and drop_last=True, or batch_size"
                )
            self._batch_size = (whole + ranks - 1 - self.world.rank) // ranks
            self._global_batch = whole
        # Without a size for each rank nothing needs to be repeated; sub-batches are those of ranks.
        padded = whole is None or isinstance(self._order, SubBatches)
        self._order_world = ranks if padded else 1

    def _drawn_seed(self) -> int:
        """A seed for all ranks, which meet for it."""
        world, peers = self.world, self._options.peers
        if world.processes is not None:
            raise UsageError(
                f"seed=None draws one seed for all ranks, which meet for it, and {_several(world)}: "
                "pass seed="
            )
        parts = [os.urandom(_SEED_BYTES)]
        if world.world_size > 1:
            from nostall.job._rendezvous import find_rendezvous

            allgather = (
                peers
                if callable(peers)
                else find_rendezvous(world.rank, world.world_size, f"{self._meets} seed")
            )
            if allgather is None:
                raise UsageError(
                    "seed=None draws one seed for all ranks, and nothing connects them: pass seed=, or "
                    "initialise torch.distributed or mpi4py first, or set NOSTALL_RENDEZVOUS"
                )
            try:
                parts = allgather(parts[0])
            except PeerError as error:
                raise PeerError(
                    f"{error}; ranks meet to draw a seed: pass seed=None on all of them, or one number"
                ) from error
            given = [rank for rank, part in enumerate(parts) if len(part) != _SEED_BYTES]
            if given:
                raise UsageError(
                    f"rank {world.rank} has seed=None, and ranks {given} have another: pass seed=None "
                    "on all of them, or one number"
                )
        return int.from_bytes(parts[0], "little")

    def _take_memory(self, tiers: Tiers | TierList | None) -> None:
        """Sizes of tiers and buffers, and the threads."""
        ranks, size = self.world.most_here, self.dataset.total_bytes
        self._shares_own = self._shared is None and self.world.processes is not None
        if isinstance(tiers, Tiers):
            self._tiers = tiers.specs
        elif self._shares_own:
            # Processes that have one rank read the same samples, and not all of them need to read.
            self._shared = Tiers(self.dataset, tiers, job=_with_node(self.world.job))
            self._tiers = self._shared.specs
        else:
            found = planned(tiers, self.dataset, ranks, warns=self.world.local_rank == 0)
            known = self._calibration
            self._tiers = found if known is None else known.with_readers(found, ranks)
        usual = defaults(_native.memory_limits(), dataset_bytes=size, local_world_size=ranks)
        staging = self._options.staging
        self._staging = usual.staging if staging == "auto" else parse_size(staging)
        self._reading = usual.reading
        self._device_bytes = parse_size(self._options.device_ahead)
        self._threads = self._options.threads or cores_of_rank(ranks)

    def _tell_of_second(self) -> None:
        """Warns where another loader of this process that began has the same data in its own tiers."""
        if self._shared is not None:
            return
        for reference in _with_tiers.valuerefs():
            other = reference()
            if other is None or other._closed or other._job == self._job:
                continue
            if self.world.local_rank == 0:
                twice = held_twice(self.dataset, self._tiers, other.dataset, other._tiers)
                warn_of_second(self.dataset, twice)
        _with_tiers[self._name] = self

    def _bound_staging(self) -> None:
        if self._options.staging == "auto" and self._recipe.is_light:
            self._staging = min(self._staging, _LIGHT_STAGING)

    # ------------------------------------------------------------------ iterating

    def __len__(self) -> int:
        """Batches of this rank in one epoch, or in the whole job if it was made with `steps`."""
        return self._batches if self._options.steps is None else self._options.steps

    def __getitem__(self, batch: int) -> NoReturn:
        _refuse_subscript()

    def epochs(self) -> Iterator[Epoch]:
        """The epochs from the current position to the end of the job.

        Raises:
            UsageError: the job has no end.
        """
        if self.epochs_total is None and self._options.steps is None:
            raise UsageError(
                "epochs() would not end, for this loader was made without epochs=: pass it, or iterate "
                "the loader itself, which gives the next epoch each time"
            )
        return self._epochs_left()

    def _epochs_left(self) -> Iterator[Epoch]:
        # The position follows what is taken, for all of them may be made before: in a list. Where
        # turns are left out, the loader itself begins with the newest one.
        epoch = self._next_epoch()
        while epoch < self._last_epoch:
            before, loads = self._position, self._loads
            yield Epoch(self, epoch)
            untaken = self._loads == loads and self._position in (before, (epoch, 0))
            if untaken:
                self._turn = epoch = epoch + 1
            else:
                epoch = self._next_epoch()
        self._turn = None

    def __iter__(self) -> Iterator[Any]:
        """The next epoch (after `set_epoch` that one, after `load_state_dict` its rest).

        With `steps`: all batches that are left of them, after the last one that was handed out.
        """
        batches = self._iterate(self._next)
        return batches if self._options.steps is None else self._steps_left(batches, self._loads)

    def _next(self) -> tuple[int, int]:
        """The epoch and the batch that an iteration of the loader begins with."""
        if self._options.steps is None or self._turn is not None:
            return self._begin_of(self._next_epoch())
        epoch, batch = self._position
        return (epoch, batch) if self._is_inside() or batch == 0 else (epoch + 1, 0)

    def _steps_left(self, epoch: Iterator[Any], loads: int) -> Iterator[Any]:
        yield from epoch
        while self._next_epoch() < self._last_epoch:
            self._refuse_before_load(loads)
            yield from self._iterate_epoch(self._next_epoch())

    @property
    def batch_sampler(self) -> _Epochs:
        """For loops and frameworks that set the epoch of a loader's sampler; it has no samples.

        ``batch_sampler.sampler.set_epoch(epoch)`` is `set_epoch`, but goes back to no epoch that is
        over. With `steps` it does nothing.

        Lightning sets the epoch of its training in the loaders of evaluations too, which `epochs`
        does not count. Before it first does, it makes an iteration of each loader to see whether it
        can. So a loader that has an iteration without a batch when its epoch is set counts its
        epochs itself from then on. It takes the epoch only for an iteration that still waits for its
        first batch and was made before an epoch was set, as a training's is, and only forward and
        without a loaded state. One without `epochs` takes it for each iteration.
        """
        return _Epochs(self)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next one to iterate, from its first batch.

        An iteration that has not taken a batch yet begins there too. One that is running goes on, and
        its next batch undoes what was set: set it between iterations.
        After `load_state_dict`, setting the epoch that was interrupted keeps its position: that of
        a state taken after the last batch has no batches left.
        """
        try:
            epoch = operator.index(epoch)  # not one of NumPy: it goes into the state
        except TypeError:
            raise UsageError(f"set_epoch takes the number of an epoch, not {epoch!r}") from None
        if not 0 <= epoch < self._last_epoch:
            steps = self._options.steps
            if epoch > 0 and steps is not None:
                raise UsageError(
                    f"this job of {counted(steps, 'step')} has no epoch {epoch}: pass a larger steps= "
                    "to DataLoader"
                )
            remedy = (
                f"pass epochs={epoch + 1} or more to DataLoader, the plan needs to know them"
                if epoch > 0
                else "epochs count from 0"
            )
            raise UsageError(
                f"this job of {counted(self._last_epoch, 'epoch')} has no epoch {epoch}: {remedy}"
            )
        self._turn = None
        if self._resumed and epoch == self._ended:
            self._position = (epoch, self._plan.batches_in(epoch))
        if self._resumed and epoch == self._position[0]:
            return
        self._resumed = False
        self._position = (epoch, 0)

    def _is_inside(self) -> bool:
        """Whether batches of the position's epoch are left."""
        epoch, batch = self._position
        return epoch < self._last_epoch and batch < self._plan.batches_in(epoch)

    def _after(self, epoch: int) -> tuple[int, int]:
        """The position after all batches of an epoch; one that `steps` cuts short is not over."""
        batches = self._plan.batches_in(epoch)
        return (epoch + 1, 0) if batches == self._batches else (epoch, batches)

    def _next_epoch(self) -> int:
        if self._turn is not None:
            return self._turn
        epoch, batch = self._position
        return epoch if batch == 0 or self._resumed else epoch + 1

    def _iterate_epoch(self, epoch: int) -> Iterator[Any]:
        return self._iterate(functools.partial(self._begin_of, epoch))

    def _begin_of(self, epoch: int) -> tuple[int, int]:
        goes_on = self._resumed and epoch == self._position[0]
        return epoch, self._position[1] if goes_on else 0

    def _iterate(self, place: Callable[[], tuple[int, int]]) -> Iterator[Any]:
        self._refuse_closed()
        # A loaded position stays one until a batch is taken: this iterator may never be used.
        if not self._resumed and (begin := place())[0] < self._last_epoch:
            self._position = begin
        _running.add(batches := self._batches_of(place, self._loads))
        self._told.make(batches)
        return batches

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("this loader is closed")

    def _refuse_before_load(self, loads: int) -> None:
        """Refuses an iteration of the time when so many states had been loaded, if more have been."""
        if loads != self._loads:
            raise UsageError(
                "a state was loaded into this loader: begin a new iteration, of epochs() where "
                "that is iterated"
            )

    def _batches_of(
        self, place: Callable[[], tuple[int, int]], loads: int
    ) -> Generator[Any, None, None]:
        self._refuse_closed()  # it may have been made before
        self._refuse_before_load(loads)
        self._told.begun = True
        self._taker = weakref.ref(threading.current_thread())
        # Lightning makes the iterator, then sets the epoch, or finds that all epochs are over.
        epoch, start = place()
        if epoch >= self._last_epoch:
            steps = self._options.steps
            raise UsageError(
                f"this job of {counted(self._last_epoch, 'epoch')} has ended, in which an iteration "
                "that is left early counts as one; pass a larger epochs= to DataLoader, or none, or go "
                "back with set_epoch, as after a look at the first batch"
                if steps is None
                else f"this job of {counted(steps, 'step')} has ended: pass a larger steps= to "
                "DataLoader"
            )
        self._position, self._turn = (epoch, start), None
        if self._ahead is not None:
            self._ahead.close()
            self._device_bytes = self._ahead.limit
        self._recipe.pause()
        if self._loader is None:  # set_epoch may have gone back since the state was loaded
            self._begin = min(self._begin, (epoch, start))
        await_all()  # a loader that was dropped may have these tiers
        loader = self._stage()
        if self._closed:  # by another thread, which may have found nothing to stop
            self.close()
            raise StoppedError("the loader is closed")
        batches = self._plan.batches_in(epoch)
        if start < batches:
            loader.seek(epoch, start)
        running = self._recorder.begin_epoch(epoch, batches - start)
        made = functools.partial(self._recipe.batches, loader, batches - start)
        here, ahead = made(), None
        if self._recipe.place is not None:
            self._ahead = ahead = Ahead(self._recipe.place, made, self._device_bytes)
        try:
            for index in range(start, batches):
                self._refuse_before_load(loads)
                if not self._recorder.is_current(running):
                    raise UsageError(
                        "another iteration of this loader has begun: a loader has one position"
                    )
                # Nothing here refers to a batch that was handed out: its memory is the caller's.
                yield self._hand_out(running, (epoch, index + 1), here, ahead)
            self._recorder.end_epoch(running, over=True)
            if self._recipe.place is not None:
                self._recipe.place.pause()
        finally:
            if ahead is not None:
                close_safely(ahead.close)
            here.close()
            self._recorder.end_epoch(running)
        if self._position == (epoch, batches):
            self._position = self._after(epoch)
            self._resumed = False

    def _hand_out(
        self,
        running: Any,
        position: tuple[int, int],
        here: Generator[Made, None, None],
        ahead: Ahead | None,
    ) -> Any:
        """The next batch, after which the loader is at `position`."""
        began = self._recorder.wait()
        # The core records waits for its own batches, which callables or a device work on afterwards.
        with trace.span("get batch", "data"):
            if ahead is not None:
                one, value = ahead.take_sent()
            else:
                one = next(here)
                value = one.hand_out(one.batch, self._recipe.here)
        self._recorder.batch(one.batch, began, one.substituted)
        taker, samples = weakref.ref(threading.current_thread()), len(one.batch)
        # What a signal raises comes before the position moves: nothing is called from here on.
        self._taker, self._samples_taken = taker, samples
        self._resumed = False
        self._position = position
        return value

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out, and what it depends on; plain numbers."""
        return self._state_at(*self._position)

    def _state_at(self, epoch: int, batch: int) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "batch": batch,
            "seed": self.seed,
            "global_batch": self._global_batch,
            "order_world": self._order_world,
            "samples": len(self.dataset),
            "dataset": self.dataset.fingerprint,
            "drop_last": self.drop_last,
            "order": self._order_before(epoch, batch),
            **self.dataset.extent,
        }

    def _order_before(self, epoch: int, batch: int) -> str:
        """The name of the order: of a mixture, of that what comes before this global batch."""
        if not isinstance(self._order, Mixed):
            return self._order_name
        return f"{self._order_name} {self._plan.mixed_before(epoch, batch):08x}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was taken, on any number of ranks.

        The global batch must be the same: on w ranks pass ``batch_size=global_batch / w``, or always
        ``global_batch_size=``. A loader whose seed was drawn takes that of the state. An iteration that
        was begun before is over: begin a new one.

        Raises:
            UsageError: the state is of another dataset, seed, order or global batch.
        """
        if not isinstance(state, Mapping) or not {"version", "epoch", "batch"} <= state.keys():
            raise UsageError(f"not a state of a loader, from its state_dict(): {state!r:.100}")
        if state["version"] != _STATE_VERSION:
            raise UsageError(
                f"the loader's state has version {state['version']!r}, this release reads "
                f"{_STATE_VERSION}"
            )
        numbers = ("epoch", "batch", "global_batch", "seed", "order_world")
        epoch, batch, _, seed, order_world = whole_of_state("loader", state, *numbers)
        mine = self.state_dict()
        if self._seed_drawn:
            mine["seed"] = seed
        mine["order"] = self._order_before(epoch, batch)
        # Of the numbers of a data set the first that differs: the others follow from it.
        data = (*self.dataset.extent, "samples", "dataset")
        first = [key for key in data if state.get(key) != mine[key]][:1]
        keys = ("seed", "global_batch", *first, "drop_last", "order")
        refuse_other_state("loader", state, mine, keys, lambda key: self._hint_of(key, state))
        # By the order that goes on: RepeatedAugmentation has as many batches as its ranks allow.
        order = {"seed": seed, "order_world": order_world}
        plan = Plan(**self._planned | order).native
        last, batches = int(plan.epochs), int(_native.batches_per_epoch(plan))
        inside = (epoch < last and batch <= batches) or (epoch, batch) == (last, 0)
        steps = self._options.steps
        if not inside or (steps is not None and epoch * batches + batch > steps):
            length = f"{counted(last, 'epoch')} of {counted(batches, 'batch')}"
            raise UsageError(
                f"the loader's state is at epoch {epoch}, batch {batch}, outside this job of "
                + (length if steps is None else counted(steps, "step"))
            )
        self._stop_native()
        self._loads += 1
        self.seed, self._order_world = seed, order_world
        self._plan_job()
        self._ended = None
        if batch and batch == self._batches:
            self._ended = epoch
            epoch, batch = epoch + 1, 0
        self._position, self._turn = (epoch, batch), None
        self._begin = (epoch, batch) if epoch < self._last_epoch else (self._last_epoch - 1, 0)
        self._resumed = True
        if self.world.rank == 0:
            self._warn_of_empty_shares()

    def _hint_of(self, key: str, state: Mapping[str, Any]) -> str:
        """What to say of an entry in which `state` differs; "" for nothing."""
        extent = self.dataset.extent
        if key in extent and key in state:
            grew = extent[key] - state[key]
            return f"the files {'grew' if grew > 0 else 'shrank'} by {abs(grew)} {key}"
        if key == "global_batch":
            each, rest = divmod(state[key], self.world.world_size)
            whole = rest or self._options.global_batch_size is not None
            return f"on {counted(self.world.world_size, 'rank')} pass " + (
                f"global_batch_size={state[key]}" if whole else f"batch_size={each}"
            )
        if key == "dataset" and not self.dataset._pairs:
            return "it is another data set, or was opened with other options or fields="
        return ""

    def _warn_of_empty_shares(self) -> None:
        """With ``batch_size=`` they come after a resume on more ranks alone: nobody expects them."""
        options, ranks = self._options, self.world.world_size
        rest = self._plan.epoch_length % self._global_batch
        if options.global_batch_size is None and options.scheme != "whole" and 0 < rest < ranks:
            _log.warning(
                "the last batch of each epoch has %s for %d ranks, as the job began on %s, so some get "
                "none, of which a mean loss is NaN: sum losses, or pass drop_last=True from the start",
                counted(rest, "sample"), ranks, counted(self._order_world, "rank"),
            )  # fmt: skip

    # ------------------------------------------------------------------ what happened

    def stats(self) -> Stats:
        """What this rank's consumer waited for, and the origins of its samples."""
        if self._loader is not None:
            self._peer_counts = self._loader.peers
        return self._recorder.stats(
            self._name,
            self._bound(),
            self._peer_counts,
            self._taken_of_sources(),
            self.seed,
            self._threads,
            self._fetchers(),
        )

    def lasting_stats(self) -> Callable[[], Stats]:
        """For recording: a function for the statistics that does not hold this loader."""
        return functools.partial(
            self._recorder.stats,
            self._name,
            self._bound(),
            seed=self.seed,
            threads=self._threads,
            fetchers=self._fetchers(),
        )

    def _taken_of_sources(self) -> dict[str, dict[str, int]]:
        """What all ranks took of the sources of a mixture."""
        mixing = self.dataset.mixing
        if mixing is None:
            return {}
        taken = self._plan.consumed(*self._position).tolist()
        return {
            name: {"samples": count, "epoch": count // samples}
            for name, count, samples in zip(mixing.names, taken, mixing.sources, strict=True)
        }

    def _bound(self) -> Callable[[], int]:
        """A function for the fewest bytes of the job, or of its epochs so far where it has no end.

        It does not hold the loader.
        """
        capacity = sum(tier.capacity for tier in self._tiers)
        if self._cluster is not None:
            capacity = sum(self._cluster.capacities)
        else:
            processes = self.world.processes or self.world.world_size
            capacity *= -(-processes // self.world.local_world_size)
        return functools.partial(
            _lower_bound,
            self._planned,
            self.dataset.sizes,
            capacity,
            self._begin,
            self._recorder,
        )

    @property
    def name(self) -> str:
        """The name of the loader in its process: "loader 0" is the first that was made."""
        return self._name

    def totals(self) -> tuple[EpochStats, dict[str, int]]:
        """All epochs so far added up, and the most memory seen by pool; cheap, from any thread."""
        return self._recorder.totals()

    def on_batch(self, live: Callable[[Recorder, int, int, int], None]) -> None:
        """For recording: `live` is called after every batch."""
        self._recorder.live = live

    @property
    def gives_pairs(self) -> bool:
        """Whether batches are pairs, of samples and of labels: neither several fields nor items."""
        return self._recipe.gives_pairs

    def settings(self) -> dict[str, Any]:
        """The settings of this loader, given or chosen, as plain data."""
        return {
            "rank": self.world.rank,
            "world_size": self.world.world_size,
            "local_world_size": self.world.local_world_size,
            "dataset": type(self.dataset).__name__,
            "samples": len(self.dataset),
            "dataset_bytes": self.dataset.total_bytes,
            "batch_size": self._batch_size,
            "global_batch": self._global_batch,
            "epochs": self.epochs_total,
            "seed": self.seed,
            "name": self._name,
            "threads": self._threads,
            "fetchers": self._fetchers(),
            **self._recipe.settings(),
            "staging_bytes": self._staging,
            "tiers": [[t.sort, t.capacity, t.path] for t in self._tiers],
            # Whether samples can travel between nodes; not before the first batch is asked for.
            "exchange": self._cluster is not None and self._cluster.exchanges,
        }

    def close(self) -> None:
        """Stops all threads, gives the memory back and leaves the node's tiers."""
        self._closed = True
        trace.keep(self)
        self._recipe.end_codecs()
        self._stop_native()
        self._recipe.close()
        if self._shares_own and self._shared is not None:
            self._shared.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end_with(kind, self.close)

    # ------------------------------------------------------------------ the native side

    @property
    def plan(self) -> Plan:
        """What this loader will read, and when; of 2**31 - 1 epochs if the job has no end."""
        return self._plan

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a whole batch; fixed, because the plan follows from it."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        raise UsageError(
            f"batch_size is fixed at {self._batch_size} when the loader is made: make another loader, "
            "or join batches by nostall.DynamicBatches"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TORCH:
            raise AttributeError(
                f"nostall.DataLoader has no {name}, as torch's loader has it: {_OF_TORCH[name]}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        """For copy.copy, copy.deepcopy and pickle, and who asks whether it can be pickled."""
        raise TypeError(
            "a DataLoader is neither copied nor pickled, for it has threads and one position: make "
            "another one of loader.dataset, which can be pickled, and load the state_dict() of this one"
        )

    def __repr__(self) -> str:
        end = "" if self.epochs_total is None else f", epochs={self.epochs_total}"
        end = end if self._options.steps is None else f", steps={self._options.steps}"
        return (
            f"<DataLoader of {self.dataset!r}: batch_size={self._batch_size}, "
            f"{counted(self._batches, 'batch')} an epoch{end}, seed={self.seed}, "
            f"{self._rank_in_words()}, tiers [{', '.join(self._tiers_in_words())}]>"
        )

    def _rank_in_words(self) -> str:
        processes = self.world.processes
        within = f" in {processes} processes" if processes else ""
        return f"rank {self.world.rank} of {self.world.world_size}{within}"

    def _tiers_in_words(self) -> list[str]:
        return list(map(in_words, self._tiers))

    def _repr_html_(self) -> str:
        """What a notebook shows: the batches, the tiers and the position, and the data set below."""
        from nostall.base import _html as html

        steps, epochs = self._options.steps, self.epochs_total
        end = counted(epochs, "epoch") if epochs is not None else "epochs without an end"
        epoch, batch = self._position
        rows = [
            ("batches", f"{self._batches} an epoch, of {counted(self._batch_size, 'sample')}"),
            ("job", f"{end if steps is None else counted(steps, 'step')}, seed {self.seed}"),
            ("position", f"epoch {epoch}, batch {batch}"),
            ("rank", self._rank_in_words()),
            ("tiers", "\n".join(self._tiers_in_words()) or "none"),
        ]
        return html.table("DataLoader", rows) + self.dataset._repr_html_()

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and batch after the last batch handed out."""
        return self._position

    @property
    def batches_left(self) -> int:
        """Batches between the position and the end of an iteration: 0 once the last was handed out."""
        epoch, batch = self._position
        if self._options.steps is not None:
            return self._options.steps - (epoch * self._batches + batch)
        return self._plan.batches_in(epoch) - batch if epoch < self._last_epoch else 0

    def _plan_job(self) -> None:
        self._planned: dict[str, Any] = {
            "samples": len(self.dataset),
            "batch_size": self._batch_size,
            "global_batch_size": self._global_batch,
            "world_size": self.world.world_size,
            "epochs": _ENDLESS if self.epochs_total is None else self.epochs_total,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "order": self._order,
            "scheme": self._options.scheme,
            "order_world": self._order_world,
            "steps": self._options.steps,
        }
        self._plan = Plan(**self._planned)
        self._order = self._planned["order"] = self._plan.order
        self._spec = self._plan.native
        self._last_epoch = int(self._spec.epochs)
        self._batches = int(_native.batches_per_epoch(self._spec))
        self._recipe.follow(self._spec)

    def _join(self) -> Cluster | None:
        """Meets the ranks of other nodes, if there are any and something connects them.

        A rank that takes no samples from them meets them too, and says so: they need not wait for it.
        """
        peers, world = self._options.peers, self.world
        if self._shared is not None:
            where, remedy = "with tiers= that are shared", "give each loader tiers of its own"
            if self._shares_own:
                where = f"where {_several(world)}"
                remedy = (
                    "pass local_rank=, local_world_size= and job= too, if each rank is one process"
                )
                if world.world_size == 1 and peers != "on":  # as for any loader of one rank
                    return None
            if peers == "on":
                raise UsageError(
                    f'samples cannot travel between nodes {where}: leave peers="on" out, or {remedy}'
                )
            for name, default in (
                ("sharing", "push"),
                ("copies", "fixed"),
                ("assignment", "plan"),
            ):
                if (given := getattr(self._options, name)) != default:
                    raise UsageError(
                        f"{name}={given!r} has no effect {where}, for each node then reads for itself: "
                        f'leave {name}="{default}", or {remedy}'
                    )
            first = world.rank == 0 and world.local_rank == 0
            if self._shares_own and first and peers == "auto" and _spans_nodes(world):
                _log.warning(
                    "samples do not travel between nodes, for %s: each node reads for itself, or %s",
                    _several(world),
                    remedy,
                )
            return None
        if peers in ("auto", "off") and world.world_size == 1:
            return None
        from nostall.job import _cluster as cluster
        from nostall.job._rendezvous import find_rendezvous

        if peers in ("auto", "off") and not cluster.spans_nodes(world):
            return None
        allgather = (
            peers
            if callable(peers)
            else find_rendezvous(world.rank, world.world_size, f"{self._meets} {self._joins}")
        )
        if allgather is None:
            reason = (
                "nothing connects the ranks: initialise torch.distributed or mpi4py first, set "
                "NOSTALL_RENDEZVOUS, or pass peers="
            )
            if peers == "on":
                raise UsageError(f"samples cannot travel between nodes: {reason}")
            if world.rank == 0 and peers == "auto":
                _log.warning("samples do not travel between nodes: %s", reason)
            return None
        joined = cluster.join(world, self._tiers, allgather, self._alike(), alone=peers == "off")
        self._joins += 1
        if joined.problem and peers == "on":
            raise UsageError(f"samples cannot travel between nodes: {joined.problem}")
        self.world = joined.settle(world)
        return joined

    def _alike(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks, by the names of their arguments."""
        state = self.state_dict()
        for key in ("version", "epoch", "batch", "global_batch"):
            del state[key]
        return {
            "batch_size": self._batch_size if self._options.global_batch_size is None else None,
            "global_batch_size": self._options.global_batch_size,
            "epochs": self.epochs_total,
            "steps": self._options.steps,
            **state,
            "order": f"{self._order_name} {self._plan.fingerprint}"
            if isinstance(self._order, Mixed)
            else self._order_name,
            "sharing": self._options.sharing,
            "copies": self._options.copies,
            "assignment": self._options.assignment,
            "scheme": self._options.scheme,
        }

    def _stage(self) -> _native.Loader:
        if self._process != os.getpid():
            one_of_several = self.world.processes is None and self.world.local_world_size > 1
            # Here, for the core would wait for threads of the run before, which are not in a child.
            if self._loader is not None:
                raise UsageError(
                    f"this loader belongs to process {self._process}; a forked child must make its own"
                )
            self._process = os.getpid()
            if not one_of_several:  # whose ranks meet by the name
                self._job += f" process {self._process}"  # other children begin with it, too
        if (loader := self._loader) is None:
            if self._options.rank is None:
                refuse_late_group(self.world.world_size, "loader")
            if not self._compared and self.world.world_size > 1:
                from nostall.job import _cluster as cluster

                cluster.check_alike(self.world, self._twins, self._alike())
                self._compared = True
            met = self._cluster = self._join()
            self._tell_of_second()  # not before: what this one replaces is gone by now
            job_name = self._job
            if met is not None:
                # Nodes on one machine, by NOSTALL_NODE, do not share memory.
                job_name += f" node {met.node}"
            transport = met.transport if met is not None else None
            loader = _native.Loader(
                self._config(), self._node(met, job_name), self._reach(met), transport
            )
            self._finalizer.detach()
            learned = self.dataset if self.world.rank == 0 else None
            from nostall.observe import _live as live

            self._finalizer = Closer(self, _end, loader, learned, live.remove)
            self._loader = loader
            _started.add(self)
            before_child_ends(_end_with_child, 0)
            metrics.add(self)
            live.add(self)
            if trace.wanted():
                trace.begin(self)
        return loader

    def _fetchers(self) -> int:
        known = self._calibration.source_threads if self._calibration else 0
        least = _NETWORK_FETCHERS if self.dataset.over_network else 2
        return max(least, known or self._threads)

    def _expect(self, config: _native.LoaderConfig) -> None:
        """Sets the seconds per byte of each origin, for one fetch thread of this rank."""
        if self._calibration is None:
            return
        readers = self.world.local_world_size * self._fetchers()
        expected = functools.partial(self._calibration.seconds_per_byte, readers=readers)
        config.expected_tiers = [expected(tier.path or tier.kind) for tier in self._tiers]
        config.expected_peer, config.expected_source = expected("peer"), expected("source")

    def _config(self) -> _native.LoaderConfig:
        chosen, config = self._options, _native.LoaderConfig()
        config.job = self._spec
        config.rank = self.world.rank
        config.source = self.dataset.native
        config.program = self._recipe.program
        # The stage of callables finds replacements itself, because they must suit the callable; that
        # of items knows of the processes that were to make them.
        report = (
            self._recipe.stage
            and self._recipe.program is None
            and (self._on_error == "substitute" or self.dataset.item_maker is not None)
        )
        on_error = "report" if report else self._on_error
        config.on_error = _named(_native.OnError, on_error)
        config.fetchers = self._fetchers()
        config.workers = self._threads
        config.depth = _NETWORK_READS if self.dataset.over_network else _READS_IN_FLIGHT
        config.reader = _named(_native.ReaderKind, chosen.reader)
        config.staging_bytes = self._staging
        config.io_bytes = self._reading
        config.begin = self._begin
        if self._recipe.place is not None and self._recipe.is_native:
            config.take_batch_memory(self._recipe.place.memory)
            config.labels_in_slab = True
            config.keep_bytes = 2 * self._staging  # beside what is staged, what is being copied
        if self._recipe.stage is not None and self._recipe.program is None:
            self._recipe.stage.staging = self._staging
            # Raw batches differ in size: one that is free is often too small for the next.
            config.keep_bytes = max(1, self._staging // 4)
        self._expect(config)
        if self._shared is not None:
            numbers = self._shared.numbers_of(self.dataset)
            config.share(
                self._shared.native, np.zeros(0, np.uint64) if numbers is None else numbers
            )
        config.sharing = _named(_native.Sharing, chosen.sharing)
        config.copies = _named(_native.CopyRule, chosen.copies)
        config.locality = chosen.assignment == "locality"
        return config

    def _node(self, met: Cluster | None, job_name: str) -> _native.NodeSpec:
        node = _native.NodeSpec()
        node.job = job_name
        node.loads = self._loads
        if self.world.processes is None:
            node.local_rank = self.world.local_rank
            node.local_world = self.world.local_world_size
        node.tiers = native_tiers(self._tiers)
        if met is not None and met.transport is not None:
            node.node = met.node
            node.nodes.of_rank = met.node_of_rank
            node.nodes.capacity = met.capacities
            node.all_tiers = [
                [
                    _native.TierSpec(_named(_native.TierKind, kind), capacity, "", False, False)
                    for kind, capacity in tiers
                ]
                for tiers in met.tiers
            ]
        return node

    @staticmethod
    def _reach(met: Cluster | None) -> _native.ExchangeConfig:
        peers = _native.ExchangeConfig()
        if met is not None and met.transport is not None:
            peers.addresses = met.addresses
            peers.secret = met.secret
            peers.timeout = timedelta(milliseconds=value("job.peer_timeout_ms"))
        return peers

    def _stop_native(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        loader, self._loader = self._loader, None
        if loader is not None:
            from nostall.observe import _live as live

            self._peer_counts = loader.peers
            live.remove(self)
            self._finalizer()
