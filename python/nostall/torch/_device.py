"""An accelerator of torch as a place for batches, through what all of its devices have in common."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nostall.base._device_clock import end_step, waiting, waits_of
from nostall.base._streams import on_stream
from nostall.errors import UsageError
from nostall.loader._ahead import Finish, aligned
from nostall.loader._mixing import Mixed

_log = logging.getLogger("nostall")


def place(name: Any) -> Device | None:
    """The device of this name; None, and one sentence, where torch has no streams for it.

    Raises:
        UsageError: there is none.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device={name!r}: {str(error).partition(chr(10))[0]}") from None
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        _log.warning(
            "device=%s: batches stay on the host, for torch's accelerator here is %s",
            str(device),
            accelerator or "none",
        )
        return None
    count = torch.accelerator.device_count()
    if count == 0 or (device.index or 0) >= count:
        raise UsageError(f"device={str(device)!r}: torch finds {count} {device.type} devices")
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return Device(device)


class Device:
    """Copies go on a stream of their own; its memory is that of torch's allocators."""

    mixes = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device)
        self._pins = True
        self._kept: list[torch.Tensor] = []
        self._finishes: dict[Finish, tuple[torch.Tensor, torch.Tensor]] = {}

    def memory(self, size: int) -> NDArray[np.uint8]:
        if self._pins:
            try:
                # The stream names the device: pinning for another one would open that one too.
                with on_stream(torch, self.stream):
                    pinned = torch.empty(
                        max(1, size), dtype=torch.uint8, pin_memory=True, device="cpu"
                    )
                memory: NDArray[np.uint8] = pinned.numpy()
                return memory
            except RuntimeError as error:
                self._give_up_pinning(error)
        return aligned(size)

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """The tensor in page-locked memory, where there is some."""
        plain = host.device.type == "cpu" and host.layout == torch.strided  # no other can be
        if not self._pins or not plain or host.is_pinned():
            return host
        try:
            with on_stream(torch, self.stream):
                return host.pin_memory()
        except RuntimeError as error:
            self._give_up_pinning(error)
            return host

    def _give_up_pinning(self, error: RuntimeError) -> None:
        if self._pins:
            self._pins = False
            _log.warning(
                "host memory cannot be page-locked (%s): copies use ordinary memory, and each holds up "
                "the thread that begins it",
                str(error).partition("\n")[0],
            )

    def enter(self) -> None:
        torch.accelerator.set_stream(self.stream)

    def begin(self) -> Sending:
        return Sending(self)

    def is_full(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def current(self) -> torch.Stream:
        """The stream of the device on which the calling thread computes."""
        return torch.accelerator.current_stream(self.device)

    def waiting(self) -> AbstractContextManager[None]:
        return waiting(torch, self.device, "input")

    def pause(self) -> None:
        end_step(torch, self.device)

    def waits(self) -> dict[str, float]:
        return waits_of(self.device)

    def numbers(self, finish: Finish) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset on the device."""
        if finish not in self._finishes:
            shape = (3, 1, 1) if finish.layout == "chw" else (3,)
            host = self.pinned(
                torch.tensor([finish.scale, finish.offset], device="cpu").view(2, *shape)
            )
            self._kept.append(host)  # until it has been copied, and for no less
            scale, offset = host.to(self.device, non_blocking=True)
            self._finishes[finish] = scale, offset
        return self._finishes[finish]


class Sending:
    """One batch: host tensors that copies read, device tensors that they fill, and the event.

    Made by a thread that has entered the device.
    """

    def __init__(self, to: Device) -> None:
        self._to = to
        self._host: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._copied = torch.Event(device=to.device)
        self.bytes = 0

    def array(self, array: NDArray[Any]) -> torch.Tensor:
        return self._keep(self._copy(torch.from_numpy(array)))

    def images(
        self, array: NDArray[Any], finish: Finish | None, mixed: Mixed | None
    ) -> torch.Tensor:
        if finish is None:
            return self.array(array)
        scale, offset = self._to.numbers(finish)
        images = self._copy(torch.from_numpy(array))
        if finish.layout == "chw":
            images = images.permute(0, 3, 1, 2)
        finished = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        # Two operations: one that fuses them would round once.
        torch.mul(images, scale, out=finished).add_(offset)
        if finish.dtype != "float32":
            finished = finished.to(getattr(torch, finish.dtype))
        return self._keep(finished if mixed is None else _mix(finished, mixed, finish.layout))

    def both(self, array: NDArray[Any], shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.array(array)
        return own, self._keep(own.roll(shift, 0))

    def tree(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._keep(self._copy(value))
        if isinstance(value, np.ndarray):
            return self.array(value) if value.dtype.kind in "biufc" else value
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.tree, value))
        if isinstance(value, list | tuple):
            return type(value)(map(self.tree, value))
        return value

    def _mapping(self, value: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The same kind of mapping, where it can be made, else a dict; as torch pins one."""
        there = {key: self.tree(each) for key, each in value.items()}
        try:
            if isinstance(value, MutableMapping):  # it may have more than its items
                clone = copy.copy(value)
                clone.update(there)
                return clone
            made: Mapping[Any, Any] = type(value)(there)  # type: ignore[call-arg]
            return made
        except TypeError:
            return there

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        host = self._to.pinned(host)
        self._host.append(host)
        return host.to(self._to.device, non_blocking=True)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._tensors.append(tensor)
        self.bytes += tensor.nbytes
        return tensor

    def sent(self) -> None:
        self._copied.record(self._to.stream)

    def is_copied(self, wait: bool) -> bool:
        if wait:
            self._copied.synchronize()
        elif not self._copied.query():
            return False
        self._host.clear()
        return True

    def hand_over(self) -> None:
        current = self._to.current()
        with waiting(torch, self._to.device, "copy"):
            self.wait_on(current)
        for tensor in self._tensors:
            use_on(tensor, current)
        self._tensors.clear()

    def wait_on(self, stream: torch.Stream) -> None:
        stream.wait_event(self._copied)


def _mix(images: torch.Tensor, mixed: Mixed, layout: str) -> torch.Tensor:
    """As native/image/mix.h does it, rounding included."""
    if mixed.kind == "mixup":
        others = images.roll(mixed.shift, 0).mul_(1 - mixed.lam)
        return others.add_(images.mul_(mixed.lam))
    x, y, width, height = mixed.box
    rows, columns = (2, 3) if layout == "chw" else (1, 2)
    box = images.narrow(rows, y, height).narrow(columns, x, width)
    box.copy_(box.roll(mixed.shift, 0))
    return images


def use_on(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Its memory goes back to the stream of copies when `stream` has used it, not before."""
    tensor.record_stream(stream)
