"""Columns of Arrow as fields: which kind each is, and where the value of every row lies."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall.errors import UsageError
from nostall.fields import Array, Audio, Boxes, Bytes, Image, Keypoints, Kind, Scalar, Text
from nostall.source._composite import NO_PART, Composite, make_column
from nostall.source._source import Pixels, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall import _native

#: The names of columns, those of fields with their columns, or all.
Names = Mapping[str, str] | Sequence[str] | Literal["all"]

_ENCODED: tuple[tuple[bytes, int, bytes, Kind], ...] = (
    (b"\xff\xd8\xff", 0, b"", Image()),
    (b"\x89PNG\r\n\x1a\n", 0, b"", Image()),
    (b"RIFF", 8, b"WEBP", Image()),
    (b"II*\0", 0, b"", Image()),
    (b"MM\0*", 0, b"", Image()),
    (b"BM", 6, bytes(4), Image()),
    (b"RIFF", 8, b"WAVE", Audio()),
    (b"fLaC", 0, b"", Audio()),
)


def kind_of_bytes(value: bytes) -> Kind:
    """What a value of a column of bytes is by its first bytes: an image, sound, or anything."""
    for start, at, mark, kind in _ENCODED:
        if value.startswith(start) and value[at : at + len(mark)] == mark:
            return kind
    return Bytes()


def chosen_columns(names: Names, every: Callable[[], list[str]]) -> dict[str, str]:
    """The column of every field; `every` names all columns.

    Raises:
        UsageError: there is none.
    """
    if isinstance(names, Mapping):
        chosen = dict(names)
    elif isinstance(names, str):
        if names != "all":
            raise UsageError(f'columns must be "all", names, or {{field: column}}, not {names!r}')
        chosen = {name: name for name in every()}
    else:
        chosen = {name: name for name in names}
    if not chosen:
        raise UsageError("columns must name at least one column")
    return chosen


def check_fields(schema: Mapping[str, Kind] | None, fields: Iterable[str]) -> dict[str, Kind]:
    """The given kinds.

    Raises:
        UsageError: one of them is of a field that there is not.
    """
    given, known = dict(schema or {}), list(fields)
    if unknown := given.keys() - set(known):
        raise UsageError(
            f"schema names the field {min(unknown)}, which is none of {', '.join(known)}"
        )
    return given


def fitting(given: Kind, dtype: str, shape: tuple[int | None, ...]) -> Kind | None:
    """`given` for arrays whose numbers lie in the file as they are; None if they are not of it."""
    if not isinstance(given, (Array, Boxes, Keypoints)) or given.dtype != dtype:
        return None
    pairs = itertools.zip_longest(given._dimensions(), shape, fillvalue=-1)
    if not all(w is None or s is None or w == s for w, s in pairs):
        return None
    return dataclasses.replace(given, codec="raw")


def pixels_of(shape: tuple[int | None, ...], dtype: Any) -> Pixels | None:
    """How samples of this shape are pixels; None if they are none."""
    if dtype != np.uint8 or len(shape) not in (2, 3) or None in shape:
        return None
    height, width, channels = (int(side or 0) for side in (*shape, 1)[:3])
    if channels in (1, 3):
        return Pixels(height, width, channels)
    if height in (1, 3):
        return Pixels(width, channels, height, layout="chw")
    return None


def array_kind(
    source: Source,
    field: str,
    dtype: Any,
    shape: tuple[int | None, ...],
    given: Kind | None,
    where: str,
) -> Kind:
    """The kind of a field whose numbers lie in the file as they are; pixels can be an image, of which
    `source` is told.

    Raises:
        UsageError: they are no numbers, or not of the given kind.
    """
    if dtype.kind not in "iufb" or dtype.itemsize > 8 or not dtype.isnative:
        raise UsageError(f"{where}: elements of type {dtype} are no field: write it as numbers")
    if given is None:
        return Array(dtype=dtype.name, shape=shape, codec="raw")
    if isinstance(given, Image) and (pixels := pixels_of(shape, dtype)) is not None:
        if source.pixels not in (None, pixels):
            raise UsageError(f"{where}: its pixels are not of the shape of another image's")
        source.pixels = pixels
        return given
    if (kind := fitting(given, dtype.name, shape)) is None:
        raise UsageError(
            f"{where} is {dtype.name} of shape {shape}, which field {field} is not: {given!r}"
        )
    return kind


def as_texts(values: NDArray[Any], where: str) -> Any:
    """Texts of an array that has them as NumPy keeps them; other arrays as they are.

    Raises:
        UsageError: one is not UTF-8.
    """
    if values.dtype.kind not in "SU":
        return values
    try:
        return [v.decode() if isinstance(v, bytes) else v for v in values.tolist()]
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: {error.object!r} is not UTF-8") from None


def _paths(name: str, kind: Any) -> list[str]:
    import pyarrow

    kind = _stored(kind)
    if not pyarrow.types.is_struct(kind) or _is_file(kind):
        return [name]
    parts = (kind.field(i) for i in range(kind.num_fields))
    return [path for part in parts for path in _paths(f"{name}.{part.name}", part.type)]


def _stored(kind: Any) -> Any:
    """The type that an extension type is stored as."""
    while hasattr(kind, "storage_type"):
        kind = kind.storage_type
    return kind


def _is_file(kind: Any) -> bool:
    """Whether it is what Hugging Face's images and sounds are: a struct of bytes and a path."""
    names = {kind.field(i).name for i in range(kind.num_fields)}
    return "bytes" in names and names <= {"bytes", "path"}


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of numbers, of lists of them, of texts or of bytes, at the end of a path of structs.

    Attributes:
        names: of the column, and of the fields of structs on the way to its values.
        leaf: the type of its values, or of the numbers in its lists.
        sides: one for each level of lists, None where lengths differ from row to row.
    """

    names: tuple[str, ...]
    leaf: Any
    sides: tuple[int | None, ...]

    @property
    def path(self) -> str:
        return ".".join(self.names)

    @property
    def is_number(self) -> bool:
        return not self.sides and _is_numeric(self.leaf)

    @property
    def dtype(self) -> str:
        return str(np.dtype(self.leaf.to_pandas_dtype()).name)

    def __str__(self) -> str:
        lists = "".join(f"[{'' if side is None else side}]" for side in self.sides)
        return f"{self.leaf}{lists}"


def column_of(schema: Any, path: str, where: str) -> Column:
    """The column at `path`, dots between the names of structs and of their fields.

    Raises:
        UsageError: there is no such column, or one of a type that is not read.
    """
    import pyarrow

    parts = path.split(".")
    tops = (i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in schema.names)
    top = next(tops, 0)
    if top == 0:
        raise UsageError(f"{where} has no column {path!r}; it has: {', '.join(schema.names)}")
    names = [".".join(parts[:top]), *parts[top:]]
    kind = _stored(schema.field(names[0]).type)
    for name in names[1:]:
        fields = (
            [kind.field(i).name for i in range(kind.num_fields)]
            if pyarrow.types.is_struct(kind)
            else []
        )
        if name not in fields:
            has = f"it has: {', '.join(fields)}" if fields else f"it is {kind}"
            raise UsageError(f"{where}: the column of {path!r} has no field {name!r}; {has}")
        kind = _stored(kind.field(name).type)
    if pyarrow.types.is_struct(kind) and _is_file(kind):
        names.append("bytes")
        kind = kind.field("bytes").type
    whole, sides = kind, []
    while _is_list(kind):
        fixed = pyarrow.types.is_fixed_size_list(kind)
        sides.append(kind.list_size if fixed else None)
        kind = _stored(kind.value_type)
    numeric = _is_numeric(kind)
    good = numeric or (not sides and _is_bytes(kind))
    if not good or (sides and pyarrow.types.is_boolean(kind)):
        raise UsageError(
            f"{where}: column {path!r} is {whole}: numbers, lists of numbers, texts, bytes and structs "
            "of them are read; name other columns, or write it as one of these"
        )
    return Column(tuple(names), kind, tuple(sides))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_numeric(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_bytes(kind: Any) -> bool:
    from pyarrow import types

    return bool(_is_variable(kind) or types.is_fixed_size_binary(kind))


def _is_variable(kind: Any) -> bool:
    from pyarrow import types

    narrow = types.is_binary(kind) or types.is_string(kind)
    return bool(narrow or types.is_large_binary(kind) or types.is_large_string(kind))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def check_same(first: Column, other: Column, paths: tuple[str, str]) -> None:
    """Refuses a column that is of another type in another file.

    Raises:
        UsageError: it is.
    """
    if (first.leaf, first.sides) != (other.leaf, other.sides):
        raise UsageError(
            f"{paths[1]}: column {other.path!r} is {other}, in {paths[0]} it is {first}: all files "
            "need the same types"
        )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the values of some rows lie: bytes of `data`, an Arrow buffer, if there are any.

    Attributes:
        begin, length: of each row, in bytes; a row without a value has no length.
        missing: which rows have no value.
        sides: as of `Column`, where the rows of this chunk have them; -1 where there are none.
    """

    data: Any
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    missing: NDArray[np.bool_]
    sides: tuple[int | None, ...]


