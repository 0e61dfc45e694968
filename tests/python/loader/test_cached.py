"""Data sets in Python behind the tiers: each item made once, in the plan's order, by processes."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import logging
import operator
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import prefork
import pytest
import torch
from light import Five, FromAnother, first_three
from loader_ranks import own_job
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

import nostall
from nostall.base import _children
from nostall.errors import CorruptionError, IoError, TransformError, UsageError
from nostall.plugins.torch_loader import TorchLoader
from nostall.source import _makers

N = 50


class Items(Dataset[Any]):
    """Notes in a file which item was made by which process."""

    def __init__(self, notes: Path | None = None, n: int = N) -> None:
        self.notes, self.n = notes, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if self.notes is not None:
            with self.notes.open("a") as file:
                file.write(f"{i} {os.getpid()}\n")
        return {"image": torch.full((3, 4), float(i)), "label": i % 7, "name": f"{i:03d}"}

    def made(self) -> list[int]:
        assert self.notes is not None
        return [int(line.split()[0]) for line in self.notes.read_text().splitlines()]


def as_torch_has_it(
    dataset: Any, epoch: int, batch: int, collate: Any = default_collate
) -> list[Any]:
    sampler: Any = DistributedSampler(dataset, 1, 0, shuffle=True, seed=5)
    sampler.set_epoch(epoch)
    return list(DataLoader(dataset, batch, sampler=sampler, collate_fn=collate))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.fixture
def cached() -> Any:
    """Makes Cached data sets, and ends their processes."""
    opened: list[nostall.Cached] = []

    def make(dataset: Any, **options: Any) -> nostall.Cached:
        opened.append(nostall.Cached(dataset, **{"makers": 2, **options}))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


Make = Callable[..., nostall.Cached]


@pytest.mark.parametrize("tiers", [["ram:1MiB"], ["ram:4KiB"], []])
def test_batches_are_those_of_torch(cached: Make, tiers: list[str]) -> None:
    data = Items()
    with nostall.DataLoader(cached(data), 8, epochs=3, seed=5, tiers=tiers) as loader:
        for epoch in loader.epochs():
            assert equal(list(epoch), as_torch_has_it(data, epoch.index, 8))


def test_items_are_made_once_and_elsewhere(cached: Make, tmp_path: Path) -> None:
    data = Items(tmp_path / "notes")
    source = cached(data)
    looked = len(data.made())
    assert looked < N
    with nostall.DataLoader(source, 8, epochs=3, tiers=["ram:1MiB"]) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                pass
    assert sorted(data.made()[looked:]) == list(range(N))
    pids = {line.split()[1] for line in (tmp_path / "notes").read_text().splitlines()}
    assert len(pids) <= 2
    assert str(os.getpid()) not in pids


def plus_one(item: Any) -> Any:
    return item["image"] + 1, item["label"]


class Gated(Dataset[Any]):
    """Items 4 to 15 are late, from `begun` on, until there is `go`."""

    def __init__(self, folder: Path) -> None:
        self.begun, self.go = folder / "begun", folder / "go"

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        deadline = time.monotonic() + 60
        while 4 <= i < 16 and self.begun.exists() and not self.go.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"item {i} is made before the first batch is taken")
            time.sleep(0.01)
        return i


def test_a_batch_does_not_wait_for_items_of_later_ones(cached: Make, tmp_path: Path) -> None:
    items = Gated(tmp_path)
    data = cached(items, makers=4)
    with nostall.DataLoader(data, 4, epochs=1, shuffle=False, tiers=[], output="numpy") as loader:
        items.begun.touch()
        batches = iter(loader)
        first = next(batches)
        items.go.touch()
        assert [i for batch in [first, *batches] for i in batch.tolist()] == list(range(64))


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_then_is_called_in_every_epoch(cached: Make, workers: Any) -> None:
    source = cached(Items(n=20), then=plus_one)
    with nostall.DataLoader(
        source, 8, epochs=2, seed=5, tiers=["ram:1MiB"], workers=workers, threads=1
    ) as loader:
        for epoch in loader.epochs():
            wanted = as_torch_has_it(
                Items(n=20), epoch.index, 8, lambda items: default_collate([*map(plus_one, items)])
            )
            assert equal(list(epoch), wanted)


class Ragged(Items):
    def __getitem__(self, i: int) -> Any:
        return np.arange(i * 100, dtype=np.int32), i


def test_a_users_collate_gets_the_items(cached: Make, caplog: pytest.LogCaptureFixture) -> None:
    source = cached(Ragged())
    with (
        caplog.at_level(logging.WARNING),
        nostall.DataLoader(
            source,
            8,
            epochs=2,
            seed=5,
            tiers=["ram:2MiB"],
            output="numpy",
            collate=lambda items: items,
        ) as loader,
    ):
        for epoch in loader.epochs():
            for batch in epoch:
                for values, i in batch:
                    assert values.tolist() == list(range(i * 100))
    # The largest is among those that were looked at.
    assert not [m for m in caplog.messages if "max_bytes=" in m]


def test_items_without_room_are_made_anew(
    cached: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Noted(Ragged):
        def __getitem__(self, i: int) -> Any:
            super(Ragged, self).__getitem__(i)
            return super().__getitem__(i)

    data = Noted(tmp_path / "notes")
    source = cached(data, max_bytes=10_000)
    looked = len(data.made())
    with (
        caplog.at_level(logging.WARNING),
        nostall.DataLoader(
            source, 8, epochs=2, tiers=["ram:2MiB"], output="numpy", collate=lambda items: items
        ) as loader,
    ):
        for epoch in loader.epochs():
            seen = {i: len(values) for batch in epoch for values, i in batch}
            assert seen == {i: i * 100 for i in range(N)}
    assert len([m for m in caplog.messages if "max_bytes=" in m]) == 1
    made = data.made()[looked:]
    assert {i for i in made if made.count(i) > 1} == set(range(25, N))  # 25 * 400 bytes and more


class Failing(Items):
    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise ValueError("seven")
        if i == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return i


def test_an_item_that_raises_is_named(cached: Make) -> None:
    data = Failing(n=8)
    with pytest.raises(
        TransformError, match=r"item 7 of Failing cannot be made: ValueError: seven .*line"
    ):
        cached(data)


class FailingLate(Items):
    """Only after it was looked at; without a signal of which the forked faulthandler would tell."""

    def __init__(self, flag: Path, n: int, ends: signal.Signals = signal.SIGTRAP) -> None:
        super().__init__(None, n)
        self.flag = flag
        self.ends = ends

    def __getitem__(self, i: int) -> Any:
        if not self.flag.exists() or i not in (7, 8):
            return i
        if i == 7:
            raise ValueError("seven")
        return os.kill(os.getpid(), self.ends)


def test_items_that_raise_or_crash_end_the_epoch_or_are_replaced(
    cached: Make, tmp_path: Path
) -> None:
    data = FailingLate(tmp_path / "flag", 20)
    source = cached(data)
    data.flag.touch()
    with (
        nostall.DataLoader(source, 5, tiers=[], shuffle=False) as loader,
        pytest.raises(
            CorruptionError, match=r"item 7 of FailingLate \(sample 7\).*ValueError: seven"
        ),
    ):
        list(loader)
    for tiers in ([], ["ram:1MiB"]):
        with nostall.DataLoader(
            source, 5, tiers=tiers, shuffle=False, on_error="substitute", epochs=2
        ) as loader:
            for epoch in loader.epochs():
                values = torch.cat(list(epoch)).tolist()
                assert [v for i, v in enumerate(values) if i not in (7, 8)] == [
                    i for i in range(20) if i not in (7, 8)
                ]
                assert not {7, 8} & set(values)
            assert loader.stats().epochs[0].substituted == [7, 8]
    with pytest.raises(IoError, match="ended by SIGTRAP: most often a library in it crashed"):
        source.read(8)


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_an_item_whose_makers_are_killed_is_not_taken_for_a_bad_one(
    cached: Make, tmp_path: Path, on_error: Any
) -> None:
    data = FailingLate(tmp_path / "flag", 20, signal.SIGKILL)
    source = cached(data, makers=1)
    data.flag.touch()
    told = (
        r"item 8 of FailingLate \(sample 8\) cannot be made: .* ended by SIGKILL: most often memory "
        r"ran out .*fewer makers="
    )
    # The item itself, and where item 7 finds nothing but item 8 to take its place.
    for samples in ([9, 8], [7, 8]) if on_error == "substitute" else ([9, 8],):
        part = nostall.Subset(source, samples)
        with (
            nostall.DataLoader(
                part, 2, epochs=1, tiers=[], shuffle=False, on_error=on_error
            ) as loader,
            pytest.raises(TransformError, match=told.replace("sample 8", "sample 1")),
        ):
            list(loader)
    # They have memory again.
    data.flag.unlink()
    with nostall.DataLoader(source, 5, tiers=[], shuffle=False, on_error=on_error) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(20))


class KilledOnce(Items):
    """As by a system without memory: the item is not to blame."""

    def __init__(self, armed: Path) -> None:
        super().__init__(None, 20)
        self.armed = armed

    def __getitem__(self, i: int) -> Any:
        if i == 7 and self.armed.exists():
            self.armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return i


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_an_item_whose_maker_is_killed_is_made_by_another(
    cached: Make, tmp_path: Path, on_error: Any
) -> None:
    data = KilledOnce(tmp_path / "armed")
    source = cached(data)
    data.armed.touch()
    with nostall.DataLoader(source, 5, tiers=[], shuffle=False, on_error=on_error) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(20))
        assert loader.stats().epochs[0].substituted == []
    assert not data.armed.exists()


class Random(Items):
    def __getitem__(self, i: int) -> Any:
        return torch.rand(3)


class OneDiffers:
    """One item is not like the others."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def __len__(self) -> int:
        return 200

    def __getitem__(self, i: int) -> Any:
        return self.other if i == 101 else {"x": np.full(3, i), "y": (i, "a")}


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_an_item_of_another_structure_is_named(cached: Make, output: Any) -> None:
    x = np.zeros(3, np.int64)
    for other, how in [
        ((x, 1), "is tuple, and not dict"),
        ({"x": x, "z": 1}, r"has the keys \['x', 'z'\], and not \['x', 'y'\]"),
        ({"x": x[:2], "y": (1, "a")}, r"has the shape \(2,\) at \['x'\], and not \(3,\)"),
        ({"x": x, "y": (1,)}, r"has 1 values at \['y'\], and not 2"),
    ]:
        source = cached(OneDiffers(other))
        with (
            nostall.DataLoader(source, 50, tiers=[], output=output, shuffle=False) as loader,
            pytest.raises(
                UsageError, match=rf"item 101 of the data set {how}.*item 100 has.*collate="
            ),
        ):
            list(loader)


