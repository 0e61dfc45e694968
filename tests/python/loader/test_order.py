"""The order of samples is torch's, whatever caches, threads and world sizes are at work."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from loader_ranks import one_rank
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.distributed import DistributedSampler

import nostall
import nostall.plugins.torch_loader
import nostall.torch
from nostall import transforms as t
from nostall.base._sizes import parse_size
from nostall.errors import UsageError


def torch_order(
    count: int, batch: int, world: int, rank: int, seed: int, epoch: int, drop: bool
) -> list[list[int]]:
    sampler = DistributedSampler(
        range(count), num_replicas=world, rank=rank, shuffle=True, seed=seed, drop_last=drop
    )
    sampler.set_epoch(epoch)
    loader = TorchLoader(range(count), batch_size=batch, sampler=sampler, drop_last=drop)
    return [b.tolist() for b in loader]


def content(folder: nostall.ImageFolder) -> dict[bytes, int]:
    """Which sample some bytes are: the test files all differ."""
    found = {Path(folder.describe(i)).read_bytes(): i for i in range(len(folder))}
    assert len(found) == len(folder)
    return found


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("world", "batch"), [(1, 8), (2, 7), (4, 5)])
@pytest.mark.parametrize("tiers", [[], ["ram:1MiB"], ["ram:20KiB"]])
def test_batches_are_those_of_torch(
    image_folder: Path, world: int, batch: int, drop: bool, tiers: list[str]
) -> None:
    folder = nostall.ImageFolder(image_folder)
    ids = content(folder)
    for rank in range(world):
        with nostall.DataLoader(
            folder,
            batch,
            epochs=3,
            seed=11,
            drop_last=drop,
            tiers=tiers,
            **one_rank(rank, world),
        ) as loader:
            for epoch in loader.epochs():
                expected = torch_order(len(folder), batch, world, rank, 11, epoch.index, drop)
                seen = []
                for raw, labels in epoch:
                    samples = [ids[raw[i].tobytes()] for i in range(len(raw))]
                    assert labels.tolist() == [folder.labels[s] for s in samples]
                    seen.append(samples)
                assert seen == expected
                assert len(epoch) == len(expected)


def test_a_users_own_order_is_kept(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    ids = content(folder)
    order = [5, 3, 3, 60, 0, 1]
    with nostall.DataLoader(folder, 4, epochs=2, order=order, tiers=[]) as loader:
        for epoch in loader.epochs():
            seen = [ids[raw[i].tobytes()] for raw, _ in epoch for i in range(len(raw))]
            assert seen == order


def test_an_order_that_the_caller_changes_later_stays() -> None:
    """Also where a state is loaded, which plans anew; the ids are held once, by the core."""
    order = np.arange(40, dtype=np.uint64)[::-1].copy()
    kept = order.tolist()
    lengths = np.arange(40)
    buckets = nostall.Buckets(lengths, 4)
    of_buckets = nostall.Plan(samples=40, order=buckets).epoch_order(0).tolist()
    sampler = nostall.torch.BatchSampler(40, 4, order=order)
    data = nostall.Arrays({"x": np.arange(40)})
    with nostall.DataLoader(data, 4, epochs=1, order=order, tiers=[], output="numpy") as loader:
        state, of_sampler = loader.state_dict(), sampler.state_dict()
        order[:] = lengths[:] = 0
        loader.load_state_dict(state)
        assert [x for batch in loader for x in batch["x"].tolist()] == kept
        assert loader.state_dict()["order"] == state["order"]
        held: Any = loader.plan.order
        assert np.shares_memory(held, loader.plan.native.user_order)
        assert np.shares_memory(held, loader._order)  # type: ignore[arg-type]
        assert not held.flags.writeable
    sampler.load_state_dict(of_sampler)
    assert list(itertools.chain(*sampler)) == kept
    assert nostall.Plan(samples=40, order=buckets).epoch_order(0).tolist() == of_buckets


State = dict[str, object] | None


def parts(
    folder: nostall.ImageFolder,
    world: int,
    state: State = None,
    take: int | None = None,
    **options: Any,
) -> tuple[list[list[list[int]]], State]:
    """The parts of the ranks in every global batch, and the state after `take` of them."""
    ids = content(folder)
    of_rank, states = [], []
    for rank in range(world):
        with nostall.DataLoader(
            folder, tiers=["ram:1MiB"], **options, **one_rank(rank, world)
        ) as loader:
            if "global_batch_size" in options:
                assert loader.batch_size == len(range(rank, options["global_batch_size"], world))
            if state:
                loader.load_state_dict(state)
            batches = itertools.islice(itertools.chain.from_iterable(loader.epochs()), take)
            of_rank.append([[ids[r[i].tobytes()] for i in range(len(r))] for r, _ in batches])
            states.append(loader.state_dict())
    assert all(s == states[0] for s in states)
    return [list(batch) for batch in zip(*of_rank, strict=True)], states[0]


def whole_batches(found: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(itertools.chain(*batch)) for batch in found]


@pytest.mark.parametrize("split", [1, 2, 3, 6])
def test_resume_on_another_world_size_gives_the_same_global_batches(
    image_folder: Path, split: int
) -> None:
    folder = nostall.ImageFolder(image_folder)

    def stream(world: int, state: State = None, take: int | None = None) -> tuple[list, State]:
        """The sorted samples of every global batch."""
        batches, state = parts(folder, world, state, take, batch_size=12 // world, epochs=3, seed=5)
        return whole_batches(batches), state

    whole, _ = stream(2)
    for take in (1, 5, 6, 7, 11):
        head, state = stream(2, take=take)
        tail, _ = stream(split, state)
        assert head + tail == whole, f"after {take} batches"


def test_tiers_keep_what_a_resumed_epoch_still_reads(tmp_path: Path) -> None:
    size, room = 4096, 60
    (tmp_path / "class").mkdir()
    for i in range(200):
        (tmp_path / "class" / f"{i:03d}.jpg").write_bytes(bytes([i]) * size)
    folder = nostall.ImageFolder(tmp_path, index=False)
    with nostall.DataLoader(folder, 10, epochs=3, tiers=[], **one_rank(0, 1)) as loader:
        list(itertools.islice(itertools.chain.from_iterable(loader.epochs()), 20 + 15))
        state = loader.state_dict()
    tiers = [f"ram:{room * size}B"]
    with nostall.DataLoader(
        folder, 10, epochs=3, tiers=tiers, staging="1KiB", **one_rank(0, 1)
    ) as loader:
        loader.load_state_dict(state)
        ends, begins = loader.plan.epoch_order(1)[-30:], loader.plan.epoch_order(2)[:30]
        assert [len(list(epoch)) for epoch in loader.epochs()] == [5, 20]
        stats = loader.stats()
    # 50 are read in what is left of epoch 1, and all of them have room. One that is wanted again before
    # it has come to the tier is read twice: of two staged batches and the one in hand.
    soon = len({*ends.tolist()} & {*begins.tolist()})
    found = stats.epochs[1].origins["ram"].samples
    assert soon < 10 and 50 - soon <= found <= 50
    assert stats.lower_bound_bytes == 200 * size
    assert stats.source_bytes == (250 - found) * size


def test_a_kept_tier_keeps_what_a_resumed_epoch_does_not_read_any_more(
    image_folder: Path, tmp_path: Path
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)

    def job(state: State, epochs: int) -> nostall.observe.Stats:
        with nostall.DataLoader(
            folder, 4, epochs=epochs, tiers=[f"{tmp_path}:1MiB:keep"], **one_rank(0, 1)
        ) as loader:
            state = {**loader.state_dict(), **(state or {})}
            loader.load_state_dict(state)
            for epoch in loader.epochs():
                list(epoch)
            return loader.stats()

    # A second epoch would read from the source again where the files look slower for a moment.
    assert job(None, 1).source_bytes == folder.total_bytes
    assert job({"epoch": 1, "batch": 14}, 2).source_bytes == 0
    assert job(None, 1).source_bytes == 0


@pytest.mark.parametrize("drop_last", [False, True])
def test_any_number_of_ranks_shares_a_global_batch(image_folder: Path, drop_last: bool) -> None:
    folder = nostall.ImageFolder(image_folder)
    options = {"global_batch_size": 6, "epochs": 2, "drop_last": drop_last}
    alone = whole_batches(parts(folder, 1, **options)[0])
    epoch = len(alone) // 2
    lengths = [6] * (len(folder) // 6) + ([] if drop_last else [len(folder) % 6])
    assert len(folder) % 6 == 1  # of the last batch all ranks but one have nothing
    for part in (alone[:epoch], alone[epoch:]):
        assert [len(batch) for batch in part] == lengths
        assert len(set(itertools.chain(*part))) == sum(lengths)
    for old, new, take in ((4, 2, 4), (2, 5, epoch), (5, 4, epoch + 2)):
        head, state = parts(folder, old, None, take, **options)
        tail, _ = parts(folder, new, state, **options)
        assert whole_batches(head + tail) == alone
        for world, found in ((old, head), (new, tail)):
            for batch in found:
                sizes = [len(part) for part in batch]
                assert len(sizes) == world and max(sizes) - min(sizes) <= 1


def test_batch_size_is_that_of_a_rank_or_of_all(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    with pytest.raises(UsageError, match="batch_size=None and global_batch_size=None: pass one"):
        nostall.DataLoader(folder)
    with pytest.raises(UsageError, match="batch_size=2 and global_batch_size=4: pass one"):
        nostall.DataLoader(folder, 2, global_batch_size=4)
    with pytest.raises(UsageError, match="global_batch_size=2 is less than a sample for each of 3"):
        nostall.DataLoader(folder, global_batch_size=2, rank=0, world_size=3)
    with pytest.raises(UsageError, match="global_batch_size"):
        nostall.DataLoader(folder, global_batch_size=0)
    with nostall.DataLoader(folder, 6, rank=0, world_size=2) as loader:
        state = loader.state_dict()
    with (
        nostall.DataLoader(folder, 4, rank=0, world_size=5) as loader,
        pytest.raises(UsageError, match="on 5 ranks pass global_batch_size=12"),
    ):
        loader.load_state_dict(state)
    with nostall.DataLoader(folder, global_batch_size=12, rank=0, world_size=5) as loader:
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epoch": 2, "batch": 1}, "epoch 2, batch 1, outside this job of 2 epochs of 6 batches"),
        ({"epoch": 3}, "epoch 3, batch 0, outside"),
        ({"batch": 7}, "batch 7, outside"),
        ({"epoch": 1.7}, r"epoch=1\.7, which is no whole number from 0 on"),
        ({"epoch": float("nan")}, "epoch=nan"),
        ({"batch": "2"}, "batch='2'"),
        ({"global_batch": "4"}, "global_batch='4'"),
        ({"order_world": -1}, "order_world=-1"),
        ({"order_world": None}, "order_world=None"),
        ({"order_world": 0}, "order_world must be an integer from 1"),
        ({"seed": None}, "seed=None"),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(
    wrong: dict[str, Any], words: str
) -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    with nostall.DataLoader(data, 8, epochs=2, tiers=[], output="numpy") as loader:
        with pytest.raises(UsageError, match=words):
            loader.load_state_dict({**loader.state_dict(), **wrong})
        assert len([batch for epoch in loader.epochs() for batch in epoch]) == 12


def test_resume_in_mid_epoch_repeats_images_bit_for_bit(image_folder: Path) -> None:
    from nostall import transforms as t

    steps = [t.RandomResizedCrop(16), t.RandomHorizontalFlip(), t.ToTensor()]

    def loader() -> nostall.DataLoader:
        return nostall.DataLoader(
            nostall.ImageFolder(image_folder), 8, epochs=2, seed=3, transforms=steps, tiers=[]
        )

    with loader() as first:
        images = [x.clone() for epoch in first.epochs() for x, _ in epoch]
    with loader() as second:
        for _ in itertools.islice(second, 3):
            pass
        state = second.state_dict()
    with loader() as third:
        third.load_state_dict(state)
        rest = [x.clone() for epoch in third.epochs() for x, _ in epoch]
    assert len(rest) == len(images) - 3
    assert all(torch.equal(a, b) for a, b in zip(rest, images[3:], strict=True))


def test_epochs_in_a_list_begin_where_the_loaded_state_is() -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    options: dict[str, Any] = {"epochs": 4, "tiers": [], "output": "numpy"}
    with nostall.DataLoader(data, 8, **options) as loader:
        state = {**loader.state_dict(), "epoch": 1, "batch": 4}
        whole = [[batch["x"].tolist() for batch in epoch] for epoch in loader.epochs()]
    with nostall.DataLoader(data, 8, **options) as loader:
        loader.load_state_dict(state)
        second, third, fourth = loader.epochs()
        iter(second)  # no batch is taken
        assert [batch["x"].tolist() for batch in second] == whole[1][4:]
        assert [batch["x"].tolist() for batch in third] == whole[2]
        assert [batch["x"].tolist() for batch in second] == whole[1]
        assert len(list(fourth)) == 6
        loader.load_state_dict(state)
        second, *_ = loader.epochs()
        loader.set_epoch(0)
        loader.set_epoch(1)
        assert [batch["x"].tolist() for batch in second] == whole[1]


def test_epochs_in_a_list_leave_the_loader_where_it_is() -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    options: dict[str, Any] = {"epochs": 3, "tiers": [], "output": "numpy"}
    with nostall.DataLoader(data, 8, **options) as loader:
        state = {**loader.state_dict(), "epoch": 0, "batch": 4}
        all_of_them = list(loader.epochs())
        assert loader.position == (0, 0) and loader.batches_left == 6
        assert len(list(loader)) == 6
        assert [len(list(epoch)) for epoch in all_of_them[1:]] == [6, 6]
        loader.load_state_dict(state)
        all_of_them = list(loader.epochs())
        assert loader.state_dict() == state
        begun = [iter(epoch) for epoch in all_of_them]
        assert loader.state_dict() == state
        assert [len(list(batches)) for batches in begun] == [2, 6, 6]
        loader.load_state_dict(state)
        first, second = itertools.islice(loader.epochs(), 2)
        assert [len(list(epoch)) for epoch in (first, second)] == [2, 6]
        loader.load_state_dict(state)
        taken = []
        for epoch in list(loader.epochs()):
            loader.set_epoch(epoch.index)
            taken.append(len(list(epoch)))
        assert taken == [2, 6, 6]
        loader.load_state_dict({**state, "batch": 6})
        assert len(list(loader.epochs())) == 2
        loader.set_epoch(0)
        assert list(loader) == [] and len(list(loader)) == 6


def test_epochs_of_which_nothing_is_taken_are_left_out() -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    with nostall.DataLoader(data, 8, epochs=5, tiers=[], output="numpy") as loader:
        seen = []
        for epoch in loader.epochs():
            seen.append(epoch.index)
            if epoch.index in (1, 4):
                next(iter(epoch))
            if epoch.index == 2:
                loader.set_epoch(2)
        assert seen == [0, 1, 2, 3, 4]
        assert loader.position == (4, 1)


@pytest.mark.parametrize("begin", [(0, 0), (0, 4), (1, 0)])
def test_the_loader_itself_begins_with_the_turn_behind_those_left_out(
    begin: tuple[int, int],
) -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    with nostall.DataLoader(data, 8, epochs=4, tiers=[], output="numpy") as loader:
        whole = [[batch["x"].tolist() for batch in epoch] for epoch in loader.epochs()]
        state = loader.state_dict()
        loader.load_state_dict({**state, "epoch": begin[0], "batch": begin[1]})
        taken = {}
        for epoch in loader.epochs():
            if epoch.index >= 2:
                taken[epoch.index] = [batch["x"].tolist() for batch in loader]
        assert taken == {2: whole[2], 3: whole[3]}
        loader.load_state_dict({**state, "epoch": begin[0], "batch": begin[1]})
        for epoch in loader.epochs():
            if epoch.index == 2:
                break
        assert loader.position == begin
        assert [batch["x"].tolist() for batch in loader] == whole[2]
        for _ in loader.epochs():
            pass
        assert loader.position == (3, 0)
        assert [batch["x"].tolist() for batch in loader] == whole[3]


def test_an_iterator_behind_the_last_step_moves_nothing() -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    with nostall.DataLoader(data, 8, steps=10, tiers=[], output="numpy") as loader:
        first = next(iter(loader.epochs()))
        assert len(list(first)) == 6
        for epoch in loader.epochs():
            assert (epoch.index, len(list(loader))) == (1, 4)
        assert loader.position == (1, 4)
        iter(loader)
        assert loader.position == (1, 4)
        with pytest.raises(UsageError, match="has ended"):
            list(loader)
        assert loader.position == (1, 4) and loader.batches_left == 0


def test_a_state_of_another_job_is_refused(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    with nostall.DataLoader(folder, 8, epochs=2, seed=3, tiers=[]) as loader:
        state = loader.state_dict()
    with (
        nostall.DataLoader(folder, 8, epochs=2, seed=4, tiers=[]) as other,
        pytest.raises(nostall.errors.UsageError, match="seed=3"),
    ):
        other.load_state_dict(state)
    with (
        nostall.DataLoader(folder, 9, epochs=2, seed=3, tiers=[]) as other,
        pytest.raises(nostall.errors.UsageError, match="batch_size=8"),
    ):
        other.load_state_dict(state)
    both = (
        "saved with seed=3, global_batch=8, but .* has seed=4, global_batch=9: on 1 rank pass batch"
    )
    with (
        nostall.DataLoader(folder, 9, epochs=2, seed=4, tiers=[]) as other,
        pytest.raises(nostall.errors.UsageError, match=both),
    ):
        other.load_state_dict(state)


def test_set_epoch_goes_where_it_is_told(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    with nostall.DataLoader(folder, 8, epochs=3, seed=1, tiers=[], shuffle=True) as loader:
        by_epoch = [[b.data.tobytes() for b, _ in epoch] for epoch in loader.epochs()]
        for e in (2, 0, 1):
            loader.set_epoch(e)
            assert [b.data.tobytes() for b, _ in loader] == by_epoch[e]
        for wrong, told in (
            (3, "this job of 3 epochs has no epoch 3: pass epochs=4 or more"),
            (-1, "this job of 3 epochs has no epoch -1: epochs count from 0"),
            ("2", "set_epoch takes the number of an epoch, not '2'"),
        ):
            with pytest.raises(nostall.errors.UsageError, match=told):
                loader.set_epoch(wrong)  # type: ignore[arg-type]
    with (
        nostall.DataLoader(folder, 8, steps=3, tiers=[]) as loader,
        pytest.raises(
            nostall.errors.UsageError, match=r"of 3 steps has no .*: pass a larger steps="
        ),
    ):
        loader.set_epoch(4)


def test_a_loader_is_neither_copied_nor_pickled() -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    with nostall.DataLoader(data, 8, tiers=[]) as loader:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"neither copied nor pickled.*loader\.dataset"):
                copied(loader)


def test_the_end_of_a_job_speaks_of_iterations_that_were_left() -> None:
    data = nostall.Arrays({"x": np.arange(48)})
    with nostall.DataLoader(data, 8, epochs=1, tiers=[], output="numpy") as loader:
        next(iter(loader))
        with pytest.raises(UsageError, match="an iteration that is left early counts as one"):
            next(iter(loader))
        loader.set_epoch(0)
        assert len(list(loader)) == 6


def test_what_is_raised_while_a_batch_is_handed_out_loses_none() -> None:
    """Wherever Python looks for signals: where something is called, or returns."""
    data = nostall.Arrays({"x": np.arange(48)})
    hand_out = nostall.DataLoader._hand_out.__code__

    def taken(stop: int) -> int | None:
        """Batches that came before the call of this number was interrupted; None if there is none."""
        calls = itertools.count()

        def interrupt(frame: Any, event: str, _: Any) -> None:
            inside = frame.f_back if event in ("call", "return") else frame
            if inside.f_code is hand_out and next(calls) == stop:
                raise KeyboardInterrupt

        came = 0
        with nostall.DataLoader(data, 8, epochs=1, tiers=[], output="numpy") as loader:
            try:
                sys.setprofile(interrupt)
                for _ in loader:
                    came += 1
            except KeyboardInterrupt:
                sys.setprofile(None)
                assert loader.position == (0, came)
                return came
            finally:
                sys.setprofile(None)
        return None

    counts = list(
        itertools.takewhile(lambda count: count is not None, map(taken, itertools.count()))
    )
    assert sorted(set(counts)) == list(range(6))


def test_labels_and_images_have_the_stated_types(image_folder: Path) -> None:
    from nostall import transforms as t

    folder = nostall.ImageFolder(image_folder)
    steps = [t.Resize(20), t.CenterCrop(16), t.ToTensor()]
    with nostall.DataLoader(folder, 8, transforms=steps, tiers=[]) as loader:
        images, labels = next(iter(loader))
        assert images.shape == (8, 3, 16, 16)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
    with nostall.DataLoader(folder, 8, transforms=steps, tiers=[], output="numpy") as loader:
        array, _ = next(iter(loader))
        assert isinstance(array, np.ndarray)


def labels_of(loader: nostall.DataLoader) -> list[int]:
    return [int(label) for _, labels in loader for label in labels]


def test_epochs_end_though_their_body_takes_nothing(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(folder, 8, epochs=3, tiers=[]) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with nostall.DataLoader(folder, 8, epochs=3, tiers=[]) as loader:
        loader.load_state_dict(state)
        assert [epoch.index for epoch, _ in zip(loader.epochs(), range(9), strict=False)] == [
            0,
            1,
            2,
        ]


def test_an_iterator_that_is_not_used_is_no_epoch_taken(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(folder, 8, epochs=4, tiers=[]) as loader:
        begun = []
        for epoch, _ in zip(loader.epochs(), range(9), strict=False):
            begun.append(epoch.index)
            unused = iter(epoch)
            if epoch.index == 0:
                next(unused)  # and leaves the epoch there
        assert begun == [0, 1, 2, 3]
    with nostall.DataLoader(folder, 8, epochs=4, tiers=[]) as loader:
        for epoch in loader.epochs():
            unused = iter(epoch)
            if epoch.index == 1:
                break
            next(unused)
        assert loader.position == (1, 0)
        assert [len(list(epoch)) for epoch in loader.epochs()] == [len(loader)] * 3


def test_an_epoch_that_the_state_had_ended_is_not_repeated(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(folder, 8, epochs=3, tiers=[]) as loader:
        for i, _ in enumerate(loader):
            if i == len(loader) - 1:
                state = loader.state_dict()
        whole = labels_of(loader)
    with nostall.DataLoader(folder, 8, epochs=3, tiers=[]) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert labels_of(loader) == []
        loader.set_epoch(1)
        assert labels_of(loader) == whole
    with nostall.DataLoader(folder, 8, epochs=3, tiers=[]) as loader:
        loader.load_state_dict(state)
        assert labels_of(loader) == whole


def test_a_state_is_read_by_the_order_that_it_goes_on_with() -> None:
    """Repeated augmentation cuts an epoch to a multiple of the ranks, unless batches are of all."""
    source = nostall.Arrays({"x": np.arange(256)})
    sizes = {"whole": {"global_batch_size": 15}, "each": {"batch_size": 5}}
    states: dict[str, list[dict[str, Any]]] = {}

    def loader(size: str) -> nostall.DataLoader:
        order = nostall.RepeatedAugmentation()
        place = one_rank(0, 3)
        return nostall.DataLoader(source, epochs=2, order=order, tiers=[], **place, **sizes[size])

    for size in sizes:
        with loader(size) as made:
            states[size] = [made.state_dict() for epoch in made.epochs() for _ in epoch]
    assert {size: len(found) for size, found in states.items()} == {"whole": 36, "each": 34}
    for size, other in (("whole", "each"), ("each", "whole")):
        for state in (states[size][0], states[size][len(states[size]) // 2 - 1], states[size][-1]):
            with loader(other) as made:
                made.load_state_dict(state)
                left = [len(list(epoch)) for epoch in made.epochs()]
            assert 0 not in left
            assert sum(left) == len(states[size]) - 1 - states[size].index(state)


def taken_until(loader: nostall.DataLoader, batches: int) -> dict[str, Any]:
    """The loader's state after so many batches."""
    for i, _ in enumerate(loader, 1):
        if i == batches:
            break
    return loader.state_dict()


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 16}, {}])
def test_an_iterator_that_is_not_used_leaves_the_loaded_place(
    image_folder: Path, length: dict[str, Any]
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    options: dict[str, Any] = {"seed": 1, "tiers": [], **length}
    with nostall.DataLoader(folder, 8, **options) as loader:
        labels = labels_of(loader)
        loader.set_epoch(0)
        state = taken_until(loader, 3)
        loader.set_epoch(0)
        nothing_left = taken_until(loader, 8)
    with nostall.DataLoader(folder, 8, **options) as loader:
        loader.load_state_dict(state)
        unused = iter(loader)
        assert loader.state_dict() == state
        loader.set_epoch(0)
        assert labels_of(loader) == labels[24:]
        del unused
        # The place was taken: another iteration begins the epoch anew.
        loader.set_epoch(0)
        assert next(iter(loader))[1].tolist() == labels[:8]
        loader.load_state_dict(nothing_left)
        iter(loader)
        loader.set_epoch(0)
        assert labels_of(loader) == (labels[61:] if "steps" in length else [])


def test_an_iterator_that_is_not_used_begins_no_epoch(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(folder, 8, steps=16, seed=1, tiers=[]) as loader:
        labels = labels_of(loader)
        loader.set_epoch(0)
        taken_until(loader, 3)
        iter(loader)
        loader.set_epoch(0)  # nothing was loaded: from its first batch
        assert labels_of(loader) == labels


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 16}])
@pytest.mark.parametrize("transforms", [None, len])
def test_a_state_that_is_loaded_ends_the_iterations_before(
    image_folder: Path, length: dict[str, Any], transforms: Any
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    options: dict[str, Any] = {"seed": 1, "tiers": [], "transforms": transforms, **length}
    refused = pytest.raises(UsageError, match="a state was loaded into this loader: begin a new it")
    with nostall.DataLoader(folder, 8, **options) as loader:
        whole = [labels.tolist() for epoch in loader.epochs() for _, labels in epoch]
    with nostall.DataLoader(folder, 8, **options) as loader:
        first = loader.state_dict()
        taken, unused, epoch = iter(loader), iter(loader), next(loader.epochs())
        as_torchs = next(nostall.plugins.torch_loader.TorchLoader(loader).epochs())
        for _ in range(3):
            next(taken)
        state = loader.state_dict()
        next(taken)
        loader.load_state_dict(state)
        for before in (taken, unused):
            with refused:
                next(before)
            assert loader.state_dict() == state
        for old in (epoch, as_torchs):
            with refused:
                next(iter(old))
        assert loader.state_dict() == state
        batches = len(loader) if "epochs" in length else 16
        assert [labels.tolist() for _, labels in loader] == whole[3:batches]
        # Also in the last batch of an epoch, where all steps are one iteration.
        loader.load_state_dict(first)
        taken = iter(loader)
        for _ in range(8):
            next(taken)
        loader.load_state_dict(first)
        if "steps" in length:
            with refused:
                next(taken)
        else:
            assert next(taken, None) is None
        # A loop over epochs goes on with that of the state.
        seen: list[list[int]] = []
        for epoch in loader.epochs():
            for _, labels in epoch:
                seen.append(labels.tolist())
                if len(seen) == 2:
                    loader.load_state_dict(first)
                    break
        assert seen == whole[:2] + whole


def test_an_iterator_of_before_the_end_begins_nothing(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    loader = nostall.DataLoader(folder, 8, epochs=2, tiers=[])
    unused, epochs = iter(loader), loader.epochs()
    first = next(epochs)
    loader.close()
    for begin in (lambda: next(unused), lambda: next(iter(first))):
        with pytest.raises(UsageError, match="this loader is closed"):
            begin()
    assert loader._loader is None


def test_going_back_before_the_start_places_what_comes_from_there(image_folder: Path) -> None:
    """Samples that the tiers cannot hold are chosen by the epochs that are read."""
    folder = nostall.ImageFolder(image_folder, index=False)
    options: dict[str, Any] = {"epochs": 3, "seed": 1, "tiers": [f"ram:{folder.total_bytes // 2}"]}
    with nostall.DataLoader(folder, 8, **options) as loader:
        whole = [labels_of(loader) for _ in range(3)]
        bound = loader.stats().lower_bound_bytes
        state = {**loader.state_dict(), "epoch": 2, "batch": 0}
    with nostall.DataLoader(folder, 8, **options) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert [labels_of(loader) for _ in range(3)] == whole
        assert loader.stats().lower_bound_bytes == bound


@pytest.mark.parametrize("transforms", [None, [t.CenterCrop(8), t.ToTensor()]])
def test_a_batch_larger_than_the_data_set_is_all_of_it(image_folder: Path, transforms: Any) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    options: dict[str, Any] = {"epochs": 1, "transforms": transforms}
    with nostall.DataLoader(folder, 2**31 - 1, **options) as loader:
        assert [len(labels) for _, labels in loader] == [len(loader.plan.epoch_order(0))]


def test_the_bound_of_a_loader_without_an_end_is_of_the_epochs_that_began(
    image_folder: Path,
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(folder, 8, tiers=[]) as loader:
        for epoch in (0, 1, 10**9, 10**9, 7):
            loader.set_epoch(epoch)
            labels_of(loader)
        stats = loader.stats()
    assert stats.source_bytes == 5 * folder.total_bytes
    # What is read of an epoch a second time may have been left out the first time.
    assert stats.lower_bound_bytes == 4 * folder.total_bytes


@pytest.mark.parametrize(
    "other", [{"shuffle": False}, {"order": list(range(60, -1, -1))}, {"order": "keyed"}]
)
def test_a_state_of_another_order_is_refused(image_folder: Path, other: dict[str, Any]) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    for mine in ({}, {"order": list(range(61))}):
        state = nostall.DataLoader(folder, 8, tiers=[], **mine).state_dict()
        with pytest.raises(UsageError, match="order="):
            nostall.DataLoader(folder, 8, tiers=[], **other).load_state_dict(state)
        del state["order"]
        with pytest.raises(UsageError, match="order=None"):
            nostall.DataLoader(folder, 8, tiers=[], **mine).load_state_dict(state)


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_an_empty_share_of_the_last_batch_has_the_shape_of_the_others(
    make_folder: Callable[[int], Path], output: Literal["numpy", "torch"]
) -> None:
    folder = nostall.ImageFolder(make_folder(10), index=False)

    def corner(image: np.ndarray) -> np.ndarray:
        return image[:2, :3].copy()

    def make(rank: int, world: int) -> nostall.DataLoader:
        return nostall.DataLoader(
            folder,
            8 // world,
            rank=rank,
            world_size=world,
            transforms=corner,
            decode=True,
            output=output,
            tiers=[],
        )

    with make(0, 2) as loader:
        state = loader.state_dict()
    with make(3, 4) as loader:
        loader.load_state_dict(state)
        assert [(tuple(x.shape), len(y)) for x, y in loader] == [
            ((2, 2, 3, 3), 2),
            ((0, 2, 3, 3), 0),
        ]


def test_a_resume_that_leaves_ranks_without_samples_is_warned_of(
    make_folder: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = nostall.ImageFolder(make_folder(10), index=False)

    def warned(rank: int, world: int, **options: Any) -> list[str]:
        caplog.clear()
        drop_last = options.pop("drop_last", False)
        options = {"batch_size": 8 // world, **options}
        others: dict[str, Any] = {"drop_last": drop_last, "tiers": []}
        with nostall.DataLoader(folder, 4, **one_rank(0, 2), **others) as loader:
            state = loader.state_dict()
        with nostall.DataLoader(folder, **options, **one_rank(rank, world), **others) as loader:
            loader.load_state_dict(state)
        return [record.message for record in caplog.records if "none" in record.message]

    (told,) = warned(0, 4)
    assert "has 2 samples for 4 ranks, as the job began on 2 ranks, so some get none" in told
    assert "sum losses, or pass drop_last=True from the start" in told
    assert warned(1, 4) == [] == warned(0, 2) == warned(0, 4, drop_last=True)
    assert warned(0, 4, batch_size=None, global_batch_size=8) == []


@dataclass(frozen=True)
class Pixels:
    values: torch.Tensor


def listed(images: list[Any]) -> dict[str, Any]:
    """A batch as collators of other libraries make it, which also change what they are given."""
    given = [image.pop("x") if isinstance(image, dict) else image for image in images]
    lengths = [len(image) for image in given]
    return {
        "pixel_values": torch.stack([torch.as_tensor(image) for image in given]),
        "names": tuple("image" for _ in given),
        "ends": np.cumsum([0, *lengths]),
        "count": len(given),
        "pixels": Pixels(torch.zeros(len(given), 2)),
        "columns": (torch.zeros(len(given), 2), "all"),
    }


def as_item(image: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": image.transpose(2, 0, 1)[:, :8, :8].astype(np.float32)}


@pytest.mark.parametrize("way", ["native", "called", "cached", "bytes"])
def test_collate_is_never_given_no_samples(make_folder: Callable[[int], Path], way: str) -> None:
    folder = nostall.ImageFolder(make_folder(5), index=False)
    data: Any = folder
    options: dict[str, Any] = {"collate": listed}
    if way == "native":
        options["transforms"] = [t.Resize((8, 8)), t.ToTensor()]
    elif way == "called":
        options |= {"transforms": as_item, "decode": True}
    elif way == "cached":
        images = nostall.torch.Dataset(folder, as_item, decode=True, tiers=[])
        data = nostall.Cached([images[i][0] for i in range(5)], makers=1)
    else:
        options["collate"] = lambda samples: listed([sample[:192] for sample in samples])
    with nostall.DataLoader(
        data, None, global_batch_size=4, **one_rank(1, 2), epochs=1, shuffle=False, tiers=[],
        **options,
    ) as loader:  # fmt: skip
        batches = [batch if way == "cached" else batch[0] for batch in loader]
    shape = (192,) if way == "bytes" else (3, 8, 8)
    assert [batch["pixel_values"].shape for batch in batches] == [(2, *shape), (0, *shape)]
    none = batches[1]
    assert none["pixel_values"].dtype == batches[0]["pixel_values"].dtype
    assert (len(none["names"]), none["ends"].tolist(), none["count"]) == (0, [0], 0)
    assert none["pixels"].values.shape == (0, 2)
    assert none["columns"][0].shape == (0, 2) and none["columns"][1] == "all"


def counts_alone(samples: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(count=torch.tensor(len(samples)))


def test_a_batch_without_samples_is_cut_from_others_or_left_to_collate(
    make_folder: Callable[[int], Path],
) -> None:
    def last(collate: Callable[[list[Any]], Any]) -> Any:
        with nostall.DataLoader(
            nostall.ImageFolder(make_folder(5), index=False), None, global_batch_size=4,
            **one_rank(1, 2), epochs=1, shuffle=False, tiers=[], collate=collate,
        ) as loader:  # fmt: skip
            return [batch[0] for batch in loader][-1]

    counted = last(lambda samples: {"of torch": torch.tensor(len(samples)), "any": np.bool_(True)})
    assert (counted["of torch"].item(), counted["any"]) == (0, True)
    # What cannot be cut is asked for.
    assert last(counts_alone).count.item() == 0

    def taken(samples: list[Any]) -> SimpleNamespace:
        return SimpleNamespace(first=samples[0])

    with pytest.raises(UsageError, match="cannot be cut to none"):
        last(taken)


@pytest.mark.parametrize("fields", [False, True])
@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5], [3] * 5])
def test_an_empty_share_is_like_samples_that_the_order_gives(
    make_folder: Callable[[int], Path], fields: bool, order: list[int]
) -> None:
    folder = nostall.ImageFolder(make_folder(6), index=False)
    files = [folder.describe(i) for i in range(6)]
    data = nostall.Files({"image": files}, {"label": np.arange(6)}) if fields else folder
    Path(files[0]).unlink()

    def corner(image: np.ndarray) -> np.ndarray:
        return image[:2, :3].copy()

    with nostall.DataLoader(
        data, None, global_batch_size=4, **one_rank(1, 2), epochs=1, order=order, tiers=[],
        transforms={"image": corner} if fields else corner, decode=True, output="numpy",
    ) as loader:  # fmt: skip
        images = [batch["image"] if fields else batch[0] for batch in loader]
    assert [image.shape for image in images] == [(2, 2, 3, 3), (0, 2, 3, 3)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"threads": 0},
        {"epochs": 2**33},
        {"batch_size": 2.5},
        {"order": [-1, 2]},
        {"order": np.array([3, -1])},
        {"order": [0.5, 1.0]},
        {"order": [[1, 2]]},
        {"order": []},
        {"staging": 0.5},
        {"tiers": ["ram:99999999TiB"]},
    ],
)
def test_values_that_cannot_be_are_usage_errors(image_folder: Path, wrong: dict[str, Any]) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with pytest.raises(UsageError):
        nostall.DataLoader(folder, **{"batch_size": 4, "tiers": [], **wrong})


def test_sizes_are_exact() -> None:
    assert parse_size("9007199254740993") == 9007199254740993
