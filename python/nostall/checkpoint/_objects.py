"""A store of checkpoints on an object store: the same names, by requests of obstore.

Two things differ from a directory. A file that decides (a manifest, a rank's word) is written on a
condition: that there is none, or still the one that was read. And there are no locks: a job that begins
notes itself in ``.owner``, and the one before is refused from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import logging
import mmap
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base import _object_client as client
from nostall.checkpoint._files import (
    CheckedPart,
    ConflictError,
    Copy,
    Pacing,
    UnknownOutcomeError,
    UnreachableError,
    Url,
    Version,
    step_name,
    steps_of,
)
from nostall.checkpoint._format import Part
from nostall.checkpoint._upload import Upload
from nostall.errors import CorruptionError, Error, IoError, PeerError, UsageError

SCHEMES = ("s3://", "s3a://", "gs://", "az://", "abfs://", "abfss://")
_OWNER = ".owner"
# Attempts of a request whose connection ends, which the client's own retries do not all cover.
_ATTEMPTS = 3
_RUN = 2  # blocks of a read
_READERS = 16

_log = logging.getLogger("nostall")


class ObjectFiles:
    """Objects below a URL such as ``s3://bucket/run1``."""

    look_seconds = 0.2

    def __init__(self, url: str) -> None:
        match = re.fullmatch(r"([a-z0-9]+://[^/?#]+)(?:/(.*))?", url.rstrip("/"))
        if not match or not url.startswith(SCHEMES):
            raise UsageError(f"{url} is not a place for checkpoints on an object store")
        self.root = Url(url.rstrip("/"))
        self._bucket, self._prefix = match[1], match[2] or ""
        self._store: Any = None
        self._owner: bytes | None = None

    # ------------------------------------------------------------------ requests

    def key(self, step: int | None, name: str = "") -> str:
        """Of an object in its bucket."""
        within = "" if step is None else step_name(step)
        return "/".join(filter(None, (self._prefix, within, name)))

    def place(self, step: int) -> Url:
        return self.root / step_name(step)

    def ask(self, doing: str, key: str, call: Callable[[Any, Any], Any]) -> Any:
        """What `call(obstore, store)` gives.

        Raises:
            FileNotFoundError: there is no such object.
            UnreachableError: the store cannot be asked, or refuses.
        """
        url = f"{self._bucket}/{key}"
        obstore = client.client(url)
        if self._store is None:
            self._store = client.connect(self._bucket)
        for attempt in itertools.count(1):
            try:
                return call(obstore, self._store)
            except Exception as error:
                if isinstance(error, (*_refusals(obstore), Error, TypeError)):
                    raise
                if _no_bucket(error):
                    raise UnreachableError(
                        f"cannot {doing} {url}: {self._bucket} does not exist: make the bucket, or "
                        "correct its name"
                    ) from None
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
                if attempt < _ATTEMPTS and client.worth_another(error):
                    continue
                text = client.denied(error) or client.brief(error)[:500]
                kind = UnreachableError if _is_final(error) else UnknownOutcomeError
                raise kind(f"cannot {doing} {url}: {text}") from None
        raise AssertionError  # the loop has no end

    def _put_if(self, step: int | None, name: str, data: bytes, before: Version) -> None:
        """Writes an object if there is none (`before` is None), or still the one that was read.

        An answer may be lost: what is there then decides.

        Raises:
            ConflictError: another object is there.
            UnknownOutcomeError: whether it was written is not known.
        """
        key = self.key(step, name)
        mode = "create" if before is None else before

        def put(obstore: Any, store: Any) -> None:
            try:
                obstore.put(store, key, data, mode=mode, use_multipart=False)
            except (NotImplementedError, obstore.exceptions.NotSupportedError) as error:
                raise UsageError(_unconditional(self._bucket)) from error

        try:
            self.ask("write", key, put)
        except Exception as error:
            if not isinstance(
                error, (*_refusals(client.client(key)), FileNotFoundError, UnknownOutcomeError)
            ):
                raise
            try:
                there = self.read(step, name)[0]
            except FileNotFoundError:
                there = b""
            if there == data:
                return  # its answer was lost
            if isinstance(error, UnknownOutcomeError):
                raise
            raise ConflictError(
                f"{self._bucket}/{key} was written by another job meanwhile: give every job a "
                "store of its own"
            ) from None

    def _list(self, key: str) -> dict[str, int]:
        """Names and sizes of the objects right below."""

        def listing(obstore: Any, store: Any) -> dict[str, int]:
            found = obstore.list_with_delimiter(store, key or None)["objects"]
            return {str(m["path"]).rpartition("/")[2]: int(m["size"]) for m in found}

        found: dict[str, int] = self.ask("list", key, listing)
        return found

    # ------------------------------------------------------------------ files

    def steps(self) -> list[int]:
        def listing(obstore: Any, store: Any) -> list[str]:
            found = obstore.list_with_delimiter(store, self._prefix or None)["common_prefixes"]
            return [str(path).rstrip("/").rpartition("/")[2] for path in found]

        return steps_of(self.ask("list", self._prefix, listing))

    def names(self, step: int) -> list[str]:
        return sorted(self._list(self.key(step)))

    def sizes(self, step: int, names: Sequence[str]) -> dict[str, int | OSError]:
        found = self._list(self.key(step)) if names else {}
        gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return {name: found.get(name, gone) for name in names}

    def read(self, step: int | None, name: str) -> tuple[bytes, Version]:
        key = self.key(step, name)

        def get(obstore: Any, store: Any) -> tuple[bytes, Version]:
            result = obstore.get(store, key)
            meta = result.meta
            data = bytes(result.bytes())
            if len(data) != int(meta["size"]):
                raise OSError(f"the answer has {len(data)} bytes instead of {meta['size']}")
            tags = {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
            return data, tags

        found: tuple[bytes, Version] = self.ask("read", key, get)
        return found

    def write(self, step: int | None, name: str, data: bytes) -> None:
        key = self.key(step, name)
        self.ask("write", key, lambda o, store: o.put(store, key, data, use_multipart=False))

    def replace(self, step: int, name: str, data: bytes, before: Version) -> None:
        self._put_if(step, name, data, before)

    def unlink(self, step: int | None, names: Iterable[str]) -> None:
        keys = [self.key(step, name) for name in names]

        def delete(obstore: Any, store: Any) -> None:
            try:
                obstore.delete(store, keys)
            except FileNotFoundError:  # some stores say so, and stop
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(store, key)

        if keys:
            with contextlib.suppress(FileNotFoundError):
                self.ask("remove", keys[0], delete)

    def put_aside(self, name: str, new: str) -> None:
        self.write(None, new, self.read(None, name)[0])
        self.unlink(None, [name])

    def make(self) -> None:
        self._list(self._prefix)  # the bucket is there, and may be read

    # There are no directories, and what was written is durable.

    def make_step(self, step: int) -> None:
        pass

    def leave_step(self, step: int) -> None:
        pass

    def sync(self, step: int | None) -> None:
        pass

    # ------------------------------------------------------------------ ranks

    def take(self, step: int, word: str, taken: str) -> bytes:
        try:
            data = self.read(step, word)[0]
        except FileNotFoundError:
            return self.read(step, taken)[0]
        try:
            self._put_if(step, taken, data, None)
        except ConflictError:  # the rank has withdrawn it
            return self.read(step, taken)[0]
        self.unlink(step, [word])
        return data

    def withdraw(self, step: int, word: str, taken: str, left: bool) -> bool:
        try:
            self._put_if(step, taken, b'{"failed": "it has given up"}', None)
        except ConflictError:
            return False
        if left and not self.waits(step, word):
            # Rank 0 took the word, and has removed what it noted of that since.
            self.unlink(step, [taken])
            return False
        self.unlink(step, [word])
        return True

    def waits(self, step: int, word: str) -> bool:
        try:
            self.read(step, word)
        except FileNotFoundError:
            return False
        return True

    def mark(self, token: str) -> None:
        self.write(None, f".run-{token}", b"")

    def marked(self, tokens: Sequence[str]) -> list[int]:
        names = self._list(self._prefix)
        return [i for i, token in enumerate(tokens) if f".run-{token}" in names]

    def unmark(self) -> None:
        self.unlink(None, [n for n in self._list(self._prefix) if n.startswith(".run-")])

    # ------------------------------------------------------------------ owning

    def own(self) -> None:
        me = {"run": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid()}
        data = json.dumps(me).encode()
        for _ in range(_ATTEMPTS):
            try:
                before = self.read(None, _OWNER)[1]
            except FileNotFoundError:
                before = None
            try:
                self._put_if(None, _OWNER, data, before)
                break
            except ConflictError as error:
                conflict = error
        else:
            raise conflict
        self._owner = data
        with contextlib.suppress(ConflictError):
            # A store that knows conditions refuses this, because the object is there.
            self._put_if(None, _OWNER, b"{}", None)
            raise UsageError(_unconditional(self._bucket))

    def disown(self) -> None:
        self._owner = None

    def check_owned(self) -> None:
        if self._owner is None:
            return
        try:
            there = self.read(None, _OWNER)[0]
        except FileNotFoundError:
            there = b"{}"
        if there == self._owner:
            return
        other = "another job"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            values = json.loads(there)
            other = f"process {values['pid']} on {values['host']}"
        raise PeerError(
            f"{self.root} was taken over by {other}, which began later: give every job a store of "
            "its own"
        )

    def abort_uploads(self, ours: Callable[[str], bool]) -> None:
        if not self._bucket.startswith(("s3://", "s3a://")):
            return  # boto3 knows no others
        try:
            import boto3
        except ImportError:
            return
        bucket, below = self._bucket.partition("://")[2], self.key(None) and self.key(None) + "/"
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or None
        try:
            s3 = boto3.client("s3", endpoint_url=endpoint)
            pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=below)
            for upload in [u for page in pages for u in page.get("Uploads", ())]:
                step, _, name = str(upload["Key"]).removeprefix(below).partition("/")
                if steps_of([step]) and ours(name):
                    ids = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    s3.abort_multipart_upload(Bucket=bucket, **ids)
        except Exception as error:
            _log.warning("uploads that were interrupted stay in %s: %s", self.root, error)

    # ------------------------------------------------------------------ parts

    def copy(self, source: Path, step: int, name: str, part: Part, pacing: Pacing) -> Copy:
        return Upload(self, source, step, name, part, pacing)

    def open(self, step: int, part: Part) -> CheckedPart:
        return ObjectPart(self, step, part)

    def check(
        self,
        step: int,
        part: Part,
        threads: int,
        progress: _native.Progress | None = None,
        priority: _native.Priority = _native.Priority.normal,
    ) -> list[int]:
        return read_blocks(self, step, part, range(len(part.crcs)), None, threads, progress)


