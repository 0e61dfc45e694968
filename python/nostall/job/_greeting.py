"""Proof that both ends of a connection know a secret, before anything else is read from it.

The end that connects proves first, so a stranger that connects receives nothing from which the secret
could be guessed. The proofs are HMACs over the random numbers of both ends and the purpose of the
connection, so none can be played back or used elsewhere. docs/formats/greeting.md has the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from nostall.errors import PeerError

_MAGIC = b"nostall greeting 2\n"
_NONCE = 32
_PROOF = 32
_HELLO = len(_MAGIC) + _NONCE + 32
_ANSWER = len(_MAGIC) + _NONCE
_ACCEPTED, _REFUSED = b"\1", b"\0"
_SECONDS = 10.0  # from a connection to its proof
_GRACE = 0.5  # no greeting gives way before
_GREETINGS = 256  # connections that have not proved the secret yet
_RETRY_SECONDS = 0.1
_BACKLOG = 1024
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("nostall")


class Closed(ConnectionError):
    """The other side closed a connection before its end."""


def read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes, else an OSError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        _limit(connection, deadline)
        got = connection.recv_into(view)
        if not got:
            raise Closed("the other side closed the connection")
        view = view[got:]
    return bytes(data)


def write(connection: socket.socket, data: bytes, deadline: float) -> None:
    """All of `data`, else an OSError."""
    _limit(connection, deadline)
    connection.sendall(data)  # its time limit is for all of it


def _limit(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other side takes too long")
    connection.settimeout(left)


def connect(
    address: tuple[str, int], secret: bytes, purpose: str, deadline: float
) -> socket.socket:
    """Connects to the listener at `address` that has the same purpose and the same secret.

    Raises:
        OSError: there is no such listener yet; a later attempt may succeed.
        PeerError: the other side has another secret, or is not nostall of this release.
    """
    deadline = min(deadline, time.monotonic() + _SECONDS)
    connection = socket.create_connection(address, max(0.001, deadline - time.monotonic()))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(_NONCE)
        write(connection, _MAGIC + mine + _digest(purpose), deadline)
        answer = read(connection, _ANSWER, deadline)
        if not answer.startswith(_MAGIC):
            raise PeerError(f"{address[0]}:{address[1]} is not nostall of this release")
        both = mine + answer[len(_MAGIC) :]
        write(connection, _proof(secret, b"connects", purpose, both), deadline)
        if read(connection, 1, deadline) != _ACCEPTED:
            raise PeerError(f"{address[0]}:{address[1]} has another secret")
        if not hmac.compare_digest(
            read(connection, _PROOF, deadline), _proof(secret, b"listens", purpose, both)
        ):
            raise PeerError(f"{address[0]}:{address[1]} does not know the secret")
    except BaseException:
        connection.close()
        raise
    return connection


def _digest(purpose: str) -> bytes:
    return hashlib.sha256(purpose.encode()).digest()


def _proof(secret: bytes, side: bytes, purpose: str, both: bytes) -> bytes:
    return hmac.digest(secret, side + both + purpose.encode(), "sha256")


@dataclass
class _Greeting:
    host: str
    ends: float
    mine: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE))
    theirs: bytes = b""  # the random number of the end that connects, once it has arrived
    got: bytes = b""


class Door:
    """Listens, and lets in those that prove the secret.

    The thread that calls admit() serves all greetings and waits for none of them. Each has ten
    seconds and one of 256 places. When all places are taken, the host with the most greetings loses
    its oldest one, if that is half a second old. So a host that floods the door displaces its own
    greetings, and ranks that connect at the same time do not displace each other.

    Args:
        listening: a listening socket, which belongs to the door from now on.
        secret: what both sides must know.
        purpose: what the connections are for; others are turned away.
    """

    def __init__(self, listening: socket.socket, secret: bytes, purpose: str) -> None:
        self._socket, self._secret, self._purpose = listening, secret, purpose
        self._greetings: dict[socket.socket, _Greeting] = {}  # the oldest first
        self._closed = threading.Event()
        self._failing = False
        self._listening = True
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    @staticmethod
    def at(host: str, port: int, secret: bytes, purpose: str) -> Door:
        """A door at an address; port 0 is any that is free, and :: has those of IPv4 too."""
        listening = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        return Door(listening, secret, purpose)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def admit(self, deadline: float) -> list[socket.socket]:
        """The connections that have proved the secret: at least one, or none after the deadline.

        Also none once another thread has called close().
        """
        admitted: list[socket.socket] = []
        while not admitted and not self._closed.is_set():
            now = time.monotonic()
            self._end_late(now)
            if now >= deadline:
                break
            nearest = min([deadline, *(g.ends for g in self._greetings.values())])
            full = not self._make_place(now)
            self._listen(not full)
            if full:
                nearest = min(nearest, now + _GRACE)
            for key, _ in self._selector.select(max(0.0, nearest - now)):
                if key.fileobj is self._socket:
                    self._accept()
                elif key.fileobj in self._greetings and self._hear(key.fileobj):
                    admitted.append(key.fileobj)
        return admitted

    def _listen(self, listen: bool) -> None:
        if listen != self._listening:
            self._listening = listen
            self._selector.modify(self._socket, selectors.EVENT_READ if listen else 0)

    def _accept(self) -> None:
        while len(self._greetings) < _GREETINGS:
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._closed.is_set():
                    return
                # No descriptors left, or a broken connection: later calls may succeed.
                if not self._failing:
                    _log.warning(
                        "a connection for the %s is not accepted: %s", self._purpose, error
                    )
                self._failing = True
                if error.errno not in _SCARCE or not self._end_oldest(time.monotonic()):
                    self._closed.wait(_RETRY_SECONDS)
                return
            self._failing = False
            connection.setblocking(False)
            self._greetings[connection] = _Greeting(address[0], time.monotonic() + _SECONDS)
            self._selector.register(connection, selectors.EVENT_READ)

    def _make_place(self, now: float) -> bool:
        return len(self._greetings) < _GREETINGS or self._end_oldest(now)

    def _end_oldest(self, now: float) -> bool:
        if not self._greetings:
            return False
        hosts = Counter(greeting.host for greeting in self._greetings.values())
        host = hosts.most_common(1)[0][0]
        oldest = next(c for c, greeting in self._greetings.items() if greeting.host == host)
        if now < self._greetings[oldest].ends - _SECONDS + _GRACE:
            return False
        self._end(oldest)
        return True

    def _end_late(self, now: float) -> None:
        for connection in [c for c, greeting in self._greetings.items() if greeting.ends <= now]:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._greetings[connection]

    def _hear(self, connection: socket.socket) -> bool:
        """Whether the bytes so far prove the secret."""
        try:
            if not self._step(connection, self._greetings[connection]):
                return False
        except (OSError, PeerError) as error:
            _log.debug("a greeting for the %s ended: %s", self._purpose, error)
            self._end(connection)
            return False
        self._forget(connection)
        connection.setblocking(True)
        return True

    def _step(self, connection: socket.socket, greeting: _Greeting) -> bool:
        wanted = _PROOF if greeting.theirs else _HELLO
        got = connection.recv(wanted - len(greeting.got))
        if not got:
            raise ConnectionError("the other side closed the connection")
        greeting.got += got
        if not _MAGIC.startswith(greeting.got[: len(_MAGIC)]) and not greeting.theirs:
            raise PeerError("it is not nostall of this release")
        if len(greeting.got) < wanted:
            return False
        whole, greeting.got = greeting.got, b""
        if not greeting.theirs:
            greeting.theirs = whole[len(_MAGIC) : len(_MAGIC) + _NONCE]
            if not hmac.compare_digest(whole[-32:], _digest(self._purpose)):
                raise PeerError("it is for something else")
            self._say(connection, _MAGIC + greeting.mine)
            return False
        both = greeting.theirs + greeting.mine
        expected = _proof(self._secret, b"connects", self._purpose, both)
        if not hmac.compare_digest(whole, expected):
            self._say(connection, _REFUSED)
            raise PeerError("it does not know the secret")
        mine = _proof(self._secret, b"listens", self._purpose, both)
        self._say(connection, _ACCEPTED + mine)
        return True

    @staticmethod
    def _say(connection: socket.socket, data: bytes) -> None:
        if connection.send(data) != len(data):
            raise ConnectionError("the other side takes nothing")

    def close(self) -> None:
        """Admits no more connections and ends a wait in admit(); from any thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self.release()

    def release(self) -> None:
        """Closes all that is open; by the thread that calls admit(), or after it."""
        for connection in list(self._greetings):
            self._end(connection)
        self._selector.close()
        self._socket.close()
