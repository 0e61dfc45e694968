"""Sizes and tiers as people write them: "20GiB", "ram:20GiB", "/nvme/cache:400GiB:keep"."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

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
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class TierSpec:
    """A storage class of the node: `capacity` bytes of memory, or of a directory's disk."""

    kind: Literal["ram", "file"]
    capacity: int
    path: str = ""
    keep: bool = False


def parse_size(text: int | str) -> int:
    """Bytes in "20GiB", "1.5 GB", "512k" or a number.

    Raises:
        UsageError: the text is not a size.
    """
    if isinstance(text, int):
        if text < 0:
            raise UsageError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if not match or match[2].lower() not in _UNITS:
        raise UsageError(f'"{text}" is not a size: write for example 20GiB, 512MiB or 1000000')
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if size >= 2**63:
        raise UsageError(f'"{text}" is more than any machine holds')
    return size


def parse_tiers(
    spec: str | Sequence[str | TierSpec], *, dataset_bytes: int, local_world_size: int
) -> list[TierSpec]:
    """The tiers of a node, fastest first.

    Args:
        spec: "auto" (memory for the data set, at most half of what is free, none where there is
            no shared memory), one tier, or a list of tiers: "ram:SIZE", "DIRECTORY:SIZE",
            "DIRECTORY:SIZE:keep".
        dataset_bytes: size of the data set.
        local_world_size: ranks of the node; sizes are the node's, shared by them.

    Raises:
        UsageError: a tier is not written as above; too many tiers.
    """
    if spec == "auto":
        capacity = min(dataset_bytes, _free_memory() // 2)
        return [TierSpec("ram", capacity)] if capacity > 0 else []
    items = [spec] if isinstance(spec, str) else list(spec)
    if len(items) > 8:
        raise UsageError(f"at most 8 tiers can be used, not {len(items)}")
    return [item if isinstance(item, TierSpec) else _parse_tier(item) for item in items]


def _parse_tier(text: str) -> TierSpec:
    keep = text.endswith(":keep")
    where, separator, size = text.removesuffix(":keep").rpartition(":")
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
    if where == "ram":
        if keep:
            raise UsageError(f'"{text}": memory cannot outlive the job; only a directory can')
        return TierSpec("ram", capacity)
    if "/" not in where:
        raise UsageError(
            f'"{text}": "{where}" is neither "ram" nor a path; for a directory here write '
            f'"./{where}:{size}"'
        )
    return TierSpec("file", capacity, os.path.abspath(where), keep)


def _free_memory() -> int:
    """Bytes that can be had now, in memory and in the shared-memory file system."""
    if not _SHM.is_dir():
        return 0
    status = os.statvfs(_SHM)
    shared = status.f_bavail * status.f_frsize
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(shared, int(line.split()[1]) * 1024)
    return shared
