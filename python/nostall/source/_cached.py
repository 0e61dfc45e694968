"""A user's own map-style data set, whose items are made once and kept by the tiers."""

from __future__ import annotations

import functools
import logging
import random
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from nostall.base import _checks as checks
from nostall.base import _children as children
from nostall.base._garbage import Closer, end_with
from nostall.base._sizes import parse_size
from nostall.base._words import counted
from nostall.errors import CorruptionError, TransformError, UsageError
from nostall.job._cores import cores_of_rank
from nostall.job._world import find_world
from nostall.source._custom import SampleReader, native_source
from nostall.source._item_record import FORMAT, left_out, modules_of
from nostall.source._items import admit, decode
from nostall.source._makers import MakeError, Makers
from nostall.source._source import ItemMaker, Source, arguments_of, way_to_sources

_log = logging.getLogger("nostall")

_LOOKED_AT = 16  # items, when the data set is opened
_MADE_TWICE = 3
_SPREAD = 1.25  # the room for an item whose size varies, as a multiple of the largest one seen
_PAGE = 4096
_ROUND = 64

# The data sets of this process, by what was looked at. Ranks make theirs in the same order; those of
# other items, which only some ranks make, do not shift the numbers.
_numbered: defaultdict[str, list[Callable[[], object]]] = defaultdict(list)
# The numbers of a Cached that is copied, while its copy opens the data set again.
_of_copy: ContextVar[tuple[int, ...]] = ContextVar("_of_copy", default=())


class _Reader(SampleReader):
    def __init__(self, makers: Makers, room: int, name: str) -> None:
        self._makers, self._room, self._name = makers, room, name
        self._told = False

    def read(self, samples: list[int]) -> list[Any]:
        return [self._fitting(record) for record in self._makers.make_all(samples)]

    def _fitting(self, record: bytes | MakeError) -> Any:
        if isinstance(record, MakeError):
            return CorruptionError(str(record))
        if len(record) <= self._room:
            return record
        if not self._told:
            self._told = True
            _log.warning(
                "an item of %s has %d bytes, more than the room of %d: such items are made anew in "
                "each epoch; pass max_bytes= to Cached",
                self._name,
                len(record),
                self._room,
            )
        return left_out(len(record))

    def describe(self, sample: int) -> str:
        return f"item {sample} of {self._name}"


