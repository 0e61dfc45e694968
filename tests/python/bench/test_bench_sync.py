"""``nostall bench sync``: every way trains, and says what it cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from nostall.bench import sync


@pytest.mark.multi
@pytest.mark.timeout(400)
def test_ways_are_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    sync.add_arguments(parser)
    out = tmp_path / "runs.json"
    options = (
        "--networks", "mlp", "--ways", "planned", "negotiated NBCS", "--repeats", "1", "--steps", "4",
        "--warm", "2", "--delay-ms", "5", "--input", "loader", "--json", str(out),
        "--plot", str(tmp_path / "runs.svg"),
    )  # fmt: skip
    arguments = parser.parse_args(options)
    assert sync.run(arguments) == 0
    assert "graph:" in capsys.readouterr().out
    drawn = (tmp_path / "runs.svg").read_text()
    assert "<svg" in drawn
    assert "negotiated NBCS" in drawn  # matplotlib writes texts as comments beside their outlines
    planned, negotiated = json.loads(out.read_text())["runs"]
    for run in (planned, negotiated):
        assert len(run["ranks"]) == 2
        for rank in run["ranks"]:
            assert rank["seconds"] >= 4 * 0.005
            assert rank["engine_steps"] == 4
    assert planned["ranks"][0]["engine_cycles"] == 0
    assert negotiated["ranks"][0]["engine_cycles"] > 0
