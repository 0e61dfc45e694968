"""A small model of texts with images, trained on packed chats of one or several images.

    python examples/lm-images.py FOLDER

The folder gets chats.bin and its images: token ids with one id wherever an image stands.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import nostall
from nostall import transforms as t

IMAGE, END, WORDS = 98, 99, 100  # ids
LENGTH, COST, SIZE, WIDTH, BATCH = 64, 16, 32, 32, 4


def make(folder):
    """Chats about the colours of squares: what a tokeniser and a data set of instructions give."""
    draw, ids, names = np.random.default_rng(0), [], []
    for chat in range(48):
        for _ in range(1 + chat % 2):
            colour = int(draw.integers(8))
            ids += [IMAGE, 10 + colour]
            names.append(f"{colour}.png")
        ids += [*draw.integers(20, 90, 1 + chat % 9).tolist(), END]
    for colour in range(8):
        bits = tuple(255 * (colour >> bit & 1) for bit in range(3))
        Image.new("RGB", (48, 40), bits).save(folder / f"{colour}.png")
    np.array(ids, np.uint16).tofile(folder / "chats.bin")
    return names


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.patches = torch.nn.Conv2d(3, WIDTH, SIZE // 4, SIZE // 4)  # 16 of an image
        self.mix = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids, images, places):
        x = self.words(ids)
        seen = self.patches(images).flatten(2).transpose(1, 2)
        for (unit, first, count), patches in zip(places.tolist(), seen, strict=True):
            x = torch.index_put(
                x, (torch.tensor(unit), torch.arange(first, first + count)), patches
            )
        return self.out(self.mix(x)[0])


def train(folder):
    folder = Path(folder)
    names = make(folder)
    tokens = nostall.Tokens(folder / "chats.bin", dtype="uint16", end=END)
    images = nostall.FileList(names, root=folder)
    units = nostall.Interleaved(tokens, images, LENGTH, image=IMAGE, cost=COST)
    loader = nostall.DataLoader(
        units,
        BATCH,
        epochs=12,
        seed=0,
        tiers=["ram:16MiB"],
        transforms={"images": [t.Resize((SIZE, SIZE)), t.ToTensor()]},
    )
    torch.manual_seed(0)
    model = Model()
    steps, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    with loader:
        for epoch in loader.epochs():
            for batch in epoch:
                assert (batch["ids"] == IMAGE).sum() == COST * len(batch["images"])
                found = model(batch["ids"], batch["images"], batch["image_places"])
                loss = torch.nn.functional.cross_entropy(
                    found.flatten(0, 1), batch["labels"].flatten()
                )
                steps.zero_grad()
                loss.backward()
                steps.step()
                losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = train(sys.argv[1])
    print(f"{len(found)} steps, loss {found[0]:.2f} at first, {found[-1]:.2f} at last")
