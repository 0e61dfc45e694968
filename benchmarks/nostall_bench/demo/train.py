"""The training of the demo: one rank, under torchrun, with torch's loader or nostall's.

    python -m torch.distributed.run --nproc-per-node 2 -m nostall_bench.demo.train --loader torch ...

Both runs have the same seed, order, initial weights and schedule; only the loader differs.
Rank 0 writes one JSON file with losses, accuracies and the seconds spent waiting in ``next()``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# All of it takes no part of the time, whichever loader trains.
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

import nostall.loader
import nostall.source
from nostall import transforms as t

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def make_model(classes: int, seed: int) -> nn.Module:
    """A small convolutional network with the same weights on every rank."""
    torch.manual_seed(seed)

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]

    return nn.Sequential(
        *block(3, 16), *block(16, 32), *block(32, 64), *block(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


def torch_epochs(arguments: argparse.Namespace) -> Iterator[Iterable[Any]]:
    """What most people run: ImageFolder, PIL transforms, worker processes that stay."""
    dataset = ImageFolder(
        arguments.data,
        transforms.Compose(
            [
                transforms.RandomResizedCrop(arguments.size, scale=(0.35, 1.0)),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        ),
    )
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, shuffle=True, seed=arguments.seed
    )
    loader = DataLoader(
        dataset,
        batch_size=arguments.batch_size,
        sampler=sampler,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        prefetch_factor=4 if arguments.workers else None,
    )
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        yield loader


class NostallEpochs:
    """The same with nostall, one statement longer only to keep the statistics."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.loader = nostall.DataLoader(
            nostall.ImageFolder(arguments.data),
            batch_size=arguments.batch_size,
            epochs=arguments.epochs,
            seed=arguments.seed,
            transforms=[
                t.RandomResizedCrop(arguments.size, scale=(0.35, 1.0)),
                t.RandomHorizontalFlip(),
                t.ToTensor(),
                t.Normalize(MEAN, STD),
            ],
            tiers=arguments.tiers,
        )

    def __iter__(self) -> Iterator[Iterable[Any]]:
        return iter(self.loader.epochs())


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains for all epochs; the record of this rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(arguments.classes, arguments.seed)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    began_all = time.perf_counter()
    nostall_run = NostallEpochs(arguments) if arguments.loader == "nostall" else None
    rows = []
    total = began_all
    for epoch, batches in enumerate(nostall_run or torch_epochs(arguments)):
        began = time.perf_counter() if epoch else began_all
        stall, seen, right, loss_sum = 0.0, 0, 0, 0.0
        waiting = began
        for images, labels in batches:
            stall += time.perf_counter() - waiting
            optimizer.zero_grad(set_to_none=True)
            output = parallel(images)
            loss = nn.functional.cross_entropy(output, labels)
            loss.backward()
            optimizer.step()
            seen += len(labels)
            right += int((output.argmax(1) == labels).sum())
            loss_sum += float(loss) * len(labels)
            waiting = time.perf_counter()
        stall += time.perf_counter() - waiting
        sums = torch.tensor([seen, right, loss_sum, stall], dtype=torch.float64)
        dist.all_reduce(sums)
        total = time.perf_counter()
        rows.append(
            {
                "epoch": epoch,
                "seconds": total - began,
                "stall_seconds": float(sums[3]) / world,
                "samples": int(sums[0]),
                "loss": float(sums[2] / sums[0]),
                "accuracy": float(sums[1] / sums[0]),
            }
        )
        if rank == 0:
            # The parent shows progress from these lines.
            print(f"epoch {epoch} {json.dumps(rows[-1])}", flush=True)
    record: dict[str, Any] = {
        "loader": arguments.loader,
        "seconds": total - began_all,
        "epochs": rows,
    }
    if nostall_run is not None:
        stats = nostall_run.loader.stats()
        stats.save(Path(arguments.out).with_suffix(f".rank{rank}.stats.json"))
        record["lower_bound_bytes"] = stats.lower_bound_bytes
        nostall_run.loader.close()
    dist.barrier()
    dist.destroy_process_group()
    return record


def main() -> None:
    """Parses what the demo passes, trains, and lets rank 0 write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", choices=["torch", "nostall"], required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tiers", nargs="*", default=[])
    arguments = parser.parse_args()
    record = train(arguments)
    if os.environ.get("RANK", "0") == "0":
        Path(arguments.out).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
