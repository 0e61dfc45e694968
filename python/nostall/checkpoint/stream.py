"""Short authenticated conversations between the processes of a job: a question, an answer, a file.

A connection carries one question. Both ends prove the job's secret (HMAC of both sides' random
numbers, so nothing can be played back) before anything else is read; messages are JSON, files travel
as they are and are checked by their CRC32C at the end. docs/formats/checkpoint.md has the bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nostall.errors import CorruptionError, PeerError

_MAGIC = b"nostall checkpoint stream 1\n"
_NONCE = 32
_LARGEST = 256 << 20
_CHUNK = 4 << 20
_GREETING_SECONDS = 10.0
_CONNECTIONS = 256

_log = logging.getLogger("nostall")


class Stream:
    """One side of a connection that has proved itself; every wait ends after `timeout` seconds."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket = connection
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            got = self._socket.recv(min(size, _CHUNK))
            if not got:
                raise ConnectionError("the other side closed the connection")
            parts.append(got)
            size -= len(got)
        return b"".join(parts)

    def prove(self, secret: bytes, listening: bool) -> None:
        """Raises PeerError unless the other side knows the secret."""
        mine = secrets.token_bytes(_NONCE)
        self._socket.sendall(_MAGIC + mine)
        greeting = self._read(len(_MAGIC) + _NONCE)
        if not greeting.startswith(_MAGIC):
            raise PeerError("this is no checkpoint stream of this release")
        theirs = greeting[len(_MAGIC) :]
        both = mine + theirs if listening else theirs + mine
        sides = (b"listens", b"connects") if listening else (b"connects", b"listens")
        self._socket.sendall(hmac.digest(secret, sides[0] + both, "sha256"))
        answer = self._read(32)
        if not hmac.compare_digest(answer, hmac.digest(secret, sides[1] + both, "sha256")):
            raise PeerError("the other side of a checkpoint stream has another secret")

    def send(self, message: Any) -> None:
        """A message of plain values."""
        data = json.dumps(message).encode()
        self._socket.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> Any:
        """The next message."""
        (size,) = struct.unpack("<I", self._read(4))
        if size > _LARGEST:
            raise PeerError(f"a message of {size} bytes on a checkpoint stream")
        try:
            return json.loads(self._read(size))
        except ValueError as error:
            raise PeerError(f"a message on a checkpoint stream cannot be read: {error}") from error

    def send_file(self, path: Path, size: int) -> None:
        """Its first `size` bytes, without a copy in this process."""
        with open(path, "rb") as file:
            if self._socket.sendfile(file, 0, size) != size:
                raise CorruptionError(f"{path} ends before its {size} bytes")

    def receive_file(self, path: Path, size: int) -> None:
        """`size` bytes into a new file, on its device at the end."""
        buffer = bytearray(min(size, _CHUNK) or 1)
        view = memoryview(buffer)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            while size:
                got = self._socket.recv_into(view, min(size, len(buffer)))
                if got == 0:
                    raise ConnectionError("the other side closed the connection")
                part = view[:got]
                while part:
                    part = part[os.write(fd, part) :]
                size -= got
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def connect(address: tuple[str, int], secret: bytes, timeout: float) -> Stream:
    """To the listener at `address`.

    Raises:
        PeerError: it is not there, or of another job.
    """
    try:
        stream = Stream(socket.create_connection(address, min(timeout, 30.0)), timeout)
    except OSError as error:
        raise PeerError(f"cannot reach {address[0]}:{address[1]}: {error}") from error
    try:
        stream.prove(secret, listening=False)
    except BaseException:
        stream.close()
        raise
    return stream


def own_host() -> str:
    """The address of this machine by which other nodes of the job reach it.

    NOSTALL_HOST overrides it; else it is that of the interface towards the job's first node.
    """
    if host := os.environ.get("NOSTALL_HOST"):
        return host
    first = os.environ.get("MASTER_ADDR") or (
        urlsplit(os.environ.get("NOSTALL_RENDEZVOUS", "")).hostname
    )
    with contextlib.suppress(OSError):
        target = first or socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing: only the route is asked for
            return str(probe.getsockname()[0])
    return "127.0.0.1"


class Listener:
    """Answers questions, each in a thread of its own, until closed.

    Args:
        answer: given a question and its stream.
        secret: what both sides must know.
        timeout: seconds of silence that end a conversation.
    """

    def __init__(
        self, answer: Callable[[dict[str, Any], Stream], None], secret: bytes, timeout: float
    ) -> None:
        self._answer, self._secret, self._timeout = answer, secret, timeout
        self._socket = socket.create_server((own_host(), 0), backlog=_CONNECTIONS)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        self._thread = threading.Thread(
            target=self._listen, name="nostall-checkpoint-listener", daemon=True
        )
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            self._room.acquire()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                # A stranger who says nothing is not waited for.
                Stream(connection, _GREETING_SECONDS).prove(self._secret, listening=True)
                stream = Stream(connection, self._timeout)
                self._answer(stream.receive(), stream)
        except (OSError, PeerError) as error:
            _log.debug("a conversation about checkpoints ended: %s", error)
        finally:
            self._room.release()

    def close(self) -> None:
        """No more questions."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
