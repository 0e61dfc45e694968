"""Fast directories that are each node's own: real processes, real loss of a node's directory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import node_rank
import prefork
import pytest
from test_checkpointer import World

import nostall
import nostall.checkpoint._begin
import nostall.checkpoint._nodes
import nostall.job._greeting
import nostall.job._stream
from nostall.checkpoint._background import BackgroundWriter, Drain
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._nodes import Nodes, Outcome, holdings, together
from nostall.checkpoint._place import UnreachableError
from nostall.checkpoint._store import Store, part_name
from nostall.errors import IoError, PeerError, UsageError
from nostall.job._stream import Listener, Stream, connect

HERE = Path(__file__).parent
NODES = [0, 0, 1]  # of each rank


class Job:
    """Three ranks on two nodes, `phase` by `phase`."""

    def __init__(self, home: Path, **settings: Any) -> None:
        self.home, self.settings, self.runs = home, settings, 0

    def start(self, phase: str) -> list[prefork.Process]:
        self.runs += 1
        env = {**os.environ, "NOSTALL_RENDEZVOUS": str(self.home / f"rendezvous{self.runs}")}
        env |= {"NOSTALL_HOST": "127.0.0.1"}
        return [
            prefork.Process(
                [
                    str(HERE / "node_rank.py"),
                    json.dumps(
                        {
                            "home": str(self.home),
                            "rank": rank,
                            "node": node,
                            "world": len(NODES),
                            "phase": phase,
                            **self.settings,
                        }
                    ),
                ],
                env=env,
                stdout=prefork.PIPE,
                stderr=prefork.PIPE,
            )
            for rank, node in enumerate(NODES)
        ]

    def save_and_die(self) -> None:
        ranks = self.start("save")
        try:
            for process in ranks:
                assert process.stdout is not None and process.stderr is not None
                assert process.stdout.readline() == "safe\n", process.stderr.read()
        finally:
            for process in ranks:
                process.send_signal(signal.SIGKILL)
                process.communicate()

    def restore(self) -> tuple[list[Any], str]:
        ranks = self.start("restore")
        outputs = [process.communicate(timeout=300) for process in ranks]
        for process, (_, words) in zip(ranks, outputs, strict=True):
            assert process.returncode == 0, words
        return [json.loads(out) for out, _ in outputs], "".join(words for _, words in outputs)

    def expected(self, step: int, tier: str) -> list[Any]:
        return [
            [step, tier, node_rank.digest(node_rank.state_of(rank, step)), rank]
            for rank in range(len(NODES))
        ]


@pytest.mark.multi
@pytest.mark.parametrize("lost", [0, 1])
def test_with_a_partner_a_lost_node_loses_nothing(lost: int, tmp_path: Path) -> None:
    job = Job(tmp_path, durable=False, partner=True)
    job.save_and_die()
    shutil.rmtree(tmp_path / f"node{lost}")
    found, _ = job.restore()
    assert found == job.expected(3, "fast")
    # The new node has its parts again, and the next save protected both.
    for node in (0, 1):
        store = Store(tmp_path / f"node{node}", "fast")
        assert [e.step for e in store.entries()][-1] == 4
        assert len(store.files(4)) == len(NODES)


@pytest.mark.multi
def test_without_a_partner_the_durable_one_is_left(tmp_path: Path) -> None:
    job = Job(tmp_path, durable=True, partner=False)
    job.save_and_die()
    kept = shutil.ignore_patterns("rendezvous*")
    shutil.copytree(tmp_path, tmp_path.with_name("intact"), ignore=kept)
    shutil.rmtree(tmp_path / "node1")
    found, words = job.restore()
    assert found == job.expected(1, "durable")
    assert "parts of ranks [2]" in words and "partner=True" in words
    # With all nodes there, the fast one is found, and drained by the next start.
    intact = Job(tmp_path.with_name("intact"), durable=True, partner=False)
    found, _ = intact.restore()
    assert found == intact.expected(3, "fast")
    steps = [e.step for e in Store(intact.home / "durable", "durable").entries()]
    assert 3 in steps


def part_at(store: Store, step: int, data: bytes) -> Part:
    import nostall._native as native

    name = part_name(1, "aaaaaaaa-000001")
    path = store.directory(step) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return Part(1, name, len(data), (native.crc32c(data),))


def some_nodes(tmp_path: Path, count: int, timeout: float = 60) -> list[Nodes]:
    """Of one rank each."""
    made = []
    groups = [[rank] for rank in range(count)]
    for rank in range(count):
        store = Store(tmp_path / f"node{rank}", "fast")
        store.root.mkdir()
        made.append(Nodes(store, rank, groups, b"secret", partner=True, timeout=timeout))
    addresses = [nodes.address for nodes in made]
    for nodes in made:
        nodes.addresses = [a for a in addresses if a is not None]
    return made


def two_nodes(tmp_path: Path) -> tuple[Nodes, Nodes]:
    first, second = some_nodes(tmp_path, 2)
    return first, second


def test_parts_travel_whole_or_not_at_all(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    data = os.urandom(5000)
    part = part_at(first.store, 7, data)
    assert first.give_partner(7, part) == ""
    assert (second.store.directory(7) / part.name).read_bytes() == data
    damaged = Part(1, part.name, part.size, (part.crcs[0] ^ 1,))
    assert "damaged" in first.give_partner(7, damaged)
    assert (second.store.directory(7) / part.name).read_bytes() == data
    target = tmp_path / "got"
    with pytest.raises(IoError, match="not there"):
        first.fetch(9, part, 1, target)
    first.fetch(7, part, 1, target)
    assert target.read_bytes() == data
    first.take_back(7, part)
    assert not second.store.directory(7).exists()
    second.close()
    assert "cannot reach" in first.give_partner(7, part)
    assert list(tmp_path.rglob("*.partial")) == []
    first.close()


def test_names_from_the_network_stay_in_their_directory(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    part = part_at(first.store, 7, b"x" * 10)
    for step, name in ((7, "../../evil"), (7, "/etc/evil"), (-1, part.name), ("7", part.name)):
        values = {**part.to_dict(), "name": name}
        stream = connect(first.addresses[1], b"secret", 60)
        stream.send({"ask": "put", "step": step, "part": values})
        assert stream.receive()["error"]
        stream.close()
    stream = connect(first.addresses[1], b"secret", 60)
    stream.send({"ask": "explode"})
    assert "cannot be understood" in stream.receive()["error"]
    stream.close()
    for nodes in (first, second):
        nodes.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["node0", "node1"]


def test_strangers_are_not_answered() -> None:
    asked: list[Any] = []

    def answer(question: dict[str, Any], stream: Stream) -> None:
        asked.append(question)
        stream.send({"ok": True})

    listener = Listener(answer, b"secret", 60)
    with pytest.raises((PeerError, OSError)):
        connect(listener.address, b"another", 60)
    with socket.create_connection(listener.address) as silent:
        # One who says nothing keeps nobody else waiting.
        stream = connect(listener.address, b"secret", 60)
        stream.send({"hello": 1})
        assert stream.receive() == {"ok": True}
        stream.close()
        silent.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
    listener.close()
    assert asked == [{"hello": 1}]


def test_a_save_that_one_rank_cannot_write_is_none_on_all_nodes(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    manifest = Manifest(5, "aaaaaaaa-000001", 2, ())
    results: dict[int, str] = {}

    def commit(nodes: Nodes, mine: Part | str) -> None:
        results[nodes.rank] = nodes.commit(manifest, mine, lambda: False).reason

    mine = part_at(first.store, 5, b"y")
    threads = [
        threading.Thread(target=commit, args=(first, Part(0, mine.name, mine.size, mine.crcs))),
        threading.Thread(target=commit, args=(second, "its disk is gone")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: "rank 1: its disk is gone", 1: "rank 1: its disk is gone"}
    assert first.store.entries() == [] and second.store.entries() == []
    for nodes in (first, second):
        nodes.close()


def test_a_listener_survives_what_accept_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    errors, accept = [errno.EMFILE, errno.EMFILE, errno.ECONNABORTED], socket.socket.accept
    listener = Listener(lambda _, stream: stream.send({"ok": True}), b"secret", 60)

    def flaky(listening: socket.socket) -> Any:
        # Those of earlier tests may be about to end, and accept once more.
        if errors and listening is listener._door._socket:
            raise OSError(errors[0], os.strerror(errors.pop(0)))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", flaky)
    with contextlib.closing(connect(listener.address, b"secret", 60)) as stream:
        stream.send({"hello": 1})
        assert stream.receive() == {"ok": True}
    assert errors == [] and caplog.text.count("is not accepted") == 1
    listener.close()
    listener._thread.join(60)
    assert not listener._thread.is_alive()


@pytest.mark.parametrize(
    ("ranks", "soft", "hard", "now"),
    [
        (200, 1024, 4096, 1024),  # there is room
        (1000, 1024, 4096, 4000),
        (1000, 1024, resource.RLIM_INFINITY, 4000),
        (1000, resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        (1500, 1024, 4096, 4096),
        (2500, 1024, 4096, 4096),  # there is none
        (1500, 4096, 4096, 4096),  # nor could it be raised
    ],
)
def test_rank_0_may_open_a_connection_to_each_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: int,
    soft: int,
    hard: int,
    now: int,
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    groups = [[0], list(range(1, ranks))]
    for rank in (2, 0):
        store = Store(tmp_path, "fast")
        Nodes(store, rank, groups, b"secret", partner=False, timeout=10).close()
        assert limits[-1] == ((now if rank == 0 else soft), hard)
    assert len(limits) == 1 + (now != soft)
    told = (
        "needs a connection to each of 2500 ranks: checkpoints may fail; start it with `ulimit -n"
    )
    assert (told in caplog.text) == (ranks == 2500)


def test_notes_that_wait_keep_nobody_from_being_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nostall.job._greeting, "_GREETINGS", 3)
    nodes = some_nodes(tmp_path, 7, timeout=60)
    manifest = Manifest(5, "aaaaaaaa-000001", 7, ())
    told: list[Any] = []

    def commit(one: Nodes) -> None:
        told.append(one.commit(manifest, own_part(one, 5), lambda: False))

    threads = [threading.Thread(target=commit, args=(one,), daemon=True) for one in nodes[1:]]
    for thread in threads:
        thread.start()
    while len(nodes[0]._notes.get(manifest.id, {})) < 6:  # all of them wait
        time.sleep(0.01)
    commit(nodes[0])
    for thread in threads:
        thread.join(60)
    assert [one.reason for one in told] == [""] * 7
    for one in nodes:
        one.close()


def test_a_node_is_never_known_by_an_address_that_is_everybodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = nostall.job._stream
    monkeypatch.delenv("NOSTALL_HOST", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")  # rank 0's own name, on many a system
    assert stream.own_host(False) == "127.0.0.1"
    routes = {"127.0.1.1": "127.0.0.1", stream._ANYWHERE: "10.1.2.3"}
    monkeypatch.setattr(stream, "_route_to", lambda target: routes.get(target, "127.0.1.1"))
    assert stream.own_host(True) == "10.1.2.3"
    routes[stream._ANYWHERE] = ""
    monkeypatch.setattr(stream, "_interfaces", lambda: ["127.0.0.1", "10.3.2.1"])
    assert stream.own_host(True) == "10.3.2.1"
    monkeypatch.setattr(stream, "_interfaces", lambda: ["127.0.0.1"])
    with pytest.raises(UsageError, match="set NOSTALL_HOST"):
        stream.own_host(True)
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    with pytest.raises(UsageError, match="loopback"):
        stream.own_host(True)


def test_the_interfaces_of_this_machine_are_found() -> None:
    assert "127.0.0.1" in nostall.job._stream._interfaces()


def checkpointer_of(tmp_path: Path, **options: Any) -> Any:
    """One rank of a job whose ranks are nodes."""

    def make(rank: int, gather: Any, **more: Any) -> nostall.Checkpointer:
        return nostall.Checkpointer(
            tmp_path / f"node{rank}", rank=rank, gather=gather, job="nodes", **options, **more
        )

    return make


@pytest.mark.parametrize("failing", ["Nodes", "_settle", "check_ways"])
def test_what_one_node_cannot_begin_with_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2)
    made: list[Nodes] = []

    def nodes(store: Store, rank: int, *args: Any, **options: Any) -> Nodes:
        if failing == "Nodes" and rank == 1:
            raise OSError("no address is left")
        made.append(Nodes(store, rank, *args, **options))
        if failing == "check_ways" and rank == 1:
            made[-1]._secret = b"another"  # a stranger listens there
        return made[-1]

    def settle(settling: Nodes, held: Any) -> None:
        if failing == "_settle" and settling.rank == 1:
            raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(nostall.checkpoint._begin, "Nodes", nodes)
        patched.setattr(nostall.checkpoint._begin, "_settle", settle)
        words = {
            "Nodes": "rank 1 cannot begin: no address is left",
            "_settle": "rank 1 cannot begin: the disk is gone",
            "check_ways": "cannot be reached from .*NOSTALL_HOST",
        }[failing]
        for error in World(2).run(make):
            assert isinstance(error, UsageError) and re.search(words, str(error)), error
    assert all(one._listener is None or one._listener._closed.is_set() for one in made)

    def work(rank: int, gather: Any) -> None:  # nobody has the directories any more
        make(rank, gather).close()

    assert World(2).run(work) == [None, None]


def own_part(nodes: Nodes, step: int) -> Part:
    return dataclasses.replace(part_at(nodes.store, step, b"y"), rank=nodes.rank)


@pytest.mark.parametrize("fails", [False, True])
def test_the_name_of_a_part_is_durable_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    first, second = two_nodes(tmp_path)
    synced: list[Path] = []
    reports: dict[int, Any] = {}

    def sync(path: Path) -> None:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(path)

    def note(nodes: Nodes, id: str, rank: int, report: Any) -> None:
        reports[rank] = report
        assert fails or synced == [first.store.directory(5), second.store.directory(5)][: rank + 1]

    monkeypatch.setattr(nostall.checkpoint._nodes, "sync_directory", sync)
    monkeypatch.setattr(Nodes, "_take_note", note)
    for nodes in (first, second):
        part = own_part(nodes, 5)
        monkeypatch.setattr(nodes, "_timeout", 0.1)
        nodes.commit(Manifest(5, "aaaaaaaa-000001", 2, ()), part, lambda: True)
        assert ("cannot be synced" in str(reports[nodes.rank])) == fails
    for nodes in (first, second):
        nodes.close()


def test_ranks_that_do_not_finish_are_named_and_a_stop_ends_the_wait(tmp_path: Path) -> None:
    first, second = some_nodes(tmp_path, 2, timeout=0.1)
    late = first.commit(Manifest(5, "aaaaaaaa-000001", 2, ()), own_part(first, 5), lambda: False)
    assert late.reason == "ranks [1] did not finish their part in time"
    stopped = first.commit(Manifest(6, "aaaaaaaa-000002", 2, ()), own_part(first, 6), lambda: True)
    assert stopped.reason == "stopped"
    for nodes in (first, second):
        nodes.close()


@pytest.mark.parametrize("where", ["_decide", "_publish_everywhere"])
def test_what_no_one_expects_to_fail_on_rank_0_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Once the manifest may be somewhere nothing is certain."""
    first, second = two_nodes(tmp_path)
    manifest, told = Manifest(5, "aaaaaaaa-000001", 2, ()), {}

    def fail(*_: Any) -> Any:
        raise MemoryError("none is left")

    def commit(nodes: Nodes) -> None:
        told[nodes.rank] = nodes.commit(manifest, own_part(nodes, 5), lambda: False)

    monkeypatch.setattr(first, where, fail)
    thread = threading.Thread(target=commit, args=(second,))
    thread.start()
    commit(first)
    thread.join(60)
    outcome = Outcome("MemoryError: none is left", where == "_decide")
    assert told == {0: outcome, 1: outcome}
    for nodes in (first, second):
        nodes.close()


