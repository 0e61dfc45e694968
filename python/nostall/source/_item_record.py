"""The record of an item: how an item of a data set in Python lies in bytes.

A record says by itself what it holds. It begins with the lengths of its template and of itself, two
uint32; the template follows, JSON that names containers, types and shapes. The values follow in the
order of the template: those whose size the template gives, each aligned to 16 bytes, with the lengths
of the others among them; then the bytes of the others. All numbers are little-endian
(docs/formats/items.md).
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.errors import CorruptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1
HEAD = struct.Struct("<II")
LENGTH = struct.Struct("<Q")
_ALIGN = 16
BEGIN = 64  # the values begin at a multiple of it
LARGEST = 2**32 - 1
MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16")
PALETTE = 768
# Tensors of torchvision that keep their kind, and what they have beside their numbers.
VISION: dict[str, tuple[str, ...]] = {
    "Image": (),
    "Mask": (),
    "Video": (),
    "BoundingBoxes": ("format", "canvas_size", "clamping_mode"),
    "KeyPoints": ("canvas_size",),
}

Template = Any  # what JSON can hold


def aligned(size: int, to: int = _ALIGN) -> int:
    return -(-size // to) * to


def left_out(size: int) -> bytes:
    """What stands for a record of `size` bytes that has no room."""
    return HEAD.pack(0, min(size, LARGEST))


def is_left_out(record: NDArray[np.uint8]) -> bool:
    """Whether the record had no room."""
    return record.size >= HEAD.size and bool(not record[:4].any())


@dataclass(frozen=True)
class Leaf:
    """One value of an item. `begin` and `size` say where it lies, or its length if it is `sized` no."""

    kind: str
    arguments: tuple[Any, ...]
    begin: int
    size: int
    sized: bool


class RecordLayout:
    """Where the values lie in every record of one template."""

    def __init__(self, template: bytes) -> None:
        self._at = aligned(HEAD.size + len(template), BEGIN)
        self.leaves: list[Leaf] = []
        try:
            self.tree = self._place(json.loads(template), 0)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise CorruptionError(f"a record has an impossible template: {error}") from None
        self.end = self._at  # of the sized values

    def _leaf(self, kind: str, size: int, *arguments: Any, sized: bool = True) -> int:
        if not 0 <= size <= LARGEST:
            raise ValueError(f"a value of {size} bytes")
        self.leaves.append(Leaf(kind, arguments, self._at, size, sized))
        self._at += aligned(size if sized else LENGTH.size)
        return len(self.leaves) - 1

    # The tree has the same containers, with the numbers of leaves in the places of the values.
    def _place(self, t: Template, depth: int) -> Any:
        if depth > 32:
            raise ValueError("containers in containers, 32 deep")
        if isinstance(t, str):
            return self._leaf(
                t, {"z": 0, "b": 1, "i": 8, "f": 8, "s": 0, "y": 0}[t], sized=t not in "sy"
            )
        if isinstance(t, dict):
            if "d" in t:
                return {"d": [(_key(k), self._place(v, depth + 1)) for k, v in t["d"]]}
            if "o" in t:
                return {"o": str(t["o"]), "v": [self._place(v, depth + 1) for v in t["v"]]}
            ((name, values),) = t.items()
            if name not in ("l", "u"):
                raise ValueError(f"a container {name!r}")
            return {name: [self._place(v, depth + 1) for v in values]}
        return self._typed(*t)

    def _typed(self, kind: str, *arguments: Any) -> int:
        if kind == "v":
            name, more, (_, dtype, shape) = arguments
            return self._leaf(
                "v", _bytes_of(_torch_size(dtype), shape), name, more, dtype, tuple(shape)
            )
        if kind == "t":
            dtype, shape = arguments
            return self._leaf("t", _bytes_of(_torch_size(dtype), shape), dtype, tuple(shape))
        if kind == "n":
            numbers = _numbers(arguments[0])
            return self._leaf(
                "n", _bytes_of(numbers.itemsize, arguments[1]), numbers, tuple(arguments[1])
            )
        if kind == "g":
            numbers = _numbers(arguments[0])
            return self._leaf("g", numbers.itemsize, numbers)
        if kind == "p":
            mode, width, height = arguments
            return self._leaf(
                "p", _picture_bytes(mode, int(width), int(height)), mode, (width, height)
            )
        if kind == "k":
            return self._leaf("k", 0, str(arguments[0]), sized=False)
        raise ValueError(f"a value of kind {kind!r}")


def _key(key: Any) -> Any:
    if isinstance(key, list | dict):
        raise ValueError("a key that is a container")
    return key


def _numbers(text: str) -> np.dtype[Any]:
    numbers = np.dtype(text)
    if numbers.kind not in "biufcSUmM":
        raise ValueError(f"an array of type {text}")
    return numbers


_TORCH_SIZES = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4}
_TORCH_SIZES |= dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2)
_TORCH_SIZES |= dict.fromkeys(("uint8", "int8", "bool"), 1)
_FLOAT8 = frozenset(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"))
_TORCH_SIZES |= dict.fromkeys(_FLOAT8, 1)
# NumPy has them only while a module of others has registered them.
UNKNOWN_TO_NUMPY = _FLOAT8 | {"bfloat16"}


def _torch_size(dtype: str) -> int:
    return _TORCH_SIZES[dtype]


def _bytes_of(each: int, shape: Sequence[int]) -> int:
    total = each
    for side in shape:
        if not isinstance(side, int) or side < 0:
            raise ValueError(f"the shape {shape}")
        total *= side
    return total


def _picture_bytes(mode: str, width: int, height: int) -> int:
    if width < 0 or height < 0:
        raise ValueError("a picture of negative size")
    if mode == "P":
        return width * height + PALETTE
    if mode == "1":
        return -(-width // 8) * height
    each = {"L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3, "I;16": 2}.get(mode, 4)
    if mode not in MODES:
        raise ValueError(f"a picture of mode {mode}")
    return each * width * height


@functools.lru_cache(maxsize=4096)
def layout_of(template: bytes) -> RecordLayout:
    """The layout of a template.

    Raises:
        CorruptionError: no record has such a template.
    """
    return RecordLayout(template)


def _head(record: NDArray[np.uint8]) -> tuple[bytes, int]:
    if record.size < HEAD.size:
        raise CorruptionError(f"a record of {record.size} bytes")
    length, total = HEAD.unpack_from(record.data)
    if total > record.size or HEAD.size + length > total:
        raise CorruptionError(
            f"a record that says it has {total} bytes, {length} of them its template, in {record.size}"
        )
    return record[HEAD.size : HEAD.size + length].tobytes(), total


def layout(record: NDArray[np.uint8]) -> tuple[RecordLayout, NDArray[np.uint8]]:
    """The layout of a record, and the record without what follows it.

    Raises:
        CorruptionError: it is none, or is cut short.
    """
    template, total = _head(record)
    found = layout_of(template)
    if found.end > total:
        raise CorruptionError(f"a record of {total} bytes whose values need {found.end}")
    return found, record[:total]


def values_of(found: RecordLayout, record: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The bytes of every leaf."""
    at, values = found.end, []
    for leaf in found.leaves:
        if leaf.sized:
            values.append(record[leaf.begin : leaf.begin + leaf.size])
            continue
        (size,) = LENGTH.unpack_from(record.data, leaf.begin)
        if size > record.size - at:
            raise CorruptionError(
                f"a value of {size} bytes in a record that has {record.size - at} left"
            )
        values.append(record[at : at + size])
        at += size
    return values


def modules_of(record: bytes) -> frozenset[str]:
    """The modules of the named tuples in a record that this job's own process made."""
    found: set[str] = set()

    def look(t: Template) -> None:
        if isinstance(t, list):
            return
        if isinstance(t, dict):
            if "o" in t:
                found.add(t["o"].split(":")[0])
            for child in t["v"] if "o" in t else t.get("l") or t.get("u") or []:
                look(child)
            for _, child in t.get("d", []):
                look(child)

    length, _ = HEAD.unpack_from(record)
    look(json.loads(record[HEAD.size : HEAD.size + length]))
    return frozenset(found)
