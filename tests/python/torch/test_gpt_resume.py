"""A small GPT ends with the same loss bits when it is killed and goes on with other ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import nostall

BATCH, LENGTH, STEPS, VOCABULARY = 8, 16, 12, 64


class GPT(nn.Module):
    """One layer of attention that does not cross documents."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.places = nn.Embedding(LENGTH, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.tokens(batch["ids"]) + self.places(batch["positions"])
        segments = batch["segments"]
        allowed = (segments[:, :, None] == segments[:, None, :]).tril()
        mask = torch.where(allowed, 0.0, -1e9).repeat_interleave(2, 0)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return functional.cross_entropy(self.out(x).flatten(0, 1), batch["labels"].flatten())


def batches(folder: Path, world: int, state: dict[str, Any] | None) -> Iterator[Any]:
    """(global batch, state behind it), put together from what each of `world` ranks loads."""
    tokens = nostall.Tokens(folder / "train.bin", dtype="uint16", end=0)
    fields = ("ids", "labels", "positions", "segments")
    ranks = [
        nostall.DataLoader(
            nostall.Packed(tokens, LENGTH, fields=fields),
            BATCH // world,
            seed=3,
            steps=STEPS,
            tiers=[],
            rank=rank,
            world_size=world,
            local_rank=0,
            local_world_size=1,
            job=f"gpt-{os.getpid()}-{world}-{rank}",
        )
        for rank in range(world)
    ]
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
    for parts in zip(*ranks, strict=True):
        # Rank r has places r, r + world, ... of the global batch.
        whole = {name: torch.stack([p[name] for p in parts], 1).flatten(0, 1) for name in fields}
        yield whole, ranks[0].state_dict()
    for loader in ranks:
        loader.close()


def train(folder: Path, world: int, kill_after: int = 0) -> list[str]:
    """The losses of all steps, in hexadecimal; goes on from the folder's checkpoint if there is one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, losses, state = GPT(), [], None
    saved = folder / "saved.pt"
    if saved.exists():
        kept = torch.load(saved)
        model.load_state_dict(kept["model"])
        losses, state = kept["losses"], json.loads(kept["loader"])
    for batch, after in batches(folder, world, state):
        loss = model(batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        losses.append(loss.item().hex())
        if len(losses) == kill_after:
            kept = {"model": model.state_dict(), "losses": losses, "loader": json.dumps(after)}
            torch.save(kept, saved)
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


def test_losses_are_the_same_after_a_kill_on_another_number_of_ranks(tmp_path: Path) -> None:
    ids = np.random.default_rng(5).integers(1, VOCABULARY, 1000).astype(np.uint16)
    ids[np.random.default_rng(6).integers(0, 1000, 120)] = 0
    ids.tofile(tmp_path / "train.bin")
    threads = torch.get_num_threads()
    try:
        whole = train(tmp_path, 2)
        assert len(whole) == STEPS and len(set(whole)) == STEPS
        killed = subprocess.run([sys.executable, __file__, str(tmp_path)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert (tmp_path / "saved.pt").exists()
        assert train(tmp_path, 4) == whole
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    train(Path(sys.argv[1]), 2, kill_after=5)
