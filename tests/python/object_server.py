"""An S3 server (moto's, as a process of its own) and a proxy before it that spoils answers."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
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
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def moto_server() -> Iterator[int]:
    """The port of a server that lives as long as the context."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("moto's server did not start") from None
                time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Answer:
    """What the server said, on its way to the client."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body
        self.cut = -1  # bytes of the body after which the connection ends; -1: none
        self.drop = False  # the connection ends without an answer


def error(status: int, code: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())


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

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
            handler.send_header("Content-Length", answer.headers.get("Content-Length", "0"))
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
