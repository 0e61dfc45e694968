"""torch's own DataLoader: over its plain data set, and over nostall's tiers.

    python examples/torchs-loader.py /tmp/data

The folder has images/. Both give the same samples in the same order to the same worker processes. Over
the tiers each file is read once on the node, whatever the number of epochs, workers and ranks, and the
validation takes what the training has read.
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2

import nostall

BATCH, EPOCHS = 4, 3
prepare = v2.Compose(
    [v2.ToImage(), v2.Resize((32, 32), antialias=True), v2.ToDtype(torch.float32, scale=True)]
)


class Pictures(torch.utils.data.Dataset):
    def __init__(self, paths, labels):
        self.paths, self.labels = paths, labels

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with Image.open(self.paths[i]) as image:
            return prepare(image.convert("RGB")), self.labels[i]


def batches_of_torch(paths, labels):
    data = Pictures(paths, labels)
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(source, tiers):
    data = nostall.torch.Dataset(source, prepare, decode=True, tiers=tiers)
    sampler = nostall.torch.BatchSampler(len(data), BATCH, epochs=EPOCHS, seed=0)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def main(root):
    paths = sorted(Path(root, "images").glob("*.jpg"))
    labels = [i % 3 for i in range(len(paths))]
    source = nostall.FileList(paths, labels)
    tiers = nostall.Tiers(source, ["ram:1GiB"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pairs = zip(batches_of_torch(paths, labels), batches_of_nostall(source, tiers), strict=True)
    for theirs, (images, numbers) in pairs:
        # Two decoders of JPEG may differ by a level of 255.
        assert torch.allclose(images, theirs[0], rtol=0, atol=1.5 / 255)
        assert torch.equal(numbers, theirs[1])
        loss = torch.nn.functional.cross_entropy(model(images), numbers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    part = nostall.Subset(source, [1, 3])
    validation = nostall.torch.Dataset(part, prepare, decode=True, tiers=tiers)
    assert [label for _, label in DataLoader(validation, None)] == [1, 0]
    assert tiers.taken == {"ram": 2, "file": 0, "source": 0}
    print(f"torch's loader: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
