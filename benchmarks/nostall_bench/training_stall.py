"""``nostall bench stall --networks``: stalls of trainings by network, loader and number of ranks.

Figures 5.11 to 5.14 of [Böhringer 2020]. Each rank is a node of its own: it has a mount of its own of
one emulated storage (`SlowFS`) and tiers of its own, and trains on an emulated accelerator, which
sleeps as one lets its host. A network is the images that it takes a second. A batch stalls from the
moment when it is wanted to the one when it is there; the first one from the making of the loader on.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nostall_bench import harness
from nostall_bench.nodes import launch
from nostall_bench.slowfs import SlowFS, memory_words

SIDE = 96
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Images a second, of ResNet-50's: by the multiplications of one image, 4.1 and 0.82 thousand millions.
NETWORKS = {"resnet50": 1.0, "squeezenet": 5.0}
OURS = "nostall"
# Worker processes of torch's loader; the two that the publication compares with.
WORKERS = {"torch, 0 workers": 0, "torch, 4 workers": 4}
LOADERS = (OURS, *WORKERS)


def run(arguments: argparse.Namespace, data: Path) -> int:
    """Measures every network, number of ranks and loader; prints the table, draws."""
    total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        with (
            tempfile.TemporaryDirectory(prefix="nostall-stall-") as mount,
            SlowFS(
                data,
                Path(mount),
                arguments.bandwidth * 1e6,
                arguments.bandwidth * 1e6,
                arguments.latency_ms / 1e3,
                clients=ranks,
                keep_cache=arguments.keep_cache,
            ) as storage,
        ):
            ways = list(itertools.product(arguments.networks, arguments.loaders))
            for network, loader in harness.turns(ways, arguments.repeats):
                found = _job(arguments, storage, total, network, loader)
                rows.append({"network": network, "ranks": ranks, "loader": loader, **found})
                harness.write(arguments.json, rows=rows, batch=arguments.batch_size)
    harness.console().print(_table(rows, arguments))
    if arguments.plot:
        _plot(rows, Path(arguments.plot))
    return 0


def _job(
    arguments: argparse.Namespace, storage: SlowFS, total: int, network: str, loader: str
) -> dict[str, Any]:
    """One training on cold storage."""
    storage.drop_caches()
    before = storage.served_bytes
    ranks = len(storage.mounts)
    settings = {
        "loader": loader,
        "world": ranks,
        "ranks": 1,
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "tier": int(1.1 * total),
        "image_seconds": 1 / (arguments.images * NETWORKS[network]),
    }
    roots = [str(m) for m in storage.mounts]
    stalls = launch("nostall_bench.training_stall", settings, roots, together=True)
    return {**summary(stalls), "storage_bytes": storage.served_bytes - before}


def summary(stalls: list[list[float]]) -> dict[str, Any]:
    """Of the stalls of each rank by iteration, seconds: the median and the 95th percentile of all,
    the sum of the rank in the middle, and the most of any rank by iteration."""
    every = np.concatenate([np.asarray(s) for s in stalls])
    return {
        "median": float(np.median(every)),
        "late": float(np.percentile(every, 95)),
        "sum": statistics.median(sum(s) for s in stalls),
        "worst": [max(s) for s in zip(*stalls, strict=True)],
    }


def _table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> Any:
    first = arguments.batch_size / arguments.images
    steps = ", ".join(f"{n} {1e3 * first / NETWORKS[n]:.0f} ms" for n in arguments.networks)
    table = harness.table(
        f"stall: batches of {arguments.batch_size}, {arguments.epochs} epochs; a step: {steps}",
        *("network", "ranks", "loader", "median, ms", "95th percentile, ms", "of a rank in all, s"),
        *("times ours: median", "in all", "MB read"),
        left=3,
        caption=f"nostall's tiers hold all data; {memory_words(arguments.keep_cache)}",
    )
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["network"], row["ranks"], row["loader"]), []).append(row)
    for (network, ranks, loader), found in sorted(runs.items()):
        ours = runs.get((network, ranks, OURS))
        ratios = ("", "")
        if ours and loader != OURS:
            of = [harness.median(found, k) / harness.median(ours, k) for k in ("median", "sum")]
            ratios = (f"{of[0]:.0f}", f"{of[1]:.1f}")
        table.add_row(
            network,
            str(ranks),
            loader,
            harness.spread((1e3 * r["median"] for r in found), "{:.2f}"),
            harness.spread((1e3 * r["late"] for r in found), "{:.1f}"),
            harness.spread((r["sum"] for r in found), "{:.2f}"),
            *ratios,
            harness.megabytes(harness.median(found, "storage_bytes")),
        )
    return table


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A row of axes for each network: stalls by ranks, and the worst rank by iteration."""
    networks = list(dict.fromkeys(r["network"] for r in rows))
    loaders = list(dict.fromkeys(r["loader"] for r in rows))
    most = max(r["ranks"] for r in rows)
    with harness.figure(path, len(networks), 2, (11, 3.4 * len(networks))) as (_, axes):
        for (left, right), network in zip(axes, networks, strict=True):
            for loader in loaders:
                mine = [r for r in rows if (r["network"], r["loader"]) == (network, loader)]
                counts = sorted({r["ranks"] for r in mine})
                runs = [[1e3 * r["median"] for r in mine if r["ranks"] == n] for n in counts]
                late = [[1e3 * r["late"] for r in mine if r["ranks"] == n] for n in counts]
                middle, ends = harness.error_bars(runs)
                line = left.errorbar(counts, middle, yerr=ends, marker="o", label=loader)
                left.plot(
                    counts,
                    [statistics.median(v) for v in late],
                    ":",
                    marker="^",
                    color=line[0].get_color(),
                )
                worst = next(r["worst"] for r in mine if r["ranks"] == most)
                right.plot([1e3 * s for s in worst], color=line[0].get_color(), linewidth=1)
            left.set(yscale="log", xscale="log", xlabel="ranks", ylabel="stall of a batch, ms")
            left.set_xticks(counts, [str(n) for n in counts], minor=False)
            left.minorticks_off()
            left.set_title(f"{network}: median, and 95th percentile (dotted)")
            right.set(yscale="log", xlabel="iteration", ylabel="stall of the worst rank, ms")
            right.set_title(f"{network}, {most} ranks")
        axes[0, 0].legend(frameon=False, fontsize=8)


