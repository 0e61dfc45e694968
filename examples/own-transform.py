"""A transform of your own: a template to copy.

    python examples/own-transform.py FOLDER

FOLDER has a folder of images for each class. The transform of this example cuts a random square, and
adds noise; its draws depend on the seed, the epoch and the sample alone, so they repeat exactly.
"""

import sys
from dataclasses import dataclass

import numpy as np

import nostall


@dataclass(frozen=True)
class NoisyCut:
    """A square of `size` pixels, channels first, with noise of that many levels; frozen: no state."""

    size: int
    noise: float = 5.0

    def __call__(self, image, *, context):
        draw = context.numpy()
        top, left = (int(draw.integers(side - self.size + 1)) for side in image.shape[:2])
        cut = image[top : top + self.size, left : left + self.size].astype(np.float32)
        return (cut + draw.normal(0, self.noise, cut.shape)).transpose(2, 0, 1).astype(np.float32)


def main(folder):
    step = NoisyCut(24)
    images = [np.full((32, 40, 3), level, np.uint8) for level in (0, 99)]
    nostall.testing.check_transform(step, images, dtype="float32", shape=(3, 24, 24))
    loader = nostall.DataLoader(
        nostall.ImageFolder(folder),
        16,
        epochs=1,
        seed=0,
        transforms=step,
        decode=True,
        output="numpy",
    )
    for images, labels in loader:
        print(images.shape, labels.shape)


if __name__ == "__main__":
    main(sys.argv[1])
