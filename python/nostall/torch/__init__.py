"""For those who keep ``torch.utils.data.DataLoader``: a map-style dataset and its batch sampler.

    dataset = nostall.torch.Dataset(nostall.ImageFolder("/data/train"), transform=augment)
    sampler = nostall.torch.BatchSampler(len(dataset), batch_size=64, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=4)
    for epoch in range(90):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            ...

The order is that of ``nostall.DataLoader``, and resumes as exactly; tiers and native transforms are
its alone. Importing this module imports torch.
"""

from __future__ import annotations

from nostall.torch.data import Dataset, decode_pil
from nostall.torch.sampler import BatchSampler

__all__ = ["BatchSampler", "Dataset", "decode_pil"]
