"""``nostall bench app``: AlexNet trains from every pipeline, and input costs time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from nostall.errors import UsageError
from nostall_bench import app, harness
from nostall_bench.demo.dataset import DatasetSpec, make_dataset

pytest_plugins = ["forked_children"]


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    app.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_the_cost_of_input_is_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "data", DatasetSpec(4, 2, 0, 0.3))
    options = (
        "--dir", str(tmp_path), "--data", str(data), "--threads", "1", "--prefetch", "1",
        "--batch-size", "2", "--dense", "16", "--repeats", "2", "--pipelines", "nostall",
    )  # fmt: skip
    assert app.run(parse(*options)) == 0
    memory, ours = json.loads((tmp_path / "app.json").read_text())["rows"]
    assert memory["steps"] == ours["steps"] == 2
    assert len(ours["seconds"]) == 2
    medians = [sum(row["seconds"]) / 2 for row in (ours, memory)]
    assert ours["cost"] == pytest.approx(medians[0] - medians[1])
    assert (tmp_path / "app.png").stat().st_size > 1000
    assert "cost of input" in capsys.readouterr().out
    with pytest.raises(UsageError, match="too few"):
        app.run(parse(*options, "--batch-size", "3"))


def test_ways_take_turns_and_ours_has_one_prefetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[tuple[str, int]] = []

    def child(module: str, settings: dict[str, Any], **_: str) -> dict[str, Any]:
        turns.append((settings["pipeline"], settings["prefetch"]))
        return {"seconds": 1.0, "steps": 2, "device": "none", "activity": []}

    monkeypatch.setattr(harness, "child", child)
    data = make_dataset(tmp_path / "data", DatasetSpec(4, 2, 0, 0.3), processes=1)
    options = ("--threads", "1", "--batch-size", "2", "--repeats", "2")
    pipelines = ("--pipelines", "nostall", "map")
    home = ("--dir", str(tmp_path), "--data", str(data))
    assert app.run(parse(*home, *options, *pipelines)) == 0
    ways = [(app.MEMORY, 0), ("nostall", 1), ("map", 0), ("map", 1)]
    assert turns == [*ways, *ways[1:], ways[0]]
    capsys.readouterr()
    assert app.run(parse(*home, *options, "--pipelines", "torch", "map", "--threads", "3")) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    ahead = {(row[1].strip(), row[4].strip()) for row in rows}
    # A worker of torch makes whole batches.
    assert {("torch", "0"), ("torch", "6"), ("map", "0"), ("map", "1")} <= ahead


def test_the_model_is_alexnet() -> None:
    layers = [type(layer).__name__ for layer in app.model(102)]
    assert layers.count("Conv2d") == 5
    assert layers.count("MaxPool2d") == 3
    assert layers.count("Linear") == 3
