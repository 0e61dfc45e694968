"""A process group for tensors of the simulated device, over Gloo.

allreduce is a task of a stream of the group, as NCCL's: its call returns at once, and a wait for
the work makes a stream wait. The other operations go through the host.

import simdev.group
torch.distributed.init_process_group("cpu:gloo,simdev:simgloo", ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Work, _create_work_from_future

import simdev


class SimGloo(Backend):  # type: ignore[misc]
    """Each operation follows the current stream."""

    made: ClassVar[list[SimGloo]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.streams: dict[torch.device, torch.Stream] = {}
        SimGloo.made.append(self)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "simgloo"

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _reduced(self, tensor: torch.Tensor, options: Any) -> torch.Tensor:
        host = tensor.cpu()
        reducing = dist.AllreduceOptions()
        average = options.reduceOp == dist.ReduceOp.AVG  # which Gloo has not
        reducing.reduceOp = dist.ReduceOp.SUM if average else options.reduceOp
        self._gloo.allreduce([host], reducing).wait()
        return host / self.size() if average else host

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        host = tensor.cpu()
        parts = [torch.empty_like(host) for _ in range(self.size())]
        self._gloo.allgather([parts], [host]).wait()
        return parts

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        if len(tensors) != 1:
            raise ValueError("Expecting one tensor only but got multiple")  # as NCCL has it
        return self.allreduce_coalesced(tensors, options)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        options = options or dist.AllreduceOptions()
        average = options.reduceOp == dist.ReduceOp.AVG  # which Gloo has not
        reducing = dist.AllreduceOptions()
        reducing.reduceOp = dist.ReduceOp.SUM if average else options.reduceOp

        def reduce(host: torch.Tensor) -> None:
            self._gloo.allreduce([host], reducing).wait()
            if average:
                host /= self.size()

        device = tensors[0].device
        stream = self.streams.setdefault(device, torch.Stream(device=device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        with stream:
            for tensor in tensors:
                simdev.call("allreduce", tensor, reduce)
                tensor.record_stream(stream)
            future.set_result(list(tensors))
        return _create_work_from_future(future)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        for tensor in tensors:
            host = tensor.cpu()
            self._gloo.broadcast([host], options).wait()
            tensor.copy_(host)
        return _done(list(tensors))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part, host in zip(parts, self._gathered(tensor), strict=True):
                part.copy_(host)
        return _done(outputs)

    def all_gather_single(self, output: Any, tensor: Any, options: Any = None) -> Work:
        output.view(-1).copy_(torch.cat([part.reshape(-1) for part in self._gathered(tensor)]))
        return _done([output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _done(outputs)

    def reduce_scatter_single(self, output: Any, tensor: Any, options: Any) -> Work:
        mine = self._reduced(tensor, options).reshape(self.size(), -1)[self.rank()]
        output.view(-1).copy_(mine)
        return _done([output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, options)
        return _done(outputs)

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Work:
        hosts = [torch.empty_like(tensor, device="cpu") for tensor in outputs]
        parts = [[tensor.cpu() for tensor in each] for each in inputs]
        self._gloo.scatter(hosts, parts, options).wait()
        for tensor, host in zip(outputs, hosts, strict=True):
            tensor.copy_(host)
        return _done(list(outputs))

    def barrier(self, options: Any = None) -> Work:
        self._gloo.barrier().wait()
        return _done([])


def _done(result: Any) -> Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


dist.Backend.register_backend("simgloo", SimGloo, devices=["simdev"])
