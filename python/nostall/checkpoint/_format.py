"""The content of a checkpoint's files: safetensors for the arrays, a manifest for the whole.

docs/formats/checkpoint.md describes both. Readers are total: any bytes give a value or an error.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall._version import __version__
from nostall.checkpoint._lineage import LEGACY, Ranges, checked
from nostall.checkpoint._tree import ITEM_BYTES, Leaf, Stored, heaviest
from nostall.errors import UNREADABLE, CorruptionError, UsageError

FORMAT = "nostall checkpoint"
VERSION = 2
BRANCH_FORMAT = "nostall branch"
BRANCH_VERSION = 1
_LARGEST_HEADER = 256 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


# ---------------------------------------------------------------------- safetensors


def layout(leaves: Sequence[Leaf], guarded: Collection[int] | None = None) -> list[Leaf]:
    """The order in the file: large elements first, so that every array is aligned.

    Of these, arrays at `guarded` addresses come first, so that the others share few blocks.
    """
    return sorted(
        leaves, key=lambda leaf: (-leaf.align, guarded is not None and leaf.address not in guarded)
    )


def header(tree: Any, ordered: Sequence[Leaf]) -> bytes:
    """The file's bytes before the arrays; a multiple of the alignment of direct input and output.

    Raises:
        UsageError: they are more than `parse` takes.
    """
    table: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "nostall": json.dumps(tree, separators=(",", ":"))}
    }
    at = 0
    for leaf in ordered:
        table[leaf.name] = {
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "data_offsets": [at, at + leaf.nbytes],
        }
        at += leaf.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    block = _native.CHECKPOINT_ALIGNMENT
    text += b" " * (-(8 + len(text)) % block)
    if len(text) > _LARGEST_HEADER:
        place, size = heaviest(tree)
        raise UsageError(
            f"values beside the arrays take {len(text)} bytes as text, and a checkpoint holds "
            f"{_LARGEST_HEADER} of them: {place} has {size}; make it one array"
        )
    return len(text).to_bytes(8, "little") + text


def header_bytes(data: NDArray[np.uint8]) -> int:
    """Of the header, from the first bytes of a file; at most those that there are."""
    return min(8 + int.from_bytes(data[:8].tobytes(), "little"), len(data))


def parse(data: NDArray[np.uint8]) -> tuple[Any, dict[str, Stored]]:
    """The tree and the arrays of a file's bytes, uint8 of shape (bytes,).

    Raises:
        CorruptionError: it is not a checkpoint file of nostall.
    """
    try:
        size = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or size > min(len(data) - 8, _LARGEST_HEADER):
            raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
        table = json.loads(data[8 : 8 + size].tobytes())
        tree = json.loads(table.pop("__metadata__")["nostall"])
        body = data[8 + size :]
        arrays = {}
        for name, entry in table.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if not 0 <= begin <= end <= len(body):
                raise ValueError(f"{name} lies at {begin} to {end} of {len(body)} bytes")
            if prod(shape) * ITEM_BYTES[entry["dtype"]] != end - begin:
                raise ValueError(f"{name} of shape {shape} has {end - begin} bytes")
            arrays[name] = Stored(body[begin:end], entry["dtype"], shape)
    except UNREADABLE as error:
        raise CorruptionError(f"this is not a checkpoint file of nostall: {error}") from error
    return tree, arrays


def arrays_in(data: NDArray[np.uint8], blocks: Sequence[int]) -> list[str]:
    """Names of the arrays that have bytes in the given blocks; the header's if it cannot be read."""
    try:
        _, arrays = parse(data)
    except CorruptionError:
        return ["the header"]
    size, block = header_bytes(data), _native.CHECKPOINT_BLOCK
    base = data.ctypes.data
    hit = ["the header"] if any(b * block < size for b in blocks) else []
    for name, stored in arrays.items():
        begin = stored.data.ctypes.data - base
        end = begin + len(stored.data)
        if any(b * block < end and begin < (b + 1) * block for b in blocks):
            hit.append(name)
    return hit


# ---------------------------------------------------------------------- manifest


