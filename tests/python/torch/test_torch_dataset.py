"""torch's own DataLoader over the tiers of a node."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch.utils.data import DataLoader, RandomSampler

import nostall
import nostall.torch
from nostall import fields, transforms
from nostall.errors import CorruptionError, IoError, UsageError


def sizes_of(folder: nostall.ImageFolder, ids: list[int]) -> list[int]:
    return [int(folder.sizes[i]) for i in ids]


def test_forked_workers_of_each_epoch_find_what_the_last_ones_read(
    make_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    root = make_folder(13)
    folder = nostall.ImageFolder(root, index=False)
    dataset = nostall.torch.Dataset(folder, len, tiers=["ram:1MiB"])
    sampler = nostall.torch.BatchSampler(len(folder), 4, epochs=3, seed=1, rank=0, world_size=1)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert [sizes.tolist() for sizes, _ in loader] == [sizes_of(folder, ids) for ids in sampler]
        assert dataset.tiers.kept_bytes == (folder.total_bytes, 0)
        root.rename(tmp_path / "away") if epoch == 0 else None
    # The rest of an epoch, from the state after three batches of it.
    sampler.load_state_dict({**sampler.state_dict(batches=3), "epoch": 1})
    ids, ends = nostall.Plan(samples=13, batch_size=4, epochs=3, seed=1).rank_epoch(1, 0)
    rest = [ids[begin:end].tolist() for begin, end in itertools.pairwise(ends[2:])]
    assert [sizes.tolist() for sizes, _ in loader] == [sizes_of(folder, b) for b in rest]
    assert len(rest) == 1
    other = DataLoader(dataset, batch_size=5, sampler=RandomSampler(range(13)))
    assert sorted(size for sizes, _ in other for size in sizes.tolist()) == sorted(
        folder.sizes.tolist()
    )
    assert dataset.tiers.taken == {"ram": 13, "file": 0, "source": 0}


@pytest.mark.multi
def test_spawned_workers_stay_and_share(make_folder: Callable[[int], Path], tmp_path: Path) -> None:
    root = make_folder(9)
    folder = nostall.ImageFolder(root, index=False)
    dataset = nostall.torch.Dataset(folder, len, tiers=[f"{tmp_path}:1MiB"])
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=1,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    for epoch in range(2):
        assert [sizes.tolist() for sizes, _ in loader] == [
            folder.sizes[i : i + 4].tolist() for i in (0, 4, 8)
        ]
        root.rename(tmp_path / "away") if epoch == 0 else None
    # What they read is here too.
    assert dataset[8] == (int(folder.sizes[8]), int(folder.labels[8]))
    assert dataset.tiers.taken == {"ram": 0, "file": 1, "source": 0}


def test_items_have_the_fields_that_loaders_have(image_folder: Path, tmp_path: Path) -> None:
    paths = sorted(image_folder.rglob("*.jpg"))[:6]
    data = nostall.Files(
        {"image": [str(p) for p in paths]},
        {
            "label": list(range(6)),
            "text": [p.name for p in paths],
            "box": [[0, 1, 2, i] for i in range(6)],
        },
    )
    dataset = nostall.torch.Dataset(data, decode=True)
    with nostall.DataLoader(
        data, 1, order="sequential", output="numpy", epochs=1, tiers=[]
    ) as loader:
        for i, batch in enumerate(loader):
            item = dataset[i]
            assert list(item) == ["image", "label", "text", "box"]
            decoded = nostall._native.decode_rgb(batch["image"].sample(0))
            assert np.array_equal(item["image"], decoded)
            assert item["label"] == batch["label"][0] == i
            assert item["text"] == batch["text"][0] == paths[i].name
            assert np.array_equal(item["box"], batch["box"][0])
    chosen = nostall.torch.Dataset(
        nostall.Subset(data, [4, 2]), lambda item: item["text"], fields=["text"]
    )
    assert chosen.__getitems__([0, 1, -1]) == [paths[4].name, paths[2].name, paths[2].name]
    image, label = nostall.torch.Dataset(nostall.ImageFolder(image_folder), decode=True)[3]
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    assert label == 0


class Slow:
    """Items that say in a file that they were made; item 3 needs more room than the others."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> Any:
        with self.log.open("ab") as log:
            log.write(bytes([i]))
        return {"values": np.full(900 if i == 3 else 40, i), "name": f"item {i}"}


