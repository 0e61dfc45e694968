"""Texts made into token ids once, by worker processes, and kept as files of Megatron's format.

The cache of a set of texts is a folder whose name is a hash of all that the ids depend on. Its parts
are written apart, each complete once its ``.idx`` is there, so that work that was cut off goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import secrets
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native, errors
from nostall.base._locks import free_lock, take_lock
from nostall.errors import CorruptionError, Error, IoError, UsageError
from nostall.job._cores import cores_of_rank
from nostall.job._world import find_world
from nostall.source._makers import MakeError, Makers
from nostall.source._objects import is_url
from nostall.source._records import PathLike, Progress, absolute, open_storage
from nostall.source._texts import Piece, pieces_of, rows_of_piece, text_files
from nostall.source._tokenizers import Chat, Ids, tokenizer_of
from nostall.source._tokens import LABELS, LOSS_MASK, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("nostall")

_FORMAT = 2
_PART_BYTES = 32 << 20  # of texts
_AT_ONCE = 512  # texts that a tokenizer gets in one call
_CODES = {"uint16": 8, "int32": 4}
_DESCRIPTION, _DONE = "description.json", "done"


@dataclass(frozen=True)
class _Parts:
    """What worker processes make: item i writes the files of part i, and is (documents, tokens)."""

    folder: str
    name: str
    parts: Sequence[Sequence[Piece]]
    tokenizer: Ids
    columns: tuple[str, ...]
    end: int | None
    dtype: str
    chat: Chat | None
    chats: bool
    tracks: tuple[str, ...]
    separator: str | None
    store: Any

    def __len__(self) -> int:
        return len(self.parts)

    def path(self, number: int) -> str:
        return os.path.join(self.folder, f"{self.name}-{number:06d}")

    def __getitem__(self, number: int) -> list[Any]:
        # Each process has a part of its own to work on.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            return self._write(number)
        except Error as error:
            return [type(error).__name__, str(error)]

    def _write(self, number: int) -> list[Any]:
        names = [".bin", *(f".{track}" for track in self.tracks)]
        kinds = [self.dtype, *("uint8" if t == LOSS_MASK else "int32" for t in self.tracks)]
        # A worker may outlive the process whose lock it wrote under by a moment.
        own = f"{secrets.token_hex(4)}.making"
        making = [f"{self.path(number)}{name}.{own}" for name in names]
        lengths: list[int] = []
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb", 1 << 20)) for path in making]
            for places, documents in self._documents(number):
                for place, values in zip(places, documents, strict=True):
                    arrays = [
                        _as(kind, value, place, name)
                        for kind, value, name in zip(kinds, values, names, strict=True)
                    ]
                    if any(len(array) != len(arrays[0]) for array in arrays):
                        raise CorruptionError(
                            f"{place}: {len(arrays[0])} ids, but {[len(a) for a in arrays[1:]]} "
                            f"values of {', '.join(self.tracks)}"
                        )
                    if self.end is not None and len(arrays[0]):
                        arrays = [
                            np.append(array, np.array([behind], array.dtype))
                            for array, behind in zip(arrays, self._behind(arrays), strict=True)
                        ]
                    lengths.append(len(arrays[0]))
                    for file, array in zip(files, arrays, strict=True):
                        array.tofile(file)
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for path, name in zip(making, names, strict=True):
            os.replace(path, self.path(number) + name)
        # The index last: with it the part is complete.
        _put(f"{self.path(number)}.idx", _index(lengths, self.dtype))
        return [len(lengths), sum(lengths)]

    def _documents(self, number: int) -> Iterator[tuple[list[str], list[list[Any]]]]:
        """(places, [ids, then the values of each track] of each) of some documents after the other."""
        rows = (
            row
            for piece in self.parts[number]
            for row in rows_of_piece(piece, self.columns, self.separator, self.store)
        )
        while some := list(itertools.islice(rows, _AT_ONCE)):
            places = [place for place, _ in some]
            if self.chats:
                yield places, [self._chat(values[0], place) for place, values in some]
                continue
            texts = [values[0] for _, values in some]
            if self.tokenizer.identity[0] != "none":
                for place, text in zip(places, texts, strict=True):
                    if not isinstance(text, str):
                        raise CorruptionError(
                            f"{place} has no text, but {type(text).__name__}: name another column="
                        )
            found = self._encoded(texts, places)
            yield places, [[ids, *values[1:]] for ids, (_, values) in zip(found, some, strict=True)]

    def _encoded(self, texts: list[Any], places: list[str]) -> Sequence[Sequence[int]]:
        try:
            return self.tokenizer.encode(texts)
        except (Error, MemoryError, OSError):
            raise
        except Exception as error:
            if len(texts) == 1:
                raise CorruptionError(
                    f"{places[0]} cannot be tokenised: {type(error).__name__}: {error}"
                ) from None
        # Of many texts an error does not say which it is of.
        alone = zip(texts, places, strict=True)
        return [self._encoded([text], [place])[0] for text, place in alone]

    def _behind(self, arrays: Sequence[NDArray[Any]]) -> list[Any]:
        """The end of a document, and what stands beside it in each track."""
        if self.chats:
            return [self.end, arrays[1][-1]]  # the end of an answer is learned with it
        return [self.end, *(-100 if track == LABELS else 0 for track in self.tracks)]

    def _chat(self, messages: Any, place: str) -> list[Any]:
        try:
            ids, mask = (self.chat or self.tokenizer.chat)(messages)
        except Error:
            raise
        except Exception as error:
            raise CorruptionError(
                f"{place} makes no chat: {type(error).__name__}: {error}"
            ) from None
        return [ids, mask]


def _as(kind: str, values: Any, place: str, name: str) -> NDArray[Any]:
    try:
        array = np.asarray([] if values is None else values)
    except ValueError:  # lists of several lengths
        array = np.zeros(1, object)
    if array.size == 0:
        return np.zeros(0, kind)
    bounds = np.iinfo(kind)
    if array.ndim != 1 or array.dtype.kind not in "biu":
        raise CorruptionError(f"{place}: the values of {name[1:]} are no list of whole numbers")
    least = 0 if name == ".bin" else bounds.min
    if array.min() < least or array.max() > bounds.max:
        wrong = array.max() if array.max() > bounds.max else array.min()
        raise CorruptionError(
            f"{place}: {wrong} is not from {least} to {bounds.max}, as the values of {name[1:]} are"
        )
    return np.ascontiguousarray(array, kind)


def _index(lengths: Sequence[int], dtype: str) -> bytes:
    """Megatron's index of documents that lie one after the other."""
    sizes = np.asarray(lengths, np.int32)
    begins = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], out=begins[1:], dtype=np.int64)
    begins *= np.dtype(dtype).itemsize
    head = struct.pack("<QBQQ", 1, _CODES[dtype], len(sizes), len(sizes) + 1)
    marks = np.arange(len(sizes) + 1, dtype=np.int64)
    return b"MMIDIDX\0\0" + head + sizes.tobytes() + begins.tobytes() + marks.tobytes()


