"""A rank that saves or loads sharded state: checkpoint_rank.py HOME save|load WORLD RANK."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from nostall.errors import CorruptionError, UsageError
from nostall.torch.checkpoint import StorageReader, StorageWriter, load

home, mode = Path(sys.argv[1]), sys.argv[2]
world, rank = int(sys.argv[3]), int(sys.argv[4])


def load_from_directories_that_differ() -> None:
    writer = StorageWriter(home / "newer")
    dcp.save({"n": 1}, checkpoint_id="7", storage_writer=writer)
    dcp.save({"n": 2}, checkpoint_id="8", storage_writer=writer)
    dist.barrier()
    cases = {
        ("c", "none"): r"rank 0: step 7; rank 1: none",
        ("none", "c"): r"rank 0: none; rank 1: step 7",
        ("c", "newer"): r"rank 0: step 7; rank 1: step 8",
    }
    for names, words in cases.items():
        try:
            load({"n": 0}, home / names[rank])
        except UsageError as error:
            assert re.search(words, str(error)), error
        else:
            raise AssertionError(f"not refused: {names}")
    # A reader of the user's own: torch wraps what it raises, the same on all ranks.
    reader = StorageReader(home / ("c", "newer")[rank], 7)
    try:
        dcp.load({"n": 0}, storage_reader=reader)
    except dcp.api.CheckpointException as error:
        assert re.search(r"rank 0: step 7 \(save .*rank 1: step 7", str(error)), error
    else:
        raise AssertionError("not refused: a save of another directory")
    # What one rank alone finds damaged is told on all.
    dist.barrier()
    if rank == 1:
        for part in (home / "newer").glob("step-*/rank-*"):
            part.unlink()
    try:
        load({"n": 0}, home / ("none", "newer")[rank])
    except CorruptionError as error:
        assert re.search("step-0*7/rank-00000.* does not exist; .*step-0*8/", str(error)), error
    else:
        raise AssertionError("not told: damage that another rank has found")


def save_to_directories_that_differ() -> None:
    """As on nodes of which one has not mounted the file system."""
    root = home / f"own{rank}"
    root.mkdir()
    writer = StorageWriter(root)
    try:
        dcp.save({"w": sharded}, checkpoint_id="7", storage_writer=writer)
    except dcp.api.CheckpointException as error:
        words = (
            rf"step 7 is not saved: {home}/own0/.*/rank-00001\S* does not exist\. All ranks must"
        )
        assert re.search(words, str(error)), error
    else:
        raise AssertionError("a save is complete without the other rank's part")
    writer.close()
    assert [path.name[:10] for path in root.glob("step-*/*")] == ["rank-00001"] * rank


def fail_to_save(writer: StorageWriter) -> None:
    """Rank 1 cannot write its part of step 6."""
    large = distribute_tensor(torch.zeros(100_000), mesh, [Shard(0)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        dcp.save({"w": large}, checkpoint_id="6", storage_writer=writer)
    except dcp.api.CheckpointException as error:
        assert "File too large" in str(error), error
    else:
        raise AssertionError("a part that cannot be written is called saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    parts = (home / "c").glob("step-*/*")
    assert [path.name[:10] for path in parts] == ["rank-00000"]  # until the next save


torch.set_num_threads(1)
whole = torch.arange(40.0).reshape(10, 4)
dist.init_process_group(
    "gloo", init_method=f"file://{home}/{mode}-{world}", rank=rank, world_size=world
)
mesh = init_device_mesh(torch.get_default_device().type, (world,))
if mode == "save":
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    writer = StorageWriter(home / "c")
    fail_to_save(writer)
    dcp.save({"w": sharded, "n": 5}, checkpoint_id="7", storage_writer=writer)
    load_from_directories_that_differ()
    save_to_directories_that_differ()
else:
    target = distribute_tensor(torch.zeros(10, 4), mesh, [Shard(1)])
    state = {"w": target, "n": 0}
    assert load(state, home / "c") == 7
    loaded = state["w"]
    assert isinstance(loaded, DTensor)
    assert torch.equal(loaded.full_tensor(), whole) and state["n"] == 5
dist.destroy_process_group()
