"""One MPI rank of ``nostall bench patterns``: trains in Horovod's manner, and tells its loss and times.

mpirun -n 4 python -m nostall_bench.patterns_rank SETTINGS.json

Horovod starts with a broadcast of every tensor of the model. Its thread then negotiates in cycles
which gradients all ranks have, fuses them, and reduces them, all by MPI: here it is nostall's engine
that does so (``mode="negotiated"``, after the same protocol), on a connection over MPI.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from nostall import sync
from nostall.sync import Network, SyncOptions
from nostall.torch import DistributedOptimizer
from nostall_bench.sync_rank import NETWORKS

_TYPES = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}


class MpiNetwork(Network):
    """Every call is one of MPI, as in Horovod's controller over MPI; no memory is shared."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.ranks = comm.rank, comm.size
        self.node, self.nodes = list(range(comm.size)), comm.size
        self.job = "patterns"

    def set_timeout(self, seconds: float) -> None:
        """MPI has none."""

    def allreduce(self, address: int, count: int, type: str) -> None:
        kind = _TYPES[type]
        memory = (ctypes.c_char * (count * kind.Get_size())).from_address(address)
        self._comm.Allreduce(MPI.IN_PLACE, [memory, count, kind])

    def all_and(self, data: bytes) -> bytes:
        words = bytearray(data)
        self._comm.Allreduce(MPI.IN_PLACE, [words, len(data) // 8, MPI.UINT64_T], MPI.BAND)
        return bytes(words)

    def all_min(self, value: int) -> int:
        words = np.array([value], np.int64)
        self._comm.Allreduce(MPI.IN_PLACE, words, MPI.MIN)
        return int(words[0])

    def all_gather(self, data: bytes) -> list[bytes]:
        """Where Horovod gathers sizes and messages on rank 0."""
        sizes = np.zeros(self.ranks, np.int32)
        self._comm.Allgather(np.array([len(data)], np.int32), sizes)
        whole = bytearray(int(sizes.sum()))
        counts = [int(size) for size in sizes]
        self._comm.Allgatherv([data, MPI.BYTE], [whole, counts, MPI.BYTE])
        ends = [int(end) for end in np.cumsum([0, *counts])]
        return [bytes(whole[a:b]) for a, b in itertools.pairwise(ends)]

    def broadcast(self, data: bytes, root: int) -> bytes:
        size = np.array([len(data)], np.int32)
        self._comm.Bcast(size, root)
        content = bytearray(data) if self.rank == root else bytearray(int(size[0]))
        if content:
            self._comm.Bcast([content, MPI.BYTE], root)
        return bytes(content)


def train(settings: dict[str, Any]) -> dict[str, float]:
    """Some steps on one batch in memory, as Horovod's synthetic benchmark trains."""
    comm = MPI.COMM_WORLD
    # No rank shares memory with another one: what is measured are MPI's collectives.
    place = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    # The engine's thread and this one call at the same time.
    sync.connect_nodes_by(lambda name, rank, ranks: MpiNetwork(comm.Dup()))
    torch.set_num_threads(1)
    torch.manual_seed(comm.rank)
    make, shape = NETWORKS[settings["network"]]
    model = make()
    for tensor in model.state_dict().values():
        comm.Bcast(tensor.numpy().reshape(-1))
    options = SyncOptions(
        mode="negotiated", cycle=settings["cycle"], threshold=settings["threshold"]
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(optimizer, model.named_parameters(), options)
    images = torch.randn(settings["batch"], *shape)
    labels = torch.randint(0, 100, (settings["batch"],))
    began, loss = time.perf_counter(), torch.zeros(())
    for _ in range(settings["steps"]):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    stats = optimizer.gradient_sync.engine.stats()
    mine = float(sum(p.detach().abs().sum() for p in model.parameters()))
    weights = comm.allgather(mine)
    if max(weights) != min(weights):
        raise SystemExit(f"rank {comm.rank}: the ranks ended with different weights, {weights}")
    return {
        "seconds": seconds,
        "loss": float(loss),
        "cycles": stats["cycles"],
        "parameters": sum(p.numel() for p in model.parameters()),
    }


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    told = train(given)
    if MPI.COMM_WORLD.rank == 0:
        Path(given["answer"]).write_text(json.dumps(told))
