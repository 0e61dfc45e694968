"""`nostall.Checkpointer`: saves in the background, and restores of complete checkpoints alone."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsFloat, Unpack

from nostall import _native
from nostall.base._garbage import Closer, apart, end_with
from nostall.base._options import checked
from nostall.base._sizes import parse_size
from nostall.base._words import counted, words_of
from nostall.checkpoint import _format as files
from nostall.checkpoint._background import BackgroundWriter
from nostall.checkpoint._begin import begin, undrained
from nostall.checkpoint._device import DeviceCopies, DeviceWindow, Pace
from nostall.checkpoint._landing import Landing
from nostall.checkpoint._nodes import Held
from nostall.checkpoint._open import check_places, open_store
from nostall.checkpoint._options import (
    CheckpointArguments,
    CheckpointOptions,
    with_arguments,
)
from nostall.checkpoint._restore import MisfitError, Restored, check_fit
from nostall.checkpoint._retention import Keep
from nostall.checkpoint._saved import Drain, Failures, Job, Level, Saved, Settings, waitable
from nostall.checkpoint._search import Search
from nostall.checkpoint._signals import Signals, names_of
from nostall.checkpoint._store import LARGEST_STEP, Store
from nostall.checkpoint._tree import Leaf, called, encode
from nostall.checkpoint._window import (
    SaveWindow,
    choose_copying,
    guarded_addresses,
    tensors_of,
)
from nostall.errors import Error, IoError, PeerError, SignalExit, UsageError
from nostall.job._cores import cores_of_rank
from nostall.job._rendezvous import Rendezvous, exposed, find_rendezvous
from nostall.job._world import AllGather, find_world
from nostall.observe import trace

_log = logging.getLogger("nostall")
# Ranks make the checkpointers of a world in the same order; those of other worlds, which only some
# ranks make, do not shift the numbers.
_made_in: dict[tuple[int, int], Iterator[int]] = collections.defaultdict(itertools.count)
# In the history of a checkpointer; of saves that are safe nowhere more stay, to tell since when.
_KEPT_SAVES, _KEPT_UNSAFE = 100, 1000


class Checkpointer:
    """Saves the state of a training to a fast and a durable directory, and restores the newest.

    A save copies the state once, to memory that was allocated before, and returns. A background thread
    writes it to `fast`; another one drains it from there to `durable` at a limited rate. A checkpoint
    exists once its manifest exists, which appears by one rename after all parts of all ranks are on
    their device. The next job completes or removes what a killed job has left.

    Args:
        fast: a directory on fast storage (NVMe, /dev/shm), seen by all ranks or each node's own.
        durable: a directory on durable storage, seen by all ranks, or a URL on an object store
            (``s3://bucket/run1``, gs://, az://), which needs `fast` too. Else one of both may be left
            out.
        keep: how many checkpoints stay, or a `Keep`.
        every: only multiples of this step are saved; for others `save` returns None at once.
        level: what `save` waits for: ``"memory"`` (the copy), ``"fast"``, ``"durable"``.
        replicated: all ranks hold the same state (data parallelism): rank 0 writes it, all restore
            it, on any number of ranks.
        snapshots: how many may be in memory at the same time. Each has the size of the state.
        partner: where each node has a fast directory of its own, the next node keeps a copy of what
            this one writes there, so that the loss of one node loses nothing. Level fast waits for both
            copies. If the second copy fails, the save is complete with the first alone, with a warning
            and an entry in `Saved.problems`.
        options: all other options, a `CheckpointOptions`.
        rare: fields of `CheckpointOptions`, which replace those of `options`.

    Raises:
        UsageError: arguments that contradict each other, or differ between ranks; a directory that
            another job uses.
        IoError: a directory that cannot be made, an object store that does not answer.
        PeerError: another job began on the same object store at the same time, and has it.

    A restore of an older step, or a save of a step below the newest one, begins a branch: later
    checkpoints are superseded. They stay, because the rules of `keep` hold for each branch by itself,
    and `restore(step)` or ``nostall checkpoints branch`` can go back to them. `restore()` gives the
    newest checkpoint of the current branch, independent of clocks.

    Thread-safety: one thread, the training's, calls it.
    """

    def __init__(
        self,
        fast: str | os.PathLike[str] | None = None,
        durable: str | os.PathLike[str] | None = None,
        *,
        keep: int | Keep = 5,
        every: int | None = None,
        level: Level = "memory",
        replicated: bool = False,
        snapshots: int = 1,
        partner: bool = False,
        options: CheckpointOptions | None = None,
        **rare: Unpack[CheckpointArguments],
    ) -> None:
        check_places(fast, durable)
        chosen = self._options = with_arguments(options, rare)
        self.level: Level = checked("checkpoint.level", level)
        self._check_level(self.level, fast is not None, durable is not None)
        self.every: int | None = checked("checkpoint.every", every)
        self.replicated: bool = checked("checkpoint.replicated", replicated)
        keep = checked("checkpoint.keep", keep)
        count = checked("checkpoint.snapshots", snapshots)
        partner = checked("checkpoint.partner", partner)
        settings = self._settings(keep if isinstance(keep, Keep) else Keep(keep))
        world = find_world(rank=chosen.rank, world_size=chosen.world_size, job=chosen.job)
        self.rank, self.world_size = world.rank, world.world_size
        meets = self.world_size > 1 and chosen.gather is None
        number = next(_made_in[self.rank, self.world_size]) if meets else 0
        self._name = f"checkpointer {number} of {self.world_size}"
        self._gathered = itertools.count()
        self._threads = chosen.threads or min(8, cores_of_rank(world.most_here))
        self.fast = Store(fast, "fast") if fast is not None else None
        self.durable = open_store(durable, "durable") if durable is not None else None
        begun = begin(
            self.fast,
            self.durable,
            self.rank,
            self.world_size,
            Rendezvous(self._allgather, self._exposed()),
            partner=partner,
            timeout=chosen.timeout,
            alike=self._alike(partner),
        )
        self._run, self._nodes = begun.run, begun.nodes
        self._lineage, self._owned = begun.lineage, begun.owned
        self._failures = Failures(chosen.max_failures, chosen.max_unsafe_seconds, chosen.on_failure)
        self._background = BackgroundWriter(
            self.fast, self.durable, self.rank, settings, self._nodes
        )
        self._snapshots = [_native.Snapshot(self._threads) for _ in range(count)]
        for snapshot in self._snapshots:
            self._background.add_snapshot(snapshot)
        self._saves = itertools.count()
        self._saving = False  # a call of `save` has a snapshot, or is about to
        self._unfinished: _native.Snapshot | None = (
            None  # which the writer has, and that call fills
        )
        self._pid = os.getpid()
        self._history: collections.deque[Saved] = collections.deque(maxlen=_KEPT_UNSAFE)
        self._window: SaveWindow | DeviceWindow | None = None
        self._device_streams: dict[Any, Any] = {}  # of copies, by device
        self._device_paces: dict[Any, Pace] = {}
        self._unsteady: set[str] = set()  # arrays that were seen to change within windows
        self._window_seconds: float | None = None
        self._optimizers: list[Any] = []
        self._hooks: list[Any] = []  # by which they call this
        self._drain_what_was_left(settings.keep, begun.held)
        self._signals: list[Signals] = []
        self._closer = Closer(
            self, _shut, os.getpid(), self._background, self.fast, self.durable, self._signals
        )
        atexit.register(self._closer)
        if chosen.on_signal is not None:
            self._signals.append(signals := Signals(chosen.on_signal))
            if self.world_size > 1:
                signals.meet(self.rank, begun.key, begun.several, self._allgather)
            elif signals.refusal:
                raise UsageError(signals.refusal)

    def _alike(self, partner: bool) -> dict[str, Any]:
        """What all ranks must be given alike."""
        names = self._options.on_signal
        return {
            "fast": "a directory" if self.fast else None,
            "durable": self.durable and _sort(self.durable),
            "every": self.every,
            "replicated": self.replicated,
            "partner": partner,
            "on_signal": names and ", ".join(names_of(names)),
        }

    def _settings(self, keep: Keep) -> Settings:
        chosen = self._options
        return Settings(
            keep=keep,
            keep_fast=chosen.keep_fast,
            rate=0 if chosen.rate is None else parse_size(chosen.rate),
            timeout=chosen.timeout,
            patience=chosen.patience,
            priority=chosen.priority,
            verify=chosen.verify,
            windows=chosen.windows,
        )

    def _drain_what_was_left(self, keep: Keep, held: Sequence[Held]) -> None:
        """Drains what an earlier job left on the fast tier."""
        if self.rank > 0 or self.fast is None or self.durable is None:
            return
        by_id = {h.manifest.id: h for h in held}
        on_nodes = held if self._nodes is not None else None
        try:
            left = undrained(self.fast, self.durable, keep, on_nodes)
        except (Error, OSError) as error:  # the other ranks have begun, and do not ask
            _log.warning(
                "what an earlier job left in %s is copied to %s at the next start: %s",
                self.fast.root,
                self.durable.root,
                error,
            )
            return
        for manifest in left:
            self._background.submit_drain(Drain(manifest, alone=True, held=by_id.get(manifest.id)))

    @staticmethod
    def _check_level(level: str, fast: bool, durable: bool) -> None:
        if (level == "fast" and not fast) or (level == "durable" and not durable):
            raise UsageError(f"level {level} needs {level}= to be given")

    # ------------------------------------------------------------------ saving

    def prepare(self, state: Any) -> None:
        """Allocates snapshots of `state`, so that the first save is as fast as later ones.

        A save that is under way is written first.

        Args:
            state: as `save` takes it.

        Raises:
            UsageError: the state holds what a checkpoint cannot, named by its place.
            IoError: so much memory is not to be had.
        """
        self._check_process()
        if self.rank == 0 or not self.replicated:
            tree, leaves = encode(called(state))
            size = len(files.header(tree, leaves)) + sum(leaf.nbytes for leaf in leaves)
            self.before_update()
            self._background.reserve(len(self._snapshots), size + (1 << 20))

    def due(self, step: int) -> bool:
        """Whether `save` saves at this step."""
        return self.every is None or step % self.every == 0

    def save(
        self,
        state: Any,
        step: int,
        *,
        metric: SupportsFloat | None = None,
        level: Level | None = None,
        window: bool = False,
        force: bool = False,
    ) -> Saved | None:
        """Takes a checkpoint of `state`; returns once it is safe at the level.

        Args:
            state: nested dictionaries, lists and tuples of NumPy arrays, torch tensors, numbers,
                strings, bytes, None, and objects with a state_dict (modules, optimizers, the
                loader); or a function that returns it, called only if the step is due.
            step: 0 to 10**12 - 1; saving a step again replaces it.
            metric: a number for `Keep.best`, or what float() makes one of: a scalar of NumPy, torch or
                JAX. Of several ranks, rank 0's counts.
            level: instead of the checkpointer's.
            window: return before the tensors are copied. They are read while the training continues,
                until an update; until then they do not change [Li 2019, sec. III]. For level memory.
                With `attach`, parameters and optimizer state are read later, and everything else is
                copied by the call. Without it, nothing may change before `before_update` is called.
                If a torch tensor does change, the checkpoint is not kept.
            force: save also if the step is not due.

        Raises:
            UsageError: the state holds what a checkpoint cannot, named by its place; or the metric is
                no number.
            IoError: level fast or durable was not reached, with the reasons; or the saves before it
                are safe nowhere (`max_failures`, `max_unsafe_seconds`). This save continues in the
                background all the same.
            SignalExit: this is the call at which the ranks end because of a signal (`on_signal`); the
                checkpoint is on the durable directory, or on the fast one if there is no other or that
                one did not take it.
        """
        if type(step) is not int or not 0 <= step <= LARGEST_STEP:
            raise UsageError(f"step must be a number from 0 to {LARGEST_STEP}, not {step!r}")
        ending = self._signals[0].due() if self._signals else ""
        if not (force or ending or self.due(step)):
            return None
        self._check_process()
        if not self._closer.alive:
            raise UsageError("this checkpointer is closed")
        wanted: Level = checked("checkpoint.level", level or self.level)
        self._check_level(wanted, self.fast is not None, self.durable is not None)
        if ending:
            wanted, window = "fast" if self.durable is None else "durable", False
        before = self._history[-1] if self._history else None
        try:
            with trace.span("save", "checkpoint"):
                saved = self._save(state, step, metric, wanted, window)
        except (IoError, PeerError) as error:
            newest = self._history[-1] if self._history else None
            if not ending or newest is None or newest is before or newest.level == "memory":
                raise
            # The ranks agree on one call alone, and the next start goes on from what is safe.
            _log.warning(
                "%s: the training ends, with step %d safe at level %s: %s",
                ending,
                step,
                newest.level,
                error,
            )
        if ending:
            raise SignalExit(ending)
        return saved

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this checkpointer belongs to process {self._pid}, and its threads are not in the "
                f"forked process {os.getpid()}: make a checkpointer in the process that uses it"
            )

    def _save(
        self, state: Any, step: int, metric: SupportsFloat | None, wanted: Level, window: bool
    ) -> Saved:
        began = time.perf_counter()
        self.before_update()
        # A signal's handler may save within a save, which stands still until the handler returns.
        within, self._saving = self._saving, True
        if self._unfinished is not None:
            self._unfinished.finish()
        try:
            saved = self._begin_save(state, step, metric, wanted, window, spare=within)
        finally:
            self._saving = within
        if wanted != "memory":
            saved.wait(wanted, self._options.timeout + 10)
        saved.seconds = time.perf_counter() - began
        self._failures.check(self._history, self._is_complete)
        return saved

    def _begin_save(
        self,
        state: Any,
        step: int,
        metric: SupportsFloat | None,
        wanted: Level,
        window: bool,
        spare: bool,
    ) -> Saved:
        """Copies the state, and gives it to the writer."""
        number = next(self._saves)
        id = f"{self._run}-{number:06d}"
        sequence, abandoned = self._lineage.save(step)
        manifest = files.Manifest(
            step,
            id,
            self.world_size,
            (),
            self.replicated,
            sequence=sequence,
            abandoned=abandoned,
        )
        saved = Saved(step, id, 0)
        job = Job(saved, manifest, None, number, spare=spare)
        snapshot = leaves = None
        try:
            job.manifest = dataclasses.replace(manifest, metric=_as_number(metric))
            if self.rank == 0 or not self.replicated:
                # A call that waits for storage writes each block as soon as it is copied.
                window = window and wanted == "memory"
                now = wanted == "memory" and not window
                snapshot = self._snapshot(called(state), job, window, now)
                leaves = job.leaves  # the job drops them once it fails
        except BaseException as error:
            self._lineage.take_back(sequence)  # what is refused begins no branch
            self._tell_others(job, error)
            raise
        try:
            self._unfinished = snapshot
            self._background.submit(job, awaited=wanted)
            self._remember(saved)
        finally:  # also of an interrupt: the writer waits for the blocks
            if snapshot is not None:
                snapshot.finish()
            self._unfinished = None
        del leaves
        return saved

    def _tell_others(self, job: Job, error: BaseException) -> None:
        """Ends a save that fails in its call for the other ranks too: they wait for this one's part."""
        if self.world_size > 1 and (self.rank == 0 or not self.replicated):
            job.failed = f"it cannot save: {type(error).__name__}: {error}"
            job.window = job.leaves = None
            self._background.submit(job, awaited="memory")

    def _remember(self, saved: Saved) -> None:
        self._history.append(saved)
        while len(self._history) > _KEPT_SAVES and any(
            later.level != "memory" for later in itertools.islice(self._history, 1, None)
        ):
            self._history.popleft()

    def _is_complete(self, saved: Saved) -> bool:
        """Whether a save that has not succeeded on this rank is complete all the same."""
        failed: IoError | None = None
        for store in (self.fast, self.durable):
            try:
                there = store.find(saved.step, saved.id) if store is not None else None
                if store is not None and there is not None:
                    store.confirm(there)
                    return True
            except IoError as error:
                failed = error
        if failed is not None:
            raise failed
        return False

    def _snapshot(self, state: Any, job: Job, window: bool, now: bool) -> _native.Snapshot | None:
        """Begins the snapshot of the job; the caller finishes the one that is returned."""
        copies = DeviceCopies(self._device_streams, self._device_paces)
        tree, leaves = encode(state, copies.host)
        if copies:
            torch, late = sys.modules["torch"], self._late(copies, leaves) if window else ()
            leaves = copies.enqueue(torch, leaves, late)
            if window:
                job.window = self._window = copies.window(leaves, self._unsteady)
            window = now = False
        guarded = guarded_addresses(leaves, self._optimizers, self._unsteady) if window else None
        leaves = files.layout(leaves, guarded)
        head = files.header(tree, leaves)
        began = time.perf_counter()
        take = self._background.take_snapshot
        snapshot = _native.Snapshot(self._threads) if job.spare else take()
        job.saved.waited_seconds = time.perf_counter() - began
        if snapshot is None:
            job.failed = (
                f"the snapshot before is not written after {self._background.settings.patience:g} "
                "s, its storage hangs; snapshots=2 makes room for one more"
            )
            return None
        began = time.perf_counter()
        try:
            copying = _native.Copying.at_once
            if window:
                copying, why = choose_copying(self._window_seconds, self._background.write_seconds)
                job.saved.copying = f"{copying.name}: {why}"
            job.leaves = leaves  # some are copies that have no other reference
            snapshot.begin(head, [(leaf.address, leaf.nbytes) for leaf in leaves], copying)
            if window:
                if snapshot.is_lazy and copying is not _native.Copying.lazily:
                    job.saved.copying = "lazily: no thread can be started to copy it"
                job.window = SaveWindow(snapshot, leaves, guarded, job.saved, self._unsteady)
                self._window = job.window
            elif now:
                snapshot.finish()
            elif copies:
                job.arriving = copies
                before = "an update" if job.window is not None else "its next work"
                job.saved.copying = f"from the device, before {before}"
                if copies.why:
                    job.saved.copying += f": {copies.why}"
        except BaseException:
            self._window = None
            snapshot.finish()  # no thread reads the leaves any more
            if not job.spare:
                self._background.add_snapshot(snapshot)
            raise
        job.snapshot = snapshot
        job.saved.bytes = snapshot.size
        job.saved.copy_seconds = time.perf_counter() - began
        return None if now or window or copies else snapshot

    def _late(self, copies: DeviceCopies, leaves: Sequence[Leaf]) -> set[int]:
        """Where tensors lie on the device that only an attached optimizer's step changes."""
        late = copies.addresses({leaf.name for leaf in leaves} - self._unsteady, leaves)
        if self._optimizers:
            late &= {t.data_ptr() for optimizer in self._optimizers for t in tensors_of(optimizer)}
        return late

    def before_update(self) -> None:
        """Copies what a save with `window` has not copied yet; returns at once if nothing is left."""
        if self._window is not None:
            window, self._window = self._window, None
            with _held():
                self._window_seconds = window.close()

    def attach(self, optimizer: Any) -> None:
        """Before each step of this torch optimizer, copies what the step is about to change.

        With `nostall.torch.DistributedOptimizer` and ``overlap_update`` that is a bucket at a time.
        """
        this = weakref.ref(self)  # or the optimizer would keep the snapshots

        def before_step(stepping: Any, *_: Any) -> None:
            if (checkpointer := this()) is not None:
                checkpointer._before_step(stepping)

        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(before_step))

    def _before_step(self, optimizer: Any) -> None:
        if self._window is None:
            return
        with _held():
            left = self._window.reach(optimizer)
        if not left:
            self.before_update()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds background writing back inside a ``with``, while the training needs storage or network.

        A block is delayed by at most a second, so that every checkpoint becomes safe.
        """
        self._background.gate.hold()
        try:
            yield
        finally:
            self._background.gate.release()

    # ------------------------------------------------------------------ restoring

    def restore(
        self,
        step: int | None = None,
        *,
        into: Any = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Restored | None:
        """Restores the newest complete and undamaged checkpoint, from the fast tier if it is there.

        Saves that have returned are written first; it waits for them at most `patience` seconds
        and half of `timeout`. All ranks restore the same one. Damaged ones are passed over with a
        warning that says what is damaged. Nothing is unpickled. Tensors of a device are filled while
        the file is read.

        Args:
            step: restore this one instead of the newest; if it is not the newest, a branch begins
                there, and later checkpoints are superseded, with a warning.
            into: a state as given to `save`, but no function. Objects with a load_state_dict load their
                state, arrays and tensors are filled in place, all other values are replaced, also those
                of tuples; None takes whatever was saved in its place. If names or arrays do not fit,
                nothing changes; if a load_state_dict raises, some of the rest may be loaded. An array
                or a tuple by itself must be filled as a whole.
            progress: called now and then with (bytes read, bytes in all).

        Returns:
            What was restored, or None if there never was a checkpoint.

        Raises:
            CorruptionError: there are checkpoints, and all are damaged; tensors of a device may have
                been filled from one of them in part.
            UsageError: the checkpoint is of another number of ranks, or does not fit `into`; of several
                ranks all raise it, and change nothing but tensors of a device. Also of a torch module
                that load_state_dict found to be another one.
            IoError: an object store does not answer, or memory, open files or room are too little to
                read a checkpoint of which no other tier has a copy: it is not passed over. Or a
                directory is not this job's any more, and the newest checkpoint is nowhere else. Or a
                rank cannot read a directory, or does not see a checkpoint that others see there, also
                not a minute later; all raise it.
            PeerError: a load_state_dict has raised on another rank.
        """
        self._check_process()
        self.before_update()  # for restoring changes the state as well
        # What `save` has returned for counts: each rank waits until its own part is written.
        # Not for long: another rank may not be in that save, and wait for this one.
        seconds = min(self._options.patience, self._options.timeout / 2)
        if not self._background.wait(drained=False, timeout=seconds):
            _log.warning(
                "a save is not written after %g s, its storage hangs or other ranks do not save: the "
                "restore looks for what is there",
                seconds,
            )
        stores = [s for s in (self.fast, self.durable) if s is not None]
        search = Search(
            stores,
            self._nodes,
            self.rank,
            self.world_size,
            self._threads,
            self._allgather,
            self._background.damaged,
            Landing(into, self._device_streams) if into is not None else None,
            self._lineage.newest,
        )
        with self._background.all_stays():
            if self.world_size > 1:
                self._allgather(b"")  # no rank looks before all have stopped removing
            restored = search.run(step, progress)
            if restored is not None:  # `into` may not fit, so it comes first: removal waits for it
                self._go_on_from(restored, into, chosen=step is not None)
        return restored

    def _go_on_from(self, restored: Restored, into: Any, chosen: bool) -> None:
        """Fills `into`, and keeps the checkpoint from the rules of the branch that it may leave."""
        changes: list[Callable[[], object]] = []
        problem = ""
        if into is not None:
            try:
                changes = check_fit(into, restored.state)
            except Exception as error:
                if self.world_size == 1 and not isinstance(error, UsageError):
                    raise
                problem = words_of(error)
        # All ranks raise, before one of them has changed anything or waits for the others.
        if problem := self._of_all(problem):
            raise UsageError(f"step {restored.step} cannot be restored: {problem}")
        failed: Exception | None = None
        try:
            for change in changes:
                change()
        except MisfitError as error:
            problem = str(error)
            failed = UsageError(f"step {restored.step} cannot be restored: {problem}")
            failed.__cause__ = error.__cause__
        except Exception as error:  # of somebody's load_state_dict
            failed, problem = error, words_of(error)
        problem = self._of_all(problem)
        if failed is not None:
            raise failed
        if problem:
            raise PeerError(f"step {restored.step} cannot be restored: {problem}")
        for store in self._owned:
            try:
                store.adopt(restored.manifest)
            except (Error, OSError) as error:
                _log.warning("%s", error)
        behind = self._lineage.restored(restored.manifest)
        if chosen:
            self._begin_branch(restored.manifest, behind)

    def _of_all(self, problem: str) -> str:
        """The problems of all ranks; "" if none has any."""
        if self.world_size == 1:
            return problem
        # It may name a path whose bytes are no UTF-8.
        mine = problem.encode(errors="backslashreplace")
        notes = [note.decode() for note in self._allgather(mine)]
        return "; ".join(f"rank {rank}: {note}" for rank, note in enumerate(notes) if note)

    def _begin_branch(self, manifest: files.Manifest, behind: bool) -> None:
        """Writes durably that the training went back, so that the next start goes back too."""
        note = b""
        if self.rank == 0 and behind:
            number, abandoned = self._lineage.begin()
            note = files.Branch(number, abandoned, manifest.step, manifest.id).to_bytes()
        if self.world_size > 1:
            note = self._allgather(note)[0]
        if not note:
            return
        branch = files.Branch.from_bytes(note, "rank 0's note")
        if self.rank != 0:
            self._lineage.begin()  # the numbers of saves are the same on all ranks
        problem = ""
        try:
            for store in self._owned:
                store.note_branch(branch)
        except (Error, OSError) as error:
            problem = str(error)
        if problem := self._of_all(problem):
            _log.warning(
                "the next save will tell that the training went back to step %d; until then a restart "
                "does not know: %s",
                manifest.step,
                problem,
            )
        elif self.rank == 0:
            _log.warning(
                "the training goes on from step %d: what was saved after it is superseded, and stays "
                "by the rules of keep= for each branch (with Keep(superseded=n) the newest n); "
                "restore(step) or `nostall checkpoints branch` goes back to it, `nostall checkpoints "
                "rm --superseded` removes it",
                manifest.step,
            )

    def steps(self) -> dict[int, list[str]]:
        """Complete checkpoints: step -> the tiers that have it."""
        found: dict[int, list[str]] = {}
        for store in (self.fast, self.durable):
            for entry in store.entries() if store is not None else ():
                if entry.manifest is not None and not entry.damage:
                    found.setdefault(entry.step, []).append(entry.path.parent.as_posix())
        return dict(sorted(found.items()))

    def _exposed(self) -> str:
        if self.world_size == 1:
            return ""
        return exposed(self._options.gather or self._find("exposed"))

    def _allgather(self, mine: bytes) -> list[bytes]:
        gather = self._options.gather or self._find(f"{self._name} {next(self._gathered)}")
        return gather(mine)

    def _find(self, name: str) -> AllGather:
        gather = find_rendezvous(self.rank, self.world_size, name, timeout=self._options.timeout)
        if gather is None:
            raise UsageError(
                f"the {self.world_size} ranks of this job cannot find each other: start them with "
                "torchrun, mpirun or srun, set NOSTALL_RENDEZVOUS, or pass gather="
            )
        return gather

    # ------------------------------------------------------------------ ending

    @property
    def history(self) -> list[Saved]:
        """The last hundred saves of this process, oldest first; up to a thousand while none is safe."""
        return list(self._history)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all saves are written and drained; drains that failed are tried once more.

        It tells nothing of saves that no storage took: `save` and `close` do.

        Raises:
            IoError: checkpoints of the fast directory cannot be copied to the durable one, with the
                reasons. Rank 0 raises it for all ranks, and once of what can never be copied.
            PeerError: they are not after `timeout` seconds (the checkpointer's if None).
        """
        self._check_process()
        self.before_update()
        limit = self._options.timeout if timeout is None else waitable(timeout)
        if not self._background.wait(drained=True, timeout=limit):
            raise PeerError(
                f"checkpoints are not durable after {limit:g} s; what is on the fast tier is drained "
                "by the next start"
            )
        problems, again = self._background.undrained()
        if self.durable is not None and problems:
            more = f", and {len(problems) - 3} before" if len(problems) > 3 else ""
            by = "the next wait or by the next start" if again else "the next start"
            raise IoError(
                f"{counted(len(problems), 'checkpoint')} cannot be drained: "
                f"{'; '.join(problems[-3:])}{more}. What is undamaged is copied by {by}, once "
                f"{self.durable.root} takes it"
            )

    def close(self, timeout: float | None = None) -> None:
        """Waits for saves under way, at most `timeout` seconds (the checkpointer's if None), and up to
        15 s more for the blocks in flight and for the storage's answers about the newest save and the
        end of this job.

        A checkpoint that is not drained by then, or cannot be, stays on the fast tier, with a warning;
        the next checkpointer of the same directories drains it, or ``nostall checkpoints drain``. A
        snapshot that is on no storage by then is lost.

        Raises:
            IoError: the newest save is safe nowhere.
            UsageError: `timeout` is no number; nothing is closed.
        """
        self._check_process()
        if not self._closer.alive:
            return
        limit = self._options.timeout if timeout is None else waitable(timeout)
        deadline = time.monotonic() + limit
        try:
            self.wait(limit)
        except (PeerError, IoError) as error:
            _log.warning("%s", error)
        finally:
            atexit.unregister(self._closer)
            self._closer.detach()
            _shut(
                os.getpid(),
                self._background,
                self.fast,
                self.durable,
                self._signals,
                max(0.0, deadline - time.monotonic()),
            )
            for hook in self._hooks:
                hook.remove()
            for kept in (self._hooks, self._optimizers, self._snapshots):
                kept.clear()
        self._failures.tell_of_newest(self._history, self._is_complete)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if os.getpid() != self._pid:
            return  # the end of a forked child, not of the checkpointer
        try:
            end_with(kind, self.close)
        except IoError as error:
            if kind in (None, GeneratorExit):
                raise
            _log.error("%s", error)


