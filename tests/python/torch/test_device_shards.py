"""Replicas and shards on two ranks of the simulated device, and their checkpoints on other worlds."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))

import cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

RANK = int(os.environ.get("RANK", "0"))


def net(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)]
    return torch.nn.Sequential(*layers).to(device)


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made: torch.nn.Module = fully_shard(model, mesh=init_device_mesh("simdev", (2,)))
    return made


def trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> torch.nn.Module:
    """On batches that differ by rank."""
    device = next(model.parameters()).device.type
    for step in steps:
        torch.manual_seed(10 * step + RANK)
        model(torch.randn(5, 8).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(tensors: Any) -> list[torch.Tensor]:
    return [
        (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu()
        for value in tensors
    ]


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return whole(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))


def case_replicas_and_shards_equal_the_cpu() -> None:
    import simdev
    from torch.nn.parallel import DistributedDataParallel

    host = DistributedDataParallel(net("cpu"))
    expected = whole(trained(host, adam(host), range(3)).parameters())
    wraps: list[Callable[[torch.nn.Module], torch.nn.Module]] = [DistributedDataParallel, sharded]
    for wrap in wraps:
        model = wrap(net("simdev"))
        trained(model, adam(model), range(3))
        for mine, theirs in zip(whole(model.parameters()), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert simdev.reports() == []


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Of all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        box = [mine]
        dist.broadcast_object_list(box, 0)
        yield box[0]
        dist.barrier()


def case_shards_are_restored_as_shards_and_whole() -> None:
    """Saved by two ranks; restored by two, and by each as if it were alone; and the other way."""
    import simdev

    from nostall.torch.checkpoint import StorageReader, StorageWriter, load

    model = sharded(net("simdev"))
    optimizer = adam(model)
    trained(model, optimizer, range(3))
    expected, seen = whole(model.parameters()), moments(optimizer)
    with shared_folder() as folder:
        weights, state = get_state_dict(model, optimizer)
        assert type(next(iter(weights.values()))).__name__ == "DTensor"
        writer = StorageWriter(folder)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id="3", storage_writer=writer)
        assert len(list(Path(folder).glob("step-*/*.safetensors"))) == 2

        # On the same world, sharded.
        again = sharded(net("simdev"))
        other = adam(again)
        weights, state = get_state_dict(again, other)
        found = {"model": weights, "optimizer": state}
        assert load(found, folder) == 3
        set_state_dict(
            again, other, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        assert all(map(torch.equal, whole(again.parameters()), expected))
        assert all(map(torch.equal, moments(other), seen))

        # On a world of one, whole, straight to the device.
        alone = net("simdev")
        single = adam(alone)
        weights, state = get_state_dict(alone, single)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, storage_reader=StorageReader(folder, 3), no_dist=True)
        set_state_dict(
            alone, single, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        assert next(alone.parameters()).device.type == "simdev"
        assert all(map(torch.equal, whole(alone.parameters()), expected))
        assert all(map(torch.equal, moments(single), seen))

        # Whole, saved by one rank, and restored by two as shards.
        if RANK == 0:
            with torch.no_grad():
                for p in alone.parameters():
                    p.add_(1)
            weights, state = get_state_dict(alone, single)
            kept = StorageWriter(f"{folder}/whole")
            dcp.save(
                {"model": weights, "optimizer": state},
                checkpoint_id="4",
                storage_writer=kept,
                no_dist=True,
            )
            kept.close()
        dist.barrier()
        weights, state = get_state_dict(again, other)
        found = {"model": weights, "optimizer": state}
        assert load(found, f"{folder}/whole") == 4
        set_state_dict(
            again, other, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        assert all(a.equal(b + 1) for a, b in zip(whole(again.parameters()), expected, strict=True))
        writer.close()
    assert simdev.reports() == []


def case_without_the_wait_for_copies() -> None:
    import simdev

    from nostall.checkpoint import _device
    from nostall.torch.checkpoint import StorageWriter

    with (
        shared_folder() as folder,
        mock.patch.object(_device.DeviceCopies, "await_all", lambda self: None),
    ):
        writer = StorageWriter(folder)
        weights = sharded(net("simdev")).state_dict()
        dcp.save({"model": weights}, checkpoint_id="1", storage_writer=writer)
        writer.close()
    torch.accelerator.synchronize()
    assert any("early" in line for line in simdev.reports())


def test_on_two_ranks_of_the_simulated_device() -> None:
    cases.check(__file__, ranks=2)


if __name__ == "__main__":
    import simdev.group  # noqa: F401

    cases.join("cpu:gloo,simdev:simgloo")
    cases.main(globals())