def tokenize(
    files: PathLike | Sequence[PathLike],
    tokenizer: Any,
    cache: PathLike,
    *,
    column: str = "text",
    end: int | str | None = None,
    chat: bool | Chat = False,
    tracks: Mapping[str, str] | None = None,
    separator: str | None = None,
    version: str | None = None,
    workers: int | None = None,
    store: Any = None,
    progress: Progress | None = None,
) -> Tokens:
    """Texts as a stream of tokens: tokenised once, by worker processes, and kept in a folder.

    The folder is one in `cache`, by a hash of the tokenizer's content and version, of names, sizes and
    times of the files, and of the arguments. Where it is complete, nothing is read but it; work that
    was cut off goes on. Processes that want the same folder wait for the one that fills it.

    Args:
        files: JSON Lines (``.jsonl``, ``.ndjson``, ``.json``), Parquet, Arrow or plain texts
            (``.txt``), also with ``.gz``, by the endings of their names: a list, a pattern, a folder,
            URLs, or a folder of Hugging Face's `datasets`.
        tokenizer: one of `tokenizers`, `transformers` or `tiktoken`, the path of a
            ``tokenizer.json``, a function from a text to its ids, or None if the column has ids.
        cache: where folders of tokens lie.
        column: the column of texts, or of chats or ids.
        end: the id, or its text, that is put behind every document that has tokens; None for none.
        chat: the column has lists of messages: True renders them by the tokenizer's chat template, a
            function gets them and returns ids and mask. The stream has a track ``loss_mask``, which is
            1 for what the assistant wrote.
        tracks: of ids, columns of numbers beside them, by the names of tracks: see `Tokens`.
        separator: between the documents of a plain text; None if each file is one, or "", with which
            files of other endings are plain texts too.
        version: of a tokenizer or `chat` that is a function, or of a tokenizer of `transformers` that
            is written in Python: change it when that changes.
        workers: processes; this rank's share of the cores if None.
        store: for URLs, an ``obstore.store`` that has them.
        progress: called with the number of parts that are done.

    Raises:
        UsageError: there is no such column or id, a function or a tokenizer whose content cannot be
            known has no version, or what files hold is not clear from their names.
        CorruptionError: a row is none, or its ids are not, with its file and place.
        IoError: a file cannot be read, or changes meanwhile, or the cache cannot be written.
    """
    if not isinstance(column, str):
        raise UsageError(
            f"column= is the name of one column, not {column!r}: write prompts and answers as one "
            "column of messages (chat=), or of ids beside a mask (tracks=)"
        )
    adapter = tokenizer_of(tokenizer)
    _check(adapter, chat, tracks, version)
    paths = absolute(text_files(files, separator, store))
    narrow = adapter.vocabulary is not None and adapter.vocabulary <= 1 << 16
    parts = _Parts(
        folder=os.path.abspath(cache),
        name="",
        parts=(),
        tokenizer=adapter,
        columns=(column, *(tracks or {}).values()),
        end=_end_of(adapter, end),
        dtype="uint16" if narrow else "int32",
        chat=chat if callable(chat) else None,
        chats=bool(chat),
        tracks=(LOSS_MASK,) if chat else tuple(tracks or {}),
        separator=separator,
        store=store,
    )
    return _cached(parts, paths, version, workers, progress)


