"""DeepSpeed: the loader's position in its checkpoints, in the middle of an epoch.

    pip install dist/nostall-*-cp311-*_x86_64.whl 'nostall[deepspeed]'  # of make wheel: not on PyPI
    python examples/make-data.py /tmp/data
    torchrun --nproc-per-node 2 examples/train-deepspeed.py /tmp/data

The folder has images/. DS_ACCELERATOR=cpu runs it where there is no GPU.
"""

import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
from torch import distributed

import nostall
from nostall import transforms as t

EPOCHS, BATCH, SUMMED, KEPT = 2, 2, 2, 3


def train(root, folder):
    """Goes on from the last checkpoint in `folder`; the labels and losses of each batch."""
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    steps = [t.Resize((32, 32)), t.RandomHorizontalFlip(), t.ToTensor()]
    loader = nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0, transforms=steps)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 14))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": SUMMED}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if Path(folder, "latest").exists():
        _, kept = engine.load_checkpoint(folder)
        loader.load_state_dict(kept["loader"])
    seen = []
    for epoch in loader.epochs():
        for images, labels in epoch:
            images, labels = images.to(engine.device), labels.to(engine.device)
            loss = torch.nn.functional.cross_entropy(engine(images), labels)
            engine.backward(loss)
            updates = engine.is_gradient_accumulation_boundary()
            engine.step()
            seen.append((labels.tolist(), loss.item()))
            if updates and engine.global_steps % KEPT == 0:
                engine.save_checkpoint(folder, client_state={"loader": loader.state_dict()})
    return seen


def main(root):
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]  # one folder for all ranks
        distributed.broadcast_object_list(shared)
        whole = train(root, shared[0])
        rest = train(root, shared[0])
        distributed.barrier()
    assert rest == whole[KEPT * SUMMED :], (rest, whole)
    print(f"deepspeed: loss {whole[-1][1]:.3f}, the same batches", flush=True)


if __name__ == "__main__":
    deepspeed.init_distributed()  # joins the processes
    main(sys.argv[1])
