"""Files of token ids: nanoGPT's, NumPy's, raw memory maps, and Megatron's with their index."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._objects import is_url
from nostall.source._records import (
    PathLike,
    Progress,
    ReadOptions,
    absolute,
    open_storage,
    reading_of,
    records_path,
    shard_paths,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("nostall")

Format = Literal["auto", "raw", "npy", "megatron"]

_THREADS = 8
_STORED = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_NPY = b"\x93NUMPY"
_MEGATRON = b"MMIDIDX\x00\x00"
# Megatron's codes of types; floating-point ones are no ids.
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


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
            a document a row), ``"megatron"`` (``.bin`` with ``.idx``), or ``"auto"``: what lies there.
        index: True keeps what was found beside the first file, or in the user's cache folder where
            that is read-only; a path keeps it there; False nowhere.
        reading: how the files are read.
        store: of URLs, as for other record stores.
        progress: called with the number of pieces of the files examined.

    Raises:
        UsageError: there are no tokens, or the type of the ids is not known.
        CorruptionError: a file is cut, or does not go with its index, or has an id outside the
            vocabulary.
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
        index: bool | PathLike = True,
        reading: ReadOptions | None = None,
        store: Any = None,
        progress: Progress | None = None,
    ) -> None:
        if format not in ("auto", "raw", "npy", "megatron"):
            raise UsageError(f'format must be "auto", "raw", "npy" or "megatron", not {format!r}')
        if dtype is not None:
            dtype = _id_type(dtype)
        for name, value in (("end", end), ("vocabulary", vocabulary)):
            if value is not None and not 0 <= value < 2**63:
                raise UsageError(f"{name}={value} must be a whole number, 0 or more")
        paths = absolute(shard_paths(files, (".bin", ".npy"), store))
        if not paths:
            raise UsageError("the list of token files is empty")
        self._arguments: dict[str, Any] = {
            "files": paths,
            "dtype": dtype,
            "end": end,
            "vocabulary": vocabulary,
            "format": format,
            "index": index,
            "reading": reading,
            "store": store,
        }
        self.vocabulary = vocabulary
        self.index_file = ""
        self.index_reused = False
        self._end = end
        data, indexes = _pairs(paths, format)
        self.storage = open_storage(data + indexes, direct=reading_of(reading).direct, store=store)
        self._files = len(data)
        self.dtype = self._find_type(dtype, format, indexes)
        self._check_end(end)
        found = self._load(index) or self._examine(bool(indexes), progress)
        self.native = _native.TokenStream(self.storage, found)
        if self.native.tokens == 0:
            raise UsageError(
                f"{paths[0]} has no tokens" + (", nor has any other file" * (len(data) > 1))
            )

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
        for file in range(self._files):
            header = self._npy_header(file, format)
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
        ids = int(np.iinfo(self.dtype).max) + 1
        for below, what in ((ids, f"the ids of {self.dtype}"), (self.vocabulary, "the vocabulary")):
            if end is not None and below is not None and end >= below:
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

    def _npy_header(self, file: int, format: Format) -> tuple[str, int, tuple[int, ...]] | None:
        """(type, offset of the ids, shape) of a .npy file; None of a raw one."""
        size, path = int(self.storage.sizes[file]), self.storage.paths[file]
        if format == "raw" or (format == "auto" and not path.endswith(".npy")):
            return None
        head = self.storage.read(file, 0, min(size, 4096))
        if not head.startswith(_NPY):
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
        return f"tokens dtype={self.dtype} end={self._end} vocabulary={self.vocabulary}"

    def _load(self, index: bool | PathLike) -> _native.TokenIndex | None:
        self.index_file = records_path(self.storage.paths, self._stamp, index)
        if not self.index_file or not os.path.exists(self.index_file):
            return None
        names = [path.rsplit("/", 1)[-1] for path in self.storage.paths]
        try:
            found = _native.load_tokens(self.index_file)
        except (IoError, CorruptionError) as error:
            _log.warning("%s: %s; examining the files again", self.index_file, error)
            return None
        same = (
            (found.stamp, found.paths) == (self._stamp, names)
            and np.array_equal(found.sizes, self.storage.sizes)
            and np.array_equal(found.times, self.storage.times)
        )
        if not same:
            _log.info("%s: it is of another state of the files; examining them", self.index_file)
            return None
        self.index_reused = True
        return found

    def _examine(self, indexed: bool, progress: Progress | None) -> _native.TokenIndex:
        found = [self._extent(file, indexed) for file in range(self._files)]
        known = any(begins is not None for _, _, begins in found)
        if known and self._end is not None:
            raise UsageError(
                f"end={self._end} is for files that do not say where documents end: leave it out"
            )
        files = np.arange(self._files, dtype=np.uint32)
        offsets = np.array([offset for offset, _, _ in found], np.uint64)
        counts = np.array([count for _, count, _ in found], np.uint64)
        width = np.dtype(self.dtype).itemsize
        if self._end is not None or (self.vocabulary is not None and not known):
            index = _native.scan_tokens(
                storage=self.storage,
                stamp=self._stamp,
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
                stamp=self._stamp,
                width=width,
                file=files,
                offset=offsets,
                tokens=counts,
                begins=np.concatenate(
                    [
                        before[file] + (np.zeros(min(1, count), np.uint64) if at is None else at)
                        for file, (_, count, at) in enumerate(found)
                    ]
                ),
            )
        self._store(index)
        return index

    def _extent(self, file: int, indexed: bool) -> tuple[int, int, NDArray[np.uint64] | None]:
        """(offset of the ids of a file, their number, and where documents begin, if it says that)."""
        width, size = np.dtype(self.dtype).itemsize, int(self.storage.sizes[file])
        if indexed:
            return (0, *self._megatron(file, width))
        header = self._headers[file]
        if header is not None:
            offset, shape = header
            count = math.prod(shape)
            if len(shape) == 1 or count == 0:
                return offset, count, None
            return offset, count, np.arange(shape[0], dtype=np.uint64) * np.uint64(shape[1])
        count, rest = divmod(size, width)
        if rest:
            raise CorruptionError(
                f"{self.storage.paths[file]} has {size} bytes, which are no ids of {width} bytes: it "
                f"was cut, or dtype={self.dtype!r} is wrong"
            )
        return 0, count, None

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
    if name not in _STORED:
        raise UsageError(f"ids are whole numbers ({', '.join(_STORED)}), not {name}")
    return name


def _pairs(paths: list[str], format: Format) -> tuple[list[str], list[str]]:
    """The files of ids, and for Megatron's the index of each."""
    bare = [p[:-4] if p.endswith((".bin", ".idx")) else p for p in paths]
    if format == "auto":
        with_index = [
            p.endswith(".idx")
            or (not is_url(p) and not p.endswith(".npy") and Path(f"{b}.idx").exists())
            for p, b in zip(paths, bare, strict=True)
        ]
        if any(with_index) and not all(with_index):
            raise UsageError(
                f"{paths[with_index.index(False)]} has no .idx file, others have one: open them apart"
            )
        format = "megatron" if with_index[0] else "auto"
    if format != "megatron":
        return paths, []
    bare = list(dict.fromkeys(bare))
    return [f"{b}.bin" for b in bare], [f"{b}.idx" for b in bare]


def _megatron_head(raw: bytes, path: str) -> tuple[str, int, int]:
    """(type, sequences, marks of documents) of an index."""
    if len(raw) < 34 or not raw.startswith(_MEGATRON):
        raise CorruptionError(f"{path} is no index of Megatron's: it does not begin with MMIDIDX")
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
