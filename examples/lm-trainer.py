"""Hugging Face's Trainer with packed units: its loop, its checkpoints, nostall's batches.

python examples/lm-trainer.py /tmp/tokens
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import nostall

LENGTH, BATCH, STEPS = 32, 4, 8


class TokenTrainer(Trainer):
    """A trainer whose batches come from a nostall loader, whose place is in its checkpoints."""

    def __init__(self, loader, **options):
        super().__init__(**options)
        self.loader = loader
        self.add_callback(SavesPlace(loader))

    def get_train_dataloader(self):
        return Batches(self.loader)


class Batches:
    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return STEPS

    def __iter__(self):
        for batch in self.loader:
            # The labels are shifted already; the loss counts those that are not -100.
            yield {
                "input_ids": batch["ids"],
                "position_ids": batch["positions"],
                "labels": batch["labels"],
                "shift_labels": batch["labels"],
            }


class SavesPlace(TrainerCallback):
    def __init__(self, loader):
        self.loader = loader

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        torch.save(self.loader.state_dict(), folder / "loader.pt")


def make_trainer(root, folder, losses):
    tokens = nostall.Tokens(f"{root}/train.bin", dtype="uint16", end=0)
    units = nostall.Packed(tokens, LENGTH, fields=("ids", "labels", "positions"))
    loader = nostall.DataLoader(units, BATCH, steps=STEPS, seed=0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)
    )
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        save_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ignore_data_skip=True,  # the loader's state has the place
    )
    trainer = TokenTrainer(loader, model=model, args=arguments)
    trainer.add_callback(Losses(losses))
    return trainer


class Losses(TrainerCallback):
    def __init__(self, losses):
        self.losses = losses

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def main(root):
    whole, resumed = [], []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(root, folder, whole)
        trainer.train()
        trainer.loader.close()
        checkpoint = Path(folder, "checkpoint-4")
        trainer = make_trainer(root, folder, resumed)
        trainer.loader.load_state_dict(torch.load(checkpoint / "loader.pt"))
        trainer.train(resume_from_checkpoint=str(checkpoint))
        trainer.loader.close()
    assert resumed == whole[4:], (resumed, whole)
    print(f"trainer: loss {whole[-1]:.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