def rows_of(node: Any, column: Column, where: str) -> Rows:
    """The rows of one chunk, as `leaf_of` gives it; its bytes are not copied.

    Raises:
        UsageError: a list has a null in it, or lists in lists have different lengths.
    """
    missing = np.asarray(node.is_null().to_numpy(zero_copy_only=False), bool)
    begin = np.arange(len(node), dtype=np.int64)
    end = begin + 1
    sides: list[int | None] = []
    while _is_list(node.type):
        if sides:
            _refuse_nulls(node, begin, end, missing, column, where)
        if hasattr(node.type, "list_size"):
            side: int | None = node.type.list_size
            begin, end = ((x + node.offset) * node.type.list_size for x in (begin, end))
        else:
            ends = _ends(node)
            side = _inner_side(ends, begin, end, missing, column, where) if sides else None
            begin, end = ends[begin], ends[end]
        sides.append(side)
        node = _storage(node.values)
    if sides:
        _refuse_nulls(node, begin, end, missing, column, where)
    if _is_variable(node.type):
        ends = _ends(node)
        begin, end, data = ends[begin], ends[end], node.buffers()[2]
    else:
        size = node.type.bit_width // 8
        begin, end = ((x + node.offset) * size for x in (begin, end))
        data = node.buffers()[1]
    return Rows(data, begin, np.where(missing, 0, end - begin), missing, tuple(sides))


