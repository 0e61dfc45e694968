"""For PyTorch: gradients reduced while backward runs, and the samples of nostall for torch's loader.

    optimizer = nostall.torch.DistributedOptimizer(optimizer, model.named_parameters())

    dataset = nostall.torch.Dataset(nostall.ImageFolder(path), transform)
    batches = nostall.torch.BatchSampler(len(dataset), 64, epochs=90, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, num_workers=8)

The order is DistributedSampler's and can be resumed exactly. The node's tiers keep the samples, for all
workers and ranks.

Importing this module also registers the torch.distributed backend "nostall"
(``nostall.torch._group``), for ``init_process_group("nostall")``, and under srun and mpirun sets the
variables that this call reads. Newer releases of torch find the backend without the import, but too
late for these variables.
"""

import torch.distributed

from nostall.sync import SyncOptions
from nostall.torch._dataset import Dataset
from nostall.torch._optimizer import DistributedOptimizer, GradientSync
from nostall.torch._sampler import BatchSampler
from nostall.torch._static import copy_into

__all__ = [
    "BatchSampler",
    "Dataset",
    "DistributedOptimizer",
    "GradientSync",
    "SyncOptions",
    "copy_into",
]

if torch.distributed.is_available():
    from nostall.torch._group import Options as GroupOptions
    from nostall.torch._group import register_backend
    from nostall.torch._hook import BucketReducer, reduce_bucket
    from nostall.torch._launch import init
    from nostall.torch._parameter_servers import ParameterServers
    from nostall.torch._shared import DistributedDataParallel, empty_shared

    __all__ += [
        "BucketReducer",
        "DistributedDataParallel",
        "GroupOptions",
        "ParameterServers",
        "empty_shared",
        "init",
        "reduce_bucket",
    ]
    register_backend()
