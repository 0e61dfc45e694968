"""What happens behind `save`: one thread writes snapshots, one drains the fast tier to the durable.

Both do their work in native code without the GIL and at low priority; here are only the decisions.
All that a next start must know is in the directories (`store.py`), nothing in this process.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from typing import Literal

from nostall import _native
from nostall.checkpoint.format import Manifest, Part
from nostall.checkpoint.retention import Keep, decide
from nostall.checkpoint.store import Store, part_name
from nostall.errors import CorruptionError, Error, IoError, PeerError, StoppedError

Level = Literal["memory", "fast", "durable"]
_ORDER: dict[str, int] = {"memory": 0, "fast": 1, "durable": 2}
_PRIORITY = {
    "normal": _native.Priority.normal,
    "low": _native.Priority.low,
    "idle": _native.Priority.idle,
}

_log = logging.getLogger("nostall")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the engine writes; rates in bytes a second (0: any), times in seconds."""

    keep: Keep
    keep_fast: int = 1
    rate: int = 0
    timeout: float = 600.0
    patience: float = 60.0
    priority: Literal["normal", "low", "idle"] = "idle"
    writes_in_flight: int = 2
    verify: bool = True
    gate_patience: float = 1.0


class Saved:
    """One call of `save`: what it cost, and how far its checkpoint has come.

    `seconds` is the call's, `copy_seconds` that of the copy in it, `waited_seconds` that of waiting
    for an earlier snapshot to be written. `fast_seconds` and `durable_seconds` are from the call to
    the level, None before. `problems` says what did not go as configured.
    """

    def __init__(self, step: int, id: str, size: int) -> None:
        self.step = step
        self.id = id
        self.bytes = size
        self.seconds = 0.0
        self.copy_seconds = 0.0
        self.waited_seconds = 0.0
        self.fast_seconds: float | None = None
        self.durable_seconds: float | None = None
        self.writer_cpu_seconds = 0.0
        self.problems: list[str] = []
        self._began = time.monotonic()
        self._level: Level = "memory"
        self._ended: set[str] = set()  # levels that will not be reached any more
        self._changed = threading.Condition()
        self._engine: Engine | None = None

    @property
    def level(self) -> Level:
        """The safest level that the checkpoint has reached."""
        return self._level

    def wait(self, level: Level = "durable", timeout: float | None = None) -> None:
        """Returns once the checkpoint is safe at `level`; meanwhile it is written at full speed.

        Raises:
            IoError: it will not get there; with the reasons.
            PeerError: it has not got there in `timeout` seconds.
        """
        if self._engine is not None and not self._is_over(level):
            self._engine.hurry(self, level)
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over(level), timeout):
                raise PeerError(
                    f"the checkpoint of step {self.step} has reached {self._level} and not {level} "
                    f"in {timeout:g} s"
                )
            if _ORDER[self._level] < _ORDER[level]:
                raise IoError(
                    f"the checkpoint of step {self.step} is not safe at level {level}: "
                    + "; ".join(self.problems)
                )

    def _is_over(self, level: Level) -> bool:
        return _ORDER[self._level] >= _ORDER[level] or level in self._ended

    def _reach(self, level: Level) -> None:
        with self._changed:
            seconds = time.monotonic() - self._began
            if level == "durable":
                self.durable_seconds = seconds
            else:
                self.fast_seconds = seconds
            self._level = level
            self._changed.notify_all()

    def _miss(self, *levels: Level) -> None:
        with self._changed:
            self._ended.update(levels)
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, level={self._level!r}, seconds={self.seconds:.3f})"


@dataclasses.dataclass
class Job:
    """A snapshot on its way: `image` is None where this rank writes nothing, `failed` says why a
    rank that should has none."""

    saved: Saved
    manifest: Manifest
    image: _native.Image | None
    number: int
    failed: str = ""


@dataclasses.dataclass
class Drain:
    """A checkpoint that is complete on the fast tier; `alone`: left over by an earlier job."""

    manifest: Manifest
    saved: Saved | None = None
    alone: bool = False


