"""Keras 3 on torch: fit over a loader, epoch by epoch, and once more from the middle of the training.

    python examples/make-data.py /tmp/data
    python examples/train-keras.py /tmp/data

The folder has images/.
"""

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras

import nostall
from nostall import transforms as t
from nostall.plugins.torch_loader import TorchLoader

EPOCHS, BATCH = 3, 4


class Seen(keras.layers.Layer):
    """Passes images on, and keeps their means."""

    def __init__(self):
        super().__init__()
        self.means = []

    def call(self, images, training=False):
        if training and images.device.type != "meta":
            self.means.append(images.mean().item())
        return images


def fit(root, epochs, weights=None, first=0):
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    steps = [t.Resize((32, 32)), t.RandomHorizontalFlip(), t.ToTensor()]
    loader = nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0, transforms=steps)
    check = nostall.DataLoader(data, BATCH, shuffle=False, transforms=steps)
    keras.utils.set_random_seed(0)
    seen = Seen()
    layers = [keras.Input((3, 32, 32)), seen, keras.layers.Flatten(), keras.layers.Dense(14)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss, run_eagerly=True)
    if weights is not None:
        model.set_weights(weights)
    places_epoch = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: loader.set_epoch(epoch)
    )
    history = model.fit(
        TorchLoader(loader),
        validation_data=TorchLoader(check),
        epochs=epochs,
        initial_epoch=first,
        callbacks=[places_epoch],
        verbose=0,
    )
    return seen.means, history.history["loss"], model.get_weights()


def main(root):
    means, losses, _ = fit(root, EPOCHS)
    head, _, weights = fit(root, 2)
    rest, ends, _ = fit(root, EPOCHS, weights, first=2)
    assert len(means) == EPOCHS * 4  # 14 samples in batches of four
    assert head + rest == means, (head, rest, means)
    assert ends == losses[2:], (ends, losses)
    print(f"keras: loss {losses[-1]:.3f}, the same batches", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
