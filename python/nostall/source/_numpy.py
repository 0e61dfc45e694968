"""Arrays of NumPy: files, memory maps, or in memory; row i of each is a field of sample i."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never

import numpy as np
from numpy.lib import format as npy_format

from nostall.base._paths import path_of
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.fields import Array, Image, Kind
from nostall.source._columns import array_kind, as_texts, check_fields
from nostall.source._composite import Composite, make_column
from nostall.source._records import PathLike, PlacedRows, open_storage, replaced

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall import _native

_UNNAMED = 'Arrays takes arrays by the names of their fields: Arrays({"x": x, "y": y})'


class Arrays(Composite):
    """Samples whose fields are rows of arrays: row i of each is a field of sample i.

    Rows of files and of memory maps are read from the file when they are needed, as any record;
    numbers and texts of shape (n,), and arrays that are no map of a file, are held in memory.

    Args:
        arrays: by the name of the field, in a mapping or a data frame, the path of a ``.npy`` file, a
            memory map, an array, or a sequence of values; or the path of a ``.npz`` file (as
            ``numpy.savez`` writes it, without compression), or of a ``.npy`` file with a structured
            array, or such an array: their names are those of the fields.
        schema: the kinds of fields. Those that it does not have follow from the arrays' types.
            ``Image()`` takes uint8 of shape (n, h, w, 1 or 3), or (n, 1 or 3, h, w), as pixels.

    Raises:
        UsageError: arrays differ in length, one is of a type or in an order that is not read, or does
            not fit its kind; or the ``.npz`` file is compressed.
        CorruptionError: a file is damaged, with its path.
        IoError: a file cannot be opened.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any] | NDArray[Any] | PathLike,
        *more: Never,
        schema: Mapping[str, Kind] | None = None,
    ) -> None:
        if more:
            raise UsageError(_UNNAMED)
        named = _named(arrays)
        self._arguments = {
            "arrays": {name: _storable(values) for name, values in named.items()},
            "schema": schema,
        }
        given = check_fields(schema, named)
        lengths = {name: _rows(name, values) for name, values in named.items()}
        if not lengths or len(set(lengths.values())) > 1 or not max(lengths.values()):
            told = ", ".join(f"{name} has {n}" for name, n in lengths.items()) or "there are none"
            raise UsageError(f"arrays need one row for each sample: {told}")
        rows = next(iter(lengths.values()))
        kinds: dict[str, Kind] = {}
        columns: dict[str, tuple[Kind, _native.Column]] = {}
        mapped: list[tuple[_Map, NDArray[Any]]] = []
        for name, values in named.items():
            where = _where(name, values)
            if not isinstance(values, np.ndarray) or values.ndim < 2:
                listed = as_texts(values, where) if isinstance(values, np.ndarray) else values
                columns[name] = make_column(name, listed, given.get(name))
                continue
            shape = tuple(values.shape[1:])
            kind = array_kind(self, name, values.dtype, shape, given.get(name), where)
            place = _map_of(values)
            if values.size and place is not None and _whole_rows(values):
                kinds[name] = kind
                mapped.append((place, values))
                continue
            stored = kind
            if isinstance(kind, Image):
                stored = Array(dtype="uint8", shape=shape, codec="raw")
            columns[name] = kind, make_column(name, values, stored)[1]
        part_of = np.arange(len(mapped) * rows).reshape(len(mapped), rows).T
        self._compose(_parts(mapped) if mapped else None, part_of, kinds, columns, rows)


class _Map(NamedTuple):
    """A view of an array in a file."""

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self) -> NDArray[Any]:
        """The view again."""
        return _view(self.path, self.offset, self.dtype, self.shape, strides=self.strides)


def _view(
    path: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], **order: Any
) -> NDArray[Any]:
    try:
        whole = np.memmap(path, np.uint8, "r")
        return np.ndarray(shape, dtype, whole, offset, **order)
    except (OSError, ValueError) as error:
        raise IoError(f"cannot map {path}: {error}") from None
    except TypeError:
        raise CorruptionError(f"{path} ends before its array of shape {shape} does") from None