def test_items_of_a_data_set_are_made_once_by_the_workers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cached = nostall.Cached(Slow(log), makers=1, max_bytes=1024)
    log.write_bytes(b"")
    dataset = nostall.torch.Dataset(nostall.Subset(cached, range(29, -1, -1)), tiers=["ram:1MiB"])
    loader = DataLoader(dataset, None, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        assert [(item["name"], item["values"].tolist()) for item in loader] == [
            (f"item {i}", [i] * (900 if i == 3 else 40)) for i in range(29, -1, -1)
        ]
    cached.close()
    assert dataset[0]["name"] == "item 29"
    made = sorted(log.read_bytes())
    # The one that has no room is made to find that out, and then by each epoch.
    assert made == sorted([*range(30), 3, 3])


class Corrected:
    """Item i is i, but for one that the look at its opening leaves out."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> int:
        return i + self.by * (i == 1)


def test_items_that_differ_where_nobody_looked_share_no_tiers() -> None:
    with contextlib.ExitStack() as held:
        first, second = (
            held.enter_context(nostall.Cached(Corrected(by), makers=1)) for by in (1, 2)
        )
        assert first.fingerprint == second.fingerprint
        again = held.enter_context(pickle.loads(pickle.dumps(second)))
        third = held.enter_context(nostall.Cached(Corrected(3), makers=1))
        made = [
            nostall.torch.Dataset(source, tiers="ram:1MiB")
            for source in (first, second, again, third, nostall.Concat([second, third]))
        ]
        assert [data[1] for data in made] == [2, 3, 3, 4, 3]
        assert made[-1][1001] == 4
        assert made[2].tiers.taken == {"ram": 1, "file": 0, "source": 1}  # as `second` has it
        both = nostall.torch.Dataset(nostall.Concat([first, third]), tiers="ram:1MiB")
        assert [both[1], both[1001]] == [2, 4]
        with pytest.raises(UsageError, match=r"items may be others.*the same version="):
            nostall.torch.Dataset(first, tiers=made[1].tiers)
        items = Corrected(6)
        for _ in range(2):  # the second one has what the first one keeps
            of_one = nostall.torch.Dataset(
                held.enter_context(nostall.Cached(items, makers=1)), tiers="ram:1MiB"
            )
            assert of_one[1] == 7
        assert of_one.tiers.taken == {"ram": 1, "file": 0, "source": 1}
        assert first.numbers == (second.numbers[0] - 1,) and again.numbers == second.numbers
        assert third.numbers == (second.numbers[0] + 1,)  # the copy in between has taken none
        kept = [held.enter_context(nostall.Cached(Corrected(0), makers=1, version=1)) for _ in "ab"]
        shared = [nostall.torch.Dataset(source, tiers="ram:1MiB") for source in kept]
        assert [data[5] for data in shared] == [5, 5]
        assert shared[1].tiers.taken == {"ram": 1, "file": 0, "source": 1}


class Alone:
    """Items that say whether two threads ask for them at once."""

    def __init__(self) -> None:
        self._both: threading.Barrier | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        if self._both is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._both.wait(0.5)
                return {"together": 1}
        return {"together": 0}

    def meet(self) -> None:
        self._both = threading.Barrier(2)


def test_a_forked_child_makes_one_item_at_a_time() -> None:
    data = Alone()
    cached = nostall.Cached(data, makers=1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            data.meet()
            with ThreadPoolExecutor(2) as pool:
                items = pool.map(cached.__getitem__, range(2))
                os.write(write, bytes(item["together"] for item in items))
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 2) == bytes(2)
    os.close(read)
    cached.close()


@dataclass(frozen=True)
class Asking(fields.Custom):
    """Decodes item 0 with the help of item 1."""

    dataset: ClassVar[Any]
    dtype: str = "int64"
    shape: tuple[int, ...] = (1,)

    def decode(self, stored: bytes) -> Any:
        if stored == b"\0":
            self.dataset[1]
        return np.array([stored[0]], np.int64)


def test_an_item_may_be_asked_for_while_another_one_is_made() -> None:
    values = {"a": [b"\0", b"\1"], "b": [b"what item 0 has", b"and what item 1 has"]}
    source = nostall.Files({}, values, schema={"a": Asking(), "b": fields.Bytes()})
    Asking.dataset = nostall.torch.Dataset(source, tiers=[])
    items = [Asking.dataset[i] for i in range(2)]
    assert [bytes(item["b"]) for item in items] == values["b"]


@dataclass(frozen=True)
class Drawing(fields.Custom):
    """Decodes to its draw."""

    dtype: str = "uint64"

    def decode(self, stored: bytes, draw: int = 0) -> Any:
        return np.array(draw, np.uint64)


def test_kinds_draw_as_torch_has_seeded_the_process() -> None:
    source = nostall.Files({}, {"a": [b"a", b"b"]}, schema={"a": Drawing()})
    data = nostall.torch.Dataset(source, tiers=[])

    def drawn(seed: int) -> list[int]:
        random.seed(seed)
        return [int(data[i]["a"]) for i in (0, 1, 1)]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 6


def test_damage_is_named(make_folder: Callable[[int], Path]) -> None:
    root = make_folder(4)
    victim = root / "class1" / "001.jpg"
    victim.write_bytes(b"no image at all")
    folder = nostall.ImageFolder(root, index=False)
    at = [folder.describe(i) for i in range(4)].index(str(victim))
    with pytest.raises(CorruptionError, match=r"001\.jpg: "):
        nostall.torch.Dataset(folder, decode=True)[at]
    dataset = nostall.torch.Dataset(folder, tiers=[])
    assert dataset[at] == (b"no image at all", 1)
    victim.write_bytes(b"now image at al")
    with pytest.raises(CorruptionError, match=r"001\.jpg.*not those that were read first"):
        dataset[at]
    victim.unlink()
    with pytest.raises(IoError, match=r"001\.jpg"):
        dataset[at]
    with pytest.raises(IndexError):
        dataset[4]


def test_steps_of_the_loader_are_refused(make_folder: Callable[[int], Path]) -> None:
    folder = nostall.ImageFolder(make_folder(2), index=False)
    for steps in ([transforms.ToTensor()], transforms.ToTensor()):
        with pytest.raises(
            UsageError, match=r"transform must be a function .* of nostall\.DataLoader"
        ):
            nostall.torch.Dataset(folder, steps)  # type: ignore[arg-type]


def test_a_part_is_that_of_the_source(make_folder: Callable[[int], Path]) -> None:
    dataset = nostall.torch.Dataset(nostall.ImageFolder(make_folder(2), index=False))
    with pytest.raises(UsageError, match=r"an integer as its index: nostall\.Subset"):
        dataset[0:2]  # type: ignore[index]
