"""Batches that grow, data used again: the order stays exact, also after a break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch

import nostall
from nostall import fields
from nostall import transforms as t
from nostall.errors import TransformError, UsageError
from nostall.loader._ahead import Ahead, Made

EPOCHS = 4


def pixels(data: Any) -> np.ndarray:
    return np.ones((2, 2), np.uint8)


def loader(folder: Path, batch: int = 4, rank: int = 0, world: int = 1, **more: Any) -> Any:
    # Order by number: labels would not tell samples apart.
    return nostall.DataLoader(
        nostall.ImageFolder(folder, index=False),
        batch,
        rank=rank,
        world_size=world,
        epochs=EPOCHS,
        seed=3,
        transforms=pixels,
        output="numpy",
        tiers=[],
        **more,
    )


def sizes(batches: nostall.DynamicBatches, reports: list[float]) -> list[list[int]]:
    found = []
    for (_, epoch), value in zip(batches.epochs(), reports, strict=True):
        found.append([len(labels) for _, labels in epoch])
        batches.report(value)
    return found


def test_the_batch_grows_when_progress_slows(image_folder: Path) -> None:
    with loader(image_folder) as source:  # 61 samples, 16 batches of 4
        batches = nostall.DynamicBatches(source, threshold=0.05, limit=8)
        # The first report has nothing to compare with; 0.3 is progress, 0.01 is not.
        found = sizes(batches, [0.5, 0.8, 0.81, 0.811])
        assert found == [[4] * 15 + [1], [4] * 15 + [1], [4] * 15 + [1], [8] * 7 + [5]]
        assert batches.factor == 4
        for _ in range(4):
            batches.report(0.811)
        assert batches.factor == 8  # the limit


def test_losses_and_values_that_are_no_numbers(image_folder: Path) -> None:
    batches = nostall.DynamicBatches(
        loader(image_folder), threshold=0.1, smaller_is_better=True, limit=64
    )
    assert [batches.report(v) for v in (2.0, 1.0, 0.95, float("nan"), 1.0)] == [1, 1, 2, 4, 8]


def labels_of(batches: nostall.DynamicBatches, changes: dict[int, float]) -> list[list[int]]:
    """All batches from the position on; reports after the batches with these numbers in total."""
    found: list[list[int]] = []
    for _, epoch in batches.epochs():
        for _, labels in epoch:
            found.append(labels.tolist())
            if len(found) in changes:
                batches.report(changes[len(found)])
    return found


@pytest.mark.parametrize("sawtooth", [False, True])
def test_a_resumed_job_goes_on_with_the_same_batches(image_folder: Path, sawtooth: bool) -> None:
    order: Any = nostall.SubBatches(4, 2) if sawtooth else "torch"
    options: dict[str, Any] = {"threshold": 0.1, "limit": 8, "sawtooth": sawtooth}
    # In the middle of an epoch, too.
    changes = {5: 0.5, 9: 0.5, 20: 0.5}
    with loader(image_folder, order=order) as source:
        whole = labels_of(nostall.DynamicBatches(source, **options), changes)
    assert len({len(b) for b in whole}) > 2
    for stop in range(1, len(whole), 5):
        with loader(image_folder, order=order) as source:
            batches = nostall.DynamicBatches(source, **options)
            begun = []
            for _, epoch in batches.epochs():
                for _, labels in epoch:
                    begun.append(labels.tolist())
                    if len(begun) in changes:
                        batches.report(changes[len(begun)])
                    if len(begun) == stop:
                        break
                if len(begun) == stop:
                    break
            state = batches.state_dict()
        assert begun == whole[:stop]
        rest = {n - stop: v for n, v in changes.items()}
        with loader(image_folder, order=order) as source:
            batches = nostall.DynamicBatches(source, **options)
            batches.load_state_dict(state)
            assert labels_of(batches, rest) == whole[stop:]
        # On two ranks: each global batch is the union of theirs.
        parts = []
        for rank in range(2):
            with loader(image_folder, 2, rank, 2, order=order) as source:
                batches = nostall.DynamicBatches(source, agree=lambda v: v, **options)
                batches.load_state_dict(state)
                parts.append(labels_of(batches, rest))
        joined = [sorted(a + b) for a, b in zip(*parts, strict=True)]
        assert joined == [sorted(b) for b in whole[stop:]]


def test_a_state_has_no_part_of_a_batch_that_failed() -> None:
    """Nor one that is saved while a batch is joined, as by a handler of a signal."""
    inside: list[int] = []

    class Saving(nostall.DynamicBatches):
        def _joined(self, parts: Sequence[Any], counts: Sequence[int]) -> Any:
            inside.append(self.state_dict()["loader"]["batch"])
            return super()._joined(parts, counts)

    def once(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 12 and not failed:
            failed.append(12)
            raise ValueError("sample 12")
        return {}

    failed: list[int] = []
    source = nostall.Files({}, {"x": list(range(32))})
    with nostall.DataLoader(
        source, 2, epochs=1, shuffle=False, tiers=[], transforms=[once], output="numpy", threads=1
    ) as loader:
        batches = Saving(loader)
        batches.factor = 4
        seen: list[int] = []
        with pytest.raises(TransformError, match="sample 12"):
            for _, epoch in batches.epochs():
                for batch in epoch:
                    seen += batch["x"].tolist()
        state = batches.state_dict()
        assert failed
        batches.load_state_dict(state)
        rest = [x for _, epoch in batches.epochs() for batch in epoch for x in batch["x"].tolist()]
        assert seen + rest == list(range(32))
        assert inside == [0, 4, 8, 12]
        assert batches.state_dict()["loader"]["epoch"] == 1


def test_an_epoch_behind_the_interrupted_one_begins_with_its_first_batch(
    image_folder: Path,
) -> None:
    with loader(image_folder) as source:
        batches, state = nostall.DynamicBatches(source), source.state_dict()
        batches.factor = len(source)
        source.load_state_dict({**state, "epoch": 0, "batch": 3})
        _, second, *_ = batches.epochs()
        assert len(list(second[1])) == 1


def test_sawtooth_grows_with_each_pass_and_ends_with_the_data(image_folder: Path) -> None:
    # 15 whole batches of 4: chunks of 4, 4, 4, 3 batches, two passes each, cut into two epochs.
    with loader(image_folder, order=nostall.SubBatches(4, 2)) as source:
        batches = nostall.DynamicBatches(source, limit=16, sawtooth=True)
        found = [[len(labels) // 4 for _, labels in epoch] for _, epoch in batches.epochs()][:2]
    assert found == [
        [1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1, 0],
        [1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 2, 1, 0],
    ]


def test_data_used_again_are_the_plans(image_folder: Path) -> None:
    order = nostall.SubBatches(3, 2, together=2)
    dataset = nostall.ImageFolder(image_folder, index=False)
    got = []
    for rank in range(2):
        with loader(image_folder, 4, rank, 2, order=order) as source:
            got.append([y.tolist() for epoch in source.epochs() for _, y in epoch])
            plan = source.plan
    for rank in range(2):
        expected = []
        for epoch in range(EPOCHS):
            ids, ends = plan.rank_epoch(epoch, rank)
            for a, b in zip([0, *ends.tolist()], ends.tolist(), strict=False):
                expected.append(dataset.labels[ids[a:b]].tolist())
        assert got[rank] == expected


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"threshold": "x"}, "threshold must be a number from -inf to inf, not 'x'"),
        ({"threshold": float("nan")}, "threshold must be a number from -inf to inf, not nan"),
        ({"grow": 2.0}, "grow must be a whole number from 2 to .*, not 2.0"),
        ({"limit": True}, "limit must be a whole number from 1 to .*, not True"),
        ({"agree": 5}, "agree must be a function, or None, not 5"),
        ({"sawtooth": "no"}, "sawtooth must be True or False, not 'no'"),
        ({"smaller_is_better": 1}, "smaller_is_better must be True or False, not 1"),
        ({"loader": 5}, "DynamicBatches takes a nostall.DataLoader, not 5"),
    ],
)
def test_arguments_are_checked_when_it_is_made(
    image_folder: Path, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        nostall.DynamicBatches(**{"loader": loader(image_folder), **wrong})


def test_numbers_of_numpy_are_taken(image_folder: Path) -> None:
    numbers: dict[str, Any] = {
        "grow": np.int64(2),
        "limit": np.int64(4),
        "threshold": np.float32(1),
    }
    batches = nostall.DynamicBatches(loader(image_folder), **numbers)
    assert [batches.report(0) for _ in range(4)] == [1, 2, 4, 4]
    assert type(batches.state_dict()["factor"]) is int


def test_wrong_arguments_are_named(image_folder: Path) -> None:
    source = loader(image_folder)
    for wrong, match in (
        ({"grow": 1}, "grow"),
        ({"limit": 0}, "limit"),
        ({"sawtooth": True}, "Sub"),
    ):
        with pytest.raises(UsageError, match=match):
            nostall.DynamicBatches(source, **wrong)
    batches = nostall.DynamicBatches(source)
    with pytest.raises(UsageError, match="sawtooth"):
        batches.load_state_dict({**batches.state_dict(), "sawtooth": True})
    other = nostall.DynamicBatches(loader(image_folder, order=nostall.SubBatches(2)))
    with pytest.raises(UsageError, match="order="):
        other.load_state_dict(batches.state_dict())
    raw = nostall.DataLoader(nostall.ImageFolder(image_folder, index=False), 4, epochs=2, tiers=[])
    with raw, pytest.raises(UsageError, match="RawBatch"):
        joined = nostall.DynamicBatches(raw)
        joined.factor = 2
        for _, epoch in joined.epochs():
            next(epoch)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return bool((one.dtype, one.shape) == (other.dtype, other.shape) and (one == other).all())
    return bool(one == other)


@pytest.mark.parametrize("form", ["dict", "tuple"])
@pytest.mark.parametrize("padded", [False, True])
def test_batches_of_fields_grow(
    image_folder: Path, form: Literal["dict", "tuple"], padded: bool
) -> None:
    """As those of a loader of larger batches: ragged and padded arrays, texts, JSON, numbers."""
    paths = [str(path) for path in sorted(image_folder.rglob("*.jpg"))[:21]]
    source = nostall.Files(
        {"image": paths},
        {
            "label": list(range(21)),
            "name": [f"{i}" * i for i in range(21)],
            "boxes": [np.full((i % 4, 4), i, np.float32) for i in range(21)],
            "json": [[i, {"of": i}] for i in range(21)],
        },
        schema={
            "image": fields.Image(),
            "boxes": fields.Boxes(padded=padded),
            "json": fields.Json(),
        },
    )
    options: dict[str, Any] = {
        "epochs": 1, "seed": 3, "tiers": [], "output": "numpy", "batch": form, "drop_last": True
    }  # fmt: skip
    with (
        nostall.DataLoader(source, 2, **options) as small,
        nostall.DataLoader(source, 6, **options) as large,
    ):
        batches = nostall.DynamicBatches(small)
        batches.factor = 3
        ((_, joined),) = batches.epochs()
        count = 0
        for one, other in zip(joined, large, strict=False):
            assert same(one, other)
            count += 1
        assert count == 3


def grown(loader: nostall.DataLoader, factor: int) -> list[Any]:
    batches = nostall.DynamicBatches(loader)
    batches.factor = factor
    ((_, content),) = batches.epochs()
    return list(content)


def targets(sample: dict[str, Any]) -> dict[str, Any]:
    return {"target": {"box": np.full((1, 4), sample["a"])}, "pair": [np.zeros(2), sample["a"]]}


def test_samples_of_a_list_stay_apart() -> None:
    """What callables give for each sample is that sample's, also where it holds arrays."""
    source = nostall.Files({}, {"a": list(range(6)), "b": list(range(6))})
    options: dict[str, Any] = {"epochs": 1, "shuffle": False, "tiers": [], "output": "numpy"}
    with nostall.DataLoader(source, 2, transforms=[targets], **options) as loader:
        (batch,) = grown(loader, 3)
    assert batch["a"].tolist() == list(range(6))
    assert [target["box"].tolist() for target in batch["target"]] == [[[i] * 4] for i in range(6)]
    assert [int(pair[1]) for pair in batch["pair"]] == list(range(6))
    with (
        nostall.DataLoader(source, 2, collate=lambda batch: list(batch.values()), **options) as own,
        pytest.raises(UsageError, match="collate= gives a list"),
    ):
        grown(own, 2)


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_places_of_segments_go_on(tmp_path: Path, form: Literal["dict", "tuple"]) -> None:
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(37, dtype=np.uint16).tofile(tmp_path / "b.bin")
    tokens = nostall.Tokens(str(tmp_path / "*.bin"), dtype="uint16")
    units = nostall.Packed(tokens, 16, fields=("ids", "cu_seqlens"))
    options: dict[str, Any] = {
        "epochs": 1,
        "seed": 1,
        "tiers": [],
        "batch": form,
        "drop_last": True,
    }
    with (
        nostall.DataLoader(units, 2, output="numpy", **options) as small,
        nostall.DataLoader(units, 6, output="numpy", **options) as large,
    ):
        for one, other in zip(grown(small, 3), large, strict=False):
            assert same(one, other)
    with (
        nostall.DataLoader(units, 2, collate=list, **options) as own,
        pytest.raises(UsageError, match="cu_seqlens, let collate= give a mapping"),
    ):
        grown(own, 3)


