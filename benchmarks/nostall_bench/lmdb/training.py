"""A rank's side of a training that reads a database: a real network, real sums of its gradients, and
py-lmdb in torch's DataLoader as the way of reading that the others are compared with."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from nostall.errors import UsageError
from nostall_bench.lmdb.data import key, liblmdb, named

_CLASSES = 10


def side_of(least: int) -> int:
    """Pixels of one side of the picture in records of at least so many bytes."""
    return isqrt(least // 3)


class Training:
    """One convolution and two full layers (68,000 parameters), on the first bytes of each record as
    a square picture; its class is the record's number modulo 10. Gradients are those of the global
    batch, so that every way of reading arrives at the same loss."""

    def __init__(self, side: int, batch: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.pixels = 3 * side * side
        self._side, self._batch = side, batch
        self._network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 5, stride=max(1, side // 16), padding=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(8),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, _CLASSES),
        )
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01, momentum=0.9)
        self.loss = 0.0

    def compute(self, pixels: NDArray[np.uint8], records: NDArray[np.int64]) -> None:
        """Forward and backward on this rank's part of the batch, shape (samples, self.pixels)."""
        pictures = torch.from_numpy(pixels).view(-1, 3, self._side, self._side).float() / 255
        classes = torch.from_numpy(records % _CLASSES)
        self._optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._network(pictures), classes, reduction="sum")
        (loss / self._batch).backward()
        self.loss = float(loss.detach()) / self._batch

    def update(self) -> None:
        """Sums gradients and losses over the ranks, and moves the parameters."""
        gradients = [p.grad for p in self._network.parameters() if p.grad is not None]
        if torch.distributed.is_initialized():
            flat = torch.cat([torch.tensor([self.loss]), *[g.flatten() for g in gradients]])
            torch.distributed.all_reduce(flat)
            edges = np.cumsum([1, *[g.numel() for g in gradients]]).tolist()
            for gradient, (begin, end) in zip(gradients, pairwise(edges), strict=True):
                gradient.copy_(flat[begin:end].view_as(gradient))
            self.loss = float(flat[0])
        self._optimizer.step()


def join(rank: int, ranks: int, room: str) -> None:
    """Makes the process group of the ranks, once a process; none for a single rank."""
    if ranks > 1 and not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(f"{room}/gradients", ranks)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


class _Keys:
    """The data set that users of py-lmdb write: each worker opens the database, and gets by key."""

    def __init__(self, folder: Path, count: int, pixels: int) -> None:
        self._folder, self._count, self._pixels = folder, count, pixels
        self._transaction: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record: int) -> torch.Tensor:
        if self._transaction is None:
            self._transaction = (
                liblmdb().open(str(self._folder), readonly=True, lock=False).begin(buffers=True)
            )
        value = np.frombuffer(self._transaction.get(key(record)), np.uint8)
        if not named(value, record):
            raise UsageError(f"record {record} was not delivered")
        return torch.from_numpy(value[: self._pixels].copy())


def loader(
    folder: Path, records: NDArray[np.int64], count: int, pixels: int, workers: int
) -> torch.utils.data.DataLoader[torch.Tensor]:
    """torch's DataLoader of a rank: its part of each global batch, in their order."""
    keys: Any = _Keys(folder, count, pixels)
    return torch.utils.data.DataLoader(
        keys, batch_sampler=records.tolist(), num_workers=workers, multiprocessing_context="fork"
    )
