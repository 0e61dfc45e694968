"""A rank of the tests' training: one line of its log for each batch, until a signal ends it.

slurm_rank.py DIRECTORY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import nostall
from nostall.job._world import find_world

BATCHES = 100_000


def batches(world_size: int, rank: int) -> nostall.DataLoader:
    """What each rank loads; the test loads it as well, to compare."""
    source = nostall.Arrays({"x": np.arange(1000)})
    return nostall.DataLoader(
        source,
        5,
        epochs=BATCHES,
        seed=7,
        tiers=[],
        output="numpy",
        peers="off",
        rank=rank,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        job=f"rank {rank} alone {os.getpid()}",
    )


def main() -> None:
    folder, world = Path(sys.argv[1]), find_world()
    loader = batches(world.world_size, world.rank)
    signals = "SIGUSR1 SIGTERM"
    checkpoints = nostall.Checkpointer(durable=folder / "ckpt", on_signal=signals, every=10**6)
    state = {"loader": loader, "step": 0}
    checkpoints.restore(into=state)
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    with open(folder / f"rank{world.rank}.log", "a") as log, checkpoints:
        for epoch in loader.epochs():
            for batch in epoch:
                state["step"] += 1
                print(start, state["step"], *np.asarray(batch["x"]), file=log, flush=True)
                time.sleep(0.01 * (1 + world.rank))  # ranks are at different steps
                checkpoints.save(state, state["step"])


if __name__ == "__main__":
    main()
