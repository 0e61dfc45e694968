"""Files of token ids: raw ones, NumPy's, Megatron's with their index, llm.c's, and columns of Arrow."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import logging
import math
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from nostall import _native
from nostall.base._made_once import made_once
from nostall.base._paths import path_of
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._hugging_face import dataset_files
from nostall.source._objects import exist, is_url, store_identity
from nostall.source._records import (
    FOUND,
    PathLike,
    Progress,
    ReadOptions,
    absolute,
    open_storage,
    reading_of,
    records_paths,
    shard_paths,
)
from nostall.source._token_columns import Extent, column_extents

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("nostall")

Format = Literal["auto", "raw", "npy", "megatron", "llm.c", "wav"]
_FORMATS = ("auto", "raw", "npy", "megatron", "llm.c", "wav")

_THREADS = 8
# Bytes of a file that are read at once for its header, and those that say what a chunk of WAV is.
_HEAD = 4096
_WAV_CHUNK = 34
# Seconds that a process waits for another one that looks for documents, and one more for so many bytes.
_PATIENCE = 600.0
_SLOWEST = 10e6
_SHARED_FROM = 16 << 20  # bytes of files: fewer are read sooner than they are shared
_STORED = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_REAL = "float32"  # of tracks
_NPY = b"\x93NUMPY"
_MEGATRON = b"MMIDIDX\x00\x00"
# Megatron's codes of types; floating-point ones are no ids.
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
# llm.c's: magic, version, type; the number of ids is the third number of a header of 1 KiB.
_LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_LLMC_HEADER = 1024
# Of WAV files: (PCM is 1, floating point 3; bits).
_SOUNDS = {(1, 8): "uint8", (1, 16): "int16", (1, 32): "int32", (3, 32): "float32"}
#: Tracks that mean something to units: labels that are stored, and which of them count.
LABELS, LOSS_MASK = "labels", "loss_mask"


class Track(NamedTuple):
    """Numbers beside the ids of a stream, one for each."""

    native: _native.TokenStream
    dtype: str
    vocabulary: int | None


class Tokens:
    """The token ids of a few or of thousands of files, as one stream, and the documents in it.

    Ids are read by ranges, from local files or objects, and never mapped. Where documents begin costs
    4 bytes a document; it is found once and stored. A file's end is a document's end. The stream is
    given to `Windows`, `Documents` or `Packed`, whose samples a loader takes.

    Args:
        files: a list of files, a pattern, a folder (its ``.bin`` and ``.npy`` files), or a URL of them.
        dtype: the type of the ids of raw files, ``"uint16"`` for example; that of others stands in
            them.
        end: the id that ends every document, found by one pass over the files; None if there is
            none, or the files have an index of documents.
        vocabulary: how many ids there are: another id makes what has it unusable.
        format: ``"raw"`` (nanoGPT's and OLMo's: ids and nothing else), ``"npy"`` (of one dimension, or
            a document a row), ``"megatron"`` (``.bin`` with ``.idx``), ``"llm.c"`` (``.bin`` with a
            header), ``"wav"`` (recordings of one channel, for `Clips`), or ``"auto"``: what lies there.
        column: the column of lists of ids in Arrow files, or in a folder of Hugging Face's
            `datasets`; a row is a document.
        split: of a folder of `datasets` that has several.
        tracks: numbers beside the ids, one for each, in the same order: a stream of its own by the
            name of its field. ``"loss_mask"`` says which ids are learned, ``"labels"`` are labels that
            are stored: at the place of their id, -100 where there is none.
        index: True keeps what was found beside the first file, or in the user's cache folder where
            that is read-only; a path keeps it there; False nowhere.
        reading: how the files are read.
        store: of URLs, as for other record stores.
        progress: called with the number of pieces of the files examined.

    Raises:
        UsageError: there are no tokens, or the type of the ids is not known.
        CorruptionError: a file is cut, or does not go with its index, or has an id outside the
            vocabulary; a track does not go with the ids.
        IoError: a file cannot be read.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        *,
        dtype: str | None = None,
        end: int | None = None,
        vocabulary: int | None = None,
        format: Format = "auto",
        column: str | None = None,
        split: str | None = None,
        tracks: Mapping[str, Tokens] | None = None,
        index: bool | PathLike = True,
        reading: ReadOptions | None = None,
        store: Any = None,
        progress: Progress | None = None,
    ) -> None:
        if format not in _FORMATS:
            raise UsageError(f"format must be one of {', '.join(_FORMATS)}, not {format!r}")
        if dtype is not None:
            dtype = _id_type(dtype)
        for name, value in (("end", end), ("vocabulary", vocabulary)):
            if value is not None and not 0 <= value < 2**63:
                raise UsageError(f"{name}={value} must be a whole number, 0 or more")
        paths = _paths_of(files, column, split, format, store)
        self._arguments: dict[str, Any] = {
            "files": paths,
            "dtype": dtype,
            "end": end,
            "vocabulary": vocabulary,
            "format": format,
            "column": column,
            "tracks": dict(tracks or {}),
            "index": index,
            "reading": reading,
            "store": store,
        }
        self.vocabulary = vocabulary
        self._marks = False  # whether `_end` ends no documents
        # What gives the documents to other processes of the node; of ids, with what was found of them.
        self._shared: _native.NodeOnce | None = None
        self._places: dict[int, tuple[_native.TokenIndex, _native.NodeOnce]] = {}
        self.index_file = ""
        self.index_reused = False
        self._end, self._column = end, column
        data, indexes = _pairs(paths, format, store)
        self.storage = open_storage(data + indexes, direct=reading_of(reading).direct, store=store)
        self._files = len(data)
        if column is None:
            self.dtype = self._find_type(dtype, format, indexes)
            # Where ids lie in files: how a file is read decides it, not the file alone.
            read = "indexed" if indexes else repr(self._headers)
            self._layout = hashlib.sha256(read.encode()).hexdigest()[:16]
            self._check_end(end)
        elif end is not None:
            raise UsageError(f"end={end}: the rows of column {column!r} are its documents")
        self._indexed = bool(indexes)
        self._index = self._load_any(index) or self._find(progress)
        if column is not None:
            self.dtype = self._one_type([_id_type(self._index.stamp.split(FOUND)[1])], dtype)
            self._check_end(end)
        self.native = _native.TokenStream(self.storage, self._index)
        if self.native.tokens == 0:
            raise UsageError(
                f"{paths[0]} has no tokens" + (", nor has any other file" * (len(data) > 1))
            )
        self.tracks = {name: self._track(name, track) for name, track in (tracks or {}).items()}

    # ------------------------------------------------------------------ what there is

    def __len__(self) -> int:
        """Tokens of all files."""
        return self.native.tokens

    @property
    def documents(self) -> int:
        """How many documents there are; files, where nothing divides them."""
        return self.native.documents

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Tokens of every document, shape (documents,)."""
        return self.native.lengths

    @property
    def fingerprint(self) -> int:
        """A 64-bit hash over names and sizes of the files, types and documents."""
        return self.native.fingerprint

    def read(self, begin: int, count: int) -> NDArray[Any]:
        """`count` ids from token `begin` of the stream on.

        Raises:
            IndexError: there are not so many.
            IoError: a file cannot be read.
        """
        return self.native.read(begin, count).view(self.dtype)

    def document(self, number: int) -> NDArray[Any]:
        """The ids of a document.

        Raises:
            IndexError: there is none of that number.
            IoError: a file cannot be read.
        """
        begin = self.native.begin(number)
        last = number + 1 == self.documents
        return self.read(begin, (len(self) if last else self.native.begin(number + 1)) - begin)

    def places(self, id: int) -> NDArray[np.uint64]:
        """Where an id stands in the stream; found by one pass over the files, and stored as documents
        are.

        Raises:
            UsageError: it is no id of the stream's type.
            IoError: a file cannot be read.
        """
        if id in self._places:
            return _native.token_places(self.native, self._places[id][0], id, _THREADS)
        marks = object.__new__(type(self))
        marks.__dict__.update(self.__dict__)
        marks.vocabulary, marks._end, marks._marks, marks._shared = None, id, True, None
        marks._check_end(id)
        index = self._arguments["index"]
        kept = index if isinstance(index, bool) else f"{os.fspath(index)}.{id}"
        found = marks._load_any(kept) or marks._find(None)
        if marks._shared is not None:
            self._places[id] = found, marks._shared
        return _native.token_places(self.native, found, id, _THREADS)

    def _track(self, name: str, track: Tokens) -> Track:
        """A track, divided into the documents of the ids.

        Raises:
            UsageError: it is no stream, or its type cannot be that of what it means.
            CorruptionError: it is of another length, or has other documents.
        """
        if not isinstance(track, Tokens):
            raise UsageError(f"the track {name} must be nostall.Tokens, not {type(track).__name__}")
        if name in (LABELS, LOSS_MASK) and track.dtype == _REAL:
            raise UsageError(f"the track {name} is {track.dtype}: it must be of whole numbers")
        if len(track) != len(self):
            raise CorruptionError(
                f"the track {name} has {len(track)} values for {len(self)} ids: {track!r} and {self!r} "
                "do not go together"
            )
        if track.documents > track._files:
            lengths, own = track.lengths, self.lengths
            if len(lengths) != len(own) or (lengths != own).any():
                raise CorruptionError(
                    f"the track {name} has other documents than the ids: {track!r} and {self!r} do not "
                    "go together"
                )
        divided = _native.TokenStream(track.storage, track._index.divided_as(self.native))
        return Track(divided, track.dtype, track.vocabulary)

    def __repr__(self) -> str:
        files = self._arguments["files"]
        where = f"{files[0]!r}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        return f"<Tokens {where}: {len(self)} tokens of {self.dtype} in {self.documents} documents>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments of opening: unpickling opens the files again, and compares."""
        return _reopen, (self._arguments, self.fingerprint)

    # ------------------------------------------------------------------ opening

    def _find_type(self, dtype: str | None, format: Format, indexes: list[str]) -> str:
        """The type of the ids; `self._headers` gets what the headers of .npy files say."""
        self._headers: list[tuple[int, tuple[int, ...]] | None] = []
        if indexes:
            sizes = self.storage.sizes
            types = []
            for file in range(self._files, 2 * self._files):
                head = self.storage.read(file, 0, min(34, int(sizes[file])))
                types.append(_megatron_head(head, self.storage.paths[file])[0])
            return self._one_type(types, dtype)
        types = []
        # An object store takes its time for each of them.
        with ThreadPoolExecutor(_THREADS) as threads:
            headers = list(threads.map(lambda file: self._header(file, format), range(self._files)))
        for file, header in enumerate(headers):
            if header is None:
                if dtype is None:
                    raise UsageError(
                        f"{self.storage.paths[file]} has ids and nothing else: pass their type, as in "
                        'dtype="uint16"'
                    )
                self._headers.append(None)
                continue
            self._headers.append(header[1:])
            types.append(header[0])
        return self._one_type(types, dtype)

    def _check_end(self, end: int | None) -> None:
        if self.dtype == _REAL and (end, self.vocabulary) != (None, None):
            raise UsageError(f"numbers of {_REAL} are no ids: they have no end= and no vocabulary=")
        if end is None:
            return
        ids = int(np.iinfo(self.dtype).max) + 1
        for below, what in ((ids, f"the ids of {self.dtype}"), (self.vocabulary, "the vocabulary")):
            if below is not None and end >= below:
                raise UsageError(
                    f"end={end} is none of {what}, below {below}: no document would end"
                )

    def _one_type(self, types: list[str], dtype: str | None) -> str:
        found = sorted({*types, *([dtype] if dtype is not None else [])})
        if len(found) > 1:
            raise UsageError(
                f"the ids of {self.storage.paths[0]} and its companions, and dtype=, are of the types "
                f"{', '.join(found)}: open files of different types apart"
            )
        return found[0]

    def _header(self, file: int, format: Format) -> tuple[str, int, tuple[int, ...]] | None:
        """(type, offset of the ids, shape) of a file with a header; None of a raw one."""
        if format == "raw":
            return None
        size, path = int(self.storage.sizes[file]), self.storage.paths[file]
        if format == "wav" or (format == "auto" and path.endswith(".wav")):
            return _wav_header(self.storage, file)
        head = self.storage.read(file, 0, min(size, _HEAD))
        npy = head.startswith(_NPY)
        if format == "llm.c" or (format == "auto" and not npy and not path.endswith(".npy")):
            return _llmc_header(head, size, path, format == "llm.c")
        if not npy:
            if format == "auto":
                return None  # OLMo gives raw files this ending
            raise CorruptionError(f"{path} is no .npy file")
        stream = io.BytesIO(head)
        try:
            version = np.lib.format.read_magic(stream)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(stream)
        except ValueError as error:
            raise CorruptionError(f"{path} is no .npy file: {error}") from None
        if len(shape) not in (1, 2) or (fortran and len(shape) == 2) or dtype.byteorder == ">":
            raise UsageError(
                f"{path} has an array of shape {shape}: ids are little-endian, of one dimension, or of "
                "two in C order"
            )
        if size != stream.tell() + dtype.itemsize * math.prod(shape):
            raise CorruptionError(
                f"{path} has {size} bytes, not those of {math.prod(shape)} ids of {dtype}: it was cut"
            )
        return _id_type(dtype.name), stream.tell(), shape

    @property
    def _stamp(self) -> str:
        # What was found of the documents depends on it, and whether ids were looked at.
        what = f"column={self._column}"
        if self._column is None:
            what = f"dtype={self.dtype} layout={self._layout}"
        end = f"{'marks' if self._marks else 'end'}={self._end}"
        return f"tokens {what} {end} vocabulary={self.vocabulary}"

    def _load_any(self, index: bool | PathLike) -> _native.TokenIndex | None:
        """From where it may be read; if it cannot be, `index_file` is where it is to be kept."""
        for place in records_paths(self.storage.paths, self._stamp, index):
            self.index_file = place
            if (found := self._load()) is not None:
                return found
        return None

    def _load(self) -> _native.TokenIndex | None:
        if not self.index_file or not os.path.exists(self.index_file):
            return None
        names = [path.rsplit("/", 1)[-1] for path in self.storage.paths]
        try:
            found = _native.load_tokens(self.index_file)
        except (IoError, CorruptionError) as error:
            _log.warning("%s: %s; examining the files again", self.index_file, error)
            return None
        same = (
            (found.stamp.split(FOUND)[0], found.paths) == (self._stamp, names)
            and np.array_equal(found.sizes, self.storage.sizes)
            and np.array_equal(found.times, self.storage.times)
        )
        if not same:
            _log.info("%s: it is of another state of the files; examining them", self.index_file)
            return None
        self.index_reused = True
        return found

    def _find(self, progress: Progress | None) -> _native.TokenIndex:
        """The documents, which one process looks for: of all that can have the stored index from it, or
        of this node where there is none."""

        def examine() -> _native.TokenIndex:
            return self._examine(progress)

        size = int(self.storage.sizes.sum())
        patience = _PATIENCE + size / _SLOWEST
        if self.index_file:
            folder = os.path.dirname(self.index_file) or "."
            if os.access(folder, os.W_OK):
                return made_once(self.index_file, self._load, examine, patience)
            if os.path.isdir(folder):
                self.index_file = ""  # read-only
        paths = self.storage.paths
        store = store_identity(self._arguments["store"]) if is_url(paths[0]) else ""
        if size < _SHARED_FROM or store is None:
            return examine()
        content = [self._stamp, store, *paths, self.storage.sizes, self.storage.times]
        key = hashlib.sha256(repr([np.asarray(c).tolist() for c in content]).encode()).hexdigest()
        found, self._shared = _native.token_index_once(f"tokens {key}", examine, patience)
        return found

    def _examine(self, progress: Progress | None) -> _native.TokenIndex:
        if self._column is None:
            found = [self._extent(file, self._indexed) for file in range(self._files)]
        else:
            paths, store = self._arguments["files"], self._arguments["store"]
            found_type, found = column_extents(self.storage, paths, self._column, store)
            self.dtype = _id_type(found_type)
        known = any(extent.begins is not None for extent in found)
        if known and self._end is not None and not self._marks:
            raise UsageError(
                f"end={self._end} is for files that do not say where documents end: leave it out"
            )
        stamp = self._stamp + ("" if self._column is None else FOUND + self.dtype)
        files = np.array([extent.file for extent in found], np.uint32)
        offsets = np.array([extent.offset for extent in found], np.uint64)
        counts = np.array([extent.tokens for extent in found], np.uint64)
        width = np.dtype(self.dtype).itemsize
        if self._end is not None or (self.vocabulary is not None and not known):
            index = _native.scan_tokens(
                storage=self.storage,
                stamp=stamp,
                width=width,
                file=files,
                offset=offsets,
                tokens=counts,
                end=self._end,
                vocabulary=self.vocabulary or 0,
                threads=_THREADS,
                progress=progress,
            )
        else:
            before = np.cumsum(counts) - counts
            index = _native.token_index(
                storage=self.storage,
                stamp=stamp,
                width=width,
                file=files,
                offset=offsets,
                tokens=counts,
                begins=np.concatenate(
                    [
                        start
                        + (np.zeros(min(1, e.tokens), np.uint64) if e.begins is None else e.begins)
                        for start, e in zip(before, found, strict=True)
                    ]
                ),
            )
        self._store(index)
        return index

    def _extent(self, file: int, indexed: bool) -> Extent:
        width, size = np.dtype(self.dtype).itemsize, int(self.storage.sizes[file])
        if indexed:
            return Extent(file, 0, *self._megatron(file, width))
        header = self._headers[file]
        if header is not None:
            offset, shape = header
            count = math.prod(shape)
            if len(shape) == 1 or count == 0:
                return Extent(file, offset, count, None)
            begins = np.arange(shape[0], dtype=np.uint64) * np.uint64(shape[1])
            return Extent(file, offset, count, begins)
        count, rest = divmod(size, width)
        if rest:
            raise CorruptionError(
                f"{self.storage.paths[file]} has {size} bytes, which are no ids of {width} bytes: it "
                f"was cut, or dtype={self.dtype!r} is wrong"
            )
        return Extent(file, 0, count, None)

    def _store(self, found: _native.TokenIndex) -> None:
        if not self.index_file:
            return
        error, _ = found.store(self.index_file)
        if error:
            # A read-only data set is the usual case, not a fault.
            if -error not in (errno.EROFS, errno.EACCES, errno.EPERM):
                _log.warning("cannot store %s: %s", self.index_file, os.strerror(-error))
            self.index_file = ""

    def _megatron(self, file: int, width: int) -> tuple[int, NDArray[np.uint64]]:
        """(tokens, first token of every document) of a file with an index."""
        path = self.storage.paths[self._files + file]
        size = int(self.storage.sizes[self._files + file])
        raw = self.storage.read(self._files + file, 0, size)
        _, sequences, marks = _megatron_head(raw, path)
        if size < 34 + 12 * sequences + 8 * marks:
            raise CorruptionError(
                f"{path} has {size} bytes, fewer than those of {sequences} sequences and {marks} "
                "documents: it was cut"
            )
        lengths = np.frombuffer(raw, np.int32, sequences, 34)
        pointers = np.frombuffer(raw, np.int64, sequences, 34 + 4 * sequences)
        ends = np.zeros(sequences + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        divides = np.frombuffer(raw, np.int64, marks, 34 + 12 * sequences)
        tokens = int(ends[-1])
        if (lengths < 0).any() or not np.array_equal(pointers, ends[:-1] * width):
            raise CorruptionError(f"{path}: its sequences do not lie one after the other")
        has = int(self.storage.sizes[file])
        if tokens * width != has:
            raise CorruptionError(
                f"{self.storage.paths[file]} has {has} bytes, its index {path} tells of {tokens} ids "
                f"of {width} bytes: index and data disagree"
            )
        sound = marks == 0 or (
            divides[0] == 0 and divides[-1] == sequences and (np.diff(divides) >= 0).all()
        )
        if not sound:
            raise CorruptionError(f"{path}: its documents are not made of its sequences")
        begins = ends[divides[:-1]] if marks else ends[:-1]
        return tokens, begins.astype(np.uint64)


def _id_type(dtype: Any) -> str:
    name: str
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in (*_STORED, _REAL):
        raise UsageError(
            f"ids are whole numbers ({', '.join(_STORED)}), and what lies beside them may be {_REAL}: "
            f"not {name}"
        )
    return name


def _paths_of(
    files: PathLike | Sequence[PathLike],
    column: str | None,
    split: str | None,
    format: Format,
    store: Any,
) -> list[str]:
    """The files of a stream, in their order."""
    if column is None:
        if split is not None:
            raise UsageError(f"split={split!r} is of a folder of Arrow files: pass column= too")
        try:
            paths = shard_paths(files, (".bin", ".npy", ".wav"), store)
        except UsageError as error:
            if isinstance(files, str | os.PathLike) and any(Path(path_of(files)).rglob("*.arrow")):
                raise UsageError(
                    f"{files} has Arrow files: name their column of ids: column="
                ) from error
            raise
        if table := next((path for path in paths if path.endswith(".arrow")), None):
            raise UsageError(f"{table} is an Arrow file: name its column of ids: column=")
    else:
        if format != "auto":
            raise UsageError(f"column={column!r} is of Arrow files, not of format={format!r}")
        listed = dataset_files(files, split)
        paths = shard_paths(files, (".arrow",), store) if listed is None else listed
    compressed = next((path for path in paths if path.endswith(".parquet")), None)
    if compressed is not None:
        raise UsageError(
            f"{compressed} has no ids that can be read alone: nostall.tokenize(..., tokenizer=None, "
            "column=...) writes them once as they are read"
        )
    return absolute(paths)


def _llmc_header(
    head: bytes, size: int, path: str, wanted: bool
) -> tuple[str, int, tuple[int, ...]] | None:
    """As `Tokens._header`, of a file that may have llm.c's."""
    magic, version, count = struct.unpack_from("<3i", head) if len(head) >= 12 else (0, 0, 0)
    if magic not in _LLMC:
        if wanted:
            raise CorruptionError(f"{path} does not begin with a header of llm.c")
        return None
    known, dtype = _LLMC[magic]
    if version != known:
        raise CorruptionError(
            f"{path} has a header of llm.c of version {version}, this release reads {known}"
        )
    if size != _LLMC_HEADER + count * np.dtype(dtype).itemsize:
        raise CorruptionError(
            f"{path} has {size} bytes, its header tells of {count} ids of {dtype}: it was cut"
        )
    return dtype, _LLMC_HEADER, (count,)


def _wav_header(storage: _native.Storage, file: int) -> tuple[str, int, tuple[int, ...]]:
    """As `Tokens._header`, of a WAV file."""
    size, path = int(storage.sizes[file]), storage.paths[file]
    first, head = 0, storage.read(file, 0, min(size, _HEAD))
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        raise CorruptionError(f"{path} is no WAV file")
    at, kind, channels, bits = 12, 0, 0, 0
    while at + 8 <= size:
        if first + len(head) < min(size, at + _WAV_CHUNK):
            first, head = at, storage.read(file, at, min(size - at, _HEAD))
        chunk = head[at - first :]
        name, length = struct.unpack_from("<4sI", chunk)
        if not name.isascii() or not name.decode().isprintable():
            break
        at += 8
        if name == b"fmt " and len(chunk) >= 24:
            kind, channels, _, _, _, bits = struct.unpack_from("<HHIIHH", chunk, 8)
            if kind == 0xFFFE and len(chunk) >= _WAV_CHUNK:  # extensible: the kind stands behind
                kind = struct.unpack_from("<H", chunk, 32)[0]
        elif name == b"data":
            if (kind, bits) not in _SOUNDS or channels != 1:
                raise UsageError(
                    f"{path} has {channels} channels of {bits} bits (kind {kind}): a stream of sound "
                    "has one, of PCM with 8, 16 or 32 bits or of floating point with 32"
                )
            if at + length > size:
                raise CorruptionError(
                    f"{path} has {size} bytes, its header tells of {at + length}: it was cut"
                )
            return _SOUNDS[kind, bits], at, (length // (bits // 8),)
        at += length + length % 2
    raise CorruptionError(f"{path} has no sound: none of its chunks is data")


def _pairs(paths: list[str], format: Format, store: Any) -> tuple[list[str], list[str]]:
    """The files of ids, and for Megatron's the index of each."""
    bare = [p[:-4] if p.endswith((".bin", ".idx")) else p for p in paths]
    if format == "auto":
        asked = [f"{b}.idx" for p, b in zip(paths, bare, strict=True) if _may_have_index(p)]
        remote = [p for p in asked if is_url(p)]
        there = {p for p in asked if not is_url(p) and Path(p).exists()}
        try:
            found = exist(remote, store)
        except IoError as error:
            raise IoError(
                f"{error}; no .idx is asked for where format= says what the files are"
            ) from None
        there.update(itertools.compress(remote, found))
        with_index = [
            p.endswith(".idx") or f"{b}.idx" in there for p, b in zip(paths, bare, strict=True)
        ]
        if any(with_index) and not all(with_index):
            raise UsageError(
                f"{paths[with_index.index(False)]} has no .idx file, others have one: open them apart"
            )
        format = "megatron" if with_index[0] else "auto"
    if format != "megatron":
        return paths, []
    # An index is of the file beside it, wherever that is listed; what is listed twice is there twice.
    data = {b for p, b in zip(paths, bare, strict=True) if not p.endswith(".idx")}
    bare = [b for p, b in zip(paths, bare, strict=True) if b not in data or not p.endswith(".idx")]
    return [f"{b}.bin" for b in bare], [f"{b}.idx" for b in bare]


def _may_have_index(path: str) -> bool:
    return not path.endswith((".idx", ".npy", ".wav"))


def _megatron_head(raw: bytes, path: str) -> tuple[str, int, int]:
    """(type, sequences, marks of documents) of an index."""
    if len(raw) < 34 or not raw.startswith(_MEGATRON):
        raise CorruptionError(
            f"{path} is no index of Megatron's: it does not begin with MMIDIDX; if what lies beside it "
            'is ids alone, pass format="raw"'
        )
    version, code, sequences, marks = struct.unpack_from("<QBQQ", raw, len(_MEGATRON))
    if version != 1:
        raise CorruptionError(f"{path} is an index of version {version}, this release reads 1")
    if code not in _CODES:
        raise CorruptionError(
            f"{path} has ids of a type with code {code}, which is no whole number"
        )
    return _CODES[code], sequences, marks


def _reopen(arguments: dict[str, Any], fingerprint: int) -> Tokens:
    tokens = Tokens(**arguments)
    if tokens.fingerprint != fingerprint:
        raise IoError(
            f"{arguments['files'][0]} changed since it was opened: start again, every process must see "
            "the same files"
        )
    return tokens
