"""Levels, drain, retention, several ranks: what a checkpointer leaves in its directories."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prefork
import pytest

import nostall
import nostall.checkpoint._checkpointer
import nostall.checkpoint._saved
import nostall.checkpoint._store
from nostall import Keep, _native, trace
from nostall.base import _garbage
from nostall.checkpoint import _begin, _search
from nostall.checkpoint._background import BackgroundWriter
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._place import UnreachableError
from nostall.checkpoint._retention import decide
from nostall.checkpoint._saved import Saved
from nostall.checkpoint._search import Search
from nostall.checkpoint._store import Entry, Store, part_name
from nostall.checkpoint._window import choose_copying
from nostall.cli import main
from nostall.errors import CorruptionError, IoError, PeerError, UsageError
from nostall.observe.report import _digest as digest
from nostall.observe.timelines._stream import Source


def state_of(value: int, size: int = 1000) -> dict[str, Any]:
    return {"weights": np.full(size, value, np.float32), "step": value}


def steps_in(root: Path) -> list[int]:
    return [e.step for e in Store(root, "test").entries() if e.manifest is not None]


def test_checkpointers_of_a_part_of_the_ranks_do_not_part_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(rank: int, size: int, name: str, **_: Any) -> Any:
        names.append(name)
        return (lambda mine: [mine]) if name == "exposed" else None

    names: list[str] = []
    monkeypatch.setattr(nostall.checkpoint._checkpointer, "find_rendezvous", find)

    def met(rank: int, size: int) -> str:
        with pytest.raises(UsageError, match="or pass gather="):
            nostall.Checkpointer(tmp_path, rank=rank, world_size=size)
        return names.pop()

    part = met(0, 61)
    first, second = ([met(rank, 62) for _ in range(2)] for rank in range(2))
    assert first == second and len({part, *first}) == 3


def test_a_checkpoint_goes_through_the_levels(tmp_path: Path) -> None:
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        saved = ckpt.save(state_of(1), 1, level="fast")
        assert saved is not None and saved.level in ("fast", "durable")
        assert steps_in(tmp_path / "fast") == [1]
        saved.wait("durable", 60)
        assert steps_in(tmp_path / "durable") == [1]
        assert saved.fast_seconds is not None and saved.durable_seconds is not None
        assert saved.problems == []
    assert os.listdir(tmp_path / "fast" / "step-000000000001") != []


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with nostall.Checkpointer("~/fast", Path("~/durable")) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
    assert steps_in(tmp_path / "fast") == steps_in(tmp_path / "durable") == [1]
    with pytest.raises(UsageError, match="same directory"):
        nostall.Checkpointer("~/fast", tmp_path / "fast")


def test_room_for_a_later_save_is_made_once_the_one_under_way_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, hurried = BackgroundWriter._write_part, threading.Event()

    def late(*arguments: Any) -> Any:
        assert hurried.wait(60)  # somebody waits for it
        return write(*arguments)

    hurry = BackgroundWriter._hurry_writer

    def note(background: BackgroundWriter, number: int) -> None:
        hurried.set()
        hurry(background, number)

    monkeypatch.setattr(BackgroundWriter, "_write_part", late)
    monkeypatch.setattr(BackgroundWriter, "_hurry_writer", note)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.prepare(state_of(0))
        ckpt.save(state_of(1), 1)
        ckpt.prepare(state_of(0, 9_000_000))
        ckpt.wait(60)
        found = ckpt.restore()
        assert found is not None and (found.state["weights"] == 1).all()
        (snapshot,) = ckpt._snapshots
        assert snapshot.capacity >= 36_000_000
        monkeypatch.setattr(BackgroundWriter, "take_snapshot", lambda _: None)
        ckpt.prepare(state_of(0))  # of storage that hangs the next save tells


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    weights = np.zeros(3_000_000, np.float32)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        for step in range(4):
            weights[:] = step
            ckpt.save({"w": weights}, step)
            weights[:] = -1  # the training goes on
        ckpt.wait()
        for step in range(4):
            found = ckpt.restore(step)
            assert found is not None and (found.state["w"] == step).all()


def test_arrays_that_only_the_save_has_are_kept_while_they_are_copied(tmp_path: Path) -> None:
    strided = np.arange(4_000_000, dtype=np.float64)[::2]  # made contiguous by the save
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        for step, options in enumerate(({"level": "durable"}, {"window": True}, {})):
            ckpt.save({"a": strided, "b": strided + step}, step, **options)
            np.full(4_000_000, -1.0)  # takes what was let go
            ckpt.before_update()
        ckpt.wait(60)
        for step in range(3):
            found = ckpt.restore(step)
            assert found is not None
            assert (found.state["a"] == strided).all() and (
                found.state["b"] == strided + step
            ).all()


@pytest.mark.parametrize("copying", ["lazily", "in_background"])
def test_a_window_may_outlive_a_save_that_fails(tmp_path: Path, copying: str) -> None:
    with (
        pytest.raises(IoError, match="safe nowhere"),
        nostall.Checkpointer(durable=tmp_path) as ckpt,
    ):
        engine = ckpt._background
        engine._write = lambda store, job: "the disk is full"  # type: ignore[method-assign]
        if copying == "lazily":
            ckpt._window_seconds, engine.write_seconds = 100.0, 0.1
        alive: list[Any] = []

        def state() -> dict[str, Any]:
            made = np.ones(6_000_000)  # nobody else has it
            alive.append(weakref.ref(made))
            return {"w": made}

        saved = ckpt.save(state, 1, window=True)
        assert saved is not None and saved.copying.startswith(copying)
        assert engine.wait(drained=False, timeout=60) and "full" in saved.problems[0]
        assert alive[0]() is not None
        ckpt.before_update()  # reads all of it
        assert alive[0]() is None


def test_a_save_that_fails_early_is_copied_from_what_is_still_there(tmp_path: Path) -> None:
    with (
        pytest.raises(IoError, match="safe nowhere"),
        nostall.Checkpointer(durable=tmp_path) as ckpt,
    ):
        engine = ckpt._background
        engine._write = lambda store, job: "the disk is full"  # type: ignore[method-assign]
        submit, alive = engine.submit, []

        def submit_and_fail(job: Any, awaited: Any) -> None:
            alive.append(weakref.ref(job.leaves[0].owner))
            submit(job, awaited)
            assert engine.wait(drained=False, timeout=60)
            alive.append(alive[0]() is not None)

        engine.submit = submit_and_fail  # type: ignore[method-assign]
        with pytest.raises(IoError, match="full"):
            ckpt.save(lambda: {"w": np.ones(6_000_000)}, 1, level="durable")
        assert alive[1] is True and alive[0]() is None


def test_a_snapshot_that_fails_is_not_read_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no window")

    weights = np.ones(6_000_000)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        monkeypatch.setattr(nostall.checkpoint._checkpointer, "SaveWindow", fail)
        with pytest.raises(RuntimeError, match="no window"):
            ckpt.save({"w": weights}, 1, window=True)
        (snapshot,) = ckpt._background._snapshots
        assert snapshot.copied_bytes >= weights.nbytes  # all is copied: nobody is at it any more
        ckpt.save({"w": weights}, 2, level="durable")
    assert steps_in(tmp_path) == [2]


def test_a_window_reads_until_the_update(tmp_path: Path) -> None:
    import torch

    weight = torch.nn.Parameter(torch.zeros(4_000_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with nostall.Checkpointer(durable=tmp_path, threads=2) as ckpt:
        ckpt.attach(optimizer)
        for step in range(5):
            ckpt.save({"w": weight}, step, window=True)
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
        ckpt.save({"w": weight}, 5, window=True)  # nothing comes after: close copies
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        for step in range(1, 6):
            found = ckpt.restore(step)
            assert found is not None and (found.state["w"] == step).all()


def test_an_optimizer_keeps_no_checkpointer(tmp_path: Path) -> None:
    import torch

    weight = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    kept = []
    for closed in (True, False):
        ckpt = nostall.Checkpointer(durable=tmp_path)
        ckpt.attach(optimizer)
        ckpt.save({"w": weight}, 1, window=True)
        if closed:
            ckpt.close()
            assert not optimizer._optimizer_step_pre_hooks
            assert not ckpt._snapshots and not ckpt._background._snapshots
        kept.append(weakref.ref(ckpt))
        gc.disable()
        try:
            del ckpt
            assert kept[-1]() is None
        finally:
            gc.enable()
        optimizer.step()


def test_a_checkpointer_that_its_own_thread_collects_saves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, dropped, collected = Store.prepare, threading.Event(), threading.Event()

    def collect_first(store: Store, step: int) -> Path:
        assert dropped.wait(60)
        gc.collect()
        collected.set()
        return prepare(store, step)

    monkeypatch.setattr(Store, "prepare", collect_first)
    ckpt = nostall.Checkpointer(durable=tmp_path)
    cycle = [ckpt]
    cycle.append(cycle)  # type: ignore[arg-type]
    ckpt.save(state_of(1), 1)
    gc.disable()
    try:
        del ckpt, cycle
        dropped.set()
        assert collected.wait(60)
    finally:
        gc.enable()
    _garbage.await_all(60)
    assert steps_in(tmp_path) == [1]
    with nostall.Checkpointer(durable=tmp_path):  # for it has let the directory go
        pass


def test_what_changes_outside_of_updates_is_copied_by_the_save(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.attach(optimizer)
        for step in range(6):
            before = {k: v.clone() for k, v in model.state_dict().items()}
            saved = ckpt.save({"model": model, "optimizer": optimizer}, step, window=True)
            model(torch.randn(16, 8)).sum().backward()  # the running mean changes here
            optimizer.step()
            assert saved is not None
            found = None
            saved.wait("durable", 60)
            found = ckpt.restore(step)
            assert found is not None
            for name, tensor in before.items():
                assert torch.equal(found.state["model"][name], tensor), (step, name)
    assert saved.copying.startswith(("lazily", "in_background"))


def test_the_copy_before_an_update_is_recorded(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    trace.start(tmp_path / "run", rank=0)
    try:
        with nostall.Checkpointer(durable=tmp_path / "ckpt") as ckpt:
            ckpt.attach(optimizer)
            model(torch.ones(8)).sum().backward()
            for window in (False, True):
                ckpt.save({"model": model}, 1, window=window)
                with trace.span(f"step, window={window}"):
                    optimizer.step()
    finally:
        trace.stop()
    found = digest.read(Source(tmp_path / "run" / "rank0.trace.json.gz"))
    copies, step = (
        found.of("checkpoint", "copy before an update"),
        found.of("compute", "step, window=True"),
    )
    assert len(copies.begin)
    assert (copies.begin >= step.begin).all() and (copies.end <= step.end).all()


@pytest.mark.parametrize("copying", ["lazily", "in_background"])
@pytest.mark.parametrize("attached", [True, False])
def test_a_weight_that_changes_before_the_update_gives_no_torn_checkpoint(
    tmp_path: Path, copying: str, attached: bool
) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(1000, 3000, max_norm=1.0)  # cut in forward
            self.linear = torch.nn.Linear(3000, 1)

        def forward(self, which: Any) -> Any:
            return self.linear(self.table(which))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = {k: v.clone() for k, v in model.state_dict().items()}
    state = {"model": model, "optimizer": optimizer, "average": average}
    with nostall.Checkpointer(durable=tmp_path, fast=tmp_path / "fast") as ckpt:
        ckpt._background._patience = lambda size: 600.0  # type: ignore[method-assign]
        if attached:
            ckpt.attach(optimizer)
        torn = []
        for step in range(4):
            ckpt._window_seconds = 100.0 if copying == "lazily" else 0.001
            ckpt._background.write_seconds = 0.1
            before = [
                {name: tensor.clone() for name, tensor in part.items()}
                for part in (model.state_dict(), average)
            ]
            with ckpt.hold():  # the writer is done with nothing before it changes
                saved = ckpt.save(state, step, window=True)
                for name, value in model.state_dict().items():
                    average[name].lerp_(value, 0.5)
                with torch.no_grad():
                    model.linear.bias.clamp_(-2.0, 2.0)
                model(torch.arange(1000)).sum().backward()
                if not attached:
                    ckpt.before_update()
                optimizer.step()
            assert saved is not None
            ckpt.wait()
            if saved.level == "memory":
                torn.append(step)
                assert "changed before the update" in saved.problems[0]
                assert step not in ckpt.steps()
                continue
            found = ckpt.restore(step)
            assert found is not None
            for part, was in zip(("model", "average"), before, strict=True):
                for name, tensor in was.items():
                    assert torch.equal(found.state[part][name], tensor), (step, part, name)
    # The first one, and from then on the save copies what it has seen to change.
    assert torn == [0]


def test_a_forked_child_has_what_was_restored_and_saves_itself(tmp_path: Path) -> None:
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        ckpt.save({"w": np.arange(1000)}, 1, level="durable")
        found = ckpt.restore()
        assert found is not None

    def save_again(root: Path) -> int:
        with nostall.Checkpointer(root / "fast", root / "durable") as ckpt:
            # Who waits helps to write, in memory of its thread.
            for step in range(2, 20):
                ckpt.save({"w": found.state["w"]}, step, level="durable")
        return int(found.state["w"].sum())

    save_again(tmp_path / "parent")
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if save_again(tmp_path / "child") == 499500 else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_buckets_are_copied_as_updates_reach_them(tmp_path: Path) -> None:
    import torch

    first, second = (torch.nn.Parameter(torch.zeros(3_000_000)) for _ in range(2))
    one, two = torch.optim.SGD([first], lr=1.0), torch.optim.SGD([second], lr=1.0)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.attach(one)
        ckpt.attach(two)
        ckpt._window_seconds, ckpt._background.write_seconds = 100.0, 0.1
        ckpt._background._patience = lambda size: 600.0  # type: ignore[method-assign]
        with ckpt.hold():  # the writer gets nothing done meanwhile
            saved = ckpt.save({"a": first, "b": second}, 1, window=True)
            assert saved is not None and saved.copying.startswith("lazily")
            (snapshot,) = [w._snapshot for w in [ckpt._window] if w is not None]
            for optimizer, parameter in ((one, first), (two, second)):
                before = snapshot.copied_bytes
                parameter.grad = torch.full_like(parameter, -1.0)
                optimizer.step()
                assert 0 < snapshot.copied_bytes - before <= 16 << 20
        assert ckpt._window is None
        saved.wait("durable", 60)
        found = ckpt.restore()
        assert found is not None
        assert not found.state["a"].any() and not found.state["b"].any()
    assert saved.copied_bytes == saved.bytes


def test_a_window_that_is_long_enough_needs_no_copy(tmp_path: Path) -> None:
    weights = np.arange(3_000_000, dtype=np.float32)
    with nostall.Checkpointer(durable=tmp_path, priority="normal") as ckpt:
        ckpt._window_seconds, ckpt._background.write_seconds = 100.0, 0.1
        saved = ckpt.save({"w": weights}, 1, window=True)
        assert saved is not None
        deadline = time.monotonic() + 60
        while saved.level != "durable" and time.monotonic() < deadline:
            time.sleep(0.01)
        ckpt.before_update()
        weights[:] = 0
        assert saved.copied_bytes == 0
        found = ckpt.restore()
        assert found is not None and (found.state["w"] == np.arange(3_000_000)).all()


def test_copying_is_chosen_by_what_was_measured() -> None:
    assert choose_copying(None, 1.0)[0] == _native.Copying.in_background
    assert choose_copying(1.0, 0.5)[0] == _native.Copying.lazily
    assert choose_copying(0.5, 0.5)[0] == _native.Copying.in_background


def test_only_due_steps_are_saved_and_states_are_made_only_then(tmp_path: Path) -> None:
    made = []

    def state() -> dict[str, Any]:
        made.append(1)
        return state_of(1)

    with nostall.Checkpointer(durable=tmp_path, every=4) as ckpt:
        saved = [ckpt.save(state, step) for step in range(9)]
        assert [s is not None for s in saved] == [s % 4 == 0 for s in range(9)]
        assert ckpt.save(state, 9, force=True) is not None
    assert len(made) == 4
    assert steps_in(tmp_path) == [0, 4, 8, 9]


def saves_of(found: list[tuple[int, float | None]]) -> list[Manifest]:
    """Saves of (step, metric), one after another."""
    return [
        Manifest(step, f"aaaaaaaa-{i:06d}", 1, (), metric=metric, sequence=i)
        for i, (step, metric) in enumerate(found)
    ]


def kept_steps(found: list[tuple[int, float | None]], keep: Keep) -> dict[int, str]:
    saves = saves_of(found)
    stay = decide(saves, keep)
    return {m.step: stay[m.id] for m in saves if m.id in stay}


def test_retention_keeps_the_last_every_nth_and_the_best() -> None:
    found: list[tuple[int, float | None]] = [(s, float(abs(s - 30))) for s in range(0, 100, 10)]
    assert sorted(kept_steps(found, Keep(2))) == [80, 90]
    assert sorted(kept_steps(found, Keep(1, every=40))) == [0, 40, 80, 90]
    assert kept_steps(found, Keep(1, best=2)) == {90: "last", 30: "best", 40: "best"}
    assert kept_steps(found, Keep(1, best=1, mode="max")) == {90: "last"}
    unrated = [(1, None), (2, float("nan")), (3, 0.5)]
    assert kept_steps(unrated, Keep(1, best=3)) == {3: "last"}
    for bad in (
        {"last": 0},
        {"last": "5"},
        {"every": 0},
        {"every": 2.5},
        {"best": -1},
        {"mode": "most"},
        {"superseded": -1},
    ):
        with pytest.raises(UsageError):
            Keep(**bad)  # type: ignore[arg-type]


def test_retention_on_both_tiers(tmp_path: Path) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    keep = Keep(last=2, best=1)
    with nostall.Checkpointer(fast, durable, keep=keep, level="durable") as ckpt:
        for step in range(6):
            ckpt.save(state_of(step), step, metric=abs(step - 1))
    assert steps_in(durable) == [1, 4, 5]
    assert steps_in(fast) == [5]
    assert sorted(p.name for p in durable.glob("step-*")) == [f"step-{s:012d}" for s in (1, 4, 5)]


def test_retention_that_gets_due_meanwhile_is_done_once_more(tmp_path: Path) -> None:
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        engine, calls = ckpt._background, []

        def due() -> None:
            with engine._lock:
                engine._retain_due = True
                engine._start("drain")
                engine._lock.notify_all()

        def retain() -> None:
            calls.append(engine._retaining)
            if len(calls) == 1:
                due()

        engine._retain = retain  # type: ignore[method-assign]
        due()
        assert engine.wait(drained=True, timeout=60)
        assert calls == [True, True]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state_of(1), 7)
        ckpt.save(state_of(2), 7)
        found = ckpt.restore()
    assert found is not None and found.state["step"] == 2
    assert len(list(tmp_path.glob("step-*/*.safetensors"))) == 1


def test_a_save_that_is_replaced_before_it_is_copied_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, begun, replaced = Store.make_step, threading.Event(), threading.Event()

    def late(store: Store, step: int) -> None:
        if store.kind == "durable":
            begun.set()
            assert replaced.wait(60)
        make(store, step)

    monkeypatch.setattr(Store, "make_step", late)
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        first = ckpt.save(state_of(1), 100)
        assert begun.wait(60)  # a drain that has not begun would be left out
        second = ckpt.save(state_of(2), 100, level="fast", force=True)
        replaced.set()
        ckpt.wait(60)
        assert first is not None and second is not None and second.level == "durable"
        assert first.level == "fast"
        assert first.problems == ["step 100 was saved again before this save was copied"]
    (kept,) = Store(tmp_path / "durable", "test").manifests()
    assert kept.id == second.id


def test_the_newest_is_restored_from_the_fast_tier(tmp_path: Path) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast, durable, level="durable") as ckpt:
        for step in range(3):
            ckpt.save(state_of(step), step)
        found = ckpt.restore()
        assert found is not None and (found.step, found.tier) == (2, "fast")
        end = time.monotonic() + 60
        while 1 in steps_in(fast) and time.monotonic() < end:
            time.sleep(0.01)  # older ones leave it in the background
        older = ckpt.restore(1)
        assert older is not None and (older.step, older.tier) == (1, "durable")
        with pytest.raises(UsageError, match="step 9"):
            ckpt.restore(9)


@pytest.mark.parametrize("tiers", [("fast", "durable"), ("durable",)])
def test_a_restore_sees_every_save_that_has_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, ...]
) -> None:
    prepare, hurry, awaited = Store.prepare, BackgroundWriter._hurry_writer, threading.Event()

    def late(store: Store, step: int) -> Path:
        assert awaited.wait(60)
        return prepare(store, step)

    def note(background: BackgroundWriter, number: int) -> None:
        hurry(background, number)
        awaited.set()

    monkeypatch.setattr(Store, "prepare", late)
    monkeypatch.setattr(BackgroundWriter, "_hurry_writer", note)
    state = state_of(1)
    with nostall.Checkpointer(**{tier: tmp_path / tier for tier in tiers}) as ckpt:
        try:
            ckpt.save(state, 1)
            state["weights"][:] = np.nan
            found = ckpt.restore(into=state)
        finally:
            awaited.set()
        assert found is not None and found.step == 1 and (state["weights"] == 1).all()


def test_a_restore_waits_no_longer_for_a_save_than_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare, over = Store.prepare, threading.Event()

    def hang(store: Store, step: int) -> Path:
        assert step == 1 or over.wait(60)
        return prepare(store, step)

    monkeypatch.setattr(Store, "prepare", hang)
    with nostall.Checkpointer(tmp_path, patience=0.1) as ckpt:
        ckpt.save(state_of(1), 1, level="fast")
        ckpt.save(state_of(2), 2)
        found = ckpt.restore()
        over.set()
        assert found is not None and found.step == 1
    assert "not written after 0.1 s" in caplog.text


def test_a_drain_goes_on_at_the_next_start(tmp_path: Path) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast=fast, level="fast") as ckpt:
        ckpt.save(state_of(3), 3)
    with nostall.Checkpointer(fast, durable) as ckpt:
        ckpt.wait(60)
    assert steps_in(durable) == [3]


def test_the_history_is_bounded_and_forgets_no_save_that_is_safe_nowhere(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, keep=1) as ckpt:
        for step in range(1, 131):
            ckpt._remember(Saved(step, "", 0))
        assert [saved.step for saved in ckpt.history] == list(range(1, 131))
        ckpt._history.clear()
        safe = Saved(0, "", 0)
        safe._reach("fast")
        for saved in (safe, *(Saved(step, "", 0) for step in range(1, 131))):
            ckpt._remember(saved)
        assert ckpt.history[0] is safe  # the newest that is safe
        ckpt._history.clear()
        made = []
        for step in range(1, 131):
            saved = ckpt.save({"step": step}, step, level="durable")
            assert saved is not None
            made.append(weakref.ref(saved))
            del saved
        assert [saved.step for saved in ckpt.history] == list(range(31, 131))
        gc.collect()
        assert [ref() for ref in made[:29]] == [None] * 29


def test_a_slow_drain_never_delays_saves_and_skips_what_is_superseded(tmp_path: Path) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast, durable, keep=1) as ckpt:
        engine = ckpt._background
        engine.settings = dataclasses.replace(engine.settings, gate_patience=600.0)
        engine._patience = lambda size: 600.0  # type: ignore[method-assign]
        with ckpt.hold():  # the drain gets nothing done
            for step in range(8):
                saved = ckpt.save(state_of(step), step, level="fast")
                assert saved is not None and saved.level == "fast"
                while engine._copying is None:  # the first one is on its way
                    time.sleep(0.001)
        ckpt.wait()
        history = ckpt.history
    skipped = [s.step for s in history if s.level != "durable"]
    assert skipped == [1, 2, 3, 4, 5, 6]
    assert all("need not be kept" in s.problems[0] for s in history[1:7])
    assert steps_in(durable) == [7] and steps_in(fast) == [7]


def test_hold_keeps_the_drain_back(tmp_path: Path) -> None:
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        engine = ckpt._background
        engine.settings = dataclasses.replace(engine.settings, gate_patience=600.0)
        engine._patience = lambda size: 600.0  # type: ignore[method-assign]
        with ckpt.hold():
            saved = ckpt.save(state_of(1), 1, level="memory")
            assert saved is not None
            time.sleep(0.3)
            assert saved.level == "memory"
        saved.wait("durable", 60)


def test_the_drain_leaves_loaders_and_gradients_alone(tmp_path: Path) -> None:
    def await_drain(saved: Saved | None) -> None:  # nobody hurries it
        assert saved is not None
        deadline = time.monotonic() + 60
        while saved.level != "durable" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert saved.level == "durable"

    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        engine = ckpt._background
        with _native.Activity():  # as a loader that reads, or an engine that reduces
            assert not _native.Activity.quiet()
            await_drain(ckpt.save(state_of(1), 1, level="fast"))
            assert engine.gate.waited_seconds > 0  # for a limited time
            engine.settings = dataclasses.replace(engine.settings, gate_patience=600.0)
            engine._patience = lambda size: 600.0  # type: ignore[method-assign]
            saved = ckpt.save(state_of(2), 2, level="fast")
            assert saved is not None
            time.sleep(0.3)
            assert saved.level == "fast"
        await_drain(saved)


def test_waiting_for_windows_takes_at_most_half_the_time_between_saves(tmp_path: Path) -> None:
    with (
        nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt,
        _native.Activity(),  # for ever
    ):
        engine = ckpt._background
        ckpt.save(state_of(1), 1)
        assert engine._patience(1000 << 20) == pytest.approx(60 / 2 / 250)
        ckpt.save(state_of(2), 2)
        assert engine._patience(1000 << 20) < 60 / 2 / 250
        ckpt.wait(60)
    assert steps_in(tmp_path / "durable") == [1, 2]


def test_directories_belong_to_one_job(tmp_path: Path) -> None:
    with (
        nostall.Checkpointer(durable=tmp_path),
        pytest.raises(UsageError, match="another running job"),
    ):
        nostall.Checkpointer(durable=tmp_path)
    nostall.Checkpointer(durable=tmp_path).close()


@pytest.mark.parametrize("below", ["", "/job/ckpt"])
@pytest.mark.parametrize("which", ["fast", "durable"])
def test_a_directory_on_a_disk_that_is_not_mounted_is_refused(
    tmp_path: Path, which: str, below: str
) -> None:
    places = {"fast": str(tmp_path / "fast"), "durable": str(tmp_path / "durable")}
    places[which] = f"/nostall-unmounted{below}"
    with pytest.raises(
        IoError,
        match=f"directory /nostall-unmounted{below}: /nostall-unmounted is not there, and would lie",
    ):
        nostall.Checkpointer(**places)
    assert not Path("/nostall-unmounted").exists()
    nostall.Checkpointer(tmp_path / "fast").close()  # nothing holds the other one


def test_a_relative_directory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # as in most containers
    name = f"nostall-test-{os.getpid()}"
    try:
        if os.geteuid() == 0:
            nostall.Checkpointer(name).close()
            assert Path("/", name).is_dir()
        else:
            with pytest.raises(IoError, match="Permission denied"):
                nostall.Checkpointer(name)
    finally:
        shutil.rmtree(Path("/", name), ignore_errors=True)


def test_a_directory_that_this_user_may_not_make_is_told_with_a_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(
            IoError, match="Permission denied: give a directory where this user may"
        ):
            nostall.Checkpointer(tmp_path / "a" / "b")
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "why"), [("file/a", "Not a directory"), ("x" * 300, "File name too long")]
)
def test_a_directory_that_cannot_be_is_told_with_its_path(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IoError, match=f"cannot make the directory {tmp_path / name}: {why}"):
        nostall.Checkpointer(durable=tmp_path / name)


def test_waiting_for_a_directory_that_was_not_given_is_refused(tmp_path: Path) -> None:
    with nostall.Checkpointer(tmp_path) as ckpt:
        saved = ckpt.save({"x": 1}, 1)
        assert saved is not None
        with pytest.raises(UsageError, match=r"no durable directory: give it durable=, or wait"):
            saved.wait()
        with pytest.raises(UsageError, match='level must be "memory", "fast" or "durable"'):
            saved.wait("disk")  # type: ignore[arg-type]
        saved.wait("fast", 60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "fast=, durable= or both"),
        ({"fast": "/tmp/x", "durable": "/tmp/./x"}, "same directory"),
        ({"fast": 3}, "fast must be a path, as str or pathlib.Path, not 3"),
        ({"fast": "/tmp/x", "level": "durable"}, "needs durable="),
        ({"fast": "/tmp/x", "level": "disk"}, "memory"),
        ({"fast": "/tmp/x", "every": 0}, "every"),
        ({"fast": "/tmp/x", "keep": 0}, "keep must be at least 1, not 0"),
        ({"fast": "/tmp/x", "priority": "high"}, "priority"),
        ({"fast": "/tmp/x", "snapshots": 0}, "snapshots"),
        ({"fast": "/tmp/x", "every": "1"}, "every must be an integer from 1"),
        ({"fast": "/tmp/x", "keep": "5"}, "keep must be an integer from 1 to"),
        ({"fast": "/tmp/x", "rate": "fast"}, 'rate must be bytes per second, as "200MB"'),
        ({"fast": "/tmp/x", "rate": "300"}, 'as "200MB" with its unit, or a number of at least 1'),
        ({"fast": "/tmp/x", "rate": "0.0MB"}, 'as "200MB" with its unit, or a number of at least'),
        ({"fast": "/tmp/x", "rate": "0.5B"}, 'as "200MB" with its unit, or a number of at least'),
        ({"fast": "/tmp/x", "rate": "0.0009kB"}, 'as "200MB" with its unit, or a number of at'),
        ({"fast": "/tmp/x", "keep_fst": 2}, "has no option keep_fst: did you mean keep_fast="),
        ({"fast": "/tmp/x", "max_to_keep": 2}, "max_to_keep: pass keep="),
        ({"fast": "/tmp/x", "options": {"rate": 1}}, r"options must be nostall\.CheckpointOptions"),
        ({"fast": "/tmp/x", "timeout": "600"}, "timeout must be a number of seconds"),
        ({"fast": "/tmp/x", "patience": -1}, "patience"),
        ({"fast": "/tmp/x", "replicated": "yes"}, "replicated must be True or False"),
        ({"fast": "/tmp/x", "max_failures": 0}, "max_failures"),
        ({"fast": "/tmp/x", "on_failure": "print"}, "on_failure must be a function"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        nostall.Checkpointer(**arguments)


def test_a_closed_checkpointer_saves_nothing(tmp_path: Path) -> None:
    ckpt = nostall.Checkpointer(durable=tmp_path)
    ckpt.close()
    ckpt.close()
    with pytest.raises(UsageError, match="closed"):
        ckpt.save(state_of(1), 1)


class World:
    """Ranks as threads, with an allgather among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._notes: list[bytes] = [b""] * size

    def gather(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def allgather(mine: bytes) -> list[bytes]:
            self._notes[rank] = mine
            self._barrier.wait(60)
            notes = list(self._notes)
            self._barrier.wait(60)
            return notes

        return allgather

    def run(self, work: Callable[[int, Callable[[bytes], list[bytes]]], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def rank(r: int) -> None:
            try:
                results[r] = work(r, self.gather(r))
            except BaseException as error:
                results[r] = error

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(300)  # of many saves together
        return results


def ranked(tmp_path: Path, world: int, **options: Any) -> Callable[..., nostall.Checkpointer]:
    def make(rank: int, gather: Any) -> nostall.Checkpointer:
        return nostall.Checkpointer(
            tmp_path / "fast", tmp_path / "durable", rank=rank, world_size=world, gather=gather,
            job="test", **options,
        )  # fmt: skip

    return make


def test_ranks_save_one_checkpoint_and_restore_their_parts(tmp_path: Path) -> None:
    make = ranked(tmp_path, 3, level="durable", keep=2)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in range(4):
                ckpt.save(state_of(100 * step + rank), step)
            found = ckpt.restore()
            assert found is not None
            return found.step, found.state["step"]

    assert World(3).run(work) == [(3, 300), (3, 301), (3, 302)]
    assert steps_in(tmp_path / "durable") == [2, 3]
    manifest = json.loads(next((tmp_path / "durable").glob("*3/manifest.json")).read_bytes())
    assert [f["rank"] for f in manifest["files"]] == [0, 1, 2]
    names = {p.name for p in (tmp_path / "durable").glob("*3/*")}
    assert names == {f["name"] for f in manifest["files"]} | {"manifest.json"}


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (
            {"on_signal": "SIGUSR1 SIGTERM"},
            {},
            "on_signal is 'SIGTERM, SIGUSR1' on rank 0 and None on",
        ),
        ({}, {"on_signal": "SIGUSR1"}, "on_signal is None on rank 0 and 'SIGUSR1' on"),
        ({"every": 5}, {"every": 10}, "every is 5 on rank 0 and 10 on"),
        ({}, {"replicated": True}, "replicated is False on rank 0 and True on"),
        ({"fast": None}, {}, "fast is None on rank 0 and 'a directory' on"),
    ],
)
def test_ranks_that_disagree_are_told_the_argument_and_both_values(
    tmp_path: Path, mine: dict[str, Any], theirs: dict[str, Any], words: str
) -> None:
    def work(rank: int, gather: Any) -> None:
        roots: dict[str, Any] = {"fast": tmp_path / "fast", "durable": tmp_path / "durable"}
        options = roots | (theirs if rank == 1 else mine)
        with pytest.raises(UsageError, match=f"{words} rank 1; give all ranks the same arguments"):
            nostall.Checkpointer(rank=rank, world_size=2, gather=gather, job="test", **options)

    assert World(2).run(work) == [None, None]
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        ckpt.save(state_of(1), 1, level="durable")  # nobody has the directories


def test_signals_outside_of_a_main_thread_are_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    told: dict[int, str] = {}
    world = World(2)

    def make(rank: int) -> None:
        try:
            nostall.Checkpointer(
                tmp_path, rank=rank, world_size=2, gather=world.gather(rank), job="test",
                on_signal="SIGUSR2",
            )  # fmt: skip
        except UsageError as error:
            told[rank] = str(error)

    before = signal.getsignal(signal.SIGUSR2)
    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    words = (
        'rank 1 cannot listen for signals: on_signal="SIGUSR2" needs a Checkpointer that the main'
    )
    assert told[0] == told[1] and told[0].startswith(words)
    assert signal.getsignal(signal.SIGUSR2) == before
    with nostall.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)  # nobody has the directory


