"""Copies of other nodes' samples by their next use, on real processes."""

from __future__ import annotations

import itertools
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import Job, reading_at_most

import nostall
from nostall_bench.slowfs import SlowFS, missing

EPOCHS = 8
BATCHES = 240 // 12  # of an epoch


def files(root: Path, sizes: list[int]) -> Path:
    random = np.random.default_rng(6)
    for i, size in enumerate(sizes):
        path = root / f"class{i % 3}" / f"{i:04d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(random.bytes(size))
    return root


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files(tmp_path_factory.mktemp("copies"), [8192] * 240)


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = np.random.default_rng(7).integers(200, 2000, 2000)
    return files(tmp_path_factory.mktemp("many"), sizes.tolist())


def size_of(data: Path) -> int:
    return sum(p.stat().st_size for p in data.rglob("*.jpg"))


def tiers(data: Path, nodes: int, room: float) -> list[str]:
    """Of a node: `room` times its part of one copy of all."""
    return [f"ram:{int(room * size_of(data) / nodes)}"]


def run(data: Path, nodes: int, room: float, copies: str, **more: Any) -> list[dict[str, Any]]:
    """Ranks go in step and stage little, as ranks that train on much data do."""
    extra = {"copies": copies, "staging": "64KiB", **more.pop("extra", {})}
    more = {"epochs": EPOCHS, "global_batch": 12, "tiers": tiers(data, nodes, room), **more}
    with tempfile.NamedTemporaryFile() as step:
        step.write(bytes(8 * 64))
        step.flush()
        extra["in_step"] = step.name
        return Job(data, nodes, extra=extra, together=True, **more).run()


def total(results: list[dict[str, Any]], origin: str) -> int:
    return sum(e["origins"][origin]["samples"] for r in results for e in r["epochs"])


