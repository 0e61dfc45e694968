"""What failed is told, what is the user's stays, and what may be done again is done again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_checkpointer import World, ranked, steps_in

import nostall
import nostall.checkpoint._background
import nostall.checkpoint._checkpointer
import nostall.checkpoint._nodes
import nostall.checkpoint._saved
import nostall.checkpoint._store
from nostall import _native
from nostall.checkpoint._background import BackgroundWriter
from nostall.checkpoint._begin import undrained
from nostall.checkpoint._cleaner import Cleaner
from nostall.checkpoint._drain import copy_all, read_back
from nostall.checkpoint._format import Branch, Manifest, Part
from nostall.checkpoint._place import LostStoreError, UnreachableError
from nostall.checkpoint._retention import Keep
from nostall.checkpoint._saved import Drain, Saved, Settings
from nostall.checkpoint._store import Store, part_name, rename
from nostall.checkpoint._tree import Stored, decode
from nostall.errors import CorruptionError, IoError, PeerError, StoppedError, UsageError


def state_of(value: int) -> dict[str, Any]:
    return {"w": np.full(10, value), "step": value}


class Broken:
    """Storage that takes nothing while `broken` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str = "", **errors: Any) -> None:
        self.broken, prepare = True, Store.prepare
        self.error: BaseException = errors.get("error", IoError("the disk is gone"))

        def prepare_or_fail(store: Store, step: int) -> Path:
            if self.broken and kind in ("", store.kind):
                raise self.error
            return prepare(store, step)

        monkeypatch.setattr(Store, "prepare", prepare_or_fail)


class Raising:
    """A call that fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> None:
        raise self.error


# ---------------------------------------------------------------------- told


def test_failures_in_a_row_are_told_and_the_training_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch)
    ckpt = nostall.Checkpointer(durable=tmp_path, max_failures=2)
    broken.broken = False
    ckpt.save(state_of(0), 0, level="durable")
    broken.broken = True
    for step in (1, 2):
        ckpt.save(state_of(step), step)
        ckpt.wait(60)
    with pytest.raises(IoError, match=r"steps 1, 2, 3; the newest that is safe is of step 0.*gone"):
        ckpt.save(state_of(3), 3)
    ckpt.wait(60)
    broken.broken = False
    with contextlib.suppress(IoError):  # the one that raises is on its way all the same
        ckpt.save(state_of(4), 4)
    ckpt.wait(60)
    ckpt.save(state_of(5), 5)
    ckpt.close()
    assert steps_in(tmp_path) == [0, 4, 5]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_save_that_raises_does_not_depend_on_the_writers_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    Broken(monkeypatch)
    ckpt = nostall.Checkpointer(durable=tmp_path, max_failures=2)
    remember = ckpt._remember

    def late(saved: Saved) -> None:
        remember(saved)
        ckpt.wait(60)

    if ahead:  # the writer is done with a save before the call looks at it
        monkeypatch.setattr(ckpt, "_remember", late)
    for step in (1, 2):
        ckpt.save(state_of(step), step)
        ckpt.wait(60)
    with pytest.raises(IoError, match="steps 1, 2, 3; no other is safe"):
        ckpt.save(state_of(3), 3)
    with pytest.raises(IoError, match="of step 3, is safe nowhere"):
        ckpt.close()


def test_a_time_without_a_safe_checkpoint_is_told_to_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Broken(monkeypatch)
    told: list[str] = []
    ckpt = nostall.Checkpointer(durable=tmp_path, max_unsafe_seconds=600, on_failure=told.append)
    saved = ckpt.save(state_of(1), 1)
    assert saved is not None
    ckpt.wait(60)
    ckpt.save(state_of(2), 2)
    ckpt.wait(60)
    assert told == []
    saved._began -= 600  # ten minutes later
    ckpt.save(state_of(3), 3)
    assert len(told) == 1 and "no other is safe" in told[0]
    ckpt.close()
    assert len(told) == 2 and "the newest checkpoint, of step 3, is safe nowhere" in told[1]


def test_hanging_storage_does_not_keep_the_answer_that_a_save_is_safe_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, go = Broken(monkeypatch), threading.Event()
    monkeypatch.setattr(nostall.checkpoint._saved, "_LOOK_SECONDS", 0.05)
    ckpt = nostall.Checkpointer(durable=tmp_path, max_failures=1)
    with contextlib.suppress(IoError):  # it may have failed already
        ckpt.save(state_of(1), 1)
    ckpt.wait(60)
    find = Store.find

    def hang(store: Store, step: int, id: str) -> Any:
        go.wait()
        return find(store, step, id)

    monkeypatch.setattr(Store, "find", hang)
    try:
        with pytest.raises(IoError, match=r"the disk is gone; the storage does not answer"):
            ckpt.save(state_of(2), 2)
        ckpt.wait(60)
        with pytest.raises(IoError, match=r"step 2, is safe nowhere.*has not answered"):
            ckpt.close()
    finally:
        go.set()
    assert broken.broken


def test_close_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(Store, "prepare", lambda *_: go.wait())
    ckpt = nostall.Checkpointer(durable=tmp_path)
    saved = ckpt.save(state_of(1), 1)
    engine = ckpt._background
    stop, waits = engine.stop, []
    wait = engine.wait

    def noted(drained: bool, timeout: float) -> bool:
        waits.append(timeout)
        return wait(drained, timeout)

    monkeypatch.setattr(engine, "wait", noted)
    monkeypatch.setattr(engine, "stop", lambda timeout: stop(0.0))
    try:
        with pytest.raises(IoError, match=r"step 1, is safe nowhere: .*the checkpointer is closed"):
            ckpt.close(timeout=0.1)
        assert saved is not None and saved.failed
        assert sum(waits) <= 0.1 + 1e-6
    finally:
        go.set()
        stop(60)


def test_waits_may_be_without_a_limit(tmp_path: Path) -> None:
    ckpt = nostall.Checkpointer(durable=tmp_path)
    saved = ckpt.save(state_of(1), 1)
    assert saved is not None
    waits = (ckpt.wait, ckpt.close, lambda timeout: saved.wait("durable", timeout))
    for wait in waits:
        with pytest.raises(UsageError, match="timeout must be a number of seconds, not nan"):
            wait(float("nan"))
    for limit in (float("inf"), 1e300):
        saved.wait("durable", limit)
        ckpt.wait(limit)
    ckpt.save(state_of(2), 2)
    ckpt.close(float("inf"))
    assert steps_in(tmp_path) == [1, 2]
    nostall.Checkpointer(durable=tmp_path).close()


def test_an_end_that_is_interrupted_gives_the_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = nostall.Checkpointer(durable=tmp_path)
    monkeypatch.setattr(ckpt._background, "wait", Raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    assert ckpt._background._stopping
    nostall.Checkpointer(durable=tmp_path).close()


def test_the_end_of_a_with_does_not_hide_another_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Broken(monkeypatch)
    with pytest.raises(KeyError), nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
        raise KeyError
    assert "of step 1, is safe nowhere" in caplog.text


def test_a_save_goes_on_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failing = threading.Thread.start, {"writer", "drain"}

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.removeprefix("nostall-checkpoint-") in failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        for step, options in enumerate([{"level": "fast"}, {"window": True}, {}], 1):
            saved = ckpt.save(state_of(step), step, **options)  # type: ignore[arg-type]
            assert saved is not None and saved.level == "fast"
            ckpt.before_update()
            with pytest.raises(IoError, match="no thread can be started"):
                saved.wait("durable", 60)
        failing.clear()
        ckpt.save(state_of(4), 4, level="durable")
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1, 2, 3, 4]


def test_an_error_without_a_text_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "commit", Raising(TimeoutError()))
    ckpt = nostall.Checkpointer(durable=tmp_path)
    saved = ckpt.save(state_of(1), 1)
    with pytest.raises(IoError, match=r"step 1, is safe nowhere: .* of step 1: TimeoutError"):
        ckpt.close()
    assert saved is not None and saved.failed


def test_a_save_is_safe_before_its_drain_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a drain without a thread is given up without a look at the storage, which may hang."""
    start, miss, levels = threading.Thread.start, Saved._miss, []

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "nostall-checkpoint-drain":
            raise RuntimeError("can't start new thread")
        start(thread)

    def see_level(saved: Saved, *missed: Any) -> None:
        levels.append((saved.level, missed))
        miss(saved, *missed)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    monkeypatch.setattr(Saved, "_miss", see_level)
    monkeypatch.setattr(BackgroundWriter, "_is_gone", Raising(AssertionError("a look")))
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        saved = ckpt.save(state_of(1), 1)
        assert saved is not None
        with pytest.raises(IoError, match="no thread can be started"):
            saved.wait("durable", 60)
        assert saved.level == "fast" and levels == [("fast", ("durable",))]
        monkeypatch.undo()
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1]


def test_retention_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with nostall.Checkpointer(durable=tmp_path, keep=1) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(state_of(step), step, level="durable")
    assert steps_in(tmp_path) == [3]


def test_a_rank_without_a_part_needs_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, start = ranked(tmp_path, 2, replicated=True), threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "nostall-checkpoint-writer":
            raise RuntimeError("can't start new thread")
        start(thread)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            return ckpt.save(state_of(1), 1, level="durable").level  # type: ignore[union-attr]

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    assert World(2).run(work) == ["durable"] * 2


def test_retention_that_waits_for_a_restore_needs_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Raising(RuntimeError("no new thread")))
        with nostall.Checkpointer(durable=tmp_path, keep=1) as ckpt:
            with ckpt._background.all_stays():
                for step in (1, 2):
                    ckpt.save(state_of(step), step, level="durable")
                assert steps_in(tmp_path) == [1, 2]
            assert steps_in(tmp_path) == [2]


def test_a_restore_does_not_wait_for_ever_for_a_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    removing, go = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        removing.set()
        go.wait(60)

    monkeypatch.setattr(Cleaner, "retain", hang)
    engine = BackgroundWriter(None, Store(tmp_path, "durable"), 0, Settings(Keep(1), timeout=0.01))
    thread = threading.Thread(target=engine._retain)
    thread.start()
    try:
        assert removing.wait(60)
        with engine.all_stays():
            assert "removed for 0.01 s already: the restore begins" in caplog.text
    finally:
        go.set()
        thread.join(60)


def test_a_save_waits_for_the_one_before_as_long_as_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, go = Store.prepare, threading.Event()

    def hang(store: Store, step: int) -> Path:
        go.wait(60)
        return prepare(store, step)

    monkeypatch.setattr(Store, "prepare", hang)
    ckpt = nostall.Checkpointer(durable=tmp_path, patience=0.01)
    try:
        ckpt.save(state_of(1), 1)
        late = ckpt.save(state_of(2), 2)
    finally:
        go.set()
    assert late is not None
    with pytest.raises(IoError, match=r"not written after 0\.01 s, its storage hangs"):
        late.wait("durable", 60)
    with pytest.raises(IoError, match="of step 2, is safe nowhere"):
        ckpt.close()
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize(
    ("met", "waits"), [([], [10]), ([0, 0, 0], [10, 10, 10, 10]), ([25], [10, 10, 10, 10, 5])]
)
def test_patience_counts_from_when_no_other_rank_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, met: list[float], waits: list[float]
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(nostall.checkpoint._background, "time", clock)
    engine = BackgroundWriter(None, None, 0, Settings(Keep(5), patience=10))
    waited = []

    def wait_for(free: Any, seconds: float) -> bool:
        waited.append(seconds)
        clock.now += seconds
        if met:
            engine._meets(met.pop())
        return bool(free())

    monkeypatch.setattr(engine._lock, "wait_for", wait_for)
    assert engine.take_snapshot() is None
    assert waited == waits


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_that_is_late_makes_no_other_one_give_a_save_up(
    tmp_path: Path, each: bool, last: int
) -> None:
    late = threading.Event()

    def work(rank: int, gather: Any) -> list[list[str]]:
        fast = tmp_path / f"fast-{rank if each else 0}"
        with nostall.Checkpointer(
            fast, rank=rank, world_size=2, gather=gather, patience=60, timeout=60
        ) as ckpt:
            if rank == last:
                assert late.wait(60)
            for step in (1, 2):
                if rank != last and step == 2:
                    deadline = time.monotonic() + 60
                    while not ckpt._background._met:  # the wait is known as one for ranks
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                    late.set()
                ckpt.save(state_of(step), step)
            for saved in ckpt.history:
                saved.wait("fast", 60)
            return [saved.problems for saved in ckpt.history]

    assert World(2).run(work) == [[[], []], [[], []]]


