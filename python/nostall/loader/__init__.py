"""The data loader: the plan's batches, decoded, transformed and in order."""

from nostall.loader import transforms
from nostall.loader._dynamic_batches import DynamicBatches
from nostall.loader._loader import DataLoader, RawBatch

__all__ = ["DataLoader", "DynamicBatches", "RawBatch", "transforms"]
