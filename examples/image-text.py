"""Images and their captions, from the rows of a table, by torch's loader and by nostall.

    python examples/image-text.py /tmp/data

The folder has captions.csv with the columns path and caption, and the images that it names.
"""

import csv
import sys
import zlib
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2

import nostall
from nostall import transforms as t

SIZE, WORDS, WIDTH, BATCH, EPOCHS = 32, 256, 16, 4, 2


class Captioned(Dataset):
    def __init__(self, root):
        self.root = Path(root)
        with Path(root, "captions.csv").open(newline="") as file:
            self.rows = list(csv.DictReader(file))
        self.steps = v2.Compose(
            [v2.Resize((SIZE, SIZE)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        image = Image.open(self.root / self.rows[i]["path"]).convert("RGB")
        return self.steps(image), self.rows[i]["caption"]


def batches_of_torch(root):
    data = Captioned(root)
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(root):
    data = nostall.Manifest(f"{root}/captions.csv", files={"image": "path"}, columns=["caption"])
    steps = [t.Resize((SIZE, SIZE)), t.ToTensor()]
    with nostall.DataLoader(
        data, BATCH, epochs=EPOCHS, seed=0, transforms=steps, batch="tuple"
    ) as loader:
        for epoch in loader.epochs():
            yield from epoch


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(WORDS, WIDTH)
        self.pixels = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, WIDTH)
        )

    def forward(self, images, captions):
        tokens = [[zlib.crc32(word.encode()) % WORDS for word in c.split()] for c in captions]
        offsets = torch.tensor([0, *map(len, tokens)]).cumsum(0)[:-1]
        flat = torch.tensor([token for text in tokens for token in text])
        return self.pixels(images) @ self.words(flat, offsets).T


def main(root):
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pairs = zip(batches_of_torch(root), batches_of_nostall(root), strict=True)
    for (their_images, their_captions), (images, captions) in pairs:
        assert list(captions) == list(their_captions)
        assert (images - their_images).abs().max() < 1.5 / 255  # one level
        loss = torch.nn.functional.cross_entropy(model(images, captions), torch.arange(len(images)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"image-text: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
