"""Hugging Face's Trainer with packed units: its loop, its checkpoints, nostall's batches.

python examples/lm-trainer.py /tmp/tokens
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import nostall
from nostall.plugins.hugging_face import FromLoader

LENGTH, BATCH, STEPS = 32, 4, 8


# Labels of a unit are shifted already: the model is not to shift them again.
NAMES = ("input_ids", ("labels", "shift_labels"), "position_ids")


class TokenTrainer(FromLoader, Trainer):
    """A trainer whose batches are a loader's."""


def make_trainer(root, folder, losses):
    tokens = nostall.Tokens(f"{root}/train.bin", dtype="uint16", end=0)
    units = nostall.Packed(tokens, LENGTH, fields=("ids", "labels", "positions"))
    loader = nostall.DataLoader(units, BATCH, steps=STEPS, seed=0, batch="tuple")
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
    )
    trainer = TokenTrainer(loader=loader, names=NAMES, model=model, args=arguments)
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
        trainer = make_trainer(root, folder, [])
        batch = next(iter(trainer.get_train_dataloader()))
        logits = trainer.model(batch["input_ids"], position_ids=batch["position_ids"]).logits
        first = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        make_trainer(root, folder, whole).train()
        make_trainer(root, folder, resumed).train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert abs(whole[0] - first.item()) < 1e-3, (whole, first)
    assert resumed == whole[4:], (resumed, whole)
    print(f"trainer: loss {whole[-1]:.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
