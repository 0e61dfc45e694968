"""A rank of the guide's training, which logs each step until a signal ends it.

slurm_rank.py LOGS EXAMPLE ARGUMENTS...

LOGS/RANK.log has a line for each step: starts of the job, step, labels. LOGS/RANK.STARTS.json is what
the loader says at the end. PAUSE_SECONDS is the pause in each step.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch.distributed

import nostall.torch
from nostall.errors import SignalExit

PAUSE = float(os.environ.get("PAUSE_SECONDS", "0.02"))
logs, start = Path(sys.argv[1]), os.environ.get("SLURM_RESTART_COUNT", "0")
cross_entropy, save = torch.nn.functional.cross_entropy, nostall.Checkpointer.save
batch: list[int] = []


def heard(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    batch[:] = labels.tolist()
    return cross_entropy(scores, labels)


def logged(self: nostall.Checkpointer, state: dict, step: int) -> object:
    rank = torch.distributed.get_rank()
    with open(logs / f"{rank}.log", "a") as log:
        print(start, step, *batch, file=log)
    time.sleep(PAUSE)  # so that a training of any length has few steps
    try:
        return save(self, state, step)
    except SignalExit:
        said = state["loader"].stats()
        told = {"peers": said.peers, "source_bytes": said.source_bytes}
        (logs / f"{rank}.{start}.json").write_text(json.dumps(told))
        raise


torch.nn.functional.cross_entropy, nostall.Checkpointer.save = heard, logged
# A forked process has it imported; the example's own import shall do what it does in a new one.
del sys.modules["nostall.torch"]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
