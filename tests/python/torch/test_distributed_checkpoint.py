"""torch.distributed.checkpoint through nostall: sharded state, resharding, damage, no pickle."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import prefork
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

import nostall.torch.checkpoint
from nostall import _native
from nostall.checkpoint._format import Branch
from nostall.checkpoint._store import Store
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.torch.checkpoint import StorageReader, StorageWriter, load

ROWS = 10
RANK = Path(__file__).with_name("checkpoint_rank.py")


def whole() -> torch.Tensor:
    return torch.arange(ROWS * 4.0).reshape(ROWS, 4)


def state_of(step: int) -> dict[str, Any]:
    return {
        "model": {"w": whole() + step, "b": torch.full((3,), step, dtype=torch.bfloat16)},
        "optimizer": {"lr": 0.1 * step, "groups": [{"params": [0, 1], "betas": (0.9, 0.99)}]},
        "step": step,
    }


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def save(root: Path, steps: list[int], **options: Any) -> None:
    writer = StorageWriter(root, **options)
    for step in steps:
        dcp.save(state_of(step), checkpoint_id=f"run/{step}", storage_writer=writer)
    writer.close()


def blank() -> dict[str, Any]:
    state = state_of(0)
    state["model"] = {k: torch.zeros_like(v) for k, v in state["model"].items()}
    return state


def test_state_comes_back_and_old_ones_go(group: None, tmp_path: Path) -> None:
    save(tmp_path / "c", [1, 2, 3], keep=2)
    state = blank()
    assert load(state, tmp_path / "c") == 3
    for name, tensor in state_of(3)["model"].items():
        assert torch.equal(state["model"][name], tensor)
    assert state["optimizer"] == state_of(3)["optimizer"] and state["step"] == 3
    assert [e.step for e in Store(tmp_path / "c", "durable").entries()] == [2, 3]
    dcp.load(state, storage_reader=StorageReader(tmp_path / "c", 2))
    assert state["step"] == 2


def test_what_a_save_returned_for_stays_until_a_rule_of_its_branch_retires_it(
    group: None, tmp_path: Path
) -> None:
    root = tmp_path / "c"
    save(root, [90, 95, 100], keep=2)
    for step in (80, 85):  # below the newest: a branch
        save(root, [step], keep=2)
        state = blank()
        assert load(state, root) == step and state["step"] == step
    assert [e.step for e in Store(root, "durable").entries()] == [80, 85, 95, 100]
    dcp.load(state, storage_reader=StorageReader(root, 100))
    assert state["step"] == 100
    for step in (80, 85):
        Store(root, "durable").remove_step(step)
    Store(root, "durable").note_branch(Branch(1 << 30, ((0, 1 << 29),), 85, "x"))
    with pytest.raises(CorruptionError, match="branches that were given up"):
        load(blank(), root)


def test_what_cannot_be_saved_is_named_as_the_user_names_it(group: None, tmp_path: Path) -> None:
    state = {"model": {"good": torch.ones(2), "bad": torch.ones(2).to_sparse()}}
    writer = StorageWriter(tmp_path / "c")
    with pytest.raises(
        dcp.api.CheckpointException, match=r"\['model\.bad'\] is a torch.sparse_coo"
    ):
        dcp.save(state, checkpoint_id="1", storage_writer=writer)
    writer.close()


@pytest.mark.parametrize("id", ["run/1234567890123", "1234567890123/"])
def test_a_number_that_is_no_step_is_refused(tmp_path: Path, id: str) -> None:
    for one in (StorageWriter(tmp_path), StorageReader(tmp_path)):
        with pytest.raises(UsageError, match="steps are from 0 to 999999999999, not 1234567890123"):
            one.reset(id)
    reader = StorageReader(tmp_path)
    reader.reset("run/0000000000000120")
    assert reader.step == 120


def test_async_save(group: None, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    dcp.async_save(state_of(4), checkpoint_id="4", storage_writer=writer).result()
    state = blank()
    assert load(state, tmp_path / "c") == 4 and state["step"] == 4


def test_a_reader_loads_what_is_newest_at_each_load(group: None, tmp_path: Path) -> None:
    reader, state = StorageReader(tmp_path), blank()
    for step in (1, 2):
        save(tmp_path, [step])
        dcp.load(state, storage_reader=reader)
        assert (state["step"], reader.step) == (step, step)
    dcp.load(state, checkpoint_id="1", storage_reader=reader)
    assert (state["step"], reader.step) == (1, 1)


def test_what_an_object_of_the_state_refuses_is_no_damage(group: None, tmp_path: Path) -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"place": 7}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise UsageError("this is the place in another data set")

    writer = StorageWriter(tmp_path)
    for step in (1, 2):
        state = {"w": whole(), "loader": Loader()}
        dcp.save(state, checkpoint_id=str(step), storage_writer=writer)
    writer.close()
    with pytest.raises(UsageError, match="another data set"):
        load(state, tmp_path)


@pytest.mark.parametrize("place", ["read_metadata", "read_data"])
def test_a_load_follows_a_job_that_retires_what_it_has_found(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    writer, steps = StorageWriter(tmp_path, keep=1), iter(range(1, 1000))

    def save_next() -> None:
        step = next(steps)
        dcp.save(state_of(step), checkpoint_id=str(step), storage_writer=writer)

    saves = 1
    read = getattr(StorageReader, place)

    def retired_first(*args: Any) -> Any:
        nonlocal saves
        if saves:
            saves -= 1
            save_next()
        return read(*args)

    save_next()
    state = blank()
    monkeypatch.setattr(StorageReader, place, retired_first)
    assert load(state, tmp_path) == 2 and state["step"] == 2
    saves = 500
    with pytest.raises(IoError, match="stayed until it was read, in 10 attempts"):
        load(state, tmp_path)
    saves = 0
    writer.close()
    assert load(state, tmp_path) == state["step"] > 2


class Gate:
    """Holds the first that comes until another one has ended, or waits for what the first has."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def hold(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(600)


