"""An object as a seekable file, for libraries that read their formats themselves."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from typing import Any

from nostall.errors import Error
from nostall.source._objects import Ranges, is_url

# Libraries read headers in small pieces: a request costs more than that many bytes.
_BLOCK = 256 << 10


class ObjectFile(io.RawIOBase):
    """Reads an object by ranged GETs, small ones a block at a time.

    Attributes:
        url: where it lies.
        size: of the object, in bytes.
        version: another number for another content, from its ETag or its time.
        failure: an error of reading: the library may hide it behind one of its own.

    Raises:
        IoError: the object is not there or cannot be read, with its URL.
    """

    def __init__(self, url: str, store: Any = None) -> None:
        self._ranges = Ranges([url], store)
        self._at = 0
        self._block: tuple[int, Any] = (0, b"")
        self.url = url
        self.size: int = self._ranges.sizes[0]
        self.version: int = self._ranges.versions[0]
        self.failure: Error | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset} is before the start of the object")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._get(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """`size` bytes from here on, or all: fewer only where the object ends."""
        return bytes(self._get(self.size if size is None or size < 0 else size))

    def readall(self) -> bytes:
        return self.read()

    def _get(self, size: int) -> memoryview:
        begin = min(self._at, self.size)
        end = min(self.size, begin + size)
        first, block = self._block
        if not first <= begin <= end <= first + len(block):
            if end - begin >= _BLOCK:
                first, block = begin, self._fetch(begin, end - begin)
            else:
                first, block = begin, self._fetch(begin, min(_BLOCK, self.size - begin))
                self._block = first, block
        self._at = end
        return memoryview(block)[begin - first : end - first]

    def _fetch(self, offset: int, size: int) -> Any:
        answer = self._ranges.read([(0, offset, size)])[0]
        if isinstance(answer, BaseException):
            self.failure = answer if isinstance(answer, Error) else None
            raise answer
        return answer


def as_file(path: str, store: Any = None) -> Any:
    """What a library opens: the path itself, or an `ObjectFile` for a URL."""
    return ObjectFile(path, store) if is_url(path) else path


def state_of(file: Any) -> tuple[int, int]:
    """(size, time or version) of what `as_file` gave, as a storage has them."""
    if isinstance(file, ObjectFile):
        return file.size, file.version
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def stamp_of(files: Iterable[Any]) -> int:
    """Another number where one of these, as `as_file` gives them, lies elsewhere or was changed."""
    digest = hashlib.sha256()
    for file in files:
        where = file.url if isinstance(file, ObjectFile) else os.path.realpath(file)
        digest.update(repr((where, *state_of(file))).encode())
    return int.from_bytes(digest.digest()[:8], "little")


def failure_of(file: Any) -> Error | None:
    """Why the last reading failed, if the object store failed and not the bytes; only once."""
    if not isinstance(file, ObjectFile):
        return None
    failure, file.failure = file.failure, None
    return failure