def test_items_that_are_random_are_refused(cached: Make) -> None:
    with pytest.raises(UsageError, match=r"not the same when it is made again.*then="):
        cached(Random())


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter([1]), {}, "__len__ and __getitem__"),
        ([], {}, "empty"),
        ([{1, 2}], {}, r"item 0 of list cannot be made: the item is a builtins\.set"),
        ([1], {"makers": 0}, "makers must be a whole number from 1 to .*, not 0"),
        ([1], {"makers": 1.5}, "makers must be a whole number from 1 to .*, not 1.5"),
        ([1], {"makers": True}, "makers must be a whole number from 1 to .*, not True"),
        ([1], {"start_method": "x"}, "start_method must be one of .*, not 'x'"),
        ([1], {"pickles": "a.B"}, "pickles must be a list of texts, not 'a.B'"),
        ([1], {"pickles": [int]}, "pickles must be a list of texts"),
        ([1], {"max_bytes": True}, '"True" is not a size'),
        ([1], {"then": 3}, "then= is int"),
        ([1], {"max_bytes": "much"}, "much"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    cached: Make, dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageError, TransformError), match=message):
        cached(dataset, **options)


def test_transforms_belong_into_then(cached: Make) -> None:
    with pytest.raises(UsageError, match="then="):
        nostall.DataLoader(cached([1, 2]), 1, transforms=lambda x: x)


