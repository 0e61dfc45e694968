"""nostall in Keras 3 on torch: the callback by which `fit` has the epochs that it counts.

    model.fit(TorchLoader(loader), epochs=90, callbacks=[Place(loader)])

`TorchLoader` is that of `nostall.plugins.torch_loader`. Importing this module needs keras, and
KERAS_BACKEND=torch in the environment before keras is imported.
"""

from __future__ import annotations

from typing import Any

import nostall
from nostall.plugins.torch_loader import TorchLoader

try:
    import keras
except ImportError as error:
    raise ImportError(
        "nostall.plugins.keras is for Keras 3 on torch: install keras, and set KERAS_BACKEND=torch "
        f"before it is imported ({error})"
    ) from error

__all__ = ["Place"]


class Place(keras.callbacks.Callback):
    """Gives each epoch of `fit` the loader's epoch of that number.

    So `initial_epoch=` and the epoch that `keras.callbacks.BackupAndRestore` goes on with are the
    loader's too, and a batch that Keras takes to build the model is not missing.

    Args:
        loader: of the training, or the `TorchLoader` around it.
    """

    def __init__(self, loader: nostall.DataLoader | TorchLoader) -> None:
        super().__init__()
        self._loader = loader

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Before Keras asks for the first batch of the epoch."""
        self._loader.set_epoch(epoch)
