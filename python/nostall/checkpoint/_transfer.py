"""The bytes of parts on an object store: uploads in the background, and reads, each block checked."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base import _object_client as client
from nostall.checkpoint._format import Part
from nostall.checkpoint._place import Pacing, UnreachableError
from nostall.checkpoint._store import io_errors
from nostall.errors import CorruptionError, IoError, StoppedError

if TYPE_CHECKING:
    from nostall.checkpoint._objects import ObjectStore

T = TypeVar("T")

# Of a multipart upload: bytes of a request, requests at a time (the client begins one more before it
# waits), and the most requests that S3 takes of one.
_CHUNK = 8 << 20
_IN_FLIGHT = 3
_MOST_CHUNKS = 9_000
# Of a read: blocks of a request, and the most requests at a time.
_RUN = 2
_READERS = 16
# How often the training is asked whether it needs storage or network.
_LOOK_SECONDS = 0.005


class Upload:
    """One upload; `run` in one thread, `hurry` and `stop` from any.

    Each block is checked when it is read: what the fast storage has damaged becomes no object. An
    upload that ends in the middle leaves no object.
    """

    def __init__(
        self, store: ObjectStore, source: Path, step: int, name: str, part: Part, pacing: Pacing
    ) -> None:
        self._store, self._source, self._step, self._name = store, source, step, name
        self._part, self._pacing = part, pacing
        self._urgent = threading.Event()
        self._stopped = False
        self._failed: Exception | None = None

    def hurry(self) -> None:
        """No rate and no gate from now on."""
        self._urgent.set()

    def stop(self) -> None:
        self._stopped = True
        self._urgent.set()

    def run(self) -> None:
        """Uploads the part.

        Raises:
            CorruptionError: a block of the file is damaged.
            StoppedError: `stop` was called.
            UnreachableError: the store does not take it.
        """
        key, size = self._store.part_key(self._step, self._name), self._part.size
        chunk = _CHUNK
        while chunk * _MOST_CHUNKS < size:
            chunk *= 2

        def put(obstore: Any, store: Any) -> None:
            blocks, errors = self._checked(), obstore.exceptions
            try:
                if size <= chunk:
                    obstore.put(store, key, b"".join(blocks), use_multipart=False)
                else:
                    obstore.put(store, key, blocks, chunk_size=chunk, max_concurrency=_IN_FLIGHT)
            except (errors.AlreadyExistsError, errors.PreconditionError) as error:
                # The request had no condition: another change is under way, or the bucket has rules.
                raise UnreachableError(
                    f"cannot write {self._store.place(self._step) / self._name}: "
                    f"{client.brief(error)[:500]}"
                ) from None

        try:
            self._store.ask("write", key, put)
        except Exception as error:
            if self._failed is not None:
                raise self._failed from None
            if not isinstance(error, UnreachableError | FileNotFoundError):
                raise
            # The name is this upload's alone: a whole object is it, and its answer was lost.
            if self._store.part_size(self._step, self._name) != size:
                if isinstance(error, UnreachableError):
                    raise
                raise UnreachableError(
                    f"cannot write {self._store.place(self._step) / self._name}: the store has "
                    "forgotten the upload"
                ) from None

    def _checked(self) -> Iterator[bytes]:
        try:
            with io_errors("read", self._source):
                yield from self._read()
        except Exception as error:
            self._failed = error
            raise

    def _read(self) -> Iterator[bytes]:
        block, free = _native.CHECKPOINT_BLOCK, time.monotonic()
        left = self._part.size
        with self._source.open("rb") as file:
            for number, crc in enumerate(self._part.crcs):
                free = self._wait(free, min(block, left))
                data = file.read(min(block, left))
                if _native.crc32c(data) != crc:
                    raise CorruptionError(
                        f"{self._source} is damaged: bytes {number * block} to "
                        f"{number * block + min(block, left)} do not match their CRC32C"
                    )
                left -= len(data)
                yield data

    def _wait(self, free: float, size: int) -> float:
        """Waits until so many bytes may pass; the time from which the next ones may."""
        pacing = self._pacing
        now = time.monotonic()
        patience = now + pacing.gate_patience
        while pacing.gate is not None and not self._urgent.is_set() and now < patience:
            busy = pacing.considerate and not _native.Activity.quiet()
            if not busy and not pacing.gate.held:
                break
            self._urgent.wait(_LOOK_SECONDS)
            now = time.monotonic()
        if pacing.rate and free > now:
            self._urgent.wait(free - now)
        if self._stopped:
            raise StoppedError(f"{self._name} is not uploaded: the checkpointer is closed")
        return max(free, now) + (size / pacing.rate if pacing.rate else 0.0)


class ObjectPart:
    """A part that is read in runs of blocks, as `_native.CheckedFile` is."""

    def __init__(self, store: ObjectStore, step: int, part: Part) -> None:
        self._store, self._step, self._part = store, step, part
        # Private, or a forked process would share it; page-aligned, as arrays in files expect.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(1, part.size), flags=flags)
        self._data: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[: part.size]

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    def read(
        self,
        first: int,
        count: int,
        threads: int,
        progress: _native.Progress | None = None,
        address: int = 0,
    ) -> list[int]:
        size = _native.CHECKPOINT_BLOCK
        begin, end = first * size, min((first + count) * size, self._part.size)
        if address:
            memory = (ctypes.c_uint8 * (end - begin)).from_address(address)
            into: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        else:
            into = self._data[begin:end]
        blocks = range(first, first + count)
        return read_blocks(self._store, self._step, self._part, blocks, into, threads, progress)


def _in_threads(threads: int, call: Callable[[int], T], values: Iterable[int]) -> list[T]:
    """The results of the calls, in any order, by so many threads with this one or as many as the system
    gives; the first error of one of them ends it, and so does an interrupt. No call is under way then:
    the memory that it writes to may go."""
    left, lock = iter(values), threading.Lock()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    value = next(left, None)
                if value is None:
                    return
                results.append(call(value))
        except BaseException as error:
            errors.append(error)

    helpers: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # a limit of processes
            for _ in range(threads - 1):
                helpers.append(threading.Thread(target=work, name="nostall restore"))
                helpers[-1].start()
        work()
    except BaseException as error:  # an interrupt
        errors.append(error)
    while alive := [helper for helper in helpers if helper.is_alive()]:
        try:
            alive[0].join()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise next((e for e in errors if not isinstance(e, Exception)), errors[0])
    return results


def read_blocks(
    store: ObjectStore,
    step: int,
    part: Part,
    blocks: range,
    into: NDArray[np.uint8] | None,
    threads: int,
    progress: _native.Progress | None,
) -> list[int]:
    """Reads consecutive blocks, several ranges at a time, and gives those that are damaged.

    Raises:
        IoError: the object is not there.
        CorruptionError: it has another size.
        UnreachableError: the store does not answer.
    """
    size, key = _native.CHECKPOINT_BLOCK, store.part_key(step, part.name)

    def one(first: int) -> list[int]:
        last = min(first + _RUN, blocks.stop)
        begin, end = first * size, min(last * size, part.size)

        def get(obstore: Any, objects: Any) -> tuple[int, Any]:
            try:
                result = obstore.get(objects, key, options={"range": (begin, end)})
                there, body = int(result.meta["size"]), np.frombuffer(result.bytes(), np.uint8)
            except Exception as error:
                if "status code: 416" not in client.brief(error):
                    raise
                # The object ends before the range. The answer does not say its size.
                there, body = int(obstore.head(objects, key)["size"]), np.empty(0, np.uint8)
            if there == part.size and len(body) != end - begin:
                raise OSError(f"the answer has {len(body)} bytes instead of {end - begin}")
            return there, body

        there, body = store.ask("read", key, get)
        if there != part.size:
            raise CorruptionError(
                f"{store.place(step) / part.name} has {there} bytes, not {part.size}"
            )
        damaged = []
        for block in range(first, last):
            piece = body[block * size - begin : (block + 1) * size - begin]
            if _native.crc32c_of(piece) != part.crcs[block]:
                damaged.append(block)
        if into is not None:
            at = begin - blocks.start * size
            into[at : at + len(body)] = body
        if progress is not None:
            progress.add(len(body))
        return damaged

    try:
        runs = _in_threads(min(_READERS, threads), one, range(blocks.start, blocks.stop, _RUN))
        return sorted(itertools.chain.from_iterable(runs))
    except FileNotFoundError:
        raise IoError(f"{store.place(step) / part.name} does not exist") from None
