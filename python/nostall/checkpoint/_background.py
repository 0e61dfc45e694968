"""The background of `save`: one thread writes snapshots, one drains the fast tier to the durable.

Both work in native code, without the GIL and at low priority; this module makes the decisions.
Everything that the next start must know is in the directories (`_store.py`), nothing in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from nostall import _native
from nostall.base._words import words_of
from nostall.checkpoint._cleaner import Cleaner
from nostall.checkpoint._drain import copy_all, find_copy, read_back
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._lineage import is_past
from nostall.checkpoint._nodes import Nodes
from nostall.checkpoint._place import Copy, LostStoreError, Pacing
from nostall.checkpoint._saved import Drain, Job, Level, Saved, Settings
from nostall.checkpoint._store import Store, is_full, part_name
from nostall.errors import CorruptionError, Error, IoError, StoppedError
from nostall.observe import trace

_PRIORITY = {
    "normal": _native.Priority.normal,
    "low": _native.Priority.low,
    "idle": _native.Priority.idle,
}

# Seconds between two saves, assumed as long as there was only one.
_INTERVAL = 60.0

# A rank waits so long for room on a full fast directory, and looks for it at such intervals.
_ROOM_SECONDS, _LOOK_SECONDS = 10.0, 0.2
# How often other ranks may find a step's directory empty, and remove it, before a part is in it.
_REMOVALS = 100

_log = logging.getLogger("nostall")
T = TypeVar("T")


class BackgroundWriter:
    """The two threads and their queues, for one rank."""

    def __init__(
        self,
        fast: Store | None,
        durable: Store | None,
        rank: int,
        settings: Settings,
        nodes: Nodes | None = None,
    ) -> None:
        self.fast, self.durable, self.rank = fast, durable, rank
        self.settings, self.nodes = settings, nodes
        # Rank 0 clears up; in a fast directory of a node's own the node's first rank does.
        self._cleans = nodes.leader if nodes is not None else rank == 0
        self._retain_due = self._retaining = False
        self._looking = 0  # restores that are looking or reading
        self._removing = self._retain_later = False
        self.gate = _native.Gate()
        self._cleaner = Cleaner(fast, durable, settings, owns_durable=rank == 0)
        if self._cleans:
            self._cleaner.begin()
        self._lock = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._drains: deque[Drain] = deque()
        self._postponed: list[Drain] = []
        self._given_up: list[str] = []  # why drains failed that are not tried again
        self._draining: Drain | None = None
        self._job: Job | None = None  # that is being written
        self._busy = 0  # jobs taken and not persisted
        self._snapshots: list[_native.Snapshot] = []
        self._newest = -1  # the number of the last job
        self._urgent = -1  # some thread waits for jobs up to this number
        self._awaited: set[Saved] = set()  # some thread waits, or waited, for their drain
        self._waiting = 0  # threads that wait for all drains
        self._writing: tuple[int, _native.SnapshotWrite] | None = None
        self._copying: tuple[str, Copy] | None = None
        # Until when the writer has waited for other ranks, or may, while its own storage answers.
        self._met = 0.0
        self._stopping = False
        self._threads: dict[str, threading.Thread] = {}
        self.write_seconds: float | None = None  # of the last snapshot, from file to fsync
        self._submitted = 0.0
        self._interval = _INTERVAL

    # ------------------------------------------------------------------ snapshots

    def add_snapshot(self, snapshot: _native.Snapshot) -> None:
        """Adds a snapshot, so that one more can be in memory at the same time."""
        with self._lock:
            if not self._stopping:
                self._snapshots.append(snapshot)
            self._lock.notify_all()

    def take_snapshot(self) -> _native.Snapshot | None:
        """A free snapshot; waits until an earlier one is written, at full speed.

        None if that takes longer than `patience` seconds: the storage hangs. What a save waits for the
        other ranks does not count, which `timeout` bounds.
        """
        with self._lock:
            if self._snapshots:
                return self._snapshots.pop()
        self._hurry_writer(self._newest)
        with self._lock:
            left = patience = self.settings.patience
            while not self._lock.wait_for(lambda: bool(self._snapshots), left):
                left = min(patience, self._met + patience - time.monotonic())
                if left <= 0:
                    return None
            return self._snapshots.pop()

    def reserve(self, count: int, size: int) -> None:
        """Makes room for `size` bytes in so many snapshots, each once it is free."""
        taken: list[_native.Snapshot] = []
        try:
            while len(taken) < count and (snapshot := self.take_snapshot()) is not None:
                taken.append(snapshot)
                snapshot.reserve(size)
        finally:
            for snapshot in taken:
                self.add_snapshot(snapshot)

    # ------------------------------------------------------------------ asking

    def is_this_thread(self) -> bool:
        """Whether one of the two threads asks, which cannot wait for itself."""
        return threading.current_thread() in self._threads.values()

    def submit(self, job: Job, awaited: Level) -> None:
        """Writes the snapshot as soon as the ones before it are written; at once and at full speed if
        the caller waits for a level. If no thread can be started, the caller writes it."""
        job.saved._background = self
        with self._lock:
            self._newest = max(self._newest, job.number)
            if awaited != "memory":
                self._urgent = max(self._urgent, job.number)
            if awaited == "durable":
                self._await(job.saved)
            now = time.monotonic()
            if self._submitted:
                self._interval = now - self._submitted
            self._submitted = now
            problem = self._start("writer")
            self._busy += 1
            if not problem:
                self._jobs.append(job)
                self._lock.notify_all()
        if problem:
            self._say(job.saved, f"step {job.saved.step} is written within save itself: {problem}")
            if job.window is not None:
                job.window.close()
            elif job.snapshot is not None and job.arriving is None:
                job.snapshot.finish()
            self._write_one(job)

    def submit_drain(self, drain: Drain) -> None:
        """Copies a complete fast checkpoint to the durable storage."""
        with self._lock:
            stopping = self._stopping
            problem = self._start("drain")
            if not problem and not stopping:
                self._drains.append(drain)
                self._lock.notify_all()
        if stopping:
            self._leave(drain)
        elif problem:
            self._postpone(drain, IoError(problem), gone=False)

    def hurry(self, saved: Saved, level: Level) -> None:
        """Speeds up what leads to that level, for a waiting thread: no rate, gate or low priority."""
        with self._lock:
            if level == "durable":
                self._await(saved)
            jobs = [job for job in (*self._jobs, self._job) if job is not None]
        for job in jobs:
            if job.saved is saved:
                self._hurry_writer(job.number)

    def _await(self, saved: Saved) -> None:
        """Speeds up its drain, and those before it; inside the lock."""
        self._awaited = {one for one in (*self._awaited, saved) if not one._is_over("durable")}
        if self._copying is not None:
            self._copying[1].hurry()
        self._lock.notify_all()

    def _hurry_writer(self, number: int) -> None:
        with self._lock:
            self._urgent = max(self._urgent, number)
            writing = self._writing
        if writing is not None:
            writing[1].hurry()

    def wait(self, drained: bool, timeout: float) -> bool:
        """Waits until all snapshots are persisted and, if asked, drained; returns whether they are.

        What could not be drained is tried once more, and counts as done if it fails again:
        `undrained` tells of it.
        """

        def done() -> bool:
            idle = not self._busy
            busy = self._drains or self._draining or self._retain_due or self._retaining
            return self._stopping or (idle and not (drained and busy))

        if drained:
            self._try_again()
        self._hurry_writer(self._newest)
        with self._lock:
            if drained and self._copying is not None:
                self._copying[1].hurry()
            self._waiting += drained
            self._lock.notify_all()
            try:
                return self._lock.wait_for(done, timeout)
            finally:
                self._waiting -= drained

    def _is_urgent(self) -> bool:
        """Whether a thread waits for a drain: those before it hold it up."""
        return bool(self._waiting) or any(not one._is_over("durable") for one in self._awaited)

    def _priority(self, urgent: bool) -> _native.Priority:
        return _PRIORITY["normal" if urgent else self.settings.priority]

    def undrained(self) -> tuple[list[str], bool]:
        """Why checkpoints stay on the fast tier, and whether one of them is tried again; of those that
        are not it tells once."""
        with self._lock:
            given_up, self._given_up = self._given_up, []
            again = [drain.problem for drain in self._postponed]
            return given_up + again, bool(again)

    def _try_again(self) -> None:
        with self._lock:  # or retention could miss one
            again, self._postponed = self._postponed, []
            for drain in again:
                self.submit_drain(drain)

    def stop(self, timeout: float) -> None:
        """Ends both threads, after the blocks in flight; the next start continues their work.

        Saves that are left reach no further level, so `Saved.wait` ends.
        """
        with self._lock:
            self._stopping = True
            self._snapshots.clear()
            jobs, drains = [*self._jobs], [*self._drains]
            self._jobs.clear()
            self._drains.clear()
            self._busy -= len(jobs)
            for running in (self._writing, self._copying):
                if running is not None:
                    running[1].stop()
            self._lock.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:  # a thread that hanging storage keeps
            if self._job is not None and self._job.saved.level == "memory":
                jobs.append(self._job)
            if self._draining is not None:
                drains.append(self._draining)
        for job in jobs:
            self._say(job.saved, f"step {job.saved.step} is not saved: the checkpointer is closed")
            job.saved._miss("fast", "durable")
        for drain in drains:
            self._leave(drain)

    # ------------------------------------------------------------------ writing

    def _start(self, name: Literal["writer", "drain"]) -> str:
        """Starts a thread; returns why it cannot be started, or ""."""
        if name in self._threads or self._stopping:
            return ""
        loop = self._write_loop if name == "writer" else self._drain_loop
        thread = threading.Thread(target=loop, name=f"nostall-checkpoint-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit of processes
            return f"no thread can be started: {error}"
        self._threads[name] = thread
        return ""

    def _write_loop(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._jobs or self._stopping)
                if self._stopping:
                    return
                job = self._job = self._jobs.popleft()
            self._write_one(job)

    def _write_one(self, job: Job) -> None:
        try:
            with trace.span("write checkpoint", "background"):
                self._persist(job)
        except Exception as error:
            self._say(job.saved, f"step {job.saved.step} is not saved: {words_of(error)}")
            job.saved._miss("fast", "durable")
        finally:
            self._release(job)
            with self._lock:
                self._job = None
                self._busy -= 1
                self._lock.notify_all()

    def _release(self, job: Job) -> None:
        if job.snapshot is not None:
            snapshot, job.snapshot, job.leaves, job.window = job.snapshot, None, None, None
            job.saved.copied_bytes = snapshot.copied_bytes
            if not job.spare:
                self.add_snapshot(snapshot)

    def _persist(self, job: Job) -> None:
        saved = job.saved
        if job.arriving is not None and job.snapshot is not None:
            try:
                job.arriving.take(job.snapshot)
            except Exception as error:
                job.failed = f"a copy from the device failed: {words_of(error)}"
            job.arriving = job.leaves = None
        # A snapshot goes to directories alone: uploads are from the fast one.
        stores = [s for s in (self.fast, self.durable) if s is not None and s.is_directory]
        for store in stores:
            reason = self._write(store, job)
            if reason:
                then = (
                    f"; writing to {self.durable.root} directly"
                    if store is self.fast and self.durable is not None and self.durable in stores
                    else ""
                )
                self._say(
                    saved,
                    f"the {store.kind} storage {store.root} did not take the checkpoint of step "
                    f"{saved.step}: {reason}{then}",
                )
                continue
            if store is self.durable:
                saved._reach("durable")
            else:
                whole = None
                if self.durable is not None:
                    whole = job.complete or self._complete(store, job.manifest)
                # A thread that sees the level also sees the drain, and one that sees how the drain
                # ended the level.
                with self._lock:
                    saved._reach("fast")
                    if whole is not None:
                        self.submit_drain(Drain(whole, saved))
                    else:
                        saved._miss("durable")
            self._release(job)
            with self._lock:  # in the thread that may wait for the durable storage, if there is one
                alone = bool(self._start("drain"))
                self._retain_due = not alone
                self._lock.notify_all()
            if alone:
                self._retain()
            return
        saved._miss("fast", "durable")

    def _complete(self, store: Store, manifest: Manifest) -> Manifest:
        whole = store.find(manifest.step, manifest.id)
        if whole is None and manifest.replicated and self.rank != 0:
            return manifest  # it has no part there, and rank 0 may have retired what was complete
        if whole is None:
            raise IoError(f"the checkpoint in {store.directory(manifest.step)} is gone")
        return whole

    def _write(self, store: Store, job: Job) -> str:
        """Writes the rank's part to one storage and commits; returns why that failed, or ""."""
        manifest, settings = job.manifest, self.settings
        name = part_name(self.rank, manifest.id)
        mine: Part | str | None = job.failed or None
        try:
            if job.snapshot is not None and not job.failed:
                if store is self.fast and self._cleans:
                    size = job.snapshot.size * self._parts_here(manifest)
                    self._cleaner.make_room(store, size, manifest)
                written = self._write_part(store, job, job.snapshot, name)
                job.saved.writer_cpu_seconds += written.cpu_seconds
                self.write_seconds = written.seconds
                job.failed = job.window.torn() if job.window is not None else ""
                if not job.failed:
                    mine = Part(self.rank, name, written.size, tuple(written.crcs))
                else:
                    mine = job.failed
        except Exception as error:  # notifies the other ranks at once
            mine = words_of(error)
        if isinstance(mine, str) and job.snapshot is not None:
            store.discard(manifest.step, name)  # before a word, which may need its room
        nodes = self.nodes if store is self.fast else None
        if (
            nodes is not None
            and isinstance(mine, Part)
            and (problem := nodes.give_partner(manifest.step, mine))
        ):
            self._say(
                job.saved,
                f"step {manifest.step} has no partner's copy of rank {self.rank}'s part: {problem}",
            )
        certain = True
        try:
            if nodes is not None:
                outcome = nodes.commit(manifest, mine, self._is_stopped, self._meets)
                reason, certain, job.complete = outcome[:3]
                if outcome.problem:
                    self._say(job.saved, outcome.problem)
            else:
                reason = store.commit(
                    manifest,
                    self.rank,
                    mine,
                    timeout=settings.timeout,
                    stopped=self._is_stopped,
                )
        except Exception as error:  # a part that no checkpoint names must not stay
            reason = words_of(error)
            certain = nodes is None and self.rank == 0 and store.lacks(manifest)
        finally:
            self._meets()
        if reason and certain and isinstance(mine, Part):
            store.discard(manifest.step, name)
            if nodes is not None:
                nodes.take_back(manifest.step, mine)
        return reason

    def _is_stopped(self) -> bool:
        """Asked again and again while the writer waits for other ranks."""
        self._meets()
        return self._stopping

    def _meets(self, seconds: float = 0.0) -> None:
        """The writer waits for other ranks, for so many more seconds at most."""
        self._met = time.monotonic() + seconds

    def _write_part(
        self, store: Store, job: Job, snapshot: _native.Snapshot, name: str
    ) -> _native.Written:
        """Writes the rank's part. On a fast directory that is full it waits a while for the rank that
        makes room there, which may be about to."""
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            path = store.prepare(job.manifest.step) / name
            try:
                return _beside_removals(
                    store,
                    job.manifest.step,
                    functools.partial(self._write_file, store, job, snapshot, path),
                )
            except OSError as error:
                if store is not self.fast or self._cleans or not is_full(error):
                    raise
                with contextlib.suppress(OSError):
                    path.unlink()  # the rank that makes room counts what is free
                with self._lock:
                    over = self._lock.wait_for(lambda: self._stopping, _LOOK_SECONDS)
                if over or time.monotonic() > deadline or store.aborted(job.manifest):
                    raise

    def _write_file(
        self, store: Store, job: Job, snapshot: _native.Snapshot, path: Path
    ) -> _native.Written:
        settings, urgent = self.settings, job.number <= self._urgent
        slow = store is self.durable and not urgent
        write = _native.SnapshotWrite(
            snapshot,
            str(path),
            rate=settings.rate if slow else 0,
            priority=self._priority(urgent),
            threads=settings.writes_in_flight if not slow else 1,
            gate=self.gate if not urgent else None,
            gate_patience=self._patience(snapshot.size),
            considerate=settings.windows and slow,
        )
        with self._lock:
            self._writing = (job.number, write)
            urgent = job.number <= self._urgent
        try:
            if urgent:
                write.hurry()
            return write.run()
        finally:
            with self._lock:
                self._writing = None

    def _parts_here(self, manifest: Manifest) -> int:
        """How many parts of a checkpoint come to this fast directory, if this rank writes one."""
        if manifest.replicated:
            return 1
        if self.nodes is None:
            return manifest.world_size
        ranks = len(self.nodes.groups[self.nodes.node])
        return ranks if self.nodes.partner is None else 2 * ranks

    def _patience(self, size: int) -> float:
        """How long a closed gate may delay a block of a file: all blocks together by at most half the
        time between two saves, so that a drain does not fall behind."""
        blocks = max(1, -(-size // _native.CHECKPOINT_BLOCK))
        return min(self.settings.gate_patience, self._interval / 2 / blocks)

    # ------------------------------------------------------------------ draining

    def _drain_loop(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._drains or self._retain_due or self._stopping)
                if self._stopping:
                    return
                drain = self._draining = self._drains.popleft() if self._drains else None
                if drain is None:
                    # Retention that becomes due from now on runs once more.
                    self._retain_due, self._retaining = False, True
            if drain is None:
                try:
                    self._retain()
                finally:
                    with self._lock:
                        self._retaining = False
                        self._lock.notify_all()
                continue
            try:
                with trace.span("drain checkpoint", "background"):
                    self._drain(drain)
            except StoppedError:
                self._leave(drain)
                return
            except Exception as error:
                if again := self._saved_again(drain.manifest):
                    self._skip(drain, again)
                else:
                    self._postpone(drain, error, self._is_gone(drain.manifest))
            finally:
                with self._lock:
                    self._draining = None
                    self._lock.notify_all()

    def _leave(self, drain: Drain) -> None:
        """Logs that the job ends before this is drained."""
        assert self.fast is not None and self.durable is not None
        words = (
            f"the checkpoint of step {drain.manifest.step} stays in {self.fast.root}: the next start "
            f"copies it to {self.durable.root}"
        )
        self._skip(drain, words)

    @staticmethod
    def _skip(drain: Drain, reason: str) -> None:
        """Ends a drain that does not take place, and that nobody misses."""
        _log.info("%s", reason)
        if drain.saved is not None:
            drain.saved.problems.append(reason)
            drain.saved._miss("durable")

    def _postpone(self, drain: Drain, error: Exception, gone: bool) -> None:
        """Tries a drain once more, when the storage has taken another one or somebody waits."""
        assert self.fast is not None and self.durable is not None
        stays = "is whole no more" if gone else "stays"
        problem = (
            f"the checkpoint of step {drain.manifest.step} {stays} in {self.fast.root}: it cannot be "
            f"copied to {self.durable.root}: {words_of(error)}"
        )
        self._say(drain.saved, problem)
        if self.rank == 0:
            self._keep(drain, error, problem, gone)
        if drain.saved is not None:  # last: who is told may have it tried again at once
            drain.saved._miss("durable")

    def _keep(self, drain: Drain, error: Exception, problem: str, gone: bool) -> None:
        """Keeps a drain that failed, to be tried again, or why it will not be."""
        if gone or isinstance(error, CorruptionError | LostStoreError):
            # Damage of what an earlier job left concerns no save of this one.
            if drain.saved is not None or isinstance(error, LostStoreError):
                with self._lock:
                    self._given_up.append(problem)
            return
        # Rank 0 then copies all parts alone, because the other ranks have given this drain up.
        held = drain.held
        if held is None and self.nodes is not None:
            held = self.nodes.held(drain.manifest)
        with self._lock:
            self._postponed.append(
                dataclasses.replace(drain, alone=True, held=held, problem=problem)
            )

    def _is_gone(self, manifest: Manifest) -> bool:
        """Whether the fast tier has it no more: somebody has removed it, or it had to make room."""
        if self.nodes is not None:  # another one may have its parts
            return False
        assert self.fast is not None
        try:
            self.fast.check_owned()
            if self.fast.missing(manifest):
                return True
            # A damaged manifest may be its own: the parts are there.
            damaged = any(entry.manifest is None for entry in self.fast.saves(manifest.step))
            return not damaged and self.fast.lacks(manifest)
        except (Error, OSError):
            return False

    def _saved_again(self, manifest: Manifest) -> str:
        """Why a checkpoint that cannot be copied is not missed, or "": a later save of its step, which
        continues it, is complete and has taken its place."""
        assert self.fast is not None and self.durable is not None
        for store in (self.fast, self.durable):
            try:
                entries = store.saves(manifest.step)
            except (Error, OSError):
                return ""
            if any(entry.id in ("", manifest.id) for entry in entries):
                return ""  # a damaged manifest may be its own
            for later in (e.manifest for e in entries if e.manifest is not None and not e.damage):
                past = is_past(manifest.sequence, later.sequence, later.abandoned)
                if past and later.order > manifest.order:
                    return f"step {manifest.step} was saved again before this save was copied"
        return ""

    def _drain(self, drain: Drain) -> None:
        fast, durable, manifest = self.fast, self.durable, drain.manifest
        assert fast is not None and durable is not None
        if reason := self._superseded(manifest):
            if self.rank == 0 and manifest.world_size > 1 and not drain.alone:
                durable.abort(manifest, reason)
            self._skip(drain, reason)
            self._retain()
            return
        alone, whole, failed = drain.alone or manifest.world_size == 1, False, ""
        try:
            if self.rank == 0:
                durable.check_owned()  # nothing is copied in vain
            there = (
                find_copy(durable, manifest) if alone else durable.find(manifest.step, manifest.id)
            )
            whole = there is not None and durable.has_all(there)
            # Gone since, as manifests go first, it was retired: no rank without a part is waited for.
            if there is not None and not whole and durable.find(there.step, there.id) is not None:
                failed = f"{durable.root} lacks parts of step {manifest.step}"
            copies = durable.is_directory and any(p.rank == self.rank for p in manifest.parts)
            if whole and self.rank != 0 and not copies:
                # Rank 0 alone knows whether it is on its device, and whether another job has it since.
                whole = False
            if whole and there is not None:
                durable.check_owned()  # or another job may have removed it since
                durable.confirm(there)
        except IoError as error:
            if alone:
                raise  # else other ranks wait for this one's word
            whole = False
            if durable.is_directory:  # on an object store no name is written twice
                failed = words_of(error)
        except LostStoreError as error:
            if not alone:
                durable.abort(manifest, str(error))
            raise
        if alone and not whole:
            self._drain_alone(drain)
        elif not whole:
            self._drain_together(drain, failed)
        if drain.saved is not None:
            drain.saved._reach("durable")
        self._retain()
        self._try_again()  # for the storage works

    def _drain_alone(self, drain: Drain) -> None:
        """Copies all parts, on this rank."""
        assert self.durable is not None
        copy_all(
            self.durable,
            drain.manifest,
            lambda part, name: self._copy(drain, part, name),
        )

    def _drain_together(self, drain: Drain, failed: str) -> None:
        """Copies this rank's part; rank 0 completes the checkpoint.

        `failed` says why it must not be copied so: the checkpoint is there and lacks parts, or that is
        not known. Its files are left as they are: rank 0, told by this rank's word, copies all parts
        alone and beside them.
        """
        durable, manifest = self.durable, drain.manifest
        assert durable is not None
        own = () if failed else tuple(p for p in manifest.parts if p.rank == self.rank)
        parts = [
            dataclasses.replace(part, name=durable.part_name(part, manifest.id)) for part in own
        ]
        try:
            if parts:
                durable.make_step(manifest.step)
            for part, copy in zip(own, parts, strict=True):
                self._copy(drain, part, copy.name)
        except StoppedError:
            raise
        except Exception as error:
            failed = words_of(error)
            for part in parts:  # before a word, which may need their room
                durable.discard(manifest.step, part.name)
        mine = failed or (parts[0] if parts else None)
        try:
            reason = durable.commit(
                manifest,
                self.rank,
                mine,
                timeout=self.settings.timeout,
                stopped=lambda: self._stopping,
            )
        except (Error, OSError) as error:
            if self._stopping:
                raise StoppedError(str(error)) from error
            raise
        if reason:
            for part in parts:
                durable.discard(manifest.step, part.name)
            if self._stopping:
                raise StoppedError(reason)
            raise IoError(reason)

    def _copy(self, drain: Drain, part: Part, name: str) -> None:
        """Copies a part into the file `name`."""
        assert self.durable is not None
        copy = functools.partial(self._copy_from_nodes, drain, part, name)
        _beside_removals(self.durable, drain.manifest.step, copy)

    def _copy_from_nodes(self, drain: Drain, part: Part, name: str) -> None:
        """The same, from this node, or else from the first node that has an undamaged copy."""
        nodes = self.nodes
        if nodes is None or drain.held is None:
            self._copy_here(drain, part, name)
            return
        assert self.durable is not None
        problems: list[str] = []
        for node in nodes.nearest_first(drain.held.holders[part.name]):
            try:
                if node == nodes.node:
                    self._copy_here(drain, part, name)
                elif self.durable.is_directory:
                    target = self.durable.directory(drain.manifest.step) / name
                    nodes.fetch(drain.manifest.step, part, node, target, self._pace())
                else:
                    self._fetch_and_copy(drain, part, name, node)
                return
            except StoppedError:
                raise
            except (Error, OSError) as error:
                problems.append(f"node {node}: {error}")
                _log.warning("a copy of %s cannot be drained: %s", part.name, problems[-1])
        raise IoError("; ".join(problems))

    def _fetch_and_copy(self, drain: Drain, part: Part, name: str, node: int) -> None:
        """Uploads a part of another node, by way of this one's fast directory."""
        nodes, step = self.nodes, drain.manifest.step
        assert nodes is not None and self.fast is not None
        path = self.fast.prepare(step) / part.name
        own = path.exists()  # and damaged
        try:
            nodes.fetch(step, part, node, path, self._pace())
            self._copy_here(drain, part, name)
        finally:
            if not own:
                self.fast.discard(step, part.name)

    def _pace(self) -> Callable[[int], None]:
        """Called with the bytes received so far: waits to keep the rate."""
        began = time.monotonic()

        def wait(bytes: int) -> None:
            def hurried() -> bool:
                return self._stopping or self._is_urgent()

            with self._lock:
                if self.settings.rate:
                    left = began + bytes / self.settings.rate - time.monotonic()
                    self._lock.wait_for(hurried, max(0.0, left))
                if self._stopping:
                    raise StoppedError("the checkpointer is closed")

        return wait

    def _copy_here(self, drain: Drain, part: Part, name: str) -> None:
        assert self.fast is not None and self.durable is not None
        source = self.fast.directory(drain.manifest.step) / part.name
        urgent = self._is_urgent()
        pacing = Pacing(
            rate=0 if urgent else self.settings.rate,
            priority=self._priority(urgent),
            gate=self.gate if not urgent else None,
            gate_patience=self._patience(part.size),
            considerate=self.settings.windows and not urgent,
        )
        copy = self.durable.copy(source, drain.manifest.step, name, part, pacing)
        with self._lock:
            if self._stopping:  # even a copy that is stopped at once makes its file anew
                raise StoppedError("the checkpointer is closed")
            self._copying = (drain.manifest.id, copy)
            if self._is_urgent():
                copy.hurry()
        try:
            copy.run()
        finally:
            with self._lock:
                self._copying = None
        if self.settings.verify:
            priority = self._priority(self._is_urgent())
            read_back(self.durable, drain.manifest.step, part, name, priority)
        if self._stopping:  # meanwhile: the directories may be another checkpointer's
            raise StoppedError("the checkpointer is closed")

    def _superseded(self, manifest: Manifest) -> str:
        """Why this checkpoint need not be drained, by the rule of retention; or ""."""
        assert self.fast is not None and self.durable is not None
        if self.rank != 0:
            return self.durable.aborted(manifest) or ""
        with self._lock:
            waiting = {d.manifest.id: d.manifest for d in self._drains}
        newer = [m for m in waiting.values() if m.order > manifest.order]
        if not newer:
            return ""
        try:
            known = self._cleaner.complete(self.durable) | waiting | {manifest.id: manifest}
            if manifest.id in self._cleaner.staying(known):
                return ""
        except (Error, OSError):  # the copy tells of it; other ranks wait for this one
            return ""
        newest = max(newer, key=lambda m: m.order).step
        return f"step {newest} is complete already and step {manifest.step} need not be kept"

    @property
    def damaged(self) -> set[str]:
        """Ids that restore found unusable: they never count as kept."""
        return self._cleaner.damaged

    @contextlib.contextmanager
    def all_stays(self) -> Iterator[None]:
        """Inside a ``with`` the rules of retention remove nothing: what a restore has seen can be read.

        A save that is drained meanwhile would else be missed: not yet durable when that storage is
        looked at, and gone from the fast one when it is read.

        Three removals go on: one that is under way and does not end within the timeout, that of a fast
        copy to make room for a save, and that of the save which a new one of its step replaces.
        """
        with self._lock:
            self._looking += 1
            if not self._lock.wait_for(lambda: not self._removing, self.settings.timeout):
                _log.warning(
                    "old checkpoints are being removed for %g s already: the restore begins",
                    self.settings.timeout,
                )
        try:
            yield
        finally:
            with self._lock:
                self._looking -= 1
                due = self._retain_later and not self._looking
                alone = due and bool(self._start("drain"))
                if due:
                    self._retain_later, self._retain_due = False, not alone
                self._lock.notify_all()
            if alone:
                self._retain()

    def _retain(self) -> None:
        if not self._cleans:
            return
        with self._lock:
            if self._looking:
                self._retain_later = True
                return
            self._removing = True
            waiting = [*self._drains, *self._postponed]
            if self._draining is not None:
                waiting.append(self._draining)
        try:
            self._cleaner.retain({drain.manifest.id for drain in waiting})
        except Exception as error:
            _log.warning("old checkpoints stay: %s", words_of(error))
        finally:
            with self._lock:
                self._removing = False
                self._lock.notify_all()

    def _say(self, saved: Saved | None, problem: str) -> None:
        _log.warning("%s", problem)
        if saved is not None:
            saved.problems.append(problem)


def _beside_removals(store: Store, step: int, write: Callable[[], T]) -> T:
    """What `write` gives, which makes a file in a step's directory.

    Another rank may remove that directory as long as nothing is in it: it is made again, if that one
    has not done so in the meantime, to leave word there.
    """
    for _ in range(_REMOVALS):
        try:
            return write()
        except OSError as error:
            gone = store.step_is_gone(step)
            if not gone and not (store.is_directory and error.errno == errno.ENOENT):
                raise
        if gone:
            store.make_step(step)
    return write()
