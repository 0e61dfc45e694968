"""Simulated readers on storage with heads: seeks and seconds that follow by hand, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.cli import main
from nostall_bench.staggering import LAYOUTS, STRIPE, HeadStorage, reads_of, simulate

# One server of 1 MiB a second, a seek of a second, links and latencies that take no time.
ONE = HeadStorage(servers=1, rate=STRIPE, seek=1.0, link=1e18, latency=0.0, in_flight=1)


def test_seconds_follow_by_hand() -> None:
    reads = [[(r * 4 * STRIPE, 4 * STRIPE)] for r in range(3)]
    # In turns at the server: each of 12 requests seeks. One reader after the other: the first.
    assert simulate(ONE, reads, 0) == (pytest.approx(24.0), 12, 12)
    assert simulate(ONE, reads, 1) == (pytest.approx(13.0), 1, 12)
    # Two at once seek in turns; the third goes on where the second ended.
    seconds, seeks, _ = simulate(ONE, reads, 2)
    assert 8 <= seeks <= 12 and seconds == pytest.approx(12 + seeks)


def test_a_sorted_queue_needs_no_turns() -> None:
    storage = HeadStorage(in_flight=32, sorted=True)
    reads = reads_of("one range a reader", 16, 8 * STRIPE, 0, 1)
    free, _, _ = simulate(storage, reads, 0)
    turns, _, _ = simulate(storage, reads, 2)
    assert free < turns


def test_readers_of_random_records_seek_for_each_in_any_turn() -> None:
    reads = reads_of("records at random", 8, 16 * STRIPE, 150_000, 1)
    for stagger in (0, 1, 4):
        seconds, seeks, requests = simulate(HeadStorage(), reads, stagger, jitter=0.02)
        assert seeks > 0.99 * requests
        assert seconds > 0


def test_all_that_was_asked_for_is_read_however_few_read_at_once() -> None:
    reads = reads_of("one range a reader", 37, 3 * STRIPE + 5, 0, 1)
    found = {n: simulate(HeadStorage(), reads, n, jitter=0.01) for n in (0, 1, 5, 36, 37, 64)}
    assert len({requests for _, _, requests in found.values()}) == 1
    assert all(seconds > 0 for seconds, _, _ in found.values())


def test_the_command_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    words = ["simulate", "staggering", "--readers", "4", "8", "--stagger", "1", "2", "8"]
    assert main([*words, "--each", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    # All at once, and in turn by one and two, and by eight where there are more.
    assert len(rows) == len(LAYOUTS) * 2 * 2 * 3
    assert all(0 < r["share"] <= 1.01 for r in rows)
    assert "best in turn" in capsys.readouterr().out
    assert main(["simulate", "staggering", "--readers", "0"]) == 2
