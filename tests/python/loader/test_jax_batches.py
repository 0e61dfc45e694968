"""DataLoader(output="jax") on JAX's CPU devices: arrays on devices and over shardings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = 4  # of both processes


def batches(steps: Any, folder: Path, **more: Any) -> list[Any]:
    import nostall

    source = nostall.ImageFolder(folder, index=False)
    options = {"epochs": 2, "seed": 1, "tiers": [], "drop_last": True, **more}
    with nostall.DataLoader(source, 4, transforms=steps, **options) as loader:
        return [batch for epoch in loader.epochs() for batch in epoch]


def check_items(job: dict[str, Any]) -> None:
    """Batches of the items of a data set in Python are arrays of JAX as well."""
    import multiprocessing

    import jax
    import numpy as np
    import torch

    import nostall

    multiprocessing.set_forkserver_preload(["torch"])  # read once for the makers of both
    items = [
        {
            "x": np.full(3, i, np.float32),
            "y": torch.tensor(i),
            "half": torch.full((2,), i + 0.5, dtype=torch.bfloat16),
            "octet": torch.tensor(i, dtype=torch.float8_e5m2),
            "name": str(i),
        }
        for i in range(8)
    ]
    for then in (None, lambda item: {**item, "x": item["x"] + 1}):
        made = nostall.Cached(items, then=then, start_method="forkserver", makers=1)
        with nostall.DataLoader(
            made, 2, epochs=1, shuffle=False, output="jax", tiers=[], **job
        ) as loader:
            for batch in loader:
                assert list(batch) == ["x", "y", "half", "octet", "name"]
                assert all(isinstance(batch[name], jax.Array) for name in list(batch)[:-1])
                assert batch["half"].dtype == "bfloat16" and batch["half"].shape == (2, 2)
                assert np.array_equal(batch["half"][:, 0], batch["y"] + 0.5)
                assert batch["octet"].dtype == "float8_e5m2" and batch["octet"].shape == (2,)
                assert batch["name"] == [str(i) for i in batch["y"]]
                expected = batch["y"][:, None] + (0 if then is None else 1)
                assert np.array_equal(batch["x"], np.broadcast_to(expected, (2, 3)))
        made.close()


def main(folder: Path, rank: int, address: str) -> dict[str, Any]:
    """One of two processes, each with two devices."""
    import jax
    import numpy as np
    import pytest
    from jax._src.distributed import global_state
    from jax.sharding import NamedSharding, PartitionSpec

    import nostall
    from nostall import transforms as t
    from nostall.errors import UsageError

    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    steps = [t.Resize((24, 32)), t.ToTensor(), t.Normalize([0.485] * 3, [0.229, 0.224, 0.225])]
    job = {"rank": rank, "world_size": 2, "local_rank": 0, "local_world_size": 1, "peers": "off"}
    check_items(job)
    for more in ({}, {"dtype": "float16", "layout": "hwc"}):
        host = batches(steps, folder, output="numpy", **job, **more)
        there = batches(steps, folder, output="jax", **job, **more)
        for (images, labels), (mine, classes) in zip(host, there, strict=True):
            assert isinstance(mine, jax.Array) and mine.dtype == images.dtype
            assert np.array_equal(mine, images) and np.array_equal(classes, labels)
    # What a step was donated is not looked at any more: JAX would crash.
    from nostall.loader import _jax

    for wait in (False, True):
        sending = _jax.place("cpu:0").begin()
        donated = sending.array(np.zeros((2, 2), np.float32))
        sending.sent()
        if not wait:  # else the user gets it while the thread waits for it
            sending.hand_over()
        donated.delete()
        assert sending.is_copied(wait)
    mixed = [*steps, t.MixUp(num_classes=3)]
    host = batches(mixed, folder, output="numpy", **job)
    there = batches(mixed, folder, output="jax", device="cpu:1", **job)
    for one, two in zip(host, there, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        assert two[0].devices() == {jax.local_devices()[1]}

    # Batches of both ranks as one array over all four devices.
    mesh = jax.make_mesh((4,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    host = batches(steps, folder, output="numpy", **job)
    there = batches(steps, folder, output="jax", device=sharding, device_ahead=1, **job)
    step = jax.jit(lambda images, labels: (images.mean(), labels.sum()))
    # Gloo gives up where the first step of one process begins 30 s after that of the other.
    global_state.client.wait_at_barrier("first step", timeout_in_ms=600_000)
    sums = []
    for (images, _), (mine, classes) in zip(host, there, strict=True):
        assert mine.shape == (8, 3, 24, 32) and mine.sharding.is_equivalent_to(sharding, 4)
        local = [shard.data for shard in mine.addressable_shards]
        assert len(local) == 2 and np.array_equal(np.concatenate(local), images)
        mean, total = step(mine, classes)
        sums.append((float(mean), int(total)))
    with pytest.raises(UsageError, match="does not divide among the devices"):
        batches(steps, folder, output="jax", device=sharding, drop_last=False, **job)
    for wrong, why in (("cpu:7", "JAX finds 2 cpu devices"), ("abacus", "abacus")):
        with pytest.raises(UsageError, match=why):
            batches(steps, folder, output="jax", device=wrong, **job)
    source = nostall.ImageFolder(folder, index=False)
    with pytest.raises(UsageError, match="pass output="):
        nostall.DataLoader(source, 4, transforms=steps, output="numpy", device="cpu:0")
    with pytest.raises(UsageError, match="output='jax' takes batches of arrays"):
        nostall.DataLoader(source, 4, output="jax")
    with pytest.raises(UsageError, match=r'no device of torch: .* output="jax"'):
        nostall.DataLoader(source, 4, transforms=steps, output="torch", device=sharding)
    uneven: dict[str, Any] = {"output": "jax", "device": sharding, **job}
    for whole, dropped in ((8, False), (7, True)):
        with pytest.raises(UsageError, match="parts of several sizes"):
            nostall.DataLoader(
                source, transforms=steps, global_batch_size=whole, drop_last=dropped, **uneven
            )
    return {"sums": sums, "labels": [labels.tolist() for _, labels in host]}


def test_arrays_on_devices_and_over_shardings_of_two_processes(image_folder: Path) -> None:
    from nodes import free_port  # not where this file is a rank's program

    port = free_port()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // 2}",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(image_folder), str(rank), f"127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    done = [rank.communicate(timeout=800) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], done
    told = [json.loads(out.splitlines()[-1]) for out, _ in done]
    assert told[0]["sums"] == told[1]["sums"]
    # What is computed is of the samples of both.
    for (_, total), *labels in zip(told[0]["sums"], *(one["labels"] for one in told), strict=True):
        assert total == sum(map(sum, labels))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
