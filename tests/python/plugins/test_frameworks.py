"""The frameworks of the guide, with their real packages: their loops over our loader, on two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import prefork
import pytest
from nodes import free_port

import nostall
from nostall.errors import UsageError

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
# One process a rank, which imports what they share once.
RUN = """
import runpy, sys
from pathlib import Path
data, out, *scripts = sys.argv[1:]
for script in scripts:
    name = Path(script).stem
    print(f"script {name}", flush=True)
    sys.argv = [script, data, f"{out}/{name}"]
    runpy.run_path(script, run_name="__main__")
"""


def needs(*packages: str) -> None:
    for package in packages:
        # Not imported here: that takes seconds.
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")


def sections() -> dict[str, list[str]]:
    """The code of the page, by the name of its example."""
    page = (ROOT / "docs" / "guide" / "frameworks.md").read_text()
    rows = re.findall(r"^\| \[([^]]+)\]\(#[\w-]+\) \| \[([\w-]+)\.py\]", page, re.M)
    found = {}
    for title, name in rows:
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        found[name] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return found


def scripts_of(name: str, folder: Path) -> list[str]:
    """The script on the page, as a user saves it, and the example."""
    (page,) = sections()[name]
    script = folder / f"page-{name}.py"
    script.write_text(page)
    return [str(script), str(EXAMPLES / f"{name}.py")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frameworks") / "data"
    run = prefork.run([str(EXAMPLES / "make-data.py"), str(folder)], timeout=800)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.long
@pytest.mark.multi
def test_frameworks_have_the_same_batches_on_two_ranks(data: Path, tmp_path: Path) -> None:
    needs("pytorch_lightning", "accelerate", "transformers")
    names = ["train-lightning", "train-accelerate", "train-trainer"]
    scripts = [script for name in names for script in scripts_of(name, tmp_path)]
    port = free_port()
    ranks = []
    for rank in range(2):
        # What torchrun sets.
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
        env = os.environ | {k: str(v) for k, v in (numbers | job | {"GROUP_RANK": 0}).items()}
        command = ["-c", RUN, str(data), str(tmp_path), *scripts]
        ranks.append(
            prefork.Process(
                command, torch=True, env=env, stdout=prefork.PIPE, stderr=prefork.STDOUT
            )
        )
    outputs = [rank.communicate(timeout=800)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]
        assert output.count("the same batches") == len(names), output
    # What each script shows of its progress: four batches an epoch, and all twelve of the Trainer.
    shown = dict(re.findall(r"^script (\S+)$(.*?)(?=^script |\Z)", outputs[0], re.M | re.DOTALL))
    ended = {name: re.findall(r"100%[^\r\n]* (\d+/\d+) ", text) for name, text in shown.items()}
    assert set(ended["page-train-accelerate"]) == {"4/4"}, shown
    # The last one begins with a batch in the middle of the second epoch.
    assert ended["train-accelerate"].count("4/4") >= 3, shown
    assert set(ended["train-accelerate"]) == {"4/4"}, shown
    assert "12/12" in ended["page-train-trainer"], shown
    assert ended["train-trainer"].count("12/12") >= 2, shown


@pytest.mark.long
@pytest.mark.multi
def test_ranks_that_lightning_starts_share_their_node_and_reduce_over_our_backend(
    image_folder: Path, tmp_path: Path
) -> None:
    needs("pytorch_lightning")
    of_launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in of_launchers}
    # Lightning would choose one seconds before it listens there, and another process may get it.
    env["MASTER_PORT"] = str(free_port())
    script = str(Path(__file__).with_name("lightning_ranks.py"))
    run = prefork.run([script, str(image_folder), str(tmp_path)], torch=True, timeout=800, env=env)
    assert run.returncode == 0, run.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [r["place"] for r in ranks] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert ranks[0]["job"] == ranks[1]["job"]
    # 61 samples and one that is repeated are dealt to two ranks, which have one copy.
    assert sum(r["source"] for r in ranks) == ranks[0]["total"]
    labels = [np.array(r["labels"]) for r in ranks]
    assert sorted(set(np.concatenate(labels).tolist())) == list(range(61))
    # The mean of a step is of the last one, whose batch has one sample on each rank.
    logged = {
        "mean": np.mean(labels),
        "mean_epoch": np.mean(labels),
        "mean_step": np.mean([part[-1] for part in labels]),
        "sum": np.sum(labels),
        "max": 60,
    }
    # A gradient is the mean of the labels of a batch over both ranks.
    steps = [np.mean([part[i : i + 5] for part in labels]) for i in range(0, 31, 5)]
    for r in ranks:
        assert r["backend"] == "nostall"
        assert r["logged"] == pytest.approx(logged), r["logged"]
        assert r["weight"] == pytest.approx(-0.01 * sum(steps))
    assert [r["bar"] for r in ranks] == [[7, 7], None]


@pytest.mark.parametrize("framework", ["keras", "flax"])
def test_a_framework_has_the_same_batches(data: Path, tmp_path: Path, framework: str) -> None:
    needs(framework)
    scripts = scripts_of(f"train-{framework}", tmp_path)
    command = ["-c", RUN, str(data), str(tmp_path), *scripts]
    run = prefork.run(command, torch=framework == "keras", timeout=800)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "the same batches" in run.stdout
    if framework == "keras":
        # Three epochs on the page and in the example, which trains two and one once more.
        assert re.findall(r"^(\d+/\d+) - ", run.stdout, re.M) == 9 * ["4/4"], run.stdout


READ = """
import logging
import sys
from pathlib import Path
import accelerate as accelerator
import torch
import transformers
import nostall
import nostall.errors
from nostall.plugins import accelerate, hugging_face
from nostall.plugins.torch_loader import TorchLoader