def test_a_report_that_is_none_is_told(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    manifest = Manifest(5, "aaaaaaaa-000001", 2, ())
    first._take_note(manifest.id, 1, {"rank": 1})
    outcome = first.commit(manifest, own_part(first, 5), lambda: False)
    assert outcome == Outcome("a rank's report cannot be read: 'name'", True)
    assert first.store.entries() == []
    for nodes in (first, second):
        nodes.close()


def test_rank_0_remembers_the_last_saves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nostall.checkpoint._nodes, "_REMEMBERED", 2)
    (only,) = some_nodes(tmp_path, 1)
    ids = [f"aaaaaaaa-00000{step}" for step in range(1, 7)]
    for step, id in enumerate(ids[:3], 1):
        assert only.commit(Manifest(step, id, 1, ()), own_part(only, step), lambda: False)[0] == ""
    for id in (*ids[3:], ids[2]):  # the last of them is decided already
        only._take_note(id, 1, None)
    assert list(only._decided) == ids[1:3] and list(only._notes) == ids[4:]
    only.close()


def test_a_part_that_does_not_fit_or_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_nodes(tmp_path)
    part = part_at(first.store, 7, b"some bytes")
    full = os.statvfs_result((4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        told = first.give_partner(7, part)
    assert f"{second.store.root} has no room for a partner's 10 bytes" in told
    assert first.give_partner(7, part) == ""
    with pytest.raises(IoError, match=r"cannot fetch .*/none/got from node 1: .*No such file"):
        first.fetch(7, part, 1, tmp_path / "none" / "got")
    for nodes in (first, second):
        nodes.close()


def test_an_answer_that_is_no_answer_is_told(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    mine = part_at(second.store, 5, b"y")
    other = dataclasses.replace(mine, rank=0)
    whole = Manifest(5, "aaaaaaaa-000009", 2, (other, mine)).to_bytes().decode()
    answers: list[dict[str, Any]] = [{"nothing": 1}, {"reason": "", "manifest": whole}]
    rude = Listener(lambda _, stream: stream.send(answers.pop(0)), b"secret", 10)
    second.addresses[0] = rude.address
    for said in ("rank 0 answers {", "rank 0 answers of save aaaaaaaa-000009, not of"):
        outcome = second.commit(Manifest(5, "aaaaaaaa-000001", 2, ()), mine, lambda: False)
        assert said in outcome.reason and not outcome.certain
    rude.close()
    for nodes in (first, second):
        nodes.close()


def test_a_directory_that_changes_while_nodes_meet_is_refused() -> None:
    groups = nostall.checkpoint._begin._groups
    assert groups([[0, 2], [1], [0, 2]]) == [[0, 2], [1]]
    for seen, rank in (([[0, 1], [1]], 0), ([[0], []], 1)):
        with pytest.raises(UsageError, match=f"rank {rank} sees the marks of ranks"):
            groups(seen)


def test_who_was_told_that_nobody_decided_is_in_no_checkpoint(tmp_path: Path) -> None:
    first, second = some_nodes(tmp_path, 2, timeout=0.3)
    manifest = Manifest(5, "aaaaaaaa-000001", 2, ())
    told = second.commit(manifest, own_part(second, 5), lambda: False)
    assert told == Outcome("rank 0 did not decide in time", True)  # so its part goes
    late = first.commit(manifest, own_part(first, 5), lambda: False)
    assert late == Outcome("rank 1: rank 0 did not decide in time", True)
    assert first.store.entries() == [] and second.store.entries() == []
    for nodes in (first, second):
        nodes.close()


def test_while_the_manifest_is_on_its_way_nothing_is_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nostall.checkpoint._nodes, "_PUBLISHING_SECONDS", 0.1)
    first, second = some_nodes(tmp_path, 2, timeout=60)
    manifest = Manifest(5, "aaaaaaaa-000001", 2, ())
    publishing, go_on, told = threading.Event(), threading.Event(), []
    publish, mine = first._publish_everywhere, own_part(second, 5)

    def slowly(whole: Manifest) -> Any:
        publishing.set()
        go_on.wait(60)
        return publish(whole)

    monkeypatch.setattr(first, "_publish_everywhere", slowly)
    rank0 = threading.Thread(
        target=lambda: told.append(first.commit(manifest, own_part(first, 5), lambda: False))
    )
    rank0.start()
    first._take_note(manifest.id, 1, mine.to_dict())  # as the one that rank 1 sends below
    assert publishing.wait(60)
    first._timeout = 0.1  # from now on: the note of rank 1 alone
    told_second = second.commit(manifest, mine, lambda: False)
    assert told_second == Outcome("rank 0 did not decide in time", False)
    first._timeout = 60
    go_on.set()
    rank0.join(60)
    assert told[0].reason == "" and told[0].certain
    assert [e.step for e in second.store.entries()] == [5]
    for nodes in (first, second):
        nodes.close()


@pytest.mark.parametrize("heals", [True, False])
def test_a_node_that_misses_the_manifest_drains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, durable=tmp_path / "durable", world_size=2)
    publish, failed = Store.publish, []

    def fail(store: Store, manifest: Manifest) -> None:
        if store.root.name == "node1" and not (heals and failed):
            failed.append(manifest.step)
            raise IoError("the disk is full")
        publish(store, manifest)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            saved = ckpt.save({"rank": rank}, 1)
            saved.wait("durable", 60)
            ckpt.wait(60)
            found = ckpt.restore()
            return saved.problems, found.step, found.tier, found.state["rank"]

    with monkeypatch.context() as patched:
        patched.setattr(Store, "publish", fail)
        results = World(2).run(work)
    assert failed
    told = [" ".join(result[0]) for result in results]
    assert "step 1 is complete, but not all nodes know: node 1: the disk is full" in told[0]
    assert ("node 1 has no manifest of step 1: the disk is full" in told[1]) != heals
    assert [result[1:] for result in results] == [(1, "fast", 0), (1, "fast", 1)]
    durable = Store(tmp_path / "durable", "durable")
    assert [e.step for e in durable.entries()] == [1]


def test_the_first_rank_of_a_node_writes_the_manifest_that_it_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    stores = [Store(tmp_path / f"node{node}", "fast") for node in range(2)]
    for store in stores:
        store.make()
    ranks = [
        Nodes(stores[node], rank, [[0], [1, 2]], b"secret", partner=False, timeout=60)
        for rank, node in enumerate([0, 1, 1])
    ]
    for one in ranks:
        one.addresses = [ranks[0].address, ranks[1].address]  # type: ignore[list-item]
    publish, tried, told = Store.publish, [], {}

    def fail(store: Store, manifest: Manifest) -> None:
        if store is stores[1]:
            tried.append(threading.current_thread().name)
            raise IoError("the disk is full")
        publish(store, manifest)

    def commit(one: Nodes) -> None:
        manifest = Manifest(5, "aaaaaaaa-000001", 3, ())
        told[one.rank] = one.commit(manifest, own_part(one, 5), lambda: False)

    monkeypatch.setattr(Store, "publish", fail)
    threads = [threading.Thread(target=commit, args=(one,), name=f"{one.rank}") for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (whole,) = stores[0].manifests()
    problems = {rank: told[rank].problem for rank in told}
    assert {r: one._replace(problem="") for r, one in told.items()} == {
        0: Outcome("", True, whole, (1,)), 1: Outcome("", True, whole), 2: Outcome("", True, whole)
    }  # fmt: skip
    assert len(tried) == 2 and tried[1] == "1"  # the first time rank 0 has asked for it
    assert "step 5 is complete, but not all nodes know: node 1: the disk is full" in problems[0]
    assert "node 1 has no manifest of step 5: the disk is full" in problems[1] and not problems[2]
    for one in ranks:
        one.close()


@pytest.mark.parametrize("room", [True, False])
def test_a_full_disk_keeps_no_job_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: bool
) -> None:
    """A node has missed a manifest, and its disk is full; removing rubbish gives room, or none."""
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2)

    def save(rank: int, gather: Any) -> None:
        with make(rank, gather) as ckpt:
            ckpt.save({"rank": rank}, 1, level="fast")

    assert World(2).run(save) == [None, None]
    directory = Store(tmp_path / "node1", "fast").directory(1)
    manifest, (part,) = directory / "manifest.json", directory.glob("*.safetensors")
    manifest.unlink()
    rubbish = directory / part_name(1, "aaaaaaaa-000001")
    rubbish.touch()
    write = nostall.checkpoint._store._write_durably

    def full(path: Path, data: bytes) -> None:
        if path.is_relative_to(tmp_path / "node1") and (rubbish.exists() or not room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    def restore(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            found = ckpt.restore()
            return found and (found.step, found.state["rank"])

    with monkeypatch.context() as patched:
        patched.setattr(nostall.checkpoint._store, "_write_durably", full)
        assert World(2).run(restore) == [(1, 0), (1, 1)]
    assert part.exists() and not rubbish.exists() and manifest.exists() == room
    assert ("the checkpoint of step 1 in" in caplog.text) != room
    assert World(2).run(restore) == [(1, 0), (1, 1)] and manifest.exists()


@pytest.mark.parametrize("partner", [True, False])
def test_parts_of_a_save_that_fails_go_from_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partner: bool
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2, partner=partner)
    write, files = BackgroundWriter._write_file, []

    def full(self: BackgroundWriter, *job: Any) -> Any:
        if self.rank == 1:
            raise IoError("no room is left")
        return write(self, *job)

    def work(rank: int, gather: Any) -> None:
        ckpt = make(rank, gather)
        ckpt.save({"rank": rank}, 1)
        ckpt.wait(60)
        gather(b"")
        files.extend(tmp_path.rglob("*.safetensors"))  # before another start clears up
        gather(b"")
        with pytest.raises(IoError, match="rank 1: no room is left"):
            ckpt.close()

    monkeypatch.setattr(BackgroundWriter, "_write_file", full)
    assert World(2).run(work) == [None, None]
    assert files == []


@pytest.mark.parametrize(("ranks", "why"), [(1, "this job has one rank"), (2, "all ranks share")])
def test_a_partner_that_there_cannot_be_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int, why: str
) -> None:
    def work(rank: int, gather: Any) -> None:
        nostall.Checkpointer(
            tmp_path, rank=rank, world_size=ranks, gather=gather, job="nodes", partner=True
        ).close()

    assert World(ranks).run(work) == [None] * ranks
    assert caplog.text.count(f"partner=True has no effect: {why}") == 1


