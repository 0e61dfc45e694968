"""What goes wrong in real jobs: bad files, dead ranks, early ends, stubborn consumers."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import prefork
import pytest
from conftest import write_jpeg
from limits import refuse_threads
from loader_ranks import one_rank, own_job
from PIL import Image
from procfs import OwnSharedMemory, abstract_sockets, open_links, shared_memory

import nostall
from nostall import _native
from nostall import transforms as t
from nostall.base._garbage import await_all
from nostall.errors import CorruptionError, IoError, PeerError, StoppedError, UsageError
from nostall.job import _cluster as cluster
from nostall.job import _rendezvous as rendezvous
from nostall.loader import _python_transforms
from nostall_bench.slowfs import SlowFS, missing

STEPS = [t.Resize(16), t.CenterCrop(16), t.ToTensor()]


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "vanished":
        path.unlink()
    elif how == "text":
        path.write_text("this is not an image")


@pytest.mark.parametrize("how", ["truncated", "zeros", "empty", "text"])
@pytest.mark.parametrize("tiers", [[], ["ram:1MiB"]])
def test_a_bad_file_raises_with_its_path(
    make_folder: Callable[[int], Path], how: str, tiers: list[str]
) -> None:
    root = make_folder(12)
    bad = root / "class1" / "003.jpg"
    damage(bad, how)
    with (
        nostall.DataLoader(
            nostall.ImageFolder(root, index=False), 4, transforms=STEPS, tiers=tiers
        ) as loader,
        pytest.raises(CorruptionError, match=r"class1/003\.jpg"),
    ):
        list(loader)


@pytest.mark.parametrize("how", ["truncated", "vanished"])
@pytest.mark.parametrize("raw", [False, True])
def test_a_file_that_changes_after_indexing_raises_with_its_path(
    make_folder: Callable[[int], Path], how: str, raw: bool
) -> None:
    root = make_folder(12)
    folder = nostall.ImageFolder(root, index=False)
    damage(root / "class0" / "004.jpg", how)
    with (
        nostall.DataLoader(folder, 4, transforms=None if raw else STEPS, tiers=[]) as loader,
        pytest.raises(CorruptionError, match=r"class0/004\.jpg"),
    ):
        list(loader)


@pytest.mark.parametrize("how", ["truncated", "zeros", "empty", "text"])
def test_substitution_is_counted_and_the_same_on_every_rank(
    make_folder: Callable[[int], Path], how: str
) -> None:
    root = make_folder(12)
    damage(root / "class1" / "003.jpg", how)
    folder = nostall.ImageFolder(root, index=False)
    bad = next(i for i in range(12) if folder.describe(i).endswith("003.jpg"))
    runs = []
    for world in (1, 2, 3):
        images: dict[int, list[bytes]] = {}
        substituted: list[int] = []
        for rank in range(world):
            with nostall.DataLoader(
                folder,
                6 // world,
                epochs=2,
                transforms=STEPS,
                tiers=["ram:1MiB"],
                on_error="substitute",
                **one_rank(rank, world),
            ) as loader:
                for epoch in loader.epochs():
                    for x, _ in epoch:
                        images.setdefault(epoch.index, []).extend(i.numpy().tobytes() for i in x)
                stats = loader.stats()
                substituted += [s for e in stats.epochs for s in e.substituted]
        assert substituted == [bad, bad]
        runs.append({e: sorted(i) for e, i in images.items()})
    assert runs[0] == runs[1] == runs[2]


def await_the_end_of_all_but(before: list[str]) -> None:
    """A thread that was joined is in /proc for a moment more."""
    deadline = time.monotonic() + 60
    while left := set(os.listdir("/proc/self/task")) - set(before):
        assert time.monotonic() < deadline, f"threads {left} do not end"
        time.sleep(0.01)


def test_early_stop_and_restart_leave_nothing_behind(image_folder: Path) -> None:
    # What other tests left to the collector has memory and threads, which would go meanwhile.
    gc.collect()
    await_all()
    before, there = os.listdir("/proc/self/task"), shared_memory(os.getpid())
    for _ in range(5):
        loader = nostall.DataLoader(
            nostall.ImageFolder(image_folder), 4, epochs=3, transforms=STEPS, tiers=["ram:1MiB"]
        )
        for i, _ in enumerate(loader):
            if i == 2:
                break
        assert shared_memory(os.getpid()) > there
        loader.close()
        assert shared_memory(os.getpid()) == there
        with pytest.raises(UsageError, match="closed"):
            next(iter(loader))
    await_the_end_of_all_but(before)


def test_a_loader_that_is_dropped_stops_its_threads(image_folder: Path) -> None:
    before = os.listdir("/proc/self/task")
    loader = nostall.DataLoader(nostall.ImageFolder(image_folder), 4, epochs=3, tiers=[])
    next(iter(loader))
    del loader
    await_the_end_of_all_but(before)


def test_batches_stay_valid_as_long_as_they_are_held(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)

    def batches() -> list[np.ndarray]:
        with nostall.DataLoader(folder, 4, epochs=2, transforms=STEPS, tiers=[]) as loader:
            return [x.numpy() for epoch in loader.epochs() for x, _ in epoch]

    held = batches()
    copies = [x.copy() for x in held]
    again = batches()
    assert all(np.array_equal(a, b) for a, b in zip(held, copies, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(again, copies, strict=True))


def test_an_idle_loader_uses_no_cpu(image_folder: Path) -> None:
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder), 4, epochs=50, transforms=STEPS, tiers=["ram:1MiB"]
    ) as loader:
        iterator = iter(loader)
        next(iterator)

        def used() -> float:
            before = time.process_time()
            time.sleep(1.0)
            return time.process_time() - before

        # Until the stage is full; what spins never uses as little as this.
        assert any(used() < 0.02 for _ in range(30))


def test_dataset_smaller_than_a_batch_and_than_the_world(
    make_folder: Callable[[int], Path],
) -> None:
    folder = nostall.ImageFolder(make_folder(3))
    for rank in range(5):
        with nostall.DataLoader(
            folder,
            8,
            epochs=2,
            tiers=["ram:1MiB"],
            **one_rank(rank, 5),
        ) as loader:
            for epoch in loader.epochs():
                assert [len(raw) for raw, _ in epoch] == [1]


def test_zero_capacity_tier_means_no_tier(image_folder: Path) -> None:
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder), 8, epochs=2, tiers=["ram:0"]
    ) as loader:
        for epoch in loader.epochs():
            list(epoch)
        stats = loader.stats()
    assert stats.source_bytes == 2 * nostall.ImageFolder(image_folder).total_bytes
    assert stats.lower_bound_bytes == stats.source_bytes


def test_an_unwritable_tier_degrades_to_the_source(image_folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file-not-directory"
    blocked.write_text("")
    folder = nostall.ImageFolder(image_folder)
    with nostall.DataLoader(folder, 8, epochs=2, tiers=[f"{blocked}:1MiB"]) as loader:
        seen = sum(len(raw) for epoch in loader.epochs() for raw, _ in epoch)
        assert seen == 2 * len(folder)
        assert loader.stats().source_bytes == 2 * folder.total_bytes


def test_a_forked_child_is_told_and_does_not_hang(image_folder: Path) -> None:
    code = f"""
    import os, nostall
    loader = nostall.DataLoader(nostall.ImageFolder({str(image_folder)!r}), 4, epochs=2,
                                output="numpy", tiers=["ram:1MiB"])
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
        except nostall.errors.UsageError as e:
            assert "forked" in str(e), e
            del iterator, loader
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert len(list(iterator)) == len(loader) - 1
    loader.close()
    """
    done = prefork.run(["-c", textwrap.dedent(code)], timeout=100)
    assert done.returncode == 0, done.stderr


FORKED_RANKS = """
import multiprocessing, sys, time
import nostall

