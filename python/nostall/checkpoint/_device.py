"""Tensors of a state that lie on an accelerator: copied while the training goes on.

`save` enqueues their copies to page-locked memory on a stream of their own, behind what the training
has enqueued before. No thread of the training waits. What it enqueues afterwards waits for the copies
on the device: at once, or, in a window, what a step of an optimizer enqueues, for those that it is
about to change. Where the bus could not carry all of them in the last window, `save` enqueues what it
could; the rest is copied on the device just before it is changed, and crosses the bus during the steps
that follow. The writer waits for the copies and takes them into the snapshot, as any other state.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from nostall import _native
from nostall.base._device_clock import waiting
from nostall.base._streams import awaited, on_stream, raise_if_lost
from nostall.checkpoint._tree import Leaf
from nostall.checkpoint._window import changes_of, tensors_of, torn_words

_log = logging.getLogger("nostall")

# Of a tensor, in bytes: what is enqueued at once, and how much an event follows.
_PIECE = 32 << 20
# Of what the bus carried in the last window: the next one may be shorter.
_ROOM = 0.9


@dataclasses.dataclass
class _Piece:
    """Elements of a tensor, and page-locked memory for them; `copied`: an event, once enqueued."""

    source: Any
    pinned: Any
    copied: Any = None


@dataclasses.dataclass
class _Copy:
    tensor: Any
    pinned: Any
    changes: int | None
    pieces: list[_Piece]


class Pace:
    """How fast the copies of the last window of a device were, and how long it was, on its clock."""

    def __init__(self) -> None:
        self.rate = self.window = 0.0  # bytes per second, seconds; 0: not known
        self._bytes = 0
        self._began: Any = None
        self._ended: Any = None
        self._reached: Any = None

    def begin(self, began: Any, ended: Any, size: int) -> None:
        """Of copies that are enqueued between the two events."""
        self._began, self._ended, self._bytes = began, ended, size
        self._reached = None

    def reach(self, torch: Any, stream: Any) -> None:
        """The first update begins here."""
        if self._reached is None:
            self._reached = _moment(torch, stream)

    def look(self) -> None:
        """Takes the times of the last window, if it is over."""
        events = (self._began, self._ended, self._reached)
        if any(event is None or not event.query() for event in events):
            return
        self.window = self._began.elapsed_time(self._reached) / 1e3
        if self._bytes and (seconds := self._began.elapsed_time(self._ended) / 1e3) > 0:
            self.rate = self._bytes / seconds


def choose_early(size: int, rate: float, window: float, free: int) -> tuple[int, str]:
    """How many of the bytes are copied where they lie, and why no more of them.

    Args:
        size: of what an update changes.
        rate: of the bus in bytes per second; 0: not known.
        window: seconds until the update; 0: not known.
        free: bytes of the device that nothing has. A step's memory was had once when an update
            comes; half of what is free is left to steps that take more.
    """
    # The first update may come before the copies begin.
    early = max(0, int(rate * window * _ROOM))
    if not rate or not window or early >= size:
        return size, ""
    if size - early > free // 2:
        early = size - free // 2
    if early >= size:
        return size, "the device has no memory for another copy"
    return early, f"the bus carries {early >> 20} of {size >> 20} MiB before the update"


class DeviceCopies:
    """Makes the copies of one save; streams and paces are kept from save to save, by device."""

    def __init__(self, streams: dict[Any, Any], paces: dict[Any, Pace]) -> None:
        self._streams, self._paces = streams, paces
        self._copies: dict[tuple[Any, ...], _Copy] = {}
        self._late: list[_Copy] = []
        self._lock = threading.Lock()  # which pieces are enqueued: the writer enqueues as well
        self._torch: Any = None
        self.why = ""  # not all copies are enqueued by `enqueue`

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
            side_of(torch, self._streams, tensor.device)  # is asked where memory is refused
            memory = pinned(torch, self._streams, tensor.shape, tensor.dtype)
            if memory is None:
                return tensor.cpu()
            count = max(1, _PIECE // tensor.element_size())
            parts = zip(tensor.view(-1).split(count), memory.view(-1).split(count), strict=True)
            pieces = [_Piece(source, target) for source, target in parts]
            self._copies[same] = _Copy(tensor, memory, changes_of(tensor), pieces)
        return self._copies[same].pinned

    def addresses(self, names: Collection[str], leaves: Sequence[Leaf]) -> set[int]:
        """Where the tensors lie on the device that are written under these names."""
        hosts = {leaf.address for leaf in leaves if leaf.name in names}
        copies = self._copies.values()
        return {c.tensor.data_ptr() for c in copies if c.pinned.data_ptr() in hosts}

    def enqueue(self, torch: Any, leaves: Sequence[Leaf], late: Collection[int] = ()) -> list[Leaf]:
        """Starts the copies; gives the leaves in memory that nothing but the copies still changes.

        What the training enqueues next waits for the copies, but for those of tensors at the addresses
        `late`: `release` has to be called before these change.
        """
        self._torch = torch
        self._late = [c for c in self._copies.values() if c.tensor.data_ptr() in late]
        for device in {c.tensor.device for c in self._copies.values()}:
            side = side_of(torch, self._streams, device)
            current = torch.accelerator.current_stream(device)
            here = [c for c in self._copies.values() if c.tensor.device == device]
            follow(side, current)
            if now := _pieces(c for c in here if c.tensor.data_ptr() not in late):
                copied = self._copy(side, now)
                with waiting(torch, device, "checkpoint"):
                    hold_back(current, copied)
            if later := _pieces(c for c in here if c.tensor.data_ptr() in late):
                self._copy_early(device, side, later)
        filled = {c.pinned.data_ptr() for c in self._copies.values()}
        return [leaf if leaf.address in filled else _kept(leaf) for leaf in leaves]

    def _copy_early(self, device: Any, side: Any, pieces: Sequence[_Piece]) -> None:
        """What can be copied before an update."""
        pace = self._paces.setdefault(device, Pace())
        pace.look()
        size = sum(piece.source.nbytes for piece in pieces)
        early, why = choose_early(size, pace.rate, pace.window, _free(self._torch, device))
        self.why = self.why or why
        ends = itertools.accumulate(piece.source.nbytes for piece in pieces)
        first = [piece for piece, end in zip(pieces, ends, strict=True) if end <= early]
        first = first or list(pieces[:1])  # for how fast they are is measured by copies
        began = _moment(self._torch, side)
        self._copy(side, first)
        pace.begin(began, _moment(self._torch, side), sum(piece.source.nbytes for piece in first))

    def _copy(self, side: Any, pieces: Sequence[_Piece]) -> Any:
        """Enqueues the copies, with an event each time so many bytes are; the last event."""
        some: list[_Piece] = []
        copied = None
        for piece in pieces:
            with on_stream(self._torch, side):
                piece.pinned.copy_(piece.source, non_blocking=True)
            keep_for(piece.source, side)
            some.append(piece)
            if piece is pieces[-1] or sum(each.source.nbytes for each in some) >= _PIECE:
                copied = awaited(self._torch, side.device)
                copied.record(side)
                for each in some:
                    each.copied = copied
                some = []
        return copied

    def release(self, copies: Sequence[_Copy]) -> None:
        """What the training enqueues next may change these tensors."""
        for device in {copy.tensor.device for copy in copies}:
            side, current = self._streams[device], self._torch.accelerator.current_stream(device)
            self._paces[device].reach(self._torch, current)
            with self._lock:
                pieces = _pieces(copy for copy in copies if copy.tensor.device == device)
                left = [piece for piece in pieces if piece.copied is None]
                aside: list[_Piece] = []
                try:
                    for piece in left:
                        piece.source = set_aside(piece.source)
                        aside.append(piece)
                except RuntimeError:  # no memory: the rest is copied, and waited for, as it is
                    self._copy(side, left[len(aside) :])
                there = {piece.copied: None for piece in pieces if piece.copied is not None}
                if aside:
                    follow_aside(side, current)
                    self._copy(side, aside)
                    for piece in aside:
                        piece.source = None  # its memory is free once it is copied
            with waiting(self._torch, device, "checkpoint"):
                for copied in there:
                    hold_back(current, copied)

    def window(self, leaves: Sequence[Leaf], unsteady: set[str]) -> DeviceWindow:
        """The window in which updates have to wait for the copies that are late."""
        names: dict[int, str] = {}
        for leaf in leaves:
            names.setdefault(leaf.address, leaf.name)
        named = [(names[c.pinned.data_ptr()], c) for c in self._late]
        return DeviceWindow(self, named, unsteady)

    def take(self, snapshot: _native.Snapshot) -> None:
        """Waits for the copies and makes them the snapshot; without the GIL."""
        self._copy_the_rest()
        self.await_all()
        snapshot.finish()
        self._copies = {}

    def _copy_the_rest(self) -> None:
        """What no update has reached, one piece after the other: an update waits for one at most."""
        pieces = _pieces(self._late)
        early = {piece.copied: None for piece in pieces if piece.copied is not None}
        if all(piece.copied is not None for piece in pieces):
            return
        for copied in early:
            copied.synchronize()
        for copy in self._late:
            for piece in copy.pieces:
                with self._lock:
                    side = self._streams[copy.tensor.device]
                    copied = piece.copied or self._copy(side, [piece])
                copied.synchronize()

    def await_all(self) -> None:
        for copied in {piece.copied: None for piece in _pieces(self._copies.values())}:
            copied.synchronize()


def _pieces(copies: Iterable[_Copy]) -> list[_Piece]:
    return [piece for copy in copies for piece in copy.pieces]


class DeviceWindow:
    """As `SaveWindow`: what an update is about to change is waited for, on the device."""

    def __init__(
        self, copies: DeviceCopies, named: Sequence[tuple[str, _Copy]], unsteady: set[str]
    ) -> None:
        self._copies, self._unsteady = copies, unsteady
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
        self._copies.release(
            [copy for address in addresses for _, copy in self._left.get(address, ())]
        )
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


def follow_aside(side: Any, current: Any) -> None:
    """The copies read what was set aside."""
    side.wait_stream(current)


def set_aside(tensor: Any) -> Any:
    """A copy on the device, before the tensor changes."""
    return tensor.clone()


def keep_for(tensor: Any, side: Any) -> None:
    """The training may drop the tensor: its memory is given to nothing else before it is copied."""
    tensor.record_stream(side)


def _moment(torch: Any, stream: Any) -> Any:
    """An event that has a time; None where there is none."""
    try:
        event = torch.Event(device=stream.device, enable_timing=True)
        event.record(stream)
    except (RuntimeError, NotImplementedError):
        return None
    return event


def _free(torch: Any, device: Any) -> int:
    """Bytes of the device that nothing has."""
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError, NotImplementedError):  # before torch 2.9
        return 0


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
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
    except RuntimeError as error:
        for device, stream in streams.items():
            if device != "unpinned":
                raise_if_lost(stream)
        if not streams.get("unpinned"):
            streams["unpinned"] = True
            _log.warning(
                "host memory cannot be page-locked (%s): save and restore wait for each copy of a "
                "device's tensor",
                str(error).partition("\n")[0],
            )
        return None