def test_replicated_state_is_written_once_and_read_by_any_world(tmp_path: Path) -> None:
    make = ranked(tmp_path, 2, level="durable", replicated=True)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            ckpt.save(state_of(5), 5)
            found = ckpt.restore()
            return found.state["step"] if found else None

    assert World(2).run(work) == [5, 5]
    assert len(list((tmp_path / "durable").glob("step-*/*.safetensors"))) == 1
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        found = ckpt.restore()
        assert found is not None and found.state["step"] == 5


@pytest.mark.parametrize("level", ["memory", "fast"])
def test_a_wait_hurries_the_drain_that_comes_and_the_one_under_way(
    tmp_path: Path, level: Any
) -> None:
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", rate=1) as ckpt:
        saved = ckpt.save({"w": np.zeros(2_000_000)}, 1, level=level)  # of four blocks
        ckpt.wait(60)
        assert saved is not None and saved.level == "durable"


def test_a_wait_for_a_drain_hurries_those_before_it(tmp_path: Path) -> None:
    state = {"w": np.zeros(1_000_000)}  # of two blocks
    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", rate=1) as ckpt:
        before = [ckpt.save(state, step, level="fast") for step in (1, 2)]
        ckpt.save(state, 3, level="durable")
        assert all(saved is not None and saved.level == "durable" for saved in before)
        assert not ckpt._background._is_urgent()


