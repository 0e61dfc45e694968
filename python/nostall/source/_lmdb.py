"""LMDB databases, read without liblmdb: the places of all values are found once and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.base._paths import path_of
from nostall.errors import CorruptionError, UsageError
from nostall.fields import Kind
from nostall.source._columns import Names
from nostall.source._members import fields_of, find_fields, members_stamp
from nostall.source._objects import is_url
from nostall.source._parts import PartsStore, as_text, cover, short_head
from nostall.source._records import (
    FOUND,
    PathLike,
    Progress,
    ReadOptions,
    absolute,
    classes_beside,
    open_storage,
    reading_of,
)
from nostall.source._source import Pixels, arguments_of, whole_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAGE_HEADER = 16
_NO_NUMBER = np.iinfo(np.uint64).max
_THREADS = 8
_PAIRS = ("raw", "datum", "pickled", "example")
_FIELDS = ("npz", "msgpack", "npy")
# The features of an example that are image and label.
_IMAGE, _LABEL = "image/encoded", "image/class/label"
# Keys that writers of datasets add beside the samples.
LABELS_KEY = b"__labels__"  # nostall convert: little-endian int64 by decimal key
SPECIAL_KEYS = (b"__len__", b"__keys__", LABELS_KEY)
Labels = Callable[[bytes], int] | Sequence[int] | None


class LMDB(PartsStore):
    """The records of an LMDB database ([Pumma 2020, ch. 3 to 5] is about reading them).

    The scan reads branch and leaf pages only, no large values. The places are stored beside the
    database and are valid for its last transaction; after a commit the database is scanned again.

    Args:
        path: the folder of ``data.mdb``, the file itself, or a URL of it.
        database: a named database in it; the main one if empty.
        values: what a value is: ``"raw"`` (the sample itself), ``"datum"`` (Caffe's Datum: image and
            label), ``"pickled"`` (a pickled (bytes, int), or bytes alone; nothing is executed),
            ``"example"`` (tf.train.Example), or fields: ``"npz"`` (without compression),
            ``"msgpack"`` (a map or a list), ``"npy"`` (one field, ``array``).
        label: one integer per sample, or a function of the key; if None what the value says, or, of
            raw values, what the key ``__labels__`` holds (``nostall convert``), or 0.
            With a function the places are not kept, unless `index` names a file.
        order: of the samples: ``"number"`` where the keys are decimal numbers ("0", "1", "10": the
            sample with key "10" is the eleventh), ``"key"`` as the database sorts them, ``"auto"``
            the first where it can be.
        keep: which keys are samples; all but ``__len__``, ``__keys__`` and ``__labels__`` if None.
        members: of ``"npz"``, ``"msgpack"`` and ``"example"`` the names of the values that are fields,
            or by the name of the field that of its value, or "all". Of an example without it the
            features ``image/encoded`` and ``image/class/label`` are images and labels.
        schema: the kinds of fields. Those that it does not have follow from the values.
        index: True keeps the places beside the database, or in the user's cache folder where that
            is read-only; a path keeps them there; False nowhere.
        reading: how the file is read.
        progress: called with the number of values examined (not for raw ones).

    Attributes:
        classes: the names of the labels, where ``nostall convert`` has left them beside the file.
        pixels: set where the samples are pixels, not encoded (Caffe's Datum: channels first, blue
            first): native transforms take them as images.

    Raises:
        UsageError: there is no such database, it allows several values per key, its data version is
            not 1, or the arguments contradict each other.
        CorruptionError: the database is damaged; with page and offset.
        IoError: it cannot be read, or is written to faster than it can be scanned.
    """

    classes: list[str] | None = None

    def __init__(
        self,
        path: PathLike,
        *,
        database: str = "",
        values: Literal["raw", "datum", "pickled", "example", "npz", "msgpack", "npy"] = "raw",
        label: Labels = None,
        order: Literal["auto", "key", "number"] = "auto",
        keep: Callable[[bytes], bool] | None = None,
        members: Names | None = None,
        schema: Mapping[str, Kind] | None = None,
        index: bool | PathLike = True,
        reading: ReadOptions | None = None,
        progress: Progress | None = None,
        store: Any = None,
    ) -> None:
        self._arguments = arguments_of(locals(), but="progress")
        if members is None and values in ("npz", "msgpack"):
            members = "all"
        has_fields = members is not None or values == "npy"
        _check_options(values, label, order, members, has_fields or schema is None)
        chosen = reading_of(reading)
        (self._arguments["path"],) = absolute([path_of(path)])
        self.database = database
        self.path = data_file(path)
        self.storage = open_storage([self.path], direct=chosen.direct, store=store)
        self._values, self._order, self._label, self._keep = values, order, label, keep
        self._members, self._reading, self._pairs = members, chosen, not has_fields
        self._progress = progress
        options = f" values={values} order={order}"
        if members is not None:
            options += f" {members_stamp(members, values)}"
        elif values == "example":
            options += f" image={_IMAGE} label={_LABEL}"
        if label is not None:
            options += f" label={'function' if callable(label) else _digest(label)}"
        if keep is not None:
            options += " keep=function"
        by_function = callable(label) or keep is not None
        self._open(
            kind="lmdb",
            stamp=lambda: _native.lmdb_stamp(self.storage, database) + options,
            scan=lambda: self._scan(options),
            index=False if index is True and by_function else index,
            reading=chosen,
            page_size=self._page_size,
            database=database,
        )
        if has_fields:
            self._schema = fields_of(self, schema)
            return
        self.pixels = _pixels(self.native.table.stamp)
        if label is not None and not callable(label) and len(label) != len(self):
            raise UsageError(f"{len(label)} labels were given for {len(self)} samples")
        if label is None:
            self.classes = classes_beside([self.path], self.labels)

    def _page_size(self) -> int:
        fields = dict(f.split("=", 1) for f in self._stamp().split(" ") if "=" in f)
        return int(fields["page"])

    def _stamp(self) -> str:
        return _native.lmdb_stamp(self.storage, self.database)

    def _scan(self, options: str) -> _native.RecordTable:
        records = _native.scan_lmdb(self.storage, self.database)
        if len(records) == 0 and records.databases:
            raise UsageError(
                f"{self.path} has no records itself, only named databases: pass database= one of "
                f"{', '.join(records.databases)}"
            )
        chosen = self._choose(records)
        offset, length = records.offset[chosen], records.length[chosen]
        own = records.own_pages[chosen].astype(bool)
        start = np.where(own, offset - np.uint64(_PAGE_HEADER), offset)
        if not self._pairs:
            return self._scan_fields(records, chosen, start, options)
        label: NDArray[np.int64] | None = None
        found = ""
        if self._values == "raw" and self._label is None:
            label = self._labels_of(records, chosen)
        if self._values != "raw":
            offset, length, label, shapes, _ = _native.find_payloads(
                storage=self.storage,
                file=np.empty(0, np.uint32),
                offset=np.ascontiguousarray(offset),
                length=np.ascontiguousarray(length),
                kind=self._values,
                image=_IMAGE,
                label=_LABEL if self._label is None else "",
                threads=_THREADS,
                progress=self._progress,
                crc=np.empty(0, np.uint32),
            )
            found = self._shape(shapes.reshape(-1, 3), records, chosen)
        if callable(self._label):
            function = self._label
            given = [function(records.key(int(i))) for i in chosen]
            label = whole_numbers(given, "what label= returns")
        elif self._label is not None:
            label = whole_numbers(self._label, "label=")
            if len(label) != len(chosen):
                raise UsageError(f"{len(label)} labels were given for {len(chosen)} samples")
        return self._table(
            "lmdb",
            records.stamp(self.database) + options + found,
            offset=offset,
            length=length,
            label=label,
            head=short_head(np.where(own, offset - start, 0)),
        )

    def _scan_fields(
        self,
        records: _native.LmdbRecords,
        chosen: NDArray[np.int64],
        start: NDArray[np.uint64],
        options: str,
    ) -> _native.RecordTable:
        """`start` is where the page of a value that has its own begins, else where the value does."""
        file = np.zeros(0, np.uint32)
        offset, length = records.offset[chosen], records.length[chosen]
        if self._members is None:
            found = FOUND + as_text([["array", "array", "npy", False, 0, 0]])
            places = cover(
                offset[:, None], length[:, None], np.ones((len(offset), 1), bool), offset
            )
        else:
            kind: Any = self._values
            found, places = find_fields(
                self,
                kind,
                self._members,
                file,
                offset,
                length,
                self._progress,
                given=self._arguments["schema"],
            )
        head = np.where(offset > start, places[0] - start, 0)
        return self._parts_table(
            "lmdb", records.stamp(self.database) + options + found, places, file, head
        )

    def _native_again(self, table: _native.RecordTable) -> _native.RecordSource:
        return self._native_of(table, self._reading, self._page_size, self.database)

    def _shape(
        self, shapes: NDArray[np.uint32], records: _native.LmdbRecords, chosen: NDArray[np.int64]
    ) -> str:
        """The stamp's entry for samples that are pixels: one shape, or nothing if encoded."""
        other = np.flatnonzero((shapes != shapes[:1]).any(axis=1))
        if len(other):
            at = int(other[0])
            key = records.key(int(chosen[at]))
            raise UsageError(
                f"{self.path}: the sample with the key {key!r} has the shape "
                f"{tuple(shapes[at].tolist())} (zeros: encoded), others {tuple(shapes[0].tolist())}: "
                "they are not images of one kind"
            )
        if len(shapes) == 0 or shapes[0, 0] == 0:
            return ""
        return FOUND + "pixels=" + "x".join(map(str, shapes[0].tolist()))

    def _labels_of(
        self, records: _native.LmdbRecords, chosen: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """The labels that ``nostall convert`` wrote beside raw values; None if it wrote none."""
        place = records.find(LABELS_KEY)
        if place is None:
            return None
        stored = self.storage.read(0, int(records.offset[place]), int(records.length[place]))
        labels = np.frombuffer(stored[: len(stored) // 8 * 8], "<i8")
        numbers = records.decimal_keys()[chosen]
        if len(stored) % 8 or (numbers >= len(labels)).any():
            raise CorruptionError(
                f"{self.path}: the value of the key {LABELS_KEY.decode()} ({len(stored)} bytes) does "
                f"not have a label for each of {len(chosen)} samples; pass label="
            )
        return labels[numbers].astype(np.int64)

    def _choose(self, records: _native.LmdbRecords) -> NDArray[np.int64]:
        """The records that are samples, in the order of the samples."""
        numbers = records.decimal_keys()
        wanted = np.ones(len(records), bool)
        if self._keep is not None:
            wanted[:] = [self._keep(records.key(i)) for i in range(len(records))]
        else:
            for key in SPECIAL_KEYS:
                place = records.find(key)
                if place is not None:
                    wanted[place] = False
        chosen = np.flatnonzero(wanted)
        keys = numbers[chosen]
        decimal = len(chosen) > 0 and bool((keys != _NO_NUMBER).all())
        if decimal:
            decimal = len(np.unique(keys)) == len(keys)
        if self._order == "number" and not decimal:
            bad = next((int(c) for c, k in zip(chosen, keys, strict=True) if k == _NO_NUMBER), None)
            which = (
                "two keys are the same number" if bad is None else f"{records.key(bad)!r} is not"
            )
            raise UsageError(f'{self.path}: order="number" needs decimal keys, but {which}')
        if decimal and self._order != "key":
            chosen = chosen[np.argsort(keys, kind="stable")]
        return chosen


def _check_options(
    values: str, label: Labels, order: str, members: Names | None, schema_fits: bool
) -> None:
    if values not in (*_PAIRS, *_FIELDS):
        known = ", ".join(f'"{name}"' for name in (*_PAIRS, *_FIELDS))
        raise UsageError(f"values must be one of {known}, not {values!r}")
    if members is not None and values not in ("npz", "msgpack", "example"):
        raise UsageError(f"members= names values in npz, msgpack and example, not in {values!r}")
    if not schema_fits:
        raise UsageError("schema= says the kinds of fields, which members= names")
    if (members is not None or values == "npy") and label is not None:
        raise UsageError("label= is for samples of one value: a label is a field like others")
    if order not in ("auto", "key", "number"):
        raise UsageError(f'order must be "auto", "key" or "number", not {order!r}')


def _digest(label: Sequence[int]) -> str:
    return hashlib.sha256(whole_numbers(label, "label=").tobytes()).hexdigest()[:16]


def _pixels(stamp: str) -> Pixels | None:
    found = stamp.partition(f"{FOUND}pixels=")[2]
    if not found:
        return None
    channels, height, width = (int(n) for n in found.split("x"))
    return Pixels(height, width, channels, layout="chw", order="bgr")


def data_file(path: PathLike) -> str:
    """``data.mdb`` of a database's folder, or the file itself."""
    name = path_of(path)
    if is_url(name):
        return name if name.endswith(".mdb") else f"{name.rstrip('/')}/data.mdb"
    return str(Path(name) / "data.mdb") if Path(name).is_dir() else name
