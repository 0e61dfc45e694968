"""``nostall bench checkpoint``: what checkpoints cost a training, on slow and on fast storage.

The experiment of [Chien 2018, sec. IV.C and V.C, fig. 9 and 10]: iterations that update all of the
state, a checkpoint every so many, to slow storage, to fast storage, and to fast storage with a
copy to the slow one behind. The stall of a checkpoint is its call and what the steps until the next
one take longer than steps without any checkpoint; a save before them does not count. "processor" is
the processor time of a checkpoint, until it is durable.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nostall.base._sizes import parse_size
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.checkpoint_worker import METHODS

_CGROUP = Path("/sys/fs/cgroup/blkio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench checkpoint``."""
    parser.add_argument("--slow", default="nostall-bench/slow", help="a directory on slow storage")
    parser.add_argument("--fast", default="/dev/shm/nostall-bench", help="one on fast storage")
    parser.add_argument("--bytes", default="629MB", help="of the state")
    parser.add_argument("--iterations", type=int, default=100, action=harness.AtLeastOne)
    parser.add_argument(
        "--every",
        type=int,
        default=20,
        action=harness.AtLeastOne,
        help="iterations to a checkpoint",
    )
    parser.add_argument(
        "--compute", type=float, default=0.2, help="seconds between updates, on an accelerator"
    )
    parser.add_argument("--busy", action="store_true", help="compute on the processor instead")
    parser.add_argument("--threads", type=int, default=1, help="of the training's updates")
    parser.add_argument(
        "--write-limit", default="150MB", help="bytes a second that the slow storage takes; 0: any"
    )
    parser.add_argument(
        "--device",
        nargs="?",
        const="nostall-bench/device",
        help="only compare a save and a restore with the device of this directory",
    )
    harness.add_repeats(parser, 5)
    parser.add_argument("--methods", nargs="+", help="only those whose names contain one of these")
    harness.add_files(parser, plot="run times and writes over time")


def run(arguments: argparse.Namespace) -> int:
    """Measures in turns, prints the table."""
    if arguments.device:
        return _against_device(arguments)
    chosen = [
        name
        for name in METHODS
        if not arguments.methods or name == "none" or any(m in name for m in arguments.methods)
    ]
    limit = parse_size(arguments.write_limit)
    slow, fast = Path(arguments.slow).absolute(), Path(arguments.fast).absolute()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with _made((slow, fast)), _limited(slow, limit) as prefix:
        for name in harness.turns(chosen, arguments.repeats):
            row = _measure(name, arguments, slow, fast, prefix)
            rows[name].append(row)
            print(f"{name}: {row['train_seconds']:.2f} s", file=sys.stderr, flush=True)
            # A long measurement may be cut short.
            harness.write(arguments.json, settings=vars(arguments), rows=rows)
    harness.console().print(_table(rows, arguments, limit))
    if arguments.plot:
        draw(rows, arguments.plot)
    return 0


def _against_device(arguments: argparse.Namespace) -> int:
    from nostall_bench import checkpoint_device

    directory = Path(arguments.device).absolute() / f"run-{os.getpid()}"
    directory.mkdir(parents=True)
    try:
        rows = checkpoint_device.measure(directory, parse_size(arguments.bytes), arguments.repeats)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    harness.console().print(checkpoint_device.table(rows, parse_size(arguments.bytes)))
    harness.write(arguments.json, rows=rows)
    return 0


@contextlib.contextmanager
def _made(directories: Sequence[Path]) -> Iterator[None]:
    """The directories exist inside a ``with``; one that was not there is removed, if nothing is in it.

    Raises:
        UsageError: one of them cannot be made.
    """
    with contextlib.ExitStack() as stack:
        for directory in directories:
            there = directory.exists()
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot make {directory}: {error.strerror}") from error
            if not there:
                stack.callback(_remove_if_empty, directory)
        yield


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


@contextlib.contextmanager
def _limited(slow: Path, limit: int) -> Iterator[list[str]]:
    """What to put before a command so that its writes to the slow directory's disk are limited."""
    if not limit:
        yield []
        return
    group = _CGROUP / f"nostall-bench-{os.getpid()}"
    device = os.stat(slow).st_dev
    try:
        group.mkdir()
        rule = f"{os.major(device)}:{os.minor(device)} {limit}"
        (group / "blkio.throttle.write_bps_device").write_text(rule)
    except OSError as error:
        raise UsageError(
            f"writes cannot be limited here ({error}): run as root where cgroup v1's blkio "
            "controller is, or pass --write-limit 0 and a --slow that is slow"
        ) from error
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def _measure(
    name: str, arguments: argparse.Namespace, slow: Path, fast: Path, prefix: list[str]
) -> dict[str, Any]:
    settings = {
        "method": name,
        "bytes": parse_size(arguments.bytes),
        "iterations": arguments.iterations,
        "every": arguments.every,
        "compute": arguments.compute,
        "busy": arguments.busy,
        "threads": arguments.threads,
    }
    with contextlib.ExitStack() as stack:
        # The directories may hold what others need: only these two are written to and removed.
        for tier, directory in (("slow", slow), ("fast", fast)):
            own = tempfile.TemporaryDirectory(
                dir=directory, prefix="nostall-bench-", ignore_cleanup_errors=True
            )
            settings[tier] = stack.enter_context(own)
        os.sync()
        with _Writes(Path(settings["slow"]), Path(settings["fast"])) as writes:
            row: dict[str, Any] = harness.child(
                "nostall_bench.checkpoint_worker", settings, name=name, prefix=prefix
            )
    row["writes"] = [
        (t - row["origin"], disk, memory)
        for t, disk, memory in writes.samples
        if t >= row["origin"]
    ]
    row["stall"] = _stall(row, arguments.every)
    return row


