"""A data set of your own: torch's loader calls it in each epoch, nostall makes its items once.

    python examples/cached-dataset.py /tmp/data

The folder has images/. What is the same in each epoch (decode, resize, cut) stays in the data set;
what is random is done in each epoch, by `then=`.
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2

import nostall

BATCH, EPOCHS = 4, 3


class Pictures(Dataset):
    def __init__(self, root):
        self.paths = sorted(Path(root, "images").glob("*.jpg"))
        self.prepare = v2.Compose([v2.Resize(40), v2.CenterCrop(40), v2.PILToTensor()])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with Image.open(self.paths[i]) as image:
            return {"image": self.prepare(image.convert("RGB")), "label": i % 3}


augment = v2.Compose(
    [v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
)


def then(item):
    return {"image": augment(item["image"]), "label": item["label"]}


def batches_of_torch(data):
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(data, then=None):
    cached = nostall.Cached(data, then=then)
    with nostall.DataLoader(cached, BATCH, epochs=EPOCHS, seed=0) as loader:
        for epoch in loader.epochs():
            yield from epoch


def main(root):
    data = Pictures(root)
    for theirs, ours in zip(batches_of_torch(data), batches_of_nostall(data), strict=True):
        assert torch.equal(ours["image"], theirs["image"])
        assert torch.equal(ours["label"], theirs["label"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches_of_nostall(data, then):
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"cached data set: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
