"""Sub-batches stay in the RAM tier while their chunk is in use: what then leaves the storage."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_ranks import own_job, run_ranks

import nostall

FILES, BATCH, RESIDENT = 480, 4, 5  # of 2 ranks: 60 global batches an epoch, 12 chunks of 40 files
MEAN = 6000
TWO_CHUNKS = 2 * RESIDENT * 2 * BATCH * MEAN * 23 // 20  # a sixth of the data set, and a little

RANK = """
import json, sys, zlib
import numpy as np
import nostall
from nostall.collective import Communicator

root, rank, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
together, nodes = map(int, sys.argv[4:6])
tiers, ahead = json.loads(sys.argv[6]), int(sys.argv[7])  # the first rank, by so many batches
loader = nostall.DataLoader(
    nostall.ImageFolder(root, index=False), 4, epochs=4, seed=3, tiers=tiers, output="numpy", threads=1,
    order=nostall.SubBatches(resident=5, reuse=2, together=together), reader="pread",
    rank=rank, world_size=2, local_rank=rank % (2 // nodes), local_world_size=2 // nodes,
    job=f"{job} {rank // (2 // nodes)}", staging="48KiB" if ahead else "256MiB",  # two batches, or all
)
step, ranks = np.zeros(1, np.float32), Communicator(job, rank, 2)
def has_read():
    return int(open("/proc/self/io").readline().split()[1])
import nostall.job._notes, nostall.observe._live  # which the first batch would read
samples, read, begun, batches = [], [], 0, 4 * loader.plan.batches_in(0)
before = has_read()
for epoch in loader.epochs():
    for data, labels in epoch:
        samples += [zlib.crc32(data[i].tobytes()) for i in range(len(data))]
        begun += 1
        if (begun > ahead) if rank == 0 else (begun <= batches - ahead):
            ranks.allreduce(step)  # as a training does
    # Asked once for two epochs, for the loader reads ahead between them too.
    now = has_read()
    read.append(now - before)
    before = now
alive = loader.stats().peers.get("nodes_alive")
ranks.allreduce(step)  # before the other has looked none leaves
loader.close()
stats = loader.stats()
print(json.dumps({
    "samples": samples, "read": read, "ram": stats.memory["ram_tier"],
    "counted": [e.origins["source"].bytes for e in stats.epochs],
    "alive": alive,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chunks")
    random = np.random.default_rng(0)
    for i in range(FILES):
        place = root / f"class{i % 4}" / f"{i:03}.jpg"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(random.bytes(int(random.integers(MEAN // 2, MEAN * 3 // 2))))
    return root


def run(
    folder: Path, job: str, tiers: list[str], together: int, nodes: int = 1, ahead: int = 0
) -> list[dict[str, Any]]:
    """What each rank printed; nodes are one machine's, and exchange samples."""
    more = [own_job(job), str(together), str(nodes), json.dumps(tiers), str(ahead)]
    arguments = [[str(folder), str(rank), *more] for rank in range(2)]
    met = Path(tempfile.mkdtemp(dir=folder.parent)) if nodes > 1 else None
    return run_ranks(RANK, arguments, met)


@pytest.mark.multi
@pytest.mark.parametrize("together", [1, 2])
def test_an_epoch_takes_its_share_of_the_bytes_from_storage(folder: Path, together: int) -> None:
    total = sum(file.stat().st_size for file in folder.rglob("*.jpg"))
    assert total / 5 > TWO_CHUNKS
    without = run(folder, f"chunks without {together}", [], together)
    kept = run(folder, f"chunks {together}", [f"ram:{TWO_CHUNKS}B"], together)
    for rank in range(2):
        assert kept[rank]["samples"] == without[rank]["samples"]
    # What the processes asked the system for: all of the data set, or half of it and what is read of
    # the next chunk before the epoch begins or ends; and what they look up meanwhile, as the memory
    # that is free, which is the more the longer they take.
    chunk = TWO_CHUNKS / 2
    beside = {"counted": 0, "read": sum(sum(r["read"]) - sum(r["counted"]) for r in kept)}
    for measured in ("read", "counted"):
        every = np.sum([rank[measured] for rank in without], axis=0)
        half = np.sum([rank[measured] for rank in kept], axis=0)
        assert every.sum() >= 4 * total, measured
        assert (half <= total / 2 + 2 * chunk + beside[measured]).all(), (measured, half / total)
        assert half.sum() <= 4 * total * 0.6, (measured, half / total)
    assert all(rank["ram"] <= TWO_CHUNKS for rank in kept)
    # Nothing is read twice: a round, of two epochs, takes each file once.
    assert sum(sum(rank["counted"]) for rank in kept) <= 2 * total


@pytest.mark.multi
def test_a_chunk_stays_until_the_rank_behind_has_left_it(folder: Path) -> None:
    """One rank is at the next chunk all the time, whose successor would take the place of this one."""
    total = sum(file.stat().st_size for file in folder.rglob("*.jpg"))
    without = run(folder, "apart without", [], 2)
    kept = run(folder, "apart", [f"ram:{TWO_CHUNKS}B"], 2, ahead=2 * RESIDENT)
    for rank in range(2):
        assert kept[rank]["samples"] == without[rank]["samples"]
        assert kept[rank]["ram"] <= TWO_CHUNKS
    assert sum(sum(rank["counted"]) for rank in kept) <= 2 * total


@pytest.mark.multi
def test_nodes_keep_chunks_beside_what_they_own(folder: Path) -> None:
    total = sum(file.stat().st_size for file in folder.rglob("*.jpg"))
    # A node's part of a chunk is half of it: of two chunks' room half is left for what it owns.
    alone = run(folder, "plain nodes", [], 1)
    kept = run(folder, "nodes", [f"ram:{TWO_CHUNKS}B"], 1, nodes=2)
    for rank in range(2):
        assert kept[rank]["samples"] == alone[rank]["samples"]
        assert kept[rank]["ram"] <= TWO_CHUNKS
        assert kept[rank]["alive"] == 2
    # Two rounds. Of what the nodes own some is read again where the source is faster than the network.
    assert sum(sum(rank["counted"]) for rank in kept) <= 2 * total


def loader(folder: Path, job: str, **options: Any) -> nostall.DataLoader:
    return nostall.DataLoader(
        nostall.ImageFolder(folder, index=False),
        BATCH,
        epochs=4,
        output="numpy",
        threads=1,
        job=own_job(job),
        **{"tiers": [f"ram:{TWO_CHUNKS}B"], "order": nostall.SubBatches(10, 2)} | options,
    )


def taken(batches: Any) -> list[bytes]:
    return [sample.tobytes() for data, _ in batches for sample in data]


def test_a_job_resumes_within_a_chunk(folder: Path) -> None:
    with loader(folder, "whole", tiers=[]) as whole:
        expected = [taken(epoch) for epoch in whole.epochs()]
    with loader(folder, "first part") as first:
        epochs = iter(first.epochs())
        assert taken(next(epochs)) == expected[0]
        batches = iter(next(epochs))
        begun = [sample.tobytes() for _ in range(33) for sample in next(batches)[0]]
        state = first.state_dict()
    with loader(folder, "second part") as second:
        second.load_state_dict(state)
        rest = [taken(epoch) for epoch in second.epochs()]
        # Of the two rounds: half of the first one, and what was in memory; all of the second.
        read = sum(e.origins["source"].bytes for e in second.stats().epochs)
    assert begun + rest[0] == expected[1]
    assert rest[1:] == expected[2:]
    assert read <= 1.45 * sum(len(s) for s in expected[0])


def test_going_back_and_forth_gives_the_same_samples(folder: Path) -> None:
    with loader(folder, "plain", tiers=[]) as plain, loader(folder, "back") as back:
        for epoch in (0, 3, 1, 0, 2):
            plain.set_epoch(epoch)
            back.set_epoch(epoch)
            expected = taken(plain)
            assert taken(back) == expected


def test_a_rank_that_has_closed_holds_nothing_up(folder: Path) -> None:
    place: dict[str, Any] = {
        "world_size": 2, "local_world_size": 2, "order": nostall.SubBatches(5, 2, together=2)
    }  # fmt: skip
    first = loader(folder, "closes", rank=0, local_rank=0, **place)
    with loader(folder, "closes", rank=1, local_rank=1, **place) as second:
        pairs = zip(first, second, strict=False)
        for _ in range(3):
            next(pairs)
        first.close()
        for epoch in second.epochs():
            taken(epoch)
        stats = second.stats()
    # Half of a round, then a whole one. It reads seven of eight samples: three that it uses itself, and
    # half of the fourth for the other rank. Without the memory of chunks that it has left these are
    # three epochs of its half.
    total = second.dataset.total_bytes
    assert sum(e.origins["source"].bytes for e in stats.epochs) <= 1.4 * total


def test_tiers_that_hold_everything_stay_as_they_are(folder: Path) -> None:
    with loader(folder, "all", tiers=["ram:4MiB"]) as everything:
        for epoch in everything.epochs():
            taken(epoch)
        stats = everything.stats()
    total = everything.dataset.total_bytes
    assert sum(e.origins["source"].bytes for e in stats.epochs) == total


def test_memory_beside_the_halves_keeps_samples_for_the_whole_job(folder: Path) -> None:
    with loader(folder, "more", tiers=[f"ram:{3 * TWO_CHUNKS}B"]) as more:
        for epoch in more.epochs():
            taken(epoch)
        stats = more.stats()
    total = more.dataset.total_bytes
    read = [e.origins["source"].bytes for e in stats.epochs]
    # About a third stays for ever: two rounds read the rest twice.
    assert sum(read) <= total * 1.75
    assert stats.memory["ram_tier"] <= 3 * TWO_CHUNKS
