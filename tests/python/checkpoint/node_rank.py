"""One rank of a job whose nodes have a fast directory each: python node_rank.py SETTINGS (JSON)."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nostall

SIZE = 700_000  # 5.6 MB: two blocks


def state_of(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    return {"w": random.random(SIZE), "rank": rank, "step": step}


def digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(state["w"].tobytes()).hexdigest()


def main(s: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    home, rank = Path(s["home"]), s["rank"]
    ckpt = nostall.Checkpointer(
        home / f"node{s['node']}",
        home / "durable" if s["durable"] else None,
        rank=rank,
        world_size=s["world"],
        job="nodes",
        partner=s["partner"],
        keep=3,
        timeout=60,
        priority="normal",
    )
    if s["phase"] == "save":
        if s["durable"]:
            ckpt.save(state_of(rank, 1), 1, level="durable")
            # What follows stays on the fast tier, however long the test takes.
            ckpt._background._patience = lambda size: 600.0
            ckpt._background.gate.hold()
        for step in (2, 3):
            saved = ckpt.save(state_of(rank, step), step, level="fast")
            assert saved is not None and not saved.problems, saved
        print("safe", flush=True)
        time.sleep(600)
    found = ckpt.restore()
    assert found is not None
    print(json.dumps([found.step, found.tier, digest(found.state), found.state["rank"]]))
    if s["durable"]:
        ckpt.wait(60)
    ckpt.save(state_of(rank, 4), 4, level="fast")
    ckpt.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
