"""``nostall bench tiers``: the storage classes of one node, memory and disks, read cold.

Each hierarchy of tiers holds a whole data set of random bytes: it is filled in a first epoch, and the
second is measured. Before it the tier files and the source's files are dropped from the page cache,
so that disks are read. The hierarchies take turns: memory alone, each disk with two reads in flight
and without a limit, memory with the first disk, and memory with all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import nostall
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.disk import forget

_NUMBER = 8  # bytes of a sample's number, which it begins with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench tiers``."""
    parser.add_argument(
        "--disks", nargs="+", default=["nostall-bench"], help="a directory on each, fastest first"
    )
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--sample-bytes", type=int, default=64 * 1024)
    harness.add_repeats(parser, 3)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table, writes JSON."""
    if min(arguments.samples, arguments.sample_bytes - _NUMBER) < 1:
        raise UsageError("--samples must be at least 1, --sample-bytes above 8")
    with contextlib.ExitStack() as stack:
        disks = []
        for disk in arguments.disks:
            os.makedirs(disk, exist_ok=True)
            disks.append(stack.enter_context(tempfile.TemporaryDirectory(dir=disk)))
        data = _samples(Path(disks[0]) / "data", arguments.samples, arguments.sample_bytes)
        ways = _ways(arguments, disks)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for name in harness.turns(list(ways), arguments.repeats):
            runs[name].append(_measure(data, ways[name]))
    table = harness.table(
        f"{arguments.samples} samples of {arguments.sample_bytes} bytes, the second epoch",
        *("tiers", "MB/s", "s", "from memory", "from files", "from the source"),
    )
    for name, found in runs.items():
        taken = found[0]["samples"]
        table.add_row(
            name, harness.spread((r["rate"] / 1e6 for r in found), "{:.0f}"),
            harness.spread((r["seconds"] for r in found), "{:.3f}"),
            *(str(taken.get(o, 0)) for o in ("ram", "file", "source")),
        )  # fmt: skip
    harness.console().print(table)
    harness.write(arguments.json, runs=runs)
    return 0


def _ways(arguments: argparse.Namespace, disks: list[str]) -> dict[str, list[str]]:
    record = arguments.sample_bytes + 24  # docs/formats/tier.md
    whole = arguments.samples * record
    part = arguments.samples // (len(disks) + 1) * record
    ways = {"memory": [f"ram:{whole}"]}
    for number, disk in enumerate(disks, 1):
        ways[f"disk {number}, 2 reads"] = [f"{disk}:{whole}:readers=2"]
        ways[f"disk {number}"] = [f"{disk}:{whole}"]
    ways["memory + disk 1"] = [f"ram:{part}", f"{disks[0]}:{whole}"]
    if len(disks) > 1:
        parts = [f"{disk}:{part}" for disk in disks[:-1]]
        ways["memory + all disks"] = [f"ram:{part}", *parts, f"{disks[-1]}:{whole}"]
    return ways


def _samples(folder: Path, samples: int, size: int) -> nostall.Source:
    """Files of random bytes that begin with their number."""
    folder.mkdir()
    random = np.random.default_rng(0)
    paths = []
    for i in range(samples):
        paths.append(folder / f"{i:08d}.bin")
        paths[-1].write_bytes(i.to_bytes(_NUMBER, "little") + random.bytes(size - _NUMBER))
    return nostall.FileList(paths)


def _measure(data: nostall.Source, tiers: list[str]) -> dict[str, Any]:
    with nostall.DataLoader(
        data, 32, epochs=2, seed=0, transforms=None, tiers=tiers, staging="8MiB"
    ) as loader:
        for epoch in loader.epochs():
            if epoch.index == 1:
                begin = time.perf_counter()
            for _ in epoch:
                pass
            if epoch.index == 0:
                forget(data.describe(s) for s in range(len(data)))
                _forget_tiers()
        seconds = time.perf_counter() - begin
        last = loader.stats().to_dict()["epochs"][1]
    taken = {name: origin["samples"] for name, origin in last["origins"].items()}
    return {"seconds": seconds, "rate": float(data.sizes.sum()) / seconds, "samples": taken}


def _forget_tiers() -> None:
    """Drops this process's open files from the page cache: tier files have no names."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptor = int(entry.name)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
