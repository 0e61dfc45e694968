"""Keras 3 on torch: fit over a loader, stopped between two epochs, and continued from its backup.

    python examples/make-data.py /tmp/data
    python examples/train-keras.py /tmp/data

The folder has images/.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras

import nostall
from nostall import transforms as t
from nostall.plugins.keras import Place
from nostall.plugins.torch_loader import TorchLoader

EPOCHS, BATCH = 3, 4


def fit(root, folder, *callbacks):
    """Goes on from the backup in `folder`."""
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    steps = [t.Resize((32, 32)), t.RandomHorizontalFlip(), t.ToTensor()]
    loader = nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0, transforms=steps, layout="hwc")
    plain = [t.Resize((32, 32)), t.ToTensor()]
    check = nostall.DataLoader(data, BATCH, shuffle=False, transforms=plain, layout="hwc")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(14)]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    backup = keras.callbacks.BackupAndRestore(folder)
    return model.fit(
        TorchLoader(loader),
        validation_data=TorchLoader(check),
        epochs=EPOCHS,
        callbacks=[Place(loader), backup, *callbacks],
        verbose=2,
    )


class Seen(keras.callbacks.Callback):
    """Keeps the loss after each batch; stops the training where an epoch begins."""

    def __init__(self, stop=None):
        super().__init__()
        self.losses, self.stop = [], stop

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.stop:
            raise InterruptedError

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def main(root):
    whole, head, rest = Seen(), Seen(stop=2), Seen()
    with tempfile.TemporaryDirectory() as folder:
        fit(root, f"{folder}/whole", whole)
        try:
            fit(root, f"{folder}/stopped", head)
        except InterruptedError:
            fit(root, f"{folder}/stopped", rest)
    assert len(whole.losses) == EPOCHS * 4  # 14 samples in batches of four
    assert len(rest.losses) == 4
    assert head.losses + rest.losses == whole.losses, (head.losses, rest.losses, whole.losses)
    print(f"keras: loss {whole.losses[-1]:.3f}, the same batches", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
