"""How the ranks of a job tell each other where they are: one function, allgather of bytes.

It is called once per loader, before any sample travels. Where torch.distributed or MPI runs already,
theirs is used; by hand, a socket or a shared directory.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nostall.errors import PeerError, UsageError

AllGather = Callable[[bytes], list[bytes]]

_TIMEOUT = 120.0


def find_rendezvous(
    rank: int,
    world_size: int,
    name: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT,
) -> AllGather | None:
    """The allgather of this job, or None if nothing connects its ranks.

    NOSTALL_RENDEZVOUS (tcp://host:port or a directory) wins, then an initialised torch.distributed,
    the store that torchrun offers, an initialised mpi4py. `name` tells apart what one job gathers.
    """
    env = os.environ if environment is None else environment
    if where := env.get("NOSTALL_RENDEZVOUS"):
        return _by_hand(where, rank, world_size, name, env, timeout)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        return _by_store(store, rank, world_size, name, timeout)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_PORT" in env:
        if importlib.util.find_spec("torch") is None:
            return None
        from torch.distributed import TCPStore

        store = TCPStore(
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            None,
            False,
            timeout=timedelta(seconds=timeout),
        )
        name = f"{name} restart {env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return _by_store(store, rank, world_size, name, timeout)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size == world_size:
        gather: AllGather = mpi.COMM_WORLD.allgather
        return gather
    return None


def _by_store(store: Any, rank: int, world_size: int, name: str, timeout: float) -> AllGather:
    def allgather(mine: bytes) -> list[bytes]:
        store.set(f"nostall/{name}/{rank}", mine)
        keys = [f"nostall/{name}/{r}" for r in range(world_size)]
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except Exception as error:
            raise PeerError(
                f"rank {rank} waited {timeout:g} s for all {world_size} ranks to make their loader: "
                f"{error}"
            ) from error
        return [bytes(store.get(key)) for key in keys]

    return allgather


def _by_hand(
    where: str, rank: int, world_size: int, name: str, env: Mapping[str, str], timeout: float
) -> AllGather:
    url = urlsplit(where)
    if url.scheme == "tcp" and url.hostname and url.port:
        secret = env.get("NOSTALL_SECRET", "")
        if not secret:
            raise UsageError(
                f"NOSTALL_RENDEZVOUS={where} needs NOSTALL_SECRET, the same on all ranks, so that "
                "nobody else can join the job"
            )
        address = (url.hostname, url.port)
        return lambda mine: _by_socket(address, rank, world_size, name, secret, mine, timeout)
    if url.scheme in ("", "file") and url.path:
        directory = Path(url.path)
        return lambda mine: _by_files(directory, rank, world_size, name, mine, timeout)
    raise UsageError(f"NOSTALL_RENDEZVOUS={where} is neither tcp://host:port nor a directory")


def _by_socket(
    address: tuple[str, int],
    rank: int,
    world_size: int,
    name: str,
    secret: str,
    mine: bytes,
    timeout: float,
) -> list[bytes]:
    """Rank 0 listens; both sides prove the secret (multiprocessing's HMAC) before a byte counts."""
    key = f"{secret} {name}".encode()
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _collect(address, world_size, key, mine, deadline)
    while True:
        try:
            with Client(address, authkey=key) as connection:
                connection.send_bytes(rank.to_bytes(4, "little") + mine)
                return [connection.recv_bytes() for _ in range(world_size)]
        except AuthenticationError as error:
            raise PeerError(
                f"rank 0 at {address[0]}:{address[1]} has another NOSTALL_SECRET"
            ) from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {rank} cannot reach rank 0 at {address[0]}:{address[1]}: {error}"
                ) from error
            time.sleep(0.05)


def _collect(
    address: tuple[str, int], world_size: int, key: bytes, mine: bytes, deadline: float
) -> list[bytes]:
    parts = {0: mine}
    joined: dict[int, Connection[Any, Any]] = {}
    with Listener(address, backlog=world_size, authkey=key) as listener:
        # The listener's own socket is the only one with a deadline.
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while len(parts) < world_size:
            if time.monotonic() > deadline:
                missing = sorted(set(range(world_size)) - parts.keys())
                raise PeerError(f"rank 0 waited in vain for ranks {missing} at {address}")
            try:
                connection = listener.accept()
                message = connection.recv_bytes()
            except (OSError, EOFError, AuthenticationError):
                continue  # nobody, or a stranger
            rank = int.from_bytes(message[:4], "little")
            parts[rank] = message[4:]
            joined[rank] = connection
        ordered = [parts[r] for r in range(world_size)]
        for connection in joined.values():
            for part in ordered:
                connection.send_bytes(part)
            connection.close()
    return ordered


def _by_files(
    directory: Path, rank: int, world_size: int, name: str, mine: bytes, timeout: float
) -> list[bytes]:
    """One file per rank in a directory that only this user can read."""
    safe = "".join(c if c.isalnum() else "_" for c in name)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = [directory / f"nostall-{safe}-{r}" for r in range(world_size)]
    partial = paths[rank].with_suffix(".part")
    partial.touch(mode=0o600)
    partial.write_bytes(mine)
    partial.rename(paths[rank])
    deadline = time.monotonic() + timeout
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            missing = [r for r, path in enumerate(paths) if not path.exists()]
            raise PeerError(f"rank {rank} waited in vain for ranks {missing} in {directory}")
        time.sleep(0.02)
    return [path.read_bytes() for path in paths]
