"""Data reuse by sub-batch shuffling: what each rank gets, and when."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall import Plan, SubBatches
from nostall.errors import UsageError

SHAPES = {
    "batches": st.integers(1, 14),
    "tail": st.integers(0, 30),
    "per_rank": st.integers(1, 4),
    "groups": st.integers(1, 3),
    "together": st.integers(1, 3),
    "resident": st.integers(1, 6),
    "reuse": st.integers(1, 4),
    "seed": st.integers(0, 2**40),
}


def make(
    batches: int, tail: int, per_rank: int, groups: int, together: int, resident: int, reuse: int,
    seed: int, **more: Any,
) -> Plan:  # fmt: skip
    world = groups * together
    return Plan(
        samples=batches * per_rank * world + tail % (per_rank * world),
        batch_size=per_rank,
        world_size=world,
        epochs=2 * reuse + 1,
        seed=seed,
        order=SubBatches(resident=resident, reuse=reuse, together=together),
        **more,
    )


@settings(max_examples=150)
@given(**SHAPES, drop=st.booleans())
def test_a_round_is_so_many_epochs_of_torch(drop: bool, **shape: int) -> None:
    plan = make(**shape, drop_last=drop)
    torch = Plan(
        samples=plan.native.samples,
        batch_size=shape["per_rank"],
        world_size=plan.native.world,
        epochs=9,
        seed=shape["seed"],
        drop_last=drop,
    )
    assert plan.epoch_length == torch.epoch_length
    for r in range(2):
        epochs = [
            plan.epoch_order(e).tolist()
            for e in range(r * shape["reuse"], (r + 1) * shape["reuse"])
        ]
        expected = Counter(torch.epoch_order(r).tolist())
        assert Counter(s for epoch in epochs for s in epoch) == {
            s: n * shape["reuse"] for s, n in expected.items()
        }


@settings(max_examples=150)
@given(**SHAPES)
def test_sub_batches_stay_whole_and_with_their_ranks(**shape: int) -> None:
    plan = make(**shape)
    size, world, together = plan.native.global_batch, plan.native.world, shape["together"]
    batches = plan.epoch_length // size
    seen: dict[int, tuple[int, int]] = {}  # chunk of each sample in round 0, and its group
    units: dict[int, set[frozenset[int]]] = {}
    fresh = set()
    for epoch in range(shape["reuse"]):
        order = plan.epoch_order(epoch)
        for h in range(batches):
            chunk, turn, place, length = plan.pass_of(epoch, h)
            assert turn < shape["reuse"] and place < length <= shape["resident"]
            batch = order[h * size : (h + 1) * size]
            for rank in range(world):
                unit = frozenset(batch[rank::world].tolist())
                home = (chunk, rank // together)
                if turn == 0:
                    fresh.update(unit)
                    units.setdefault(chunk, set()).add(unit)
                    for s in unit:
                        assert seen.setdefault(s, home) == home or plan.native.samples % world
                else:
                    assert unit in units[chunk]
                    if plan.native.samples % world == 0:
                        assert all(seen[s] == home for s in unit)
    assert len(fresh) >= batches * size - world  # padding repeats some


@settings(max_examples=60)
@given(**SHAPES)
def test_one_use_is_torch(**shape: int) -> None:
    plan = make(**{**shape, "reuse": 1})
    torch = Plan(
        samples=plan.native.samples,
        batch_size=shape["per_rank"],
        world_size=plan.native.world,
        epochs=3,
        seed=shape["seed"],
    )
    for epoch in range(3):
        assert plan.epoch_order(epoch).tolist() == torch.epoch_order(epoch).tolist()


@settings(max_examples=60)
@given(**SHAPES)
def test_other_worlds_continue_with_the_same_global_batches(**shape: int) -> None:
    plan = make(**shape)
    size = plan.native.global_batch
    for world in (w for w in (1, 2, 3, 4, 6) if size % w == 0):
        other = Plan(
            samples=plan.native.samples,
            batch_size=size // world,
            world_size=world,
            order_world=plan.native.world,
            epochs=plan.native.epochs,
            seed=shape["seed"],
            order=SubBatches(shape["resident"], shape["reuse"], shape["together"]),
        )
        for epoch in range(shape["reuse"] + 1):
            assert other.epoch_order(epoch).tolist() == plan.epoch_order(epoch).tolist()


def test_the_order_is_pinned() -> None:
    plan = Plan(
        samples=13, batch_size=2, world_size=2, epochs=4, seed=5, order=SubBatches(2, 2, together=1)
    )
    assert [plan.epoch_order(e).tolist() for e in range(3)] == GOLDEN


def test_reuse_distance_and_bytes_shrink() -> None:
    samples, sizes = 1024, np.full(1024, 10, np.uint64)
    common: dict[str, Any] = {"samples": samples, "batch_size": 8, "world_size": 4, "epochs": 8}
    torch = Plan(**common)
    assert torch.reuse_distances().mean() == pytest.approx(samples - 1, rel=0.01)
    assert len(torch.reuse_distances()) == 7 * samples
    # 32 batches of 32; 4 of them resident, twice: half the uses follow within two passes.
    reused = Plan(**common, order=SubBatches(4, 2, together=4))
    distances = reused.reuse_distances()
    assert len(distances) == 7 * samples
    assert (distances < 2 * 4 * 32).mean() > 0.5
    # Room for one chunk: every byte is read once in a round instead of once in an epoch.
    room = 4 * 32 * 10
    assert torch.lower_bound(sizes, 0) == 8 * samples * 10
    assert reused.lower_bound(sizes, 0) <= 8 * samples * 10 // 2 + 7 * room


def test_reuse_distances_of_an_order_worked_out_by_hand() -> None:
    plan = Plan(samples=3, epochs=2, order=[0, 1, 0, 2, 2])
    #            0 1 0 2 2 0 1 0 2 2: 0 after 1, 2, 1; 1 after 4; 2 after 0, 3, 0
    assert sorted(plan.reuse_distances().tolist()) == [0, 0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("order", "more", "match"),
    [
        (SubBatches(4, 2, together=3), {}, "do not divide"),
        (SubBatches(4, 2), {"scheme": "whole"}, "uniform"),
        (SubBatches(4, 2), {"order_world": 3}, "no equal sub-batches"),
        (SubBatches(2**31 - 1, 2), {}, "resident"),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    order: SubBatches, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        Plan(samples=64, batch_size=4, world_size=4, order=order, **more)
    for bad in ({"resident": 0}, {"resident": 2, "reuse": 0}, {"resident": 2, "together": -1}):
        with pytest.raises(UsageError, match="integer"):
            SubBatches(**bad)


def test_fingerprints_tell_them_apart() -> None:
    found = {
        Plan(samples=64, batch_size=4, world_size=4, order=order).fingerprint
        for order in ("torch", SubBatches(4), SubBatches(5), SubBatches(4, 3), SubBatches(4, 2, 2))
    }
    assert len(found) == 5


GOLDEN: list[list[int]] = [
    [1, 7, 2, 8, 12, 11, 0, 4, 1, 11, 2, 4, 6, 1],
    [12, 7, 0, 8, 5, 9, 3, 10, 5, 9, 3, 10, 6, 1],
    [0, 10, 9, 5, 11, 1, 12, 7, 0, 1, 9, 7, 2, 0],
]