def test_a_durable_directory_of_each_node_is_refused(tmp_path: Path) -> None:
    def work(rank: int, gather: Any) -> None:
        durable = tmp_path / f"durable{rank}"
        nostall.Checkpointer(durable=durable, rank=rank, world_size=2, gather=gather, job="nodes")

    for error in World(2).run(work):
        assert isinstance(error, UsageError) and "rank 0 does not see rank 0's" in str(error)


@pytest.mark.parametrize("finders", [{0}, {1}, {0, 1}])
def test_a_durable_copy_that_lacks_parts_is_acknowledged_by_no_rank_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finders: set[int]
) -> None:
    """`finders` see it before they drain; a network file system shows it to others later."""
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, durable=tmp_path / "durable", world_size=2)
    durable = Store(tmp_path / "durable", "durable")
    drain, drain_together = BackgroundWriter._drain, BackgroundWriter._drain_together
    ready = threading.Barrier(2)

    def damage(self: BackgroundWriter, work: Drain) -> None:
        if work.manifest.step == 1 and not work.alone:
            if self.rank == 0:
                durable.prepare(1)
                durable.publish(work.manifest)
            ready.wait(60)
        drain(self, work)

    def late(self: BackgroundWriter, work: Drain, failed: str) -> None:
        drain_together(self, work, failed if self.rank in finders else "")

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            saved = ckpt.save({"rank": rank}, 1, level="fast")
            with pytest.raises(IoError, match="lacks parts of step 1"):
                saved.wait("durable", 60)
            ckpt.save({"rank": rank}, 2, level="fast").wait("durable", 60)
            ckpt.wait(60)
            ready.wait(60)  # rank 0 fetches the part of rank 1
            return saved.id

    monkeypatch.setattr(BackgroundWriter, "_drain", damage)
    monkeypatch.setattr(BackgroundWriter, "_drain_together", late)
    first, second = World(2).run(work)
    assert first == second
    manifest = durable.find(1, first)
    assert manifest is not None and durable.has_all(manifest)


