"""A rank's part of the work, its memory, and reads by known places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall_bench.lmdb.data import check
from nostall_bench.lmdb.pool import Rank, Task, aligned

PAGE = 4096


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
        self.path = Path(task.paths[self.node]) / "data.mdb"
        self.slot = -(-int(task.length.max()) // PAGE) * PAGE + 2 * PAGE
        self.batch = aligned(self.slot * self.size)
        self.slots = np.arange(self.size, dtype=np.int64) * self.slot

    def of_node(self, task: Task) -> NDArray[np.int64]:
        """Records of all ranks of this node, (iterations, per_node * size)."""
        width = self.per_node * self.size
        return task.order[:, self.node * width : (self.node + 1) * width]


def checked(
    share: Share, task: Task, records: NDArray[np.int64], places: NDArray[np.int64]
) -> None:
    check(share.batch, places, task.length[records].astype(np.int64), records)


class Places:
    """Reads records by their places, past the page cache, one plain read after the other."""

    def __init__(self, share: Share, depth: int = 1, reader: str = "pread") -> None:
        storage = _native.open_storage([str(share.path)], "always")
        self._end = int(storage.sizes[0])
        self._reader = _native.RangeReader(storage, reader, depth)

    def each(
        self, share: Share, offset: NDArray[np.uint64], length: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """One read for each record; where they lie in the rank's memory."""
        begin = offset // PAGE * PAGE
        end = np.minimum((offset + length + PAGE - 1) // PAGE * PAGE, self._end)
        self._reader.read(begin, end - begin, share.slots.astype(np.uint64), share.batch)
        return share.slots + (offset - begin).astype(np.int64)

    def ranges(
        self,
        begin: NDArray[np.uint64],
        length: NDArray[np.uint64],
        place: NDArray[np.uint64],
        room: NDArray[np.uint8],
    ) -> None:
        """Reads whole ranges."""
        length = np.minimum(length, self._end - begin)
        self._reader.read(begin, length, place, room)
