"""A data set of your own behind nostall's tiers: its items are made once, and kept for all epochs.

    python examples/cached-dataset.py /data/train

The data set below decodes an image and cuts it to a square; that is the slow part, done once for
each image. What is random is done in each epoch, by `then=`.
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

import nostall


class Pictures(Dataset):
    def __init__(self, root):
        self.paths = sorted(Path(root).rglob("*.jpg"))
        self.classes = sorted({path.parent.name for path in self.paths})
        self.prepare = v2.Compose([v2.Resize(40), v2.CenterCrop(40), v2.PILToTensor()])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        path = self.paths[i]
        with Image.open(path) as image:
            return self.prepare(image.convert("RGB")), self.classes.index(path.parent.name)


augment = v2.Compose(
    [v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
)


def then(item):
    image, label = item
    return augment(image), label


def main(root):
    dataset = Pictures(root)
    loader = nostall.DataLoader(nostall.Cached(dataset, then=then), batch_size=16, epochs=3, seed=0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(len(dataset.classes)))
    optimizer = None
    for epoch in loader.epochs():
        total = 0.0
        for images, labels in epoch:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch.index}: loss {total / len(loader):.3f}")
    print(loader.stats())


if __name__ == "__main__":
    main(sys.argv[1])
