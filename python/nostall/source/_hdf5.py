"""HDF5 datasets, one sample, or one field of it, per first index."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native
from nostall.base._paths import path_of
from nostall.errors import CorruptionError, Error, IoError, UsageError
from nostall.fields import Bytes, Kind, Text
from nostall.source._columns import (
    Names,
    array_kind,
    as_texts,
    check_fields,
    chosen_columns,
    kind_of_bytes,
    pixels_of,
)
from nostall.source._composite import Composite, make_column
from nostall.source._custom import SampleReader, native_source
from nostall.source._object_file import as_file, failure_of, stamp_of, state_of
from nostall.source._objects import is_url
from nostall.source._records import PathLike, PlacedRows, absolute, open_storage, refuse_replaced
from nostall.source._source import arguments_of, whole_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS_AT_ONCE = 256


class HDF5(Composite):
    """Samples of an HDF5 dataset: ``HDF5(path, "images", labels="labels")``; or, with `columns`, of
    several: row i of each is a field of sample i.

    Where the bytes of a sample lie together in the file (contiguous, or chunks of whole samples
    without filters), they are read straight from there, like those of any record store. Compressed
    chunks and samples of different lengths are read through the HDF5 library, which allows one call at
    a time. That gives fewer samples per second, so use tiers.

    Args:
        path: the file, or the URL of an object.
        dataset: its name; shape (n, ...) of numbers, or (n,) of variable-length bytes.
        labels: name of the labels' dataset, shape (n,), or a sequence; 0 for all if None.
        columns: instead of `dataset` and `labels`, the names of the datasets, or by the name of the
            field that of its dataset, or "all". Numbers and texts of shape (n,) are held in memory.
        schema: the kinds of fields. Those that it does not have follow from the datasets' types.
            ``Image()`` takes uint8 of shape (n, h, w, 1 or 3), or (n, 1 or 3, h, w), as pixels.
        store: for a URL, an ``obstore.store`` that has it; made from the environment if None.

    Attributes:
        pixel_shape, dtype: of one sample of `dataset`.
        pixels: set where a sample is uint8 of shape (h, w), (h, w, 1 or 3) or (1 or 3, h, w): native
            transforms take such samples as images, RGB.
        through_library: whether the HDF5 library reads samples, or some of their fields.

    Raises:
        UsageError: no such dataset, an unsupported kind, datasets of different lengths, or a filter
            that is not installed.
        CorruptionError: the file is damaged.
        IoError: it cannot be opened.
    """

    pixel_shape: tuple[int, ...] = ()
    dtype: Any = None

    def __init__(
        self,
        path: PathLike,
        dataset: str | None = None,
        *,
        labels: str | Sequence[int] | NDArray[Any] | None = None,
        columns: Names | None = None,
        schema: Mapping[str, Kind] | None = None,
        store: Any = None,
    ) -> None:
        self._arguments = arguments_of(locals())
        self._arguments["path"] = path = absolute([path_of(path)])[0]
        if (dataset is None) == (columns is None) or (columns is not None and labels is not None):
            raise UsageError("HDF5 needs either a dataset, and perhaps labels=, or columns=")
        if schema is not None and columns is None:
            raise UsageError("schema= says the kinds of fields, which columns= names")
        opened = _open(path, store)
        with opened as file:
            if columns is not None:
                self._open_columns(opened, path, columns, schema, store)
                return
            assert dataset is not None
            data = _dataset(file, path, dataset)
            self.pixel_shape, self.dtype = tuple(data.shape[1:]), data.dtype
            label = _labels(file, path, labels, len(data))
            self.pixels = pixels_of(self.pixel_shape, self.dtype)
            self.native, self.through_library = _native_of(opened, data, path, store, label)

    def _open_columns(
        self,
        opened: _Opened,
        path: str,
        names: Names,
        schema: Mapping[str, Kind] | None,
        store: Any,
    ) -> None:
        file = opened.file
        chosen = chosen_columns(names, lambda: _all_datasets(file))
        given = check_fields(schema, chosen)
        data = {field: _dataset(file, path, name) for field, name in chosen.items()}
        lengths = {chosen[field]: len(values) for field, values in data.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise UsageError(f"{path}: datasets need one row for each sample: {told}")
        rows = len(next(iter(data.values())))
        kinds: dict[str, Kind] = {}
        columns = {}
        sources = []
        self.through_library = False
        for field, values in data.items():
            where = f"{path}, dataset {chosen[field]}"
            if values.ndim == 1 and not _is_variable(values):
                columns[field] = make_column(field, _in_memory(values, where), given.get(field))
                continue
            kinds[field] = self._kind(field, values, given.get(field), where)
            labels = np.zeros(rows, np.int64)
            native, library = _native_of(opened, values, path, store, labels)
            if field not in given and kinds[field] == Bytes():
                kinds[field] = kind_of_bytes(native.read(int(np.argmax(native.sizes > 0))))
            self.through_library |= library
            sources.append(native)
        parts = None
        if sources:
            parts = _native.open_view(sources, [0] * len(sources), None)
        part_of = np.arange(len(sources) * rows).reshape(len(sources), rows).T
        self._compose(parts, part_of, kinds, columns, rows)

    def _kind(self, field: str, values: Any, given: Kind | None, where: str) -> Kind:
        dtype = values.dtype
        shape: tuple[int | None, ...] = tuple(values.shape[1:])
        if _is_variable(values):
            of = dtype.metadata["vlen"]
            dtype, shape = np.dtype(of), (None,)
        if dtype.kind in "SU" and len(values.shape) > 1 and given is None:
            raise UsageError(
                f"{where}: a row of {values.shape[1:]} texts is no field: write one text for each row"
            )
        if dtype.kind in "SU" or (dtype == np.uint8 and shape == (None,)):
            return given or (Text() if dtype.kind in "SU" else Bytes())
        return array_kind(self, field, dtype, shape, given, where)


def _all_datasets(file: Any) -> list[str]:
    import h5py

    names: list[str] = []
    file.visititems(lambda n, o: names.append(n) if isinstance(o, h5py.Dataset) else None)
    return names


def _in_memory(values: Any, where: str) -> Any:
    """One number or text for each sample."""
    try:
        return as_texts(values[...], where)
    except OSError as error:
        raise CorruptionError(f"{where}: {error}") from None


def _native_of(
    opened: _Opened, data: Any, path: str, store: Any, label: NDArray[np.int64]
) -> tuple[_native.Source, bool]:
    """The native source of the rows of a dataset, and whether the library reads them."""
    if data.file != opened.file:  # places and names are those in the file behind an external link
        path = absolute([data.file.filename])[0]
        behind = _open(path, store)
        with behind as file:
            return _native_of(behind, file[data.name], path, store, label)
    places = _places(data)
    name = data.name.removeprefix("/")
    if places is None:
        return _Library(path, name, store).open(data, label), True
    length = int(np.prod(data.shape[1:], dtype=np.int64)) * data.dtype.itemsize
    storage = open_storage([path], store=store)
    refuse_replaced(storage, 0, opened.state)
    placed = PlacedRows(
        "hdf5",
        f"{name} {data.dtype} {data.shape[1:]}",
        storage,
        offset=places,
        length=np.full(len(places), length, np.uint64),
        label=label,
    )
    return placed.native, False


class _Library(SampleReader):
    """Samples that the HDF5 library unpacks; see ``HDF5``."""

    def __init__(self, path: str, dataset: str, store: Any) -> None:
        self._path, self._name, self._store = path, dataset, store
        self._opened: tuple[int, Any] | None = None
        self._lock = threading.Lock()

    def open(self, data: Any, label: NDArray[np.int64]) -> _native.Source:
        """The native source of the dataset, which is open."""
        _check_filters(data, self._path)
        n = len(data)
        rows = int(data.chunks[0]) if data.chunks else 1
        others = filter(os.path.exists, _others_of(data.file, data.name))
        return native_source(
            self,
            sizes=self._sizes(data),
            labels=label,
            group=(np.arange(n) // rows).astype(np.uint32) if rows > 1 else None,
            identity=("hdf5", Path(self._path).name, self._name, str(data.dtype), data.shape),
            stamp=stamp_of([as_file(self._path, self._store), *others]),
        )

    def _sizes(self, data: Any) -> NDArray[np.uint64]:
        n = len(data)
        if not _is_variable(data):
            one = int(np.prod(data.shape[1:], dtype=np.int64)) * data.dtype.itemsize
            return np.full(n, one, np.uint64)
        sizes = np.zeros(n, np.uint64)
        # The library gives lengths only with the bytes, so all of them are read once.
        rows = int(data.chunks[0]) if data.chunks else _ROWS_AT_ONCE
        for begin in range(0, n, rows):
            try:
                some = data[begin : begin + rows]
            except OSError as error:
                raise CorruptionError(
                    f"{self._path}, dataset {self._name}, from index {begin} on: {error}"
                ) from None
            sizes[begin : begin + rows] = [_bytes_of(x).nbytes for x in some]
        return sizes

    def _data(self) -> Any:
        # A file that was open while the process forked belongs to the parent.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), _open(self._path, self._store)
        return self._opened[1].file[self._name]

    def read(self, samples: list[int]) -> list[Any]:
        answers: list[Any] = []
        with self._lock:
            for sample in samples:
                try:
                    data = self._data()
                    # Of fixed-length strings, one alone would lose its zeros at the end.
                    answers.append(
                        _bytes_of(data[sample] if _is_variable(data) else data[sample : sample + 1])
                    )
                except (OSError, KeyError, ValueError, CorruptionError, IoError) as error:
                    failed = failure_of(self._opened[1].source) if self._opened else None
                    answers.append(failed or _said(error))
        return answers

    def describe(self, sample: int) -> str:
        return f"{self._path}, dataset {self._name}, index {sample}"


def _said(error: Exception) -> Error:
    return (
        error if isinstance(error, IoError) else CorruptionError(f"the HDF5 library says: {error}")
    )


def _is_variable(data: Any) -> bool:
    return data.dtype.metadata is not None and "vlen" in data.dtype.metadata


def _bytes_of(value: Any) -> NDArray[np.uint8]:
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


class _Opened:
    """An h5py file that raises a failing object store's own error; `state` is what `source` was
    before."""

    def __init__(self, file: Any, source: Any, state: tuple[int, int]) -> None:
        self.file, self.source, self.state = file, source, state

    def __enter__(self) -> Any:
        return self.file

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.file.close()
        failure = failure_of(self.source)
        if failure is not None and error is not None:
            raise failure from None


def _open(path: PathLike, store: Any) -> _Opened:
    try:
        import h5py
    except ImportError:
        raise UsageError(
            f"reading {path} needs the package h5py: pip install 'nostall[stores]'"
        ) from None
    source = as_file(os.fspath(path), store)
    try:
        state = state_of(source)
        # Only files have locks; an object cannot be written to in place.
        options = {"locking": False} if isinstance(source, str) else {}
        try:
            return _Opened(h5py.File(source, "r", **options), source, state)
        except OSError as error:
            # The program itself has the file open, with locks: it has one way for both.
            if "locking flag" not in str(error):
                raise
            return _Opened(h5py.File(source, "r"), source, state)
    except FileNotFoundError:
        raise IoError(f"{path} does not exist") from None
    except OSError as error:
        failed = failure_of(source)
        raise failed or CorruptionError(f"{path} cannot be opened as HDF5: {error}") from None


def _dataset(file: Any, path: PathLike, name: str) -> Any:
    import h5py

    data = file.get(name)
    if not isinstance(data, h5py.Dataset):
        names = ", ".join(_all_datasets(file)) or "none"
        raise UsageError(f"{path} has no dataset {name!r}; it has: {names}")
    if is_url(os.fspath(path)) and (others := _others_of(file, name)):
        # The library looks in the working directory, or takes this object for the other one.
        raise UsageError(
            f"{path}, dataset {name}: values lie in the file {os.path.basename(others[0])}, and an "
            "object leads to no other file: open that one, or copy its values into this one"
        )
    if data.ndim == 0 or len(data) == 0:
        raise UsageError(f"{path}, dataset {name}: shape {data.shape} has no samples")
    if _is_variable(data) and data.ndim > 1:
        raise UsageError(
            f"{path}, dataset {name}: values of different lengths are read of shape (n,), not of "
            f"{data.shape}"
        )
    of = np.dtype(data.dtype.metadata["vlen"]) if _is_variable(data) else data.dtype
    if of.hasobject or (of is data.dtype and of.kind not in "iufbSV"):
        raise UsageError(f"{path}, dataset {name}: elements of type {data.dtype} are not read")
    return data


def _others_of(file: Any, dataset: str) -> list[str]:
    """The other files in which values of a dataset lie, existing or not.

    Those that parts of a virtual dataset name in turn are not among them.
    """
    import h5py

    found: dict[str, None] = {}
    seen, left = set(), [dataset]
    while left:
        data = file.get(left.pop())
        if not isinstance(data, h5py.Dataset) or data.id in seen:
            continue
        seen.add(data.id)
        own = data.file
        folder = os.path.dirname(own.filename)
        if own != file:  # behind an external link
            found[own.filename] = None
        above = _prefix("HDF5_EXTFILE_PREFIX", folder)
        found |= {os.path.join(above, name): None for name, _, _ in data.external or ()}
        virtual = data.virtual_sources() if data.is_virtual else []
        for name in sorted({each.file_name for each in virtual} - {"."}):
            found |= dict.fromkeys(_parts(folder, name))
        if own == file:
            left += sorted({each.dset_name for each in virtual if each.file_name == "."})
    return list(found)


def _prefix(variable: str, folder: str) -> str:
    return os.environ.get(variable, "").replace("${ORIGIN}", folder)


def _parts(folder: str, name: str) -> list[str]:
    """The files that the library takes for a virtual dataset's name, in which "%b" numbers blocks."""
    base = os.path.basename(name) if os.path.isabs(name) else name
    places = [name] if os.path.isabs(name) else []
    above = _prefix("HDF5_VDS_PREFIX", folder)
    places += [os.path.join(where, base) for where in (above, folder) if where] + [base]
    for place in places:
        if found := sorted(glob.glob(glob.escape(place).replace("%b", "*"))):
            return found
    return [name]


