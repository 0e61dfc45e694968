"""The common part of record stores: a storage, a table of places, and its stored form."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.base._paths import path_of
from nostall.base._sizes import parse_size
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._objects import WILDCARD, is_url, list_objects, open_objects
from nostall.source._source import Source, cache_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("nostall")

Direct = Literal["auto", "never", "always"]
Progress = Callable[[int], object]
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a record store reads its files.

    Attributes:
        direct: whether reads go past the page cache: ``"auto"`` where that is faster, ``"never"`` or
            ``"always"``.
        coalesce: read neighbours together.
        max_read: bytes of one such read at most.

    Raises:
        UsageError: an impossible value, with its option.
    """

    direct: Direct = "auto"
    coalesce: bool = True
    max_read: int | str = "4MiB"

    def __post_init__(self) -> None:
        if self.direct not in ("auto", "never", "always"):
            raise UsageError(f'direct must be "auto", "never" or "always", not {self.direct!r}')
        if not isinstance(self.coalesce, bool):
            raise UsageError(f"coalesce must be True or False, not {self.coalesce!r}")
        parse_size(self.max_read)


_READING = ReadOptions()


def reading_of(given: ReadOptions | None) -> ReadOptions:
    """The options, or the defaults for None; UsageError for something else."""
    if given is None:
        return _READING
    if not isinstance(given, ReadOptions):
        raise UsageError(f"reading must be nostall.ReadOptions, or None, not {given!r}")
    return given


# In a table's stamp, what follows is not a condition; the scan found it.
FOUND = " found "
# The number that follows is a condition, the version of the rules by which the scan chooses samples,
# but no part of the fingerprint.
RULES = " rules "


_only_look: ContextVar[bool] = ContextVar("nostall only look at the index", default=False)


class _Outdated(Exception):
    """(index file, why it does not hold)."""


def examine_index(opens: Callable[[], RecordStore]) -> tuple[str, str]:
    """(index file, why it does not hold) of the store that `opens` would open; the latter is empty
    if it holds. Neither scans nor writes."""
    token = _only_look.set(True)
    try:
        return opens().index_file, ""
    except _Outdated as outdated:
        file, why = outdated.args
        return str(file), str(why)
    finally:
        _only_look.reset(token)


