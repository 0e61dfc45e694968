"""JAX: batches are global arrays over all devices, each process with its own rows.

    python examples/lm-jax.py /tmp/tokens

Runs on four devices of the host. On several processes, jax.distributed.initialize() comes first, and
rank= and world_size= are jax.process_index() and jax.process_count().
"""

import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nostall

LENGTH, BATCH, STEPS = 32, 8, 10


def make_loader(root, sharding):
    tokens = nostall.Tokens(f"{root}/train.bin", dtype="uint16", end=0)
    units = nostall.Packed(tokens, LENGTH, dtype="int32")
    return nostall.DataLoader(
        units,
        BATCH // jax.process_count(),
        steps=STEPS,
        seed=0,
        drop_last=True,
        output="jax",
        device=sharding,
        rank=jax.process_index(),
        world_size=jax.process_count(),
    )


def loss_of(parameters, batch):
    embedded = parameters["embedding"][batch["ids"]]
    logits = jax.nn.log_softmax(embedded @ parameters["output"])
    counted = batch["labels"] != -100
    labels = batch["labels"].clip(0)[..., None]
    of_labels = jax.numpy.take_along_axis(logits, labels, -1)[..., 0]
    return -(of_labels * counted).sum() / counted.sum()


@jax.jit
def step(parameters, batch):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    return jax.tree.map(lambda p, g: p - 2.0 * g, parameters, gradients), loss


def train(root, parameters, state=None, stop=STEPS):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    losses = []
    with make_loader(root, sharding) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            assert batch["ids"].shape == (BATCH, LENGTH)
            assert len(batch["ids"].sharding.device_set) == jax.device_count()
            parameters, loss = step(parameters, batch)
            losses.append(float(loss))
            if len(losses) == stop:
                break
        return parameters, losses, loader.state_dict()


def main(root):
    keys = jax.random.split(jax.random.key(0))
    parameters = {
        "embedding": jax.random.normal(keys[0], (64, 32)) / 8,
        "output": jax.random.normal(keys[1], (32, 64)) / 8,
    }
    _, whole, _ = train(root, parameters)
    half, head, state = train(root, parameters, stop=4)
    _, rest, _ = train(root, half, state)
    assert head + rest == whole, (head, rest, whole)
    assert jax.device_count() > 1
    print(f"jax: loss {whole[-1]:.3f} on {jax.device_count()} devices, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
