"""A save and its progress, as the training and the background threads share them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nostall import _native
from nostall.checkpoint._format import Manifest
from nostall.checkpoint._retention import Keep
from nostall.errors import IoError, PeerError, UsageError

if TYPE_CHECKING:
    from nostall.checkpoint._background import BackgroundWriter
    from nostall.checkpoint._device import DeviceCopies, DeviceWindow
    from nostall.checkpoint._nodes import Held
    from nostall.checkpoint._window import SaveWindow

Level = Literal["memory", "fast", "durable"]
# Seconds that the storage may take to answer whether a save is complete.
_LOOK_SECONDS = 5.0
_ORDER: dict[str, int] = {"memory": 0, "fast": 1, "durable": 2}


def waitable(timeout: float) -> float:
    """So many seconds as a lock takes them, which knows no infinity.

    Raises:
        UsageError: it is no number.
    """
    if timeout != timeout:
        raise UsageError(f"timeout must be a number of seconds, not {timeout!r}")
    return min(timeout, threading.TIMEOUT_MAX)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How checkpoints are written; rates in bytes per second (0: no limit), times in seconds."""

    keep: Keep
    keep_fast: int = 1
    rate: int = 0
    timeout: float = 600.0
    patience: float = 60.0
    priority: Literal["normal", "low", "idle"] = "low"
    writes_in_flight: int = 2
    verify: bool = True
    gate_patience: float = 1.0
    windows: bool = True


class Saved:
    """One call of `save`: its cost, and the progress of its checkpoint.

    `seconds` is the time of the call, `copy_seconds` that of the copy in it, `waited_seconds` that of
    waiting until an earlier snapshot was written. With `window`, `update_seconds` is the time that
    updates waited for the rest of a copy; `copied_bytes` is what was copied, `copying` how and why.
    `fast_seconds` and `durable_seconds` are the times from the call to the level, None before it.
    `problems` lists what differed from the configuration.
    """

    def __init__(self, step: int, id: str, size: int) -> None:
        self.step = step
        self.id = id
        self.bytes = size
        self.seconds = 0.0
        self.copy_seconds = 0.0
        self.waited_seconds = 0.0
        self.update_seconds = 0.0
        self.copied_bytes = 0
        self.copying = "in the call"
        self.fast_seconds: float | None = None
        self.durable_seconds: float | None = None
        self.writer_cpu_seconds = 0.0
        self.problems: list[str] = []
        self._began = time.monotonic()
        self._level: Level = "memory"
        self._ended: set[str] = set()  # levels that will not be reached any more
        self._changed = threading.Condition()
        self._background: BackgroundWriter | None = None

    @property
    def level(self) -> Level:
        """The safest level that the checkpoint has reached."""
        return self._level

    def wait(self, level: Level = "durable", timeout: float | None = None) -> None:
        """Waits until the checkpoint is safe at `level`, and lets it be written at full speed.

        Raises:
            UsageError: the checkpointer has no durable directory, but `level` is durable; or `timeout`
                is no number.
            IoError: it will not reach the level, with the reasons.
            PeerError: it has not reached the level in `timeout` seconds.
        """
        if level not in _ORDER:
            raise UsageError(f'level must be "memory", "fast" or "durable", not {level!r}')
        if level == "durable" and self._background is not None and not self._background.durable:
            raise UsageError(
                'the checkpointer has no durable directory: give it durable=, or wait("fast")'
            )
        limit = None if timeout is None else waitable(timeout)
        if self._background is not None and not self._is_over(level):
            self._background.hurry(self, level)
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over(level), limit):
                raise PeerError(
                    f"the checkpoint of step {self.step} has reached {self._level} and not {level} "
                    f"in {timeout:g} s"
                )
            if _ORDER[self._level] < _ORDER[level]:
                raise IoError(
                    f"the checkpoint of step {self.step} is not safe at level {level}: "
                    + "; ".join(self.problems)
                )

    @property
    def failed(self) -> bool:
        """Whether the checkpoint will be safe nowhere."""
        return self._level == "memory" and {"fast", "durable"} <= self._ended

    def _is_over(self, level: Level) -> bool:
        return _ORDER[self._level] >= _ORDER[level] or level in self._ended

    def _reach(self, level: Level) -> None:
        with self._changed:
            seconds = time.monotonic() - self._began
            if level == "durable":
                self.durable_seconds = seconds
            else:
                self.fast_seconds = seconds
            if _ORDER[level] > _ORDER[self._level]:  # the drain may have been first
                self._level = level
            self._changed.notify_all()
        if _native.trace_on():
            kind, now = (
                _native.trace_kind("background", f"resume point, {level}"),
                _native.trace_now(),
            )
            _native.trace_record(kind, now - int(1e9 * seconds), now)

    def _miss(self, *levels: Level) -> None:
        with self._changed:
            self._ended.update(levels)
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"Saved(step={self.step}, level={self._level!r}, seconds={self.seconds:.3f})"


