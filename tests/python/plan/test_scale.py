"""What makes planning fast changes no value: everything against plain references."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nostall import _native
from nostall.plan import Plan

NEVER = 2**64 - 1
NO_OWNER = 2**32 - 1


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (b >> 32) ^ c[1] ^ k[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ c[3] ^ k[1],
            a & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def keyed_order(n: int, seed: int, epoch: int) -> list[int]:
    """The order "keyed", as docs/formats/order.md states it."""
    b = max(1, math.isqrt(n))
    a = -(-n // b)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    keys = [k for i in (0, 1) for k in philox((i, epoch, 0x4B657965, 0), key)]

    def h(x: int, k: int, bound: int) -> int:
        x = (x ^ k) * 0x85EBCA6B & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0xC2B2AE35 & 0xFFFFFFFF
        x ^= x >> 13
        return x * bound >> 32

    def forward(x: int) -> int:
        left, right = divmod(x, b)
        for i in range(0, 8, 2):
            left = (left + h(right, keys[i], a)) % a
            right = (right + h(left, keys[i + 1], b)) % b
        return left * b + right

    order = []
    for x in range(n):
        y = forward(x)
        while y >= n:
            y = forward(y)
        order.append(y)
    return order


def accesses(plan: Plan, ranks_per_node: int, nodes: int) -> dict[int, list[tuple[int, int]]]:
    """For each sample its accesses as (time, node), in order of time; from the ranks' own strings."""
    found: dict[int, list[tuple[int, int]]] = {}
    length, batch = plan.epoch_length, plan.native.global_batch
    for epoch in range(plan.native.epochs):
        order = plan.epoch_order(epoch)
        for begin in range(0, length, batch):
            for p in range(begin, min(begin + batch, length)):
                node = (p - begin) % plan.native.world // ranks_per_node
                found.setdefault(int(order[p]), []).append((epoch * length + p, node))
    assert nodes * ranks_per_node == plan.native.world
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 31, 255, 257, 1000, 4096, 4099])
def test_the_keyed_order_is_the_documented_one(n: int) -> None:
    seed = 0x1234567890 + n
    plan = Plan(samples=n, order="keyed", seed=seed, epochs=3)
    one = _native.KeyedPermutation(n, seed, 2)
    expected = keyed_order(n, seed, 2)
    assert plan.epoch_order(2).tolist() == expected
    assert [one(x) for x in range(n)] == expected


@pytest.mark.parametrize("order", ["torch", "keyed"])
@pytest.mark.parametrize("drop_last", [False, True])
# With 40 and 64 ranks a node reads so little that single positions are looked up.
@pytest.mark.parametrize(("samples", "world"), [(997, 4), (1003, 40), (1500, 64), (5, 32)])
def test_a_nodes_accesses_are_those_of_its_ranks(
    order: str, drop_last: bool, samples: int, world: int
) -> None:
    if drop_last and samples < world:
        drop_last = False  # nothing would be left
    plan = Plan(
        samples=samples,
        batch_size=3,
        world_size=world,
        epochs=5,
        seed=11,
        order=order,
        drop_last=drop_last,
    )
    found = accesses(plan, 2, world // 2)
    for node in {0, world // 4, world // 2 - 1}:
        frequency, first = plan.node_access(2 * node, 2)
        for s in range(samples):
            mine = [time for time, reader in found.get(s, []) if reader == node]
            assert frequency[s] == len(mine)
            assert first[s] == (min(mine) if mine else NEVER)


@pytest.mark.parametrize("order", ["torch", "keyed"])
@pytest.mark.parametrize("nodes", [4, 300])  # a node's number takes one byte or two
@pytest.mark.parametrize("share", [0.7, 2.0])  # nodes fill up, or have room for all
def test_owners_are_those_of_the_rule(order: str, nodes: int, share: float) -> None:
    samples = 2400
    plan = Plan(samples=samples, batch_size=2, world_size=2 * nodes, epochs=9, seed=5, order=order)
    sizes = np.random.default_rng(0).integers(50, 150, samples).astype(np.uint64)
    capacity = int(sizes.sum() * share) // nodes
    owners = plan.owners(sizes, [capacity] * nodes, ranks_per_node=2)

    ranking = []
    for s, reads in accesses(plan, 2, nodes).items():
        counts: dict[int, int] = {}
        for _, node in reads:
            counts[node] = counts.get(node, 0) + 1
        # Most reads first; among equals the one that reads first, which sorted() keeps.
        preferred = sorted(counts, key=lambda node: -counts[node])
        ranking.append((-counts[preferred[0]], reads[0][0], s, preferred))
    left = [capacity] * nodes
    expected = np.full(samples, NO_OWNER, dtype=np.uint32)
    without_reader = []
    for _, _, s, preferred in sorted(ranking):
        fitting = [node for node in preferred if left[node] >= sizes[s]]
        if not fitting and owners[s] != NO_OWNER:
            # Any node with room: which one is not part of the rule.
            assert left[owners[s]] >= sizes[s]
            fitting = [int(owners[s])]
            without_reader.append(s)
        if fitting:
            expected[s] = fitting[0]
            left[fitting[0]] -= int(sizes[s])
        else:
            assert all(room < sizes[s] for room in left)
    assert np.array_equal(owners, expected)
    if share > 1 and nodes == 4:
        assert not without_reader
