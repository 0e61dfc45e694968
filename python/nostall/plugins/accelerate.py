"""nostall in Hugging Face Accelerate: the loader that `Accelerator.prepare` takes.

    model, optimizer, loader = accelerator.prepare(
        model, optimizer, nostall.plugins.accelerate.Loader(loader)
    )

`accumulate` finds the end of the loader, and `save_state` and `load_state` keep its position. Importing
this module needs accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import nostall
from nostall.plugins.torch_loader import Names, TorchLoader

try:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState
except ImportError as error:
    raise ImportError(
        f"nostall.plugins.accelerate is for Accelerate: install accelerate ({error})"
    ) from error

__all__ = ["Loader"]


class Loader(DataLoaderStateMixin, TorchLoader):
    """A loader that is already this rank's: Accelerate neither shards its batches nor moves them.

    `gather_for_metrics` keeps the samples that the order repeats so that all ranks have as many; pass
    ``drop_last=True``, or a number of samples that divides among the ranks, where that matters.
    """

    # What Accelerate looks for in a loader that it has prepared.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(self, loader: nostall.DataLoader, names: Names | None = None) -> None:
        super().__init__(loader, names)
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        self.remainder = 0
        try:
            for batch in super().__iter__():
                self.end_of_dataloader = self._left == 0
                if self.end_of_dataloader:
                    self.remainder = self._partial()
                yield batch
        finally:
            self.end()

    def _partial(self) -> int:
        """The samples of all ranks in the batch that was handed out; 0 if it is whole.

        `gather_for_metrics` cuts what is gathered for the last batch to so many rows: a loss that is
        repeated for a whole batch.
        """
        loader = self.loader
        rows = loader._samples_taken
        # Parts of a global batch may differ, and each rank knows its own.
        even = loader._options.global_batch_size is None
        return rows * loader.world.world_size if even and rows < loader.batch_size else 0
