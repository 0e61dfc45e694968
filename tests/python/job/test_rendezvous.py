"""The ways in which ranks find each other."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nodes import free_port, run_by_mpi

from nostall.base import _owned as owned
from nostall.base._sizes import parse_tiers
from nostall.errors import IoError, PeerError, UsageError
from nostall.job import _cluster as cluster
from nostall.job import _rendezvous as rendezvous
from nostall.job._rendezvous import find_rendezvous
from nostall.job._world import AllGather, World

WORLD = 3


def gather_all(env: Mapping[str, str], timeout: float = 60) -> list[list[bytes]]:
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


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Of hosts, in the place of DNS: none if their name is not known."""
    found: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def resolve_here(host: str, *more: Any, **named: Any) -> list[Any]:
        if found.get(host) == []:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        each = found.get(host, [host])
        return [info for address in each for info in resolve(address, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    return found


@pytest.mark.parametrize(("host", "elsewhere"), [("head", True), ("localhost", False)])
def test_by_socket_where_the_hosts_own_name_is_its_loopback(
    host: str, elsewhere: bool, addresses: dict[str, list[str]]
) -> None:
    """Other hosts find it at another address, which is one of the loopback here."""
    addresses[host] = ["127.0.1.1"]
    port = free_port()

    def gathering(rank: int, at: str) -> AllGather:
        env = {"NOSTALL_RENDEZVOUS": f"tcp://{at}:{port}", "NOSTALL_SECRET": "s" * 16}
        gather = find_rendezvous(rank, 2, "test", environment=env, timeout=60 if elsewhere else 1)
        assert gather is not None
        return gather

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gathering(0, host), b"0")
        if elsewhere:
            assert gathering(1, "127.0.0.2")(b"1") == waiting.result() == [b"0", b"1"]
            return
        with pytest.raises(PeerError, match="cannot reach rank 0"):
            gathering(1, "127.0.0.2")(b"1")
        with pytest.raises(PeerError, match="in vain"):
            waiting.result()


@pytest.mark.parametrize("host", ["192.0.2.1", "service", "six"])
@pytest.mark.parametrize("way", ["127.0.0.1", "[::1]"])
def test_by_socket_where_rank_0_does_not_have_the_address_that_leads_to_it(
    host: str, way: str, addresses: dict[str, list[str]]
) -> None:
    """As that of a Service of Kubernetes, whose name it may not know yet."""
    if way == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("IPv6 is missing")
    addresses |= {"service": [], "six": ["2001:db8::1"]}
    port = free_port()

    def gathering(rank: int, at: str, timeout: float) -> AllGather:
        env = {"NOSTALL_RENDEZVOUS": f"tcp://{at}:{port}", "NOSTALL_SECRET": "s" * 16}
        gather = find_rendezvous(rank, 2, "test", environment=env, timeout=timeout)
        assert gather is not None
        return gather

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gathering(0, host, 60), b"0")
        assert gathering(1, way, 60)(b"1") == waiting.result() == [b"0", b"1"]
    with pytest.raises(PeerError, match=rf"at {host}:\d+ \(on all interfaces of its host\)"):
        gathering(0, host, 0.1)(b"0")


def test_by_socket_meetings_of_threads_take_turns() -> None:
    env = {"NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}", "NOSTALL_SECRET": "s" * 16}

    def one(rank: int, name: str) -> list[bytes]:
        gather = find_rendezvous(rank, 2, name, environment=env, timeout=60)
        assert gather is not None
        return gather(f"{name}{rank}".encode())

    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(one, 0, name) for name in "ab"]
        second = [pool.submit(one, 1, name) for name in "ba"]
        assert [f.result() for f in first] == [[b"a0", b"a1"], [b"b0", b"b1"]]
        assert [f.result() for f in second] == [[b"b0", b"b1"], [b"a0", b"a1"]]


