"""Rows of columns: Parquet, and Arrow IPC files as Hugging Face keeps them."""

from __future__ import annotations

import errno
import os
import resource
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.errors import CorruptionError, IoError, UsageError
from nostall.fields import Image, Kind, Scalar
from nostall.source._columns import (
    Column,
    Gathered,
    Names,
    Rows,
    check_same,
    classes_of,
    column_of,
    compose_columns,
    gathered_columns,
    leaf_of,
    rows_of,
)
from nostall.source._composite import Composite
from nostall.source._custom import SampleReader, native_source
from nostall.source._hugging_face import dataset_files
from nostall.source._object_file import ObjectFile, as_file, failure_of, stamp_of, state_of
from nostall.source._objects import is_url
from nostall.source._records import (
    PathLike,
    PlacedRows,
    RecordStore,
    absolute,
    open_storage,
    refuse_replaced,
    shard_paths,
)
from nostall.source._source import arguments_of, whole_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall import _native

_KEPT_BYTES = 256 << 20
_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"


class Parquet(Composite):
    """Rows of Parquet files: a column of images and one of labels, or with `columns` any columns.

    A row cannot be read alone: the columns of its whole row group are unpacked. The last ones are kept
    unpacked, and the other rows of a group go to the tiers while they have room. With a shuffled order
    and without tiers every sample costs a whole group, so convert such a data set (`nostall convert`)
    or give it tiers. Opening reads the chosen columns once: numbers stay in memory, of others the
    lengths. Of lists of a fixed size it needs the footers alone, where these say that no value is
    missing.

    Args:
        files: a list of files, a pattern, or a folder; or URLs of objects.
        image: the column: binary, or a struct with a binary field ``bytes`` (Hugging Face).
        label: an integer column; None for 0.
        columns: instead of `image` and `label`, the names of the columns, or by the name of the field
            that of its column, or "all". ``a.b`` is the field ``b`` of the structs of column ``a``.
        schema: the kinds of fields. Those that it does not have follow from the columns' types.
        kept: bytes of unpacked columns to keep.
        store: for URLs, an ``obstore.store`` that has them; made from the environment if None.

    Raises:
        UsageError: there is no such column, it is of a type that is not read or of another type in
            another file, or a row has no value and its kind no ``fill``.
        CorruptionError: a file is damaged, with its path.
        IoError: a file cannot be opened.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        image: str = "image",
        label: str | None = "label",
        columns: Names | None = None,
        schema: Mapping[str, Kind] | None = None,
        kept: int = _KEPT_BYTES,
        store: Any = None,
    ) -> None:
        self._arguments = arguments_of(locals())
        _pyarrow("parquet", files)
        self._arguments["files"] = paths = absolute(shard_paths(files, (".parquet",), store))
        pairs = _is_pair(image, label, columns, schema)
        groups = _Groups(paths, kept, store)
        if columns is None:
            _check_columns(groups.schema(0), image, label, paths[0])
            columns = {"image": image, **({} if label is None else {"label": label})}
            schema = (
                {"image": Image(), "label": Scalar()} if label is not None else {"image": Image()}
            )
        gathered = gathered_columns(groups.schema(0), columns, schema, paths[0])
        rows = groups.gather(gathered)
        compose_columns(self, gathered, rows, groups.parts, pairs)


def _is_pair(
    image: str, label: str | None, columns: Names | None, schema: Mapping[str, Kind] | None
) -> bool:
    if columns is None and schema is not None:
        raise UsageError("schema= says the kinds of fields, which columns= names")
    if columns is not None and (image, label) != ("image", "label"):
        raise UsageError("columns= names all fields: image= and label= are not for it")
    return columns is None


class _Unpacked:
    """A column of a row group: the bytes of its chunks, of which Arrow joins none beyond 2 GiB."""

    def __init__(self, column: Any, what: Column, where: str) -> None:
        self._first: list[int] = []  # row of each chunk
        self._chunks: list[tuple[NDArray[np.uint8], Rows]] = []
        self.nbytes = row = 0
        for chunk in column.chunks:
            rows = rows_of(leaf_of(chunk, what), what, where)
            data = np.frombuffer(rows.data if rows.data is not None else b"", np.uint8)
            self._first.append(row)
            self._chunks.append((data, rows))
            self.nbytes += data.nbytes
            row += len(rows.begin)

    def value(self, row: int) -> NDArray[np.uint8]:
        place = bisect_right(self._first, row) - 1
        data, rows = self._chunks[place]
        begin = rows.begin[row - self._first[place]]
        return data[begin : begin + rows.length[row - self._first[place]]]


class _Groups(SampleReader):
    """Columns of row groups of Parquet files, the last ones unpacked; see ``Parquet``.

    Sample `row` of field `i` is the part ``i * rows + row``.
    """

    def __init__(self, paths: list[str], kept: int, store: Any) -> None:
        self._paths, self._kept, self._store = paths, kept, store
        self._lock = threading.Lock()
        self._unpacked: OrderedDict[tuple[int, int], _Unpacked] = OrderedDict()
        self._opened: dict[int, Any] = {}
        self._pid = os.getpid()
        self._of_group: list[tuple[int, int]] = []  # (file, row group in it)
        self._first: list[int] = []  # row
        self._columns: list[Column] = []  # of the fields that are parts
        self._rows = 0

    def schema(self, number: int) -> Any:
        """The Arrow schema of a file."""
        return self._open(number).schema_arrow

    def gather(self, gathered: Sequence[Gathered]) -> int:
        """Reads the columns once; returns the number of rows."""
        for number, path in enumerate(self._paths):
            schema = self.schema(number)
            for g in gathered:
                same = column_of(schema, g.column.path, path)
                check_same(g.column, same, (self._paths[0], path))
            for i in range(self._open(number).num_row_groups):
                where = f"{path}, row group {i}"
                metadata = self._open(number).metadata.row_group(i)
                for g in gathered:
                    if _is_regular(metadata, g.column):
                        g.add_regular(metadata.num_rows)
                    else:
                        g.add(self._read(number, i, g.column), where)
                self._of_group.append((number, i))
                self._first.append(self._rows)
                self._rows += metadata.num_rows
        if self._rows == 0:
            raise UsageError(f"{self._paths[0]} has no rows")
        return self._rows

    def parts(self, gathered: Sequence[Gathered]) -> _native.Source:
        """The native source of the values of these columns."""
        self._columns = [g.column for g in gathered]
        counts = np.diff([*self._first, self._rows])
        group = np.repeat(np.arange(len(counts)), counts)
        return native_source(
            self,
            sizes=np.concatenate([g.rows()[1] for g in gathered]).astype(np.uint64),
            labels=np.zeros(len(gathered) * self._rows, np.int64),
            group=np.concatenate([group + i * len(counts) for i in range(len(gathered))]),
            identity=(
                "parquet",
                [Path(p).name for p in self._paths],
                [(g.column.path, str(g.column)) for g in gathered],
            ),
            stamp=stamp_of(self._opened[number][0] for number in range(len(self._paths))),
        )

    def _open(self, number: int) -> Any:
        if number not in self._opened:
            file = as_file(self._paths[number], self._store)
            self._opened[number] = file, open_parquet(self._paths[number], file)
        return self._opened[number][1]

    def _read(self, number: int, group: int, column: Column) -> Any:
        try:
            return self._open(number).read_row_group(group, columns=[column.path])
        except (IoError, MemoryError):
            raise
        except Exception as error:  # pyarrow's errors have no common base
            where = f"{self._paths[number]}, row group {group}"
            raise _told(self._opened.get(number, ("",))[0], error, where) from None

    def _values(self, field: int, group: int) -> _Unpacked:
        if (found := self._unpacked.get((field, group))) is not None:
            self._unpacked.move_to_end((field, group))
            return found
        if self._pid != os.getpid():
            # Files that were open while the process forked share their place with the parent's.
            self._opened, self._pid = {}, os.getpid()
        number, inside = self._of_group[group]
        column = self._columns[field]
        table = self._read(number, inside, column)
        values = _Unpacked(table.column(column.names[0]), column, f"row group {inside}")
        self._unpacked[field, group] = values
        while len(self._unpacked) > 1 and self._kept < sum(
            unpacked.nbytes for unpacked in self._unpacked.values()
        ):
            self._unpacked.popitem(last=False)
        return values

    def read(self, samples: list[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        with self._lock:
            for sample in sorted(samples):
                field, row = divmod(sample, self._rows)
                group = bisect_right(self._first, row) - 1
                try:
                    answers[sample] = self._values(field, group).value(row - self._first[group])
                except (IoError, MemoryError) as error:
                    answers[sample] = error
                except Exception as error:
                    answers[sample] = CorruptionError(str(error))
        return [answers[s] for s in samples]

    def describe(self, sample: int) -> str:
        row = sample % self._rows
        group = bisect_right(self._first, row) - 1
        number, inside = self._of_group[group]
        return f"{self._paths[number]}, row group {inside}, row {row - self._first[group]}"


def _is_regular(group: Any, column: Column) -> bool:
    """Whether a row group's metadata say that each row has a list of as many numbers, and no null."""
    side = column.sides[0] if len(column.sides) == 1 else None
    if side is None:
        return False
    for chunk in (group.column(i) for i in range(group.num_columns)):
        if chunk.path_in_schema in (f"{column.path}.list.element", f"{column.path}.list.item"):
            told = chunk.statistics
            counted = told is not None and told.has_null_count and told.null_count == 0
            return bool(counted and chunk.num_values == group.num_rows * side)
    return False


