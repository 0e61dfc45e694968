"""A rank that saves to, or restores from, an object store: python object_rank.py ORDERS (JSON).

It prints JSON lines: what it has restored, each step that was acknowledged, and what failed.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import numpy as np

import nostall
from nostall.errors import Error


def state_of(rank: int, step: int, size: int = 1000) -> dict[str, Any]:
    return {"w": np.full(size, 100 * step + rank, np.float64), "step": step}


def is_whole(found: Any, rank: int = 0) -> bool:
    return bool((found.state["w"] == 100 * found.step + rank).all())


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main(s: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    rank, size = s["rank"], s["size"]
    try:
        ckpt = nostall.Checkpointer(
            s["fast"],
            s["durable"],
            rank=rank,
            world_size=s["world"],
            job="objects",
            keep=s["keep"],
            timeout=60,
            priority="normal",
            max_failures=1000,
        )
    except Error as error:
        say(failed=str(error))
        return
    found = ckpt.restore(s["back_to"])
    say(restored=found and [found.step, found.tier, is_whole(found, rank)])
    for step in s["steps"]:
        try:
            ckpt.save(state_of(rank, step, size), step, level=s["level"])
            say(step=step)
        except Error as error:
            say(failed=str(error))
    if s["hold"]:
        time.sleep(600)
    ckpt.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