class Failures:
    """Raises in the training when its checkpoints are safe nowhere.

    Before that a thread looks for the checkpoints on the storage, which may hang. A checkpoint that is
    not found within `_LOOK_SECONDS` counts as safe nowhere.

    Args:
        most: saves in a row that may fail.
        seconds: greatest age of a save that is safe nowhere, while no later one is safe.
        on_failure: called with the text in place of raising an IoError; None raises.
    """

    def __init__(self, most: int, seconds: float, on_failure: Callable[[str], None] | None) -> None:
        self._most, self._seconds, self._on_failure = most, seconds, on_failure
        self._looking: threading.Thread | None = None

    def check(self, history: Sequence[Saved], is_complete: Callable[[Saved], bool]) -> None:
        """Checks all saves, oldest first, once the last one is under way.

        That one counts for no failure, whether the writer is done with it or not: the save that raises
        is then the same one on every machine.

        Raises:
            IoError: too many or too old ones are safe nowhere.
        """
        unsafe: list[Saved] = []
        for saved in reversed(history):
            if saved.level != "memory":
                break
            unsafe.append(saved)
        failed = [saved for saved in unsafe if saved.failed and saved is not history[-1]]
        age = time.monotonic() - unsafe[-1]._began if unsafe else 0.0
        if len(failed) < self._most and age < self._seconds:
            return
        unanswered = self._look(unsafe, is_complete)
        if unanswered is None:
            return
        safe = [saved.step for saved in history if saved.level != "memory"]
        newest = f"the newest that is safe is of step {safe[-1]}" if safe else "no other is safe"
        steps = ", ".join(str(saved.step) for saved in reversed(unsafe[:5]))
        more = "the newest of them " if len(unsafe) > 5 else ""
        self._say(
            f"{len(unsafe)} checkpoints in a row, in {age:.0f} s, are safe nowhere ({more}steps "
            f"{steps}; {newest}): {_problems(unsafe)}{unanswered}"
        )

    def tell_of_newest(
        self, history: Sequence[Saved], is_complete: Callable[[Saved], bool]
    ) -> None:
        """At the end of a training.

        Raises:
            IoError: the newest save is safe nowhere.
        """
        if not history or history[-1].level != "memory":
            return
        unanswered = self._look([history[-1]], is_complete)
        if unanswered is not None:
            self._say(
                f"the newest checkpoint, of step {history[-1].step}, is safe nowhere: "
                f"{_problems([history[-1]])}{unanswered}"
            )

    def _look(self, unsafe: list[Saved], is_complete: Callable[[Saved], bool]) -> str | None:
        """None if one of them is complete all the same; else why that is not known, or ""."""
        answers: list[str | None] = []

        def look() -> None:
            try:
                answers.append(None if any(is_complete(saved) for saved in unsafe) else "")
            except Exception as error:
                answers.append(f"; the storage cannot be read: {error}")

        if self._looking is not None and self._looking.is_alive():
            return "; the storage has not answered since an earlier save"
        self._looking = threading.Thread(target=look, name="nostall-checkpoint-look", daemon=True)
        try:
            self._looking.start()
        except RuntimeError as error:  # a limit of processes
            self._looking = None
            return f"; no thread can be started to read the storage: {error}"
        self._looking.join(_LOOK_SECONDS)
        return answers[0] if answers else f"; the storage does not answer in {_LOOK_SECONDS:g} s"

    def _say(self, words: str) -> None:
        if self._on_failure is None:
            raise IoError(words)
        self._on_failure(words)


def _problems(saves: Sequence[Saved]) -> str:
    """The problems of the newest save that has any, newest first."""
    return next(("; ".join(s.problems) for s in saves if s.problems), "it is not written yet")


@dataclasses.dataclass
class Job:
    """A snapshot to be written. `snapshot` is None if this rank writes nothing; `failed` says why it
    is missing where the rank should write."""

    saved: Saved
    manifest: Manifest
    snapshot: _native.Snapshot | None
    number: int
    failed: str = ""
    # Of what is read while the training continues.
    window: SaveWindow | DeviceWindow | None = None
    arriving: DeviceCopies | None = None  # what the snapshot is made of, once it is copied
    leaves: Any = None  # keeps the memory that is read in place, until the job is done
    complete: Manifest | None = None  # once it is, where the storage may not have it
    spare: bool = False  # its snapshot is one more than the checkpointer keeps


@dataclasses.dataclass
class Drain:
    """A checkpoint that is complete on the fast tier. `alone`: rank 0 drains it for all ranks, because
    an earlier job or an earlier attempt of all ranks left it; `problem` says why that attempt failed.
    """

    manifest: Manifest
    saved: Saved | None = None
    alone: bool = False
    held: Held | None = None  # where its parts are, if each node has its own
    problem: str = ""
