"""A checked copy of a part from a file to an object, by a multipart upload in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall import _native
from nostall.checkpoint._files import Pacing, UnreachableError, io_errors
from nostall.checkpoint._format import Part
from nostall.errors import CorruptionError, StoppedError

if TYPE_CHECKING:
    from nostall.checkpoint._objects import ObjectFiles

# Of a multipart upload: bytes of a request, requests at a time (the client begins one more before it
# waits), and the most requests that S3 takes of one.
_CHUNK = 8 << 20
_IN_FLIGHT = 3
_MOST_CHUNKS = 9_000
# How often the training is asked whether it needs storage or network.
_LOOK_SECONDS = 0.005


class Upload:
    """One upload; `run` in one thread, `hurry` and `stop` from any.

    Each block is checked when it is read: what the fast storage has damaged becomes no object. An
    upload that ends in the middle leaves no object.
    """

    def __init__(
        self, files: ObjectFiles, source: Path, step: int, name: str, part: Part, pacing: Pacing
    ) -> None:
        self._files, self._source, self._step, self._name = files, source, step, name
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
        key, size = self._files.key(self._step, self._name), self._part.size
        chunk = _CHUNK
        while chunk * _MOST_CHUNKS < size:
            chunk *= 2

        def put(obstore: Any, store: Any) -> None:
            blocks = self._checked()
            if size <= chunk:
                obstore.put(store, key, b"".join(blocks), use_multipart=False)
            else:
                obstore.put(store, key, blocks, chunk_size=chunk, max_concurrency=_IN_FLIGHT)

        try:
            self._files.ask("write", key, put)
        except Exception as error:
            if self._failed is not None:
                raise self._failed from None
            if not isinstance(error, UnreachableError | FileNotFoundError):
                raise
            # The name is this upload's alone: a whole object is it, and its answer was lost.
            if self._files.sizes(self._step, [self._name])[self._name] != size:
                if isinstance(error, UnreachableError):
                    raise
                raise UnreachableError(
                    f"cannot write {self._files.place(self._step) / self._name}: the store has "
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
