"""Orders are torch's, shares partition them, placement and bounds keep their promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nostall import Plan, Weighted, _native
from nostall.errors import UsageError


def batches(plan: Plan, epoch: int, rank: int) -> list[list[int]]:
    ids, ends = plan.rank_epoch(epoch, rank)
    starts = [0, *ends.tolist()][:-1]
    return [ids[a:b].tolist() for a, b in zip(starts, ends.tolist(), strict=True)]


@settings(max_examples=400)
@given(
    samples=st.integers(1, 700),
    world=st.integers(1, 9),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    drop=st.booleans(),
)
def test_every_rank_gets_the_batches_of_torch(
    samples: int, world: int, batch: int, seed: int, epoch: int, drop: bool
) -> None:
    plan = Plan(
        samples=samples,
        batch_size=batch,
        world_size=world,
        epochs=epoch + 1,
        seed=seed,
        drop_last=drop,
    )
    for rank in range(world):
        sampler = DistributedSampler(
            range(samples), num_replicas=world, rank=rank, seed=seed, drop_last=drop
        )
        sampler.set_epoch(epoch)
        expected = [
            b.tolist()
            for b in DataLoader(range(samples), batch_size=batch, sampler=sampler, drop_last=drop)
        ]
        assert batches(plan, epoch, rank) == expected
        assert len(plan) == len(expected)


@settings(max_examples=150)
@given(
    samples=st.integers(1, 300),
    order_world=st.integers(1, 6),
    per_rank=st.integers(1, 6),
    drop=st.booleans(),
    seed=st.integers(0, 99),
)
def test_global_batches_do_not_depend_on_how_many_ranks_share_them(
    samples: int, order_world: int, per_rank: int, drop: bool, seed: int
) -> None:
    total = order_world * per_rank
    seen = set()
    for world in [w for w in range(1, total + 1) if total % w == 0]:
        plan = Plan(
            samples=samples,
            batch_size=total // world,
            world_size=world,
            seed=seed,
            drop_last=drop,
            order_world=order_world,
        )
        parts = [batches(plan, 0, r) for r in range(world)]
        seen.add(tuple(tuple(sorted(sum(b, []))) for b in zip(*parts, strict=True)))  # noqa: RUF017
    assert len(seen) == 1


@settings(max_examples=100)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 99))
def test_keyed_permutation_is_a_bijection_with_an_inverse(n: int, seed: int, epoch: int) -> None:
    permutation = _native.KeyedPermutation(n, seed, epoch)
    images = [permutation(i) for i in range(n)]
    assert sorted(images) == list(range(n))
    assert all(permutation.inverse(x) == i for i, x in enumerate(images))
    plan = Plan(samples=n, epochs=epoch + 1, seed=seed, order="keyed")
    assert plan.epoch_order(epoch).tolist() == images


def test_keyed_permutation_mixes() -> None:
    n = 100_000
    order = Plan(samples=n, seed=1, order="keyed").epoch_order(0).astype(np.int64)
    other = Plan(samples=n, seed=2, order="keyed").epoch_order(0).astype(np.int64)
    # Of a random permutation about one element stays, and neighbours are n/3 apart on average.
    assert (order == np.arange(n)).sum() < 12
    assert (order == other).sum() < 12
    assert abs(np.abs(np.diff(order)).mean() / (n / 3) - 1) < 0.02


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_schemes_divide_the_batch_as_stated(world: int) -> None:
    samples, batch = 96, 24
    for scheme in ("uniform", "imbalanced", "whole"):
        plan = Plan(
            samples=samples, batch_size=batch // world, world_size=world, scheme=scheme, seed=3
        )
        order = plan.epoch_order(0).tolist()
        for h in range(len(plan)):
            parts = [batches(plan, 0, r)[h] for r in range(world)]
            expected = order[h * batch : (h + 1) * batch]
            if scheme == "whole":
                assert all(p == expected for p in parts)
            else:
                assert sorted(x for p in parts for x in p) == sorted(expected)
            if scheme == "imbalanced" and world == 4:
                assert [len(p) for p in parts] == [9, 10, 2, 3]


def cached_reads(plan: Plan, epochs: int, sizes: np.ndarray, keep: set[int]) -> int:
    """Bytes read by the policy that never evicts what it keeps."""
    seen: set[int] = set()
    read = 0
    for epoch in range(epochs):
        for s in set(plan.epoch_order(epoch).tolist()):
            if s not in seen or s not in keep:
                read += int(sizes[s])
            seen.add(s)
    return read


@settings(max_examples=150)
@given(
    samples=st.integers(1, 60),
    world=st.integers(1, 4),
    epochs=st.integers(1, 6),
    share=st.floats(0, 1.2),
    drop=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_lower_bound_is_one_and_is_reached(
    samples: int, world: int, epochs: int, share: float, drop: bool, seed: int
) -> None:
    plan = Plan(
        samples=samples, batch_size=2, world_size=world, epochs=epochs, seed=seed, drop_last=drop
    )
    sizes = np.random.default_rng(seed).integers(1, 50, samples).astype(np.uint64)
    capacity = int(share * int(sizes.sum()))
    bound = plan.lower_bound(sizes, capacity)
    tiers, _, used = plan.place(sizes, [capacity], first_rank=0, ranks=world)
    keep = {i for i in range(samples) if tiers[i] == 0}
    assert used[0] == sizes[list(keep)].sum() <= capacity
    reached = cached_reads(plan, epochs, sizes, keep)
    assert bound <= reached
    if plan.epoch_length >= samples:
        total = int(sizes.sum())
        assert bound == total + (epochs - 1) * max(0, total - capacity)
        # Whole samples leave less than one of them unused, in every epoch.
        assert reached <= bound + (epochs - 1) * int(sizes.max())


@settings(max_examples=60)
@given(
    batches=st.integers(1, 12),
    epochs=st.integers(2, 5),
    begin=st.tuples(st.integers(0, 1), st.integers(0, 12)),
    share=st.floats(0, 1.2),
    seed=st.integers(0, 99),
)
def test_the_lower_bound_of_a_job_that_goes_on(
    batches: int, epochs: int, begin: tuple[int, int], share: float, seed: int
) -> None:
    epoch, batch = begin[0], min(begin[1], batches)
    plan = Plan(samples=4 * batches, batch_size=2, world_size=2, epochs=epochs, seed=seed)
    sizes = np.random.default_rng(seed).integers(1, 50, 4 * batches).astype(np.uint64)
    total, capacity = int(sizes.sum()), int(share * int(sizes.sum()))
    rest = int(sizes[plan.epoch_order(epoch)[4 * batch :]].sum())
    bound = plan.lower_bound(sizes, capacity, first_epoch=epoch, first_batch=batch)
    expected = rest
    if epoch + 1 < epochs:  # the next one finds of the rest what can be kept
        expected += total - min(rest, capacity)
        expected += (epochs - epoch - 2) * max(0, total - capacity)
    assert bound == expected


@pytest.mark.parametrize("order", ["torch", "keyed", "sequential"])
@pytest.mark.parametrize("scheme", list(_native.Scheme))
def test_a_batch_larger_than_the_epoch_costs_no_more_than_the_epoch(
    order: Any, scheme: Any
) -> None:
    """No memory has room for one of 2**60 samples."""
    whole, larger = (Plan(samples=10, batch_size=5, world_size=2, order=order) for _ in range(2))
    larger.native.global_batch = 2**60
    sizes = np.arange(1, 11, dtype=np.uint64)
    for plan in whole, larger:
        plan.native.scheme = scheme
    for rank in range(2):
        assert batches(larger, 0, rank) == batches(whole, 0, rank)
        tiers, offsets, _ = larger.place(sizes, [20], first_rank=rank, ranks=1)
        expected = whole.place(sizes, [20], first_rank=rank, ranks=1)
        assert tiers.tolist() == expected[0].tolist()
        assert offsets.tolist() == expected[1].tolist()
    for plan in whole, larger:
        owners = plan.owners(sizes, [30, 30], ranks_per_node=1)
        assert owners.tolist() == whole.owners(sizes, [30, 30], ranks_per_node=1).tolist()


def test_more_epochs_than_16_bits_count_have_owners() -> None:
    plan = Plan(samples=2, batch_size=1, world_size=2, epochs=2**16, order="sequential")
    assert plan.owners(np.ones(2, np.uint64), [1, 1], ranks_per_node=1).tolist() == [0, 1]


def least_of(order: list[list[int]], sizes: list[int], capacity: int) -> int:
    """The bound as a linear program: how much of each sample is kept from one epoch to the next."""
    import scipy.optimize

    uses: dict[int, list[int]] = {}
    for epoch, samples in enumerate(order):
        for sample in set(samples):
            uses.setdefault(sample, []).append(epoch)
    gaps = [(s, a, b) for s, at in uses.items() for a, b in itertools.pairwise(at)]
    read = sum(sizes[s] * len(at) for s, at in uses.items())
    if not gaps:
        return read
    crossed = [[sizes[s] * (a < e <= b) for s, a, b in gaps] for e in range(1, len(order))]
    saved = scipy.optimize.linprog(
        [-sizes[s] for s, _, _ in gaps],
        A_ub=crossed,
        b_ub=[capacity] * len(crossed),
        bounds=(0, 1),
    )
    return read + round(saved.fun)


@settings(max_examples=40)
@given(
    epochs=st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True),
    share=st.floats(0, 1.2),
    seed=st.integers(0, 99),
)
def test_the_lower_bound_of_some_epochs(epochs: list[int], share: float, seed: int) -> None:
    """Of epochs that leave samples out, so that what is kept skips epochs."""
    weights = np.random.default_rng(seed).random(12)
    plan = Plan(samples=12, batch_size=2, epochs=31, seed=seed, order=Weighted(weights))
    sizes = np.random.default_rng(seed).integers(0, 50, 12).astype(np.uint64)
    capacity = int(share * int(sizes.sum()))
    bound = _native.source_bytes_lower_bound(plan.native, sizes, capacity, 0, 0, epochs)
    order = [plan.epoch_order(e).tolist() for e in epochs]
    assert bound == least_of(order, sizes.tolist(), capacity)


@settings(max_examples=60)
@given(
    samples=st.integers(1, 80),
    nodes=st.integers(1, 5),
    epochs=st.integers(1, 8),
    seed=st.integers(0, 99),
    share=st.floats(0.1, 1.5),
)
def test_owners_fill_all_nodes_without_duplicates(
    samples: int, nodes: int, epochs: int, seed: int, share: float
) -> None:
    plan = Plan(samples=samples, batch_size=2, world_size=nodes * 2, epochs=epochs, seed=seed)
    sizes = np.full(samples, 10, dtype=np.uint64)
    capacity = int(share * 10 * samples / nodes) // 10 * 10
    owners = plan.owners(sizes, [capacity] * nodes, ranks_per_node=2)
    owned = [int((owners == n).sum()) * 10 for n in range(nodes)]
    assert all(o <= capacity for o in owned)
    assert sum(owned) == min(samples * 10, capacity * nodes)
    if capacity >= samples * 10:
        counts = np.stack([plan.node_access(2 * n, 2)[0] for n in range(nodes)])
        best = counts.max(axis=0)
        assert (counts[owners, np.arange(samples)] == best).all()


def test_placement_prefers_frequency_then_first_access() -> None:
    plan = Plan(samples=200, batch_size=5, world_size=4, epochs=12, seed=4)
    sizes = np.full(200, 7, dtype=np.uint64)
    frequency, first = plan.node_access(1, 1)
    tiers, offsets, used = plan.place(sizes, [7 * 30, 7 * 50], first_rank=1, ranks=1)
    assert used == [210, 350]
    assert frequency[tiers == 0].min() >= frequency[tiers == 1].max()
    assert frequency[tiers == 1].min() >= frequency[tiers == 255].max()
    for tier in (0, 1):
        inside = np.flatnonzero(tiers == tier)
        by_offset = inside[np.argsort(offsets[inside])]
        assert (np.diff(first[by_offset].astype(np.int64)) > 0).all()
        assert (offsets[by_offset] == np.arange(len(inside)) * 7).all()


def test_frequencies_add_up_to_the_epochs() -> None:
    plan = Plan(samples=101, batch_size=4, world_size=6, epochs=5, seed=9)
    total = sum(plan.node_access(2 * n, 2)[0].astype(int) for n in range(3))
    order = np.concatenate([plan.epoch_order(e) for e in range(5)]).astype(int)
    assert (total == np.bincount(order, minlength=101)).all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples": 0}, "no samples"),
        ({"samples": 5, "epochs": 0}, "epochs"),
        ({"samples": 5, "order": [1, 5]}, "sample 5"),
        ({"samples": 5, "order": "backwards"}, "backwards"),
        ({"samples": 5, "scheme": "fair"}, "fair"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Plan(**arguments)  # type: ignore[arg-type]


def test_torch_is_what_we_compare_with() -> None:
    assert Plan(samples=10, seed=0).epoch_order(0).tolist() == (
        torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.epoch_order(2), "epoch 2 is not among the 2 epochs"),
        (lambda p: p.epoch_order(-1), "epoch -1 is not"),
        (lambda p: p.rank_epoch(0.0, 0), r"epoch 0\.0 is not"),
        (lambda p: p.rank_epoch(0, 3), "rank 3 is not in a world of 3"),
        (lambda p: p.node_access(2, 2), "2 ranks from 2 on are not in a world of 3"),
        (lambda p: p.node_access(0, 0), "0 ranks from 0 on are not"),
        (
            lambda p: p.place(np.ones(9, int), [5], first_rank=0, ranks=1),
            r"not int64 of shape \(9,\)",
        ),
        (lambda p: p.place(np.ones(10, int), [5], first_rank=3, ranks=1), "rank 3 is not"),
        (lambda p: p.owners(np.ones(11, int), [5], ranks_per_node=3), r"shape \(11,\)"),
        (lambda p: p.lower_bound(np.full(10, 0.9), 5), "not float64 of shape"),
        (lambda p: p.lower_bound(np.full(10, -1), 5), "must not be negative: -1"),
        (lambda p: p.consumed(0, 1), "the order is 'torch', which is no Mixed"),
        (lambda p: p.mixed_before(0, 1), "which is no Mixed"),
    ],
)
def test_what_a_plan_has_not_is_refused(call: Callable[[Plan], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(Plan(samples=10, batch_size=2, world_size=3, epochs=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"order_world": 0},
        {"order_world": 1.5},
        {"order_world": "a"},
        {"scheme": 3},
        {"scheme": "__class__"},
        {"batch_size": True},
        {"epochs": True},
    ],
)
def test_arguments_that_cannot_be_planned_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Plan(**{"samples": 10, **wrong})
