"""Batches in memory of the user's that stays where it is, as a CUDA graph reads its inputs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from nostall.errors import UsageError


def copy_into(buffers: Any, batch: Any) -> Any:
    """Copies a batch into tensors of the same shapes, in the same dicts, lists and tuples.

    The copies are enqueued on the current stream, and nothing waits for them. What is no tensor is
    taken from the batch.

    Returns:
        `buffers`, with what is no tensor from `batch`.

    Raises:
        UsageError: a shape, a type or the structure differs.
    """
    if isinstance(buffers, torch.Tensor) and isinstance(batch, torch.Tensor):
        if buffers.shape != batch.shape or buffers.dtype != batch.dtype:
            raise UsageError(
                f"a batch has {batch.dtype} of shape {tuple(batch.shape)}, and its buffer is "
                f"{buffers.dtype} of shape {tuple(buffers.shape)}: make buffers like the first batch, "
                "and pass drop_last=True"
            )
        return buffers.copy_(batch, non_blocking=True)
    if isinstance(batch, dict) and isinstance(buffers, dict) and batch.keys() == buffers.keys():
        each = ((key, copy_into(buffers[key], batch[key])) for key in batch)
        if isinstance(batch, defaultdict):
            return type(batch)(batch.default_factory, each)
        return type(batch)(each)
    if isinstance(batch, list | tuple) and type(batch) is type(buffers):
        if len(batch) == len(buffers):
            made = [copy_into(*pair) for pair in zip(buffers, batch, strict=True)]
            return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
    elif not isinstance(batch, torch.Tensor | dict | list | tuple):
        return batch
    raise UsageError(
        f"the buffers ({type(buffers).__name__}) have another structure than the batch "
        f"({type(batch).__name__}): make them from the first batch"
    )
