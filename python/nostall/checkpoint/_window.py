"""The immutable window of a save: what of it still lies where the training has it.

Weights and optimizer state change in the optimizer's step alone [Li 2019, sec. III]. Until then they
need not be copied: what an update is about to change is copied just before it, and what the writer has
read by then is not copied at all. Whatever else a state holds (batch norm's statistics, generators) may
change at any time, and is copied by the save itself.

What changes a weight besides (an embedding with max_norm, a clamp) would leave a copy that is half of
one moment and half of another. Torch counts the changes of a tensor: a copy of one whose count has
moved is not kept, and the tensor is copied by the save itself from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nostall import _native
from nostall.checkpoint._saved import Saved
from nostall.checkpoint._tree import Leaf

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


class SaveWindow:
    """One open window.

    Args:
        snapshot: begun, with `leaves` as its pieces.
        leaves: what the snapshot is made of; kept until the window is closed, because the snapshot
            reads them until then, whatever becomes of the writing.
        guarded: where those lie that are copied later; None: all of them.
        saved: gets the seconds that updates waited.
        unsteady: gets the names of leaves that changed otherwise.
    """

    def __init__(
        self,
        snapshot: _native.Snapshot,
        leaves: Sequence[Leaf],
        guarded: set[int] | None,
        saved: Saved,
        unsteady: set[str],
    ) -> None:
        self._snapshot, self._saved, self._unsteady = snapshot, saved, unsteady
        self._leaves: Sequence[Leaf] = leaves
        self._began = time.perf_counter()
        self._lock = threading.Lock()  # of what follows: the writer looks as well
        self._left: dict[int, list[int]] = {}
        self._changes = [changes_of(leaf.owner) for leaf in leaves]
        self._torn = ""
        now = []
        for i, leaf in enumerate(leaves):
            if leaf.nbytes and guarded is not None and leaf.address not in guarded:
                now.append(i)
            elif leaf.nbytes:
                self._left.setdefault(leaf.address, []).append(i)
        if now:
            snapshot.copy(now)

    def reach(self, optimizer: Any) -> bool:
        """Copies what a step of this optimizer is about to change; whether anything is left."""
        began = time.perf_counter()
        reached = [a for a in (t.data_ptr() for t in tensors_of(optimizer)) if a in self._left]
        if len(set(reached)) == len(self._left):
            return False
        self._snapshot.copy([piece for address in reached for piece in self._left[address]])
        self.torn()
        with self._lock:
            for address in reached:
                self._left.pop(address, None)
        self._saved.update_seconds += time.perf_counter() - began
        return True

    def torn(self) -> str:
        """What has changed before it was certainly copied, as a reason; or nothing.

        To be asked once all that is not guarded any more is copied, or written.
        """
        with self._lock:
            names = [
                self._leaves[piece].name
                for pieces in self._left.values()
                for piece in pieces
                if changes_of(self._leaves[piece].owner) != self._changes[piece]
            ]
            self._unsteady.update(names)  # those too that change after the writer has looked
            self._torn = self._torn or torn_words(names)
            return self._torn

    def close(self) -> float:
        """Copies all that is left; how long the window was open, in seconds."""
        began = time.perf_counter()
        self._snapshot.finish()
        self.torn()
        with self._lock:
            self._left = {}
            self._leaves = ()
        self._saved.update_seconds += time.perf_counter() - began
        return began - self._began


def guarded_addresses(
    leaves: Sequence[Leaf], optimizers: Sequence[Any], unsteady: set[str]
) -> set[int] | None:
    """Where the memory lies that only these optimizers' steps change, and that has not been seen to
    change otherwise; without optimizers nothing changes before the window is closed. None: all."""
    if not optimizers and not unsteady:
        return None
    if optimizers:
        guarded = {t.data_ptr() for optimizer in optimizers for t in tensors_of(optimizer)}
    else:
        guarded = {leaf.address for leaf in leaves}
    return guarded - {leaf.address for leaf in leaves if leaf.name in unsteady}


def torn_words(names: Sequence[str]) -> str:
    """Why a save is given up in whose window these changed; nothing if none did."""
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more} changed before the update, and not by an attached optimizer, so "
        "that the copy is not of one moment; from now on save copies them before it returns"
    )


def changes_of(owner: Any) -> int | None:
    """How often torch changed the tensor in place; None where it is not counted."""
    try:
        return owner._version  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # an array; a tensor of inference_mode
        return None
