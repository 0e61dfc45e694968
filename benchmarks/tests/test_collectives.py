"""Simulated collectives: right sums whoever is late, and the bounds that they exist for."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from nostall.cli import main
from nostall.errors import UsageError
from nostall_bench.simulate_collectives import (
    PATTERNS,
    SimulatedCall,
    SimulatedCluster,
    gains,
    missing,
    simulate,
)

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

MIB = 1 << 20


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_sums_are_right_whoever_is_late(pattern: str) -> None:
    for cluster in (SimulatedCluster(4, 2), SimulatedCluster(4, 4)):
        rows = simulate(
            cluster, "ours", pattern, [4, 100, 32764, 400_004], calls=2, redraw=True, check=True
        )
        assert all(r.right for r in rows)


@pytest.mark.parametrize("nodes", [11, 16])
def test_small_messages_are_halved_between_many_nodes(nodes: int) -> None:
    cluster, sizes = SimulatedCluster(nodes, 3), [8196, 20_004, 32_768]
    rows = simulate(cluster, "ours", "listing 4.2", sizes, check=True)
    direct = simulate(cluster, "ours", "listing 4.2", sizes, options=("--direct", "0"))
    assert all(r.right for r in rows)
    # Sixteen are a power of two: nobody hands on another's part.
    if nodes == 16:
        assert all(r.after_last < d.after_last for r, d in zip(rows, direct, strict=True))
    else:
        assert all(r.after_last != d.after_last for r, d in zip(rows, direct, strict=True))


@pytest.mark.parametrize("engine", ["flat RSA", "ring", "hierarchical", "mvapich2"])
def test_rivals_are_right_too(engine: str) -> None:
    rows = simulate(SimulatedCluster(4, 2), engine, "listing 4.2", [4, 65536], check=True)
    assert all(r.right for r in rows)


def test_time_after_the_last_arrival_is_near_its_bound() -> None:
    cluster = SimulatedCluster(4, 4)
    ours = simulate(cluster, "ours", "one node", [MIB, 4 * MIB])
    flat = simulate(cluster, "flat RSA", "one node", [MIB, 4 * MIB])
    for mine, its in zip(ours, flat, strict=True):
        # One link carries a message out and one in.
        assert mine.bound * 0.5 < mine.after_last < mine.bound * 1.3
        assert mine.after_last * 1.3 < its.after_last
        assert mine.worst == pytest.approx(3, rel=1e-3)


@pytest.mark.parametrize("engine", ["ours", "flat RSA"])
def test_delays_in_one_node_are_in_its_own_messages_time(engine: str) -> None:
    (row,) = simulate(SimulatedCluster(1, 8), engine, "MIF 10", [65536], check=True)
    assert row.right and row.bound == 0
    # A message of 64 KB through memory of 12 GB/s; the latest of eight ranks is late by ten at most.
    assert row.alpha == pytest.approx(65536 / 12e9, rel=0.3)
    assert 1 < row.worst <= 10


def test_simulations_repeat_exactly() -> None:
    one, other = (
        simulate(SimulatedCluster(2, 4), "ours", "listing 4.2", [65536], seed=5) for _ in range(2)
    )
    assert one == other


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "collectives", "--ranks", "8", "--sizes", "4KiB", "64KiB"]
    words += ["--engines", "ours", "ring", "--patterns", "balanced", "one rank", "--check"]
    words += ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert main([*words, "--plot", str(tmp_path / "a.png")]) == 0
    said = capsys.readouterr().out
    assert said.count("ours") == 4
    assert "gain over" not in said
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert len(rows) == 8 and all(r["right"] for r in rows)
    assert len(list(csv.reader((tmp_path / "a.csv").open()))) == 9
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_gains_are_those_of_the_times() -> None:
    def call(engine: str, size: int, seconds: float) -> SimulatedCall:
        return SimulatedCall(
            engine, "balanced", 8, 4, size, 0, 1e-6, seconds, seconds, 0, 0, True, 1e-6
        )

    times = {("flat RSA", 64): 4.0, ("flat RSA", 128): 8.0, ("ring", 64): 3.0, ("ring", 128): 10.0}
    rows = [call(engine, size, seconds) for (engine, size), seconds in times.items()]
    (line,) = [line for line in gains(rows).splitlines() if "ring" in line]
    assert line.split() == [
        *["8", "4", "balanced", "ring", "0.0", "%"],
        *["25.0", "%", "at", "64", "-25.0", "%", "at", "128"],
    ]
    assert gains(rows, "ours") == ""


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UsageError, match="there are: ours"):
        simulate(SimulatedCluster(2, 4), "magic", "balanced", [4])
    assert main(["simulate", "collectives", "--ranks", "10", "--per-node", "4"]) == 2
    assert main(["simulate", "collectives", "--sizes", "6"]) == 2
