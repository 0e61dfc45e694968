"""``nostall bench stall``: how long a training of known compute waits on slow storage, by epoch.

Ranks of one node load the dataset through `SlowFS` and "compute" for a fixed time per batch. The
physics allow max(compute, bytes / bandwidth) for the first epoch, and for later ones the same with
the bytes that the tiers cannot hold. The table holds what was measured against that. With --networks it
measures the stall of each batch instead, beside torch's loader (`training_stall`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall_bench import harness, training_stall
from nostall_bench.slowfs import SlowFS, add_keep_cache, memory_words

SIDE = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench stall``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the dataset goes")
    parser.add_argument("--files", type=int, default=1500, help="synthetic files (95 KB each)")
    parser.add_argument("--epochs", type=int, default=3, action=harness.AtLeastOne)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and batch")
    parser.add_argument("--bandwidth", type=float, default=40, help="of the storage, MB/s")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="per operation")
    add_keep_cache(parser)
    parser.add_argument("--compute", type=float, default=1.2, help="of the first epoch's read time")
    harness.add_repeats(parser, 5)
    parser.add_argument(
        "--networks", nargs="+", choices=list(training_stall.NETWORKS), default=[],
        help="stalls by batch of trainings whose steps are as long as those of these networks",
    )  # fmt: skip
    parser.add_argument(
        "--loaders", nargs="+", choices=training_stall.LOADERS, default=training_stall.LOADERS,
        metavar="LOADER", help="with --networks",
    )  # fmt: skip
    parser.add_argument("--images", type=float, default=27, help="a second of resnet50 on one rank")
    harness.add_files(parser, plot="the stalls of --networks")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table."""
    data = harness.dataset(arguments.dir, arguments.files)
    if arguments.networks:
        return training_stall.run(arguments, data)
    if arguments.plot:
        raise UsageError("--plot draws what --networks measures: name networks")
    total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
    runs: dict[tuple[int, float], list[dict[str, Any]]] = {
        (ranks, share): [] for ranks in arguments.ranks for share in (1.1, 0.5)
    }
    rate = arguments.bandwidth * 1e6
    with (
        tempfile.TemporaryDirectory(prefix="nostall-stall-") as mount,
        SlowFS(
            data,
            Path(mount),
            rate,
            rate,
            arguments.latency_ms / 1e3,
            keep_cache=arguments.keep_cache,
        ) as storage,
    ):
        for way in harness.turns(runs, arguments.repeats):
            runs[way].append(_job(arguments, storage, Path(mount), total, *way))
    table = harness.table(
        f"waiting on storage of {arguments.bandwidth:g} MB/s",
        *("ranks", "tiers hold", "epoch 1", "of the physics", "stall later", "bytes / bound"),
        left=0,
        caption=memory_words(arguments.keep_cache),
    )
    for (ranks, share), found in runs.items():

        def cell(key: str, form: str, found: list[dict[str, Any]] = found) -> str:
            return harness.spread((r[key] for r in found), form)

        table.add_row(
            str(ranks),
            "all" if share > 1 else "half",
            cell("first_seconds", "{:.2f} s"),
            cell("first_of_physics", "{:.3f}"),
            cell("later_stall", "{:.1%}") if arguments.epochs > 1 else "",
            cell("bytes_of_bound", "{:.4f}"),
        )
    harness.console().print(table)
    rows = [{"ranks": ranks, "share": s, "runs": found} for (ranks, s), found in runs.items()]
    harness.write(arguments.json, rows=rows)
    return 0


def _job(
    arguments: argparse.Namespace,
    storage: SlowFS,
    mount: Path,
    total: int,
    ranks: int,
    share: float,
) -> dict[str, Any]:
    """One training of `ranks` processes; what it took against what it had to."""
    storage.drop_caches()
    before = storage.served_bytes
    read_seconds = total / (arguments.bandwidth * 1e6)
    batches = -(-arguments.files // (arguments.batch_size * ranks))
    settings = {
        "root": str(mount),
        "ranks": ranks,
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "tier": int(total * share),
        "compute": arguments.compute * read_seconds / batches,
        "job": f"stall-{os.getpid()}-{time.monotonic_ns()}",
    }
    ranked = [{**settings, "rank": r} for r in range(ranks)]
    stats = harness.children("nostall_bench.stall", ranked, timeout=300)
    first = max(s["epochs"][0]["seconds"] for s in stats)
    compute = settings["compute"] * batches
    return {
        "first_seconds": first,
        "first_of_physics": first / max(compute, read_seconds),
        "later_stall": harness.stalled(e for s in stats for e in s["epochs"][1:]),
        "bytes_of_bound": (storage.served_bytes - before) / stats[0]["lower_bound_bytes"],
    }


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank: loads, and computes by waiting, as an accelerator does for its host."""
    import nostall
    from nostall import transforms as t

    with nostall.DataLoader(
        nostall.ImageFolder(settings["root"], index=False),
        settings["batch_size"],
        epochs=settings["epochs"],
        transforms=[t.RandomResizedCrop(SIDE), t.RandomHorizontalFlip(), t.ToTensor()],
        tiers=[f"ram:{settings['tier']}"],
        rank=settings["rank"],
        world_size=settings["ranks"],
        local_rank=settings["rank"],
        local_world_size=settings["ranks"],
        job=settings["job"],
        output="numpy",
    ) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                time.sleep(settings["compute"])
        return loader.stats().to_dict()


if __name__ == "__main__":
    harness.answer(_work)
