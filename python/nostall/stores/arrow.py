"""Images in columns: Parquet, and Arrow IPC files as Hugging Face keeps them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source import Source
from nostall.stores.callback import RowReader
from nostall.stores.records import (
    PathLike,
    RecordStore,
    absolute,
    only_local,
    open_storage,
    shard_paths,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall import _native

_KEPT_BYTES = 256 << 20
_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"


class Parquet(Source):
    """Rows of Parquet files with a column of image bytes.

    A row is not readable alone: its whole row group is unpacked. The last groups are kept unpacked,
    and what else a group holds goes to the tiers while they have room; with a shuffled order and no
    tiers every sample costs its group again, so convert such a data set (`nostall convert`) or give
    it tiers. Opening reads the image column once, for the lengths of its values.

    Args:
        files: a list of files, a pattern, or a folder.
        image: the column: binary, or a struct with a binary field ``bytes`` (Hugging Face).
        label: an integer column; None for 0.
        kept: bytes of unpacked groups to keep.

    Raises:
        UsageError: there is no such column, it is of another type, or a row has no image.
        CorruptionError: a file is damaged, with its path.
        IoError: a file cannot be opened.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        image: str = "image",
        label: str | None = "label",
        kept: int = _KEPT_BYTES,
    ) -> None:
        _pyarrow("parquet", files)
        only_local(files, "Parquet")
        paths = absolute(shard_paths(files, (".parquet",)))
        self._arguments = {"files": paths, "image": image, "label": label, "kept": kept}
        self.native = _Groups(paths, image, kept).open(label)