def test_a_rank_whose_own_storage_hangs_does_not_count_as_waiting_for_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, sync = threading.Event(), nostall.checkpoint._nodes.sync_directory

    def hang(path: Path) -> None:
        if tmp_path / "fast-1" in path.parents:
            given_up.wait(20)
        sync(path)

    def work(rank: int, gather: Any) -> bool:
        with nostall.Checkpointer(
            tmp_path / f"fast-{rank}", rank=rank, world_size=2, gather=gather,
            patience=0.01 if rank else 60, timeout=60,
        ) as ckpt:  # fmt: skip
            for step in (1, 2):
                ckpt.save(state_of(step), step)
            if rank:
                given_up.set()
            ckpt.wait(60)
            ckpt.save(state_of(3), 3, level="fast")
            (second,) = (saved for saved in ckpt.history if saved.step == 2)
            return "its storage hangs" in str(second.problems)

    monkeypatch.setattr(nostall.checkpoint._nodes, "sync_directory", hang)
    assert World(2).run(work)[1] is True


def test_a_level_is_never_lowered() -> None:
    saved = Saved(1, "a", 0)
    saved._reach("durable")
    saved._reach("fast")
    assert saved.level == "durable" and saved.fast_seconds is not None
    saved.wait("durable", 0)


def test_after_the_end_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots in the queue and in the hands of a thread that storage keeps, and drains."""
    prepare, reached, go = Store.prepare, threading.Event(), threading.Event()

    def hang(store: Store, step: int) -> Path:
        if store.kind == "durable" or step > 1:
            reached.set()
            go.wait()
        return prepare(store, step)

    monkeypatch.setattr(Store, "prepare", hang)
    ckpt = nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", snapshots=3)
    saves = [ckpt.save(state_of(step), step) for step in (1, 2, 3)]
    assert reached.wait(60)
    saves[0].wait("fast", 60)  # type: ignore[union-attr]
    ckpt._background.stop(0.0)
    try:
        for saved in saves:
            assert saved is not None
            with pytest.raises(IoError, match=f"step {saved.step}"):
                saved.wait("durable", 60)
    finally:
        go.set()
        ckpt._background.stop(60)
        ckpt._closer()


def test_the_end_denies_no_save_that_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer still tidies up."""
    release, go = BackgroundWriter._release, threading.Event()

    def late(background: BackgroundWriter, job: Any) -> None:
        assert go.wait(60)
        release(background, job)

    monkeypatch.setattr(BackgroundWriter, "_release", late)
    with nostall.Checkpointer(tmp_path) as ckpt:
        saved = ckpt.save(state_of(1), 1, level="fast")
        try:
            ckpt._background.stop(0.0)
        finally:
            go.set()
    assert saved is not None and saved.problems == []


@pytest.mark.parametrize("stopped", [True, False])
def test_a_drain_that_outlives_its_checkpointer_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """The next checkpointer writes a part of that name; with `stopped` the thread sees the end."""
    reading, go_on = threading.Event(), threading.Event()
    refused: list[Exception] = []

    def postpone(self: BackgroundWriter, _: Any, error: Exception, *__: Any) -> None:
        refused.append(error)
        self._stopping = True

    def slowly(*_: Any) -> None:
        reading.set()
        assert go_on.wait(60)

    monkeypatch.setattr(nostall.checkpoint._background, "read_back", slowly)
    monkeypatch.setattr(BackgroundWriter, "_postpone", postpone)
    stop = BackgroundWriter.stop
    monkeypatch.setattr(BackgroundWriter, "stop", lambda self, timeout: stop(self, 0.0))
    first = nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable")
    first.save(state_of(1), 1, level="fast")
    assert reading.wait(60)
    first.close(0)
    (part,) = (tmp_path / "durable").glob("*1/rank-*")
    first._background._stopping = stopped
    go_on.set()
    first._background._threads["drain"].join(60)
    assert [type(error) for error in refused] == ([] if stopped else [LostStoreError])
    assert part.exists() and steps_in(tmp_path / "durable") == []
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1]


def test_what_an_ended_job_removes_late_is_nothing_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal hangs until the next job has drained the same checkpoint."""
    id = "aaaaaaaa-000001"
    manifest = Manifest(3, id, 1, (Part(0, part_name(0, id), 0, ()),), sequence=5)
    ended, store = Store(tmp_path, "durable"), Store(tmp_path, "durable")
    ended.own()
    unlink = os.unlink

    def copy(part: Part, name: str) -> None:
        (store.directory(3) / name).touch()

    def late(path: Path) -> None:
        monkeypatch.undo()
        ended.disown()
        store.own()
        store.clean()
        copy_all(store, manifest, copy)
        unlink(path)

    def stopped(part: Part, name: str) -> None:
        copy(part, name)
        monkeypatch.setattr(os, "unlink", late)
        raise StoppedError("the job ends")

    with pytest.raises(StoppedError):
        copy_all(ended, manifest, stopped)
    (copied,) = store.manifests()
    assert store.has_all(copied)
    store.disown()


def test_a_directory_that_was_given_back_is_changed_no_more(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        (manifest,) = ckpt.durable.manifests()
    store = ckpt.durable
    for change in (
        lambda: store.publish(manifest),
        lambda: store.prepare(1),
        lambda: store.remove(1, manifest.id),
        lambda: store.note_branch(Branch(manifest.sequence + 1, (), 1, manifest.id)),
    ):
        with pytest.raises(LostStoreError, match="the checkpointer is closed"):
            change()
    store.discard(1, manifest.parts[0].name)
    assert store.has_all(manifest)
    found = ckpt.restore()  # which changes nothing
    assert found is not None and found.step == 1
    store.own()
    store.publish(manifest)
    store.disown()


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
        calls = [lambda: ckpt.save(state_of(2), 2), ckpt.restore, ckpt.wait, ckpt.close]
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            refused = 0
            try:
                for call in calls:
                    try:
                        call()
                    except UsageError as error:
                        refused += "make a checkpointer in the process that uses it" in str(error)
                ckpt.__exit__(None)
                os.write(writer, bytes([refused]))
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            assert answer.read() == bytes([len(calls)])
        os.waitpid(child, 0)
        ckpt.save(state_of(3), 3, level="durable")
    assert steps_in(tmp_path) == [1, 3]


# ------------------------------------------------------------------ what cannot be read


class Unread:
    """Files that the system refuses to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: set[Path] = set()
        inner = Path.read_bytes

        def read(path: Path) -> bytes:
            if path in self.paths:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return inner(path)

        monkeypatch.setattr(Path, "read_bytes", read)


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: (p.name, p.open("rb").read())[1] for p in directory.iterdir()}


@pytest.mark.parametrize("how", ["damaged", "unread"])
def test_a_checkpoint_that_was_passed_over_stays_when_its_step_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    unread, store = Unread(monkeypatch), Store(tmp_path, "durable")
    directory, manifest = store.directory(2), store.directory(2) / "manifest.json"
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
    if how == "damaged":
        manifest.write_bytes(manifest.read_bytes().replace(b'"step"', b'"stop"'))
    else:
        unread.paths.add(manifest)
    before = content(directory)
    for value in (20, 21):
        with nostall.Checkpointer(durable=tmp_path, level="durable", keep=1) as ckpt:
            found = ckpt.restore()
            assert found is not None and found.state["step"] == (1 if value == 20 else 20)
            ckpt.save(state_of(value), 2)
            ckpt.wait(60)
            found = ckpt.restore()
            assert found is not None and found.state["step"] == value
    assert before.items() <= content(directory).items()
    if how == "damaged":
        assert len(list(directory.iterdir())) == len(before) + 2  # the newest save alone
        return
    unread.paths.clear()
    with nostall.Checkpointer(durable=tmp_path, level="durable", keep=1) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.state["step"] == 21
        ckpt.save(state_of(3), 3)  # and it is one of its step's saves, by the rules
        ckpt.wait(60)
    assert steps_in(tmp_path) == [3] and not directory.exists()


def test_a_whole_copy_stays_beside_one_that_has_lost_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, durable = two_tiers(tmp_path)
    unread, directory = Unread(monkeypatch), durable.directory(3)
    lost = next(directory.glob("*.safetensors"))
    unread.paths.add(directory / "manifest.json")
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep_fast=3) as ckpt:
        ckpt.wait(60)
    unread.paths.clear()
    lost.unlink()
    with nostall.Checkpointer(durable=tmp_path / "durable") as ckpt:  # what starts tidies up
        found = ckpt.restore()
        assert found is not None and found.step == 3
    id = fast.manifests()[-1].id
    copied = durable.find(3, id)
    assert copied is not None and durable.has_all(copied)
    # So it does when its step is saved again, on another branch or on its own.
    with nostall.Checkpointer(durable=tmp_path / "durable", level="durable") as ckpt:
        ckpt.restore(2)
        ckpt.save(state_of(30), 3)
    with nostall.Checkpointer(durable=tmp_path / "durable", level="durable") as ckpt:
        assert durable.find(3, id) == copied and durable.has_all(copied)
        again = ckpt.restore(3)
        assert again is not None and again.state["step"] == 30
        durable.remove(3, id)
        assert durable.find(3, id) is None and len(list(directory.iterdir())) == 2


def test_both_copies_of_a_save_go_when_its_step_is_saved_again(tmp_path: Path) -> None:
    store, directory = Store(tmp_path, "durable"), Store(tmp_path, "durable").directory(3)
    earlier = saved_empty(store, "aaaaaaaa-000001", sequence=5)
    copy = dataclasses.replace(earlier, parts=(Part(0, part_name(0, earlier.id, 1), 0, ()),))
    (directory / copy.parts[0].name).touch()
    (directory / f"manifest-{copy.id}.json").write_bytes(copy.to_bytes())
    assert store.find(3, copy.id) == copy and [e.manifest for e in store.saves(3)] == [copy]
    for manifest in (earlier, copy):  # where both have lost parts too
        (directory / manifest.parts[0].name).unlink()
        assert [store.find(3, copy.id)] == [e.manifest for e in store.saves(3)]
    later = saved_empty(store, "bbbbbbbb-000001", sequence=6)
    names = [part_name(0, later.id), "manifest.json"]
    assert store.manifests() == [later] and sorted(names) == sorted(content(directory))


def test_of_two_copies_none_goes_while_a_part_cannot_be_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, directory = Store(tmp_path, "durable"), Store(tmp_path, "durable").directory(3)
    earlier = saved_empty(store, "aaaaaaaa-000001", sequence=5)
    copy = dataclasses.replace(earlier, parts=(Part(0, part_name(0, earlier.id, 1), 0, ()),))
    part = directory / copy.parts[0].name
    part.touch()
    (directory / f"manifest-{copy.id}.json").write_bytes(copy.to_bytes())
    before, stat = content(directory), Path.stat

    def failing(path: Path, **options: Any) -> os.stat_result:
        if path == part:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", failing)
        assert store.clean() == []
        assert f"{directory} stays: cannot look for {part}: Input/output error" in caplog.text
        with pytest.raises(IoError, match=f"cannot look for {part}"):  # which of them stays aside
            store.publish(Manifest(3, "bbbbbbbb-000001", 1, (), sequence=9, abandoned=((5, 5),)))
    assert content(directory) == before
    store.clean()
    assert store.manifests() == [copy]
    assert content(directory).keys() == before.keys() - {earlier.parts[0].name}


def test_a_copy_that_lacks_a_part_does_not_hide_a_whole_manifest(tmp_path: Path) -> None:
    store, directory = Store(tmp_path, "durable"), Store(tmp_path, "durable").directory(3)
    whole = saved_empty(store, "aaaaaaaa-000001", sequence=5)
    copy = dataclasses.replace(whole, parts=(Part(0, part_name(0, whole.id, 1), 0, ()),))
    (directory / f"manifest-{copy.id}.json").write_bytes(copy.to_bytes())
    assert store.find(3, whole.id) == whole and store.manifests() == [whole]


def test_a_part_whose_name_no_file_can_have_is_not_there(tmp_path: Path) -> None:
    store = Store(tmp_path, "durable")
    store.make()
    store.prepare(3)
    long = Part(0, "x" * 300, 0, ())
    assert not store.has(3, long)
    with pytest.raises(IoError, match=r"cannot look for .*File name too long"):
        store.missing(Manifest(3, "aaaaaaaa-000001", 1, (long,)))


def test_what_a_rank_cannot_look_at_is_not_taken_for_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, "durable")
    manifest = saved_empty(store, "aaaaaaaa-000001", sequence=5)
    unread = Unread(monkeypatch)
    unread.paths.add(store.directory(3) / "manifest.json")
    assert not store._completed(manifest, 1, left=False)
    unread.paths.clear()
    assert store._completed(manifest, 1, left=False)


def saved_empty(store: Store, id: str, sequence: int) -> Manifest:
    """A save of step 3 whose part has no bytes."""
    part = Part(0, part_name(0, id), 0, ())
    store.make()
    (store.prepare(3) / part.name).touch()
    manifest = Manifest(3, id, 1, (part,), sequence=sequence)
    store.publish(manifest)
    return manifest


