"""What programs write first: a data set of torch that reads an object a sample through fsspec (s3fs).

The variant is the number of workers, as many as threads without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nostall_bench.peers import Job, listing
from nostall_bench.peers.torch_loader import decoder, raw_collate

REQUIRES = ("s3fs", "torch", "torchvision")


class Objects:
    """A map-style dataset over the objects; a sample is (bytes or image, label)."""

    def __init__(self, job: Job) -> None:
        self.items = [
            (f"{job.remote}/{path.removeprefix(f'{job.data}/')}", label)
            for path, label in listing(job.data)
        ]
        self.decode = None if job.mode == "read" else decoder("tv")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import fsspec

        url, label = self.items[index]
        with fsspec.open(url, "rb") as file:
            data = file.read()
        return (data if self.decode is None else self.decode(data)), label


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Shuffled globally, worker processes that stay."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    loader: DataLoader[Any] = DataLoader(
        Objects(job),  # type: ignore[arg-type]
        batch_size=job.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(job.seed),
        num_workers=int(job.variant or job.threads),
        persistent_workers=True,
        collate_fn=raw_collate if job.mode == "read" else None,
    )
    for _ in range(job.epochs):
        yield (len(batch[-1]) for batch in loader)