def test_one_item_by_its_number(cached: Make) -> None:
    source = cached(Items())
    assert equal(source[3], Items()[3])
    assert equal(source[-1], Items()[N - 1])
    with pytest.raises(IndexError):
        source[N]
    assert repr(source).startswith(f"<Cached Items: {N} items")


@pytest.mark.multi
@pytest.mark.parametrize("inner", ["fork", "spawn"])
@pytest.mark.parametrize("outer", ["then", "spawn", "forkserver"])
def test_what_processes_are_given_may_have_processes(cached: Make, outer: str, inner: str) -> None:
    with nostall.Cached(Five(), makers=1, start_method=inner) as other:
        if outer == "then":
            source = cached(Five(), then=FromAnother(other))
            more: Any = {"workers": "processes", "threads": 1, "tiers": [], "shuffle": False}
            with nostall.DataLoader(source, 5, output="numpy", **more) as loader:
                assert next(iter(loader)).tolist() == [1, 2, 3, 4, 5]
        else:
            assert cached(FromAnother(other), makers=1, start_method=outer)[4] == 5


def test_processes_end_with_their_source() -> None:
    source = nostall.Cached(Items(), makers=2)
    pids = source.maker_pids
    assert len(pids) == 2
    del source
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with nostall.Cached(Items(), makers=1) as source:
        pids = source.maker_pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


