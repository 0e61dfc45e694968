"""Checkpoints in the background of a training, each of them complete or absent.

ckpt = nostall.Checkpointer(fast="/nvme/ckpt", durable="/pfs/ckpt", keep=5, every=100)
state = {"model": model, "optimizer": optimizer, "loader": loader}
found = ckpt.restore(into=state)
...
ckpt.save(state, step)
"""

from nostall.checkpoint._checkpointer import Checkpointer
from nostall.checkpoint._options import CheckpointOptions
from nostall.checkpoint._restore import Restored
from nostall.checkpoint._retention import Keep
from nostall.checkpoint._rng import rng_state, set_rng_state
from nostall.checkpoint._saved import Saved

__all__ = [
    "CheckpointOptions",
    "Checkpointer",
    "Keep",
    "Restored",
    "Saved",
    "rng_state",
    "set_rng_state",
]