paths = sorted(Path(sys.argv[1], "images").glob("*.jpg"))
data = nostall.FileList(paths, range(len(paths)))
with nostall.DataLoader(data, 4, epochs=2, tiers=[]) as inner:
    for names in (("x", "x"), ("x", ("y", "x")), 5, {"x": 1}, ("x", 5), ("x", None)):
        try:
            TorchLoader(inner, names)
        except nostall.errors.UsageError as error:
            assert str(error).startswith("names"), error
        else:
            raise AssertionError(names)
    loader = TorchLoader(inner, names=("bytes", "labels"))
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.dataset, loader.batch_size, loader.drop_last) == (data, 4, False)
    assert len(loader) == len(loader.batch_sampler) == 4 and len(loader.sampler) == 14
    for epoch in range(2):
        read = list(loader.batch_sampler)
        assert [n for batch in read for n in batch] == list(loader.sampler)
        left, seen = [], []
        for batch in loader:
            left.append(inner.batches_left)
            seen.append(batch["labels"].tolist())
        assert (left, seen) == ([3, 2, 1, 0], read), (left, seen, read)
    loader.set_epoch(0)
    batches = iter(loader)
    first = [next(batches)["labels"].tolist() for _ in range(2)]
    state = loader.state_dict()
with nostall.DataLoader(data, 4, epochs=2, tiers=[]) as inner:
    loader = TorchLoader(inner, names=("bytes", "labels"))
    whole = list(loader.batch_sampler)
    loader.load_state_dict(state)
    assert first + [batch["labels"].tolist() for batch in loader] == whole
# As a trainer makes it that restores its callbacks.
place = hugging_face.Place()
assert place.state() == {"args": {}, "attributes": {}}
kept = {"Place": {"args": {}, "attributes": {"loader": state}}}
with nostall.DataLoader(data, 4, epochs=2, tiers=[]) as inner:
    trained = transformers.TrainerState(global_step=2, stateful_callbacks=kept)
    place.on_train_begin(None, trained, None, train_dataloader=accelerate.Loader(inner))
    assert first + [labels.tolist() for _, labels in inner] == whole
    assert place.state()["attributes"]["loader"] == inner.state_dict()
