"""nostall in Lightning's loggers: what the training's loader did, beside the numbers of the model.

    trainer = pytorch_lightning.Trainer(callbacks=[nostall.plugins.lightning.LoaderMonitor()], ...)

Importing this module needs pytorch_lightning or lightning.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import nostall
from nostall.errors import UsageError

if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    # Of the two names of Lightning the one that the program uses: the other takes a second more.
    name = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    try:
        Callback = import_module(name).Callback
    except ImportError as error:
        raise ImportError(
            f"nostall.plugins.lightning is for Lightning: install pytorch_lightning ({error})"
        ) from error

__all__ = ["LoaderMonitor"]


class LoaderMonitor(Callback):
    """Gives `nostall.metrics.Interval` to all loggers of the trainer, every `log_every_n_steps`.

    The numbers are those of the rank that logs, which is the first, and of one epoch: what came after
    the last ones of an epoch is not logged.

    Args:
        loader: the one to look at; that of the training if None.
    """

    def __init__(self, loader: nostall.DataLoader | None = None) -> None:
        self._given = loader

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins anew: another training counts its steps from 0 on."""
        self._logged = 0
        # Lightning tells of no start of the epoch in whose middle a training goes on.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Finds the loader, which may be another one in each epoch.

        Raises:
            UsageError: the training has none of nostall, or several.
        """
        found = self._given if self._given is not None else trainer.train_dataloader
        if not isinstance(found, nostall.DataLoader):
            raise UsageError(
                f"the training's loader is {type(found).__name__}, not nostall.DataLoader: pass the "
                "one to look at, LoaderMonitor(loader)"
            )
        # Anew in each epoch: Lightning leaves the loader's running while it validates.
        self._interval = nostall.metrics.Interval(found)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Logs, when Lightning logs as well."""
        # As Lightning counts for its own: batches of one step, and steps of one batch, are one.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        every = trainer.log_every_n_steps
        if step == self._logged or not every or step % every:
            return
        self._logged = step
        numbers = self._interval()
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step - 1)
