"""Lightning's loop over windows of a token stream; a checkpoint in the middle of an epoch.

    python examples/lm-lightning.py /tmp/tokens

Lightning keeps the state of a loader that has state_dict() in its checkpoints, and loads it.
"""

import sys
import tempfile
import warnings

import pytorch_lightning
import torch

import nostall

LENGTH, BATCH, STEPS = 32, 4, 8


class Tokens(pytorch_lightning.LightningDataModule):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def train_dataloader(self):
        tokens = nostall.Tokens(self.path, dtype="uint16", end=0)
        self.loader = nostall.DataLoader(
            nostall.Windows(tokens, LENGTH), BATCH, epochs=None, seed=0
        )
        return self.loader


class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
        self.losses = []

    def training_step(self, batch, _):
        logits = self.net(batch["ids"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(root, folder, steps, checkpoint=None):
    torch.manual_seed(0)
    data, model = Tokens(f"{root}/train.bin"), Model()
    trainer = pytorch_lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    trainer.save_checkpoint(f"{folder}/{steps}.ckpt")
    data.loader.close()
    return model.losses


def main(root):
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(root, folder, STEPS)
        head = fit(root, folder, 5)
        rest = fit(root, folder, STEPS, f"{folder}/5.ckpt")
    assert head + rest == whole, (head, rest, whole)
    print(f"lightning: loss {whole[-1]:.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