class Trained(hugging_face.FromLoader, transformers.Trainer):
    pass

def refused(told, loader):
    try:
        Trained(loader=loader, model=torch.nn.Linear(1, 1))
    except nostall.errors.UsageError as error:
        assert told in str(error), error
    else:
        raise AssertionError(told)

refused("not torch.utils.data", torch.utils.data.DataLoader([1]))
with nostall.DataLoader(data, 4, tiers=[]) as inner:
    refused("pass names=", inner)
for given in (nostall.Cached(range(16), makers=1), data):
    with nostall.DataLoader(given, 4, tiers=[]) as inner:
        skipped = accelerator.skip_first_batches(accelerate.Loader(inner), 1)
        try:
            list(skipped)
        except nostall.errors.UsageError as error:
            assert "leave skip_first_batches out" in str(error), error
        else:
            raise AssertionError("the batches were read")
with nostall.DataLoader(data, 4, tiers=[]) as inner:
    taken = transformers.TrainingArguments(sys.argv[1] + "/trained", use_cpu=True, report_to=[])
    trainer = Trained(loader=inner, names=["x", "y"], model=torch.nn.Linear(1, 1), args=taken)
    try:
        trainer.evaluate(data)
    except nostall.errors.UsageError as error:
        assert "as eval_loader=" in str(error), error
    else:
        raise AssertionError("the data set was evaluated")
logged = []
logging.getLogger("nostall").addFilter(lambda record: logged.append(record.getMessage()) or True)
for more, told in (
    ({"num_train_epochs": 2.5}, "num_train_epochs=2.5 of the Trainer is 3 epochs"),
    ({"max_steps": 9}, "max_steps=9 of the Trainer is 3 epochs, and this loader has 2: pass epochs=3"),
    ({"max_steps": 8}, ""),
):
    with nostall.DataLoader(data, 4, epochs=2, tiers=[]) as inner:
        taken = transformers.TrainingArguments(sys.argv[1] + "/t", use_cpu=True, report_to=[], **more)
        trainer = Trained(loader=inner, names=["x", "y"], model=torch.nn.Linear(1, 1), args=taken)
        try:
            trainer.get_train_dataloader()
        except nostall.errors.UsageError as error:
            assert told and told in str(error), error
        else:
            assert not told
(logged,) = logged
assert "batches of 4, and the Trainer reports its speed for 8" in logged, logged
with nostall.DataLoader(data, 4, steps=6, tiers=[]) as inner:
    assert [inner.batches_left for _ in inner] == [5, 4, 3, 2, 1, 0]
# Epochs are the loader's where its steps are one iteration; the last ends with the steps.
with nostall.DataLoader(data, 4, steps=6, tiers=[]) as inner:
    loader = accelerate.Loader(inner, names=("bytes", "labels"))
    ended = []
    for epoch in loader.epochs():
        read, seen = list(epoch.batch_sampler)[: len(epoch)], []
        for batch in epoch:
            seen.append(batch["labels"].tolist())
            ended.append(epoch.end_of_dataloader)
        assert seen == read, (seen, read)
    assert ended == [False, False, False, True, False, True] and len(loader) == 6
# The next epoch's order, also where one ended early; with steps that goes on.
with nostall.DataLoader(data, 4, epochs=3, tiers=[]) as inner:
    loader = TorchLoader(inner, names=("bytes", "labels"))
    for _ in loader:
        break
    read = list(loader.batch_sampler)
    assert [batch["labels"].tolist() for batch in loader] == read
with nostall.DataLoader(data, 4, steps=6, tiers=[]) as inner:
    loader = TorchLoader(inner, names=("bytes", "labels"))
    for _ in loader:
        break
    read = list(loader.batch_sampler)
    assert next(iter(loader))["labels"].tolist() == read[1]
"""

RESUME = """
import sys
import numpy as np
import torch
import transformers
import nostall
from nostall.plugins.hugging_face import FromLoader

class Trained(FromLoader, transformers.Trainer):
    pass