def test_items_grow_and_mixed_labels_are_refused(image_folder: Path) -> None:
    items = [(np.full(3, i), {"text": str(i), "n": i}) for i in range(8)]
    cached = nostall.Cached(items, makers=1)
    with nostall.DataLoader(cached, 2, epochs=1, shuffle=False, tiers=[]) as loader:
        batches = nostall.DynamicBatches(loader)
        batches.factor = 4
        ((_, content),) = batches.epochs()
        (batch,) = content
        assert batch[0].tolist() == [[i] * 3 for i in range(8)]
        assert batch[1]["n"].tolist() == list(range(8))
        assert batch[1]["text"] == [str(i) for i in range(8)]
    cached.close()
    texts = nostall.Cached([(["a", str(i)], {"b": str(i)}) for i in range(5)], makers=1)
    for output in ("numpy", "torch"):
        options: dict[str, Any] = {"epochs": 1, "shuffle": False, "tiers": [], "output": output}
        with nostall.DataLoader(texts, 2, **options) as loader:
            (batch,) = grown(loader, 3)
            assert batch == [[("a",) * 5, tuple("01234")], {"b": list("01234")}]
    texts.close()
    steps = [t.Resize((8, 8)), t.ToTensor(), t.MixUp()]
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False), 4, epochs=1, transforms=steps, tiers=[]
    ) as mixing:
        batches = nostall.DynamicBatches(mixing)
        batches.factor = 2
        ((_, content),) = batches.epochs()
        with pytest.raises(UsageError, match="num_classes="):
            next(content)


