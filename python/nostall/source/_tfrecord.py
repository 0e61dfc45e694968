"""TFRecord files of tf.train.Example records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.errors import UsageError
from nostall.source._records import (
    PathLike,
    Progress,
    ReadOptions,
    RecordStore,
    absolute,
    open_storage,
    reading_of,
    shard_paths,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THREADS = 8


class TFRecord(RecordStore):
    """Records of TFRecord files, uncompressed.

    Args:
        files: a list of files, a pattern (``train-*-of-01024``), a folder, or a URL of them.
        values: ``"example"`` (tf.train.Example: image and label features) or ``"raw"``.
        image, label: names of the features; `label` None where there is none.
        check: ``"lengths"`` compares the checksums of the lengths while scanning, and collects those of
            the records, with which every later reading is compared; ``"all"`` reads and compares
            every record at once.
        index: True keeps the places beside the first file, or in the user's cache folder where that
            is read-only; a path keeps them there; False nowhere.
        reading: how the files are read.
        progress: called with the number of files, then records, examined.

    Raises:
        CorruptionError: a checksum is wrong, or a file is cut, with record and offset.
        UsageError: there is no record, or a record lacks a feature.
        IoError: a file cannot be read.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        values: Literal["example", "raw"] = "example",
        image: str = "image/encoded",
        label: str | None = "image/class/label",
        check: Literal["lengths", "all"] = "lengths",
        index: bool | PathLike = True,
        reading: ReadOptions | None = None,
        progress: Progress | None = None,
        store: Any = None,
    ) -> None:
        if values not in ("example", "raw"):
            raise UsageError(f'values must be "example" or "raw", not {values!r}')
        if check not in ("lengths", "all"):
            raise UsageError(f'check must be "lengths" or "all", not {check!r}')
        paths = absolute(shard_paths(files, (".tfrecord", ".tfrecords", ".tfrec"), store))
        chosen = reading_of(reading)
        self._arguments = {
            "files": paths,
            "values": values,
            "image": image,
            "label": label,
            "check": check,
            "index": index,
            "reading": reading,
            "store": store,
        }
        self.storage = open_storage(paths, direct=chosen.direct, store=store)
        stamp = f"values={values} check={check}"
        if values == "example":
            stamp += f" image={image} label={label}"

        sums: NDArray[np.uint32] | None = None

        def scan() -> _native.RecordTable:
            nonlocal sums
            file, offset, length, crc = _native.scan_tfrecord(
                storage=self.storage, check=check == "all", threads=_THREADS, progress=progress
            )
            sums = np.maximum(crc, 1)  # 0 is kept as 1
            labels = None
            if values == "example":
                offset, length, labels, _, sums = _native.find_payloads(
                    storage=self.storage,
                    file=file,
                    offset=offset,
                    length=length,
                    kind="example",
                    image=image,
                    label=label or "",
                    threads=_THREADS,
                    progress=progress,
                    crc=crc,
                )
            return self._table(
                "tfrecord",
                stamp,
                offset=offset,
                length=length,
                label=None if labels is None else np.asarray(labels),
                file=file if len(paths) > 1 else None,
            )

        self._open(
            kind="tfrecord",
            stamp=lambda: stamp,
            scan=scan,
            index=index,
            reading=chosen,
            sums=lambda: sums,
        )
