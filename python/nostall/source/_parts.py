"""Record stores whose samples have several fields, each a part of the sample's record."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.fields import Array, Schema
from nostall.source._records import ReadOptions, RecordStore

NO_PART = 2**32 - 1
# Samples, from the first to the last, whose .npy parts give type and shape of all.
_LOOKED_AT = 16
_MOST_HEAD = 4096

_OF_MASKS = re.compile(
    r"(?:^|[-_.])(?i:seg|labels?|gt)(?=$|[-_.\dA-Z])"
    r"|(?i:(?<!un)mask(?!ed)|segm|trimap|annotation|panoptic)"
)

Places = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]


def cover(
    begin: NDArray[np.uint64],
    size: NDArray[np.uint64],
    present: NDArray[np.bool_],
    otherwise: NDArray[np.uint64],
) -> Places:
    """(offset and length of every record, offset and length of every field in its record): a record
    reaches from its first member to its last; one without any is at `otherwise`.

    Raises:
        UsageError: a record is too long.
    """
    some = present.any(axis=1)
    offset = np.where(some, np.where(present, begin, np.uint64(2**64 - 1)).min(axis=1), otherwise)
    end = np.where(present, begin + size, np.uint64(0)).max(axis=1)
    length = np.where(some, end - offset, np.uint64(0))
    if (length >= NO_PART).any():
        raise UsageError(
            f"sample {int(np.argmax(length))} has {int(length.max())} bytes: its fields "
            "must lie within 4 GiB"
        )
    inside = np.where(present, begin - offset[:, None], np.uint64(NO_PART)).astype(np.uint32)
    return offset, length, inside, np.where(present, size, np.uint64(0)).astype(np.uint32)


def refuse_likely_mask(name: str, ending: str) -> None:
    """A mask that is taken for a picture is resampled as one, which mixes its labels.

    Raises:
        UsageError: the field has a name of masks, and files that may be masks.
    """
    if ending == "png" and _OF_MASKS.search(name):
        raise UsageError(
            f"field {name} has .png files, of labels or of pictures: give schema={{{name!r}: "
            "nostall.fields.Mask()}, which keeps labels as they are, or nostall.fields.Image()"
        )


def short_head(head: NDArray[Any]) -> NDArray[np.uint16] | None:
    """The bytes before each sample that are read along to be checked; 0 where they are too many."""
    head = np.where(head > _MOST_HEAD, 0, head)
    return head.astype(np.uint16) if head.any() else None


def as_text(value: object) -> str:
    """JSON without a space, for a table's stamp."""
    return json.dumps(value, separators=(",", ":")).replace(" ", "\\u0020")


class PartsStore(RecordStore):
    """Base of record stores that may have several fields: one whose `_schema` is set has, else its
    samples are images and labels."""

    _reading = ReadOptions()
    _schema: Schema | None = None
    _whole: PartsStore | None = None  # what these fields were selected of

    def _parts_table(
        self,
        kind: str,
        stamp: str,
        places: Places,
        file: NDArray[np.uint32],
        head: NDArray[np.uint64] | None = None,
    ) -> _native.RecordTable:
        offset, length, inside, sizes = places
        return self._table(
            kind,
            stamp,
            offset=offset,
            length=length,
            file=file if len(self.storage.paths) > 1 else None,
            head=None if head is None else short_head(head),
            parts=(inside, sizes),
        )

    @property
    def schema(self) -> Schema:
        """The fields of every sample."""
        return super().schema if self._schema is None else self._schema

    def select(self, names: Sequence[str]) -> RecordStore:
        """The same samples with these fields alone; what lies before the first and after the last of
        them in a record is not read.

        Raises:
            UsageError: a field is not there.
        """
        chosen = self.schema.select(names)
        if self._schema is None or len(chosen) == len(self._schema):
            return self
        kept = [i for i, name in enumerate(self._schema) if name in chosen]
        table = self.native.table
        inside = table.part_offset.reshape(-1, table.parts)[:, kept]
        size = table.part_length.reshape(-1, table.parts)[:, kept].astype(np.uint64)
        begin = table.offset[:, None] + inside
        places = cover(begin, size, inside != NO_PART, table.offset)
        # Not copy.copy(), which would open the source again, by __reduce__.
        narrowed = object.__new__(type(self))
        narrowed.__dict__.update(self.__dict__)
        narrowed._whole = self._whole or self
        narrowed._schema = self._schema.select([n for n in self._schema if n in chosen])
        # What is checked before a record is checked before its rest too, if that is near.
        before = places[0] - table.offset + table.head if len(table.head) else None
        head = None if before is None else np.where(table.head == 0, 0, before)
        stamp = f"{table.stamp} fields={as_text(list(narrowed._schema))}"
        narrowed.native = narrowed._native_again(
            self._parts_table(table.kind, stamp, places, table.file, head)
        )
        return narrowed

    def _native_again(self, table: _native.RecordTable) -> _native.RecordSource:
        """The native source of another table of the same files."""
        return self._native_of(table, self._reading)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments of opening, and the chosen fields."""
        if self._whole is None:
            return super().__reduce__()
        return _select, (self._whole, tuple(self.schema))


def _select(source: PartsStore, names: tuple[str, ...]) -> RecordStore:
    return source.select(names)


def array_of(native: _native.RecordSource, name: str, place: int) -> Array:
    """Type and shape of some arrays from all over the files; a side that differs among them is None."""
    table = native.table
    offset = table.part_offset.reshape(-1, table.parts)[:, place]
    length = table.part_length.reshape(-1, table.parts)[:, place]
    looked_at = np.unique(np.linspace(0, len(offset) - 1, _LOOKED_AT).astype(np.int64))
    dtype = ""
    shape: tuple[int | None, ...] = ()
    for sample in looked_at.tolist():
        begin, size = int(offset[sample]), int(length[sample])
        content = io.BytesIO(native.read(sample)[begin : begin + size])
        try:
            version = npy_format.read_magic(content)
            read = {
                (1, 0): npy_format.read_array_header_1_0,
                (2, 0): npy_format.read_array_header_2_0,
            }.get(version)
            if read is None:
                raise ValueError(f"version {version} is not read")
            sides, _, found = read(content)
        except ValueError as error:
            raise CorruptionError(f"{native.describe(sample)}: field {name}: {error}") from None
        if sample == 0:
            dtype, shape = found.name, sides
        if found.name != dtype or len(sides) != len(shape):
            raise UsageError(
                f"{native.describe(sample)}: field {name} is an array of {found.name} with "
                f"{len(sides)} dimensions, the first one is of {dtype} with {len(shape)}: give "
                f"schema={{{name!r}: ...}}"
            )
        shape = tuple(a if a == b else None for a, b in zip(shape, sides, strict=True))
    return Array(dtype=dtype, shape=shape)