class RecordStore(Source):
    """Samples that are ranges of a few files, read with their neighbours where that is cheaper.

    Attributes:
        storage: the files.
        index_file: where the places of the samples are kept; empty if nowhere.
        index_bytes: size of that file, 0 if none.
        index_reused: whether the places were taken from there.
        index_problem: why they could not be kept where they were to be; empty if they could.
    """

    native: _native.RecordSource
    storage: _native.Storage
    index_file: str = ""
    index_bytes: int = 0
    index_reused: bool = False
    index_problem: str = ""

    def _open(
        self,
        *,
        kind: str,
        stamp: Callable[[], str],
        scan: Callable[[], _native.RecordTable],
        index: bool | PathLike,
        reading: ReadOptions = _READING,
        page_size: Callable[[], int] = lambda: 0,
        database: str = "",
        sums: Callable[[], NDArray[np.uint32]] | None = None,
    ) -> None:
        """Takes the stored table if it still holds, else scans and stores. `sums` gives the
        checksums that the scan found, 0 where it found none; a table without their file does not
        hold where this user could have removed it."""
        places, stamped = records_paths(self.storage.paths, f"{kind} {database}", index), stamp()

        def source(table: _native.RecordTable) -> _native.RecordSource:
            return self._native_of(table, reading, page_size, database)

        for place in places:
            self.index_file = place
            table, why = self._stored(kind, stamped)
            if table is not None:
                self.native = source(table)
                why = self._open_sums(place, places[-1])
                kept = (f"{one}.sums" for one in (place, places[-1]))
                removable = os.access(os.path.dirname(place) or ".", os.W_OK)
                if sums is not None and removable and not any(map(os.path.exists, kept)):
                    why = "the checksums that were found with it are missing"
                self.index_reused = not why
            if self.index_reused:
                return
            if os.path.exists(place):
                level = logging.INFO if table is None else logging.WARNING
                _log.log(level, "%s: %s; examining the data set again", place, why)
        if _only_look.get():
            raise _Outdated(self.index_file, why)
        table = scan()
        self.native = source(table)  # refuses one without samples, which is not to be kept
        if self.index_file:
            self._store(table)
        found = None if sums is None else sums()
        if found is not None:
            self.native.learn_sums(found)
        if why := self._open_sums(self.index_file, self.index_file):
            _log.warning("%s: %s; checksums are learned anew", self.storage.paths[0], why)
        if found is not None:
            self.keep_sums()
            if self.index_file and not found.any():
                with contextlib.suppress(OSError):  # then the next opening scans again
                    os.close(os.open(f"{self.index_file}.sums", os.O_CREAT | os.O_EXCL, 0o666))

    def _native_of(
        self,
        table: _native.RecordTable,
        reading: ReadOptions,
        page_size: Callable[[], int] = lambda: 0,
        database: str = "",
    ) -> _native.RecordSource:
        if len(table) == 0:
            raise UsageError(f"{self.storage.paths[0]} has no samples")
        return _native.record_source(
            storage=self.storage,
            table=table,
            max_read=parse_size(reading.max_read),
            coalesce=reading.coalesce,
            page_size=page_size(),
            database=database,
        )

    def _stored(self, kind: str, stamp: str) -> tuple[_native.RecordTable | None, str]:
        """The stored table, or why there is none that holds."""
        if not self.index_file:
            return None, "it is kept nowhere"
        try:
            table = _native.load_records(self.index_file)
        except (IoError, CorruptionError) as error:
            return None, str(error)
        if why := self._outdated(table, kind, stamp):
            return None, why
        self.index_bytes = Path(self.index_file).stat().st_size
        return table, ""

    def _outdated(self, table: _native.RecordTable, kind: str, stamp: str) -> str:
        if (table.kind, table.stamp.split(FOUND)[0]) != (kind, stamp):
            return "it was made with other options, or of another state of the data set"
        names = [path.rsplit("/", 1)[-1] for path in self.storage.paths]
        if table.paths != names:
            return "it is of other files"
        same = (table.file_sizes == self.storage.sizes) & (table.times == self.storage.times)
        if not same.all():
            return f"{names[int(np.argmin(same))]} has changed since"
        return ""

    def _store(self, table: _native.RecordTable) -> None:
        error, size = table.store(self.index_file)
        if error == 0:
            self.index_bytes = size
            return
        self.index_problem = f"cannot store the index {self.index_file}: {os.strerror(-error)}"
        # A read-only data set is the usual case, not a fault.
        if -error not in (errno.EROFS, errno.EACCES, errno.EPERM):
            _log.warning("%s", self.index_problem)
        self.index_file = ""

    def _table(
        self,
        kind: str,
        stamp: str,
        *,
        offset: NDArray[np.uint64],
        length: NDArray[np.uint64],
        label: NDArray[np.int64] | None = None,
        file: NDArray[np.uint32] | None = None,
        head: NDArray[np.uint16] | None = None,
        parts: tuple[NDArray[np.uint32], NDArray[np.uint32]] | None = None,
    ) -> _native.RecordTable:
        if label is None:
            label = np.zeros(len(length), np.int64)
        return _native.record_table(
            kind=kind,
            stamp=stamp,
            storage=self.storage,
            file=np.ascontiguousarray([] if file is None else file, np.uint32),
            offset=np.ascontiguousarray(offset, np.uint64),
            length=np.ascontiguousarray(length, np.uint64),
            label=np.ascontiguousarray(label, np.int64),
            head=np.ascontiguousarray([] if head is None else head, np.uint16),
            parts=0 if parts is None else parts[0].shape[1],
            part_offset=np.ascontiguousarray([] if parts is None else parts[0].ravel(), np.uint32),
            part_length=np.ascontiguousarray([] if parts is None else parts[1].ravel(), np.uint32),
        )

    @property
    def over_network(self) -> bool:
        """Whether its files are objects."""
        storage: _native.Storage | None = getattr(self, "storage", None)
        return storage is not None and not storage.is_local

    @property
    def places(self) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]:
        """(file, offset, length) of every sample; `file` is empty where there is one file."""
        table = self.native.table
        return table.file, table.offset, table.length


