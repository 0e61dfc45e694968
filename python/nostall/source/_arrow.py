"""Images in columns: Parquet, and Arrow IPC files as Hugging Face keeps them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._callback import RowReader
from nostall.source._object_file import ObjectFile, as_file, failure_of
from nostall.source._objects import is_url
from nostall.source._records import PathLike, RecordStore, absolute, open_storage, shard_paths
from nostall.source._source import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall import _native

_KEPT_BYTES = 256 << 20
_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"


class Parquet(Source):
    """Rows of Parquet files with a column of image bytes.

    A row cannot be read alone: its whole row group is unpacked. The last groups are kept unpacked, and
    the other rows of a group go to the tiers while they have room. With a shuffled order and without
    tiers every sample costs a whole group, so convert such a data set (`nostall convert`) or give it
    tiers. Opening reads the image column once, for the lengths of its values.

    Args:
        files: a list of files, a pattern, or a folder; or URLs of objects.
        image: the column: binary, or a struct with a binary field ``bytes`` (Hugging Face).
        label: an integer column; None for 0.
        kept: bytes of unpacked groups to keep.
        store: for URLs, an ``obstore.store`` that has them; made from the environment if None.

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
        store: Any = None,
    ) -> None:
        _pyarrow("parquet", files)
        paths = absolute(shard_paths(files, (".parquet",), store))
        self._arguments = {
            "files": paths,
            "image": image,
            "label": label,
            "kept": kept,
            "store": store,
        }
        self.native = _Groups(paths, image, kept, store).open(label)


class _Groups(RowReader):
    """Row groups of Parquet files, the last ones unpacked; see ``Parquet``."""

    def __init__(self, paths: list[str], image: str, kept: int, store: Any) -> None:
        self._paths, self._column, self._kept, self._store = paths, image, kept, store
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._opened: dict[int, Any] = {}
        self._pid = os.getpid()
        self._of_group: list[tuple[int, int]] = []  # (file, row group in it)
        self._first: list[int] = []  # sample
        self._group = np.zeros(0, np.uint32)  # of every sample

    def open(self, label: str | None) -> _native.Source:
        """The native source, after reading the metadata of every row group."""
        sizes: list[NDArray[np.uint64]] = []
        labels: list[NDArray[np.int64]] = []
        group: list[NDArray[np.uint32]] = []
        total = 0
        for number, path in enumerate(self._paths):
            file = self._open(number)
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

    def _open(self, number: int) -> Any:
        if number not in self._opened:
            file = as_file(self._paths[number], self._store)
            self._opened[number] = file, _open_parquet(self._paths[number], file)
        return self._opened[number][1]

    def _columns(self, number: int, group: int, name: str) -> Any:
        try:
            return self._open(number).read_row_group(group, columns=[name]).column(name)
        except IoError:
            raise
        except Exception as error:  # pyarrow's errors have no common base
            where = f"{self._paths[number]}, row group {group}"
            raise _told(self._opened.get(number, ("",))[0], error, where) from None

    def _unpacked(self, group: int) -> Any:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group][0]
        if self._pid != os.getpid():
            # Files that were open while the process forked share their place with the parent's.
            self._opened, self._pid = {}, os.getpid()
        number, inside = self._of_group[group]
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
                except IoError as error:
                    answers[sample] = error
                except Exception as error:
                    answers[sample] = CorruptionError(str(error))
        return [answers[s] for s in samples]

    def describe(self, sample: int) -> str:
        group = int(self._group[sample])
        number, inside = self._of_group[group]
        row = sample - self._first[group]
        return f"{self._paths[number]}, row group {inside}, row {row}"


def _open_parquet(path: str, file: Any) -> Any:
    try:
        return _pyarrow("parquet", path).ParquetFile(file)
    except FileNotFoundError:
        raise IoError(f"{path} does not exist") from None
    except Exception as error:
        raise _told(file, error, f"{path} cannot be opened as Parquet") from None


def _told(file: Any, error: Exception, what: str) -> Exception:
    """The object store's own error if there was one, else one that says that the bytes are wrong."""
    return failure_of(file) or CorruptionError(f"{what}: {error}")