def _held() -> trace.span:
    """Records how long an update is held back by a save's window."""
    return trace.span("copy before an update", "checkpoint")


def _as_number(metric: SupportsFloat | None) -> float | None:
    """What a manifest can hold of it."""
    if metric is None:
        return None
    try:
        return float(metric.detach() if hasattr(metric, "detach") else metric)  # torch warns else
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"metric= is a {type(metric).__name__} of which float() makes no number ({error}): give "
            "one number, or a scalar of NumPy, torch or JAX"
        ) from None


def _sort(store: Store) -> str:
    return "a directory" if store.is_directory else "an object store"


def _shut(
    pid: int,
    background: BackgroundWriter,
    fast: Store | None,
    durable: Store | None,
    signals: Sequence[Signals],
    timeout: float | None = None,
) -> None:
    """Writes every snapshot to some storage; leaves drains to the next start."""
    if os.getpid() != pid:
        return  # a forked child: the threads are its parent's
    if background.is_this_thread():  # it dropped the checkpointer
        apart(_shut, pid, background, fast, durable, signals, timeout)
        return
    with contextlib.ExitStack() as ending:  # the last one first, also where one of them fails
        for store in (durable, fast):
            if store is not None:
                ending.callback(store.disown)
        if background.nodes is not None:
            ending.callback(background.nodes.close)
        for one in signals:  # not earlier, as a signal may end the process once it is given back
            ending.callback(one.close)
        ending.callback(background.stop, timeout=5.0)
        background.wait(
            drained=False, timeout=background.settings.timeout if timeout is None else timeout
        )