class PlacedRows(RecordStore):
    """Samples whose places the caller gives; they are stored nowhere.

    `stamp` says what they are, for the fingerprint; `storage` has the files, and see `refuse_replaced`.
    """

    def __init__(
        self,
        kind: str,
        stamp: str,
        storage: _native.Storage,
        *,
        offset: NDArray[np.uint64],
        length: NDArray[np.uint64],
        label: NDArray[np.int64] | None = None,
        file: NDArray[np.uint32] | None = None,
    ) -> None:
        self.storage = storage
        file = file if len(storage.paths) > 1 else None
        table = self._table(kind, stamp, offset=offset, length=length, label=label, file=file)
        self.native = self._native_of(table, _READING)


#: Of a converted folder, beside its files: the names of the classes, by label.
CLASSES_FILE = "classes.json"


def classes_beside(paths: Sequence[str], labels: NDArray[np.int64]) -> list[str] | None:
    """The names of the classes that a conversion left beside these files.

    None if there are none, or others beside other files, or not one for each of the labels.
    """
    if is_url(paths[0]):
        return None
    try:
        folders = {Path(path).parent for path in paths}
        first, *others = {(folder / CLASSES_FILE).read_bytes() for folder in folders}
        names = json.loads(first)
    except (OSError, ValueError):
        return None
    if others or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    fits = labels.size and labels.min() >= 0 and labels.max() < len(names)
    return names if fits else None


_BRACES = re.compile(r"\{[^{}]*(\.\.|,)[^{}]*\}")
_PARTS = re.compile("[^/]+")
_ANY_FOLDERS = re.compile(r"(?<![^/])(?:\*\*/+)*\*\*(?:(/+)|$)")
_SPLIT = re.compile(
    r"(?:^|[-_.])(?:(train(?:ing)?)|(val(?:id(?:ation)?)?|dev|test(?:ing)?|eval))(?=[-_.\d]|$)",
    re.IGNORECASE,
)


def shard_paths(
    paths: PathLike | Sequence[PathLike],
    suffixes: tuple[str, ...],
    store: Any = None,
    also: tuple[str, ...] = (),
) -> list[str]:
    """The files of a list, one file, a pattern, or a folder's files with those endings; also URLs.

    In a pattern ``**`` is any number of folders, each of them once. A folder's files that end with
    `also` are given too, for the caller to judge.

    Raises:
        UsageError: there are none, a folder or what ``**`` finds has those of training and of
            testing, or the name has braces of a shell.
    """
    if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes)):
        listed = [path_of(p, "each file") for p in paths]
        if not listed:
            raise UsageError(
                "the list of files is empty: if it was found by a pattern, no file matches that"
            )
        return listed
    path = path_of(paths, "files")
    if _BRACES.search(path) and (is_url(path) or not os.path.exists(path)):
        raise UsageError(f"{path}: braces are not expanded: write a pattern with *, or a list")
    wildcard = None if not is_url(path) and Path(path).exists() else WILDCARD.search(path)
    folder = path[: wildcard.start()].rpartition("/")[0] if wildcard else path
    if is_url(path):
        found = [url for url, _ in list_objects(path, (*suffixes, *also), store)]
    elif wildcard:
        found = sorted({one for one in _matching(path) if not os.path.isdir(one)})
    elif Path(path).is_dir():
        inside = (name for name in os.listdir(path) if name.endswith((*suffixes, *also)))
        found = sorted(os.path.join(path, name) for name in inside)
    else:
        found = [path]
    deep = _ANY_FOLDERS.search(path) if wildcard else None
    if not wildcard or deep:  # who names files by a pattern says which
        named = len(_PARTS.findall(path, len(folder), deep.start())) if deep else 0
        _refuse_several_splits(folder, [name[len(folder) :] for name in found], named)
    if not found:
        raise UsageError(f"{path} names no file that ends with {' or '.join(suffixes)}")
    return found


