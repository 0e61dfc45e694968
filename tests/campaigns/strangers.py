"""Ranks meet, and a listener about checkpoints answers, while strangers do what they can.

Each case draws a way to meet and strangers: silent, dripping, flooding and babbling connections,
greetings that are played back, proofs under another secret, listeners that pretend to be rank 0,
files of a meeting that was killed, directories that are open to others, links, or another user's. A
case fails if a rank does not have what all ranks said within LIMIT seconds, has anything else, a
stranger is let in or told a proof, or a directory that is not the user's is used.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from campaigns.outcome import Outcome, Task
from nostall.base import _owned as owned
from nostall.errors import PeerError, UsageError
from nostall.job import _greeting as greeting
from nostall.job._rendezvous import find_rendezvous
from nostall.job._stream import Listener, connect

FULL = "2,000 meetings of 2 to 4 ranks among 1 to 40 strangers"
SMALL = 0.02

LIMIT = 60.0
OTHER_USER = 54321
Says = Callable[[], bytes]


class Strangers:
    """Threads that bother an address until they are ended; `told` is what the address said to each."""

    def __init__(self, address: tuple[str, int], rng: random.Random, heard: list[bytes]) -> None:
        self._address, self._rng, self._heard = address, rng, heard
        self.told: list[bytes] = []
        self._ended = threading.Event()
        kinds = [self._silent, self._drip, self._flood, self._babble, self._replay, self._guess]
        count = rng.choice((1, 2, 5, 40))
        self.kinds = [rng.choice(kinds) for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in self.kinds]
        for thread in self._threads:
            thread.start()

    def _run(self, kind: Callable[[socket.socket], None]) -> None:
        while not self._ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(self._address, 1) as stranger,
            ):
                stranger.settimeout(0.2)
                kind(stranger)
                self._listen(stranger)
            self._ended.wait(0.01)

    def _listen(self, stranger: socket.socket) -> None:
        said = b""
        with contextlib.suppress(OSError):
            while got := stranger.recv(1000):
                said += got
        self.told.append(said)

    def _silent(self, _: socket.socket) -> None:
        self._ended.wait(1)

    def _drip(self, stranger: socket.socket) -> None:
        for byte in greeting._MAGIC + secrets.token_bytes(64):
            stranger.sendall(bytes([byte]))
            if self._ended.wait(0.02):
                return

    def _flood(self, stranger: socket.socket) -> None:
        for _ in range(50):
            with socket.create_connection(self._address, 1):
                pass

    def _babble(self, stranger: socket.socket) -> None:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)

    def _replay(self, stranger: socket.socket) -> None:
        stranger.sendall(b"".join(self._heard))

    def _guess(self, stranger: socket.socket) -> None:
        end = time.monotonic() + 5
        hello = self._heard[0][-32:] if self._heard else bytes(32)
        stranger.sendall(greeting._MAGIC + bytes(32) + hello)
        greeting.read(stranger, greeting._ANSWER, end)
        stranger.sendall(secrets.token_bytes(32))

    def end(self) -> list[bytes]:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return self.told


@contextlib.contextmanager
def tap(address: tuple[str, int], heard: list[bytes]) -> Iterator[tuple[str, int]]:
    """An address that passes one greeting on to `address` and keeps what the connecting end said."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def relay() -> None:
            listening.settimeout(LIMIT)
            client, _ = listening.accept()
            end = time.monotonic() + LIMIT
            with client, socket.create_connection(address) as onward:
                for there, back in ((greeting._HELLO, greeting._ANSWER), (32, 33)):
                    heard.append(greeting.read(client, there, end))
                    onward.sendall(heard[-1])
                    client.sendall(greeting.read(onward, back, end))

        relaying = pool.submit(relay)
        yield listening.getsockname()
        relaying.result()


