"""nostall in Hugging Face's Trainer: its batches, and its position in the trainer's checkpoints.

    class ImageTrainer(nostall.plugins.hugging_face.FromLoader, transformers.Trainer):
        pass

    trainer = ImageTrainer(loader=loader, names=("pixel_values", "labels"), model=model, args=arguments)

Importing this module needs transformers and accelerate.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import nostall
from nostall.errors import UsageError
from nostall.plugins.accelerate import Loader
from nostall.plugins.torch_loader import Names, TorchLoader

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError as error:
    raise ImportError(
        f"nostall.plugins.hugging_face is for the Trainer: install transformers ({error})"
    ) from error

__all__ = ["FromLoader", "Place"]

_log = logging.getLogger("nostall")


class Place(TrainerCallback, ExportableState):
    """Keeps the position of `loader` in trainer_state.json, and goes on from it.

    Without `loader` it is that of the training which begins: a trainer that restores its callbacks
    makes them anew.
    """

    def __init__(self, loader: nostall.DataLoader | None = None) -> None:
        self._loader = loader
        self._resumed = False  # in the middle of the epoch that is trained

    def state(self) -> dict[str, Any]:
        """What the trainer writes into each checkpoint."""
        position = {} if self._loader is None else {"loader": self._loader.state_dict()}
        return {"args": {}, "attributes": position}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Loads the state of the checkpoint that the trainer has just read, if it has read one."""
        if self._loader is None:
            self._loader = kwargs["train_dataloader"].loader
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and kept:
            self._loader.load_state_dict(kept["attributes"]["loader"])
            self._resumed = 0 < self._loader.batches_left < len(self._loader)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Has the trainer log how far a resumed epoch is: it leaves out what came before."""
        loader = getattr(kwargs["train_dataloader"], "loader", None)
        if self._resumed and loader is self._loader and loader is not None:
            trained = 1 - loader.batches_left / len(loader)
            state.epoch = math.ceil(state.epoch) - 1 + trained

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on the trainer counts all batches of an epoch."""
        self._resumed = False


class _OfTrainer(Loader):
    """For the Trainer, which sets each of its epochs: with `steps=` the first is the whole job."""

    def set_epoch(self, epoch: int) -> None:
        if self.loader._options.steps is None:
            super().set_epoch(epoch)


def _keys(names: Names | None) -> list[str]:
    """All of them, of whichever member."""
    return [key for name in names or () for key in ([name] if isinstance(name, str) else name)]


def _uneven(loader: nostall.DataLoader) -> bool:
    """Whether ranks have parts of other sizes in a batch."""
    batch, ranks = loader._options.global_batch_size, loader.world.world_size
    if batch is None:
        return False
    last = 0 if loader.drop_last else loader.plan.epoch_length % batch
    return bool(batch % ranks or last % ranks)


