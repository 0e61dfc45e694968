"""A checkpoint's file straight to a device: read to page-locked memory and sent on, piece by piece.

The first blocks say what the file holds. Its arrays are compared with the state that is to be filled;
those that belong on a device are sent there, on a stream of their own, while the next blocks are read.
A piece is sent once its checksum is found right.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from nostall import _native
from nostall.base._streams import awaited, on_stream
from nostall.base._tensors import octets_of
from nostall.checkpoint._device import follow, pinned, side_of
from nostall.checkpoint._format import header_bytes, parse
from nostall.checkpoint._place import CheckedPart
from nostall.checkpoint._restore import check_fit, fits, is_array
from nostall.checkpoint._tree import Stored, decode
from nostall.errors import Error, UsageError

_log = logging.getLogger("nostall")

_BLOCK = _native.CHECKPOINT_BLOCK
# What is page-locked: so many slabs of so many blocks.
_SLABS = 3
_SLAB_BLOCKS = 8


class Way(NamedTuple):
    """Where bytes lie in the file, and those of a device that they fill; None: nothing takes them."""

    begin: int
    end: int
    bytes: Any


class Head(NamedTuple):
    """What a file holds, by its first blocks: `blocks` of them were read."""

    tree: Any
    arrays: Mapping[str, Stored]
    blocks: int


def read_head(
    file: CheckedPart, blocks: int, threads: int, progress: _native.Progress
) -> tuple[Head | None, list[int]]:
    """Reads what tells of the rest, to `file.data`; damaged blocks, if there are any.

    Raises:
        CorruptionError: it is not a checkpoint file of nostall.
    """
    head = min(1, blocks)
    damaged = file.read(0, head, threads, progress)
    if not damaged and (more := -(-header_bytes(file.data) // _BLOCK) - head) > 0:
        damaged = file.read(head, more, threads, progress)
        head += more
    return (None if damaged else Head(*parse(file.data), head)), damaged


def read_rest(
    file: CheckedPart,
    head: int,
    blocks: int,
    threads: int,
    progress: _native.Progress,
    streams: dict[Any, Any],
    ways_of: Callable[[], Sequence[Way]],
) -> tuple[bool, list[int]]:
    """Reads the blocks from `head` on to `file.data`, but for what has a way to a device.

    It ends at the first damage; devices may have got what was read before.

    Returns:
        Whether devices have all that has a way, or `file.data` has it too, for there is no way or a
        device refuses a copy; and damaged blocks.
    """
    try:
        if ways := sorted(ways_of(), key=lambda way: way.begin):
            slabs = _Slabs(sys.modules["torch"], streams, ways, blocks)
            return True, _send(slabs, file, head, blocks, ways, threads, progress)
    except RuntimeError as error:  # of the device, which the copies on the host's side meet too
        if isinstance(error, Error):
            raise
        _log.warning(
            "arrays go to the device by way of ordinary memory: %s",
            str(error).partition("\n")[0],
        )
    return False, file.read(head, blocks - head, threads, progress)


class Landing:
    """Reads files for a state, parts of which lie on devices.

    Args:
        into: the state; of it, tensors of devices are filled.
        streams: kept from one save or restore to the next, by device.
    """

    def __init__(self, into: Any, streams: dict[Any, Any]) -> None:
        self._into, self._streams = into, streams
        torch = sys.modules.get("torch")
        # What torch is built for may be missing here.
        found = torch and torch.accelerator.current_accelerator(check_available=True)
        # Before anything is read: that of a sharded module needs all ranks.
        self._own = _own(torch, into) if found else None

    def read(
        self, file: CheckedPart, blocks: int, threads: int, progress: _native.Progress
    ) -> tuple[Any, list[int]]:
        """The state in the file, of arrays in `file.data` and on devices, and its damaged blocks.

        It ends at the first damage; devices may have got what was read before.

        Raises:
            CorruptionError: it is not a checkpoint file of nostall.
        """
        head, damaged = read_head(file, blocks, threads, progress)
        if head is None:
            return None, damaged
        tree, arrays, read = head
        placed: dict[str, Any] = {}

        def ways() -> list[Way]:
            if self._own is None:
                return []
            torch = sys.modules["torch"]
            placed.update(self._targets(torch, tree, arrays))
            return _ways(placed, arrays, file.data)

        landed, damaged = read_rest(file, read, blocks, threads, progress, self._streams, ways)
        state = None if damaged else decode(tree, arrays, placed if landed else {})
        return state, damaged

    def _targets(self, torch: Any, tree: Any, arrays: Mapping[str, Stored]) -> dict[str, Any]:
        """By the arrays' names, contiguous tensors of devices for their bytes."""
        accelerator = torch.accelerator.current_accelerator()
        saved = decode(tree, arrays)  # for shapes and types: nothing is read yet
        try:
            check_fit(self._into, saved)
        except UsageError:  # is raised once all ranks have read
            return {}
        if not _loads(torch, self._own, saved):  # load_state_dict says so
            return {}
        names = {_address(stored.data): name for name, stored in arrays.items() if len(stored.data)}
        found: dict[str, Any] = {}
        pairs: Counter[str] = Counter()
        for array, tensor, device in _pairs(torch, self._own, saved):
            name = names.get(_address(array))
            if name is not None and device.type == accelerator.type:
                pairs[name] += 1
                found.setdefault(name, (array, tensor, device))
        # What another place of the state takes too, on the host, is read to the host.
        places = Counter(names.get(_address(array)) for array in _arrays(saved))
        placed = {}
        for name, (array, tensor, device) in found.items():
            if pairs[name] == places[name]:
                if tensor is None or not tensor.is_contiguous():
                    kind = array.dtype if tensor is None else tensor.dtype
                    tensor = torch.empty(array.shape, dtype=kind, device=device)
                placed[name] = tensor
        return placed


