"""``nostall bench servers``: every way trains, and what it counts agrees with what it must send."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_children import Subprocess

from nostall.errors import UsageError
from nostall_bench import harness, server_training

pytest_plugins = ["forked_children"]

BYTES = 4 * 61_338  # of the network's parameters


def arguments(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    server_training.add_arguments(parser)
    return parser.parse_args(words.split())


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_ways_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.json"
    words = f"--files 96 --side 16 --epochs 2 --batch 2 --staleness 0 2 --seeds 1 --json {out}"
    assert server_training.run(arguments(words)) == 0
    assert "proxies 2" in capsys.readouterr().out
    rows = {(r["way"], r["staleness"]): r for r in json.loads(out.read_text())["rows"]}
    assert len(rows) == 5
    steps = 2 * 72 // 8
    assert all(row["steps"] == steps for row in rows.values())
    for staleness in (0, 2):
        flat, proxies = rows["flat", staleness], rows["proxies", staleness]
        assert flat["staleness_most"] <= staleness
        assert proxies["staleness_most"] <= staleness
        # Four workers, or two proxies, with two servers of the other node.
        assert flat["messages_between_per_step"] == 4 * 2 * 2 + 4 * 2 * 2 / steps + 2 / steps
        assert proxies["messages_between_per_step"] == 2 * 2 * 2 + 2 * 2 * 2 / steps + 2 / steps
        # The kernel's counts; what is still under way at the end is not in them.
        most = 1 + (staleness + 2) / steps
        assert 0.7 < flat["bytes_between_per_step"] / (4 * BYTES) < most
        assert 0.7 < proxies["bytes_between_per_step"] / (2 * BYTES) < most
    # Local leaders exchange halves, and the sums of them.
    assert 0.9 < rows["allreduce", 0]["bytes_between_per_step"] / (2 * BYTES) < 1.2


def test_connections_that_share_a_port_are_told_apart() -> None:
    """The kernel gives one local port to connections that go to several places."""
    one, other, shared = "127.0.0.1 9000", "127.0.0.1 9001", "127.0.0.1 40000"

    def measured(connections: list[tuple[str, str, int]]) -> dict[str, object]:
        return {
            **{"accuracy": 1.0, "loss": 0.0, "begins": 0.0, "ends": 1.0, "steps": 1},
            **{"updates": 1, "messages": 0, "staleness": {}, "connections": connections},
        }

    # Rank 0 and rank 3, which is on the other node, connect to rank 2 from one port.
    run = server_training._together(
        [
            measured([(shared, one, 100)]),
            measured([]),
            measured([(one, shared, 30), (other, shared, 9)]),
            measured([(shared, other, 5)]),
        ]
    )
    assert run["bytes_between_per_step"] == 130


LATE = """
import os, time
from nostall_bench import harness, server_training
connections = server_training._connections
def late():
    time.sleep(0.5 if os.environ["RANK"] == "2" else 0)
    return connections()
server_training._connections = late
harness.answer(server_training._work)
"""


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_a_late_rank_counts_connections_before_they_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = tmp_path / "late.py", tmp_path / "runs.json"
    script.write_text(LATE)
    start = harness.subprocess.Popen

    def late(command: list[str], **more: Any) -> Any:
        return start([sys.executable, str(script), *command[3:]], **more)

    monkeypatch.setattr(harness, "subprocess", Subprocess(late))
    words = "--files 32 --side 16 --epochs 1 --batch 2 --ways allreduce --seeds 1"
    assert server_training.run(arguments(f"{words} --json {out}")) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert 0.9 < row["bytes_between_per_step"] / (2 * BYTES) < 1.2


def test_impossible_settings_are_refused() -> None:
    for words, told in (
        ("--ranks 3", "half of them are on each of two nodes"),
        ("--epochs 0", "at least 1"),
        ("--staleness -1", "0 or more"),
        ("--files 10", "is less than a batch of 4 ranks"),
    ):
        with pytest.raises(UsageError, match=told):
            server_training.run(arguments(words))
