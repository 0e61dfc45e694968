"""Reads a checkpoint's files back to a state."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nostall import _native
from nostall.base._tensors import octets_of, tensor_of
from nostall.checkpoint._format import Manifest, Part, arrays_in, parse
from nostall.checkpoint._lineage import Ranges, Record, is_past, newest
from nostall.checkpoint._place import UnreachableError, refuse_scarce, scarce_is_away
from nostall.checkpoint._store import Entry, Store
from nostall.checkpoint._tree import decode, import_for
from nostall.errors import CorruptionError, Error, IoError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall.checkpoint._landing import Landing

# How often a manifest is read that is replaced each time.
_READS = 10
# Arrays that are no longer are copied for an object that may keep them: bytes.
_SMALL_BYTES = 4096


@dataclass(frozen=True, repr=False)
class Restored:
    """A checkpoint that was read and checked.

    Arrays of `state` share memory of their own; with `into`, those that went to a device are there.
    """

    state: Any
    step: int
    tier: str
    manifest: Manifest
    seconds: float

    def __repr__(self) -> str:
        keys = f", {len(self.state)} entries" if isinstance(self.state, dict) else ""
        return (
            f"Restored(step={self.step}, tier={self.tier!r}, {self.manifest.size} bytes{keys}, "
            f"seconds={self.seconds:.3f})"
        )


class Choice(NamedTuple):
    """A checkpoint that could be restored; `kind` is that of its store, `name` that of its manifest."""

    step: int
    kind: str
    id: str
    order: tuple[int, float, str]
    name: str

    @property
    def sequence(self) -> int:
        """Its number in the order of saves."""
        return self.order[0]


@dataclass
class View:
    """What some directories hold: checkpoints that could be restored, and damage."""

    choices: list[Choice]
    problems: list[str]
    # The newest record, which defines the current branch: its number, and what it gave up.
    top: tuple[int, Ranges] | None
    # Directories that are not the job's any more: why.
    away: list[str] = field(default_factory=list)
    # Of what is damaged or cannot be read: the kind of its store, its step, and its manifest's name.
    passed: list[tuple[str, int, str]] = field(default_factory=list)


def view(stores: Sequence[Store], step: int | None) -> View:
    """What could be restored, best first.

    Raises:
        UnreachableError: one of them does not answer, or what it takes to read them is missing.
    """
    choices: list[Choice] = []
    problems: list[str] = []
    away: list[str] = []
    passed: list[tuple[str, int, str]] = []
    records: list[Record | None] = []
    for store in stores:
        try:
            store.check_there()  # or nothing may seem to be there
        except Error as error:
            away.append(str(error))
        try:
            with scarce_is_away(store.root):
                records.append(store.branch())
        except UnreachableError:
            raise
        except (Error, OSError) as error:
            problems.append(str(error))
        for entry in store.entries():
            records.append(entry.manifest)
            if step is not None and entry.step != step:
                continue
            entry, damage = _settled(store, entry)
            if damage or entry.manifest is None:
                if damage:
                    problems.append(damage)
                    passed.append((store.kind, entry.step, entry.name))
            else:
                manifest = entry.manifest
                choices.append(
                    Choice(entry.step, store.kind, manifest.id, manifest.order, entry.name)
                )
    top = newest(records)
    last = (top.sequence, top.abandoned) if top is not None else None
    found = View([], [*away, *problems], last, away, passed)
    found.choices = in_order(choices, found.top)
    return found


def on_branch(choice: Choice, top: tuple[int, Ranges] | None) -> bool:
    """Whether a checkpoint is of the branch of the newest record."""
    return top is not None and is_past(choice.sequence, *top)


def in_order(choices: Iterable[Choice], top: tuple[int, Ranges] | None) -> list[Choice]:
    """Best first: those of the current branch, of them the newest, from the fast tier."""
    tiers = {"fast": 0, "durable": 1}
    by_tier = sorted(choices, key=lambda c: tiers[c.kind])
    newest_first = sorted(by_tier, key=lambda c: c.order, reverse=True)
    return sorted(newest_first, key=lambda c: not on_branch(c, top))


def _settled(store: Store, entry: Entry) -> tuple[Entry, str]:
    """The entry and what is wrong with it; read again if it was replaced meanwhile."""
    for _ in range(_READS):
        refuse_scarce(entry.unread, entry.damage)
        try:
            with scarce_is_away(entry.path):
                damage = entry.damage if entry.manifest is None else store.missing(entry.manifest)
        except UnreachableError:
            raise
        except IoError as error:
            damage = str(error)
        now = store.read(entry.step, entry.name) if damage else entry
        if now is None:  # removed meanwhile
            return Entry(entry.step, entry.path, None), ""
        if now == entry:
            break
        entry = now
    return entry, damage


def read_part(
    store: Store,
    manifest: Manifest,
    rank: int,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
    landing: Landing | None = None,
) -> Restored:
    """The state of one rank; of it, `landing` sends arrays to devices.

    Raises:
        CorruptionError: what is damaged: the file, its bytes and the arrays in them.
        IoError: the file cannot be read.
        UnreachableError: that says nothing of the file.
    """
    if manifest.extra is not None:
        raise UsageError(
            f"step {manifest.step} in {store.root} was saved by torch.distributed.checkpoint: load it "
            "with nostall.torch.checkpoint.load or StorageReader"
        )
    part = manifest.part_of(rank)
    # Callers refuse another number of ranks, and a manifest names a part of each.
    assert part is not None
    path = store.place(manifest.step) / part.name
    counter = _native.Progress()
    began, threads, blocks = time.perf_counter(), max(4, threads), len(part.crcs)
    with scarce_is_away(path), _Reporter(progress, counter, part.size):
        file = store.open(manifest.step, part)
        if landing is not None:
            state, damaged = landing.read(file, blocks, threads, counter)
        elif not (damaged := file.read(0, blocks, threads, counter)):
            tree, arrays = parse(file.data)
            began += import_for(tree)
            state = decode(tree, arrays)
    if damaged:
        raise CorruptionError(
            f"{path} is damaged: {describe(part, damaged, arrays_in(file.data, damaged))}"
        )
    seconds = time.perf_counter() - began
    return Restored(state, manifest.step, store.kind, manifest, seconds)


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


def check_fit(target: Any, state: Any) -> list[Callable[[], object]]:
    """What gives each value of `target` its saved state, and was not called yet.

    Raises:
        UsageError: the checkpoint has other names, or an array of another shape or type.
    """
    todo: list[Callable[[], object]] = []
    loads = callable(getattr(target, "load_state_dict", None))
    if isinstance(target, MutableMapping | list) and not loads:  # its entries can be replaced
        _plan_entries(target, state, "state", todo)
    elif _plan(target, state, "state", todo) is not None:
        raise UsageError(
            f"into= is a {type(target).__name__}, not all of which can be filled: give a dictionary, a "
            "list, a writeable array or an object with a load_state_dict, or read restore().state"
        )
    return todo


def _plan(
    value: Any, saved: Any, place: str, todo: list[Callable[[], object]]
) -> Callable[[], Any] | None:
    """Notes how `value` is filled in place; what makes the value that takes its place, if it is not."""
    if callable(getattr(value, "load_state_dict", None)):
        todo.append(partial(_load, value, saved, place))
        return None
    if is_array(value) or _is_of_jax(value):
        _check_array(value, saved, place)
        if is_array(value) and _plan_fill(value, saved, place, todo):
            return None
    elif _is_in_place(value):
        return _plan_entries(value, saved, place, todo)
    return partial(_as_it_was, value, saved)


class MisfitError(UsageError):
    """A module has other tensors than the checkpoint, which torch's error names."""


