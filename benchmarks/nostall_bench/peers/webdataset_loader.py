"""WebDataset: tar shards, shuffled approximately through a buffer."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import Job, listing
from nostall_bench.peers.torch_loader import decoder, raw_collate

REQUIRES = ("webdataset", "torch", "torchvision")
_PER_SHARD = 250


def prepare(data: Path, work: Path) -> Path:
    """Writes tar shards of 250 samples."""
    out = work / "webdataset"
    if (out / "done").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    items = listing(data)
    for shard in range(0, len(items), _PER_SHARD):
        with tarfile.open(out / f"{shard // _PER_SHARD:06d}.tar", "w") as tar:
            for i, (path, label) in enumerate(items[shard : shard + _PER_SHARD], shard):
                for name, body in (
                    (f"{i:08d}.jpg", Path(path).read_bytes()),
                    (f"{i:08d}.cls", str(label).encode()),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
    (out / "done").touch()
    return out


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Worker processes each read their shards."""
    import torch
    import webdataset
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    shards = sorted(str(p) for p in job.prepared.glob("*.tar"))
    decode = decoder("tv")

    def image(data: bytes) -> Any:
        return decode(data) if job.mode == "transform" else data

    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(image, int)
    )
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=int(job.variant),
        persistent_workers=True,
        collate_fn=raw_collate if job.mode == "read" else None,
    )
    for _ in range(job.epochs):
        yield (len(labels) for _, labels in loader)
