"""A communication hook for DistributedDataParallel: nostall reduces its buckets.

    model = DistributedDataParallel(model)            # over any backend
    reducer = nostall.torch.BucketReducer()
    model.register_comm_hook(reducer, nostall.torch.reduce_bucket)
    ...
    reducer.close()

For programs that stay with DistributedDataParallel and its process group: buckets of CPU gradients
go through a separate group of the backend "nostall", compressed on request. Those of a device go
through the given group where it reduces tensors of that device (NCCL) and no fixed order is asked
for, else through page-locked memory and the separate group. If you can change the optimizer's line, use
`nostall.torch.DistributedOptimizer`, which needs no wrapper.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from nostall import _native
from nostall.errors import UsageError
from nostall.sync import WIRES
from nostall.torch._group import Options


class BucketReducer:
    """What `reduce_bucket` works with; all ranks of the group make it, and close it in the end.

    It has a process group of its own: `close`, or the end of a `with`, destroys that.

    Args:
        group: the process group that DistributedDataParallel uses; the default one if None.
        compression: ``"fp16"`` or ``"bf16"`` on the wire; float32 and float64 buckets only.
        order: ``"fixed"``: the same bits in every run. Buckets of a device then go through page-locked
            memory, for its own group does not promise that.
        timeout: seconds after which ranks that do not arrive are an error.

    Raises:
        UsageError: torch.distributed is not initialised, or an unknown compression.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        compression: Literal["fp16", "bf16"] | None = None,
        order: Literal["any", "fixed"] = "any",
        timeout: float = 600.0,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "call torch.distributed.init_process_group before making a BucketReducer"
            )
        if compression not in (None, *WIRES):
            raise UsageError(f'compression must be "fp16", "bf16" or None, not {compression!r}')
        self.wire = getattr(torch, WIRES[compression]) if compression else None
        from nostall.torch._device_gradients import new_group

        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.group = new_group(members, timeout, backend="nostall", pg_options=Options(order))
        self.ranks = dist.get_world_size(self.group)
        self.given = group or dist.group.WORLD
        self._fixed = order == "fixed"
        self._thread = ThreadPoolExecutor(
            1, "nostall-gradients", initializer=_native.serve_collectives
        )
        self._reductions: dict[torch.device, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroys its process group, once what was begun is done; again it does nothing."""
        from nostall.torch._device_gradients import destroy

        group, self.group = self.group, None
        self._thread.shutdown()
        self._reductions.clear()
        destroy(group)

    def reduced(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """The sum of the tensor over the ranks, in place.

        Raises:
            UsageError: it is closed.
        """
        if self.group is None:
            raise UsageError("this BucketReducer is closed: close it after the last backward pass")
        if tensor.device.type == "cpu":
            return dist.all_reduce(tensor, group=self.group, async_op=True).get_future()
        from nostall.torch import _device_gradients

        if not self._fixed and _device_gradients.reduces(self.given, tensor.device):
            return dist.all_reduce(tensor, group=self.given, async_op=True).get_future()
        if tensor.device not in self._reductions:
            made = _device_gradients.StagedReduction(tensor.device, self.group, self._thread)
            self._reductions[tensor.device] = made
        future: torch.futures.Future[list[torch.Tensor]] = self._reductions[tensor.device](tensor)
        return future


# torch reads the annotations themselves: they must not be strings here.
def reduce_bucket(
    reducer: BucketReducer, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over the ranks, as DistributedDataParallel asks for it.

    Each rank's part is multiplied by 1/ranks before it is added, as by DistributedDataParallel: without
    compression and with the same order of sums, the bits are the same as without a hook. With
    ``gradient_as_bucket_view=True`` torch divides instead, which gives the same bits for 2, 4, 8, ...
    ranks.
    """
    gradients: torch.Tensor = bucket.buffer()
    wire = reducer.wire if gradients.dtype in (torch.float32, torch.float64) else None
    gradients.mul_(1.0 / reducer.ranks)
    sent = gradients if wire is None else gradients.to(wire)

    def give(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        total = done.value()[0]
        return gradients if wire is None else gradients.copy_(total)

    return reducer.reduced(sent).then(give)
