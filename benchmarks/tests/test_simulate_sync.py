"""The simulated protocols against answers that are known, and against the engine itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sync_ranks import run_ranks

from nostall.cli import main
from nostall.errors import UsageError
from nostall_bench.simulate_sync import (
    MODES,
    Costs,
    Training,
    measured,
    sampler,
    simulate_sync,
    sweep,
    timeline,
)

EXACT = Costs(0.0001, {})  # every thread wakes in time
STILL = Training(jitter=0.0, hop=0.0)
LATE = Costs(0.0001, {"negotiated": (0.0,) * 10 + (95.0, 4.0, 1.0)})  # 1 to 8 ms


@pytest.mark.parametrize("ranks", [1, 2, 96, 4096])
def test_without_late_threads_nothing_cascades(ranks: int) -> None:
    t = STILL
    for mode in MODES:
        o = simulate_sync(mode, ranks, t, EXACT)
        assert o.lost == 0
        assert o.spin < 1e-12
    planned = simulate_sync("TOPO", ranks, t, EXACT)
    # 95 % and 100 % of the compute; the reduction of the first half ends before or after.
    half = t.reduce / 2
    expected = max(t.compute, 0.95 * t.compute + half) + half
    assert planned.iteration == pytest.approx(expected)
    assert planned.latency == 0
    negotiated = simulate_sync("negotiated", ranks, t, EXACT)
    # At most a cycle, and what it takes to agree, later; twice, for there are two groups.
    assert expected <= negotiated.iteration <= expected + 2 * (t.cycle + EXACT.agree) + half


def test_one_iteration_worked_out_by_hand() -> None:
    # Cycles of 5 ms and 0.1 ms: after agreeing the thread sleeps 4.9 ms, so it wakes at 5, 10, ...
    t = replace(STILL, compute=0.012, groups=1, reduce=0.002)
    o = simulate_sync("negotiated", 3, t, EXACT, iterations=1)
    assert o.cycles == 3
    assert o.iteration == pytest.approx(0.005 * 3 + 0.0001 + 0.002)
    assert o.latency == pytest.approx(0.003 / o.iteration)
    planned = simulate_sync("TOPO", 3, t, EXACT, iterations=1)
    assert planned.iteration == pytest.approx(0.014)


def test_an_oversleep_cascades_and_global_sleep_ends_it() -> None:
    """Figures 6.8, 6.9, 6.11, 6.12: rank 1 oversleeps 8 ms in the first cycle, nothing after."""

    def spins(mode: str, oversleep: float) -> list[float]:
        history = timeline(mode, STILL, oversleep)  # type: ignore[arg-type]
        return [float(done[0] - awake[0]) * 1e3 for _, awake, done in history]

    assert spins("negotiated", 0.0) == pytest.approx([0.2] * 5)
    # Rank 0 waited 8.2 ms: it does not sleep in the next cycle, rank 1 sleeps 4.8 ms, and so on.
    waits = spins("negotiated", 0.008)
    assert waits[:2] == pytest.approx([8.2, 5.0])
    assert sum(waits) > 2 * 8.2
    # GS: the imbalance ends with its cycle.
    assert spins("GS", 0.008)[1:] == pytest.approx([0.2] * 4)
    # NBCS: the wait is there, on no core.
    assert spins("NBCS", 0.008)[0] == pytest.approx(8.3, abs=0.11)


def test_contention_is_what_makes_it_slower() -> None:
    t = Training(contention=0.5)
    slow = simulate_sync("negotiated", 256, t, LATE)
    fast = simulate_sync("negotiated", 256, replace(t, contention=0.0), LATE)
    assert slow.lost > 0.01 and fast.lost == 0
    assert slow.iteration > fast.iteration
    assert slow.spin > 0.3  # on the core for nothing (figure 6.10)
    planned = simulate_sync("TOPO", 256, t, LATE)
    assert planned.spin == planned.lost == 0
    assert planned.iteration < fast.iteration


def test_more_ranks_wait_for_later_threads() -> None:
    spins = [simulate_sync("negotiated", n, Training(), LATE).spin for n in (2, 32, 1024)]
    assert spins == sorted(spins)


def test_a_histogram_is_drawn_as_it_is() -> None:
    counts = (10.0, 0.0, 30.0, 60.0)
    drawn = sampler(counts, np.random.default_rng(0))(40_000) * 1e6
    assert drawn.min() >= 0 and drawn.max() < 16
    share = [((drawn >= low) & (drawn < 2 * low)).mean() for low in (4, 8)]
    assert share == pytest.approx([0.3, 0.6], abs=0.02)
    assert (drawn < 2).mean() == pytest.approx(0.1, abs=0.01)


def test_the_same_seed_gives_the_same_numbers() -> None:
    once, again = (sweep([8, 64], Training(), LATE, iterations=4, seeds=2) for _ in range(2))
    assert once == again
    assert once[0].improvement["negotiated"] == (0.0, 0.0, 0.0)


GROUPS, STEPS = 3, 10
FOUR_RANKS = f"""
import numpy as np
from nostall.sync import GradientReducer, SyncOptions
result = {{}}
for mode in ("planned", "negotiated"):
    options = SyncOptions(mode=mode, cycle=0.001, threshold=1)  # every array is a group
    reducer = GradientReducer({{str(g): np.ones(3000) for g in range({GROUPS})}}, options)
    engine = reducer._engine
    arrays = [np.ones(3000) for _ in range({GROUPS})]
    for step in range({STEPS} + 1):
        if step == 1:
            before, late = engine.stats(), engine.oversleeps()
        for g in reversed(range({GROUPS})):  # the last one first, as a backward pass has them
            engine.submit(g, arrays[g].ctypes.data, True)
        engine.wait()
    late = [int(b) - int(a) for a, b in zip(late, engine.oversleeps())]
    result[mode] = [{{k: v - before[k] for k, v in engine.stats().items()}}, late]
    del engine, reducer
