"""``nostall bench allreduce`` measures what it says, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.cli import main

pytestmark = pytest.mark.multi


@pytest.mark.parametrize("operation", ["allreduce", "reduce"])
def test_measures_all_engines_in_one_run(
    operation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    words = ["bench", "allreduce", "--operation", operation, "--ranks", "2", "--repeats", "1"]
    words += ["--sizes", "64", "64KiB", "--mif", "0", "5", "--seconds", "0.01", "--most", "20"]
    engines = ["nostall", "nostall shared", "arrival_leader", "arrival_chain", "openmpi"]
    if operation == "allreduce":
        engines.append("rsa")

    assert main([*words, "--engines", *engines, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert {(r["engine"], r["size"], r["mif"]) for r in rows} == {
        (e, size, mif) for e in engines for size in (64, 65536) for mif in (0.0, 5.0)
    }
    for row in rows:
        assert row["in_call"] > 0
        assert row["after_last"] > 0
    assert "best peer / nostall" in capsys.readouterr().out


def test_waiting_for_a_late_rank_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["bench", "allreduce", "--ranks", "3", "--repeats", "1", "--sizes", "64KiB"]
    words += ["--mif", "0", "--most", "6", "--late-ms", "20", "--busy", "1"]
    assert main([*words, "--engines", "nostall", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["in_call"] > 5000
    assert 0 < row["late_cpu_share"] < 0.5
    assert row["busy"] > 0
