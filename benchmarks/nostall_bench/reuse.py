"""``nostall bench reuse``: what using data again, and growing the batch, does to a real training.

The demo's network learns the demo's pictures, kept in memory at --side pixels, in the order of a job
of --ranks ranks: the order "torch"; sub-batches used again within processes, among --node ranks or
among all [Pumma 2020, sec. 8.4.1]; and batches that grow when the accuracy gains less than
--threshold in an epoch, or with every pass over the data in memory (sec. 8.4.3), with the learning
rate. Accuracy is that of other pictures, percent, median [least-most] of the random seeds; distance
is the median of samples between two uses; fresh is what leaves the source if only the resident
batches are kept.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UsageError
from nostall.job._world import World
from nostall.loader._dynamic_batches import DynamicBatches
from nostall.plan import Order, Plan, SubBatches
from nostall_bench import harness

_RATE = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench reuse``."""
    parser.add_argument("--files", type=int, default=1600, help="a quarter of them to test with")
    parser.add_argument("--side", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="samples a rank")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--node", type=int, default=4, help="ranks of a node")
    parser.add_argument("--resident", type=int, default=8, help="global batches in memory")
    parser.add_argument("--reuse", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--threshold", type=float, default=0.01)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains every way with every seed; prints the table."""
    if min(arguments.epochs, arguments.seeds, arguments.batch, arguments.ranks) < 1:
        raise UsageError("--epochs, --seeds, --batch and --ranks must be at least 1")
    if arguments.files < 8 * arguments.batch * arguments.ranks:
        raise UsageError("--files must be at least 8 global batches")
    with tempfile.TemporaryDirectory(prefix="nostall-reuse-") as folder:
        images, labels = pictures(Path(folder), arguments.files, arguments.side)
    rows: list[dict[str, Any]] = []
    for name, order, dynamic in _ways(arguments):
        runs = [
            _train(images, labels, order, dynamic, arguments, seed)
            for seed in range(arguments.seeds)
        ]
        rows.append({"way": name, "runs": runs})
    table = harness.table(
        f"{arguments.epochs} epochs, {arguments.ranks} ranks",
        *("way", "accuracy", "half-way", "updates", "distance", "fresh", "s"),
    )
    for row in rows:
        accuracy, middle = (
            harness.spread((100 * r["accuracy"][at] for r in row["runs"]), "{:.1f}")
            for at in (-1, arguments.epochs // 2 - 1)
        )
        first = row["runs"][0]
        table.add_row(
            row["way"], accuracy, middle, f"{harness.median(row['runs'], 'updates'):.0f}",
            f"{first['distance']:.0f}", f"{first['fresh']:.0%}",
            f"{harness.median(row['runs'], 'seconds'):.1f}",
        )  # fmt: skip
    harness.console().print(table)
    harness.write(arguments.json, rows=rows)
    return 0


def _ways(arguments: argparse.Namespace) -> Iterator[tuple[str, Order, dict[str, Any] | None]]:
    grows = {"threshold": arguments.threshold, "limit": arguments.limit}
    yield "torch", "torch", None
    places = {"process": 1, "node": arguments.node, "machine": arguments.ranks}
    for reuse in arguments.reuse:
        for place, together in places.items():
            order = SubBatches(arguments.resident, reuse, together)
            yield f"reuse {reuse}, {place}", order, None
    yield f"largest batch ({arguments.limit}x)", "torch", {"limit": arguments.limit, "fixed": True}
    yield "growing batch", "torch", grows
    order = SubBatches(arguments.resident, max(arguments.reuse), arguments.node)
    # Only the passes decide here: reports never do.
    yield f"sawtooth, reuse {order.reuse}", order, {**grows, "threshold": -1e9, "sawtooth": True}


def pictures(folder: Path, files: int, side: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The demo's pictures, float32 of shape (files, 3, side, side), and their classes."""
    from PIL import Image

    from nostall_bench.demo.dataset import DatasetSpec, make_dataset

    spec = DatasetSpec(files=files, scale=0.3)
    made = make_dataset(folder, spec)
    images = np.empty((files, 3, side, side), np.float32)
    for i in range(files):
        with Image.open(Path(made) / spec.path(i)) as image:
            small = np.asarray(image.convert("RGB").resize((side, side)), np.float32)
        images[i] = small.transpose(2, 0, 1) / 127.5 - 1
    return images, np.arange(files) % spec.classes


class _Memory:
    """Arrays as a `DataLoader` gives them: what `DynamicBatches` needs of one."""

    gives_pairs = True
    _recipe = types.SimpleNamespace(records=None, lists=None)  # samples and labels, stacked

    def __init__(self, images: Any, labels: Any, plan: Plan) -> None:
        self.plan, self.position = plan, (0, 0)
        self.world = World(0, 1, 0, 1, "memory")
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self.plan)

    def epochs(self) -> Iterator[Any]:
        for index in range(self.plan.native.epochs):
            yield _MemoryEpoch(self, index)


class _MemoryEpoch:
    def __init__(self, loader: _Memory, index: int) -> None:
        self._loader, self.index = loader, index

    def __iter__(self) -> Iterator[Any]:
        self._loader.position = (self.index, 0)
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        loader = self._loader
        order, size = loader.plan.epoch_order(self.index), loader.plan.native.global_batch
        for h in range(len(loader)):
            ids = order[h * size : (h + 1) * size].astype(np.int64)
            loader.position = (self.index, h + 1)
            yield loader._images[ids], loader._labels[ids]


def _train(
    images: Any,
    labels: Any,
    order: Order,
    dynamic: dict[str, Any] | None,
    arguments: argparse.Namespace,
    seed: int,
) -> dict[str, Any]:
    import torch

    from nostall_bench.demo.train import make_model

    torch.set_num_threads(1)
    count = len(labels) * 3 // 4
    data, classes = torch.from_numpy(images), torch.from_numpy(labels)
    plan = Plan(
        samples=count,
        batch_size=arguments.batch * arguments.ranks,
        order_world=arguments.ranks,
        epochs=arguments.epochs,
        seed=seed,
        order=order,
        drop_last=True,
    )
    settings = dict(dynamic or {"limit": 1})
    fixed = settings.pop("fixed", False)
    loader: Any = _Memory(data, classes, plan)
    batches = DynamicBatches(loader, **settings)
    if fixed:
        batches.factor = batches.limit
    model = make_model(10, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9, weight_decay=1e-4)
    flips = torch.Generator().manual_seed(seed)
    accuracy, factors, updates = [], [], 0
    begin = time.perf_counter()
    for index, epoch in batches.epochs():
        model.train()
        for x, y in epoch:
            # With the root of the batch's size, after an epoch that warms up; a cosine to nothing.
            larger = (len(y) / plan.native.global_batch) ** 0.5 if index else 1
            decay = (1 + math.cos(math.pi * index / arguments.epochs)) / 2
            optimizer.param_groups[0]["lr"] = _RATE * larger * decay
            if torch.rand((), generator=flips) < 0.5:
                x = x.flip(3)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            updates += 1
        model.eval()
        with torch.no_grad():
            right = (model(data[count:]).argmax(1) == classes[count:]).float().mean().item()
        accuracy.append(right)
        factors.append(batches.factor)
        if not fixed:
            batches.report(right)
    distances = plan.reuse_distances()
    return {
        "seed": seed,
        "accuracy": accuracy,
        "factors": factors,
        "updates": updates,
        "distance": float(np.median(distances)) if len(distances) else float("nan"),
        "fresh": _fresh(plan),
        "seconds": time.perf_counter() - begin,
    }


def _fresh(plan: Plan) -> float:
    """Batches that are not a further pass over what is in memory, as a part of all."""
    passes = [
        plan.pass_of(epoch, batch)[1]
        for epoch in range(plan.native.epochs)
        for batch in range(len(plan))
    ]
    return sum(p == 0 for p in passes) / len(passes)
