"""Texts in files: JSON Lines, columns of Parquet and Arrow, plain text; in pieces of like size."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nostall.errors import CorruptionError, UsageError
from nostall.source._arrow import each_piece, open_parquet
from nostall.source._hugging_face import dataset_files
from nostall.source._object_file import ObjectFile, as_file
from nostall.source._objects import is_url
from nostall.source._records import PathLike, shard_paths

_LINES = (".jsonl", ".ndjson", ".json")
# Endings in small letters: of rows of columns, of plain texts, and of what would be either if it were
# called or packed otherwise.
_ROWS = (*_LINES, *(f"{ending}.gz" for ending in _LINES), ".parquet", ".arrow")
_PLAIN = (".txt", ".txt.gz")
_OTHER = (".jsonlines", ".gz", ".zst", ".bz2", ".xz", ".lz4")
_BLOCK = 1 << 20
_ROWS_AT_ONCE = 4096  # of Parquet that are Python objects
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)  # what a compressed file raises


class Piece(NamedTuple):
    """A part of a file: bytes, or of Parquet row groups, of Arrow batches."""

    path: str
    begin: int
    end: int
    size: int


def text_files(
    files: PathLike | Sequence[PathLike], separator: str | None, store: Any
) -> list[str]:
    """The files of a list, a pattern, a folder, URLs, or a folder of Hugging Face's `datasets`.

    Raises:
        UsageError: there are none; one has an ending that says nothing, and is not said to be a plain
            text by `separator`; or a folder or a pattern has plain texts beside files of columns, or
            files that would be left out.
    """
    listed = dataset_files(files, None)
    if listed is not None:
        return listed
    known = (*_ROWS, *_PLAIN)
    also = (*_OTHER, *(ending.upper() for ending in known))
    paths = shard_paths(files, known, store, also=also)
    first = {_kind_of(path, separator): path for path in reversed(paths)}
    mixed = isinstance(files, (str, os.PathLike)) and len(first) > 1
    if "other" in first and (mixed or separator is None):
        raise UsageError(
            f"{first['other']} does not end as texts that are read do ({', '.join(known)}): separator= "
            'says that files are plain texts ("" if each is one), and a pattern or a list leaves '
            "others out"
        )
    if mixed:
        raise UsageError(
            f"{files} has plain texts ({first['plain']}) beside files of columns ({first['rows']}): "
            "name those of one kind by a pattern, or both by a list"
        )
    return paths


def _kind_of(path: str, separator: str | None) -> str:
    if _ends(path, *_ROWS):
        return "rows"
    said = separator is not None and not _ends(path, *_OTHER)
    return "plain" if said or _ends(path, *_PLAIN) else "other"


def _ends(path: str, *endings: str) -> bool:
    return path.lower().endswith(endings)


def pieces_of(
    paths: Sequence[str], sizes: Sequence[int], separator: str | None, most: int, store: Any
) -> list[Piece]:
    """All files in pieces of `most` bytes, or of what cannot be divided."""
    found: list[Piece] = []
    for path, size in zip(paths, map(int, sizes), strict=True):
        if _ends(path, ".parquet"):
            groups = open_parquet(path, as_file(path, store)).metadata
            counts = [groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)]
            found += _grouped(path, counts, most)
        elif _ends(path, ".arrow") and not is_url(path):
            tables: list[Any] = []
            each_piece(path, store, lambda table, held: tables.append(table))  # noqa: B023
            found += _grouped(path, [table.nbytes for table in tables[1:]], most)
        elif _divided(path, separator):
            begins = range(0, size, most)
            found += [Piece(path, at, min(size, at + most), min(size - at, most)) for at in begins]
        else:
            found.append(Piece(path, 0, 2**62, size))
    return found


def _divided(path: str, separator: str | None) -> bool:
    """Whether a document's beginning is seen from any byte before it."""
    if _ends(path, *_LINES):
        return True
    if _ends(path, ".gz", ".arrow") or not separator:
        return False
    # Of a separator that overlaps itself it depends on where the search begins.
    return not any(separator[:i] == separator[-i:] for i in range(1, len(separator)))


def _grouped(path: str, sizes: Sequence[int], most: int) -> list[Piece]:
    found, begin, total = [], 0, 0
    for number, size in enumerate(sizes):
        total += size
        if total >= most or number + 1 == len(sizes):
            found.append(Piece(path, begin, number + 1, total))
            begin, total = number + 1, 0
    return found


