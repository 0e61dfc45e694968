"""Hugging Face's Trainer on images: its epochs, its evaluations, its checkpoints.

    python examples/make-data.py /tmp/data
    torchrun --nproc-per-node 2 examples/train-trainer.py /tmp/data

The folder has images/.
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from accelerate.utils import broadcast_object_list

import nostall
from nostall import transforms as t
from nostall.plugins.hugging_face import FromLoader

EPOCHS, BATCH = 3, 2


class ImageTrainer(FromLoader, transformers.Trainer):
    """A trainer whose batches are a loader's."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 14))

    def forward(self, pixel_values, labels):
        logits = self.net(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_trainer(root, folder):
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        save_steps=6,
        eval_strategy="epoch",
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        label_names=["labels"],
    )
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    steps = [t.Resize((32, 32)), t.ToTensor()]
    transformers.set_seed(0)
    return ImageTrainer(
        loader=nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0, transforms=steps),
        eval_loader=nostall.DataLoader(data, BATCH, shuffle=False, transforms=steps),
        names=("pixel_values", "labels"),
        model=Model(),
        args=arguments,
    )


def train(root, folder, checkpoint):
    """The trainer, and the labels and losses of each batch."""
    trainer, seen = make_trainer(root, folder), []

    def see(model, _, given, made):
        if model.training:
            seen.append((given["labels"].tolist(), made["loss"].item()))

    trainer.model.register_forward_hook(see, with_kwargs=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, seen


def main(root):
    with tempfile.TemporaryDirectory() as folder:
        shared = broadcast_object_list([folder])[0]
        trainer, whole = train(root, shared, None)
        _, rest = train(root, shared, f"{shared}/checkpoint-6")
    state = trainer.state
    assert state.global_step == EPOCHS * 4  # 14 samples, two ranks, batches of two
    assert rest == whole[6:], (rest, whole)
    assert [int(log["epoch"]) for log in state.log_history if "eval_loss" in log] == [1, 2, 3]
    print(f"trainer: loss {whole[-1][1]:.3f}, the same batches", flush=True)


if __name__ == "__main__":
    _ = transformers.TrainingArguments(use_cpu=True).device  # joins the processes
    main(sys.argv[1])
