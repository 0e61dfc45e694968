"""Nodes that share what they keep: the same samples, read once, whatever the number of nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from nodes import Job, read_of_bound, reading_at_most

from nostall_bench.slowfs import SlowFS, missing


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """149 files of 1 to 40 KB; 149 is prime. The loader reads raw bytes, so any bytes do."""
    root = tmp_path_factory.mktemp("cluster")
    random = np.random.default_rng(5)
    for i in range(149):
        path = root / f"class{i % 3}" / f"{i:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(random.bytes(int(random.integers(1000, 40_000))))
    return root


def size_of(data: Path) -> int:
    return sum(p.stat().st_size for p in data.rglob("*.jpg"))


@pytest.fixture
def slow(data: Path, tmp_path: Path):
    """A shared file system with a mount for each of four nodes."""
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    with SlowFS(data, tmp_path / "mounts", 20e6, 40e6, 15e-3, clients=4) as storage:
        yield storage


@pytest.mark.alone
@pytest.mark.multi
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("share", [1.2, 0.6, 0.15], ids=["S<D", "D<S<ND", "S>ND"])
def test_the_source_is_read_once_and_every_sample_is_right(
    data: Path, slow: SlowFS, nodes: int, share: float
) -> None:
    job = Job(
        data,
        nodes,
        tiers=[f"ram:{int(share * size_of(data))}"],
        roots=slow.mounts,
        extra={"compute": 0.002},
        together=True,
    )
    # The bound may keep samples in part; of so few and so small tiers the last one counts.
    results = reading_at_most(1.02 if share > 0.5 else 1.05, job, slow)
    peers = [r["peers"] for r in results]
    fetched, served = (sum(p[what] for p in peers) for what in ("fetched", "served"))
    # But for what was on its way when a node closed.
    assert fetched > 0 and abs(fetched - served) <= 4
    assert sum(p["refused"] + p["dropped_ranks"] for p in peers) == 0
    asked = sum(p["fetched"] + p["asked_too_early"] for p in peers)
    assert sum(p["asked_too_early"] for p in peers) <= 0.001 * asked + 1


@pytest.mark.multi
def test_eight_ranks_on_four_nodes_with_file_tiers(data: Path, tmp_path: Path) -> None:
    tiers = [f"ram:{size_of(data) // 8}", f"{tmp_path / 'tier'}:{size_of(data) // 4}"]
    results = Job(data, 4, ranks=2, tiers=tiers, extra={"compute": 0.002}, together=True).run()
    assert {r["batches"] for r in results} == {3 * 19}
    assert sum(e["origins"]["file"]["samples"] for r in results for e in r["epochs"]) > 0
    assert sum(r["peers"]["fetched"] for r in results) > 0
    assert sum(r["peers"]["dropped_ranks"] for r in results) == 0


@pytest.mark.multi
def test_other_rules_read_more_than_once_but_give_the_same(
    data: Path, slow: SlowFS, tmp_path: Path
) -> None:
    size = size_of(data)
    tiers = [f"ram:{int(0.3 * size)}", f"{tmp_path / 'tier'}:{int(0.35 * size)}"]
    together = {"tiers": tiers, "roots": slow.mounts, "together": True}
    pushed = Job(data, 2, **together).run()
    for rule in ("owners-read", "hdmlp"):
        results = Job(data, 2, **together, extra={"sharing": rule}).run()
        assert read_of_bound(results) > 1.05
        assert sum(r["peers"]["pushed"] for r in results) == 0
        assert [r["stream"] for r in results] == [r["stream"] for r in pushed]


@pytest.mark.multi
def test_hdmlps_rule_has_no_owners_to_deal_samples_to(data: Path) -> None:
    job = Job(data, 2, epochs=1, extra={"sharing": "hdmlp", "assignment": "locality"})
    said = [process.communicate(timeout=800)[1] for process in job.start()]
    assert all("leave one of them out" in err for err in said)


@pytest.mark.alone
@pytest.mark.multi
def test_locality_keeps_the_bytes_and_spares_the_network(data: Path, slow: SlowFS) -> None:
    tiers = [f"ram:{int(0.6 * size_of(data))}"]
    plain, local = (
        Job(
            data,
            2,
            tiers=tiers,
            roots=slow.mounts,
            global_batch=32,
            extra={"assignment": how, "compute": 0.01},
            together=True,
        ).run()
        for how in ("plan", "locality")
    )
    for epoch in range(3):
        # 149 samples on two ranks: one is repeated, and may be another one's size.
        total = [sum(r["epochs"][epoch]["samples"] for r in job) for job in (plain, local)]
        assert total == [150, 150]
    assert sum(r["peers"]["fetched"] for r in local) < 0.6 * sum(
        r["peers"]["fetched"] for r in plain
    )


@pytest.mark.multi
def test_a_forked_child_may_let_go_of_the_loader(data: Path) -> None:
    results = Job(data, 2, extra={"fork_after": 1, "compute": 0.002}, together=True).run()
    assert {r["batches"] for r in results} == {3 * 19}
    assert sum(r["peers"]["dropped_ranks"] for r in results) == 0


@pytest.mark.multi
def test_nodes_alone_read_more(data: Path) -> None:
    tiers = [f"ram:{int(0.6 * size_of(data))}"]
    alone = Job(data, 2, tiers=tiers, extra={"peers": "off"}).run()
    assert sum(r["source_bytes"] for r in alone) > 1.5 * size_of(data)
    assert all(r["peers"] == {} and r["exchange"] is False for r in alone)


@pytest.mark.multi
def test_a_node_that_is_to_stay_alone_makes_no_other_wait(data: Path) -> None:
    job = Job(data, 2, epochs=1, extra={"peers": "auto"}, per_rank={1: {"peers": "off"}})
    said = [process.communicate(timeout=800) for process in job.start()]
    assert 'samples do not travel between nodes: rank 1: it has peers="off"' in said[0][1]
    for result in (json.loads(out.splitlines()[-1]) for out, _ in said):
        assert result["peers"] == {} and result["exchange"] is False


@pytest.mark.multi
def test_a_node_without_tiers_asks_those_that_have_some(data: Path) -> None:
    results = Job(data, 2, extra={"peers": "auto"}, per_rank={1: {"tiers": []}}).run()
    assert [r["peers"]["nodes"] for r in results] == [2, 2]
    assert all(r["exchange"] is True for r in results)
    assert {r["batches"] for r in results} == {3 * 19}


@pytest.mark.multi
def test_nodes_without_tiers_could_exchange(data: Path) -> None:
    for peers, could in (("auto", True), ("off", False)):
        results = Job(data, 2, tiers=[], epochs=1, extra={"peers": peers}).run()
        assert all(r["peers"] == {} and r["exchange"] is could for r in results)


@pytest.mark.multi
def test_a_killed_node_leaves_the_others_with_the_right_bytes(data: Path) -> None:
    """At 8 random points of the job; rank.py compares every sample with its file as well."""
    random = np.random.default_rng(8)
    undisturbed = [r["stream"] for r in Job(data, 3, global_batch=9).run()]
    for _ in range(8):
        victim, die_at = int(random.integers(3)), int(random.integers(1, 50))
        job = Job(
            data,
            3,
            global_batch=9,
            per_rank={victim: {"die_at": die_at}},
            extra={"compute": 0.002},
        )
        for rank, process in enumerate(job.start()):
            out, err = process.communicate(timeout=800)
            if rank == victim:
                assert process.returncode == -signal.SIGKILL
                continue
            assert process.returncode == 0, (victim, die_at, err)
            result = json.loads(out.splitlines()[-1])
            assert result["batches"] == 3 * 17
            assert result["stream"] == undisturbed[rank], (victim, die_at)


@pytest.mark.alone
@pytest.mark.multi
def test_a_node_that_hangs_is_left_and_comes_back(data: Path, tmp_path: Path) -> None:
    """Stopped for longer than the time limit, as by a migration, and continued."""
    job = Job(
        data,
        2,
        epochs=10_000,  # it ends when samples are fetched again
        tiers=[f"ram:{int(0.5 * size_of(data))}"],
        extra={
            "compute": 0.01,
            "staging": "400kB",
            "hangs": str(tmp_path / "hangs"),
            "until": str(tmp_path / "until"),
        },
        # The other node still needs its samples when it happens.
        per_rank={0: {"wait_at": 20}, 1: {"hang_at": 25}},
        environment={"NOSTALL_PEER_TIMEOUT_MS": "1000"},
    )
    first, second = job.start()
    try:
        # A busy machine may lose it earlier, and what is continued too early stops for good.
        deadline = time.monotonic() + 60
        while not Path(f"/proc/{second.pid}/stat").read_text().rpartition(") ")[2].startswith("T"):
            assert time.monotonic() < deadline, "rank 1 does not stop"
            time.sleep(0.01)
        assert first.stderr is not None
        said = next(line for line in first.stderr if "lost rank 1" in line)
        assert "comes from the source until it is reached again; no other node is reached" in said
        os.kill(second.pid, signal.SIGCONT)
        for process in (first, second):
            out, err = process.communicate(timeout=800)
            assert process.returncode == 0, err
            if process is first:
                peers = json.loads(out.splitlines()[-1])["peers"]
                assert peers["dropped_ranks"] >= 1 and peers["returned_ranks"] >= 1
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.multi
def test_ranks_that_disagree_are_told_on_what(data: Path) -> None:
    started = Job(data, 2, per_rank={1: {"epochs": 4}}).start()
    for process in started:
        _, err = process.communicate(timeout=800)
        assert process.returncode != 0
        assert "epochs is 3 on rank 0 and 4 on rank 1" in err


@pytest.mark.multi
def test_peers_on_fails_where_samples_cannot_travel(data: Path) -> None:
    job = Job(data, 2, environment={"NOSTALL_UCX_LIBRARY": "/nonexistent/nostall_ucx.so"})
    for process in job.start():
        _, err = process.communicate(timeout=800)
        assert process.returncode != 0
        why = "for NOSTALL_UCX_LIBRARY=/nonexistent/nostall_ucx.so is not there"
        assert f"samples cannot travel between nodes, {why}" in err


@pytest.mark.alone
@pytest.mark.multi
def test_tiers_that_were_kept_are_used_again_after_a_restart(
    data: Path, slow: SlowFS, tmp_path: Path
) -> None:
    per_rank = {
        r: {"tiers": [f"{tmp_path / str(r)}:{int(0.7 * size_of(data))}:keep"]} for r in range(2)
    }
    stop = {r: {**s, "stop_at": 25} for r, s in per_rank.items()}
    stopped = Job(data, 2, roots=slow.mounts, per_rank=stop, together=True).run()
    again = {"state": stopped[0]["state"]}
    resumed = Job(data, 2, roots=slow.mounts, per_rank=per_rank, extra=again, together=True).run()
    assert sum(r["source_bytes"] for r in stopped) > 0.8 * size_of(data)
    # Nothing but what the other node has, as long as it is not reached yet.
    own = sum(e["origins"]["file"]["bytes"] for r in resumed for e in r["epochs"])
    assert sum(r["source_bytes"] for r in resumed) < 0.3 * size_of(data) < own
    assert {r["batches"] for r in resumed} == {3 * 19 - 25}


@pytest.mark.multi
def test_another_number_of_nodes_continues_the_same_stream(data: Path) -> None:
    stopped = Job(data, 2, extra={"stop_at": 25}).run()
    state = stopped[0]["state"]
    assert (state["epoch"], state["batch"]) == (1, 6)
    on_four = Job(data, 4, extra={"state": state}).run()
    on_one = Job(data, 1, extra={"state": state, "peers": "off"}).run()
    assert {r["batches"] for r in on_four} == {on_one[0]["batches"]} == {3 * 19 - 25}
    total = {e["epoch"]: e["bytes"] for e in on_one[0]["epochs"]}
    assert total == {
        n: sum(e["bytes"] for r in on_four for e in r["epochs"] if e["epoch"] == n) for n in total
    }
