"""Shows what the ranks of a job are doing, live: nostall top, nostall top PID, RUN or HOST:PORT.

Without more it asks all processes of this user on this machine that have a loader open; the number of a
process is of one of them, or of what started them, as torchrun. A run that is recorded
(NOSTALL_TRACE=RUN or nostall profile -o RUN) has a directory, where each rank writes once per second. A
job on another machine is asked for its metrics, which NOSTALL_METRICS_PORT lets it serve.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nostall.base import _process as process
from nostall.base._words import counted
from nostall.errors import IoError, UsageError
from nostall.observe import _live as live
from nostall.observe._stats import ORIGINS

# Of an address the host may be missing.
_ADDRESS = re.compile(r"(?:([\w.-]+):)?(\d{1,7})")
_LINE = re.compile(r"(nostall_\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SHORTEST, _LONGEST = 0.1, 86400  # seconds between two looks
_ANSWER_SECONDS = 2.0  # that a job's metrics may take, for others are asked after it
# Names of metrics as a recorded run writes them.
_KEYS = {
    "nostall_epoch_seconds_total": "seconds",
    "nostall_stall_seconds_total": "stall_seconds",
    "nostall_samples_total": "samples",
    "nostall_memory_bytes": "memory",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall top``."""
    parser.add_argument(
        "run",
        nargs="*",
        help="processes, the run's directory, or addresses of its metrics (9464, host:9464); all "
        "processes of this user on this machine if none is given",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="show one table and end: rates and shares since the start, or of --seconds if given",
    )
    parser.add_argument("--seconds", type=_seconds, help="between two looks; 1 if not given")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not _SHORTEST <= seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not from {_SHORTEST} to {_LONGEST}")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Shows the table until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    look = _looks(arguments.run)
    console = Console()
    seconds = 1.0 if arguments.seconds is None else arguments.seconds
    now = look()
    if arguments.once or not console.is_terminal:
        older = None
        if arguments.seconds is not None:
            older = now
            time.sleep(seconds)
            now = look()
        if not now:
            raise UsageError(
                _none_here()
                if getattr(look, "func", None) is of_processes
                else f"{' '.join(arguments.run)}: no loader has told what it does, which each does "
                "once per second from its first batch on"
            )
        console.print(table(now, older, seconds))
        return 0
    with Live(table(now, None, seconds), console=console, auto_refresh=False) as live:
        older = {}
        while True:
            time.sleep(seconds)
            last, now = now, look()
            older = before(now, last, older)
            live.update(table(now, older, seconds), refresh=True)


def _looks(names: list[str]) -> Callable[[], dict[str, dict[str, Any]]]:
    if not names:
        return functools.partial(of_processes, [])
    if all(name.isdecimal() for name in names) and not Path(names[0]).is_dir():
        numbers = [int(name) for name in names]
        known = {above for found in live.ask() for above in _line_of(found)}
        if known.issuperset(numbers):
            return functools.partial(of_processes, numbers)
        if max(numbers) > 65535:
            unknown = next(number for number in numbers if number > 65535)
            raise UsageError(f"{unknown} is not the number of a port, and {_none_here(unknown)}")
    matches = [_ADDRESS.fullmatch(name) for name in names]
    addresses = [m and f"{m[1] or '127.0.0.1'}:{m[2]}" for m in matches]
    if all(addresses) and not Path(names[0]).is_dir():
        if over := [m[0] for m in matches if m and int(m[2]) > 65535]:
            raise UsageError(f"{over[0]}: ports are numbers up to 65535")
        scrape([str(address) for address in addresses])  # says which of them has no answer
        return functools.partial(scrape, [str(address) for address in addresses], refuse=False)
    home = Path(names[0])
    if len(names) > 1 or not home.is_dir():
        missing = next((n for n, a in zip(names, addresses, strict=True) if not a), names[-1])
        raise UsageError(
            f"there is no directory {missing}: a run makes it, for example nostall profile -o "
            f"{missing} -- python train.py; of a run that is not recorded give the ports of its metrics"
        )
    return functools.partial(read, home)


def _none_here(number: int | None = None) -> str:
    """Why there is nothing to show: of all processes, or of this one and those it started."""
    silent = [str(pid) for pid, loaders in live.ask().items() if not loaders]
    if silent and number is None:
        return (
            f"of this user's processes with a loader {', '.join(silent)} did not answer in time: they "
            "are stopped, or in a call that keeps the interpreter (py-spy dump --pid tells which)"
        )
    of = "no process of this user" if number is None else f"no process {number} of this user"
    return (
        f"{of} has a loader open here: run nostall top as the user who trains, in the same container; "
        "a loader opens when its first batch is asked for"
    )


def of_processes(numbers: list[int]) -> dict[str, dict[str, Any]]:
    """What the loaders of these processes, and of those that they have started, do; of all if empty."""
    found = {}
    for pid, loaders in live.ask().items():
        if not numbers or not _line_of(pid).isdisjoint(numbers):
            for data in loaders:
                name = f"{pid} {data['loader']}"
                found[name] = {**data, "pid": pid, "time": time.time()}
    return found


def _line_of(pid: int) -> set[int]:
    """The process and those above it."""
    line = {pid}
    with contextlib.suppress(OSError):
        while pid := int(process.stat(pid)[1]):
            line.add(pid)
    return line


