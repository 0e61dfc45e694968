"""An emulated object store: the reading part of S3 over files, each answer late and slow as stated.

`ObjectStore` starts it as a process of its own, ``python -m nostall_bench.object_store``. It answers
ListObjectsV2, HEAD and GET (with Range, If-Match and ETag), path style, without checking signatures.
An answer begins after the time to the first byte; its body flows at the bandwidth of its connection,
and of all connections together, a piece at a time, so that connections share it. The times follow
from a seed, in the order of the requests: each is up to a tenth above the latency or a little more,
and one in fifty takes four times as long.

``GET /-/counts`` answers at once: what was asked for, and what has been in flight, since the start.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import random
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from nostall.errors import UsageError
from nostall_bench.programs import child_environment

# Of a body, sent at once: small enough that connections share the bandwidth evenly.
_PIECE = 64 << 10
_LATE, _TIMES = 1 / 50, 4.0
_START_SECONDS = 60
_MOST_KEYS = 1000
# What clients of S3 want to have before they ask; nothing here is checked.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "nostall",
    "AWS_SECRET_ACCESS_KEY": "nostall",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Counts(NamedTuple):
    """What the store has answered since its start.

    Attributes:
        requests: of all kinds.
        bytes: of bodies.
        flight_seconds: requests in flight, summed over time: by the seconds, their mean number.
        peak: most requests in flight at once since the last look.
        latency_seconds: times to the first byte, summed.
    """

    requests: int
    bytes: int
    flight_seconds: float
    peak: int
    latency_seconds: float


def counts(endpoint: str) -> Counts:
    """The counts of the store at `endpoint`; begins a new peak."""
    with urllib.request.urlopen(f"{endpoint}/-/counts", timeout=30) as answer:
        return Counts(**json.loads(answer.read()))


class ObjectStore:
    """A store with the files of some folders as objects; a context manager.

    Args:
        buckets: the folder of each bucket.
        latency: seconds to the first byte of an answer.
        connection: bytes/s of one connection; 0 for no limit.
        total: bytes/s of all connections; 0 for no limit.
        seed: of the latencies.

    Raises:
        UsageError: a number is negative, a folder is not there, or the store does not start.
    """

    def __init__(
        self,
        buckets: Mapping[str, Path],
        *,
        latency: float = 0.03,
        connection: float = 0.0,
        total: float = 0.0,
        seed: int = 0,
    ) -> None:
        if min(latency, connection, total) < 0:
            raise UsageError("latency and bandwidths must not be negative")
        for name, folder in buckets.items():
            if not folder.is_dir():
                raise UsageError(f"bucket {name}: {folder} is not a directory")
        self._settings = {
            "buckets": {name: str(folder) for name, folder in buckets.items()},
            "latency": latency,
            "connection": connection,
            "total": total,
            "seed": seed,
        }
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = ""

    def __enter__(self) -> ObjectStore:
        # Its end of the pipe closes with this process, however that ends, and it ends too.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nostall_bench.object_store", json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            if not ready:
                self._process.kill()
            self.close()
            why = "see its message above" if ready else f"it says nothing for {_START_SECONDS} s"
            raise UsageError(f"the emulated object store did not start: {why}")
        self.endpoint = line.strip()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    @property
    def environment(self) -> dict[str, str]:
        """For a process that reads from it with a client of S3."""
        found = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}
        found["AWS_ALLOW_HTTP"] = "true"
        return found | {"AWS_ENDPOINT_URL_S3": self.endpoint, "S3_ENDPOINT_URL": self.endpoint}

    def counts(self) -> Counts:
        """What it has answered so far; begins a new peak."""
        return counts(self.endpoint)


# The process itself


class _Object(NamedTuple):
    body: memoryview
    tag: str
    modified: float


class _Bandwidth:
    """Hands out the times at which bytes have passed a link of some bytes/s, 0 for no limit."""

    def __init__(self, rate: float) -> None:
        self._seconds = 1 / rate if rate else 0.0
        self._free = 0.0

    def passed(self, size: int, earliest: float) -> float:
        """When `size` bytes that are there at `earliest` have passed, after all others."""
        self._free = max(self._free, earliest) + size * self._seconds
        return self._free


class _Store:
    """What all connections share."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.latency = float(settings["latency"])
        self.connection = float(settings["connection"])
        self.total = _Bandwidth(settings["total"])
        self.random = random.Random(settings["seed"])
        self.buckets = {
            name: dict(sorted(_objects(Path(folder))))
            for name, folder in settings["buckets"].items()
        }
        self.requests = self.bytes = self.flying = self.peak = 0
        self.latencies = self._sum = 0.0
        self._since = time.monotonic()

    def first_byte(self) -> float:
        """Seconds until an answer begins."""
        seconds = self.latency * (1 + 0.1 * self.random.expovariate(1))
        if self.random.random() < _LATE:
            seconds *= _TIMES
        self.latencies += seconds
        return seconds

    def fly(self, change: int) -> None:
        """Accounts for a request that begins or ends."""
        now = time.monotonic()
        self._sum += self.flying * (now - self._since)
        self._since = now
        self.flying += change
        self.peak = max(self.peak, self.flying)

    def count(self) -> Counts:
        self.fly(0)
        found = Counts(self.requests, self.bytes, self._sum, self.peak, self.latencies)
        self.peak = self.flying
        return found


