"""``nostall bench scaling`` and ``nostall bench patterns``: trainings by ranks, their collectives."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nostall.errors import UsageError
from nostall.observe.report import _arrivals as arrivals
from nostall_bench import patterns, scaling

pytest_plugins = ["forked_children"]


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_epochs_and_metrics_by_ranks_threads_and_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    out, plot = tmp_path / "rows.json", tmp_path / "epochs.svg"
    words = ["--networks", "mlp", "--ranks", "1", "2", "--threads", "1", "2", "--batch", "4"]
    words += ["--samples", "48", "--repeats", "2", "--json", str(out), "--plot", str(plot)]
    assert scaling.run(parser.parse_args(words)) == 0
    assert "feed-forward" in capsys.readouterr().out
    assert "<svg" in plot.read_text()
    rows = json.loads(out.read_text())["rows"]
    # One thread cannot be shared by two ranks.
    assert [(r["ranks"], r["threads"]) for r in rows] == [(1, 1), (1, 2), (2, 2)]
    assert all(len(r["seconds"]) == 2 and min(r["seconds"]) > 0 for r in rows)
    assert [r["metrics"] is None for r in rows] == [True, True, False]
    found = rows[-1]["metrics"]
    assert 0 < found["feed_forward"] < max(rows[-1]["seconds"])
    assert 0 <= found["negotiation_average"] <= found["negotiation_max"]
    assert 0 <= found["window_average"] <= found["window_max"]


def test_epochs_of_whole_steps_are_scaled_to_the_same_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(runs: list[dict[str, Any]], ranks: int) -> list[list[dict[str, float]]]:
        # A second for 8 samples of all ranks.
        return [[{"seconds": run["steps"] * run["batch"] * ranks / 8}] * ranks for run in runs]

    monkeypatch.setattr(scaling.sync, "measure", train)
    settings = [scaling.Setting("mlp", 1, 1, batch) for batch in (4, 5, 32)]
    rows = scaling.measure(settings, 48, 2)
    assert [row["trained"] for row in rows] == [48, 45, 32]
    assert all(row["seconds"] == pytest.approx([6, 6]) for row in rows)


def test_settings_that_cannot_be_are_refused() -> None:
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    with pytest.raises(UsageError, match="multiple of its ranks"):
        scaling.run(parser.parse_args(["--ranks", "2", "--threads", "1"]))
    with pytest.raises(UsageError, match="at least 1"):
        scaling.run(parser.parse_args(["--batch", "0"]))
    parser = argparse.ArgumentParser()
    patterns.add_arguments(parser)
    with pytest.raises(UsageError, match="--ranks must be at least 2"):
        patterns.run(parser.parse_args(["--ranks", "1"]))


@pytest.mark.long
@pytest.mark.multi
def test_a_training_in_horovods_manner_is_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    patterns.add_arguments(parser)
    out, plot = tmp_path / "patterns.json", tmp_path / "patterns.svg"
    words = ["--networks", "mlp", "--ranks", "2", "--per-node", "1", "--steps", "6"]
    words += ["--cycle-ms", "1"]
    words += ["--profiles", str(tmp_path), "--json", str(out), "--plot", str(plot)]
    assert patterns.run(parser.parse_args(words)) == 0
    assert "published: vgg16 narrow" in capsys.readouterr().out
    assert "<svg" in plot.read_text()
    (told,) = json.loads(out.read_text())["networks"].values()
    profile = arrivals.read(arrivals.find([str(tmp_path / "mlp")]))
    calls = [call.operation for call in profile.calls]
    tensors = 4
    assert calls[:tensors] == ["bcast"] * tensors  # of the parameters, before anything else
    gradients = [c.bytes for c in profile.calls if c.operation == "allreduce" and c.bytes > 1024]
    assert sum(gradients) >= 6 * 4 * (3072 * 64 + 64 * 100)
    # Every cycle agrees once.
    small = [c for c in profile.calls if c.operation == "allreduce" and c.bytes <= 64]
    assert len(small) >= told["cycles"] >= 6
    assert {"allgather", "allgatherv"} <= set(calls)
    for values in told["shares"].values():
        assert sum(values) == pytest.approx(1)
    assert told["left_out"] == {}
    # The time of messages of the machine is measured, and no rank of a node is alone in being late.
    assert [size for size, ns in told["alpha"] if ns > 0] == [
        8 << s for s in (0, 7, 11, 14, 17, 19)
    ]
    assert all(row["worst_factor"] > 0 for row in told["rows"])
    assert all(row["node_worst_factor"] == 0 for row in told["rows"])


def test_shares_are_of_the_figures() -> None:
    def call(operation: str, size: int, begin: int, length: int) -> arrivals.Call:
        arrived = np.array([begin, begin], np.int64)
        return arrivals.Call(operation, size, arrived, arrived + length, ("a", "a"), (0, 1))

    calls = [call("allreduce", 8, 0, 30), call("allreduce", 2 << 20, 100, 50)]
    calls += [call("bcast", 8, 200, 10), call("gather", 8, 300, 10), call("barrier", 0, 400, 900)]
    kinds, time, sizes, size_time = patterns.shares(arrivals.Profile(2, calls, 0)).values()
    assert kinds == pytest.approx([0.5, 0.25, 0.25])
    assert time == pytest.approx([0.8, 0.1, 0.1])
    assert sizes == pytest.approx([0.5, 0, 0.5])
    assert size_time == pytest.approx([30 / 80, 0, 50 / 80])
