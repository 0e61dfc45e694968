"""``nostall bench stall --networks``: every iteration of every rank is measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.cli import main
from nostall.errors import UsageError
from nostall_bench import harness, nodes, slowfs, stall, training_stall
from nostall_bench.demo.dataset import DatasetSpec, make_dataset


def test_stalls_are_summed_over_ranks_and_iterations() -> None:
    found = training_stall.summary([[1.0, 0.0, 0.0], [3.0, 2.0, 0.0], [0.0, 0.0, 9.0]])
    assert found["median"] == 0
    assert found["late"] == pytest.approx(6.6)  # at 0.95 of the way from 0 to 8 in nine values
    assert found["sum"] == 5
    assert found["worst"] == [3, 2, 9]


def _parsed(benchmark: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return parser.parse_args(words)


def test_one_epoch_has_no_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = {
        "seconds": 2.0, "stall_seconds": 1.0, "batches": 4, "samples": 8,
        "origins": {"source": {"bytes": 100}},
    }  # fmt: skip
    rank = {"epochs": [epoch], "peers": {}, "lower_bound_bytes": 100, "stream": ""}
    monkeypatch.setattr(nodes, "launch", lambda *_, **__: [rank])
    monkeypatch.setattr(harness, "children", lambda *_, **__: [rank])
    storage: Any = SimpleNamespace(
        served_bytes=0, drop_caches=lambda: None, backing=tmp_path, mounts=[tmp_path]
    )
    (tmp_path / "one.jpg").touch()
    run = nodes.job(_parsed(nodes, "--epochs", "1"), storage, 100, 1, 1.1, "alone", 1e6)
    row = {"nodes": 1, "bandwidth": 1e6, "regime": "S < D", "way": "alone", "runs": [run]}
    assert nodes._cells(row)[4:7] == ["2.00", "", ""]
    found = stall._job(_parsed(stall, "--epochs", "1"), storage, tmp_path, 100, 1, 1.1)
    assert found["first_seconds"] == 2 and found["later_stall"] is None
    with pytest.raises(UsageError, match="--epochs must be at least 1, not 0"):
        _parsed(stall, "--epochs", "0")


@pytest.mark.parametrize("networks", [[], ["--networks", "resnet50"]])
def test_the_page_cache_is_kept_where_that_is_asked_for(
    networks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bool] = []

    def mounted(*_: object, keep_cache: bool, **__: object) -> None:
        kept.append(keep_cache)
        raise UsageError("seen")

    make_dataset(tmp_path / "data-4", DatasetSpec(4), processes=1)
    words = ["--dir", str(tmp_path), "--files", "4", *networks]
    for module in (stall, training_stall):
        monkeypatch.setattr(module, "SlowFS", mounted)
    for more in ([], ["--keep-cache"]):
        with pytest.raises(UsageError, match="seen"):
            stall.run(_parsed(stall, *words, *more))
    assert kept == [False, True]


@pytest.mark.skipif(slowfs.missing() is not None, reason=str(slowfs.missing()))
def test_later_epochs_are_said_with_tiers_for_all_and_for_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(*words: Any) -> dict[str, float]:
        share = words[-1]
        later = 0.25 if share > 1 else 0.5
        return {
            **{"first_seconds": 1.0, "first_of_physics": 1.0},
            **{"later_stall": later, "bytes_of_bound": 1.0},
        }

    make_dataset(tmp_path / "data-4", DatasetSpec(4), processes=1)
    monkeypatch.setattr(stall, "_job", job)
    words = ("--dir", str(tmp_path), "--files", "4", "--ranks", "1", "--repeats", "1")
    assert stall.run(_parsed(stall, *words)) == 0
    said = capsys.readouterr().out
    assert "25.0%" in said and "50.0%" in said


@pytest.mark.multi
def test_two_ranks_wait_for_the_storage_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = slowfs.missing()
    if reason:
        pytest.skip(reason)
    make_dataset(tmp_path / "data-12", DatasetSpec(12), processes=1)
    out, plot = tmp_path / "rows.json", tmp_path / "stall.png"
    words = (
        f"--dir {tmp_path} --files 12 --ranks 2 --epochs 2 --batch-size 2 --networks squeezenet "
        f"--loaders nostall --images 50 --bandwidth 0 --repeats 1 --json {out} --plot {plot}"
    )
    assert main(["bench", "stall", *words.split()]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    # Two epochs of three batches of 2 x 2; both ranks began together, so the first waits.
    assert len(row["worst"]) == 6
    assert row["late"] >= row["median"] > 0
    assert row["storage_bytes"] >= sum(p.stat().st_size for p in tmp_path.rglob("*.jpg"))
    assert plot.stat().st_size > 10_000
    assert "squeezenet 8 ms" in capsys.readouterr().out
    assert main(["bench", "stall", "--dir", str(tmp_path), "--files", "12", "--plot", "no"]) == 2
    assert "name networks" in capsys.readouterr().err


def test_torchs_loader_gives_each_rank_its_part(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", DatasetSpec(6, 2, 0, 0.3), processes=1)
    settings = {
        "loader": "torch, 0 workers", "world": 2, "rank": 1, "batch_size": 2, "epochs": 2,
    }  # fmt: skip
    found = training_stall._torch(training_stall._folder(str(data)), settings)
    side = training_stall.SIDE
    sizes = [[tuple(images.shape) for images, _ in epoch] for epoch in found]
    assert sizes == [[(2, 3, side, side), (1, 3, side, side)]] * 2