class ArrowIPC(RecordStore):
    """Rows of uncompressed Arrow IPC files or streams with a column of image bytes.

    The bytes lie in the files unchanged, so they are read like those of any record store. Opening reads
    only the metadata of local files. Objects are read once from end to end, and the places are stored
    for the next time.

    Args:
        files: a list of files, a pattern, or a folder (``*.arrow``); or URLs of objects.
        image: the column: binary, or a struct with a binary field ``bytes`` (Hugging Face).
        label: an integer column; None for 0.
        store: for URLs, an ``obstore.store`` that has them; made from the environment if None.

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
        store: Any = None,
    ) -> None:
        _pyarrow("ipc", files)
        paths = absolute(shard_paths(files, (".arrow",), store))
        self._arguments = {"files": paths, "image": image, "label": label, "store": store}
        self.storage = open_storage(paths, store=store)

        def scan() -> _native.RecordTable:
            parts = [_arrow_places(path, image, label, store) for path in paths]
            file = np.concatenate([np.full(len(p[0]), i, np.uint32) for i, p in enumerate(parts)])
            offset, length, labels = (np.concatenate(c) for c in zip(*parts, strict=True))
            return self._table(
                "arrow",
                stamp,
                offset=offset,
                length=length,
                label=labels,
                file=file if len(paths) > 1 else None,
            )

        stamp = f"{image} {label}"
        self._open(kind="arrow", stamp=lambda: stamp, scan=scan, index=is_url(paths[0]))


Places = tuple["NDArray[np.uint64]", "NDArray[np.uint64]", "NDArray[np.int64]"]
# (address, bytes, offset in the file) of memory that holds a part of the file
Held = list[tuple[int, int, int]]


def _arrow_places(path: str, image: str, label: str | None, store: Any) -> Places:
    import pyarrow

    if is_url(path):
        file: Any = _Watched(path, store)
        pieces = _pieces(path, file)
    else:
        try:
            file = pyarrow.memory_map(path)
        except FileNotFoundError:
            raise IoError(f"{path} does not exist") from None
        whole = file.read_buffer()
        pieces = (
            (table, [(whole.address, whole.size, 0)])
            for table, _ in _pieces(path, pyarrow.BufferReader(whole))
        )
    parts: list[Places] = []
    with file:
        try:
            for table, held in pieces:
                _check_columns(table.schema, image, label, path)
                parts.append(_table_places(table, held, image, label, path))
        except (pyarrow.ArrowException, OSError) as error:
            raise _told(file, error, f"{path} cannot be read as Arrow IPC") from None
    if sum(len(p[0]) for p in parts) == 0:
        raise UsageError(f"{path} has no rows")
    offset, length, labels = (np.concatenate(c) for c in zip(*parts, strict=True))
    return offset, length, labels


class _Watched(ObjectFile):
    """Remembers to which place in the file the memory belongs that it returned."""

    def __init__(self, url: str, store: Any) -> None:
        super().__init__(url, store)
        self.held: Held = []

    def read(self, size: int | None = -1, /) -> bytes:
        offset = self.tell()
        data = super().read(size)
        self.held.append((np.frombuffer(data, np.uint8).ctypes.data, len(data), offset))
        return data


def _pieces(path: str, file: Any) -> Iterator[tuple[Any, Held]]:
    """The record batches as tables, and the places of their memory in the file, if known."""
    import pyarrow

    ipc = _pyarrow("ipc", path)
    file.seek(0)
    is_file = bytes(file.read(len(_FILE_MAGIC))) == _FILE_MAGIC
    if not is_file:
        # Streams of before Arrow 0.15 have no continuation marks.
        file.seek(0)
        mark = bytes(file.read(4)) + bytes(4)
        mark = mark if mark.startswith(_CONTINUATION) else bytes(4)
        size = file.seek(0, 2)
        size = file.tell() if size is None else size
        file.seek(max(0, size - len(mark)))
        if bytes(file.read(len(mark))) != mark:
            raise CorruptionError(
                f"{path} ends at byte {size} without the mark that ends a stream: it was cut off, "
                "or is still being written"
            )
    file.seek(0)
    held: Held = getattr(file, "held", [])
    if is_file:
        reader = ipc.open_file(file)
        batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = reader = ipc.open_stream(file)
    yield reader.schema.empty_table(), []
    for batch in batches:
        yield pyarrow.Table.from_batches([batch]), held
        held.clear()


def _table_places(table: Any, held: Held, image: str, label: str | None, path: str) -> Places:
    offsets: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
    lengths: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
    for chunk in _binary(table.column(image), path).chunks:
        ends = _offsets(chunk)
        data = chunk.buffers()[2]
        if len(chunk) == 0:
            continue
        if data is None or data.size == 0:
            offsets.append(np.zeros(len(chunk), np.uint64))
        else:
            offsets.append((ends[:-1] + _place(data, held, path)).astype(np.uint64))
        lengths.append(np.diff(ends).astype(np.uint64))
    length = np.concatenate(lengths)
    labels = np.zeros(len(length), np.int64)
    if label is not None:
        labels = _integers(table.column(label), path)
    return np.concatenate(offsets), length, labels


def _place(data: Any, held: Held, path: str) -> int:
    """Where in the file a buffer lies that was not copied out of it."""
    for address, size, offset in held:
        if address <= data.address and data.address + data.size <= address + size:
            return int(offset + data.address - address)
    raise UsageError(
        f"{path} is compressed inside: its rows cannot be read alone; write it again without "
        "compression"
    )


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
            raise UsageError(f"{path}: column {label!r} is {kind}, not integers: pass label=None")


def _pyarrow(module: str, files: Any) -> Any:
    try:
        import importlib

        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise UsageError(
            f"reading {files} needs the package pyarrow: pip install 'nostall[stores]'"
        ) from None
