"""A training under Slurm that saves before the time limit; requeued, it goes on with the next batch.

    python examples/make-data.py /data
    sbatch train.sbatch

docs/guide/clusters.md has the script for sbatch. /data has images/; all nodes see the checkpoints.
"""

import sys
from pathlib import Path

import torch
from torch import distributed

import nostall.torch
from nostall import transforms as t

BATCH = 2


def main(root, checkpoints, epochs=90):
    distributed.init_process_group("nostall")
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    steps = [t.Resize((32, 32)), t.RandomHorizontalFlip(), t.ToTensor()]
    loader = nostall.DataLoader(data, BATCH, epochs=epochs, seed=0, transforms=steps)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, len(data)))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    with nostall.Checkpointer(
        durable=checkpoints, replicated=True, every=500, on_signal="SIGUSR1 SIGTERM"
    ) as ckpt:
        if ckpt.restore(into=state) and distributed.get_rank() == 0:
            print(f"going on at step {state['step']}", flush=True)
        for epoch in loader.epochs():
            for images, labels in epoch:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
                ckpt.save(state, state["step"])
        ckpt.save(state, state["step"], force=True)
    if distributed.get_rank() == 0:
        print(f"trained {state['step']} steps", loader.stats(), sep="\n", flush=True)
    loader.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
