"""Detection: images with the boxes and classes of a COCO file, by torch's loader and by nostall.

    python examples/detection.py /tmp/data

The folder has images/ and instances.json, in COCO's format.
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import tv_tensors
from torchvision.transforms import v2

import nostall
from nostall import transforms as t

SIZE, BATCH, EPOCHS = 32, 4, 2


class Objects(Dataset):
    def __init__(self, root):
        self.folder = Path(root, "images")
        described = json.loads(Path(root, "instances.json").read_text())
        self.images = sorted(described["images"], key=lambda image: image["id"])
        self.found = {image["id"]: [] for image in self.images}
        for one in described["annotations"]:
            self.found[one["image_id"]].append(one)
        self.steps = v2.Compose([v2.Resize((SIZE, SIZE)), v2.ToImage()])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = Image.open(self.folder / self.images[i]["file_name"]).convert("RGB")
        found = self.found[self.images[i]["id"]]
        boxes = tv_tensors.BoundingBoxes(
            torch.tensor([one["bbox"] for one in found], dtype=torch.float32).reshape(-1, 4),
            format="XYWH",
            canvas_size=(image.height, image.width),
        )
        image, boxes = self.steps(image, boxes)
        labels = torch.tensor([one["category_id"] for one in found], dtype=torch.int64)
        return v2.functional.to_dtype(image, torch.float32, scale=True), boxes, labels


def collate(samples):
    images, boxes, labels = zip(*samples, strict=True)
    return torch.stack(images), boxes, labels


def batches_of_torch(root):
    data = Objects(root)
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, collate_fn=collate)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(root):
    data = nostall.COCO(f"{root}/images", f"{root}/instances.json")
    with nostall.DataLoader(
        data,
        BATCH,
        epochs=EPOCHS,
        seed=0,
        transforms=[t.Resize((SIZE, SIZE)), t.ToTensor()],
        fields=["image", "boxes", "labels"],
        batch="tuple",
    ) as loader:
        for epoch in loader.epochs():
            yield from epoch


def main(root):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    pairs = zip(batches_of_torch(root), batches_of_nostall(root), strict=True)
    for (their_images, their_boxes, their_labels), (images, boxes, labels) in pairs:
        assert (images - their_images).abs().max() < 1.5 / 255  # one level
        for i in range(len(images)):  # each sample has its own number of objects
            assert torch.equal(boxes.sample(i), their_boxes[i])
            assert torch.equal(labels.sample(i), their_labels[i])
        # One box for each image that has objects: the mean of theirs.
        some = boxes.offsets.diff() > 0
        if not some.any():
            continue
        means = [boxes.sample(i).mean(0) for i in range(len(images)) if some[i]]
        loss = (model(images[some]) - torch.stack(means) / SIZE).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"detection: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
