"""Checkpoints on an object store: what was acknowledged stays, whatever the store and others do."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import object_rank
import obstore
import prefork
import pytest
from object_server import Answer, Proxy, Request, cut, error
from obstore.store import LocalStore, MemoryStore
from test_checkpoint_failures import Clock, Raising, commit_all
from test_checkpointer import World

import nostall
from nostall import Keep, _native
from nostall.base import _object_client
from nostall.checkpoint import _checkpointer, _objects, _store, _transfer
from nostall.checkpoint._begin import lineage_of
from nostall.checkpoint._cleaner import Cleaner
from nostall.checkpoint._drain import copy_all
from nostall.checkpoint._format import Branch, Manifest, Part
from nostall.checkpoint._lineage import STRIDE
from nostall.checkpoint._objects import ObjectStore, _part_name, _step
from nostall.checkpoint._open import open_store
from nostall.checkpoint._place import Pacing, UnknownOutcomeError, UnreachableError, Url
from nostall.checkpoint._restore import view
from nostall.checkpoint._saved import Settings
from nostall.checkpoint._store import part_name
from nostall.cli import _checkpoints, main
from nostall.errors import CorruptionError, IoError, PeerError, StoppedError, UsageError

pytest_plugins = ["object_fixtures"]
ID = "aaaaaaaa-000001"
BLOCK = _native.CHECKPOINT_BLOCK


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    return {"w": np.full(size, step, np.float64), "step": step}


def is_whole(found: Any, step: int, tier: str = "durable") -> bool:
    return (found.step, found.tier) == (step, tier) and bool((found.state["w"] == step).all())


@pytest.fixture
def url(bucket: Any) -> str:
    return f"s3://{bucket.name}/runs/one"


@pytest.fixture
def make(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., nostall.Checkpointer]:
    # What a job says at its end comes before what the test does next.
    monkeypatch.setattr(_objects, "_LAST_WORD_SECONDS", 60.0)

    def made(fast: str = "fast", **options: Any) -> nostall.Checkpointer:
        return nostall.Checkpointer(tmp_path / fast, url, **{"priority": "normal", **options})

    return made


def keys(bucket: Any, below: str = "runs/one/") -> list[str]:
    """Of the objects in steps, below the URL."""
    names = [o.key.removeprefix(below) for o in bucket.objects.filter(Prefix=below)]
    return [name for name in names if name.startswith("step-")]


def kinds(bucket: Any) -> list[str]:
    """What the objects in steps are, in order."""
    return [re.split(r"[-.]", key.rpartition("/")[2])[0] for key in keys(bucket)]


def steps_on(url: str) -> list[int]:
    return [m.step for m in open_store(url, "durable").manifests()]


def uploads(bucket: Any) -> list[str]:
    return [upload.object_key for upload in bucket.multipart_uploads.all()]


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and "/manifest" in request.path


def store_at(url: str) -> ObjectStore:
    return ObjectStore(Url(url), "durable")


# ---------------------------------------------------------------------- going through


def test_saves_are_uploaded_and_restored_without_the_fast_directory(
    bucket: Any, proxy: Proxy, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfer, "_CHUNK", 5 << 20)
    here, most, lock = [0], [0], threading.Lock()

    def count(request: Request, forward: Callable[[], Answer]) -> Answer:
        part = request.method == "PUT" and "partNumber" in request.path
        with lock:
            here[0] += part
            most[0] = max(most[0], here[0])
        try:
            return forward()
        finally:
            with lock:
                here[0] -= part

    proxy.meddle = count
    with make(keep=2, level="durable") as ckpt:
        for step in range(4):
            saved = ckpt.save(state_of(step, 4_000_000 if step == 3 else 1000), step)
            assert saved is not None and saved.problems == []
        ckpt.wait(60)
    assert 1 <= most[0] <= 4  # the bound of requests at a time
    assert kinds(bucket) == ["manifest", "rank"] * 2 and uploads(bucket) == []
    manifest, part = keys(bucket)[2:]
    assert saved.id in manifest and saved.id in part
    progress: list[tuple[int, int]] = []
    with make("other") as ckpt:
        into = {"w": np.zeros(4_000_000), "step": None}
        found = ckpt.restore(into=into, progress=lambda *told: progress.append(told))
        assert is_whole(found, 3) and (into["w"] == 3).all()
        assert progress[-1] == (found.manifest.size, found.manifest.size)
        assert is_whole(ckpt.restore(2), 2)


def test_a_rate_is_kept_until_a_thread_waits(url: str, tmp_path: Path) -> None:
    store, (manifest, path) = store_at(url), one_part(tmp_path, blocks=3)
    (part,) = manifest.parts
    began = time.monotonic()
    store.copy(path, 1, part.name, part, Pacing(rate=16 * BLOCK)).run()
    assert time.monotonic() - began >= 2 / 16  # the third block waits for two
    slow = store.copy(path, 2, part.name, part, Pacing(rate=1))
    running = threading.Thread(target=slow.run)
    running.start()
    slow.hurry()
    running.join(60)
    assert store.check(2, part, threads=2) == []
    pacing = Pacing(gate=_native.Gate(), gate_patience=0.05, considerate=True)
    with _native.Activity():  # a loader reads: for a limited time
        store.copy(path, 3, part.name, part, pacing).run()
    assert store.check(3, part, threads=2) == []


@pytest.mark.parametrize("threads", [0, 1])  # that can be started
def test_parts_are_read_by_the_threads_there_are(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    store, (manifest, path) = store_at(url), one_part(tmp_path, blocks=7)
    (part,) = manifest.parts
    store.copy(path, 1, part.name, part, Pacing()).run()
    start, left = threading.Thread.start, [threads]

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.startswith("nostall restore"):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    file = store.open(1, part)
    assert file.read(0, 7, threads=4) == []
    assert file.data.tobytes() == path.read_bytes()
    wrong = dataclasses.replace(part, crcs=(part.crcs[0], 0, *part.crcs[2:6], 0))
    assert store.check(1, wrong, threads=4) == [1, 6]
    with pytest.raises(IoError, match="does not exist"):
        store.check(2, part, threads=4)


@pytest.mark.parametrize("interrupted", ["start", "join"])
def test_an_interrupt_leaves_no_thread_that_still_writes(
    monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    calls = {name: getattr(threading.Thread, name) for name in ("start", "join")}
    under_way, go_on, written = threading.Event(), threading.Event(), []
    interrupts: list[str] = []

    def write(value: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            under_way.set()
            assert go_on.wait(60)
            written.append(value)
        assert under_way.wait(60)

    def start(thread: threading.Thread) -> None:
        calls["start"](thread)
        if interrupted == "start":
            assert under_way.wait(60)
            interrupts.append("start")
            raise KeyboardInterrupt

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if interrupted == "join" and len(interrupts) < 2:  # it is pressed again
            interrupts.append("join")
            raise KeyboardInterrupt
        go_on.set()
        calls["join"](thread, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        patch.setattr(threading.Thread, "join", join)
        with pytest.raises(KeyboardInterrupt):
            _transfer._in_threads(2, write, range(2))
    at_the_end = [*written]
    go_on.set()
    assert len(at_the_end) == 1 and interrupts


def test_retention_and_going_back(make: Any, url: str) -> None:
    with make(keep=Keep(2, every=4), level="durable") as ckpt:
        for step in range(1, 7):
            ckpt.save(state_of(step), step)
        ckpt.wait(60)
        assert steps_on(url) == [4, 5, 6]
        assert is_whole(ckpt.restore(4), 4)
    with make("elsewhere", keep=Keep(2, every=4), level="durable") as ckpt:
        assert is_whole(ckpt.restore(), 4)
        ckpt.save({"w": np.full(1000, 6.0), "step": 60}, 6)
        ckpt.save(state_of(7), 7)
        ckpt.wait(60)
        # Both saves of step 6 are there, one of the superseded branch.
        assert steps_on(url) == [4, 5, 6, 6, 7]
        assert ckpt.restore(6).state["step"] == 60


def test_a_step_again_replaces_the_save_before(bucket: Any, make: Any) -> None:
    with make(level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        saved = ckpt.save({"w": np.full(1000, 1.0), "step": "again"}, 1)
        ckpt.wait(60)
    assert kinds(bucket) == ["manifest", "rank"]
    assert all(saved.id in key for key in keys(bucket))


def test_commands_take_urls(make: Any, url: str, tmp_path: Path, capsys: Any) -> None:
    with make(level="durable") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step)
        ckpt.wait(60)
    fast = str(tmp_path / "fast")
    assert main(["checkpoints", "verify", fast, url]) == 0
    assert capsys.readouterr().out.count(f"verified in {url}") == 3
    assert main(["checkpoints", "restore-dry-run", url]) == 0
    assert f"would restore step 3 from {url}" in capsys.readouterr().out
    assert main(["checkpoints", "rm", "--step", "2", url]) == 0
    assert steps_on(url) == [1, 3]
    assert main(["checkpoints", "branch", "--step", "1", url]) == 0
    with make("other") as ckpt:
        assert is_whole(ckpt.restore(), 1)
    assert main(["checkpoints", "rm", "--superseded", url]) == 0
    assert steps_on(url) == [1]
    assert main(["checkpoints", "drain", fast, url]) == 0
    assert steps_on(url) == [1, 3]


def test_distributed_checkpoints_of_torch(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from nostall.torch.checkpoint import StorageWriter, load

    with pytest.raises(UsageError, match="needs fast=, a directory from which"):
        StorageWriter(url)
    monkeypatch.setenv("HOME", str(tmp_path))
    writer = StorageWriter(url, keep=2, fast="~/parts")
    for step in (1, 2, 3):
        state = {"w": torch.full((1000,), float(step)), "step": step}
        dcp.save(state, checkpoint_id=str(step), storage_writer=writer, no_dist=True)
    assert (tmp_path / "parts").is_dir()
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    other = StorageWriter(url, fast=tmp_path / "parts")
    write = _native.SnapshotWrite

    def upload_first(*arguments: Any, **options: Any) -> Any:
        """Another rank of this node writes and uploads its part in the meantime."""
        monkeypatch.setattr(_native, "SnapshotWrite", write)
        other.write_data(given[1], planner).wait()
        return write(*arguments, **options)

    for one in (writer, other):
        one.reset("4")
        one.set_up_storage_writer(one is writer)
    given = writer.prepare_global_plan([plan, plan])
    monkeypatch.setattr(_native, "SnapshotWrite", upload_first)
    writer.write_data(given[0], planner).wait()
    writer.close()
    assert steps_on(url) == [2, 3] and kinds(bucket) == ["manifest", "rank"] * 2
    assert list((tmp_path / "parts").rglob("*.safetensors")) == []
    state = {"w": torch.zeros(1000), "step": 0}
    assert load(state, url, no_dist=True) == 3
    assert state["step"] == 3 and bool((state["w"] == 3).all())
    proxy.spoil = lambda number, answer: cut(answer, 100)
    with pytest.raises(UnreachableError, match="cannot read s3://"):
        load(state, url, no_dist=True)


# ---------------------------------------------------------------------- processes


class Ranks:
    """Processes of one job after another, with a fast directory that all share."""

    def __init__(self, tmp_path: Path, url: str, world: int = 1, **more: str) -> None:
        self.home, self.url, self.world, self.jobs = tmp_path, url, world, 0
        self.environment = more

    def start(self, steps: list[int], **more: Any) -> list[prefork.Process]:
        self.jobs += 1
        orders = {"fast": str(self.home / "fast"), "durable": self.url, "world": self.world}
        orders |= {"steps": steps, "size": 1000, "level": "durable", "hold": False, "keep": 3}
        orders |= {"back_to": None, **more}
        meeting = {"NOSTALL_RENDEZVOUS": str(self.home / f"rendezvous{self.jobs}")}
        return [
            prefork.Process(
                [object_rank.__file__, json.dumps({**orders, "rank": rank})],
                stdout=prefork.PIPE,
                stderr=prefork.PIPE,
                env={**os.environ, **meeting, **self.environment},
            )
            for rank in range(self.world)
        ]

    def run(self, steps: list[int], **more: Any) -> list[list[dict[str, Any]]]:
        """What each rank has said."""
        ranks = self.start(steps, **more)
        outputs = [rank.communicate(timeout=300) for rank in ranks]
        for rank, (_, words) in zip(ranks, outputs, strict=True):
            assert rank.returncode == 0, words
        return [[json.loads(line) for line in out.splitlines()] for out, _ in outputs]

    def restored(self, steps: list[int], **more: Any) -> list[Any]:
        """What each rank has restored; none has failed."""
        said = self.run(steps, **more)
        assert all("failed" not in words for rank in said for words in rank), said
        return [rank[0]["restored"] for rank in said]


@pytest.mark.multi
def test_two_ranks_complete_one_checkpoint(bucket: Any, url: str, tmp_path: Path) -> None:
    job = Ranks(tmp_path, url, 2)
    assert job.restored([1, 2]) == [None] * 2
    assert kinds(bucket) == ["decision", "manifest", "rank", "rank"] * 2  # no word is left
    (tmp_path / "fast").rename(tmp_path / "gone")
    assert job.restored([3]) == [[2, "durable", True]] * 2
    assert steps_on(url) == [1, 2, 3]


@pytest.mark.multi
@pytest.mark.parametrize("kept", [False, True])
def test_a_process_that_is_killed_in_mid_upload(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path, kept: bool
) -> None:
    job = Ranks(tmp_path, url)
    arrived, go_on = threading.Event(), threading.Event()

    def hold(request: Request, forward: Callable[[], Answer]) -> Answer:
        if "partNumber=2" in request.path:
            arrived.set()
            go_on.wait(60)
        return forward()

    assert job.restored([1]) == [None]
    proxy.meddle = hold
    (process,) = job.start([2], size=3_000_000)
    try:
        assert arrived.wait(60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        go_on.set()
    proxy.meddle = None
    assert steps_on(url) == [1] and len(uploads(bucket)) == 1
    if not kept:
        (tmp_path / "fast").rename(tmp_path / "gone")
    assert job.restored([]) == ([[2, "fast", True]] if kept else [[1, "durable", True]])
    assert uploads(bucket) == []
    assert steps_on(url) == ([1, 2] if kept else [1])
    # Of the step that was not complete nothing is left, or all of it is.
    assert len(keys(bucket)) == (4 if kept else 2)


def test_verify_calls_nothing_damaged_while_the_store_is_away(
    proxy: Proxy, make: Any, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(level="durable") as ckpt:
        ckpt.save(state_of(1), 1)

    def away(request: Request, forward: Callable[[], Answer]) -> Answer:
        part = request.method == "GET" and "/rank-" in request.path
        return error(503, "SlowDown") if part else forward()

    proxy.meddle = away
    for command in ("verify", "restore-dry-run"):
        assert main(["checkpoints", command, url]) == IoError.exit_code
        told = capsys.readouterr()
        assert "DAMAGED" not in told.out and "passed over" not in told.out
        assert "nostall: cannot read s3://" in told.err and "503" in told.err


def test_parts_of_other_nodes_are_drained_when_the_store_is_back(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    def work(rank: int, gather: Any, home: str, away: bool) -> Any:
        with nostall.Checkpointer(
            tmp_path / f"{home}{rank}", url, rank=rank, world_size=2, gather=gather, job="test",
            max_failures=100, timeout=60, priority="normal",
        ) as ckpt:  # fmt: skip
            if not away:
                ckpt.wait(60)
                found = ckpt.restore()
                return found.step, found.tier, bool((found.state["w"] == 10 + rank).all())
            gather(b"")
            proxy.meddle = lambda *_: error(503, "SlowDown")
            gather(b"")
            ckpt.save({"w": np.full(1000, 10 + rank)}, 1, level="fast")
            told = pytest.raises(IoError, match=r"cannot be drained: .*503")
            with contextlib.nullcontext() if rank else told:
                ckpt.wait(60)
            with pytest.raises(UnreachableError, match=r"rank [01]: cannot list s3://.*SlowDown"):
                ckpt.restore()
        return None

    def job(home: str, away: bool = False) -> list[Any]:
        return World(2).run(lambda rank, gather: work(rank, gather, home, away))

    assert job("node", away=True) == [None, None]
    proxy.meddle = None
    assert steps_on(url) == []
    assert job("node") == [(1, "fast", True)] * 2  # and drained: by rank 0, that of rank 1 too
    assert steps_on(url) == [1]
    files = [p.name for p in (tmp_path / "node0").rglob("*.safetensors")]
    assert [name[:10] for name in files] == ["rank-00000"]  # what was fetched has gone again
    assert job("new") == [(1, "durable", True)] * 2


def test_a_damaged_part_takes_that_of_the_next_node_on_its_way(
    bucket: Any, url: str, tmp_path: Path
) -> None:
    def work(rank: int, gather: Any, durable: str | None) -> None:
        with nostall.Checkpointer(
            tmp_path / f"node{rank}", durable, rank=rank, world_size=2, gather=gather, job="test",
            partner=True, priority="normal",
        ) as ckpt:  # fmt: skip
            if durable is None:
                ckpt.save({"w": np.full(1000, rank)}, 1, level="fast")
            ckpt.wait(60)
            gather(b"")  # all listen until here

    assert World(2).run(lambda rank, gather: work(rank, gather, None)) == [None, None]
    paths = [next((tmp_path / f"node{node}").rglob("rank-00001*")) for node in range(2)]
    paths[0].write_bytes(bytes(paths[0].stat().st_size))
    assert World(2).run(lambda rank, gather: work(rank, gather, url)) == [None, None]
    assert steps_on(url) == [1]
    assert paths[0].read_bytes() == paths[1].read_bytes()  # and it stays


# ---------------------------------------------------------------------- two jobs


def test_a_job_that_begins_later_takes_the_store(make: Any, url: str) -> None:
    first = make("one", max_failures=100)
    first.save(state_of(1), 1, level="durable")
    with make("two", level="durable") as second:
        assert is_whole(second.restore(), 1)
        sentence = rf"taken over by process {os.getpid()} on .*store of its own"
        with pytest.raises(IoError, match=sentence):
            first.save(state_of(5), 5, level="durable")
        with pytest.raises(PeerError, match=sentence):
            first.durable.remove(1, second.durable.manifests()[0].id)
        second.save(state_of(2), 2)
        first._begin_branch(second.durable.manifests()[0], True)  # a warning
    first.close()
    assert steps_on(url) == [1, 2]


COMMANDS = (["rm", "--step", "1"], ["rm", "--superseded"], ["branch", "--step", "2"], ["drain"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_takes_the_store_from_no_job_that_may_run(
    make: Any, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    other = tmp_path / "other"
    with make(level="durable", max_failures=100) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        with nostall.Checkpointer(other) as elsewhere:
            elsewhere.save(state_of(9), 9, level="fast")
        command = ["checkpoints", *words, *([str(other)] if words == ["drain"] else []), url]
        me = f"process {os.getpid()} on {socket.gethostname()}, begun at 20"
        assert main(command) == UsageError.exit_code
        told = capsys.readouterr()
        assert f"{url} belongs to {me}" in told.err and "give --take-over" in told.err
        assert told.out == "" and steps_on(url) == [1, 2]
        ckpt.save(state_of(3), 3)  # the store is still its own
        assert main([*command, "--take-over"]) == 0
        assert f"{url} is taken over from {me}" in capsys.readouterr().err
        with pytest.raises(IoError, match="taken over by process"):
            ckpt.save(state_of(4), 4)
    assert main(command) in (0, UsageError.exit_code)  # step 1 may be gone
    assert "belongs to" not in capsys.readouterr().err  # the command before has closed


@pytest.mark.parametrize("how", ["taken", "away"])
def test_a_drain_ends_once_the_store_takes_nothing(
    proxy: Proxy,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    """Each further checkpoint would be uploaded, or asked for, in vain."""
    fast, tried = str(tmp_path / "fast"), []
    with nostall.Checkpointer(fast, level="fast", keep=4) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(state_of(step), step)

    def fail(store: ObjectStore, manifest: Manifest, copy: Any) -> None:
        tried.append(manifest.step)
        if manifest.step == 1:
            raise IoError("of this one alone")
        if how == "away":
            proxy.meddle = lambda *_: error(503, "SlowDown")
        elif manifest.step == 2:
            store_at(url).own()
        copy_all(store, manifest, copy)

    monkeypatch.setattr(_checkpoints, "copy_all", fail)
    assert main(["checkpoints", "drain", fast, url]) == IoError.exit_code
    said = capsys.readouterr().err
    assert tried == [1, 2] and "of this one alone; " in said
    assert ("taken over" if how == "taken" else "503") in said


def test_a_drain_removes_what_a_killed_one_has_left_and_nothing_of_a_running_job(
    bucket: Any, make: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["checkpoints", "drain", str(tmp_path / "other"), url]
    with nostall.Checkpointer(tmp_path / "other") as ckpt:
        ckpt.save(state_of(1), 1, level="fast")

    def upload(number: int) -> str:
        """A part that no manifest names yet."""
        key = f"runs/one/{_step(2)}/{_part_name(Part(0, '', 0, ()), ID, f'{number:016x}')}"
        bucket.put_object(Key=key, Body=b"")
        return key.removeprefix("runs/one/")

    with make():
        part = upload(1)
        assert main(command) == UsageError.exit_code
        assert keys(bucket) == [part]
    assert main(command) == 0
    assert kinds(bucket) == ["manifest", "rank"] and steps_on(url) == [1]

    uploaded = [upload(2)]
    with contextlib.ExitStack() as jobs:

        def begin(store: ObjectStore) -> list[Any]:
            jobs.callback((job := store_at(url)).disown)
            job.own()
            uploaded.append(upload(3))
            return []

        monkeypatch.setattr(ObjectStore, "_uploads", begin)
        assert main(command) == PeerError.exit_code
        assert set(uploaded) < set(keys(bucket))


@pytest.mark.parametrize(
    ("status", "code"), [(400, "EntityTooLarge"), (403, "AccessDenied"), (503, "SlowDown")]
)
def test_a_checkpoint_that_the_store_refuses_keeps_no_other_from_its_turn(
    proxy: Proxy,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: str,
) -> None:
    fast = str(tmp_path / "fast")
    with nostall.Checkpointer(fast, level="fast", keep=3) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step)

    def refuse(request: Request, forward: Callable[[], Answer]) -> Answer:
        part = request.method == "PUT" and f"{_step(1)}/rank-" in request.path
        return error(status, code) if part else forward()

    proxy.meddle = refuse
    assert main(["checkpoints", "drain", fast, url]) == IoError.exit_code
    said = capsys.readouterr()
    assert f"{_step(1)}/rank-" in said.err
    assert "2 checkpoints drained" in said.out and steps_on(url) == [2, 3]


def test_all_stores_are_taken_before_a_command_removes(
    make: Any, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "other"
    with make(), nostall.Checkpointer(there) as ckpt:
        ckpt.save(state_of(1), 1, level="fast")
        ckpt.close()
        assert main(["checkpoints", "rm", "--step", "1", str(there), url]) == UsageError.exit_code
    assert "belongs to process" in capsys.readouterr().err
    assert [m.step for m in open_store(there, "fast").manifests()] == [1]


def test_a_command_knows_an_owner_that_has_ended(
    bucket: Any, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoints", "rm", "--superseded", url]
    (job,) = Ranks(tmp_path, url).start([1], hold=True)
    try:
        assert [sorted(json.loads(job.stdout.readline())) for _ in range(2)] == [
            ["restored"],
            ["step"],
        ]
        (key,) = [o.key for o in bucket.objects.all() if "/.owners/" in o.key]
        note = json.loads(bucket.Object(key).get()["Body"].read())
        assert main(command) == UsageError.exit_code
        assert f"belongs to process {job.pid} on " in capsys.readouterr().err
    finally:
        job.send_signal(signal.SIGKILL)
        job.communicate()
    assert note["pid"] == job.pid and store_at(url).other_owner() == ""
    # Notes of other owners, as their processes would leave them.
    for number, (change, ended) in enumerate(
        [
            ({"pid": os.getpid()}, True),  # the number was given again
            ({"process": {"numbers": "another boot", "start": "1"}}, False),
            ({"process": {}}, False),
            ({"process": None}, False),
            ({"pid": 10**30, "process": {"numbers": "elsewhere"}, "began": 1e300}, False),
        ],
        2,
    ):
        body = json.dumps({**note, **change}).encode()
        bucket.put_object(Key=f"runs/one/.owners/{number:012d}.json", Body=body)
        assert (store_at(url).other_owner() == "") == ended, change
    body = json.dumps({name: note[name] for name in ("run", "host", "pid", "first")}).encode()
    bucket.put_object(Key="runs/one/.owners/000000000007.json", Body=body)
    assert main(command) == UsageError.exit_code  # it has no mark: nothing is known
    told = capsys.readouterr().err
    assert f"belongs to process {note['pid']} on {note['host']}, which is not known" in told


def test_a_job_that_ends_says_so_and_one_that_begins_asks_nobody(
    bucket: Any, make: Any, url: str
) -> None:
    def notes() -> list[str]:
        return [Path(o.key).name for o in bucket.objects.all() if "/.owners/" in o.key]

    with make():
        assert open_store(url, "durable").other_owner().startswith("process ")
        with make("two"):
            pass
        assert open_store(url, "durable").other_owner() == ""
    assert notes() == [
        "000000000001.closed.json",
        "000000000001.json",
        "000000000002.closed.json",
        "000000000002.json",
    ]
    with make():  # one such word is enough
        assert [n for n in notes() if "closed" in n] == []
    assert len([n for n in notes() if "closed" in n]) == 1


def test_a_job_ends_although_the_store_does_not_answer(
    proxy: Proxy, make: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_objects, "_LAST_WORD_SECONDS", 0.1)
    go = threading.Event()

    def hang(request: Request, forward: Callable[[], Answer]) -> Answer:
        if request.method == "PUT" and ".closed" in request.path:
            go.wait(60)
        return forward()

    proxy.meddle = hang
    try:
        make().close()
        assert open_store(url, "durable").other_owner() != ""
    finally:
        go.set()


@pytest.mark.multi
def test_marks_of_killed_jobs_are_removed(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    """The proxy says of some objects that they are years old."""
    old, aged = ["aaaaaaaa", "bbbbbbbb", "readme"], []

    def age(request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        if request.method == "GET" and b"/.runs/" in answer.body:
            for name in old:
                found = rb"(/%s</Key>\s*<LastModified>)[^<]*" % name.encode()
                answer.body, changed = re.subn(
                    found, rb"\g<1>2020-01-01T00:00:00.000Z", answer.body
                )
                aged.append(changed)
            answer.headers.pop("Content-Length", None)
        return answer

    for name in (*old, "cccccccc"):
        bucket.put_object(Key=f"runs/one/.runs/{name}", Body=b"")
    proxy.meddle = age
    assert Ranks(tmp_path, url, 2).restored([]) == [None] * 2
    assert sum(aged) >= 3
    left = [Path(o.key).name for o in bucket.objects.all() if "/.runs/" in o.key]
    assert left == ["cccccccc", "readme"]  # of a job that may be about to begin, and the user's


def test_a_drain_that_another_job_prevents_is_told_once(
    bucket: Any, proxy: Proxy, make: Any, url: str
) -> None:
    puts: list[str] = []

    def count(request: Request, forward: Callable[[], Answer]) -> Answer:
        if request.method in ("PUT", "POST"):
            puts.append(request.path)
        return forward()

    with make(max_failures=100) as first:
        with make("two"):
            pass
        proxy.meddle = count
        saved = first.save(state_of(1), 1, level="fast")
        told = r"^1 checkpoint cannot be drained: .*taken over by process .* the next start, once"
        with pytest.raises(IoError, match=told) as error:
            first.wait(60)
        assert "the next wait" not in str(error.value)
        first.wait(60)  # nothing is tried again
        with pytest.raises(IoError, match="taken over by process"):
            saved.wait("durable", 60)
        assert first.fast.steps() == [1] and puts == []
    with make():  # nor is it lost
        pass
    assert steps_on(url) == [1]


def test_a_drain_of_ranks_that_another_job_prevents_keeps_nobody_waiting(
    url: str, tmp_path: Path
) -> None:
    def work(rank: int, gather: Any) -> None:
        with nostall.Checkpointer(
            tmp_path / "fast", url, rank=rank, world_size=2, gather=gather, job="test",
            max_failures=100, priority="normal",
        ) as ckpt:  # fmt: skip
            if rank == 0:
                store_at(url).own()
            gather(b"")
            with pytest.raises(IoError, match="taken over by process"):
                ckpt.save(state_of(1), 1, level="durable")  # ranks wait for each other for 600 s

    assert World(2).run(work) == [None, None]


def test_a_rank_goes_by_the_decision_of_rank_0_of_its_own_job(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    failed, began = threading.Event(), []

    def take_over(request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        if is_manifest(request) and not began:
            began.append(store_at(url))
            began[0].own()
        return answer

    def work(rank: int, gather: Any) -> None:
        with nostall.Checkpointer(
            tmp_path / "fast", url, rank=rank, world_size=2, gather=gather, job="test",
            replicated=True, max_failures=100, timeout=60, priority="normal",
        ) as ckpt:  # fmt: skip
            if rank == 0:
                proxy.meddle = take_over
            else:  # it looks when the manifest is there
                find = ckpt.durable.find

                def find_late(step: int, id: str) -> Manifest | None:
                    failed.wait(60)
                    return find(step, id)

                ckpt.durable.find = find_late
            try:
                with pytest.raises(IoError, match="taken over by process"):
                    ckpt.save(state_of(1), 1, level="durable")
            finally:
                failed.set()

    assert World(2).run(work) == [None, None]
    assert steps_on(url) == [1] and began  # the manifest is there, and counts for the later job


def test_a_newer_save_of_another_job_is_no_word_of_rank_0(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    store, (newer, path) = store_at(url), one_part(tmp_path, sequence=2 * STRIDE)
    copy_all(store, newer, copying(store, path))
    older = Manifest(1, "bbbbbbbb-000001", 2, (), sequence=STRIDE, replicated=True)
    assert "rank 0 did not complete step 1" in store.commit(
        older, 1, None, timeout=0, stopped=lambda: True
    )
    mine = dataclasses.replace(older, id="aaaaaaaa-000000")
    assert store.commit(mine, 1, None, timeout=0, stopped=lambda: True) == ""


def test_a_complete_save_removes_what_those_before_have_left(bucket: Any, url: str) -> None:
    store = store_at(url)
    store.own()
    saves = [
        Manifest(step, f"aaaaaaaa-00000{step}", 2, (), sequence=STRIDE + step) for step in range(3)
    ]
    store.abort(saves[0], "step 2 is complete already")
    assert commit_all(store, saves[1], "the disk is full") == ["rank 1: the disk is full"] * 2
    assert kinds(bucket) == ["decision", "decision", "word"]
    assert commit_all(store, saves[2]) == ["", ""]
    assert {key.partition("/")[0] for key in keys(bucket)} == {"step-000000000002"}


@pytest.mark.parametrize("world", [2, 100, 1000])
@pytest.mark.parametrize(("at", "end"), [(21.0, None), (24.9, None), (12.3, 12.4), (0.1, 0.1)])
def test_what_is_decided_by_the_end_of_a_ranks_wait_counts(
    monkeypatch: pytest.MonkeyPatch, world: int, at: float, end: float | None
) -> None:
    clock, decision = Clock(), {"complete": True, "certain": True, "reason": ""}

    def decided(store: ObjectStore, key: str) -> bytes:
        if clock.now < at:
            raise FileNotFoundError
        return json.dumps(decision).encode()

    monkeypatch.setattr(_store, "time", clock)
    monkeypatch.setattr(ObjectStore, "_read", decided)
    monkeypatch.setattr(ObjectStore, "_create", lambda store, key, data: True)
    store, manifest = store_at("s3://bucket/run"), Manifest(1, ID, world, ())
    stopped = lambda: end is not None and clock.now >= end  # noqa: E731
    assert store.commit(manifest, 1, Part(1, "a", 1, ()), timeout=20, stopped=stopped) == ""
    assert at <= clock.now < (end or 25) + 0.5


def test_a_newer_save_at_the_end_of_a_ranks_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, manifest = Clock(), Manifest(1, ID, 2, (), sequence=STRIDE, replicated=True)
    newer = dataclasses.replace(manifest, step=2, id="aaaaaaaa-000002", sequence=STRIDE + 1)
    monkeypatch.setattr(_store, "time", clock)
    monkeypatch.setattr(_store, "LOOK_SECONDS", 10.0)
    monkeypatch.setattr(ObjectStore, "_decided", lambda *_: None)
    monkeypatch.setattr(ObjectStore, "manifests", lambda *_: [newer] if clock.now > 24.9 else [])
    assert store_at("s3://bucket/run").commit(manifest, 1, None, timeout=20) == ""


def test_a_word_that_only_a_list_shows_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, put, words = Clock(), [], []
    store, manifest = store_at("s3://bucket/run"), Manifest(1, ID, 2, ())

    def read(store: ObjectStore, key: str) -> bytes:
        words.append(clock.now)
        if clock.now < 3:
            raise FileNotFoundError
        return json.dumps(Part(1, "a", 1, (7,)).to_dict()).encode()

    monkeypatch.setattr(_store, "time", clock)
    monkeypatch.setattr(ObjectStore, "_read", read)
    name = store._word(manifest, 1).rpartition("/")[2]
    monkeypatch.setattr(ObjectStore, "_list", lambda *names: {name: 1})
    monkeypatch.setattr(ObjectStore, "_create", lambda store, key, data: True)
    monkeypatch.setattr(ObjectStore, "_delete", lambda store, names: None)
    monkeypatch.setattr(ObjectStore, "publish", lambda store, manifest: put.append(manifest))
    assert store.commit(manifest, 0, Part(0, "b", 1, ()), timeout=20) == ""
    assert len(words) > 10 and [len(m.parts) for m in put] == [2]


def test_a_word_that_cannot_be_read_is_told_with_its_rank(tmp_path: Path) -> None:
    store, manifest = _store.Store(tmp_path, "fast"), Manifest(1, ID, 4, ())
    store.prepare(1)
    store._taken(manifest, 3).mkdir()
    reason = store.commit(manifest, 0, Part(0, "b", 1, ()), timeout=20)
    assert reason.startswith(f"cannot take the word of rank 3, {store._note(manifest, 3)}: ")


@pytest.mark.parametrize("world", [2, 8, 64, 1000])
def test_requests_for_a_decision_do_not_grow_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    clock, reads, lists = Clock(), [], []

    def nothing(store: ObjectStore, key: str) -> bytes:
        reads.append(key)
        raise FileNotFoundError

    monkeypatch.setattr(_store, "time", clock)
    monkeypatch.setattr(ObjectStore, "_read", nothing)
    monkeypatch.setattr(ObjectStore, "_list", lambda store, *names: lists.append(names) or {})
    monkeypatch.setattr(ObjectStore, "_create", lambda store, key, data: True)
    store, manifest = store_at("s3://bucket/run"), Manifest(1, ID, world, ())
    with pytest.raises(PeerError, match=r"rank 0 did not complete step 1 in .* in 600 s"):
        store.commit(manifest, 1, Part(1, "a", 1, ()), timeout=600)
    seconds = 600 + _store.GRACE_SECONDS
    assert seconds / 5 <= len(reads) <= seconds / min(5, max(0.2, world / 20)) + 6 and not lists
    before, clock.now = len(reads), 0.0
    assert "did not finish their part in time" in store.commit(
        manifest, 0, Part(0, "b", 1, ()), timeout=600
    )
    assert len(reads) == before and len(lists) <= 600 / 0.2 + 2
    clock.now = 0.0
    assert store.commit(manifest, 1, None, timeout=600, stopped=lambda: clock.now > 1)
    assert clock.now < 1.5  # it does not sleep through the end of the job


@pytest.fixture
def slow(server: Proxy) -> Iterator[Proxy]:
    """Another way to the server, for one job alone."""
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def run_with_a_pause(
    job: Ranks, slow: Proxy, at: int, other: Callable[[], None]
) -> tuple[int, int, list[dict[str, Any]]]:
    """A job that stops at its request of that number, while `other` runs, and goes on.

    Returns:
        The number of its requests, its process, and what it has said.
    """
    numbers = itertools.count()
    running: list[prefork.Process] = []
    started = threading.Event()

    def pause(request: Request, forward: Callable[[], Answer]) -> Answer:
        if next(numbers) == at:
            started.wait(60)
            os.kill(running[0].pid, signal.SIGSTOP)
            try:
                other()
            finally:
                os.kill(running[0].pid, signal.SIGCONT)
        return forward()

    slow.meddle = pause
    running += job.start([1, 2], keep=1)
    started.set()
    out, words = running[0].communicate(timeout=300)
    assert running[0].returncode == 0, words
    return next(numbers), running[0].pid, [json.loads(line) for line in out.splitlines()]


def last_owner(bucket: Any, below: str) -> int:
    """Its process."""
    owners = bucket.objects.filter(Prefix=f"{below}/.owners/")
    return int(json.loads(max(owners, key=lambda o: o.key).get()["Body"].read())["pid"])


# Every sixth request; NOSTALL_TESTS_EVERY_REQUEST=1 takes all of them.
EVERY = 1 if os.environ.get("NOSTALL_TESTS_EVERY_REQUEST") else 6


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.parametrize("residue", range(2))
def test_an_old_owner_that_pauses_anywhere_harms_no_later_save(
    bucket: Any, proxy: Proxy, slow: Proxy, tmp_path: Path, residue: int
) -> None:
    url = f"s3://{bucket.name}"
    first = Ranks(tmp_path, f"{url}/count", AWS_ENDPOINT_URL=slow.url)
    requests, _, said = run_with_a_pause(first, slow, -1, lambda: None)
    assert said == [{"restored": None}, {"step": 1}, {"step": 2}]
    places, stops = range(EVERY * residue, requests, EVERY * 2), 0
    for at in places:
        goes_back = at // (EVERY * 2) % 2 == 0
        made, problem = pause_at(at, goes_back, bucket, f"{url}/{at}", slow, tmp_path / str(at))
        assert not problem, f"stopped at request {at}: {problem}"
        # A run has fewer requests where two runs of retention became one.
        stops += made > at
    assert stops > len(places) // 2


def pause_at(
    at: int, goes_back: bool, bucket: Any, url: str, slow: Proxy, home: Path
) -> tuple[int, str]:
    """A job is stopped at a request; another one saves, or goes back; then the first one goes on.

    Returns:
        The number of its requests, of which the one to stop at may be none; and what went wrong.
    """
    for name in ("earlier", "later", "final"):
        (home / name).mkdir(parents=True)
    later, there, found = Ranks(home / "later", url), [], []

    def other() -> None:
        there.extend(steps_on(url))
        # To the oldest, which the earlier one may be about to remove.
        back_to = there[0] if there and goes_back else None
        steps = [] if back_to is not None else [10, 11]
        found.extend([later.restored(steps, keep=2, back_to=back_to)[0], back_to])

    # Its client's clock runs while it is stopped.
    earlier = Ranks(
        home / "earlier", url, AWS_ENDPOINT_URL=slow.url, NOSTALL_OBJECT_TIMEOUT_S="120"
    )
    made, pid, said = run_with_a_pause(earlier, slow, at, other)
    slow.meddle = None
    if made <= at:
        return made, ""
    acknowledged = [words["step"] for words in said if "step" in words]
    on_store, story = steps_on(url), f"{there} were there; {said}; {found}"
    if last_owner(bucket, str(at)) == pid:  # it was stopped before it began
        wanted = 2
        if acknowledged != [1, 2]:
            return made, f"the job that has the store could not save: {story}"
    else:
        wanted = 11 if found[1] is None else found[1]
        if max(acknowledged, default=0) > max(there, default=0):
            return made, f"a save was acknowledged that the later job did not find: {story}"
        if found[1] is None and on_store[-2:] != [10, 11]:
            return made, f"the later job's saves are lost, {on_store} are there: {story}"
    restored = Ranks(home / "final", url).restored([])
    whole = restored == [[wanted, "durable", True]]
    return made, "" if whole else f"{restored}: {story}"


def test_jobs_that_begin_at_once_have_numbers_of_their_own(
    url: str, make: Any, proxy: Proxy
) -> None:
    arrived = threading.Barrier(3)

    one = threading.Lock()  # moto looks at If-None-Match, and then puts: not in one step

    def meet(request: Request, forward: Callable[[], Answer]) -> Answer:
        if request.method == "PUT" and "owners/000000000001" in request.path and not met[0]:
            arrived.wait(60)
            met[0] = True
        with one:
            return forward()

    met = [False]
    proxy.meddle = meet
    stores = [store_at(url) for _ in range(3)]
    threads = [threading.Thread(target=store.own) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(store._owner for store in stores) == [1, 2, 3]
    assert sorted(store._first for store in stores) == [STRIDE, 2 * STRIDE, 3 * STRIDE]
    last = max(stores, key=lambda store: store._owner)
    for store in stores:
        if store is last:
            store.check_owned()
        else:
            with pytest.raises(PeerError, match="taken over by process"):
                store.check_owned()
    # One that knows higher numbers, of its fast directory, takes them before it saves.
    last.note_sequence(9 * STRIDE)
    last.check_owned()
    assert last.seen() == 9 * STRIDE - 1
    later = store_at(url)
    later.own()
    assert (later._owner, later._first) == (5, 10 * STRIDE)


def one_part(
    tmp_path: Path, step: int = 1, blocks: int = 1, sequence: int = 1
) -> tuple[Manifest, Path]:
    data = np.random.default_rng(step).bytes((blocks - 1) * BLOCK + 100)
    path = tmp_path / f"part{step}"
    path.write_bytes(data)
    crcs = tuple(_native.crc32c(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))
    part = Part(0, part_name(0, ID), len(data), crcs)
    return Manifest(step, ID, 1, (part,), sequence=sequence), path


def copying(store: ObjectStore, path: Path) -> Callable[[Part, str], None]:
    return lambda part, name: store.copy(path, 1, name, part, Pacing()).run()


def test_a_manifest_that_comes_after_the_parts_were_removed_counts_for_nothing(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path, make: Any
) -> None:
    first, (manifest, path) = store_at(url), one_part(tmp_path, sequence=STRIDE)
    first.own()

    def be_late(request: Request, forward: Callable[[], Answer]) -> Answer:
        if is_manifest(request):
            proxy.meddle = None
            with make() as ckpt:
                assert ckpt.restore() is None
        return forward()

    proxy.meddle = be_late
    with pytest.raises(PeerError, match="taken over"):
        copy_all(first, manifest, copying(first, path))
    assert kinds(bucket) == ["manifest"] and steps_on(url) == []
    with make("other", keep=1) as ckpt:
        assert ckpt.restore() is None and keys(bucket) == []


def test_what_a_later_job_goes_on_from_stays(url: str, tmp_path: Path) -> None:
    first, (manifest, path) = store_at(url), one_part(tmp_path, sequence=STRIDE)
    first.own()
    copy_all(first, manifest, copying(first, path))
    later = store_at(url)
    delete = first._delete

    def be_slow(names: Any) -> None:
        """What it knows is listed and checked; then the later job takes the checkpoint over."""
        names, first._delete = list(names), delete
        later.own()
        later.clean()
        (found,) = later.manifests()
        later.adopt(found)
        delete(names)

    first._delete = be_slow
    with pytest.raises(PeerError, match="taken over"):
        first.remove(1, ID)
    (found,) = later.manifests()
    assert found.id == ID and later.has_all(found)
    later.adopt(found)  # it has
    assert len(later._sizes(1)) == 2
    later.remove(1, ID)
    assert later._sizes(1) == {}


def test_a_save_whose_name_goes_before_it_is_adopted_stays(url: str, tmp_path: Path) -> None:
    first, (manifest, path) = store_at(url), one_part(tmp_path, sequence=STRIDE)
    first.own()
    copy_all(first, manifest, copying(first, path))
    later = store_at(url)
    later.own()
    (found,) = later.manifests()
    first._delete(first.key(_step(1), n) for n in first._sizes(1) if n.startswith("manifest"))
    assert later.manifests() == []
    later.adopt(found)
    assert later.manifests() == [found] and later.has_all(found)
    later.remove(1, ID)
    later.adopt(found)  # of what has no parts there is nothing to go on from
    assert later._sizes(1) == {}


def test_a_late_manifest_without_parts_says_nothing_of_branches(
    url: str, tmp_path: Path, make: Any
) -> None:
    with make("zero", level="durable") as ckpt:
        ckpt.save(state_of(9), 9)
    first = store_at(url)
    first.own()
    (newest,) = first.manifests()
    lost, _ = one_part(tmp_path, step=2, sequence=first._first)
    (name,) = first.copy_names(lost).values()
    lost = dataclasses.replace(
        lost,
        parts=(dataclasses.replace(lost.parts[0], name=name),),
        abandoned=((newest.sequence, newest.sequence),),
    )
    with make("later", level="durable") as later:
        first._put_manifest(lost)  # of an attempt whose parts the later job has removed
        assert is_whole(later.restore(), 9)
        later.save(state_of(3), 3)
    assert [m.sequence in range(*lost.abandoned[0]) for m in first.manifests()] == [False, False]


def test_parts_that_are_being_removed_are_completed_no_more(
    proxy: Proxy, url: str, make: Any
) -> None:
    """The second job stops while it removes what the first one has not completed; a third begins."""
    first, second = make("one", level="durable", max_failures=100), store_at(url)
    first.save(state_of(9), 9)
    first.wait(60)
    began: list[Any] = []

    def be_late(request: Request, forward: Callable[[], Answer]) -> Answer:
        if not is_manifest(request) or began:
            return forward()
        began.append(None)
        second.own()
        delete, answers = second._delete, []

        def be_slow(names: Any) -> None:
            names = list(names)
            if any("/rank-" in name for name in names):
                second._delete = delete
                answers.append(forward())
                with make("third", keep=1) as third:
                    began.append(third.restore().step)
                    third._background._cleaner.retain(set())
            delete(names)

        second._delete = be_slow
        second.clean()
        return answers[0]

    proxy.meddle = be_late
    with pytest.raises(IoError, match="taken over by process"):
        first.save(state_of(11), 11)
    first.close()
    assert began == [None, 9]
    with make("final") as ckpt:
        assert is_whole(ckpt.restore(), 9)
    assert steps_on(url) == [9]


def test_what_was_given_up_is_removed_by_the_next_owner(
    bucket: Any, url: str, tmp_path: Path
) -> None:
    first, (manifest, path) = store_at(url), one_part(tmp_path, sequence=STRIDE)
    names = first.copy_names(manifest)
    first.copy(path, 1, *names.values(), manifest.parts[0], Pacing()).run()
    second = store_at(url)
    second.own()
    second._delete = lambda names: (_ for _ in ()).throw(UnreachableError("away"))
    second.clean()
    assert kinds(bucket) == ["manifest", "rank"] and second.entries() == []
    third = store_at(url)
    third.own()
    third.clean()
    assert kinds(bucket) == []


def test_a_save_that_lost_a_part_still_says_what_it_does_not_continue(
    bucket: Any, url: str, tmp_path: Path, capsys: Any
) -> None:
    store = store_at(url)
    store.own()
    one, path = one_part(tmp_path)
    parts = tuple(dataclasses.replace(one.parts[0], rank=r, name=part_name(r, ID)) for r in (0, 1))
    for step in (1, 2, 3):
        number, given_up = store._first + step, ((store._first + 2,) * 2,) if step == 3 else ()
        manifest = Manifest(
            step, f"aaaaaaaa-00000{step}", 2, parts, sequence=number, abandoned=given_up
        )
        upload = lambda part, name, at=step: store.copy(path, at, name, part, Pacing()).run()  # noqa: E731
        copy_all(store, manifest, upload)

    def best() -> list[int]:
        return [choice.step for choice in view([store], None).choices]

    assert best() == [3, 1, 2]
    first, second = [o for o in bucket.objects.all() if "step-000000000003/rank-" in o.key]
    first.delete()
    assert best() == [1, 2]
    assert main(["checkpoints", "ls", url]) == CorruptionError.exit_code
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "DAMAGED" in line]
    assert "aaaaaaaa-000003 " in row and "current" in row and first.key in row
    assert lineage_of([store], []).save(4)[1] == given_up
    Cleaner(None, store, Settings(Keep(1, superseded=0))).retain(set())
    assert steps_on(url) == [1]  # the newest that is whole of the current branch
    second.delete()
    assert view([store], None).top == (store._first + 3, given_up)  # by the note that it has left
    (note,) = [o for o in bucket.objects.all() if "/.branches/" in o.key]
    note.delete()
    assert view([store], None).top == (store._first + 1, ())


def under_way(store: ObjectStore, tmp_path: Path) -> Manifest:
    """What a job is about to put, whose part is there."""
    manifest, path = one_part(tmp_path, sequence=STRIDE)
    (name,) = store.copy_names(manifest).values()
    store.copy(path, 1, name, manifest.parts[0], Pacing()).run()
    (part,) = manifest.parts
    return dataclasses.replace(manifest, parts=(dataclasses.replace(part, name=name),))


@pytest.mark.parametrize("how", ["clean", "rm", "retention"])
@pytest.mark.parametrize("pause", ["give up", "remove"])
def test_an_attempt_that_a_third_job_goes_on_from_stays(
    url: str, tmp_path: Path, how: str, pause: str
) -> None:
    """The second job is paused while it removes what the first one then completes."""
    first, second, third = store_at(url), store_at(url), store_at(url)
    first.own()
    manifest = under_way(first, tmp_path)
    second.own()
    remove: Callable[[], object] = {
        "clean": second.clean,
        "rm": lambda: second.remove_step(1),
        "retention": lambda: second.remove(1, ID),
    }[how]
    create, delete, found = second._create, second._delete, []

    def overtake() -> None:
        second._create, second._delete = create, delete
        with contextlib.suppress(PeerError):  # it is given up
            first._put_manifest(manifest)
        third.own()
        third.clean()
        found.extend(third.manifests())
        for one in found:
            third.adopt(one)

    def create_late(key: str, data: bytes) -> bool:
        overtake()
        return create(key, data)

    def delete_late(names: Any) -> None:
        names = list(names)
        if any("/rank-" in name for name in names):
            overtake()
        delete(names)

    if pause == "give up":
        second._create = create_late
    else:
        second._delete = delete_late
    with contextlib.suppress(PeerError):
        remove()
    with pytest.raises(PeerError, match="taken over"):
        second.check_owned()
    assert [m.id for m in found] == ([ID] if pause == "give up" else [])
    assert third.manifests() == found and all(map(third.has_all, found))


def test_a_manifest_that_comes_while_its_step_is_removed_goes_with_it(
    bucket: Any, url: str, tmp_path: Path
) -> None:
    first, second = store_at(url), store_at(url)
    manifest = under_way(first, tmp_path)
    second.own()
    create = second._create

    def create_late(key: str, data: bytes) -> bool:
        second._create = create
        first._put_manifest(manifest)
        return create(key, data)

    second._create = create_late
    second.remove_step(1)
    assert keys(bucket) == []


def test_what_says_that_an_attempt_is_given_up_is_kept_until_its_parts_are_gone(
    bucket: Any, url: str, tmp_path: Path
) -> None:
    store = store_at(url)
    manifest = under_way(store, tmp_path)
    store.own()
    delete = store._delete

    def away(names: Any) -> None:
        names = list(names)
        if any("/rank-" in name for name in names):
            raise UnreachableError("away")
        delete(names)

    store._delete = away
    for _ in range(2):
        with pytest.raises(UnreachableError):
            store.remove_step(1)
        assert kinds(bucket) == ["manifest", "rank"] and store.manifests() == []
    assert store.lacks(manifest)  # what is given up is no manifest
    store._delete = delete
    store.remove_step(1)
    assert keys(bucket) == []


def test_a_save_that_is_removed_by_hand_takes_its_note_of_a_branch_along(
    bucket: Any, url: str, tmp_path: Path
) -> None:
    store = store_at(url)
    store.own()
    manifest, path = one_part(tmp_path)
    before = Branch(store._first, (), 1, "bbbbbbbb-000001")
    store.note_branch(before)
    number, abandoned = store._first + 1, ((1, store._first),)
    begun = dataclasses.replace(manifest, sequence=number, abandoned=abandoned)
    copy_all(store, begun, copying(store, path))
    assert store.branch() == Branch(number, abandoned, 1, ID)
    store.remove(1, ID)  # of retention
    assert store.branch() == Branch(number, abandoned, 1, ID)
    copy_all(store, begun, copying(store, path))
    store.remove_step(1)
    assert store.branch() == before


def test_what_only_the_fast_directory_had_retires_nothing(
    proxy: Proxy, make: Any, url: str
) -> None:
    def away(request: Request, forward: Callable[[], Answer]) -> Answer:
        return error(503, "SlowDown") if _step(2) in request.path else forward()

    with make(keep=1, level="durable", max_failures=100) as ckpt:
        ckpt.save(state_of(1), 1)
        proxy.meddle = away
        ckpt.save(state_of(2), 2, level="fast")
    with make(keep=1, max_failures=100) as ckpt:
        assert is_whole(ckpt.restore(), 2, "fast")
        ckpt.save(state_of(2), 2, level="fast")
    proxy.meddle = None
    with make("another", keep=1) as ckpt:
        assert is_whole(ckpt.restore(), 1)


def test_a_note_of_a_branch_that_only_the_fast_directory_has(
    proxy: Proxy, make: Any, url: str, caplog: Any
) -> None:
    def away(request: Request, forward: Callable[[], Answer]) -> Answer:
        note = request.method == "PUT" and ".branches/" in request.path
        return error(503, "SlowDown") if note else forward()

    with make(keep=1, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
    with make(keep=2, level="durable") as ckpt:
        ckpt.save(state_of(2), 2)
        ckpt.wait(60)
        ckpt._background._cleaner.retain(set())
        assert ckpt.fast.steps() == [2]
        proxy.meddle = away
        assert is_whole(ckpt.restore(1), 1)
        assert "until then a restart does not know" in caplog.text
    proxy.meddle = None
    with make("another", keep=2) as ckpt:  # it does not know
        assert is_whole(ckpt.restore(), 2)
        ckpt._background._cleaner.retain(set())
    assert steps_on(url) == [1, 2]
    with make(keep=1) as ckpt:
        assert ckpt.restore().step == 1
        ckpt.save(state_of(3), 3, level="durable")
        ckpt.wait(60)
        ckpt._background._cleaner.retain(set())
    assert steps_on(url) == [2, 3]  # the tips of both
    with make("new", keep=1) as ckpt:
        assert is_whole(ckpt.restore(), 3)


def test_a_note_of_a_branch_that_is_taken_back_harms_no_save(
    bucket: Any, proxy: Proxy, make: Any, url: str
) -> None:
    """A job is overtaken while it puts the note; the later one sees the note, and then it is gone."""
    with make("zero", level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
    began: list[Any] = []

    def be_late(request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        if request.method == "PUT" and ".branches/" in request.path and not began:
            began.append(make("later", level="durable"))
            assert is_whole(began[0].restore(), 1)
        return answer

    proxy.meddle = be_late
    with make("earlier") as ckpt:
        ckpt.restore(1)
    assert not any(".branches/" in o.key for o in bucket.objects.all())
    with began[0] as later:
        later.save(state_of(3), 3)
    with make("final") as ckpt:
        assert is_whole(ckpt.restore(), 3)
        assert is_whole(ckpt.restore(2), 2)  # of the branch that the later job has left


# ---------------------------------------------------------------------- answers that are lost


def test_a_commit_whose_answer_is_lost_has_worked(proxy: Proxy, make: Any, url: str) -> None:
    lost: list[int] = []

    def lose(request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        if is_manifest(request) and len(lost) < 2:
            lost.append(answer.status)
            answer.drop = True
        return answer

    proxy.meddle = lose
    with make(level="durable") as ckpt:
        saved = ckpt.save(state_of(1), 1)
        assert saved.problems == [] and lost[0] == 200
    assert steps_on(url) == [1]


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_answers_that_are_lost_once_change_nothing(
    proxy: Proxy, make: Any, url: str, method: str
) -> None:
    seen: set[str] = set()

    def lose(request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        if request.method == method and request.path not in seen:
            seen.add(request.path)
            answer.drop = True
        return answer

    proxy.meddle = lose
    with make(level="durable", keep=1) as ckpt:
        for step in (1, 2):
            assert ckpt.save(state_of(step), step).problems == []
        assert is_whole(ckpt.restore(), 2, "fast")
    assert steps_on(url) == [2] and (seen or method == "DELETE")


def test_a_commit_of_which_nothing_is_known_keeps_its_part(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    store, (manifest, path) = store_at(url), one_part(tmp_path)

    def silent(request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = error(503, "SlowDown")
        answer.drop = is_manifest(request)
        return answer if answer.drop else forward()

    proxy.meddle = silent
    with pytest.raises(UnknownOutcomeError):
        copy_all(store, manifest, copying(store, path))
    assert kinds(bucket) == ["rank"]  # the manifest may still come
    proxy.meddle = None
    copy_all(store, manifest, copying(store, path))
    (found,) = store.manifests()
    assert found.id == ID and store.has_all(found) and kinds(bucket) == ["manifest", "rank", "rank"]
    store.own()
    store.clean()
    assert kinds(bucket) == ["manifest", "rank"]


@pytest.mark.parametrize("status", [0, 501])
def test_a_store_without_conditional_writes_is_refused(
    proxy: Proxy, make: Any, status: int
) -> None:
    def ignore(request: Request, forward: Callable[[], Answer]) -> Answer:
        for name in [n for n in request.headers if n.lower().startswith("if-")]:
            del request.headers[name]
            if status:
                return error(status, "NotImplemented")
        return forward()

    proxy.meddle = ignore
    with pytest.raises(UsageError, match=r"has no conditional writes \(If-None-Match\)"):
        make()


# ---------------------------------------------------------------------- faults


def test_a_store_that_is_busy_for_a_while_is_asked_again(proxy: Proxy, make: Any, url: str) -> None:
    refused: dict[str, int] = {}

    def busy(request: Request, forward: Callable[[], Answer]) -> Answer:
        key = f"{request.method} {request.path}"
        refused[key] = refused.get(key, 0) + 1
        return error(503, "SlowDown") if refused[key] == 1 else forward()

    proxy.meddle = busy
    with make(level="durable") as ckpt:
        assert ckpt.save(state_of(1), 1).problems == []
    assert steps_on(url) == [1]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda: error(503, "SlowDown"), "SlowDown"),
        (lambda: error(403, "AccessDenied"), "access was denied .* check the credentials"),
        (lambda: error(404, "NoSuchBucket"), "does not exist: make the bucket"),
    ],
    ids=["busy", "denied", "gone"],
)
def test_a_drain_that_fails_is_told_and_tried_again(
    proxy: Proxy, make: Any, url: str, fault: Callable[[], Answer], sentence: str
) -> None:
    with make(max_failures=100) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
        ckpt.wait(60)
        proxy.meddle = lambda *_: fault()
        saved = ckpt.save(state_of(2), 2)
        with pytest.raises(IoError, match=rf"cannot be copied to {url}: .*{sentence}"):
            saved.wait("durable", 60)
        assert saved.level == "fast"
        proxy.meddle = None
        ckpt.save(state_of(3), 3, level="durable")
        ckpt.wait(60)
    assert steps_on(url) == [1, 2, 3]


def test_what_is_not_there_or_denied_is_told_at_the_start(
    proxy: Proxy, tmp_path: Path, make: Any
) -> None:
    with pytest.raises(UnreachableError, match=r"s3://no-such-bucket does not exist: make the"):
        nostall.Checkpointer(tmp_path / "fast", "s3://no-such-bucket/run")
    proxy.meddle = lambda *_: error(403, "InvalidAccessKeyId")
    with pytest.raises(UnreachableError, match=r"access was denied .*check the credentials"):
        make()
    proxy.meddle = None
    with make() as ckpt:  # nothing of it is held
        assert ckpt.restore() is None


def test_what_the_client_does_not_take_is_told_as_unreachable(
    proxy: Proxy, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(UnreachableError, match=r"cannot .* s3://.*correct the URL, or what the en"):
        make()


def test_a_store_that_goes_after_the_begin_keeps_no_job_from_starting(
    proxy: Proxy, make: Any, url: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    begin = _checkpointer.begin

    def then_go(*args: Any, **options: Any) -> Any:
        begun = begin(*args, **options)
        proxy.meddle = lambda *_: error(503, "SlowDown")
        return begun

    with make() as ckpt:
        proxy.meddle = lambda *_: error(503, "SlowDown")
        ckpt.save(state_of(1), 1, level="fast")
        proxy.meddle = None
    monkeypatch.setattr(_checkpointer, "begin", then_go)
    with make():
        assert f"is copied to {url} at the next start" in caplog.text
    monkeypatch.setattr(_checkpointer, "begin", begin)
    proxy.meddle = None
    with make() as ckpt:
        ckpt.wait(60)
    assert steps_on(url) == [1]


def test_what_another_job_has_is_not_safe(make: Any, url: str) -> None:
    first = make("one", keep=5, max_failures=100)
    for step in (1, 2, 3):
        first.save(state_of(step), step, level="durable")
    first.wait(60)
    cleaner = first._background._cleaner
    cleaner.begin()
    (newest,) = first.fast.manifests()  # what is durable may go
    assert cleaner._safe == {newest.id}
    with make("two"):
        cleaner.begin()
        assert cleaner._safe == set()
    first.close()


def test_a_job_that_is_overtaken_at_its_begin_does_not_begin(
    make: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_sequence = ObjectStore.note_sequence

    def be_late(store: ObjectStore, number: int) -> None:
        store_at(url).own()
        note_sequence(store, store._first + STRIDE)

    monkeypatch.setattr(ObjectStore, "note_sequence", be_late)
    with pytest.raises(PeerError, match="taken over by process"):
        make()


def test_answers_that_are_cut_are_not_taken_for_damage(proxy: Proxy, make: Any) -> None:
    with make(level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        ckpt.wait(60)
    with make("other") as ckpt:
        proxy.ranges.clear()  # of what was read back
        proxy.spoil = lambda number, answer: cut(answer, 100) if number < 2 else answer
        assert is_whole(ckpt.restore(), 2)
        assert len(proxy.ranges) > 2
        # An older one is not restored while the newest is only out of reach.
        proxy.spoil = lambda number, answer: cut(answer, 100)
        with pytest.raises(UnreachableError, match=r"cannot read s3://.*rank-00000"):
            ckpt.restore()
        proxy.spoil = None
        assert is_whole(ckpt.restore(), 2)


@pytest.mark.parametrize("how", ["flip", "cut", "gone", "manifest"])
def test_damage_is_passed_over(bucket: Any, make: Any, how: str, caplog: Any) -> None:
    with make(level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        ckpt.wait(60)
    wanted = "manifest" if how == "manifest" else "rank-"
    (key,) = [key for key in keys(bucket) if f"2/{wanted}" in key]
    thing = bucket.Object(f"runs/one/{key}")
    data = bytearray(thing.get()["Body"].read())
    data[-5] ^= 1
    if how == "gone":
        thing.delete()
    else:
        thing.put(Body=bytes(data[:-9]) if how == "cut" else bytes(data))
    with make("other") as ckpt:
        assert is_whole(ckpt.restore(), 1)
    if how == "gone":  # it has one part
        assert "none of the parts that it names is there" in caplog.text
    else:
        assert "passing over a checkpoint" in caplog.text and key in caplog.text


def test_a_note_of_a_branch_that_is_damaged_is_put_aside(
    bucket: Any, url: str, make: Any, tmp_path: Path, caplog: Any
) -> None:
    def notes() -> list[Any]:
        return [o for o in bucket.objects.all() if ".branches/" in o.key]

    store = store_at(url)
    store.own()
    for number in (1, 2):
        store.note_branch(Branch(STRIDE + number, (), number, ID))
    assert store.branch() == Branch(STRIDE + 2, (), 2, ID)
    store.clean()
    assert len(notes()) == 2  # no save outranks the first, and the second may yet be taken back
    manifest, path = one_part(tmp_path, sequence=STRIDE + 3)
    copy_all(store, manifest, copying(store, path))
    store.clean()
    (note,) = notes()
    bucket.put_object(Key=note.key, Body=b"{}")
    with pytest.raises(CorruptionError, match="is damaged"):
        store.branch()
    with make(level="durable") as ckpt:
        assert "what was saved last counts as the newest" in caplog.text
        ckpt.save(state_of(1), 1)
    assert store.branch() is None
    assert [o.key for o in notes()] == [f"{note.key}.damaged"]


def test_what_the_fast_storage_damaged_is_not_uploaded(
    bucket: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfer, "_CHUNK", 5 << 20)
    store, (manifest, path) = store_at(url), one_part(tmp_path, blocks=4)
    (part,) = manifest.parts
    with path.open("r+b") as file:
        file.seek(3 * BLOCK)
        file.write(b"?")
    with pytest.raises(CorruptionError, match=r"part1 is damaged: bytes 12582912 to 12583012"):
        store.copy(path, 1, part.name, part, Pacing()).run()
    stopped = store.copy(path, 1, part.name, part, Pacing(rate=1))
    stopped.stop()
    with pytest.raises(StoppedError):
        stopped.run()
    with pytest.raises(IoError, match=r"cannot read .*nothing: No such file"):
        store.copy(tmp_path / "nothing", 1, part.name, part, Pacing()).run()
    assert keys(bucket) == [] and uploads(bucket) == []


def test_places_that_cannot_be_are_refused(tmp_path: Path, url: str) -> None:
    for arguments, sentence in (
        ({"durable": url}, "needs fast=, a directory from which"),
        ({"fast": url}, "is not a directory: an object store is for durable="),
        ({"fast": tmp_path, "durable": "http://host/run"}, "is not a place for checkpoints"),
        ({"fast": tmp_path, "durable": "s3://"}, "is not a place for checkpoints"),
        (
            {"fast": tmp_path, "durable": "s3://b/x//y"},
            "s3://b/x//y is .*, for a name in it is empty",
        ),
        (
            {"fast": tmp_path, "durable": "hf://datasets/me/runs"},
            "Hub is only read, for data sets: ",
        ),
        ({"fast": tmp_path, "durable": Path(url)}, rf"was the URL {url} before a Path was made"),
    ):
        with pytest.raises(UsageError, match=sentence):
            nostall.Checkpointer(**arguments)


def test_an_owner_whose_note_is_removed_stops(bucket: Any, url: str) -> None:
    bucket.put_object(Key="runs/one/.owners/readme.txt", Body=b"the user's")
    store = store_at(url)
    store.own()
    for note in bucket.objects.filter(Prefix="runs/one/.owners/"):
        note.delete()
    with pytest.raises(
        PeerError, match=r"owners/000000000001\.json, by which this job owns .*gone"
    ):
        store.check_owned()
    store.disown()
    with pytest.raises(PeerError, match="the checkpointer is closed"):
        store.publish(dataclasses.replace(Manifest(1, ID, 1, ()), sequence=1))


# ---------------------------------------------------------------------- the bytes of parts


def test_a_part_takes_no_more_requests_than_a_store_takes(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfer, "_CHUNK", 5 << 20)
    monkeypatch.setattr(_transfer, "_MOST_CHUNKS", 2)
    store, (manifest, path) = store_at(url), one_part(tmp_path, blocks=4)
    (part,), sizes = manifest.parts, {}

    def note(request: Request, forward: Callable[[], Answer]) -> Answer:
        if found := re.search(r"partNumber=(\d+)", request.path):
            sizes[int(found[1])] = len(request.body)
        return forward()

    proxy.meddle = note
    store.copy(path, 1, part.name, part, Pacing()).run()
    assert sizes == {1: 10 << 20, 2: part.size - (10 << 20)}
    assert store.check(1, part, threads=1) == []


def test_an_upload_that_the_store_has_forgotten_is_told_and_may_begin_anew(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfer, "_CHUNK", 5 << 20)
    store, (manifest, path) = store_at(url), one_part(tmp_path, blocks=3)
    (part,), forgotten, lock = manifest.parts, [], threading.Lock()

    def forget(request: Request, forward: Callable[[], Answer]) -> Answer:
        """As a rule of the bucket gives up what takes too long."""
        if request.method == "PUT":
            with lock:
                for upload in [] if forgotten else bucket.multipart_uploads.all():
                    upload.abort()
                    forgotten.append(upload.object_key)
        return forward()

    proxy.meddle, copy = forget, store.copy(path, 1, part.name, part, Pacing())
    with pytest.raises(UnreachableError, match=rf"{part.name}: the store has forgotten the upload"):
        copy.run()
    assert forgotten == [store.part_key(1, part.name)] and keys(bucket) == []
    copy.run()
    assert store.check(1, part, threads=1) == []


@pytest.mark.parametrize(
    ("status", "code", "blocks"),
    [(409, "OperationAborted", 1), (412, "PreconditionFailed", 1), (409, "OperationAborted", 3)],
)
def test_a_part_that_is_refused_for_another_change_is_told_and_drained_later(
    bucket: Any,
    proxy: Proxy,
    make: Any,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: str,
    blocks: int,
) -> None:
    monkeypatch.setattr(_transfer, "_CHUNK", 5 << 20)
    with make(level="fast") as ckpt:
        ckpt._background.submit_drain = lambda drain: None
        ckpt.save(state_of(1, blocks * BLOCK // 8), 1)

    def refuse(request: Request, forward: Callable[[], Answer]) -> Answer:
        if request.method == "PUT" and "/rank-" in request.path:
            return error(status, code)
        return forward()

    proxy.meddle, words = refuse, ["checkpoints", "drain", str(tmp_path / "fast"), url]
    assert main(words) == IoError.exit_code
    said = capsys.readouterr().err
    assert re.search(rf"cannot write {url}/step-0*1/rank-.*Error performing PUT", said), said
    assert kinds(bucket) == [] and uploads(bucket) == []
    proxy.meddle = None
    assert main(words) == 0
    with make("other") as ckpt:
        assert is_whole(ckpt.restore(), 1)


def test_a_forked_process_is_told_that_it_cannot_upload(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (manifest, path) = store_at(url), one_part(tmp_path)
    (part,), requests = manifest.parts, []

    def note(request: Request, forward: Callable[[], Answer]) -> Answer:
        requests.append(request)
        return forward()

    proxy.meddle = note
    monkeypatch.setattr(_object_client, "_client_process", os.getppid())
    with pytest.raises(IoError, match=r'start processes with "spawn"') as told:
        store.copy(path, 1, part.name, part, Pacing()).run()
    assert not isinstance(told.value, UnreachableError)  # to be tried again
    assert requests == []


class Looks(threading.Event):
    """Waits no time, and opens the gate at the third look."""

    def __init__(self, gate: _native.Gate) -> None:
        super().__init__()
        self.gate, self.count = gate, 0

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        if self.count == 3:
            self.gate.release()
        return False


def test_an_upload_waits_at_a_gate_until_it_opens_and_then_no_more(tmp_path: Path) -> None:
    store, (manifest, path), gate = in_memory(), one_part(tmp_path, blocks=3), _native.Gate()
    (part,), looks = manifest.parts, Looks(gate)
    gate.hold()
    copy = store.copy(path, 1, part.name, part, Pacing(gate=gate, gate_patience=3600.0))
    copy._urgent = looks
    copy.run()
    assert looks.count == 3 and not gate.held
    assert store.check(1, part, threads=1) == []


def test_a_part_is_read_to_memory_that_is_given(tmp_path: Path) -> None:
    store, (manifest, path) = in_memory(), one_part(tmp_path, blocks=4)
    (part,), data = manifest.parts, path.read_bytes()
    store.copy(path, 1, part.name, part, Pacing()).run()
    wrong = dataclasses.replace(part, crcs=(part.crcs[0], part.crcs[1], 0, part.crcs[3]))
    for first, count, expected in ((1, 2, []), (1, 3, []), (1, 2, [2])):
        file, progress = store.open(1, wrong if expected else part), _native.Progress()
        wanted = data[first * BLOCK : (first + count) * BLOCK]
        memory = np.full(len(wanted) + 100, 7, np.uint8)
        damaged = file.read(first, count, 4, progress, memory.ctypes.data)
        assert damaged == expected and progress.bytes == len(wanted)
        assert memory[: len(wanted)].tobytes() == wanted
        assert (memory[len(wanted) :] == 7).all() and not file.data.any()


@pytest.mark.parametrize("times", [2, 100])
def test_a_range_that_lacks_bytes_is_asked_for_again_and_is_no_damage(
    proxy: Proxy, url: str, tmp_path: Path, times: int
) -> None:
    store, (manifest, path) = store_at(url), one_part(tmp_path)
    (part,) = manifest.parts
    store.copy(path, 1, part.name, part, Pacing()).run()

    def shorten(number: int, answer: Answer) -> Answer:
        """It says the right range, and the wrong length."""
        body = answer.body[:-1] if number < times else answer.body
        return Answer(answer.status, answer.headers, body)

    proxy.ranges.clear()
    proxy.spoil, words = shorten, f"{part.name}: the answer has 99 bytes instead of 100"
    told = pytest.raises(UnreachableError, match=words)
    with told if times > 2 else contextlib.nullcontext():
        assert store.check(1, part, threads=1) == []
    assert len(proxy.ranges) == 3


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size", [0, 100, 2 * BLOCK, 3 * BLOCK])
def test_a_part_of_another_size_is_damaged_wherever_it_ends(
    bucket: Any, url: str, tmp_path: Path, size: int, threads: int
) -> None:
    store, (manifest, _) = store_at(url), one_part(tmp_path, blocks=3)
    (part,) = manifest.parts
    bucket.put_object(Key=store.part_key(1, part.name), Body=bytes(size))
    with pytest.raises(CorruptionError, match=rf"{part.name} has {size} bytes, not {part.size}"):
        store.check(1, part, threads=threads)


# ---------------------------------------------------------------------- the store alone


def in_memory(client: Any = None) -> ObjectStore:
    """Objects of this process, which no server has."""
    store = ObjectStore(Url("gs://bucket/run"), "durable")
    store._client = client or MemoryStore()
    return store


def completed(store: ObjectStore, tmp_path: Path) -> Manifest:
    manifest = under_way(store, tmp_path)
    store._put_manifest(manifest)
    return manifest


def test_a_step_of_objects_is_no_directory() -> None:
    with pytest.raises(UsageError, match="gs://bucket/run/step-000000000001 is not a directory"):
        in_memory().directory(1)


def test_what_the_environment_says_wrongly_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere")
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL='nowhere' in the environment is not a"):
        store_at("s3://bucket/run").steps()


def test_a_name_that_is_refused_and_never_shown_is_of_unknown_outcome(
    proxy: Proxy, url: str
) -> None:
    puts: list[str] = []

    def refuse(request: Request, forward: Callable[[], Answer]) -> Answer:
        if request.method == "PUT":
            puts.append(request.path)
            return error(412, "PreconditionFailed")
        return forward()

    proxy.meddle, store = refuse, store_at(url)
    with pytest.raises(UnknownOutcomeError, match="says that it is there, and does not show it"):
        store._create(store.key("name"), b"1")
    assert len(puts) == 3


@pytest.mark.parametrize("times", [1, 3])
def test_an_answer_that_lacks_bytes_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    store, get, answers = in_memory(), obstore.get, []

    def lacking(client: Any, key: str) -> Any:
        answers.append(key)
        result = get(client, key)
        data = bytes(result.bytes())
        left = data[:2] if len(answers) <= times else data
        return SimpleNamespace(bytes=lambda: left, meta=result.meta)

    store._create("a", b"123")
    monkeypatch.setattr(obstore, "get", lacking)
    told = pytest.raises(UnknownOutcomeError, match="the answer has 2 bytes instead of 3")
    with told if times == 3 else contextlib.nullcontext():
        assert store._read("a") == b"123"
    assert len(answers) == min(times + 1, 3)


def test_a_store_that_stops_at_what_is_gone_is_asked_to_remove_the_others(tmp_path: Path) -> None:
    store = in_memory(LocalStore(tmp_path))
    names = [f"{number:02d}" for number in range(50)]
    for name in names[25:]:
        store._create(name, b"")
    store._delete(names)
    assert os.listdir(tmp_path) == []
    store._delete([])


def test_a_manifest_that_goes_after_it_was_listed_is_none(tmp_path: Path) -> None:
    store = in_memory()
    manifest = completed(store, tmp_path)
    assert store.has(1, manifest.parts[0])
    assert not store.has(1, dataclasses.replace(manifest.parts[0], size=1))
    listed = store._list()
    store._delete(store.key(name) for name in listed)
    assert not store.has(1, manifest.parts[0])
    store._list = lambda *names: listed
    assert store.entries() == []


@pytest.mark.parametrize("whole", ["1" * 16, "2" * 16])
def test_of_two_manifests_of_a_save_the_one_with_parts_counts(tmp_path: Path, whole: str) -> None:
    store, (manifest, path) = in_memory(), one_part(tmp_path)
    (part,) = manifest.parts
    for token in ("1" * 16, "2" * 16):
        name = _part_name(part, ID, token)
        parts = (dataclasses.replace(part, name=name),)
        store._put_manifest(dataclasses.replace(manifest, parts=parts))
        if token == whole:
            copying(store, path)(part, name)
    (entry,) = store.saves(1)
    assert entry.manifest is not None and store.has_all(entry.manifest)


def test_a_note_of_a_branch_that_goes_after_it_was_listed_is_passed_over() -> None:
    store = in_memory()
    for number in (1, 2):
        store.note_branch(Branch(number, (), number, ID))
    listed = store._list(".branches")
    store._list = lambda *names: listed
    for number in (2, 1):
        assert store.branch() == Branch(number, (), number, ID)
        store._delete(store.key(".branches", n) for n in listed if int(n[:20]) == number)
    assert store.branch() is None


@pytest.mark.parametrize("note", [b"?", b"{}", b"[]", b'{"first": null}', None])
def test_an_owners_note_that_says_nothing_of_its_numbers_keeps_nobody_out(
    note: bytes | None,
) -> None:
    store = in_memory()
    if note is None:  # only a list shows it
        names = store._list
        store._list = lambda *below: {**names(*below), "000000000001.json": 1}
    else:
        store._create("run/.owners/000000000001.json", note)
    store.own()
    assert (store._owner, store._first) == (2, STRIDE)
    store.check_owned()


def test_a_later_owner_that_cannot_be_read_is_another_job() -> None:
    store = in_memory()
    store.own()
    store._create(store._owner_key(2), b"?")
    with pytest.raises(PeerError, match="was taken over by another job, which began later"):
        store.check_owned()


@pytest.mark.parametrize("away", [False, True])
def test_a_job_ends_although_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    store = in_memory()
    store.own()
    if away:
        store._create = Raising(UnreachableError("away"))
    monkeypatch.setattr(threading.Thread, "start", Raising(RuntimeError("can't start new thread")))
    store.disown()
    assert (store.other_owner() == "") == (not away)
    with pytest.raises(PeerError, match="the checkpointer is closed"):
        store.check_owned()


@pytest.mark.parametrize("arrived", [False, True])
def test_numbers_that_were_asked_for_in_vain_are_taken_before_the_next_change(
    arrived: bool,
) -> None:
    store = in_memory()
    store.own()
    create = store._create

    def fail(key: str, data: bytes) -> bool:
        store._create = create
        if arrived:
            create(key, data)
        raise UnknownOutcomeError("away")

    store._create = fail
    with pytest.raises(UnknownOutcomeError):
        store.note_sequence(9 * STRIDE)
    assert (store._owner, store._first) == (1, STRIDE)
    store.check_owned()
    assert (store._owner, store._first) == (2, 9 * STRIDE) == store._last_owner()


def test_uploads_are_asked_for_where_there_can_be_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert store_at("s3://bucket/run")._uploads() == []
    clients: list[str] = []
    monkeypatch.setitem(sys.modules, "boto3", SimpleNamespace(client=clients.append))
    assert in_memory()._uploads() == []
    assert clients == [] and caplog.text == ""


def is_list_of_uploads(request: Request) -> bool:
    query = request.path.partition("?")[2]
    return request.method == "GET" and "uploads" in re.split("[=&]", query)


# The bytes of an upload that is interrupted, and names like it that are not of this store.
_INTERRUPTED = f"step-000000000001/rank-00000.{ID}.{'a' * 16}.safetensors"
_OTHERS = [f"runs/one/other/{_INTERRUPTED}", "runs/one/step-000000000001/mine.txt", _INTERRUPTED]


def test_uploads_of_others_stay_where_a_list_takes_no_prefix(
    bucket: Any, proxy: Proxy, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    for key in (f"runs/one/{_INTERRUPTED}", *_OTHERS):
        bucket.Object(key).initiate_multipart_upload()
    lists: list[str] = []

    def find_none(request: Request, forward: Callable[[], Answer]) -> Answer:
        """As MinIO does."""
        if is_list_of_uploads(request):
            lists.append(request.path)
            if "prefix=" in request.path:
                body = b"<ListMultipartUploadsResult></ListMultipartUploadsResult>"
                return Answer(200, {"Content-Type": "application/xml"}, body)
        return forward()

    store, proxy.meddle = store_at(url), find_none
    store.own()
    store.clean()
    assert sorted(uploads(bucket)) == sorted(_OTHERS) and caplog.text == ""
    assert ["prefix=" in path for path in lists[:2]] == [True, False]


@pytest.mark.parametrize("denied", ["list", "remove"])
def test_uploads_that_cannot_be_given_up_are_told(
    bucket: Any, proxy: Proxy, url: str, caplog: pytest.LogCaptureFixture, denied: str
) -> None:
    keys_of = [f"runs/one/{_INTERRUPTED}", f"runs/one/{_INTERRUPTED.replace('1/', '2/')}"]
    for key in keys_of:
        bucket.Object(key).initiate_multipart_upload()

    def deny(request: Request, forward: Callable[[], Answer]) -> Answer:
        removal = request.method == "DELETE" and _step(1) in request.path
        if removal if denied == "remove" else is_list_of_uploads(request):
            return error(403, "AccessDenied")
        return forward()

    store, proxy.meddle = store_at(url), deny
    store.own()
    store.clean()
    proxy.meddle = None
    told = "an upload stays" if denied == "remove" else "uploads that were interrupted stay"
    assert f"{told} in {url}: " in caplog.text and "AccessDenied" in caplog.text
    assert uploads(bucket) == (keys_of[:1] if denied == "remove" else keys_of)


def test_a_save_whose_name_another_thing_has_is_not_acknowledged(tmp_path: Path) -> None:
    store = in_memory()
    store.own()
    manifest = under_way(store, tmp_path)
    token = manifest.parts[0].name.split(".")[2]
    key = store.key(_step(1), f"manifest-{ID}.{token}.json")
    store._create(key, b"another")
    with pytest.raises(IoError, match="is there, and is another one"):
        store.publish(manifest)
    assert store._read(key) == b"another" and not store._uncertain


def test_what_is_not_owned_is_not_adopted(tmp_path: Path) -> None:
    client = MemoryStore()
    manifest = completed(in_memory(client), tmp_path)
    store = in_memory(client)
    there = store._list(_step(1))
    store.adopt(manifest)
    store.own()
    store.disown()
    store.adopt(manifest)
    assert store._list(_step(1)) == there


def test_a_save_stays_whose_name_of_this_job_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MemoryStore()
    earlier, store = in_memory(client), in_memory(client)
    manifest = completed(earlier, tmp_path)
    store.own()
    monkeypatch.setattr(_objects.secrets, "token_hex", lambda size: "0" * 2 * size)
    store._create(store.key(_step(1), f"manifest-{ID}.{'0' * 16}.json"), b'{"given up": true}')
    store.adopt(manifest)
    assert store.manifests() == [manifest]


def test_a_removal_that_attempts_overtake_again_and_again_is_not_told_as_done(
    tmp_path: Path,
) -> None:
    """Earlier jobs complete one attempt after the other, each before it is given up."""
    client = MemoryStore()
    earlier, store = in_memory(client), in_memory(client)
    attempts, create, late = [under_way(earlier, tmp_path)], store._create, []
    store.own()

    def create_late(key: str, data: bytes) -> bool:
        if len(late) < 5:
            earlier._put_manifest(attempts.pop())
            attempts.append(under_way(earlier, tmp_path))
            late.append(key)
        return create(key, data)

    store._create = create_late
    with pytest.raises(IoError, match=r"step-000000000001 cannot be removed: other jobs completed"):
        store.remove(1, ID)
    assert len(late) == 3 and [m.id for m in store.manifests()] == [ID]
    store._create = create
    store.remove(1, ID)
    assert store._sizes(1) == {}


def test_a_part_that_a_manifest_names_is_not_discarded(tmp_path: Path) -> None:
    store = in_memory()
    (named,), (other,) = completed(store, tmp_path).parts, under_way(store, tmp_path).parts
    for part in (named, other):
        store.discard(1, part.name)
    assert store.has(1, named) and not store.has(1, other)


def test_a_job_of_one_rank_leaves_no_decision(tmp_path: Path) -> None:
    store = in_memory()
    (manifest, _), part = one_part(tmp_path), under_way(store, tmp_path).parts[0]
    assert store.commit(manifest, 0, part, timeout=20) == ""
    assert [m.id for m in store.manifests()] == [ID]
    assert not any("decision" in name for name in store._sizes(1))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"?", None),
        (b"[]", None),
        (b"{}", None),
        (b'{"complete": true, "certain": true, "reason": ""}', None),
        (b'{"complete": false, "certain": false, "reason": "away"}', None),
        (b'{"complete": false, "certain": true, "reason": "the disk is full"}', "the disk is full"),
    ],
)
def test_only_a_decision_that_is_certain_gives_a_save_up(said: bytes, reason: str | None) -> None:
    store, manifest = in_memory(), Manifest(1, ID, 2, ())
    assert store.aborted(manifest) is None
    store._create(store._decision_key(manifest), said)
    assert store.aborted(manifest) == reason
    store._read = Raising(UnreachableError("away"))
    assert store.aborted(manifest) is None