def test_a_wait_hurries_a_save_that_the_writer_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, hurry = Store.prepare, BackgroundWriter.hurry
    begun, hurried = threading.Event(), threading.Event()

    def late(store: Store, step: int) -> Path:
        begun.set()
        assert hurried.wait(60)
        return prepare(store, step)

    def note(background: BackgroundWriter, saved: Saved, level: Any) -> None:
        hurry(background, saved, level)
        hurried.set()

    monkeypatch.setattr(Store, "prepare", late)
    monkeypatch.setattr(BackgroundWriter, "hurry", note)
    with nostall.Checkpointer(durable=tmp_path, rate=1) as ckpt:
        saved = ckpt.save({"w": np.zeros(1_000_000)}, 1)  # of two blocks
        assert saved is not None and begun.wait(60)
        saved.wait("durable", 60)


def test_a_wait_hurries_no_later_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: queue.Queue[int] = queue.Queue()
    write = _native.SnapshotWrite

    def note(*arguments: Any, **options: Any) -> Any:
        rates.put(options["rate"])
        return write(*arguments, **options)

    monkeypatch.setattr(_native, "SnapshotWrite", note)
    with nostall.Checkpointer(durable=tmp_path, rate=7) as ckpt:
        ckpt.save({"w": np.zeros(9)}, 1, level="durable")
        ckpt.wait(60)
        ckpt.save({"w": np.zeros(9)}, 2)
        assert [rates.get(timeout=60) for _ in range(2)] == [0, 7]