class Model(torch.nn.Linear):
    def forward(self, x, y):
        seen.append(y.tolist())
        return {"loss": super().forward(x).sum()}

def train(checkpoint, summed):
    seen.clear()
    data = nostall.Arrays({"x": np.ones((12, 1), np.float32), "y": np.arange(12)})
    arguments = transformers.TrainingArguments(
        f"{sys.argv[1]}/{summed}", max_steps=8 // summed, save_steps=1, report_to=[], use_cpu=True,
        gradient_accumulation_steps=summed, disable_tqdm=True, logging_steps=1,
    )
    with nostall.DataLoader(data, 4, steps=8, tiers=[], batch="tuple") as loader:
        trainer = Trained(loader=loader, names=("x", "y"), model=Model(1, 1), args=arguments)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step * summed == 8 and loader.batches_left == 0
        epochs = [log["epoch"] * 8 for log in trainer.state.log_history if "loss" in log]
        assert epochs == list(range(summed, 9, summed)), epochs
    return list(seen)

seen = []
for summed in (1, 2):
    whole = train(None, summed)
    # Three batches are an epoch of the loader; the Trainer counts one for all eight.
    for step in (2, 3, 4, 6, 7) if summed == 1 else (2, 3):
        rest = train(f"{sys.argv[1]}/{summed}/checkpoint-{step}", summed)
        assert rest == whole[step * summed :], (step, rest, whole)
"""


LIGHTNING = """
import sys, warnings
from pathlib import Path
import numpy as np
import pytorch_lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
import nostall
from nostall.errors import UsageError
warnings.simplefilter("ignore")

EPOCHS = 4
data = nostall.Arrays({"x": np.ones((12, 1), np.float32), "y": np.arange(12)})

class Model(pytorch_lightning.LightningModule):
    epochs = EPOCHS
    def __init__(self, validated):
        super().__init__()
        self.net, self.seen, self.validated = torch.nn.Linear(1, 1), [], validated
    def train_dataloader(self):
        return nostall.DataLoader(data, 2, epochs=self.epochs, tiers=[], batch="tuple")
    def val_dataloader(self):
        checks = nostall.DataLoader(data, 4, shuffle=False, tiers=[], batch="tuple")
        return checks if self.validated else []
    def training_step(self, batch, _):
        self.seen.append((self.current_epoch, batch[1].tolist()))
        return self.net(batch[0]).sum()
    def validation_step(self, batch, _):
        pass
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(folder, checkpoint=None, validated=False, every=None, **options):
    keep = ModelCheckpoint(
        folder, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=every, save_weights_only=False
    )
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", callbacks=[keep], logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )
    model = validated if isinstance(validated, Model) else Model(validated)
    trainer.fit(model, ckpt_path=checkpoint)
    return model.seen
"""

GOES_ON = """
whole = fit(sys.argv[1] + "/whole", max_epochs=EPOCHS)
assert [epoch for epoch, _ in whole] == [e for e in range(EPOCHS) for _ in range(6)]
assert len({str(whole[6 * e : 6 * e + 6]).replace(f"({e},", "") for e in range(EPOCHS)}) == EPOCHS
ways = {
    "plain": dict(max_epochs=EPOCHS),
    "validated": dict(max_epochs=EPOCHS, validated=True),
    "middle": dict(max_epochs=EPOCHS, every=4),
    "steps": dict(max_steps=6 * EPOCHS),
    "steps, validated": dict(max_steps=6 * EPOCHS, validated=True),
    "reloaded": dict(max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1),
    "limited": dict(max_epochs=EPOCHS, limit_train_batches=4),
}
for way, options in ways.items():
    folder = Path(sys.argv[1], way)
    mine = fit(folder, **options)
    if "limited" not in way:
        assert mine == whole, (way, mine, whole)
    kept = {int(path.stem.partition("step=")[2]): path for path in folder.glob("*.ckpt")}
    assert len(kept) >= 3, kept
    for step, path in kept.items():
        rest = fit(folder / "again", str(path), **options)
        assert rest == mine[step:], (way, path.name, rest, mine[step:])
