"""WebDataset: tar shards, shuffled approximately through a buffer."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import Job, listing
from nostall_bench.peers.torch_loader import collate_records, decoder, raw_collate, record
from nostall_bench.records import FIELDS, shards

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
    records = job.mode in FIELDS
    archives = (
        shards(job.prepared, [p for p, _ in listing(job.data)], job.mode)
        if records
        else sorted(str(p) for p in job.prepared.glob("*.tar"))
    )
    if job.remote:  # its own way to fetch, a curl for each shard
        bucket = f"{os.environ['AWS_ENDPOINT_URL']}/{job.remote.removeprefix('s3://')}"
        archives = [f"{bucket}/{Path(archive).name}" for archive in archives]
    samples = webdataset.WebDataset(
        archives, shardshuffle=len(archives), empty_check=False
    ).shuffle(1000)
    if records:
        endings = [ending for _, ending in FIELDS[job.mode]]
        fields = [field for field, _ in FIELDS[job.mode]]
        make = record(job.mode, "tv")
        dataset = samples.to_tuple(*endings).map(
            lambda found: make(dict(zip(fields, map(io.BytesIO, found), strict=True)))
        )
    else:
        decode = decoder("tv") if job.mode == "transform" else bytes
        dataset = samples.to_tuple("jpg", "cls").map_tuple(decode, int)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.threads,
        persistent_workers=True,
        collate_fn=collate_records if records else raw_collate if job.mode == "read" else None,
    )
    for _ in range(job.epochs):
        yield (len(batch[-1]) for batch in loader)
