"""The strategies that know where records are: PROV, COAL, STAG [Pumma 2020, sec. 5.2.2 to 5.2.4].

As in [Pumma 2020] the roots of a node read for all of its ranks, into memory that they share.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nostall_bench.lmdb.pool import Rank, Task
from nostall_bench.lmdb.share import PAGE, NodeRoom, Share, read_each

_GAP = 64 << 10  # unwanted bytes that coalescing reads through
_LARGEST = 4 << 20  # bytes of one coalesced read


def prov(me: Rank, task: Task) -> None:
    """LMDBIO-LMM-DIO-PROV (5.2.2): places are known, each root reads its part of the node's."""
    share = Share(me, task)
    node = NodeRoom.of_records(me, share, task)
    me.begin()
    read_each(me, task, share, node, np.stack((task.offset, task.length)))


class _Group:
    """Iterations that are read together: ranges over the records of a node, cut into large reads,
    and where each record then lies in the shared room."""

    def __init__(self, records: NDArray[np.int64], task: Task) -> None:
        flat = records.ravel()
        order = np.argsort(task.offset[flat], kind="stable")
        begin = (task.offset[flat][order] // PAGE * PAGE).astype(np.int64)
        stop = task.offset[flat][order].astype(np.int64) + task.length[flat][order].astype(np.int64)
        end = -(-stop // PAGE) * PAGE
        starts = [0]
        for i in range(1, len(begin)):
            if begin[i] - end[i - 1] > _GAP or end[i] - begin[starts[-1]] > _LARGEST:
                starts.append(i)
        first = np.array(starts)
        last = np.append(first[1:], len(begin)) - 1
        self.begin = begin[first].astype(np.uint64)
        self.length = (end[last] - begin[first]).astype(np.uint64)
        self.place = np.concatenate(([0], np.cumsum(self.length)[:-1])).astype(np.uint64)
        self.bytes = int(self.length.sum())
        which = np.searchsorted(first, np.arange(len(begin)), side="right") - 1
        at = task.offset[flat][order] - self.begin[which] + self.place[which]
        where = np.empty(len(flat), np.int64)
        where[order] = at.astype(np.int64)
        self.where = where.reshape(records.shape)

    def part(self, k: int, n: int) -> slice:
        """The k-th of n parts of the ranges, neighbours together, of about equal bytes."""
        edges = np.searchsorted(
            np.cumsum(self.length), [self.bytes * k // n, self.bytes * (k + 1) // n]
        )
        return slice(int(edges[0]) if k else 0, int(edges[1]) if k + 1 < n else len(self.begin))


def _groups(share: Share, task: Task) -> Iterator[tuple[int, _Group]]:
    """First iteration and ranges of each group whose reads fill the window, as many on every node: all
    ranks meet after each."""
    records = share.of_node(task)
    pages = ((task.length.astype(np.int64) + PAGE - 1) // PAGE + 1) * PAGE
    of_nodes = pages[task.order].reshape(len(task.order), task.nodes, -1)
    each = int(of_nodes.sum(axis=2).max())
    count = max(1, task.window // max(1, each))
    for begin in range(0, len(records), count):
        yield begin, _Group(records[begin : begin + count], task)


def _coalesced(me: Rank, task: Task, stagger: int) -> None:
    share = Share(me, task)
    groups = list(_groups(share, task))
    node = NodeRoom(me, share, task, max(g.bytes for _, g in groups))
    roots = node.roots * task.nodes
    reads = 0
    column = slice(share.local * share.size, (share.local + 1) * share.size)
    me.begin()
    for begin, group in groups:
        if node.root is not None:
            if stagger and node.root >= stagger:
                # The token of the root of the same label in the group before.
                me.tokens[node.root].acquire()
                me.lap("skew")
            part = group.part(node.part, node.roots)
            node.read_ranges(group.begin[part], group.length[part], group.place[part])
            reads += len(group.begin[part])
            me.lap("read")
            if stagger and node.root + stagger < roots:
                me.tokens[node.root + stagger].release()
        me.wait()
        for i in range(len(group.where)):
            records = share.records[begin + i]
            node.take(records, group.where[i, column])
            me.lap("read")
            me.step(records, share.batch, share.slots)
    me.end()
    me.counters.extra["reads"] = reads


def coal(me: Rank, task: Task) -> None:
    """LMDBIO-LMM-DIO-PROV-COAL [Pumma 2020, sec. 5.2.3]: several iterations in one read."""
    _coalesced(me, task, 0)


def stag(me: Rank, task: Task) -> None:
    """LMDBIO-LMM-DIO-PROV-COAL-STAG [Pumma 2020, sec. 5.2.4]: at most `stagger` roots read at once."""
    _coalesced(me, task, task.stagger)