class _Slabs:
    """Page-locked memory that goes round, and the streams that copy from it."""

    def __init__(
        self, torch: Any, streams: dict[Any, Any], ways: Sequence[Way], blocks: int
    ) -> None:
        self._torch = torch
        devices = {way.bytes.device for way in ways if way.bytes is not None}
        self._sides = {device: side_of(torch, streams, device) for device in devices}
        for device, side in self._sides.items():
            follow(side, torch.accelerator.current_stream(device))
        size = min(_SLAB_BLOCKS, blocks) * _BLOCK
        self._slabs: deque[tuple[Any, list[Any]]] = deque()  # and the events of their copies
        for _ in range(min(_SLABS, blocks)):
            slab = pinned(torch, streams, (size,), torch.uint8)
            if slab is None:
                slab = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._slabs.append((slab, []))

    def free(self) -> Any:
        """The next slab, once no copy reads it any more."""
        slab, copied = self._slabs[0]
        await_copies(copied)
        return slab

    def send(self, begin: int, ways: Sequence[Way]) -> None:
        """Copies what these arrays have in that slab, whose place in the file is `begin`."""
        slab, _ = self._slabs.popleft()
        ways = [way for way in ways if way.bytes is not None]
        for way in ways:
            first, last = max(begin, way.begin), min(begin + len(slab), way.end)
            with on_stream(self._torch, self._sides[way.bytes.device]):
                target = way.bytes[first - way.begin : last - way.begin]
                target.copy_(slab[first - begin : last - begin], non_blocking=True)
        copied = []
        for device in {way.bytes.device for way in ways}:
            copied.append(awaited(self._torch, device))
            copied[-1].record(self._sides[device])
        self._slabs.append((slab, copied))

    def finish(self) -> None:
        for side in self._sides.values():
            await_end(side)


def await_copies(copied: Sequence[Any]) -> None:
    """A slab may be filled again."""
    for event in copied:
        event.synchronize()


def await_end(side: Any) -> None:
    """The tensors have what they were sent."""
    side.synchronize()


def _send(
    slabs: _Slabs,
    file: CheckedPart,
    head: int,
    blocks: int,
    ways: Sequence[Way],
    threads: int,
    progress: _native.Progress,
) -> list[int]:
    """Reads the blocks from `head` on, and sends the arrays; damaged blocks, if it ended there."""
    data = file.data
    try:
        for first in [head - 1, *range(head, blocks, _SLAB_BLOCKS)]:
            last = head if first < head else min(first + _SLAB_BLOCKS, blocks)
            begin, end = first * _BLOCK, min(last * _BLOCK, len(data))
            here = [way for way in ways if way.begin < end and begin < way.end]
            if not here:
                if first >= head and (damaged := file.read(first, last - first, threads, progress)):
                    return damaged
                continue
            slab = slabs.free()
            there = slab.numpy()[: end - begin]
            if first < head:
                there[:] = data[begin:end]
            else:
                address = slab.data_ptr()
                if damaged := file.read(first, last - first, threads, progress, address):
                    return damaged
                for hole, until in _holes(here, begin, end):
                    data[hole:until] = there[hole - begin : until - begin]
            slabs.send(begin, here)
        return []
    finally:
        slabs.finish()