class FromLoader:
    """A base class beside `transformers.Trainer`, named before it.

    Args:
        loader: of the training.
        eval_loader: of evaluations; without it they are the trainer's own.
        names: the keys of the model's arguments, for loaders whose batches are pairs or tuples. Labels
            that are shifted already, as those of units of tokens, are ``("labels", "shift_labels")``.
        log_loader: what the loader did meanwhile (`nostall.metrics.Interval`) is logged with the loss,
            and so goes to all that `report_to` names.
        options: those of the trainer.

    Raises:
        UsageError: a loader is another one's; the batches are pairs, which `compute_loss` of
            transformers cannot take, and no names are given; `eval_loader` has batches that do not
            divide among the ranks; labels that are shifted already would be smoothed.
    """

    def __init__(
        self,
        *,
        loader: nostall.DataLoader,
        eval_loader: nostall.DataLoader | None = None,
        names: Names | None = None,
        log_loader: bool = False,
        **options: Any,
    ) -> None:
        # A loss of the user's own may take pairs.
        loss = getattr(type(self), "compute_loss", None)
        by_name = getattr(loss, "__module__", "").startswith("transformers.")
        for given in (loader, *([] if eval_loader is None else [eval_loader])):
            if TorchLoader(given, names).loader.gives_pairs and names is None and by_name:
                raise UsageError(
                    "batches of this loader are pairs, and the Trainer passes arguments of forward by "
                    'name: pass names=, for example ("pixel_values", "labels")'
                )
        if eval_loader is not None and _uneven(eval_loader):
            raise UsageError(
                f"with global_batch_size={eval_loader._options.global_batch_size} the ranks have other "
                "numbers of samples in a batch of eval_loader, and the Trainer gathers equal ones: "
                "make it with batch_size="
            )
        self._loader, self._eval_loader, self._names = loader, eval_loader, names
        self._evaluated: nostall.DataLoader | None = None
        self._interval = nostall.metrics.Interval(loader) if log_loader else None
        if eval_loader is not None:
            options.setdefault("eval_dataset", eval_loader.dataset)  # the trainer asks for one
        super().__init__(**options)
        trainer: Any = self
        if trainer.args.label_smoothing_factor and "shift_labels" in _keys(names):
            raise UsageError(
                f"label_smoothing_factor={trainer.args.label_smoothing_factor} does not go with "
                "shift_labels, for the Trainer would shift the labels again: smooth them in a "
                "compute_loss of your own"
            )
        # The loader goes to its place by itself: the trainer need not read what was trained.
        trainer.args.ignore_data_skip = True
        trainer.add_callback(Place(loader))

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Logs as the trainer does; with `log_loader` the loader's numbers beside the loss."""
        if self._interval is not None and "loss" in logs:
            logs = {**logs, **self._interval()}
        trainer: Any = super()
        trainer.log(logs, *args, **options)

    def get_train_dataloader(self) -> Any:
        """The loader of the training.

        Raises:
            UsageError: it has fewer epochs than the trainer is to train.
        """
        trainer: Any = self
        arguments, options = trainer.args, self._loader._options
        summed, batches = arguments.gradient_accumulation_steps, len(self._loader)
        warns = self._loader.world.rank == 0
        if options.steps is None:
            self._refuse_more_epochs(trainer, batches)
        size = arguments.train_batch_size  # of a process
        if warns and options.global_batch_size is None and size != self._loader.batch_size:
            _log.warning(
                "the loader gives batches of %s, and the Trainer reports its speed for %s: pass "
                "per_device_train_batch_size=%s",
                self._loader.batch_size, size, self._loader.batch_size // max(1, arguments.n_gpu),
            )  # fmt: skip
        if options.steps is None and batches % summed and warns:
            _log.warning(
                "an epoch of %s batches is no multiple of gradient_accumulation_steps=%s: after a "
                "resume in the middle of an epoch the Trainer adds its last gradients to those of the "
                "next one, and counts other updates",
                batches, summed,
            )  # fmt: skip
        return trainer.accelerator.prepare(_OfTrainer(self._loader, self._names))

    def _refuse_more_epochs(self, trainer: Any, batches: int) -> None:
        """Raises UsageError where the trainer is to train more epochs, of so many `batches`, than the
        loader has."""
        arguments, planned = trainer.args, self._loader.epochs_total
        epochs, given = arguments.num_train_epochs, "num_train_epochs"
        if arguments.max_steps > 0:
            # Sequence parallelism makes several steps of a batch.
            parts = getattr(trainer, "get_sp_size", lambda: 1)()
            updates = max(1, math.ceil(batches * parts / arguments.gradient_accumulation_steps))
            epochs, given = arguments.max_steps / updates, "max_steps"
        if planned is not None and (needed := math.ceil(epochs)) > planned:
            raise UsageError(
                f"{given}={getattr(arguments, given)} of the Trainer is {needed} epochs, and this "
                f"loader has {planned}: pass epochs={needed} to DataLoader, or leave it out"
            )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of evaluations, unless one of other data is asked for.

        Raises:
            UsageError: the other data are a source of nostall.
        """
        loader = self._eval_loader
        if isinstance(eval_dataset, nostall.Source) and (
            loader is None or eval_dataset is not loader.dataset
        ):
            raise UsageError(
                f"evaluate() got {type(eval_dataset).__name__}, a data set of nostall, which the "
                "Trainer cannot read: pass a DataLoader of it to the trainer as eval_loader=, and call "
                "evaluate() without a data set"
            )
        if loader is None or eval_dataset not in (None, loader.dataset):
            trainer: Any = super()
            return trainer.get_eval_dataloader(eval_dataset)
        return Loader(loader, self._names)

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """As the trainer's; in its loss each sample of an `eval_loader` counts alike, in processes of
        one GPU."""
        me: Any = self
        trainer: Any = super()
        size = me.args.per_device_eval_batch_size
        if isinstance(dataloader, Loader):
            self._evaluated = dataloader.loader
            me.args.per_device_eval_batch_size = 1  # how often a loss counts: see prediction_step
        try:
            return trainer.evaluation_loop(dataloader, *args, **options)
        finally:
            self._evaluated = None
            me.args.per_device_eval_batch_size = size

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """As the trainer's; the loss once for each sample of an `eval_loader`."""
        trainer: Any = super()
        loss, *others = trainer.prediction_step(*args, **options)
        if self._evaluated is not None and loss is not None:
            loss = loss.repeat(self._evaluated._samples_taken)
        return loss, *others

    def _prepare_input(self, data: Any) -> Any:
        """Moves a batch; the trainer's makes no named tuples, such as `Ragged` and `Padded`."""
        trainer: Any = super()
        if hasattr(data, "_fields"):
            return type(data)(*map(self._prepare_input, data))
        return trainer._prepare_input(data)
