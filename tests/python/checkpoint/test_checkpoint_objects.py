"""Checkpoints on an object store: what was acknowledged is there, whatever the store does."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import object_rank
import prefork
import pytest
from object_server import Answer, Proxy, Request, cut, error
from test_checkpointer import World

import nostall
from nostall import Keep, _native
from nostall.checkpoint import _upload
from nostall.checkpoint._drain import copy_all
from nostall.checkpoint._files import ConflictError, Pacing, UnknownOutcomeError, UnreachableError
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._objects import ObjectFiles
from nostall.checkpoint._store import Store, part_name
from nostall.cli import main
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
def make(url: str, tmp_path: Path) -> Callable[..., nostall.Checkpointer]:
    def made(fast: str = "fast", **options: Any) -> nostall.Checkpointer:
        return nostall.Checkpointer(tmp_path / fast, url, **{"priority": "normal", **options})

    return made


def keys(bucket: Any) -> list[str]:
    """Of the objects in steps, below the URL."""
    names = [o.key.removeprefix("runs/one/") for o in bucket.objects.all()]
    return [name for name in names if name.startswith("step-")]


def steps_on(url: str) -> list[int]:
    return [m.step for m in Store(url, "durable").manifests()]


def uploads(bucket: Any) -> list[str]:
    return [upload.object_key for upload in bucket.multipart_uploads.all()]


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and "/manifest" in request.path


# ---------------------------------------------------------------------- going through


def test_saves_are_uploaded_and_restored_without_the_fast_directory(
    bucket: Any, proxy: Proxy, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_upload, "_CHUNK", 5 << 20)
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
    id = saved.id
    assert keys(bucket)[2:] == [
        "step-000000000003/manifest.json", f"step-000000000003/rank-00000.{id}.safetensors"
    ]  # fmt: skip
    assert len(keys(bucket)) == 4 and uploads(bucket) == []
    progress: list[tuple[int, int]] = []
    with make("other") as ckpt:
        into = {"w": np.zeros(4_000_000), "step": None}
        found = ckpt.restore(into=into, progress=lambda *told: progress.append(told))
        assert is_whole(found, 3) and (into["w"] == 3).all()
        assert progress[-1] == (found.manifest.size, found.manifest.size)
        assert is_whole(ckpt.restore(2), 2)


def test_a_rate_is_kept_until_somebody_waits(url: str, tmp_path: Path) -> None:
    files, (manifest, path) = ObjectFiles(url), one_part(tmp_path, blocks=3)
    (part,) = manifest.parts
    began = time.monotonic()
    files.copy(path, 1, part.name, part, Pacing(rate=16 * BLOCK)).run()
    assert time.monotonic() - began >= 2 / 16  # the third block waits for two
    slow = files.copy(path, 2, part.name, part, Pacing(rate=1))
    running = threading.Thread(target=slow.run)
    running.start()
    slow.hurry()
    running.join(60)
    assert files.check(2, part, threads=2) == []
    pacing = Pacing(gate=_native.Gate(), gate_patience=0.05, considerate=True)
    with _native.Activity():  # a loader reads: for a limited time
        files.copy(path, 3, part.name, part, pacing).run()
    assert files.check(3, part, threads=2) == []


def test_retention_and_going_back(bucket: Any, make: Any, url: str) -> None:
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
        # Both saves of step 6 are there: that of the superseded branch under a name of its own.
        assert steps_on(url) == [4, 5, 6, 6, 7]
        assert len([key for key in keys(bucket) if "6/manifest-" in key]) == 1
        assert ckpt.restore(6).state["step"] == 60


def test_a_step_again_replaces_the_save_before(bucket: Any, make: Any) -> None:
    with make(level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        saved = ckpt.save({"w": np.full(1000, 1.0), "step": "again"}, 1)
        ckpt.wait(60)
    assert keys(bucket) == [
        "step-000000000001/manifest.json", f"step-000000000001/rank-00000.{saved.id}.safetensors"
    ]  # fmt: skip


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
    assert main(["checkpoints", "drain", fast, url]) == 0
    assert steps_on(url) == [1, 3]


# ---------------------------------------------------------------------- processes


class Ranks:
    """Processes of one job after another, with a fast directory that all share."""

    def __init__(self, tmp_path: Path, url: str, world: int) -> None:
        self.home, self.url, self.world, self.jobs = tmp_path, url, world, 0

    def start(self, steps: list[int], **more: Any) -> list[prefork.Process]:
        self.jobs += 1
        orders = {"fast": str(self.home / "fast"), "durable": self.url, "world": self.world}
        orders |= {"steps": steps, "size": 1000, "level": "durable", "hold": False, **more}
        meeting = {"NOSTALL_RENDEZVOUS": str(self.home / f"rendezvous{self.jobs}")}
        return [
            prefork.Process(
                [object_rank.__file__, json.dumps({**orders, "rank": rank})],
                stdout=prefork.PIPE,
                stderr=prefork.PIPE,
                env={**os.environ, **meeting},
            )
            for rank in range(self.world)
        ]

    def run(self, steps: list[int], **more: Any) -> list[Any]:
        """What each rank has restored."""
        ranks = self.start(steps, **more)
        outputs = [rank.communicate(timeout=100) for rank in ranks]
        for rank, (_, words) in zip(ranks, outputs, strict=True):
            assert rank.returncode == 0, words
        return [json.loads(out.splitlines()[0]) for out, _ in outputs]


@pytest.mark.multi
def test_two_ranks_complete_one_checkpoint(bucket: Any, url: str, tmp_path: Path) -> None:
    job = Ranks(tmp_path, url, 2)
    assert job.run([1, 2]) == [[None, None, True]] * 2
    names = [key.rpartition("/")[2].split(".")[0] for key in keys(bucket)]
    assert names == ["manifest", "rank-00000", "rank-00001"] * 2  # no word is left
    (tmp_path / "fast").rename(tmp_path / "gone")
    assert job.run([3]) == [[2, "durable", True]] * 2
    assert steps_on(url) == [1, 2, 3]


@pytest.mark.multi
@pytest.mark.parametrize("kept", [False, True])
def test_a_process_that_is_killed_in_mid_upload(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path, kept: bool
) -> None:
    job = Ranks(tmp_path, url, 1)
    arrived, go_on = threading.Event(), threading.Event()

    def hold(request: Request, forward: Callable[[], Answer]) -> Answer:
        if "partNumber=2" in request.path:
            arrived.set()
            go_on.wait(60)
        return forward()

    assert job.run([1]) == [[None, None, True]]
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
    found = job.run([])
    assert found == [[2, "fast", True]] if kept else [[1, "durable", True]]
    assert uploads(bucket) == []
    assert steps_on(url) == ([1, 2] if kept else [1])
    # Of the step that was not complete nothing is left, or all of it is.
    assert len(keys(bucket)) == (4 if kept else 2)


def test_parts_of_other_nodes_are_drained_when_the_store_is_back(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    def work(rank: int, gather: Any, home: str, away: bool) -> Any:
        with nostall.Checkpointer(
            tmp_path / f"{home}{rank}", url, rank=rank, world_size=2, gather=gather, job="test",
            max_failures=100, timeout=20, priority="normal",
        ) as ckpt:  # fmt: skip
            if not away:
                ckpt.wait(60)
                found = ckpt.restore()
                return found.step, found.tier, bool((found.state["w"] == 10 + rank).all())
            gather(b"")
            proxy.meddle = lambda *_: error(503, "SlowDown")
            gather(b"")
            ckpt.save({"w": np.full(1000, 10 + rank)}, 1, level="fast")
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


# ---------------------------------------------------------------------- one writer


def test_a_job_that_begins_later_takes_the_store(make: Any, url: str) -> None:
    first = make("one", max_failures=100)
    first.save(state_of(1), 1, level="durable")
    with make("two", level="durable") as second:
        assert is_whole(second.restore(), 1)
        sentence = rf"taken over by process {os.getpid()} on .*store of its own"
        with pytest.raises(IoError, match=sentence):
            first.save(state_of(5), 5, level="durable")
        second.save(state_of(2), 2)
        first._begin_branch(second.durable.manifests()[0], True)  # a warning
    first.close()
    assert steps_on(url) == [1, 2]


def one_part(tmp_path: Path, step: int = 1, blocks: int = 1) -> tuple[Manifest, Path]:
    data = np.random.default_rng(step).bytes((blocks - 1) * BLOCK + 100)
    path = tmp_path / f"part{step}"
    path.write_bytes(data)
    crcs = tuple(_native.crc32c(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))
    return Manifest(step, ID, 1, (Part(0, part_name(0, ID), len(data), crcs),), sequence=1), path


def test_of_two_writers_of_a_step_one_wins(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    store, (manifest, _) = Store(url, "durable"), one_part(tmp_path)
    other = dataclasses.replace(manifest, id="bbbbbbbb-000001", sequence=2)

    def be_first(request: Request, forward: Callable[[], Answer]) -> Answer:
        if is_manifest(request):
            proxy.meddle = None
            bucket.put_object(Key="runs/one/step-000000000001/manifest.json", Body=other.to_bytes())
        return forward()

    proxy.meddle = be_first
    with pytest.raises(ConflictError, match=r"manifest\.json was written by another job meanwhile"):
        store.publish(manifest)
    assert store.manifests() == [other]
    # The same where both replace an earlier one.
    third = dataclasses.replace(manifest, id="cccccccc-000001", sequence=3)
    proxy.meddle = None
    store.publish(third)
    other = dataclasses.replace(other, sequence=4)
    proxy.meddle = be_first
    with pytest.raises(ConflictError):
        store.publish(dataclasses.replace(manifest, sequence=5))
    assert store.manifests()[0] == other


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


def test_a_commit_of_which_nothing_is_known_keeps_its_part(
    bucket: Any, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    store, (manifest, path) = Store(url, "durable"), one_part(tmp_path)

    def silent(request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = error(503, "SlowDown")
        answer.drop = is_manifest(request)
        return answer if answer.drop else forward()

    def copy(part: Part, name: str) -> None:
        store.files.copy(path, 1, name, part, Pacing()).run()

    proxy.meddle = silent
    with pytest.raises(UnknownOutcomeError):
        copy_all(store, manifest, copy)
    assert len(keys(bucket)) == 1  # the manifest may still come
    proxy.meddle = None
    copy_all(store, manifest, copy)
    assert store.manifests() == [manifest] and store.has_all(manifest)


def test_a_store_without_conditional_writes_is_refused(proxy: Proxy, make: Any) -> None:
    def ignore(request: Request, forward: Callable[[], Answer]) -> Answer:
        for name in [n for n in request.headers if n.lower().startswith("if-")]:
            del request.headers[name]
        return forward()

    proxy.meddle = ignore
    with pytest.raises(UsageError, match=r"has no conditional writes \(If-None-Match\)"):
        make()


def test_a_word_is_taken_once(url: str) -> None:
    files = ObjectFiles(url)

    def names(rank: int) -> tuple[str, str]:
        return f"part-0000{rank}.{ID}.json", f"taken-0000{rank}.{ID}.json"

    with pytest.raises(FileNotFoundError):
        files.take(1, *names(0))
    files.write(1, names(0)[0], b"{}")
    assert files.take(1, *names(0)) == b"{}" == files.take(1, *names(0))
    assert not files.withdraw(1, *names(0), left=True)  # rank 0 has it
    files.unlink(1, [names(0)[1]])  # and has completed the checkpoint
    assert not files.withdraw(1, *names(0), left=True)
    assert files.names(1) == []
    files.write(1, names(1)[0], b"{}")
    assert files.withdraw(1, *names(1), left=True)
    assert b"failed" in files.take(1, *names(1))
    assert files.withdraw(1, *names(2), left=False)
    files.write(1, names(2)[0], b"{}")  # it comes late
    assert b"failed" in files.take(1, *names(2))


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


def test_answers_that_are_cut_are_not_taken_for_damage(proxy: Proxy, make: Any) -> None:
    with make(level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        ckpt.wait(60)
    with make("other") as ckpt:
        proxy.spoil = lambda number, answer: cut(answer, 100) if number < 2 else answer
        assert is_whole(ckpt.restore(), 2)
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
    assert "passing over a checkpoint" in caplog.text and key in caplog.text


def test_what_the_fast_storage_damaged_is_not_uploaded(
    bucket: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_upload, "_CHUNK", 5 << 20)
    files, (manifest, path) = ObjectFiles(url), one_part(tmp_path, blocks=4)
    (part,) = manifest.parts
    with path.open("r+b") as file:
        file.seek(3 * BLOCK)
        file.write(b"?")
    with pytest.raises(CorruptionError, match=r"part1 is damaged: bytes 12582912 to 12583012"):
        files.copy(path, 1, part.name, part, Pacing()).run()
    stopped = files.copy(path, 1, part.name, part, Pacing(rate=1))
    stopped.stop()
    with pytest.raises(StoppedError):
        stopped.run()
    with pytest.raises(IoError, match=r"cannot read .*nothing: No such file"):
        files.copy(tmp_path / "nothing", 1, part.name, part, Pacing()).run()
    assert files.names(1) == [] and uploads(bucket) == []


def test_places_that_cannot_be_are_refused(tmp_path: Path, url: str) -> None:
    from nostall.torch.checkpoint import StorageWriter

    for arguments, sentence in (
        ({"durable": url}, "needs fast=, a directory from which"),
        ({"fast": url}, "is no directory: an object store is for durable="),
        ({"fast": tmp_path, "durable": "http://host/run"}, "is not a place for checkpoints"),
        ({"fast": tmp_path, "durable": "s3://"}, "is not a place for checkpoints"),
    ):
        with pytest.raises(UsageError, match=sentence):
            nostall.Checkpointer(**arguments)
    with pytest.raises(UsageError, match="is saved to a directory here"):
        StorageWriter(url)
    with pytest.raises(PeerError, match="taken over by another job"):
        files = ObjectFiles(url)
        files.own()
        files.unlink(None, [".owner"])
        files.check_owned()