class _Groups(RowReader):
    """Row groups of Parquet files, the last ones unpacked; see ``Parquet``."""

    def __init__(self, paths: list[str], image: str, kept: int) -> None:
        self._paths, self._column, self._kept = paths, image, kept
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._opened: dict[int, Any] = {}
        self._pid = os.getpid()
        self._of_group: list[tuple[int, int]] = []  # (file, row group in it)
        self._first: list[int] = []  # sample
        self._group = np.zeros(0, np.uint32)  # of every sample

    def open(self, label: str | None) -> _native.Source:
        """The native source, after a look at every row group."""
        sizes: list[NDArray[np.uint64]] = []
        labels: list[NDArray[np.int64]] = []
        group: list[NDArray[np.uint32]] = []
        total = 0
        for number, path in enumerate(self._paths):
            file = self._opened[number] = _open_parquet(path)
            _check_columns(file.schema_arrow, self._column, label, path)
            for i in range(file.num_row_groups):
                where = f"{path}, row group {i}"
                rows = _binary(self._columns(number, i, self._column), where)
                sizes.append(_lengths(rows))
                if label is not None:
                    labels.append(_integers(self._columns(number, i, label), where))
                group.append(np.full(len(rows), len(self._of_group), np.uint32))
                self._of_group.append((number, i))
                self._first.append(total)
                total += len(rows)
        if total == 0:
            raise UsageError(f"{self._paths[0]} has no rows")
        self._group = np.concatenate(group)
        return self.make_source(
            sizes=np.concatenate(sizes),
            labels=np.concatenate(labels) if labels else np.zeros(total, np.int64),
            group=self._group,
            identity=("parquet", [Path(p).name for p in self._paths], self._column, label),
        )

    def _columns(self, number: int, group: int, name: str) -> Any:
        try:
            return self._opened[number].read_row_group(group, columns=[name]).column(name)
        except Exception as error:  # pyarrow's errors have no common base
            where = f"{self._paths[number]}, row group {group}"
            raise CorruptionError(f"{where}: {error}") from None

    def _unpacked(self, group: int) -> Any:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group][0]
        if self._pid != os.getpid():
            # Files that were open while the process forked share their place with the parent's.
            self._opened, self._pid = {}, os.getpid()
        number, inside = self._of_group[group]
        if number not in self._opened:
            self._opened[number] = _open_parquet(self._paths[number])
        column = self._columns(number, inside, self._column)
        rows = _binary(column, f"row group {inside}").combine_chunks()
        self._groups[group] = rows, int(rows.nbytes)
        while len(self._groups) > 1 and sum(n for _, n in self._groups.values()) > self._kept:
            self._groups.popitem(last=False)
        return rows

    def read(self, samples: list[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        with self._lock:
            for sample in sorted(samples):
                group = int(self._group[sample])
                try:
                    row = self._unpacked(group)[sample - self._first[group]]
                    answers[sample] = np.frombuffer(row.as_buffer() or b"", np.uint8)
                except Exception as error:
                    answers[sample] = CorruptionError(str(error))
        return [answers[s] for s in samples]

    def describe(self, sample: int) -> str:
        group = int(self._group[sample])
        number, inside = self._of_group[group]
        row = sample - self._first[group]
        return f"{self._paths[number]}, row group {inside}, row {row}"


def _open_parquet(path: str) -> Any:
    try:
        return _pyarrow("parquet", path).ParquetFile(path)
    except FileNotFoundError:
        raise IoError(f"{path} does not exist") from None
    except Exception as error:
        raise CorruptionError(f"{path} cannot be opened as Parquet: {error}") from None


class ArrowIPC(RecordStore):
    """Rows of uncompressed Arrow IPC files or streams with a column of image bytes.

    The bytes lie in the files as they are, so they are read like any record store's.

    Args:
        files: a list of files, a pattern, or a folder (``*.arrow``).
        image: the column: binary, or a struct with a binary field ``bytes`` (Hugging Face).
        label: an integer column; None for 0.

    Raises:
        UsageError: there is no such column, it is of another type, or the file is compressed.
        CorruptionError: a file is damaged, with its path.
        IoError: a file cannot be opened.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        image: str = "image",
        label: str | None = "label",
    ) -> None:
        _pyarrow("ipc", files)
        only_local(files, "Arrow IPC")
        paths = absolute(shard_paths(files, (".arrow",)))
        self._arguments = {"files": paths, "image": image, "label": label}
        self.storage = open_storage(paths)
        parts = [_arrow_places(path, image, label) for path in paths]
        file = np.concatenate([np.full(len(p[0]), i, np.uint32) for i, p in enumerate(parts)])
        offset, length, labels = (np.concatenate(c) for c in zip(*parts, strict=True))
        self._open(
            kind="arrow",
            stamp=lambda: image,
            scan=lambda: self._table(
                "arrow",
                image,
                offset=offset,
                length=length,
                label=labels,
                file=file if len(paths) > 1 else None,
            ),
            index=False,
        )


def _arrow_places(
    path: str, image: str, label: str | None
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    pa = _pyarrow("ipc", path)
    import pyarrow

    try:
        mapped = pyarrow.memory_map(path)
    except FileNotFoundError:
        raise IoError(f"{path} does not exist") from None
    with mapped:
        whole = mapped.read_buffer()
        try:
            if whole.slice(0, len(_FILE_MAGIC)).to_pybytes() == _FILE_MAGIC:
                table = pa.open_file(pyarrow.BufferReader(whole)).read_all()
            else:
                table = pa.open_stream(pyarrow.BufferReader(whole)).read_all()
                # Streams of before Arrow 0.15 have no continuation marks.
                mark = whole.slice(0, 4).to_pybytes() + bytes(4)
                mark = mark if mark.startswith(_CONTINUATION) else bytes(4)
                if whole.slice(max(0, whole.size - len(mark))).to_pybytes() != mark:
                    raise CorruptionError(
                        f"{path} ends at byte {whole.size} without the mark that ends a stream: it "
                        "was cut off, or is still being written"
                    )
        except (pyarrow.ArrowException, OSError) as error:
            raise CorruptionError(f"{path} cannot be read as Arrow IPC: {error}") from None
        _check_columns(table.schema, image, label, path)
        begin, end = whole.address, whole.address + whole.size
        offsets: list[NDArray[np.uint64]] = []
        lengths: list[NDArray[np.uint64]] = []
        for chunk in _binary(table.column(image), path).chunks:
            ends = _offsets(chunk)
            data = chunk.buffers()[2]
            if len(chunk) == 0:
                continue
            if data is None or data.size == 0:
                offsets.append(np.zeros(len(chunk), np.uint64))
            elif begin <= data.address and data.address + data.size <= end:
                offsets.append((ends[:-1] + (data.address - begin)).astype(np.uint64))
            else:
                raise UsageError(
                    f"{path} is compressed inside: its rows cannot be read alone; write it again "
                    "without compression"
                )
            lengths.append(np.diff(ends).astype(np.uint64))
        if not offsets:
            raise UsageError(f"{path} has no rows")
        labels = np.zeros(sum(len(x) for x in lengths), np.int64)
        if label is not None:
            labels = _integers(table.column(label), path)
        return np.concatenate(offsets), np.concatenate(lengths), labels


def _offsets(chunk: Any) -> NDArray[np.int64]:
    """Ends of the values in the data buffer, shape (n + 1,), of a binary array."""
    import pyarrow

    large = pyarrow.types.is_large_binary(chunk.type) or pyarrow.types.is_large_string(chunk.type)
    kind = np.int64 if large else np.int32
    buffer = chunk.buffers()[1]
    if buffer is None:
        return np.zeros(len(chunk) + 1, np.int64)
    ends = np.frombuffer(buffer, kind)[chunk.offset : chunk.offset + len(chunk) + 1]
    return ends.astype(np.int64)


def _lengths(column: Any) -> NDArray[np.uint64]:
    parts = [np.diff(_offsets(chunk)) for chunk in column.chunks]
    return np.concatenate(parts).astype(np.uint64) if parts else np.zeros(0, np.uint64)


def _binary(column: Any, where: str) -> Any:
    """The binary values of a column: its own, or those of the field ``bytes`` of its structs."""
    import pyarrow

    if pyarrow.types.is_struct(column.type):
        chunks = [chunk.field("bytes") for chunk in column.chunks]
        values = pyarrow.chunked_array(chunks, type=column.type.field("bytes").type)
    else:
        values = column
    for some in (column, values):
        if some.null_count:
            row = some.is_null().index(True).as_py()
            raise UsageError(
                f"{where}, row {row} has no image bytes (only a path, or nothing): such a data set "
                "must be written again with its images inside"
            )
    return values


def _integers(column: Any, where: str) -> NDArray[np.int64]:
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise UsageError(f"{where}, row {row} has no label")
    numbers: NDArray[Any] = column.to_numpy()
    return numbers.astype(np.int64)


def _check_columns(schema: Any, image: str, label: str | None, path: str) -> None:
    import pyarrow

    for name in (image, label):
        if name is not None and name not in schema.names:
            hint = ": pass label=None or its name" if name == label else ""
            raise UsageError(
                f"{path} has no column {name!r}{hint}; it has: {', '.join(schema.names)}"
            )
    kind = schema.field(image).type
    if pyarrow.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if "bytes" not in names:
            raise UsageError(f"{path}: the structs of column {image!r} have no field 'bytes'")
        kind = kind.field("bytes").type
    if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
        raise UsageError(f"{path}: column {image!r} is {kind}, not binary: it has no image bytes")
    if label is not None:
        kind = schema.field(label).type
        if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind)):
            raise UsageError(f"{path}: column {label!r} is {kind}, no integers: pass label=None")


def _pyarrow(module: str, files: Any) -> Any:
    try:
        import importlib

        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise UsageError(
            f"reading {files} needs the package pyarrow: pip install 'nostall[stores]'"
        ) from None