def test_of_two_jobs_that_start_together_one_is_told_of_the_other(tmp_path: Path) -> None:
    make = ranked(tmp_path, 2)
    marked, begun = threading.Event(), threading.Event()
    old, ahead = (tmp_path / "fast" / f".run-{digit * 8}" for digit in "0f")
    old.parent.mkdir()
    for mark, seconds in ((old, 0), (ahead, 1 << 40)):  # as a clock that jumped has left it
        mark.touch()
        os.utime(mark, (seconds, seconds))

    def late(rank: int, gather: Any) -> None:
        def gather_and_wait(mine: bytes) -> list[bytes]:
            notes: list[bytes] = gather(mine)
            marked.set()  # the first time: by all ranks
            assert begun.wait(60)
            return notes

        with pytest.raises(UsageError, match="is used by another running job"):
            make(rank, gather_and_wait)

    def first(rank: int, gather: Any) -> None:
        assert marked.wait(60)
        with make(rank, gather) as ckpt:
            begun.set()
            ckpt.save(state_of(rank), 1)
            told.join(60)
            assert not told.is_alive()
            gather(b"")

    ended: list[Any] = []
    told = threading.Thread(target=lambda: ended.extend(World(2).run(late)))
    told.start()
    assert World(2).run(first) == [None, None]
    assert ended == [None, None]
    assert list(tmp_path.rglob(".run-*")) == [ahead]


