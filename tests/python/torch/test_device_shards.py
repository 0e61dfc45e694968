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
import pytest
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


@contextlib.contextmanager
def one_by_one() -> Iterator[list[tuple[int, int]]]:
    """Blocks are read one by one; what is sent on: its place in the file, and how many bytes of it."""
    from nostall.checkpoint import _landing

    sent: list[tuple[int, int]] = []
    send = _landing._Slabs.send

    def one(self: Any, begin: int, ways: Any) -> None:
        end = begin + len(self._slabs[0][0])
        here = [way for way in ways if way.bytes is not None]
        sent.append((begin, sum(min(end, way.end) - max(begin, way.begin) for way in here)))
        send(self, begin, ways)

    with (
        mock.patch.object(_landing, "_SLAB_BLOCKS", 1),
        mock.patch.object(_landing._Slabs, "send", one),
    ):
        yield sent


def long_state(value: float) -> dict[str, Any]:
    """Of several blocks: a matrix, a transposed one, one of another type, half of one, and a number."""
    rows = torch.arange(3 << 20, dtype=torch.float32).reshape(3 << 10, 1 << 10) * value
    made = {"a": rows, "t": rows.t(), "b": rows.to(torch.bfloat16), "s": torch.tensor(value)}
    return {**{name: tensor.to("simdev") for name, tensor in made.items()}, "n": value}


def case_tied_tensors_of_device_and_host_are_both_filled() -> None:
    """They are stored once."""
    from nostall.torch.checkpoint import StorageReader, StorageWriter

    tied = long_state(3.0)["a"]
    with tempfile.TemporaryDirectory() as folder:
        writer = StorageWriter(folder)
        state = {"there": tied, "here": tied}
        dcp.save(state, checkpoint_id="1", storage_writer=writer, no_dist=True)
        writer.close()
        into = {"there": torch.zeros_like(tied), "here": torch.zeros_like(tied, device="cpu")}
        dcp.load(into, storage_reader=StorageReader(folder, 1), no_dist=True)
    assert into["there"].equal(tied) and into["here"].equal(tied.cpu())


def case_tensors_land_while_the_file_is_read() -> None:
    """Every byte once, by page-locked memory; each rank alone."""
    import simdev

    from nostall.checkpoint import _landing
    from nostall.torch.checkpoint import StorageReader, StorageWriter, load

    with tempfile.TemporaryDirectory() as folder:
        writer = StorageWriter(folder)
        for value in (1.0, 2.0):
            state = long_state(value)
            dcp.save(state, checkpoint_id=str(int(value)), storage_writer=writer, no_dist=True)
        writer.close()
        into = long_state(0.0)
        into["t"] = torch.zeros_like(into["a"]).t()  # its memory is not in the file's order
        with one_by_one() as sent:
            assert load(into, folder, no_dist=True) == 2
        tensors = [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor)]
        assert sum(size for _, size in sent) == sum(tensor.nbytes for tensor in tensors)
        assert len({begin for begin, _ in sent}) == len(sent) > 3
        assert into["n"] == 2.0
        assert all(torch.equal(into[name], state[name]) for name in "atbs")

        # Of what nothing takes, nothing stays on the host either.
        into, holes = {"b": torch.zeros_like(state["b"])}, _landing._holes
        with one_by_one() as sent, mock.patch.object(_landing, "_holes", wraps=holes) as found:
            dcp.load(into, storage_reader=StorageReader(folder, 2), no_dist=True)
        kept = [hole for call in found.mock_calls for hole in holes(*call.args)]
        assert into["b"].equal(state["b"]) and sum(size for _, size in sent) == state["b"].nbytes
        assert sum(end - begin for begin, end in kept) < 1 << 16

        # A tensor of another type, and one of the host beside those of the device.
        into = long_state(0.0)
        into["a"], into["b"] = into["a"].double(), into["b"].cpu()
        dcp.load(into, storage_reader=StorageReader(folder, 1), no_dist=True)
        expected = long_state(1.0)
        assert into["a"].dtype == torch.float64 and into["a"].equal(expected["a"].double())
        assert into["b"].device.type == "cpu" and into["b"].equal(expected["b"].cpu())

        # Damage is found before it lands, and the save before it lands over what did.
        (file,) = Path(folder).glob("step-000000000002/*.safetensors")
        with file.open("r+b") as stored:
            stored.seek(-(3 << 20), os.SEEK_END)
            stored.write(b"damage")
        into = long_state(0.0)
        with one_by_one(), cases.warnings() as said:
            assert load(into, folder, no_dist=True) == 1
        assert "passing over the checkpoint of step 2" in said[0]
        assert all(torch.equal(into[name], expected[name]) for name in "atbs")

        # What the device refuses is read to the host and copied from there.
        into = long_state(0.0)
        simdev.fail_after(1)
        with cases.warnings() as said:
            dcp.load(into, storage_reader=StorageReader(folder, 1), no_dist=True)
        assert "by way of ordinary memory" in said[0]
        assert all(torch.equal(into[name], expected[name]) for name in "atbs")
    simdev.reports()


def loaded_by(function: str, nothing: Any) -> list[str]:
    """What is reported of a load without one of its waits."""
    import simdev

    from nostall.checkpoint import _landing
    from nostall.torch.checkpoint import StorageReader, StorageWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = StorageWriter(folder)
        state = long_state(1.0)
        dcp.save(state, checkpoint_id="1", storage_writer=writer, no_dist=True)
        writer.close()
        into = {name: torch.zeros_like(state[name]) for name in "atbs"}
        reader = StorageReader(folder, 1)
        side = reader._streams[into["a"].device] = torch.Stream(device="simdev")
        simdev.speed(0.01, stream=side)
        with one_by_one(), mock.patch.object(_landing, function, nothing):
            dcp.load(into, storage_reader=reader, no_dist=True)
            for tensor in into.values():
                tensor.sum().item()
    torch.accelerator.synchronize()
    return simdev.reports()


def case_without_the_wait_of_a_load_for_what_makes_the_tensors() -> None:
    assert any("no event" in line for line in loaded_by("follow", lambda side, current: None))


def case_without_the_wait_before_a_slab_is_read_to_again() -> None:
    import simdev

    # What a copy still reads, a reader of the file cannot write to.
    with pytest.raises(dcp.api.CheckpointException, match="Bad address"):
        loaded_by("await_copies", lambda copied: None)
    torch.accelerator.synchronize()
    simdev.reports()


def case_without_the_wait_for_what_was_loaded() -> None:
    assert any("no event" in line for line in loaded_by("await_end", lambda side: None))


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


# ---------------------------------------------------------------------------- groups


def case_several_tensors_are_reduced_by_one_call_of_the_devices_backend() -> None:
    from simdev.group import SimGloo

    group: Any = dist.new_group(backend="nostall")
    store = dist.PrefixStore("device", dist.distributed_c10d._get_default_store())
    group._keep("simdev", SimGloo(store, RANK, 2, dist.default_pg_timeout))
    tensors = [torch.full((count,), RANK + 1.0, device="simdev") for count in (3, 5)]
    dist.all_reduce_coalesced(tensors, group=group)
    assert all(tensor.cpu().eq(3).all() for tensor in tensors)
    dist.destroy_process_group(group)


def test_on_two_ranks_of_the_simulated_device() -> None:
    cases.check(__file__, ranks=2)


if __name__ == "__main__":
    import simdev.group  # noqa: F401

    cases.join("cpu:gloo,simdev:simgloo")
    cases.main(globals())
