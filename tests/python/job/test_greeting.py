"""Strangers at a door: silent, dripping, flooding, replaying; none is let in, none is waited for."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nostall.errors import PeerError
from nostall.job import _greeting as greeting

SECRET = b"sixteen bytes or more"
LIMIT = 60.0  # what waits longer hangs


@contextlib.contextmanager
def serving(secret: bytes = SECRET, purpose: str = "test") -> Iterator[greeting.Door]:
    """A door that says "in" to all who come in."""

    def admit(door: greeting.Door) -> None:
        while not ended.is_set():
            for connection in door.admit(time.monotonic() + LIMIT):
                with connection:
                    connection.sendall(b"in")

    ended = threading.Event()
    with greeting.Door.at("127.0.0.1", 0, secret, purpose) as door, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(admit, door)
        try:
            yield door
        finally:
            ended.set()
            door.close()
            waiting.result(LIMIT)


def enter(door: greeting.Door, secret: bytes = SECRET, purpose: str = "test") -> bytes:
    end = time.monotonic() + LIMIT
    while True:
        try:
            with greeting.connect(door.address, secret, purpose, end) as connection:
                return greeting.read(connection, 2, end)
        except OSError:
            if time.monotonic() > end:
                raise


def rest(connection: socket.socket) -> bytes:
    """All that the other side says until it hangs up."""
    connection.settimeout(LIMIT)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while got := connection.recv(1000):
            said += got
    return said


def test_who_knows_the_secret_is_let_in() -> None:
    with serving() as door:
        assert enter(door) == b"in"
        with pytest.raises(PeerError, match="another secret"):
            enter(door, b"another secret, as long")
        with pytest.raises(greeting.Closed):
            greeting.connect(door.address, SECRET, "other", time.monotonic() + LIMIT)
        assert enter(door) == b"in"


def test_one_who_connects_is_given_no_proof_before_his_own() -> None:
    with serving() as door, socket.create_connection(door.address) as stranger:
        stranger.sendall(greeting._MAGIC + bytes(32) + greeting._digest("test"))
        said = greeting.read(stranger, greeting._ANSWER, time.monotonic() + LIMIT)
        assert said.startswith(greeting._MAGIC)
        stranger.sendall(bytes(32))
        assert rest(stranger) == greeting._REFUSED


def test_a_listener_that_does_not_know_the_secret_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                end = time.monotonic() + LIMIT
                greeting.read(connection, greeting._HELLO, end)
                connection.sendall(greeting._MAGIC + bytes(32))
                greeting.read(connection, 32, end)
                connection.sendall(greeting._ACCEPTED + bytes(32))

        pretending = pool.submit(pretend)
        with pytest.raises(PeerError, match="does not know"):
            greeting.connect(listener.getsockname(), SECRET, "test", time.monotonic() + LIMIT)
        pretending.result(LIMIT)


def test_a_greeting_cannot_be_played_back() -> None:
    heard: list[bytes] = []
    with serving() as door, socket.create_server(("127.0.0.1", 0)) as tap:

        def relay() -> None:
            end = time.monotonic() + LIMIT
            client, _ = tap.accept()
            with client, socket.create_connection(door.address) as onward:
                for there, back in ((greeting._HELLO, greeting._ANSWER), (32, 33 + 2)):
                    heard.append(greeting.read(client, there, end))
                    onward.sendall(heard[-1])
                    client.sendall(greeting.read(onward, back, end))

        with ThreadPoolExecutor(1) as pool:
            relaying = pool.submit(relay)
            with greeting.connect(
                tap.getsockname(), SECRET, "test", time.monotonic() + LIMIT
            ) as connection:
                assert rest(connection) == b"in"
            relaying.result(LIMIT)
        with socket.create_connection(door.address) as stranger:
            stranger.sendall(b"".join(heard))
            assert rest(stranger)[greeting._ANSWER :] == greeting._REFUSED


def test_silent_ones_give_way_and_end() -> None:
    """More of them than there are places; they would hold these for longer than the test waits."""
    with serving() as door, contextlib.ExitStack() as closing:
        strangers = [
            closing.enter_context(socket.create_connection(door.address))
            for _ in range(greeting._GREETINGS + 20)
        ]
        assert enter(door) == b"in"
        assert all(rest(stranger) == b"" for stranger in strangers[:20])


def test_silence_and_drops_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "_SECONDS", 0.2)
    with serving() as door:
        with socket.create_connection(door.address) as silent:
            assert rest(silent) == b""
        with socket.create_connection(door.address) as dripping:
            begun = time.monotonic()
            with contextlib.suppress(OSError):
                for byte in greeting._MAGIC + bytes(1000):
                    dripping.sendall(bytes([byte]))
                    time.sleep(0.01)
            assert rest(dripping) == b""
            assert time.monotonic() - begun < LIMIT / 2


def test_a_flood_keeps_nobody_out() -> None:
    ended, flooded = threading.Event(), threading.Semaphore(0)

    def flood(address: tuple[str, int]) -> int:
        count = 0
        while not ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(address, timeout=LIMIT) as stranger,
            ):
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" if count % 2 else greeting._MAGIC)
                count += 1
                flooded.release()
        return count

    with serving() as door, ThreadPoolExecutor(4) as pool:
        floods = [pool.submit(flood, door.address) for _ in range(4)]
        try:
            assert all(flooded.acquire(timeout=LIMIT) for _ in range(20))
            assert [enter(door) for _ in range(20)] == [b"in"] * 20
        finally:
            ended.set()
        assert sum(f.result(LIMIT) for f in floods) >= 20


def test_a_listener_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        greeting.connect(silent.getsockname(), SECRET, "test", time.monotonic() + LIMIT)
