"""One rank under a real launcher; each stands for a node of its own: launched.py DATA OUT WAY...

What each way of finding the others gave is OUT/WAY/RANK.json. "store" is torchrun's alone, "group" a
process group, "mpi" the MPI.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import nostall
from nostall.job._world import find_world

EPOCHS = 3

data, out, *ways = sys.argv[1:]
if ways == ["mpi"]:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
else:
    rank = int(os.environ["RANK"])
place = find_world()
# A machine that does other things must not make a peer look lost.
os.environ["NOSTALL_PEER_TIMEOUT_MS"] = "60000"
os.environ["NOSTALL_NODE"] = f"node {rank}"
for way in ways:
    if way == "group":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    seen, latest = 0, time.monotonic() + 90
    with nostall.DataLoader(
        nostall.ImageFolder(data, index=False), 5, tiers=["ram:32KiB"], output="numpy"
    ) as loader:
        # The tiers hold a part of the data, so nodes that have met exchange samples in each epoch.
        exchanged = False
        while loader.position < (EPOCHS, 0) or not (exchanged or time.monotonic() > latest):
            within = loader.position < (EPOCHS, 0)
            seen += within * sum(len(labels) for _, labels in loader)
            stats = loader.stats()
            exchanged = any(
                stats.peers[name] for name in ("pushed", "received", "fetched", "served")
            )
        folder = Path(out, way)
        folder.mkdir(exist_ok=True)
        result: dict[str, object] = {"seen": seen, "exchanged": exchanged, "peers": stats.peers}
        result["place"] = [place.rank, place.local_rank]
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
        # One that has closed is lost to a rank that a busy machine made late.
        latest = time.monotonic() + 60
        while len(list(folder.iterdir())) < place.world_size and time.monotonic() < latest:
            time.sleep(0.005)
    if way == "mpi":
        MPI.COMM_WORLD.Barrier()
