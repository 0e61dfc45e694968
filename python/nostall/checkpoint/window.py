"""The immutable window of a save: what of it still lies where the training has it.

Weights and optimizer state change in the optimizer's step alone ("Understanding Scalability and
Fine-Grain Parallelism of Synchronous Data Parallel Training", section III: immutable bandwidth).
Until then they need not be copied; what an update is about to reach is copied just before it, and
what a writer has read by then is not copied at all. Whatever else a state holds (batch norm's
statistics, generators) may change at any time, and is copied by the save itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from nostall import _native
from nostall.checkpoint.saved import Saved
from nostall.checkpoint.tree import Leaf

# A window this much longer than the writing of a state needs no copy.
_ROOM = 1.25


def choose_copying(
    window_seconds: float | None, write_seconds: float | None
) -> tuple[_native.Copying, str]:
    """How to take a snapshot in a window, by how long the last window and the last writing took."""
    if window_seconds is None or write_seconds is None:
        return _native.Copying.in_background, "nothing is known of window and storage yet"
    if window_seconds >= _ROOM * write_seconds:
        return _native.Copying.lazily, (
            f"it can be written in {write_seconds:.3g} s, before the update in {window_seconds:.3g} s"
        )
    return _native.Copying.in_background, (
        f"writing takes {write_seconds:.3g} s, and the update comes in {window_seconds:.3g} s"
    )


def tensors_of(optimizer: Any) -> Iterator[Any]:
    """What a step of a torch optimizer changes: the parameters of its groups, and their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if hasattr(value, "data_ptr"):
                    yield value


class Window:
    """One open window.

    Args:
        image: begun, with `leaves` as its pieces.
        leaves: what the image is made of; kept until the window is closed, for the image reads them
            until then, whatever becomes of the writing.
        optimizers: the ones that alone change what they hold; none: nothing changes before `close`.
        saved: gets the seconds that updates waited.
    """

    def __init__(
        self, image: _native.Image, leaves: Sequence[Leaf], optimizers: Sequence[Any], saved: Saved
    ) -> None:
        self._image, self._saved = image, saved
        self._leaves: Sequence[Leaf] = leaves
        self._began = time.perf_counter()
        self._left: dict[int, list[int]] = {}
        guarded = guarded_addresses(optimizers)
        now = []
        for i, leaf in enumerate(leaves):
            if leaf.nbytes and guarded is not None and leaf.address not in guarded:
                now.append(i)
            elif leaf.nbytes:
                self._left.setdefault(leaf.address, []).append(i)
        if now:
            image.copy(now)

    def reach(self, optimizer: Any) -> bool:
        """Copies what a step of this optimizer is about to change; whether anything is left."""
        began = time.perf_counter()
        pieces: list[int] = []
        for tensor in tensors_of(optimizer):
            pieces += self._left.pop(tensor.data_ptr(), ())
        if self._left:
            self._image.copy(pieces)
            self._saved.update_seconds += time.perf_counter() - began
        return bool(self._left)

    def close(self) -> float:
        """Copies all that is left; how long the window was open, in seconds."""
        began = time.perf_counter()
        self._image.finish()
        self._leaves = ()
        self._saved.update_seconds += time.perf_counter() - began
        return began - self._began


def guarded_addresses(optimizers: Sequence[Any]) -> set[int] | None:
    """Where the memory lies that only these optimizers' steps change; None without optimizers."""
    if not optimizers:
        return None
    return {tensor.data_ptr() for optimizer in optimizers for tensor in tensors_of(optimizer)}
