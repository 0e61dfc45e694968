"""Sounds and their classes, from the rows of a table, by torch's loader and by nostall.

    python examples/audio.py /tmp/data

The folder has sounds.csv with the columns path and label, and the WAV files that it names.
"""

import csv
import sys
import wave
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import nostall
from nostall import fields

RATE, FRAMES, CLASSES, BATCH, EPOCHS = 8000, 4000, 3, 4, 2


class Sounds(Dataset):
    def __init__(self, root):
        self.root = Path(root)
        with Path(root, "sounds.csv").open(newline="") as file:
            self.rows = list(csv.DictReader(file))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        with wave.open(str(self.root / self.rows[i]["path"])) as file:
            values = np.frombuffer(file.readframes(FRAMES), np.int16)
        sound = torch.zeros(FRAMES)
        sound[: len(values)] = torch.from_numpy(values.astype(np.float32) / 32768)
        return sound, int(self.rows[i]["label"])


def batches_of_torch(root):
    data = Sounds(root)
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(root):
    data = nostall.Manifest(
        f"{root}/sounds.csv",
        files={"sound": "path"},
        schema={"sound": fields.Audio(rate=RATE, frames=FRAMES)},
    )
    with nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0, batch="tuple") as loader:
        for epoch in loader.epochs():
            yield from epoch


def main(root):
    torch.manual_seed(0)
    model = torch.nn.Linear(101, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = torch.hann_window(200)
    pairs = zip(batches_of_torch(root), batches_of_nostall(root), strict=True)
    for (their_sounds, their_labels), (sounds, labels) in pairs:
        assert torch.equal(sounds, their_sounds)
        assert torch.equal(labels, their_labels)
        spectrum = torch.stft(sounds, 200, window=window, return_complex=True).abs().mean(2)
        loss = torch.nn.functional.cross_entropy(model(spectrum), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"audio: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