def _check(adapter: Ids, chat: bool | Chat, tracks: object, version: str | None) -> None:
    unknown = "a function" if callable(chat) else adapter.unknown
    if unknown and not version:
        raise UsageError(
            f'{unknown} has no version of its own: pass version="1", and another one when that changes'
        )
    if tracks and (chat or adapter.identity[0] != "none"):
        raise UsageError("tracks= are columns beside ids: pass tokenizer=None")


def _end_of(adapter: Ids, end: int | str | None) -> int | None:
    found = adapter.id_of(end) if isinstance(end, str) else end
    known = found is not None and 0 <= found < (adapter.vocabulary or 2**31)
    if end is not None and not known:
        raise UsageError(f"end={end!r} is no token of the tokenizer")
    return found


def _cached(
    parts: _Parts,
    paths: Sequence[str],
    version: str | None,
    workers: int | None,
    progress: Progress | None,
) -> Tokens:
    storage = open_storage(paths, store=parts.store)
    names = [path.rsplit("/", 1)[-1] for path in paths]
    content = {
        "format": _FORMAT,
        "tokenizer": [*parts.tokenizer.identity, version],
        "columns": [*parts.columns, *parts.tracks],
        "end": parts.end,
        "chat": getattr(parts.chat, "__qualname__", parts.chats),
        "separator": parts.separator,
        "texts": [list(text) for text in zip(names, map(int, storage.sizes), strict=True)],
    }
    times = [int(at) for at in storage.times]
    folder = Path(parts.folder) / f"tokens-{_key(content, times)}"
    parts = replace(parts, folder=str(folder), name=_key(content)[:8])
    try:
        # What is complete may lie where nothing can be written.
        count = _parts_in(folder)
        if count is None:
            _make_folder(folder, {**content, "times": times})
            with _alone(folder) as alone:
                count = _parts_in(folder)
                if count is None:
                    pieces = pieces_of(
                        paths, list(storage.sizes), parts.separator, _PART_BYTES, parts.store
                    )
                    count = _fill(parts, _in_parts(pieces), alone, workers, progress)
                    _refuse_changed(parts, storage, open_storage(paths, store=parts.store))
                    _put(os.path.join(parts.folder, _DONE), str(count).encode())
        return _open(parts, count)
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise IoError(f"{folder} cannot be written: {error}") from error