def _matching(pattern: str) -> Iterator[str]:
    """As ``glob.glob(pattern, recursive=True)``, but ``**`` is each folder once, whatever links lead to
    it."""
    deep = _ANY_FOLDERS.search(pattern)
    if deep is None:
        yield from glob.glob(pattern)
        return
    before, after = pattern[: deep.start()], pattern[deep.end() :] if deep[1] else "*"
    for folder in _folders(glob.glob(before) if before else [""]):
        yield from _matching(glob.escape(folder) + after)


def _folders(tops: Iterable[str]) -> Iterator[str]:
    """These and the folders below them, each once: the name with the fewest links. Names end with /,
    but that of the working directory is ""."""
    seen: set[str] = set()
    waiting = sorted(tops, key=lambda top: (os.path.islink(top[:-1]), top))
    for top in waiting:
        inside = [top]
        for folder in inside:
            real = os.path.realpath(folder)
            if real in seen:
                continue
            seen.add(real)
            yield folder
            for below in sorted(glob.glob(f"{glob.escape(folder)}*/")):
                (waiting if os.path.islink(below[:-1]) else inside).append(below)


def _refuse_several_splits(folder: str, names: Sequence[str], named: int) -> None:
    """A training on all files of a folder would see what it is tested on, if that lies there too.
    The first `named` parts of each name are what the caller asked for."""
    trained, others = "", set()
    for name in names:
        for part in itertools.islice(_PARTS.finditer(name), named, None):
            matches = list(_SPLIT.finditer(part[0]))
            if matches and matches[-1][1]:
                of_file = name[: part.start() + matches[-1].end(1)] + "*"
                of_folder = name[: part.end()] + "/"
                one = of_folder if part.end() < len(name) else of_file
                trained = trained or one.lstrip("/")
            elif matches:
                others.add(matches[-1][2].lower())
    if trained and others:
        raise UsageError(
            f"{folder} has files of several splits, train and {', '.join(sorted(others))}: name those "
            f"of one by its folder, a pattern or a list, as {os.path.join(folder, trained)}"
        )


def open_storage(
    paths: Sequence[str], *, direct: Direct = "auto", store: Any = None
) -> _native.Storage:
    """A storage over local files, or over objects where the paths are URLs.

    Raises:
        IoError: a file or object cannot be opened, with its path.
        UsageError: files and URLs in one data set.
    """
    remote = [is_url(p) for p in paths]
    if all(remote) and remote:
        return open_objects(paths, store)
    if any(remote):
        raise UsageError("a data set lies either in files or on an object store, not in both")
    return _native.open_storage([str(Path(p).absolute()) for p in paths], direct)


def refuse_replaced(storage: _native.Storage, number: int, state: tuple[int, int]) -> None:
    """Places that one file gave must not be read from another that has taken its name.

    Args:
        number: of the file in the storage.
        state: (size, time) of that file by its name, asked for before the file was opened for the
            places if the storage was opened after that, else once the places were known.

    Raises:
        IoError: the storage has another file.
    """
    if state != (int(storage.sizes[number]), int(storage.times[number])):
        raise replaced(storage.paths[number])


def replaced(path: str) -> IoError:
    return IoError(f"{path} was replaced while it was opened: open the data set again")


def absolute(paths: Sequence[str]) -> list[str]:
    """The paths, valid in a process with another working directory."""
    return [p if is_url(p) else str(Path(p).absolute()) for p in paths]


def records_paths(paths: Sequence[str], key: str, index: bool | PathLike) -> list[str]:
    """Where the table of these files may be read; in the last place it is kept, or nowhere if empty.

    Beside data that this user may not change there may be one of others.
    """
    if index is False:
        return [""]
    if index is not True:
        return [path_of(index, "index")]
    names = "\n".join([key, *(p.rsplit("/", 1)[-1] for p in paths)])
    name = f".nostall-records-{_hash(names)[:12]}"
    beside = []
    if not is_url(paths[0]):
        parent = os.path.dirname(paths[0])
        beside = [os.path.join(parent, name)]
        if os.access(parent, os.W_OK):
            return beside
        beside = [place for place in beside if os.path.exists(place)]
    folder = cache_folder()
    if folder is None:
        return [*beside, ""]
    whole = _hash("\n".join([key, *paths]))[:16]
    return [*beside, str(folder / f"{whole}.records")]


def _hash(names: str) -> str:
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()