def test_a_copy_that_the_partner_does_not_take_is_a_problem_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2, partner=True)

    def full(self: Nodes, *_: Any) -> None:
        raise IoError(f"node{self.node} has no room")

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            saved = ckpt.save({"rank": rank}, 1, level="fast")
            return saved.level, saved.problems

    monkeypatch.setattr(Nodes, "_hear_put", full)
    for rank, (level, problems) in enumerate(World(2).run(work)):
        assert level == "fast"
        (problem,) = problems
        assert f"no partner's copy of rank {rank}'s part" in problem and "no room" in problem


def test_what_has_lost_parts_takes_no_place_among_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2)

    def save(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            return [ckpt.save({"rank": rank}, step, level="fast").id for step in (1, 2, 3)]

    ids = World(2).run(save)[0]
    for part in (tmp_path / "node1").glob("*[23]/*.safetensors"):
        part.unlink()

    def restore(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            return ckpt.restore().step, ckpt._background.damaged

    assert World(2).run(restore) == [(1, {*ids[1:]})] * 2
    (tmp_path / "durable").mkdir()
    fast, durable = Store(tmp_path / "node0", "fast"), Store(tmp_path / "durable", "durable")
    held = together([holdings(fast), holdings(Store(tmp_path / "node1", "fast"))])
    waiting = nostall.checkpoint._begin.undrained(fast, durable, nostall.Keep(1), held)
    assert [manifest.step for manifest in waiting] == [1]


@pytest.mark.parametrize("what", ["parts", "directory"])
def test_what_has_lost_parts_goes_once_a_later_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2)

    def save(rank: int, gather: Any) -> None:
        with make(rank, gather) as ckpt:
            for step in (1, 2, 3):
                ckpt.save({"rank": rank}, step, level="fast")

    assert World(2).run(save) == [None, None]
    for part in (tmp_path / "node1").glob("*[13]/*.safetensors"):
        part.unlink()
    if what == "directory":
        shutil.rmtree(Store(tmp_path / "node1", "fast").directory(1))

    def begin(rank: int, gather: Any) -> None:
        make(rank, gather).close()

    assert World(2).run(begin) == [None, None]
    for node in (0, 1):  # that of step 3 may have a part on a node that comes back
        assert Store(tmp_path / f"node{node}", "fast").steps() == [2, 3]


@pytest.mark.parametrize("without", [None, 0, 1])
def test_what_a_node_cannot_look_at_is_not_taken_for_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    without: int | None,
) -> None:
    """Also where a node's part is named by the other one's manifest alone."""
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2)

    def save(rank: int, gather: Any) -> None:
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save({"rank": rank}, step, level="fast")

    assert World(2).run(save) == [None, None]
    stores = [Store(tmp_path / f"node{node}", "fast") for node in (0, 1)]
    (part,) = stores[1].directory(1).glob("*.safetensors")
    if without is not None:
        (stores[without].directory(1) / "manifest.json").unlink()
    kept, stat = sorted(tmp_path.rglob("*.safetensors")), Path.stat

    def failing(path: Path, **options: Any) -> os.stat_result:
        if path == part:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    def begin(rank: int, gather: Any) -> None:
        make(rank, gather).close()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", failing)
        assert World(2).run(begin) == [None, None]
    assert f"the parts of step 1 count as lost: cannot look for {part}" in caplog.text
    assert sorted(tmp_path.rglob("*.safetensors")) == kept
    assert World(2).run(begin) == [None, None]
    assert [[m.step for m in store.manifests()] for store in stores] == [[1, 2]] * 2


