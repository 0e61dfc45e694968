"""``nostall bench checkpoint``: what it leaves of the directories that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nostall.cli import main
from nostall_bench import checkpoint, checkpoint_worker, harness

pytest_plugins = ["forked_children"]

ROW = {
    **{"train_seconds": 1.0, "durable_seconds": 1.0, "origin": 0.0, "quiet": 0.1},
    **{"steps": [0.1, 0.1], "calls": [0.1], "memcpy": 0.1, "cpu": 0.1},
}
OPTIONS = ["--write-limit", "0", "--repeats", "2", "--iterations", "2", "--every", "1"]


def save(used: list[Path]) -> Any:
    """In the place of a training: a file in each of its directories, which are new to it."""

    def child(_: str, settings: dict[str, Any], **__: object) -> dict[str, Any]:
        for tier in ("slow", "fast"):
            used.append(Path(settings[tier]))
            assert list(used[-1].iterdir()) == []
            (used[-1] / "checkpoint").write_bytes(b"1")
        return dict(ROW)

    return child


@pytest.mark.parametrize("saves", [1, 2, 5])
def test_a_stall_is_what_a_save_adds_to_an_endless_training(saves: int) -> None:
    every, quiet, call, behind = 4, 0.1, 0.03, 0.02
    steps = [quiet] * every + [quiet + behind] * every * (saves - 1)
    row = {"steps": steps, "calls": [call] * saves, "quiet": quiet}
    expected = call + (behind * every if saves > 1 else 0)  # nothing is known of one save's steps
    assert checkpoint._stall(row, every) == pytest.approx(expected)


@pytest.mark.parametrize("option", ["--every", "--iterations"])
def test_a_training_without_steps_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "checkpoint", option, "0"]) == 2
    assert capsys.readouterr().err == f"nostall: {option} must be at least 1, not 0\n"


@pytest.mark.parametrize("fast", ["fast", "slow"])
def test_what_the_directories_hold_stays(
    fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Path] = []
    monkeypatch.setattr(harness, "child", save(used))
    for name in ("slow", "fast"):
        (tmp_path / name / "results").mkdir(parents=True)
        (tmp_path / name / "results" / "table").write_text(name)
    before = sorted(tmp_path.rglob("*"))
    words = ["--slow", str(tmp_path / "slow"), "--fast", str(tmp_path / fast)]
    assert main(["bench", "checkpoint", *words, *OPTIONS, "--methods", "torch.save"]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert len(used) == len(set(used)) > 4
    assert {path.parent.name for path in used} == {"slow", fast}


@pytest.mark.parametrize("every", [1, 2])
def test_a_first_save_does_not_count(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Recorded(checkpoint_worker.Method):
        def save(self, state: dict[str, Any], number: int) -> None:
            done.append(number)

        def before_update(self) -> None:
            done.append("step")

        def finish(self) -> None:
            done.append("finish")

    monkeypatch.setitem(checkpoint_worker.METHODS, "mine", (Recorded, "slow"))
    settings: dict[str, Any] = {"method": "mine", "fast": str(tmp_path), "slow": str(tmp_path)}
    settings |= {"threads": 1, "busy": False, "bytes": 1 << 20, "compute": 0}
    found = checkpoint_worker.work({**settings, "iterations": 2 * every, "every": every})
    steps = ["step"] * every
    assert done == [0, "finish", *steps, 1, *steps, 2, "finish"]
    assert len(found["calls"]) == 2


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_dcps_burst_buffer_keeps_two_saves_on_slow_storage_too(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for directory in (fast, slow):
        directory.mkdir()
    settings = {"method": "DCP async_save, fast, cp", "fast": str(fast), "slow": str(slow)}
    settings |= {"threads": 1, "busy": False, "bytes": 1 << 20, "compute": 0}
    work = {**settings, "iterations": 6, "every": 2}
    found = harness.child("nostall_bench.checkpoint_worker", work)
    assert len(found["calls"]) == 3

    def files(home: Path) -> dict[str, bytes]:
        return {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*") if p.is_file()}

    copied, kept = files(slow), files(fast)
    saved = [f"checkpoint-{n}" for n in (2, 3)]
    assert [p.name for p in sorted(slow.glob("checkpoint-*"))] == saved
    assert {name.partition("/")[0] for name in kept} == set(saved)
    assert kept.items() <= copied.items()
    sizes = {sum(len(copied[f]) for f in copied if f.startswith(f"{n}/")) for n in saved}
    assert min(sizes) > 1 << 20


def test_directories_that_were_made_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "child", save([]))
    words = ["--slow", str(tmp_path / "slow"), "--fast", str(tmp_path / "slow" / "fast")]
    assert main(["bench", "checkpoint", *words, *OPTIONS, "--methods", "DCP"]) == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "slow").touch()
    assert main(["bench", "checkpoint", *words, *OPTIONS]) == 2
    assert f"cannot make {tmp_path / 'slow'}: File exists" in capsys.readouterr().err
