"""Sources of several fields: parts of another source side by side, and columns in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base._words import counted
from nostall.errors import IoError, UsageError
from nostall.fields import Array, Boxes, Bytes, Keypoints, Kind, Scalar, Schema, Text
from nostall.source._source import Pixels, Source, refuse_masked

NO_PART = 2**32 - 1
_NONE = np.zeros(0, np.uint64)


class Composite(Source):
    """Base of sources of several fields; a subclass sets `_arguments`, and calls `_compose`, or is of
    images and labels as any `Source`."""

    _schema: Schema | None = None
    _selected: tuple[str, ...] | None = None
    _labels: NDArray[np.int64] | None = None

    def _compose(
        self,
        parts: _native.Source | None,
        part_of: NDArray[np.uint32] | NDArray[np.int64],
        kinds: Mapping[str, Kind],
        columns: Mapping[str, tuple[Kind, _native.Column]],
        samples: int,
        *,
        pairs: bool = False,
    ) -> None:
        """Makes the native source; `part_of` has the shape (samples, kinds), NO_PART for none.

        If `pairs`, its batches are `images, labels` by default.

        Raises:
            UsageError: a part is missing, and its kind has no fill.
        """
        part_of = np.ascontiguousarray(part_of, np.uint32).reshape(samples, len(kinds))
        for place, (name, kind) in enumerate(kinds.items()):
            missing = part_of[:, place] == NO_PART
            if kind.fill is None and missing.any():
                raise UsageError(
                    f"sample {int(np.argmax(missing))} has no {name}, which holds for "
                    f"{counted(int(missing.sum()), 'sample')} in all: give the schema's field a fill=, "
                    f"as in {type(kind).__name__}(fill=...)"
                )
        self._pairs = pairs
        if "label" in columns:
            self._labels = _integers(*columns["label"])
        self._schema = Schema({**kinds, **{name: kind for name, (kind, _) in columns.items()}})
        self.native = _native.CompositeSource(
            names=list(self._schema),
            parts=parts,
            part_of=part_of.reshape(-1),
            columns=[column for _, column in columns.values()],
            labels=np.zeros(0, np.int64) if self._labels is None or not pairs else self._labels,
            samples=samples,
        )

    @property
    def labels(self) -> NDArray[Any]:
        """The column of integers named `label`, as int64.

        Raises:
            UsageError: there is none, or a sample lacks it.
        """
        return super().labels if self._labels is None else self._labels

    @property
    def schema(self) -> Schema:
        """The fields of every sample: those of parts, then the columns."""
        return super().schema if self._schema is None else self._schema

    def select(self, names: Sequence[str]) -> Source:
        """The same samples with these fields alone; the others are not read.

        Raises:
            UsageError: a field is not there.
        """
        chosen = self.schema.select(names)
        if self._schema is None or len(chosen) == len(self._schema):
            return self
        assert isinstance(self.native, _native.CompositeSource)
        kept = [(i, name) for i, name in enumerate(self._schema) if name in chosen]
        # Not copy.copy(), which would open the source again, by __reduce__.
        narrowed = object.__new__(type(self))
        narrowed.__dict__.update(self.__dict__)
        narrowed.native = self.native.select([i for i, _ in kept])
        narrowed._schema = self._schema.select([name for _, name in kept])
        narrowed._selected = tuple(narrowed._schema)
        return narrowed

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments of opening and the chosen fields."""
        fixed = (self.fingerprint, self.pixels)
        return _reopen, (type(self), self._arguments, self._selected, *fixed)

    def __repr__(self) -> str:
        if self._schema is None:
            return super().__repr__()
        return (
            f"<{type(self).__name__} of {', '.join(self._schema)}: {counted(len(self), 'sample')}, "
            f"{self.total_bytes / 1e6:.1f} MB>"
        )


def _reopen(
    kind: type[Composite],
    arguments: dict[str, Any],
    selected: tuple[str, ...] | None,
    fingerprint: int,
    pixels: Pixels | None,
) -> Source:
    source: Source = kind(**arguments)
    if selected is not None:
        source = source.select(selected)
    if source.fingerprint != fingerprint:
        raise IoError(
            f"{source!r} changed since it was opened: start again, all must see the same files"
        )
    source.pixels = pixels
    return source


class _Column(_native.Column):
    """A column whose bytes can be had again."""

    def __init__(
        self,
        values: NDArray[np.uint8],
        width: int,
        ends: NDArray[np.uint64],
        present: NDArray[np.uint8],
    ) -> None:
        super().__init__(values, width, ends, present)
        self.stored = values
        self.whole = not present.size


def _integers(kind: Kind, column: _native.Column) -> NDArray[np.int64] | None:
    """The values of a column that has an integer for each sample; None of others."""
    if not isinstance(kind, Scalar) or np.dtype(kind.dtype).kind not in "biu":
        return None
    if not isinstance(column, _Column) or not column.whole:
        return None
    return column.stored.view(np.dtype(kind.dtype).newbyteorder("<")).astype(np.int64)