# A rank


def _work(settings: dict[str, Any]) -> list[float]:
    """Trains; the seconds that each iteration waited for its batch."""
    ours = settings["loader"] == OURS
    dataset = _files(settings["root"]) if ours else _folder(settings["root"])
    epochs = (_ours if ours else _torch)(dataset, settings)
    harness.ready()
    stalls = []
    waiting = time.perf_counter()
    for epoch in epochs:
        for _, labels in epoch:
            stalls.append(time.perf_counter() - waiting)
            time.sleep(len(labels) * settings["image_seconds"])
            waiting = time.perf_counter()
    return stalls


def _files(root: str) -> Any:
    import nostall

    return nostall.ImageFolder(root, index=False)


def _ours(dataset: Any, settings: dict[str, Any]) -> Iterator[Iterable[Any]]:
    import nostall
    from nostall import transforms as t

    with nostall.DataLoader(
        dataset,
        settings["batch_size"],
        epochs=settings["epochs"],
        transforms=[
            t.RandomResizedCrop(SIDE),
            t.RandomHorizontalFlip(),
            t.ToTensor(),
            t.Normalize(MEAN, STD),
        ],
        tiers=[f"ram:{settings['tier']}"],
        rank=settings["rank"],
        world_size=settings["world"],
        local_rank=0,
        local_world_size=1,
        job=f"{settings['job']} node {settings['rank']}",
        output="numpy",
    ) as loader:
        yield from loader.epochs()


def _folder(root: str) -> Any:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    return ImageFolder(
        root,
        transforms.Compose(
            [
                transforms.RandomResizedCrop(SIDE),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        ),
    )


def _torch(dataset: Any, settings: dict[str, Any]) -> Iterator[Iterable[Any]]:
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    # The publication has as many workers, on other processors.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    workers = WORKERS[settings["loader"]]
    sampler: Any = DistributedSampler(dataset, settings["world"], settings["rank"], shuffle=True)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=settings["batch_size"],
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for epoch in range(settings["epochs"]):
        sampler.set_epoch(epoch)
        yield loader


if __name__ == "__main__":
    harness.answer(_work)