def test_a_save_is_removed_by_one_reading_of_its_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading fails that comes after the look that finds nothing wrong."""
    store = Store(tmp_path, "durable")
    manifest = saved_empty(store, "aaaaaaaa-000001", sequence=5)
    read, readings = Path.read_bytes, 0

    def scarce(path: Path) -> bytes:
        nonlocal readings
        readings += path.name == "manifest.json"
        if readings > 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", scarce)
    store.remove(3, manifest.id)
    assert not store.directory(3).exists()


def test_a_save_that_stays_is_not_written_over_by_what_may_be_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, unread = Store(tmp_path, "durable"), Unread(monkeypatch)
    earlier = saved_empty(store, "aaaaaaaa-000001", sequence=5)
    aside = store.directory(3) / f"manifest-{earlier.id}.json"
    aside.write_bytes(b"of a copy")
    unread.paths.add(aside)
    newer = Manifest(3, "bbbbbbbb-000001", 1, (), sequence=9, abandoned=((5, 5),))
    with pytest.raises(IoError, match=f"{aside} cannot be read"):
        store.publish(newer)
    unread.paths.clear()
    assert aside.read_bytes() == b"of a copy" and store.find(3, earlier.id) == earlier


def test_a_copy_of_which_nothing_is_known_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, durable = two_tiers(tmp_path)
    unread, directory = Unread(monkeypatch), durable.directory(3)

    def look() -> dict[Path, Any]:
        # The copy's own manifest is written anew, as its rename may not be on its device.
        own = f"manifest-{fast.manifests()[-1].id}.json"
        return {
            p: p.read_bytes() if p.name == own else p.stat().st_mtime_ns
            for p in directory.iterdir()
        }

    def drain() -> dict[Path, Any]:
        with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep_fast=3) as ckpt:
            ckpt.wait(60)
        (copied,) = (m for m in durable.manifests() if m.step == 3)
        assert durable.has_all(copied) and copied.id == fast.manifests()[-1].id
        return look()

    before = look()

    unread.paths.add(directory / "manifest.json")
    after = drain()  # beside it
    assert before.items() < after.items() and drain() == after
    unread.paths.clear()
    drained = [path for path in before if path.suffix == ".safetensors"]
    # Of two whole ones that which was read back stays.
    assert drain() == {path: when for path, when in after.items() if path not in drained}
    # What is damaged may be mended by hand, and stays beside its copy.
    (directory / f"manifest-{fast.manifests()[-1].id}.json").unlink()
    (directory / "manifest.json").write_bytes(b"{}")
    before = look()
    assert before.items() < drain().items()


@pytest.mark.parametrize("other", ["lost", "gone"])
def test_a_copy_that_was_read_back_counts_also_once_the_one_before_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    fast, durable = two_tiers(tmp_path)
    unread, directory = Unread(monkeypatch), durable.directory(3)
    id = fast.manifests()[-1].id
    (first,) = directory.glob("*.safetensors")
    newest, aside = directory / "manifest.json", directory / f"manifest-{id}.json"

    def drain() -> Manifest:
        with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep_fast=3) as ckpt:
            ckpt.wait(60)
        found = durable.find(3, id)
        assert found is not None and durable.has_all(found)
        return found

    unread.paths.add(newest)
    second = drain()
    assert aside.exists()
    unread.paths = {aside}
    (first if other == "lost" else newest).unlink()
    third = drain()
    assert third.parts != second.parts
    unread.paths.clear()
    assert drain() == third
    parts = [name for name in content(directory) if name.endswith(".safetensors")]
    assert parts == [third.parts[0].name]


def test_an_earlier_save_goes_for_one_that_had_a_copy_which_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, unread = Store(tmp_path, "durable"), Unread(monkeypatch)
    saved_empty(store, "aaaaaaaa-000001", sequence=5)
    aside = store.directory(3) / "manifest-bbbbbbbb-000001.json"
    aside.write_bytes(b"of a copy")
    unread.paths.add(aside)

    def readable(old: Path, new: Path) -> None:
        rename(old, new)
        unread.paths.discard(new)  # another file

    monkeypatch.setattr(nostall.checkpoint._store, "rename", readable)
    later = saved_empty(store, "bbbbbbbb-000001", sequence=6)
    assert store.manifests() == [later]
    assert sorted(content(store.directory(3))) == ["manifest.json", later.parts[0].name]


@pytest.mark.parametrize("how", ["copy", "stop", "interrupt", "publish"])
@pytest.mark.parametrize("there", ["damaged", "unread"])
def test_a_drain_that_fails_beside_what_is_damaged_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, there: str
) -> None:
    fast, durable = two_tiers(tmp_path)
    manifest, directory = fast.manifests()[-1], durable.directory(3)
    if there == "damaged":
        (directory / "manifest.json").write_bytes(b"{}")
    else:
        Unread(monkeypatch).paths.add(directory / "manifest.json")
    before = {p.name for p in directory.iterdir()}
    errors = {"stop": StoppedError("the job ends"), "interrupt": KeyboardInterrupt()}
    error = errors.get(how, IoError("the disk is full"))

    def copy(part: Part, name: str) -> None:
        (directory / name).write_bytes(bytes(part.size))
        if how != "publish":
            raise error

    if how == "publish":
        monkeypatch.setattr(durable, "publish", Raising(error))
    with pytest.raises(type(error)):
        copy_all(durable, manifest, copy)
    left = {p.name for p in directory.iterdir()} - before
    # Where the manifest cannot be read it may be the one that was just published.
    assert bool(left) == (how == "publish" and there == "unread")


def test_a_save_that_fails_beside_what_is_damaged_is_given_up_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = Store(tmp_path, "durable"), Manifest(1, "aaaaaaaa-000001", 2, (), True)
    store.make()
    (store.prepare(1) / "manifest.json").write_bytes(b"{}")
    monkeypatch.setattr(store, "publish", Raising(IoError("the disk is full")))
    part = Part(0, part_name(0, manifest.id), 0, ())
    assert store.commit(manifest, 0, part, timeout=60) == "the disk is full"
    assert store.commit(manifest, 1, None, timeout=60) == "the disk is full"


def test_a_fast_checkpoint_whose_manifest_is_damaged_is_not_given_up(tmp_path: Path) -> None:
    fast, durable = two_tiers(tmp_path)
    background, manifest = (
        BackgroundWriter(fast, durable, 0, Settings(Keep(5))),
        fast.manifests()[-1],
    )
    (fast.directory(3) / "manifest.json").write_bytes(b"{}")
    assert not background._is_gone(manifest)
    (fast.directory(3) / "manifest.json").unlink()
    assert background._is_gone(manifest)


@pytest.mark.parametrize("unknown", ["find", "check_owned"])
def test_a_rank_does_not_take_a_copy_of_which_nothing_is_known_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    fast, durable = Store(tmp_path / "fast", "fast"), Store(tmp_path / "durable", "durable")
    parts = tuple(Part(rank, part_name(rank, "aaaaaaaa-000001"), 0, ()) for rank in range(2))
    manifest, told = Manifest(1, "aaaaaaaa-000001", 2, parts), []
    for store in (fast, durable):
        store.make()
        for part in parts:
            (store.prepare(1) / part.name).touch()
        store.publish(manifest)
    background = BackgroundWriter(fast, durable, 1, Settings(Keep(5)))
    monkeypatch.setattr(durable, unknown, Raising(IoError("Stale file handle")))
    monkeypatch.setattr(background, "_drain_together", lambda drain, failed: told.append(failed))
    background._drain(Drain(manifest))
    assert told == ["Stale file handle"]


def test_a_copy_that_is_retired_before_a_rank_without_a_part_looks_at_it_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, saves = Store(tmp_path / "durable", "durable"), []
    for step in (1, 2):
        id = f"aaaaaaaa-00000{step}"
        part = Part(0, part_name(0, id), 0, ())
        saves.append(Manifest(step, id, 2, (part,), replicated=True, sequence=step))
        store.make()
        (store.prepare(step) / part.name).touch()
        store.publish(saves[-1])
    background = BackgroundWriter(Store(tmp_path / "fast", "fast"), store, 1, Settings(Keep(1)))
    has_all = Store.has_all

    def late(looking: Store, manifest: Manifest) -> bool:
        store.remove(1, saves[0].id)
        return has_all(looking, manifest)

    monkeypatch.setattr(Store, "has_all", late)
    saved = Saved(1, saves[0].id, 0)
    background._drain(Drain(saves[0], saved))
    assert saved.level == "durable" and store.steps() == [2]


def test_nothing_is_removed_of_a_step_that_has_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, durable = two_tiers(tmp_path)
    unread = Unread(monkeypatch)
    (manifest, *_) = fast.manifests()
    unread.paths.add(fast.directory(1) / "manifest.json")
    before = content(fast.directory(1))
    with pytest.raises(IoError, match=r"manifest\.json cannot be read"):
        fast.remove(1, manifest.id)
    assert fast.has_all(manifest) and content(fast.directory(1)) == before
    # Room is made of the others.
    unread.paths.clear()
    cleaner = Cleaner(fast, durable, Settings(Keep(5)))
    cleaner.begin()
    remove = Store.remove

    def refuse(store: Store, step: int, id: str) -> None:
        if step == 1:
            raise IoError("the manifest cannot be read")
        remove(store, step, id)

    monkeypatch.setattr(Store, "remove", refuse)
    cleaner.make_room(fast, 1 << 62, dataclasses.replace(manifest, step=4, id="coming-000000"))
    assert fast.steps() == [1]


# ---------------------------------------------------------------------- drains


@pytest.mark.parametrize("error", [RuntimeError("no thread"), MemoryError(), IoError("full")])
def test_a_drain_survives_any_exception_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    broken = Broken(monkeypatch, "durable", error=error)
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        saved = ckpt.save(state_of(1), 1)
        assert saved is not None
        with pytest.raises(IoError, match="stays in"):
            saved.wait("durable", 60)
        broken.broken = False
        ckpt.save(state_of(2), 2, level="durable")
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1, 2]


def test_a_failed_drain_is_told_once_it_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once the save is at level fast."""
    told: list[tuple[str, int]] = []
    reach, miss, missed = Saved._reach, Saved._miss, threading.Event()

    def reach_late(saved: Saved, level: Any) -> None:
        if level == "fast":
            missed.wait(0.5)  # in vain
        told.append((level, 0))
        reach(saved, level)

    def note(saved: Saved, *levels: Any) -> None:
        missed.set()
        told.extend((f"no {level}", len(ckpt._background._postponed)) for level in levels)
        miss(saved, *levels)

    monkeypatch.setattr(Saved, "_reach", reach_late)
    monkeypatch.setattr(Saved, "_miss", note)
    broken = Broken(monkeypatch, "durable")
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        with pytest.raises(IoError, match="the disk is gone"):
            ckpt.save(state_of(1), 1, level="durable")
        broken.broken = False
        ckpt.wait(60)
    assert told == [("fast", 0), ("no durable", 1), ("durable", 0)]


def test_a_wait_tries_failed_drains_again_and_tells_of_those_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(monkeypatch, "durable")
    places = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(*places) as ckpt:
        ckpt.save(state_of(1), 1)
        for _ in range(2):
            with pytest.raises(
                IoError, match=r"^1 checkpoint cannot be drained: .*the disk is gone"
            ):
                ckpt.wait(60)
        broken.broken = False
        ckpt.wait(60)
        assert steps_in(places[1]) == [1]
        broken.broken = True
        ckpt.save(state_of(2), 2)
        caplog.clear()
    assert "1 checkpoint cannot be drained: the checkpoint of step 2 stays in" in caplog.text


