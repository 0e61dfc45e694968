"""What batches have of units of tokens: the kinds of `Windows`, `Documents` and `Packed`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from nostall import _native
from nostall.errors import UsageError
from nostall.fields._batch import Ragged
from nostall.fields._kinds import Image, Kind

PARTS = {
    "ids": "ids",
    "labels": "labels",
    "positions": "positions",
    "segments": "segments",
    "cu_seqlens": "lengths",
}


@dataclass(frozen=True, kw_only=True)
class UnitPart(Kind):
    """A part of a unit: ids, labels, positions, segments (n, length), or cu_seqlens (segments + 1,);
    or numbers beside the ids, at their own places ("ids") or those of labels ("labels").

    Args:
        part: which one.
        stored: NumPy's name of the type of ids in the files.
        dtype: of what a batch has; cu_seqlens are int32.
        length: of every unit; None where they differ.
        pad: the id that fills a unit up.
        vocabulary: ids below it alone are sound; None for any.
        ignored: what stands for labels that there are not.
        mask: the type of the mask behind the ids, which says what labels there are; None for all.
    """

    part: Literal["ids", "labels", "positions", "segments", "cu_seqlens"]
    stored: str
    dtype: str = "int64"
    length: int | None = None
    pad: int = 0
    vocabulary: int | None = None
    ignored: int = -100
    mask: str | None = None

    def _native_kind(self) -> Any:
        kind = _native.TokensField()
        kind.part = _native.TokenPart[PARTS[self.part]]
        kind.type = self.dtype
        kind.stored = self.stored
        kind.length = self.length or 0
        kind.pad = self.pad
        kind.vocabulary = self.vocabulary or 0
        kind.ignored = self.ignored
        if self.mask is not None:
            kind.mask = self.mask
        return kind

    def encode(self, value: Any) -> bytes:
        raise UsageError("units of tokens have no columns, and none of them is missing")

    def hand_out(self, batch: _native.Batch, number: int, array: Callable[[Any], Any]) -> Any:
        if self.part != "cu_seqlens":
            return super().hand_out(batch, number, array)
        lengths = batch.output(number)[0]
        ends = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=ends[1:])
        return array(ends)


@dataclass(frozen=True, kw_only=True)
class UnitImages(Image):
    """All images of the units of a batch, one after the other: (images, ...) as transforms make them,
    or `Ragged` bytes as they are stored."""

    _single: ClassVar[bool] = False

    def _in_group(self, kind: Any, pipeline: _native.Pipeline) -> Any:
        return _native.images_of_units(pipeline)

    def hand_out(self, batch: _native.Batch, number: int, array: Callable[[Any], Any]) -> Any:
        values, offsets = batch.output(number)[:2]
        if values.ndim > 1:
            return array(values)
        images = []
        for begin, end in pairwise(offsets.tolist()):
            record = values[begin:end]
            count = int(record[-4:].view(np.uint32)[0])
            table = record[len(record) - 4 - 12 * count : -4].view(np.uint32).reshape(count, 3)
            images += np.split(record[: int(table[:, 0].sum())], np.cumsum(table[:-1, 0]))[:count]
        ends = np.cumsum([0, *map(len, images)])
        joined = np.concatenate(images) if images else np.zeros(0, np.uint8)
        return Ragged(array(joined), array(ends))


@dataclass(frozen=True, kw_only=True)
class UnitPlaces(Kind):
    """Where the images of a batch stand, int64, (images, 3): unit, first token in it, tokens."""

    part: ClassVar[str] = "image_places"

    def _native_kind(self) -> Any:
        return _native.places_in_units()

    def encode(self, value: Any) -> bytes:
        raise UsageError("places of images have no columns, and none of them is missing")

    def hand_out(self, batch: _native.Batch, number: int, array: Callable[[Any], Any]) -> Any:
        values, offsets = batch.output(number)[:2]
        units = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        return array(np.column_stack([units, values]))
