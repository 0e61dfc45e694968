"""Columns of ids in Arrow files: where the ids of each batch of rows lie, and its documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nostall.errors import UsageError
from nostall.source._arrow import Held, each_piece, place_of
from nostall.source._columns import Column, column_of, leaf_of, rows_of
from nostall.source._records import refuse_replaced

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall import _native


class Extent(NamedTuple):
    """Ids that lie one after the other in a file.

    Attributes:
        file: its number.
        offset: of the first id, in bytes.
        tokens: how many there are.
        begins: the first token of every document among them; None if nothing divides them.
    """

    file: int
    offset: int
    tokens: int
    begins: NDArray[np.uint64] | None


def column_extents(
    storage: _native.Storage, paths: Sequence[str], name: str, store: Any
) -> tuple[str, list[Extent]]:
    """(type of the ids, extents) of a column of lists of whole numbers; a row is a document. `storage`
    has the files of these paths.

    Raises:
        UsageError: there is no such column, or it is compressed.
        CorruptionError: a file is damaged, with its path.
        IoError: a file is another than that of the storage.
    """
    types: dict[str, str] = {}
    found: list[Extent] = []

    def take(number: int, path: str, table: Any, held: Held) -> None:
        column = column_of(table.schema, name, path)
        if column.is_number or len(column.sides) != 1:
            raise UsageError(f"{path}: column {name!r} is {column}, no list of ids a row")
        types.setdefault(column.dtype, path)
        if len(types) > 1:
            (one, first), (other, second) = types.items()
            raise UsageError(
                f"column {name!r} is {one} in {first}, {other} in {second}: open files of different "
                "types apart"
            )
        for chunk in table.column(column.names[0]).chunks:
            if len(chunk):
                found.extend(_extents_of(number, path, chunk, column, held))

    for number, path in enumerate(paths):
        refuse_replaced(storage, number, each_piece(path, store, partial(take, number, path)))
    return next(iter(types)), found


def _extents_of(file: int, path: str, chunk: Any, column: Column, held: Held) -> list[Extent]:
    rows = rows_of(leaf_of(chunk, column), column, path)
    width = np.dtype(column.dtype).itemsize
    tokens = rows.length // width
    if not tokens.any():
        return [Extent(file, 0, 0, np.zeros(len(tokens), np.uint64))]
    # A row that is missing has no ids; those of the others may not follow each other.
    full = np.flatnonzero(tokens)
    ends = rows.begin[full] + rows.length[full]
    breaks = full[1:][rows.begin[full][1:] != ends[:-1]]
    base = place_of(rows.data, held, path)
    extents = []
    for first, last in zip([0, *breaks], [*breaks, len(tokens)], strict=True):
        part = tokens[first:last]
        offset = base + int(rows.begin[first:last][np.argmax(part > 0)])
        begins = np.cumsum(part) - part
        extents.append(Extent(file, offset, int(part.sum()), begins.astype(np.uint64)))
    return extents
