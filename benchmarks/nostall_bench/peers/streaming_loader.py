"""MosaicML Streaming: MDS shards on a local path, its own shuffle, torch's worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import Job, listing
from nostall_bench.peers.torch_loader import decoder, raw_collate

REQUIRES = ("streaming", "torch", "torchvision")


def prepare(data: Path, work: Path) -> Path:
    """Writes MDS shards."""
    from streaming import MDSWriter

    out = work / "streaming"
    if (out / "index.json").exists():
        return out
    with MDSWriter(out=str(out), columns={"jpg": "bytes", "cls": "int"}) as writer:
        for path, label in listing(data):
            writer.write({"jpg": Path(path).read_bytes(), "cls": label})
    return out


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Worker processes that stay."""
    import torch
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    decode = decoder("tv")
    mode = job.mode

    class Images(StreamingDataset):  # type: ignore[misc]
        """Samples as (bytes or image, label)."""

        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return (decode(sample["jpg"]) if mode == "transform" else sample["jpg"]), sample["cls"]

    loader: DataLoader[Any] = DataLoader(
        Images(
            local=job.cache or str(job.prepared),
            remote=job.remote or None,
            shuffle=True,
            shuffle_seed=job.seed,
            batch_size=job.batch_size,
        ),
        batch_size=job.batch_size,
        num_workers=job.threads,
        persistent_workers=True,
        collate_fn=raw_collate if job.mode == "read" else None,
    )
    for _ in range(job.epochs):
        yield (len(labels) for _, labels in loader)
