"""torch's DataLoader with PIL or torchvision's decode_jpeg; the variant is "<workers> <how>"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import MEAN, SIDE, STD, Job, listing

REQUIRES = ("torch", "torchvision")
DATASETS = True


def decoder(how: str) -> Callable[[bytes], Any]:
    """A function from JPEG bytes to a float32 tensor of shape (3, 224, 224)."""
    import io

    import numpy as np
    import torch
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    if how == "pil":
        pil = v2.Compose(
            [
                v2.RandomResizedCrop(SIDE),
                v2.RandomHorizontalFlip(),
                v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )
        return lambda data: pil(Image.open(io.BytesIO(data)).convert("RGB"))
    tensors = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )

    def decode(data: bytes) -> Any:
        array = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        return tensors(decode_jpeg(array, ImageReadMode.RGB))

    return decode


def prepared(how: str) -> Callable[[bytes], Any]:
    """A function from JPEG bytes to a uint8 tensor of shape (3, 224, 224), the same at every call."""
    import io

    import numpy as np
    import torch
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    cut = v2.Compose([v2.Resize(SIDE + 32), v2.CenterCrop(SIDE)])
    if how == "pil":
        return lambda data: v2.functional.pil_to_tensor(
            cut(Image.open(io.BytesIO(data)).convert("RGB"))
        )
    return lambda data: cut(
        decode_jpeg(torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)), ImageReadMode.RGB)
    )


class Files:
    """A map-style dataset over the files; a sample is (bytes or image, label)."""

    def __init__(self, job: Job, how: str) -> None:
        self.items = listing(job.data)
        self.mode = job.mode
        self.how = how
        self.decode: Callable[[bytes], Any] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.items[index]
        data = Path(path).read_bytes()
        if self.mode == "read":
            return data, label
        if self.decode is None:
            self.decode = (prepared if self.mode == "cached" else decoder)(self.how)
        return self.decode(data), label


def raw_collate(samples: list[tuple[Any, int]]) -> tuple[list[Any], list[int]]:
    """Keeps the bytes of the samples as they are."""
    return [s[0] for s in samples], [s[1] for s in samples]


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Shuffled globally, worker processes that stay."""
    import torch
    from torch.utils.data import DataLoader

    workers, how = job.variant.split()
    torch.set_num_threads(1)
    loader: DataLoader[Any] = DataLoader(
        Files(job, how),  # type: ignore[arg-type]
        batch_size=job.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(job.seed),
        num_workers=int(workers),
        persistent_workers=int(workers) > 0,
        collate_fn=raw_collate if job.mode == "read" else None,
    )
    for _ in range(job.epochs):
        yield (len(labels) for _, labels in loader)
