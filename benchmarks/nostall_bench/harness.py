"""What the benchmarks share: turns, processes, tables, numbers, files and plots.

Every benchmark runs each way in processes of its own, in turns, prints medians with the least and the
most, and writes JSON with the machine described.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nostall.errors import UsageError
from nostall_bench.programs import child_environment

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")
# Before anything is measured.
_LOAD = os.getloadavg()[0]
# The descriptor that a child of `children` writes to when it is ready.
_GATE = "NOSTALL_BENCH_GATE"
_PACKAGES = (
    *("nostall", "torch", "torchvision", "pillow", "numpy"),
    *("nvidia-dali-cuda120", "grain", "webdataset", "mosaicml-streaming"),
)


def turns(names: Iterable[T], repeats: int) -> Iterator[T]:
    """Every name `repeats` times, in turns: what else the machine does falls on all alike.

    Each round begins one name later, so that none is always first or always after the same one.
    """
    ways = list(names)
    for repeat in range(repeats):
        first = repeat % len(ways) if ways else 0
        yield from ways[first:] + ways[:first]


def matching(names: Iterable[str], parts: Sequence[str] | None) -> list[str]:
    """The names that contain one of the parts, in any case; all without parts.

    Raises:
        UsageError: there are none.
    """
    every = list(names)
    found = [n for n in every if not parts or any(p.lower() in n.lower() for p in parts)]
    if not found:
        raise UsageError(f"no loader matches {parts}; there are {every}")
    return found


def dataset(
    directory: str | Path, files: int, *, given: str | None = None, scale: float = 1.0
) -> Path:
    """The folder `given`, or one of synthetic images in `directory`, made once and kept."""
    if given:
        return Path(given).absolute()
    from nostall_bench.demo.dataset import DatasetSpec, make_dataset

    home = Path(directory).absolute()
    home.mkdir(parents=True, exist_ok=True)
    suffix = "" if scale == 1 else f"-{scale:g}"
    return make_dataset(home / f"data-{files}{suffix}", DatasetSpec(files, scale=scale))


def made_of(data: Path, directory: Path) -> Path:
    """The folder in `directory` for what is made of a data set once: another for other files there."""
    from nostall_bench.peers import listing

    known = hashlib.sha256(os.fsencode(data.resolve()))
    for path, _ in listing(data):
        found = os.stat(path)
        line = f"{os.path.relpath(path, data)} {found.st_size} {found.st_mtime_ns}\n"
        known.update(os.fsencode(line))
    return directory / f"made-{data.name}-{known.hexdigest()[:16]}"


# Processes


def child(
    module: str,
    settings: Mapping[str, Any],
    *,
    name: str = "the measurement",
    prefix: Sequence[str] = (),
    timeout: float | None = None,
    **environment: str,
) -> Any:
    """Runs ``python -m module`` (see `answer`) in a session of its own; what it measured.

    Args:
        prefix: put before the command.
        timeout: seconds.
        environment: changes of this process's.

    Raises:
        UsageError: it failed or took too long; has `name` and the last line of its errors.
    """
    with tempfile.TemporaryDirectory(prefix="nostall-bench-") as folder:
        command = [*prefix, *_command(module, settings, Path(folder, "settings.json"))]
        out, errors = Path(folder, "out"), Path(folder, "errors")
        process = _start(command, out, errors, env=child_environment(**environment))
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise UsageError(f"{name} took more than {timeout:g} s") from None
        finally:
            _end(process)
        answers = out.read_text().splitlines()
        said = errors.read_text().strip().splitlines()
    if process.returncode or not answers:
        raise UsageError(
            f"{name} failed: {said[-1] if said else f'exit status {process.returncode}'}"
        )
    return json.loads(answers[-1])


def children(
    module: str,
    settings: Sequence[Mapping[str, Any]],
    *,
    name: str = "the benchmark",
    timeout: float = 600,
    together: bool = False,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> list[Any]:
    """Runs ``python -m module`` once for each of the settings, all at once; what each measured.

    The first that fails ends all.

    Args:
        timeout: seconds for all of them.
        together: they wait in `ready` until all of them have come so far.
        environments: changes of this process's environment, one for each child.

    Raises:
        UsageError: one failed, with its own message above this one, or took too long.
    """
    deadline = time.monotonic() + timeout
    failed = UsageError(f"a rank of {name} failed: see its message above")
    started: list[subprocess.Popen[bytes]] = []
    with (
        tempfile.TemporaryDirectory(prefix="nostall-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        here, there = os.pipe()
        stack.callback(os.close, here)
        stack.callback(os.close, there)
        outputs = [Path(folder, f"{i}.out") for i in range(len(settings))]
        try:
            for i, mine in enumerate(settings):
                changes = {_GATE: str(there), **(environments[i] if environments else {})}
                process = _start(
                    _command(module, mine, Path(folder, f"{i}.json")),
                    outputs[i],
                    stdin=subprocess.PIPE,
                    env=child_environment(**changes),
                    pass_fds=[there],
                )
                started.append(process)
            if together:
                if not _all_ready(here, started, deadline):
                    raise failed
                for process in started:
                    assert process.stdin is not None
                    process.stdin.close()
            if not all_end_well(started, deadline):
                raise failed
        except subprocess.TimeoutExpired:
            raise UsageError(f"a rank of {name} took more than {timeout:g} s") from None
        finally:
            for process in started:
                _end(process)
        return [json.loads(out.read_text().splitlines()[-1]) for out in outputs]


def all_end_well(processes: Sequence[subprocess.Popen[bytes]], deadline: float = math.inf) -> bool:
    """Waits for all, or for the first that fails: others may wait for it without end.

    After the deadline raises TimeoutExpired.
    """
    left = {os.pidfd_open(process.pid): process for process in processes}
    try:
        while left:
            seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            found = connection.wait(list(left), seconds)
            if not found:
                raise subprocess.TimeoutExpired("the end", 0)
            for ended in found:
                assert isinstance(ended, int)
                os.close(ended)
                if left.pop(ended).wait():
                    return False
        return True
    finally:
        for pidfd in left:
            os.close(pidfd)


def _start(
    command: Sequence[str], out: Path, errors: Path | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """In a session of its own. Into files: a pipe's end is awaited as long as any process has it."""
    with contextlib.ExitStack() as stack:
        to = stack.enter_context(out.open("wb"))
        wrong = stack.enter_context(errors.open("wb")) if errors else None
        return subprocess.Popen(command, stdout=to, stderr=wrong, start_new_session=True, **options)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it has left behind in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _all_ready(gate: int, started: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """False if one ended first; after the deadline raises TimeoutExpired."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        selector.register(gate, selectors.EVENT_READ)
        for process in started:
            pidfd = os.pidfd_open(process.pid)
            stack.callback(os.close, pidfd)
            selector.register(pidfd, selectors.EVENT_READ)
        missing = len(started)
        while missing:
            found = selector.select(max(0.0, deadline - time.monotonic()))
            if not found:
                raise subprocess.TimeoutExpired("ready", 0)
            if any(key.fd != gate for key, _ in found):
                return False
            missing -= len(os.read(gate, missing))
    return True


def _command(module: str, settings: Mapping[str, Any], path: Path) -> list[str]:
    # A file, for a list of files can be longer than an argument may be.
    path.write_text(json.dumps(settings))
    return [sys.executable, "-m", module, str(path)]


def answer(work: Callable[[dict[str, Any]], Any]) -> None:
    """The main program of a child: the last line that it prints is the JSON of what `work` returns."""
    print(json.dumps(work(json.loads(Path(sys.argv[1]).read_text()))), flush=True)


def ready() -> None:
    """In a child started by `children(together=True)`: waits until all have called it."""
    os.write(int(os.environ[_GATE]), b".")
    sys.stdin.read()


def attempt(row: dict[str, Any], measure: Callable[[], Any]) -> None:
    """Adds one measurement to the `runs` of a way's row, or what stands against it to its `failed`."""
    try:
        row["runs"].append(measure())
    except UsageError as error:
        row.setdefault("failed", []).append(str(error))


# Numbers and tables


def named(name: str, row: Mapping[str, Any]) -> str:
    """What a table calls a way: its name, how many of its runs failed, and why the last one did."""
    from rich.markup import escape

    if failed := row.get("failed"):
        name += f" ({len(failed)} of {len(failed) + len(row['runs'])} failed: {failed[-1]})"
    return escape(name)


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The median with the least and the most, each written by `form`: "12 [11-14]"."""
    found = list(values)
    middle = form.format(statistics.median(found))
    if len(found) == 1:
        return middle
    return f"{middle} [{form.format(min(found))}-{form.format(max(found))}]"


def median(runs: Iterable[Mapping[str, Any]], key: str) -> float:
    """The median of one quantity over runs."""
    return float(statistics.median(run[key] for run in runs))


def extent(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most, as JSON has them."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def error_bars(values: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Medians, and their distances to the least and the most, as matplotlib wants them."""
    middle = [statistics.median(v) for v in values]
    pairs = list(zip(middle, values, strict=True))
    return middle, [[m - min(v) for m, v in pairs], [max(v) - m for m, v in pairs]]


def stalled(epochs: Iterable[Mapping[str, Any]]) -> float | None:
    """The share of these epochs' time that was waited for batches; None of no epochs."""
    found = list(epochs)
    seconds = sum(e["seconds"] for e in found)
    return sum(e["stall_seconds"] for e in found) / seconds if found else None


def megabytes(count: float, digits: int = 0) -> str:
    """Millions of bytes, without the unit: that is in the heading."""
    return f"{count / 1e6:.{digits}f}"


def console(width: int = 160) -> Console:
    """Where tables go; `width` columns where that is no terminal."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=width)


def verdict(holds: bool, words: str) -> None:
    """Prints whether what was aimed at was reached."""
    console().print(f"{'reached' if holds else 'NOT REACHED'}: {words}", highlight=False)


def table(title: str, *headings: str, left: int = 1, caption: str | None = None) -> Table:
    """An empty table whose first `left` columns hold words, and the others numbers."""
    from rich.markup import escape
    from rich.table import Table

    out = Table(title=escape(title), caption=caption)
    for number, heading in enumerate(headings):
        justify: Any = "left" if number < left else "right"
        out.add_column(escape(heading), justify=justify)
    return out


# Options


class AtLeastOne(argparse.Action):
    """The action of an option that takes a number from 1 on."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        if value < 1:
            raise UsageError(f"{option} must be at least 1, not {value}")
        setattr(namespace, self.dest, value)


def add_repeats(parser: argparse.ArgumentParser, usual: int, help: str = "of each") -> None:
    """The option --repeats: nothing can be said of no runs."""
    parser.add_argument("--repeats", type=int, default=usual, action=AtLeastOne, help=help)


def add_files(parser: argparse.ArgumentParser, *, plot: str | None = None) -> None:
    """The options --json and, with a text for it, --plot."""
    parser.add_argument("--json", help="write all numbers, and the machine's, to this file")
    if plot:
        parser.add_argument("--plot", help=f"draw {plot} into this file (.png, .svg, .pdf)")


# Files


@functools.cache
def machine() -> dict[str, Any]:
    """The machine and the versions, as written beside every result."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "cpu": next(models, platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "load": _LOAD,
    }


def write(path: str | Path | None, **parts: Any) -> None:
    """Writes the machine and the parts as JSON; nothing without a path."""
    if path:
        text = json.dumps({"machine": machine(), **parts}, indent=1, default=str)
        Path(path).write_text(text)


# As the report's page has it: Okabe and Ito's colours, which colour-blind readers can distinguish.
_STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), "#52606d"),
    **{"grid.color": "#dde3ea", "text.color": "#1d2733", "axes.titlesize": "medium"},
    **{"hatch.linewidth": 0.6, "lines.linewidth": 1.8},
}
_CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f6c7b", "#7b6bb7")


@contextlib.contextmanager
def figure(
    path: str | Path, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure and its `rows` x `columns` axes, to draw into; written to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot

    style = {**_STYLE, "axes.prop_cycle": cycler(color=_CYCLE)}
    with pyplot.rc_context(style):
        drawn, axes = pyplot.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", **options
        )
        try:
            yield drawn, axes
            drawn.savefig(path, dpi=120)
        finally:
            pyplot.close(drawn)