def test_a_lost_save_is_not_excused_by_what_does_not_continue_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a later save of its step that continues it takes its place."""
    places = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(*places) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step, level="durable")
    prepare = Store.prepare

    def lose(store: Store, step: int) -> Path:
        if store.kind == "durable":
            Store(places[0], "fast").remove_step(step)
        return prepare(store, step)

    with nostall.Checkpointer(*places) as ckpt:
        ckpt.restore(1)
        monkeypatch.setattr(Store, "prepare", lose)
        ckpt.save(state_of(20), 2)  # the durable directory has that of the other branch
        with pytest.raises(IoError, match=f"step 2 is whole no more in {places[0]}"):
            ckpt.wait(60)
    assert [m.step for m in Store(places[1], "durable").manifests()] == [1, 2]


def test_a_failed_drain_is_missed_where_its_step_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, saves = Broken(monkeypatch, "durable"), Store.saves

    def away(store: Store, step: int) -> Any:
        if broken.broken:
            raise UnreachableError(f"{store.root} does not answer")
        return saves(store, step)

    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        ckpt.save(state_of(1), 1, level="fast")
        monkeypatch.setattr(Store, "saves", away)
        with pytest.raises(IoError, match=r"step 1 stays in .*the disk is gone"):
            ckpt.wait(60)
        broken.broken = False
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1]


def test_a_wait_tells_once_of_what_can_never_be_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch, "durable")
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        ckpt.save(state_of(1), 1, level="fast")
        with pytest.raises(IoError, match="the disk is gone"):
            ckpt.wait(60)
        (part,) = (tmp_path / "fast").glob("*1/*.safetensors")
        part.write_bytes(bytes(part.stat().st_size))
        broken.broken = False
        with pytest.raises(IoError, match=rf"{part}.* is damaged"):
            ckpt.wait(60)
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == []


@pytest.mark.parametrize("what", ["step", "part"])
def test_a_wait_tells_once_of_what_somebody_has_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    broken = Broken(monkeypatch, "durable")
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        ckpt.save(state_of(1), 1, level="fast")
        with pytest.raises(IoError, match=r"stays in .*the disk is gone"):
            ckpt.wait(60)
        (part,) = (tmp_path / "fast").glob("*1/*.safetensors")
        shutil.rmtree(part.parent) if what == "step" else part.unlink()
        broken.broken = False
        with pytest.raises(IoError, match=r"step 1 is whole no more in .*by the next start"):
            ckpt.wait(60)
        ckpt.wait(60)
        ckpt.save(state_of(2), 2, level="durable")
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [2]


def test_a_fast_directory_that_is_away_has_not_lost_what_waits_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, fast = Broken(monkeypatch, "durable"), tmp_path / "fast"
    with nostall.Checkpointer(fast, tmp_path / "durable") as ckpt:
        ckpt.save(state_of(1), 1, level="fast")
        with pytest.raises(IoError, match="the disk is gone"):
            ckpt.wait(60)
        fast.rename(tmp_path / "away")
        with pytest.raises(IoError, match="step 1 stays in"):
            ckpt.wait(60)
        (tmp_path / "away").rename(fast)
        broken.broken = False
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1]


def test_a_directory_whose_number_could_not_be_noted_is_known_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, full = tmp_path / "durable", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr(nostall.checkpoint._store, "_write_durably", Raising(full))
        ckpt = nostall.Checkpointer(durable=place, max_failures=9)
    assert "cannot note the numbers of this job's saves" in caplog.text
    ckpt.save(state_of(1), 1, level="durable")
    place.rename(tmp_path / "away")
    place.mkdir()
    with pytest.raises(IoError, match="is not the directory that this job has taken"):
        ckpt.save(state_of(2), 2, level="durable")
    place.rmdir()
    (tmp_path / "away").rename(place)
    ckpt.save(state_of(3), 3, level="durable")
    ckpt.close()
    assert steps_in(place) == [1, 3]


@pytest.mark.multi
def test_a_rank_writes_nothing_below_a_mount_point_of_its_own(tmp_path: Path) -> None:
    """Rank 1 has a link of its own to the durable directory, which then leads elsewhere."""
    view, elsewhere = tmp_path / "view", tmp_path / "elsewhere"
    (tmp_path / "durable").mkdir()
    elsewhere.mkdir()
    view.symlink_to(tmp_path / "durable")

    def work(rank: int, gather: Any) -> None:
        durable = view if rank else tmp_path / "durable"
        with nostall.Checkpointer(
            tmp_path / "fast", durable, rank=rank, world_size=2, gather=gather, job="test"
        ) as ckpt:
            ckpt.save(state_of(rank), 1, level="durable")
            if rank == 0:
                return
            view.unlink()
            view.symlink_to(elsewhere)
            store, words = ckpt.durable, f"{view} is not the directory that this job has taken"
            assert store is not None
            with pytest.raises(IoError, match=words):
                store.make_step(2)
            manifest, part = Manifest(2, "aaaaaaaa-000001", 2, ()), Part(1, "part", 1, ())
            assert words in store.commit(manifest, 1, part, timeout=600)

    assert World(2).run(work) == [None, None]
    assert list(elsewhere.iterdir()) == []


def test_a_restore_from_below_a_mount_point_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fast, durable, words = tmp_path / "fast", tmp_path / "durable", "is not the directory that this"
    with nostall.Checkpointer(fast, durable) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
        for place in (fast, durable):
            place.rename(tmp_path / f"{place.name} away")
            place.mkdir()
            if place is fast:
                found = ckpt.restore()
                assert found is not None and found.tier == "durable"
                assert f"passing over a checkpoint: {fast} {words}" in caplog.text
        with pytest.raises(IoError, match=rf"{fast} {words}.*{durable} {words}"):
            ckpt.restore()


def test_a_restore_goes_back_past_no_save_that_is_below_a_mount_point(tmp_path: Path) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast, durable) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step, level="durable")
        (second,) = (path for path in fast.iterdir() if path.name.endswith("2"))
        shutil.rmtree(second)
        durable.rename(tmp_path / "away")
        durable.mkdir()
        with pytest.raises(
            IoError, match=rf"{durable} is not .*: the newest checkpoint of this job"
        ):
            ckpt.restore()
        durable.rmdir()
        (tmp_path / "away").rename(durable)
        found = ckpt.restore()
        assert found is not None and found.step == 2


@pytest.mark.parametrize("kind", ["fast", "durable"])
def test_nothing_is_saved_below_a_mount_point_without_its_file_system(
    tmp_path: Path, kind: str
) -> None:
    """What is mounted is moved away, and back."""
    fast, durable, away = tmp_path / "fast", tmp_path / "durable", tmp_path / "away"
    gone = tmp_path / kind
    with nostall.Checkpointer(fast, durable, keep_fast=5) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
        ckpt.wait(60)
        gone.rename(away)
        gone.mkdir()
        told = (
            rf"{gone} is not the directory that this job has taken: its \.sequence is gone\. Mount"
        )
        if kind == "durable":
            with pytest.raises(IoError, match=told):
                ckpt.save(state_of(2), 2, level="durable")
            with pytest.raises(IoError, match=told):
                ckpt.wait(60)
        else:
            saved = ckpt.save(state_of(2), 2, level="durable")  # past the fast directory
            assert saved is not None and any(gone.name in text for text in saved.problems)
        assert list(gone.iterdir()) == []
        (gone / ".sequence").write_bytes(b"7")  # of a job that began there
        with pytest.raises(IoError, match="is of another job"):
            getattr(ckpt, kind).remove(1, "aaaaaaaa-000000")
        (gone / ".sequence").unlink()
        gone.rmdir()
        away.rename(gone)
        ckpt.save(state_of(3), 3, level="durable")
        ckpt.wait(60)
    assert steps_in(durable) == [1, 2, 3]


def test_a_directory_that_somebody_tidies_up_stays_the_jobs(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        note = (tmp_path / ".sequence").read_bytes()
        (tmp_path / ".sequence").unlink()
        ckpt.save(state_of(1), 1)
    assert (tmp_path / ".sequence").read_bytes() == note
    assert steps_in(tmp_path) == [1]


def damage(part: Path, how: str) -> None:
    part.unlink() if how == "gone" else os.truncate(part, part.stat().st_size - 1)


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_durable_copy_without_a_part_is_drained_again(tmp_path: Path, how: str) -> None:
    _, durable = two_tiers(tmp_path)
    for _ in range(2):
        (part,) = durable.directory(3).glob("*.safetensors")
        damage(part, how)
        with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep_fast=3) as ckpt:
            ckpt.wait(60)
        # Under a name of its own: what the old manifest names is never written to.
        assert durable.has_all(durable.manifests()[-1])
        assert part not in durable.directory(3).iterdir()
    with nostall.Checkpointer(durable=tmp_path / "durable") as ckpt:
        found = ckpt.restore()
    assert found is not None and (found.step, found.tier) == (3, "durable")


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_drain_that_is_broken_off_is_not_taken_for_a_whole_copy(tmp_path: Path, how: str) -> None:
    fast, durable = two_tiers(tmp_path)
    manifest = fast.manifests()[-1]
    (part,) = durable.directory(3).glob("*.safetensors")
    damage(part, how)

    def broken(part: Part, name: str) -> None:
        # A copy has its full size before it has its bytes.
        (durable.directory(3) / name).write_bytes(bytes(part.size))
        raise StoppedError("the job ends")

    with pytest.raises(StoppedError):
        copy_all(durable, manifest, broken)
    assert not durable.has_all(durable.manifests()[-1])
    assert [m.step for m in undrained(fast, durable, Keep(5))] == [3]
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep_fast=1) as ckpt:
        ckpt.wait(60)
        ckpt.save(state_of(4), 4, level="durable")
        ckpt.wait(60)
    with nostall.Checkpointer(durable=tmp_path / "durable") as ckpt:
        found = ckpt.restore(step=3)
    assert found is not None and found.state["step"] == 3
    assert len(list(durable.directory(3).glob("*.safetensors"))) == 1


def test_retention_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Cleaner, "retain", fail)
        with nostall.Checkpointer(durable=tmp_path, keep=1) as ckpt:
            for step in (1, 2):
                ckpt.save(state_of(step), step, level="durable")
                ckpt.wait(60)
    assert "old checkpoints stay: MemoryError" in caplog.text
    assert steps_in(tmp_path) == [1, 2]


def two_tiers(tmp_path: Path) -> tuple[Store, Store]:
    """Steps 1 to 3 on both."""
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep_fast=3) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step, level="durable")
        ckpt.wait(60)
    return Store(tmp_path / "fast", "fast"), Store(tmp_path / "durable", "durable")


def test_a_fast_copy_stays_while_the_durable_one_lacks_a_part(tmp_path: Path) -> None:
    fast, durable = two_tiers(tmp_path)
    (part,) = durable.directory(1).glob("*.safetensors")
    part.unlink()
    Cleaner(fast, durable, Settings(Keep(5))).retain(set())
    assert fast.steps() == [1, 3]


class Unsynced:
    """A durable storage that syncs no directory with a manifest in it while `broken` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.broken, sync = True, nostall.checkpoint._store.sync_directory

        def sync_or_fail(path: Path) -> None:
            if self.broken and root in path.parents and (path / "manifest.json").exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(path)

        monkeypatch.setattr(nostall.checkpoint._store, "sync_directory", sync_or_fail)


def test_a_save_whose_rename_is_not_synced_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Unsynced(monkeypatch, tmp_path / "durable")
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        saved = ckpt.save(state_of(1), 1, level="fast")
        assert saved is not None
        for _ in range(2):  # the manifest is there at the second attempt
            with pytest.raises(IoError, match="Input/output error"):
                ckpt.wait()
        assert saved.level == "fast"
        (manifest,) = (tmp_path / "durable").glob("step-*/manifest.json")
        with manifest.open() as before:  # so that no other file gets its number
            disk.broken = False
            ckpt.wait()
            assert saved.level == "durable"
            assert not os.path.samestat(os.fstat(before.fileno()), manifest.stat())  # renamed anew


def test_no_storage_has_a_save_whose_rename_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Unsynced(monkeypatch, tmp_path)
    ckpt = nostall.Checkpointer(durable=tmp_path, max_failures=1)
    ckpt.save(state_of(1), 1)
    assert ckpt._background.wait(drained=False, timeout=60)
    with pytest.raises(IoError, match="safe nowhere"):
        ckpt.save(state_of(2), 2)
    with pytest.raises(IoError, match="the newest checkpoint, of step 2, is safe nowhere"):
        ckpt.close()