class Cached(Source):
    """Any data set with ``__len__`` and ``__getitem__``, for example one of ``torch.utils.data``.

    Each item is made once in the job, by worker processes, in the order in which the training needs it
    and ahead of need. The tiers keep it, and all ranks and nodes share it. An item may consist of
    tensors, arrays, numbers, texts, bytes, images of PIL, and tuples, lists and dictionaries of them.
    A batch is what torch's default_collate makes of its items.

    Every ``dataset[i]`` must give the same bytes whenever it is called: random augmentation belongs
    into `then`, which is called for every sample in each epoch.

    Args:
        dataset: the data set. The worker processes have copies of it.
        then: called with each item, in the loader's threads or (``workers="processes"`` of the loader)
            processes; what it returns takes the item's place.
        makers: worker processes of this rank; its share of the cores if None.
        max_bytes: the room for one item in tiers and buffers, in bytes or as in "2MiB". Larger items
            are made anew in each epoch. If None, the size of all items if some that are made at the
            start are of one size, else a quarter more than the largest of them.
        version: names the state of the data set, as a text or a number. Tiers that are kept for later
            jobs need it: change it when an item changes. Without one, memory in `Tiers` is that of this
            `dataset` object and its copies alone.
        pickles: classes, as "module.Class", whose objects may be stored by pickle.
        start_method: of the processes, as multiprocessing has it; its default if None.

    Raises:
        UsageError: the data set has no length, is empty, gives what cannot be stored, or gives
            something else when it is asked again.
        TransformError: an item cannot be made.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        then: Callable[[Any], Any] | None = None,
        makers: int | None = None,
        max_bytes: int | str | None = None,
        version: str | int | None = None,
        pickles: Sequence[str] = (),
        start_method: str | None = None,
    ) -> None:
        self._arguments = arguments_of(locals())
        if way := way_to_sources(dataset):
            raise UsageError(f"Cached takes a Dataset, not {type(dataset).__name__}: {way}")
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"{type(dataset).__name__} has no __len__ and __getitem__, so no order can be planned "
                "for it: Cached takes map-style data sets"
            )
        if isinstance(dataset, Source):
            raise UsageError(f"{type(dataset).__name__} needs no Cached: give it to DataLoader")
        if then is not None and not callable(then):
            raise UsageError(f"then= is {type(then).__name__}, which cannot be called")
        if len(dataset) == 0:
            raise UsageError(f"{type(dataset).__name__} is empty")
        pickles = self._arguments["pickles"] = checks.texts("pickles", pickles)
        room = None if max_bytes is None else parse_size(max_bytes)
        if start_method is not None:
            children.check_method("start_method", start_method)
        self.then = then
        self.version = version
        self.pickles = frozenset(pickles)
        self._name = type(dataset).__name__
        if makers is None:
            makers = cores_of_rank(find_world().most_here)
        count = checks.whole("makers", makers, 1, 2**16)
        self._makers = Makers(
            dataset,
            count=count,
            pickles=pickles,
            start_method=start_method,
            fewer="Cached fewer makers=",
        )
        self._finalizer = Closer(self, self._makers.close)
        try:
            self._open(len(dataset), room)
        except BaseException:
            self._finalizer()
            raise

    def _open(self, samples: int, room: int | None) -> None:
        records = self._look_at(samples)
        largest = max(map(len, records.values()))
        smallest = min(map(len, records.values()))
        if room is None:
            varies = -(-int(largest * _SPREAD) // _PAGE) * _PAGE
            room = largest if smallest == largest else varies
        self.room = -(-room // _ROUND) * _ROUND
        self.modules = frozenset().union(*map(modules_of, records.values()))
        admit(self.modules)
        identity = [
            FORMAT,
            self._name,
            self.version,
            [(sample, zlib.crc32(record)) for sample, record in records.items()],
        ]
        # A version says of all items whether they are the same.
        self.numbers: tuple[int, ...] = ()
        if self.version is None:
            self.numbers = _of_copy.get() or _number_of(
                self._arguments["dataset"], _numbered[repr(identity)]
            )
        self.native = native_source(
            _Reader(self._makers, self.room, self._name),
            sizes=np.full(samples, self.room, np.uint64),
            labels=np.zeros(samples, np.int64),
            group=None,
            identity=identity,
            bounded=True,
            made_at_once=self._makers.count,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """As for any source; the copy has the numbers of this one."""
        return _reopen_as, (self.numbers, *super().__reduce__())

    def _look_at(self, samples: int) -> dict[int, bytes]:
        """The records of some items, by their numbers."""
        looked = {0, samples - 1, samples // 2}
        looked |= set(random.Random(samples).sample(range(samples), min(samples, _LOOKED_AT)))
        chosen = sorted(looked)
        records: dict[int, bytes] = {}
        for sample, record in zip(chosen, self._makers.make_all(chosen), strict=True):
            records[sample] = self._made(sample, record)
        again = chosen[:: max(1, len(chosen) // _MADE_TWICE)][:_MADE_TWICE]
        for sample, record in zip(again, self._makers.make_all(again), strict=True):
            if self._made(sample, record) != records[sample]:
                raise UsageError(
                    f"item {sample} of {self._name} is not the same when it is made again: what is "
                    "random in it would be frozen. Take that part out of the data set and pass it as "
                    "then="
                )
        return records

    def _made(self, sample: int, record: bytes | MakeError) -> bytes:
        if isinstance(record, MakeError):
            raise TransformError(f"item {sample} of {self._name} cannot be made: {record}")
        return record

    @property
    def item_maker(self) -> ItemMaker:
        """The data set itself."""
        return self

    @property
    def maker_pids(self) -> list[int]:
        """The processes that make items."""
        return self._makers.pids()

    def close(self) -> None:
        """Ends the processes; items that the tiers do not have cannot be made any more."""
        self._finalizer()

    def __enter__(self) -> Cached:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end_with(kind, self.close)

    def __repr__(self) -> str:
        return f"<Cached {self._name}: {counted(len(self), 'item')}, {self.room} bytes for each>"

    def __getitem__(self, sample: int) -> Any:
        """One item, as the data set gives it; `then` is not called.

        Raises:
            TransformError: it cannot be made.
        """
        sample = range(len(self))[sample]
        return decode(np.frombuffer(self.make(sample), np.uint8), self.pickles)

    def make(self, sample: int) -> bytes:
        """The record of an item, made anew.

        Raises:
            TransformError: it cannot be made.
        """
        try:
            return self._makers.make(sample)
        except MakeError as error:
            return self._made(sample, error)

    def were_killed(self, sample: int) -> bool:
        """Whether processes were killed at an item, so that it was not made: it may be good."""
        return self._makers.were_killed(sample)


def _reopen_as(
    numbers: tuple[int, ...], reopen: Callable[..., Cached], arguments: tuple[Any, ...]
) -> Cached:
    before = _of_copy.set(numbers)
    try:
        return reopen(*arguments)
    finally:
        _of_copy.reset(before)


def _number_of(dataset: object, given: list[Callable[[], object]]) -> tuple[int]:
    for number, other in enumerate(given):
        if other() is dataset:
            return (number,)
    try:
        told: Callable[[], object] = weakref.ref(dataset)
    except TypeError:  # a list, for example: it gets a new number each time
        told = functools.partial(_nothing)
    given.append(told)
    return (next(number for number, other in enumerate(given) if other is told),)


def _nothing() -> None:
    return None
