"""Tensors of a state that lie on an accelerator: copied while the training goes on.

`save` enqueues their copies to page-locked memory on a stream of their own, behind what the training
has enqueued before. No thread of the training waits. What it enqueues afterwards waits for the copies
on the device: at once, or, in a window, what a step of an optimizer enqueues, for those that it is
about to change. The writer waits for the copies and takes them into the snapshot, as any other state.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from nostall import _native
from nostall.base._device_clock import waiting
from nostall.base._streams import on_stream
from nostall.checkpoint._tree import Leaf
from nostall.checkpoint._window import changes_of, tensors_of, torn_words

_log = logging.getLogger("nostall")

# An event follows copies of so many bytes: an update waits for what it changes, and for little else.
_PIECE = 16 << 20


@dataclasses.dataclass
class _Copy:
    """Of a tensor of the device into page-locked memory; `copied` is an event of its piece."""

    tensor: Any
    pinned: Any
    changes: int | None
    copied: Any = None


class DeviceCopies:
    """Makes the copies of one save; `streams` are kept from save to save, by device."""

    def __init__(self, streams: dict[Any, Any]) -> None:
        self._streams = streams
        self._copies: dict[tuple[Any, ...], _Copy] = {}
        self._last: list[Any] = []  # events, one for each device

    def __bool__(self) -> bool:
        return bool(self._copies)

    def host(self, torch: Any, tensor: Any) -> Any:
        """Memory that `enqueue` fills, of a contiguous tensor; a copy at once where that cannot be."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != tensor.device.type or not tensor.numel():
            return tensor.cpu()
        # Tied weights are the same memory, here and in the file.
        same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.dtype)
        if same not in self._copies:
            memory = pinned(torch, self._streams, tensor.shape, tensor.dtype)
            if memory is None:
                return tensor.cpu()
            self._copies[same] = _Copy(tensor, memory, changes_of(tensor))
        return self._copies[same].pinned

    def addresses(self, names: Collection[str], leaves: Sequence[Leaf]) -> set[int]:
        """Where the tensors lie on the device that are written under these names."""
        hosts = {leaf.address for leaf in leaves if leaf.name in names}
        copies = self._copies.values()
        return {c.tensor.data_ptr() for c in copies if c.pinned.data_ptr() in hosts}

    def enqueue(self, torch: Any, leaves: Sequence[Leaf], late: Collection[int] = ()) -> list[Leaf]:
        """Starts all copies; gives the leaves in memory that nothing but the copies still changes.

        What the training enqueues next waits for the copies, but for those of tensors at the addresses
        `late`.
        """
        for device in {c.tensor.device for c in self._copies.values()}:
            side = side_of(torch, self._streams, device)
            current = torch.accelerator.current_stream(device)
            here = [c for c in self._copies.values() if c.tensor.device == device]
            later = [c for c in here if c.tensor.data_ptr() in late]
            follow(side, current)
            if now := [c for c in here if c.tensor.data_ptr() not in late]:
                copied = self._copy(torch, side, now)
                with waiting(torch, device, "checkpoint"):
                    hold_back(current, copied)
            self._last.append(self._copy(torch, side, later) if later else now[-1].copied)
        filled = {c.pinned.data_ptr() for c in self._copies.values()}
        return [leaf if leaf.address in filled else _kept(leaf) for leaf in leaves]

    def _copy(self, torch: Any, side: Any, copies: Sequence[_Copy]) -> Any:
        """Enqueues the copies, in pieces; gives the last event."""
        piece: list[_Copy] = []
        for copy in copies:
            with on_stream(torch, side):
                copy.pinned.copy_(copy.tensor, non_blocking=True)
            keep_for(copy.tensor, side)
            piece.append(copy)
            if copy is copies[-1] or sum(c.tensor.nbytes for c in piece) >= _PIECE:
                copied = torch.Event(device=side.device)
                copied.record(side)
                for each in piece:
                    each.copied = copied
                piece = []
        return copies[-1].copied

    def window(
        self, torch: Any, leaves: Sequence[Leaf], late: Collection[int], unsteady: set[str]
    ) -> DeviceWindow:
        """The window in which updates have to wait for the copies that are late."""
        names: dict[int, str] = {}
        for leaf in leaves:
            names.setdefault(leaf.address, leaf.name)
        copies = [c for c in self._copies.values() if c.tensor.data_ptr() in late]
        named = [(names[c.pinned.data_ptr()], c) for c in copies]
        return DeviceWindow(torch, named, unsteady)

    def take(self, snapshot: _native.Snapshot) -> None:
        """Waits for the copies and makes them the snapshot; without the GIL."""
        self.await_all()
        snapshot.finish()
        self._copies = {}

    def await_all(self) -> None:
        for copied in self._last:
            copied.synchronize()


