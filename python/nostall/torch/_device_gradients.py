"""Gradients of an accelerator: reduced by its own process group, or by the host's engine.

Where torch.distributed has a backend for the device (NCCL), groups of the plan go to it from the
backward pass itself, and no thread waits: gradients are packed on a stream beside the one that
computes them, and the counts of ranks that gave them travel behind them. Else, and where ranks
negotiate or ask for a fixed order of sums, gradients travel through page-locked memory and the
engine of the host.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from nostall import _native
from nostall.base._device_clock import waiting
from nostall.base._streams import awaited, on_stream
from nostall.errors import PeerError, UsageError
from nostall.job._world import find_world
from nostall.sync import WIRES, Ranks, Spec, SyncOptions, find_ranks, members_of
from nostall.torch._device import Device, use_on
from nostall.torch._optimizer import GradientSync
from nostall.torch._waits import Wait

_ALIGNED = 64  # bytes, of the gradients in a group


def make(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    options: SyncOptions,
    process_set: Sequence[int] | None,
    passes: int,
) -> GradientSync:
    """What reduces these parameters' gradients, on all ranks alike.

    Raises:
        UsageError: they are on several devices, or on one that torch has no streams for.
    """
    device = device_of(named)
    members = members_of(process_set, find_world())
    direct = options.mode == "planned" and not options.fixed_order
    if direct and len(members) == 1:
        return CollectiveSync(named, options, find_ranks(process_set), passes, device, None)
    if direct and reduces(dist.group.WORLD if dist.is_initialized() else None, device):
        group = new_group(members, options.timeout)
        ranks = Ranks(dist.get_rank(group), dist.get_world_size(group), "")
        return CollectiveSync(named, options, ranks, passes, device, group)
    return StagedSync(named, options, find_ranks(process_set), passes, device)


def device_of(named: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    (first, some), *others = named
    for name, tensor in named:
        if accelerator is None or tensor.device.type != accelerator.type:
            raise UsageError(
                f"parameter {name} is on {tensor.device}: gradients are reduced on the CPU and on "
                f"torch's accelerator, which here is {accelerator or 'none'}; all parameters of an "
                "optimizer are on one of them"
            )
    for name, tensor in others:
        if tensor.device != some.device:
            raise UsageError(
                f"parameters are on several devices, {first} on {some.device} and {name} on "
                f"{tensor.device}: make an optimizer for each device"
            )
    return some.device


def reduces(group: Any, device: torch.device) -> bool:
    """Whether a process group reduces tensors of the device."""
    if group is None:
        return False
    from nostall.torch._group import Group

    if isinstance(group, Group):
        return device.type == "cuda" and bool(dist.is_nccl_available())
    try:
        group._get_backend(torch.device(device.type))
    except RuntimeError:
        return False
    return True


# Torch's count of groups is part of the names of new ones; it stays far below this.
_APART = 1 << 40
# Of the living world: how many groups of the same ranks were made.
_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def new_group(members: Sequence[int], timeout: float, **named: Any) -> Any:
    """A process group that one optimizer or hook has. Its members alone make it.

    Members count it apart, and other ranks not at all: all ranks give the same name to a group that
    they make later.
    """
    limit = timedelta(seconds=timeout)
    if len(members) == dist.get_world_size():
        return dist.new_group(members, timeout=limit, **named)
    made, ranks = _made.setdefault(dist.group.WORLD, Counter()), tuple(sorted(members))
    world = dist.distributed_c10d._world
    count, world.group_count = world.group_count, _APART + made[ranks]
    made[ranks] += 1
    try:
        return dist.new_group(members, timeout=limit, use_local_synchronization=True, **named)
    finally:
        world.group_count = count


def destroy(group: Any) -> None:
    """Ends a process group that one optimizer or hook has; None is no group."""
    if group is not None and dist.is_initialized():
        with contextlib.suppress(ValueError):  # torch.distributed was initialised anew since
            dist.destroy_process_group(group)


# Each is a wait that results depend on.


def follow(later: torch.Stream, earlier: torch.Stream) -> None:
    """What is enqueued on `later` from now on comes after what `earlier` has."""
    later.wait_stream(earlier)


def arrive(work: Any) -> None:
    """What the current stream gets from now on comes after the reduction."""
    work.wait()


def await_copy(copied: torch.Event) -> None:
    """A thread waits for a copy to the host."""
    copied.synchronize()


class _DeviceSync(GradientSync):
    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: SyncOptions,
        ranks: Ranks,
        passes: int,
        device: torch.device,
    ) -> None:
        self._place = Device(device)
        self._side = self._place.stream
        self._finite: list[tuple[int, torch.Tensor]] = []
        super().__init__(named, options, ranks, passes)
        # Memory of torch's allocator needs no care when it is kept, dropped or inherited.
        self._views = False
        self._gathers_rows = False

    def _note(self, i: int) -> None:
        """Gradients lie in common buffers, of which torch counts the changes together."""

    def _refuse_changed(self) -> None:
        """No rank notes any: a step need not wait to hear of them."""

    def _mine(self) -> torch.Stream:
        """The stream that computes."""
        return self._place.current()

    def _check_finite(self, i: int, gradient: torch.Tensor) -> None:
        self._finite.append((i, torch.isfinite(gradient).all()))

    def _found_not_finite(self) -> list[int]:
        if self._finite:  # waits for this rank's gradients
            good = torch.stack([finite for _, finite in self._finite]).tolist()
            pairs = zip(self._finite, good, strict=True)
            self._not_finite += [i for (i, _), finite in pairs if not finite]
            self._finite = []
        return self._not_finite

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return waiting(torch, self._place.device, "gradient")

    def _memory(self, count: int, kind: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self._place.memory(count * kind.itemsize)).view(kind)


# ---------------------------------------------------------------------- through the host's engine


class StagedSync(_DeviceSync):
    """Copies gradients to page-locked memory, where the host's engine reduces them, and back."""

    def __init__(self, *arguments: Any) -> None:
        self._tickets: dict[int, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "nostall-gradients")
        super().__init__(*arguments)
        self._slabs = [self._memory(p.numel(), p.dtype).view(p.shape) for p in self._parameters]

    def _submit(self, i: int, gradient: torch.Tensor) -> None:
        memory = gradient.detach()
        if not memory.is_contiguous():
            memory = memory.contiguous()
        self._stage(i, memory, True)

    def _submit_nothing(self, i: int) -> None:
        memory = torch.empty_like(self._parameters[i], memory_format=torch.contiguous_format)
        self._stage(i, memory.detach(), False)

    def _stage(self, i: int, memory: torch.Tensor, present: bool) -> None:
        self._submitted[i] = memory
        follow(self._side, self._mine())
        use_on(memory, self._side)
        copied = awaited(torch, self._place.device)
        with on_stream(torch, self._side):
            if present:
                self._slabs[i].copy_(memory, non_blocking=True)
            copied.record(self._side)
        self._tickets[i] = self._thread.submit(self._pass_on, i, copied, present)

    def _pass_on(self, i: int, copied: torch.Event, present: bool) -> None:
        await_copy(copied)  # also when there is nothing: what was copied out of the slab before
        self.engine.submit(i, self._slabs[i].data_ptr(), present)

    def wait_for(self, i: int) -> None:
        if i not in self._tickets:
            return
        with self._waiting():
            self._tickets.pop(i).result()
            self.engine.wait_for(i)
        with on_stream(torch, self._side):
            self._submitted[i].copy_(self._slabs[i], non_blocking=True)

    def _wait(self) -> None:
        for i in itertools.chain(*self.plan, list(self._tickets)):
            self.wait_for(i)
        self.engine.wait()

    def _store(self, numbers: Sequence[int]) -> None:
        with self._waiting():
            follow(self._mine(), self._side)
        super()._store(numbers)

    def _release(self) -> None:
        super()._release()
        self._thread.shutdown(wait=False)


