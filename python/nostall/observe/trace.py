"""Records what a job does, one trace per rank, for ``nostall report`` and for Perfetto.

On by ``NOSTALL_TRACE=directory``, by ``nostall profile -- command``, or by `start`. Loaders record by
themselves; a program names its own phases with `span`:

    with nostall.trace.span("forward"):
        loss = model(images)

A run's directory holds, for each rank, ``rank<r>.trace.json.gz`` (Chrome's format) and, for each of its
loaders in the order in which they began, ``rank<r>.<n>.run.json`` (its settings, and once it has ended
its statistics), ``rank<r>.<n>.live.json`` (what it does) and ``rank<r>.<n>.held.json`` (its process's
memory over time). All files of a process begin alike.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import platform
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall import _native
from nostall._version import __version__
from nostall.base import _checks as checks
from nostall.base import _device_clock
from nostall.base import _options as options
from nostall.base._garbage import Closer, before_child_ends
from nostall.errors import Error, IoError, UsageError
from nostall.job._cores import cores_of_rank
from nostall.job._world import World, find_world
from nostall.observe import _processors as processors
from nostall.observe import _values as values
from nostall.observe import metrics

if TYPE_CHECKING:
    from nostall.observe._observed import Observed
    from nostall.observe._stats import Stats

__all__ = ["enabled", "span", "start", "stop"]

VARIABLE = options.row("observe.trace").variable
FORMAT = 1
_OF_PROGRAM = re.compile("-[^-WXcm]*c")


@dataclass
class _Entry:
    """A loader that records; its statistics outlive it."""

    loader: weakref.ref[Observed]
    settings: dict[str, Any]
    stats: Callable[[], Stats]
    live: metrics.Live
    path: Path
    begin: processors.Processors = field(default_factory=processors.count)


class _Run:
    """The directory that this process records to."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.stem = stem
        self.pid = os.getpid()
        self.entries: list[_Entry] = []
        self.begun = 0


# Loaders of several threads begin at once; a finaliser of a loader may run where it is held.
_lock = threading.RLock()
_run: _Run | None = None
_refused = False  # the directory of the environment: warned of once


def _begin_anew() -> None:
    """In a forked child, whose parent may have held the lock in another thread."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


def start(
    directory: str | os.PathLike[str], rank: int | None = None, world: int | None = None
) -> None:
    """Records from now on, until `stop` or the end of the process; also loaders that run already, whose
    statistics are of all their batches.

    Args:
        directory: of the run; made if absent; the same for all ranks.
        rank: of this process; found as the DataLoader finds it if not given.
        world: how many ranks there are, where `rank` is given; 1 if None.

    Raises:
        IoError: the directory cannot be written.
        UsageError: this process records already, or is none of the ranks.
    """
    global _run
    if world is not None:
        world = checks.whole("world", world, 1, 2**31 - 1)
    if rank is not None:
        rank = checks.whole("rank", rank, 0, (world or 2**31) - 1)
    with _lock:
        if _run is not None and _run.pid == os.getpid():
            raise UsageError(f"this process records already, to {_run.directory}")
        if rank is None:
            here = find_world()
            rank, world = here.rank, here.world_size
        world = 1 if world is None else world
        home = Path(directory).absolute()
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise IoError(
                f"cannot make {home} for the trace: {error.strerror}; give another directory"
            ) from error
        stem = _claim(home, rank)
        _device_clock.begin()
        _native.trace_start(str(home / f"{stem}.trace.json.gz"), rank, world)
        _run = _Run(home, stem)
        atexit.register(stop)
        before_child_ends(_stop_with_child, -1)  # after the loaders
        from nostall.observe import _live as live

        for loader in live.running():
            _note(_run, loader)


def _claim(home: Path, rank: int) -> str:
    """A name for this process's files: the rank's, unless another process of the rank uses it.

    The numbers of processes of a container are given again when it starts again.
    """
    own = f"rank{rank}.{os.getpid()}"
    again = (f"{own}.{number}" for number in itertools.count(2))
    stems = itertools.chain((f"rank{rank}", own), again)
    while True:
        stem = next(stems)
        try:
            os.close(os.open(home / f"{stem}.trace.json.gz", os.O_CREAT | os.O_EXCL, 0o644))
            return stem
        except FileExistsError:
            continue
        except OSError as error:
            raise IoError(
                f"cannot write the trace to {home}: {error.strerror}; give another directory"
            ) from error


def _stop_with_child() -> None:
    """Once threads have ended for which this process still waits, and in which loaders may go on."""
    here = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not here and not t.daemon]

    def stop_after() -> None:
        for thread in others:
            thread.join()
        stop()

    if not others:
        stop()
    else:
        threading.Thread(target=stop_after, name="nostall-trace").start()


def stop() -> tuple[int, int, int] | None:
    """Ends the recording; (events, events dropped, bytes of the file), None if there was none."""
    global _run, _refused
    with _lock:
        _refused = False
        if _run is None or _run.pid != os.getpid():
            return None
        for entry in list(_run.entries):
            _end(_run, entry)
        _device_clock.settle(last=True)
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

    def __exit__(self, *_: object) -> None:
        if self._begin:
            _native.trace_record(self._kind, self._begin, _native.trace_now())
            self._begin = 0


def wanted() -> bool:
    """Whether this process records, or ``NOSTALL_TRACE`` asks for it."""
    return enabled() or bool(options.value("observe.trace"))


def begin(loader: Observed) -> None:
    """For loaders that run: notes them, by starting to record if ``NOSTALL_TRACE`` asks for it.

    A failure here loses the record and does not end the training.
    """
    global _refused
    with _lock:
        directory = options.value("observe.trace")
        if _run is not None and _run.pid == os.getpid():
            _note(_run, loader)
        elif directory and not _refused:
            try:
                place = _place(loader)
                start(directory, place.rank, place.world_size)
            except Error as error:
                _refused = True
                logging.getLogger("nostall").warning("%s; training goes on without a record", error)


def _note(run: _Run, loader: Observed) -> None:
    """Begins the record of a loader, or goes on with it."""
    try:
        settings, stats = describe(loader), loader.lasting_stats()
        entry = next((e for e in run.entries if e.loader() is loader), None)
        if entry is not None:  # it goes on, from another place
            entry.settings, entry.stats = settings | {"began": entry.settings["began"]}, stats
        else:
            stem = str(run.directory / f"{run.stem}.{run.begun}")
            live = metrics.Live(stem, loader.world.rank, loader.name)
            path = Path(f"{stem}.run.json")
            entry = _Entry(weakref.ref(loader), settings, stats, live, path)
            run.begun += 1
            run.entries.append(entry)
            loader.on_batch(live)
            Closer(loader, _end, run, entry)
    except Exception as error:
        # The training does not end because it cannot be described.
        logging.getLogger("nostall").warning("%s is not recorded: %r", loader.name, error)
        return
    _write(entry, dict)  # a job that is killed leaves this


def _place(loader: Observed) -> World:
    """The process's, of which the launcher knows more than a loader that validates alone."""
    try:
        here = find_world()
    except UsageError:  # the loader has been told
        return loader.world
    return here if here.world_size > 1 else loader.world


