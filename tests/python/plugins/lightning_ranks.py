"""Lightning starts its second rank itself: lightning_ranks.py DATA OUT, each writes OUT/RANK.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch

import nostall

data, out = Path(sys.argv[1]), Path(sys.argv[2])


class Model(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def train_dataloader(self) -> nostall.DataLoader:
        paths = sorted(data.rglob("*.jpg"))
        self.loader = nostall.DataLoader(
            nostall.FileList(paths, range(len(paths))), 5, epochs=1, tiers=["ram:16MiB"]
        )
        return self.loader

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.weight.sum() * len(batch[1])

    def on_train_end(self) -> None:
        loader = self.loader
        world = loader.world
        told = {
            "place": [world.rank, world.world_size, world.local_rank, world.local_world_size],
            "job": world.job,
            "source": loader.stats().source_bytes,
            "total": loader.dataset.total_bytes,
        }
        (out / f"{world.rank}.json").write_text(json.dumps(told))
        self.trainer.strategy.barrier()  # the tiers stay until both have read

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = pytorch_lightning.Trainer(
    max_epochs=1,
    strategy="ddp",
    devices=2,
    accelerator="cpu",
    default_root_dir=out,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model())