class StagedReduction:
    """Sums tensors of a device over a process group that takes tensors of the host alone.

    All that share a group share its thread: ranks reduce in the order of their calls.
    """

    def __init__(self, device: torch.device, group: Any, thread: ThreadPoolExecutor) -> None:
        self._place, self._group, self._thread = Device(device), group, thread

    def __call__(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        side, device = self._place.stream, self._place.device
        slab = torch.from_numpy(self._place.memory(tensor.nbytes)).view(tensor.dtype)
        follow(side, torch.accelerator.current_stream(device))
        use_on(tensor, side)
        copied = awaited(torch, device)
        with on_stream(torch, side):
            slab.copy_(tensor, non_blocking=True)
            copied.record(side)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[device])
        wait = Wait.after_backward("allreduce")

        def reduce() -> None:
            try:
                await_copy(copied)
                dist.all_reduce(slab, group=self._group)
                wait.end()
                with on_stream(torch, side):
                    tensor.copy_(slab, non_blocking=True)
                    future.set_result([tensor])  # what waits for it waits for the copy
            except Exception as error:
                future.set_exception(error)

        self._thread.submit(reduce)
        return future


# ---------------------------------------------------------------------- by the device's own group


class _Turn:
    """A group of gradients in one step: side by side, and behind them how many ranks gave each."""

    def __init__(self, numbers: list[int], specs: Sequence[Spec]) -> None:
        self.numbers = numbers
        self.kind: torch.dtype = getattr(torch, specs[numbers[0]][3])
        self.places: dict[int, tuple[int, int]] = {}
        at = 0
        for i in numbers:
            self.places[i] = at, specs[i][1]
            step = _ALIGNED // self.kind.itemsize
            at += -(-specs[i][1] // step) * step
        self.flags = at
        self.buffer: torch.Tensor | None = None
        self.present: set[int] = set()
        self.missing = len(numbers)
        self.work: Any = None
        self.counts: torch.Tensor | None = None
        self.counted: torch.Event | None = None

    def count(self, i: int) -> float:
        """How many ranks gave gradient i; waits where this rank did not."""
        if i in self.present:
            return 1
        assert self.counts is not None and self.counted is not None
        await_copy(self.counted)
        return float(self.counts[self.numbers.index(i)])


class CollectiveSync(_DeviceSync):
    """Reduces groups by the process group of the device, in the order of the plan.

    The first pattern of gradients is planned for a step later than on the host: no rank waits for
    the counts of the step that ended.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: SyncOptions,
        ranks: Ranks,
        passes: int,
        device: torch.device,
        group: Any,
    ) -> None:
        self._group = group
        self._groups: list[list[int]] = []
        self._turns: list[_Turn] = []
        self._turn_of: dict[int, _Turn] = {}
        self._next = 0
        self._ended: tuple[dict[int, _Turn], list[int]] | None = None
        self._scale = 1.0 / ranks.ranks if options.mean else 1.0
        super().__init__(named, options, ranks, passes, device)
        self._stays = options.views and options.compression is None
        self._set_plan(
            _native.fuse_reductions(
                list(reversed(range(len(self._specs)))), self._specs, options.threshold
            )
        )

    def _connect(self, tensors: list[tuple[str, int, str]], shapes: list[torch.Size]) -> list[Spec]:
        _refuse_other(tensors, self._gathered(tensors), self.ranks.rank)
        how = f"mean={self.options.mean} and compression={self.options.compression}"
        for other, theirs in enumerate(self._gathered(how)):
            if theirs != how:
                raise PeerError(
                    f"rank {self.ranks.rank} has {how}, and rank {other} {theirs}: pass the same "
                    "options on all ranks"
                )
        wire = WIRES.get(self.options.compression or "")
        return [
            (name, count, kind, wire if wire and kind in ("float32", "float64") else kind)
            for name, count, kind in tensors
        ]

    def _set_plan(self, groups: list[list[int]]) -> None:
        if self._submitted:
            raise UsageError(
                "gradients of this step are being reduced: plan the next one before its backward pass"
            )
        self._groups = groups
        self._begin()

    def _begin(self) -> None:
        self._turns = [_Turn(numbers, self._specs) for numbers in self._groups]
        self._turn_of = {i: turn for turn in self._turns for i in turn.numbers}
        self._next = 0

    def _gathered(self, mine: Any) -> list[Any]:
        if self._group is None:
            return [mine]
        met: list[Any] = [None] * self.ranks.ranks
        with self._here():
            dist.all_gather_object(met, mine, group=self._group)
        return met

    def _here(self) -> contextlib.AbstractContextManager[None]:
        """NCCL sends objects through the thread's own device, which may be another rank's."""
        return on_stream(torch, self._mine())

    def _agreed(self, order: Sequence[int]) -> list[int]:
        return list(map(int, self._from(0, list(order))))

    def _from(self, root: int, value: Any) -> Any:
        if self._group is None:
            return value
        box = [value]
        with self._here():
            dist.broadcast_object_list(box, dist.get_global_rank(self._group, root), self._group)
        return box[0]

    def _broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        if self._group is None:
            return
        source = dist.get_global_rank(self._group, root)
        tensors = [tensor.detach() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    memory = tensor.contiguous()
                    dist.broadcast(memory, source, group=self._group)
                    tensor.copy_(memory)
            host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
            for tensor, value in zip(host, self._from(root, host), strict=True):
                tensor.copy_(value)

    # ------------------------------------------------------------------ while backward runs

    def _submit(self, i: int, gradient: torch.Tensor) -> None:
        mine = gradient.detach()

        def pack(place: torch.Tensor) -> None:
            if place.dtype == mine.dtype:
                torch.mul(mine, self._scale, out=place)
            else:
                place.copy_(mine * self._scale)
            use_on(mine, self._side)

        self._turn_of[i].present.add(i)
        self._submitted[i] = self._pack(i, gradient.shape, pack)
        if self._stays and gradient.is_contiguous() and not gradient.requires_grad:
            self._parameters[i].grad = self._submitted[i]

    def _submit_nothing(self, i: int) -> None:
        self._submitted[i] = self._pack(i, self._parameters[i].shape, torch.Tensor.zero_)

    def _sign(self, *signs: bool) -> None:
        for i, present in enumerate(signs[: len(self._signs)], len(self._parameters)):
            if present:
                self._turn_of[i].present.add(i)
            self._pack(i, torch.Size([1]), torch.Tensor.zero_)

    def _pack(self, i: int, shape: torch.Size, pack: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        """Enqueues what fills the gradient's place, and the reductions whose turn has come."""
        turn = self._turn_of[i]
        if turn.buffer is None:
            turn.buffer = torch.empty(
                turn.flags + len(turn.numbers), dtype=turn.kind, device=self._place.device
            )
            # It may be dropped while it is packed or reduced: by zero_grad(), or with an optimizer.
            use_on(turn.buffer, self._side)
        begin, count = turn.places[i]
        place = turn.buffer[begin : begin + count].view(shape)
        follow(self._side, self._mine())
        with torch.no_grad(), on_stream(torch, self._side):
            pack(place)
        turn.missing -= 1
        while self._next < len(self._turns) and self._turns[self._next].missing == 0:
            self._reduce(self._turns[self._next])
            self._next += 1
        return place

    def _reduce(self, turn: _Turn) -> None:
        assert turn.buffer is not None
        with torch.no_grad(), on_stream(torch, self._side):
            flags = turn.buffer[turn.flags :].fill_(1)
            for place, i in enumerate(turn.numbers):
                if i not in turn.present:
                    flags[place].zero_()
            if self._group is not None:
                turn.work = dist.all_reduce(turn.buffer, group=self._group, async_op=True)

    # ------------------------------------------------------------------ the end of a step

    def _forget(self) -> None:
        super()._forget()
        self._begin()

    def close(self) -> None:
        super().close()
        group, self._group = self._group, None
        destroy(group)

    def wait_for(self, i: int) -> None:
        turn = self._turn_of[i]
        if turn.buffer is None:
            return
        mine = self._mine()
        with self._waiting():
            if turn.work is not None:
                arrive(turn.work)
            else:
                follow(mine, self._side)
        turn.work = None
        follow(self._side, mine)
        turn.counts = self._memory(len(turn.numbers), torch.float32)
        turn.counted = awaited(torch, self._place.device)
        with torch.no_grad(), on_stream(torch, self._side):
            turn.counts.copy_(turn.buffer[turn.flags :].float(), non_blocking=True)
            turn.counted.record(self._side)
        turn.buffer = None

    def _wait(self) -> None:
        for turn in self._turns:
            self.wait_for(turn.numbers[0])

    def _given(self, numbers: Iterable[int]) -> NDArray[np.bool_]:
        return np.array([self._turn_of[i].count(i) > 0 for i in numbers])

    def _signed(self, sign: int) -> bool:
        # No rows are gathered, so that a rank with gradients need not wait for this.
        return super()._signed(sign) if sign != 1 else False

    def _follow(self, order: list[int]) -> None:
        before, self._ended = self._ended, (self._turn_of, order)
        self._begin()
        if before is None:
            return
        turns, order = before
        self._replan(np.array([turns[i].count(i) > 0 for i in range(len(self._specs))]), order)


def _refuse_other(
    mine: list[tuple[str, int, str]], met: Sequence[list[tuple[str, int, str]]], rank: int
) -> None:
    def text(tensor: tuple[str, int, str] | None) -> str:
        return "no more" if tensor is None else f"{tensor[0]} ({tensor[1]} x {tensor[2]})"

    for other, theirs in enumerate(met):
        for here, there in itertools.zip_longest(mine, theirs):
            if here != there:
                raise PeerError(
                    f"rank {rank} has gradient {text(here)} where rank {other} has {text(there)}: "
                    "make the same model on all ranks"
                )
