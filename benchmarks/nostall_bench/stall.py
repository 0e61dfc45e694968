"""``nostall bench stall``: how long a training of known compute waits on slow storage, by epoch.

Ranks of one node load the dataset through `SlowFS` and "compute" for a fixed time per batch. The
physics allow max(compute, bytes / bandwidth) for the first epoch, and for later ones the same with
the bytes that the tiers cannot hold. The table holds what was measured against that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall_bench.programs import child_environment
from nostall_bench.slowfs import SlowFS

SIDE = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench stall``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the dataset goes")
    parser.add_argument("--files", type=int, default=1500, help="synthetic files (95 KB each)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and batch")
    parser.add_argument("--bandwidth", type=float, default=40, help="of the storage, MB/s")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="per operation")
    parser.add_argument("--compute", type=float, default=1.2, help="of the first epoch's read time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the numbers to this file")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table."""
    from rich.console import Console
    from rich.table import Table

    from nostall_bench.demo.dataset import DatasetSpec, make_dataset

    console = Console()
    home = Path(arguments.dir).absolute()
    home.mkdir(parents=True, exist_ok=True)
    spec = DatasetSpec(arguments.files)
    data = make_dataset(home / f"data-{spec.files}", spec)
    total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
    table = Table(title=f"waiting on storage of {arguments.bandwidth:g} MB/s")
    for name in (
        "ranks",
        "tiers hold",
        "epoch 1",
        "of the physics",
        "stall later",
        "bytes / bound",
    ):
        table.add_column(name, justify="right")
    rows: list[dict[str, Any]] = []
    rate = arguments.bandwidth * 1e6
    with (
        tempfile.TemporaryDirectory(prefix="nostall-stall-") as mount,
        SlowFS(data, Path(mount), rate, rate, arguments.latency_ms / 1e3) as storage,
    ):
        storage.drop_caches()
        for ranks in arguments.ranks:
            for share in (1.1, 0.5):
                runs = [
                    _job(arguments, storage, Path(mount), total, ranks, share)
                    for _ in range(arguments.repeats)
                ]
                row = {"ranks": ranks, "share": share, "runs": runs}
                rows.append(row)
                table.add_row(
                    str(ranks),
                    "all" if share > 1 else "half",
                    _spread(runs, "first_seconds", "{:.2f} s"),
                    _spread(runs, "first_of_physics", "{:.3f}"),
                    _spread(runs, "later_stall", "{:.1%}") if share > 1 else "",
                    _spread(runs, "bytes_of_bound", "{:.4f}"),
                )
    console.print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    return 0


def _spread(runs: list[dict[str, float]], key: str, form: str) -> str:
    values = [r[key] for r in runs]
    least, most = form.format(min(values)), form.format(max(values))
    return f"{form.format(statistics.median(values))} ({least}-{most})"


def _job(
    arguments: argparse.Namespace,
    storage: SlowFS,
    mount: Path,
    total: int,
    ranks: int,
    share: float,
) -> dict[str, float]:
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
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "nostall_bench.stall", json.dumps({**settings, "rank": r})],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for r in range(ranks)
    ]
    outputs = [w.communicate(timeout=300)[0] for w in workers]
    if any(w.returncode for w in workers):
        raise UsageError("a rank of the benchmark failed: see its message above")
    stats = [json.loads(o.splitlines()[-1]) for o in outputs]
    first = max(s["epochs"][0]["seconds"] for s in stats)
    later = [e for s in stats for e in s["epochs"][1:]]
    compute = settings["compute"] * batches
    return {
        "first_seconds": first,
        "first_of_physics": first / max(compute, read_seconds),
        "later_stall": sum(e["stall_seconds"] for e in later) / sum(e["seconds"] for e in later),
        "bytes_of_bound": (storage.served_bytes - before) / stats[0]["lower_bound_bytes"],
    }


def _work(settings: dict[str, Any]) -> None:
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
        print(json.dumps(loader.stats().to_dict()), flush=True)


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
