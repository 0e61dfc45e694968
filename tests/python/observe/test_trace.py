"""Recording: what lands in the files, which processes record, and what a killed job leaves."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prefork
import pytest
from loader_ranks import own_job

import nostall
from nostall import trace
from nostall.errors import CorruptionError, Error, IoError, UsageError
from nostall.loader.transforms import RandomResizedCrop, ToTensor
from nostall.observe import metrics
from nostall.observe.report import _digest as digest
from nostall.observe.report import _run as runs
from nostall.observe.timelines._stream import Source


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    trace.stop()


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return list(json.load(file)["traceEvents"])


def job(images: Path, **more: Any) -> nostall.DataLoader:
    return nostall.DataLoader(
        nostall.ImageFolder(images, index=False), 4, epochs=2, output="numpy",
        transforms=[RandomResizedCrop(32), ToTensor()], **more,
    )  # fmt: skip


def test_a_loader_records_waits_reads_and_decodes(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "run"
    monkeypatch.setenv("NOSTALL_TRACE", str(home))
    with job(image_folder, tiers=["ram:64MiB"]) as loader:
        batches = 0
        for epoch in loader.epochs():
            for _ in epoch:
                batches += 1
                with trace.span("forward"):
                    time.sleep(0.002)
        stats = loader.stats()
    assert trace.enabled()
    assert trace.stop() is not None
    rows = events(home / "rank0.trace.json.gz")
    waits = [e for e in rows if e["name"] == "wait for batch"]
    assert len(waits) == batches
    assert [w["args"]["epoch"] for w in waits] == stats.batches.epoch
    assert [w["args"]["source"] for w in waits] == stats.batches.source
    assert [w["args"]["ram"] for w in waits] == stats.batches.ram
    reads = [e for e in rows if e["name"] == "read source"]
    assert sum(e["args"]["samples"] for e in reads) == sum(
        e.origins["source"].samples for e in stats.epochs
    )
    assert sum(e["args"]["bytes"] for e in reads) == stats.source_bytes
    decodes = [e for e in rows if e["name"] == "decode"]
    assert len(decodes) == stats.samples
    forward = [e for e in rows if e["name"] == "forward"]
    assert len(forward) == batches
    assert all(e["cat"] == "compute" and e["dur"] >= 2000 for e in forward)
    # One clock: waits and phases take turns on the main thread.
    main = sorted([*waits, *forward], key=lambda e: e["ts"])
    assert all(b["ts"] >= a["ts"] + a["dur"] - 0.001 for a, b in itertools.pairwise(main))
    kept = json.loads((home / "rank0.0.run.json").read_text())
    assert kept["stats"]["source_bytes"] == stats.source_bytes
    assert kept["samples"] == len(loader.dataset)


def test_the_record_says_which_tiers_there_are_and_what_memory_is_left(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(nostall.Tier):
        def put(self, key: str, data: bytes) -> None:
            pass

        def get(self, key: str) -> None:
            pass

    tiers = ["ram:1MiB", f"{tmp_path / 'a'}:1MiB", f"{tmp_path / 'b'}:1MiB:keep", Own(1 << 20)]
    limits = [SimpleNamespace(left=5000, most=9000), SimpleNamespace(left=3000, most=7000)]
    with job(image_folder, tiers=tiers) as loader, monkeypatch.context() as patched:
        patched.setattr("nostall._native.memory_limits", lambda: limits)
        found = trace.describe(loader)
    assert [row[0] for row in found["tiers"]] == ["ram", "file", "kept file", "own file"]
    assert found["memory_left"] == 3000


def test_nothing_is_recorded_unless_asked(image_folder: Path, tmp_path: Path) -> None:
    with job(image_folder, tiers=[]) as loader:
        for _ in loader:
            with trace.span("forward"):
                pass
    assert not trace.enabled()
    assert trace.stop() is None
    assert not list(tmp_path.iterdir())


def test_two_processes_of_one_rank_keep_their_own_files(tmp_path: Path) -> None:
    home = tmp_path / "run"
    trace.start(home, rank=0)
    code = (
        "import sys\nfrom nostall import trace as t\nt.start(sys.argv[1], rank=0)\n"
        "with t.span('x'):\n  pass\n"
    )
    done = prefork.run(["-c", code, home])
    assert done.returncode == 0, done.stderr
    with trace.span("mine"):
        pass
    trace.stop()
    files = sorted(home.glob("rank0*.trace.json.gz"))
    assert len(files) == 2
    assert {e["name"] for f in files for e in events(f) if e["ph"] == "X"} == {"mine", "x"}


def test_a_loader_whose_state_is_loaded_while_it_runs_is_recorded_once(
    image_folder: Path, tmp_path: Path
) -> None:
    trace.start(tmp_path, rank=0)
    with job(image_folder) as loader:
        next(iter(loader))
        state = loader.state_dict()
        (path,) = tmp_path.glob("*.run.json")
        began = json.loads(path.read_text())["began"]
        loader.load_state_dict(state)
        samples = 4 + sum(len(batch[0]) for epoch in loader.epochs() for batch in epoch)
    trace.stop()
    assert list(tmp_path.glob("*.run.json")) == [path]
    kept = json.loads(path.read_text())
    assert sum(e["samples"] for e in kept["stats"]["epochs"]) == samples
    assert kept["began"] == began


def test_a_process_records_under_its_own_rank_though_a_loader_of_another_begins(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_TRACE", str(tmp_path))
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
    with job(image_folder, **alone) as loader:
        next(iter(loader))
    trace.stop()
    monkeypatch.delenv("NOSTALL_TRACE")
    (path,) = tmp_path.glob("*.run.json")
    assert path.name == "rank1.0.run.json"
    assert json.loads(path.read_text())["stats"]["rank"] == 0


def test_memory_over_time_is_not_written_with_all_else(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LIVE_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "HELD_SECONDS", 3600.0)  # ten may pass between two batches
    trace.start(tmp_path, rank=0)
    with job(image_folder) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        assert "held" not in json.loads((tmp_path / "rank0.0.live.json").read_text())
        held = json.loads((tmp_path / "rank0.0.held.json").read_text())
        assert [len(column) for column in held.values()] == [1, 1, 1]
        assert {type(x) for x in held["own"] + held["shared"]} == {int}
        # As if they had passed.
        (entry,) = trace._run.entries if trace._run is not None else []
        entry.live._next_held = 0.0
        next(batches)
        held = json.loads((tmp_path / "rank0.0.held.json").read_text())
        assert [len(column) for column in held.values()] == [4, 4, 4]
    trace.stop()
    kept = json.loads((tmp_path / "rank0.0.run.json").read_text())
    assert len(kept["held"]["time"]) == 5


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    trace.start(tmp_path, rank=0)
    child = os.fork()
    if child == 0:
        with trace.span("child"):
            pass
        os._exit(0 if not trace.enabled() and trace.stop() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    with trace.span("parent"):
        pass
    trace.stop()
    names = {e["name"] for e in events(tmp_path / "rank0.trace.json.gz") if e["ph"] == "X"}
    assert names == {"parent"}


def train_in_child(home: Path, images: Path) -> None:
    """Beside a thread for which the process waits, and which goes on once all else has ended."""
    trace.start(home, rank=0)
    at_end = threading.Event()

    def later() -> None:
        at_end.wait()
        with trace.span("later"):
            pass

    threading.Thread(target=later).start()
    util.Finalize(None, at_end.set, exitpriority=-2)
    with job(images, tiers=[]) as loader:
        for _ in loader:
            pass


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_of_multiprocessing_leaves_its_whole_trace(
    method: str, image_folder: Path, tmp_path: Path
) -> None:
    start = multiprocessing.get_context(method)
    process = start.Process(target=train_in_child, args=(tmp_path, image_folder))
    process.start()
    process.join()
    assert process.exitcode == 0
    names = [e["name"] for e in events(tmp_path / "rank0.trace.json.gz")]
    assert names.count("get batch") == 16 and "later" in names and names[-1] == "recorded"


def test_loaders_that_run_already_are_recorded(image_folder: Path, tmp_path: Path) -> None:
    with job(image_folder, tiers=[]) as loader, job(image_folder, tiers=[]) as ended:
        batches = iter(loader)
        next(batches), next(iter(ended))
        ended.close()
        trace.start(tmp_path, rank=0)
        next(batches)
        assert json.loads((tmp_path / "rank0.0.live.json").read_text())["samples"] == 8
    trace.stop()
    (kept,) = tmp_path.glob("*.run.json")
    found = json.loads(kept.read_text())
    assert found["name"] == loader.name
    assert found["stats"]["epochs"][0]["batches"] == 2


def test_a_loader_that_cannot_be_described_trains(
    image_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(_: object) -> dict[str, Any]:
        raise IndexError("no word")

    monkeypatch.setenv("NOSTALL_TRACE", str(tmp_path))
    monkeypatch.setattr(trace, "describe", fails)
    with job(image_folder, tiers=[]) as loader:
        next(iter(loader))
    assert caplog.messages == [f"{loader.name} is not recorded: IndexError('no word')"]
    trace.stop()
    assert not list(tmp_path.glob("*.run.json"))


def test_loaders_that_begin_at_once_start_one_recording(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, free = trace._claim, []

    def claims(home: Path, rank: int) -> str:
        # As another loader would, in its thread.
        other = threading.Thread(target=lambda: free.append(trace._lock.acquire(blocking=False)))
        other.start()
        other.join()
        return claim(home, rank)

    monkeypatch.setenv("NOSTALL_TRACE", str(tmp_path))
    monkeypatch.setattr(trace, "_claim", claims)
    with job(image_folder, tiers=[]) as loader:
        next(iter(loader))
    assert free == [False]


def test_a_number_of_a_process_that_is_given_again_records(
    image_folder: Path, tmp_path: Path
) -> None:
    # As when a container starts again, in which it has the same number each time.
    for _ in range(4):
        trace.start(tmp_path, rank=0)
        with job(image_folder, tiers=[]) as loader:
            next(iter(loader))
        trace.stop()
    own = f"rank0.{os.getpid()}"
    stems = ["rank0", own, f"{own}.2", f"{own}.3"]
    assert sorted(tmp_path.glob("*.trace.json.gz")) == sorted(
        tmp_path / f"{stem}.trace.json.gz" for stem in stems
    )
    # Each trace with its own loader.
    run = runs.read(tmp_path)
    assert [len(rank.loaders) for rank in run.ranks] == [1]
    assert any("holds 4 attempts" in note for note in run.notes)


def so_far(file: Path) -> bytes:
    """What of a compressed file that is being written can be read."""
    return zlib.decompressobj(31).decompress(file.read_bytes()) if file.exists() else b""


def test_a_killed_job_leaves_all_but_its_last_second(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom nostall import trace as t\nt.start(sys.argv[1], rank=0)\n"
        "with t.span('early', 'data'):\n  pass\n"
        "while True:\n  with t.span('late'):\n    time.sleep(0.001)\n"
    )
    process = prefork.Process(["-c", code, tmp_path])
    file, deadline = tmp_path / "rank0.trace.json.gz", time.monotonic() + 60
    try:
        while b'"early"' not in so_far(file):
            assert time.monotonic() < deadline, "nothing is written while it runs"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    got = digest.read(Source(file))
    assert len(got.of("data", "early").begin) == 1
    assert any("cut off" in n for n in got.notes)


def test_checkpoints_and_collectives_are_recorded(tmp_path: Path) -> None:
    from nostall.checkpoint import Checkpointer
    from nostall.collective import Communicator
    from nostall.sync import GradientReducer

    trace.start(tmp_path / "run", rank=0)
    with Checkpointer(durable=tmp_path / "ckpt") as checkpointer:
        checkpointer.save({"w": np.ones(1000)}, 1)
        checkpointer.wait()
    with Communicator(rank=0, size=1, job=own_job("communicator")) as node:
        node.allreduce(np.ones(10))
        node.allgather(np.ones(10))
        node.barrier()
    GradientReducer({"x": np.zeros(2)})({"x": np.ones(2)})
    trace.stop()
    rows = [e for e in events(tmp_path / "run" / "rank0.trace.json.gz") if e["ph"] == "X"]
    found = {(e["cat"], e["name"]): e.get("args") for e in rows}
    assert ("checkpoint", "save") in found
    assert ("background", "write checkpoint") in found
    assert ("background", "resume point, durable") in found
    assert found["peers", "allreduce"] == {"count": 10}
    assert found["peers", "allgather"] == {"count": 80}
    assert ("peers", "barrier") in found
    assert ("peers", "wait for gradients") in found


def test_the_wait_for_one_gradient_is_recorded(tmp_path: Path) -> None:
    from nostall.sync import Ranks, SyncOptions, make_engine

    trace.start(tmp_path, rank=0)
    ranks = Ranks(0, 1, own_job("engine"))
    engine, _ = make_engine([("a", 1, "float32")], SyncOptions(), ranks)
    engine.all_gather(b"")
    threading.Timer(0.01, engine.stop).start()
    with pytest.raises(Error):
        engine.wait_for(0)  # it does not come
    trace.stop()
    got = digest.read(Source(tmp_path / "rank0.trace.json.gz")).category("peers")
    assert {name: len(s.begin) for name, s in got.items()} == {
        "exchange values": 1,
        "wait for gradients": 1,
    }


def test_mistakes_are_told(tmp_path: Path) -> None:
    trace.start(tmp_path / "a", rank=0)
    with pytest.raises(UsageError, match="records already"):
        trace.start(tmp_path / "b", rank=0)
    trace.stop()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(IoError, match="give another directory"):
        trace.start(file / "below", rank=0)
    with pytest.raises(CorruptionError):
        digest.read(Source(file))


def spans(*rows: tuple[float, float]) -> digest.Spans:
    begin, end = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows], float)
    return digest.Spans(begin, end, np.ones(len(rows)), np.ones(len(rows)))


def test_a_wait_is_blamed_on_what_was_done_meanwhile() -> None:
    made = digest.Digest(
        "t", 0, 1, "h", 0.0,
        {
            ("data", "wait for batch"): spans((0, 10), (20, 30), (40, 41)),
            # First wait: one of two threads decodes; two reads of the source to one of a peer.
            ("data", "decode"): spans((0, 10), (20, 30), (20, 30), (50, 60)),
            ("data", "read source"): spans((0, 10), (0, 10), (100, 110)),
            ("data", "fetch from peers"): spans((0, 10)),
        },
        0,
    )  # fmt: skip
    causes = made.causes(threads=2)
    assert causes["decode"] == pytest.approx(5 + 10)
    assert causes["source"] == pytest.approx(5 * 2 / 3)
    assert causes["peer"] == pytest.approx(5 / 3)
    assert causes["other"] == pytest.approx(1)
    assert sum(causes.values()) == pytest.approx(21)
    assert made.of("data", "read source").merged().seconds == pytest.approx(20)


def test_a_wait_for_callables_is_theirs_though_the_next_batch_is_awaited_as_well() -> None:
    made = digest.Digest(
        "t", 0, 1, "h", 0.0,
        {
            ("data", "get batch"): spans((0, 10), (20, 24)),
            ("data", "wait for callables"): spans((4, 10), (20, 24)),
            ("data", "wait for batch"): spans((0, 9), (15, 24)),
            ("data", "read source"): spans((0, 24)),
        },
        0,
    )  # fmt: skip
    causes = made.causes(threads=2)
    assert causes["source"] == pytest.approx(4)
    assert causes["decode"] == pytest.approx(6 + 4)
    assert sum(causes.values()) == pytest.approx(14)


def test_the_handing_over_of_a_batch_is_no_decoding() -> None:
    rows = {
        ("data", "get batch"): spans((0, 10), (20, 21)),
        ("data", "wait for batch"): spans((0, 9)),
        ("data", "read source"): spans((0, 9)),
    }
    made = digest.Digest("t", 0, 1, "h", 0.0, rows, 0)
    causes = made.causes(threads=2, finished=False)
    assert causes["source"] == pytest.approx(9) and causes["other"] == pytest.approx(2)
    assert causes["decode"] == 0
    assert made.causes(threads=2, finished=True)["decode"] == pytest.approx(2)


def test_seconds_in_which_several_threads_wait_count_once() -> None:
    made = digest.Digest(
        "t", 0, 1, "h", 0.0,
        {
            # Of two consumers; the second waits within the third wait of the first one as well.
            ("data", "get batch"): spans((0, 10), (20, 30), (40, 50), (5, 15), (42, 44)),
            ("data", "wait for batch"): spans((0, 10), (20, 30), (40, 50), (5, 15), (42, 44)),
            ("data", "read source"): spans((0, 15), (40, 42)),
            ("data", "fetch from peers"): spans((44, 50)),
        },
        0,
    )  # fmt: skip
    causes = made.causes(threads=2)
    assert causes["source"] == pytest.approx(15 + 2)
    assert causes["peer"] == pytest.approx(6)
    assert causes["other"] == pytest.approx(10 + 2)
    assert sum(causes.values()) == pytest.approx(15 + 10 + 10)


def test_waits_are_those_of_the_consumer_where_a_batch_is_not_at_once_its() -> None:
    made = digest.Digest(
        "t", 0, 1, "h", 0.0,
        {
            ("data", "get batch"): spans((0, 10), (20, 21)),
            # Of the thread that sends batches to a device: half of the first wait, and compute.
            ("data", "wait for batch"): spans((0, 5), (12, 19)),
            ("data", "read source"): spans((0, 5), (12, 19)),
        },
        0,
    )  # fmt: skip
    causes = made.causes(threads=2)
    assert causes["source"] == pytest.approx(5)
    assert causes["decode"] == pytest.approx(5 + 1)
    assert sum(causes.values()) == pytest.approx(11)


@pytest.mark.parametrize(
    "ranks, words",
    [
        ({"rank": 5, "world": 2}, "rank must be a whole number from 0 to 1, not 5"),
        ({"rank": -1}, "rank must be a whole number from 0 to .*, not -1"),
        ({"rank": "a"}, "rank must be a whole number from 0 to .*, not 'a'"),
        ({"rank": True}, "rank must be a whole number from 0 to .*, not True"),
        ({"rank": 0, "world": 0}, "world must be a whole number from 1 to .*, not 0"),
        ({"world": 1.5}, "world must be a whole number from 1 to .*, not 1.5"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(tmp_path: Path, ranks: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        trace.start(tmp_path / "run", **ranks)
    assert not (tmp_path / "run").exists()