def test_a_rename_that_an_earlier_job_has_not_synced_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, durable = two_tiers(tmp_path)
    disk = Unsynced(monkeypatch, tmp_path / "durable")
    for broken, waits, left in ((True, [1, 2, 3], [1, 2, 3]), (False, [], [3])):
        disk.broken = broken
        assert [m.step for m in undrained(fast, durable, Keep(5))] == waits
        Cleaner(fast, durable, Settings(Keep(5))).retain(set())
        assert fast.steps() == left


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_a_full_storage_has_is_durable_unless_a_sync_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    two_tiers(tmp_path)
    synced, synchronize = [], os.fsync

    def note(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        synchronize(fd)

    store = Store(tmp_path / "durable", "durable")
    store.own()
    manifest = store.manifests()[0]
    directory = store.directory(manifest.step)
    failing = Raising(OSError(number, os.strerror(number)))
    monkeypatch.setattr(nostall.checkpoint._store, "_write_durably", failing)
    monkeypatch.setattr(os, "fsync", note)
    assert store.is_durable(manifest) == (number != errno.EIO)
    if number == errno.EIO:
        failing.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert not store.is_durable(manifest)
    else:
        assert synced == [directory / "manifest.json", directory, store.root]


def test_a_rename_whose_sync_says_that_the_storage_is_full_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_tiers(tmp_path)
    store = Store(tmp_path / "durable", "durable")
    store.own()
    sync, left = nostall.checkpoint._store.sync_directory, [1]

    def full_once(path: Path) -> None:
        if left and left.pop():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(nostall.checkpoint._store, "sync_directory", full_once)
    assert not store.is_durable(store.manifests()[0])
    assert store.is_durable(store.manifests()[0])  # renamed anew


def test_a_rank_that_does_not_own_the_storage_takes_no_manifest_for_durable_before_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = (Store(tmp_path, "durable") for _ in range(2))
    owner.own()
    disk = Unsynced(monkeypatch, tmp_path)
    manifest = Manifest(1, "aaaaaaaa-000001", 2, (), replicated=True)
    owner.prepare(1)
    with pytest.raises(IoError):
        owner.commit(manifest, 0, Part(0, part_name(0, manifest.id), 0, ()), timeout=60)
    disk.broken = False
    with pytest.raises(IoError, match="Input/output error"):
        other.confirm(manifest)
    owner._taken(manifest, 0).write_bytes(b"")
    with pytest.raises(IoError, match="rank 0 has not synced it yet"):
        other.confirm(manifest)
    owner.confirm(manifest)
    assert other.is_durable(manifest)
    owner._taken(manifest, 0).write_bytes(b"true")
    assert Store(tmp_path, "durable").is_durable(manifest)


def empty_save(step: int, world_size: int = 2) -> Manifest:
    """Of parts without bytes."""
    id = f"aaaaaaaa-{step:06d}"
    parts = tuple(Part(rank, part_name(rank, id), 0, ()) for rank in range(world_size))
    return Manifest(step, id, world_size, parts, sequence=step)


def copy_alone(store: Store, manifest: Manifest) -> None:
    """As rank 0 copies all parts by itself."""
    copy_all(store, manifest, lambda part, name: (store.directory(manifest.step) / name).touch())


def marks_in(store: Store, step: int) -> list[str]:
    return [path.name for path in store.directory(step).glob("taken-00000.*")]


@pytest.mark.parametrize("world_size", [1, 2])  # of the job that has saved it
def test_a_copy_that_rank_0_makes_alone_counts_for_no_rank_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    owner, manifest = Store(tmp_path, "durable"), empty_save(1, world_size)
    owner.own()
    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):
        with monkeypatch.context() as full:
            full.setattr(nostall.checkpoint._store, "_write_durably", Raising(error))
            with pytest.raises(type(error)):
                copy_alone(owner, manifest)
        assert not owner.directory(1).exists()  # it certainly has none
    disk = Unsynced(monkeypatch, tmp_path)
    with pytest.raises(IoError, match="Input/output error"):
        copy_alone(owner, manifest)
    disk.broken = False
    assert not Store(tmp_path, "durable").is_durable(manifest)
    copy_alone(owner, manifest)
    assert marks_in(owner, 1) == []
    assert Store(tmp_path, "durable").is_durable(manifest)


def test_a_mark_that_cannot_be_removed_goes_when_the_save_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, manifest = Store(tmp_path, "durable"), empty_save(1)
    owner.own()
    there = owner._is_there

    def stale(manifest: Manifest) -> None:
        there(manifest)
        patched.setattr(owner, "check_owned", Raising(OSError(errno.ESTALE, "stale")))

    with monkeypatch.context() as patched:
        patched.setattr(owner, "_is_there", stale)
        copy_alone(owner, manifest)
    assert len(marks_in(owner, 1)) == 1
    owner.confirm(manifest)
    assert marks_in(owner, 1) == [] and Store(tmp_path, "durable").is_durable(manifest)


def test_a_late_thread_leaves_the_mark_of_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, next_job, manifest = Store(tmp_path, "durable"), Store(tmp_path, "durable"), empty_save(1)
    late.own()
    go_on, inside = threading.Event(), threading.Event()
    sync = nostall.checkpoint._store.sync_directory

    def hang(path: Path) -> None:
        if threading.current_thread() is thread and path == late.directory(1):
            inside.set()
            assert go_on.wait(60)
        sync(path)

    def work() -> None:
        with pytest.raises(LostStoreError):
            copy_alone(late, manifest)
        ended.append(True)

    ended: list[bool] = []
    thread = threading.Thread(target=work)
    monkeypatch.setattr(nostall.checkpoint._store, "sync_directory", hang)
    thread.start()
    assert inside.wait(60)
    late.disown()
    next_job.own()
    next_job.clean()
    next_job.prepare(1)
    next_job._mark(manifest)
    go_on.set()
    thread.join()
    assert ended == [True] and len(marks_in(next_job, 1)) == 1


def test_a_copy_of_before_that_is_confirmed_leaves_the_mark_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = Store(tmp_path, "durable"), empty_save(1)
    store.own()
    copy_alone(store, manifest)
    before = store.find(1, manifest.id)
    assert before is not None
    store.disown()
    store.own()
    store._synced.clear()  # another process has made it
    mark, write = store._mark, nostall.checkpoint._store._write_durably
    marks: list[list[str]] = []

    def mark_and_confirm(manifest: Manifest) -> None:
        mark(manifest)
        thread.start()
        thread.join(0.3)  # it waits until the copy is complete

    def note(path: Path, data: bytes) -> None:
        if threading.current_thread() is not thread and path.name == "manifest.json":
            marks.append(marks_in(store, 1))
        write(path, data)

    monkeypatch.setattr(store, "_mark", mark_and_confirm)
    monkeypatch.setattr(nostall.checkpoint._store, "_write_durably", note)
    thread = threading.Thread(target=store.confirm, args=(before,))
    copy_alone(store, manifest)
    thread.join()
    assert len(marks) == 1 and len(marks[0]) == 1
    assert marks_in(store, 1) == []


def test_without_its_mark_rank_0_completes_no_save_of_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, manifest = Store(tmp_path, "durable"), empty_save(1)
    owner.own()
    owner.prepare(1)
    owner._note(manifest, 1).write_text(json.dumps(manifest.parts[1].to_dict()))
    monkeypatch.setattr(owner, "_mark", Raising(IoError("no room for a mark")))
    assert owner.commit(manifest, 0, manifest.parts[0], timeout=60) == "no room for a mark"
    assert owner.find(1, manifest.id) is None


def test_a_rank_that_does_not_own_the_storage_leaves_the_mark(tmp_path: Path) -> None:
    owner, other, manifest = Store(tmp_path, "durable"), Store(tmp_path, "durable"), empty_save(1)
    owner.own()
    copy_alone(owner, manifest)
    lock = other._changing

    @contextlib.contextmanager
    def as_another_thread_confirms() -> Iterator[None]:
        with lock:
            other._synced[manifest.id] = True
            owner._mark(manifest)  # of a second copy
            yield

    other._changing = as_another_thread_confirms()  # type: ignore[assignment]
    other.confirm(manifest)
    assert len(marks_in(owner, 1)) == 1


def test_a_save_that_rank_0_gave_up_before_keeps_the_mark_of_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, first, second = Store(tmp_path, "durable"), empty_save(1), empty_save(2)
    owner.own()
    owner.prepare(1)
    owner._note(first, 1).write_bytes(b'{"failed": "full"}')
    assert owner.commit(first, 0, first.parts[0], timeout=60) == "rank 1: full"
    disk = Unsynced(monkeypatch, tmp_path)
    with pytest.raises(IoError):
        copy_alone(owner, first)
    disk.broken = False
    owner.prepare(2)
    owner._note(second, 1).write_text(json.dumps(second.parts[1].to_dict()))
    assert owner.commit(second, 0, second.parts[0], timeout=60) == ""
    assert len(marks_in(owner, 1)) == 1 and marks_in(owner, 2) == []
    assert not Store(tmp_path, "durable").is_durable(first)


def test_the_next_job_removes_a_mark_once_the_save_is_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, manifest = Store(tmp_path, "durable"), empty_save(1)
    owner.own()
    disk = Unsynced(monkeypatch, tmp_path)
    with pytest.raises(IoError):
        copy_alone(owner, manifest)
    owner.disown()
    for broken in (True, False):
        disk.broken = broken
        owner = Store(tmp_path, "durable")
        owner.own()
        owner.clean()
        assert len(marks_in(owner, 1)) == broken
        disk.broken = False
        assert Store(tmp_path, "durable").is_durable(manifest) != broken
        if broken:
            with monkeypatch.context() as patched:
                patched.setattr(owner, "_lift", Raising(OSError(errno.ESTALE, "stale")))
                owner.confirm(manifest)
            assert len(marks_in(owner, 1)) == 1
            owner.confirm(manifest)
            assert marks_in(owner, 1) == []
            owner._mark(manifest)
        owner.disown()


def test_room_is_made_without_a_look_at_the_durable_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, durable = two_tiers(tmp_path)
    cleaner = Cleaner(fast, durable, Settings(Keep(5)))
    cleaner.begin()
    shutil.rmtree(durable.root)
    coming = fast.manifests()[-1]
    looks: list[str] = []
    for name in ("steps", "branch", "read", "has"):
        inner = getattr(Store, name)

        def noted(store: Store, *more: Any, inner: Any = inner) -> Any:
            looks.append(store.kind)
            return inner(store, *more)

        monkeypatch.setattr(Store, name, noted)
    cleaner.make_room(fast, 1 << 62, dataclasses.replace(coming, step=4, id="coming-000000"))
    assert set(looks) == {"fast"}
    assert fast.steps() == []  # all of them were durable


@pytest.mark.parametrize("durable", [True, False])
def test_no_more_is_removed_than_makes_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    durable: bool,
) -> None:
    fast, there = two_tiers(tmp_path)
    if not durable:
        shutil.rmtree(there.root)
    cleaner, coming = Cleaner(fast, there, Settings(Keep(1))), fast.manifests()[-1]
    cleaner.begin()

    def room(_: Any) -> Any:
        free = 0 if fast.directory(1).exists() else 1 << 20
        return os.statvfs_result((4096, 4096, free, free, free, 9, 9, 9, 0, 255))

    monkeypatch.setattr(os, "statvfs", room)
    cleaner.make_room(fast, 1, dataclasses.replace(coming, step=4, id="coming-0", sequence=1 << 40))
    assert fast.steps() == [2, 3]
    assert ("step 1 is removed before the one that replaces it" in caplog.text) != durable


@pytest.mark.parametrize("keep", [Keep(1), Keep(1, best=1, superseded=1), Keep(1, superseded=0)])
@pytest.mark.parametrize("durable", [False, True])
def test_room_is_made_of_what_is_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Keep, durable: bool
) -> None:
    places = (tmp_path / "fast", tmp_path / "durable" if durable else None)
    with monkeypatch.context() as without_drains:
        without_drains.setattr(BackgroundWriter, "_drain", lambda *_: None)
        with nostall.Checkpointer(*places, keep_fast=9) as ckpt:
            for step in (40, 50, 60, 70):
                ckpt.save(state_of(step), step, level="fast", metric=step)
            found = ckpt.restore(50)
            sequence, abandoned = ckpt._lineage.save(55)
    assert found is not None
    fast = Store(tmp_path / "fast", "fast")
    cleaner = Cleaner(fast, Store(tmp_path / "durable", "durable"), Settings(keep))
    cleaner.begin()
    coming = dataclasses.replace(
        found.manifest, step=55, id="coming-0", sequence=sequence, abandoned=abandoned
    )
    cleaner.make_room(fast, 1 << 62, coming)
    assert 50 in fast.steps()  # what a restart goes on from until the new one is complete
    assert 60 not in fast.steps() and (70 in fast.steps()) == (keep.superseded != 0)


@pytest.mark.parametrize(("replicated", "parts"), [(True, 1), (False, 2)])
def test_room_is_made_for_the_parts_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicated: bool, parts: int
) -> None:
    asked: list[int] = []

    def note(self: Cleaner, fast: Store, size: int, coming: Manifest) -> None:
        asked.append(size)

    monkeypatch.setattr(Cleaner, "make_room", note)

    def work(rank: int, gather: Any) -> int:
        with ranked(tmp_path, 2, replicated=replicated)(rank, gather) as ckpt:
            saved = ckpt.save({"w": np.zeros(5000)}, 1, level="fast")
            assert saved is not None
            return saved.bytes

    size, _ = World(2).run(work)
    assert asked == [parts * size]