def keep(loader: Observed) -> None:
    """For loaders that end: writes the loader's statistics beside its settings."""
    if _run is not None:
        for entry in [e for e in _run.entries if e.loader() is loader]:
            _end(_run, entry)


def _end(run: _Run, entry: _Entry) -> None:
    if run.pid != os.getpid():
        return
    try:
        run.entries.remove(entry)
    except ValueError:  # it has ended
        return
    entry.live.end()
    _device_clock.settle()

    def learned() -> dict[str, Any]:
        loader = entry.loader()
        stats = entry.stats() if loader is None else loader.stats()
        return {
            "held": asdict(entry.live.memory.held),
            "processors": asdict(processors.count(entry.begin.cores).since(entry.begin)),
            "stats": stats.to_dict(),
        }

    _write(entry, learned)


def _write(entry: _Entry, learned: Callable[[], dict[str, Any]]) -> None:
    """The settings, and what was learned since."""
    try:
        record = {"format": FORMAT, "kind": "run", **entry.settings, **learned()}
        values.write(entry.path, record)
    except Exception as error:
        # The training does not fail because its record cannot be written.
        logging.getLogger("nostall").warning("cannot write %s: %s", entry.path, error)


def describe(loader: Observed) -> dict[str, Any]:
    """The loader's settings, as far as a report needs them."""
    return {
        "host": platform.node(),
        "command": _command(),
        "began": time.strftime(values.MOMENT),
        "versions": _versions(),
        "rank_cores": cores_of_rank(loader.world.most_here),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_left": min((x.left for x in _native.memory_limits()), default=0),
        "storage": _storage(str(getattr(loader.dataset, "root", ""))),
        **loader.settings(),
    }


def _command() -> str:
    """How this process was started, without the directory of its Python."""
    import multiprocessing
    import shlex

    words = list(sys.orig_argv)
    # A process that multiprocessing made has the words of its parent's program in sys.argv alone.
    if not words or multiprocessing.parent_process() is not None:
        words = ["python", *sys.argv]
    elif sys.argv[:1] == ["-c"]:  # of Python, not of the program
        # The program itself, behind the option or in one word with it.
        for at, word in enumerate(words):
            if option := _OF_PROGRAM.match(word):
                words[at : at + 1 + (option[0] == word)] = [option[0], "..."]
                break
    return shlex.join([os.path.basename(words[0]), *words[1:]])


def _versions() -> dict[str, str]:
    """Of Python, this package, and the packages that the program has imported."""
    packages = {name: sys.modules.get(name) for name in ("numpy", "torch", "jax")}
    found = {name: str(getattr(m, "__version__", "")) for name, m in packages.items() if m}
    return {"nostall": __version__, "python": platform.python_version(), **found}


def _storage(path: str) -> str:
    """The path with the kind of file system that it lies on."""
    if not path:
        return ""
    real = os.path.realpath(path)
    kind = ""
    longest = -1
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return real
    for line in mounts:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        below = real == point or real.startswith(point.rstrip("/") + "/")
        if below and len(point) > longest:
            kind, longest = fields[2], len(point)
    return f"{real}, {kind}" if kind else real
