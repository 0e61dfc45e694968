"""``nostall bench storage``: three curves with their intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.cli import main
from nostall_bench.slowfs import missing
from nostall_bench.storage import interval


def test_the_interval_is_that_of_equation_5_1() -> None:
    assert interval(10) == (2, 9)
    assert interval(6) == (1, 6)
    assert interval(3) == (1, 3)
    assert interval(100) == (40, 61)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_three_curves_are_measured_and_drawn(tmp_path: Path) -> None:
    out, plot = tmp_path / "curves.json", tmp_path / "curves.png"
    words = f"--disk {tmp_path / 'disk'} --threads 2 --nodes 2 --runs 2 --seconds 0.02 --size 65536"
    assert main(["bench", "storage", *words.split(), "--json", str(out), "--plot", str(plot)]) == 0
    curves = json.loads(out.read_text())["curves"]
    assert list(curves) == ["memory, threads", "disk, threads", "file system, nodes"]
    for points in curves.values():
        assert [len(point) for point in points] == [2, 2]
        assert all(value > 0 for point in points for value in point)
    assert plot.stat().st_size > 1000
    assert not any((tmp_path / "disk").iterdir())
