"""The analysis of MPI profiles: known arrivals give known factors; real ones are read whole."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from nostall.cli import main
from nostall.errors import CorruptionError, UsageError
from nostall.observe.report import _arrivals as arrivals
from nostall.observe.report import _mpi_trace as mpi_trace

ALPHA = arrivals.Alpha(latency=100.0, bandwidth=10.0)


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
            **{"nostall": "mpi profile", "version": 1, "rank": rank, "ranks": ranks},
            **{"node": nodes[rank], "records": len(arrived), "dropped": 0},
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
    row = arrivals.table(profile, ALPHA)[0]  # alpha: 100 + 1000 / 10 = 200 ns
    assert (row.operation, row.size, row.calls) == ("allreduce", "all", 2)
    assert row.worst_factor == pytest.approx((5 + 0.5) / 2, abs=0.02)
    assert row.average_factor == pytest.approx((1.5 + 0.25) / 2, abs=0.02)
    # Node a: 400 and 100 apart; node b: 800 and 100.
    assert row.node_worst_factor == pytest.approx(((400 + 800) / 2 + 100) / 2 / 200, abs=0.02)
    assert [share for _, share, _ in arrivals.late_ranks(profile)][2] == 0.5
    assert second.worst == pytest.approx(100, abs=2)


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
    assert "allreduce  0-1 KB     19" in shown
    assert "3         100.0 %" in shown
    for explained in ("time:", "worst:", "average:", "alpha =", "node:", "size:", "lateness:"):
        assert explained in shown
    assert "<svg" in Path(outputs[0]).read_text()
    assert len(Path(outputs[1]).read_text().splitlines()) == 20
    assert json.loads(Path(outputs[2]).read_text())["ranks"][3]["last"] == 1.0
    assert Path(outputs[3]).read_bytes().startswith(b"\x89PNG")


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[1, 2, 3, 4]])
    files = arrivals.find([str(tmp_path)])
    with pytest.raises(UsageError, match=r"ranks \[1\] are missing"):
        arrivals.read([files[0], *files[2:]])
    whole = files[1].read_bytes()
    for damaged in (whole[:-1], b"", b"{}\n", whole.replace(b'"version": 1', b'"version": 9')):
        files[1].write_bytes(damaged)
        with pytest.raises(CorruptionError, match="mpi-1"):
            arrivals.read(files)


@pytest.mark.parametrize(("field", "value"), [("call", 2), ("bytes", 2000)])
def test_calls_that_cannot_be_one_are_not_paired(field: str, value: int, tmp_path: Path) -> None:
    write_profiles(tmp_path, [[i, 2 * i, 3 * i, 4 * i] for i in range(1, 11)])
    file = tmp_path / "mpi-2.profile"
    head, _, data = file.read_bytes().partition(b"\n")
    records = np.frombuffer(data, arrivals._RECORD).copy()
    records[field][6] = value
    file.write_bytes(head + b"\n" + records.tobytes())
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    assert (len(profile.calls), profile.differing) == (6, 4)
    assert "4 calls are left out" in arrivals.text(profile, ALPHA)


def test_ranks_without_data_fit_any_size(tmp_path: Path) -> None:
    write_profiles(tmp_path, [[1, 2, 3, 4]])
    file = tmp_path / "mpi-2.profile"
    head, _, data = file.read_bytes().partition(b"\n")
    records = np.frombuffer(data, arrivals._RECORD).copy()
    records["bytes"] = 0
    file.write_bytes(head + b"\n" + records.tobytes())
    (call,) = arrivals.read(arrivals.find([str(tmp_path)])).calls
    assert call.bytes == 1000


def test_traces_have_the_calls_on_rank_0s_clock(tmp_path: Path) -> None:
    write_profiles(
        tmp_path, [[1000, 4000, 9000, 2000], [5_000_000, 5_000_100, 5_000_000, 5_000_100]]
    )
    written = mpi_trace.convert(arrivals.find([str(tmp_path)]), tmp_path)
    assert [p.name for p in written] == [f"rank{r}.mpi.trace.json.gz" for r in range(4)]
    for rank, path in enumerate(written):
        with gzip.open(path, "rt") as file:
            calls = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        assert calls[0]["ts"] == pytest.approx([1, 4, 9, 2][rank], abs=0.002)
        assert calls[0]["ts"] + calls[0]["dur"] == pytest.approx(9.05, abs=0.002)
        assert calls[1]["args"] == {
            "bytes": 1000, "elements": 250, "communicator": 3, "seq": 1, "by nostall": 1,
        }  # fmt: skip
