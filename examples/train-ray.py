"""Ray Train on two workers, one of which is killed: Ray starts them again, and no sample is missed.

    pip install dist/nostall-*-cp311-*_x86_64.whl 'nostall[ray]'  # of make wheel: not on PyPI
    python examples/make-data.py /tmp/data
    python examples/train-ray.py /tmp/data

The folder has images/. On several nodes all of them see it, and `storage_path` is one that all see.
"""

import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import distributed

import nostall
from nostall import transforms as t

EPOCHS, GLOBAL_BATCH = 2, 5


def make_loader(root, **place):
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    steps = [t.Resize((32, 32)), t.ToTensor()]
    return nostall.DataLoader(
        data, global_batch_size=GLOBAL_BATCH, epochs=EPOCHS, transforms=steps, **place
    )


def train(config):
    """What each worker runs, also after a failure."""
    ranks = ray.train.get_context().get_world_size()
    loader = make_loader(config["root"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 14))
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = []  # the samples of each global batch that the weights have seen
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        order = saved["order"]
    for epoch in loader.epochs():
        for images, labels in epoch:
            loss = torch.nn.functional.cross_entropy(model(images), labels, reduction="sum")
            (loss * ranks / GLOBAL_BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
            parts = [None] * ranks
            distributed.all_gather_object(parts, labels.tolist())
            order.append(sorted(itertools.chain.from_iterable(parts)))
            if not checkpoint and len(order) == 4 and distributed.get_rank() == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)  # as a worker that is lost
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
                "order": order,
            }
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder, "state.pt"))
                first = distributed.get_rank() == 0
                ray.train.report(
                    {"order": order, "resumed": bool(checkpoint), "loss": loss.item()},
                    checkpoint=Checkpoint.from_directory(folder) if first else None,
                )
    loader.close()


def main(root):
    with tempfile.TemporaryDirectory() as home:
        trainer = TorchTrainer(
            train,
            train_loop_config={"root": str(Path(root).absolute())},
            # Ray goes on with one worker where there is no room for two.
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(storage_path=home, failure_config=FailureConfig(max_failures=1)),
        )
        found = trainer.fit().metrics
    assert found["resumed"]
    with make_loader(root, rank=0, world_size=1) as loader:
        alone = [sorted(labels.tolist()) for epoch in loader.epochs() for _, labels in epoch]
    assert found["order"] == alone, (found["order"], alone)
    print(f"ray: loss {found['loss']:.3f}, the same batches", flush=True)


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False)  # of this machine; leave it out on a cluster
    main(sys.argv[1])
    ray.shutdown()
