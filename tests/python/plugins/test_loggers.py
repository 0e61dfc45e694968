"""What a loader did reaches TensorBoard, W&B and MLflow, by Lightning and by the Trainer."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import prefork
import pytest

# W&B is offline, and MLflow has a folder: neither needs a server.
LOGS = """
import sys
from pathlib import Path
import mlflow
import pytorch_lightning
import torch
import transformers
import wandb
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
import nostall
from nostall.errors import UsageError
from nostall.plugins.hugging_face import FromLoader
from nostall.plugins.lightning import LoaderMonitor

data, folder = sys.argv[1], Path(sys.argv[2])
EVERY = 3


def make():
    to_8 = [nostall.transforms.Resize((8, 8)), nostall.transforms.ToTensor()]
    return nostall.DataLoader(
        nostall.ImageFolder(data, index=False), 4, epochs=2, tiers=[], transforms=to_8
    )


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8))

    def forward(self, pixel_values, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.net(pixel_values), labels)}


class Model(pytorch_lightning.LightningModule, Net):
    def training_step(self, batch, _):
        loss = self(*batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def check(numbers):
    assert set(numbers["nostall/share_from/source"]) == {1}, numbers
    assert set(numbers["nostall/share_from/ram"]) == {0}, numbers
    assert all(0 <= share <= 1 for share in numbers["nostall/stall_fraction"]), numbers
    assert all(rate > 0 for rate in numbers["nostall/samples_per_second"]), numbers


def of_tensorboard(where, prefix=""):
    events = EventAccumulator(str(where)).Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith(f"{prefix}nostall/")]
    (steps,) = {tuple(event.step for event in events.Scalars(name)) for name in names}
    check({name.removeprefix(prefix): [e.value for e in events.Scalars(name)] for name in names})
    return list(steps)


def of_mlflow(run):
    client = mlflow.MlflowClient()
    names = [name for name in client.get_run(run).data.metrics if name.startswith("nostall/")]
    found = {name: client.get_metric_history(run, name) for name in names}
    check({name: [metric.value for metric in history] for name, history in found.items()})
    (steps,) = {tuple(metric.step for metric in history) for history in found.values()}
    return list(steps)


# By itself.
with make() as loader:
    interval = nostall.metrics.Interval(loader)
    assert interval() == nostall.metrics.scalars(loader.stats()) == {}
    each = [interval() for _ in loader]
    check({name: [numbers[name] for numbers in each] for name in each[0]})
    assert interval() == {}
    stats = loader.stats()
    whole = nostall.metrics.scalars(stats)
    assert whole["nostall/stall_fraction"] == stats.epochs[0].stall_fraction
    stalled = sum(numbers["nostall/stall_seconds"] for numbers in each)
    assert abs(stalled - whole["nostall/stall_seconds"]) < 1e-6
    with SummaryWriter(folder / "plain") as writer:
        nostall.metrics.to_tensorboard(writer, stats, 7)
events = EventAccumulator(str(folder / "plain")).Reload()
assert set(events.Tags()["scalars"]) == set(whole)
for name, value in whole.items():
    (event,) = events.Scalars(name)
    assert event.step == 7 and abs(event.value - value) <= 1e-6 * value, name

# Lightning's loggers.
mlflow.set_tracking_uri(f"file://{folder}/mlflow")
trained = {"max_epochs": 2, "log_every_n_steps": EVERY, "accelerator": "cpu"}
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
to_mlflow = MLFlowLogger(tracking_uri=f"file://{folder}/mlflow")
to = [TensorBoardLogger(folder, "lightning", ""), WandbLogger(save_dir=folder, offline=True), to_mlflow]
with make() as loader:
    steps = 2 * len(loader)
    trainer = pytorch_lightning.Trainer(callbacks=[LoaderMonitor()], logger=to, **trained, **quiet)
    trainer.fit(Model(), loader)
