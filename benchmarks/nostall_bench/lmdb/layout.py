"""``nostall bench lmdb --layout``: the first epoch over a database whose samples lie in the order of
their source, and in that of the plan (`nostall convert --order plan`), on slow storage."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.slowfs import SlowFS

if TYPE_CHECKING:
    from rich.table import Table

ORDERS: tuple[Literal["source", "plan"], ...] = ("source", "plan")
_SAMPLES = 1500
_BYTES = (4_000, 16_000, 60_000)
_BATCH = 32
_SEED = 5


def measure(arguments: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    """A row for each size of a sample, with and without a tier, and each order."""
    import nostall
    from nostall import convert

    rows = []
    for size in _BYTES:
        with tempfile.TemporaryDirectory(dir=home, prefix="layout-") as folder:
            files, bases = Path(folder, "files"), Path(folder, "bases")
            files.mkdir()
            bases.mkdir()
            for i in range(arguments.records or _SAMPLES):
                (files / f"{i:06d}").write_bytes(os.urandom(size))
            for order in ORDERS:
                source = nostall.FileList(root=files)
                convert.to_lmdb(source, bases / order, order=order, seed=_SEED)
            rows += _of_size(arguments, bases, size)
    return rows


def _of_size(arguments: argparse.Namespace, bases: Path, size: int) -> list[dict[str, Any]]:
    tiers = {"none": [], "memory": ["ram:1GiB"]}
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {
        way: [] for way in itertools.product(tiers, ORDERS)
    }
    rate = arguments.bandwidth * 1e6
    with (
        tempfile.TemporaryDirectory(prefix="nostall-layout-") as mount,
        SlowFS(bases, mount, rate, rate, arguments.latency_ms / 1e3) as slow,
    ):
        for tier, order in harness.turns(runs, arguments.repeats):
            slow.drop_caches()
            served, operations = slow.served_bytes, slow.operations["read"]
            settings = {
                "root": str(Path(mount, order)),
                "index": str(bases.parent / f"{order}.records"),
                "tiers": tiers[tier],
            }
            found = harness.child("nostall_bench.lmdb.layout", settings, timeout=600)
            found["read_bytes"] = slow.served_bytes - served
            found["operations"] = slow.operations["read"] - operations
            runs[tier, order].append(found)
    if len({run["digest"] for found in runs.values() for run in found}) != 1:
        raise UsageError("the two orders gave different batches: please report this")
    return [
        {"layout": order, "tier": tier, "bytes": size, "runs": found}
        for (tier, order), found in runs.items()
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows as a rich table."""
    out = harness.table(
        "the first epoch, by the order in the database",
        *("sample, KB", "tier", "order", "seconds", "MB read", "reads"),
        left=0,
    )
    for row in rows:
        out.add_row(
            f"{row['bytes'] / 1e3:.0f}",
            row["tier"],
            row["layout"],
            harness.spread((r["seconds"] for r in row["runs"]), "{:.3f}"),
            harness.megabytes(harness.median(row["runs"], "read_bytes"), 1),
            f"{harness.median(row['runs'], 'operations'):.0f}",
        )
    return out


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """One epoch; its seconds, and what all batches were."""
    import nostall

    source = nostall.LMDB(settings["root"], index=settings["index"])
    digest = hashlib.sha256()
    with nostall.DataLoader(
        source, _BATCH, epochs=1, seed=_SEED, tiers=settings["tiers"], rank=0, world_size=1,
        output="numpy",
    ) as loader:  # fmt: skip
        began = time.perf_counter()
        for samples, _ in loader:
            digest.update(samples.data.tobytes())
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "digest": digest.hexdigest()}


if __name__ == "__main__":
    harness.answer(_work)