def _objects(folder: Path) -> list[tuple[str, _Object]]:
    found = []
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        status = path.stat()
        if status.st_size:
            with path.open("rb") as file:
                body = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        else:
            body = memoryview(b"")
        name = str(path.relative_to(folder))
        tag = hashlib.md5(f"{name} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
        found.append((name, _Object(body, f'"{tag}"', status.st_mtime)))
    return found


_WORDS = {200: "OK", 206: "Partial Content", 400: "Bad Request", 404: "Not Found"}
_WORDS |= {405: "Method Not Allowed", 412: "Precondition Failed", 416: "Range Not Satisfiable"}


class _Connection(asyncio.Protocol):
    """Answers the requests of one connection, one after the other."""

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._link = _Bandwidth(store.connection)
        self._received = b""
        self._busy = False
        self._closed = False
        self._writable = True
        self._held = False  # until the client has taken what was sent
        self._left: memoryview = memoryview(b"")
        self._close_after = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        transport.set_write_buffer_limits(high=4 * _PIECE)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        if self._busy:
            self._store.fly(-1)
            self._busy = False

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._held:
            self._held = False
            self._next_piece(self._loop.time())

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._busy:
            self._next_request()

    def _next_request(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head, self._received = self._received[:end].decode("latin-1"), self._received[end + 4 :]
        first, *lines = head.split("\r\n")
        method, target, version = first.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        self._close_after = (
            headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
        )
        self._busy = True
        if target == "/-/counts":
            told = json.dumps(self._store.count()._asdict()).encode()
            self._transport.write(_head(200, {"Content-Length": str(len(told))}) + told)
            self._end()
            return
        self._store.requests += 1
        self._store.fly(+1)
        status, more, body = _answer(self._store, method, target, headers)
        self._left = memoryview(b"") if method == "HEAD" else memoryview(body)
        start = _head(status, {"Content-Length": str(len(body)), **more})
        self._loop.call_later(self._store.first_byte(), self._begin, start)

    def _begin(self, start: bytes) -> None:
        if not self._closed:
            self._transport.write(start)
            self._continue(self._loop.time())

    def _next_piece(self, earliest: float) -> None:
        if not self._left:
            self._store.fly(-1)
            self._end()
            return
        size = min(_PIECE, len(self._left))
        passed = max(self._link.passed(size, earliest), self._store.total.passed(size, earliest))
        self._loop.call_at(passed, self._send, size, passed)

    def _send(self, size: int, now: float) -> None:
        if self._closed:
            return
        self._transport.write(self._left[:size])
        self._left = self._left[size:]
        self._store.bytes += size
        # From the time that was due: what the loop is late by costs no bandwidth.
        self._continue(now)

    def _continue(self, now: float) -> None:
        self._held = not self._writable
        if not self._held:
            self._next_piece(now)

    def _end(self) -> None:
        self._busy = False
        if self._close_after:
            self._transport.close()
        elif self._received:
            self._next_request()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {_WORDS[status]}", *(f"{k}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _answer(
    store: _Store, method: str, target: str, headers: Mapping[str, str]
) -> tuple[int, dict[str, str], bytes | memoryview]:
    """(status, headers, body) of a request."""
    split = urlsplit(target)
    bucket, _, key = unquote(split.path).lstrip("/").partition("/")
    objects = store.buckets.get(bucket)
    if method not in ("GET", "HEAD"):
        return _error(405, "MethodNotAllowed")
    if objects is None:
        return _error(404, "NoSuchBucket")
    if not key:
        return _listing(bucket, objects, parse_qs(split.query, keep_blank_values=True))
    found = objects.get(key)
    if found is None:
        return _error(404, "NoSuchKey")
    wanted = headers.get("if-match")
    if wanted and wanted.strip('"') != found.tag.strip('"'):
        return _error(412, "PreconditionFailed")
    more = {
        "ETag": found.tag,
        "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(found.modified)),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    asked = headers.get("range", "")
    if not asked.startswith("bytes="):
        return 200, more, found.body
    size = len(found.body)
    low, _, high = asked.removeprefix("bytes=").partition("-")
    begin = int(low) if low else max(0, size - int(high))
    end = min(size, int(high) + 1) if low and high else size
    if begin >= end:
        return _error(416, "InvalidRange")
    more["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    return 206, more, found.body[begin:end]


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return status, {"Content-Type": "application/xml"}, body.encode()


def _listing(
    bucket: str, objects: Mapping[str, _Object], query: Mapping[str, list[str]]
) -> tuple[int, dict[str, str], bytes]:
    def of(name: str, usual: str = "") -> str:
        return query.get(name, [usual])[0]

    prefix, delimiter = of("prefix"), of("delimiter")
    after = of("continuation-token") or of("start-after")
    most = min(_MOST_KEYS, int(of("max-keys", str(_MOST_KEYS))))
    keys: list[str] = []
    folders: list[str] = []
    last, more = "", False
    for name in objects:
        if not name.startswith(prefix) or name <= after:
            continue
        folder = ""
        if delimiter and delimiter in name[len(prefix) :]:
            folder = prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter
            if after.startswith(folder) or (folders and folders[-1] == folder):
                last = name
                continue
        if len(keys) + len(folders) == most:
            more = True
            break
        (folders if folder else keys).append(folder or name)
        last = name
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(keys) + len(folders)}</KeyCount><MaxKeys>{most}</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
    ]
    if more:
        parts.append(f"<NextContinuationToken>{escape(last)}</NextContinuationToken>")
    for name in keys:
        entry = objects[name]
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(entry.modified))
        parts.append(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{modified}</LastModified>"
            f"<ETag>{escape(entry.tag)}</ETag><Size>{len(entry.body)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    for name in folders:
        parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
    parts.append("</ListBucketResult>")
    return 200, {"Content-Type": "application/xml"}, "".join(parts).encode()


async def _serve(settings: dict[str, Any]) -> None:
    store = _Store(settings)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(store), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    ended = asyncio.Event()

    def look() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            ended.set()

    loop.add_reader(sys.stdin.fileno(), look)
    await ended.wait()


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=json.loads)
    asyncio.run(_serve(parser.parse_args().settings))


if __name__ == "__main__":
    main()
