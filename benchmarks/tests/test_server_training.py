"""``nostall bench servers``: every way trains, and what it counts agrees with what it must send."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall_bench import server_training

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


def test_impossible_settings_are_refused() -> None:
    for words, told in (
        ("--ranks 3", "half of them are on each of two nodes"),
        ("--epochs 0", "at least 1"),
        ("--staleness -1", "0 or more"),
        ("--files 10", "is less than a batch of 4 ranks"),
    ):
        with pytest.raises(UsageError, match=told):
            server_training.run(arguments(words))