class ObjectPart:
    """A part that is read in runs of blocks, as `_native.CheckedFile` is."""

    def __init__(self, files: ObjectFiles, step: int, part: Part) -> None:
        self._files, self._step, self._part = files, step, part
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
        return read_blocks(self._files, self._step, self._part, blocks, into, threads, progress)


def read_blocks(
    files: ObjectFiles,
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
    """
    size, key = _native.CHECKPOINT_BLOCK, files.key(step, part.name)

    def one(first: int) -> list[int]:
        last = min(first + _RUN, blocks.stop)
        begin, end = first * size, min(last * size, part.size)

        def get(obstore: Any, store: Any) -> tuple[int, Any]:
            result = obstore.get(store, key, options={"range": (begin, end)})
            there, body = int(result.meta["size"]), np.frombuffer(result.bytes(), np.uint8)
            if there == part.size and len(body) != end - begin:
                raise OSError(f"the answer has {len(body)} bytes instead of {end - begin}")
            return there, body

        there, body = files.ask("read", key, get)
        if there != part.size:
            raise CorruptionError(
                f"{files.place(step) / part.name} has {there} bytes, not {part.size}"
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
        with ThreadPoolExecutor(min(_READERS, max(1, threads)), "nostall restore") as pool:
            runs = pool.map(one, range(blocks.start, blocks.stop, _RUN))
            return [block for damaged in runs for block in damaged]
    except FileNotFoundError:
        raise IoError(f"{files.place(step) / part.name} does not exist") from None


def _refusals(obstore: Any) -> tuple[type[Exception], ...]:
    """What says that a condition does not hold."""
    return obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError


def _no_bucket(error: Exception) -> bool:
    signs = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
    return any(sign in str(error) for sign in signs)


def _is_final(error: Exception) -> bool:
    """Whether the server has refused, so that nothing was written or will be."""
    status = re.search(r"status code: (\d{3})", client.brief(error))
    refused = status is not None and status[1][0] == "4" and status[1] not in ("408", "409", "429")
    return bool(refused or client.denied(error))


def _unconditional(bucket: str) -> str:
    return (
        f"{bucket} has no conditional writes (If-None-Match), without which a checkpoint cannot become "
        "complete at once: use a store that has them, or a directory"
    )
