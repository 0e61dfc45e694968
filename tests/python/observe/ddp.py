"""A rank of DistributedDataParallel on Gloo, profiled: ddp.py STORE OUT RANK WORLD."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

store, out, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
layers = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for _ in range(6):
        time.sleep(0.03 * rank)  # rank 0 waits for the others
        optimizer.zero_grad()
        model(torch.ones(4, 128)).sum().backward()
        optimizer.step()
        profiler.step()
profiler.export_chrome_trace(out)
dist.destroy_process_group()
