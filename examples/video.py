"""Clips of videos and their classes, from the rows of a table, by torch's loader and by nostall.

    python examples/video.py /tmp/data

The folder has videos.csv with the columns path and label, and the video files that it names. Needs the
package av (pip install 'nostall[video]', where nostall is installed: it is not on PyPI).
"""

import csv
import io
import itertools
import sys
from pathlib import Path

import av
import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import nostall
from nostall import fields

FRAMES, STEP, BEGIN, SIZE, CLASSES, BATCH, EPOCHS = 4, 3, 0.2, (24, 32), 3, 4, 2


class Clips(Dataset):
    def __init__(self, root):
        self.root = Path(root)
        with Path(root, "videos.csv").open(newline="") as file:
            self.rows = list(csv.DictReader(file))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        with av.open(io.BytesIO((self.root / self.rows[i]["path"]).read_bytes())) as file:
            frames = (f for f in file.decode(video=0) if f.time >= BEGIN - 0.001)
            clip = [
                frame.reformat(
                    SIZE[1], SIZE[0], format="rgb24", interpolation="BILINEAR"
                ).to_ndarray()
                for frame in itertools.islice(frames, 0, FRAMES * STEP, STEP)
            ]
        return torch.stack([*map(torch.from_numpy, clip)]), int(self.rows[i]["label"])


def batches_of_torch(root):
    data = Clips(root)
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(root):
    data = nostall.Manifest(
        f"{root}/videos.csv",
        files={"clip": "path"},
        schema={"clip": fields.Video(frames=FRAMES, step=STEP, begin=BEGIN, size=SIZE)},
    )
    with nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0, batch="tuple") as loader:
        for epoch in loader.epochs():
            yield from epoch


def main(root):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv3d(3, 8, 3, stride=2), torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten()
    )
    head = torch.nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    pairs = zip(batches_of_torch(root), batches_of_nostall(root), strict=True)
    for (their_clips, their_labels), (clips, labels) in pairs:
        assert torch.equal(clips, their_clips)
        assert torch.equal(labels, their_labels)
        values = clips.permute(0, 4, 1, 2, 3).float() / 255
        loss = torch.nn.functional.cross_entropy(head(model(values)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"video: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
