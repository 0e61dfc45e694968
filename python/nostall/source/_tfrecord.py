"""TFRecord files of tf.train.Example records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.errors import UsageError
from nostall.fields import Kind
from nostall.source._columns import Names
from nostall.source._members import fields_of, find_fields, members_stamp, names_in_first
from nostall.source._parts import PartsStore
from nostall.source._records import (
    PathLike,
    Progress,
    ReadOptions,
    absolute,
    open_storage,
    reading_of,
    shard_paths,
)
from nostall.source._source import arguments_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THREADS = 8


class TFRecord(PartsStore):
    """Records of TFRecord files, uncompressed.

    Args:
        files: a list of files, a pattern (``train-*-of-01024``), a folder, or a URL of them.
        values: ``"example"`` (tf.train.Example: image and label features) or ``"raw"``.
        image: name of the feature that is the image.
        label: name of that of the labels; None where there is none.
        features: instead of `image` and `label`, the names of the features that are fields, or by the
            name of the field that of its feature, or "all".
        schema: the kinds of fields. Those that it does not have follow from the features' values.
        check: ``"lengths"`` compares the checksums of the lengths while scanning, and collects those of
            the records, with which every later reading is compared; ``"all"`` reads and compares
            every record at once.
        index: True keeps the places beside the first file, or in the user's cache folder where that
            is read-only; a path keeps them there; False nowhere.
        reading: how the files are read.
        progress: called with the number of files, then records, examined.

    Raises:
        CorruptionError: a checksum is wrong, or a file is cut, with record and offset.
        UsageError: there is no record, or a record lacks a feature that has no ``fill`` in the schema,
            or a feature is of several types.
        IoError: a file cannot be read.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        values: Literal["example", "raw"] = "example",
        image: str = "image/encoded",
        label: str | None = "image/class/label",
        features: Names | None = None,
        schema: Mapping[str, Kind] | None = None,
        check: Literal["lengths", "all"] = "lengths",
        index: bool | PathLike = True,
        reading: ReadOptions | None = None,
        progress: Progress | None = None,
        store: Any = None,
    ) -> None:
        self._arguments = arguments_of(locals(), but="progress")
        if values not in ("example", "raw"):
            raise UsageError(f'values must be "example" or "raw", not {values!r}')
        if check not in ("lengths", "all"):
            raise UsageError(f'check must be "lengths" or "all", not {check!r}')
        if features is not None and values != "example":
            raise UsageError(f'features= are of values="example", not of {values!r}')
        if features is None and schema is not None:
            raise UsageError("schema= says the kinds of fields, which features= names")
        paths = absolute(shard_paths(files, (".tfrecord", ".tfrecords", ".tfrec"), store))
        self._arguments["files"] = paths
        chosen = reading_of(reading)
        self.storage = open_storage(paths, direct=chosen.direct, store=store)
        self._reading = chosen
        stamp = f"values={values} check={check}"
        if features is not None:
            stamp += f" {members_stamp(features, values)}"
        elif values == "example":
            stamp += f" image={image} label={label}"
        self._pairs = features is None
        find = partial(self._pairs_of, (image, label or ""), progress)
        sums = np.zeros(0, np.uint32)

        def scan() -> _native.RecordTable:
            nonlocal sums
            file, offset, length, crc = _native.scan_tfrecord(
                storage=self.storage, check=check == "all", threads=_THREADS, progress=progress
            )
            if features is not None:
                scanned = (file, offset, length)
                found, parts = find_fields(
                    self, "example", features, *scanned, progress, given=schema
                )
                return self._parts_table("tfrecord", stamp + found, parts, file)
            labels, sums = None, np.maximum(crc, 1)  # 0 is kept as 1
            if values == "example":
                offset, length, labels, sums = find(file, offset, length, crc)
            return self._table(
                "tfrecord",
                stamp,
                offset=offset,
                length=length,
                label=labels,
                file=file if len(paths) > 1 else None,
            )

        self._open(
            kind="tfrecord",
            stamp=lambda: stamp,
            scan=scan,
            index=index,
            reading=chosen,
            sums=(lambda: sums) if features is None else None,
        )
        if features is not None:
            self._schema = fields_of(self, schema)

    def _pairs_of(
        self,
        names: tuple[str, str],
        progress: Progress | None,
        file: NDArray[np.uint32],
        offset: NDArray[np.uint64],
        length: NDArray[np.uint64],
        crc: NDArray[np.uint32],
    ) -> tuple[NDArray[Any], ...]:
        """Offset, length, label and checksum of the image in every record."""
        try:
            found = _native.find_payloads(
                storage=self.storage,
                file=file,
                offset=offset,
                length=length,
                kind="example",
                image=names[0],
                label=names[1],
                threads=_THREADS,
                progress=progress,
                crc=crc,
            )
        except UsageError as error:
            there = names_in_first(self.storage, "example", file, offset, length)
            raise UsageError(
                f"{error}; the first record has: {there}. image= and label= name others, label=None is "
                "for images without labels"
            ) from None
        offset, length, labels, _, sums = found
        return offset, length, np.asarray(labels), sums