class Training:
    def __init__(self, rank):
        self.itself = self
        self.loader = nostall.DataLoader(
            nostall.ImageFolder(sys.argv[1], index=False), 4, tiers=["ram:1MiB"],
            output="numpy", rank=rank, world_size=2, local_rank=rank, local_world_size=2,
            job=sys.argv[2],
        )

def train(rank, both, other_ended):
    training = Training(rank)
    batches = iter(training.loader)
    next(batches)
    both.wait()
    if rank == 1:
        return
    other_ended.wait()
    # It looks for ranks that were killed a few times per second.
    until = time.monotonic() + 2
    while time.monotonic() < until:
        list(training.loader)
    print("goes on")

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    both, other_ended = context.Barrier(2), context.Event()
    ranks = [context.Process(target=train, args=(r, both, other_ended)) for r in range(2)]
    for rank in ranks:
        rank.start()
    ranks[1].join()
    other_ended.set()
    ranks[0].join()
    print([rank.exitcode for rank in ranks])
"""


@pytest.mark.multi
def test_a_forked_rank_that_ends_leaves_its_tiers(image_folder: Path) -> None:
    done = prefork.run(["-c", FORKED_RANKS, str(image_folder), own_job("forked")], timeout=800)
    assert done.stdout.splitlines() == ["goes on", "[0, 0]"], done.stderr


MADE_BEFORE_FORKS = """
import multiprocessing, sys
import nostall
from nostall.errors import UsageError

data = nostall.ImageFolder(sys.argv[1], index=False)
alone = nostall.DataLoader(data, 4, epochs=1, tiers=["ram:1MiB"])
of_ranks = [
    nostall.DataLoader(
        data, 4, epochs=1, tiers=["ram:1MiB"], job=sys.argv[2],
        rank=rank, world_size=2, local_rank=rank, local_world_size=2,
    )
    for rank in range(2)
]

