"""torch.distributed.checkpoint on nostall's files: sharded state, loaded on any world size.

    writer = StorageWriter("/pfs/ckpt", keep=5)
    dcp.save(state, checkpoint_id=str(step), storage_writer=writer)        # or dcp.async_save
    step = nostall.torch.checkpoint.load(state, "/pfs/ckpt")

PyTorch decides which rank saves what, and what goes where on loading (FSDP, DTensor, planners). This
module makes a checkpoint complete through one rename, compares a CRC32C of every byte on loading, and
keeps metadata as JSON, so that no pickle from a file is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import re
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nostall import _native
from nostall.base._paths import path_of
from nostall.checkpoint import _format as files
from nostall.checkpoint._begin import lineage_of
from nostall.checkpoint._cleaner import Cleaner
from nostall.checkpoint._device import DeviceCopies
from nostall.checkpoint._drain import read_back
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._landing import Way, read_head, read_rest, way_to
from nostall.checkpoint._lineage import Lineage, Ranges
from nostall.checkpoint._open import check_places, open_store
from nostall.checkpoint._place import Pacing, Place, UnreachableError, scarce_is_away
from nostall.checkpoint._restore import describe, on_branch, view
from nostall.checkpoint._retention import Keep
from nostall.checkpoint._saved import Settings
from nostall.checkpoint._store import (
    LARGEST_STEP,
    Store,
    io_errors,
    part_name,
    refuse_unmounted,
)
from nostall.checkpoint._tree import decode, encode
from nostall.errors import CorruptionError, Error, IoError, UsageError

__all__ = ["StorageReader", "StorageWriter", "load"]

_log = logging.getLogger("nostall")
# Ids of saves that `load` found unusable, by their places: they never count as kept.
_damaged: defaultdict[str, set[str]] = defaultdict(set)
_LOOKS = 10  # for checkpoints that another job does not retire before they are read
_STEP = re.compile(r"0*(\d+)/?$")
_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Saving(threading.local):
    """The save that a thread is at: torch calls the writer for all of it in one thread."""

    given: int | None = None  # by `reset`, for the save that begins next
    step = -1
    number: tuple[int, Ranges] = (-1, ())  # and what it gives up: the coordinator's


class StorageWriter(dcp.StorageWriter):  # type: ignore[misc]
    """Writes checkpoints into a directory that all ranks see, or below a URL on an object store.

    Args:
        root: the directory, or a URL such as ``s3://bucket/run1``.
        keep: how many stay, or a `Keep`.
        threads: number of threads that copy.
        fast: with a URL, a directory on fast storage, where each rank's part lies until it is uploaded.

    The step is the number at the end of ``checkpoint_id``, which each save needs. A step below the
    newest one begins a branch: later steps are superseded, and the rules of `keep` hold for that branch
    by itself. Use one writer for all saves, because it keeps its memory. Several may be under way, as
    those of ``dcp.async_save``, in the order in which they begin; one at a time writes. Only one job at
    a time may write into a directory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | Keep = 5,
        threads: int = 2,
        fast: str | os.PathLike[str] | None = None,
    ) -> None:
        check_places(fast, root)
        self._store = open_store(root, "durable")
        if fast is not None and self._store.is_directory:
            raise UsageError(f"fast={fast} is for a URL: parts are written to {root} itself")
        self._fast = None if fast is None else Path(os.path.abspath(path_of(fast, "fast")))
        self._keep = keep if isinstance(keep, Keep) else Keep(keep)
        self._threads = threads
        self._snapshot = _native.Snapshot(threads)
        self._streams: dict[Any, Any] = {}  # of copies, by device
        self._saving = _Saving()
        # The snapshot is of one save at a time; a signal's handler may save within a save.
        self._writing = threading.RLock()
        self._within = False
        self._changing = threading.RLock()  # what the coordinator has and knows of the directory
        self._owned = False
        self._recognized = False  # on a rank that leaves the owning to the coordinator
        # The steps of saves that are not complete, and the threads that are or were at them, by id.
        self._begun: dict[str, tuple[int, threading.Thread]] = {}
        self._lineage: Lineage | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the step from the id of the next checkpoint."""
        step = _step_of(checkpoint_id)
        if step is None:
            raise UsageError(
                f'checkpoint_id must end with the step, as "120" or "run/120", not {checkpoint_id!r}'
            )
        self._saving.given = step

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """The coordinator takes the directory at its first save.

        Raises:
            UsageError: this save has no id, or several ranks save each by itself.
        """
        if not kwargs.get("use_collectives", True) and _ranks() > 1:
            raise UsageError(
                "use_collectives=False is not supported on several ranks: each would make a checkpoint "
                "of its own part"
            )
        saving = self._saving
        step, saving.given = saving.given, None
        if step is None:
            raise UsageError("give checkpoint_id=, which ends with the step, to each save")
        saving.step = step
        if not is_coordinator:
            return
        with self._changing:
            if self._lineage is None or not self._owned:
                self._store.own()
                self._store.clean()
                self._lineage = lineage_of([self._store], [self._store])
                self._owned = True
            saving.number = self._lineage.save(step)

    def close(self) -> None:
        """Removes the parts of saves that are not complete, and lets other jobs write into the
        directory."""
        with self._changing:
            self._remove_incomplete(list(self._begun))
            self._store.disown()
            self._owned = self._recognized = False

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Gives all ranks the id of this save, and each rank its number.

        Raises:
            UsageError: a planner lets some rank write by the plan of an earlier save, with its id.
        """
        if not all(plan.usable for plan in plans):
            raise UsageError(
                "this save planner takes its plan from an earlier save, which is not supported: give "
                "DefaultSavePlanner without enable_plan_caching"
            )
        id = f"{secrets.token_hex(4)}-000000"
        me = threading.current_thread()
        with self._changing:
            # No rank is at these any more, and none has begun this one.
            over = [i for i, (_, it) in self._begun.items() if it is me or not it.is_alive()]
            self._remove_incomplete(over)
            self._begun[id] = self._saving.step, me
        return [
            dataclasses.replace(plan, storage_data={"id": id, "part": i, "parts": len(plans)})
            for i, plan in enumerate(plans)
        ]

    def _remove_incomplete(self, ids: Iterable[str]) -> None:
        """Removes the parts of saves that some rank could not write or that could not be completed."""
        for id in ids:
            step, _ = self._begun.pop(id)
            try:
                if self._store.lacks(Manifest(step, id, 1, ())):
                    self._store.remove(step, id)
                    # And with it the directory of the step.
                    self._store.discard(step, part_name(0, id))
            except (Error, OSError) as error:
                _log.warning("parts of step %d that is not complete stay: %s", step, error)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part; the future completes when it is on its device."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        if not (self._owned or self._recognized):
            with contextlib.suppress(Error, OSError):  # then it cannot tell another directory
                self._store.recognize()
                self._recognized = True
        where = plan.storage_data
        state: dict[str, dict[str, Any]] = {"tensors": {}, "objects": {}}
        keys = []
        for i, item in enumerate(plan.items):
            data: Any = planner.resolve_data(item)
            values = state["tensors"]
            if item.type == WriteItemType.BYTE_IO:
                # Just made by the planner; stored as values, so that loading needs no pickle.
                data.seek(0)
                data, values = torch.load(data, weights_only=False), state["objects"]
            key = item.index.fqn
            while key in values:  # another part of the same tensor
                key += f"#{i}"
            values[key] = data
            keys.append(key)
        with self._writing:
            within, self._within = self._within, True
            try:
                snapshot = _native.Snapshot(self._threads) if within else self._snapshot
                part = self._write(snapshot, state, where["part"], where["id"])
            finally:
                self._within = within
        note = {"id": where["id"], "parts": where["parts"], "part": part.to_dict()}
        done.set_result(
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=_size(item),
                    storage_data={
                        "key": key,
                        "part": where["part"],
                        "note": note if not i else None,
                    },
                )
                for i, (key, item) in enumerate(zip(keys, plan.items, strict=True))
            ]
        )
        return done

    def _write(
        self, snapshot: _native.Snapshot, state: dict[str, dict[str, Any]], rank: int, id: str
    ) -> Part:
        """Takes the state to its device as the part of a rank."""
        copies = DeviceCopies(self._streams, {})  # of all tensors on a device at once, and one wait
        tree, leaves = encode(state, copies.host)
        if copies:
            leaves = copies.enqueue(torch, leaves)
        leaves = files.layout(leaves)
        pieces = [(leaf.address, leaf.nbytes) for leaf in leaves]
        copies.await_all()
        snapshot.begin(files.header(tree, leaves), pieces)
        snapshot.finish()
        name = part_name(rank, id)
        if self._fast is None:
            path = self._store.prepare(self._saving.step) / name
        else:  # not in a directory of the step, which another rank might remove
            with io_errors("make the directory", self._fast):
                refuse_unmounted(self._fast)
                self._fast.mkdir(parents=True, exist_ok=True)
            path = self._fast / name
        priority = _native.Priority.normal
        try:
            written = _native.SnapshotWrite(snapshot, str(path), threads=2, priority=priority).run()
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        part = Part(rank, name, written.size, tuple(written.crcs))
        return part if self._fast is None else self._upload(path, part, id)

    def _upload(self, path: Path, part: Part, id: str) -> Part:
        """Takes a part from the fast directory to the store."""
        step, store = self._saving.step, self._store
        name = store.part_name(part, id)
        try:
            store.copy(path, step, name, part, Pacing()).run()
            read_back(store, step, part, name, _native.Priority.normal)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        return dataclasses.replace(part, name=name)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the checkpoint complete; the coordinator alone does it, after all parts."""
        written = [r for rank in results for r in rank]
        notes = [r.storage_data["note"] for r in written if r.storage_data["note"]]
        if not notes:
            raise UsageError("there is nothing to save: the state is empty on all ranks")
        parts = sorted((Part.from_dict(n["part"]) for n in notes), key=lambda p: p.rank)
        places = {r.index: (r.storage_data["part"], r.storage_data["key"]) for r in written}
        step, id = self._saving.step, notes[0]["id"]
        sequence, abandoned = self._saving.number
        with self._changing:
            if id not in self._begun:
                raise IoError(f"step {step} is not saved: its writer was closed meanwhile")
            manifest = Manifest(
                step=step,
                id=id,
                world_size=notes[0]["parts"],
                parts=tuple(parts),
                extra={"dcp": _metadata_to_json(metadata, places)},
                sequence=sequence,
                abandoned=abandoned,
            )
            if missing := self._store.missing(manifest):
                raise IoError(
                    f"step {step} is not saved: {missing}. All ranks must write into one "
                    f"{self._store.root}: is it shared by all nodes, and mounted on each?"
                )
            self._store.publish(manifest)
            del self._begun[id]
            cleaner = Cleaner(None, self._store, Settings(self._keep))
            cleaner.damaged = _damaged[str(self._store.root)]
            cleaner.retain(set())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return _STEP.search(os.fspath(checkpoint_id)) is not None

    def storage_meta(self) -> StorageMeta | None:
        """No metadata file: everything is in the manifest."""
        return None


class StorageReader(dcp.StorageReader):  # type: ignore[misc]
    """Reads the checkpoint of `step`, or the newest complete one, of a directory or below a URL.

    Without `step`, each load takes the newest one that is there then; the attribute `step` says which.
    Of several saves of one step, `id` is that of the one to read. Tensors of a device are filled while
    the file is read.

    Raises, while loading:
        CorruptionError: a part or a manifest is damaged; it is named, and the block whose bytes do not
            match their checksum. Tensors of a device may have been filled in part.
        UsageError: there is no such checkpoint, or the ranks find different ones.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        step: int | None = None,
        *,
        id: str | None = None,
        threads: int = 4,
    ) -> None:
        self._store = open_store(root, "durable")
        self._threads = threads
        self._id = id
        self._wanted = step
        self.step = step  # wanted, then found
        self._manifest: Manifest | None = None
        self._places: dict[MetadataIndex, tuple[int, str]] = {}
        self._streams: dict[Any, Any] = {}  # of copies, by device

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the step from an id that has one."""
        step = _step_of(checkpoint_id)
        if step is not None:
            self._wanted = self.step = step

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the checkpoint holds, from its manifest."""
        found, problems = candidates(self._store, self._wanted)
        chosen = [m for m in found if self._id in (None, m.id)]
        if not chosen:
            of = "" if self._wanted is None else f" of step {self._wanted}"
            of += "" if self._id is None else f" and save {self._id}"
            if problems:
                raise CorruptionError(
                    f"no checkpoint{of} in {self._store.root} can be loaded: {'; '.join(problems)}"
                )
            raise UsageError(f"there is no checkpoint{of} in {self._store.root}")
        if self._wanted is None:
            _warn_of(problems)
        self.step, self._manifest = chosen[0].step, chosen[0]
        assert self._manifest is not None
        return _metadata_from_json(self._manifest.extra["dcp"])

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Every rank looks at the manifest of the step that the metadata is of."""
        if self._manifest is None:
            self.read_metadata()
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """As it is, with the save that this rank reads."""
        assert self._manifest is not None
        return dataclasses.replace(plan, storage_data=(self._manifest.step, self._manifest.id))

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """As they are.

        Raises:
            UsageError: they are of different saves.
        """
        _refuse_different(self._store, [plan.storage_data for plan in plans])
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Fills this rank's tensors, from parts that were checked."""
        by_part = defaultdict(list)
        for item in plan.items:
            by_part[self._places[item.storage_index][0]].append(item)
        for rank, items in sorted(by_part.items()):
            self._fill(rank, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, rank: int, items: list[ReadItem], planner: dcp.LoadPlanner) -> None:
        """From the part of a rank."""
        assert self._manifest is not None
        part = next(p for p in self._manifest.parts if p.rank == rank)
        path = self._store.place(self._manifest.step) / part.name
        with scarce_is_away(path):
            self._fill_from(part, path, items, planner)

    def _fill_from(
        self, part: Part, path: Place, items: list[ReadItem], planner: dcp.LoadPlanner
    ) -> None:
        assert self._manifest is not None
        file = self._store.open(self._manifest.step, part)
        how = len(part.crcs), self._threads, _native.Progress()
        filled: list[_Filled] = []
        stored: dict[str, torch.Tensor] = {}  # in memory that is read to later

        def ways() -> list[Way]:
            # Tied tensors are stored once: what one of the host takes too is read to the host.
            on_host = {one.begin for one in filled if not one.is_on_device()}
            there = [
                one.lands() for one in filled if one.is_on_device() and one.begin not in on_host
            ]
            begin = file.data.ctypes.data
            found = [way_to(rows, address - begin) for rows, address in there]
            if not found:
                return []
            wanted = sorted(one.place() for one in filled)
            left = _left_of(stored.values(), wanted)  # goes nowhere
            return found + [Way(first - begin, last - begin, None) for first, last in left]

        head, damaged = read_head(file, *how)
        if head is not None:
            stored.update(decode(head.tree, head.arrays)["tensors"])
            filled += [
                _Filled(item, stored[self._key(item)], planner.resolve_tensor(item).detach())
                for item in items
                if item.type != LoadItemType.BYTE_IO
            ]
            landed, damaged = read_rest(file, head.blocks, *how, self._streams, ways)
        if head is None or damaged:
            raise CorruptionError(f"{path} is damaged: {describe(part, damaged)}")
        for one in filled:
            one.finish(landed)
            planner.commit_tensor(one.item, one.target)
        objects = decode(head.tree, head.arrays)["objects"]
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                # The planner takes torch.save's bytes: these are ours, made of plain values.
                buffer = io.BytesIO()
                torch.save(objects[self._key(item)], buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)

    def _key(self, item: ReadItem) -> str:
        """Its name in the part."""
        return self._places[item.storage_index][1]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True