def _load(value: Any, saved: Any, place: str) -> None:
    try:
        value.load_state_dict(_apart(saved, {}))
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        raise MisfitError(
            f"{place} does not fit: {error}\nBuild the module as it was when it was saved, or read "
            "restore().state without into= and load what fits"
        ) from error


def _apart(saved: Any, made: dict[int, Any]) -> Any:
    """The same with memory of their own for small arrays of the host, by their ids in `made`.

    An object may keep what it is given, and one counter of an optimizer would keep the whole file.
    """
    if is_array(saved):
        device = saved.device.type if _is_tensor(saved) else "cpu"
        if device != "cpu" or saved.nbytes > _SMALL_BYTES:
            return saved
        if id(saved) not in made:
            made[id(saved)] = saved.clone() if _is_tensor(saved) else saved.copy()
        return made[id(saved)]
    if isinstance(saved, dict):
        entries = copy.copy(saved)  # with the versions of a module's
        for key, one in saved.items():
            entries[key] = _apart(one, made)
        return entries
    if isinstance(saved, list | tuple):
        return type(saved)(_apart(one, made) for one in saved)
    return saved


def _plan_entries(
    target: Any, saved: Any, place: str, todo: list[Callable[[], object]]
) -> Callable[[], Any] | None:
    """As `_plan`, of a mapping, a list or a tuple."""
    _check_entries(target, saved, place)
    made = {}
    for key, old in _entries(target):
        make = _plan(old, saved[key], f"{place}[{key!r}]", todo)
        if make is not None:
            made[key] = make
    if isinstance(target, MutableMapping | list):
        todo += [partial(_replace, target, key, make) for key, make in made.items()]
        return None
    return partial(_with, target, made) if made else None