def _holes(ways: Sequence[Way], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What lies between the arrays, which are in order."""
    for way in ways:
        if begin < way.begin:
            yield begin, way.begin
        begin = max(begin, way.end)
    if begin < end:
        yield begin, end


def way_to(tensor: Any, begin: int) -> Way:
    """That of all bytes of a contiguous tensor, which begin there in the file."""
    return Way(begin, begin + tensor.nbytes, octets_of(tensor.detach()))


def _ways(placed: Mapping[str, Any], arrays: Mapping[str, Stored], data: Any) -> list[Way]:
    ways = []
    for name, tensor in placed.items():
        begin = _address(arrays[name].data) - _address(data)
        ways.append(way_to(tensor, begin))
    return ways


def _address(array: Any) -> int:
    address: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return address


def _arrays(saved: Any) -> Iterator[Any]:
    """All arrays in there."""
    if is_array(saved):
        yield saved
    elif isinstance(saved, dict | list | tuple):
        for value in saved.values() if isinstance(saved, dict) else saved:
            yield from _arrays(value)


class _Object(NamedTuple):
    """One that loads a state, and the state that it has; None: it is not known."""

    value: Any
    own: Any


def _own(torch: Any, value: Any) -> Any:
    """The value with the states of the objects in it."""
    if callable(getattr(value, "load_state_dict", None)):
        return _Object(value, _own(torch, _state_of(torch, value)))
    if isinstance(value, Mapping):
        return {key: _own(torch, one) for key, one in value.items()}
    return [_own(torch, one) for one in value] if isinstance(value, list | tuple) else value


def _state_of(torch: Any, value: Any) -> Any:
    """The state of a module or an optimizer that saves and loads as torch's do; None of all others.

    Of these it is known that they may be given their own tensors, filled; others may write to theirs
    before they read what they are given.
    """
    for kind in (torch.nn.Module, torch.optim.Optimizer):
        ways = [(getattr(value, name, None), name) for name in ("state_dict", "load_state_dict")]
        if isinstance(value, kind) and all(
            getattr(way, "__func__", None) is getattr(kind, name) for way, name in ways
        ):
            try:
                state = value.state_dict()
            except Exception:  # a hook's: load_state_dict may do all the same
                return None
            # What get_extra_state gave is loaded by the user's set_extra_state.
            return {key: one for key, one in state.items() if not _is_extra(key)}
    return None


def _is_extra(key: Any) -> bool:
    return str(key).endswith("_extra_state")


def _loads(torch: Any, value: Any, saved: Any) -> bool:
    """Whether no object whose state is known refuses what was saved, for its names or shapes."""
    if isinstance(value, _Object):
        own = value.own
        if isinstance(value.value, torch.nn.Module) and own is not None:
            plain = (torch.Tensor, torch.nn.Parameter)
            arrays = {key: one for key, one in own.items() if type(one) in plain}
            return (
                isinstance(saved, dict)
                and own.keys() == {key for key in saved if not _is_extra(key)}
                and all(is_array(saved[key]) for key in arrays)
                and all(tuple(one.shape) == tuple(saved[key].shape) for key, one in arrays.items())
            )
        return own is None or _group_sizes(own) == _group_sizes(saved)
    if isinstance(value, dict) and isinstance(saved, dict):
        return all(_loads(torch, one, saved[key]) for key, one in value.items() if key in saved)
    if isinstance(value, list) and isinstance(saved, list | tuple):
        return all(_loads(torch, *both) for both in zip(value, saved, strict=False))
    return True


def _group_sizes(state: Any) -> list[int] | None:
    """How many parameters each group of an optimizer has."""
    try:
        return [len(group["params"]) for group in state["param_groups"]]
    except (LookupError, TypeError):
        return None


def _pairs(torch: Any, value: Any, saved: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Arrays that were saved, each with the tensor that it belongs in, or None, and the device."""
    if is_array(value):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and fits(value, saved):
            yield saved, value.detach(), value.device
    elif isinstance(value, _Object):
        yield from _pairs(torch, value.own, saved)
        yield from _to_come(torch, value, saved)
    elif isinstance(value, dict) and isinstance(saved, dict):
        for key in (key for key in value if key in saved):
            yield from _pairs(torch, value[key], saved[key])
    elif isinstance(value, list) and isinstance(saved, list | tuple):
        for one, other in zip(value, saved, strict=False):  # of another length: it does not fit
            yield from _pairs(torch, one, other)


def _to_come(torch: Any, given: _Object, saved: Any) -> Iterator[tuple[Any, None, Any]]:
    """What an optimizer of torch that has made no step will take to the devices of its parameters."""
    optimizer = given.value
    known = isinstance(optimizer, torch.optim.Optimizer) and isinstance(given.own, dict)
    if not known or given.own.get("state", True):
        return
    try:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        states = saved["state"]
        parameters = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, array in states.get(number, {}).items():
                if key != "step" and isinstance(array, torch.Tensor):
                    yield array, None, parameter.device
    except (LookupError, TypeError, AttributeError, ValueError):
        return  # load_state_dict says what is wrong
