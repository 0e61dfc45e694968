"""One rank under a real launcher; each stands for a node of its own. Argument: the dataset."""

from __future__ import annotations

import json
import os
import sys

if sys.argv[2] == "mpi":
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
else:
    rank = int(os.environ["RANK"])
    if sys.argv[2] == "group":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
os.environ["NOSTALL_NODE"] = f"node {rank}"

import nostall

with nostall.DataLoader(
    nostall.ImageFolder(sys.argv[1], index=False), 5, epochs=3, tiers=["ram:1MiB"], output="numpy"
) as loader:
    seen = sum(len(labels) for epoch in loader.epochs() for _, labels in epoch)
    stats = loader.stats()
if sys.argv[2] == "mpi":
    MPI.COMM_WORLD.Barrier()
with open(f"{sys.argv[3]}/{rank}.json", "w") as file:
    json.dump({"seen": seen, "source": stats.source_bytes, "peers": stats.peers}, file)