"""


@pytest.mark.multi
def test_four_ranks_in_the_order_of_the_graph_do_what_is_predicted() -> None:
    """The counts; how long it takes is the machine's affair."""
    results = run_ranks(4, FOUR_RANKS)
    for mode, simulated in (("planned", "TOPO"), ("negotiated", "negotiated")):
        runs = [r[mode] for r in results]
        late = tuple(float(sum(counts)) for counts in zip(*(r[1] for r in runs), strict=True))
        stats = [r[0] for r in runs]
        agree = [(s["order_ns"] - s["order_wait_ns"]) / max(1, s["cycles"]) for s in stats]
        training = replace(STILL, groups=GROUPS, first=1 / GROUPS)
        costs = Costs(float(np.median(agree)) / 1e9, {simulated: late})
        predicted = simulate_sync(simulated, 4, training, costs)  # type: ignore[arg-type]
        assert predicted.iteration >= training.compute  # of costs that were measured
        for s in stats:
            assert s["steps"] == STEPS
            if mode == "planned":  # a reduction a group, and no agreement
                assert s["reductions"] == GROUPS * STEPS
                assert s["cycles"] == predicted.cycles == 0
            else:  # groups that become ready in one cycle are reduced in it
                assert STEPS <= s["reductions"] <= GROUPS * STEPS
                assert s["cycles"] >= s["reductions"] / GROUPS and predicted.cycles >= 1


def test_costs_come_from_the_benchmark(tmp_path: Path) -> None:
    rank = {
        "engine_order_ns": 5_000_000,
        "engine_order_wait_ns": 3_000_000,
        "engine_cycles": 100,
        "oversleeps": [1, 2, 3],
    }
    runs = [
        {"way": "negotiated", "ranks": [rank, rank]},
        {"way": "planned", "ranks": [{"oversleeps": [0, 7, 0]}]},
        {"way": "DDP gloo", "ranks": [{"oversleeps": []}]},
    ]
    path = tmp_path / "sync.json"
    path.write_text(json.dumps({"runs": runs}))
    costs = measured(path)
    assert costs.agree == pytest.approx(2e-5)
    assert costs.late == {"negotiated": (2, 4, 6), "TOPO": (0, 7, 0)}
    assert costs.late_in("GS") == (2, 4, 6)
    assert math.isfinite(measured().agree)  # what comes with nostall
    path.write_text('{"runs": []}')
    with pytest.raises(UsageError, match="negotiated"):
        measured(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="no measurement"):
        measured(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["simulate", "sync", "--ranks", "4", "64", "--iterations", "3", "--seeds", "1"]
    plots = ["--plot", str(tmp_path / "a.png"), "--timeline", str(tmp_path / "b.png")]
    assert main([*words, "--json", str(out), *plots, "--set", "groups=3"]) == 0
    assert "TOPO" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [p["ranks"] for p in found["points"]] == [4, 64]
    assert found["training"]["groups"] == 3
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert (tmp_path / "b.png").stat().st_size > 1000
    for bad in (["--set", "x=1"], ["--set", "cycle=0"], ["--modes", "X"], ["--ranks", "0"]):
        assert main([*words, *bad]) == 2
    assert "must be" in capsys.readouterr().err