def leaf_of(array: Any, column: Column) -> Any:
    """The column's own values in a chunk of the top column."""
    array = _storage(array)
    for name in column.names[1:]:
        kinds = array.type
        place = next(i for i in range(kinds.num_fields) if kinds.field(i).name == name)
        array = _storage(array.flatten()[place])  # missing where its struct is
    return array


def _storage(array: Any) -> Any:
    while hasattr(array.type, "storage_type"):
        array = array.storage
    return array


def _ends(array: Any) -> NDArray[np.int64]:
    """Ends of the values of a list or binary array, shape (n + 1,), in its values or data."""
    from pyarrow import types

    kind = array.type
    large = types.is_large_list(kind) or types.is_large_binary(kind) or types.is_large_string(kind)
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array) + 1, np.int64)
    ends = np.frombuffer(buffer, np.int64 if large else np.int32)
    return ends[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _inner_side(
    ends: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    missing: NDArray[np.bool_],
    column: Column,
    where: str,
) -> int:
    """The one length of the lists that lie in the lists of all rows; -1 if there are none."""
    lengths = np.diff(ends)
    used = np.zeros(len(lengths) + 1, np.int64)
    np.add.at(used, begin[~missing], 1)
    np.add.at(used, end[~missing], -1)
    found = np.unique(lengths[np.cumsum(used)[:-1] > 0])
    if len(found) > 1:
        raise UsageError(
            f"{where}: column {column.path!r} has lists of {found[0]} and of {found[1]} inside its "
            "lists: such a value is no array"
        )
    return int(found[0]) if len(found) else -1


def _refuse_nulls(
    node: Any,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    missing: NDArray[np.bool_],
    column: Column,
    where: str,
) -> None:
    if not node.null_count or not len(node):
        return
    nulls = np.concatenate([[0], np.cumsum(node.is_null().to_numpy(zero_copy_only=False))])
    bad = (nulls[end] > nulls[begin]) & ~missing
    if bad.any():
        raise UsageError(
            f"{where}, row {int(np.argmax(bad))}: a list of column {column.path!r} has a null in it, "
            "which is no number"
        )


def merge_sides(
    first: tuple[int | None, ...], other: tuple[int | None, ...], column: Column, where: str
) -> tuple[int | None, ...]:
    """The sides of two chunks together.

    Raises:
        UsageError: they contradict each other.
    """
    merged = tuple(b if a == -1 else a for a, b in zip(first, other, strict=True))
    if any(b not in (a, -1) for a, b in zip(merged, other, strict=True)):
        raise UsageError(
            f"{where}: column {column.path!r} has lists of {_product(merged)} before, and of "
            f"{_product(other)} here, inside its lists: such values are no array"
        )
    return merged


def _product(sides: tuple[int | None, ...]) -> str:
    return " x ".join(str(side) for side in sides[1:])


def kind_for(
    field: str,
    column: Column,
    sides: tuple[int | None, ...],
    first: bytes,
    given: Kind | None,
    where: str,
) -> Kind:
    """The kind of a field: the given one, if the column can be it, else the one that follows from the
    column's type, and for bytes from the first value.

    Raises:
        UsageError: the column cannot be of the given kind.
    """
    if column.is_number:
        if given is None or isinstance(given, Scalar):
            return given or Scalar(dtype=column.dtype)
    elif column.sides:
        shape = tuple(None if side == -1 else side for side in sides)
        if given is None:
            return Array(dtype=column.dtype, shape=shape, codec="raw")
        if (kind := fitting(given, column.dtype, shape)) is not None:
            return kind
    elif given is None:
        return Text() if _is_text(column.leaf) else kind_of_bytes(first)
    elif isinstance(given, (Text, Bytes)) or not _is_text(column.leaf):
        return given
    raise UsageError(
        f"{where}: column {column.path!r} is {column}, which field {field} is not: {given!r}"
    )


def gathered_columns(
    schema: Any, names: Names, kinds: Mapping[str, Kind] | None, where: str
) -> list[Gathered]:
    """The chosen columns of the first file, of which no rows are known yet.

    Raises:
        UsageError: a column is not there or not read, or `kinds` names a field that is none.
    """
    chosen = chosen_columns(
        names, lambda: [path for part in schema for path in _paths(part.name, part.type)]
    )
    given = check_fields(kinds, chosen)
    return [
        Gathered(field, column_of(schema, path, where), given.get(field), where)
        for field, path in chosen.items()
    ]


def classes_of(schema: Any, path: str) -> list[str] | None:
    """The names of classes that Hugging Face's metadata say of a column; None if they say none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[path]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names]


class Gathered:
    """What is known of the rows of one column of several files; `given` is its kind, if stated."""

    def __init__(self, field: str, column: Column, given: Kind | None, where: str) -> None:
        self.field, self.column = field, column
        self._given, self._where = given, where
        self._sides: tuple[int | None, ...] = tuple(-1 for _ in column.sides)
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = []
        self._numbers: list[Any] = []
        self._first: bytes | None = None

    def add(
        self, table: Any, where: str, row: int = 0, place: Callable[[Any], int] = lambda data: 0
    ) -> None:
        """Takes the column of a table, whose first row is number `row` there; `place` is where in the
        file a buffer lies.

        Raises:
            UsageError: its values are no array, or one is missing and its kind has no ``fill``.
        """
        for chunk in table.column(self.column.names[0]).chunks:
            leaf = leaf_of(chunk, self.column)
            if leaf.null_count and (self._given is None or self._given.fill is None):
                self._refuse(row + leaf.is_null().index(True).as_py(), where)
            row += len(leaf)
            if self.column.is_number:
                self._numbers.append(leaf)
            else:
                self._take(rows_of(leaf, self.column, where), where, place)

    def add_regular(self, rows: int) -> None:
        """Takes rows that have a list of as many numbers each, of which nothing else is needed."""
        assert self.column.sides[0] is not None
        length = self.column.sides[0] * self.column.leaf.bit_width // 8
        self._sides = self.column.sides
        self._parts.append(
            (np.arange(rows) * length, np.full(rows, length, np.int64), np.zeros(rows, bool))
        )

    def _refuse(self, row: int, where: str) -> None:
        what = self.field
        if self.column.names[-1] == "bytes" or _is_bytes(self.column.leaf):
            what += " bytes (only a path, or nothing)"
        raise UsageError(
            f"{where}, row {row} has no {what}: write the data set again with it, or give the schema's "
            "field a fill="
        )

    def _take(self, rows: Rows, where: str, place: Callable[[Any], int]) -> None:
        self._sides = merge_sides(self._sides, rows.sides, self.column, where)
        begin = np.zeros(len(rows.begin), np.int64)
        if rows.length.any():
            begin = np.where(rows.length > 0, rows.begin + place(rows.data), 0)
            if self._first is None:
                at = int(np.argmax(rows.length > 0))
                value = rows.data.slice(int(rows.begin[at]), min(16, int(rows.length[at])))
                self._first = value.to_pybytes()
        self._parts.append((begin, rows.length, rows.missing))

    @property
    def kind(self) -> Kind:
        """See `kind_for`."""
        first = self._first or b""
        return kind_for(self.field, self.column, self._sides, first, self._given, self._where)

    def values(self) -> Any:
        """The numbers of all rows: an array, or if some are missing a list."""
        import pyarrow

        numbers = pyarrow.chunked_array(self._numbers, self.column.leaf)
        return numbers.to_pylist() if numbers.null_count else numbers.to_numpy()

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Begin, length and whether it is missing of the value of every row."""
        begin, length, missing = zip(*self._parts, strict=True)
        return np.concatenate(begin), np.concatenate(length), np.concatenate(missing)


def compose_columns(
    source: Composite,
    gathered: Sequence[Gathered],
    rows: int,
    parts: Callable[[Sequence[Gathered]], _native.Source],
    pairs: bool,
) -> None:
    """Makes a source of columns: numbers in memory, the rest as parts, those of field i after all of
    field i - 1.

    Raises:
        UsageError: a kind does not fit its column.
    """
    kinds = {g.field: g.kind for g in gathered}
    read = [g for g in gathered if not g.column.is_number]
    columns = {
        g.field: make_column(g.field, g.values(), g.kind) for g in gathered if g.column.is_number
    }
    if pairs and "label" not in kinds:
        columns["label"] = make_column("label", np.zeros(rows, np.int64))
    part_of = np.arange(len(read) * rows, dtype=np.int64).reshape(len(read), rows).T
    if read:
        part_of = np.where(np.stack([g.rows()[2] for g in read], 1), NO_PART, part_of)
    source._compose(
        parts(read) if read else None,
        part_of,
        {g.field: kinds[g.field] for g in read},
        columns,
        rows,
        pairs=pairs,
    )
