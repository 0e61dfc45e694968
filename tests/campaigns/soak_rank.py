"""One rank of the soak: batches, collectives and checkpoints, and counts of what could grow."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nostall
from nostall.collective import Communicator
from nostall.observe import _recorder as record


def private_bytes() -> int:
    """Counted page by page: RssAnon of some kernels is wrong by tens of pages for each core."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Anonymous in /proc/self/smaps_rollup")


def threads() -> int:
    """Without those that end: the system lists one that was joined until it has taken it down."""
    exiting, found = 4, 0  # PF_EXITING
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/self/task/{task}/stat").read_text()
            found += not int(stat.rpartition(")")[2].split()[6]) & exiting
    return found


def count(begin: float, done: dict[str, int]) -> dict[str, Any]:
    gc.collect()
    return {
        "seconds": time.monotonic() - begin,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads(),
        "objects": len(gc.get_objects()),
        "bytes": private_bytes(),
        **done,
    }


def settle_interned() -> None:
    """Grows CPython's table of interned strings to the size at which it stays.

    The parts of each path are interned, and deleted entries take room until the table is made anew,
    with three times the strings that live: half a megabyte, once, at any time.
    """
    for number in range(1 << 16):
        sys.intern(f"name {number}")


def main() -> None:
    base, rank = Path(sys.argv[1]), int(sys.argv[2])
    given = json.loads((base / "settings").read_text())
    source = nostall.ImageFolder(base / "data", extensions=(".bin",), index=False)
    job, ranks = f"soak {base.name}", given["ranks"]
    done = {"batches": 0, "collectives": 0, "checkpoints": 0}
    counts: list[dict[str, Any]] = []
    distance = given["batches"] // given["counts"]
    # What is kept whole is bounded: a short run passes the bound too.
    record._BATCHES, record._EPOCHS = given["kept_batches"], given["kept_epochs"]
    state = {"weights": np.zeros(4096, np.float32)}
    settle_interned()
    begin = time.monotonic()
    # A small staging: it is filled to its bound at any time, once, and would look like growth.
    with (
        nostall.DataLoader(
            source, 1, epochs=given["epochs"], tiers=["ram:1MiB"], output="numpy", threads=1,
            staging="64KiB",
            rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, job=job,
        ) as loader,
        Communicator(job, rank, ranks, arena_bytes=1 << 20) as node,
        nostall.Checkpointer(
            base / f"fast{rank}", base / f"durable{rank}", keep=2, rank=0, world_size=1
        ) as checkpointer,
    ):  # fmt: skip
        for epoch in loader.epochs():
            for _batch, _ in epoch:
                done["batches"] += 1
                if done["batches"] % given["per_collective"] == 0:
                    node.allreduce(state["weights"])
                    done["collectives"] += 1
                if done["batches"] % given["per_checkpoint"] == 0:
                    checkpointer.save(state, done["batches"])
                    done["checkpoints"] += 1
                if done["batches"] % distance == 0:
                    # Drained, so that a count does not depend on how far the drain has come.
                    checkpointer.wait()
                    loader.stats()
                    counts.append(count(begin, done))
                    due = begin + given["seconds"] * done["batches"] / given["batches"]
                    time.sleep(max(0.0, due - time.monotonic()))
                if done["batches"] == given["batches"]:
                    break
            if done["batches"] == given["batches"]:
                break
    (base / f"{rank}.json").write_text(json.dumps(counts))


main()
