"""A rank of DistributedDataParallel on Gloo, profiled: ddp.py STORE OUT RANK WORLD."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

store, out, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
layers = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = -2  # the first two build the buckets, for which each rank waits for the other
works: list[dist.Work] = []


def came(at: int) -> Path:
    """Is there once rank 0 has begun all collectives of this step."""
    return Path(f"{store}.{at}")


def allreduce(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses types that are strings
    works.append(dist.all_reduce(bucket.buffer().div_(int(world)), async_op=True))
    if rank == 0 and bucket.is_last():
        came(step).touch()
    return works[-1].get_future().then(lambda done: done.value()[0])


def train() -> None:
    global step
    while step >= 0 and rank == 1 and not came(step).exists():
        time.sleep(0.001)
    time.sleep(0.03 * rank)  # rank 0 waits for it
    optimizer.zero_grad()
    model(torch.ones(4, 128)).sum().backward()
    for work in works:  # its end is recorded after its future has the sums
        work.wait()
    works.clear()
    optimizer.step()
    step += 1


model.register_comm_hook(None, allreduce)
for _ in range(2):
    train()
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for _ in range(6):
        train()
        profiler.step()
profiler.export_chrome_trace(out)
dist.destroy_process_group()
