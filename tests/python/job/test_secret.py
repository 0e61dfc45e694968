"""Which secret a job has, and who could know it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import nostall
from nostall.errors import UsageError
from nostall.job import _cluster as cluster
from nostall.job import _notes as notes
from nostall.job import _secret as secret
from nostall.job._rendezvous import Rendezvous, find_rendezvous
from nostall.job._world import World


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("NOSTALL_SECRET", raising=False)
    return tmp_path / "nostall"


def agree(exposed: str, environments: list[dict[str, str]] | None = None) -> list[bytes]:
    """The secret of each of three ranks."""
    with pytest.MonkeyPatch.context() as patch:

        def enter(rank: int) -> None:
            for name, value in (environments[rank] if environments else {}).items():
                patch.setenv(name, value)

        offers: list[dict[str, Any]] = []
        for rank in range(3):
            enter(rank)
            offers.append(json.loads(json.dumps(secret.offer(rank, exposed))))
        settled = []
        for rank in range(3):
            enter(rank)
            settled.append(secret.settle(rank, offers, exposed))
    said = json.dumps(offers).encode()
    readable = any(key in said for key in settled)
    assert readable == (not exposed or "WARNED" in os.environ)
    return settled


def test_where_nobody_listens_rank_0_chooses(home: Path) -> None:
    first = agree("")
    assert len(set(first)) == 1 and len(first[0]) >= 16
    assert agree("") != first
    assert not home.exists()


def test_in_a_store_that_others_read_the_users_key_makes_it(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = agree("anybody")
    assert len(set(first)) == 1 and agree("anybody")[0] != first[0]
    assert (home / "key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["key"]
    assert caplog.text == ""


def test_without_a_common_key_it_is_said_who_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WARNED", "1")
    homes = [{"XDG_STATE_HOME": str(tmp_path / str(rank))} for rank in range(3)]
    assert len(set(agree("every process that reaches torch's store at h:1", homes))) == 1
    assert caplog.text.count("every process that reaches torch's store at h:1 can read it") == 1
    assert "NOSTALL_SECRET" in caplog.text


def test_a_key_that_others_can_read_or_made_is_not_used(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agree("anybody")
    (home / "key").chmod(0o644)
    monkeypatch.setenv("WARNED", "1")
    agree("anybody")
    assert caplog.text.count("anybody can read it") == 1
    (home / "key").unlink()
    (home / "key").symlink_to("/dev/zero")
    agree("anybody")
    assert caplog.text.count("anybody can read it") == 2


def test_a_secret_that_is_too_short_or_not_everywhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NOSTALL_SECRET", "s" * 16)
    assert agree("anybody") == [b"s" * 16] * 3
    with pytest.raises(UsageError, match=r"ranks \[2\]"):
        agree("anybody", [{}, {}, {"NOSTALL_SECRET": ""}])
    monkeypatch.setenv("NOSTALL_SECRET", "s" * 15)
    with pytest.raises(UsageError, match=r"has 15 bytes.*at least 16"):
        secret.offer(0, "")
    with pytest.raises(UsageError, match="15 bytes"):
        find_rendezvous(0, 2, "x", environment={**os.environ, "NOSTALL_RENDEZVOUS": "tcp://h:1"})


def test_marks_tell_secrets_apart_and_do_not_give_them_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = {0: secret.mark()}
    for rank, given in enumerate(["a" * 16, "b" * 16, "a" * 16], 1):
        monkeypatch.setenv("NOSTALL_SECRET", given)
        marks[rank] = secret.mark()
    assert marks[0] == "" and marks[1] == marks[3] != marks[2]
    assert {len(bytes.fromhex(marks[rank])) for rank in (1, 2)} == {2}
    assert (
        secret.disagreement({0: "", 1: ""}) == secret.disagreement({1: marks[1], 3: marks[3]}) == ""
    )
    assert "not set on ranks [0], but on others" in secret.disagreement(marks)
    del marks[0]
    assert "another one on ranks [2] than on rank 1" in secret.disagreement(marks)


def test_a_store_forgets_what_was_said() -> None:
    """Torch's own store: read by one who is not of the job after the ranks met."""
    torch = pytest.importorskip("torch.distributed", reason="torch is not installed")
    from nostall.job._rendezvous import _by_store

    store = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [torch.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(2)]
    ranks = [_by_store(client, rank, 2, "job", 60) for rank, client in enumerate(clients)]
    assert isinstance(ranks[0], Rendezvous) and f"127.0.0.1:{store.port}" in ranks[0].exposed
    before = store.num_keys()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            waiting = pool.submit(ranks[0], b"zero")
            assert ranks[1](b"one") == waiting.result() == [b"zero", b"one"]
            assert store.num_keys() == before + 1  # how many meetings ended