class Full:
    """Writes of snapshots that leave a file and find no room, where `refuses` says so of its path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: Any) -> None:
        inner = _native.SnapshotWrite

        def write(snapshot: Any, path: str, **more: Any) -> Any:
            write = inner(snapshot, path, **more)
            if not refuses(Path(path)):
                return write
            Path(path).write_bytes(b"what was reserved")
            words = os.strerror(errno.ENOSPC)
            full = IoError(f"no room for 9 bytes of a checkpoint {path}: {words}")
            full.errno = errno.ENOSPC
            return SimpleNamespace(run=Raising(full), hurry=write.hurry, stop=write.stop)

        monkeypatch.setattr(_native, "SnapshotWrite", write)


def test_ranks_wait_for_the_one_that_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, make_room = ranked(tmp_path, 2), Cleaner.make_room
    found_full, roomy = threading.Event(), threading.Event()
    left: list[Path] = []

    def slowly(self: Cleaner, fast: Store, size: int, coming: Manifest) -> None:
        assert found_full.wait(60)
        make_room(self, fast, size, coming)
        roomy.set()

    def refuses(path: Path) -> bool:
        if "fast" not in path.parts or "rank-00001" not in path.name or roomy.is_set():
            return False
        left.extend(path.parent.glob("rank-00001*"))
        found_full.set()
        return True

    monkeypatch.setattr(Cleaner, "make_room", slowly)
    monkeypatch.setattr(nostall.checkpoint._background, "_ROOM_SECONDS", 60.0)
    Full(monkeypatch, refuses)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            saved = ckpt.save(state_of(rank), 1, level="durable")
            assert saved is not None
            return saved.problems, ckpt.restore().tier

    assert World(2).run(work) == [([], "fast")] * 2
    assert left == []  # the bytes of an attempt are free while the others look for room


@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_without_room_goes_before_its_rank_leaves_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    make, commit, left = ranked(tmp_path, 2), Store.commit, {}

    def noted(store: Store, manifest: Manifest, rank: int, mine: Any, **more: Any) -> str:
        if isinstance(mine, str):
            left[rank] = [p.name for p in store.root.rglob(f"rank-{rank:05d}*")]
        return commit(store, manifest, rank, mine, **more)

    monkeypatch.setattr(Store, "commit", noted)
    monkeypatch.setattr(nostall.checkpoint._background, "_ROOM_SECONDS", 0.0)
    Full(monkeypatch, lambda path: f"rank-{failing:05d}" in path.name and "fast" in path.parts)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            saved = ckpt.save(state_of(rank), 1, level="durable")
            assert saved is not None
            return saved.problems

    for problems in World(2).run(work):
        assert len(problems) == 1 and os.strerror(errno.ENOSPC) in problems[0]
    # The other rank leaves word too where the step's directory goes before it has a file there.
    assert failing in left and not any(left.values())
    assert steps_in(tmp_path / "durable") == [1] and steps_in(tmp_path / "fast") == []


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_says_survives_that_another_removes_the_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, again: bool
) -> None:
    """A rank that had no room removes the empty directory, and a third one may make it again."""
    store, manifest = Store(tmp_path, "fast"), Manifest(1, "aaaaaaaa-000001", 2, ())
    opened, removed = os.open, []

    def late(path: Any, *more: Any, **options: Any) -> int:
        if len(removed) == 3 or not str(path).endswith(".json.partial"):
            return opened(path, *more, **options)
        removed.append(path.parent)
        os.rmdir(path.parent)
        try:
            return opened(path, *more, **options)
        finally:
            if again:
                os.mkdir(path.parent)

    monkeypatch.setattr(os, "open", late)
    if rank == 0:
        store.abort(manifest, "no room")
        assert store.aborted(manifest) == "no room"
    else:
        assert store._leave_word(manifest, rank, b"{}") == ""
        assert [*store._words(manifest, [rank])] == [(rank, b"{}")]
    assert len(removed) == 3


def test_a_word_whose_directory_is_removed_for_ever_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = Store(tmp_path, "fast"), Manifest(1, "aaaaaaaa-000001", 2, ())
    mkdir = Path.mkdir

    def made_and_removed(path: Path, *arguments: Any, **options: Any) -> None:
        mkdir(path, *arguments, **options)
        path.rmdir()

    monkeypatch.setattr(Path, "mkdir", made_and_removed)
    reason = store._leave_word(manifest, 1, b"{}")
    assert reason.endswith(f"{store._note(manifest, 1)}: its directory is removed again and again")
    store.abort(manifest, "no room")  # which no rank is told, and which ends no job
    assert store.aborted(manifest) is None


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["fast", "durable"])
@pytest.mark.parametrize("times", [3, 1000])
def test_a_part_is_written_although_others_remove_its_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, times: int, again: bool
) -> None:
    """As retention of rank 0 does, which took an earlier save of the step from it; a rank that leaves
    word that it has failed may make it again."""
    left, write, copy = [times], BackgroundWriter._write_file, BackgroundWriter._copy_here
    step = tmp_path / kind / "step-000000000001"

    def removing(inner: Any) -> Any:
        def late(background: BackgroundWriter, *arguments: Any) -> Any:
            removed = left[0] > 0
            if removed:
                left[0] -= 1
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(step)
            try:
                return inner(background, *arguments)
            finally:
                if removed and again:
                    step.mkdir()

        return late

    if kind == "fast":
        monkeypatch.setattr(BackgroundWriter, "_write_file", removing(write))
    else:
        monkeypatch.setattr(BackgroundWriter, "_copy_here", removing(copy))
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        saved = ckpt.save(state_of(1), 1)
        assert saved is not None
        ckpt._background.wait(drained=False, timeout=60)
        with contextlib.suppress(IoError):
            saved.wait("durable", 60)
        if times == 3:
            assert saved.level == "durable" and saved.problems == [] and left == [0]
        else:  # it is no other rank that removes it so often
            assert "No such file" in saved.problems[0] and left[0] > 0
            left[0] = 0


def test_what_rank_0_cannot_look_at_keeps_no_rank_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(nostall.checkpoint._checkpointer, "undrained", Raising(error))

    def work(rank: int, gather: Any) -> int:
        with ranked(tmp_path, 2)(rank, gather) as ckpt:
            return ckpt.rank

    assert World(2).run(work) == [0, 1]
    assert "at the next start: [Errno 5]" in caplog.text


@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_without_room_goes_before_its_rank_leaves_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    make, commit, copy, left = ranked(tmp_path, 2), Store.commit, Store.copy, []
    copied = threading.Event()

    def noted(store: Store, manifest: Manifest, rank: int, mine: Any, **more: Any) -> str:
        if isinstance(mine, str):
            left.append([p.name for p in store.root.rglob(f"rank-{rank:05d}*")])
        return commit(store, manifest, rank, mine, **more)

    def full(store: Store, source: Path, step: int, name: str, part: Part, pacing: Any) -> Any:
        inner = copy(store, source, step, name, part, pacing)
        if part.rank != failing or left:

            def run() -> Any:
                try:
                    return inner.run()
                finally:
                    copied.set()

            return SimpleNamespace(run=run, hurry=inner.hurry, stop=inner.stop)
        # Else the failing rank may remove the step's directory before the other one has a file there.
        assert copied.wait(60)
        (store.directory(step) / name).write_bytes(b"what was reserved")
        return SimpleNamespace(run=Raising(IoError("full")), hurry=inner.hurry, stop=inner.stop)

    monkeypatch.setattr(Store, "commit", noted)
    monkeypatch.setattr(Store, "copy", full)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            with pytest.raises(IoError, match=f"rank {failing}: full"):
                ckpt.save(state_of(rank), 1, level="durable")
            ckpt.wait(60)  # rank 0 copies all parts alone

    assert World(2).run(work) == [None, None]
    assert left == [[]] and steps_in(tmp_path / "durable") == [1]


def test_a_failed_drain_of_several_ranks_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ranked(tmp_path, 2)
    commit, failing = Store.commit, [True]

    def commit_or_fail(store: Store, manifest: Manifest, rank: int, mine: Any, **more: Any) -> str:
        if store.kind == "durable" and rank == 1 and failing[0]:
            mine = "rank 1's disk is full"
        return commit(store, manifest, rank, mine, **more)

    monkeypatch.setattr(Store, "commit", commit_or_fail)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            saved = ckpt.save(state_of(rank), 1)
            assert saved is not None
            with pytest.raises(IoError, match="disk is full"):
                saved.wait("durable", 60)
            gather(b"")
            failing[0] = False
            ckpt.save(state_of(10 + rank), 2, level="durable")
            ckpt.wait(60)
            gather(b"")
            found = ckpt.restore(1)
            return found and (found.tier, found.state["step"])

    assert World(2).run(work) == [("durable", 0), ("durable", 1)]
    names = {p.name.count(".") for p in (tmp_path / "durable").glob("*1/rank-*")}
    assert names == {3}  # of a second attempt


def commit_all(store: Any, manifest: Manifest, failing: str = "") -> list[str]:
    """What a commit of two ranks returns; rank 1 has failed if `failing` says why."""
    parts = [Part(rank, part_name(rank, manifest.id), 0, ()) for rank in range(2)]
    words = [parts[0], failing or (None if manifest.replicated else parts[1])]
    told: list[str] = ["", ""]

    def commit(rank: int) -> None:
        told[rank] = store.commit(manifest, rank, words[rank], timeout=60)

    thread = threading.Thread(target=commit, args=(1,))
    thread.start()
    commit(0)
    thread.join(60)
    return told


def test_a_complete_save_removes_what_those_before_have_left(tmp_path: Path) -> None:
    store = Store(tmp_path, "durable")
    saves = [Manifest(step, f"aaaaaaaa-00000{step}", 2, (), sequence=step) for step in range(4)]
    store.abort(saves[0], "step 3 is complete already")
    store.prepare(1)
    assert commit_all(store, saves[1], "the disk is full") == ["rank 1: the disk is full"] * 2
    store.discard(1, part_name(0, saves[1].id))
    store._leave_word(saves[2], 1, b"{}")  # of a rank that had not heard yet
    store.abort(saves[2], "step 3 is complete already")
    (store.directory(2) / part_name(0, saves[2].id)).write_text("of an attempt under way")
    assert store.steps() == [0, 1, 2]
    store.prepare(3)
    assert commit_all(store, saves[3]) == ["", ""]
    assert store.steps() == [2, 3] and store.find(3, saves[3].id) is not None
    assert os.listdir(store.directory(2)) == [part_name(0, saves[2].id)]


def test_what_cannot_be_removed_once_goes_after_the_next_complete_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, forget = Store(tmp_path, "durable"), Store._forget
    saves = [Manifest(step, f"aaaaaaaa-00000{step}", 2, (), sequence=step) for step in range(3)]
    store.abort(saves[0], "step 1 is complete already")
    fails = iter([True])

    def once(self: Store, step: int, id: str) -> None:
        if next(fails, False):
            raise OSError(errno.ESTALE, "Stale file handle")
        forget(self, step, id)

    monkeypatch.setattr(Store, "_forget", once)
    for number, left in ((1, [0, 1]), (2, [1, 2])):
        store.prepare(number)
        assert commit_all(store, saves[number]) == ["", ""]
        assert store.steps() == left


def test_saves_whose_files_cannot_be_removed_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tried = Store(tmp_path, "durable"), []
    saves = [Manifest(step, f"aaaaaaaa-00000{step}", 2, (), sequence=step) for step in range(6)]
    for manifest in saves[:4]:
        store.abort(manifest, "step 4 is complete already")

    def fail(_: Store, step: int, __: str) -> None:
        tried.append(step)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Store, "_forget", fail)
    for manifest in saves[4:]:
        store.prepare(manifest.step)
        assert commit_all(store, manifest) == ["", ""]
    assert tried == [0, 1, 2, 3]


def test_late_ranks_of_a_replicated_state_are_told_of_the_last_saves_that_were_given_up(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path, "durable")
    saves = [
        Manifest(step, f"aaaaaaaa-{step:06d}", 2, (), sequence=step, replicated=True)
        for step in range(13)
    ]
    for manifest in saves[:12]:
        store.abort(manifest, f"step {manifest.step + 1} is complete already")
    store.prepare(12)
    assert commit_all(store, saves[12]) == ["", ""]
    assert store.steps() == list(range(2, 13))
    assert store.commit(saves[2], 1, None, timeout=60) == "step 3 is complete already"


def test_drains_that_are_skipped_leave_no_directories(tmp_path: Path) -> None:
    make, held = ranked(tmp_path, 2, keep=1, keep_fast=2), threading.Barrier(4)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            engine = ckpt._background
            superseded = engine._superseded

            def once_all_wait(manifest: Manifest) -> str:
                if manifest.step == 1:
                    held.wait(60)
                return superseded(manifest)

            engine._superseded = once_all_wait  # type: ignore[method-assign]
            for step in (1, 2, 3):
                ckpt.save(state_of(rank), step, level="fast")
            held.wait(60)
            ckpt.wait(60)
            return [s.level for s in ckpt.history]

    assert World(2).run(work) == [["fast", "fast", "durable"]] * 2
    assert Store(tmp_path / "durable", "durable").steps() == [3]


def test_a_drain_that_the_end_stops_is_left_to_the_next_start(tmp_path: Path) -> None:
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        engine = ckpt._background

        def stop(drain: Any) -> None:
            engine._stopping = True
            raise StoppedError("the job ends")

        engine._drain = stop  # type: ignore[method-assign]
        saved = ckpt.save(state_of(1), 1)
        assert saved is not None
        with pytest.raises(IoError, match="the next start copies it"):
            saved.wait("durable", 60)
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1]


@pytest.mark.parametrize("what", ["own", "leftover", "together"])
def test_a_copy_under_way_ends_with_the_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    """Its second block would have to wait for years."""
    ranks, state = 1 + (what == "together"), {"w": np.zeros(_native.CHECKPOINT_BLOCK, np.uint8)}
    if what == "leftover":
        with nostall.Checkpointer(tmp_path / "fast", level="fast") as ckpt:
            ckpt.save(state, 1)

    def work(rank: int, gather: Any) -> bool:
        ckpt = ranked(tmp_path, ranks, rate="1B")(rank, gather)
        if what != "leftover":
            ckpt.save(state, 1, level="fast")
        engine = ckpt._background
        while engine._copying is None:
            time.sleep(0.01)
        engine.stop(60)
        alive = engine._threads["drain"].is_alive()
        ckpt.close()
        return alive

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    caplog.set_level("INFO", "nostall")
    assert World(ranks).run(work) == [False] * ranks
    assert raised == []
    assert caplog.text.count("the next start copies it") == ranks
    assert "cannot be copied" not in caplog.text
    assert list((tmp_path / "durable").glob("*1/*.json")) == []  # neither a manifest nor a word


def of_two_ranks(tmp_path: Path) -> tuple[Store, Store, Manifest]:
    """A checkpoint on the fast one of two stores."""
    fast, durable = Store(tmp_path / "fast", "fast"), Store(tmp_path / "durable", "durable")
    data, id = b"a part", "aaaaaaaa-000001"
    parts = [Part(rank, part_name(rank, id), 6, (_native.crc32c(data),)) for rank in (0, 1)]
    manifest = Manifest(1, id, 2, tuple(parts), sequence=1)
    for store in (fast, durable):
        store.make()
    for part in parts:
        (fast.prepare(1) / part.name).write_bytes(data)
    fast.publish(manifest)
    return fast, durable, manifest


@pytest.mark.parametrize("taken", [True, False])
def test_a_rank_that_the_end_meets_in_its_wait_for_rank_0_leaves_the_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Its part stays if rank 0 has taken its word."""
    fast, durable, manifest = of_two_ranks(tmp_path)
    engine, leave = BackgroundWriter(fast, durable, 1, Settings(Keep(5))), Store._leave_word

    def left(store: Store, *word: Any) -> str:
        why = leave(store, *word)
        assert not taken or len(list(store._words(manifest, [1]))) == 1
        engine._stopping = True
        return why

    monkeypatch.setattr(Store, "_leave_word", left)
    with pytest.raises(StoppedError, match="part stays" if taken else "before this job's end$"):
        engine._drain_together(Drain(manifest), "")
    assert durable.has(1, manifest.parts[1]) == taken


