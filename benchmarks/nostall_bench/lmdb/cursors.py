"""The strategies that must walk through the database to find their records: plain LMDB (3.1), a
local reader (LMM, 3.2), speculative parallel reads (DM, 4.2) and direct reads (DIO, 5.2.1).

They read in the order of the keys, each iteration's records one after the other; the order of the
task must be that.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UsageError
from nostall_bench.lmdb.data import key, liblmdb
from nostall_bench.lmdb.pool import Rank, Task
from nostall_bench.lmdb.share import PAGE, NodeRoom, Share, checked, read_each


def _open(share: Share) -> Any:
    return liblmdb().open(str(share.path.parent), readonly=True, lock=False)


def _skip(cursor: Any, records: int) -> None:
    for _ in range(records):
        cursor.next()


def lmdb(me: Rank, task: Task) -> None:
    """Every rank maps the database and moves its cursor over the records of the others."""
    share = Share(me, task)
    others = share.size * (me.ranks - 1)
    with _open(share) as environment, environment.begin(buffers=True) as transaction:
        me.begin()
        cursor = transaction.cursor()
        cursor.first()
        _skip(cursor, share.size * me.rank)
        for i, records in enumerate(share.records):
            if i:
                _skip(cursor, others)
            me.lap("seek")
            for place in share.slots:
                value = cursor.value()
                share.batch[place : place + len(value)] = np.frombuffer(value, np.uint8)
                cursor.next()
            checked(share, task, records, share.slots)
            me.lap("read")
            me.step(records, share.batch, share.slots)
        me.end()
        del value
        cursor.close()


def lmm(me: Rank, task: Task) -> None:
    """LMDBIO-LMM: one rank of each node reads for all of the node, by shared memory."""
    share = Share(me, task)
    width = share.size * share.per_node
    room = me.room(share.node, width * share.slot)
    local = share.local
    others = width * (task.nodes - 1)
    if local:
        me.begin()
        for records in share.records:
            me.wait()
            _take(me, share, task, room, local, records)
        me.end()
        return
    with _open(share) as environment, environment.begin(buffers=True) as transaction:
        me.begin()
        cursor = transaction.cursor()
        cursor.first()
        _skip(cursor, width * share.node)
        for i, records in enumerate(share.records):
            if i:
                _skip(cursor, others)
            me.lap("seek")
            for place in range(0, width * share.slot, share.slot):
                value = cursor.value()
                room[place : place + len(value)] = np.frombuffer(value, np.uint8)
                cursor.next()
            me.lap("read")
            me.wait()
            _take(me, share, task, room, 0, records)
        me.end()
        del value
        cursor.close()


def _take(
    me: Rank,
    share: Share,
    task: Task,
    room: NDArray[np.uint8],
    local: int,
    records: NDArray[np.int64],
) -> None:
    """A rank's records out of the node's room; the room is free again when all have theirs."""
    start = local * share.size * share.slot
    for place, size in zip(share.slots, task.length[records], strict=True):
        share.batch[place : place + int(size)] = room[start + place : start + place + int(size)]
    checked(share, task, records, share.slots)
    me.lap("read")
    me.step(records, share.batch, share.slots)


class _Guess:
    """Guesses the pages that a rank needs [Pumma 2020, sec. 4.2.2, fig. 4.5]: first from the size of
    one record, then from the least and the most pages that an iteration of this rank had."""

    def __init__(self, me: Rank, share: Share, first_size: int) -> None:
        self._ranks = me.ranks
        each = -(-(first_size + 16) // PAGE)
        begin = 2 + me.rank * share.size * each
        self.range = (begin, begin + share.size * each)
        self._least = self._most = 0

    def learn(self, first: int, end: int) -> None:
        """The pages that the iteration really had."""
        pages = end - first
        self._least = min(self._least or pages, pages)
        self._most = max(self._most, pages)
        self.range = (
            first + self._ranks * self._least,
            first + (self._ranks + 1) * self._most,
        )


def lmm_dm(me: Rank, task: Task) -> None:
    """LMDBIO-LMM-DM: all ranks touch the pages that they guess, at once; then the cursor goes from
    rank to rank, through pages that are mostly there. What is passed on is the next key: a cursor of
    liblmdb means something in its own process only."""
    share = Share(me, task)
    guess = _Guess(me, share, int(task.length[0]))
    last = int(task.order[-1, -1])
    missed, redundant = [], []
    with (
        share.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        _open(share) as environment,
        environment.begin(buffers=True) as transaction,
    ):
        pages = np.frombuffer(mapped, np.uint8)
        cursor = transaction.cursor()
        guesses = []
        me.begin()
        if me.rank == 0:
            cursor.first()
            begin_key = bytes(cursor.key())
        for i, records in enumerate(share.records):
            begin, end = guess.range
            guesses.append((begin, end))
            int(pages[begin * PAGE : end * PAGE : PAGE].sum())
            me.lap("read")
            start = begin_key if me.rank == 0 and i == 0 else me.mail_in.recv_bytes()
            me.lap("skew")
            cursor.set_key(start)
            values = []
            for _ in range(share.size):
                values.append(cursor.value())
                cursor.next()
            if int(records[-1]) != last:
                me.mail_out.send_bytes(bytes(cursor.key()))
            me.lap("seek")
            for place, value in zip(share.slots, values, strict=True):
                share.batch[place : place + len(value)] = np.frombuffer(value, np.uint8)
            checked(share, task, records, share.slots)
            first, after = _pages(task, records)
            guess.learn(int(first.min()), int(after.max()))
            del values, value
            me.lap("read")
            me.step(records, share.batch, share.slots)
        me.end()
        cursor.close()
        del pages
    for (begin, end), records in zip(guesses, share.records, strict=True):
        first, after = _pages(task, records)
        there = np.clip(np.minimum(after, end) - np.maximum(first, begin), 0, None)
        missed.append(int((after - first).sum() - there.sum()))
        redundant.append(int(max(0, end - begin) - there.sum()))
    me.counters.extra.update(missed=missed, redundant=redundant)


def _pages(task: Task, records: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offset = task.offset[records].astype(np.int64)
    return offset // PAGE, -(-(offset + task.length[records].astype(np.int64)) // PAGE)


def dio(me: Rank, task: Task) -> None:
    """LMDBIO-LMM-DIO: one rank walks through the database for all and tells where the records lie; the
    roots of each node then read them by plain reads past the page cache."""
    share = Share(me, task)
    node = NodeRoom.of_records(me, share, task)
    told = me.room(task.nodes, 16 * task.order.size).view(np.uint64).reshape(2, -1)
    first = int(task.order[0, 0])
    environment = _open(share) if me.rank == 0 else None
    me.begin()
    if environment is not None:
        base = _base(share.path)
        with environment.begin(buffers=True) as transaction:
            cursor = transaction.cursor()
            cursor.set_key(key(first))
            for i in range(task.order.size):
                value = np.frombuffer(cursor.value(), np.uint8)
                told[0, i] = value.__array_interface__["data"][0] - base
                told[1, i] = value.size
                cursor.next()
            del value
            cursor.close()
        me.lap("seek")
    me.wait()
    read_each(me, task, share, node, told[:, : task.order.size], first)
    if environment is not None:
        environment.close()


def _base(path: Path) -> int:
    """Where liblmdb has mapped the database."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            return int(line.split("-", 1)[0], 16)
    raise UsageError(f"{path} is not mapped: this liblmdb reads in another way")