def make_column(name: str, values: Any, kind: Kind | None = None) -> tuple[Kind, _native.Column]:
    """A column of one value a sample, None where there is none; and its kind, found if not given.

    Numbers become `Scalar`, arrays of one shape and lists of arrays `Array`, texts `Text`, bytes
    `Bytes`.

    Raises:
        UsageError: the values make no such column.
    """
    refuse_masked(values, f"column {name}")
    if isinstance(values, (Mapping, set, frozenset)):
        raise UsageError(
            f"column {name} is a {type(values).__name__}: its values must stand in the order of the "
            "samples, in a list or an array"
        )
    if kind is None:
        kind = _kind_of(name, values)
    if isinstance(kind, (Array, Boxes, Keypoints)) and kind.codec != "raw":
        differing = sum(side is None for side in kind._dimensions())
        if differing <= 1:
            kind = dataclasses.replace(kind, codec="raw")
    elif isinstance(kind, Scalar):
        kind = dataclasses.replace(kind, codec="raw", stored=None)
    try:
        column = _dense(values, kind) or _encoded(values, kind)
    except UsageError as error:
        raise UsageError(f"column {name}: {error}") from None
    return kind, column


def _kind_of(name: str, values: Any) -> Kind:
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        if values.ndim == 1:
            return Scalar(dtype=values.dtype.name)
        return Array(dtype=values.dtype.name, shape=values.shape[1:], codec="raw")
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, str) for value in given):
        return Text()
    if given and all(isinstance(value, bytes) for value in given):
        return Bytes()
    try:
        arrays = [_as_array(value) for value in given]
    except ValueError:
        arrays = []
    dtype = np.result_type(*{a.dtype for a in arrays}) if arrays else np.dtype(object)
    if dtype.kind == "f" and all(a.dtype.kind in "biu" for a in arrays):  # int64 and uint64
        signed = any(a.dtype.kind == "i" and a.size and a.min() < 0 for a in arrays)
        dtype = np.dtype(object if signed else np.uint64)
    if dtype.kind not in "biuf" or len({a.ndim for a in arrays}) > 1:
        raise UsageError(
            f"column {name} is neither of numbers, arrays of as many dimensions, texts nor bytes: "
            f"say what it is by schema={{{name!r}: ...}}"
        )
    sides: list[set[int]] = [set(side) for side in zip(*(a.shape for a in arrays), strict=True)]
    if not sides:
        return Scalar(dtype=dtype.name)
    shape = tuple(side.pop() if len(side) == 1 else None for side in sides)
    return Array(dtype=dtype.name, shape=shape)


def _as_array(value: Any) -> np.ndarray:
    """The array; integers stay integers if one type holds them, and are objects if none does."""
    array = np.asarray(value)
    rounded = array.dtype.kind == "f" and not hasattr(value, "dtype") and array.size
    if rounded and array.max() >= 2**63:
        given = np.asarray(value, object)
        if all(isinstance(number, int) for number in given.flat):
            return given.astype(np.uint64) if given.min() >= 0 else given
    return array


def _dense(values: Any, kind: Kind) -> _native.Column | None:
    """The column of numbers that need no loop; None if they do."""
    shape: tuple[int | None, ...]
    if isinstance(kind, Scalar):
        shape = ()
    elif type(kind) is Array:
        shape = kind.shape
    else:
        return None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        return None
    if values.shape[1:] != shape or 0 in shape:
        return None
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(values.astype(kind.dtype))
    if stored.dtype.kind in "biu" and not np.array_equal(stored, values):
        raise UsageError(f"its numbers are not all of type {kind.dtype}")
    if stored.dtype.kind == "f" and np.isinf(stored).sum() > np.isinf(values).sum():
        raise UsageError(f"some of its numbers are too large for {kind.dtype}")
    width = stored.dtype.itemsize * math.prod(values.shape[1:])
    return _Column(stored.reshape(-1).view(np.uint8), width, _NONE, np.zeros(0, np.uint8))


def _encoded(values: Any, kind: Kind) -> _native.Column:
    missing = [value is None for value in values]
    if kind.fill is None and any(missing):
        raise UsageError(
            f"sample {missing.index(True)} has no value: give its kind a fill=, as in "
            f"{type(kind).__name__}(fill=...), or leave the column out by columns="
        )
    stored = []
    for sample, value in enumerate(values):
        try:
            stored.append(b"" if value is None else kind.encode(value))
        except UsageError as error:
            raise UsageError(f"sample {sample}: {error}") from None
    ends = np.zeros(len(stored) + 1, np.uint64)
    np.cumsum([len(value) for value in stored], out=ends[1:])
    present = (
        np.array([not m for m in missing], np.uint8) if any(missing) else np.zeros(0, np.uint8)
    )
    return _Column(np.frombuffer(b"".join(stored), np.uint8), 0, ends, present)