def test_a_durable_directory_that_is_gone_hides_nothing_that_the_nodes_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    durable = tmp_path / "durable"
    make = checkpointer_of(tmp_path, world_size=2, durable=durable)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            ckpt.save({"rank": rank}, 1, level="durable")
            ckpt.save({"rank": rank}, 2, level="fast")
            ckpt.wait(60)
            gather(b"")
            if rank == 0:
                durable.rename(tmp_path / "mounted elsewhere")
                durable.mkdir()
            gather(b"")
            found = ckpt.restore()
            seen = found.step, found.tier, found.state["rank"]
            gather(b"")
            if rank == 1:  # its parts
                shutil.rmtree(tmp_path / "node1")
                (tmp_path / "node1").mkdir()
            gather(b"")
            with pytest.raises(IoError, match="the newest checkpoint of this job is nowhere else"):
                ckpt.restore()
            return seen

    assert World(2).run(work) == [(2, "fast", 0), (2, "fast", 1)]


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(
    ("refused", "number", "remedy"),
    [
        ("connection", errno.EMFILE, "ulimit -n"),
        ("read there", errno.ENFILE, "fs.file-max"),
        ("write here", errno.EMFILE, "ulimit -n"),
        ("write here", errno.ENOSPC, "make room"),
        ("write here", errno.EDQUOT, "quota"),
        ("read here", errno.EMFILE, "ulimit -n"),
    ],
)
def test_a_limit_on_a_node_passes_over_no_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    number: int,
    remedy: str,
    replicated: bool,
) -> None:
    """Rank 1 lacks its part, and node 0 has it."""
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2, replicated=replicated, partner=not replicated)
    limited: list[int] = []

    def limit(owner: Any, name: str, which: str, applies: Callable[..., bool]) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            if limited and refused == which and applies(*args):
                raise OSError(number, os.strerror(number))
            return inner(*args, **more)

        monkeypatch.setattr(owner, name, call)

    limit(socket, "create_connection", "connection", lambda *_: True)
    limit(Path, "open", "read there", lambda path, *_: path.match("node0/*/*.safetensors"))
    limit(os, "open", "write here", lambda path, *_: Path(path).match("node1/*/*.partial"))
    limit(Store, "open", "read here", lambda store, *_: store.root == tmp_path / "node1")

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save({"step": step}, step, level="fast")
            gather(b"")
            if rank == 1:
                for own in (tmp_path / "node1").glob("*/rank-00001.*"):
                    own.unlink()
                limited.append(number)
            gather(b"")
            with pytest.raises(UnreachableError, match=rf"rank 1: .*node1.*{remedy}"):
                ckpt.restore()
            gather(b"")
            limited.clear()
            gather(b"")
            found = ckpt.restore()
            gather(b"")  # all listen until here
            return found and found.step

    assert World(2).run(work) == [2, 2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("durable", ["whole", "damaged"])
def test_a_limit_on_a_node_leaves_the_durable_copy_to_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, durable: str
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2, durable=tmp_path / "durable")
    limited, opened = threading.Event(), os.open

    def limit(path: Any, *args: Any, **more: Any) -> int:
        if limited.is_set() and Path(path).match("node1/*/*.partial"):
            raise OSError(number, os.strerror(number))
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", limit)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save({"step": step}, step, level="durable")
            ckpt.wait(60)
            gather(b"")
            if rank == 1:
                (own,) = (tmp_path / "node1").glob("*2/rank-00001.*")
                own.rename(tmp_path / "node0" / own.parent.name / own.name)
                if durable == "damaged":
                    (tmp_path / "durable" / own.parent.name / own.name).write_bytes(b"")
                limited.set()
            gather(b"")
            found: Any = None
            try:
                found = ckpt.restore()
            except UnreachableError as error:
                assert "rank 1: " in str(error) and os.strerror(number) in str(error)
            gather(b"")  # all listen until here
            assert not ckpt._background.damaged
            return found and (found.step, found.tier)

    expected = (2, "durable") if durable == "whole" else None
    assert World(2).run(work) == [expected] * 2