def open_parquet(path: str, file: Any) -> Any:
    parquet = _pyarrow("parquet", path)
    import pyarrow

    try:
        # pyarrow takes names that are no UTF-8 as bytes alone.
        opened = pyarrow.OSFile(os.fsencode(file)) if isinstance(file, str) else file
        return parquet.ParquetFile(opened)
    except FileNotFoundError:
        raise IoError(f"{path} does not exist") from None
    except Exception as error:
        if getattr(error, "errno", None) == errno.EMFILE and _more_descriptors():
            return open_parquet(path, file)
        raise _told(file, error, f"{path} cannot be opened as Parquet") from None


def _more_descriptors() -> bool:
    """Raises this process's soft limit to the hard one, if that is more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft < hard


def _told(file: Any, error: Exception, what: str) -> Exception:
    """The object store's own error or the system's, else one that says that the bytes are wrong."""
    if failure := failure_of(file):
        return failure
    if isinstance(error, OSError) and error.errno:
        remedy = ": raise the limit (ulimit -n)" if error.errno == errno.EMFILE else ""
        return IoError(f"{what}: {os.strerror(error.errno)}{remedy}")
    return CorruptionError(f"{what}: {error}")


class ArrowIPC(RecordStore, Composite):
    """Rows of uncompressed Arrow IPC files: images and labels, or with `columns` any columns.

    The bytes lie in the files unchanged, so they are read like those of any record store. Opening reads
    only the metadata of local files. Objects are read once from end to end; of images and labels the
    places are stored for the next time.

    Args:
        files: a list of files, a pattern, or a folder (``*.arrow``); or URLs of objects; or a folder of
            Hugging Face's `datasets`: what ``save_to_disk`` wrote, or one of its cache.
        image: the column: binary, or a struct with a binary field ``bytes`` (Hugging Face).
        label: an integer column; None for 0.
        columns: instead of `image` and `label`, the names of the columns, or by the name of the field
            that of its column, or "all". ``a.b`` is the field ``b`` of the structs of column ``a``.
        schema: the kinds of fields. Those that it does not have follow from the columns' types.
        split: of a folder of `datasets` that has several.
        store: for URLs, an ``obstore.store`` that has them; made from the environment if None.

    Attributes:
        classes: the names of the labels, where files have Hugging Face's description of them; of
            objects only with `columns`.

    Raises:
        UsageError: there is no such column, it is of a type that is not read or of another type in
            another file, a row has no value and its kind no ``fill``, or the file is compressed.
        CorruptionError: a file is damaged, with its path.
        IoError: a file cannot be opened.
    """

    classes: list[str] | None = None

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        image: str = "image",
        label: str | None = "label",
        columns: Names | None = None,
        schema: Mapping[str, Kind] | None = None,
        split: str | None = None,
        store: Any = None,
    ) -> None:
        self._arguments = arguments_of(locals(), but="split")
        _pyarrow("ipc", files)
        found = dataset_files(files, split)
        paths = absolute(shard_paths(files, (".arrow",), store) if found is None else found)
        self._arguments["files"] = paths
        if not _is_pair(image, label, columns, schema):
            assert columns is not None
            self._open_columns(paths, columns, schema, store)
            return
        self.storage = open_storage(paths, store=store)

        def scan() -> _native.RecordTable:
            parts = []
            for number, path in enumerate(paths):
                places, state = _arrow_places(path, image, label, store)
                refuse_replaced(self.storage, number, state)
                parts.append(places)
            file = np.concatenate([np.full(len(p[0]), i, np.uint32) for i, p in enumerate(parts)])
            offset, length, labels = (np.concatenate(c) for c in zip(*parts, strict=True))
            if not len(offset):
                raise UsageError(f"{paths[0]} has no rows")
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
        if label is not None and not is_url(paths[0]):
            self.classes = _classes(paths[0], label)

    def _open_columns(
        self, paths: list[str], names: Names, schema: Mapping[str, Kind] | None, store: Any
    ) -> None:
        gathered: list[Gathered] = []
        counts: list[int] = []
        storage = open_storage(paths, store=store)

        def take(number: int, path: str, table: Any, held: Held) -> None:
            if number == len(counts):
                counts.append(0)
                if number == 0:
                    gathered.extend(gathered_columns(table.schema, names, schema, path))
                    self.classes = classes_of(table.schema, "label")
                for g in gathered:
                    same = column_of(table.schema, g.column.path, path)
                    check_same(g.column, same, (paths[0], path))
            for g in gathered:
                g.add(table, path, counts[number], lambda data: place_of(data, held, path))
            counts[number] += len(table)

        for number, path in enumerate(paths):
            refuse_replaced(storage, number, each_piece(path, store, partial(take, number, path)))
        if sum(counts) == 0:
            raise UsageError(f"{paths[0]} has no rows")

        def parts(read: Sequence[Gathered]) -> _native.Source:
            begin, length = (np.concatenate([g.rows()[i] for g in read]) for i in range(2))
            file = np.tile(np.repeat(np.arange(len(paths), dtype=np.uint32), counts), len(read))
            return PlacedRows(
                "arrow",
                f"columns {[(g.column.path, str(g.column)) for g in read]}",
                storage,
                offset=begin.astype(np.uint64),
                length=length.astype(np.uint64),
                file=file,
            ).native

        compose_columns(self, gathered, sum(counts), parts, pairs=False)


Places = tuple["NDArray[np.uint64]", "NDArray[np.uint64]", "NDArray[np.int64]"]
# (address, bytes, offset in the file) of memory that holds a part of the file
Held = list[tuple[int, int, int]]


def _arrow_places(
    path: str, image: str, label: str | None, store: Any
) -> tuple[Places, tuple[int, int]]:
    """The places of the rows, and the file's state as `each_piece` gives it."""
    parts: list[Places] = []

    def take(table: Any, held: Held) -> None:
        _check_columns(table.schema, image, label, path)
        parts.append(_table_places(table, held, image, label, path))

    state = each_piece(path, store, take)
    offset, length, labels = (np.concatenate(c) for c in zip(*parts, strict=True))
    return (offset, length, labels), state


