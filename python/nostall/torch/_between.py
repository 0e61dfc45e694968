"""What connects local leaders, and all ranks, between nodes: Gloo, called by native code.

native/collective/two_level.h has the algorithm. Native code holds addresses; the tensors that own
the memory live here, so that Gloo may go on to use them after a call has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import AllgatherOptions

from nostall.errors import UsageError
from nostall.job._cluster import node_identity
from nostall.job._meeting import meet, own_connection
from nostall.job._rendezvous import initialised_store
from nostall.sync import Network, connect_nodes_by
from nostall.torch._mesh import connect, hang_up


class LeaderTensor:
    """One tensor of a local leader; `allreduce` reduces a part of it among leaders."""

    def __init__(self, flat: torch.Tensor, allreduce: Callable[[torch.Tensor], Any]) -> None:
        self._flat, self._allreduce = flat.view(-1), allreduce

    def start(self, address: int, count: int, _type: str) -> Any:
        begin = (address - self._flat.data_ptr()) // self._flat.element_size()
        return self._allreduce(self._flat[begin : begin + count])


class GlooNetwork(Network):
    """Ranks of several nodes over Gloo, in connections that nothing else uses."""

    def __init__(self, name: str, rank: int, ranks: int, store: Any) -> None:
        self.rank, self.ranks = rank, ranks
        self._timeout = timedelta(minutes=10)
        self._memory: dict[int, torch.Tensor] = {}
        seconds = self._timeout.total_seconds()
        met = meet(store, rank, ranks, name, node_identity().encode(), seconds)
        store = PrefixStore(f"nostall {met.number}", own_connection(store, seconds))
        self._all = connect(PrefixStore("all", store), rank, ranks, self._timeout)
        nodes: dict[bytes, list[int]] = {}
        for other, node in enumerate(met.parts):
            nodes.setdefault(node, []).append(other)
        self.node = nodes[met.parts[rank]]
        self.nodes = len(nodes)
        self.job = f"{met.number} {self.node[0]}"
        self._leaders: Any = None
        if self.nodes > 1 and self.node[0] == rank:
            place = [members[0] for members in nodes.values()].index(rank)
            among = PrefixStore("leaders", store)
            self._leaders = connect(among, place, self.nodes, self._timeout)

    def set_timeout(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=seconds)

    # What native code calls.

    def allocate(self, size: int) -> int:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        address = int(memory.data_ptr())
        self._memory[address] = memory
        return address

    def release(self, address: int) -> None:
        self._memory.pop(address, None)

    def end(self) -> None:
        for gloo in (self._all, self._leaders):
            if gloo is not None:
                hang_up(gloo)

    def start(self, address: int, count: int, type: str) -> Any:
        # A copy: an engine that is made or dropped meanwhile changes it from another thread.
        base = max(begin for begin in list(self._memory) if begin <= address)
        whole = self._memory[base]
        kind: torch.dtype = getattr(torch, type)
        part = whole[address - base : address - base + count * kind.itemsize].view(kind)
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.SUM, self._timeout
        return self._leaders.allreduce([part], options)

    def all_gather(self, data: bytes) -> list[bytes]:
        sizes = self._gather(torch.tensor([len(data)], device="cpu"))
        most = int(max(sizes))
        if most == 0:
            return [b""] * self.ranks
        padded = self._gather(
            torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
        )
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(padded, sizes, strict=True)
        ]

    def broadcast(self, data: bytes, root: int) -> bytes:
        size = torch.tensor([len(data)], device="cpu")
        self._send(size, root)
        if int(size) == 0:
            return b""
        content = bytearray(data) if self.rank == root else bytearray(int(size))
        self._send(torch.frombuffer(content, dtype=torch.uint8), root)
        return bytes(content)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        options = AllgatherOptions()
        options.timeout = self._timeout
        out = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._all.allgather([out], [mine], options).wait()
        return out

    def _send(self, data: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, self._timeout
        self._all.broadcast([data], options).wait()


def _connect(name: str, rank: int, ranks: int) -> GlooNetwork:
    store = initialised_store()
    if store is None:
        raise UsageError(
            "the ranks span several nodes: call torch.distributed.init_process_group first, the "
            "gradient engine meets through its store"
        )
    return GlooNetwork(name, rank, ranks, store)


connect_nodes_by(_connect)
