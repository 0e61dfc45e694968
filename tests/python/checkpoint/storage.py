"""Saves under failing storage (faults.c is preloaded): python storage.py SCENARIO HOME; prints JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nostall


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(50_000, step, np.float64), "step": step}


def report(ckpt: nostall.Checkpointer, **more: Any) -> None:
    saves = [
        {"step": s.step, "level": s.level, "seconds": s.seconds, "problems": s.problems}
        for s in ckpt.history
    ]
    found = ckpt.restore()
    restored = (
        None
        if found is None
        else [found.step, found.tier, bool((found.state["w"] == found.step).all())]
    )
    print(json.dumps({"saves": saves, "restored": restored, **more}), flush=True)


def full(home: Path, tier: str) -> None:
    """`tier` is full from the second save to the fourth."""
    flag = home / f"{tier}.full"
    with nostall.Checkpointer(home / "fast", home / "durable", level="fast") as ckpt:
        for step in range(1, 6):
            if step == 2:
                flag.touch()
            if step == 5:
                flag.unlink()
            saved = ckpt.save(state_of(step), step)
            assert saved is not None
            deadline = time.monotonic() + 60
            while saved.level != "durable" and not saved.problems and time.monotonic() < deadline:
                time.sleep(0.01)
        ckpt.wait(60)
        report(ckpt)


def full_everywhere(home: Path) -> None:
    """Both are full at the second save."""
    ckpt = nostall.Checkpointer(home / "fast", home / "durable", level="durable")
    ckpt.save(state_of(1), 1)
    Path(f"{home}.full").touch()
    errors = []
    for end in (lambda: ckpt.save(state_of(2), 2), ckpt.close):
        try:
            end()
        except nostall.errors.IoError as e:
            errors.append(str(e))
    report(ckpt, errors=errors)


def hang(home: Path) -> None:
    """The durable storage hangs, for longer than the training takes."""
    flag = home / "durable.hang"
    ckpt = nostall.Checkpointer(home / "fast", home / "durable", keep=2)
    ckpt.save(state_of(0), 0, level="durable")
    flag.touch()
    for step in range(1, 6):
        ckpt.save(state_of(step), step, level="fast")
    report(ckpt)
    ckpt.close(timeout=0.2)
    print(json.dumps("closed"), flush=True)


if __name__ == "__main__":
    scenario, where = sys.argv[1], Path(sys.argv[2])
    {
        "full-fast": lambda: full(where, "fast"),
        "full-durable": lambda: full(where, "durable"),
        "full-everywhere": lambda: full_everywhere(where),
        "hang": lambda: hang(where),
    }[scenario]()