def test_no_rank_saves_before_all_know_what_a_save_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, early, begin = threading.Event(), [], _begin.lineage_of

    def slow(stores: Any, owned: Any, *more: Any) -> Any:
        if not owned:
            early.append(saved.wait(0.5))
        return begin(stores, owned, *more)

    def work(rank: int, gather: Any) -> int:
        with ranked(tmp_path, 2, replicated=True)(rank, gather) as ckpt:
            ckpt.save(state_of(1), 1)
            saved.set()
            return ckpt._lineage.first

    monkeypatch.setattr(_begin, "lineage_of", slow)
    one, other = World(2).run(work)
    assert early == [False] and one == other


@pytest.mark.parametrize("fast", [True, False])
def test_a_late_rank_of_a_replicated_state_waits_for_nothing_retired(
    tmp_path: Path, fast: bool
) -> None:
    ahead = threading.Event()

    def work(rank: int, gather: Any) -> list[list[str]]:
        with nostall.Checkpointer(
            tmp_path / "fast" if fast else None, tmp_path / "durable", rank=rank, world_size=2,
            gather=gather, job="test", replicated=True, keep=1,
        ) as ckpt:  # fmt: skip
            if rank == 1:
                assert ahead.wait(60)
            saved = [ckpt.save(state_of(step), step, level="durable") for step in range(3)]
            ahead.set()
        return [one.problems for one in saved]

    assert World(2).run(work) == [[[]] * 3] * 2
    assert steps_in(tmp_path / "durable") == [2]


def test_another_world_size_is_refused_with_the_remedy(tmp_path: Path) -> None:
    make = ranked(tmp_path, 2, level="durable")

    def work(rank: int, gather: Any) -> None:
        with make(rank, gather) as ckpt:
            ckpt.save(state_of(1), 1)

    World(2).run(work)
    words = r"saved by 2 ranks.*replicated=True.*StorageWriter"
    with (
        nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt,
        pytest.raises(UsageError, match=words),
    ):
        ckpt.restore()


def test_a_rank_that_never_saves_makes_no_checkpoint(tmp_path: Path) -> None:
    make = ranked(tmp_path, 2)

    def work(rank: int, gather: Any) -> Any:
        ckpt = make(rank, gather)
        saved = ckpt.save(state_of(rank), 1)
        assert saved is not None
        saved.wait("durable", 60)
        gather(b"")
        if rank == 0:
            engine = ckpt._background
            engine.settings = dataclasses.replace(engine.settings, timeout=0.5)
            ckpt.save(state_of(rank), 2)
            with pytest.raises(IoError, match="of step 2, is safe nowhere"):
                ckpt.close(60)
        gather(b"")
        ckpt.close()
        return [s.problems for s in ckpt.history]

    problems = World(2).run(work)[0]
    assert any("ranks [1]" in p for p in problems[1])
    assert steps_in(tmp_path / "fast") == [1]


