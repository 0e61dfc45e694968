"""Mixtures of sources: shares over every prefix, other weights later, ends, and resume."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nostall
from nostall.errors import UsageError
from nostall.plan import Mixed

SIZES = {"web": 60, "code": 25, "books": 9}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, nostall.FileList]:
    """Label 100 s + i is sample i of source s; a sample of source s has s + 1 bytes."""
    made = {}
    for s, (name, count) in enumerate(SIZES.items()):
        root = tmp_path / name
        root.mkdir()
        for i in range(count):
            (root / f"{i:03d}").write_bytes(bytes([s]) * (s + 1))
        paths = [f"{i:03d}" for i in range(count)]
        made[name] = nostall.FileList(paths, range(100 * s, 100 * s + count), root=root)
    return made


def weighted(sources: dict[str, Any], *weights: float) -> dict[Any, float]:
    return dict(zip(sources.values(), weights, strict=True))


def load(dataset: nostall.Source, batch: int = 5, **options: Any) -> nostall.DataLoader:
    return nostall.DataLoader(
        dataset, batch, **{"output": "numpy", "tiers": "ram:1MiB", "seed": 3, **options}
    )


def taken(batches: Any) -> list[int]:
    return [label for _, labels in batches for label in labels.tolist()]


def test_each_prefix_has_its_shares(sources: dict[str, Any]) -> None:
    weights = (0.6, 0.3, 0.1)
    mixture = nostall.Mixture(weighted(sources, *weights), names=list(sources), samples=40)
    with load(mixture, steps=60) as loader:
        labels = taken(loader)
        stats = loader.stats()
    assert len(labels) == 300
    had = [0, 0, 0]
    for n, label in enumerate(labels, 1):
        had[label // 100] += 1
        assert all(abs(h - n * w) < 1 for h, w in zip(had, weights, strict=True))
    assert stats.sources == {
        "web": {"samples": 180, "epoch": 3},
        "code": {"samples": 90, "epoch": 3},
        "books": {"samples": 30, "epoch": 3},
    }
    again = nostall.Stats.from_dict(stats.to_dict())
    assert again.sources == stats.sources
    # Each source comes whole before it comes again, in another order.
    books = [label for label in labels if label >= 200]
    assert sorted(books[:9]) == sorted(books[9:18]) == list(range(200, 209))
    assert books[:9] != books[9:18]


def test_goes_on_on_other_ranks_with_other_weights_from_there(sources: dict[str, Any]) -> None:
    begun = nostall.Mixture(weighted(sources, 0.5, 0.5, 0), samples=30)
    changed = begun.changed(7, weighted(sources, 0.2, 0, 0.8))
    with load(changed, 6, steps=20) as whole:
        wanted = taken(whole)
    with load(begun, 6, steps=20) as loader:
        batches = iter(loader)
        first = taken(next(batches) for _ in range(7))
        state = loader.state_dict()
        late = taken(next(batches) for _ in range(2))
        too_late = loader.state_dict()
    assert first == wanted[:42]
    assert late != wanted[42:54]
    ranks = []
    for rank in (0, 1):
        with load(changed, 3, steps=20, rank=rank, world_size=2, peers="off") as half:
            half.load_state_dict(state)
            ranks.append(taken(half))
    assert [v for pair in zip(*ranks, strict=True) for v in pair] == wanted[42:]
    with load(changed, 6, steps=20) as refused, pytest.raises(UsageError, match="order="):
        refused.load_state_dict(too_late)
    with pytest.raises(UsageError, match="changes after step 3"):
        changed.changed(3, weighted(sources, 1, 0, 0))


def test_an_epoch_may_end_with_its_sources(sources: dict[str, Any]) -> None:
    with load(
        nostall.Mixture(weighted(sources, 1, 1, 1), at_end="reweight"), epochs=2, drop_last=False
    ) as loader:
        one, two = (taken(epoch) for epoch in loader.epochs())
    everything = sorted(100 * s + i for s, n in enumerate(SIZES.values()) for i in range(n))
    assert sorted(one) == sorted(two) == everything
    assert one != two
    assert {label // 100 for label in one[27:50]} == {0, 1}
    assert {label // 100 for label in one[80:]} == {0}
    with load(nostall.Mixture(weighted(sources, 1, 1, 1), at_end="stop"), epochs=1) as loader:
        (only,) = (taken(epoch) for epoch in loader.epochs())
    assert 27 <= len(only) <= 29
    assert only == one[: len(only)]


def test_weights_may_count_bytes_or_be_evened_out(sources: dict[str, Any]) -> None:
    def shares(**options: Any) -> list[float]:
        (_, weights), *_ = nostall.Mixture(weighted(sources, 4, 4, 1), **options).mixing.schedule
        return [w / sum(weights) for w in weights]

    assert shares() == pytest.approx([4 / 9, 4 / 9, 1 / 9])
    assert shares(temperature=2) == pytest.approx([2 / 5, 2 / 5, 1 / 5])
    third = 4 + 2 + 1 / 3
    assert shares(per="bytes") == pytest.approx([4 / third, 2 / third, 1 / 3 / third])


def test_a_changed_mixture_has_what_was_set_on_the_one_before(sources: dict[str, Any]) -> None:
    mixture = nostall.Mixture(weighted(sources, 3, 2, 1), samples=20)
    mixture.pixels, mixture.classes = nostall.Pixels(2, 2), ["cat", "dog"]
    changed = mixture.changed(2, weighted(sources, 0, 1, 1))
    assert (changed.pixels, changed.classes) == (mixture.pixels, mixture.classes)
    assert changed.mixing != mixture.mixing


def test_a_pickled_mixture_has_the_same_order(sources: dict[str, Any]) -> None:
    mixture = nostall.Mixture(weighted(sources, 3, 2, 1), samples=20)
    again = pickle.loads(pickle.dumps(mixture))
    with load(mixture, epochs=1) as one, load(again, epochs=1) as other:
        assert taken(one) == taken(other)
    there, copies = pickle.loads(pickle.dumps((mixture, list(sources.values()))))
    changed = mixture.changed(2, weighted(sources, 0, 1, 1)).mixing
    assert there.changed(2, {copies[1]: 1, copies[2]: 1}).mixing == changed


@pytest.mark.parametrize(
    ("weights", "options", "what"),
    [
        ((1, -1, 1), {}, "is -1: weights are finite and not negative"),
        ((1, math.nan, 1), {}, "is nan: weights are finite"),
        ((math.inf, 1, 1), {}, "is inf: weights are finite"),
        ((0, 0, 0), {}, "all weights of the mixture are 0"),
        ((1, 1, "2"), {}, "is '2': weights are finite"),
        ((1, 1, 1), {"temperature": 0}, "temperature must be a number above 0"),
        ((1, 1e300, 1), {"temperature": 0.1}, "1e.300 of .* at temperature=0.1 is beyond all"),
        ((1, 1, 1), {"names": ["a", "a", "b"]}, "3 different names"),
        ((1, 1, 1), {"at_end": "end"}, 'at_end must be "repeat", "stop" or "reweight"'),
        ((1, 1, 1), {"at_end": "stop", "samples": 9}, "says how long an epoch is"),
        ((1, 1, 1), {"per": "tokens"}, "does not know its tokens"),
        ((1, 1, 1), {"per": "words"}, 'per must be "samples"'),
        ((1, 1, 1), {"schedule": {0: {}}}, "changes at a global batch from 1 on: 0"),
        ((1, 1, 1), {"schedule": {5: {}}}, "all weights of the mixture are 0 from step 5 on"),
        ((1, 1, 1), {"samples": 0}, "samples must be a whole number from 1"),
        ((1, 1, True), {}, "is True: weights are finite"),
        ((1, 1, 1), {"temperature": "2"}, "temperature must be a number above 0: '2'"),
        ((1, 1, 1), {"names": "abc"}, "names= must be 3 different names: 'abc'"),
        ((1, 1, 1), {"names": ["a", "a", "b", "c"]}, "3 different names"),
        ((1, 1, 1), {"schedule": {1: 3}}, "the schedule has for step 1 no mapping .*: 3"),
        ((1, 1, 1), {"schedule": [3]}, r"schedule must be a mapping .*: \[3\]"),
        ((1, 1, 1), {"schedule": {True: {}}}, "changes at a global batch from 1 on: True"),
        ((1, 1, 1), {"offset_labels": "no"}, "offset_labels must be True or False, not 'no'"),
    ],
)
def test_what_makes_no_mixture_is_refused(
    sources: dict[str, Any], weights: Any, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        load(nostall.Mixture(weighted(sources, *weights), **options), epochs=1)


@pytest.mark.parametrize(
    "options", [{"at_end": "stpo"}, {"samples": -1}, {"samples": 2.5}, {"samples": True}]
)
def test_how_an_epoch_ends_is_checked_when_a_mixture_is_made(
    sources: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"(at_end|samples) must be "):
        nostall.Mixture(weighted(sources, 1, 1, 1), **options)


def test_a_change_of_weights_is_from_a_number_on(sources: dict[str, Any]) -> None:
    mixture = nostall.Mixture(weighted(sources, 1, 1, 1), samples=np.int64(20))  # type: ignore[arg-type]
    for step in ("3", None, 2.5, True, -1):
        with pytest.raises(
            UsageError, match=f"step must be a whole number from 1 .*, not {step!r}"
        ):
            mixture.changed(step, weighted(sources, 1, 1, 0))  # type: ignore[arg-type]
    mixture.changed(np.int64(3), weighted(sources, 1, 1, 0))  # type: ignore[arg-type]


def test_a_temperature_may_be_a_number_of_numpy(sources: dict[str, Any]) -> None:
    weights = weighted(sources, 1, 2, 3)
    given = nostall.Mixture(weights, temperature=np.float32(2))  # type: ignore[arg-type]
    assert given.mixing == nostall.Mixture(weights, temperature=2.0).mixing


def test_a_source_whose_weight_comes_after_the_end_is_refused(sources: dict[str, Any]) -> None:
    """Its samples would never be given, though an epoch promises all of them."""
    web, code, books = sources.values()

    def made(step: int) -> nostall.DataLoader:
        later = {step: {web: 1, books: 1}}
        mixture = nostall.Mixture({web: 1, code: 1, books: 0}, schedule=later, at_end="reweight")
        return load(mixture, epochs=1)

    with made(17) as loader:  # 85 samples of web and code
        assert len(set(taken(loader))) == 94
    with pytest.raises(
        UsageError, match=r"after 90 samples.*after 85, so that source 2 .* give 9 "
    ):
        made(18)


def test_a_mixture_is_the_last_thing_that_is_made_of_sources(sources: dict[str, Any]) -> None:
    mixture = nostall.Mixture(weighted(sources, 1, 1, 1))
    for made in (
        lambda: nostall.Subset(mixture, [0]),
        lambda: nostall.Concat([mixture]),
        lambda: nostall.Mixture({mixture: 1}),
    ):
        with pytest.raises(UsageError, match="has an order of its own"):
            made()
    with pytest.raises(UsageError, match="Mixture needs at least one source"):
        nostall.Mixture({})
    for order in ({"order": "keyed"}, {"shuffle": False}, {"order": [1, 2]}):
        with pytest.raises(UsageError, match="has an order of its own"):
            load(mixture, epochs=1, **order)
    web, other = sources["web"], sources["code"]
    with pytest.raises(UsageError, match="not in the mixture: give it the weight 0"):
        nostall.Mixture({web: 1}, schedule={3: {other: 1}})


def test_a_view_is_a_source_of_a_mixture(sources: dict[str, Any]) -> None:
    half = nostall.Subset(sources["web"], range(0, 60, 2))
    with load(nostall.Mixture({half: 0.5, sources["books"]: 0.5}), epochs=1) as loader:
        labels = taken(loader)
    assert sorted({label for label in labels if label < 100}) == sorted(
        {int(v) for v in range(0, 60, 2)} & set(labels)
    )
    assert abs(sum(label >= 200 for label in labels) - len(labels) / 2) < 1


def test_plans_of_mixtures_need_no_data() -> None:
    order = Mixed((10, 1000), ((0, (1, 3)), (50, (1, 1))), samples=64)
    plan = nostall.Plan(samples=1010, batch_size=8, world_size=4, epochs=9, order=order)
    assert len(plan) == 2
    for epoch, batch in ((0, 0), (3, 1), (8, 2)):
        before = np.concatenate(
            [plan.epoch_order(e) for e in range(epoch)]
            + [plan.epoch_order(epoch)[: 32 * batch], np.zeros(0, np.uint64)]
        )
        assert plan.consumed(epoch, batch).tolist() == [
            int((before < 10).sum()),
            int((before >= 10).sum()),
        ]


def test_an_epoch_beyond_all_memory_resumes_in_its_middle(sources: dict[str, Any]) -> None:
    """Of an epoch only the batches are planned that are read."""
    mixture = nostall.Mixture(weighted(sources, math.sqrt(2), 1.0, 0.1), samples=10**15)
    at = 10**12
    with load(mixture, 12, tiers=[]) as loader:
        assert len(loader) > at
        state = loader.state_dict() | {"batch": at}
        plan = loader.plan
    found = []
    for world in (1, 3, 12):
        labels = []
        for rank in range(world):
            place = {"rank": rank, "world_size": world, "local_rank": 0, "local_world_size": 1}
            place |= {"tiers": [], "peers": "off", "job": f"beyond {world} {rank}"}
            place |= {"staging": 4096}  # few batches are planned beyond those taken
            with load(mixture, 12 // world, **place) as loader:
                loader.load_state_dict(state)
                labels += taken(itertools.islice(loader, 3))
                # Its pattern is worked out up to the place of the batches: less than a period.
                assert loader.plan.native.mixture.worked_out <= 2**20 + 2**17
        found.append(sorted(labels))
    assert found[0] == found[1] == found[2]
    consumed = plan.consumed(0, at + 3) - plan.consumed(0, at)
    assert [sum(label // 100 == s for label in found[0]) for s in range(3)] == consumed.tolist()


def test_buckets_keep_like_lengths_together(sources: dict[str, Any]) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 203)
    order = nostall.Buckets(lengths, [100, 200, 300])
    plan = nostall.Plan(samples=203, batch_size=2, world_size=3, order=order, epochs=2, seed=1)
    for epoch in range(2):
        ids = plan.epoch_order(epoch)
        kinds = np.searchsorted([100, 200, 300], lengths[ids])[: 203 // 6 * 6].reshape(-1, 6)
        mixed = [len(set(batch)) > 1 for batch in kinds.tolist()]
        assert sum(mixed) <= 3
        assert sorted(ids[:203].tolist()) == list(range(203))
    assert len(np.unique(nostall.Buckets(lengths, 7).numbers)) == 7
    for bad in ([3, 3], 0, [2, 1], [math.nan]):
        with pytest.raises(UsageError, match="bounds"):
            nostall.Buckets(lengths, bad)
    with pytest.raises(UsageError, match="one number per sample"):
        nostall.Buckets(np.zeros((2, 2)))
    with pytest.raises(UsageError, match=r"lengths\[1\] is no number"):
        nostall.Buckets([1, math.nan])
    with pytest.raises(UsageError, match="pass lengths="):
        nostall.Plan(samples=3, order=nostall.Buckets())
    # A loader's own sizes: here each source has one.
    together = nostall.Concat(list(sources.values()))
    with load(together, 3, epochs=1, order=nostall.Buckets(bounds=[1, 2])) as loader:
        batches = [
            {label // 100 for label in labels.tolist()} for _, labels in next(loader.epochs())
        ]
    assert sum(len(batch) > 1 for batch in batches) <= 2


def test_units_of_token_streams_mix_and_go_on(tmp_path: Path) -> None:
    streams = []
    for name, length, documents in (("a", 13, 40), ("b", 29, 60)):
        ids = np.full((documents, length), 7, np.uint16)
        ids[:, -1] = 0
        np.save(tmp_path / f"{name}.npy", ids)
        streams.append(nostall.Tokens(tmp_path / f"{name}.npy", index=False))
    packed = [nostall.Packed(stream, 32) for stream in streams]
    mixture = nostall.Mixture(dict(zip(packed, (0.5, 0.5), strict=True)), per="tokens", samples=24)
    (_, weights), *_ = mixture.mixing.schedule
    costs = [len(stream) / len(units) for stream, units in zip(streams, packed, strict=True)]
    assert weights == pytest.approx([0.5 / cost for cost in costs])

    # Tokens that several units have, or none, count as often as a training sees them.
    own = (
        nostall.Windows(streams[0], 20, stride=5),
        nostall.Documents(streams[1], 20, longer="cut"),
    )
    (_, weights), *_ = nostall.Mixture(dict.fromkeys(own, 0.5), per="tokens").mixing.schedule
    assert weights == pytest.approx((0.5 / 20, 0.5 / 20))

    def ids_of(batches: Any) -> list[Any]:
        return [batch["ids"].tolist() for batch in batches]

    with load(mixture, 4, steps=9) as loader:
        wanted = ids_of(loader)
        assert sum(s["samples"] for s in loader.stats().sources.values()) == 36
    with load(mixture, 4, steps=9) as begun:
        batches = iter(begun)
        first = ids_of(next(batches) for _ in range(5))
        state = begun.state_dict()
    with load(mixture, 4, steps=9) as resumed:
        resumed.load_state_dict(state)
        assert first + ids_of(resumed) == wanted
