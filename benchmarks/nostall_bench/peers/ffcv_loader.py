"""FFCV: a file of its own format (JPEG at its usual quality, 90), pipelines compiled by Numba.

It is built from source, for which OpenCV and libturbojpeg must be installed with their headers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import MEAN, SIDE, STD, Job, listing, sized

REQUIRES = ("ffcv", "torch", "PIL")


class _Images:
    """Pairs of an image and its label, for FFCV's writer."""

    def __init__(self, data: Path) -> None:
        self.items = listing(data)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        path, label = self.items[index]
        return Image.open(path).convert("RGB"), label


def prepare(data: Path, work: Path) -> Path:
    """Writes one file of all images."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    out = work / "ffcv" / "images.beton"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
        DatasetWriter(str(part), fields).from_indexed_dataset(_Images(data))
        part.rename(out)
    return out


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Shuffled globally; the file lies in the page cache, as `os_cache` says."""
    import numpy as np
    import torch
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        Squeeze,
        ToTensor,
        ToTorchImage,
    )

    torch.set_num_threads(1)
    mean, std = (255 * np.array(values) for values in (MEAN, STD))
    loader = Loader(
        str(job.prepared),
        batch_size=job.batch_size,
        num_workers=job.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        seed=job.seed,
        drop_last=False,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((SIDE, SIDE)),
                RandomHorizontalFlip(),
                NormalizeImage(mean, std, np.float32),
                ToTensor(),
                ToTorchImage(channels_last=False),
            ],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    for _ in range(job.epochs):
        yield sized((len(images) for images, _ in loader), len(listing(job.data)))