def test_another_copy_is_taken_where_a_limit_hides_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make, opened = checkpointer_of(tmp_path, world_size=3, replicated=True), Path.open
    refused: list[Path] = []

    def refuse(path: Path, *args: Any, **more: Any) -> Any:
        if path.match("node2/*/*.safetensors"):  # which node 1 asks first
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", refuse)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            ckpt.save({"common": 7}, 1, level="fast")
            ckpt.restore()  # all nodes have it from here on
            if rank == 1:
                for own in (tmp_path / "node1").glob("*/*.safetensors"):
                    own.unlink()
            gather(b"")
            found = ckpt.restore()
            gather(b"")  # all listen until here
            return found and found.state["common"]

    assert World(3).run(work) == [7, 7, 7]
    assert len(refused) == 1


def test_common_state_comes_to_a_node_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    fetch, fetched = Nodes.fetch, []

    def count(self: Nodes, *args: Any) -> None:
        fetched.append(self.rank)
        fetch(self, *args)

    monkeypatch.setattr(Nodes, "fetch", count)

    def work(rank: int, gather: Any) -> Any:
        with nostall.Checkpointer(
            tmp_path / f"node{rank // 2}", rank=rank, world_size=4, gather=gather, job="nodes",
            replicated=True,
        ) as ckpt:  # fmt: skip
            ckpt.save({"common": 7}, 1, level="fast")
            found = ckpt.restore()
            gather(b"")  # all listen until here
            return found and found.state["common"]

    assert World(4).run(work) == [7] * 4
    assert fetched == [2]