def test_after_the_end_no_file_is_made(tmp_path: Path) -> None:
    fast, durable, manifest = of_two_ranks(tmp_path)
    engine = BackgroundWriter(fast, durable, 0, Settings(Keep(5)))
    engine.stop(0.0)
    with pytest.raises(StoppedError, match="the checkpointer is closed"):
        engine._copy_here(Drain(manifest), manifest.parts[0], "copy")
    assert list(durable._path.rglob("copy*")) == []


def test_what_cannot_be_listed_supersedes_nothing(tmp_path: Path) -> None:
    """Other ranks would wait for rank 0."""
    fast, durable, manifest = of_two_ranks(tmp_path)
    engine = BackgroundWriter(fast, durable, 0, Settings(Keep(1)))
    newer = dataclasses.replace(manifest, step=2, id="aaaaaaaa-000002", sequence=2)
    engine._drains.append(Drain(newer))
    assert engine._superseded(manifest).startswith("step 2 is complete already")
    durable._path.rmdir()
    durable._path.write_text("not a directory")
    assert engine._superseded(manifest) == ""


def test_a_leftover_that_is_superseded_is_not_copied(tmp_path: Path) -> None:
    places, waiting = (tmp_path / "fast", tmp_path / "durable"), threading.Event()
    with nostall.Checkpointer(places[0], level="fast") as ckpt:
        ckpt.save(state_of(1), 1)
    superseded, copied = BackgroundWriter._superseded, []

    def once_another_waits(self: BackgroundWriter, manifest: Manifest) -> str:
        assert waiting.wait(60)
        why = superseded(self, manifest)
        copied.append((manifest.step, not why))
        return why

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BackgroundWriter, "_superseded", once_another_waits)
        with nostall.Checkpointer(*places, keep=1) as ckpt:
            ckpt.save(state_of(2), 2, level="fast")
            waiting.set()
            ckpt.wait(60)
    assert copied == [(1, False), (2, True)]
    assert steps_in(places[0]) == steps_in(places[1]) == [2]


@pytest.mark.parametrize("verify", [True, False])
def test_copies_are_read_back_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    damaged = Raising(IoError("it reads back with damaged blocks"))
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", verify=verify) as ckpt:
        monkeypatch.setattr(nostall.checkpoint._background, "read_back", damaged)
        saved = ckpt.save(state_of(1), 1)
        assert saved is not None
        told = pytest.raises(IoError, match="it reads back with damaged blocks")
        with told if verify else contextlib.nullcontext():
            saved.wait("durable", 60)
        monkeypatch.setattr(nostall.checkpoint._background, "read_back", read_back)
    assert steps_in(tmp_path / "durable") == [1]


