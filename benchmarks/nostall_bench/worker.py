"""One loader in one fresh process, for ``nostall bench loader``.

Started by `harness.child`. It measures for each epoch: seconds, samples, CPU seconds of the process
tree and the proportional memory (PSS) of the tree at the epoch's end.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nostall_bench import harness


def tree(root: int) -> list[int]:
    """The process ids of `root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in (p.name for p in Path("/proc").iterdir()):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def cpu_seconds(root: int) -> float:
    """User and system seconds of the tree, children that have ended included."""
    ticks = 0
    for pid in tree(root):
        try:
            fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(f) for f in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss_bytes(root: int) -> int:
    """Proportional set size of the tree, shared memory counted once, in bytes."""
    total = 0
    for pid in tree(root):
        try:
            rollup = Path("/proc", str(pid), "smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(x.split()[1]) for x in rollup.splitlines() if x.startswith("Pss:"))
    return total * 1024


def measure(
    settings: dict[str, Any], after_epoch: Callable[[], object] = lambda: None
) -> list[dict[str, float]]:
    """Runs `warm` epochs unmeasured, then `measured` ones.

    One more epoch is planned but not run, so that a loader that works ahead has as much done at the
    end of a measured epoch as it had at its beginning; in the cold mode every epoch counts. What a
    program imports takes no part of the time.
    """
    from nostall_bench import peers

    loader = peers.module(settings["loader"])
    for package in (*loader.REQUIRES, *getattr(loader, "IMPORTS", ())):
        if importlib.util.find_spec(package):
            importlib.import_module(package)
    warm, measured = settings["warm"], settings["measured"]
    job = peers.Job(
        data=Path(settings["data"]),
        prepared=Path(settings["prepared"]),
        mode=settings["mode"],
        epochs=warm + measured + settings["ahead"],
        threads=settings["threads"],
        tiers=tuple(settings["tiers"]),
        remote=settings.get("remote", ""),
        cache=settings.get("cache", ""),
        variant=peers.LOADERS[settings["loader"]].variant,
    )
    root = os.getpid()
    rows = []
    began, cpu = time.perf_counter(), cpu_seconds(root)
    epochs = iter(loader.epochs(job))
    for number in range(warm + measured):
        if number >= warm and number > 0:
            began, cpu = time.perf_counter(), cpu_seconds(root)
        samples = sum(next(epochs))
        seconds = time.perf_counter() - began
        after_epoch()
        if number >= warm:
            rows.append(
                {
                    "seconds": seconds,
                    "samples": samples,
                    "cpu_seconds": cpu_seconds(root) - cpu,
                    "pss_bytes": pss_bytes(root),
                }
            )
    return rows


if __name__ == "__main__":
    harness.answer(measure)
    # Peers may hang while they shut their workers down; the parent ends the process group.
    os._exit(0)