def overheard(told: list[bytes]) -> str:
    """What is wrong about what strangers were told: more than a random number and a refusal."""
    for said in told:
        if len(said) > greeting._ANSWER + 1 or greeting._ACCEPTED in said[greeting._ANSWER :]:
            return f"a stranger was told {len(said)} bytes"
    return ""


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A port that no other program is given meanwhile, and where rank 0 can listen (SO_REUSEADDR)."""
    with socket.socket() as holds:
        holds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holds.bind(("127.0.0.1", 0))
        yield int(holds.getsockname()[1])


def meet(env: dict[str, str], world: int, rng: random.Random) -> str:
    """What is wrong about a meeting of `world` ranks that begin at about the same time."""
    delays = [rng.choice((0.0, 0.1, 0.3)) for _ in range(world)]

    def one(rank: int) -> list[bytes]:
        time.sleep(delays[rank])
        gather = find_rendezvous(rank, world, "campaign", environment=env, timeout=LIMIT)
        assert gather is not None
        return gather(b"rank %d" % rank)

    with ThreadPoolExecutor(world) as pool:
        begun = time.monotonic()
        try:
            results = list(pool.map(one, range(world)))
        except (PeerError, UsageError, OSError) as error:
            return f"{type(error).__name__}: {error}"
    if time.monotonic() - begun > LIMIT:
        return f"it took {time.monotonic() - begun:.0f} s"
    if any(result != [b"rank %d" % rank for rank in range(world)] for result in results):
        return f"the ranks have {results}"
    return ""


def by_socket(rng: random.Random, _: Path) -> str:
    with own_port() as port:
        return by_port(rng, port)


def by_port(rng: random.Random, port: int) -> str:
    key = secrets.token_hex(8)
    env = {"NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{port}", "NOSTALL_SECRET": key}
    heard: list[bytes] = []
    purpose = "rendezvous campaign"
    # An earlier meeting of the same name and secret, which somebody has listened to.
    with (
        greeting.Door.at("127.0.0.1", 0, key.encode(), purpose) as door,
        tap(door.address, heard) as at,
        ThreadPoolExecutor(1) as pool,
    ):
        admitted = pool.submit(door.admit, time.monotonic() + LIMIT)
        greeting.connect(at, key.encode(), purpose, time.monotonic() + LIMIT).close()
        for connection in admitted.result():
            connection.close()
    strangers = Strangers(("127.0.0.1", port), rng, heard)
    try:
        wrong = meet(env, rng.randint(2, 4), rng)
    finally:
        told = strangers.end()
    return wrong or overheard(told)


def by_checkpoint_listener(rng: random.Random, _: Path) -> str:
    asked: list[Any] = []
    key = secrets.token_bytes(16)

    def answer(question: dict[str, Any], stream: Any) -> None:
        asked.append(question)
        stream.send({"ok": True})

    heard: list[bytes] = []
    listener = Listener(answer, key, LIMIT)
    try:
        with tap(listener.address, heard) as at:
            greeting.connect(at, key, "checkpoint", time.monotonic() + LIMIT).close()
        strangers = Strangers(listener.address, rng, heard)
        try:
            questions = rng.randint(1, 10)
            for number in range(questions):
                stream = connect(listener.address, key, LIMIT)
                stream.send({"ask": number})
                if stream.receive() != {"ok": True}:
                    return "a question has another answer"
                stream.close()
        except PeerError as error:
            return f"a question was not answered: {error}"
        finally:
            told = strangers.end()
    finally:
        listener.close()
    if asked != [{"ask": number} for number in range(questions)]:
        return f"the listener was asked {asked}"
    return overheard(told)


def pretending_listener(rng: random.Random, _: Path) -> str:
    """Something else listens where rank 0 should: the others must end in time, and tell it nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        ended = threading.Event()
        manner = rng.choice((b"", b"HTTP/1.1 400\r\n\r\n" * 5, greeting._MAGIC + bytes(65)))

        def pretend() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    client, _ = listening.accept()
                    with client:
                        client.sendall(manner)
                        ended.wait(0.3)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(pretend)
            env = {
                "NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{listening.getsockname()[1]}",
                "NOSTALL_SECRET": secrets.token_hex(8),
            }
            gather = find_rendezvous(1, 2, "campaign", environment=env, timeout=1)
            assert gather is not None
            begun = time.monotonic()
            try:
                gather(b"mine")
                return "a rank has met a stranger"
            except PeerError:
                pass
            finally:
                ended.set()
            if time.monotonic() - begun > LIMIT:
                return "a rank waited longer than its limit for a stranger"
    return ""


def by_files(rng: random.Random, folder: Path) -> str:
    """Over the files of a meeting of the same name that was killed at any of its steps."""
    env = {"NOSTALL_RENDEZVOUS": str(folder / "meet"), "SLURM_JOB_ID": "7"}
    world = rng.randint(2, 4)
    kept: dict[str, bytes] = {}
    real = owned.write

    def keep(name: str, data: bytes, directory: int) -> None:
        real(name, data, directory)
        kept[name] = data.replace(b"rank".hex().encode(), b"evil".hex().encode())

    owned.write = keep
    try:
        if wrong := meet(env, world, rng):
            return wrong
    finally:
        owned.write = real
    for name, data in kept.items():
        if rng.random() < 0.7:
            (folder / "meet" / name).write_bytes(data)
            (folder / "meet" / name).chmod(0o600)
    if wrong := meet(env, world, rng):
        return wrong
    # What was not of a meeting under the last number stays, and is not read.
    left = [p.name for p in (folder / "meet").iterdir() if p.name.endswith(("-call", "-all"))]
    return f"{left} are left" if left else ""


def planted(rng: random.Random, folder: Path) -> str:
    """A directory that another user can write to."""
    target = folder / "meet"
    (folder / "other").mkdir(mode=0o700)
    kinds = ["open", "group", "link", "file"] + ["user"] * 2 * (os.geteuid() == 0)
    kind = rng.choice(kinds)
    if kind == "link":
        target.symlink_to("other")
    elif kind == "file":
        target.write_bytes(b"")
    else:
        target.mkdir()
        target.chmod({"open": 0o777, "group": 0o770, "user": 0o700}[kind])
    if kind == "user":
        os.chown(target, OTHER_USER, OTHER_USER)
    env = {"NOSTALL_RENDEZVOUS": str(target)}
    gather = find_rendezvous(rng.randint(0, 1), 2, "campaign", environment=env, timeout=1)
    assert gather is not None
    try:
        gather(b"mine")
    except UsageError as error:
        used = [*(folder / "other").iterdir(), *(target.iterdir() if target.is_dir() else ())]
        return "" if str(target) in str(error) and not used else f"{kind}: {error}, {used}"
    except PeerError:
        pass
    return f"{kind}: the directory was used"


def run(task: Task) -> Outcome:
    os.environ["NOSTALL_HOST"] = "127.0.0.1"
    outcome = Outcome()
    ways = (by_socket, by_checkpoint_listener, pretending_listener, by_files, planted)
    longest = 0.0
    for number in range(task.count(2000, least=len(ways))):
        rng = random.Random(f"{task.seed} {number}")
        way = ways[number % len(ways)]
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            wrong = way(rng, Path(folder))
        longest = max(longest, time.monotonic() - begun)
        outcome.cases += 1
        if wrong:
            outcome.failures.append(f"seed {task.seed}, case {number}, {way.__name__}: {wrong}")
    outcome.figures["longest case"] = f"{longest:.1f} s"
    if os.geteuid() != 0:
        outcome.figures["left out"] = "directories of another user, which only root can make"
    return outcome