def test_other_stores_of_torch_are_not_taken_for_private(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch.distributed", reason="torch is not installed")
    from nostall.job._rendezvous import _readers_of

    file = torch.FileStore(str(tmp_path / "store"), 1)
    assert _readers_of(torch.PrefixStore("a", file)).endswith(f"at {tmp_path}/store")
    assert _readers_of(torch.Store()) == "every process that reaches torch's Store"
    assert _readers_of(torch.HashStore()) == ""


def ranks_of(size: int, start: str) -> list[World]:
    job = f"{start} of {size} ranks in {os.getpid()}"
    return [World(rank, size, rank, size, job) for rank in range(size)]


def test_ranks_on_one_node_are_compared_without_a_meeting() -> None:
    """One after the other, as by loaders that live shorter than the ranks are apart."""
    first, second, third = ranks_of(3, "alike")
    settings = {"batch_size": 8, "seed": 0}
    cluster.check_alike(first, "loader 0", settings)
    cluster.check_alike(second, "loader 0", settings)
    with pytest.raises(UsageError, match="batch_size is 8 on rank 0 and 16 on rank 2"):
        cluster.check_alike(third, "loader 0", settings | {"batch_size": 16})
    cluster.check_alike(third, "loader 1", settings | {"batch_size": 16})
    cluster.check_alike(ranks_of(2, "alike")[0], "loader 0", settings | {"batch_size": 16})


def test_ranks_are_not_compared_with_those_of_a_start_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own store as torchrun keeps it: what ranks that were killed left is there."""
    torch = pytest.importorskip("torch.distributed", reason="torch is not installed")
    store = torch.FileStore(str(tmp_path / "store"), 1)
    monkeypatch.setattr(cluster, "initialised_store", lambda size=2: store if size == 2 else None)
    for seed in (111, 222):
        for world in ranks_of(2, f"start {seed}"):
            cluster.check_alike(world, "loader 0", {"seed": seed})


def test_ranks_that_a_launcher_counts_on_one_node_are_told_of_walls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch.distributed", reason="torch is not installed")
    store: Any = torch.FileStore(str(tmp_path / "store"), 1)
    monkeypatch.setattr(cluster, "initialised_store", lambda size=3: store if size == 3 else None)
    first, second, third = ranks_of(3, "walls")
    own = cluster.node_identity()
    cluster.check_alike(first, "loader 0", {})
    cluster.check_alike(second, "loader 0", {})
    assert not caplog.text
    monkeypatch.setattr(cluster, "node_identity", lambda: own.replace("net:", "net:other"))
    cluster.check_alike(ranks_of(2, "walls")[1], "loader 0", {})  # not torch's ranks
    assert not caplog.text
    cluster.check_alike(third, "loader 0", {})
    assert "ranks 0 and 2 are on one machine in other namespaces" in caplog.text
    monkeypatch.setattr(notes, "noted", lambda *_: None)  # these are in another namespace
    with pytest.raises(UsageError, match="disagree: seed is None on rank 0 and 1 on rank 2"):
        cluster.check_alike(third, "loader 0", {"seed": 1})
    cluster.check_alike(ranks_of(3, "other start")[2], "loader 0", {"seed": 1})
    store = torch.Store()  # that of init_process_group("mpi") can do nothing
    cluster.check_alike(second, "loader 1", {})


def test_what_a_rank_makes_for_itself_shifts_no_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.bin").write_bytes(b"0")
    data = nostall.ImageFolder(tmp_path, extensions=(".bin",), index=False)

    def twins(**options: Any) -> str:
        with nostall.DataLoader(data, 1, tiers=[], output="numpy", **options) as loader:
            return loader._twins

    def number(name: str) -> int:
        return int(name.rpartition(" ")[2])

    both: dict[str, Any] = {"rank": 0, "world_size": 7}
    first = twins(**both)
    twins(rank=0, world_size=1)
    twins(rank=0, world_size=7, job="evaluation")
    assert number(twins(**both)) == number(first) + 1
