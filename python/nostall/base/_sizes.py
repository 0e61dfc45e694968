"""Sizes and tiers as people write them: "20GiB", "ram:20GiB", "/nvme/cache:400GiB:keep"."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from nostall import _native
from nostall.base import _checks as checks
from nostall.base._disks import local_directory
from nostall.base._paths import path_of
from nostall.base._tier import Tier
from nostall.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}
# A tier of fewer bytes was meant in another unit.
_SMALLEST = 4096
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True)
class TierSpec:
    """A storage class of the node: `capacity` bytes of memory, or of a directory's disk."""

    kind: Literal["ram", "file"]
    capacity: int
    path: str = ""
    keep: bool = False
    # Takes no more memory than it leaves: what "auto" means once others need memory too.
    modest: bool = False
    # One of the user's own, of kind "file": `path` is its name.
    own: Tier | None = None
    # Of kind "file": the most reads in flight of each process; 0 is no limit.
    readers: int = 0

    @property
    def sort(self) -> str:
        """The kind in words: "ram", "file", "kept file", or "own file"."""
        return "own file" if self.own is not None else "kept file" if self.keep else self.kind


class Limit(Protocol):
    """A limit of memory as `nostall._native.memory_limits` reads it, in bytes."""

    @property
    def kind(self) -> str:
        """ "machine", "cgroup", "address_space" or "shared_memory"."""

    @property
    def what(self) -> str:
        """The limit in words."""

    @property
    def left(self) -> int:
        """What may be taken now, without the reserve."""

    @property
    def most(self) -> int:
        """What may be taken where nothing is in use."""


@dataclass(frozen=True)
class Defaults:
    """What a loader takes where the user says nothing, in bytes, and why not more.

    `ram` is the node's, `staging` and `reading` are a rank's.
    """

    ram: int
    staging: int
    reading: int
    reason: str


_MOST_STAGING = 256 << 20
_MOST_READING = 64 << 20
_MOST_RAM = 1 << 50

_log = logging.getLogger("nostall")


