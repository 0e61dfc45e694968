"""Worker processes that are spawned, sources that changed, and states taken between epochs."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import nostall
import nostall.torch
from nostall.errors import IoError, UsageError


def sampler(
    rank: int = 0, world: int = 1, batch: int = 4, samples: int = 61
) -> nostall.torch.BatchSampler:
    return nostall.torch.BatchSampler(samples, batch, epochs=4, seed=3, rank=rank, world_size=world)


@pytest.mark.multi
@pytest.mark.parametrize("index", [True, False])
def test_spawned_workers_read_the_same_samples(image_folder: Path, index: bool) -> None:
    folder = nostall.ImageFolder(image_folder, index=index)
    loader = DataLoader(
        nostall.torch.Dataset(folder, transform=len),
        batch_sampler=sampler(),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    seen = [(sizes.tolist(), labels.tolist()) for sizes, labels in loader]
    assert seen == [
        ([int(folder.sizes[i]) for i in ids], [int(folder.labels[i]) for i in ids])
        for ids in sampler()
    ]


@pytest.mark.parametrize("kind", ["folder", "files", "list"])
def test_a_source_that_changed_does_not_reopen(
    make_folder: Callable[[int], Path], kind: str
) -> None:
    root = make_folder(4)
    source: nostall.Source
    if kind == "folder":
        source = nostall.ImageFolder(root, index=False)
    elif kind == "files":
        source = nostall.FileList(root=root)
    else:
        source = nostall.FileList(sorted(root.glob("*/*.jpg")), [3, 2, 1, 0])
    packed = pickle.dumps(source)
    again = pickle.loads(packed)
    assert again.fingerprint == source.fingerprint
    assert [again.read(i) for i in range(4)] == [source.read(i) for i in range(4)]
    changed = root / "class0" / "000.jpg"
    changed.write_bytes(changed.read_bytes() + b"more")
    with pytest.raises(IoError, match="changed since"):
        pickle.loads(packed)


@pytest.mark.parametrize("cut", [0, 1, 15, 16])
@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)])
def test_any_position_resumes_with_the_same_global_batches(old: int, new: int, cut: int) -> None:
    def stream(ranks: list[nostall.torch.BatchSampler], epochs: list[int]) -> list[set[int]]:
        parts: list[list[list[int]]] = []
        for one in ranks:
            parts.append([])
            for epoch in epochs:
                one.set_epoch(epoch)
                parts[-1] += list(one)
        return [set().union(*batch) for batch in zip(*parts, strict=True)]

    first = [sampler(rank, old, 4 // old, 63) for rank in range(old)]
    whole = stream(first, [1, 2])
    first[0].set_epoch(1)
    for _ in zip(range(cut), first[0]):  # noqa: B905  # stops after `cut` batches
        pass
    state = first[0].state_dict(cut)
    resumed = [sampler(rank, new, 4 // new, 63) for rank in range(new)]
    for one in resumed:
        one.load_state_dict(state)
    assert stream(resumed, [1, 2] if cut < 16 else [2]) == whole[cut:]


def test_a_state_between_epochs_skips_nothing() -> None:
    first = sampler()
    first.set_epoch(0)
    list(first)
    first.set_epoch(1)
    expected = list(first)
    again = sampler()
    for one in (first, again):
        one.set_epoch(0)
        list(one)
        one.set_epoch(1)
    third = sampler()
    third.load_state_dict(again.state_dict())
    assert list(third) == expected


@pytest.mark.parametrize("batch", [-1, 17])
def test_a_position_that_cannot_be_is_refused(batch: int) -> None:
    state = sampler().state_dict()
    with pytest.raises(UsageError, match=f"batch[ =]{batch}"):
        sampler().load_state_dict({**state, "batch": batch})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epoch": 7}, "epoch 7, batch 0, outside this job of 4 epochs of 16 batches"),
        ({"epoch": 4, "batch": 1}, "epoch 4, batch 1, outside"),
        ({"epoch": 1.5}, r"epoch=1\.5, which is no whole number"),
        ({"epoch": True}, "epoch=True"),
        ({"order_world": None}, "order_world=None"),
    ],
)
def test_a_state_that_cannot_be_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sampler().load_state_dict({**sampler().state_dict(), **wrong})
    with pytest.raises(UsageError, match="not a state of a sampler"):
        sampler().load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("batches", [-1, 17, 1.5, True])
def test_no_state_is_made_of_batches_that_an_epoch_has_not(batches: Any) -> None:
    with pytest.raises(UsageError, match="an epoch has 16 batches"):
        sampler().state_dict(batches)


def test_a_sampler_at_the_end_of_its_job_says_so() -> None:
    ended = sampler()
    ended.set_epoch(3)
    list(ended)
    again = sampler()
    again.load_state_dict(ended.state_dict())
    third = sampler()
    third.load_state_dict(again.state_dict())
    for one in (again, third):
        with pytest.raises(UsageError, match="all 4 epochs of the job are over"):
            list(one)
        one.set_epoch(1)
        assert len(list(one)) == 16
    # Who counts no epochs goes on with the order of all of them.
    uncounted = nostall.torch.BatchSampler(61, 4)
    order = list(uncounted)
    resumed = nostall.torch.BatchSampler(61, 4)
    resumed.load_state_dict(uncounted.state_dict())
    assert [list(resumed) for _ in range(3)] == [order] * 3


def test_numbers_of_numpy_are_in_no_state() -> None:
    one = nostall.torch.BatchSampler(61, np.int64(4), epochs=np.int64(3))  # type: ignore[arg-type]
    one.set_epoch(np.int64(1))  # type: ignore[arg-type]
    assert json.loads(json.dumps(one.state_dict(np.int64(2))))["epoch"] == 1  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"epoch 1\.5 is not among"):
        one.set_epoch(1.5)  # type: ignore[arg-type]


def test_a_sampler_does_not_repeat_the_epoch_that_its_state_had_ended() -> None:
    first = sampler()
    list(first)
    again = sampler()
    again.load_state_dict(first.state_dict())
    again.set_epoch(0)
    assert list(again) == []
    again.set_epoch(1)
    assert sorted(i for batch in again for i in batch) == list(range(61))
    again.set_epoch(0)
    assert len(list(again)) == len(again)