def scrape(addresses: list[str], refuse: bool = True) -> dict[str, dict[str, Any]]:
    """What the loaders at these addresses say of themselves; one that has ended says nothing."""
    found: dict[str, dict[str, Any]] = {}
    # A proxy that the environment names is for what is outside the cluster.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for address in addresses:
        try:
            with direct.open(f"http://{address}/metrics", timeout=_ANSWER_SECONDS) as answer:
                lines = answer.read().decode().splitlines()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if refuse:
                cause = getattr(error, "reason", error)
                why = getattr(cause, "strerror", None) or cause
                raise IoError(
                    f"nothing serves metrics at {address} ({why}): start the job with "
                    "NOSTALL_METRICS_PORT=9464, or call nostall.metrics.serve(9464) in it; a job of "
                    "this user on this machine needs neither: nostall top"
                ) from error
            continue
        for metric, labels, value in filter(None, map(_of_line, lines)):
            name = f"{address} {labels['loader']}"
            data = found.setdefault(name, _fresh(labels))
            if metric in ("nostall_samples_total", "nostall_memory_bytes"):
                data[_KEYS[metric]] += value
            elif metric in _KEYS:
                data[_KEYS[metric]] = value
            if metric == "nostall_samples_total":
                data["origins"][labels["origin"]] = value
    return found


def _of_line(line: str) -> tuple[str, dict[str, str], float] | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    labels = {k: re.sub(r"\\(.)", r"\1", v) for k, v in _LABEL.findall(match[2])}
    return match[1], labels, float(match[3])


def _fresh(labels: dict[str, str]) -> dict[str, Any]:
    return {
        **dict.fromkeys(_KEYS.values(), 0.0),
        **dict.fromkeys(("epoch", "batch", "queue"), ""),  # not among the metrics
        "origins": dict.fromkeys(ORIGINS, 0.0),
        "rank": int(labels["rank"]),
        "loader": labels["loader"],
        "time": time.time(),
    }


def read(home: Path) -> dict[str, dict[str, Any]]:
    """The newest record of every loader, by file; other files are left out."""
    found = {}
    for path in sorted(home.glob("*.live.json")):
        try:
            data = json.loads(path.read_text())
            if isinstance(data, dict) and {"rank", "time", "seconds"} <= data.keys():
                # A killed process has not said that it ends.
                mark, pid = data.get("process"), data.get("pid")
                if isinstance(mark, dict) and isinstance(pid, int) and process.has_ended(pid, mark):
                    data.setdefault("ended", data["time"])
                found[path.name] = data
        except (OSError, ValueError):
            continue
    return found


def before(
    now: dict[str, dict[str, Any]],
    last: dict[str, dict[str, Any]],
    older: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """What each loader's record of now is compared with: the last look's, or, where that is the same
    one, as of a file that was not written meanwhile, what it was compared with then."""
    return {
        name: last[name] if last[name]["time"] != data["time"] else older.get(name, data)
        for name, data in now.items()
        if name in last
    }


def table(
    now: dict[str, dict[str, Any]], older: dict[str, dict[str, Any]] | None, interval: float
) -> Any:
    """One row per loader: since the start, or since an `older` look, about `interval` seconds ago.

    Without an older record of a loader there is neither rate nor share, unless it has ended.
    """
    from rich.table import Table
    from rich.text import Text

    # No wider than 80 columns. A process that was asked has told what is true now.
    asked = bool(now) and all("queue" not in data for data in now.values())
    span = "since the start" if older is None else f"of the last {interval:g} s"
    out = Table(title=f"{counted(len(now), 'loader')}, {span}", box=None, padding=(0, 1, 0, 0))
    for heading in (
        *(["pid"] if asked else []),
        *("rank", "loader", "epoch", "batch", "samples/s", "waits", *ORIGINS, "MB"),
        *([] if asked else ["ready", "ago"]),
    ):
        out.add_column(heading, justify="right")
    for name, data in sorted(now.items(), key=lambda item: (item[1]["rank"], item[0])):
        old = {} if older is None or "ended" in data else older.get(name, data)
        seconds = data["seconds"] - old.get("seconds", 0.0)
        samples = data["samples"] - old.get("samples", 0)
        stall = data["stall_seconds"] - old.get("stall_seconds", 0.0)
        origins = {o: data["origins"][o] - old.get("origins", {}).get(o, 0) for o in ORIGINS}
        out.add_row(
            *([str(data["pid"])] if asked else []),
            str(data["rank"]),
            Text(str(data["loader"]).removeprefix("loader ")),
            str(data["epoch"]),
            str(data["batch"]),
            f"{samples / seconds:.0f}" if seconds > 0 else "",
            f"{stall / seconds:.0%}" if seconds > 0 else "",
            *(f"{origins[o] / samples:.0%}" if samples > 0 else "" for o in ORIGINS),
            f"{data['memory'] / 1e6:.0f}",
            *([] if asked else ["" if "ended" in data else str(data["queue"]), _seen(data)]),
        )
    return out


def _seen(data: dict[str, Any]) -> str:
    """How long ago the loader was seen, or when it ended."""
    if "ended" not in data:
        return f"{max(0.0, time.time() - data['time']):.0f} s"
    ended, now = time.localtime(data["ended"]), time.localtime()
    # Two lines of at most six characters: the table has no more room.
    return time.strftime("ended\n%H:%M" if ended[:3] == now[:3] else "ended\n%d %b", ended)