def _parts(mapped: list[tuple[_Map, NDArray[Any]]]) -> _native.Source:
    maps = [m for m, _ in mapped]
    paths = list(dict.fromkeys(m.path for m in maps))
    files = [paths.index(m.path) for m in maps]
    count = [m.shape[0] for m in maps]
    length = [int(np.prod(m.shape[1:], dtype=np.int64)) * m.dtype.itemsize for m in maps]
    storage = open_storage(paths)
    # A map keeps the file that it was made of, whatever has the name now.
    for file, size, (m, array) in zip(files, length, mapped, strict=True):
        for row in (0, m.shape[0] - 1):
            if storage.read(file, m.offset + row * m.strides[0], size) != array[row].tobytes():
                raise replaced(m.path)
    return PlacedRows(
        "numpy",
        str([(m.dtype.str, m.shape) for m in maps]),
        storage,
        offset=np.concatenate(
            [m.offset + np.arange(n) * m.strides[0] for m, n in zip(maps, count, strict=True)]
        ).astype(np.uint64),
        length=np.repeat(length, count).astype(np.uint64),
        file=np.repeat(files, count).astype(np.uint32),
    ).native


def _named(arrays: Any) -> dict[str, Any]:
    """The arrays by the names of their fields, files as memory maps."""
    if isinstance(arrays, (str, os.PathLike)):
        path = path_of(arrays)
        if zipfile.is_zipfile(path):
            return _members(path)
        arrays = _mapped(path)
    if isinstance(arrays, np.ndarray):
        if not arrays.dtype.names:
            raise UsageError(_UNNAMED)
        return _structured(arrays, "")
    if not hasattr(arrays, "items"):  # data frames and groups of HDF5 have it, and are no Mapping
        raise UsageError(_UNNAMED)
    opened: dict[str, Any] = {}
    for name, values in arrays.items():
        if isinstance(values, (str, os.PathLike)):
            values = _mapped(path_of(values))
        elif isinstance(values, _Map):
            values = values.open()
        if isinstance(values, np.ndarray) and values.dtype.names:
            opened |= _structured(values, f"{name}.")
        else:
            opened[name] = values
    return opened


def _structured(array: NDArray[Any], prefix: str) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name in array.dtype.names or ():
        part = array[name]
        found |= (
            _structured(part, f"{prefix}{name}.") if part.dtype.names else {prefix + name: part}
        )
    return found


def _mapped(path: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise IoError(f"{path} does not exist") from None
    except (OSError, ValueError, EOFError) as error:
        raise CorruptionError(f"{path} cannot be read as .npy: {error}") from None
    return array


def _members(path: str) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz file, as memory maps."""
    found: dict[str, NDArray[Any]] = {}
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise CorruptionError(f"{path} cannot be read as .npz: {error}") from None
    with archive, open(path, "rb") as file:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.compress_type != zipfile.ZIP_STORED:
                raise UsageError(
                    f"{path} is compressed: its arrays cannot be read row by row; write it by "
                    "numpy.savez"
                )
            try:
                file.seek(member.header_offset + 26)
                sizes = np.frombuffer(file.read(4), "<u2").sum(dtype=np.int64)
                file.seek(member.header_offset + 30 + int(sizes))
                version = npy_format.read_magic(file)
                read = (
                    npy_format.read_array_header_1_0
                    if version == (1, 0)
                    else npy_format.read_array_header_2_0
                )
                shape, fortran, dtype = read(file)
            except ValueError as error:
                raise CorruptionError(f"{path}, array {name}: {error}") from None
            if dtype.hasobject:
                raise UsageError(f"{path}, array {name}: pickled objects are not read")
            order = "F" if fortran else "C"
            found[name] = _view(path, file.tell(), dtype, shape, order=order)
    return found


def _map_of(array: NDArray[Any]) -> _Map | None:
    """Where the array lies in a file; None if it is no unchanged map of one."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    path = getattr(root, "filename", None)
    if not isinstance(root, np.memmap) or path is None or root.mode == "c":
        return None
    offset = (
        root.offset + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    )
    return _Map(str(Path(path).absolute()), offset, array.dtype, array.shape, array.strides)


def _storable(values: Any) -> Any:
    """The values for a pickle: of a memory map its place."""
    return (_map_of(values) or values) if isinstance(values, np.ndarray) else values


def _whole_rows(array: NDArray[Any]) -> bool:
    """Whether the numbers of each row lie together, in the order of C."""
    return bool(array[:1].flags.c_contiguous and array.strides[0] >= 0)


def _rows(name: str, values: Any) -> int:
    try:
        return len(values)
    except TypeError:
        raise UsageError(
            f"{_where(name, values)} is one value: a field has one for each sample"
        ) from None


def _where(name: str, values: Any) -> str:
    place = _map_of(values) if isinstance(values, np.ndarray) else None
    return f"array {name}" if place is None else f"{place.path}, array {name}"