def test_a_consumer_wakes_only_a_thread_that_waits() -> None:
    """Else its tokens pile up where batches are made more slowly than they are taken."""
    begin = threading.Event()

    def made(waited: Callable[[], None]) -> Iterator[Made]:
        begin.wait()
        for number in range(5):
            while not ahead._wanted:
                time.sleep(0.001)
                waited()
            yield Made(mock.Mock(), (), lambda batch, hand, number=number: number)

    place = mock.MagicMock()
    place.begin.return_value.bytes = 1
    ahead = Ahead(place, made, 10)  # type: ignore[arg-type]
    begin.set()
    assert [ahead.take_sent()[1] for _ in range(5)] == list(range(5))
    assert ahead._room.empty()
    ahead.close()


def test_raw_batches_of_a_callable_stay_near_what_is_given(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(500_000, 1_500_000, 60)
    files = [tmp_path / f"{number:03}" for number in range(len(sizes))]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(bytes(int(size)))
    staging, largest = 8_000_000, int(np.sort(sizes)[-4:].sum())  # of a batch
    with nostall.DataLoader(
        nostall.FileList([str(file) for file in files], root="/"), 4, epochs=2, seed=0, tiers=[],
        transforms=len, collate=list, staging=staging, threads=2, output="numpy",
    ) as loader:  # fmt: skip
        for epoch in loader.epochs():
            for batch in epoch:
                assert len(batch) in (2, 4)
        held = loader.stats().memory["staging"]
    # What is staged, the two that are at work, the one in hand, and what is kept for the next.
    assert held <= max(staging, 2 * largest) + 3 * largest + staging // 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "not a state of DynamicBatches"),
        ({"version": 0}, "not a state of DynamicBatches"),
        ({"sawtooth": True}, "with the same sawtooth="),
        ({"factor": 0}, "factor=0"),
        ({"factor": 1.5}, r"factor=1\.5, which is no whole number"),
        ({"loader": None}, "not a state of a loader"),
    ],
)
def test_a_state_of_growing_batches_that_cannot_be_is_refused(wrong: Any, words: str) -> None:
    data = nostall.Arrays({"x": np.arange(8)})
    with nostall.DataLoader(data, 4, epochs=1, tiers=[], output="numpy") as loader:
        batches = nostall.DynamicBatches(loader)
        state = {**batches.state_dict(), **wrong} if isinstance(wrong, dict) else wrong
        with pytest.raises(UsageError, match=words):
            batches.load_state_dict(state)


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([1.0, "a"], "gives str for .*1"),
        ([1.0, None], "gives NoneType for .*1"),
        ([object(), object()], r"gives object for .*0"),
        ([np.zeros(2), np.zeros(3)], r"gives shape \(2,\) for .*0\) but \(3,\) for .*1"),
        (
            [torch.zeros(2), [[1], [2, 3]]],
            r"gives shape \(2,\) for .*0\) but lists of several lengths for .*1",
        ),
    ],
)
def test_results_that_make_no_batch_are_named(
    tmp_path: Path, output: Any, results: list[Any], words: str
) -> None:
    for i in range(2):
        (tmp_path / str(i)).write_bytes(bytes([i]))
    data = nostall.FileList(["0", "1"], [0, 1], root=tmp_path)
    with (
        nostall.DataLoader(
            data, 2, epochs=1, shuffle=False, tiers=[], output=output,
            transforms=[lambda raw: results[raw[0]]],
        ) as loader,
        pytest.raises(UsageError, match=words),
    ):  # fmt: skip
        next(iter(loader))
