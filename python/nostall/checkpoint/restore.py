"""From a checkpoint's files back to a state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from nostall import _native
from nostall.checkpoint.format import Manifest, Part, arrays_in, parse
from nostall.checkpoint.store import Entry, Store
from nostall.checkpoint.tree import decode
from nostall.errors import CorruptionError, UsageError


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read and checked; arrays of `state` share memory of their own."""

    state: Any
    step: int
    tier: str
    manifest: Manifest
    seconds: float


# Step, kind of store, id, time of creation.
Choice = tuple[int, str, str, float]


def view(stores: Sequence[Store], step: int | None) -> tuple[list[Choice], list[str]]:
    """What could be restored, best first, and what is damaged at first sight."""
    choices: list[Choice] = []
    problems = []
    for store in stores:
        for entry in store.entries():
            if step is not None and entry.step != step:
                continue
            entry, damage = _settled(store, entry)
            if damage or entry.manifest is None:
                if damage:
                    problems.append(damage)
            else:
                manifest = entry.manifest
                choices.append((entry.step, store.kind, manifest.id, manifest.created))
    return in_order(choices), problems


def in_order(choices: Iterable[Choice]) -> list[Choice]:
    """Best first: the newest step, of it the newest save, from the fast tier."""
    order = {"fast": 0, "durable": 1}
    return sorted(choices, key=lambda c: (-c[0], -c[3], order[c[1]]))


def _settled(store: Store, entry: Entry) -> tuple[Entry, str]:
    """The entry and its damage; once more where it was replaced while it was looked at."""
    while True:
        damage = entry.damage if entry.manifest is None else store.missing(entry.manifest)
        now = store.entry(entry.step) if damage else entry
        if now is None:  # removed meanwhile
            return Entry(entry.step, entry.path, None), ""
        if now == entry:
            return entry, damage
        entry = now


def read_part(
    store: Store,
    manifest: Manifest,
    rank: int,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> Restored:
    """The state of one rank.

    Raises:
        CorruptionError: what is damaged: the file, its bytes and the arrays in them.
        IoError: the file cannot be read.
    """
    if manifest.extra is not None:
        raise UsageError(
            f"step {manifest.step} in {store.root} was saved by torch.distributed.checkpoint: load it "
            "with nostall.torch.checkpoint.load or StorageReader"
        )
    part = manifest.part_of(rank)
    if part is None:
        raise UsageError(f"step {manifest.step} in {store.root} has no part of rank {rank}")
    path = store.directory(manifest.step) / part.name
    counter = _native.Progress()
    with _Reporter(progress, counter, part.size):
        data, damaged, seconds = _native.read_checked(
            str(path), part.size, list(part.crcs), max(4, threads), counter
        )
    if damaged:
        raise CorruptionError(
            f"{path} is damaged: {describe(part, damaged, arrays_in(data, damaged))}"
        )
    tree, arrays = parse(data)
    return Restored(decode(tree, arrays), manifest.step, store.kind, manifest, seconds)


def describe(part: Part, blocks: Sequence[int], names: Sequence[str] = ()) -> str:
    """Which bytes of a part are wrong, and what lies in them."""
    size = _native.CHECKPOINT_BLOCK
    first = blocks[0]
    text = f"bytes {first * size} to {min(part.size, (first + 1) * size)} do not match their CRC32C"
    if len(blocks) > 1:
        text += f", and {len(blocks) - 1} more blocks of {size} bytes"
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        text += f" (in them: {shown})"
    return text


def load_into(target: MutableMapping[str, Any], state: Any) -> None:
    """Gives each value of `target` its saved state.

    Raises:
        UsageError: the checkpoint has other names.
    """
    if not isinstance(state, dict) or state.keys() != target.keys():
        saved = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise UsageError(
            f"the checkpoint holds {saved}, this training has {sorted(map(str, target))}"
        )
    for key, value in target.items():
        if callable(getattr(value, "load_state_dict", None)):
            value.load_state_dict(state[key])
        elif isinstance(value, MutableMapping) and any(
            callable(getattr(v, "load_state_dict", None)) for v in value.values()
        ):
            load_into(value, state[key])
        else:
            target[key] = state[key]


class _Reporter:
    """Tells how far a long read is, five times a second."""

    def __init__(
        self,
        progress: Callable[[int, int], None] | None,
        counter: _native.Progress,
        total: int,
    ) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if progress is not None:

            def tell() -> None:
                while not self._done.wait(0.2):
                    progress(counter.bytes, total)
                progress(counter.bytes, total)

            self._thread = threading.Thread(target=tell, daemon=True)

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
