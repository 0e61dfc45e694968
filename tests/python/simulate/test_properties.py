"""What must hold for any machine and training."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall import _native
from nostall.errors import UsageError
from nostall.simulate import load_scenario, read_once_bound, simulate
from nostall.simulate._policies import make_policy
from nostall.simulate._sweep import with_values

NODES = st.sampled_from([1, 2, 3, 4, 6])
SPEEDS = st.floats(20, 2000)


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    disk = draw(SPEEDS)
    return {
        "N": draw(NODES),
        "c": draw(SPEEDS),
        "beta": draw(SPEEDS),
        "b_c": draw(SPEEDS),
        "b_fs": draw(SPEEDS),
        "t": {"1": draw(SPEEDS), "4": draw(SPEEDS)},
        "d": [draw(st.floats(4, 50)), draw(st.floats(0, 300)), draw(st.floats(0, 300))],
        "r": [5000, 5000, {"1": disk, "2": disk * draw(st.floats(1, 2))}],
    }


@settings(max_examples=25)
@given(machines(), st.integers(1, 4), st.integers(12, 60))
def test_no_policy_beats_the_bounds(machine: dict[str, Any], epochs: int, batch: int) -> None:
    one = scenario(
        environment=machine, dataset={"samples": 400}, training={"E": epochs, "B": batch}
    )
    bound = read_once_bound(one)
    for o in simulate(one):
        if math.isnan(o.seconds):
            continue
        if o.order == "same":  # other samples on a node are other bytes
            assert o.ratio >= 1 - 1e-9, o.title
        assert o.stall_seconds >= -1e-6
        keeps_order = o.policy not in ("lower-bound",) and o.order == "same"
        # A batch that is being computed on cannot be read any more: the bound lets both overlap.
        if o.mode == "consistent" and keeps_order:
            assert o.seconds >= bound * (1 - 1e-9), o.title
        if o.policy != "lower-bound":
            read, accessed = sum(v for _, v in o.staged), _accessed(one, o)
            assert read >= accessed * (1 - 1e-6)
            # As published, what would come too late is read a second time.
            assert o.mode == "as-published" or read <= accessed * (1 + 1e-6)


def test_what_is_staged_in_one_epoch_for_the_next_is_within_the_bound() -> None:
    # Two large samples: batches with one on each node take half as long as those with both on one.
    machine = {"N": 2, "c": 10, "beta": 1e6, "b_c": 1e6, "b_fs": 1e6, "t": {"1": 17}}
    one = scenario(
        environment={**machine, "d": [1000, 0, 0]},
        training={"E": 60, "B": 2, "seed": 1},
        policies=["staging-pool"],
    )
    one = replace(one, dataset=replace(one.dataset, sizes=np.array([5, 5, 0.001, 0.001])))
    computing = simulate(replace(one, policies=(make_policy("lower-bound"),)), ["consistent"])[0]
    reading = one.dataset.total / 17
    found = simulate(one, ["consistent"])[0].seconds
    # Epochs that read for longer than they compute are shorter than that for what was staged before.
    assert found < sum(max(seconds, reading) for seconds in computing.epoch_seconds)
    assert read_once_bound(one) <= found


def _accessed(one: Any, outcome: Any) -> float:
    if outcome.order == "changed":
        return sum(v for _, v in outcome.staged)
    plan = one.training.plan(len(one.dataset), one.environment.N)
    sizes = one.dataset.sizes
    return float(sum(sizes[plan.epoch_order(e)].sum() for e in range(one.training.E)))


@settings(max_examples=40)
@given(
    st.dictionaries(st.integers(1, 64), st.floats(1, 1000), min_size=1, max_size=8),
    st.floats(0.5, 100),
)
def test_interpolation_is_equation_4_1(points: dict[int, float], at: float) -> None:
    keys = sorted(points)
    expected = float(np.interp(at, keys, [points[k] for k in keys]))
    curve = [(float(k), points[k]) for k in keys]
    assert _native.interpolate(curve, at) == pytest.approx(expected)


@pytest.mark.parametrize("key", ["b_c", "b_fs", "t", "beta", "c"])
def test_more_bandwidth_never_hurts_hdmlp(key: str) -> None:
    one = scenario(policies=["hdmlp", "nostall"])
    times: list[list[float]] = []
    for factor in (0.5, 1, 1.5, 2, 4):
        if key == "t":
            changed = {"t": {str(k): v * factor for k, v in one.environment.t}}
        else:
            changed = {key: getattr(one.environment, key) * factor}
        times.append([o.seconds for o in simulate(with_values(one, changed), ["consistent"])])
    for column in zip(*times, strict=True):
        # Which copy a read meets depends on time: a part in a hundred of play.
        assert all(b <= a * 1.01 for a, b in itertools.pairwise(column))


@pytest.mark.parametrize("key", ["d.1", "d.2"])
def test_more_room_never_hurts(key: str) -> None:
    # Not so of HDMLP: what it fetches for more room it takes from what is wanted now.
    one = scenario(policies=["nostall"])
    times = [
        simulate(with_values(one, {key: room}), ["consistent"])[0].seconds
        for room in (0, 30, 60, 120, 240)
    ]
    assert all(b <= a * 1.01 for a, b in itertools.pairwise(times))


def test_ahead_of_hdmlp_wherever_that_reads_twice() -> None:
    for room in (20, 60, 120, 200, 400):
        one = with_values(scenario(policies=["hdmlp", "nostall"]), {"d.1": room, "d.2": room})
        theirs, ours = simulate(one, ["consistent"])
        assert ours.seconds <= 1.03 * read_once_bound(one)
        if theirs.source_mb > 1.01 * ours.source_mb:
            assert ours.seconds <= theirs.seconds


@pytest.mark.parametrize("scheme", ["uniform", "whole", "imbalanced"])
def test_all_schemes_of_distribution(scheme: str) -> None:
    for o in simulate(scenario(training={"scheme": scheme, "drop_last": False})):
        assert o.seconds > 0 or o.why


def test_a_scenario_repeats() -> None:
    first, second = (
        [o.to_dict(batches=True) for o in simulate(scenario(), shuffle=False)] for _ in range(2)
    )
    for data in (*first, *second):
        data.pop("cost")
    np.testing.assert_equal(first, second)


def test_shuffle_quality_of_policies_that_change_the_order() -> None:
    found = {o.title: o.shuffle for o in simulate(scenario(), ["consistent"])}
    assert found["HDMLP"] is None and found["DeepIO (ordered)"] is None
    local = found["Locality-aware loading"]
    assert local is not None and local.batches == 1 and local.coverage == 1
    assert 0.25 < local.mobility < 1
    own = found["DeepIO (opportunistic)"]
    assert own is not None and own.batches == 0
    assert own.coverage == pytest.approx(400 / (1200 * 0.4), abs=0.03)  # four times 100 MB of RAM
    staged = found["Parallel data staging"]
    assert staged is not None and staged.coverage == 1


def test_a_table_of_step_costs_adds_to_every_batch() -> None:
    step = {"collectives": {"1": 0.0, "4": 0.02}, "engine": 0.001}
    step |= {"checkpoint": 3.0, "checkpoint_every": 30}
    plain, more = scenario(policies=["lower-bound"]), scenario(policies=["lower-bound"], step=step)
    batches = 3 * 30
    added = simulate(more)[0].seconds - simulate(plain)[0].seconds
    assert added == pytest.approx(batches * (0.02 + 0.001 + 3.0 / 30))


def test_the_scenarios_that_come_with_nostall_are_as_the_seed_says() -> None:
    expected = {1: (270, 10), 2: (150e3, 10), 3: (600e3, 5), 4: (1200e3, 5)}
    for number, (megabytes, epochs) in expected.items():
        one = load_scenario(f"scenario-{number}")
        assert one.dataset.total == pytest.approx(megabytes, rel=0.01)
        assert [epochs, 100] == [one.training.E, one.training.B]
        assert one.environment.throughput(3) == 129 and len(one.policies) == 11


def test_cleanup_keeps_within_the_room() -> None:
    for room in (20, 60):
        kept = {"name": "hdmlp", "cleanup_read": True}
        one = with_values(scenario(policies=["hdmlp", kept]), {"d.1": room, "d.2": 0})
        plain, dropping = simulate(one, ["as-published"])
        assert dropping.title == "HDMLP (cleanup)"
        # What comes free is used: more is kept, less comes straight from the source.
        assert dropping.kept_from_source + dropping.kept_from_nodes > 4 * room
        assert dict(dropping.staged)["source"] <= dict(plain.staged)["source"]


def test_lbann_stays_within_the_memory_of_every_node() -> None:
    one = with_values(scenario(policies=["lbann"]), {"d.1": 1200 * 0.4 / 4 * 1.02})
    assert one.dataset.total < 4 * one.environment.classes[1].capacity
    published, consistent = simulate(one)
    assert published.kept_from_source == pytest.approx(one.dataset.total, rel=0.02)
    assert dict(consistent.staged)["source"] == pytest.approx(one.dataset.total, rel=0.02)


def test_owners_alone_keep_every_sample_once() -> None:
    both = ["nostall", {"name": "nostall", "copies": "none"}]
    one = scenario(policies=both, training={"E": 8})  # often enough for second readers
    with_copies, without = simulate(one, ["consistent"])
    assert without.title == "nostall (no copies)"
    assert without.source_mb == pytest.approx(with_copies.source_mb, rel=1e-6)
    # What is not copied is read from its owner.
    assert dict(without.staged)["other nodes"] > dict(with_copies.staged)["other nodes"]


def test_eviction_reads_once_and_more_from_the_node() -> None:
    evict = {"name": "nostall", "evict": True}
    three = ["nostall", evict, {"name": "nostall", "copies": "next-use"}]
    one = scenario(policies=three, training={"E": 8})
    room = one.dataset.total / 4 * 2  # twice what holds one copy of each sample
    one = with_values(one, {"d.1": room, "d.2": 0})
    for na in simulate(one, ["as-published"])[1:]:
        assert "mode consistent alone" in na.why
    fixed, evicting, owned = simulate(one, ["consistent"])
    assert evicting.title == "nostall (evicting)"
    assert evicting.source_mb == pytest.approx(fixed.source_mb, rel=1e-6)
    assert evicting.local_share > fixed.local_share
    assert owned.title == "nostall (copies by next use)"
    assert owned.source_mb == pytest.approx(fixed.source_mb, rel=1e-6)
    assert owned.local_share > fixed.local_share
    with pytest.raises(UsageError, match="leave copies=none out"):
        make_policy("nostall", {"evict": True, "copies": "none"})
    with pytest.raises(UsageError, match="not 'some'"):
        make_policy("nostall", {"copies": "some"})
