"""Lightning starts its second rank itself: lightning_ranks.py DATA OUT, each writes OUT/RANK.json.

Its process group is this project's: gradients, and the values that Lightning reduces over the ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.strategies import DDPStrategy

import nostall
import nostall.torch  # so that a torch before 2.15 knows the backend

data, out = Path(sys.argv[1]), Path(sys.argv[2])


class Model(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.labels: list[int] = []

    def train_dataloader(self) -> nostall.DataLoader:
        paths = sorted(data.rglob("*.jpg"))
        self.loader = nostall.DataLoader(
            nostall.FileList(paths, range(len(paths))), 5, epochs=1, tiers=["ram:16MiB"]
        )
        return self.loader

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        labels = batch[1]
        self.labels += labels.tolist()
        size = len(labels)
        mean = labels.float().mean()
        self.log("mean", mean, sync_dist=True, on_step=True, on_epoch=True, batch_size=size)
        for name, value in (("sum", labels.sum()), ("max", labels.max())):
            self.log(name, value, sync_dist=True, on_step=False, on_epoch=True, reduce_fx=name)
        return (self.weight * mean).sum()

    def on_train_epoch_end(self) -> None:
        bar = progress.train_progress_bar
        self.bar = None if bar.disable else [bar.n, bar.total]

    def on_train_end(self) -> None:
        loader = self.loader
        world = loader.world
        metrics = self.trainer.callback_metrics
        told = {
            "backend": torch.distributed.get_backend(),
            "place": [world.rank, world.world_size, world.local_rank, world.local_world_size],
            "job": world.job,
            "source": loader.stats().source_bytes,
            "total": loader.dataset.total_bytes,
            "labels": self.labels,
            "weight": self.weight.item(),
            "logged": {name: value.item() for name, value in metrics.items()},
            "bar": self.bar,
        }
        (out / f"{world.rank}.json").write_text(json.dumps(told))
        self.trainer.strategy.barrier()  # the tiers stay until both have read

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


progress = TQDMProgressBar()
trainer = pytorch_lightning.Trainer(
    max_epochs=1,
    strategy=DDPStrategy(process_group_backend="nostall"),
    devices=2,
    accelerator="cpu",
    default_root_dir=out,
    callbacks=[progress],
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
)
trainer.fit(Model())
