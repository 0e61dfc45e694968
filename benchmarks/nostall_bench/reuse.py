"""``nostall bench reuse``: what using data again, and growing the batch, does to a real training.

The demo's network learns the demo's pictures, kept in memory at --side pixels, in the order of a job
of --ranks ranks: the order "torch"; sub-batches used again within processes, among --node ranks or
among all [Pumma 2020, sec. 8.4.1]; and batches that grow when the accuracy gains less than
--threshold in an epoch, or with every pass over the data in memory (sec. 8.4.3), with the learning
rate. Accuracy is that of other pictures, percent, median [least-most] of the random seeds; distance
is the median of samples between two uses; fresh is the part of the batches that are the first pass over
their data. Storage is what leaves it, counted: loaders of all ranks read the pictures' files, batch by
batch together, through a RAM tier of two chunks on each node; and the bytes that this process asked
the system for (rchar of /proc/self/io), as a part of all that the epochs hold.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nostall
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
    if arguments.ranks % arguments.node:
        raise UsageError(f"--ranks {arguments.ranks} are no whole nodes of --node {arguments.node}")
    with tempfile.TemporaryDirectory(prefix="nostall-reuse-") as folder:
        images, labels = pictures(Path(folder), arguments.files, arguments.side)
        stored = {
            order: _stored(Path(folder), order, arguments)
            for order in dict.fromkeys(order for _, order, _ in _ways(arguments))
        }
    rows: list[dict[str, Any]] = []
    for name, order, dynamic in _ways(arguments):
        runs = [
            _train(images, labels, order, dynamic, arguments, seed)
            for seed in range(arguments.seeds)
        ]
        rows.append({"way": name, "runs": runs, "stored": stored[order]})
    table = harness.table(
        f"{arguments.epochs} epochs, {arguments.ranks} ranks",
        *("way", "accuracy", "half-way", "updates", "distance", "fresh", "storage", "s"),
    )
    for row in rows:
        accuracy, middle = (
            harness.spread((100 * r["accuracy"][at] for r in row["runs"]), "{:.1f}")
            for at in (-1, arguments.epochs // 2 - 1)
        )
        first = row["runs"][0]
        table.add_row(
            row["way"], accuracy, middle, f"{harness.median(row['runs'], 'updates'):.0f}",
            f"{first['distance']:.0f}", f"{first['fresh']:.0%}", f"{row['stored']['share']:.0%}",
            f"{harness.median(row['runs'], 'seconds'):.1f}",
        )  # fmt: skip
    harness.console().print(table)
    memory, held = (stored["torch"][name] for name in ("tier", "bytes"))
    harness.console().print(
        f"storage: of {arguments.epochs} x {held / 1e6:.1f} MB; all nodes together have RAM tiers of "
        f"{memory / 1e6:.2f} MB"
    )
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


def _asked_for() -> int:
    """Bytes that this process asked the system for so far, from the page cache or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _two_chunks(source: nostall.Subset, order: SubBatches, arguments: argparse.Namespace) -> int:
    """The bytes of the two largest chunks that a node has in the first round."""
    ranks, chunk = arguments.ranks, order.resident * arguments.batch * arguments.ranks
    plan = Plan(samples=len(source), batch_size=arguments.batch, world_size=ranks, drop_last=True)
    sizes = source.sizes[plan.epoch_order(0)]
    nodes = np.arange(len(sizes)) % ranks // arguments.node
    found = [
        int(sizes[begin : begin + chunk][nodes[begin : begin + chunk] == node].sum())
        for begin in range(0, len(sizes), chunk)
        for node in range(ranks // arguments.node)
    ]
    return sum(sorted(found)[-2:])


def _stored(folder: Path, order: Order, arguments: argparse.Namespace) -> dict[str, Any]:
    """What leaves the storage while loaders of all ranks read the training pictures' files."""
    source = nostall.Subset(
        nostall.ImageFolder(folder, index=False), range(arguments.files * 3 // 4)
    )
    tier = _two_chunks(source, SubBatches(arguments.resident), arguments)
    job = uuid.uuid4().hex
    loaders = [
        nostall.DataLoader(
            source,
            arguments.batch,
            epochs=arguments.epochs,
            order=order,
            drop_last=True,
            tiers=[f"ram:{tier}B"],
            output="numpy",
            threads=1,
            reader="pread",
            peers="off",
            rank=rank,
            world_size=arguments.ranks,
            local_rank=rank % arguments.node,
            local_world_size=arguments.node,
            job=f"{job} {rank // arguments.node}",
        )
        for rank in range(arguments.ranks)
    ]
    before = _asked_for()
    for epoch in range(arguments.epochs):
        for loader in loaders:
            loader.set_epoch(epoch)
        for _ in zip(*loaders, strict=True):
            pass
    asked = _asked_for() - before
    counted = sum(e.origins["source"].bytes for x in loaders for e in x.stats().epochs)
    length = loaders[0].plan.epoch_length
    for loader in loaders:
        loader.close()
    # Of an epoch: the mean of its samples, for it leaves a few out.
    held = source.total_bytes * length / len(source)
    return {
        "bytes": held,
        "tier": tier * arguments.ranks // arguments.node,
        "asked": asked,
        "counted": counted,
        "share": asked / (held * arguments.epochs),
    }


class _Memory:
    """Arrays as a `DataLoader` gives them: what `DynamicBatches` needs of one."""

    gives_pairs = True
    _recipe = types.SimpleNamespace(records=None, lists=None)  # samples and labels, stacked

    def __init__(self, images: Any, labels: Any, plan: Plan) -> None:
        self.plan, self.position = plan, (0, 0)
        self._samples_taken = 0
        self.world = World(0, 1, 0, 1, "memory")
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self.plan)

    def _begin_of(self, epoch: int) -> tuple[int, int]:
        return epoch, 0

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
            loader.position, loader._samples_taken = (self.index, h + 1), len(ids)
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
