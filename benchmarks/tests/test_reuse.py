"""``nostall bench reuse``: every way trains, and is what its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.cli import main


def test_orders_and_batches_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.json"
    words = "--files 64 --side 16 --epochs 4 --batch 1 --ranks 4 --node 2 --resident 2 --reuse 2"
    words += " --limit 2 --seeds 1 --threshold 2"  # never so much better: the batch grows
    assert main(["bench", "reuse", *words.split(), "--json", str(out)]) == 0
    assert "sawtooth" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    stored = {row["way"]: row["stored"] for row in rows}
    for place in ("process", "node", "machine"):
        read = stored[f"reuse 2, {place}"]["counted"] / stored["torch"]["bytes"]
        # Two rounds. Between nodes a sample is read on each that uses it.
        assert read <= (2.2 if place != "machine" else 4)
    assert stored["torch"]["asked"] >= stored["torch"]["counted"]
    found = {row["way"]: row["runs"][0] for row in rows}
    # 48 pictures in batches of 4: 12 updates an epoch.
    assert found["torch"]["updates"] == 4 * 12
    assert found["torch"]["fresh"] == 1
    for place in ("process", "node", "machine"):
        run = found[f"reuse 2, {place}"]
        assert run["updates"] == 4 * 12
        assert run["fresh"] == 0.5
        assert run["distance"] < found["torch"]["distance"]
    assert found["largest batch (2x)"]["updates"] == 4 * 6
    assert found["growing batch"]["factors"] == [1, 1, 2, 2]
    assert found["growing batch"]["updates"] == 2 * 12 + 2 * 6
    # Passes of two batches: two fresh ones, then one of twice the size.
    assert found["sawtooth, reuse 2"]["updates"] == 4 * 12 * 3 // 4
    assert all(len(run["accuracy"]) == 4 for run in found.values())


def test_two_runs_at_once_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[str] = []

    class Named(Exception):
        pass

    def loader(*_: object, job: str, **__: object) -> None:
        jobs.append(job)
        raise Named

    monkeypatch.setattr("nostall.DataLoader", loader)
    for _ in range(2):
        with pytest.raises(Named):
            main(
                [
                    "bench",
                    "reuse",
                    "--files",
                    "64",
                    "--side",
                    "16",
                    "--batch",
                    "1",
                    "--ranks",
                    "4",
                    "--node",
                    "2",
                ]
            )
    assert jobs[0] != jobs[1]


def test_too_few_pictures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reuse", "--files", "100"]) == 2
    assert "8 global batches" in capsys.readouterr().err