class _Filled:
    """A tensor that is filled by a part of one in a file, whose place in memory `stored` has."""

    def __init__(self, item: ReadItem, stored: torch.Tensor, target: torch.Tensor) -> None:
        self.item, self.target = item, target
        self._stored = stored
        self.begin = stored.data_ptr()
        self._rows: torch.Tensor | None = None  # on the target's device

    def is_on_device(self) -> bool:
        found = torch.accelerator.current_accelerator(check_available=True)
        return found is not None and self.target.device.type == found.type

    def place(self) -> tuple[int, int]:
        """Where in memory the file has the rows of which it takes something."""
        rows = self._taken(self._stored, 0, 1)
        return rows.data_ptr(), rows.data_ptr() + rows.nbytes

    def lands(self) -> tuple[torch.Tensor, int]:
        """Contiguous memory of the device, and where in memory the file has what fills it.

        That is whole rows: what the target does not take of them is on the device until the end.
        """
        rows = self._taken(self._stored, 0, 1)
        fits = rows.shape == self.target.shape and rows.dtype == self.target.dtype
        into = fits and self.target.is_contiguous()
        self._rows = self.target if into else torch.empty_like(rows, device=self.target.device)
        return self._rows, rows.data_ptr()

    def finish(self, landed: bool) -> None:
        """Copies what is not in the target yet."""
        if not landed or self._rows is None:
            self.target.copy_(self._taken(self._stored, 0))
        elif self._rows is not self.target:
            self.target.copy_(self._taken(self._rows, 1))

    def _taken(self, tensor: torch.Tensor, first: int, end: int | None = None) -> torch.Tensor:
        """What the item takes along these axes."""
        for axis in range(tensor.dim())[first:end]:
            offset, length = self.item.storage_offsets[axis], self.item.lengths[axis]
            tensor = tensor.narrow(axis, offset, length)
        return tensor


