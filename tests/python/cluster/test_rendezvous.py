"""The ways in which ranks find each other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nodes import free_port

from nostall import cluster
from nostall.errors import PeerError, UsageError
from nostall.rendezvous import find_rendezvous
from nostall.sizes import parse_tiers
from nostall.world import World

WORLD = 3


def gather_all(env: Mapping[str, str], timeout: float = 10) -> list[list[bytes]]:
    def one(rank: int) -> list[bytes]:
        gather = find_rendezvous(rank, WORLD, "test", environment=env, timeout=timeout)
        assert gather is not None
        return gather(f"I am {rank}".encode())

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(one, range(WORLD)))


EXPECTED = [[f"I am {r}".encode() for r in range(WORLD)]] * WORLD


def test_by_socket() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    assert gather_all({"NOSTALL_RENDEZVOUS": address, "NOSTALL_SECRET": "s" * 16}) == EXPECTED


def test_by_socket_ignores_strangers() -> None:
    port = free_port()
    env = {"NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{port}", "NOSTALL_SECRET": "s" * 16}
    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
            except OSError:
                stop.wait(0.01)

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        assert gather_all(env) == EXPECTED
    finally:
        stop.set()
        knocking.join()


def test_by_socket_needs_a_secret() -> None:
    with pytest.raises(UsageError, match="NOSTALL_SECRET"):
        find_rendezvous(0, 2, "test", environment={"NOSTALL_RENDEZVOUS": "tcp://127.0.0.1:9"})


def test_by_socket_with_another_secret() -> None:
    port = free_port()

    def env(secret: str) -> dict[str, str]:
        return {"NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{port}", "NOSTALL_SECRET": secret * 16}

    first = find_rendezvous(0, 2, "test", environment=env("a"), timeout=3)
    other = find_rendezvous(1, 2, "test", environment=env("b"), timeout=3)
    assert first is not None and other is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first, b"0")
        with pytest.raises(PeerError):
            other(b"1")
        with pytest.raises(PeerError, match=r"in vain for ranks \[1\]"):
            waiting.result()


def test_by_files(tmp_path: Path) -> None:
    assert gather_all({"NOSTALL_RENDEZVOUS": str(tmp_path / "meet")}) == EXPECTED
    assert (tmp_path / "meet").stat().st_mode & 0o777 == 0o700


def test_by_files_names_who_is_missing(tmp_path: Path) -> None:
    gather = find_rendezvous(
        1, 3, "test", environment={"NOSTALL_RENDEZVOUS": str(tmp_path)}, timeout=0.1
    )
    assert gather is not None
    with pytest.raises(PeerError, match=r"\[0, 2\]"):
        gather(b"1")


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="neither tcp"):
        find_rendezvous(0, 2, "test", environment={"NOSTALL_RENDEZVOUS": "udp://x:1"})


def test_without_any_launcher_there_is_none() -> None:
    assert find_rendezvous(0, 2, "test", environment={}) is None


def test_a_wrong_allgather_is_refused() -> None:
    world = World(rank=0, world_size=2, local_rank=0, local_world_size=1, job="x")
    tiers = parse_tiers(["ram:1MiB"], dataset_bytes=1, local_world_size=1)
    with pytest.raises(UsageError, match="1 ranks together, not the 2"):
        cluster.join(world, tiers, lambda mine: [mine])


def test_node_identity_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cluster.node_identity()
    assert own == cluster.node_identity()
    monkeypatch.setenv("NOSTALL_NODE", "a")
    assert cluster.node_identity() == "named a" != own


def test_without_ucx_samples_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOSTALL_UCX_LIBRARY", "/nonexistent/nostall_ucx.so")
    world = World(rank=0, world_size=2, local_rank=0, local_world_size=1, job="x")

    def both(mine: bytes) -> list[bytes]:
        return [mine, mine.replace(b'"rank": 0', b'"rank": 1').replace(b'"node": "', b'"node": "2')]

    joined = cluster.join(world, [], both)
    assert joined.transport is None
    assert "UCX cannot be loaded" in caplog.text