ORPHANS = """
import signal, nostall
source = nostall.Cached(list(range(10)), makers=2, start_method="{method}")
print(*source.maker_pids, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_end_when_their_user_is_killed(method: str) -> None:
    process = prefork.Process(
        ["-c", ORPHANS.format(method=method)], stdout=PIPE, env=dict(os.environ)
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    ended = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    process.wait()
    import select

    for fd in ended:
        assert select.select([fd], [], [], 60)[0], "a maker outlives its user"
        os.close(fd)


def test_it_goes_on_where_it_was_on_another_number_of_ranks(cached: Make) -> None:
    source = cached(Items())
    with nostall.DataLoader(source, 8, epochs=2, seed=5, tiers=[]) as loader:
        whole = [batch["label"].tolist() for batch in loader]
    with nostall.DataLoader(source, 8, epochs=2, seed=5, tiers=[]) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
    rest = []
    for rank in range(2):
        with nostall.DataLoader(
            source,
            4,
            epochs=2,
            seed=5,
            tiers=[],
            rank=rank,
            world_size=2,
            job=own_job(f"resume {rank}"),
        ) as loader:
            loader.load_state_dict(state)
            rest.append([batch["label"].tolist() for batch in loader])
    assert [sorted(a + b) for a, b in zip(*rest, strict=True)] == [sorted(b) for b in whole[3:]]


RANK = """
import pathlib, sys, time, numpy as np, nostall
class Items:
    def __len__(self): return 40
    def __getitem__(self, i):
        with open(sys.argv[2], "a") as notes: notes.write(f"{i}\\n")
        return np.full(100, i), i
