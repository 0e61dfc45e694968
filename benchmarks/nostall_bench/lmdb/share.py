"""A rank's part of the work, the memory of its node, and reads by known places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall_bench.lmdb.data import check
from nostall_bench.lmdb.pool import Rank, Task, aligned

PAGE = 4096
Places64 = NDArray[np.uint64]


class Share:
    """A rank's part of the work: which records, and where they are to lie in its own memory."""

    def __init__(self, me: Rank, task: Task) -> None:
        iterations, batch = task.order.shape
        if batch % me.ranks:
            raise ValueError(f"a global batch of {batch} is not a multiple of {me.ranks} ranks")
        self.size = batch // me.ranks
        self.records = task.order[:, me.rank * self.size : (me.rank + 1) * self.size]
        self.iterations = iterations
        self.per_node = me.ranks // task.nodes
        self.node = me.rank // self.per_node
        self.local = me.rank % self.per_node
        self.path = Path(task.paths[self.node]) / "data.mdb"
        self.slot = -(-int(task.length.max()) // PAGE) * PAGE + 2 * PAGE
        self.batch = aligned(self.slot * self.size)
        self.slots = np.arange(self.size, dtype=np.int64) * self.slot

    def of_node(self, task: Task) -> NDArray[np.int64]:
        """Records of all ranks of this node, (iterations, per_node * size)."""
        width = self.per_node * self.size
        return task.order[:, self.node * width : (self.node + 1) * width]


class NodeRoom:
    """Memory that the ranks of a node share: its root processes read into it, by direct reads, for all
    of them, and each rank takes its records out of it [Pumma 2020, sec. 3.2 and 5.2.1].

    `root` is this rank's number among all roots of the job; None if it reads nothing. Root j of a node
    with n of them reads the j-th of n equal parts.
    """

    def __init__(self, me: Rank, share: Share, task: Task, bytes_: int) -> None:
        self.roots = min(task.roots, share.per_node)
        if share.per_node % self.roots:
            raise ValueError(f"{share.per_node} ranks of a node have no {self.roots} roots alike")
        self.group = share.per_node // self.roots
        self.part = share.local // self.group
        self.root = None if share.local % self.group else share.node * self.roots + self.part
        self._places = Places(share)
        self._share, self._task = share, task
        self.room = me.room(share.node, bytes_)

    @classmethod
    def of_records(cls, me: Rank, share: Share, task: Task) -> NodeRoom:
        """With a slot for each record of an iteration of the node."""
        return cls(me, share, task, share.per_node * share.size * share.slot)

    def read_records(self, offset: Places64, length: Places64) -> None:
        """A root's part of one iteration: one read for each record, to its slot.

        `offset` and `length` are those of all records of the iteration, of all nodes.
        """
        share, many = self._share, self.group * self._share.size
        first = (share.node * share.per_node + self.part * self.group) * share.size
        mine = slice(first, first + many)
        slots = (self.part * many + np.arange(many)) * share.slot
        self._places.each(self.room, slots, offset[mine], length[mine])

    def read_ranges(self, begin: Places64, length: Places64, place: Places64) -> None:
        """Whole ranges."""
        self._places.ranges(begin, length, place, self.room)

    def slots(self, offset: Places64) -> NDArray[np.int64]:
        """Where the records of this rank, which begin there in the file, lie in their slots."""
        share = self._share
        numbers = share.local * share.size + np.arange(share.size)
        begins: NDArray[np.int64] = numbers * share.slot + (offset % PAGE).astype(np.int64)
        return begins

    def take(self, records: NDArray[np.int64], at: NDArray[np.int64]) -> None:
        """Copies this rank's records of an iteration to its own memory, and checks them."""
        share, task = self._share, self._task
        for place, start, size in zip(share.slots, at, task.length[records], strict=True):
            share.batch[place : place + int(size)] = self.room[start : start + int(size)]
        checked(share, task, records, share.slots)


def checked(
    share: Share, task: Task, records: NDArray[np.int64], places: NDArray[np.int64]
) -> None:
    check(share.batch, places, task.length[records].astype(np.int64), records)


def read_each(
    me: Rank, task: Task, share: Share, node: NodeRoom, places: Places64, first: int = 0
) -> None:
    """Iteration by iteration one read for each record, by the roots; then the measurement ends.

    `places` has offsets and lengths of the records from number `first` on.
    """
    for i, records in enumerate(share.records):
        if node.root is not None:
            node.read_records(*places[:, task.order[i] - first])
            me.lap("read")
        me.wait()
        node.take(records, node.slots(places[0, records - first]))
        me.lap("read")
        me.step(records, share.batch, share.slots)
    me.end()


class Places:
    """Reads records by their places, past the page cache, one plain read after the other."""

    def __init__(self, share: Share, depth: int = 1, reader: str = "pread") -> None:
        storage = _native.open_storage([str(share.path)], "always")
        self._end = int(storage.sizes[0])
        self._reader = _native.RangeReader(storage, reader, depth)

    def each(
        self, room: NDArray[np.uint8], slots: NDArray[np.int64], offset: Places64, length: Places64
    ) -> None:
        """One read for each record, of the pages that it lies in, to its slot of `room`."""
        begin = offset // PAGE * PAGE
        end = np.minimum((offset + length + PAGE - 1) // PAGE * PAGE, self._end)
        self._reader.read(begin, end - begin, slots.astype(np.uint64), room)

    def ranges(
        self,
        begin: Places64,
        length: Places64,
        place: Places64,
        room: NDArray[np.uint8],
    ) -> None:
        """Reads whole ranges."""
        length = np.minimum(length, self._end - begin)
        self._reader.read(begin, length, place, room)
