"""Segmentation: an image, its mask and the boxes of its objects, moved as one by random transforms.

    python examples/segmentation.py /data/train

The folder has images/ (.jpg or .png), masks/ (.png, one label for each pixel) and boxes/ (.npy,
float32, one row for each object), whose files have equal names.
"""

import sys

import torch

import nostall
from nostall import fields
from nostall import transforms as t

LABELS = 21


def main(root):
    data = nostall.Files(
        {"image": "images", "mask": "masks", "boxes": "boxes"},
        schema={"mask": fields.Mask(dtype="int64"), "boxes": fields.Boxes(format="xyxy")},
        root=root,
    )
    loader = nostall.DataLoader(
        data,
        batch_size=4,
        epochs=3,
        seed=0,
        transforms=[
            t.RandomResizedCrop(32, scale=(0.5, 1.0)),
            t.RandomHorizontalFlip(),
            t.SanitizeBoundingBoxes(min_size=1),  # boxes that the crop left nothing of
            t.ToTensor(),
        ],
    )
    model = torch.nn.Conv2d(3, LABELS, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in loader.epochs():
        total = objects = 0.0
        for batch in epoch:
            # image (n, 3, 32, 32) float32; mask (n, 32, 32) int64; boxes.values (boxes of all, 4).
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["mask"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            objects += len(batch["boxes"].values)
        print(f"epoch {epoch.index}: loss {total / len(loader):.3f}, {objects:.0f} objects")
    print(loader.stats())


if __name__ == "__main__":
    main(sys.argv[1])
