"""Lightning on two processes: sanity check, epochs, and a checkpoint in the middle of one.

    python examples/make-data.py /tmp/data
    python examples/train-lightning.py /tmp/data

The folder has images/. Lightning starts the second process itself; torchrun may do it instead.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import pytorch_lightning
import torch

import nostall
from nostall import transforms as t

EPOCHS, BATCH = 3, 2


class Pictures(pytorch_lightning.LightningDataModule):
    def __init__(self, root):
        super().__init__()
        self.root = root

    def setup(self, stage):
        paths = sorted(Path(self.root, "images").glob("*.jpg"))
        self.data = nostall.FileList(paths, range(len(paths)))

    def train_dataloader(self):
        steps = [t.Resize((32, 32)), t.RandomHorizontalFlip(), t.ToTensor()]
        return nostall.DataLoader(self.data, BATCH, epochs=EPOCHS, seed=0, transforms=steps)

    def val_dataloader(self):
        steps = [t.Resize((32, 32)), t.ToTensor()]
        return nostall.DataLoader(self.data, BATCH, shuffle=False, transforms=steps)


class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 14))

    def training_step(self, batch, _):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(root, folder, kind=Model, checkpoint="last"):
    """Goes on from the last checkpoint in `folder`, or from another one."""
    pytorch_lightning.seed_everything(0)
    model = kind()
    keep = pytorch_lightning.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=5, save_top_k=-1, save_last=True
    )
    trainer = pytorch_lightning.Trainer(
        max_epochs=EPOCHS,
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[keep],
        logger=False,
    )
    trainer.fit(model, datamodule=Pictures(root), ckpt_path=checkpoint)
    return model


class Seen(Model):
    """Keeps the epoch, labels and loss of each batch, and the labels of validations."""

    def __init__(self):
        super().__init__()
        self.seen, self.checked = [], []

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.seen.append((self.current_epoch, batch[1].tolist(), loss.item()))
        return loss

    def validation_step(self, batch, index):
        super().validation_step(batch, index)
        self.checked.append((self.trainer.sanity_checking, batch[1].tolist()))


def main(root):
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(root, folder, Seen)
        assert whole.trainer.num_training_batches == 4  # 14 samples, two ranks, batches of two
        shared = whole.trainer.strategy.broadcast(folder)
        rest = fit(root, folder, Seen, f"{shared}/step=5.ckpt")
    assert [epoch for epoch, *_ in whole.seen] == [0] * 4 + [1] * 4 + [2] * 4
    assert rest.seen == whole.seen[5:], (rest.seen, whole.seen)
    # The order is that of torch's sampler, whose set_epoch was called.
    sampler = torch.utils.data.DistributedSampler(range(14), 2, whole.global_rank, seed=0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        labels = [n for number, part, _ in whole.seen if number == epoch for n in part]
        assert labels == list(sampler)
    # Two batches of the sanity check, then each epoch's own whole validation.
    part = list(range(whole.global_rank, 14, 2))
    assert [n for sane, found in whole.checked if sane for n in found] == part[:4]
    assert [n for sane, found in whole.checked if not sane for n in found] == EPOCHS * part
    print(f"lightning: loss {whole.seen[-1][-1]:.3f}, the same batches", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
