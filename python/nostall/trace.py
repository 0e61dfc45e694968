"""Recording what a job does, one trace a rank, for ``nostall report`` and for Perfetto.

On by ``NOSTALL_TRACE=directory``, by ``nostall profile -- command``, or by `start`. Loaders record by
themselves; a program names its own phases with `span`:

    with nostall.trace.span("forward"):
        loss = model(images)

A run's directory holds, for each rank, ``rank<r>.trace.json.gz`` (Chrome's format) and, for each of its
loaders, ``rank<r>.<n>.run.json`` (what it was given, and its statistics).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nostall import _native
from nostall.errors import IoError, UsageError
from nostall.world import find_world

if TYPE_CHECKING:
    from nostall.loader import DataLoader

VARIABLE = "NOSTALL_TRACE"
FORMAT = 1


class _Run:
    """The directory that this process records to."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.stem = stem
        self.pid = os.getpid()
        self.loaders: list[weakref.ref[DataLoader]] = []
        self.kept = 0


_run: _Run | None = None


def start(directory: str | os.PathLike[str], rank: int | None = None, world: int = 1) -> None:
    """Records from now on, until `stop` or the end of the process.

    Args:
        directory: of the run; made if absent; the same for all ranks.
        rank: of this process; found as the DataLoader finds it if not given.

    Raises:
        IoError: the directory cannot be written.
        UsageError: this process records already.
    """
    global _run
    if _run is not None and _run.pid == os.getpid():
        raise UsageError(f"this process records already, to {_run.directory}")
    if rank is None:
        here = find_world()
        rank, world = here.rank, here.world_size
    home = Path(directory).absolute()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IoError(
            f"cannot make {home} for the trace: {error.strerror}; give another directory"
        ) from error
    stem = _claim(home, rank)
    _native.trace_start(str(home / f"{stem}.trace.json.gz"), rank, world)
    _run = _Run(home, stem)
    atexit.register(stop)


def _claim(home: Path, rank: int) -> str:
    """A name for this process's files: the rank's, unless another process of the rank has it."""
    for stem in (f"rank{rank}", f"rank{rank}.{os.getpid()}"):
        try:
            os.close(os.open(home / f"{stem}.trace.json.gz", os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            continue
        except OSError as error:
            raise IoError(
                f"cannot write the trace to {home}: {error.strerror}; give another directory"
            ) from error
        return stem
    raise UsageError(f"{home} holds traces of this very process: give another directory")


def stop() -> tuple[int, int, int] | None:
    """Ends the recording; (events, events dropped, bytes of the file), None if there was none."""
    global _run
    if _run is None or _run.pid != os.getpid():
        return None
    for reference in _run.loaders:
        loader = reference()
        if loader is not None:
            keep(loader)
    _run = None
    return _native.trace_stop()


def enabled() -> bool:
    """Whether this process records."""
    return bool(_native.trace_on())


class span:
    """Records what happens inside a ``with``; nothing, and nearly free, while not recording.

    Args:
        name: of the phase: "forward", "backward", "update", ...
        category: what the report counts it as: "compute", "peers", "checkpoint", "data".
    """

    __slots__ = ("_begin", "_kind", "_names")

    def __init__(self, name: str, category: str = "compute") -> None:
        self._names = (category, name)
        self._begin = 0

    def __enter__(self) -> span:
        if _native.trace_on():
            self._kind = _native.trace_kind(*self._names)
            self._begin = _native.trace_now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._begin:
            _native.trace_record(self._kind, self._begin, _native.trace_now())
            self._begin = 0


def begin(loader: DataLoader) -> None:
    """For loaders: starts recording if ``NOSTALL_TRACE`` asks for it, and notes the loader."""
    directory = os.environ.get(VARIABLE)
    if directory and (_run is None or _run.pid != os.getpid()):
        start(directory, loader.world.rank, loader.world.world_size)
    if _run is not None and _run.pid == os.getpid():
        _run.loaders.append(weakref.ref(loader))


def keep(loader: DataLoader) -> None:
    """For loaders: writes what the loader was given and its statistics into the run's directory."""
    run = _run
    if run is None or run.pid != os.getpid() or all(r() is not loader for r in run.loaders):
        return
    run.loaders = [r for r in run.loaders if r() is not loader]
    path = run.directory / f"{run.stem}.{run.kept}.run.json"
    run.kept += 1
    data = {"format": FORMAT, "kind": "run", **describe(loader), "stats": loader.stats().to_dict()}
    try:
        path.write_text(json.dumps(data))
    except OSError as error:
        # The training is over by now, or goes on: it does not fail for its record.
        logging.getLogger("nostall").warning("cannot write %s: %s", path, error.strerror)


def describe(loader: DataLoader) -> dict[str, Any]:
    """The loader's settings, as far as a report needs them."""
    return {
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        **loader.settings(),
    }
