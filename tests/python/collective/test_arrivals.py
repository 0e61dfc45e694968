"""The analysis of MPI profiles: known arrivals give known factors; real ones are read whole."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nostall import trace
from nostall.cli import main
from nostall.errors import CorruptionError, UsageError
from nostall.observe.report import _arrivals as arrivals
from nostall.observe.report import _mpi_trace as mpi_trace
from nostall.observe.report import _run as runs


def write_profiles(
    directory: Path, arrived: list[list[int]], size: int = 1000, nodes: str = "aabb"
) -> None:
    """A file per rank; arrived[call][rank] on rank 0's clock, node b's clock being 5 s ahead and
    one in a thousand too fast."""
    ranks = len(arrived[0])
    for rank in range(ranks):
        ahead = 5_000_000_000 if nodes[rank] == "b" else 0
        rate = 1001 if ahead else 1000

        def shown(time: int, ahead: int = ahead, rate: int = rate) -> int:
            return time * rate // 1000 + ahead

        records = np.zeros(len(arrived), arrivals._RECORD)
        for i, times in enumerate(arrived):
            records[i] = (shown(times[rank]), shown(max(times) + 50), size, size // 4, 3, 0, 1, 0)
        span = (0, 10_000_000_000)
        header = {
            **{"nostall": "mpi profile", "version": 2, "rank": rank, "ranks": ranks},
            **{"node": nodes[rank], "records": len(arrived), "dropped": 0},
            **{"unrecorded": {"early": 2, "persistent": 1}},
            "alpha": [[0, 100], [100_000, 10_100]] if rank == 0 else [],
            "clock": [[shown(t), t - shown(t)] for t in span],
            "communicators": {"3": [77, ranks, 2]},
        }
        data = json.dumps(header).encode() + b"\n" + records.tobytes()
        (directory / f"mpi-{rank}.profile").write_bytes(data)


def test_factors_are_those_of_the_equations(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[0, 400, 1000, 200], [5_000_000, 5_000_100, 5_000_000, 5_000_100]])
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    first, second = profile.calls
    assert first.arrived.tolist() == pytest.approx([0, 400, 1000, 200], abs=2)
    assert first.worst == pytest.approx(1000, abs=2)
    assert first.average == pytest.approx((400 + 0 + 600 + 200) / 4, abs=2)
    row = arrivals.table(profile)[0]  # alpha: 100 + 1000 / 10 = 200 ns
    assert (row.operation, row.size, row.calls) == ("allreduce", "all", 2)
    assert row.worst_factor == pytest.approx((5 + 0.5) / 2, abs=0.02)
    assert row.average_factor == pytest.approx((1.5 + 0.25) / 2, abs=0.02)
    # Node a: 400 and 100 apart; node b: 800 and 100.
    assert row.node_worst_factor == pytest.approx(((400 + 800) / 2 + 100) / 2 / 200, abs=0.02)
    assert [share for _, share, _ in arrivals.late_ranks(profile)][2] == 0.5
    assert second.worst == pytest.approx(100, abs=2)


def test_the_last_rank_of_a_call_is_one_of_the_job(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[0, 400, 0, 1000]])
    for rank in range(4):  # two communicators of two ranks
        file = tmp_path / f"mpi-{rank}.profile"
        line, _, records = file.read_bytes().partition(b"\n")
        header = json.loads(line)
        header["communicators"]["3"] = [77 + rank // 2, 2, 2]
        file.write_bytes(json.dumps(header).encode() + b"\n" + records)
    arrivals.save(arrivals.read(arrivals.find([str(tmp_path)])), str(tmp_path / "calls.csv"))
    rows = list(csv.DictReader((tmp_path / "calls.csv").read_text().splitlines()))
    assert [row["last_rank"] for row in rows[:2]] == ["1", "3"]


def test_classes_are_those_of_the_figures() -> None:
    sizes = {
        4: "0-1 KB",
        1024: "0-1 KB",
        1025: "1 KB-1 MB",
        1 << 20: "1 KB-1 MB",
        1 << 26: "1-64 MB",
    }
    assert {size: arrivals.size_class(size) for size in sizes} == sizes
    assert arrivals.size_class((1 << 26) + 1) == "more"


def test_the_command_writes_tables_and_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profiles(tmp_path, [[i, 2 * i, 3 * i, 4 * i] for i in range(1, 20)])
    outputs = [str(tmp_path / f"out.{suffix}") for suffix in ("html", "csv", "json", "png")]
    words = [word for output in outputs for word in ("-o", output)]
    assert main(["report", str(tmp_path), *words]) == 0
    shown = capsys.readouterr().out
    assert "allreduce  0-1 KB     19  100.0%" in shown
    assert "3         100.0 %" in shown
    for explained in ("time:", "worst:", "average:", "alpha =", "node:", "size:", "lateness:"):
        assert explained in shown
    assert "<svg" in Path(outputs[0]).read_text()
    lines = list(csv.DictReader(Path(outputs[1]).read_text().splitlines()))
    assert [line["calls"] for line in lines] == ["1"] * 19 + ["2", "1"]
    assert "persistent" in lines[-1]["operation"]
    told = json.loads(Path(outputs[2]).read_text())
    assert told["ranks"][3]["last"] == 1.0
    assert sorted(told["left_out"].values()) == [1, 2]
    assert told["rows"][0]["bytes"] == 19 * 1000
    assert Path(outputs[3]).read_bytes().startswith(b"\x89PNG")


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[1, 2, 3, 4]])
    files = arrivals.find([str(tmp_path)])
    with pytest.raises(UsageError, match=r"ranks \[1\] are missing"):
        arrivals.read([files[0], *files[2:]])
    whole = files[1].read_bytes()
    for damaged in (whole[:-1], b"", b"{}\n", whole.replace(b'"version": 2', b'"version": 9')):
        files[1].write_bytes(damaged)
        with pytest.raises(CorruptionError, match="mpi-1"):
            arrivals.read(files)


def test_profiles_of_two_jobs_in_one_directory_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profiles(tmp_path, [[1, 2, 3, 4]])
    write_profiles(tmp_path, [[1, 2]])
    with pytest.raises(UsageError, match=r"mpi-2\.profile is of a job of 4 ranks, and .* of 2: "):
        arrivals.read(arrivals.find([str(tmp_path)]))
    library = tmp_path / "library.so"
    library.touch()
    words = ["run", "--library", str(library), "--profile", str(tmp_path), "--", "true"]
    assert main(words) == UsageError.exit_code
    said = capsys.readouterr().err
    assert f"{tmp_path} holds a profile already (mpi-0.profile): give another directory" in said
    words[words.index(str(tmp_path))] = str(tmp_path / "none-yet.profile")
    assert subprocess.run([sys.executable, "-m", "nostall", *words]).returncode == 0
    (tmp_path / "run" / "mpi").mkdir(parents=True)
    write_profiles(tmp_path / "run" / "mpi", [[1, 2]])
    assert main(["profile", "-o", str(tmp_path / "run"), "--", "true"]) == UsageError.exit_code
    assert "holds a run already (mpi-0.profile)" in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("call", 2), ("bytes", 2000)])
def test_calls_that_cannot_be_one_are_not_paired(field: str, value: int, tmp_path: Path) -> None:
    write_profiles(tmp_path, [[i, 2 * i, 3 * i, 4 * i] for i in range(1, 11)])
    edit(tmp_path / "mpi-2.profile", 6, **{field: value})
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    assert (len(profile.calls), profile.differing) == (6, 4)
    assert "left out: 4 calls from where" in arrivals.text(profile)


def edit(file: Path, at: int, **values: int) -> None:
    """Changes the record at a place."""
    head, _, data = file.read_bytes().partition(b"\n")
    records = np.frombuffer(data, arrivals._RECORD).copy()
    for field, value in values.items():
        records[field][at] = value
    file.write_bytes(head + b"\n" + records.tobytes())


def test_shares_are_of_all_operations_and_of_an_operations_sizes(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[i * 10_000] * 4 for i in range(1, 9)])  # 50 ns each
    numbers = {name: i for i, name in enumerate(arrivals.CALLS)}
    for rank in range(4):
        file = tmp_path / f"mpi-{rank}.profile"
        edit(file, 0, call=numbers["gatherv"], bytes=rank)  # ranks may give different amounts
        edit(file, 1, call=numbers["alltoall"], bytes=5 << 20)
        edit(file, 2, bytes=2 << 20)
        edit(file, 3, flags=arrivals.NONBLOCKING)
    rows = arrivals.table(arrivals.read(arrivals.find([str(tmp_path)])))
    found = {(row.operation, row.size): row for row in rows}
    assert {name for name, size in found if size == "all"} == {
        "allreduce", "iallreduce", "gatherv", "alltoall",
    }  # fmt: skip
    assert [row.operation for row in rows if row.size == "all"][:2] == ["allreduce", "iallreduce"]
    assert found["allreduce", "all"].call_share == 5 / 8
    assert found["allreduce", "1-64 MB"].call_share == 1 / 5
    assert found["allreduce", "0-1 KB"].bytes == 4000
    assert found["gatherv", "all"].bytes == 3
    sums = [
        sum(getattr(r, f) for r in rows if r.size == "all") for f in ("call_share", "time_share")
    ]
    assert sums == pytest.approx([1, 1])
    inside = [r.time_share for r in rows if r.operation == "allreduce" and r.size != "all"]
    assert sum(inside) == pytest.approx(1)


def test_alpha_lies_between_what_was_measured() -> None:
    alpha = arrivals.Alpha(((8, 300), (1024, 500), (2048, 400)))
    assert alpha(0) == alpha(8) == 300
    assert alpha(516) == 400
    assert alpha(1024) == 500
    assert alpha(1 << 20) == 500  # times that fall with size are the machine's noise
    assert arrivals.Alpha()(10_000) == 2000


def test_ranks_without_data_fit_any_size(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[1, 2, 3, 4]])
    edit(tmp_path / "mpi-2.profile", 0, bytes=0)
    (call,) = arrivals.read(arrivals.find([str(tmp_path)])).calls
    assert call.bytes == 1000


def test_traces_have_the_calls_on_rank_0s_clock(tmp_path: Path) -> None:
    write_profiles(
        tmp_path, [[1000, 4000, 9000, 2000], [5_000_000, 5_000_100, 5_000_000, 5_000_100]]
    )
    assert mpi_trace.convert(arrivals.find([str(tmp_path)]), tmp_path) == []
    for rank in range(4):
        with gzip.open(tmp_path / f"rank{rank}.mpi.trace.json.gz", "rt") as file:
            calls = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        assert calls[0]["ts"] == pytest.approx([1, 4, 9, 2][rank], abs=0.002)
        assert calls[0]["ts"] + calls[0]["dur"] == pytest.approx(9.05, abs=0.002)
        assert calls[1]["args"] == {
            "bytes": 1000, "elements": 250, "communicator": 3, "seq": 1, "by nostall": 1,
        }  # fmt: skip


def test_a_rank_that_was_killed_while_it_wrote_costs_no_other_its_trace(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[1000, 4000, 9000, 2000]])
    torn = tmp_path / "mpi-1.profile"
    torn.write_bytes(torn.read_bytes()[:-1])
    (said,) = mpi_trace.convert(arrivals.find([str(tmp_path)]), tmp_path)
    assert said.startswith(f"{torn} is not a whole profile")
    written = sorted(path.name for path in tmp_path.glob("*.trace.json.gz"))
    assert written == [f"rank{r}.mpi.trace.json.gz" for r in (0, 2, 3)]


def test_a_rank_has_the_trace_of_its_loader_and_that_of_mpi(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[1000, 4000, 9000, 2000], [5_000_000] * 4])
    edit(tmp_path / "mpi-0.profile", 1, flags=arrivals.NONBLOCKING)
    trace.start(tmp_path, rank=0)
    with trace.span("forward", "compute"):
        pass
    trace.stop()
    mpi_trace.convert(arrivals.find([str(tmp_path)]), tmp_path)
    run = runs.read(tmp_path)
    found = run.ranks[0].digest
    assert found is not None and len(found.of("compute", "forward").begin) == 1
    # A program may compute while a nonblocking call lasts.
    assert [*found.category("peers")] == ["MPI_Allreduce"]
    assert [*found.category("background")] == ["MPI_Iallreduce"]
    assert run.ranks[1].digest is not None and run.ranks[1].phase("peers") is not None


def test_calls_have_their_place_in_a_loader_s_trace_of_a_host_with_another_clock(
    tmp_path: Path,
) -> None:
    second = 1_000_000_000
    # Rank 2, on node b, whose monotonic clock is 5 s ahead and whose time of day is one hour early.
    write_profiles(tmp_path, [[1 * second] * 4, [2 * second] * 4])
    base = time.time_ns() - 3600 * second - 5 * second
    head = {
        "distributedInfo": {"backend": "nostall", "rank": 2, "world_size": 4},
        "baseTimeNanoseconds": base,
    }
    event = {"ph": "X", "cat": "compute", "name": "forward", "ts": 5e6, "dur": 10e6}
    text = json.dumps(head)[:-1] + ', "traceEvents": [\n' + json.dumps(event) + "\n]}\n"
    (tmp_path / "rank2.trace.json.gz").write_bytes(gzip.compress(text.encode()))
    mpi_trace.convert(arrivals.find([str(tmp_path)]), tmp_path)
    found = runs.read(tmp_path).ranks[2].digest
    assert found is not None
    assert found.seconds == pytest.approx(10)
    assert found.of("peers", "MPI_Allreduce").begin.tolist() == pytest.approx([1, 2], abs=0.02)
