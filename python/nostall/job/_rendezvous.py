"""How the ranks of a job exchange their addresses: one function, an allgather of bytes.

It is called once per loader, before any sample travels. If torch.distributed or MPI runs already,
their allgather is used; else a socket or a shared directory that the user names, and under srun a
directory in the user's home.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nostall.base import _options as options
from nostall.base import _owned as owned
from nostall.errors import IoError, PeerError, UsageError
from nostall.job import _greeting as greeting
from nostall.job import _secret as secret
from nostall.job._meeting import innermost, meet
from nostall.job._world import SECONDS_TO_MEET, AllGather, under_srun

_log = logging.getLogger("nostall")
_MEMBER_SECONDS = 10.0  # for a rank's message once it has proved the secret
_RETRY_SECONDS = 0.05
_MPI_SECONDS = 0.002  # between two looks whether all ranks have come
_LARGEST = 256 << 20


@dataclass(frozen=True)
class Rendezvous:
    """An allgather, and which strangers can read what goes through it ("": none)."""

    gather: AllGather
    exposed: str = ""

    def __call__(self, mine: bytes) -> list[bytes]:
        return self.gather(mine)


def exposed(allgather: AllGather) -> str:
    """Which strangers can read what is gathered; "" for an allgather that the user passed."""
    return allgather.exposed if isinstance(allgather, Rendezvous) else ""


def find_rendezvous(
    rank: int,
    world_size: int,
    name: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = SECONDS_TO_MEET,
) -> AllGather | None:
    """The allgather of this job, or None if nothing connects its ranks.

    NOSTALL_RENDEZVOUS (tcp://host:port or a directory) wins, then an initialised torch.distributed,
    the store that torchrun offers, an initialised mpi4py, under srun a directory in the home.
    `name` distinguishes the allgathers of one job.
    """
    env = os.environ if environment is None else environment
    if where := options.value("job.rendezvous", env):
        return _by_hand(where, rank, world_size, name, env, timeout)
    if (store := initialised_store()) is not None:
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
        return _by_store(store, rank, world_size, name, timeout)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size == world_size:
        return _by_mpi(mpi.COMM_WORLD, rank, name, timeout)
    if under_srun(env) and env["SLURM_STEP_NUM_TASKS"] == str(world_size):
        with contextlib.suppress(RuntimeError):  # this user has no home
            meet = secret.state_folder(env) / "meet"
            name = f"{name} {env.get('SLURM_CLUSTER_NAME', '')}"
            return _by_directory(meet, rank, world_size, name, env, timeout)
    return None


def initialised_store(world_size: int | None = None) -> Any | None:
    """The store of torch.distributed if it is initialised, with `world_size` ranks if given."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if world_size is not None and distributed.get_world_size() != world_size:
        return None
    return distributed.distributed_c10d._get_default_store()


def _by_store(store: Any, rank: int, world_size: int, name: str, timeout: float) -> AllGather:
    def allgather(mine: bytes) -> list[bytes]:
        return meet(store, rank, world_size, name, mine, timeout).parts

    return Rendezvous(allgather, _readers_of(store))


# The barrier of a meeting that was given up: MPI takes none back, so the next meeting uses it.
_entered: list[Any] = []
_by_turns = threading.Lock()  # for meetings through MPI's one communicator


def _by_mpi(world: Any, rank: int, name: str, timeout: float) -> AllGather:
    if world.rank != rank:
        raise UsageError(
            f"rank {rank} is rank {world.rank} of mpi4py's COMM_WORLD, through which the ranks would "
            "meet: number the ranks as MPI does, or pass an allgather that has them in their order"
        )

    vain = (
        f"rank {rank} waited {timeout:g} s in vain for all {world.size} ranks of MPI to meet for "
        f'"{name}": make this on all ranks'
    )

    def allgather(mine: bytes) -> list[bytes]:
        deadline = time.monotonic() + timeout
        if not _by_turns.acquire(timeout=timeout):
            raise PeerError(vain)
        try:
            barrier = _entered.pop() if _entered else world.Ibarrier()
            while not barrier.Test():
                if time.monotonic() > deadline:
                    _entered.append(barrier)
                    raise PeerError(vain)
                time.sleep(_MPI_SECONDS)
            said: list[tuple[str, bytes]] = world.allgather((name, mine))
        finally:
            _by_turns.release()
        other = next((r for r, (theirs, _) in enumerate(said) if theirs != name), None)
        if other is not None:
            raise UsageError(
                f'rank {rank} came to meet for "{name}", and rank {other} for "{said[other][0]}": '
                "through MPI ranks meet for one thing at a time, so let all make their loaders and "
                "checkpointers in one order"
            )
        return [part for _, part in said]

    return allgather


def _readers_of(store: Any) -> str:
    """Which strangers can read a store of torch."""
    store = innermost(store)
    if type(store).__name__ == "HashStore":  # in the memory of this process
        return ""
    if host := getattr(store, "host", ""):
        return f"every process that reaches torch's store at {host}:{store.port}"
    if path := getattr(store, "path", ""):
        return f"every process that can open torch's store at {path}"
    return f"every process that reaches torch's {type(store).__name__}"


def _by_hand(
    where: str, rank: int, world_size: int, name: str, env: Mapping[str, str], timeout: float
) -> AllGather:
    url = urlsplit(where)
    if url.scheme == "tcp" and url.hostname and url.port:
        key = secret.given(env)
        if not key:
            raise UsageError(
                f"NOSTALL_RENDEZVOUS={where} needs NOSTALL_SECRET, the same on all ranks, so that "
                "no stranger can join the job"
            )
        address = (url.hostname, url.port)
        return Rendezvous(
            lambda mine: _by_socket(address, rank, world_size, name, key, mine, timeout)
        )
    if url.scheme in ("", "file") and url.path:
        return _by_directory(Path(url.path), rank, world_size, name, env, timeout)
    raise UsageError(f"NOSTALL_RENDEZVOUS={where} is neither tcp://host:port nor a directory")


def _by_socket(
    address: tuple[str, int],
    rank: int,
    world_size: int,
    name: str,
    key: bytes,
    mine: bytes,
    timeout: float,
) -> list[bytes]:
    """Rank 0 listens; both sides prove the secret before a byte of the other counts."""
    purpose = f"rendezvous {name}"
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _collect(address, world_size, key, purpose, mine, deadline)
    hung_up = ""
    while True:
        came = False
        try:
            with greeting.connect(address, key, purpose, deadline) as connection:
                _send(connection, struct.pack("<I", rank) + mine, deadline)
                came = True
                return [_receive(connection, deadline) for _ in range(world_size)]
        except PeerError as error:
            raise PeerError(f"rank {rank} cannot join rank 0: {error}") from error
        except OSError as error:
            if came and isinstance(error, greeting.Closed):
                hung_up = (
                    "; it had let this rank in and hung up, as it does when it ends or has "
                    f"another world size: start all ranks with the {world_size} of this one"
                )
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise PeerError(
                    f"rank {rank} cannot reach rank 0 at {address[0]}:{address[1]}: {error}{hung_up}"
                ) from error
            time.sleep(_RETRY_SECONDS)


def _collect(
    address: tuple[str, int],
    world_size: int,
    key: bytes,
    purpose: str,
    mine: bytes,
    deadline: float,
) -> list[bytes]:
    parts = {0: mine}
    with (
        _turn(address, deadline),
        _listen(address, key, purpose) as door,
        contextlib.ExitStack() as joined,
    ):
        members: dict[int, socket.socket] = {}
        while len(parts) < world_size:
            admitted = door.admit(deadline)
            if not admitted:
                missing = sorted(set(range(world_size)) - parts.keys())
                where = " (on all interfaces of its host)" if door.address[0] in _ALL else ""
                raise PeerError(
                    f"rank 0 waited in vain for ranks {missing} at {address[0]}:{address[1]}{where}"
                )
            for connection in admitted:
                joined.enter_context(connection)
                try:
                    said = _receive(connection, min(deadline, time.monotonic() + _MEMBER_SECONDS))
                    (rank,) = struct.unpack_from("<I", said)
                except (OSError, PeerError, struct.error):
                    connection.close()  # its rank tries again
                    continue
                if 0 < rank < world_size:
                    parts[rank], members[rank] = said[4:], connection
        ordered = [parts[r] for r in range(world_size)]
        for rank, connection in members.items():
            try:
                for part in ordered:
                    _send(connection, part, deadline)
            except OSError as error:
                raise PeerError(
                    f"rank {rank} disconnected while the ranks of the job met: {error}"
                ) from error
    return ordered


_turns: dict[tuple[str, int], threading.Lock] = {}  # of each address that rank 0 meets at


def _begin_anew() -> None:
    """In a forked child: a lock may be of a thread that it does not have."""
    _turns.clear()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def _turn(address: tuple[str, int], deadline: float) -> Iterator[None]:
    """Of this process's meetings there: of a port that anything else has, listening says so."""
    lock = _turns.setdefault(address, threading.Lock())
    if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise PeerError(
            f"rank 0 waited in vain for another meeting of this process at {address[0]}:{address[1]}"
        )
    try:
        yield
    finally:
        lock.release()


_ALL = ("0.0.0.0", "::")


def _listen(address: tuple[str, int], key: bytes, purpose: str) -> greeting.Door:
    """At the address; on all interfaces where this host has none that is called so, as behind a
    translation of addresses."""
    host = _interface_of(address[0])
    while True:
        try:
            return greeting.Door.at(host, address[1], key, purpose)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and host not in _ALL:
                host = _all_interfaces()
                continue
            raise PeerError(
                f"rank 0 cannot listen at {address[0]}:{address[1]}: {error}"
            ) from error


def _interface_of(host: str) -> str:
    """What to listen on: all interfaces where a host's name is its loopback's, as on Debian, or is not
    known here."""
    if host == "localhost":
        return host
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        known = [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
    except socket.gaierror:
        return _all_interfaces()
    if any(ipaddress.ip_address(address).is_loopback for address in known):
        return _all_interfaces()
    return next((address for address in known if ":" not in address), known[0])


def _all_interfaces() -> str:
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    greeting.write(connection, struct.pack("<I", len(data)) + data, deadline)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    (size,) = struct.unpack("<I", greeting.read(connection, 4, deadline))
    if size > _LARGEST:
        raise PeerError(f"a rank announces {size} bytes at the rendezvous")
    return greeting.read(connection, size, deadline)


# Distinguishes the starts of a job, whose id is the same after a requeue.
_STARTS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")

# What meetings left whose ranks were killed is removed at this age; a meeting ends after minutes.
_STALE_SECONDS = 86400.0
_LEFT = re.compile(r"\.?nostall-.+-(call|[0-9a-f]{16}-(all|\d+))(\.[0-9a-f]{8})?")

_ANOTHER = "; NOSTALL_RENDEZVOUS may name another directory"
_ALL_SEE = f", which all ranks must see{_ANOTHER}"


def _by_directory(
    directory: Path,
    rank: int,
    world_size: int,
    name: str,
    env: Mapping[str, str],
    timeout: float,
) -> AllGather:
    start = " ".join(env.get(v, "") for v in _STARTS)
    return Rendezvous(
        lambda mine: _by_files(directory, rank, world_size, f"{name} {start}", mine, timeout)
    )


def _by_files(
    directory: Path, rank: int, world_size: int, name: str, mine: bytes, timeout: float
) -> list[bytes]:
    """Files in a directory that only this user can write to; they are gone at the end.

    Files of an earlier job may be there. Rank 0 writes a random number; the others answer to it,
    each with a number of its own; rank 0's last file repeats all of these. So no rank accepts a file
    that was written before this meeting.
    """
    stem = "nostall-" + "".join(c if c.isalnum() else "_" for c in name)
    deadline = time.monotonic() + timeout
    try:
        with owned.open_directory(directory) as folder:
            if rank == 0:
                return _call(folder, directory, stem, world_size, mine, deadline)
            return _answer(folder, directory, stem, rank, world_size, mine, deadline)
    except UsageError as error:
        raise UsageError(f"{error}{_ANOTHER}") from error
    except OSError as error:  # a home that compute nodes only read, say
        raise IoError(
            f"ranks cannot meet in {directory}: {error.strerror or error}{_ANOTHER}"
        ) from error


def _call(
    folder: int, directory: Path, stem: str, world_size: int, mine: bytes, deadline: float
) -> list[bytes]:
    number = secrets.token_hex(8)
    for name in os.listdir(folder):
        if name.startswith((f"{stem}-", f".{stem}-")):
            _remove(name, folder)
    others = {f"{stem}-{number}-{rank}": rank for rank in range(1, world_size)}
    parts, answers = {0: mine.hex()}, {0: number}
    try:
        owned.write(f"{stem}-call", number.encode(), folder)
        _remove_stale(folder, f"{stem}-call")
        while len(parts) < world_size:
            for name in os.listdir(folder):
                if name in others and others[name] not in parts:
                    with contextlib.suppress(FileNotFoundError):  # its rank has given up
                        said = json.loads(owned.read(name, folder))
                        parts[others[name]], answers[others[name]] = said["part"], said["number"]
            if len(parts) < world_size:
                missing = sorted(set(range(world_size)) - parts.keys())
                _pause(
                    deadline, f"rank 0 waited in vain for ranks {missing} in {directory}{_ALL_SEE}"
                )
        ranks = range(world_size)
        last = {"answers": [answers[r] for r in ranks], "parts": [parts[r] for r in ranks]}
        owned.write(f"{stem}-{number}-all", json.dumps(last).encode(), folder)
        # Each rank removes its file when it has read the last one.
        while others.keys() & set(os.listdir(folder)) and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
    finally:
        for name in (f"{stem}-call", f"{stem}-{number}-all", *others):
            _remove(name, folder)
    return [bytes.fromhex(parts[r]) for r in range(world_size)]


def _answer(
    folder: int,
    directory: Path,
    stem: str,
    rank: int,
    world_size: int,
    mine: bytes,
    deadline: float,
) -> list[bytes]:
    own = secrets.token_hex(8)
    answered = ""
    word = json.dumps({"number": own, "part": mine.hex()}).encode()
    try:
        while True:
            with contextlib.suppress(FileNotFoundError):
                called = f"{stem}-{owned.read(f'{stem}-call', folder).decode()}"
                if called != answered:
                    if answered:
                        _remove(f"{answered}-{rank}", folder)
                    owned.write(f"{called}-{rank}", word, folder)
                    answered = called
            if answered:
                with contextlib.suppress(FileNotFoundError):
                    last = json.loads(owned.read(f"{answered}-all", folder))
                    if rank < len(last["answers"]) and last["answers"][rank] == own:
                        return [bytes.fromhex(part) for part in last["parts"]]
            there = os.listdir(folder)  # and a network file system looks again at what is there
            missing = [r for r in range(1, world_size) if f"{answered}-{r}" not in there]
            late = f"ranks {missing}" if answered and missing else "rank 0"
            _pause(deadline, f"rank {rank} waited in vain for {late} in {directory}{_ALL_SEE}")
    finally:
        if answered:
            _remove(f"{answered}-{rank}", folder)


def _remove_stale(folder: int, fresh: str) -> None:
    """Removes what other meetings left long ago; the time of `fresh` is the file server's now."""
    with contextlib.suppress(FileNotFoundError):  # a start of the same job removed it
        now = os.stat(fresh, dir_fd=folder).st_mtime
        for name in filter(_LEFT.fullmatch, os.listdir(folder)):
            # Another job removes it too, or a server of files keeps it: neither concerns this one.
            with contextlib.suppress(OSError):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and now - found.st_mtime > _STALE_SECONDS:
                    os.unlink(name, dir_fd=folder)


def _pause(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise PeerError(why)
    time.sleep(_RETRY_SECONDS)


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