class Engine:
    """The two threads and their queues, for one rank."""

    def __init__(
        self, fast: Store | None, durable: Store | None, rank: int, settings: Settings
    ) -> None:
        self.fast, self.durable, self.rank = fast, durable, rank
        self.settings = settings
        self.gate = _native.Gate()
        self.damaged: set[str] = set()  # ids that restore found unusable: never counted as kept
        self._lock = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._drains: deque[Drain] = deque()
        self._postponed: list[Drain] = []
        self._draining: Drain | None = None
        self._busy = 0  # jobs taken and not persisted
        self._images: list[_native.Image] = []
        self._urgent = -1  # jobs up to this number are waited for
        self._urgent_drains: set[str] = set()
        self._writing: tuple[int, _native.ImageWrite] | None = None
        self._copying: tuple[str, _native.FileCopy] | None = None
        self._stopping = False
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------ images

    def add_image(self, image: _native.Image) -> None:
        """One more snapshot that can be in memory at a time."""
        with self._lock:
            self._images.append(image)
            self._lock.notify_all()

    def take_image(self) -> _native.Image | None:
        """A free snapshot; waits for an earlier one to be written, at full speed.

        None if that takes longer than `patience` seconds: the storage hangs.
        """
        with self._lock:
            if self._images:
                return self._images.pop()
        self._hurry_writer(1 << 62)
        with self._lock:
            if not self._lock.wait_for(lambda: bool(self._images), self.settings.patience):
                return None
            return self._images.pop()

    # ------------------------------------------------------------------ asking

    def submit(self, job: Job) -> None:
        """Writes the snapshot as soon as the ones before it are written."""
        job.saved._engine = self
        with self._lock:
            self._jobs.append(job)
            self._busy += 1
            self._start()
            self._lock.notify_all()

    def submit_drain(self, drain: Drain) -> None:
        """Copies a complete fast checkpoint to the durable storage."""
        with self._lock:
            self._drains.append(drain)
            self._start()
            self._lock.notify_all()

    def hurry(self, saved: Saved, level: Level) -> None:
        """Somebody waits: no rate, no gate, no low priority for what leads to that level."""
        with self._lock:
            self._urgent_drains.add(saved.id)
            numbers = [job.number for job in self._jobs if job.saved is saved]
            if self._writing is not None:
                numbers.append(self._writing[0])
        if numbers:
            self._hurry_writer(max(numbers))
        if level == "durable":
            with self._lock:
                copying = self._copying
            if copying is not None:
                copying[1].hurry()

    def _hurry_writer(self, number: int) -> None:
        with self._lock:
            self._urgent = max(self._urgent, number)
            writing = self._writing
        if writing is not None:
            writing[1].hurry()

    def wait(self, drained: bool, timeout: float) -> bool:
        """Until all snapshots are persisted and, if asked, drained; whether that is so."""

        def done() -> bool:
            idle = not self._busy
            return idle and not (drained and (self._drains or self._draining))

        self._hurry_writer(1 << 62)
        with self._lock:
            return self._lock.wait_for(done, timeout)

    def stop(self, timeout: float) -> None:
        """Ends both threads, after the blocks in flight; what they leave is for the next start."""
        with self._lock:
            self._stopping = True
            for running in (self._writing, self._copying):
                if running is not None:
                    running[1].stop()
            self._lock.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------ writing

    def _start(self) -> None:
        if not self._threads and not self._stopping:
            for name, loop in (("writer", self._write_loop), ("drain", self._drain_loop)):
                thread = threading.Thread(
                    target=loop, name=f"nostall-checkpoint-{name}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _write_loop(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._jobs or self._stopping)
                if self._stopping:
                    return
                job = self._jobs.popleft()
            try:
                self._persist(job)
            except Exception as error:
                self._say(job.saved, f"step {job.saved.step} is not saved: {error}")
                job.saved._miss("fast", "durable")
            finally:
                self._release(job)
                with self._lock:
                    self._busy -= 1
                    self._lock.notify_all()

    def _release(self, job: Job) -> None:
        if job.image is not None:
            image, job.image = job.image, None
            self.add_image(image)

    def _persist(self, job: Job) -> None:
        saved = job.saved
        for store in (self.fast, self.durable):
            if store is None:
                continue
            reason = self._write(store, job)
            if reason:
                then = (
                    f"; writing to {self.durable.root} directly"
                    if store is self.fast and self.durable is not None
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
                # First in the queue, so that whoever sees the level sees the drain as well.
                if self.durable is not None:
                    self.submit_drain(Drain(self._complete(store, job.manifest), saved))
                else:
                    saved._miss("durable")
                saved._reach("fast")
            self._release(job)
            self._retain()
            return
        saved._miss("fast", "durable")

    @staticmethod
    def _complete(store: Store, manifest: Manifest) -> Manifest:
        entry = store.entry(manifest.step)
        if entry is None or entry.manifest is None:
            raise IoError(f"the checkpoint in {store.directory(manifest.step)} is gone")
        return entry.manifest

    def _write(self, store: Store, job: Job) -> str:
        """The rank's part and the commit on one storage; why not, or ""."""
        manifest, settings = job.manifest, self.settings
        name = part_name(self.rank, manifest.id)
        mine: Part | str | None = job.failed or None
        try:
            if job.image is not None:
                if store is self.fast and self.rank == 0:
                    self._make_room(store, job.image.size * manifest.world_size)
                path = store.prepare(manifest.step) / name
                urgent = job.number <= self._urgent
                slow = store is self.durable and not urgent
                write = _native.ImageWrite(
                    job.image,
                    str(path),
                    rate=settings.rate if slow else 0,
                    priority=_PRIORITY["normal" if urgent else settings.priority],
                    threads=settings.writes_in_flight if not slow else 1,
                    gate=self.gate if not urgent else None,
                    gate_patience=settings.gate_patience,
                )
                with self._lock:
                    self._writing = (job.number, write)
                    urgent = job.number <= self._urgent
                if urgent:
                    write.hurry()
                written = write.run()
                job.saved.writer_cpu_seconds += written.cpu_seconds
                mine = Part(self.rank, name, written.size, tuple(written.crcs))
        except (Error, OSError) as error:
            mine = str(error)
        finally:
            with self._lock:
                self._writing = None
        try:
            reason = store.commit(
                manifest,
                self.rank,
                mine,
                timeout=settings.timeout,
                stopped=lambda: self._stopping,
            )
        except (Error, OSError) as error:
            reason = str(error)
        if reason and job.image is not None:
            store.discard(manifest.step, name)
        return reason

    # ------------------------------------------------------------------ draining

    def _drain_loop(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._drains or self._stopping)
                if self._stopping:
                    return
                drain = self._draining = self._drains.popleft()
            try:
                self._drain(drain)
            except StoppedError:
                return
            except (Error, OSError) as error:
                assert self.fast is not None and self.durable is not None
                self._say(
                    drain.saved,
                    f"the checkpoint of step {drain.manifest.step} stays in {self.fast.root}: it "
                    f"cannot be copied to {self.durable.root}: {error}",
                )
                if drain.saved is not None:
                    drain.saved._miss("durable")
                if not isinstance(error, CorruptionError) and drain.manifest.world_size == 1:
                    self._postponed.append(drain)
            finally:
                with self._lock:
                    self._draining = None
                    self._lock.notify_all()

    def _drain(self, drain: Drain) -> None:
        fast, durable, manifest = self.fast, self.durable, drain.manifest
        assert fast is not None and durable is not None
        if (newer := self._superseded(manifest)) is not None:
            reason = f"step {newer} is complete already and step {manifest.step} need not be kept"
            if self.rank == 0 and manifest.world_size > 1 and not drain.alone:
                durable.abort(manifest, reason)
            if drain.saved is not None:
                drain.saved.problems.append(reason)
                drain.saved._miss("durable")
            self._retain()
            return
        held = durable.entry(manifest.step)
        if held is None or held.manifest is None or held.manifest.id != manifest.id:
            parts = manifest.parts
            if not drain.alone:
                parts = tuple(p for p in parts if p.rank == self.rank)
            failed = ""
            try:
                if parts:
                    durable.prepare(manifest.step)
                for part in parts:
                    self._copy(drain, part)
            except StoppedError:
                raise
            except (Error, OSError) as error:
                if drain.alone or manifest.world_size == 1:
                    for part in parts:
                        durable.discard(manifest.step, part.name)
                    raise
                failed = str(error)
            if drain.alone:
                durable.publish(manifest)
            else:
                mine = failed or (parts[0] if parts else None)
                reason = durable.commit(
                    manifest,
                    self.rank,
                    mine,
                    timeout=self.settings.timeout,
                    stopped=lambda: self._stopping,
                )
                if reason:
                    for part in parts:
                        durable.discard(manifest.step, part.name)
                    raise IoError(reason)
        if drain.saved is not None:
            drain.saved._reach("durable")
        self._retain()
        with self._lock:
            # The storage works again: what it did not take before is tried once more.
            again, self._postponed = self._postponed, []
            self._drains.extend(again)

    def _copy(self, drain: Drain, part: Part) -> None:
        assert self.fast is not None and self.durable is not None
        source = self.fast.directory(drain.manifest.step) / part.name
        target = self.durable.directory(drain.manifest.step) / part.name
        urgent = drain.manifest.id in self._urgent_drains
        priority = _PRIORITY["normal" if urgent else self.settings.priority]
        copy = _native.FileCopy(
            str(source),
            str(target),
            part.size,
            list(part.crcs),
            rate=0 if urgent else self.settings.rate,
            priority=priority,
            gate=self.gate if not urgent else None,
            gate_patience=self.settings.gate_patience,
        )
        with self._lock:
            self._copying = (drain.manifest.id, copy)
            if drain.manifest.id in self._urgent_drains:
                copy.hurry()
            if self._stopping:
                copy.stop()
        try:
            copy.run()
        finally:
            with self._lock:
                self._copying = None
        if self.settings.verify:
            bad = _native.check_file(
                str(target), part.size, list(part.crcs), threads=1, priority=priority
            )
            if bad:
                raise IoError(f"{target} reads back with {len(bad)} damaged blocks")

    def _superseded(self, manifest: Manifest) -> int | None:
        """A newer step that makes draining this one a waste, by the rule of retention."""
        assert self.fast is not None and self.durable is not None
        if self.rank != 0:
            return manifest.step if self.durable.aborted(manifest) is not None else None
        with self._lock:
            waiting = {d.manifest.step: d.manifest.metric for d in self._drains}
        newer = [step for step in waiting if step > manifest.step]
        if not newer:
            return None
        known = self._kept(self.durable) | waiting | {manifest.step: manifest.metric}
        return None if manifest.step in decide(known.items(), self.settings.keep) else max(newer)

    # ------------------------------------------------------------------ retention

    def _kept(self, store: Store) -> dict[int, float | None]:
        return {
            e.step: e.manifest.metric
            for e in store.entries()
            if e.manifest is not None and e.manifest.id not in self.damaged
        }

    def _retain(self) -> None:
        """Rank 0 removes what the rules no longer keep."""
        if self.rank != 0:
            return
        try:
            last = self.durable or self.fast
            assert last is not None
            kept = self._kept(last)
            stay = decide(kept.items(), self.settings.keep)
            for step in sorted(kept.keys() - stay.keys()):
                last.remove(step)
            if self.fast is not None and self.durable is not None:
                self._trim_fast(self.fast, self.durable)
        except (Error, OSError) as error:
            _log.warning("old checkpoints stay: %s", error)

    def _trim_fast(self, fast: Store, durable: Store) -> None:
        """Of the fast tier stay the newest, and what is not durable yet and still wanted."""
        kept = self._kept(fast)
        newest = sorted(kept)[-self.settings.keep_fast :]
        wanted = decide((kept | self._kept(durable)).items(), self.settings.keep)
        with self._lock:
            running = [*self._drains, *self._postponed]
            if self._draining is not None:
                running.append(self._draining)
            waiting = {d.manifest.step for d in running}
        for step in sorted(kept.keys() - set(newest)):
            if self._is_on(durable, fast, step) or (step not in wanted and step not in waiting):
                fast.remove(step)

    @staticmethod
    def _is_on(durable: Store, fast: Store, step: int) -> bool:
        ours, theirs = fast.entry(step), durable.entry(step)
        return (
            ours is not None
            and theirs is not None
            and ours.manifest is not None
            and theirs.manifest is not None
            and ours.manifest.id == theirs.manifest.id
        )

    def _make_room(self, fast: Store, size: int) -> None:
        """Lets old fast copies go if the new one does not fit: durable ones first, never the last."""
        complete = sorted(self._kept(fast))
        durable = self.durable
        safe = [s for s in complete if durable is not None and self._is_on(durable, fast, s)]
        for step in [*safe, *(s for s in complete[:-1] if s not in safe)]:
            status = os.statvfs(fast.root)
            if status.f_bavail * status.f_frsize >= size + (1 << 20):
                return
            if step not in safe:
                _log.warning(
                    "%s is full: the checkpoint of step %d goes, though it is not durable yet, to "
                    "make room for a newer one",
                    fast.root,
                    step,
                )
            fast.remove(step)

    def _say(self, saved: Saved | None, problem: str) -> None:
        _log.warning("%s", problem)
        if saved is not None:
            saved.problems.append(problem)
