"""A small real training that checkpoints: python training.py DATA HOME EPOCHS; prints its steps."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

import nostall
from nostall import transforms as t
from nostall.checkpoint import rng_state, set_rng_state


def main(data: str, home: Path, epochs: int) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    loader = nostall.DataLoader(
        nostall.ImageFolder(data, index=False),
        8,
        epochs=epochs,
        seed=3,
        transforms=[t.RandomResizedCrop(16), t.RandomHorizontalFlip(), t.ToTensor()],
        tiers=[],
        job=str(home),
    )
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Dropout(),
        torch.nn.Linear(4 * 14 * 14, 3),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    state = {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "rng": rng_state(),
        "step": 0,
    }
    with nostall.Checkpointer(home / "fast", home / "durable", keep=2) as ckpt:
        if ckpt.restore(into=state) is not None:
            set_rng_state(state["rng"])
        ckpt.attach(optimizer)
        print("at", state["step"], flush=True)
        for epoch in loader.epochs():
            for images, labels in epoch:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                state["step"] += 1
                state["rng"] = rng_state()
                ckpt.save(state, state["step"], window=True)
                print("step", state["step"], flush=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for moments in optimizer.state_dict()["state"].values():
        digest.update(moments["exp_avg_sq"].numpy().tobytes())
    print("weights", digest.hexdigest(), state["step"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
