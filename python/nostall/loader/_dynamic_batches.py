"""Global batches that grow while training converges [Pumma 2020, sec. 8.4.3].

    batches = nostall.DynamicBatches(loader, threshold=0.01, limit=16)
    for epoch in batches.epochs():
        for images, labels in epoch:
            ...                        # batches.factor times the loader's batch
        batches.report(accuracy)

A large batch consists of consecutive global batches of the plan. So the plan, its order and the tiers
stay the same, and a change takes effect at the same batch on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.errors import UsageError

if TYPE_CHECKING:
    from nostall.loader._loader import DataLoader, Epoch

_STATE_VERSION = 1


class DynamicBatches:
    """A loader whose batches grow.

    Args:
        loader: a `DataLoader` whose batches are pairs of arrays or tensors. Its batch is the smallest
            one.
        threshold: convergence rate below which the batch grows: the improvement of the reported value
            since the last report.
        grow: factor by which the batch grows each time.
        limit: greatest number of the loader's batches in one.
        smaller_is_better: the reported value is a loss.
        sawtooth: with the order `SubBatches`: the batch grows with each pass over the data in
            memory, to at most all of it, and is small again when new data come. Reports grow it too.
        agree: makes one number of the ranks' reports, the same on all; their mean if None.

    Attributes:
        factor: how many of the loader's batches make one, by the reports.

    Raises:
        UsageError: arguments that contradict each other, named with their value.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        threshold: float = 0.0,
        grow: int = 2,
        limit: int = 16,
        smaller_is_better: bool = False,
        sawtooth: bool = False,
        agree: Callable[[float], float] | None = None,
    ) -> None:
        if not isinstance(grow, int) or grow < 2:
            raise UsageError(f"grow must be an integer from 2 on, not {grow!r}")
        if not isinstance(limit, int) or limit < 1:
            raise UsageError(f"limit must be an integer from 1 on, not {limit!r}")
        if sawtooth and not loader.plan.reuses:
            raise UsageError("sawtooth follows the reuse of data: pass order=SubBatches(...)")
        if not loader.gives_pairs:
            raise UsageError(
                "batches of several fields, and of items of Cached, cannot be joined: DynamicBatches "
                "needs pairs of arrays, as a data set of images and labels gives them without fields= "
                "and batch="
            )
        self.loader = loader
        self.threshold, self.grow, self.limit = threshold, grow, limit
        self.smaller_is_better, self.sawtooth = smaller_is_better, sawtooth
        self.factor = 1
        self._last: float | None = None
        self._agree = agree

    def report(self, value: float) -> int:
        """Takes the quality of the model; all ranks call it. Returns the next batches' factor."""
        value = self._agreed(float(value))
        if self._last is not None:
            better = self._last - value if self.smaller_is_better else value - self._last
            # A value that is not a number does not count as progress.
            if not better >= self.threshold:
                self.factor = min(self.factor * self.grow, self.limit)
        self._last = value
        return self.factor

    def _agreed(self, value: float) -> float:
        if self._agree is not None:
            return self._agree(value)
        if self.loader.world.world_size == 1:
            return value
        from nostall.sync import reduce_gradients

        return float(reduce_gradients({"reported value": np.array([value])})["reported value"][0])

    def epochs(self) -> Iterator[tuple[int, Iterator[tuple[Any, Any]]]]:
        """(index, batches) of each epoch from the current position on."""
        for epoch in self.loader.epochs():
            yield epoch.index, self._grouped(epoch)

    def size_at(self, epoch: int, batch: int) -> int:
        """How many of the loader's batches the one that begins with `batch` has."""
        if not self.sawtooth:
            return min(self.factor, self.loader.plan.batches_in(epoch) - batch)
        plan = self.loader.plan
        whole = plan.epoch_length // plan.native.global_batch
        _, turn, place, size = plan.pass_of(epoch, batch)
        # Never across the end of a pass, so that fresh and reused data do not mix.
        grown = self.factor * int(self.grow**turn)
        return min(grown, self.limit, size - place, max(whole - batch, 1))

    def _grouped(self, epoch: Epoch) -> Iterator[tuple[Any, Any]]:
        source = iter(epoch)
        while True:
            batch = self.loader.position[1]
            parts = []
            for _ in range(self.size_at(epoch.index, batch)):
                part = next(source, None)
                if part is None:
                    break
                parts.append(part)
            if not parts:
                # The loader ends its epoch when it is asked for one batch too many.
                next(source, None)
                return
            data, labels = zip(*parts, strict=True)
            yield _joined(data), _joined(labels)

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """The loader's state and the numbers that decide the next sizes."""
        return {
            "version": _STATE_VERSION,
            "loader": self.loader.state_dict(),
            "factor": self.factor,
            "last": self._last,
            "sawtooth": self.sawtooth,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the same batches, on any number of ranks that divides the loader's batch.

        Raises:
            UsageError: the state is of another kind, or not of this loader's plan.
        """
        if state.get("version") != _STATE_VERSION or state.get("sawtooth") != self.sawtooth:
            raise UsageError("this state was not saved by DynamicBatches with the same sawtooth=")
        self.loader.load_state_dict(state["loader"])
        self.factor, self._last = int(state["factor"]), state["last"]


def _joined(parts: tuple[Any, ...]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    raise UsageError(
        f"batches of {type(parts[0]).__name__} cannot be joined: pass transforms that give arrays"
    )