def test_a_word_is_taken_back_or_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nostall.checkpoint._store, "GRACE_SECONDS", 0.1)
    store = Store(tmp_path, "durable")
    names = [part_name(rank, "aaaaaaaa-000001") for rank in range(2)]
    parts = [Part(rank, name, 0, ()) for rank, name in enumerate(names)]

    def commit(step: int, rank: int, timeout: float, **more: Any) -> str:
        manifest = Manifest(step, "aaaaaaaa-000001", 2, ())
        return store.commit(manifest, rank, parts[rank], timeout=timeout, **more)

    store.prepare(1)
    assert "rank 0 did not complete" in commit(1, 1, 0.0)  # so its part goes
    assert "ranks [1] did not finish" in commit(1, 0, 0.3)
    assert store.read(1, "manifest.json") is None
    # Rank 0 has the word, and takes its time.
    store.prepare(2)
    publish, taken, go_on = Store.publish, threading.Event(), threading.Event()
    told: list[str] = []

    def slowly(self: Store, manifest: Manifest) -> None:
        taken.set()
        go_on.wait(60)
        publish(self, manifest)

    monkeypatch.setattr(Store, "publish", slowly)
    rank0 = threading.Thread(target=lambda: told.append(commit(2, 0, 60)))
    rank0.start()
    with pytest.raises(PeerError, match="part stays"):
        commit(2, 1, 60, stopped=taken.is_set)
    go_on.set()
    rank0.join(60)
    assert told == [""] and steps_in(tmp_path) == [2]
    assert [p.name for p in store.directory(2).iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("kind", [IoError, TypeError])
@pytest.mark.parametrize("named", [False, True])
def test_a_manifest_that_fails_takes_no_part_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, kind: type[Exception]
) -> None:
    make = ranked(tmp_path, 2)
    publish = Store.publish

    def fail(self: Store, manifest: Manifest) -> None:
        if named:
            publish(self, manifest)
        raise kind("the directory cannot be synced")

    def work(rank: int, gather: Any) -> Any:
        ckpt = make(rank, gather)
        with pytest.raises(IoError, match="cannot be synced"):
            saved = ckpt.save(state_of(rank), 1)
            assert saved is not None
            saved.wait("durable", 60)
            assert rank == 1 and named  # who sees the manifest is content
            raise IoError("cannot be synced")
        gather(b"")
        with contextlib.nullcontext() if named else pytest.raises(IoError, match="safe nowhere"):
            ckpt.close()
        return None

    monkeypatch.setattr(Store, "publish", fail)
    monkeypatch.setattr(nostall.checkpoint._saved, "_LOOK_SECONDS", 60.0)
    assert World(2).run(work) == [None, None]
    for tier in ("fast", "durable"):
        (directory,) = (tmp_path / tier).glob("step-*") if named else (tmp_path / tier,)
        parts = sorted(p.name.split(".")[0] for p in directory.rglob("*.safetensors"))
        assert parts == (["rank-00000", "rank-00001"] if named else [])


def test_a_part_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    make = ranked(tmp_path, 2)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            ckpt.save(state_of(rank), 1, level="durable")
            if rank == 1:  # a file where its part should go
                store = ckpt.fast
                assert store is not None
                (store.root / "step-000000000002").mkdir(exist_ok=True)
                name = f"rank-00001.{ckpt._run}-000001.safetensors"
                (store.root / "step-000000000002" / name).mkdir()
            saved = ckpt.save(state_of(10 + rank), 2, level="durable")
            assert saved is not None
            found = ckpt.restore()
            assert found is not None
            return saved.problems, found.step, found.state["step"], found.tier

    results = World(2).run(work)
    for rank, (problems, step, value, tier) in enumerate(results):
        assert "rank 1" in problems[0] and "writing to" in problems[0]
        assert (step, value, tier) == (2, 10 + rank, "durable")


@pytest.mark.parametrize("kind", ["NumPy", "torch", "int"])
def test_a_metric_is_what_float_makes_a_number_of(tmp_path: Path, kind: str) -> None:
    if kind == "torch":
        torch = pytest.importorskip("torch")
        make: Callable[[float], Any] = lambda loss: torch.tensor(loss, requires_grad=True)  # noqa: E731
    else:
        make = np.float32 if kind == "NumPy" else int
    with nostall.Checkpointer(durable=tmp_path, keep=Keep(last=1, best=1), level="durable") as ckpt:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            ckpt.save(state_of(step), step, metric=make(loss))
        ckpt.wait(60)
        assert [m.metric for m in ckpt.durable.manifests()] == [1.0, 4.0]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_metric_that_is_no_number_is_refused_and_keeps_no_rank_waiting(
    tmp_path: Path, wrong: int
) -> None:
    make = ranked(tmp_path, 2)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:  # ranks wait for each other for 600 s
            words = "metric= is a str of which float.. makes no number .*: give one number"
            metric: Any = "low" if rank == wrong else None
            with pytest.raises(UsageError if rank == wrong else IoError, match=words):
                ckpt.save(state_of(rank), 1, level="fast", metric=metric)
            ckpt.save(state_of(rank), 2, level="durable")
        return True

    assert World(2).run(work) == [True, True]
    assert steps_in(tmp_path / "durable") == [2]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_that_one_rank_cannot_copy_fails_on_all_at_once(
    tmp_path: Path, failing: int
) -> None:
    make = ranked(tmp_path, 2)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:  # ranks wait for each other for 600 s
            if rank == failing:
                with pytest.raises(UsageError, match=r"is a builtins\.object"):
                    ckpt.save({"w": object()}, 1, level="fast")
            else:
                words = f"rank {failing}: it cannot save: UsageError: .*builtins.object"
                with pytest.raises(IoError, match=words):
                    ckpt.save(state_of(rank), 1, level="fast")
            ckpt.save(state_of(rank), 2, level="durable")
        return True

    assert World(2).run(work) == [True, True]
    assert steps_in(tmp_path / "durable") == [2]


