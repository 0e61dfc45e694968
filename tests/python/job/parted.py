"""One of four processes that torchrun started, of which each two have one rank: parted.py DATA OUT.

They are 2 (data-parallel) times 2 (tensor-parallel), as Megatron numbers them. In turns all of them
make a loader, on one node and on two that are emulated; then the first of each two alone. Each checks
what it read, and writes OUT/WAY/PROCESS.json. Last they make loaders that are refused, and one
without tiers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch.distributed as dist

import nostall
from nostall.errors import UsageError

data, out = Path(sys.argv[1]), Path(sys.argv[2])
paths = sorted(data.rglob("*.jpg"))
logging.basicConfig(format="%(message)s")
dist.init_process_group("gloo")
process = dist.get_rank()
rank = process // 2
options = {"epochs": 2, "tiers": ["ram:16MiB"], "output": "numpy"}
for way in ("together", "apart", "first"):
    os.environ["NOSTALL_NODE"] = f"node {rank}" if way == "apart" else ""
    if way != "first" or process % 2 == 0:
        source = nostall.FileList(paths, labels=range(len(paths)))
        with nostall.DataLoader(source, 5, **options, rank=rank, world_size=2) as loader:
            for epoch in range(2):
                ids = []
                for images, labels in loader:
                    for i, sample in enumerate(labels.tolist()):
                        assert images[i].tobytes() == paths[sample].read_bytes(), sample
                        ids.append(sample)
                assert ids == loader.plan.rank_epoch(epoch, rank)[0].tolist()
            told = {
                "source": loader.stats().source_bytes,
                "total": source.total_bytes,
                "repr": repr(loader),
            }
            dist.barrier()  # the tiers stay until all have read
        (out / way).mkdir(exist_ok=True)
        (out / way / f"{process}.json").write_text(json.dumps(told))
    else:
        dist.barrier()
source = nostall.FileList(paths, labels=range(len(paths)))
part = {"rank": rank, "world_size": 2, "epochs": 1, "output": "numpy", "tiers": []}
for more in ({"seed": None}, {"peers": "on"}):
    try:
        next(iter(nostall.DataLoader(source, 5, **part, **more)))
    except UsageError as error:
        assert "in a job of 4 processes, so that several of these may have one rank" in str(error)
    else:
        sys.exit(f"{more} is not refused")
with nostall.DataLoader(source, 5, **part) as loader:
    ids = [sample for _, labels in loader for sample in labels.tolist()]
    assert ids == loader.plan.rank_epoch(0, rank)[0].tolist()
dist.destroy_process_group()
