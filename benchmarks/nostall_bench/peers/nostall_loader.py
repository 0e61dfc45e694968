"""nostall itself, as its guide shows it; the variants "tar" and "tar objects" read from shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nostall
from nostall import fields
from nostall import transforms as t
from nostall_bench.peers import (
    ALPHA,
    CLASSES,
    MEAN,
    SIDE,
    STD,
    Job,
    listing,
    torch_loader,
)
from nostall_bench.records import FIELDS, FRAMES, SHAPE, paths, shards

REQUIRES = ("nostall",)
IMPORTS = ("torch",)
_SCHEMA: dict[str, fields.Kind] = {
    "mask": fields.Mask(dtype="int64"),
    "boxes": fields.Boxes(),
    "array": fields.Array(shape=SHAPE),
    "sound": fields.Audio(frames=FRAMES),
}


def _source(job: Job) -> nostall.Source:
    if job.remote:
        if job.variant == "objects":
            return nostall.ObjectFolder(job.remote)
        return nostall.TarShards(f"{job.remote}/*.tar", index=False)
    if job.mode == "cached":
        return nostall.Cached(torch_loader.Files(job, "pil"), makers=job.threads)
    if job.mode not in FIELDS:
        return nostall.ImageFolder(str(job.data))
    wanted = dict(FIELDS[job.mode])
    schema = {name: kind for name, kind in _SCHEMA.items() if name in wanted}
    images = [path for path, _ in listing(job.data)]
    if job.variant == "tar":
        return nostall.TarShards(
            shards(job.prepared, images, job.mode), members=wanted, schema=schema
        )
    samples = paths(job.prepared, images, job.mode)
    return nostall.Files({name: [s[name] for s in samples] for name in wanted}, schema=schema)


def _transforms(mode: str) -> list[Any] | None:
    crop, flip, normalised = (
        t.RandomResizedCrop(SIDE),
        t.RandomHorizontalFlip(),
        [t.ToTensor(), t.Normalize(MEAN, STD)],
    )
    if mode == "recipe":
        crop = t.RandomResizedCrop(SIDE, interpolation="bicubic")
        return [
            *(crop, flip, t.RandAugment(), *normalised, t.RandomErasing()),
            t.MixUp(alpha=ALPHA, num_classes=CLASSES),
        ]
    if mode == "transform" or mode.startswith("image"):
        return [crop, flip, *normalised]
    return None


def _staging(job: Job) -> int | str:
    """As far ahead as the peers work, a few batches, so that little is ready when the clock starts."""
    if not job.remote or job.mode != "read":
        return "160MiB"
    sizes = [Path(path).stat().st_size for path, _ in listing(job.data)]
    return 2 * job.batch_size * sum(sizes) // len(sizes)


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Batches of bytes, of images from the native pipeline, of fields, or of torch's items."""
    with nostall.DataLoader(
        _source(job),
        batch_size=job.batch_size,
        epochs=job.epochs,
        seed=job.seed,
        transforms=_transforms(job.mode),
        tiers="auto" if job.mode == "cached" else list(job.tiers),
        threads=job.threads,
        staging=_staging(job),
        batch="tuple" if job.mode in FIELDS else None,
        rank=0,
        world_size=1,
    ) as loader:
        for epoch in loader.epochs():
            yield map(_size, epoch)


def _size(batch: Any) -> int:
    last = batch[-1]
    return len(last.offsets) - 1 if isinstance(last, fields.Ragged) else len(last)