def found_on_the_node(data: Path, room: float) -> tuple[int, int]:
    """Of two nodes of one rank, which have room for all that they read again: the samples that each
    has when it reads them, and those of them whose first read may not have ended.

    A node has what it read before, and what it owns and the other one asked it for. The last batches
    of an epoch, as many as are staged or in hand, may be under way while the next one begins.
    """
    plan = nostall.Plan(samples=240, batch_size=6, world_size=2, epochs=EPOCHS, seed=7)
    sizes = np.full(240, size_of(data) // 240, np.uint64)
    owner = plan.owners(sizes, [int(room * size_of(data) / 2)] * 2, ranks_per_node=1)
    found = soon = 0
    near = 3 * 6
    for rank in range(2):
        ids = [plan.rank_epoch(epoch, rank)[0].tolist() for epoch in range(EPOCHS)]
        again = EPOCHS * len(ids[0]) - len({i for epoch in ids for i in epoch})
        found += again + sum(owner[i] == rank for i in {*range(240)} - {*ids[0]})
        soon += sum(len({*a[-near:]} & {*b[:near]}) for a, b in itertools.pairwise(ids))
    return int(found), soon


def planned_and_found(results: list[dict[str, Any]]) -> tuple[int, int]:
    peers = [r["peers"] for r in results]
    return sum(p["copies_planned"] for p in peers), sum(p["copies_found"] for p in peers)


@pytest.mark.multi
@pytest.mark.parametrize(("nodes", "ranks"), [(4, 1), (2, 2)])
def test_more_samples_come_from_the_node_itself(data: Path, nodes: int, ranks: int) -> None:
    # The first rank of a node that has several is late with every batch: the others are as far ahead
    # of it as what is staged lets them, which is when the most copies give way too early.
    late = {r: {"compute": 0.005} for r in range(0, nodes * ranks, ranks) if ranks > 1}
    fixed, by_use = (
        run(data, nodes, 1.6, c, ranks=ranks, per_rank=late) for c in ("fixed", "next-use")
    )
    assert [r["stream"] for r in by_use] == [r["stream"] for r in fixed]
    planned, found = planned_and_found(by_use)
    assert planned_and_found(fixed) == (0, 0)
    # Two batches, so that nine of the 411 copies are missed at most.
    assert found >= 0.95 * planned
    assert total(by_use, "ram") > 1.03 * total(fixed, "ram")
    peers = [r["peers"] for r in by_use]
    assert sum(p["dropped_ranks"] for p in peers) == 0


@pytest.mark.multi
def test_ranks_of_a_node_stay_near_each_other_whatever_may_be_staged(data: Path) -> None:
    planned, found = planned_and_found(
        run(data, 2, 1.6, "next-use", ranks=2, extra={"staging": "256MiB"})
    )
    assert found >= 0.95 * planned > 0


@pytest.mark.multi
def test_samples_of_many_sizes_are_found_where_the_plan_says(many: Path) -> None:
    results = run(many, 2, 1.6, "next-use", ranks=2, global_batch=40)
    planned, found = planned_and_found(results)
    assert planned > 500
    assert found >= 0.9 * planned


@pytest.fixture
def slow(data: Path, tmp_path: Path):
    """A shared file system that is slower than other nodes, with a mount for each of two nodes."""
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    with SlowFS(data, tmp_path / "mounts", 20e6, 40e6, 15e-3, clients=2) as storage:
        yield storage


@pytest.mark.alone
@pytest.mark.multi
def test_the_source_is_read_once(data: Path, slow: SlowFS) -> None:
    job = Job(
        data,
        2,
        ranks=2,
        tiers=tiers(data, 2, 1.6),
        epochs=EPOCHS,
        global_batch=12,
        roots=slow.mounts,
        extra={"copies": "next-use", "staging": "64KiB"},
        together=True,
    )
    results = reading_at_most(1.1, job, slow)
    assert planned_and_found(results)[1] > 0


@pytest.mark.multi
def test_without_room_beside_owned_samples_nothing_is_copied(data: Path) -> None:
    results = run(data, 2, 1.0, "next-use", epochs=3)
    assert planned_and_found(results) == (0, 0)
    assert {r["batches"] for r in results} == {3 * BATCHES}


@pytest.mark.multi
def test_copies_stay_where_all_that_is_read_again_has_room(data: Path) -> None:
    fixed, by_use = (run(data, 2, 2.0, c) for c in ("fixed", "next-use"))
    assert planned_and_found(by_use) == (0, 0)
    found, soon = found_on_the_node(data, 2.0)
    assert soon < 40
    for results in (fixed, by_use):
        assert found - soon <= total(results, "ram") <= found


@pytest.mark.multi
def test_a_node_without_tiers_copies_nothing(data: Path) -> None:
    results = run(data, 2, 1.6, "next-use", epochs=4, per_rank={1: {"tiers": []}})
    assert {r["batches"] for r in results} == {4 * BATCHES}
    assert results[1]["peers"]["copies_planned"] == 0


@pytest.mark.multi
def test_a_job_goes_on_in_the_midst_of_an_epoch(data: Path) -> None:
    at = BATCHES * 5 // 2
    stopped = run(data, 2, 1.6, "next-use", epochs=10, extra={"stop_at": at})
    state = {"state": stopped[0]["state"]}
    fixed, by_use = (run(data, 2, 1.6, c, epochs=10, extra=state) for c in ("fixed", "next-use"))
    assert [r["stream"] for r in by_use] == [r["stream"] for r in fixed]
    assert {r["batches"] for r in by_use} == {10 * BATCHES - at}
    planned, found = planned_and_found(by_use)
    assert (
        0.5 * planned < found <= planned
    )  # what the first half of the epoch would have kept is not there


@pytest.mark.multi
@pytest.mark.parametrize(
    "staging", ["64KiB", "256MiB"]
)  # of 256 MiB more than an epoch could be staged
def test_epochs_that_are_left_early_go_on_with_the_copies(data: Path, staging: str) -> None:
    results = run(data, 2, 1.6, "next-use", extra={"leave_at": BATCHES // 2, "staging": staging})
    assert {r["batches"] for r in results} == {EPOCHS * BATCHES // 2}
    planned, found = planned_and_found(results)
    # What the other half of an epoch would have brought is not there.
    assert found > 0.3 * planned > 0


@pytest.mark.multi
def test_a_killed_node_leaves_the_others_with_the_right_bytes(data: Path) -> None:
    job = Job(
        data,
        3,
        tiers=[f"ram:{size_of(data) // 2}"],
        epochs=EPOCHS,
        global_batch=12,
        per_rank={1: {"die_at": 40}},
        extra={"copies": "next-use"},
    )
    for rank, process in enumerate(job.start()):
        out, err = process.communicate(timeout=800)
        if rank == 1:
            assert process.returncode == -signal.SIGKILL
            continue
        assert process.returncode == 0, err  # rank.py compares every sample with its file
        told = json.loads(out.splitlines()[-1])
        assert told["batches"] == EPOCHS * BATCHES
        assert told["peers"]["copies_found"] > 0


def refusals(data: Path, **more: Any) -> list[str]:
    said = []
    for process in Job(data, 2, epochs=1, **more).start():
        said.append(process.communicate(timeout=800)[1])
        assert process.returncode != 0
    return said


@pytest.mark.multi
@pytest.mark.parametrize("other", [{"sharing": "hdmlp"}, {"assignment": "locality"}])
def test_rules_that_change_owners_or_order_are_refused(data: Path, other: dict[str, str]) -> None:
    said = refusals(data, extra={"copies": "next-use", **other})
    assert all("leave one of them out" in err for err in said)


@pytest.mark.multi
def test_ranks_that_disagree_are_refused(data: Path) -> None:
    said = refusals(data, per_rank={1: {"copies": "next-use"}})
    assert all("the ranks of the job disagree: copies is" in err for err in said)


def test_another_value_is_refused(data: Path) -> None:
    with pytest.raises(nostall.errors.UsageError, match=r"copies.*fixed.*next-use"):
        nostall.DataLoader(nostall.ImageFolder(data, index=False), 4, copies="some")
