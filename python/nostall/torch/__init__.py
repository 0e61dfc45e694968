"""For PyTorch: gradients that are reduced while backward runs, and our order for its own loader.

    optimizer = nostall.torch.DistributedOptimizer(optimizer, model.named_parameters())

    dataset = nostall.torch.Dataset(nostall.ImageFolder(path), transform)
    batches = nostall.torch.BatchSampler(len(dataset), 64, epochs=90, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, num_workers=8)

The order is DistributedSampler's and can be resumed exactly. The node's tiers serve
``nostall.DataLoader`` only.
"""

from nostall.sync import SyncOptions
from nostall.torch.dataset import Dataset
from nostall.torch.optimizer import DistributedOptimizer, GradientSync
from nostall.torch.sampler import BatchSampler

__all__ = ["BatchSampler", "Dataset", "DistributedOptimizer", "GradientSync", "SyncOptions"]
