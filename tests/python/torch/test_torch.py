"""The pieces for torch's own DataLoader, and what trainers expect of an iterable loader."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.distributed import DistributedSampler

import nostall
import nostall.torch
from nostall.errors import PeerError, UsageError


def test_a_torch_without_distributed_imports_all_there_is() -> None:
    body = """
import torch.distributed
torch.distributed.is_available = lambda: False
from nostall.torch import *
assert "GroupOptions" not in globals() and GradientSync
"""
    subprocess.run([sys.executable, "-c", body], check=True)


def test_importing_nostall_is_enough_and_reads_no_torch() -> None:
    body = """
import sys, nostall
assert "torch" not in sys.modules
assert nostall.torch.Dataset
try:
    nostall.tensorflow
except AttributeError as error:
    assert "'tensorflow'" in str(error)
"""
    subprocess.run([sys.executable, "-c", body], check=True)


@pytest.mark.parametrize(
    ("given", "named", "allowed"),
    [
        ({"order": "fast"}, "order='fast'", '"any" nor "fixed"'),
        ({"order": None}, "order=None", '"any" nor "fixed"'),
        ({"order": ["any"]}, "order=['any']", '"any" nor "fixed"'),
        ({"shared_bytes": -1}, "shared_bytes=-1", "from 0 to 2**46"),
        ({"shared_bytes": 1 << 63}, f"shared_bytes={1 << 63}", "from 0 to 2**46"),
        ({"shared_bytes": 1.5}, "shared_bytes=1.5", "from 0 to 2**46"),
        ({"shared_bytes": "1G"}, "shared_bytes='1G'", "from 0 to 2**46"),
        ({"shared_bytes": True}, "shared_bytes=True", "from 0 to 2**46"),
        ({"shared_bytes": None}, "shared_bytes=None", "from 0 to 2**46"),
    ],
)
def test_options_of_a_group_are_refused_where_they_are_made(
    given: dict[str, Any], named: str, allowed: str
) -> None:
    with pytest.raises(UsageError) as error:
        nostall.torch.GroupOptions(**given)
    assert named in str(error.value)
    assert allowed in str(error.value)


def test_options_of_a_group_take_any_integer() -> None:
    assert nostall.torch.GroupOptions("fixed", 0).shared_bytes == 0
    assert nostall.torch.GroupOptions(shared_bytes=np.int64(4096)).shared_bytes == 4096


def expected(samples: int, batch: int, world: int, rank: int, epoch: int) -> list[list[int]]:
    sampler = DistributedSampler(range(samples), num_replicas=world, rank=rank, seed=3)
    sampler.set_epoch(epoch)
    return [b.tolist() for b in TorchLoader(range(samples), batch_size=batch, sampler=sampler)]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_gets_our_order(image_folder: Path, workers: int) -> None:
    folder = nostall.ImageFolder(image_folder)
    dataset = nostall.torch.Dataset(folder, transform=len)
    sampler = nostall.torch.BatchSampler(len(dataset), 8, epochs=2, seed=3, rank=1, world_size=2)
    loader = TorchLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ids = expected(len(folder), 8, 2, 1, epoch)
        assert [sizes.tolist() for sizes, _ in loader] == [
            [int(folder.sizes[i]) for i in b] for b in ids
        ]
        assert len(loader) == len(ids)


def test_sampler_resumes_on_another_world() -> None:
    first = nostall.torch.BatchSampler(52, 6, epochs=3, seed=3, rank=0, world_size=2)
    head = list(itertools.islice(first, 2))
    state = first.state_dict()
    assert state["batch"] == len(head) == 2
    parts = []
    for rank in range(3):
        sampler = nostall.torch.BatchSampler(52, 4, epochs=3, seed=3, rank=rank, world_size=3)
        sampler.load_state_dict(state)
        parts.append(list(sampler))
    whole = [expected(52, 6, 2, r, 0) for r in range(2)]
    for i, batch in enumerate(zip(*parts, strict=True), 2):
        assert sorted(itertools.chain(*batch)) == sorted(whole[0][i] + whole[1][i])
    with pytest.raises(UsageError, match="seed"):
        nostall.torch.BatchSampler(52, 12, seed=4, rank=0, world_size=1).load_state_dict(state)
    both = "saved with global_batch=12, seed=3, but this sampler has global_batch=6, seed=4$"
    with pytest.raises(nostall.errors.UsageError, match=both):
        nostall.torch.BatchSampler(52, 6, seed=4, rank=0, world_size=1).load_state_dict(state)


@pytest.mark.parametrize("samples", range(24, 36))
def test_a_sampler_that_resumes_warns_of_batches_without_samples(
    samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own collate_fn asks for the first sample of each."""
    worlds = 1, 2, 3, 4, 6
    for old, new in itertools.product(worlds, worlds):
        first = nostall.torch.BatchSampler(samples, 12 // old, rank=0, world_size=old)
        next(iter(first))
        caplog.clear()
        parts = []
        for rank in range(new):
            sampler = nostall.torch.BatchSampler(samples, 12 // new, rank=rank, world_size=new)
            sampler.load_state_dict(first.state_dict())
            parts.append(list(sampler))
        rest = -(-samples // old) * old % 12
        told = [r.getMessage() for r in caplog.records]
        assert all(map(all, parts)) == (not told), (old, new)
        assert len(told) == (0 < rest < new)
        for words in told:
            assert f" for {new} ranks, as the job began on {old} rank" in words
            assert "pass a collate_fn that takes an empty list" in words


@pytest.mark.parametrize(
    "order",
    [
        "keyed",
        nostall.Weighted(np.arange(30) + 1.0, 20),
        nostall.ClassBalanced([0, 1, 1] * 10),
        nostall.RepeatedAugmentation(3),
        nostall.Buckets(range(30), 3),
        [*range(29, 3, -2)],
    ],
    ids=str,
)
def test_samplers_have_the_orders_of_loaders(order: Any) -> None:
    sampler = nostall.torch.BatchSampler(30, 3, epochs=2, seed=1, order=order, rank=1, world_size=2)
    plan = nostall.Plan(samples=30, batch_size=3, world_size=2, epochs=2, seed=1, order=order)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ids, _ = plan.rank_epoch(epoch, 1)
        assert list(itertools.chain(*sampler)) == ids.tolist()
    state = sampler.state_dict(batches=1)
    other = nostall.torch.BatchSampler(30, 3, epochs=2, seed=1, rank=1, world_size=2)
    with pytest.raises(UsageError, match="order="):
        other.load_state_dict(state)
    sampler.load_state_dict(state)
    assert list(itertools.chain(*sampler)) == ids.tolist()[3:]


def test_items_of_cached_are_items() -> None:
    items = [("a", 1), ("b", 2), ("c", 3)]
    cached = nostall.Cached(items, makers=1)
    try:
        assert [nostall.torch.Dataset(cached)[i] for i in range(3)] == items
        chosen = nostall.torch.Dataset(nostall.Subset(cached, [2, 0]), lambda item: item[1])
        assert [chosen[0], chosen[1]] == [3, 1]
    finally:
        cached.close()


def test_unreadable_item_names_its_path(image_folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "x.jpg"
    victim.write_bytes(b"12345")
    dataset = nostall.torch.Dataset(nostall.FileList([victim]), tiers=[])
    assert dataset[0] == (b"12345", 0)
    victim.unlink()
    with pytest.raises(nostall.errors.IoError, match=r"x\.jpg"):
        dataset[0]


def test_trainers_find_what_they_expect_of_an_iterable(image_folder: Path) -> None:
    """Lightning and Accelerate iterate, ask for the length and set the epoch; nothing else."""
    loader = nostall.DataLoader(nostall.ImageFolder(image_folder), 8, epochs=3, tiers=[])
    assert not hasattr(loader, "__next__")
    lengths = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        lengths.append(sum(1 for _ in iter(loader)))
    assert lengths == [len(loader)] * 3
    # Accelerate's skip_first_batches would read the samples through a loader of torch's, and Lightning
    # would replace the order for overfit_batches.
    assert not hasattr(loader, "sampler")
    with pytest.raises(AttributeError, match=r"no sampler, .* set_epoch\(\) .* load_state_dict"):
        loader.sampler  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        loader.nonsense  # noqa: B018
    loader.close()


EIGHT = nostall.Arrays({"id": np.arange(8)})


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def orders(epochs: int) -> list[list[list[int]]]:
    with nostall.DataLoader(EIGHT, 2, epochs=epochs, tiers=[]) as loader:
        return [ids(epoch) for epoch in loader.epochs()]


def set_through_sampler(loader: nostall.DataLoader, epoch: int) -> None:
    loader.batch_sampler.sampler.set_epoch(epoch)


def test_a_loop_of_ones_own_sets_the_epoch_through_the_sampler() -> None:
    whole = orders(5)
    with nostall.DataLoader(EIGHT, 2, epochs=5, tiers=[]) as loader:
        for epoch in (2, 4):  # goes on, and leaves one out
            set_through_sampler(loader, epoch)
            assert ids(loader) == whole[epoch]
        set_through_sampler(loader, 5)  # for the next time, as some do at an epoch's end
        with pytest.raises(UsageError, match="this job of 5 epochs has ended"):
            next(iter(loader))
    with nostall.DataLoader(EIGHT, 2, epochs=5, tiers=[]) as loader:
        next(iter(loader))  # a sample batch
        for epoch in range(5):
            set_through_sampler(loader, epoch)
            assert ids(loader) == whole[epoch]
        set_through_sampler(loader, 1)
        with pytest.raises(UsageError, match="this job of 5 epochs has ended"):
            next(iter(loader))  # it goes back for nobody
    with nostall.DataLoader(EIGHT, 2, epochs=5, tiers=[]) as loader:
        set_through_sampler(loader, 1)
        iter(loader)  # of an epoch of no steps
        set_through_sampler(loader, 3)
        assert ids(loader) == whole[3]
        with pytest.raises(UsageError, match="this job of 5 epochs has no epoch 9"):
            set_through_sampler(loader, 9)
    with nostall.DataLoader(EIGHT, 2, tiers=[]) as loader:
        set_through_sampler(loader, 3)
        assert ids(loader) == whole[3]


@pytest.mark.parametrize("taken", [1, 4])
def test_a_loop_of_ones_own_goes_on_where_the_loaded_state_is(taken: int) -> None:
    whole = orders(4)
    with nostall.DataLoader(EIGHT, 2, epochs=4, tiers=[]) as loader:
        loader.set_epoch(1)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
    for first in (0, 1):  # counted by the trainer from its own beginning, or from the job's
        with nostall.DataLoader(EIGHT, 2, epochs=4, tiers=[]) as loader:
            loader.load_state_dict(state)
            set_through_sampler(loader, first)
            rest = whole[2] if first == 0 and taken == 4 else whole[1][taken:]
            assert ids(loader) == rest
            set_through_sampler(loader, 3)
            assert ids(loader) == whole[3]


def test_lightning_sets_the_epoch_of_a_training_through_the_sampler() -> None:
    """It makes an iteration to see whether it can, then that of the training, then sets the epoch."""
    whole = orders(3)

    def begin(loader: nostall.DataLoader) -> Iterator[Any]:
        iter(loader)
        return iter(loader)

    with nostall.DataLoader(EIGHT, 2, epochs=3, tiers=[]) as loader:
        batches = begin(loader)
        set_through_sampler(loader, 1)
        assert ids(batches) == whole[1]
        loader.set_epoch(0)
        next(batches := iter(loader))
        state = loader.state_dict()
    with nostall.DataLoader(EIGHT, 2, epochs=3, tiers=[]) as loader:
        loader.load_state_dict(state)
        batches = begin(loader)
        set_through_sampler(loader, 1)  # with max_steps= it counts an epoch twice
        assert ids(batches) == whole[0][1:]
    with nostall.DataLoader(EIGHT, 2, steps=8, tiers=[]) as loader:
        batches = begin(loader)
        set_through_sampler(loader, 1)
        assert ids(batches) == whole[0] + whole[1]
    with nostall.DataLoader(EIGHT, 2, epochs=3, tiers=[]) as loader:
        batches = begin(loader)
        with pytest.raises(UsageError, match="has no epoch 3"):  # goes on, with too few epochs
            set_through_sampler(loader, 3)
    with nostall.DataLoader(EIGHT, 2, epochs=3, tiers=[]) as loader:
        begin(loader)
        set_through_sampler(loader, 0)
        assert ids(loader) == whole[0]  # of an evaluation
        batches = begin(loader)  # and now of a training
        set_through_sampler(loader, 2)
        assert ids(batches) == whole[2]


@pytest.mark.parametrize("trained", [(0, 5, 10), (1, 3, 5), (2, 2, 2)])
def test_a_trainings_epoch_is_not_that_of_a_loader_for_evaluations(
    trained: tuple[int, ...],
) -> None:
    """It is set before their iterations are made, and is the epoch of the training."""
    whole = orders(3)
    for goes_on in (False, True):
        with nostall.DataLoader(EIGHT, 2, epochs=3, tiers=[]) as loader:
            seen = []
            iter(loader)  # as Lightning looks whether it can
            if goes_on:
                set_through_sampler(loader, trained[0])
                kept = iter(loader)  # of the evaluation that was over before
            for epoch in trained:
                set_through_sampler(loader, epoch)
                kept = iter(loader)
                seen.append(ids(kept))
            assert seen == whole
    with nostall.DataLoader(EIGHT, 2, tiers=[]) as loader:  # without an end it may follow
        iter(loader)
        set_through_sampler(loader, 2)
        assert ids(loader) == whole[2]


def test_a_loader_that_was_made_before_the_ranks_met_is_refused() -> None:
    """Each rank would train on all samples, as Lightning's own processes do with such a loader."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    source = nostall.Arrays({"id": np.arange(8)})
    alone = nostall.DataLoader(source, 2, epochs=1, tiers=[])
    meant = nostall.DataLoader(source, 2, epochs=1, tiers=[], rank=0, world_size=1)
    sampler = nostall.torch.BatchSampler(8, 2)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with pytest.raises(UsageError, match="make the sampler afterwards"):
            next(iter(sampler))
        with pytest.raises(
            UsageError, match=r"as rank 0 of 1, .* rank 1 of 2 here: make the loader"
        ):
            next(iter(alone))
        assert len(list(meant)) == 4
    finally:
        dist.destroy_process_group()
    assert len(list(alone)) == 4
    alone.close()
    meant.close()


def test_a_group_goes_on_after_a_thread_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    nostall.torch.register_backend()
    dist.init_process_group("nostall", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(3)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="no more threads"):
                dist.all_reduce(ones, async_op=True)
        work = dist.all_reduce(ones, async_op=True)
        work.wait(timedelta(seconds=30))
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("no more threads")


def test_a_wait_is_watched_again_after_a_thread_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from torch.distributed import HashStore

    from nostall.torch._aborts import Aborts, Doing

    class Group:
        def __init__(self) -> None:
            self.ended = threading.Event()

        def end(self) -> None:
            self.ended.set()

        def name(self, rank: int) -> int:
            return rank

    store, mine, theirs = HashStore(), Group(), Group()
    aborts = Aborts(store, 0, 2, mine.end, mine.name, 60)
    other = Aborts(store, 1, 2, theirs.end, theirs.name, 60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with aborts.watching(Doing("barrier")):
            assert aborts.is_waiting()
    assert not aborts.is_waiting()
    with aborts.watching(Doing("barrier")):
        other.announce(7)
        assert mine.ended.wait(30)
    with pytest.raises(PeerError, match="rank 7 aborted"):
        aborts.refuse()
    aborts.close()
    other.close()