def take(rank, within, told):
    batches = iter(alone)
    try:
        seen = len(next(batches)[1])
    except UsageError as error:
        within.abort()
        told.put(("nothing", str(error)))
        return
    within.wait()  # both are
    seen += sum(len(labels) for _, labels in batches)
    told.put((seen, sum(len(labels) for _, labels in of_ranks[rank])))

context = multiprocessing.get_context("fork")
within, told = context.Barrier(2), context.Queue()
children = [context.Process(target=take, args=(rank, within, told)) for rank in range(2)]
for child in children:
    child.start()
print(*told.get())
if not within.broken:
    print(*told.get())
for child in children:
    child.join()
print(sum(len(labels) for _, labels in alone))
"""


@pytest.mark.multi
def test_forked_children_may_begin_with_loaders_of_their_parent(image_folder: Path) -> None:
    """All with one of a job of one rank, or each with that of its rank."""
    command = ["-c", MADE_BEFORE_FORKS, str(image_folder), own_job("before forks")]
    done = prefork.run(command, torch=True, timeout=800)
    *children, parent = done.stdout.splitlines() or [""]
    assert parent == "61", done.stderr
    assert children == ["61 31"] * 2, done.stderr


RANK_PROGRAM = """
import os, signal, sys, time, nostall
rank = int(sys.argv[1])
loader = nostall.DataLoader(nostall.ImageFolder(sys.argv[2]), 4, epochs=1000,
                            tiers=["ram:50KiB", *sys.argv[4:]], rank=rank, world_size=2,
                            local_rank=rank, local_world_size=2, job=sys.argv[3], output="numpy")
for epoch in loader.epochs():
    for raw, labels in epoch:
        print("batch", flush=True)
        time.sleep(0.02)
