"""The engine's own timeline: written by rank 0 of a real training, read by the analysis."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sync_ranks import run_ranks

from nostall.cli import main
from nostall.observe.timelines import analyze

STEPS, LATE = 6, 0.03
TRAIN = """
import pathlib, time, torch, nostall, nostall.torch
from nostall.sync import SyncOptions
torch.set_num_threads(1)
result = []
for mode in ("planned", "negotiated"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = nostall.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(),
        SyncOptions(mode=mode, threshold=20_000, cycle=0.001))
    for step in range({steps}):
        loss = model(torch.ones(4, 64)).square().mean()
        done = pathlib.Path({home!r}, f"{{mode}} {{step}}")
        if rank == 1:  # its gradients are late, whatever else the machine does
            while not done.exists():
                time.sleep(0.001)
            time.sleep({late})
        loss.backward()
        if rank == 0:
            done.touch()
        optimizer.step()
        optimizer.zero_grad()
    result.append(optimizer.gradient_sync.engine.stats())
    optimizer.gradient_sync.close()
    del optimizer
"""


def intervals(events: list[dict[str, Any]], name: str) -> set[tuple[int, int]]:
    """(begin, end) of an activity in each reduction, microseconds.

    It begins later for a tensor that a rank gave when the reduction had begun.
    """
    found: dict[int, int] = {}
    open_: dict[int, list[tuple[str, int]]] = {}
    for e in (e for e in events if e["ph"] in "BE"):
        stack = open_.setdefault(e["pid"], [])
        if e["ph"] == "B":
            stack.append((e["name"], e["ts"]))
        else:
            begun, at = stack.pop()
            if begun == name:
                found[e["ts"]] = min(at, found.get(e["ts"], at))
    assert not any(open_.values())
    return {(begin, end) for end, begin in found.items()}


@pytest.mark.multi
def test_a_training_in_both_modes_is_analysed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOSTALL_TIMELINE", str(tmp_path / "t.json"))
    counters, _ = run_ranks(2, TRAIN.format(steps=STEPS, late=LATE, home=str(tmp_path)))
    for stats, name in zip(counters, ("t.json", "t.1.json"), strict=True):
        events = json.loads((tmp_path / name).read_text())
        # What the file says is what the engine counted.
        began = Counter(e["name"] for e in events if e["ph"] == "B")
        assert began["ALLREDUCE"] == began["NEGOTIATE_ALLREDUCE"] == 6 * STEPS
        assert stats["tensors"] == began["ALLREDUCE"] + 3 * STEPS  # three signs of the optimizer
        ticks = Counter(e["name"] for e in events if e["ph"] == "X")
        assert ticks == {"0": 6 * STEPS, "1": 6 * STEPS}
        times = [e["ts"] for e in events if "ts" in e]
        assert times == sorted(times)
        for activity, counted in (("NOSTALL_ALLREDUCE", "reduce_ns"), ("MEMCPY_", "copy_ns")):
            names = {n for n in began if n.startswith(activity)}
            spans = [s for n in names for s in intervals(events, n)]
            assert spans
            # Cut to whole microseconds; what came before the last rank is the negotiation's.
            assert sum(e - b for b, e in spans) <= stats[counted] / 1000 + len(spans)
        # The five metrics.
        got = analyze([tmp_path / name])
        assert len(got.rounds) == STEPS - 1
        assert got.notes == []
        sizes = {t.name: t.bytes for t in got.tensors}
        assert sizes == {
            f"{i}.{kind}": 4 * 64 * (64 if kind == "weight" else 1)
            for i in range(3)
            for kind in ("weight", "bias")
        }
        assert all(r.seconds > LATE for r in got.rounds)
        assert got.feed_forward is not None
        assert 0 < got.feed_forward < max(r.seconds for r in got.rounds)
        early, late = got.ranks
        assert early.rounds == late.rounds == STEPS - 1
        # Rank 0 is ready and waits; until its ticks come, rank 1 is in negotiation.
        assert early.average > LATE / 2 > 0
        assert early.average > late.average
        assert got.reaction is not None
        if name == "t.json":  # the plan's last group ends every round
            assert got.unbounded >= 1
            assert got.reaction.max == math.inf
        assert got.window_max is not None
        assert 0 < got.window_max < max(r.seconds for r in got.rounds)
    assert main(["report", str(tmp_path / "t.json")]) == 0
    assert "5 rounds" in capsys.readouterr().out


@pytest.mark.multi
def test_only_rank_0_needs_to_ask_and_a_bad_path_is_told_to_all(tmp_path: Path) -> None:
    here = tmp_path / "mine.json"
    lacking = tmp_path / "no" / "directory.json"
    both = run_ranks(
        2,
        "import numpy as np, nostall\nfrom nostall.sync import GradientReducer, SyncOptions\n"
        f"paths = [{str(here)!r}, {str(lacking)!r}]\nresult = []\n"
        "for path in paths:\n"
        "    options = SyncOptions(timeline=path if rank == 0 else '')\n"
        "    try:\n"
        "        reduce = GradientReducer({'w<\"': np.ones((2, 3), np.float32)}, options)\n"
        "        mean = reduce({'w<\"': np.full((2, 3), rank, np.float32)})\n"
        "        result.append(float(mean['w<\"'][0, 0]))\n"
        "        del reduce\n"
        "    except nostall.errors.Error as error:\n"
        "        result.append(f'{type(error).__name__}: {error}')\n",
    )
    assert [r[0] for r in both] == [0.5, 0.5]
    assert (
        both[0][1].startswith("IoError: ")
        and str(lacking.with_name("directory.1.json")) in both[0][1]
    )
    assert both[1][1].startswith("PeerError: rank 0 cannot write its timeline")
    events = json.loads(here.read_text())
    assert {"name": 'w<"'} in [e.get("args") for e in events]
    assert {"dtype": "float32", "shape": "[2, 3]"} in [e.get("args") for e in events]
