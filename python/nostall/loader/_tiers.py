"""Tiers that loaders and data sets of torch share, whatever the orders in which they read."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native
from nostall.base._garbage import Closer
from nostall.base._options import checked, value
from nostall.base._sizes import TierSpec, native_tiers, parse_tiers, warn_of_tiers, within
from nostall.base._tier import Tier
from nostall.errors import UsageError
from nostall.job._world import find_world
from nostall.source._source import Source, expect_source
from nostall.source._views import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORTH_TELLING = 64 << 20  # bytes that two loaders hold twice

_log = logging.getLogger("nostall")

TierList = str | Tier | Sequence[str | Tier | TierSpec]

# This process's readers, by the names of what they read, and the user's own tiers: those of one name
# and the same tiers are one. After a fork those of the parent are left alone.
_Key = tuple[str, tuple[int, ...]]
_Identity = tuple[int, int, tuple[int, ...]]
_readers: weakref.WeakValueDictionary[_Key, _native.NodeReader] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _begin_anew() -> None:
    global _opening, _readers
    _opening, _readers = threading.Lock(), weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_begin_anew)


def planned(tiers: TierList | None, source: Source, ranks: int, *, warns: bool) -> list[TierSpec]:
    """The tiers of a node of so many ranks, None for those of nostall.toml; warns of them if `warns`.

    Raises:
        UsageError: they are not such, or would keep what they could not recognise.
    """
    dataset_bytes = source.total_bytes
    tiers = value("loader.tiers") if tiers is None else checked("loader.tiers", tiers)
    limits = _native.memory_limits()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = parse_tiers(tiers, dataset_bytes=dataset_bytes, local_world_size=ranks)
    if warns:
        warn_of_tiers(
            [t for t in given if t.capacity <= memory or t.kind == "file"], limits, dataset_bytes
        )
    maker = source.item_maker
    if maker is not None and maker.version is None and any(t.keep for t in given):
        raise UsageError(
            "a kept tier may hold items of an earlier state of the data set: pass version= to "
            "Cached, and change it whenever an item changes"
        )
    return within(given, limits, dataset_bytes=dataset_bytes, memory=memory)


def held_twice(
    source: Source, tiers: Sequence[TierSpec], other: Source, of_other: Sequence[TierSpec]
) -> int:
    """Bytes that two loaders with tiers of their own may both have in memory."""
    here, there = (sum(t.capacity for t in each if t.kind == "ram") for each in (tiers, of_other))
    if min(here, there, source.total_bytes, other.total_bytes) < _WORTH_TELLING:
        return 0
    (whole, mine), (other_whole, theirs) = _part_of(source), _part_of(other)
    if _identity(whole) != _identity(other_whole):
        return 0
    if mine is None or theirs is None:
        both = min(source.total_bytes, other.total_bytes)
    else:
        held = np.zeros(len(whole), bool)  # cheaper than a sort of millions
        held[mine] = True
        both = int(whole.sizes[theirs[held[theirs]]].sum())
    return min(both, here, there)


def in_words(tier: TierSpec) -> str:
    """A tier as it was written."""
    readers = f":readers={tier.readers}" if tier.readers else ""
    return f"{tier.path or tier.kind}:{tier.capacity / 2**20:.0f}MiB{readers}"


_told: set[_Identity] = set()


def warn_of_second(source: Source, bytes_twice: int) -> None:
    """Tells it once in a process for the same data."""
    if bytes_twice < _WORTH_TELLING or _identity(source) in _told:
        return
    _told.add(_identity(source))
    _log.warning(
        "this loader and another one of this process, which is not closed, hold up to %.1f GiB of "
        "%r twice in memory: give both the same tiers=nostall.Tiers(...), or close the other one",
        bytes_twice / 2**30,
        source,
    )


class Tiers:
    """The storage classes of this node for one source, shared by all that read it.

        tiers = nostall.Tiers(data, ["ram:20GiB"])
        train, validation = nostall.Split(data, 0.9)
        loader = nostall.DataLoader(train, 256, tiers=tiers, ...)
        other = nostall.torch.Dataset(validation, tiers=tiers)

    There is one copy of a sample on the node, and it is read from the source once: for several loaders,
    whatever parts of the source they have, for `nostall.torch.Dataset`, its worker processes, and all
    ranks. What is kept does not depend on a plan: where not all samples fit, those with the lowest
    numbers are kept. Nodes read for themselves. The memory is free again when the last process that
    uses it has ended; the one that makes the object uses it.

    Args:
        source: the data set, or a view of one, of which all samples may be kept.
        tiers: as of ``nostall.DataLoader``.
        job: names what is shared on the node; the launcher's name of the job if None.

    Raises:
        UsageError: `tiers` are not such.
    """

    def __init__(
        self, source: Source, tiers: TierList | None = None, *, job: str | None = None
    ) -> None:
        expect_source("Tiers", source)
        self._whole, _ = _part_of(source)
        world = find_world(job=job)
        first = (world.rank if world.unknown else world.local_rank) == 0
        self.specs = planned(tiers, self._whole, world.most_here, warns=first)
        shapes = [(t.kind, t.capacity, t.path, t.keep) for t in self.specs]
        fingerprint, stamp, numbers = self._identity = _identity(self._whole)
        made = f" {numbers}" if any(numbers) else ""
        self._name = f"{world.job} shared {fingerprint:016x} {stamp:016x}{made} {shapes}"
        self._held: list[_native.NodeReader] = []
        self._pid = 0
        self._closed = False
        _ = self.native

    @property
    def native(self) -> _native.NodeReader:
        """What reads through the tiers in this process.

        Raises:
            UsageError: they were closed.
        """
        if self._closed:
            raise UsageError(f"{self!r} are closed: make nostall.Tiers again, or close them later")
        if self._pid != os.getpid() or not self._held:
            # A reader holds its tiers, so that no other one has their ids.
            key = self._name, tuple(id(t.own) for t in self.specs if t.own is not None)
            with _opening:
                reader = _readers.get(key)
                if reader is None:
                    reader = _native.NodeReader(
                        self._whole.native, self._name, native_tiers(self.specs)
                    )
                    _readers[key] = reader
            # A fork's copy of the list keeps what is the parent's.
            self._held, self._pid = [reader], os.getpid()
            Closer(self, self._held.clear)
        return self._held[0]

    def numbers_of(self, source: Source) -> NDArray[np.uint64] | None:
        """The numbers of its samples here; None if they are the same.

        Raises:
            UsageError: it is another source, or no view of this one.
        """
        whole, numbers = _part_of(source)
        identity = self._identity if whole is self._whole else _identity(whole)
        if identity != self._identity and identity[:-1] == self._identity[:-1]:
            raise UsageError(
                f"these tiers are of another data set than {source!r}, whose items may be others: give "
                "both the same Cached, or the same version= in Cached"
            )
        if identity != self._identity:
            raise UsageError(
                f"these tiers are of {self._whole!r}, and {source!r} is of another source, of other "
                "fields= of it, or of files that were changed in between: make nostall.Tiers of what "
                "both read"
            )
        return numbers

    def read(self, samples: Sequence[int]) -> list[bytes]:
        """The bytes of samples of the source, those that no tier has read together.

        Raises:
            IndexError: there is no sample of that number.
            IoError: one cannot be read, with its path.
            CorruptionError: its bytes are not those that were read first.
        """
        numbers, count = list(samples), len(self._whole)
        for number in numbers:
            if not 0 <= number < count:
                raise IndexError(
                    f"sample {number}: the tiers are of {count} samples, 0 to {count - 1}"
                )
        return self.native.read(numbers)

    @property
    def kept_bytes(self) -> tuple[int, int]:
        """Bytes in the memory and in the files of this node's tiers."""
        return self.native.ram_bytes, self.native.file_bytes

    @property
    def taken(self) -> dict[str, int]:
        """Samples that `read` gave in this process, by where from: ram, file, source."""
        return self.native.taken

    def close(self) -> None:
        """Leaves the tiers; they stay for others, and for loaders that have them."""
        self._closed = True
        self._held.clear()

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": [], "_pid": 0}

    def __repr__(self) -> str:
        sizes = ", ".join(map(in_words, self.specs))
        return f"<Tiers of {self._whole!r}: [{sizes}]>"


def _identity(source: Source) -> _Identity:
    """What no other data set of this machine has: copies for other nodes have the fingerprint alone."""
    maker = source.item_maker
    return source.fingerprint, source.native.files_stamp, () if maker is None else maker.numbers


def _part_of(source: Source) -> tuple[Source, NDArray[np.uint64] | None]:
    """The source that a view is a part of, and the numbers of its samples there."""
    if not isinstance(source, View) or len(source.parts) > 1:
        return source, None
    return source.parts[0], source.native.numbers