"""


def start_rank(
    rank: int, root: Path, job: str, *tiers: str, mounts_of: int | None = None
) -> prefork.Process:
    return prefork.Process(
        ["-c", RANK_PROGRAM, str(rank), str(root), own_job(job), *tiers],
        stdout=prefork.PIPE,
        stderr=prefork.PIPE,
        mounts_of=mounts_of,
    )


@pytest.mark.multi
def test_a_killed_rank_is_reported_to_the_others(image_folder: Path) -> None:
    ranks = [start_rank(r, image_folder, "killed") for r in range(2)]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "batch\n"
        ranks[1].send_signal(signal.SIGKILL)
        _, errors = ranks[0].communicate(timeout=100)
        assert ranks[0].returncode == 1
        assert PeerError.__name__ in errors
        assert f"process {ranks[1].pid}" in errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.multi
def test_nothing_is_left_of_ranks_that_are_all_killed(image_folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    ranks = [start_rank(r, image_folder, "massacre", f"{disk}:1MiB") for r in range(2)]
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "batch\n"
    # What they share has no name from the start, so that there is nothing to remove.
    assert any(file.startswith(f"{disk}/") for file in open_links(ranks[0].pid))
    memory = shared_memory(ranks[0].pid)
    assert memory and all(file.endswith(" (deleted)") for file in memory)
    assert not list(disk.iterdir())
    names = {n for p in ranks for n in abstract_sockets(p.pid) if n.startswith("@nostall-")}
    assert len(names) == 6  # of each its tiers, its notes, and what it does
    for process in ranks:
        process.kill()
        process.communicate()
    left = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    assert not names & left


@pytest.mark.multi
def test_ctrl_c_ends_a_waiting_loader_at_once(image_folder: Path) -> None:
    with OwnSharedMemory() as memory:
        process = start_rank(0, image_folder, "interrupted", mounts_of=memory.holder)
        assert process.stdout is not None
        assert process.stdout.readline() == "batch\n"
        assert memory.unnamed_bytes() > 0
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
        assert "KeyboardInterrupt" in errors
        assert (memory.names(), memory.unnamed_bytes_that_stay()) == (set(), 0)


@pytest.mark.multi
@pytest.mark.parametrize(("world", "tier"), [(4, "ram:1MiB"), (4, "half"), (8, "ram:1MiB")])
def test_ranks_of_a_node_read_each_byte_once(
    image_folder: Path, tmp_path: Path, world: int, tier: str
) -> None:
    # A source as fast as memory would be preferred to a tier of files whose reads are held up by
    # other work on the machine; a slow one never is.
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    with SlowFS(image_folder, tmp_path / "mounts", 20e6, 20e6, 0.5e-3) as slow:
        read_by_all_ranks(slow.mounts[0], tmp_path, world, tier)


def read_by_all_ranks(image_folder: Path, tmp_path: Path, world: int, tier: str) -> None:
    folder = nostall.ImageFolder(image_folder)
    half = folder.total_bytes // 2
    tiers = [tier] if tier != "half" else [f"ram:{half // 2}", f"{tmp_path}:{half - half // 2}"]
    # Ranks of a training stay together; these stay until the last one is done, however late it began.
    job = uuid.uuid4().hex
    code = f"""
    import json, pathlib, sys, time, nostall
    rank = int(sys.argv[1])
    done = pathlib.Path({str(tmp_path)!r})
    with nostall.DataLoader(nostall.ImageFolder({str(image_folder)!r}), 3, epochs=4,
                            tiers={tiers!r}, rank=rank, world_size={world}, local_rank=rank,
                            local_world_size={world}, job={job!r}, output="numpy") as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                pass
        stats = loader.stats()
        (done / f"done-{{rank}}").touch()
        deadline = time.monotonic() + 800
        while len(list(done.glob("done-*"))) < {world} and time.monotonic() < deadline:
            time.sleep(0.01)
    print(json.dumps([stats.source_bytes, stats.lower_bound_bytes]))
    """
    processes = [
        prefork.Process(["-c", textwrap.dedent(code), str(r)], stdout=prefork.PIPE)
        for r in range(world)
    ]
    results = [p.communicate(timeout=800)[0] for p in processes]
    assert all(p.returncode == 0 for p in processes)
    numbers = [eval(r) for r in results]
    read, bound = sum(n[0] for n in numbers), numbers[0][1]
    # The epoch is padded to a multiple of the world: those few samples come twice in an epoch, and
    # records of whole samples do not fill a half-sized tier to the last byte.
    slack = 0 if tier != "half" else 3 * 4 * int(max(folder.sizes))
    assert bound <= read <= bound + slack


def test_two_jobs_on_one_node_do_not_disturb_each_other(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    with (
        nostall.DataLoader(folder, 8, epochs=2, seed=1, tiers=["ram:1MiB"], job=own_job("a")) as a,
        nostall.DataLoader(folder, 8, epochs=2, seed=2, tiers=["ram:1MiB"], job=own_job("b")) as b,
    ):
        for epoch_a, epoch_b in zip(a.epochs(), b.epochs(), strict=True):
            for (x, _), (y, _) in zip(epoch_a, epoch_b, strict=True):
                assert x.data.tobytes() != y.data.tobytes()
        assert a.stats().source_bytes == b.stats().source_bytes == folder.total_bytes


def test_a_job_may_have_several_loaders(image_folder: Path) -> None:
    paths = sorted(image_folder.rglob("*.jpg"))
    train, validation = nostall.Split(nostall.FileList(paths, range(len(paths))), 0.8)
    job = own_job("several")

    def loaders(rank: int) -> list[nostall.DataLoader]:
        place = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2}
        options: dict[str, Any] = {"tiers": ["ram:1MiB"], "output": "numpy", "job": job, **place}
        return [
            nostall.DataLoader(train, 4, epochs=2, **options),
            nostall.DataLoader(validation, 4, shuffle=False, **options),
        ]

    ranks = loaders(0), loaders(1)
    seen: list[list[int]] = [[], []]
    for number, pair in enumerate(zip(*ranks, strict=True)):
        for batches in zip(*pair, strict=True):
            seen[number] += [label for _, labels in batches for label in labels.tolist()]
    for rank in ranks:
        for loader in rank:
            loader.close()
    for number, data in enumerate((train, validation)):
        assert set(seen[number]) == {int(data.labels[i]) for i in range(len(data))}


def test_loaders_of_one_rank_alone_do_not_part_the_others(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        rendezvous, "find_rendezvous", lambda rank, size, name, **more: names.append(name)
    )
    folder = nostall.ImageFolder(image_folder, index=False)

    def met(rank: int, node: int) -> list[str]:
        names.clear()
        place = {"rank": rank, "world_size": 61, "local_rank": 0, "local_world_size": 1}
        for number in range(2):
            with nostall.DataLoader(
                folder, 1, tiers=[], **place, job=own_job(f"node {node} {number}")
            ) as loader:
                next(iter(loader))
        with pytest.raises(UsageError, match="nothing connects them: pass seed="):
            nostall.DataLoader(folder, 1, seed=None, **place, job=own_job(f"node {node}"))
        return list(names)

    first = met(0, 0)
    nostall.DataLoader(folder, 4, tiers=[], rank=0, world_size=1).close()
    assert met(1, 1) == first and len(set(first)) == 3


def test_ranks_that_disagree_are_told_so(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the memory of the node, where nothing else could compare them."""
    monkeypatch.setattr(cluster, "check_alike", lambda *_: None)
    folder = nostall.ImageFolder(image_folder)
    paths = [folder.describe(i) for i in range(len(folder))]

    def loader(rank: int, dataset: Any = folder, **other: Any) -> nostall.DataLoader:
        return nostall.DataLoader(
            dataset,
            other.pop("batch_size", 4),
            **{"epochs": 2, "seed": 1, "tiers": ["ram:1MiB"], "output": "numpy", **other},
            rank=rank,
            world_size=2,
            local_rank=rank,
            local_world_size=2,
            job=own_job("disagree"),
        )

    for other, told in (
        ({"seed": 2}, r"seed \(2 here, 1 there\);"),
        (
            {"batch_size": 8, "epochs": 3},
            r"global_batch_size \(16 here, 8 .*epochs \(3 here, 2 there\);",
        ),
        (  # whose half, rounded down, is the same
            {"batch_size": None, "global_batch_size": 9},
            r"global_batch_size \(9 here, 8 there\), world of the order",
        ),
        ({"drop_last": True}, r"drop_last \(True here, False there\);"),
        ({"shuffle": False}, r"order \(sequential here, torch there\);"),
        ({"tiers": ["ram:20KiB"]}, r"tiers \(ram:20480 here, ram:1048576 there\);"),
        ({"dataset": nostall.FileList(paths[:60])}, r"samples \(60 here, 61 there\), bytes of"),
        ({}, r"on the first batch \(3 of epoch 0 here, 0 of epoch 0 there\);"),
    ):
        with loader(0) as first, loader(1, **other) as second:
            if not other:  # each has loaded a state, so that no rank is late
                first.load_state_dict(first.state_dict())
            next(iter(first))
            if not other:
                second.load_state_dict({**second.state_dict(), "batch": 3})
            with pytest.raises(PeerError, match=told):
                next(iter(second))


