"""An accelerator of torch as a place for batches, through what all of its devices have in common."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nostall import _native
from nostall.base._device_clock import end_step, waiting, waits_of
from nostall.base._streams import awaited, on_stream, raise_if_lost
from nostall.errors import UsageError
from nostall.loader._ahead import Finish, aligned
from nostall.loader._mixing import Mixed

_log = logging.getLogger("nostall")

_LABELS = -1  # beside numbers of outputs


def place(name: Any) -> Device | None:
    """The device of this name; None, and one sentence, where torch has no streams for it.

    Raises:
        UsageError: there is none.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device={name!r}: {str(error).partition(chr(10))[0]}") from None
    except TypeError:
        raise UsageError(
            f'device={name} is no device of torch: pass its name, or output="jax" for devices and '
            "shardings of JAX"
        ) from None
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
        raise UsageError(
            f"device={str(device)!r}: torch finds {count} {device.type} devices; device=None leaves "
            "batches on the host"
        )
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return Device(device)


class Device:
    """Copies go on a stream of their own; its memory is that of torch's allocators."""

    mixes = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device)
        self.events: list[torch.Event] = []  # that no batch needs any more
        self._pins = True
        self._kept: list[torch.Tensor] = []
        self._numbers: dict[Finish, tuple[torch.Tensor, torch.Tensor]] = {}
        self._finishers: dict[tuple[Finish, torch.Size], _Finisher] = {}
        # Batches' page-locked memory by its address, as long as the array over it lives.
        self._slabs: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
        self._views: dict[tuple[int, int], dict[int, _View]] = {}

    def memory(self, size: int) -> NDArray[np.uint8]:
        if self._pins:
            try:
                # The stream names the device: pinning for another one would open that one too.
                with on_stream(torch, self.stream):
                    pinned = torch.empty(
                        max(1, size), dtype=torch.uint8, pin_memory=True, device="cpu"
                    )
                return self._slab(pinned)[:size]
            except RuntimeError as error:
                self._give_up_pinning(error)
        return aligned(size)

    def _slab(self, pinned: torch.Tensor) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = pinned.numpy()
        address, slabs, views = pinned.data_ptr(), self._slabs, self._views

        def forget(_: Any) -> None:
            slabs.pop(address, None)
            for place in [place for place in list(views) if place[0] == address]:
                views.pop(place, None)

        slabs[address] = weakref.ref(memory, forget), pinned
        return memory

    def views(self, batch: _native.Batch) -> dict[int, _View]:
        """What lies in a batch's memory, by the number of its output; found again with this memory."""
        place = batch.place
        if (views := self._views.get(place)) is not None:
            return views
        return self._views.setdefault(place, {}) if place[0] in self._slabs else {}

    def view(self, batch: _native.Batch, number: int, finish: Finish | None) -> _View:
        """An output or the labels, over the slab where it is page-locked: no batch is held by it."""
        array = batch.labels if number == _LABELS else batch.output(number)
        host = torch.from_numpy(array)
        if (slab := self._slabs.get(batch.place[0])) is None:
            host = self.pinned(host)
        else:
            whole = slab[1]
            begin = host.data_ptr() - whole.data_ptr()
            host = whole[begin : begin + host.nbytes].view(host.dtype).view(host.shape)
        return host, None if finish is None else self.finisher(finish, host.shape)

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
        raise_if_lost(self.stream)
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

    def event(self) -> torch.Event:
        try:
            return self.events.pop()
        except IndexError:
            event: torch.Event = awaited(torch, self.device)
            return event

    def is_full(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def current(self) -> torch.Stream:
        """The stream of the device on which the calling thread computes."""
        return torch.accelerator.current_stream(self.device.index)

    def waiting(self) -> AbstractContextManager[None]:
        return waiting(torch, self.device, "input")

    def pause(self) -> None:
        end_step(torch, self.device)

    def waits(self) -> dict[str, float]:
        return waits_of(self.device)

    def numbers(self, finish: Finish) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset on the device."""
        if finish not in self._numbers:
            shape = (3, 1, 1) if finish.layout == "chw" else (3,)
            host = self.pinned(
                torch.tensor([finish.scale, finish.offset], device="cpu").view(2, *shape)
            )
            self._kept.append(host)  # until it has been copied, and for no less
            scale, offset = host.to(self.device, non_blocking=True)
            self._numbers[finish] = scale, offset
        return self._numbers[finish]

    def finisher(self, finish: Finish, shape: torch.Size) -> _Finisher:
        """What finishes images like these, in the thread that has entered the device."""
        if (found := self._finishers.get((finish, shape))) is None:
            found = self._finishers[finish, shape] = _Finisher(self, finish, shape)
        return found


class _Finisher:
    """Finishes images of one shape.

    Attributes:
        raw: what they are copied to. They are used before the next copy: one stream does both.
    """

    def __init__(self, to: Device, finish: Finish, shape: torch.Size) -> None:
        self._scale, self._offset = to.numbers(finish)
        self.raw = torch.empty(shape, dtype=torch.uint8, device=to.device)
        self._seen = self.raw.permute(0, 3, 1, 2) if finish.layout == "chw" else self.raw
        self._empty = functools.partial(
            torch.empty, self._seen.shape, dtype=torch.float32, device=to.device
        )
        self._dtype = None if finish.dtype == "float32" else getattr(torch, finish.dtype)

    def finished(self) -> torch.Tensor:
        # Two operations: one that fuses them would round once.
        images = torch.mul(self._seen, self._scale, out=self._empty()).add_(self._offset)
        return images if self._dtype is None else images.to(self._dtype)


_View = tuple[torch.Tensor, _Finisher | None]  # a tensor of the host, and what finishes it


class Sending:
    """One batch: host tensors that copies read, device tensors that they fill, and the event.

    Made by a thread that has entered the device.
    """

    def __init__(self, to: Device) -> None:
        self._to = to
        self._host: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._views: dict[int, _View] | None = None  # of the batch
        self._copied = to.event()
        self._uses = [0, 1]  # of the event: the consumer's, and that for the host's memory
        self.bytes = 0

    def array(self, array: NDArray[Any]) -> torch.Tensor:
        return self._keep(self._copy(self._to.pinned(torch.from_numpy(array))))

    def outputs(
        self, batch: _native.Batch, names: Sequence[tuple[int, str]]
    ) -> dict[str, torch.Tensor]:
        return {name: self.output(batch, number) for number, name in names}

    def output(self, batch: _native.Batch, number: int) -> torch.Tensor:
        return self._keep(self._copy(self._view(batch, number)[0]))

    def labels(self, batch: _native.Batch) -> torch.Tensor:
        return self.output(batch, _LABELS)

    def images(
        self, batch: _native.Batch, number: int, finish: Finish | None, mixed: Mixed | None
    ) -> torch.Tensor:
        host, finisher = self._view(batch, number, finish)
        if finish is None or finisher is None:
            return self._keep(self._copy(host))
        self._copy(host, finisher.raw)
        finished = finisher.finished()
        return self._keep(finished if mixed is None else _mix(finished, mixed, finish.layout))

    def _view(self, batch: _native.Batch, number: int, finish: Finish | None = None) -> _View:
        if self._views is None:
            self._views = self._to.views(batch)
        if (view := self._views.get(number)) is None:
            view = self._views[number] = self._to.view(batch, number, finish)
        return view

    def both(self, array: NDArray[Any], shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.array(array)
        return own, self._keep(own.roll(shift, 0))

    def tree(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._keep(self._copy(self._to.pinned(value)))
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

    def _copy(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        self._host.append(host)
        if into is None:
            return host.to(self._to.device, non_blocking=True)
        return into.copy_(host, non_blocking=True)

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
        self._views = None  # those of a slab are the device's too
        self._end_use()
        return True

    def _end_use(self) -> None:
        if self._uses.pop() == 0:  # the last one; the other may be another thread's
            self._to.events.append(self._copied)

    def hand_over(self) -> None:
        current = self._to.current()
        if _native.trace_on():
            with waiting(torch, self._to.device, "copy"):
                self.wait_on(current)
        else:
            self.wait_on(current)
        for tensor in self._tensors:
            use_on(tensor, current)
        self._tensors.clear()
        self._end_use()

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