def test_by_socket_a_forked_child_has_turns_of_its_own() -> None:
    address = ("127.0.0.1", 1)
    with rendezvous._turn(address, 0):
        with pytest.raises(PeerError, match="another meeting of this process at 127"):
            rendezvous._turn(address, 0).__enter__()
        child = os.fork()
        if child == 0:
            try:
                with rendezvous._turn(address, 0):
                    os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_by_socket_a_port_that_another_program_has_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sleep(_: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(time, "sleep", sleep)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        env = {"NOSTALL_RENDEZVOUS": where, "NOSTALL_SECRET": "s" * 16}
        gather = find_rendezvous(0, 2, "test", environment=env, timeout=60)
        assert gather is not None
        with pytest.raises(PeerError, match=r"rank 0 cannot listen at 127\.0\.0\.1:.* in use"):
            gather(b"0")


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


def test_by_socket_does_not_wait_for_one_who_says_nothing() -> None:
    port = free_port()
    env = {"NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{port}", "NOSTALL_SECRET": "s" * 16}
    first = find_rendezvous(0, WORLD, "test", environment=env)
    assert first is not None
    with ThreadPoolExecutor(1 + WORLD) as pool, contextlib.ExitStack() as closing:
        waiting = pool.submit(first, b"I am 0")
        while True:
            try:
                silent = socket.create_connection(("127.0.0.1", port))
                break
            except OSError:
                assert not waiting.done()
        closing.enter_context(silent)
        others = [
            pool.submit(gather, f"I am {rank}".encode())
            for rank in (1, 2)
            if (gather := find_rendezvous(rank, WORLD, "test", environment=env))
        ]
        # The stranger is connected until the end of the test.
        assert [f.result(60) for f in (waiting, *others)] == EXPECTED


def test_by_socket_leaves_a_listener_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        env = {"NOSTALL_RENDEZVOUS": where, "NOSTALL_SECRET": "s" * 16}
        gather = find_rendezvous(1, 2, "test", environment=env, timeout=0.5)
        assert gather is not None
        with pytest.raises(PeerError, match="cannot reach rank 0"):
            gather(b"1")


@pytest.mark.parametrize("rank", [1, 2])
def test_by_socket_tells_a_rank_that_counts_more_than_rank_0(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Rank 1 is in the smaller world too, rank 2 is in the larger one alone."""
    env = {
        "NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}",
        "NOSTALL_SECRET": "s" * 16,
    }
    real, came = rendezvous._send, threading.Event()

    def send(connection: socket.socket, data: bytes, deadline: float) -> None:
        real(connection, data, deadline)
        came.set()

    monkeypatch.setattr(rendezvous, "_send", send)
    later = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later, sleep=time.sleep)
    monkeypatch.setattr(rendezvous, "time", clock)

    def meet(rank: int, world: int) -> Any:
        gather = find_rendezvous(rank, world, "test", environment=env, timeout=60)
        assert gather is not None
        return gather(bytes([rank]))

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, 0, 2)
        other = pool.submit(meet, rank, 3)
        if rank == 2:
            assert came.wait(60)
            pool.submit(meet, 1, 2)
        assert first.result() == [b"\0", b"\1"]
        later = 60.0  # no need to wait for it
        with pytest.raises(PeerError, match=f"rank {rank} cannot reach .* world size: .* the 3 "):
            other.result()


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
    assert list((tmp_path / "meet").iterdir()) == []


def test_under_srun_without_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritable(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(WORLD)}
    env = {**step, "XDG_STATE_HOME": str(tmp_path)}
    assert gather_all(env) == EXPECTED
    assert list((tmp_path / "nostall" / "meet").iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(owned, "write", unwritable)
        with pytest.raises(IoError, match=r"cannot meet in .*meet: Read-only .* name another"):
            gather_all(env, timeout=0.1)
    env["SLURM_STEP_NUM_TASKS"] = "1"  # srun started a launcher of its own
    assert find_rendezvous(0, WORLD, "test", environment=env) is None


def test_by_files_takes_nothing_of_an_earlier_job(tmp_path: Path) -> None:
    """The files of a job that was killed at its meeting, under the same names."""
    meet = tmp_path / "meet"
    env = {"NOSTALL_RENDEZVOUS": str(meet), "SLURM_JOB_ID": "7"}
    stale = {}

    def keep(name: str, data: bytes, directory: int) -> None:
        real(name, data, directory)
        stale[name] = data

    real = owned.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owned, "write", keep)
        gather_all(env)
    assert len(stale) == 1 + (WORLD - 1) + 1
    for attempt in range(3):
        for name, data in stale.items():
            path = meet / name
            path.write_bytes(data.replace(b"I am".hex().encode(), b"I was".hex().encode()))
            path.chmod(0o600)
        # Rank 0 last, so that the others meet its old files.
        with ThreadPoolExecutor(WORLD) as pool:
            gathers = [find_rendezvous(r, WORLD, "test", environment=env) for r in range(WORLD)]
            others = [
                pool.submit(g, f"I am {r}".encode()) for r, g in enumerate(gathers) if r and g
            ]
            if attempt:
                number = stale["nostall-test_7__-call"].decode()
                names = [f"nostall-test_7__-{number}-{r}" for r in (1, 2)]
                while any(b"I was".hex().encode() in (meet / n).read_bytes() for n in names):
                    assert not any(f.done() for f in others)
            assert gathers[0] is not None
            first = pool.submit(gathers[0], b"I am 0")
            assert [f.result(60) for f in (first, *others)] == EXPECTED
        assert list(meet.iterdir()) == []


def test_by_files_removes_what_killed_jobs_left_long_ago(tmp_path: Path) -> None:
    meet = tmp_path / "meet"
    number = "0123456789abcdef"
    names = [f"nostall-test_6__-{end}" for end in ("call", f"{number}-1", f"{number}-all")]
    names += [f".nostall-test_6__-{number}-2.01234567", "nostall-notes", "mine"]

    def left(age: float) -> set[str]:
        meet.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            (meet / name).touch(mode=0o600)
            then = time.time() - age
            os.utime(meet / name, (then, then))
        (meet / "nostall-test_6__-call").unlink()
        (meet / "nostall-test_6__-call").symlink_to(meet / "mine")  # is no file of a meeting
        assert gather_all({"NOSTALL_RENDEZVOUS": str(meet), "SLURM_JOB_ID": "7"}) == EXPECTED
        return {path.name for path in meet.iterdir()}

    # Of another job, which may be meeting.
    assert left(3600) == set(names)
    assert left(2 * 86400) == {"nostall-test_6__-call", "nostall-notes", "mine"}


def test_by_files_meets_where_a_file_that_was_left_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = tmp_path / "meet"
    meet.mkdir(mode=0o700)
    names = [f"nostall-test_6__-0123456789abcdef-{rank}" for rank in (1, 2)]
    for name in names:
        (meet / name).touch(mode=0o600)
        os.utime(meet / name, (0, 0))
    removed = []

    def unlink(name: str, *, dir_fd: int | None = None, real: Any = os.unlink) -> None:
        if name in names:  # as a server of files does whose other client has it open
            removed.append(name)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    assert gather_all({"NOSTALL_RENDEZVOUS": str(meet), "SLURM_JOB_ID": "7"}) == EXPECTED
    assert sorted(removed) == names


def test_by_files_starts_of_a_job_do_not_meet(tmp_path: Path) -> None:
    """Two steps of one job at once, and the same job again after a requeue."""
    base = {"NOSTALL_RENDEZVOUS": str(tmp_path / "meet"), "SLURM_JOB_ID": "7"}
    starts = [base | {"SLURM_STEP_ID": "0"}, base | {"SLURM_STEP_ID": "1"}]
    starts.append(base | {"SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"})
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gather_all, starts)) == [EXPECTED] * 3


def test_by_files_refuses_a_directory_that_others_can_change(tmp_path: Path) -> None:
    def gather(directory: Path) -> None:
        env = {"NOSTALL_RENDEZVOUS": str(directory)}
        found = find_rendezvous(1, 2, "test", environment=env, timeout=0.1)
        assert found is not None
        found(b"1")

    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(UsageError, match=r"open is not used: its mode 770 .* make it 700"):
        gather(tmp_path / "open")
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("own")
    with pytest.raises(UsageError, match=r"link is not used.*no symlink"):
        gather(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not used"):
        gather(tmp_path / "file")
    with pytest.raises(UsageError, match=r"below cannot be made: .*RENDEZVOUS may name another"):
        gather(tmp_path / "file" / "below")
    if os.geteuid() != 0:
        pytest.skip("another user's directory: only root can make one")
    os.chown(tmp_path / "own", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        gather(tmp_path / "own")


def test_by_files_names_who_is_missing(tmp_path: Path) -> None:
    env = {"NOSTALL_RENDEZVOUS": str(tmp_path)}
    first, second = (find_rendezvous(r, 3, "test", environment=env, timeout=1) for r in range(2))
    assert first is not None and second is not None
    with pytest.raises(PeerError, match="rank 1 waited in vain for rank 0"):
        second(b"1")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second, b"1")
        with pytest.raises(PeerError, match=r"rank 0 waited in vain for ranks \[(1, )?2\]"):
            first(b"0")
        with pytest.raises(PeerError, match="rank 1 waited in vain"):
            other.result()
    assert list(tmp_path.iterdir()) == []


def test_by_files_waits_on_where_a_rank_gives_up_amid_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is listed, and not there any more when it is read."""
    real = owned.read
    gone: list[str] = []

    def read(name: str, directory: int) -> bytes:
        if not gone and name.endswith("-1"):
            gone.append(name)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real(name, directory)

    monkeypatch.setattr(owned, "read", read)
    assert gather_all({"NOSTALL_RENDEZVOUS": str(tmp_path / "meet")}) == EXPECTED
    assert gone


def test_by_files_waits_on_where_a_server_forgets_a_file_amid_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS 3 does with one that another client removes."""
    real = os.fstat
    gone: list[int] = []

    def fstat(fd: int) -> os.stat_result:
        found = real(fd)
        if not gone and stat.S_ISREG(found.st_mode):
            gone.append(fd)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    assert gather_all({"NOSTALL_RENDEZVOUS": str(tmp_path / "meet")}) == EXPECTED
    assert gone


def test_by_a_store_says_for_what_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        host, port = "node1", 29500

        def check(self, _keys: list[str]) -> bool:
            return False

        def wait(self, keys: list[str], _timeout: object) -> None:
            raise RuntimeError(f"{keys[0]} is not there")

    monkeypatch.setattr(rendezvous, "initialised_store", lambda: Store())
    gather = find_rendezvous(1, 2, "checkpointer 0 1", environment={}, timeout=1.5)
    assert gather is not None
    words = (
        r'rank 1 waited [\d.]+ s in vain for rank 0 of 2, to meet for "checkpointer 0 1" '
        r"\(nostall/checkpointer 0 1/2/bell 0 is not there\): see its own error"
    )
    with pytest.raises(PeerError, match=words):
        gather(b"mine")


def test_torchruns_agents_that_counted_other_restarts_meet() -> None:
    """Each counts for itself, and one that takes the place of another begins at 0."""
    torch = pytest.importorskip("torch.distributed", reason="torch is not installed")
    store = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def one(rank: int) -> list[bytes]:
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(rank)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        gather = find_rendezvous(rank, WORLD, "test", environment=env, timeout=30)
        assert gather is not None
        return gather(f"I am {rank}".encode())

    with ThreadPoolExecutor(WORLD) as pool:
        assert list(pool.map(one, range(WORLD))) == EXPECTED


@pytest.mark.multi
def test_mpi_waits_for_no_rank_for_ever() -> None:
    """A meeting that was given up is taken up by the next one, and ranks are numbered as in MPI.

    Those that came for other things are told."""
    program = """
import sys
from mpi4py import MPI
from nostall.errors import PeerError, UsageError
from nostall.job._rendezvous import find_rendezvous

world = MPI.COMM_WORLD
try:
    find_rendezvous(1 - world.rank, 2, "test")
except UsageError as error:
    assert f"rank {1 - world.rank} is rank {world.rank} of mpi4py's COMM_WORLD" in str(error), error
else:
    sys.exit("another rank than that of MPI is taken")
meet = find_rendezvous(world.rank, 2, "test", timeout=0.1 if world.rank == 0 else 60)
if world.rank == 0:
    try:
        meet(b"0")
    except PeerError as error:
        assert 'rank 0 waited 0.1 s in vain for all 2 ranks of MPI to meet for "test"' in str(error)
    else:
        sys.exit("rank 1 had come")
    world.send("come", 1)
    meet = find_rendezvous(world.rank, 2, "test")
else:
    world.recv(source=0)
assert meet(bytes([world.rank])) == [bytes([0]), bytes([1])]

meet = find_rendezvous(world.rank, 2, "ab"[world.rank])
try:
    meet(b"")
except UsageError as error:
    assert 'rank {0} came to meet for "{2}", and rank {1} for "{3}"'.format(
        world.rank, 1 - world.rank, "ab"[world.rank], "ba"[world.rank]
    ) in str(error), error
else:
    sys.exit("ranks that meet for two things have met")
"""
    run_by_mpi("openmpi", "-c", program)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="neither tcp"):
        find_rendezvous(0, 2, "test", environment={"NOSTALL_RENDEZVOUS": "udp://x:1"})


def test_without_any_launcher_there_is_none() -> None:
    assert find_rendezvous(0, 2, "test", environment={}) is None


def test_a_wrong_allgather_is_refused() -> None:
    world = World(rank=0, world_size=2, local_rank=0, local_world_size=1, job="x")
    tiers = parse_tiers(["ram:1MiB"], dataset_bytes=1, local_world_size=1)
    with pytest.raises(UsageError, match="1 rank together, not the 2"):
        cluster.join(world, tiers, lambda mine: [mine])


def test_ranks_of_one_machine_behind_walls_are_told_so() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    look = "import nostall.job._cluster as c; print(c.node_identity())"
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", look]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"network namespaces are not allowed: {result.stderr.strip()}")
    here, there = cluster.node_identity(), result.stdout.strip()
    assert here != there
    words = r"ranks 0 and 2 are on one machine in other namespaces \(net\), and share no cache"
    assert re.match(words, cluster.walls({0: here, 1: here, 2: there}))
    mounts = here.replace("mnt:", "mnt:other")
    assert "in other namespaces (mnt), and may share no cache" in cluster.walls(
        {0: here, 1: mounts}
    )
    assert (
        cluster.walls({0: here, 1: here, 2: "named a", 3: "another-boot " + here.partition(" ")[2]})
        == ""
    )


def test_node_identity_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cluster.node_identity()
    assert own == cluster.node_identity()
    monkeypatch.setenv("NOSTALL_NODE", "a")
    assert cluster.node_identity() == "named a" != own


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (False, r"nostall was built without UCX \(\S+nostall_ucx\.so is not there\): install UCX"),
        (True, r"UCX cannot be loaded \(.*\): pip install 'nostall\[cluster\]'"),
    ],
)
def test_without_ucx_samples_stay_where_they_are(
    built: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = tmp_path / "nostall_ucx.so"
    if built:
        library.write_bytes(b"no library")
    monkeypatch.setattr(cluster, "LIBRARY", library)
    world = World(rank=0, world_size=2, local_rank=0, local_world_size=1, job="x")

    def both(mine: bytes) -> list[bytes]:
        return [mine, mine.replace(b'"rank": 0', b'"rank": 1').replace(b'"node": "', b'"node": "2')]

    tiers = parse_tiers(["ram:1MiB"], dataset_bytes=1, local_world_size=1)
    joined = cluster.join(world, tiers, both)
    assert joined.transport is None
    assert re.search(said, caplog.text), caplog.text
