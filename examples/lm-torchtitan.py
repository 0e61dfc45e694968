"""torchtitan's protocol of loaders: (inputs, labels) from __iter__, and a state that is checkpointed.

    python examples/lm-torchtitan.py /tmp/tokens

A trainer of torchtitan takes such a class in the place of its ParallelAwareDataloader. The state is
that of all ranks, so a checkpoint can be loaded on another number of them.
"""

import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

import nostall

LENGTH, BATCH, STEPS = 32, 4, 12


class TokenLoader(Stateful):
    """torchtitan's BaseDataLoader, which is a Stateful that gives (dict, labels)."""

    def __init__(self, path, dp_rank=None, dp_world_size=None):
        tokens = nostall.Tokens(path, dtype="uint16", end=0)
        units = nostall.Packed(tokens, LENGTH, fields=("ids", "positions", "labels"))
        self.loader = nostall.DataLoader(
            units, BATCH, steps=STEPS, seed=0, rank=dp_rank, world_size=dp_world_size
        )

    def __iter__(self):
        for batch in self.loader:
            yield {"input": batch["ids"], "positions": batch["positions"]}, batch["labels"]

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        if state:
            self.loader.load_state_dict(state)


def train(model, loader, steps):
    """Losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, labels in loader:
        logits = model(inputs["input"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == steps:
            break
    return losses


def main(root):
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
    loader = TokenLoader(f"{root}/train.bin")
    losses = train(model, loader, 5)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"dataloader": loader}, checkpoint_id=folder)
        expected = [labels.clone() for _, labels in loader]
        loader.loader.close()
        resumed = TokenLoader(f"{root}/train.bin")
        dcp.load({"dataloader": resumed}, checkpoint_id=folder)
    batches = [labels.clone() for _, labels in resumed]
    resumed.loader.close()
    assert len(batches) == STEPS - 5
    assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=True))
    print(f"torchtitan: loss {losses[-1]:.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
