"""Shows what the ranks of a recorded run are doing, live: nostall top RUN.

The run records with NOSTALL_TRACE=RUN or nostall profile -o RUN. Each rank writes once per second.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall.observe._stats import ORIGINS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall top``."""
    parser.add_argument("run", help="the run's directory")
    parser.add_argument("--once", action="store_true", help="show one table and end")
    parser.add_argument("--seconds", type=float, default=1.0, help="between two looks")


def run(arguments: argparse.Namespace) -> int:
    """Shows the table until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    home = Path(arguments.run)
    if not home.is_dir():
        raise UsageError(
            f"there is no directory {home}: a run makes it, for example nostall profile -o {home} -- "
            "python train.py"
        )
    console = Console()
    before = read(home)
    if arguments.once:
        console.print(table(before, {}))
        return 0
    with Live(table(before, {}), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(max(0.1, arguments.seconds))
            now = read(home)
            live.update(table(now, before), refresh=True)
            # Of a file that has not changed since, the older look says nothing about now.
            before = {k: before[k] if k in before and before[k] == v else v for k, v in now.items()}


def read(home: Path) -> dict[str, dict[str, Any]]:
    """The newest record of every loader, by file; other files are left out."""
    found = {}
    for path in sorted(home.glob("*.live.json")):
        try:
            data = json.loads(path.read_text())
            if isinstance(data, dict) and {"rank", "time", "seconds"} <= data.keys():
                found[path.name] = data
        except (OSError, ValueError):
            continue
    return found


def table(now: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> Any:
    """One row per loader: since the last look if there was one, else since the start."""
    from rich.table import Table
    from rich.text import Text

    # No wider than 80 columns.
    out = Table(title=f"{len(now)} loaders", box=None, padding=(0, 1, 0, 0))
    for heading in (
        "rank", "loader", "epoch", "batch", "samples/s", "waits", *ORIGINS, "ready", "MB", "ago",
    ):  # fmt: skip
        out.add_column(heading, justify="right")
    for name, data in sorted(now.items(), key=lambda item: (item[1]["rank"], item[0])):
        old = before.get(name, {})
        if old.get("time") == data["time"]:
            old = {}
        seconds = data["seconds"] - old.get("seconds", 0.0)
        samples = data["samples"] - old.get("samples", 0)
        stall = data["stall_seconds"] - old.get("stall_seconds", 0.0)
        origins = {o: data["origins"][o] - old.get("origins", {}).get(o, 0) for o in ORIGINS}
        out.add_row(
            str(data["rank"]),
            Text(str(data["loader"]).removeprefix("loader ")),
            str(data["epoch"]),
            str(data["batch"]),
            f"{samples / seconds:.0f}" if seconds > 0 else "",
            f"{stall / seconds:.0%}" if seconds > 0 else "",
            *(f"{origins[o] / samples:.0%}" if samples > 0 else "" for o in ORIGINS),
            str(data["queue"]),
            f"{data['memory'] / 1e6:.0f}",
            f"{max(0.0, time.time() - data['time']):.0f} s",
        )
    return out