class DeviceWindow:
    """As `SaveWindow`: what an update is about to change is waited for, on the device."""

    def __init__(self, torch: Any, named: Sequence[tuple[str, _Copy]], unsteady: set[str]) -> None:
        self._torch, self._unsteady = torch, unsteady
        self._began = time.perf_counter()
        self._lock = threading.Lock()  # of what follows: the writer looks as well
        self._left: dict[int, list[tuple[str, _Copy]]] = {}
        for name, copy in named:
            self._left.setdefault(copy.tensor.data_ptr(), []).append((name, copy))
        self._torn = ""

    def reach(self, optimizer: Any) -> bool:
        """Holds a step of this optimizer back; whether anything is left."""
        self._leave([t.data_ptr() for t in tensors_of(optimizer)])
        return bool(self._left)

    def close(self) -> float:
        """Holds back whatever comes; how long the window was open, in seconds."""
        self._leave(list(self._left))
        return time.perf_counter() - self._began

    def _leave(self, addresses: Sequence[int]) -> None:
        self.torn()
        left = [copy for address in addresses for _, copy in self._left.get(address, ())]
        for copied, device in {c.copied: c.tensor.device for c in left}.items():
            current = self._torch.accelerator.current_stream(device)
            with waiting(self._torch, device, "checkpoint"):
                hold_back(current, copied)
        with self._lock:
            for address in addresses:
                self._left.pop(address, None)

    def torn(self) -> str:
        """What was changed while its copy may have been under way, as a reason; or nothing."""
        with self._lock:
            names = [
                name
                for left in self._left.values()
                for name, copy in left
                if changes_of(copy.tensor) != copy.changes
            ]
            self._unsteady.update(names)
            self._torn = self._torn or torn_words(names)
            return self._torn


def follow(side: Any, current: Any) -> None:
    """The copies read what the training has enqueued before."""
    side.wait_stream(current)


def hold_back(current: Any, copied: Any) -> None:
    """What the training enqueues from now on, on this stream, comes after the copies."""
    current.wait_event(copied)


def keep_for(tensor: Any, side: Any) -> None:
    """The training may drop the tensor: its memory is given to nothing else before it is copied."""
    tensor.record_stream(side)


def _kept(leaf: Leaf) -> Leaf:
    owner = leaf.owner.copy() if isinstance(leaf.owner, np.ndarray) else leaf.owner.clone()
    address = owner.ctypes.data if isinstance(owner, np.ndarray) else owner.data_ptr()
    return dataclasses.replace(leaf, owner=owner, address=address)


def side_of(torch: Any, streams: dict[Any, Any], device: Any) -> Any:
    """The stream of copies of this device; made when it is first asked for."""
    if device not in streams:
        streams[device] = torch.Stream(device=device)
    return streams[device]


def pinned(torch: Any, streams: dict[Any, Any], shape: Sequence[int], dtype: Any) -> Any:
    """Page-locked memory; None where it is refused, which is said once."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        if not streams.get("unpinned"):
            streams["unpinned"] = True
            _log.warning(
                "host memory cannot be page-locked (%s): save and restore wait for each copy of a "
                "device's tensor",
                str(error).partition("\n")[0],
            )
        return None