def test_all_ranks_fall_back_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = ranked(tmp_path, 2, level="durable")

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save(state_of(10 * step + rank), step)

    World(2).run(work)
    for path in tmp_path.glob("*/step-000000000002/rank-00001.*"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 16
        path.write_bytes(data)

    def restore(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            found = ckpt.restore()
            assert found is not None
            return found.step, found.state["step"]

    assert World(2).run(restore) == [(1, 10), (1, 11)]
    assert "rank 1" in caplog.text and "weights" in caplog.text


@pytest.mark.parametrize("method", ["steps", "entries"])
def test_a_directory_that_one_rank_cannot_read_ends_the_restore_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    make, failing = ranked(tmp_path, 2), threading.local()
    inner = getattr(Store, method)

    def refuse(store: Store) -> Any:
        if getattr(failing, "now", False):
            raise IoError(f"cannot list the checkpoints in {store.root}: Stale file handle")
        return inner(store)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:  # ranks wait for each other for 600 s
            ckpt.save(state_of(rank), 1, level="durable")
            failing.now = rank == 1
            with pytest.raises(IoError, match=r"^rank 1: cannot list .*: Stale file handle$"):
                ckpt.restore()
            failing.now = False
            found = ckpt.restore()  # the ranks are in step again
            assert found is not None
            return found.step, found.state["step"]

    monkeypatch.setattr(Store, method, refuse)
    assert World(2).run(work) == [(1, 0), (1, 1)]


def test_a_path_that_is_no_utf8_is_told_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = ranked(tmp_path, 2)

    def refuse(store: Store, branch: Any) -> None:
        raise IoError("cannot note the branch in /data/\udcff")

    monkeypatch.setattr(Store, "note_branch", refuse)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for at in (1, 2):
                ckpt.save(state_of(rank), at, level="durable")
            ckpt.wait(60)
            found = ckpt.restore(1)
            return found and found.step

    assert World(2).run(work) == [1, 1]
    assert r"rank 0: cannot note the branch in /data/\udcff" in caplog.text


def blinded(monkeypatch: pytest.MonkeyPatch, hidden: Callable[[int, str], bool]) -> threading.local:
    """While a rank's `blind` is set it sees no such manifest, by step and name: as over NFS, where a
    client keeps names, also those that were not there."""
    mine, inner = threading.local(), Store.read

    def read(store: Store, at: int, name: str) -> Any:
        hides = getattr(mine, "blind", 0) and hidden(at, name)
        return None if hides else inner(store, at, name)

    monkeypatch.setattr(Store, "read", read)
    return mine


@pytest.mark.parametrize(("step", "looks"), [(2, 3), (2, 99), (1, 99)])
def test_a_checkpoint_that_a_rank_sees_late_is_looked_for_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: int,
    looks: int,
) -> None:
    make, rank1 = ranked(tmp_path, 2), blinded(monkeypatch, lambda at, _: at == step)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        if getattr(rank1, "blind", 0):
            rank1.blind -= 1
            pauses.append(seconds)

    monkeypatch.setattr(_search, "time", SimpleNamespace(sleep=pause))

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for at in (1, 2):
                ckpt.save(state_of(rank), at, level="durable")
            ckpt.wait(60)
            gather(b"")
            rank1.blind = looks if rank == 1 else 0
            found: Any = None
            try:
                found = ckpt.restore()
            except UnreachableError as error:
                assert str(error).startswith("ranks [1] do not see the checkpoint of step 2 in ")
            rank1.blind = 0
            return found and found.step

    assert World(2).run(work) == [None if (step, looks) == (2, 99) else 2] * 2
    # What is older than what all see is not waited for.
    assert ("looking again" in caplog.text) == (step == 2)
    assert len(pauses) == (1 if step == 1 else min(looks, len(_search._PAUSES)))


def test_what_was_given_up_is_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank does not see a save of a branch that is not the current one."""
    make, rank1 = ranked(tmp_path, 2), blinded(monkeypatch, lambda *_: True)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for at in (1, 2):
                ckpt.save(state_of(rank), at, level="durable")
            ckpt.wait(60)
            gather(b"")
            ckpt.restore(1)
            if rank == 0:
                for store in (Store(tmp_path / kind, kind) for kind in ("fast", "durable")):
                    store.remove_step(1)
            gather(b"")
            rank1.blind = rank == 1
            found = ckpt.restore()
            rank1.blind = False
            return found

    assert World(2).run(work) == [None, None]
    assert "looking again" not in caplog.text


def test_a_checkpoint_that_a_rank_sees_late_beside_a_damaged_one_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = ranked(tmp_path, 2)
    rank1 = blinded(monkeypatch, lambda _, name: name.startswith("manifest-"))

    def pause(seconds: float) -> None:
        rank1.blind = max(0, getattr(rank1, "blind", 0) - 1)

    monkeypatch.setattr(_search, "time", SimpleNamespace(sleep=pause))

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for at in (1, 2):
                ckpt.save(state_of(rank), at, level="durable")
                ckpt.wait(60)
                gather(b"")
            if rank == 0:
                for manifest in tmp_path.glob("*/*2/manifest.json"):
                    manifest.write_bytes(b"{}")
            gather(b"")
            ckpt.save(state_of(20 + rank), 2, level="durable")
            ckpt.wait(60)
            gather(b"")
            rank1.blind = 3 if rank == 1 else 0
            found = ckpt.restore()
            return found and found.state["step"]

    assert World(2).run(work) == [20, 21]
    assert "ranks [1] do not see the checkpoint of step 2" in caplog.text


def test_a_manifest_that_one_rank_cannot_read_is_told_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, failing, inner = ranked(tmp_path, 2), threading.local(), Store.read

    def refuse(store: Store, step: int, name: str) -> Any:
        entry = inner(store, step, name)
        if entry is None or not getattr(failing, "now", False):
            return entry
        problem = f"{entry.path} cannot be read: Stale file handle"
        return dataclasses.replace(entry, manifest=None, damage=problem, unread=True)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            ckpt.save(state_of(rank), 1, level="durable")
            failing.now = rank == 1
            with pytest.raises(CorruptionError, match=r"ranks \[1\]: .*cannot be read: Stale file"):
                ckpt.restore()
            failing.now = False
            found = ckpt.restore()
            return found and found.step

    monkeypatch.setattr(Store, "read", refuse)
    assert World(2).run(work) == [1, 1]


@pytest.mark.parametrize("method", ["open", "missing", "branch"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOMEM, "more memory"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EAGAIN, "try again"),
    ],
)
def test_too_little_memory_or_too_few_files_on_a_rank_pass_over_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int, remedy: str
) -> None:
    make, failing, inner = ranked(tmp_path, 2), threading.local(), getattr(Store, method)

    def refuse(store: Store, *arguments: Any) -> Any:
        if getattr(failing, "now", False):
            error = IoError(f"cannot read {store.root}: {os.strerror(number)}")
            error.errno = number
            raise error
        return inner(store, *arguments)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save(state_of(step), step, level="durable")
            failing.now = rank == 1
            with pytest.raises(UnreachableError, match=f"^rank 1: .*{tmp_path}.*{remedy}"):
                ckpt.restore()
            failing.now = False
            found = ckpt.restore()
            return found and found.step

    monkeypatch.setattr(Store, method, refuse)
    assert World(2).run(work) == [2, 2]


def test_a_damaged_copy_beside_one_out_of_reach_passes_over_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Store.open

    def refuse(store: Store, *arguments: Any) -> Any:
        if store.kind == "fast":
            error = IoError(f"cannot read {store.root}: {os.strerror(errno.ENOMEM)}")
            error.errno = errno.ENOMEM
            raise error
        return inner(store, *arguments)

    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", keep_fast=2) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step, level="durable")
        (part,) = (tmp_path / "durable").glob("*2/*.safetensors")
        part.write_bytes(bytes(part.stat().st_size))
        with monkeypatch.context() as patched:
            patched.setattr(Store, "open", refuse)
            with pytest.raises(
                UnreachableError, match=f"{tmp_path / 'fast'}.*; .*{part} is damaged"
            ):
                ckpt.restore()
        found = ckpt.restore()
        assert found is not None and (found.step, found.tier) == (2, "fast")


@pytest.mark.parametrize("reads", [0, 1])  # of the manifest, before the limit
def test_too_few_files_for_a_manifest_pass_over_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    seen, inner = [0], Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.match("step-000000000002/*.json"):
            seen[0] += 1
            if seen[0] > reads:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return inner(path)

    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step, level="durable")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", refuse)
            with pytest.raises(UnreachableError, match=r"manifest.json cannot be read: Too many"):
                ckpt.restore()
        found = ckpt.restore()
    assert found is not None and found.step == 2


def test_what_cannot_be_listed_is_not_taken_for_no_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "durable"
    with nostall.Checkpointer(durable=root) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
        root.rename(tmp_path / "away")
        root.write_text("not a directory")
        with pytest.raises(IoError, match=f"cannot list the checkpoints in {root}"):
            ckpt.restore()
        root.unlink()
        (tmp_path / "away").rename(root)


def test_what_is_removed_after_the_look_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look = _search.view

    def remove(stores: Any, step: int | None) -> Any:
        found = look(stores, step)
        stores[0].remove_step(2)
        return found

    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        monkeypatch.setattr(_search, "view", remove)
        found = ckpt.restore()
    assert found is not None and found.step == 1
    assert f"passing over a checkpoint: step 2 in {tmp_path} is gone" in caplog.text


def test_what_is_removed_while_it_is_looked_at_is_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = Store.missing

    def remove(store: Store, manifest: Manifest) -> str:
        if manifest.step == 2:
            store.remove_step(2)
        return missing(store, manifest)

    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        monkeypatch.setattr(Store, "missing", remove)
        found = ckpt.restore()
    assert found is not None and found.step == 1
    assert "passing over" not in caplog.text


def test_a_damaged_save_whose_metric_is_no_number_ends_no_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        ckpt.save(state_of(2), 2, metric=float("nan"))
        next(ckpt.durable.directory(2).glob("*.safetensors")).unlink()
        one, other = (ckpt.durable.manifests()[-1] for _ in range(2))
        # Another object, as Python 3.13 compares each field by its value.
        assert dataclasses.replace(one, metric=float("nan")) == other
        found = ckpt.restore()
    assert found is not None and found.step == 1
    assert "does not exist" in caplog.text


def test_a_damaged_save_that_is_replaced_again_and_again_ends_no_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, times = Store.read, itertools.count()

    def another(store: Store, step: int, name: str) -> Entry | None:
        found = read(store, step, name)
        if found is None or found.manifest is None or next(times) > 1000:
            return found
        new = dataclasses.replace(found.manifest, created=float(next(times)))
        return dataclasses.replace(found, manifest=new)

    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        next(ckpt.durable.directory(2).glob("*.safetensors")).unlink()
        monkeypatch.setattr(Store, "read", another)
        found = ckpt.restore()
    assert found is not None and found.step == 1
    assert "does not exist" in caplog.text and next(times) < 100


def test_a_part_that_cannot_be_looked_for_is_passed_over_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
        (part,) = tmp_path.glob("*2/*.safetensors")
        kept = part.rename(tmp_path / "kept")
        part.symlink_to(part)
        found = ckpt.restore()
        assert found is not None and found.step == 1
        words = f"passing over a checkpoint: cannot look for {part}: {os.strerror(errno.ELOOP)}"
        assert words in caplog.text
        kept.rename(part)
        found = ckpt.restore(2)
        assert found is not None and found.step == 2


@pytest.mark.parametrize("damage", ["bytes", "directory"])
def test_a_note_of_a_branch_that_is_damaged_since_the_start_is_told_and_harms_no_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    note = tmp_path / "branch.json"
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step)
        ckpt.restore(1)
        note.unlink()
        if damage == "bytes":
            note.write_bytes(b"{}")
        else:
            note.mkdir()
        found = ckpt.restore()
        assert found is not None and found.step == 3  # what was saved last counts as the newest
        told = f"{note} is damaged" if damage == "bytes" else f"cannot read {note}: Is a directory"
        assert f"passing over a checkpoint: {told}" in caplog.text
        if damage == "directory":
            note.rmdir()


@pytest.mark.parametrize("wrong", [1, 3])  # blocks
def test_damage_is_told_with_its_bytes_and_the_arrays_in_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: int
) -> None:
    block, names = _native.CHECKPOINT_BLOCK, "abcdefg"
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save({name: np.full(block // 2, 1, np.uint8) for name in names}, 1)
        (part,) = tmp_path.glob("*/*.safetensors")
        size = part.stat().st_size
        with part.open("r+b") as file:
            for number in range(wrong):
                file.seek((number + 1) * block - 1)  # no byte of the header
                file.write(b"?")
        place, more = f"bytes 0 to {block} do not match their CRC32C", ""
        if wrong > 1:
            more = f", and 2 more blocks of {block} bytes"
        with pytest.raises(CorruptionError) as told:
            ckpt.restore()
        assert f"{part} is damaged: {place}{more} (in them: the header, a, b" in str(told.value)
        assert (" and 2 more)" in str(told.value)) == (wrong > 1)
    assert size > 3 * block
    assert main(["checkpoints", "verify", str(tmp_path)]) == CorruptionError.exit_code
    assert f"{part}: {place}{more} in {tmp_path}\n" in capsys.readouterr().out


def test_progress_is_told_while_a_read_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    under_way, block, opened = threading.Event(), _native.CHECKPOINT_BLOCK, Store.open

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        if 0 < done < total:
            under_way.set()

    def open_slow(store: Store, step: int, part: Part) -> Any:
        """Its second block is not there before a progress has been told."""
        file = opened(store, step, part)

        def read(first: int, count: int, threads: int, progress: _native.Progress) -> list[int]:
            damaged = file.read(first, 1, threads, progress)
            assert under_way.wait(60)
            return damaged + file.read(first + 1, count - 1, threads, progress)

        return SimpleNamespace(data=file.data, read=read)

    monkeypatch.setattr(Store, "open", open_slow)
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state_of(7, block // 4), 1)
        found = ckpt.restore(progress=tell)
    assert found is not None and (found.state["weights"] == 7).all()
    size = found.manifest.size
    assert (block, size) in told and told[-1] == (size, size)
    assert sorted(told) == told


def test_progress_is_told_at_the_end_where_no_thread_is_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[tuple[int, int]] = []
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            found = ckpt.restore(progress=lambda *counts: told.append(counts))
    assert found is not None and told == [(found.manifest.size, found.manifest.size)]


@pytest.mark.parametrize("where", ["take_snapshot", "submit"])
def test_a_handler_of_a_signal_saves_within_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    work, saves = getattr(BackgroundWriter, where), []

    def interrupted(background: BackgroundWriter, *arguments: Any, **options: Any) -> Any:
        result = work(background, *arguments, **options)
        if not saves:
            saves.append(None)
            signal.raise_signal(signal.SIGUSR1)
        return result

    def handle(*_: Any) -> None:
        saves.append(ckpt.save(state_of(2), 2, level="durable"))

    monkeypatch.setattr(BackgroundWriter, where, interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable", patience=0.1) as ckpt:
            outer = ckpt.save(state_of(1), 1, level="fast")
            assert outer is not None and outer.problems == []
            ckpt.wait(60)
            assert saves[1].level == outer.level == "durable"
            assert len(ckpt._background._snapshots) == 1
            found = ckpt.restore()
            assert found is not None and found.step == found.state["step"] == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("level", ["fast", "durable"])
def test_an_interrupt_after_the_copy_has_begun_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    finished = []

    class Watched:
        def __init__(self, snapshot: Any) -> None:
            self._snapshot = snapshot

        def finish(self) -> None:
            self._snapshot.finish()
            finished.append(self._snapshot.size)

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with nostall.Checkpointer(tmp_path / "fast", tmp_path / "durable") as ckpt:
        inner = ckpt._snapshot
        monkeypatch.setattr(ckpt, "_snapshot", lambda *given: Watched(inner(*given)))
        monkeypatch.setattr(ckpt, "_remember", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(state_of(1), 1, level=level)
        assert len(finished) == 1  # before the training changes anything
        ckpt.wait(60)
        found = ckpt.restore()
    assert found is not None and found.step == 1


@pytest.mark.parametrize("name", ["_read", "_choices", "manifest_of"])
def test_what_no_one_expects_to_fail_on_a_rank_ends_the_restore_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, failing = ranked(tmp_path, 2), threading.local()
    where, method = (Search, name) if name == "_read" else (_search, name)
    if name == "_choices":
        method = "view"
    inner = getattr(where, method)

    def refuse(*arguments: Any) -> Any:
        if getattr(failing, "now", False):
            raise RuntimeError("can't start new thread")
        return inner(*arguments)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:  # ranks wait for each other for 600 s
            for step in (1, 2):
                ckpt.save(state_of(rank), step, level="durable")
            failing.now = rank == 1
            kind = IoError if name == "_choices" else RuntimeError if rank == 1 else PeerError
            with pytest.raises(kind, match="can't start new thread"):
                ckpt.restore()
            failing.now = False
            found = ckpt.restore()  # nothing was wrong with it
            return found and found.step

    monkeypatch.setattr(where, method, refuse)
    assert World(2).run(work) == [2, 2]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_state_that_fits_one_rank_only_is_restored_on_none(tmp_path: Path, wrong: int) -> None:
    make = ranked(tmp_path, 2)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save(state_of(step), step, level="durable")
            into = state_of(0, 5 if rank == wrong else 1000)
            words = (
                rf"^step 1 cannot be restored: rank {wrong}: state\['weights'\] is of shape \(5,\)"
            )
            with pytest.raises(UsageError, match=words):
                ckpt.restore(1, into=into)
            assert into["step"] == 0 and not into["weights"].any()
            assert all(store.branch() is None for store in (ckpt.fast, ckpt.durable))
            into = state_of(0)
            found = ckpt.restore(into=into)  # the newest: no branch has begun
            assert found is not None
            return found.step, into["step"]

    assert World(2).run(work) == [(2, 2), (2, 2)]


def test_a_state_that_one_rank_refuses_to_load_ends_the_restore_of_all(tmp_path: Path) -> None:
    make = ranked(tmp_path, 2)

    class Model:
        def __init__(self, refuses: bool) -> None:
            self.refuses = refuses

        def state_dict(self) -> dict[str, Any]:
            return {"layers": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refuses:
                raise RuntimeError("4 layers and not 3")

    def work(rank: int, gather: Any) -> Any:
        model = Model(refuses=rank == 1)
        with make(rank, gather) as ckpt:
            for step in (1, 2):
                ckpt.save({"model": model}, step, level="durable")
            kind = RuntimeError if rank == 1 else PeerError
            with pytest.raises(kind, match="4 layers and not 3"):
                ckpt.restore(1, into={"model": model})
            found = ckpt.restore()  # the newest: no branch has begun
            return found and found.step

    assert World(2).run(work) == [2, 2]


@pytest.mark.multi
def test_a_checkpointer_of_one_rank_alone_keeps_no_ranks_from_meeting(tmp_path: Path) -> None:
    code = f"""
import sys
import nostall
home, rank = {str(tmp_path)!r}, int(sys.argv[1])
if rank == 0:
    best = nostall.Checkpointer(f"{{home}}/best", rank=0, world_size=1, job="test")
    own = nostall.Checkpointer(
        f"{{home}}/own", rank=0, world_size=2, job="test", gather=lambda mine: [mine, mine]
    )
with nostall.Checkpointer(f"{{home}}/all", rank=rank, world_size=2, job="test", timeout=120) as ckpt:
    ckpt.save({{"rank": rank}}, 1, level="fast")
"""
    env = {**os.environ, "NOSTALL_RENDEZVOUS": str(tmp_path / "rendezvous")}
    ranks = [
        prefork.Process(["-c", code, str(rank)], env=env, stderr=prefork.PIPE) for rank in range(2)
    ]
    for rank in ranks:
        _, words = rank.communicate(timeout=300)
        assert rank.returncode == 0, words
    assert steps_in(tmp_path / "all") == [1]


def test_ranks_that_cannot_find_each_other_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gather="):
        nostall.Checkpointer(durable=tmp_path, rank=0, world_size=2, job="x")


def test_damage_everywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        for path in tmp_path.glob("step-*/*.safetensors"):
            path.write_bytes(b"x" * path.stat().st_size)
        with pytest.raises(CorruptionError, match="safetensors is damaged"):
            ckpt.restore()


def test_a_forked_child_ends_without_waiting_for_its_parents_threads(tmp_path: Path) -> None:
    script = f"""
import os, sys, numpy, nostall
ckpt = nostall.Checkpointer(durable={str(tmp_path)!r})
with ckpt.hold():
    ckpt.save({{"w": numpy.zeros(3_000_000)}}, 1)
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs what is registered for the end of a process
    os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert steps_in(tmp_path) == [1]