# Loaders of evaluations have epochs of their own.
class Checked(Model):
    def __init__(self):
        super().__init__(True)
        self.checks = self.loader()
        self.checked = 0
    def loader(self, epochs=2):
        return nostall.DataLoader(
            data, 4, epochs=epochs, shuffle=False, tiers=[], batch="tuple")
    def val_dataloader(self):
        return self.checks
    def validation_step(self, batch, _):
        self.checked += 1
    test_step = predict_step = validation_step
model = Checked()
trainer = pytorch_lightning.Trainer(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, max_epochs=EPOCHS, check_val_every_n_epoch=2, num_sanity_val_steps=0)
trainer.fit(model)
assert model.checked == 2 * 3, model.checked
for evaluate in (trainer.validate, trainer.test, trainer.predict):
    model.checked = 0
    evaluate(model, model.loader(1))
    assert model.checked == 3, (evaluate, model.checked)
# Longer than it was to be, from the end of its last epoch.
last = str(*Path(sys.argv[1], "plain").glob("*=24.ckpt"))
Model.epochs = EPOCHS + 1
rest = fit(sys.argv[1] + "/longer", last, max_epochs=EPOCHS + 1)
with nostall.DataLoader(data, 2, epochs=EPOCHS + 1, tiers=[], batch="tuple") as loader:
    loader.set_epoch(EPOCHS)
    assert rest == [(EPOCHS, labels.tolist()) for _, labels in loader], rest
# The loader has too few.
for checkpoint in (None, str(*Path(sys.argv[1], "longer").glob("*=30.ckpt"))):
    try:
        fit(sys.argv[1] + "/short", checkpoint, max_epochs=EPOCHS + 2)
    except UsageError as error:
        assert f"this job of {EPOCHS + 1} epochs has" in str(error), error
    else:
        raise AssertionError(checkpoint)
"""

# Two validations in an epoch of a training. How many there were is in no checkpoint: after a resume a
# loader of evaluations begins with its first epoch.
VALIDATED = """
EPOCHS, EACH = 3, 3

def checks(epochs):
    return nostall.DataLoader(data, 4, epochs=epochs, tiers=[], batch="tuple")

with checks(8) as loader:
    orders = [[labels.tolist() for _, labels in epoch] for epoch in loader.epochs()]
with nostall.DataLoader(data, 2, epochs=EPOCHS, tiers=[], batch="tuple") as loader:
    whole = [(e, b[1].tolist()) for e, epoch in enumerate(loader.epochs()) for b in epoch]

class Checked(Model):
    def __init__(self, epochs, fresh):
        super().__init__(True)
        self.checked, self.length, self.fresh, self.loader = [], epochs, fresh, checks(epochs)
    epochs = EPOCHS
    def val_dataloader(self):
        return checks(self.length) if self.fresh else self.loader
    def validation_step(self, batch, _):
        self.checked.append(batch[1].tolist())
    test_step = predict_step = validation_step
    def in_epochs(self):
        return [self.checked[i : i + 3] for i in range(0, len(self.checked), 3)]

for fresh in (False, True):
    for counted in (True, False):
        # Checkpoints are written before or after the validation.
        for every, sanity in ((EACH, 0), (EACH, -1), (None, 0)):
            options = dict(
                max_epochs=EPOCHS, val_check_interval=EACH, every=every, num_sanity_val_steps=sanity,
                reload_dataloaders_every_n_epochs=int(fresh))
            case = (fresh, counted, every, sanity)
            folder = Path(sys.argv[1], str(case))
            # A fresh loader has the two validations of an epoch, the first of all the sanity check too.
            enough = (2 if fresh else 6) + (sanity != 0)
            model = Checked(enough if counted else None, fresh)
            assert fit(folder, validated=model, **options) == whole, case
            found = model.in_epochs()
            if counted and fresh:
                first = enough  # Lightning takes the loader of the sanity check for the first epoch
                assert found == orders[:first] + 2 * orders[:2], (case, found)
            elif counted:
                assert found == orders[:enough], (case, found)
            assert len(found) == 6 + (sanity != 0), (case, found)
            for path in folder.glob("*.ckpt"):
                step = int(path.stem.partition("step=")[2])
                left = (len(whole) - step) // EACH
                model = Checked((2 if fresh else max(1, left)) if counted else None, fresh)
                rest = fit(folder / "again", str(path), validated=model, **options)
                assert rest == whole[step:], (case, path.name, rest)
                found = model.in_epochs()
                assert len(found) == left, (case, path.name, found)
                if counted:
                    own = orders[:left % 2] + left // 2 * orders[:2] if fresh else orders[:left]
                    assert found == own, (case, path.name, found)
