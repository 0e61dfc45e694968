"""Grain: a map dataset shuffled globally, read by threads, decoded with torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import Job, listing, sized
from nostall_bench.peers.torch_loader import decoder

REQUIRES = ("grain", "torchvision")


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Batches as lists of bytes, or stacked NumPy arrays."""
    import grain
    import numpy as np
    import torch

    torch.set_num_threads(1)
    items = listing(job.data)
    decode = decoder("tv")

    def load(item: tuple[str, int]) -> tuple[Any, int]:
        data = Path(item[0]).read_bytes()
        return (decode(data).numpy() if job.mode == "transform" else data), item[1]

    def collate(samples: Any) -> tuple[Any, list[int]]:
        images = [s[0] for s in samples]
        stacked = np.stack(images) if job.mode == "transform" else images
        return stacked, [s[1] for s in samples]

    for epoch in range(job.epochs):
        dataset = (
            grain.MapDataset.source(items)
            .shuffle(seed=job.seed + epoch)
            .map(load)
            .batch(job.batch_size, batch_fn=collate)
        )
        options = grain.ReadOptions(num_threads=job.threads)
        yield sized((len(b[1]) for b in dataset.to_iter_dataset(options)), len(items))