def rows_of_piece(
    piece: Piece, columns: Sequence[str], separator: str | None, store: Any
) -> Iterator[tuple[str, list[Any]]]:
    """(place, values of the columns) of each row; a plain text has one value.

    Raises:
        UsageError: a column is not there.
        CorruptionError: a file is damaged, with its path and place.
    """
    path = piece.path
    if _ends(path, ".parquet"):
        file = open_parquet(path, as_file(path, store))
        _check(columns, file.schema_arrow.names, path)
        for group in range(piece.begin, piece.end):
            begin = 0
            for rows in file.iter_batches(_ROWS_AT_ONCE, [group], list(columns)):
                yield from _of_table(rows, columns, f"{path}, row group {group}", begin)
                begin += rows.num_rows
    elif _ends(path, ".arrow"):
        tables: list[Any] = []
        each_piece(path, store, lambda table, held: tables.append(table))
        _check(columns, tables[0].schema.names, path)
        chosen = itertools.islice(enumerate(tables[1:]), piece.begin, piece.end)
        for number, table in chosen:
            yield from _of_table(table.select(list(columns)), columns, f"{path}, batch {number}")
    elif _ends(path, *_ROWS):
        for place, line in _lines(piece, store):
            if line.strip():
                yield place, _of_line(line, columns, place)
    else:
        try:
            for place, text in _documents(piece, separator, store):
                try:
                    yield place, [text.decode()]
                except UnicodeDecodeError as error:
                    raise CorruptionError(f"{place} is not UTF-8: {error}") from None
        except _DAMAGED as error:
            raise CorruptionError(f"{path}: {error}") from None


def _check(columns: Sequence[str], names: Sequence[str], path: str) -> None:
    for column in columns:
        if column not in names:
            raise UsageError(f"{path} has no column {column!r}; it has: {', '.join(names)}")


def _of_table(
    table: Any, columns: Sequence[str], where: str, begin: int = 0
) -> Iterator[tuple[str, list[Any]]]:
    values = [_values(table.column(column), where) for column in columns]
    for number, row in enumerate(zip(*values, strict=True), begin):
        yield f"{where}, row {number}", list(row)


def _values(column: Any, where: str) -> Sequence[Any]:
    import pyarrow.compute
    from pyarrow import types

    kind = column.type
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not types.is_integer(kind.value_type):
        values: list[Any] = column.to_pylist()
        return values
    flat = pyarrow.compute.list_flatten(column)
    if flat.null_count:
        raise CorruptionError(f"{where}: a list of ids has a null in it")
    lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy()
    # Of no rows np.split makes one.
    return np.split(flat.to_numpy(), np.cumsum(lengths)[:-1])[: len(lengths)]


def _of_line(line: bytes, columns: Sequence[str], place: str) -> list[Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CorruptionError(f"{place} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise CorruptionError(f"{place} is no object of JSON")
    _check(columns, list(row), place)
    return [row[column] for column in columns]


def _opened(path: str, store: Any) -> Any:
    file = (
        io.BufferedReader(ObjectFile(path, store), _BLOCK)
        if is_url(path)
        else open(path, "rb", _BLOCK)  # noqa: SIM115 - closed by the callers
    )
    return gzip.GzipFile(fileobj=file) if _ends(path, ".gz") else file


def _lines(piece: Piece, store: Any) -> Iterator[tuple[str, bytes]]:
    """The lines that begin in a piece."""
    with _opened(piece.path, store) as file:
        at = piece.begin
        if at > 0:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        try:
            while at < piece.end and (line := file.readline()):
                yield f"{piece.path}, byte {at}", line
                at += len(line)
        except _DAMAGED as error:
            raise CorruptionError(f"{piece.path}, byte {at}: {error}") from None


def _documents(piece: Piece, separator: str | None, store: Any) -> Iterator[tuple[str, bytes]]:
    """The plain texts that begin in a piece."""
    with _opened(piece.path, store) as file:
        if not separator:
            yield piece.path, file.read()
            return
        mark = separator.encode()
        first = max(0, piece.begin - len(mark))  # of `data`, in the file
        file.seek(first)
        data, at, searched, inside = b"", 0, 0, piece.begin == 0
        while first + at < piece.end:
            end = data.find(mark, searched)
            if end < 0:
                searched = max(0, len(data) - len(mark) + 1 - at)
                # As much as there is already, so that a long text is not copied again and again.
                if more := file.read(max(_BLOCK, len(data) - at)):
                    first, data, at = first + at, data[at:] + more, 0
                    continue
                if inside and at < len(data):
                    yield f"{piece.path}, byte {first + at}", data[at:]
                return
            if inside:
                yield f"{piece.path}, byte {first + at}", data[at:end]
            at = searched = end + len(mark)
            inside = True
