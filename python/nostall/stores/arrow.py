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
from nostall.stores.callback import CallbackStore
from nostall.stores.objects import is_url
from nostall.stores.records import PathLike, RecordStore, open_storage, shard_paths

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT_BYTES = 256 << 20


class Parquet(CallbackStore):
    """Rows of Parquet files with a column of image bytes.

    A row is not readable alone: its whole row group is unpacked. The last groups are kept unpacked,
    and what else a group holds goes to the tiers while they have room; with a shuffled order and no
    tiers every sample costs its group again, so convert such a data set (`nostall convert`) or give
    it tiers.

    Args:
        files: a list of files, a pattern, or a folder.
        image: the column: binary, or a struct with a binary field ``bytes`` (Hugging Face).
        label: an integer column; None for 0.
        kept: bytes of unpacked groups to keep.

    Raises:
        UsageError: there is no such column, or it is of another type.
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
        self._arguments = {"files": files, "image": image, "label": label, "kept": kept}
        pq = _pyarrow("parquet", files)
        self._paths = [str(Path(p).absolute()) for p in shard_paths(files, (".parquet",))]
        _only_local(self._paths, "Parquet")
        self._column, self._kept = image, kept
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._opened: dict[int, Any] = {}
        self._pid = os.getpid()
        self._of_group: list[tuple[int, int]] = []  # (file, row group in it)
        self._first: list[int] = []  # sample
        sizes: list[NDArray[np.uint64]] = []
        labels: list[NDArray[np.int64]] = []
        group: list[NDArray[np.uint32]] = []
        total = 0
        for number, path in enumerate(self._paths):
            try:
                file = pq.ParquetFile(path)
            except FileNotFoundError:
                raise IoError(f"{path} does not exist") from None
            except Exception as error:
                raise CorruptionError(f"{path} cannot be opened as Parquet: {error}") from None
            _check_column(file.schema_arrow, image, path)
            if label is not None and label not in file.schema_arrow.names:
                raise UsageError(f"{path} has no column {label!r}: pass label=None or its name")
            for i in range(file.num_row_groups):
                try:
                    rows = _binary(file.read_row_group(i, columns=[image]).column(image))
                    sizes.append(_lengths(rows))
                    if label is not None:
                        column = file.read_row_group(i, columns=[label]).column(label)
                        labels.append(column.to_numpy().astype(np.int64))
                except Exception as error:
                    raise CorruptionError(f"{path}, row group {i}: {error}") from None
                group.append(np.full(len(rows), len(self._of_group), np.uint32))
                self._of_group.append((number, i))
                self._first.append(total)
                total += len(rows)
            self._opened[number] = file
        if total == 0:
            raise UsageError(f"{self._paths[0]} has no rows")
        self._group = np.concatenate(group)
        self._serve(
            sizes=np.concatenate(sizes),
            labels=np.concatenate(labels) if labels else np.zeros(total, np.int64),
            group=self._group,
            identity=("parquet", [Path(p).name for p in self._paths], image, label),
        )

    def _unpacked(self, group: int) -> Any:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group][0]
        if self._pid != os.getpid():
            self._opened, self._pid = {}, os.getpid()
        number, inside = self._of_group[group]
        if number not in self._opened:
            self._opened[number] = _pyarrow("parquet", "").ParquetFile(self._paths[number])
        table = self._opened[number].read_row_group(inside, columns=[self._column])
        rows = _binary(table.column(self._column)).combine_chunks()
        self._groups[group] = rows, int(rows.nbytes)
        while len(self._groups) > 1 and sum(n for _, n in self._groups.values()) > self._kept:
            self._groups.popitem(last=False)
        return rows

    def _read(self, samples: list[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        with self._lock:
            for sample in sorted(samples):
                group = int(self._group[sample])
                try:
                    row = self._unpacked(group)[sample - self._first[group]]
                    answers[sample] = np.frombuffer(row.as_buffer() or b"", np.uint8)
                except Exception as error:  # pyarrow's errors have no common base
                    answers[sample] = CorruptionError(str(error))
        return [answers[s] for s in samples]

    def _describe(self, sample: int) -> str:
        group = int(self._group[sample])
        number, inside = self._of_group[group]
        row = sample - self._first[group]
        return f"{self._paths[number]}, row group {inside}, row {row}"


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
        self._arguments = {"files": files, "image": image, "label": label}
        _pyarrow("ipc", files)
        paths = [str(Path(p).absolute()) for p in shard_paths(files, (".arrow",))]
        _only_local(paths, "Arrow IPC")
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
            try:
                table = pa.open_file(pyarrow.BufferReader(whole)).read_all()
            except pyarrow.ArrowInvalid:
                table = pa.open_stream(pyarrow.BufferReader(whole)).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise CorruptionError(f"{path} cannot be read as Arrow IPC: {error}") from None
        _check_column(table.schema, image, path)
        begin, end = whole.address, whole.address + whole.size
        offsets: list[NDArray[np.uint64]] = []
        lengths: list[NDArray[np.uint64]] = []
        for chunk in _binary(table.column(image)).chunks:
            ends = _offsets(chunk)
            data = chunk.buffers()[2]
            if len(chunk) == 0:
                continue
            if data is None:
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
        n = sum(len(x) for x in lengths)
        labels = np.zeros(n, np.int64)
        if label is not None:
            if label not in table.schema.names:
                raise UsageError(f"{path} has no column {label!r}: pass label=None or its name")
            labels = table.column(label).to_numpy().astype(np.int64)
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


def _binary(column: Any) -> Any:
    """The binary values of a column: its own, or those of the field ``bytes`` of its structs."""
    import pyarrow

    if pyarrow.types.is_struct(column.type):
        chunks = [chunk.field("bytes") for chunk in column.chunks]
        return pyarrow.chunked_array(chunks, type=column.type.field("bytes").type)
    return column


def _check_column(schema: Any, name: str, path: str) -> None:
    import pyarrow

    if name not in schema.names:
        raise UsageError(f"{path} has no column {name!r}; it has: {', '.join(schema.names)}")
    kind = schema.field(name).type
    if pyarrow.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if "bytes" not in names:
            raise UsageError(f"{path}: the structs of column {name!r} have no field 'bytes'")
        kind = kind.field("bytes").type
    if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
        raise UsageError(f"{path}: column {name!r} is {kind}, not binary: it has no image bytes")


def _pyarrow(module: str, files: Any) -> Any:
    try:
        import importlib

        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise UsageError(
            f"reading {files} needs the package pyarrow: pip install 'nostall[stores]'"
        ) from None


def _only_local(paths: list[str], what: str) -> None:
    for path in paths:
        if is_url(path):
            raise UsageError(f"{what} is read from files, not from {path}: copy or convert it")
