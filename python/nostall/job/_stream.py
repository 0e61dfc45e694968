"""Authenticated conversations between the processes of a job: a question, an answer, a file, bytes.

A connection carries one question, and what follows from it. Both ends prove the job's secret
(`nostall.job._greeting`) before anything else is read; messages are JSON, files and arrays travel as
they are, files checked by their CRC32C at the end. docs/formats/checkpoint.md and
docs/formats/parameters.md have the bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from nostall.base import _options as options
from nostall.errors import CorruptionError, PeerError, UsageError
from nostall.job import _greeting as greeting

_PURPOSE = "checkpoint"
_LARGEST = 256 << 20
_CHUNK = 4 << 20
_RETRY_SECONDS = 0.1
_LOOK_SECONDS = 3600.0
# What Linux takes: 32767 s for TCP_KEEPIDLE, which is two pauses; an int of ms for TCP_USER_TIMEOUT.
_LONGEST_PAUSE = 16_383
_LONGEST_MS = 2**31 - 1
_ANYWHERE = "192.0.2.1"  # reserved for documentation: the way there is the default route
_SIOCGIFADDR = 0x8915

_log = logging.getLogger("nostall")


class Stream:
    """One side of a connection that has proved itself; every wait ends after `timeout` seconds.

    `bytes` counts messages and arrays, in both directions.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket, self._timeout = connection, timeout
        self.bytes = 0
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def timeout(self) -> float:
        """Seconds of each wait."""
        return self._timeout

    def set_timeout(self, seconds: float) -> None:
        """Of each wait from now on."""
        self._timeout = seconds
        self._socket.settimeout(seconds)

    def keep_alive(self, seconds: float) -> None:
        """Ends a wait, with an OSError, if the other side's machine has not answered for so long."""
        probes = 4
        pause = min(max(1, round(seconds / (probes + 2))), _LONGEST_PAUSE)
        for option, value in (
            (socket.TCP_KEEPIDLE, 2 * pause),
            (socket.TCP_KEEPINTVL, pause),
            (socket.TCP_KEEPCNT, probes),
            (socket.TCP_USER_TIMEOUT, min(round(1000 * seconds), _LONGEST_MS)),
        ):
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def has_news(self) -> bool:
        """Whether the other side has said something that was not received yet, or has ended."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:  # in parts: the size is only what the other side says
            part = bytearray(min(size, _CHUNK))
            self.receive_into(memoryview(part))
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, message: Any) -> None:
        """A message of plain values."""
        data = json.dumps(message).encode()
        self.send_bytes(memoryview(struct.pack("<I", len(data)) + data))

    def send_bytes(self, data: memoryview) -> None:
        """Bytes of a length that the other side knows."""
        for at in range(0, data.nbytes, _CHUNK):  # the limit of time is for each part
            self._socket.sendall(data[at : at + _CHUNK])
        self.bytes += data.nbytes

    def receive_into(self, data: memoryview) -> None:
        """Bytes that the other side sends by `send_bytes`, as many as there is room for."""
        self.bytes += data.nbytes
        while data:
            got = self._socket.recv_into(data)
            if not got:
                raise ConnectionError("the other side closed the connection")
            data = data[got:]

    def receive(self) -> dict[str, Any]:
        """The next message."""
        (size,) = struct.unpack("<I", self._read(4))
        if size > _LARGEST:
            raise PeerError(f"a message of {size} bytes came from another process of the job")
        try:
            message = json.loads(self._read(size))
        except ValueError as error:
            raise PeerError(
                f"a message from another process of the job cannot be read: {error}"
            ) from error
        if not isinstance(message, dict):
            raise PeerError("a message from another process of the job is not a table")
        return message

    def send_file(self, file: BinaryIO, size: int) -> None:
        """Sends the first `size` bytes of a file, without a copy in this process."""
        if self._socket.sendfile(file, 0, size) != size:
            raise CorruptionError(f"{file.name} ends before its {size} bytes")

    def receive_file(
        self, path: Path, size: int, pace: Callable[[int], None] | None = None
    ) -> None:
        """Receives `size` bytes into a new file, which is on its device at the end.

        `pace` is called with the bytes so far, and may wait.
        """
        whole = size
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
                if pace is not None:
                    pace(whole - size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Ends the connection, also for a thread that waits in it."""
        with contextlib.suppress(OSError):  # the other side has ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(
    address: tuple[str, int], secret: bytes, timeout: float, purpose: str = _PURPOSE
) -> Stream:
    """Connects to the listener at `address`.

    Raises:
        PeerError: there is none, or it belongs to another job.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return Stream(greeting.connect(address, secret, purpose, deadline), timeout)
        except OSError as error:
            # A listener that is flooded by strangers ends greetings; the next attempt may succeed.
            ended = isinstance(error, ConnectionResetError | greeting.Closed)
            if not ended or time.monotonic() + _RETRY_SECONDS > deadline:
                raise PeerError(f"cannot reach {address[0]}:{address[1]}: {error}") from error
            time.sleep(_RETRY_SECONDS)


def machine() -> str:
    """Distinguishes the machines (network namespaces) of a job."""
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        known.append(str(os.stat("/proc/self/ns/net").st_ino))
    return " ".join(known)


def own_host(several: bool = False) -> str:
    """The address of this machine by which other nodes of the job reach it.

    NOSTALL_HOST overrides it. On one machine it is the loopback address. On several it is the address
    of the interface towards the job's first node, or else of the default route. It is never a
    loopback address, to which a machine often resolves its own name.

    Raises:
        UsageError: there is no such address.
    """
    host: str = options.value("job.host")
    if host:
        if several and _is_loopback(host):
            raise UsageError(
                f"NOSTALL_HOST={host} is a loopback address on {socket.gethostname()}, where no other "
                "machine reaches this one: give that of an interface"
            )
        return host
    if not several:
        return "127.0.0.1"
    first = os.environ.get("MASTER_ADDR") or (urlsplit(options.value("job.rendezvous")).hostname)
    towards = [_route_to(target) for target in (first, socket.gethostname(), _ANYWHERE) if target]
    for address in (*towards, *_interfaces()):
        if address and not _is_loopback(address):
            return address
    raise UsageError(
        f"{socket.gethostname()} has no address but the loopback one for the other nodes of the job: "
        "set NOSTALL_HOST to the address of an interface"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def _route_to(target: str) -> str:
    """This machine's address on the route to that host; "" if there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing: only the route is asked for
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interfaces() -> list[str]:
    """The addresses of this machine's interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    return found


class Listener:
    """Answers questions, each in a thread of its own, until closed.

    The ranks of the job limit the number of conversations: each has a few at a time. One that waits for
    a decision does not delay the others. Strangers can begin greetings, which are limited in number and
    time by `nostall.job._greeting.Door`.

    Args:
        answer: given a question and its stream.
        secret: what both sides must know.
        timeout: seconds of silence that end a conversation.
        several: whether other machines are to reach it.
        purpose: of the conversations; those that connect give the same.

    Raises:
        UsageError, OSError: it has no address.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any], Stream], None],
        secret: bytes,
        timeout: float,
        several: bool = False,
        purpose: str = _PURPOSE,
    ) -> None:
        self._answer, self._timeout, self._purpose = answer, timeout, purpose
        self._door = greeting.Door.at(own_host(several), 0, secret, purpose)
        self.address = self._door.address
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, name=f"nostall-{purpose}-listener", daemon=True
        )
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            for connection in self._door.admit(time.monotonic() + _LOOK_SECONDS):
                try:
                    threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
                except RuntimeError as error:
                    _log.warning("a connection for the %s gets no thread: %s", self._purpose, error)
                    connection.close()
        self._door.release()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                stream = Stream(connection, self._timeout)
                self._answer(stream.receive(), stream)
        except (OSError, PeerError) as error:
            _log.debug("a conversation for the %s ended: %s", self._purpose, error)

    def close(self) -> None:
        """Answers no more questions."""
        self._closed.set()
        self._door.close()