def _check_filters(data: Any, path: PathLike) -> None:
    import h5py

    plist = data.id.get_create_plist()
    for i in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(i)
        if not h5py.h5z.filter_avail(code):
            text = name.decode(errors="replace") or "unnamed"
            raise UsageError(
                f"{path}, dataset {data.name}: its chunks need HDF5 filter {code} ({text}), which "
                "is not installed: pip install hdf5plugin and import it, or set HDF5_PLUGIN_PATH"
            )


def _is_whole(stored: Any) -> bool:
    """Whether the bytes of an HDF5 type are NumPy's: integers of all bits, texts that fill them."""
    from h5py import h5t

    if isinstance(stored, h5t.TypeCompoundID):
        return all(_is_whole(stored.get_member_type(i)) for i in range(stored.get_nmembers()))
    if isinstance(stored, (h5t.TypeArrayID, h5t.TypeEnumID)):
        return _is_whole(stored.get_super())
    if isinstance(stored, h5t.TypeStringID):
        return bool(stored.get_strpad() == h5t.STR_NULLPAD)
    return not isinstance(stored, h5t.TypeIntegerID) or (
        stored.get_precision() == 8 * stored.get_size()
    )


def _places(data: Any) -> NDArray[np.uint64] | None:
    """Where each sample starts in the file; None if its bytes do not lie there unchanged."""
    if data.dtype.hasobject or data.external or data.is_virtual:
        return None
    stored = data.id.get_type()
    if stored.get_size() != data.dtype.itemsize or not _is_whole(stored):
        return None  # NumPy has no such type: the library converts what it reads
    n = len(data)
    one = int(np.prod(data.shape[1:], dtype=np.int64)) * data.dtype.itemsize
    if data.chunks is None:
        start = data.id.get_offset()
        return None if start is None else start + np.arange(n, dtype=np.uint64) * np.uint64(one)
    if data.file.userblock_size > 0:
        return (
            None  # releases of the library differ in whether places of chunks count from behind it
        )
    whole_samples = tuple(data.chunks[1:]) == tuple(data.shape[1:])
    if not whole_samples or data.id.get_create_plist().get_nfilters() > 0:
        return None
    rows = data.chunks[0]
    places = np.zeros(n, np.uint64)
    found = 0

    def visit(chunk: Any) -> None:
        nonlocal found
        first = chunk.chunk_offset[0]
        count = min(rows, n - first)
        places[first : first + count] = chunk.byte_offset + np.arange(count, dtype=np.uint64) * one
        found += count

    data.id.chunk_iter(visit)
    return places if found == n else None  # chunks that were never written have no place


def _labels(file: Any, path: PathLike, labels: Any, n: int) -> NDArray[np.int64]:
    if labels is None:
        return np.zeros(n, np.int64)
    try:
        read = _dataset(file, path, labels)[...] if isinstance(labels, str) else labels
    except OSError as error:
        raise CorruptionError(f"{path}, dataset {labels}: {error}") from None
    values = np.asarray(read).reshape(-1)
    if values.dtype.kind not in "iub":
        raise UsageError(
            f"{path}: labels of type {values.dtype} are not integers: pass columns=, whose numbers and "
            "texts are fields"
        )
    if len(values) != n:
        raise UsageError(f"{path}: {len(values)} labels for {n} samples")
    return whole_numbers(values, f"{path}: labels")
