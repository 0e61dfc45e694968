"""The reading strategies of [Pumma 2020, ch. 3 to 5], and those that they are compared with.

Every strategy copies the records of a rank's part of each global batch into the rank's own memory.
All ranks meet after each iteration, as in data-parallel training. Times go to the rank's counters:
seek (finding where records are), read (reading them), skew (waiting for other ranks).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nostall import _native
from nostall_bench.lmdb import cursors, places
from nostall_bench.lmdb.data import check, key, liblmdb
from nostall_bench.lmdb.pool import Rank, Task
from nostall_bench.lmdb.share import Places, Share, checked


def _peer(read_ahead: bool) -> Callable[[Rank, Task], None]:
    """py-lmdb as its users call it: a get for each key, through the memory map."""

    def run(me: Rank, task: Task) -> None:
        share = Share(me, task)
        with (
            liblmdb().open(
                str(share.path.parent), readonly=True, lock=False, readahead=read_ahead
            ) as environment,
            environment.begin(buffers=True) as transaction,
        ):
            me.begin()
            for records in share.records:
                for place, record in zip(share.slots, records, strict=True):
                    value = transaction.get(key(record))
                    share.batch[place : place + len(value)] = np.frombuffer(value, np.uint8)
                    del value
                checked(share, task, records, share.slots)
                me.lap("read")
                me.step(records, share.batch, share.slots)
            me.end()

    return run


def torch_loader(me: Rank, task: Task) -> None:
    """py-lmdb in torch's DataLoader; in a training only."""
    from nostall_bench.lmdb import training

    assert me.training is not None
    share = Share(me, task)
    loader = training.loader(
        share.path.parent, share.records, len(task.length), me.training.pixels, task.workers
    )
    me.begin()
    for records, pixels in zip(share.records, loader, strict=True):
        me.lap("read")
        me.train(pixels.numpy(), records)
    me.end()


# ---------------------------------------------------------------------- nostall and the limit


def _default(memory: bool) -> Callable[[Rank, Task], None]:
    """nostall.DataLoader over nostall.LMDB; with a RAM tier for all samples, or none at all, as
    where the data set is far larger than memory: then reads pass the page cache by themselves."""

    def run(me: Rank, task: Task) -> None:
        _load(me, task, [f"ram:{int(1.2 * task.length.sum()) + (64 << 20)}"] if memory else [])

    return run


def _load(me: Rank, task: Task, tiers: list[str]) -> None:
    import nostall

    iterations = len(task.order)
    share = Share(me, task)
    # Rank r of the loader's order has every R-th sample: the same global batches, dealt out anew.
    reading = nostall.ReadOptions(direct="auto" if tiers else "always")
    loader = nostall.DataLoader(
        nostall.LMDB(share.path, index=task.index_file, reading=reading),
        share.size,
        epochs=1,  # else the next one is read ahead, and counted
        order=task.order.ravel(),
        tiers=tiers,
        staging=max(task.window // share.per_node, 2 * share.slot * share.size),
        rank=me.rank,
        world_size=me.ranks,
        local_rank=share.local,
        local_world_size=share.per_node,
        job=f"bench-lmdb-{os.getppid()}-{share.node}",
        peers="off",
        output="numpy",
    )
    me.begin()
    batches = iter(loader)
    for i in range(iterations):
        data, _ = next(batches)
        records = task.order[i, me.rank :: me.ranks]
        places = data.offsets.astype(np.int64)
        check(data.data, places, data.lengths.astype(np.int64), records)
        me.lap("read")
        me.step(records, data.data, places)
    me.end()
    del batches, data
    loader.close()
    me.counters.extra["window"] = loader._staging
    del loader
    gc.collect()


def raw(me: Rank, task: Task) -> None:
    """No loader at all: this rank's places by io_uring at full depth; the limit without fio."""
    share = Share(me, task)
    known = Places(share, task.depth, "io_uring")
    me.begin()
    for records in share.records:
        known.each(share.batch, share.slots, task.offset[records], task.length[records])
    me.lap("read")
    me.wait()
    me.end()


# ---------------------------------------------------------------------- building the index


def index(me: Rank, task: Task) -> None:
    """nostall's scan of the tree."""
    path = Path(task.paths[0]) / "data.mdb"
    me.begin()
    records = _native.scan_lmdb(_native.open_storage([str(path)], "auto"), "")
    me.lap("seek")
    me.end()
    me.counters.extra.update(pages=records.pages_read, records=len(records))


def _keys(read_ahead: bool) -> Callable[[Rank, Task], None]:
    """py-lmdb's cursor over all keys, no value asked for."""

    def run(me: Rank, task: Task) -> None:
        with liblmdb().open(
            task.paths[0], readonly=True, lock=False, readahead=read_ahead
        ) as environment:
            me.begin()
            with environment.begin(buffers=True) as transaction:
                count = sum(1 for _ in transaction.cursor().iternext(keys=True, values=False))
            me.lap("seek")
            me.end()
            stat = environment.stat()
        me.counters.extra.update(
            records=count, tree_pages=stat["branch_pages"] + stat["leaf_pages"]
        )

    return run


STRATEGIES: dict[str, Callable[[Rank, Task], None]] = {
    "lmdb": cursors.lmdb,
    "lmm": cursors.lmm,
    "lmm-dm": cursors.lmm_dm,
    "dio": cursors.dio,
    "prov": places.prov,
    "coal": places.coal,
    "stag": places.stag,
    "nostall": _default(False),
    "nostall-ram": _default(True),
    "py-lmdb": _peer(True),
    "py-lmdb-no-ra": _peer(False),
    "torch": torch_loader,
    "raw": raw,
    "index": index,
    "keys": _keys(True),
    "keys-no-ra": _keys(False),
}