def _stall(row: dict[str, Any], every: int) -> float:
    """Seconds that a save costs, by its call and in as many steps as come between two saves.

    Steps come behind each save but the last of a run.
    """
    later = row["steps"][every:]  # those before the first save have none behind them
    behind: float = statistics.mean(later) - row["quiet"] if later else 0.0
    call: float = statistics.mean(row["calls"] or [0.0])
    return call + behind * every


class _Writes:
    """Bytes written to the slow directory's disk and to the fast directory, over time."""

    def __init__(self, slow: Path, fast: Path) -> None:
        self._slow, self._fast = slow, fast
        self.samples: list[tuple[float, int, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Writes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        device = os.stat(self._slow).st_dev
        stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        while not self._done.wait(0.1):
            written = int(stat.read_text().split()[6]) * 512 if stat.exists() else 0
            held = sum(p.stat().st_size for p in _files(self._fast))
            self.samples.append((time.time(), written, held))


def _files(directory: Path) -> list[Path]:
    try:
        return [p for p in directory.rglob("*") if p.is_file()]
    except OSError:
        return []


def _table(rows: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace, limit: int) -> Any:
    speed = f"{limit / 1e6:.0f} MB/s" if limit else "full speed"
    table = harness.table(
        f"{arguments.iterations} iterations, a checkpoint of {arguments.bytes} every "
        f"{arguments.every}; slow storage at {speed}; {arguments.repeats} runs",
        *("method", "run time", "call", "call / copy", "stall", "stall / copy", "processor"),
    )
    for name, runs in rows.items():
        cells = [harness.spread((r["train_seconds"] for r in runs), "{:.1f} s")]
        calls = [statistics.median(r["calls"]) for r in runs if r["calls"]]
        if calls:
            copies = (statistics.median(r["calls"]) / r["memcpy"] for r in runs)
            cells += [
                harness.spread((1e3 * c for c in calls), "{:.0f} ms"),
                f"{statistics.median(copies):.2f}",
                harness.spread((1e3 * r["stall"] for r in runs), "{:.0f} ms"),
                f"{statistics.median(r['stall'] / r['memcpy'] for r in runs):.1f}",
                harness.spread((r["cpu"] for r in runs), "{:.2f} s"),
            ]
        table.add_row(name, *cells)
    return table


def draw(rows: dict[str, list[dict[str, Any]]], path: str) -> None:
    """Run times as bars, and writes over time, as [Chien 2018, fig. 9 and 10]."""
    names = list(rows)
    shown = [n for n in names if n != "none"]
    size = (9, 3 + 1.3 * len(shown))
    heights = [3, *[1] * len(shown)]
    with harness.figure(path, len(shown) + 1, 1, size, height_ratios=heights) as (_, grid):
        _draw(rows, names, shown, grid[:, 0])


def _draw(
    rows: dict[str, list[dict[str, Any]]], names: list[str], shown: list[str], axes: Any
) -> None:
    medians = [harness.median(rows[n], "train_seconds") for n in names]
    axes[0].barh(names[::-1], medians[::-1], color="0.4")
    axes[0].axvline(medians[names.index("none")], color="tab:red", linestyle=":")
    axes[0].set_xlabel("run time, s (dotted: without checkpoints)")
    longest = max(s[0] for n in shown for s in rows[n][0]["writes"])
    for axis, name in zip(axes[1:], shown, strict=True):
        first = rows[name][0]
        times = [s[0] for s in first["writes"]]
        pairs = list(zip(first["writes"], first["writes"][1:], strict=False))
        disk = [(b[1] - a[1]) / max(b[0] - a[0], 1e-9) / 1e6 for a, b in pairs]
        memory = [max(0, b[2] - a[2]) / max(b[0] - a[0], 1e-9) / 1e6 for a, b in pairs]
        axis.fill_between(times[1:], disk, color="tab:blue", step="pre", label="slow")
        axis.plot(times[1:], memory, color="tab:orange", linewidth=0.8, label="fast")
        axis.axvline(first["train_seconds"], color="black", linestyle=":")
        axis.set_xlim(0, longest)
        axis.set_ylabel("MB/s")
        axis.set_title(name, fontsize=8, loc="left")
    axes[-1].set_xlabel("seconds (dotted: end of the training)")
    axes[1].legend(fontsize=7)
