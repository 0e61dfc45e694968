"""One rank under a real launcher; each stands for a node of its own: launched.py DATA OUT WAY...

What each way of finding the others gave is OUT/WAY/RANK.json. "store" is torchrun's alone, "group" a
process group, "mpi" the MPI.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nostall
from nostall.job._world import find_world

data, out, *ways = sys.argv[1:]
if ways == ["mpi"]:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
else:
    rank = int(os.environ["RANK"])
place = find_world()
os.environ["NOSTALL_NODE"] = f"node {rank}"
for way in ways:
    if way == "group":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    with nostall.DataLoader(
        nostall.ImageFolder(data, index=False), 5, epochs=3, tiers=["ram:1MiB"], output="numpy"
    ) as loader:
        seen = sum(len(labels) for epoch in loader.epochs() for _, labels in epoch)
        stats = loader.stats()
    if way == "mpi":
        MPI.COMM_WORLD.Barrier()
    folder = Path(out, way)
    folder.mkdir(exist_ok=True)
    result: dict[str, object] = {"seen": seen, "source": stats.source_bytes, "peers": stats.peers}
    result["place"] = [place.rank, place.local_rank]
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
