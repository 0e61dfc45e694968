"""Rows of a table, by torch's loader and by nostall: no files beside the table.

    python examples/tabular.py /tmp/data

The folder has houses.csv with the columns rooms, area, age and price.
"""

import csv
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import nostall

FEATURES, BATCH, EPOCHS = ["rooms", "area", "age"], 8, 2


class Houses(Dataset):
    def __init__(self, root):
        with Path(root, "houses.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        self.features = torch.tensor([[float(row[name]) for name in FEATURES] for row in rows])
        self.prices = torch.tensor([float(row["price"]) for row in rows])

    def __len__(self):
        return len(self.prices)

    def __getitem__(self, i):
        return self.features[i], self.prices[i]


def batches_of_torch(root):
    data = Houses(root)
    sampler = DistributedSampler(data, 1, 0, seed=0)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def batches_of_nostall(root):
    data = nostall.Manifest(f"{root}/houses.csv", files=[])
    with nostall.DataLoader(data, BATCH, epochs=EPOCHS, seed=0) as loader:
        for epoch in loader.epochs():
            for batch in epoch:
                features = torch.stack([batch[name].float() for name in FEATURES], dim=1)
                yield features, batch["price"].float()


def main(root):
    torch.manual_seed(0)
    model = torch.nn.Linear(len(FEATURES), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pairs = zip(batches_of_torch(root), batches_of_nostall(root), strict=True)
    for (their_features, their_prices), (features, prices) in pairs:
        assert torch.equal(features, their_features)
        assert torch.equal(prices, their_prices)
        loss = torch.nn.functional.l1_loss(model(features)[:, 0], prices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"tabular: loss {loss.item():.3f}, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