class HeldWriter(StorageWriter):
    """Holds the first save at one place."""

    def __init__(self, root: Path, place: str) -> None:
        super().__init__(root)
        self.gate, self._place = Gate(), place

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        if self._place == "before it has an id":
            self.gate.hold()
        plans = super().prepare_global_plan(plans)
        if self._place == "with an id":
            self.gate.hold()
        return plans

    def finish(self, *args: Any, **named: Any) -> None:
        if self._place == "before it is complete":
            self.gate.hold()
        super().finish(*args, **named)


class Queue:
    """A lock that opens a gate where somebody has to wait."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._lock = gate, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._gate.opened.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize(
    "place", ["before it has an id", "with an id", "while it writes", "before it is complete"]
)
def test_saves_that_are_under_way_at_a_time_keep_steps_and_data_apart(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    writer = HeldWriter(tmp_path, place)
    write = _native.SnapshotWrite

    def held(*args: Any, **options: Any) -> Any:
        writer.gate.hold()
        return write(*args, **options)

    if place == "while it writes":
        monkeypatch.setattr(_native, "SnapshotWrite", held)
        monkeypatch.setattr(writer, "_writing", Queue(writer.gate), raising=False)
    first = dcp.async_save(state_of(10), checkpoint_id="10", storage_writer=writer)
    assert writer.gate.reached.wait(600)
    second = dcp.async_save(state_of(20), checkpoint_id="20", storage_writer=writer)
    second.add_done_callback(lambda _: writer.gate.opened.set())
    second.result(), first.result()
    writer.close()
    for step in (10, 20):
        state = blank()
        dcp.load(state, storage_reader=StorageReader(tmp_path, step))
        assert state["step"] == step and torch.equal(state["model"]["w"], whole() + step)
    assert load(blank(), tmp_path) == 20  # what began first is its past, not a branch


def test_a_save_that_is_under_way_at_a_close_leaves_nothing(group: None, tmp_path: Path) -> None:
    writer = HeldWriter(tmp_path, "before it is complete")
    first = dcp.async_save(state_of(1), checkpoint_id="1", storage_writer=writer)
    assert writer.gate.reached.wait(600)
    writer.close()
    writer.gate.opened.set()
    with pytest.raises(dcp.api.CheckpointException, match="writer was closed meanwhile"):
        first.result()
    assert not list(tmp_path.glob("step-*"))


def test_a_signals_handler_saves_within_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, name = StorageWriter(tmp_path), nostall.torch.checkpoint.part_name

    def handle(*_: object) -> None:
        dcp.save(state_of(2), checkpoint_id="2", storage_writer=writer, no_dist=True)

    def interrupted(*arguments: Any) -> str:
        if not handled:
            handled.append(1)
            os.kill(os.getpid(), signal.SIGUSR1)
        return name(*arguments)

    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(nostall.torch.checkpoint, "part_name", interrupted)
        with pytest.raises(SystemExit):
            writer.reset("1")
            writer.set_up_storage_writer(True)
            plan = DefaultSavePlanner()
            plan.set_up_planner(state_of(1), is_coordinator=True)
            (local,) = writer.prepare_global_plan(
                [writer.prepare_local_plan(plan.create_local_plan())]
            )
            writer.write_data(local, plan)
            raise SystemExit  # as a handler that saves does in the end
    finally:
        signal.signal(signal.SIGUSR1, before)
    writer.close()
    state = state_of(0)
    assert load(state, tmp_path, no_dist=True) == 2
    assert torch.equal(state["model"]["w"], whole() + 2)


def test_ranks_that_save_each_by_itself_are_refused(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    writer = StorageWriter(tmp_path)
    writer.reset("1")
    with pytest.raises(UsageError, match="use_collectives=False is not supported on several ranks"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


@pytest.mark.parametrize("then", ["the next save", "the end"])
def test_a_save_that_cannot_be_completed_leaves_nothing(
    group: None, tmp_path: Path, then: str
) -> None:
    writer = StorageWriter(tmp_path)
    dcp.save(state_of(1), checkpoint_id="1", storage_writer=writer)
    obstacle = tmp_path / "step-000000000002" / "manifest.json.partial"
    obstacle.mkdir(parents=True)
    with pytest.raises(dcp.api.CheckpointException, match="complete the checkpoint in"):
        dcp.save(state_of(2), checkpoint_id="2", storage_writer=writer)
    assert list(obstacle.parent.glob("*.safetensors"))
    obstacle.rmdir()
    if then == "the next save":
        dcp.save(state_of(3), checkpoint_id="3", storage_writer=writer)
    writer.close()
    assert not obstacle.parent.exists()
    assert load(blank(), tmp_path) == (3 if then == "the next save" else 1)


def test_a_rank_that_cannot_write_leaves_the_directory_to_the_others(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise IoError("the disk is gone")

    writer = StorageWriter(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(_native, "SnapshotWrite", fail)
        with pytest.raises(dcp.api.CheckpointException, match="the disk is gone"):
            dcp.save(state_of(2), checkpoint_id="2", storage_writer=writer)
    assert list((tmp_path / "step-000000000002").iterdir()) == []
    writer.close()
    assert not (tmp_path / "step-000000000002").exists()


def test_a_rank_writes_no_part_into_another_directory(tmp_path: Path) -> None:
    """Rank 1, which does not own it, has a link of its own, which then leads elsewhere."""
    view, elsewhere = tmp_path / "view", tmp_path / "elsewhere"
    (tmp_path / "durable").mkdir()
    elsewhere.mkdir()
    view.symlink_to(tmp_path / "durable")
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"w": whole()}, is_coordinator=False)
    plan = planner.create_local_plan()
    writers = StorageWriter(tmp_path / "durable"), StorageWriter(view)

    def write(step: int) -> None:
        for rank, writer in enumerate(writers):
            writer.reset(str(step))
            writer.set_up_storage_writer(rank == 0)
        given = writers[0].prepare_global_plan([plan, plan])
        writers[1].write_data(given[1], planner).wait()

    write(1)
    view.unlink()
    view.symlink_to(elsewhere)
    with pytest.raises(IoError, match=f"{view} is not the directory that this job has taken"):
        write(2)
    assert list(elsewhere.iterdir()) == []
    for writer in writers:
        writer.close()


def test_damage_is_found_and_passed_over(
    group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "c", [1, 2])
    (path,) = (tmp_path / "c").glob("step-000000000002/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    state = blank()
    assert load(state, tmp_path / "c") == 1
    assert torch.equal(state["model"]["w"], whole() + 1)
    assert str(path) in caplog.text
    (other,) = (tmp_path / "c").glob("step-000000000001/*.safetensors")
    other.write_bytes(pickle.dumps(print)[: other.stat().st_size].ljust(other.stat().st_size))
    with pytest.raises(CorruptionError):
        load(state, tmp_path / "c")


def test_what_was_loaded_stays_before_what_is_damaged(group: None, tmp_path: Path) -> None:
    save(tmp_path, [10, 20], keep=2)
    (part,) = tmp_path.glob("step-000000000020/*.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert load(blank(), tmp_path) == 10
    save(tmp_path, [30], keep=2)
    assert [e.step for e in Store(tmp_path, "durable").entries()] == [10, 20, 30]


@pytest.mark.parametrize("damage", ["a short part", "no part", "the manifest"])
def test_damage_that_needs_no_reading_is_told(
    group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save(tmp_path, [1, 2])

    def spoil(step: int) -> Path:
        directory = Store(tmp_path, "durable").directory(step)
        (part,) = directory.glob("*.safetensors")
        if damage == "a short part":
            os.truncate(part, 10)
        elif damage == "no part":
            part.unlink()
        else:
            part = directory / "manifest.json"
            part.write_bytes(b"{")
        return part

    newest = spoil(2)
    state = blank()
    assert load(state, tmp_path) == 1 and state["step"] == 1
    assert f"passing over a checkpoint: {newest}" in caplog.text
    caplog.clear()
    dcp.load(state, storage_reader=StorageReader(tmp_path))
    assert f"passing over a checkpoint: {newest}" in caplog.text
    with pytest.raises(CorruptionError, match=f"no checkpoint of step 2 .*{newest}"):
        StorageReader(tmp_path, 2).read_metadata()
    oldest = spoil(1)
    with pytest.raises(CorruptionError, match=f"{oldest}.*{newest}"):
        load(state, tmp_path)


def test_an_id_without_a_step_and_an_empty_directory(group: None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="end with the step"):
        dcp.save(state_of(1), checkpoint_id="latest", storage_writer=StorageWriter(tmp_path))
    assert load(blank(), tmp_path / "none") is None


def test_a_save_without_an_id_is_refused_and_replaces_none(group: None, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    for before in ([], [1]):
        for step in before:
            dcp.save(state_of(step), checkpoint_id=str(step), storage_writer=writer)
        with pytest.raises(dcp.api.CheckpointException, match="give checkpoint_id="):
            dcp.save(state_of(2), storage_writer=writer)
        assert [e.step for e in Store(tmp_path, "durable").entries()] == before
        assert len(list(tmp_path.glob("step-*"))) == len(before)
    writer.close()
    state = blank()
    assert load(state, tmp_path) == 1 and state["step"] == 1


def test_a_plan_of_an_earlier_save_is_refused(group: None, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, keep=1)
    # For the process torch keeps plans by the name of the class.
    kind = type(tmp_path.name, (dcp.DefaultSavePlanner,), {})

    def save(step: int) -> None:
        planner = kind(enable_plan_caching=True)
        dcp.save(state_of(step), checkpoint_id=str(step), storage_writer=writer, planner=planner)

    save(1)
    for step in (2, 3):
        with pytest.raises(dcp.api.CheckpointException, match="without enable_plan_caching"):
            save(step)
    dcp.save(state_of(4), checkpoint_id="4", storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="without enable_plan_caching"):
        save(4)
    writer.close()
    state = blank()
    assert load(state, tmp_path) == 4 and torch.equal(state["model"]["w"], whole() + 4)
    assert [e.step for e in Store(tmp_path, "durable").entries()] == [4]


def run_ranks(home: Path, mode: str, world: int) -> None:
    words = [RANK, str(home), mode, str(world)]
    ranks = [
        prefork.Process([*words, str(r)], stderr=prefork.PIPE, torch=True) for r in range(world)
    ]
    ended = [(rank.communicate(timeout=800)[1], rank.wait()) for rank in ranks]
    assert [status for _, status in ended] == [0] * world, ended


@pytest.mark.multi
def test_sharded_state_loads_on_another_world_size_and_another_way(tmp_path: Path) -> None:
    run_ranks(tmp_path, "save", 2)
    # Of step 6, which rank 1 could not write, nothing is left.
    parts = [path.parent.name for path in (tmp_path / "c").glob("step-*/*.safetensors")]
    assert parts == ["step-000000000007"] * 2
    assert not (tmp_path / "c" / "step-000000000006").exists()
    run_ranks(tmp_path, "load", 1)
