"""Checkpoints in the background of a training, each of them complete or absent.

ckpt = nostall.Checkpointer(fast="/nvme/ckpt", durable="/pfs/ckpt", keep=5, every=100)
state = {"model": model, "optimizer": optimizer, "loader": loader}
found = ckpt.restore(into=state)
...
ckpt.save(state, step)
"""

# _checkpointer   `save` and `restore`, as the training calls them
# _background     the two threads: one writes snapshots, one drains
# _store          one directory of checkpoints, and the commit of a manifest
# _objects, _transfer      the same below a URL; the bytes of its parts
# _open, _place            which of both a place is, and what both give
# _nodes          the same where each node has a fast directory of its own
# _tree, _format  a state as a tree of named arrays; the content of the files
# _window, _device         saves that return before the copy; tensors on an accelerator
# _search, _restore, _landing   what is restored; to memory; straight to a device
# _lineage, _retention, _cleaner   branches; which checkpoints stay; the removal of the others
# _begin, _signals         what ranks agree on at the start; and when a signal ends the job

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