@dataclass(frozen=True)
class Part:
    """The file of one rank: its name in the checkpoint's directory, bytes, CRC32C of each block."""

    rank: int
    name: str
    size: int
    crcs: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rank": self.rank,
            "name": self.name,
            "bytes": self.size,
            "crc32c": [f"{crc:08x}" for crc in self.crcs],
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Part:
        """The inverse; ValueError, KeyError or TypeError for anything else."""
        part = Part(
            int(values["rank"]),
            str(values["name"]),
            int(values["bytes"]),
            tuple(int(crc, 16) for crc in values["crc32c"]),
        )
        if not _PLAIN_NAME.fullmatch(part.name):
            raise ValueError(f"{part.name!r} is not the name of a part")
        if len(part.crcs) != -(-part.size // _native.CHECKPOINT_BLOCK):
            raise ValueError(f"{part.name} of {part.size} bytes has {len(part.crcs)} checksums")
        return part


@dataclass(frozen=True)
class Manifest:
    """What makes a set of files one complete checkpoint."""

    step: int
    id: str
    world_size: int
    parts: tuple[Part, ...]
    replicated: bool = False
    metric: float | None = field(default=None, compare=False)  # NaN is not equal to itself
    created: float = field(default_factory=time.time)
    software: dict[str, str] = field(default_factory=lambda: software())
    spread: bool = False  # each node has its own ranks' parts, and perhaps its neighbour's
    extra: Any = None  # of another writer than Checkpointer: {"dcp": ...}
    sequence: int = 0  # the place in the order of all saves
    abandoned: Ranges = ()  # lower numbers that this save does not continue

    @property
    def order(self) -> tuple[int, float, str]:
        """Orders saves: later ones are greater. Version 1 has no number and uses a clock."""
        return self.sequence, self.created if self.sequence < 0 else 0.0, self.id

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    def part_of(self, rank: int) -> Part | None:
        """The part that this rank restores."""
        wanted = 0 if self.replicated else rank
        return next((part for part in self.parts if part.rank == wanted), None)

    def to_bytes(self) -> bytes:
        """JSON with a checksum of its own."""
        values = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "id": self.id,
            "sequence": self.sequence,
            "abandoned": [list(r) for r in self.abandoned],
            "created": self.created,
            "world_size": self.world_size,
            "replicated": self.replicated,
            "metric": self.metric,
            "software": self.software,
            "block": _native.CHECKPOINT_BLOCK,
            "files": [part.to_dict() for part in self.parts],
        }
        if self.spread:
            values["spread"] = True
        if self.extra is not None:
            values["extra"] = self.extra
        return _sealed(values)

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Manifest:
        """Raises CorruptionError, with `where`, for anything that to_bytes did not write."""
        try:
            values = _opened(data, FORMAT, VERSION)
            step = int(values["step"])
            first = values["version"] == 1
            parts = tuple(Part.from_dict(p) for p in values["files"])
            manifest = Manifest(
                step=step,
                id=str(values["id"]),
                world_size=int(values["world_size"]),
                parts=parts,
                replicated=bool(values["replicated"]),
                metric=None if values["metric"] is None else float(values["metric"]),
                created=float(values["created"]),
                software=dict(values["software"]),
                spread=bool(values.get("spread", False)),
                extra=values.get("extra"),
                sequence=LEGACY + step if first else int(values["sequence"]),
                abandoned=() if first else checked(values["abandoned"]),
            )
            ranks = range(1 if manifest.replicated else manifest.world_size)
            there = [part.rank for part in parts]
            if manifest.extra is None and (len(ranks) != len(there) or list(ranks) != there):
                raise ValueError("parts of ranks are missing")
        except UNREADABLE as error:
            raise CorruptionError(f"{where} is damaged: {error}") from error
        return manifest


@dataclass(frozen=True)
class Branch:
    """The note that a training went back to the checkpoint `id` of `step`, before its next save.

    It holds a number in the order of saves, and which lower numbers are given up. That of a save that
    begins a branch has the note whose place it took, for when the save is removed.
    """

    sequence: int
    abandoned: Ranges
    step: int
    id: str
    before: Branch | None = field(default=None, compare=False)

    def to_bytes(self) -> bytes:
        """JSON with a checksum of its own."""
        before = {} if self.before is None else {"before": self.before._values()}
        return _sealed({**self._values(), **before})

    def _values(self) -> dict[str, Any]:
        return {
            "format": BRANCH_FORMAT,
            "version": BRANCH_VERSION,
            "sequence": self.sequence,
            "abandoned": [list(r) for r in self.abandoned],
            "step": self.step,
            "id": self.id,
        }

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Branch:
        """Raises CorruptionError, with `where`, for anything that to_bytes did not write."""
        try:
            values = _opened(data, BRANCH_FORMAT, BRANCH_VERSION)
            before = _branch(values["before"]) if "before" in values else None
            return replace(_branch(values), before=before)
        except UNREADABLE as error:
            raise CorruptionError(f"{where} is damaged: {error}") from error


def _branch(values: dict[str, Any]) -> Branch:
    return Branch(
        int(values["sequence"]),
        checked(values["abandoned"]),
        int(values["step"]),
        str(values["id"]),
    )


def _sealed(values: dict[str, Any]) -> bytes:
    sealed = {**values, "crc32c": f"{_native.crc32c(_canonical(values)):08x}"}
    return json.dumps(sealed, indent=1).encode() + b"\n"


def _opened(data: bytes, format: str, newest: int) -> dict[str, Any]:
    """The inverse of `_sealed`; ValueError and others for anything else."""
    values: dict[str, Any] = json.loads(data)
    crc = values.pop("crc32c")
    version = values.get("version")
    if values.get("format") != format or type(version) is not int or not 1 <= version <= newest:
        raise ValueError(
            f"format {values.get('format')!r} version {version!r}, this release reads {format!r} "
            f"versions 1 to {newest}"
        )
    if crc != f"{_native.crc32c(_canonical(values)):08x}":
        raise ValueError("its checksum does not match")
    return values


def _canonical(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def software() -> dict[str, str]:
    """Versions of the software that wrote a checkpoint."""
    found = {
        "nostall": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    for name in ("torch", "jax"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found