# The loader of a training that was evaluated before.
at_end = str(*Path(sys.argv[1], str((False, True, EACH, 0))).glob("*=12.ckpt"))
model = Checked(1, False)
trainer = pytorch_lightning.Trainer(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, max_epochs=EPOCHS, limit_val_batches=3)
train = model.train_dataloader()
trainer.validate(model, train)
model.train_dataloader = lambda: train
trainer.fit(model, ckpt_path=at_end)
assert model.seen == whole[12:], model.seen
"""


@pytest.mark.long
@pytest.mark.parametrize("script", [GOES_ON, VALIDATED], ids=["goes on", "validated"])
def test_lightning_goes_on_with_the_epochs_of_its_loaders(tmp_path: Path, script: str) -> None:
    needs("pytorch_lightning")
    run = prefork.run(["-c", LIGHTNING + script, str(tmp_path)], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr


EVALUATED = """
import logging, sys
import numpy as np
import torch
import transformers
import nostall
from nostall.errors import UsageError
from nostall.plugins import accelerate
from nostall.plugins.hugging_face import FromLoader

class Trained(FromLoader, transformers.Trainer):
    pass

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
    def forward(self, x, labels):
        return {"loss": (x.float().mean() + self.w).sum(), "logits": x}

def arguments(**options):
    return transformers.TrainingArguments(
        sys.argv[1], report_to=[], use_cpu=True, disable_tqdm=True, label_names=["labels"], **options)

numbers = np.arange(10, dtype=np.float32) ** 2
data = nostall.Arrays({"x": numbers[:, None], "labels": np.arange(10)})
def loader(source=data, batch=4, **options):
    return nostall.DataLoader(source, batch, shuffle=False, tiers=[], **options)
for size in (8, 4, 3):
    made = []
    trainer = Trained(
        loader=loader(epochs=1), eval_loader=loader(), model=Model(),
        args=arguments(per_device_eval_batch_size=size),
        compute_metrics=lambda p: made.append(p) or {})
    loss = trainer.evaluate()["eval_loss"]
    assert abs(loss - numbers.mean()) < 1e-4, (size, loss, numbers.mean())
    assert made[0].predictions[:, 0].tolist() == numbers.tolist()
    assert made[0].label_ids.tolist() == list(range(10))
    assert trainer.args.per_device_eval_batch_size == size
# As scripts for Accelerate count a loss: those of the last batch by its two samples.
with loader() as inner:
    prepared = accelerate.Loader(inner)
    losses = []
    for batch in prepared:
        mean = batch["x"].mean()
        losses.append(trainer.accelerator.gather_for_metrics(mean.repeat(4)))
        kept = trainer.accelerator.gather_for_metrics(batch["x"])
        assert len(kept) == len(batch["x"])
    assert abs(torch.cat(losses).mean().item() - numbers.mean()) < 1e-4
lists = nostall.fields.Ragged(torch.arange(3), torch.tensor([0, 1, 3]))
prepared = trainer._prepare_inputs({"lists": lists, "pair": (lists, {"of": lists})})
assert prepared["lists"]._fields == prepared["pair"][1]["of"]._fields == lists._fields
assert prepared["lists"].sample(1).tolist() == [1, 2]
named = Model()
named.config = None
try:
    Trained(
        loader=loader(), model=named, names=("x", ("labels", "shift_labels")),
        args=arguments(label_smoothing_factor=0.1))