def each_piece(path: str, store: Any, take: Callable[[Any, Held], None]) -> tuple[int, int]:
    """Calls `take` with every record batch of a file as a table, the first of them empty, and with the
    places of its memory. Returns the file's (size, time or version), of a local one as it is then."""
    import pyarrow

    if is_url(path):
        file: Any = _Watched(path, store)
        pieces = _pieces(path, file)
    else:
        try:
            file = pyarrow.memory_map(os.fsencode(path))
        except FileNotFoundError:
            raise IoError(f"{path} does not exist") from None
        whole = file.read_buffer()
        pieces = (
            (table, [(whole.address, whole.size, 0)])
            for table, _ in _pieces(path, pyarrow.BufferReader(whole))
        )
    with file:
        try:
            for table, held in pieces:
                take(table, held)
            return state_of(file if is_url(path) else path)
        except (pyarrow.ArrowException, OSError) as error:
            raise _told(file, error, f"{path} cannot be read as Arrow IPC") from None


class _Watched(ObjectFile):
    """Records which place of the file each buffer that it returned is of."""

    def __init__(self, url: str, store: Any) -> None:
        super().__init__(url, store)
        self.held: Held = []

    def read(self, size: int | None = -1, /) -> bytes:
        offset = self.tell()
        data = super().read(size)
        self.held.append((np.frombuffer(data, np.uint8).ctypes.data, len(data), offset))
        return data


def _classes(path: str, label: str) -> list[str] | None:
    import pyarrow

    with pyarrow.memory_map(os.fsencode(path)) as file:
        empty, _ = next(_pieces(path, pyarrow.BufferReader(file.read_buffer())))
        return classes_of(empty.schema, label)


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
            offsets.append((ends[:-1] + place_of(data, held, path)).astype(np.uint64))
        lengths.append(np.diff(ends).astype(np.uint64))
    length = np.concatenate(lengths)
    labels = np.zeros(len(length), np.int64)
    if label is not None:
        labels = _integers(table.column(label), path)
    return np.concatenate(offsets), length, labels


def place_of(data: Any, held: Held, path: str) -> int:
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
    return whole_numbers(column.to_numpy(), f"{where}: labels")


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
            raise UsageError(
                f"{path}: column {label!r} is {kind}, not integers: pass label=None, or columns=, "
                "whose numbers and texts are fields"
            )


def _pyarrow(module: str, files: Any) -> Any:
    try:
        import importlib

        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise UsageError(
            f"reading {files} needs the package pyarrow: pip install 'nostall[stores]'"
        ) from None