source = nostall.Cached(Items(), makers=1)
open(sys.argv[2], "w").close()
rank = int(sys.argv[1])
with nostall.DataLoader(source, 4, epochs=3, tiers=["ram:1MiB"], output="numpy", rank=rank,
                        world_size=2, local_rank=rank, local_world_size=2, job=sys.argv[3]) as loader:
    for epoch in loader.epochs():
        for values, i in epoch:
            assert (values == i[:, None]).all()
    print(loader.stats().source_bytes // source.room, flush=True)
    # Ranks of a training stay together.
    pathlib.Path(sys.argv[2] + " ended").touch()
    while len(list(pathlib.Path(sys.argv[2]).parent.glob("* ended"))) < 2:
        time.sleep(0.01)
"""


def test_ranks_of_a_node_make_each_item_once(tmp_path: Path) -> None:
    ranks = [
        prefork.Process(
            ["-c", RANK, str(rank), str(tmp_path / f"{rank}"), f"twice {tmp_path}"], stdout=PIPE
        )
        for rank in range(2)
    ]
    made = [int(rank.communicate(800)[0]) for rank in ranks]
    assert sum(made) == 40
    items = [int(i) for rank in range(2) for i in (tmp_path / f"{rank}").read_text().split()]
    assert sorted(items) == list(range(40))


@pytest.mark.parametrize("then", [None, plus_one])
def test_a_share_without_samples_has_no_items(cached: Make, then: Any) -> None:
    source = cached(Items(n=9), then=then)
    with nostall.DataLoader(source, 4, seed=5, tiers=[]) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    sizes = []
    for rank in range(2):
        with nostall.DataLoader(
            source, 2, seed=5, tiers=[], rank=rank, world_size=2, job=own_job(f"none {rank}")
        ) as loader:
            loader.load_state_dict(state)
            *_, last = loader
            values = last["image"] if isinstance(last, dict) else last[0]
            assert values.shape[1:] == (3, 4)
            sizes.append(len(values))
    assert sizes == [1, 0]


class Late(Ragged):
    """Items without room that cannot be made again."""

    def __init__(self, flag: Path) -> None:
        super().__init__(None, 10)
        self.flag = flag

    def __getitem__(self, i: int) -> Any:
        if self.flag.exists() and i == 9:
            raise ValueError("nine")
        return np.zeros(100 if i == 9 else 3)


@pytest.mark.parametrize(
    ("then", "workers"), [(None, "threads"), (first_three, "threads"), (first_three, "processes")]
)
def test_items_without_room_that_fail_later_are_replaced(
    cached: Make, tmp_path: Path, then: Any, workers: Any
) -> None:
    data = Late(tmp_path / "flag")
    source = cached(data, then=then, max_bytes=256)
    with nostall.DataLoader(
        source, 1, epochs=2, tiers=["ram:1MiB"], workers=workers, threads=1, on_error="substitute"
    ) as loader:
        for epoch in loader.epochs():
            shapes = {tuple(batch.shape) for batch in epoch}
            data.flag.touch()
        assert shapes == {(1, 3)}
        assert loader.stats().epochs[1].substituted == [9]


def test_kept_tiers_need_a_version(cached: Make, tmp_path: Path) -> None:
    source = cached([1, 2, 3])
    with pytest.raises(UsageError, match="version="):
        nostall.DataLoader(source, 1, tiers=[f"{tmp_path}:1MiB:keep"])
    prints = [cached([1, 2, 3], version=version).fingerprint for version in (1, 2)]
    assert len({*prints, source.fingerprint}) == 3
    with nostall.DataLoader(
        cached([1, 2], version="a"), 1, tiers=[f"{tmp_path}:1MiB:keep"]
    ) as loader:
        assert len(list(loader)) == 2


class Slow(Items):
    def __getitem__(self, i: int) -> Any:
        if self.notes is not None and self.notes.exists():
            with self.notes.open("a") as file:
                file.write("begun")
            time.sleep(3600)
        return i


def test_closing_tells_those_who_wait(
    cached: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_children, "SECONDS_TO_END", 0.2)
    source = cached(Slow(tmp_path / "notes"), makers=1)
    (tmp_path / "notes").touch()
    told: list[Exception] = []

    def make() -> None:
        try:
            source.make(0)
        except TransformError as error:
            told.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    while not (tmp_path / "notes").read_text():
        time.sleep(0.01)
    source.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "ended by SIGKILL" in str(told[0])
    with pytest.raises(TransformError, match="closed"):
        source.make(0)


class Held(Items):
    """An item that says when it begins, and is made when it may be."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None, 20)
        self.armed, self.begun, self.go = folder / "armed", folder / "begun", folder / "go"

    def __getitem__(self, i: int) -> Any:
        deadline = time.monotonic() + 60
        if i == 7 and self.armed.exists():
            self.begun.touch()
            while not self.go.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return i


def test_an_item_that_was_interrupted_is_not_taken_for_the_next_one(
    cached: Make, tmp_path: Path
) -> None:
    data = Held(tmp_path)
    source = cached(data, makers=1)
    data.armed.touch()
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    def interrupt() -> None:
        while not data.begun.exists():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            source[7]
    finally:
        thread.join()
    data.go.touch()
    pids = source.maker_pids
    assert [source[i] for i in range(20)] == list(range(20))
    assert source.maker_pids == pids


def test_a_maker_of_whose_answer_nothing_is_known_is_not_asked_again(
    cached: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cached(Items(n=20), makers=1)
    pids, wait = source.maker_pids, connection.wait
    (maker,) = source._makers._all

    def once(files: Any, *more: Any) -> Any:
        if maker._pipe not in files:  # a thread that ends what another test began
            return wait(files, *more)
        monkeypatch.setattr(connection, "wait", wait)
        raise MemoryError("none left")

    monkeypatch.setattr(connection, "wait", once)
    with pytest.raises(MemoryError, match="none left"):
        source.make(7)
    assert [source[i]["name"] for i in range(20)] == [f"{i:03d}" for i in range(20)]
    assert source.maker_pids != pids


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_a_maker_that_cannot_be_started_again_is_told_and_tried_later(
    cached: Make, monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    source = cached(Items(n=20), makers=1, start_method="fork")
    (pid,) = source.maker_pids

    refused = []

    def refuse() -> int:
        refused.append(time.monotonic())
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", refuse)
        os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(TransformError, match=r"no other can be started: .*fewer makers="):
                source[7]
        with (
            nostall.DataLoader(source, 5, tiers=[], shuffle=False, on_error=on_error) as loader,
            pytest.raises(TransformError, match=r"item 0 of Items .* no other can be started"),
        ):
            list(loader)
    # Each start that fails costs descriptors.
    assert all(later - sooner >= 1 for sooner, later in itertools.pairwise(refused))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(TransformError):
            source[0]
            break
    assert [source[i]["name"] for i in range(20)] == [f"{i:03d}" for i in range(20)]
    assert not Path(f"/proc/{pid}").exists()


class HeldUp:
    """Item 0 takes until a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        while index == 0 and not self.file.exists():
            time.sleep(0.01)
        return index


def test_a_maker_that_lives_is_waited_for_while_none_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, refused = tmp_path / "go on", threading.Event()
    makers = _makers.Makers(HeldUp(go_on), count=2, pickles=[], start_method="fork", fewer="fewer")

    def refuse() -> int:
        refused.set()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    try:
        monkeypatch.setattr(os, "fork", refuse)
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(makers.make, 0)
            while not any(maker._busy for maker in makers._all):
                time.sleep(0.01)
            dead = next(maker for maker in makers._all if not maker._busy)
            dead.kill()
            second = threads.submit(makers.make, 1)
            assert refused.wait(60)
            go_on.touch()
            assert first.result(60) and second.result(60)
    finally:
        go_on.touch()
        makers.close()


def test_the_end_of_a_maker_is_seen_though_another_started_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    makers = _makers.Makers([1], count=1, pickles=[], start_method="fork", fewer="fewer")
    both, fork = threading.Barrier(2), os.fork

    def together() -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)
        return fork()

    monkeypatch.setattr(os, "fork", together)
    with ThreadPoolExecutor(2) as threads:
        started = list(threads.map(lambda _: makers._start(), range(2)))
    last = max(started, key=lambda maker: maker.pid)  # the other was forked with its pipe open
    last.kill()
    seen = connection.wait([last._process.sentinel], 60)
    for maker in started:
        makers._free.put(maker)
    makers.close()
    assert seen


def test_items_with_much_room_are_made_side_by_side_too(
    cached: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, together = cached(Items(n=32), makers=4, max_bytes="8MiB"), []
    make_all = source._makers.make_all
    monkeypatch.setattr(
        source._makers,
        "make_all",
        lambda chosen: (together.append(len(chosen)), make_all(chosen))[1],
    )
    with nostall.DataLoader(source, 8, epochs=1, threads=1, tiers=[]) as loader:
        assert len(list(loader)) == 4
    assert max(together) == 2  # for each of the two threads that fetch


def test_items_are_not_read_past_a_loader_of_torchs_class() -> None:
    """As Accelerate's skip_first_batches makes another loader of it: `then` would not be called."""
    cached = nostall.Cached(range(6), then=operator.neg, makers=1)
    for data in (cached, nostall.Subset(cached, range(4))):
        with nostall.DataLoader(data, 2, shuffle=False, tiers=[]) as loader:
            given = TorchLoader(loader)
            for dataset in (given.dataset, pickle.loads(pickle.dumps(copy.copy(given.dataset)))):
                assert len(dataset) == len(data) and dataset.schema == data.schema
                again = torch.utils.data.DataLoader(dataset, batch_sampler=given.batch_sampler)
                with pytest.raises(UsageError, match="leave skip_first_batches out"):
                    next(iter(again))
            assert next(iter(given)).tolist() == [0, -1]
