"""A rank that saves to, or restores from, an object store: python object_rank.py ORDERS (JSON)."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import numpy as np

import nostall


def state_of(rank: int, step: int, size: int = 1000) -> dict[str, Any]:
    return {"w": np.full(size, 100 * step + rank, np.float64), "step": step}


def main(s: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    rank, size = s["rank"], s["size"]
    ckpt = nostall.Checkpointer(
        s["fast"],
        s["durable"],
        rank=rank,
        world_size=s["world"],
        job="objects",
        keep=3,
        timeout=60,
        priority="normal",
    )
    found = ckpt.restore()
    whole = found is None or bool((found.state["w"] == 100 * found.step + rank).all())
    print(json.dumps([found and found.step, found and found.tier, whole]), flush=True)
    for step in s["steps"]:
        ckpt.save(state_of(rank, step, size), step, level=s["level"])
        print(step, flush=True)
    if s["hold"]:
        time.sleep(600)
    ckpt.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