wandb.finish()
expected = [step - 1 for step in range(EVERY, steps + 1, EVERY)]
assert of_tensorboard(folder / "lightning") == of_mlflow(to_mlflow.run_id) == expected
# Beside Lightning's own numbers of these steps.
history = mlflow.MlflowClient().get_metric_history(to_mlflow.run_id, "loss")
assert [metric.step for metric in history] == expected
# A monitor that has seen another training logs all steps of the next one.
monitor = LoaderMonitor()
for name in ("one", "next"):
    logger = TensorBoardLogger(folder, f"lightning-{name}", "")
    with make() as loader:
        once = {**trained, "max_steps": EVERY}
        trainer = pytorch_lightning.Trainer(callbacks=[monitor], logger=[logger], **once, **quiet)
        trainer.fit(Model(), loader)
    assert of_tensorboard(folder / f"lightning-{name}") == [EVERY - 1], name
# It logs as well where a training goes on in the middle of an epoch.
with make() as loader:
    keep = ModelCheckpoint(folder, "middle", every_n_train_steps=EVERY - 1)
    once = {**trained, **quiet, "max_steps": EVERY - 1, "enable_checkpointing": True}
    pytorch_lightning.Trainer(callbacks=[keep], logger=False, **once).fit(Model(), loader)
with make() as loader:
    logger = TensorBoardLogger(folder, "lightning-on", "")
    more = {"callbacks": [LoaderMonitor()], "logger": [logger]}
    trainer = pytorch_lightning.Trainer(**more, **trained, **quiet)
    trainer.fit(Model(), loader, ckpt_path=folder / "middle.ckpt")
assert of_tensorboard(folder / "lightning-on") == expected
try:
    trainer = pytorch_lightning.Trainer(callbacks=[LoaderMonitor()], logger=False, **trained, **quiet)
    trainer.fit(Model(), [(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))])
except UsageError as error:
    assert "loader is list, not nostall.DataLoader: pass the one" in str(error), error
else:
    raise AssertionError("no error")


class Trainer(FromLoader, transformers.Trainer):
    pass


# What the Trainer reports to.
with make() as loader:
    arguments = transformers.TrainingArguments(
        str(folder / "trainer"),
        num_train_epochs=2,
        logging_steps=EVERY,
        use_cpu=True,
        disable_tqdm=True,
        report_to=["tensorboard", "wandb", "mlflow"],
        save_strategy="no",
    )
    names = ("pixel_values", "labels")
    trainer = Trainer(loader=loader, names=names, model=Net(), args=arguments, log_loader=True)
    trainer.train()
    run = mlflow.last_active_run().info.run_id
wandb.finish()
logged = [e["step"] for e in trainer.state.log_history if "nostall/stall_fraction" in e]
assert logged == [e["step"] for e in trainer.state.log_history if "loss" in e]
assert logged == list(range(EVERY, steps + 1, EVERY)), logged
assert of_mlflow(run) == logged
assert of_tensorboard(next((folder / "trainer").rglob("events.*")).parent, "train/") == logged
"""


@pytest.mark.long
def test_loggers_get_what_the_loader_did(image_folder: Path, tmp_path: Path) -> None:
    for package in ("pytorch_lightning", "transformers", "tensorboard", "wandb", "mlflow"):
        # Not imported here: that takes seconds.
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    run = prefork.run(
        ["-c", LOGS, str(image_folder), str(tmp_path)],
        torch=True,
        timeout=800,
        cwd=tmp_path,
        env={
            **os.environ,
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(tmp_path),
            "WANDB_SILENT": "true",
            "WANDB__SERVICE_WAIT": "300",  # seconds until its process has started
            "MLFLOW_ALLOW_FILE_STORE": "true",
            # Two threads of its file store that make one folder lose what one of them logs.
            "MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE": "1",
            "TENSORBOARD_LOGGING_DIR": str(tmp_path / "trainer"),
        },
    )
    assert run.returncode == 0, run.stderr[-6000:]
    # W&B's own process has written its files by its end; names of metrics are plain in them.
    kept = [p.read_bytes() for p in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")]
    assert [b"nostall/stall_fraction" in run for run in kept] == [True, True]
    # Names of runs have seconds: nothing else tells which was the first.
    assert sorted(b"train/nostall/stall_fraction" in run for run in kept) == [False, True]
