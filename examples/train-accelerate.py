"""Hugging Face Accelerate: gradients of several batches, a state in the middle of an epoch.

    python examples/make-data.py /tmp/data
    torchrun --nproc-per-node 2 examples/train-accelerate.py /tmp/data

The folder has images/.
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, tqdm

import nostall
from nostall import transforms as t
from nostall.plugins.accelerate import Loader

EPOCHS, BATCH, ACCUMULATED, KEPT = 2, 2, 3, 3


def train(root, folder):
    """Goes on from the state in `folder`; the labels and losses, and whether the weights changed."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    steps = [t.Resize((32, 32)), t.RandomHorizontalFlip(), t.ToTensor()]
    loader = nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0, transforms=steps)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 14))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, Loader(loader))
    if any(Path(folder).glob("*")):
        accelerator.load_state(folder)
    seen, updates = [], 0
    for epoch in loader.epochs():
        for images, labels in tqdm(epoch, initial=loader.loader.position[1]):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen.append((labels.tolist(), loss.item(), accelerator.sync_gradients))
            updates += accelerator.sync_gradients
            if accelerator.sync_gradients and updates % KEPT == 0:
                accelerator.save_state(folder)
    return seen


def main(root):
    with tempfile.TemporaryDirectory() as folder:
        # One folder for all ranks.
        shared = broadcast_object_list([folder])[0]
        whole = train(root, shared)
        rest = train(root, shared)
    # Gradients are summed over three batches, and the epoch's end ends a sum too.
    batches = len(whole) // EPOCHS
    ends = [i % ACCUMULATED == ACCUMULATED - 1 or i == batches - 1 for i in range(batches)]
    assert [synchronised for *_, synchronised in whole] == EPOCHS * ends
    # The third change of the weights was in the middle of the second epoch.
    assert rest == whole[7:], (rest, whole)
    print(f"accelerate: loss {whole[-1][1]:.3f}, the same batches", flush=True)


if __name__ == "__main__":
    Accelerator(cpu=True)  # joins the processes
    main(sys.argv[1])
