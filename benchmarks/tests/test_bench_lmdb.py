"""nostall bench lmdb: every strategy delivers the right records, and counts what it did."""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nostall.cli import main
from nostall.errors import UsageError
from nostall_bench import lmdb, slowfs
from nostall_bench.lmdb import data, fio
from nostall_bench.lmdb.places import _Group, _groups
from nostall_bench.lmdb.pool import PARTS, Pool, Rank, Task
from nostall_bench.lmdb.storage import Storage


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "KINDS", {"3 KB": (3_073, 3_073), "110-190 KB": (9_000, 20_000)})
    monkeypatch.setattr(lmdb, "KINDS", data.KINDS)
    monkeypatch.setattr(
        lmdb, "_COUNTS", {"3 KB": (900, 512, 512, 32), "110-190 KB": (300, 128, 128, 16)}
    )


def rows_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    out = tmp_path / "rows.json"
    words = ["bench", "lmdb", "--dir", str(tmp_path), "--repeats", "1", "--json", str(out)]
    assert main([*words, "--window", "200KB", *options]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_more_ranks_than_a_batch_has_records_are_refused(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    lmdb.add_arguments(parser)
    arguments = parser.parse_args(["--ranks", "1", "128"])
    work = lmdb._Work(tmp_path, "110-190 KB", "disk", "strided", "weak")
    with pytest.raises(UsageError, match="--ranks 128: a batch has 64 records"):
        work.task(arguments, Storage([str(tmp_path)], None), 1)


@pytest.mark.multi
def test_all_strategies_read_what_they_should(small: None, tmp_path: Path) -> None:
    # A wrong record makes the run fail: every strategy checks what it delivered.
    rows = rows_of(
        tmp_path, "--storage", "disk", "--ranks", "2", "--sizes", "110-190 KB",
        "--plot", str(tmp_path / "a.png"), "--stagger", "1", "8", "2", "--roots", "2",
    )  # fmt: skip
    limit = "fio" if fio.installed() else "raw"
    for order in ("strided", "shuffled"):
        found = [r["strategy"] for r in rows if r["order"] == order]
        skipped = () if order == "strided" else lmdb.WALKING
        expected = [s for s in lmdb.ALL if s not in skipped]
        where = expected.index("stag")
        expected[where : where + 1] = ["stag-1", "stag-2"]
        assert found == [limit, *expected]
    for row in rows:
        if row["strategy"] == limit:
            continue
        (one,) = row["runs"]
        assert one["read"] > 0
        assert one["seek"] + one["read"] + one["skew"] <= one["seconds"] * 1.2
        # Of clocks that are read one after the other.
        assert -1e-3 <= one["asleep"] + one["queued"] <= one["seek"] + one["read"] + 1e-3
        # Past the page cache nothing is read that was not asked for.
        if row["strategy"] == "prov":
            assert 1 <= one["read_bytes"] / row["needed"] < 1.7
    walked = next(r for r in rows if r["strategy"] == "lmm-dm")
    # The first guess of rank 1 is wrong, for records differ in size.
    assert walked["runs"][0]["missed"] + walked["runs"][0]["redundant"] > 0
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.multi
@pytest.mark.parametrize("roots", [1, 2])
def test_roots_alone_read_for_their_node(small: None, tmp_path: Path, roots: int) -> None:
    rows = rows_of(
        tmp_path, "--storage", "disk", "--ranks", "4", "--sizes", "110-190 KB", "--orders", "strided",
        "--strategies", "dio", "prov", "coal", "stag", "--stagger", "1", "--roots", str(roots),
    )  # fmt: skip
    assert {row["roots"] for row in rows} == {roots}
    for row in rows[1:]:
        # What one rank alone reads more is what it walks through (dio).
        read = [rank["read_bytes"] for rank in row["runs"][0]["ranks"]]
        # A rank that does not read for its node may still have to load pages of its program.
        few = row["needed"] / 4
        assert max(read[1], read[3]) < few and (read[2] > few) == (roots == 2), row["strategy"]
        assert sum(read) >= row["needed"]
        for rank in row["runs"][0]["ranks"]:
            assert ("reads" in rank["extra"]) == (row["strategy"] in ("coal", "stag-1"))
            assert (rank["extra"].get("reads", 0) > 0) <= (rank["read_bytes"] > 0)


def test_nodes_without_a_reader_or_with_unequal_parts_are_refused(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "lmdb", "--dir", str(tmp_path), "--storage", "disk", "--repeats", "1"]
    assert main([*words, "--roots", "0"]) == 2
    assert "--roots must be at least 1" in capsys.readouterr().err
    words += ["--ranks", "4", "--sizes", "110-190 KB", "--orders", "strided"]
    assert main([*words, "--strategies", "prov", "--roots", "3"]) == 2
    assert "4 ranks of a node have no 3 roots alike" in capsys.readouterr().err


@pytest.mark.multi
def test_on_slow_storage_the_storage_counts(small: None, tmp_path: Path) -> None:
    reason = slowfs.missing()
    if reason:
        pytest.skip(reason)
    rows = rows_of(
        tmp_path, "--storage", "slow", "--ranks", "2", "--nodes", "2", "--sizes", "3 KB",
        "--strategies", "lmm", "coal", "stag", "nostall", "--bandwidth", "0", "--aggregate", "0",
    )  # fmt: skip
    assert {r["nodes"] for r in rows} == {2}
    assert all(r["runs"][0]["operations"] > 0 for r in rows)


@pytest.mark.multi
def test_trainings_of_all_strategies_make_the_same_steps(small: None, tmp_path: Path) -> None:
    # Losses that differ make the run fail.
    rows = rows_of(
        tmp_path, "--train", "strong", "--ranks", "2", "--sizes", "3 KB", "--records", "128",
        "--orders", "strided", "--storage", "disk", "--stagger", "1", "--workers", "1",
        "--plot", str(tmp_path / "a.png"),
    )  # fmt: skip
    ways = [name if name != "stag" else "stag-1" for name in lmdb.TRAINED]
    assert [r["strategy"] for r in rows] == ways
    assert {(r["batch"], r["records"], r["order"]) for r in rows} == {
        (32, 128, "strided, strong scaling")
    }
    for one in (r["runs"][0] for r in rows):
        assert one["compute"] > 0 and one["sync"] > 0
        assert sum(one[k] for k in PARTS) <= one["seconds"] * 1.2


def test_the_batch_grows_with_the_ranks_in_weak_scaling(small: None, tmp_path: Path) -> None:
    folder = data.make_database(tmp_path, data.Records(900, 3_073, 3_073))
    parser = argparse.ArgumentParser()
    lmdb.add_arguments(parser)
    arguments = parser.parse_args(["--ranks", "1", "2", "4", "--records", "128"])
    storage = Storage([str(folder)], None)
    for scaling, batches in (("strong", [32, 32, 32]), ("weak", [8, 16, 32])):
        work = lmdb._Work(folder, "3 KB", "disk", "strided", scaling)
        tasks = [work.task(arguments, storage, ranks) for ranks in (1, 2, 4)]
        assert [t.order.shape for t in tasks] == [(128 // b, b) for b in batches]
        assert all(t.train for t in tasks)


def test_losses_that_differ_are_no_measurement() -> None:
    lmdb._agree({"a": [{"loss": 2.0}], "b": [{"loss": 2.0001}]})
    for others in ([2.1], [2.1, 2.0], [math.nan]):
        with pytest.raises(UsageError, match="did not train on the same batches"):
            lmdb._agree({"a": [{"loss": 2.0}], "b": [{"loss": loss} for loss in others]})


def test_the_index_reads_branch_and_leaf_pages_alone(small: None, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--index", "--storage", "disk", "--sizes", "110-190 KB")
    scan = next(r for r in rows if r["strategy"] == "index")
    assert scan["runs"][0]["records"] == 300
    assert scan["runs"][0]["pages"] <= 1.1 * scan["tree_pages"]


def test_blocks_are_read_in_every_way_and_size(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb.blocks, "SIZES", (4096, 65536))
    rows = rows_of(tmp_path, "--blocks", "--storage", "disk", "--sizes", "3 KB")
    assert [(r["way"], r["read"]) for r in rows] == [
        (way, size) for way in lmdb.blocks.WAYS for size in (4096, 65536)
    ]
    assert all(rate > 0 for r in rows for rate in r["rates"])


@pytest.mark.multi
def test_the_orders_of_a_database_give_the_same_batches_and_that_of_the_plan_without_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = slowfs.missing()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(lmdb.layout, "_BYTES", (8_000,))
    rows = rows_of(
        tmp_path, "--layout", "--records", "320", "--bandwidth", "0", "--latency-ms", "0"
    )  # fmt: skip
    assert [(r["tier"], r["layout"]) for r in rows] == [
        (tier, order) for tier in ("none", "memory") for order in lmdb.layout.ORDERS
    ]
    runs = {(r["tier"], r["layout"]): r["runs"][0] for r in rows}
    assert all(run["read_bytes"] >= 320 * 8_000 and run["operations"] > 0 for run in runs.values())
    # How many reads there are depends on what reads and bytes are found to cost, in either order.
    # In the order of the plan no byte lies between samples that are wanted together, so whatever
    # is merged, their pages are read and those of the tree.
    assert runs["none", "plan"]["read_bytes"] <= 320 * 8_192 + 64 * 4_096


def test_sleep_is_time_in_which_a_rank_reads_and_does_not_run() -> None:
    shared = {"tokens": [], "pipes": [(None, None)], "barrier": threading.Barrier(1)}
    me = Rank(0, 1, shared, "")
    me.begin()
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    me.lap("read")
    ran = me.counters
    assert ran.asleep + ran.queued <= ran.read - 0.0199
    time.sleep(0.05)
    me.lap("skew")
    assert ran.asleep + ran.queued <= ran.read - 0.0199  # waiting for other ranks is not reading
    before = ran.asleep
    time.sleep(0.05)
    me.lap("seek")
    assert ran.asleep - before >= 0.045


def test_a_wrong_record_is_no_measurement() -> None:
    buffer = np.zeros(64, np.uint8)
    buffer[0] = buffer[24] = 7
    at, size, record = np.array([0]), np.array([32]), np.array([7])
    data.check(buffer, at, size, record)
    buffer[24] = 8
    with pytest.raises(UsageError, match="record 7 was not delivered: 8"):
        data.check(buffer, at, size, record)


def test_coalesced_ranges_cover_every_record_once() -> None:
    random = np.random.default_rng(1)
    offset = (np.cumsum(random.integers(1, 90, 400)) * 4096 + 16).astype(np.uint64)
    length = random.integers(1, 4096 * 2, 400).astype(np.uint64)
    records = random.permutation(400)[:96].reshape(4, 24)
    group = _Group(records, Task("", [], records, offset, length, "", 1, 0, 1, 1))
    for i, record in np.ndenumerate(records):
        at = int(group.where[i])
        k = int(np.searchsorted(group.place, at, side="right")) - 1
        assert int(group.begin[k]) + at - int(group.place[k]) == int(offset[record])
        assert at + int(length[record]) <= int(group.place[k]) + int(group.length[k])
    for n in (1, 3, 8):
        parts = [group.part(k, n) for k in range(n)]
        assert [i for p in parts for i in range(len(group.begin))[p]] == list(
            range(len(group.begin))
        )


def test_nodes_whose_records_differ_in_size_make_as_many_groups() -> None:
    order = np.arange(24).reshape(6, 4)  # two nodes: the second one's records are twice as long
    length = np.where(np.arange(24) % 4 < 2, 4096, 8192).astype(np.uint64)
    task = Task("", [], order, np.cumsum(length) * 2, length, "", 2, 6 * 4 * 4096, 1, 1)

    class Half:
        def __init__(self, node: int) -> None:
            self.part = slice(2 * node, 2 * node + 2)

        def of_node(self, task: Task) -> Any:
            return task.order[:, self.part]

    groups: Any = _groups
    begins = [[begin for begin, _ in groups(Half(node), task)] for node in range(2)]
    assert begins == [[0, 4], [0, 4]]


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    nothing = np.zeros((1, 2), np.int64)
    ones = np.ones(1, np.uint64)
    with Pool(2) as pool, pytest.raises(UsageError, match=r"prov failed[\s\S]*cannot open"):
        pool.run(Task("prov", [str(tmp_path)], nothing, ones, ones, "", 1, 0, 1, 1))
