"""Orders that draw samples: as docs/formats/order.md says, the same for all ranks and after a break."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nostall
import nostall.torch
from nostall import Buckets, ClassBalanced, Plan, RepeatedAugmentation, SubBatches, Weighted
from nostall.errors import UsageError
from nostall.plan import Mixed

WEIGHTS = [0.0, 1.0, 2.5, 0.125, 0.0, 7.0, 1e-3, 3.0]
# Of the format: seed 7, epochs 0 and 1.
WITH = [[7, 2, 2, 2, 7, 5, 2, 7], [5, 5, 2, 5, 5, 3, 5, 5]]
WITHOUT = [[2, 7, 5, 3, 1, 6], [5, 2, 7, 1, 3, 6]]


def philox(counter: tuple[int, int, int, int], seed: int) -> list[int]:
    """Philox4x32-10."""
    c, key = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (b >> 32) ^ c[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ c[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def bits(seed: int, epoch: int, number: int, stream: int) -> int:
    words = philox((number & 0xFFFFFFFF, number >> 32, epoch, stream), seed)
    return (words[1] << 32 | words[0]) >> 11


def with_replacement(weights: list[float], draws: int, seed: int, epoch: int) -> list[int]:
    sums = np.cumsum(np.asarray(weights, np.float64))  # adds one after the other
    wanted = [bits(seed, epoch, i, 0x77676874) * 2.0**-53 * sums[-1] for i in range(draws)]
    return [int(np.searchsorted(sums, w, side="right")) for w in wanted]


def without_replacement(weights: list[float], draws: int, seed: int, epoch: int) -> list[int]:
    times = [
        (-math.log((bits(seed, epoch, s, 0x77616974) + 0.5) * 2.0**-53) / weight, s)
        for s, weight in enumerate(weights)
        if weight > 0
    ]
    return [s for _, s in sorted(times)[:draws]]


def orders(order: Any, samples: int, epochs: int = 2, **options: Any) -> list[list[int]]:
    plan = Plan(samples=samples, epochs=epochs, order=order, **options)
    assert plan.epoch_length == len(plan.epoch_order(0))
    return [plan.epoch_order(epoch).tolist() for epoch in range(epochs)]


def test_draws_are_those_of_the_format() -> None:
    n = len(WEIGHTS)
    assert orders(Weighted(WEIGHTS), n, seed=7) == WITH
    assert orders(Weighted(WEIGHTS, replacement=False), n, seed=7) == WITHOUT
    random = np.random.default_rng(0)
    for weights in (random.random(500), random.pareto(0.5, 300), np.repeat([0.0, 1, 0], 100)):
        listed = weights.tolist()
        positive = int((weights > 0).sum())
        for seed in (0, 2**40 + 1):
            drawn = orders(Weighted(weights, samples=1000), len(weights), seed=seed)
            chosen = orders(
                Weighted(weights, samples=positive // 2, replacement=False), len(weights), seed=seed
            )
            for epoch in range(2):
                assert drawn[epoch] == with_replacement(listed, 1000, seed, epoch)
                assert chosen[epoch] == without_replacement(listed, positive // 2, seed, epoch)


def test_frequencies_follow_the_weights() -> None:
    n, draws = 100, 200_000
    weights = np.arange(n, dtype=np.float64)
    expected = draws * weights / weights.sum()
    (order,) = orders(Weighted(weights, samples=draws), n, epochs=1, seed=3)
    counts = np.bincount(order, minlength=n)
    assert counts[0] == 0
    # Chi-square of 98 degrees of freedom; this seed's value, which nothing but the seed decides.
    chi = float(((counts[1:] - expected[1:]) ** 2 / expected[1:]).sum())
    assert 60 < chi < 145
    # Without replacement the first place is drawn by weight, too.
    plan = Plan(samples=4, epochs=4000, seed=1, order=Weighted([1, 2, 3, 4], 2, replacement=False))
    pairs = [tuple(plan.epoch_order(epoch).tolist()) for epoch in range(4000)]
    firsts = Counter(first for first, _ in pairs)
    assert all(abs(firsts[i] - 400 * (i + 1)) < 120 for i in range(4))
    seconds = Counter(second for first, second in pairs if first == 3)
    assert all(abs(seconds[i] - firsts[3] * (i + 1) / 6) < 90 for i in range(3))
    assert all(a != b for a, b in pairs)


def test_classes_are_balanced() -> None:
    labels = np.repeat([3, 8, -1], [970, 20, 10])
    (order,) = orders(ClassBalanced(labels, samples=30_000), 1000, epochs=1, seed=0)
    counts = Counter(labels[order].tolist())
    assert all(abs(counts[label] - 10_000) < 300 for label in (3, 8, -1))
    assert len(orders(ClassBalanced(labels), 1000)[0]) == 1000


def as_timm(samples: int, world: int, rank: int, epoch: int, times: int) -> list[int]:
    """RASampler of DeiT, RepeatAugSampler of timm."""
    generator = torch.Generator()
    generator.manual_seed(epoch)
    indices = torch.repeat_interleave(torch.randperm(samples, generator=generator), times).tolist()
    each = math.ceil(samples * times / world)
    indices += indices[: each * world - len(indices)]
    return indices[rank : each * world : world][: samples // 256 * 256 // world]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_repeated_augmentation_is_that_of_timm(world: int) -> None:
    for samples, times in ((1000, 3), (256, 3), (600, 1), (777, 5)):
        plan = Plan(
            samples=samples,
            batch_size=16,
            world_size=world,
            epochs=2,
            order=RepeatedAugmentation(times),
        )
        for epoch in range(2):
            for rank in range(world):
                ids, _ = plan.rank_epoch(epoch, rank)
                assert ids.tolist() == as_timm(samples, world, rank, epoch, times)
    small = orders(RepeatedAugmentation(2), 5, world_size=2)
    assert len(small[0]) == 4
    assert small[0][::2] == small[0][1::2]


ALL: list[tuple[Any, int]] = [
    (Weighted(np.arange(300.0), samples=500), 300),
    (Weighted(np.arange(300.0), samples=200, replacement=False), 300),
    (RepeatedAugmentation(3), 300),
    (Buckets(np.arange(300) % 17, 4), 300),
    (Mixed((100, 200), ((0, (0.5, 0.5)), (7, (0.1, 0.9)))), 300),
    (Mixed((100, 200), ((0, (0.5, 0.5)),), at_end="stop"), 300),
]


@pytest.mark.parametrize(
    ("order", "samples"), ALL, ids=["weighted", "without", "repeated", "bucketed", "mixed", "stop"]
)
def test_what_follows_from_the_order(order: Any, samples: int) -> None:
    sizes = np.arange(1, samples + 1, dtype=np.uint64)
    plan = Plan(samples=samples, batch_size=5, world_size=4, epochs=3, seed=2, order=order)
    epochs = [set(plan.epoch_order(epoch).tolist()) for epoch in range(3)]
    # Global batches are the same whatever the number of ranks; ranks share each of them out.
    other = Plan(
        samples=samples, batch_size=10, world_size=2, epochs=3, seed=2, order=order, order_world=4
    )
    assert other.epoch_order(2).tolist() == plan.epoch_order(2).tolist()
    taken = [plan.rank_epoch(1, rank)[0] for rank in range(4)]
    assert Counter(np.concatenate(taken).tolist()) == Counter(plan.epoch_order(1).tolist())
    # The fewest bytes: what is read at all with room for everything, each epoch's own without.
    everything = int(sizes.sum())
    assert plan.lower_bound(sizes, everything) == sum(int(sizes[i]) for i in set.union(*epochs))
    assert plan.lower_bound(sizes, 0) == sum(int(sizes[i]) for epoch in epochs for i in epoch)
    # Accesses, places and owners are of what is read, and of nothing else.
    frequency, first = plan.node_access(0, 4)
    uses = Counter(i for epoch in range(3) for i in plan.epoch_order(epoch).tolist())
    assert {i: int(f) for i, f in enumerate(frequency) if f} == dict(uses)
    assert {int(i) for i in np.flatnonzero(first != 2**64 - 1)} == set(uses)
    tier, _, _ = plan.place(sizes, [everything], first_rank=0, ranks=4)
    assert {int(i) for i in np.flatnonzero(tier != 255)} == set(uses)
    owners = plan.owners(sizes, [everything] * 2, ranks_per_node=2)
    assert {int(i) for i in np.flatnonzero(owners != 2**32 - 1)} == set(uses)


def test_steps_end_within_an_epoch() -> None:
    whole = Plan(samples=100, batch_size=4, world_size=2, epochs=3, seed=1)
    plan = Plan(samples=100, batch_size=4, world_size=2, steps=2 * len(whole) + 3, seed=1)
    assert plan.native.epochs == 3
    assert [plan.batches_in(epoch) for epoch in range(4)] == [13, 13, 3, 0]
    assert plan.epoch_order(1).tolist() == whole.epoch_order(1).tolist()
    assert plan.epoch_order(2).tolist() == whole.epoch_order(2)[:24].tolist()
    sizes = np.ones(100, np.uint64)
    assert plan.lower_bound(sizes, 0) == 2 * 100 + 24
    assert int(plan.node_access(0, 2)[0].sum()) == 100 * 2 + 24
    ids, ends = plan.rank_epoch(2, 1)
    assert (len(ids), ends.tolist()) == (12, [4, 8, 12])
    assert Plan(samples=100, steps=100).fingerprint != Plan(samples=100, epochs=1).fingerprint


# --------------------------------------------------------------------------------------- the loader


def numbered(root: Path, samples: int, **options: Any) -> nostall.DataLoader:
    for i in range(samples):
        (root / f"{i:03d}").write_bytes(b"x" * i)
    source = nostall.FileList([f"{i:03d}" for i in range(samples)], range(samples), root=root)
    batch = options.pop("batch", 4)
    return nostall.DataLoader(source, batch, **{"output": "numpy", "tiers": "ram:1MiB", **options})


def taken(batches: Any) -> list[int]:
    return [label for _, labels in batches for label in labels.tolist()]


@pytest.mark.parametrize(
    "order", [Weighted(range(40), 50), RepeatedAugmentation(3), ClassBalanced(samples=30)]
)
def test_a_loader_follows_the_order(tmp_path: Path, order: Any) -> None:
    options: dict[str, Any] = {"seed": 5, "epochs": 2, "order": order}
    with numbered(tmp_path, 40, **options) as loader:
        wanted = [v for epoch in range(2) for v in loader.plan.epoch_order(epoch).tolist()]
        assert [v for epoch in loader.epochs() for v in taken(epoch)] == wanted
        assert loader.stats().lower_bound_bytes == sum(set(wanted))
    with numbered(tmp_path, 40, **options) as begun:
        batches = iter(begun)
        first = taken(next(batches) for _ in range(3))
        state = begun.state_dict()
    ranks = []
    for rank in (0, 1):
        with numbered(
            tmp_path, 40, batch=2, rank=rank, world_size=2, peers="off", **options
        ) as half:
            half.load_state_dict(state)
            ranks.append([v for epoch in half.epochs() for v in taken(epoch)])
    both = [v for pair in zip(*ranks, strict=True) for v in pair]
    assert first + both == wanted
    other = Weighted(range(40), 51)
    with (
        numbered(tmp_path, 40, **{**options, "order": other}) as refused,
        pytest.raises(UsageError, match="order="),
    ):
        refused.load_state_dict(state)


def test_each_occurrence_is_augmented_in_its_own_way(image_folder: Path) -> None:
    crops = [nostall.transforms.RandomResizedCrop(8), nostall.transforms.ToTensor()]
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False),
        15,
        epochs=1,
        transforms=crops,
        order=RepeatedAugmentation(3),
        output="numpy",
        tiers=[],
    ) as loader:
        images, labels = next(iter(loader))
    for group in range(0, 15, 3):
        assert len(set(labels[group : group + 3].tolist())) == 1
        assert len({image.tobytes() for image in images[group : group + 3]}) == 3


def test_a_loader_of_steps(tmp_path: Path) -> None:
    with numbered(tmp_path, 30, epochs=3, seed=2) as whole:
        wanted = taken(b for epoch in whole.epochs() for b in epoch)
    with numbered(tmp_path, 30, steps=19, seed=2) as loader:  # 8 batches in an epoch
        assert len(loader) == 19
        assert [len(epoch) for epoch in loader.epochs()] == [8, 8, 3]
        loader.set_epoch(0)
        batches = list(loader)
        assert len(batches) == 19
        assert taken(batches) == wanted[: 60 + 12]
        with pytest.raises(UsageError, match="this job of 19 steps has ended"):
            next(iter(loader))
        assert "steps=19" in repr(loader)
    with numbered(tmp_path, 30, steps=19, seed=2) as begun:
        batches = iter(begun)
        first = taken(next(batches) for _ in range(17))
        state = begun.state_dict()
    with numbered(tmp_path, 30, epochs=4, seed=2) as longer:
        longer.set_epoch(3)
        wanted += taken([next(iter(longer))])
    for steps, length in ((19, 72), (25, 94)):
        with numbered(tmp_path, 30, steps=steps, seed=2) as resumed:
            resumed.load_state_dict(state)
            assert first + taken(resumed) == wanted[:length]
    with (
        numbered(tmp_path, 30, steps=16, seed=2) as shorter,
        pytest.raises(UsageError, match="outside this job of 16 steps"),
    ):
        shorter.load_state_dict(state)
    # A state of the last step: nothing is left.
    with numbered(tmp_path, 30, steps=19, seed=2) as last:
        batches = iter(last)
        for _ in range(19):
            next(batches)
        state = last.state_dict()
    with numbered(tmp_path, 30, steps=19, seed=2) as ended:
        ended.load_state_dict(state)
        with pytest.raises(UsageError, match="this job of 19 steps has ended"):
            next(iter(ended))


def test_steps_that_end_within_an_epoch_can_be_extended(tmp_path: Path) -> None:
    with numbered(tmp_path, 16, epochs=3) as whole:
        wanted = taken(b for epoch in whole.epochs() for b in epoch)
    with numbered(tmp_path, 16, steps=6) as loader:  # 4 batches in an epoch
        assert taken(loader) == wanted[:24]
        state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 2)
    with numbered(tmp_path, 16, steps=6) as same:
        same.load_state_dict(state)
        with pytest.raises(UsageError, match="this job of 6 steps has ended"):
            next(iter(same))
    with numbered(tmp_path, 16, steps=9) as longer:
        longer.load_state_dict(state)
        assert taken(longer) == wanted[24:36]
    with numbered(tmp_path, 16, steps=6) as untouched:
        *_, last = untouched.epochs()
        assert untouched.position == (0, 0)
        assert len(list(last)) == 2 and untouched.position == (1, 2)


def test_steps_in_slices(tmp_path: Path) -> None:
    with numbered(tmp_path, 16, epochs=3) as whole:
        wanted = taken(b for epoch in whole.epochs() for b in epoch)
    with numbered(tmp_path, 16, steps=10) as loader:  # 4 batches in an epoch
        found = [taken(itertools.islice(loader, 3)) for _ in range(4)]
        assert [len(part) for part in found] == [12, 12, 12, 4]
        assert [label for part in found for label in part] == wanted[:40]
        with pytest.raises(UsageError, match="this job of 10 steps has ended"):
            next(iter(loader))


def test_growing_batches_of_drawn_orders(tmp_path: Path) -> None:
    order = Weighted(range(20), 23)
    with numbered(tmp_path, 20, steps=9, order=order, transforms=lambda _: np.zeros(1)) as loader:
        plan = [v for epoch in range(2) for v in loader.plan.epoch_order(epoch).tolist()]
        batches = nostall.DynamicBatches(loader, threshold=1.0, limit=4)
        found = []
        for _, epoch in batches.epochs():
            found.append([labels.tolist() for _, labels in epoch])
            batches.report(0.0), batches.report(0.0)
    assert [[len(labels) for labels in epoch] for epoch in found] == [[4] * 5 + [3], [8, 4]]
    assert [v for epoch in found for labels in epoch for v in labels] == plan


# ---------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_drawn(tmp_path: Path, image_folder: Path) -> None:
    floats = nostall.FileList(sorted(image_folder.rglob("*.jpg"))[:3], [0.5, 1.5, 2.5])
    source = nostall.ImageFolder(image_folder, index=False)
    refused: list[tuple[Any, str]] = [
        (lambda: Weighted([1, -2, 3]), "weight of sample 1 is -2.0"),
        (lambda: Weighted([1, float("nan")]), "weight of sample 1 is nan"),
        (lambda: Weighted([1, float("inf")]), "weight of sample 1 is inf"),
        (lambda: Weighted([0, 0]), "all weights are 0"),
        (lambda: Weighted([]), "not float64 of shape|all weights are 0"),
        (lambda: Weighted([[1]]), r"shape \(1, 1\)"),
        (lambda: Weighted(["a"]), "one number per sample"),
        (lambda: Weighted([1], samples=0), "samples must be an integer from 1 on"),
        (lambda: Weighted([1, 0], samples=2, replacement=False), "without replacement from 1"),
        (lambda: Plan(samples=3, order=Weighted([1, 2])), "2 weights for 3 samples"),
        (lambda: Plan(samples=2, order=Weighted([1e308] * 2)), "sum of the weights is beyond"),
        (lambda: Plan(samples=3, order=ClassBalanced()), "pass labels="),
        (lambda: Plan(samples=3, order=ClassBalanced([1, 2])), "2 weights for 3 samples"),
        (lambda: ClassBalanced([0.5]), "integers, one per sample"),
        (lambda: nostall.DataLoader(floats, 1, order=ClassBalanced()), "not by float64"),
        (lambda: RepeatedAugmentation(0), "times must be"),
        (lambda: RepeatedAugmentation(True), "times must be .*: True"),
        (lambda: SubBatches(True), "resident must be .*: True"),
        (lambda: Weighted([1], samples=True), "samples must be .*: True"),
        (
            lambda: Weighted([1], replacement="no"),  # type: ignore[arg-type]
            "replacement must be True or False, not 'no'",
        ),
        *(
            (
                lambda bounds=bounds: Buckets(bounds=bounds),
                "bounds= must be a number of buckets, or",
            )
            for bounds in (2.5, "16", ["1", "2"], True, [True], None, [[1], [1, 2]])
        ),
        (lambda: Plan(samples=3, steps=0), "steps must be"),
        (lambda: Plan(samples=3, batch_size=4, drop_last=True, steps=1), "an epoch has none"),
        (lambda: nostall.DataLoader(source, 4, steps=5, epochs=2), "epochs=2 and steps=5 both"),
        (lambda: nostall.DataLoader(source, 4, steps=0), "steps"),
        (
            lambda: nostall.DataLoader(source, 4, order=RepeatedAugmentation(), shuffle=False),
            "shuffle=False does not go with order=",
        ),
    ]
    for make, why in refused:
        with pytest.raises(UsageError, match=why):
            make()


@pytest.mark.parametrize("make", [Weighted, Buckets, ClassBalanced, list])
def test_numbers_may_be_tensors_that_numpy_does_not_take(make: Any) -> None:
    numbers = torch.tensor([1, 3, 2, 3])
    if make in (Weighted, Buckets):
        given = numbers.to(torch.bfloat16).requires_grad_()
        plain = numbers.double().numpy()
    else:

        class OnDevice:
            """Of a device; NumPy refuses those of CUDA with the same error."""

            def __array__(self, *_: object, **__: object) -> None:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")

            def detach(self) -> Any:
                return numbers

        given, plain = OnDevice(), numbers.numpy()
    orders = [given, plain] if make is list else [make(given), make(plain)]
    one, other = (Plan(samples=4, order=order, seed=3).epoch_order(0) for order in orders)
    assert one.tolist() == other.tolist()


def test_numbers_and_flags_of_numpy_are_taken() -> None:
    assert SubBatches(np.int64(4), np.int32(2), np.uint8(1)) == SubBatches(4, 2, 1)
    assert type(RepeatedAugmentation(np.int64(3)).times) is int  # type: ignore[arg-type]
    assert not Weighted([1], replacement=np.bool_(False)).replacement  # type: ignore[arg-type]
    assert Buckets(range(9), np.int64(3)).numbers.tolist() == Buckets(range(9), 3).numbers.tolist()  # type: ignore[arg-type]
    assert not len(Plan(samples=3, batch_size=4, drop_last=np.bool_(True)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="drop_last must be True or False, not 1"):
        Plan(samples=3, drop_last=1)  # type: ignore[arg-type]
    sampler = nostall.torch.BatchSampler(
        np.int64(8),
        4,
        seed=np.int64(1),
        drop_last=np.bool_(True),  # type: ignore[arg-type]
    )
    assert json.loads(json.dumps(sampler.state_dict())) == sampler.state_dict()
