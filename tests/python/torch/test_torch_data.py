"""torch's own DataLoader over a source, in the plan's order, with and without worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import nostall
import nostall.torch
from nostall.errors import CorruptionError, IoError, UsageError


def length(data: bytes) -> torch.Tensor:
    return torch.tensor(len(data))


def sampler(
    rank: int = 0, world: int = 1, batch: int = 4, **kw: object
) -> nostall.torch.BatchSampler:
    return nostall.torch.BatchSampler(61, batch, seed=3, rank=rank, world_size=world, **kw)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_order_is_distributed_samplers(world: int, drop: bool) -> None:
    for rank in range(world):
        ours = sampler(rank, world, drop_last=drop)
        theirs = DistributedSampler(
            range(61), num_replicas=world, rank=rank, shuffle=True, seed=3, drop_last=drop
        )
        for epoch in (0, 1, 7):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            expected = [
                b.tolist()
                for b in DataLoader(range(61), batch_size=4, sampler=theirs, drop_last=drop)
            ]
            assert list(ours) == expected
            assert len(ours) == len(expected)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes_read_the_same_samples(image_folder: Path, start: str) -> None:
    folder = nostall.ImageFolder(image_folder)
    dataset = nostall.torch.Dataset(folder, decode=length)
    loader = DataLoader(
        dataset, batch_sampler=sampler(), num_workers=2, multiprocessing_context=start
    )
    reference = sampler()
    for _ in range(2):
        seen = [(sizes.tolist(), labels.tolist()) for sizes, labels in loader]
        expected = [
            ([int(folder.sizes[i]) for i in ids], [int(folder.labels[i]) for i in ids])
            for ids in reference
        ]
        assert seen == expected


def test_decodes_to_rgb_and_transforms(image_folder: Path) -> None:
    dataset = nostall.torch.Dataset(
        nostall.ImageFolder(image_folder),
        transform=lambda image: (image.mode, image.size),
        target_transform=lambda label: -label,
    )
    assert dataset[60] == (("RGB", (40, 30)), -2)
    with pytest.raises(IndexError):
        dataset[61]


def test_a_bad_file_is_named(make_folder: Callable[[int], Path]) -> None:
    root = make_folder(4)
    bad = root / "class0" / "002.jpg"
    bad.write_bytes(b"x" * bad.stat().st_size)
    dataset = nostall.torch.Dataset(nostall.ImageFolder(root))
    with pytest.raises(CorruptionError, match=r"002\.jpg"):
        dataset[1]
    bad.unlink()
    with pytest.raises(IoError, match=r"002\.jpg"):
        dataset[1]


def test_a_source_that_changed_does_not_reopen(make_folder: Callable[[int], Path]) -> None:
    root = make_folder(4)
    for make in (
        lambda: nostall.ImageFolder(root, index=False),
        lambda: nostall.FileList(root=root),
    ):
        source = make()
        packed = pickle.dumps(source)
        assert pickle.loads(packed).fingerprint == source.fingerprint
        next(root.glob("*/*.jpg")).unlink()
        with pytest.raises(IoError, match="changed since"):
            pickle.loads(packed)


@pytest.mark.parametrize("cut", [0, 1, 7, 15, 16])
@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)])
def test_resumes_the_same_global_batches(old: int, new: int, cut: int) -> None:
    def stream(samplers: list[nostall.torch.BatchSampler], epochs: int) -> list[set[int]]:
        parts = [[b for _ in range(epochs) for b in s] for s in samplers]
        return [set().union(*batch) for batch in zip(*parts, strict=True)]

    def ranks(world: int) -> list[nostall.torch.BatchSampler]:
        made = [sampler(r, world, batch=4 // world) for r in range(world)]
        for s in made:
            s.set_epoch(2)
        return made

    full = stream(ranks(old), 2)
    saved = ranks(old)[0]
    begun = iter(saved)
    for _ in range(cut):
        next(begun)
    resumed = ranks(new)
    for s in resumed:
        s.load_state_dict(saved.state_dict())
        s.set_epoch(2 if cut < 16 else 3)
    assert stream(resumed, 2 if cut < 16 else 1) == full[cut:]


def test_state_counts_what_was_used_not_what_was_drawn() -> None:
    first = sampler()
    begun = iter(first)
    drawn = [next(begun) for _ in range(6)]
    again = sampler()
    again.load_state_dict(first.state_dict(batches=2))
    assert next(iter(again)) == drawn[2]


def test_refuses_the_state_of_another_order() -> None:
    state = sampler().state_dict()
    with pytest.raises(UsageError, match=r"global_batch=4.*global_batch=5"):
        sampler(batch=5).load_state_dict(state)
    with pytest.raises(UsageError, match="version"):
        sampler().load_state_dict({**state, "version": 9})
    with pytest.raises(UsageError, match="batch 99"):
        sampler().load_state_dict({**state, "batch": 99})
    with pytest.raises(UsageError, match="16 batches"):
        sampler().state_dict(batches=17)