def test_a_rank_that_goes_back_waits_for_those_that_have_yet_to(
    image_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = nostall.ImageFolder(image_folder)
    starts = threading.Event()
    start = _native.Loader

    def told(*given: Any) -> _native.Loader:
        starts.set()
        return start(*given)

    def loader(rank: int) -> nostall.DataLoader:
        return nostall.DataLoader(
            folder,
            4,
            epochs=1,
            tiers=["ram:10KiB", f"{tmp_path}:1MiB:keep"],
            output="numpy",
            rank=rank,
            world_size=2,
            local_rank=rank,
            local_world_size=2,
            job=own_job("goes back"),
        )

    def labels(batches: Any) -> list[int]:
        return [label for _, each in batches for label in each.tolist()]

    with loader(0) as first, loader(1) as second:
        ranks = [first, second]
        iterations = [iter(rank) for rank in ranks]
        before = [labels([next(it), next(it)]) for it in iterations]
        state, here, rest = first.state_dict(), len(before[0]), list(map(labels, iterations))
        assert here == 8 and len(rest[0]) > here
        monkeypatch.setattr(_native, "Loader", told)
        went_on: list[list[int]] = []
        first.load_state_dict(state)
        early = threading.Thread(target=lambda: went_on.append(labels(first)))
        early.start()
        assert starts.wait(600)
        second.load_state_dict(state)
        assert labels(second) == rest[1]
        early.join()
        assert went_on == [rest[0]]
    assert not caplog.records
    with nostall.DataLoader(
        folder, 4, tiers=[f"{tmp_path}:1MiB:keep"], **one_rank(0, 1)
    ) as following:
        labels(following)
        assert following.stats().source_bytes < folder.total_bytes


def test_a_signal_ends_the_wait_for_ranks_that_have_yet_to_go_back(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = _native.Loader

    def signalled(*given: Any) -> _native.Loader:
        threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return start(*given)

    def end(*_: object) -> None:
        raise InterruptedError

    folder = nostall.ImageFolder(image_folder)
    place = {"world_size": 2, "local_world_size": 2, "job": own_job("signalled")}
    loaders = [
        nostall.DataLoader(folder, 4, tiers=["ram:1MiB"], rank=rank, local_rank=rank, **place)
        for rank in range(2)
    ]
    before = signal.signal(signal.SIGUSR1, end)
    try:
        for loader in loaders:
            next(iter(loader))
        loaders[0].load_state_dict(loaders[0].state_dict())
        monkeypatch.setattr(_native, "Loader", signalled)
        with pytest.raises(InterruptedError):
            next(iter(loaders[0]))
    finally:
        signal.signal(signal.SIGUSR1, before)
        for loader in loaders:
            loader.close()


def test_ranks_without_tiers_are_told_that_they_deal_batches_differently(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(cluster, "check_alike", lambda *given: told.append(given[2]))
    folder = nostall.ImageFolder(image_folder)
    schemes: list[Literal["uniform", "whole"]] = ["uniform", "whole"]
    for rank, scheme in enumerate(schemes):
        with nostall.DataLoader(
            folder, 4, tiers=[], rank=rank, world_size=2, scheme=scheme, job=own_job("deals")
        ) as loader:
            next(iter(loader))
    with pytest.raises(UsageError, match="scheme is 'uniform' on rank 0 and 'whole' on rank 1"):
        cluster.compare(0, told[0], 1, told[1])


def test_python_callables_see_bytes_or_images(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    with nostall.DataLoader(
        folder, 8, shuffle=False, transforms=lambda raw: np.array([raw.size]), tiers=[]
    ) as loader:
        sizes = np.concatenate([x.numpy()[:, 0] for x, _ in loader])
    assert sizes.tolist() == list(folder.sizes)
    with nostall.DataLoader(
        folder, 8, transforms=lambda image: image.transpose(2, 0, 1), decode=True, tiers=[]
    ) as loader:
        x, _ = next(iter(loader))
        assert x.shape == (8, 3, 30, 40)


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_results_of_other_shapes_are_told_with_their_samples(
    image_folder: Path, output: Literal["numpy", "torch"]
) -> None:
    folder = nostall.ImageFolder(image_folder)
    with nostall.DataLoader(
        folder,
        4,
        shuffle=False,
        transforms=lambda raw: raw[: 10 if raw.size == folder.sizes[0] else 20],
        tiers=[],
        output=output,
    ) as loader:
        assert folder.sizes[1] != folder.sizes[0]
        with pytest.raises(
            UsageError, match=r"shape \(10,\) for .*\(sample 0\) but \(20,\) for .*\(sample 1\)"
        ):
            next(iter(loader))


def shape_of(image: np.ndarray) -> np.ndarray:
    return np.array(image.shape)


@pytest.mark.multi
def test_python_callables_run_in_processes(image_folder: Path) -> None:
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder),
        16,
        transforms=shape_of,
        decode=True,
        workers="processes",
        tiers=[],
    ) as loader:
        for x, _ in loader:
            assert (x.numpy() == [30, 40, 3]).all()


def test_a_full_tier_disk_degrades_to_the_source(
    image_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=True)
    try:
        folder = nostall.ImageFolder(image_folder)
        with nostall.DataLoader(folder, 8, epochs=3, tiers=[f"{disk}:1MiB"]) as loader:
            seen = sum(len(raw) for epoch in loader.epochs() for raw, _ in epoch)
        assert seen == 3 * len(folder)
        # One before the start, one for the first write and none for the others.
        small, full = [r.message for r in caplog.records if str(disk) in r.message]
        assert "its file system has 16.4 kB" in small
        assert "No space left on device" in full
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_tier_on_a_disk_that_is_not_mounted_is_read_without(
    image_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = nostall.ImageFolder(image_folder)
    with nostall.DataLoader(folder, 8, epochs=2, tiers=["/nostall-unmounted/job:1MiB"]) as loader:
        seen = sum(len(raw) for epoch in loader.epochs() for raw, _ in epoch)
    assert seen == 2 * len(folder)
    (told,) = [r.message for r in caplog.records if "unmounted" in r.message]
    assert "is not used, samples are read from the source: /nostall-unmounted is not" in told
    assert not Path("/nostall-unmounted").exists()


def test_slow_and_fast_consumers(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    for pause in (0.0, 0.02):
        with nostall.DataLoader(folder, 8, epochs=2, transforms=STEPS, tiers=[]) as loader:
            count = 0
            for epoch in loader.epochs():
                for x, _ in epoch:
                    count += len(x)
                    time.sleep(pause)
            assert count == 2 * len(folder)


def test_a_file_of_huge_dimensions_is_refused(make_folder: Callable[[int], Path]) -> None:
    root = make_folder(6)
    victim = root / "class0" / "002.jpg"
    write_jpeg(victim, 2)
    data = bytearray(victim.read_bytes())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"  # 65535 x 65535 pixels
    victim.write_bytes(bytes(data))
    with (
        nostall.DataLoader(
            nostall.ImageFolder(root, index=False), 6, transforms=STEPS, tiers=[]
        ) as loader,
        pytest.raises(CorruptionError, match=r"class0/002\.jpg"),
    ):
        list(loader)


def test_a_program_that_ends_within_an_iteration_says_nothing(image_folder: Path) -> None:
    code = f"""
        import nostall
        loader = nostall.DataLoader(nostall.ImageFolder({str(image_folder)!r}, index=False), 4)
        batches = iter(loader)
        next(batches)
    """
    done = prefork.run(["-c", textwrap.dedent(code)], torch=True, whole=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


# Ends the process when a thread of the loader reads the environment after refuse().
GETENV = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

static volatile int refused;
void refuse(void) { refused = 1; }

char* getenv(const char* name) {
  char thread[16] = "";
  prctl(PR_GET_NAME, thread);
  if (refused && strncmp(thread, "nostall-", 8) == 0) {
    fprintf(stderr, "%s reads %s\n", thread, name);
    abort();
  }
  char* (*real)(const char*) = (char* (*)(const char*))dlsym(RTLD_NEXT, "getenv");
  return real(name);
}
"""


@pytest.mark.parametrize("what", ["images", "units"])
def test_no_thread_of_a_loader_reads_the_environment(tmp_path: Path, what: str) -> None:
    # The C library's getenv() is not safe beside a setenv(), which other libraries call in Python.
    (tmp_path / "getenv.c").write_text(GETENV)
    shim = tmp_path / "getenv.so"
    compiler = os.environ.get("CC", "cc")
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", shim, tmp_path / "getenv.c", "-ldl"], check=True)
    folder = tmp_path / "images" / "all"
    folder.mkdir(parents=True)
    for ending in ("jpg", "png", "webp", "bmp", "ppm", "tif"):
        Image.new("RGB", (20, 20), (9, 99, 200)).save(folder / f"image.{ending}")
    np.array([1, 9, 0] * 6, np.uint16).tofile(tmp_path / "tokens.bin")
    code = f"""
        import ctypes
        import sys
        import nostall
        from nostall import transforms as t
        source = nostall.ImageFolder({str(folder.parent)!r}, index=False)
        if sys.argv[1] == "units":
            file = {str(tmp_path / "tokens.bin")!r}
            tokens = nostall.Tokens(file, dtype="uint16", end=0, index=False)
            source = nostall.Interleaved(tokens, source, 8, image=9, cost=4)
        steps = [t.Resize((16, 16)), t.ToTensor()]
        with nostall.DataLoader(
            source, 2, transforms=steps, staging="64KiB", tiers=["ram:1MiB"], output="numpy"
        ) as loader:
            for epoch in range(40):
                for batch in loader:
                    ctypes.CDLL({str(shim)!r}).refuse()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), what],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_abandoned_iterator_does_not_disturb_the_next_one(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    with nostall.DataLoader(folder, 8, epochs=3, tiers=[]) as loader:
        abandoned = iter(loader)
        next(abandoned)
        fresh = iter(loader)
        next(fresh)
        with pytest.raises(UsageError, match="another iteration"):
            next(abandoned)
        del abandoned
        assert sum(1 for _ in fresh) == len(loader) - 1
        assert [e.batches for e in loader.stats().epochs] == [1, len(loader)]


def first_value(image: np.ndarray) -> np.ndarray:
    return np.array([image.shape[0], int(image[0, 0, 0])])


def test_a_stand_in_for_a_callable_brings_its_own_label(tmp_path: Path) -> None:
    for i in range(30):
        write_jpeg(tmp_path / f"class{i % 3}" / f"{i:03d}.jpg", 0, (10, 10 + 10 * (i % 3)))
    folder = nostall.ImageFolder(tmp_path, index=False)
    for i in range(0, 30, 4):
        path = Path(folder.describe(i))
        path.write_bytes(bytes(path.stat().st_size))
    with nostall.DataLoader(
        folder,
        5,
        transforms=first_value,
        decode=True,
        on_error="substitute",
        output="numpy",
        tiers=[],
    ) as loader:
        seen = [pair for x, y in loader for pair in zip(x[:, 0], y, strict=True)]
        substituted = loader.stats().epochs[0].substituted
    assert len(seen) == 30
    assert len(substituted) == 8
    # The height of an image tells its class.
    assert [int(height) // 10 - 1 for height, _ in seen] == [int(label) for _, label in seen]


def test_an_abandoned_iterator_with_callables_does_not_disturb_the_next_one(
    image_folder: Path,
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(
        folder,
        4,
        epochs=2,
        shuffle=False,
        transforms=lambda raw: raw[:4].copy(),
        output="numpy",
        tiers=[],
    ) as loader:
        abandoned = iter(loader)
        next(abandoned)
        rest = iter(loader)
        labels = list(next(rest)[1])
        abandoned.close()  # type: ignore[attr-defined]
        for _, more in rest:
            labels += list(more)
    assert labels == list(folder.labels)


def test_closing_from_another_thread_ends_the_wait(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    for _ in range(10):
        loader = nostall.DataLoader(  # a thousand epochs may end before the close begins
            folder, 4, epochs=10**6, transforms=STEPS, output="numpy", tiers=["ram:1MiB"]
        )
        ended: list[BaseException] = []
        first = threading.Event()

        def consume(
            loader: nostall.DataLoader = loader,
            ended: list[BaseException] = ended,
            first: threading.Event = first,
        ) -> None:
            try:
                for epoch in loader.epochs():
                    for _ in epoch:
                        first.set()
            except (StoppedError, UsageError) as error:
                ended.append(error)

        consumer = threading.Thread(target=consume)
        consumer.start()
        assert first.wait(60)
        loader.close()
        consumer.join(60)
        assert not consumer.is_alive()
        assert len(ended) == 1


def in_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_loader_that_is_closed_while_it_begins_stays_closed(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    begin = _native.Loader
    begun: list[_native.Loader] = []

    def closed_meanwhile(*given: Any) -> _native.Loader:
        in_another_thread(loader.close)
        begun.append(begin(*given))
        return begun[-1]

    monkeypatch.setattr(_native, "Loader", closed_meanwhile)
    with nostall.DataLoader(folder, 4, tiers=["ram:1MiB"]) as loader:
        with pytest.raises(StoppedError, match="the loader is closed"):
            next(iter(loader))
        with pytest.raises(StoppedError):
            begun[0].next()


def test_callables_of_a_loader_that_is_closed_while_it_begins_get_no_threads(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    begun: list[ThreadPoolExecutor] = []

    def closed_meanwhile(*given: Any) -> ThreadPoolExecutor:
        in_another_thread(loader.close)
        begun.append(ThreadPoolExecutor(*given))
        return begun[-1]

    monkeypatch.setattr(_python_transforms, "ThreadPoolExecutor", closed_meanwhile)
    with nostall.DataLoader(folder, 4, transforms=lambda raw: raw[:4].copy(), tiers=[]) as loader:
        with pytest.raises(StoppedError):
            next(iter(loader))
        with pytest.raises(RuntimeError, match="after shutdown"):
            begun[0].submit(int)


def test_a_listener_that_fails_does_not_end_the_process(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no listener")

    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    dropped: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: dropped.append(str(error.exc_value)))
    handler = Failing()
    logger = logging.getLogger("nostall")
    logger.addHandler(handler)
    try:
        with nostall.DataLoader(
            nostall.ImageFolder(image_folder, index=False), 4, tiers=[f"{blocked}:1MiB"]
        ) as loader:
            count = sum(len(labels) for _, labels in loader)
    finally:
        logger.removeHandler(handler)
    assert count == 61
    assert dropped == ["no listener"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"dataset": "/data/train"}, r"argument is str, .*nostall\.ImageFolder"),
        ({"threads": 10**6}, "threads must be at most 1024, not 1000000"),
        ({"tiers": ["/cache:1GiB:kep"]}, r'tier "/cache:1GiB:kep": .*kep.*":keep"'),
        ({"transforms": "resize"}, "transforms is the text 'resize'"),
        ({"transforms": 5}, "transforms is 5: give steps of nostall.transforms"),
    ],
)
def test_first_mistakes_are_told_in_a_sentence(
    image_folder: Path, wrong: dict[str, Any], told: str
) -> None:
    arguments: dict[str, Any] = {"dataset": nostall.ImageFolder(image_folder), "batch_size": 4}
    with pytest.raises(UsageError, match=told):
        next(iter(nostall.DataLoader(**(arguments | wrong))))


def test_no_more_threads_is_an_error_that_says_so(image_folder: Path) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            refuse_threads()
            try:
                loader = nostall.DataLoader(
                    nostall.ImageFolder(image_folder), 4, transforms=STEPS, tiers=[]
                )
                next(iter(loader))
            except IoError as error:
                status = 0 if "the system gives no more threads" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_pipe_in_the_place_of_a_sample_is_an_error_on_slow_storage_too(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    (tmp_path / "data" / "a").mkdir(parents=True)
    for i in range(40):
        (tmp_path / "data" / "a" / f"{i:02}.bin").write_bytes(bytes([i]) * (5000 + i))
    with SlowFS(tmp_path / "data", tmp_path / "mounts", 1e9, 1e9, 0.0) as slow:
        folder = nostall.ImageFolder(slow.mounts[0], extensions=(".bin",))

        def read() -> int:
            loader = nostall.DataLoader(folder, 4, shuffle=False, reader="io_uring", tiers=[])
            return sum(len(set(s.tobytes())) for b, _ in loader for s in b)

        assert read() == 40
        (tmp_path / "data" / "a" / "30.bin").unlink()
        os.mkfifo(tmp_path / "data" / "a" / "30.bin")
        with pytest.raises(CorruptionError, match=r"30\.bin"):
            read()


FORKED = """
import os, sys
import nostall
from nostall.errors import UsageError

data = nostall.ImageFolder(sys.argv[1], index=False)
loader = nostall.DataLoader(data, 4, epochs=3)
running = iter(loader)
next(running)
child = os.fork()
if child == 0:
    for batches in (running, iter(loader)):
        try:
            next(batches)
        except UsageError as error:
            print(error)
    with nostall.DataLoader(data, 4, epochs=1) as own:
        print(sum(len(labels) for _, labels in own))
    sys.exit(0)
print("child", os.waitpid(child, 0)[1], "parent", sum(len(labels) for _, labels in loader))
"""


@pytest.mark.multi
def test_a_forked_child_is_refused_a_loader_and_may_make_its_own(image_folder: Path) -> None:
    # A process of its own, which may fork without threads of pytest's.
    run = prefork.run(["-c", FORKED, str(image_folder)], torch=True, whole=True, timeout=300)
    samples = len(nostall.ImageFolder(image_folder, index=False))
    said = run.stdout.splitlines()
    assert len(said) == 4, run
    assert all("a forked child must make its own" in line for line in said[:2])
    assert said[2:] == [str(samples), f"child 0 parent {samples}"]
    assert (run.returncode, run.stderr) == (0, "")
