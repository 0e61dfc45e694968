"""Gradients in shared memory of a node, where they are added without a copy.

    model = nostall.torch.DistributedDataParallel(model)       # over the backend "nostall"
    tensor = nostall.torch.empty_shared(1 << 20)               # for all_reduce by the program itself

An all_reduce of ordinary tensors moves them through a window of shared memory. If all ranks pass
tensors that are in shared memory, each sums pieces of all of them where they are.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import parallel
from torch.utils._python_dispatch import TorchDispatchMode

from nostall.errors import IoError, UsageError
from nostall.torch._group import Group

# Smaller messages are posted as they are (kPostedBytes of native/collective).
_LEAST_BYTES = 4 << 10


def empty_shared(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: Any = None
) -> torch.Tensor:
    """An uninitialised tensor in shared memory: all_reduce sums it in place if all ranks pass one.

    Args:
        size: its shape, as torch.empty takes it.
        dtype: torch's default if None.
        group: the process group, of the backend "nostall", that will reduce it; the default one.

    The memory is freed with the last tensor that uses it. A forked child must not touch it.

    Raises:
        UsageError: the group is not ours, or has no room (`GroupOptions(shared_bytes=...)`).
        IoError: the node has no memory for it in /dev/shm.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    return _ours(group).empty(shape, dtype or torch.get_default_dtype())


class DistributedDataParallel(parallel.DistributedDataParallel):  # type: ignore[misc]
    """torch's DistributedDataParallel, its buckets of gradients in shared memory.

    Takes the arguments of torch's class, by name. gradient_as_bucket_view is True unless it is given,
    so that backward writes gradients where they will be added. A bucket without room is an ordinary
    tensor, with a warning. Buckets that torch makes anew within join() are ordinary tensors, without
    a warning.

    Raises:
        UsageError: the process group is not of the backend "nostall"; or, on all ranks, their models
            differ (unless ``init_sync=False``, with which torch does not compare them either).
    """

    _has_rebuilt_buckets: bool

    def __init__(self, module: torch.nn.Module, **named: Any) -> None:
        named.setdefault("gradient_as_bucket_view", True)
        group, mesh = named.get("process_group"), named.get("device_mesh")
        shared = _InSharedMemory(_ours(group if mesh is None else mesh.get_group(mesh_dim=0)))
        if named.get("init_sync", True):
            _refuse_models_that_differ(module, shared.group)
        with shared:
            super().__init__(module, **named)
        self._shared = shared

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["_shared"]  # its group belongs to this process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shared = _InSharedMemory(_ours(None))  # torch takes the default group too
        with self._shared:
            super().__setstate__(state)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        # Once torch has seen the order of gradients, it makes the buckets anew, in its
        # forward. This does it just before, if there are buckets and no message to other ranks is due.
        none = self._use_python_reducer or self._delay_all_reduce_all_params
        if (
            torch.is_grad_enabled()
            and not self._has_rebuilt_buckets
            and not self._join_config.enable
            and not none
        ):
            with self._shared:
                self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        return super().forward(*inputs, **named)


class _InSharedMemory(TorchDispatchMode):  # type: ignore[misc]
    """Places flat CPU tensors that are made meanwhile, also native ones, in shared memory."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is torch.ops.aten.empty.memory_format and len(arguments[0]) == 1:
            made = self._make(arguments[0][0], named)
            if made is not None:
                return made
        return function(*arguments, **named)

    def _make(self, count: int, named: dict[str, Any]) -> torch.Tensor | None:
        kind = named.get("dtype") or torch.get_default_dtype()
        device = named.get("device")
        if (device is not None and torch.device(device).type != "cpu") or named.get("pin_memory"):
            return None
        if count * kind.itemsize <= _LEAST_BYTES:
            return None
        try:
            return self.group.empty(torch.Size([count]), kind)
        except (UsageError, IoError) as error:
            warnings.warn(f"a bucket of gradients is an ordinary tensor: {error}", stacklevel=2)
            return None


def _refuse_models_that_differ(module: torch.nn.Module, group: Group) -> None:
    """Raises UsageError on all ranks; torch itself raises on the ranks other than 0 alone."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    mine = [
        (name, f"{parameter.dtype} {tuple(parameter.shape)}".removeprefix("torch."))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    digests: list[Any] = [None] * group.size()
    dist.all_gather_object(digests, hashlib.sha256(repr(mine).encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    models: list[Any] = [None] * group.size()
    dist.all_gather_object(models, mine, group=group)
    number = next(
        i
        for i, row in enumerate(itertools.zip_longest(*models))
        if any(entry != row[0] for entry in row)
    )
    ranks = dist.get_process_group_ranks(group)
    having: dict[str, list[int]] = {}
    for rank, model in zip(ranks, models, strict=True):
        has = f"{model[number][0]}: {model[number][1]}" if number < len(model) else "none"
        having.setdefault(has, []).append(rank)
    each = "; ".join(f"rank {_some(ranks)} has {what}" for what, ranks in having.items())
    raise UsageError(
        f"the models of DistributedDataParallel differ from parameter {number} on: {each}; "
        "make the same model on all ranks"
    )


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _ours(group: Any) -> Group:
    group = group or dist.group.WORLD
    if not isinstance(group, Group):
        raise UsageError(
            "shared memory belongs to a process group of the backend nostall: call "
            'torch.distributed.init_process_group("nostall"), or pass a group of that backend'
        )
    return group