def test_common_state_that_no_node_has_undamaged_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=2, replicated=True)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save({"common": step}, step, level="fast")
            ckpt.wait(60)
            gather(b"")
            if rank == 0:
                (part,) = (tmp_path / "node0").glob("*2/*.safetensors")
                part.write_bytes(bytes(part.stat().st_size))
            found = ckpt.restore()
            gather(b"")  # all listen until here
            return found and found.state["common"]

    assert World(2).run(work) == [1, 1]
    # By rank 1 in its place as the first of a node, and by both ranks that read.
    assert caplog.text.count("a copy of a part cannot be used: ") == 3
    told = r"passing over a checkpoint: rank 0: .* damaged.*; rank 1: .* damaged"
    assert re.search(told, caplog.text)
    assert not list((tmp_path / "node1").glob("*2/*.safetensors"))


def test_nodes_do_not_all_ask_the_same_one(tmp_path: Path) -> None:
    nodes = some_nodes(tmp_path, 4)
    assert [one.nearest_first([0, 1])[0] for one in nodes] == [0, 1, 0, 1]
    assert [one.nearest_first([0, 3]) for one in nodes] == [[0, 3], [3, 0], [0, 3], [3, 0]]
    assert nodes[0].nearest_first([]) == []
    for one in nodes:
        one.close()


def test_a_leftover_is_drained_from_the_copy_that_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make = checkpointer_of(tmp_path, world_size=3, partner=True, rate="200MB")

    def save(rank: int, gather: Any) -> None:
        with make(rank, gather) as ckpt:
            ckpt.save(node_rank.state_of(rank, 1), 1, level="fast")

    assert World(3).run(save) == [None] * 3
    for own in (tmp_path / "node1").glob("*/rank-00001.*"):
        own.write_bytes(bytes(own.stat().st_size))

    def drain(rank: int, gather: Any) -> Any:
        durable = tmp_path / "durable"
        with make(rank, gather, durable=durable) as ckpt:
            ckpt.wait(60)
            gather(b"")  # all listen until here
        with nostall.Checkpointer(
            durable=durable, rank=rank, world_size=3, gather=gather, job="nodes"
        ) as ckpt:
            found = ckpt.restore()
            return found and (found.tier, node_rank.digest(found.state))

    expected = [("durable", node_rank.digest(node_rank.state_of(rank, 1))) for rank in range(3)]
    assert World(3).run(drain) == expected