def defaults(limits: Sequence[Limit], *, dataset_bytes: int, local_world_size: int) -> Defaults:
    """The memory that is taken by default: half of what the tightest limit leaves for the data set.

    An eighth and a sixteenth, divided by the ranks of the node, are for finished batches and for
    bytes on their way; the rest is the training's. Ranks of a node must plan the same tier though
    they start at different moments: several count what a limit leaves where nothing is in use, and
    the tier finds out while it fills what is there (`TierSpec.modest`).
    """

    def room(limit: Limit) -> int:
        return limit.left if local_world_size == 1 else limit.most

    tight = min(limits, key=room, default=None)
    half = dataset_bytes if tight is None else room(tight) // 2
    # Buffers do not lie in the shared-memory file system.
    own = min(
        (x.left // local_world_size for x in limits if x.kind != "shared_memory"), default=None
    )
    return Defaults(
        ram=min(dataset_bytes, half),
        staging=_MOST_STAGING if own is None else min(_MOST_STAGING, own // 8),
        reading=_MOST_READING if own is None else min(_MOST_READING, own // 16),
        reason=(
            f"half of what {tight.what} leaves"
            if tight is not None and half < dataset_bytes
            else "the size of the data set"
        ),
    )


def within(
    tiers: Sequence[TierSpec], limits: Sequence[Limit], *, dataset_bytes: int, memory: int
) -> list[TierSpec]:
    """The tiers; one in memory is modest if it was given more than can be had.

    One larger than `memory`, that of the machine, is cut to the data set, and to `memory` with a
    warning. Both are the same for all ranks of a node, which must plan the same tier.
    """
    tiers = [_cut(t, dataset_bytes, memory) if t.kind == "ram" else t for t in tiers]
    own = min((x.left for x in limits if x.kind != "shared_memory"), default=None)
    return [
        replace(tier, modest=True)
        if tier.kind == "ram" and own is not None and tier.capacity > own
        else tier
        for tier in tiers
    ]


def _cut(tier: TierSpec, dataset_bytes: int, memory: int) -> TierSpec:
    if tier.capacity > _MOST_RAM:
        raise UsageError(
            f"a tier asks for {tier.capacity / 2**30:.0f} GiB of memory, which no machine has: write "
            'for example "ram:20GiB", or tiers="auto"'
        )
    if tier.capacity <= memory:
        return tier
    if dataset_bytes > memory:
        _warn_of(tier.capacity, memory)
    return replace(tier, capacity=min(dataset_bytes, memory))


@functools.cache
def _warn_of(asked: int, memory: int) -> None:
    """Once in a process for the same sizes."""
    _log.warning(
        "a tier asks for %.1f GiB of memory and this machine has %.1f GiB: it takes what can be had; "
        "give a smaller ram: tier, or a directory beside it",
        asked / 2**30,
        memory / 2**30,
    )


def warn_of_tiers(tiers: Sequence[TierSpec], limits: Sequence[Limit], dataset_bytes: int) -> None:
    """Warns of tiers that will not have what was asked for.

    In memory: more than is free. In files: more than the file system has, or a directory whose parent
    has to be made too, as where a disk is not mounted.
    """
    own = min((x.left for x in limits if x.kind != "shared_memory"), default=None)
    for tier in tiers:
        if tier.kind == "ram":
            asked = min(tier.capacity, dataset_bytes)
            if own is not None and own < asked and not tier.modest:
                _log.warning(
                    "a tier asks for %.1f GiB of memory and %.1f GiB are free: it takes what it can",
                    asked / 2**30,
                    own / 2**30,
                )
            continue
        if tier.own is not None:
            continue
        there = tier.path
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        if there == "/" != tier.path:  # such a tier is not used, which the core tells
            continue
        disk = os.statvfs(there)
        size = disk.f_frsize * disk.f_blocks
        if there not in (tier.path, os.path.dirname(tier.path)):
            _log.warning(
                "tier %s is made in %s, because %s is not there: is a disk not mounted?",
                tier.path,
                there,
                os.path.dirname(tier.path),
            )
        elif min(tier.capacity, dataset_bytes) > size:
            _log.warning(
                "tier %s asks for %s and its file system has %s: it takes what can be had; is a disk "
                "not mounted?",
                tier.path,
                format_bytes(tier.capacity),
                format_bytes(size),
            )


def parse_size(text: int | str) -> int:
    """Bytes in "20GiB", "1.5 GB", "512k" or a number.

    Raises:
        UsageError: the text is not a size.
    """
    if checks.is_whole(text):
        if text < 0:
            raise UsageError(f"a size cannot be negative: {text}")
        return int(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if not match or match[2].lower() not in _UNITS:
        raise UsageError(f'"{text}" is not a size: write for example 20GiB, 512MiB or 1000000')
    whole, _, part = match[1].partition(".")
    size: int = int(whole + part) * _UNITS[match[2].lower()] // 10 ** len(part)
    if size >= 2**63:
        raise UsageError(f'"{text}" is more than any machine holds')
    return size


def format_bytes(count: float, digits: int = 1, per: str = "") -> str:
    """A number of bytes for people, in decimal units: "1.5 GB", "800 B"; `per` follows the unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}{per}"
    return f"{count} B{per}" if isinstance(count, int) else f"{count:.{digits}f} B{per}"


def parse_tiers(
    spec: str | Tier | Sequence[str | Tier | TierSpec], *, dataset_bytes: int, local_world_size: int
) -> list[TierSpec]:
    """The tiers of a node, fastest first.

    Args:
        spec: "auto" (memory for the data set, as `defaults` says), one tier, or a list of tiers:
            "ram:SIZE", "DIRECTORY:SIZE", a `Tier`. After a directory's size may follow ":keep", for a
            tier that outlives the job, and ":readers=N", the most reads in flight of each process.
        dataset_bytes: size of the data set.
        local_world_size: ranks of the node; sizes are the node's, shared by them.

    Raises:
        UsageError: a tier is not written as above; too many tiers.
    """
    if spec == "auto":
        capacity = defaults(
            _native.memory_limits(),
            dataset_bytes=dataset_bytes,
            local_world_size=local_world_size,
        ).ram
        return [TierSpec("ram", capacity, modest=True)] if capacity > 0 else []
    items = [spec] if isinstance(spec, (str, Tier)) else list(spec)
    if len(items) > 8:
        raise UsageError(f"at most 8 tiers can be used, not {len(items)}")
    return [item if isinstance(item, TierSpec) else _parse_tier(item) for item in items]


def native_tiers(tiers: Sequence[TierSpec]) -> list[_native.TierSpec]:
    """The tiers for the native core."""
    specs = []
    for tier in tiers:
        kind = _native.TierKind[tier.kind]
        spec = _native.TierSpec(kind, tier.capacity, tier.path, tier.keep, tier.modest)
        if tier.own is not None:
            spec.use_store(tier.own)
        spec.readers = tier.readers
        specs.append(spec)
    return specs


def _parse_tier(text: str | Tier) -> TierSpec:
    if isinstance(text, Tier):
        return TierSpec("file", text.capacity, type(text).__name__, own=text)
    rest, readers = _without_readers(text)
    keep = rest.endswith(":keep")
    where, separator, size = rest.removesuffix(":keep").rpartition(":")
    if text == "auto":
        raise UsageError('"auto" stands alone, not in a list: pass tiers="auto"')
    if not separator or not where:
        raise UsageError(
            f'"{text}" is not a tier: write "ram:20GiB", "/nvme/cache:400GiB" or '
            '"/nvme/cache:400GiB:keep"'
        )
    try:
        capacity = parse_size(size)
    except UsageError as error:
        raise UsageError(
            f'tier "{text}": {error}; a directory that outlives the job ends with ":keep"'
        ) from None
    if size.isdecimal() and 0 < capacity < _SMALLEST:
        raise UsageError(f'"{text}": {size} are bytes; write a unit, for example {size}GiB')
    if where == "ram":
        if keep:
            raise UsageError(f'"{text}": memory cannot outlive the job; only a directory can')
        if readers:
            raise UsageError(
                f'"{text}": memory is not read in flight; only a directory has readers'
            )
        return TierSpec("ram", capacity)
    if where == "local":
        return TierSpec("file", capacity, local_directory(), keep, readers=readers)
    if "/" not in where:
        raise UsageError(
            f'"{text}": "{where}" is neither "ram", "local" nor a path; for a directory here write '
            f'"./{where}:{size}"'
        )
    return TierSpec("file", capacity, os.path.abspath(path_of(where)), keep, readers=readers)


def _without_readers(text: str) -> tuple[str, int]:
    """The tier without ":readers=N" at its end, and N, or 0."""
    rest, separator, count = text.rpartition(":readers=")
    if not separator:
        return text, 0
    if not count.isdecimal() or not 1 <= int(count) <= 4096:
        raise UsageError(f'"{text}": ":readers=" takes a number from 1 to 4096, not "{count}"')
    return rest, int(count)
