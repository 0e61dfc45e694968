"""``nostall bench overlap`` on a tiny model: groups, their times alone and the ideal are measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from nostall_bench import overlap

pytest_plugins = ["forked_children"]


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15),
    reason="the simulated accelerator needs torch 2.15",
)
def test_steps_against_the_ideal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    overlap.add_arguments(parser)
    options = [
        *("--layers", "3", "--width", "32", "--threshold", "4096", "--steps", "7"),
        *("--operation-ms", "1", "--bandwidth", "1", "--repeats", "1", "--ways", "nostall"),
        *("--late-ms", "0", "20", "--json", str(tmp_path / "found.json")),
    ]
    assert overlap.run(parser.parse_args(options)) == 0
    assert capsys.readouterr().out.lower().count("reached: gradients of nostall within 2 %") == 2
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["late_ms"] for row in rows] == [0, 20]
    for row in rows:
        (found,) = row["runs"]
        # 12 kB at 1 MB/s cannot be hidden behind their own computing, and no delay is in a time.
        assert found["step"] > found["backward"] and found["in_turn"] - found["backward"] >= 12
