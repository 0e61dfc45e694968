"""Segmentation: images and masks, by torch's loader and by nostall; the batches are the same.

    python examples/segmentation.py /tmp/data

The folder has images/ (.jpg) and masks/ (.png, one label for each pixel), whose files have equal names.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import tv_tensors
from torchvision.transforms import v2

import nostall
from nostall import fields
from nostall import transforms as t

SIZE, LABELS, BATCH, EPOCHS = 32, 21, 4, 2


class Masked(Dataset):
    def __init__(self, root):
        self.images = sorted(Path(root, "images").glob("*.jpg"))
        self.masks = Path(root, "masks")
        self.steps = v2.Compose([v2.Resize((SIZE, SIZE)), v2.ToImage()])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = Image.open(self.images[i]).convert("RGB")
        with Image.open(self.masks / f"{self.images[i].stem}.png") as file:
            mask = tv_tensors.Mask(np.array(file))
        image, mask = self.steps(image, mask)
        return v2.functional.to_dtype(image, torch.float32, scale=True), mask.long()


def batches_of_torch(root):
    data = Masked(root)
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(root):
    data = nostall.Files(
        {"image": "images", "mask": "masks"}, schema={"mask": fields.Mask(dtype="int64")}, root=root
    )
    steps = [t.Resize((SIZE, SIZE)), t.ToTensor()]
    with nostall.DataLoader(
        data, BATCH, epochs=EPOCHS, seed=0, transforms=steps, batch="tuple"
    ) as loader:
        for epoch in loader.epochs():
            yield from epoch


def main(root):
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, LABELS, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = zip(batches_of_torch(root), batches_of_nostall(root), strict=True)
    for (their_images, their_masks), (images, masks) in pairs:
        assert torch.equal(masks, their_masks)
        assert (images - their_images).abs().max() < 1.5 / 255  # one level
        loss = torch.nn.functional.cross_entropy(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"segmentation: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