def _entries(values: Any) -> list[tuple[Any, Any]]:
    return list(values.items() if isinstance(values, Mapping) else enumerate(values))


def _check_entries(target: Any, saved: Any, place: str) -> None:
    if isinstance(target, Mapping):
        if not isinstance(saved, dict) or saved.keys() != target.keys():
            names = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
            where = "" if place == "state" else f" in {place}"
            raise UsageError(
                f"the checkpoint holds {names}{where}, this training has {sorted(map(str, target))}: "
                "give into= the same names, or read restore().state without it"
            )
    elif not isinstance(saved, list | tuple) or len(saved) != len(target):
        of = len(saved) if isinstance(saved, list | tuple) else type(saved).__name__
        raise UsageError(f"{place} has {len(target)} entries, the checkpoint {of} there")


def _replace(values: Any, key: Any, make: Callable[[], Any]) -> None:
    values[key] = make()


def _with(values: Any, made: Mapping[Any, Callable[[], Any]]) -> Any:
    """A tuple, or a mapping that cannot change, with other entries."""
    entries = {key: made[key]() if key in made else old for key, old in _entries(values)}
    return entries if isinstance(values, Mapping) else _tuple_as(values, entries.values())


def _tuple_as(value: Any, entries: Iterable[Any]) -> Any:
    """A tuple of these; a named one if that one is."""
    return getattr(type(value), "_make", tuple)(entries)


def _as_it_was(value: Any, saved: Any) -> Any:
    """What was saved; an array of JAX, which cannot be filled, on the devices of the one before."""
    if _is_of_jax(value):
        jax = sys.modules["jax"]
        array = _in_numpy(saved, value.dtype)
        if not value.committed:
            return jax.numpy.asarray(array)
        return jax.make_array_from_callback(array.shape, value.sharding, array.__getitem__)
    if isinstance(value, Mapping) and isinstance(saved, dict):
        made = copy.copy(saved)  # with the versions of a module's
        if isinstance(value, defaultdict):
            made = defaultdict(value.default_factory, saved)
        for key in saved.keys() & value.keys():
            made[key] = _as_it_was(value[key], saved[key])
        return made
    for kind, make in ((tuple, partial(_tuple_as, value)), (list, list)):
        if isinstance(value, kind) and isinstance(saved, kind) and len(value) == len(saved):
            return make(map(_as_it_was, value, saved))
    return saved


