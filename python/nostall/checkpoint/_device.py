"""Tensors of a state that lie on an accelerator: copied while the training goes on.

`save` enqueues their copies to page-locked memory on a stream of their own, behind what the training
has enqueued before; what it enqueues afterwards waits for them on the device, so that no update can
come in between. No thread of the training waits. The writer waits for the copies and takes them into
the snapshot, as any other state.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from nostall import _native
from nostall.checkpoint._tree import Leaf

_log = logging.getLogger("nostall")


class DeviceCopies:
    """Makes the copies of one save; `streams` are kept from save to save, by device."""

    def __init__(self, streams: dict[Any, Any]) -> None:
        self._streams = streams
        self._pairs: list[tuple[Any, Any]] = []  # on the device, in page-locked memory
        self._hosts: dict[tuple[Any, ...], Any] = {}
        self._copied: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def host(self, torch: Any, tensor: Any) -> Any:
        """Memory that `enqueue` fills, of a contiguous tensor; a copy at once where that cannot be."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != tensor.device.type or not tensor.numel():
            return tensor.cpu()
        # Tied weights are the same memory, here and in the file.
        same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.dtype)
        if same not in self._hosts:
            try:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError as error:
                _say_once(self._streams, str(error).partition("\n")[0])
                return tensor.cpu()
            self._pairs.append((tensor, pinned))
            self._hosts[same] = pinned
        return self._hosts[same]

    def enqueue(self, torch: Any, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Starts all copies; gives the leaves in memory that nothing but the copies still changes."""
        for device in {tensor.device for tensor, _ in self._pairs}:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device=device)
            side, current = self._streams[device], torch.accelerator.current_stream(device)
            follow(side, current)
            with side:
                for tensor, pinned in self._pairs:
                    if tensor.device == device:
                        pinned.copy_(tensor, non_blocking=True)
                        keep_for(tensor, side)
            copied = torch.Event(device=device)
            copied.record(side)
            hold_back(current, copied)
            self._copied.append(copied)
        filled = {pinned.data_ptr() for _, pinned in self._pairs}
        return [leaf if leaf.address in filled else _kept(leaf) for leaf in leaves]

    def take(self, snapshot: _native.Snapshot) -> None:
        """Waits for the copies and makes them the snapshot; without the GIL."""
        self.await_all()
        snapshot.finish()
        self._pairs, self._hosts = [], {}

    def await_all(self) -> None:
        for copied in self._copied:
            copied.synchronize()


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


def _say_once(streams: dict[Any, Any], error: str) -> None:
    if not streams.get("unpinned"):
        streams["unpinned"] = True
        _log.warning(
            "host memory cannot be page-locked (%s): save waits for the copies of device tensors",
            error,
        )
