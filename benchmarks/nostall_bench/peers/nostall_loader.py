"""nostall itself, as its guide shows it."""

from __future__ import annotations

from collections.abc import Iterator

import nostall
from nostall import transforms as t
from nostall_bench.peers import MEAN, SIDE, STD, Job, torch_loader

REQUIRES = ("nostall",)
DATASETS = True


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Batches of raw bytes, of images from the native pipeline, or of the items of torch's row."""
    steps = [t.RandomResizedCrop(SIDE), t.RandomHorizontalFlip(), t.ToTensor()]
    source: nostall.Source = (
        nostall.Cached(torch_loader.Files(job, "pil"), makers=job.threads)
        if job.mode == "cached"
        else nostall.ImageFolder(str(job.data))
    )
    with nostall.DataLoader(
        source,
        batch_size=job.batch_size,
        epochs=job.epochs,
        seed=job.seed,
        transforms=[*steps, t.Normalize(MEAN, STD)] if job.mode == "transform" else None,
        tiers="auto" if job.mode == "cached" else list(job.tiers),
        threads=job.threads,
        # As far ahead as the peers work: a few batches, so that little is ready when the clock starts.
        staging="160MiB",
        rank=0,
        world_size=1,
    ) as loader:
        for epoch in loader.epochs():
            yield (len(labels) for _, labels in epoch)