def test_a_manifest_of_another_step_is_damaged(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
    store = Store(tmp_path, "durable")
    (entry,) = store.entries()
    shutil.copytree(store.directory(1), store.directory(2))
    found = {e.step: e.damage for e in store.entries()}
    assert found == {1: "", 2: f"{store.directory(2) / entry.name} is of step 1"}


def test_a_rename_is_not_taken_for_one_that_was_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone")

    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(FileNotFoundError, match="gone"):
        rename(tmp_path / "old", tmp_path / "new")


def test_a_copy_that_reads_back_differently_is_told(tmp_path: Path) -> None:
    data = b"a part of a checkpoint"
    store = Store(tmp_path, "durable")
    store.prepare(1)
    (store.directory(1) / "copy").write_bytes(data)
    for crc, bad in ((_native.crc32c(data), False), (_native.crc32c(b"other"), True)):
        part = Part(0, "copy", len(data), (crc,))
        with (
            pytest.raises(IoError, match="copy reads back with 1 damaged blocks")
            if bad
            else (contextlib.nullcontext())
        ):
            read_back(store, 1, part, part.name, _native.Priority.normal)


def test_a_checkpoint_that_goes_before_it_is_drained_is_told(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        (manifest,) = ckpt.durable.manifests()
        ckpt.durable.remove(1, "aaaaaaaa-000001")  # another save of the step
        assert steps_in(tmp_path) == [1]
        ckpt.durable.remove(1, manifest.id)
        with pytest.raises(IoError, match=r"the checkpoint in .* is gone"):
            ckpt._background._complete(ckpt.durable, manifest)


def test_a_save_that_is_removed_at_once_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Store.commit

    def remove(store: Store, manifest: Manifest, *more: Any, **options: Any) -> str:
        reason = commit(store, manifest, *more, **options)
        shutil.rmtree(store.directory(manifest.step))
        return reason

    monkeypatch.setattr(Store, "commit", remove)
    ckpt = nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable")
    saved = ckpt.save(state_of(1), 1)
    assert saved is not None
    with pytest.raises(IoError, match=r"step 1 is not saved: the checkpoint in .* is gone"):
        saved.wait("fast", 60)
    with pytest.raises(IoError, match="of step 1, is safe nowhere"):
        ckpt.close()


def test_what_the_system_says_of_files_is_told(tmp_path: Path) -> None:
    fast, _, manifest = of_two_ranks(tmp_path)
    (fast.directory(2) / "manifest.json").mkdir(parents=True)
    entry = fast.read(2, "manifest.json")
    assert entry is not None and entry.unread and "cannot be read: Is a directory" in entry.damage
    assert fast.files(3) == {} and len(fast.files(1)) == 2
    path = fast.directory(1) / manifest.parts[1].name
    path.unlink()
    assert fast.missing(manifest) == f"{path} does not exist"
    path.symlink_to(path.name)  # a loop
    with pytest.raises(IoError, match=f"cannot look for {path}: Too many levels"):
        fast.missing(manifest)


def test_a_directory_that_is_not_there_is_gone(tmp_path: Path) -> None:
    store = Store(tmp_path / "durable", "durable")
    store.own()
    (tmp_path / "durable").rename(tmp_path / "away")
    with pytest.raises(IoError, match=r"not the directory that .*\.sequence is gone"):
        store.check_owned()
    (tmp_path / "away").rename(tmp_path / "durable")
    store.check_owned()
    store.disown()


def test_a_step_without_a_checkpoint_is_removed_too(tmp_path: Path) -> None:
    store = Store(tmp_path, "durable")
    (store.prepare(1) / part_name(0, "aaaaaaaa-000001")).write_text("of an attempt")
    store._in_use.clear()  # by the job that made it
    store.remove_step(1)
    assert store.steps() == []


@pytest.mark.parametrize(
    ("word", "stopped", "told"),
    [
        (b"{}", False, "rank 1: its word cannot be read: 'rank'"),
        (b"[]", False, "rank 1: its word cannot be read: list"),
        (b"no JSON", False, "rank 1: its word cannot be read: Expecting"),
        (None, True, "stopped"),
        (
            UnreachableError("it is away"),
            False,
            "ranks [1] did not finish their part in time: it is",
        ),
    ],
)
def test_why_rank_0_completes_nothing_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: Any, stopped: bool, told: str
) -> None:
    store, manifest = Store(tmp_path, "durable"), Manifest(1, "aaaaaaaa-000001", 2, ())
    store.prepare(1)
    timeout = 60.0
    if isinstance(word, bytes):
        assert store._leave_word(manifest, 1, word) == ""
    elif word is not None:
        monkeypatch.setattr(Store, "_words", Raising(word))
        timeout = 0.0
    mine = Part(0, part_name(0, manifest.id), 0, ())
    reason = store.commit(manifest, 0, mine, timeout=timeout, stopped=lambda: stopped)
    assert reason.startswith(told) and store.aborted(manifest) == reason


def test_a_rank_that_is_stopped_does_not_speak_of_a_timeout(tmp_path: Path) -> None:
    store = Store(tmp_path, "durable")
    store.prepare(1)
    part = Part(1, "rank-00001.aaaaaaaa-000001.safetensors", 0, ())
    words = store.commit(
        Manifest(1, "aaaaaaaa-000001", 2, ()), 1, part, timeout=600, stopped=lambda: True
    )
    assert words.endswith("before this job's end")


def test_ranks_of_which_one_has_saved_once_more_are_told_so(tmp_path: Path) -> None:
    store = Store(tmp_path, "durable")
    store.make()
    store.prepare(2)
    of_rank_0, of_rank_1 = (Manifest(2, f"aaaaaaaa-00000{n}", 2, ()) for n in (2, 1))
    parts = [
        Part(rank, part_name(rank, m.id), 0, ()) for rank, m in enumerate((of_rank_0, of_rank_1))
    ]
    told = "it is there by another number of save: all ranks must make the same calls"
    assert store._leave_word(of_rank_1, 1, json.dumps(parts[1].to_dict()).encode()) == ""
    assert told in store.commit(of_rank_0, 0, parts[0], timeout=0.0)
    assert told in store.commit(of_rank_1, 1, parts[1], timeout=600, stopped=lambda: True)
    store.prepare(3)
    alone = Manifest(3, "aaaaaaaa-000003", 2, ())
    assert told not in store.commit(alone, 0, Part(0, part_name(0, alone.id), 0, ()), timeout=0.0)


class Clock:
    """In the place of the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("world", [2, 8, 64, 1000])
def test_ranks_that_wait_look_at_a_directory_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    clock, looks, lists = Clock(), [], []
    read, aborted, manifests = Store.find, Store.aborted, Store.manifests

    def count(inner: Any, seen: list[Any]) -> Any:
        return lambda *these: (seen.append(these), inner(*these))[1]

    monkeypatch.setattr(nostall.checkpoint._store, "time", clock)
    monkeypatch.setattr(Store, "find", count(read, looks))
    monkeypatch.setattr(Store, "aborted", count(aborted, looks))
    monkeypatch.setattr(Store, "manifests", count(manifests, lists))
    store, seconds = Store(tmp_path, "durable"), 60 + nostall.checkpoint._store.GRACE_SECONDS
    store.prepare(1)
    manifest = Manifest(1, "aaaaaaaa-000001", world, ())
    part = Part(1, part_name(1, manifest.id), 0, ())
    assert "rank 0 did not complete step 1" in store.commit(manifest, 1, part, timeout=60)
    pause = min(2.0, max(0.02, world / 100))
    assert seconds / 2.1 <= len(looks) / 2 <= seconds / pause + 8 and not lists
    clock.now = 0.0
    assert "rank 0 did not complete" in store.commit(manifest, 1, None, timeout=60)
    assert len(lists) <= seconds / max(1.0, min(30.0, world / 10)) + 2
    words, rename = [], os.rename
    clock.now = 0.0
    monkeypatch.setattr(os, "rename", count(rename, words))
    part = Part(0, part_name(0, manifest.id), 0, ())
    assert "did not finish" in store.commit(manifest, 0, part, timeout=2)
    assert len(words) <= 2000 * 2 + 2 * world


# ---------------------------------------------------------------------- whose files


def test_files_of_users_stay_and_stop_nothing(tmp_path: Path) -> None:
    for step in range(1, 6):
        with nostall.Checkpointer(durable=tmp_path, keep=2, level="durable") as ckpt:
            ckpt.save(state_of(step), step)
            ckpt.wait(60)
            directory = tmp_path / f"step-{step:012d}"
            (directory / "notes.txt").write_text("mine")
            (directory / "rank-00000.mine.safetensors").write_text("mine")
            (directory / "exports").mkdir()
            (directory / "exports" / "model.onnx").write_text("mine")
            rubbish = directory / "rank-00007.aaaaaaaa-000001.safetensors"
            rubbish.write_text("ours")
    (tmp_path / "step-000000000077").write_text("mine")  # a file in the place of a directory
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.step == 5
    assert steps_in(tmp_path) == [4, 5] and not rubbish.exists()
    for step in range(1, 6):
        names = sorted(p.name for p in (tmp_path / f"step-{step:012d}").iterdir())
        assert names[0] == "exports" and "notes.txt" in names
        assert len(names) == (5 if step > 3 else 3), step
    Store(tmp_path, "durable").remove_step(5)
    assert (tmp_path / "step-000000000005" / "exports" / "model.onnx").exists()


def test_what_cannot_be_removed_keeps_no_other_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = os.unlink

    def busy(path: Any, **options: Any) -> None:
        if "step-000000000001" in str(path) and str(path).endswith(".safetensors"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, **options)

    with nostall.Checkpointer(durable=tmp_path, keep=9, level="durable") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step)
    monkeypatch.setattr(os, "unlink", busy)
    with nostall.Checkpointer(durable=tmp_path, keep=1, level="durable") as ckpt:
        ckpt.save(state_of(4), 4)
    assert steps_in(tmp_path) == [4] and "an old checkpoint stays" in caplog.text
    caplog.clear()
    nostall.Checkpointer(durable=tmp_path).close()  # rubbish by now, that stays too
    assert "an earlier job left" in caplog.text


# ---------------------------------------------------------------------- what file systems say


def test_a_rename_whose_answer_was_lost_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = os.rename, []

    def rename_and_say_no(old: Any, new: Any) -> None:
        real(old, new)
        lost.append(str(new))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old, None, new)

    monkeypatch.setattr(os, "rename", rename_and_say_no)
    make = ranked(tmp_path, 2, level="durable")

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            saved = ckpt.save(state_of(rank), 1)
            assert saved is not None
            gather(b"")
            return saved.problems

    assert World(2).run(work) == [[], []]
    assert any("taken-" in name for name in lost) and any("manifest" in name for name in lost)
    (tmp_path / "a").write_text("")
    monkeypatch.setattr(os, "rename", lambda old, new: real(old, tmp_path / "c") or real("", ""))
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("complete", [False, True])
def test_a_word_that_rank_0_takes_before_its_rename_is_looked_at_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """And may be gone again by then, once the checkpoint is complete."""
    real, store = os.rename, Store(tmp_path, "durable")
    store.prepare(1)
    manifest = Manifest(1, "aaaaaaaa-000001", 2, ())
    taken: list[tuple[int, bytes]] = []

    def rename_and_say_no(old: Any, new: Any) -> None:
        real(old, new)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", real)
            taken.extend(store._words(manifest, [1]))
            if complete:
                parts = tuple(Part(rank, part_name(rank, manifest.id), 0, ()) for rank in range(2))
                store.publish(dataclasses.replace(manifest, parts=parts))
                store._forget_words(manifest, [1])
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old, None, new)

    monkeypatch.setattr(os, "rename", rename_and_say_no)
    assert store._leave_word(manifest, 1, b"word") == ""
    assert taken == [(1, b"word")]


def test_a_word_that_cannot_be_left_beside_a_checkpoint_without_its_part_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, "durable")
    store.prepare(1)
    manifest = Manifest(1, "aaaaaaaa-000001", 2, ())
    parts = (Part(0, part_name(0, manifest.id), 0, ()),)
    store.publish(dataclasses.replace(manifest, parts=parts))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "rename", Raising(full))
    assert "No space left" in store._leave_word(manifest, 1, b"word")


def test_a_word_whose_removal_is_not_answered_may_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.unlink

    def unlink_and_say_no(path: Any, **options: Any) -> None:
        real(path, **options)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    store = Store(tmp_path, "durable")
    store.prepare(1)
    part = Part(1, "rank-00001.aaaaaaaa-000001.safetensors", 0, ())
    manifest = Manifest(1, "aaaaaaaa-000001", 2, ())
    monkeypatch.setattr(os, "unlink", unlink_and_say_no)
    with pytest.raises(PeerError, match="part stays"):
        store.commit(manifest, 1, part, timeout=600, stopped=lambda: True)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_no_rank_acknowledges_a_save_before_rank_0_has_synced_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicated: bool, fails: bool
) -> None:
    store, told = Store(tmp_path, "durable"), threading.Event()
    sync, reached = nostall.checkpoint._store.sync_directory, threading.Event()
    manifest = Manifest(1, "aaaaaaaa-000001", 2, (), replicated=replicated)

    def late(path: Path) -> None:
        if (path / "manifest.json").exists() and not reached.is_set():
            reached.set()
            assert not told.wait(0.3)  # rank 1 looks several times
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    def rank_1() -> None:
        mine = None if replicated else Part(1, part_name(1, manifest.id), 0, ())
        with contextlib.ExitStack() as stack:
            if fails:
                stack.enter_context(pytest.raises(PeerError, match="Input/output error; it may"))
            assert store.commit(manifest, 1, mine, timeout=60) == ""
        told.set()

    monkeypatch.setattr(nostall.checkpoint._store, "sync_directory", late)
    store.prepare(1)
    thread = threading.Thread(target=rank_1)
    thread.start()
    mine = Part(0, part_name(0, manifest.id), 0, ())
    if fails:
        with pytest.raises(IoError, match="Input/output error"):
            store.commit(manifest, 0, mine, timeout=60)
    else:
        assert store.commit(manifest, 0, mine, timeout=60) == ""
    assert told.wait(60)
    thread.join()
    left = [name for name in os.listdir(store.directory(1)) if name.startswith("taken-00000")]
    assert len(left) == fails  # why rank 0 does not know, until the next job begins


@pytest.mark.parametrize("times", [1, 1000])
def test_a_mark_that_cannot_be_removed_at_once_keeps_no_rank_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    store, unlink, tries = Store(tmp_path, "durable"), os.unlink, itertools.count()
    manifest = Manifest(1, "aaaaaaaa-000001", 2, ())
    parts = [Part(rank, part_name(rank, manifest.id), 0, ()) for rank in range(2)]
    mark = store._taken(manifest, 0)

    def failing(path: Path) -> None:
        if path == mark and next(tries) < times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path)

    store.prepare(1)
    store._note(manifest, 1).write_bytes(json.dumps(parts[1].to_dict()).encode())
    monkeypatch.setattr(os, "unlink", failing)
    assert store.commit(manifest, 0, parts[0], timeout=60) == ""
    assert store._decided(manifest, 1, parts[1]) == ""
    assert mark.exists() == (times > 1)


def test_a_file_system_without_locks_is_named_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = _native.Locked.elsewhere

    class NoLock:
        def __init__(self, path: str) -> None:
            Path(path).touch()

        def acquire(self) -> _native.Locked:
            return answer

        def release(self) -> None:
            pass

        error_number = errno.EIO

    monkeypatch.setattr(_native, "DirectoryLock", NoLock)
    with pytest.raises(UsageError, match="another running job"):
        nostall.Checkpointer(durable=tmp_path)
    answer = _native.Locked.failed
    with pytest.raises(IoError, match=r"cannot lock .*\.lock: Input/output error"):
        nostall.Checkpointer(durable=tmp_path)
    answer = _native.Locked.unsupported
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
    assert "has no locks: nothing keeps" in caplog.text
    assert steps_in(tmp_path) == [1]


def test_parents_of_a_new_root_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync = nostall.checkpoint._store.sync_directory

    def note(path: Path) -> None:
        synced.append(path)
        if path == tmp_path / "a":
            raise PermissionError  # it may be entered, and not listed
        sync(path)

    everything: list[float] = []
    monkeypatch.setattr(nostall.checkpoint._store, "sync_directory", note)
    monkeypatch.setattr(os, "sync", lambda: everything.append(time.time()))
    Store(tmp_path / "a" / "b" / "c", "durable").make()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"] and len(everything) == 1
    Store(tmp_path / "a" / "b" / "c", "durable").make()
    assert len(synced) == 3


# ---------------------------------------------------------------------- restoring in place


def test_arrays_and_tensors_are_filled_where_they_are(tmp_path: Path) -> None:
    import torch

    w, a, t = torch.ones(3), np.ones((2, 2)), (torch.ones(2), np.ones(1))
    module = torch.nn.Linear(2, 1)
    frozen = np.ones(2)
    frozen.flags.writeable = False
    state = {
        "w": w, "a": a, "list": [torch.ones(1), 5], "tuple": t, "mixed": ("x", np.ones(2)),
        "module": module, "inner": {"b": torch.ones(4)}, "any": np.ones(9), "step": 1,
        "frozen": frozen, "numpy": np.ones(2), "torch": torch.ones(2, dtype=torch.float64),
    }  # fmt: skip
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save({**state, "numpy": torch.ones(2, dtype=torch.float64), "torch": np.ones(2)}, 1)
        first, inner = state["list"][0], state["inner"]["b"]  # type: ignore[index]
        for array in (w, a, *t, first, inner, state["numpy"], state["torch"]):
            array[...] = 7  # type: ignore[index]
        state["any"], state["step"], state["list"][1] = None, 2, 6  # type: ignore[index]
        found = ckpt.restore(into=state)
        assert len(repr(found)) < 120
        for array in (w, a, *t, first, inner, state["numpy"], state["torch"]):
            assert (np.asarray(array) == 1).all()
        assert state["w"] is w and state["list"][0] is first  # type: ignore[index]
        assert state["list"][1] == 5 and state["step"] == 1  # type: ignore[index]
        assert isinstance(state["any"], np.ndarray) and state["mixed"][0] == "x"  # type: ignore[index]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (np.zeros(7), r"state\['x'\]\['w'\] is of shape \(7,\).*has shape \(3,\)"),
        (np.zeros(3, np.float32), "type float32, the checkpoint has shape .* type float64"),
        (
            np.zeros(7),
            "make it of this shape and type, or give None in its place, which takes whatever",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    tmp_path: Path, other: Any, words: str
) -> None:
    first = np.zeros(2)
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save({"first": np.ones(2), "x": {"w": np.ones(3), "s": 1}, "l": [np.ones(1)]}, 1)
        whole = {"first": first, "x": {"w": other, "s": 1}, "l": [np.zeros(1)]}
        with pytest.raises(UsageError, match=words):
            ckpt.restore(into=whole)
        for name, wrong, why in (
            ("l", [np.zeros(1), np.zeros(1)], "2 entries, the checkpoint 1"),
            ("x", {"w": np.zeros(3)}, r"in state\['x'\]"),
            ("x", {"w": np.zeros(3), "s": np.zeros(1)}, "the checkpoint has a int there"),
        ):
            with pytest.raises(UsageError, match=why):
                ckpt.restore(into={**whole, "x": {"w": np.zeros(3), "s": 1}, name: wrong})
        assert not first.any()
        with pytest.raises(UsageError, match="step must be a number"):
            ckpt.save({}, "1")  # type: ignore[arg-type]


def test_what_has_elements_in_one_place_is_not_filled(tmp_path: Path) -> None:
    import torch

    state = {"a": torch.ones(3), "b": np.ones(3), "n": 1}
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state, 1)
        shared = np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))
        for wrong in ({"a": torch.zeros(1).expand(3)}, {"b": shared}):
            into = {"a": torch.zeros(3), "b": np.zeros(3), "n": 0, **wrong}
            with pytest.raises(UsageError, match="several elements in one place of memory"):
                ckpt.restore(into=into)
            assert into["n"] == 0 and not any(into["a"]) and not any(into["b"])
        empty = {"boxes": np.zeros((0, 4)), "t": torch.zeros(0, 1).expand(0, 4)}
        ckpt.save(empty, 2)
        ckpt.restore(into={"boxes": np.ones((0, 4)), "t": torch.zeros(0, 1).expand(0, 4)})
        with pytest.raises(UsageError, match="whose elements have no bytes"):
            ckpt.save({"v": np.zeros(3, "V0")}, 2)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("shape", [[3, 5], [10**30], ["x"]])
def test_a_crafted_tree_is_damage_and_nothing_else(kind: str, shape: Any) -> None:
    import torch  # noqa: F401

    stored = Stored(np.zeros(8, np.uint8), "F32", (2,))
    with pytest.raises(CorruptionError):
        decode({"$tensor": "x", "kind": kind, "dtype": "float32", "shape": shape}, {"x": stored})