def _parts_in(folder: Path) -> int | None:
    """How many parts there are; None if not all are."""
    try:
        return int((folder / _DONE).read_text())
    except (FileNotFoundError, ValueError):  # a machine that stopped leaves an empty file at times
        return None


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _make_folder(folder: Path, description: dict[str, Any]) -> None:
    """Makes the folder, and says why another one does not do."""
    if not folder.exists():
        for other in sorted(folder.parent.glob(f"tokens-*/{_DESCRIPTION}")):
            with contextlib.suppress(OSError, ValueError):
                (other.parent / _DONE).stat()  # else nothing is made a second time
                old = json.loads(other.read_text())
                differing = [key for key in description if old.get(key) != description[key]]
                if len(differing) == 1 and differing[0] not in ("texts", "times"):
                    _log.warning(
                        "%s has the same texts with another value of %s (%r, now %r): tokenising them "
                        "again",
                        other.parent,
                        differing[0],
                        old.get(differing[0]),
                        description[differing[0]],
                    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Holds the folder; False where there can be no locks, and nobody waits."""
    with open(folder / "lock", "w") as lock:
        logged = False
        while not (held := take_lock(lock.fileno())):
            if held is None:
                _log.warning(
                    "%s: its file system has no locks: processes that want the same tokens at once all "
                    "tokenise; let one do it before, or name another cache=",
                    folder,
                )
                break
            if not logged:
                logged = True
                _log.info("%s: another process tokenises; waiting for it", folder)
            time.sleep(0.05)
        try:
            yield bool(held)
        finally:
            free_lock(lock.fileno())


def _in_parts(pieces: Sequence[Piece]) -> list[list[Piece]]:
    parts: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            parts.append([])
            room = _PART_BYTES
        parts[-1].append(piece)
        room -= piece.size
    return parts


def _fill(
    parts: _Parts,
    divided: Sequence[Sequence[Piece]],
    alone: bool,
    workers: int | None,
    progress: Progress | None,
) -> int:
    """Makes the parts that are not there; how many there are."""
    if not divided:
        raise UsageError("the files have no texts")
    parts = replace(parts, parts=divided)
    if alone:  # else another one may be writing them
        for left in Path(parts.folder).glob("*.making"):
            left.unlink()
    todo = [n for n in range(len(parts)) if not os.path.exists(f"{parts.path(n)}.idx")]
    if todo:
        _run(parts, todo, workers, progress)
    return len(parts)


def _refuse_changed(parts: _Parts, before: _native.Storage, now: _native.Storage) -> None:
    """Refuses parts of which some may be of the texts before, and some of those now."""
    changed = (before.sizes != now.sizes) | (before.times != now.times)
    if changed.any():
        for index in Path(parts.folder).glob("*.idx"):
            index.unlink()
        raise IoError(
            f"{before.paths[int(changed.argmax())]} changed while it was tokenised: call tokenize again"
        )


def _put(path: str, data: bytes) -> None:
    """Writes a small file, which is there with all its bytes or not at all."""
    making = f"{path}.{secrets.token_hex(4)}.making"
    with open(making, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(making, path)


def _run(
    parts: _Parts, todo: Sequence[int], workers: int | None, progress: Progress | None
) -> None:
    if workers is None:
        workers = cores_of_rank(find_world().most_here)
    count = max(1, min(workers, len(todo)))
    # A forked process has no threads of the client of an object store.
    remote = any(is_url(piece.path) for part in parts.parts for piece in part)
    made = 0
    makers = Makers(
        parts,
        count=count,
        pickles=(),
        start_method="spawn" if remote else None,
        fewer="tokenize fewer workers=",
    )
    with ThreadPoolExecutor(count) as threads:
        try:
            running = {threads.submit(_make, makers, number) for number in todo}
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                made += len(done)
                if done and progress is not None:
                    progress(len(parts) - len(todo) + made)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            makers.close()  # before the threads are waited for, which wait for processes


def _make(makers: Makers, number: int) -> None:
    from nostall.source._items import decode

    try:
        answer = decode(np.frombuffer(makers.make(number), np.uint8))
    except MakeError as error:
        raise IoError(f"part {number} of the texts cannot be tokenised: {error}") from None
    if isinstance(answer[0], str):
        raise getattr(errors, answer[0])(answer[1])


def _open(parts: _Parts, count: int) -> Tokens:
    def files(suffix: str) -> list[str]:
        return [parts.path(number) + suffix for number in range(count)]

    vocabulary = parts.tokenizer.vocabulary
    tracks = {
        track: Tokens(
            files(f".{track}"),
            dtype="uint8" if track == LOSS_MASK else "int32",
            format="raw",
            vocabulary=None,
            index=False,
        )
        for track in parts.tracks
    }
    if LABELS in tracks:
        tracks[LABELS].vocabulary = vocabulary
    return Tokens(files(".bin"), format="megatron", vocabulary=vocabulary, tracks=tracks)