def _is_in_place(value: Any) -> bool:
    """Whether something in there is filled in place, or has its place on devices of JAX."""
    if callable(getattr(value, "load_state_dict", None)) or is_array(value) or _is_of_jax(value):
        return True
    if isinstance(value, Mapping | list | tuple):
        return any(_is_in_place(one) for _, one in _entries(value))
    return False


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_of_jax(value: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def fits(value: Any, saved: Any) -> bool:
    """Whether both are arrays of one shape and type."""
    return (
        is_array(saved)
        and tuple(value.shape) == tuple(saved.shape)
        and _kind(value) == _kind(saved)
    )


def _kind(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _check_array(value: Any, saved: Any, place: str) -> None:
    if _is_tensor(value) and value.device.type == "meta":
        raise UsageError(
            f"{place} is a tensor without memory, on the device meta: make it on another one, or give "
            "None in its place, which takes what was saved"
        )
    if not is_array(saved):
        raise UsageError(
            f"{place} is an array of shape {tuple(value.shape)}, the checkpoint has a "
            f"{type(saved).__name__} there: None in its place takes whatever was saved"
        )
    if not fits(value, saved):
        raise UsageError(
            f"{place} is of shape {tuple(value.shape)} and type {_kind(value)}, the checkpoint has "
            f"shape {tuple(saved.shape)} and type {_kind(saved)} there: make it of this shape and "
            "type, or give None in its place, which takes whatever was saved"
        )


def _refuse_shared(value: Any, place: str) -> None:
    """An array that shows one element in several places, as `expand` makes them, cannot be filled."""
    strides = value.stride() if _is_tensor(value) else value.strides
    sides = zip(strides, value.shape, strict=True)
    if 0 not in value.shape and any(stride == 0 and side > 1 for stride, side in sides):
        raise UsageError(
            f"{place} has several elements in one place of memory: give a copy of it, with memory of "
            "its own for each, or read restore().state"
        )


def _plan_fill(value: Any, saved: Any, place: str, todo: list[Callable[[], object]]) -> bool:
    if _is_tensor(value):
        _refuse_shared(value, place)
        source = saved if _is_tensor(saved) else _in_torch(saved, value.dtype)
        if source.device != value.device or source.data_ptr() != value.data_ptr():
            todo.append(lambda: value.detach().copy_(source))
        return True
    if not value.flags.writeable:
        return False
    _refuse_shared(value, place)
    source = _in_numpy(saved, value.dtype)
    todo.append(lambda: np.copyto(value, source))
    return True


# By bytes, as neither knows all types of the other's, bfloat16 for example.
def _in_numpy(saved: Any, dtype: Any) -> NDArray[Any]:
    if isinstance(saved, np.ndarray):
        return saved
    flat = octets_of(saved).numpy()
    array: NDArray[Any] = flat.view(dtype).reshape(saved.shape)
    return array


def _in_torch(saved: NDArray[Any], dtype: Any) -> Any:
    return tensor_of(saved.reshape(-1).view(np.uint8), dtype, saved.shape)


class _Reporter:
    """Reports the progress of a long read, five times per second."""

    def __init__(
        self,
        progress: Callable[[int, int], None] | None,
        counter: _native.Progress,
        total: int,
    ) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress, self._counter, self._total = progress, counter, total

    def _report(self) -> None:
        assert self._progress is not None
        while not self._done.wait(0.2):
            self._progress(self._counter.bytes, self._total)
        self._progress(self._counter.bytes, self._total)

    def __enter__(self) -> None:
        if self._progress is not None:
            thread = threading.Thread(target=self._report, daemon=True)
            with contextlib.suppress(RuntimeError):  # a limit of processes: it reports the end
                thread.start()
                self._thread = thread

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        elif self._progress is not None:
            self._report()