def _left_of(
    stored: Iterable[torch.Tensor], wanted: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """What of these tensors' memory lies outside of these places, which are in order."""
    places = deque(wanted)
    for first, last in sorted({(one.data_ptr(), one.data_ptr() + one.nbytes) for one in stored}):
        while places and places[0][0] < last:
            begin, end = places.popleft()
            if first < begin:
                yield first, begin
            first = max(first, end)
        if first < last:
            yield first, last


def candidates(store: Store, step: int | None = None) -> tuple[list[Manifest], list[str]]:
    """Complete checkpoints of torch.distributed.checkpoint, best first: of the current branch, or of
    all if a step is asked for. And what a look at names and sizes shows to be damaged."""
    found = view([store], step)
    manifests = [
        store.find(choice.step, choice.id)
        for choice in found.choices
        if step is not None or on_branch(choice, found.top)
    ]
    ours = [m for m in manifests if m and isinstance(m.extra, dict) and "dcp" in m.extra]
    return ours, found.problems


def _warn_of(problems: Iterable[str]) -> None:
    for problem in problems:
        _log.warning("passing over a checkpoint: %s", problem)


def load(state: dict[str, Any], root: str | os.PathLike[str], **options: Any) -> int | None:
    """Loads the newest undamaged checkpoint of the current branch into `state` on all ranks; its
    step, or None.

    All ranks load the same save. Falls back over damaged ones with a warning. `options` go to
    torch.distributed.checkpoint.load.

    Raises:
        CorruptionError: there are checkpoints, and all are damaged, or of branches that were given
            up: `StorageReader` loads such a one by its step.
        UsageError: the ranks find different checkpoints, as in directories that are not shared.
        IoError: they cannot be listed, an object store does not answer, or the job that saves there
            removes each one before it is read.
    """
    for _ in range(_LOOKS):
        with contextlib.suppress(_RetiredError):
            return _load(state, root, options)
    raise IoError(
        f"no checkpoint in {os.fspath(root)} stayed until it was read, in {_LOOKS} attempts: let the "
        "job that saves there keep more (keep=)"
    )


class _RetiredError(Exception):
    """A checkpoint that was listed is not there any more."""


def _is_retired(store: Store, step: int, id: str) -> bool:
    """Whether it is certainly not there."""
    try:
        return store.find(step, id) is None
    except (Error, OSError):
        return False


def _load(
    state: dict[str, Any], root: str | os.PathLike[str], options: dict[str, Any]
) -> int | None:
    """As `load`, of what is there now; all ranks raise _RetiredError alike."""
    store = open_store(root, "durable")
    mine: list[tuple[int, str]] = []
    wrong: list[str] = []
    failure = ""
    try:
        manifests, wrong = candidates(store)
        mine = [(m.step, m.id) for m in manifests]
    except (Error, OSError) as error:
        failure = str(error)
    gathered: list[tuple[list[tuple[int, str]], list[str], str]]
    gathered = _gather((mine, wrong, failure), options)
    for rank, (_, _, words) in enumerate(gathered):
        if words:
            raise IoError(f"rank {rank} cannot list the checkpoints in {os.fspath(root)}: {words}")
    problems = list(dict.fromkeys(problem for _, wrong, _ in gathered for problem in wrong))
    _warn_of(problems)
    found = [saves for saves, _, _ in gathered]
    _refuse_different(store, [saves[0] if saves else None for saves in found])
    for i, (step, id) in enumerate(found[0]):
        _refuse_different(store, [saves[i] if i < len(saves) else None for saves in found])
        try:
            dcp.load(state, storage_reader=StorageReader(root, step, id=id), **options)
            return step
        except dcp.api.CheckpointException as error:
            if any(_gather(_is_retired(store, step, id), options)):
                raise _RetiredError from error
            damage = [f[0] for f in error.failures.values() if isinstance(f[0], Error)]
            if len(damage) < len(error.failures):
                raise
            problem = "; ".join(dict.fromkeys(map(str, damage)))
            if any(isinstance(one, UnreachableError) for one in damage):
                raise UnreachableError(problem) from None
            _log.warning("passing over the checkpoint of step %d: %s", step, problem)
            problems.append(problem)
            _damaged[str(store.root)].add(id)
    if not problems and any(candidates(store, step)[0] for step in store.steps()):
        problems = ["all checkpoints there are of branches that were given up"]
    if problems:
        raise CorruptionError(
            f"no checkpoint in {os.fspath(root)} can be loaded: {'; '.join(problems)}"
        )
    return None


def _gather(value: Any, options: dict[str, Any]) -> list[Any]:
    """The value of each rank that loads together with this one."""
    group = options.get("process_group")
    if options.get("no_dist") or not dist.is_initialized() or dist.get_world_size(group) <= 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _refuse_different(store: Store, saves: list[tuple[int, str] | None]) -> None:
    """Raises UsageError, on all ranks the same, unless each rank found the same save, or none."""
    ranks = defaultdict(list)
    for rank, save in enumerate(saves):
        ranks[save].append(rank)
    if len(ranks) == 1:
        return
    steps = [save[0] for save in ranks if save is not None]
    found = []
    for save, those in ranks.items():
        what = "none" if save is None else f"step {save[0]}"
        if save is not None and steps.count(save[0]) > 1:
            what += f" (save {save[1]})"
        found.append(f"rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}: {what}")
    raise UsageError(
        f"the ranks find different checkpoints in {store.root} ({'; '.join(found)}): give a directory "
        "that all nodes share, and load when no other job saves into it"
    )


# ---------------------------------------------------------------------- metadata


def _step_of(checkpoint_id: str | os.PathLike[str] | None) -> int | None:
    """The number that an id ends with.

    Raises:
        UsageError: it is larger than a step.
    """
    match = _STEP.search(os.fspath(checkpoint_id)) if checkpoint_id is not None else None
    if match is None:
        return None
    if len(match[1]) > len(str(LARGEST_STEP)):
        raise UsageError(
            f"steps are from 0 to {LARGEST_STEP}, not {match[1]} as in {checkpoint_id!r}"
        )
    return int(match[1])


def _size(item: Any) -> int:
    size = item.tensor_storage_size()
    return int(size) if size is not None else 0


def _metadata_to_json(
    metadata: Metadata, places: dict[MetadataIndex, tuple[int, str]]
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    names = {value: key for key, value in _FORMATS.items()}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            state[name] = None
            continue
        properties = entry.properties
        state[name] = {
            "dtype": str(properties.dtype).removeprefix("torch."),
            "requires_grad": properties.requires_grad,
            "memory_format": names[properties.memory_format],
            "pin_memory": properties.pin_memory,
            "size": list(entry.size),
            "chunks": [[list(c.offsets), list(c.sizes)] for c in entry.chunks],
        }
    planner, arrays = encode(metadata.planner_data)
    if arrays:
        raise UsageError("this save planner keeps tensors in its metadata, which is not supported")
    found = [
        [index.fqn, None if index.offset is None else list(index.offset), part, key]
        for index, (part, key) in places.items()
    ]
    return {"state": state, "places": found, "planner": planner, "version": metadata.version}


def _metadata_from_json(values: dict[str, Any]) -> Metadata:
    state: dict[str, Any] = {}
    for name, entry in values["state"].items():
        if entry is None:
            state[name] = BytesStorageMetadata()
            continue
        properties = TensorProperties(
            dtype=getattr(torch, entry["dtype"]),
            requires_grad=entry["requires_grad"],
            memory_format=_FORMATS[entry["memory_format"]],
            pin_memory=entry["pin_memory"],
        )
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in entry["chunks"]
        ]
        state[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    places = {
        MetadataIndex(name, offset): (part, key) for name, offset, part, key in values["places"]
    }
    planner = decode(values["planner"], {})
    return Metadata(state, planner, places, version=values.get("version"))
