"""``nostall bench allreduce`` measures what it says, with real ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nostall.cli import main
from nostall.collective import Communicator
from nostall.errors import IoError, UsageError
from nostall_bench import allreduce, allreduce_rank, choose, harness

pytest_plugins = ["forked_children"]
pytestmark = pytest.mark.multi


@pytest.mark.usefixtures("forked")
def test_a_rank_that_has_ended_already_is_waited_for() -> None:
    environment = {**os.environ}
    commands = [[sys.executable, "-c", f"raise SystemExit({status})"] for status in (0, 3)]
    processes = [allreduce.subprocess.Popen(c, env=environment) for c in commands]
    for process in processes:
        select.select([process._status], [], [])
    assert not harness.all_end_well(processes)
    assert [process.wait() for process in processes] == [0, 3]


def test_launchers_are_asked_to_end_before_they_are_killed(tmp_path: Path) -> None:
    at_sigterm = tmp_path / "asked"
    asked = f"trap 'touch {at_sigterm}; exit 1' TERM; echo ready; while :; do sleep 0.01; done"
    launcher = subprocess.Popen(["sh", "-c", asked], stdout=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stdout.readline() == b"ready\n"
    allreduce._end([launcher])
    launcher.stdout.close()
    assert launcher.returncode == 1
    assert at_sigterm.exists()


@pytest.mark.parametrize("operation", ["allreduce", "reduce", "allgather", "reduce_scatter"])
def test_what_is_timed_is_the_public_method(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    whole = getattr(Communicator, operation)

    def public(self: Communicator, array: object, *more: object, **options: object) -> object:
        called.append(array)
        return whole(self, array, *more, **options)

    monkeypatch.setattr(Communicator, operation, public)
    settings = {"rank": 0, "ranks": 1, "job": f"timed {os.getpid()} {operation}"}
    engine = allreduce_rank.Nostall({**settings, "options": {}, "operation": operation})
    buffer = engine.buffer(8)
    buffer[:] = range(8)
    prepared = engine.prepare(buffer)
    assert not called
    engine.collective(prepared)
    engine.end()
    assert len(called) == 1
    assert np.array_equal(buffer, range(8))


@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("operation", ["allreduce", "reduce", "allgather", "reduce_scatter"])
def test_measures_all_engines_in_one_run(
    operation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    words = ["bench", "allreduce", "--operation", operation, "--ranks", "2", "--repeats", "1"]
    words += ["--sizes", "64", "64KiB", "--mif", "0", "5", "--seconds", "0.01", "--most", "20"]
    engines = ["nostall", "nostall shared", "arrival_leader", "arrival_chain", "openmpi sm"]
    if operation == "allreduce":
        engines.append("rsa")
    if operation == "allgather":
        engines = ["nostall", "gloo", "openmpi"]
    if operation == "reduce_scatter":
        engines = ["nostall", "nostall fixed", "gloo", "openmpi"]

    plot = tmp_path / "plot.png"
    words += ["--json", str(out), "--plot", str(plot)]
    assert main([*words, "--engines", *engines]) == 0
    measured = json.loads(out.read_text())
    passed, written = measured["least_s"]["65536"]
    assert passed >= written > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = measured["rows"]
    assert {(r["engine"], r["size"], r["mif"]) for r in rows} == {
        (e, size, mif) for e in engines for size in (64, 65536) for mif in (0.0, 5.0)
    }
    for row in rows:
        assert row["in_call"] > 0
        assert row["after_last"] > 0
        assert row["in_call_range"][0] <= row["in_call"] <= row["in_call_range"][1]
    said = capsys.readouterr().out
    assert "best peer / nostall" in said
    assert "share of it" in said
    if operation in ("allgather", "reduce_scatter"):
        assert main([*words, "--engines", "leader"]) == 2
        assert "one algorithm" in capsys.readouterr().err


def test_waiting_for_a_late_rank_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["bench", "allreduce", "--ranks", "3", "--repeats", "1", "--sizes", "64KiB"]
    words += ["--mif", "0", "--most", "6", "--late-ms", "100", "--busy", "1"]
    assert main([*words, "--engines", "nostall", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["in_call"] > 5000
    assert 0 < row["late_cpu_share"] < 0.5
    assert row["busy"] > 0


def test_an_engine_that_is_not_installed_is_named_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def without(*lacking: str) -> None:
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: None if name in lacking else found(name)
        )

    out = tmp_path / "rows.json"
    words = ["bench", "allreduce", "--ranks", "2", "--repeats", "1", "--sizes", "64", "--mif", "0"]
    words += ["--seconds", "0.01", "--most", "5", "--json", str(out)]
    without("deepspeed", "ninja")
    assert main([*words, "--engines", "nostall", "deepspeed"]) == 2
    assert "not installed: deepspeed (deepspeed, ninja)" in capsys.readouterr().err
    # Without --engines all others are measured.
    monkeypatch.delenv("NOSTALL_MPICH", raising=False)
    without("deepspeed", "mpi4py", "torch")
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "gloo (torch), openmpi (mpi4py), openmpi yield (mpi4py)" in said
    assert "mpich (--mpich, an environment with mpich, mpi4py and numpy)" in said
    assert "deepspeed (torch, deepspeed)" in said
    engines = {row["engine"] for row in json.loads(out.read_text())["rows"]}
    assert engines == {"nostall", "nostall shared"}


def test_deepspeed_needs_a_compiler_and_reduces_to_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # All packages seem to be there, as they are to an environment that DeepSpeed is installed in.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CXX", "/no/compiler")
    words = ["bench", "allreduce", "--engines", "deepspeed"]
    assert main(words) == 2
    assert "deepspeed (a C++ compiler)" in capsys.readouterr().err
    monkeypatch.setenv("CXX", "sh")
    assert main([*words, "--operation", "reduce"]) == 2
    assert "deepspeed has no reduce" in capsys.readouterr().err


def test_ranks_that_wait_for_one_that_failed_are_not_awaited() -> None:
    waits = subprocess.Popen(["sleep", "1000"])
    try:
        assert not harness.all_end_well([waits, subprocess.Popen(["false"])])
        assert waits.poll() is None
    finally:
        waits.kill()
        waits.wait()
    assert harness.all_end_well([subprocess.Popen(["true"]), subprocess.Popen(["true"])])


def test_the_bound_is_work_that_somebody_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    least = {1024: (3e-6, 1e-6)}  # to read and write, to write
    # In the call: a rank's own message and result. After the last arrival: one message, all results.
    assert allreduce.bounds(least, "allreduce", 4, 0) == {1024: pytest.approx(3)}
    assert allreduce.bounds(least, "allreduce", 4, 20) == {1024: pytest.approx((4 + 2) / 2)}
    assert allreduce.bounds(least, "allreduce", 1, 20) == {1024: pytest.approx(3)}
    assert allreduce.bounds(least, "reduce", 4, 0) == {}


def _row(engine: str, size: int, mif: float, time: float, most: float = 0) -> allreduce.Row:
    spread = (time, max(time, most))
    return allreduce.Row(engine, 4, size, mif, time, time, 0, 0, 0, 0, spread, spread)


def test_the_table_names_the_fastest_and_the_default_when_in_doubt() -> None:
    rows = [_row("nostall", size, 0, 10) for size in (8192, 65536, 1 << 20)]
    rows += [_row("rsa", size, 0, 5) for size in (8192, 65536)] + [_row("rsa", 1 << 20, 0, 9.5)]
    rows += [_row("nostall", 8192, 20, 10), _row("rsa", 8192, 20, 10)]
    rows += [_row("arrival_chain", 8192, 20, 8)]
    # Faster, but not every time.
    rows += [_row("leader", 8192, 20, 5, most=11), _row("leader", 8192, 0, 4, most=12)]
    assert [str(c) for c in choose.choose(rows)] == [
        "4 together 65536 rsa",
        "4 together 1048576 cooperative",
        "4 apart 8192 arrival_chain",
    ]


def test_calibrated_collectives_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "cache" / "nostall" / "collectives.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What is measured has its test above; 40 programs need their time to start.
    rows = [_row(engine, 8192, mif, 5) for engine in ("nostall", "rsa") for mif in (0, 20)]
    monkeypatch.setattr(allreduce, "measure", lambda *_: rows)
    assert main(["calibrate", "collectives", "--ranks", "4", "--sizes", "8KiB"]) == 0
    told = json.loads(table.read_text())
    assert told["version"] == 1
    assert [row.split()[:3] for row in told["table"]] == [
        ["4", "together", "8192"],
        ["4", "apart", "8192"],
    ]
    table.write_text('{"version": 1, "table": ["1 together 100 magic"]}')
    with pytest.raises(UsageError, match="1 together 100 magic"):
        Communicator("a table of magic", 0, 1)
    monkeypatch.setenv("NOSTALL_COLLECTIVES", str(tmp_path / "absent"))
    with pytest.raises(IoError, match="absent"):
        Communicator("no table", 0, 1)
    monkeypatch.setenv("NOSTALL_COLLECTIVES", "off")
    Communicator("off", 0, 1).close()
