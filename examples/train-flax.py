"""Flax on JAX: batches over all devices, checkpoints of Orbax that hold the loader's place.

    python examples/make-data.py /tmp/data
    python examples/train-flax.py /tmp/data

The folder has images/. Runs on two devices of the host. On several processes,
jax.distributed.initialize() comes first, and BATCH is that of each process.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nostall
from nostall import transforms as t

EPOCHS, BATCH, KEPT = 3, 4, 5


class Model(nnx.Module):
    """One layer over the pixels."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(3 * 32 * 32, 14, rngs=rngs)

    def __call__(self, images):
        return self.layer(images.reshape(len(images), -1))


@nnx.jit
def step(model, optimizer, images, labels):
    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def make_training(mesh):
    """The model and its optimizer, the same on all devices."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=nnx.Param)
    everywhere = NamedSharding(mesh, PartitionSpec())
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), everywhere))
    return model, optimizer


def make_loader(root, mesh):
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    return nostall.DataLoader(
        data,
        BATCH,
        epochs=EPOCHS,
        seed=0,
        drop_last=True,
        transforms=[t.Resize((32, 32)), t.RandomHorizontalFlip(), t.ToTensor()],
        output="jax",
        device=NamedSharding(mesh, PartitionSpec("data")),
    )


def train(root, folder):
    """Goes on from the last checkpoint in `folder`; the labels and losses of each batch."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    model, optimizer = make_training(mesh)
    seen, folder = [], Path(folder).absolute()  # as Orbax wants it
    with make_loader(root, mesh) as loader, ocp.CheckpointManager(folder) as checkpoints:
        number = checkpoints.latest_step() or 0
        if number:
            like = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            saved = checkpoints.restore(
                number, args=ocp.args.Composite(state=like, loader=ocp.args.JsonRestore())
            )
            nnx.update((model, optimizer), saved["state"])
            loader.load_state_dict(saved["loader"])
        for epoch in loader.epochs():
            for images, labels in epoch:
                loss = float(step(model, optimizer, images, labels))
                seen.append((labels.tolist(), loss))
                number += 1
                if number % KEPT == 0:
                    state = ocp.args.StandardSave(nnx.state((model, optimizer)))
                    place = ocp.args.JsonSave(loader.state_dict())
                    checkpoints.save(number, args=ocp.args.Composite(state=state, loader=place))
    return seen


def main(root):
    with tempfile.TemporaryDirectory() as folder:
        whole = train(root, folder)
        rest = train(root, folder)
    assert len(whole) == EPOCHS * 3  # 14 samples in batches of four, the last two left out
    # The checkpoint is of the middle of the second epoch.
    assert rest == whole[KEPT:], (rest, whole)
    assert jax.device_count() > 1
    loss = whole[-1][1]
    print(f"flax: loss {loss:.3f} on {jax.device_count()} devices, the same batches", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