except UsageError as error:
    assert "does not go with shift_labels" in str(error), error
else:
    raise AssertionError("shifted labels were smoothed")
told = []
class Kept(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("nostall").addHandler(Kept())
for summed, heard in ((3, 0), (2, 1)):
    trainer = Trained(
        loader=loader(epochs=3), model=Model(), args=arguments(
            gradient_accumulation_steps=summed, per_device_train_batch_size=4))
    trainer.get_train_dataloader()
    assert len(told) == heard, told
assert "3 batches is no multiple of gradient_accumulation_steps=2" in told[0], told
# Of two ranks, whose parts the Trainer gathers.
nine, eight = (dict(order=list(range(count)), shuffle=False) for count in (9, 8))
for samples, batch, options, refused in (
    (10, 4, {}, False), (9, 3, {}, True), (9, 4, {}, True), (9, 4, {"drop_last": True}, False),
    (10, 4, nine, True), (9, 4, eight, False),
):
    part = nostall.Subset(data, range(samples))
    with nostall.DataLoader(
        part, global_batch_size=batch, rank=0, world_size=2, tiers=[], **options
    ) as inner:
        try:
            Trained(loader=inner, eval_loader=inner, model=Model(), args=arguments())
        except UsageError as error:
            assert refused and "make it with batch_size=" in str(error), error
        else:
            assert not refused
"""


def test_an_evaluation_counts_each_sample_alike(tmp_path: Path) -> None:
    needs("accelerate", "transformers")
    run = prefork.run(["-c", EVALUATED, str(tmp_path)], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr


def test_programs_read_of_a_loader_what_they_read_of_torchs(data: Path) -> None:
    needs("accelerate", "transformers")
    run = prefork.run(["-c", READ, str(data)], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr


def test_the_trainer_goes_on_in_any_epoch_of_the_loaders_steps(tmp_path: Path) -> None:
    needs("accelerate", "transformers")
    run = prefork.run(["-c", RESUME, str(tmp_path)], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr


def test_names_that_do_not_fit_the_batches_are_refused() -> None:
    needs("torch")
    import torch

    from nostall.plugins.torch_loader import TorchLoader

    source = nostall.Arrays({"x": np.arange(8), "y": np.arange(8)})
    # A dictionary of a dictionary's keys would be the batch.
    refused = pytest.raises(UsageError, match=r"have the names \('x', 'y'\): leave names= out")
    with nostall.DataLoader(source, 4, tiers=[]) as named, refused:
        next(iter(TorchLoader(named, names=("input", "labels"))))
    with nostall.DataLoader(source, 4, tiers=[], batch="tuple") as pairs:
        batch = next(iter(TorchLoader(pairs, names=("x", ("y", "z")))))
        assert [*batch] == ["x", "y", "z"] and batch["y"] is batch["z"]
        for names in (("a", "b", "c"), "ab"):
            with pytest.raises(UsageError, match=r"names? for batches of 2 members"):
                next(iter(TorchLoader(pairs, names=names)))
    theirs: Any = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(UsageError, match=r"not torch\.utils\.data"):
        TorchLoader(theirs)


def test_the_guide_shows_the_scripts() -> None:
    shown = sections()
    # That of Slurm uses no framework; its page is another one.
    assert {*shown, "train-slurm"} == {path.stem for path in EXAMPLES.glob("train-*.py")}
    for name, blocks in shown.items():
        script = (EXAMPLES / f"{name}.py").read_text()
        assert blocks, name
        for block in blocks:
            # Of a whole script, all but its imports and its last lines is in the example too.
            whole = block.startswith(("import ", "from "))
            parts = block.rstrip().split("\n\n\n")[whole : -1 if whole else None]
            assert "\n\n\n".join(parts) in script, (name, block)
