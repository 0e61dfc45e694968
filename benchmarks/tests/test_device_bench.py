"""``nostall bench device`` on one combination: parts alone, and steps of each way beside them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch

from nostall_bench import device, device_checkpoint

pytest_plugins = ["forked_children"]
pytestmark = [
    pytest.mark.multi,
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(
        tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15),
        reason="the simulated accelerator needs torch 2.15",
    ),
]


def test_steps_against_the_slowest_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    device.add_arguments(parser)
    options = ["--compute", "4", "--copy", "2", "--decode", "1", "--steps", "3", "--repeats", "1"]
    assert device.run(parser.parse_args([*options, "--json", str(tmp_path / "found.json")])) == 0
    out = capsys.readouterr().out
    assert "of the slowest part" in out
    assert re.search(r"(NOT )?reached: steps of nostall within 1 % .* in [01] of 1 ", out, re.I)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["way"] for row in rows] == list(device.WAYS)
    for row in rows:
        (found,) = row["runs"]
        # No part is done sooner than it was told; torch copies and computes on one stream.
        assert all(found["alone"][part] >= found["stated"][part] for part in found["stated"])
        assert found["step"] >= (6 if row["way"] == "torch" else 4)


def test_steps_with_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    device.add_arguments(parser)
    options = ["--modes", "checkpoint", "--state", "4", "--bus", "0.1", "--window", "10"]
    more = ["--every", "3", "--saves", "1", "--json", str(tmp_path / "found.json")]
    assert device.run(parser.parse_args([*options, *more])) == 0
    out = capsys.readouterr().out
    assert "steps with saves / without" in out
    assert re.search(r"reached: steps of nostall with saves .* cannot carry the state", out, re.I)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["way"] for row in rows] == list(device_checkpoint.WAYS)
    for row in rows:
        (run,) = row["runs"]
        # No copy and no step is done sooner than it was told; torch.save waits for all copies.
        assert row["alone"] >= 0.04 and min(run["without"], run["seconds"]) >= 0.03
        assert run["host"] >= (0.04 if row["way"] == "torch.save" else 0)


def test_what_a_ready_batch_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    device.add_arguments(parser)
    options = ["--modes", "cost", "--batches", "20", "--ways", "nostall"]
    assert device.run(parser.parse_args([*options, "--json", str(tmp_path / "found.json")])) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"reached: .* at most \d+ us without the device: median", out, re.I)) == 2
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    for cost in (row["next"], row["gil"]):
        assert 0 < cost["median"] <= cost["p95"]
        # What is inside the device is part of it, and not all.
        assert 0 < cost["device"] < cost["median"]
        assert 0 < cost["own"]["median"] <= cost["own"]["p95"] < cost["p95"]