@pytest.mark.parametrize("what", ["damaged", "stopped"])
def test_a_leftover_without_a_good_copy_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Rank 0 drains it: at a byte a second, or of node 1 a part with other bytes."""
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make, paced = checkpointer_of(tmp_path, world_size=2), threading.Event()

    def save(rank: int, gather: Any) -> None:
        with make(rank, gather) as ckpt:
            ckpt.save({"rank": rank}, 1, level="fast")

    assert World(2).run(save) == [None, None]
    if what == "damaged":
        (part,) = (tmp_path / "node1").glob("*1/*.safetensors")
        part.write_bytes(bytes(part.stat().st_size))
    pace = BackgroundWriter._pace

    def noted(self: BackgroundWriter) -> Any:
        paced.set()
        return pace(self)

    def drain(rank: int, gather: Any) -> None:
        rate = "1B" if what == "stopped" else None
        with make(rank, gather, durable=tmp_path / "durable", rate=rate) as ckpt:
            if rank == 0 and what == "stopped":
                assert paced.wait(60)
                ckpt._background.stop(60)
            elif rank == 0:
                with pytest.raises(IoError, match=r"stays in .*: node 1: .*1 damaged block"):
                    ckpt.wait(60)
            gather(b"")  # all listen until here

    monkeypatch.setattr(BackgroundWriter, "_pace", noted)
    caplog.set_level("INFO", "nostall")
    assert World(2).run(drain) == [None, None]
    assert ("the next start copies it" in caplog.text) == (what == "stopped")
    assert ("cannot be drained" in caplog.text) == (what == "damaged")
    assert Store(tmp_path / "durable", "durable").manifests() == []


def test_what_is_saved_again_before_it_is_copied_is_missed_on_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOST", "127.0.0.1")
    make, prepare, replaced = (
        checkpointer_of(tmp_path, world_size=2),
        Store.make_step,
        threading.Event(),
    )
    begun = threading.Barrier(4, timeout=60)  # of both drains and both trainings

    def late(store: Store, step: int) -> None:
        if store.kind == "durable" and not replaced.is_set():
            begun.wait()
            assert replaced.wait(60)
        prepare(store, step)

    def work(rank: int, gather: Any) -> list[str]:
        with make(rank, gather, durable=tmp_path / "durable") as ckpt:
            first = ckpt.save({"value": 1}, 1)
            begun.wait()  # a drain that has not begun would be left out
            second = ckpt.save({"value": 2}, 1, level="fast")
            gather(b"")
            replaced.set()
            for _ in range(2):
                ckpt.wait(60)
            assert first is not None and second is not None and second.level == "durable"
            gather(b"")  # all listen until here
            return first.problems

    monkeypatch.setattr(Store, "make_step", late)
    again = ["step 1 was saved again before this save was copied"]
    assert World(2).run(work) == [again, again]


def test_a_manifest_that_may_be_there_is_not_certainly_missing(tmp_path: Path) -> None:
    first, second = some_nodes(tmp_path, 2)
    manifest = Manifest(5, "aaaaaaaa-000001", 2, ())
    whole = dataclasses.replace(
        manifest, parts=tuple(own_part(one, 5) for one in (first, second)), spread=True
    )
    rude = Listener(lambda *_: None, b"secret", 10)  # hears it, and says nothing
    address, first.addresses[1] = first.addresses[1], rude.address
    shutil.rmtree(first.store.root)
    assert first._publish_everywhere(whole).certain is False
    rude.close()
    assert first._publish_everywhere(whole).certain is True  # nobody heard it
    first.addresses[1] = address
    shutil.rmtree(second.store.root)
    assert first._publish_everywhere(whole).certain is True  # it says so
    for nodes in (first, second):
        nodes.close()


def test_a_manifest_that_has_its_name_is_not_certainly_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = some_nodes(tmp_path, 1)
    whole = Manifest(5, "aaaaaaaa-000001", 1, (own_part(only, 5),), spread=True)
    publish = Store.publish

    def late(store: Store, manifest: Manifest) -> None:
        publish(store, manifest)
        raise IoError("the directory cannot be synced")

    monkeypatch.setattr(Store, "publish", late)
    assert only._publish_everywhere(whole) == Outcome(
        "node 0: the directory cannot be synced", False
    )
    only.close()


def test_an_answer_that_is_lost_leaves_the_part_where_it_is(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    manifest = Manifest(5, "aaaaaaaa-000001", 2, ())
    mine = part_at(second.store, 5, b"y")
    asked: list[Any] = []
    rude = Listener(lambda question, _: asked.append(question["ask"]), b"secret", 10)
    second.addresses[0] = rude.address
    reason, certain, *_ = second.commit(manifest, mine, lambda: False)
    assert "rank 0 cannot be asked" in reason and not certain and asked == ["note"]
    # Where the manifest has come meanwhile, all is well.
    other = dataclasses.replace(mine, rank=0)
    second.store.publish(dataclasses.replace(manifest, parts=(other, mine), spread=True))
    assert second.commit(manifest, mine, lambda: False) == Outcome("")
    rude.close()
    assert second.commit(Manifest(6, "b", 2, ()), mine, lambda: False).certain
    for nodes in (first, second):
        nodes.close()


def test_the_newest_save_of_a_step_counts_and_lost_parts_are_named() -> None:
    # The earlier save has the later clock.
    old = Manifest(
        5, "aaaaaaaa-000001", 1, (Part(0, "a.safetensors", 0, ()),), created=9.0, sequence=1
    )
    new = Manifest(
        5, "bbbbbbbb-000001", 1, (Part(0, "b.safetensors", 0, ()),), created=2.0, sequence=2
    )

    def node(manifest: Manifest | None, **files: int) -> list[dict[str, Any]]:
        texts = [manifest.to_bytes().decode()] if manifest else []
        named = {f"{name}.safetensors": size for name, size in files.items()}
        return [{"step": 5, "manifests": texts, "files": named, "unread": False}]

    held, before = together([node(old, a=0), node(new, b=0)])
    assert held.manifest == new and held.holders == {"b.safetensors": [1]} and not held.lost
    assert before.manifest == old and before.holders == {"a.safetensors": [0]}
    (held,) = together([node(new, a=0), node(None, b=0)])  # a node that missed the manifest
    assert held.holders == {"b.safetensors": [1]}
    (held,) = together([node(new), node(None, b=1)])  # of another size
    assert held.lost == [0]
