"""Progress bars of commands that may take long: on a terminal where rich is installed, else none."""

from __future__ import annotations

import sys
from typing import Any


class Bars:
    """Bars on the standard error, one for each label, drawn from the first `show` on."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._drawn = sys.stderr.isatty()

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, label: str, done: int = 0, total: int | None = None) -> None:
        """`total` is None where nobody knows it: then the bar only tells that work goes on."""
        if self._progress is None:
            self._drawn = self._drawn and self._begin()
        if not self._drawn:
            return
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total, at="")
        at = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
        self._progress.update(self._tasks[label], completed=done, total=total, at=at)

    def _begin(self) -> bool:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        except ModuleNotFoundError:
            return False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[at]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # it may be a pipe
            redirect_stderr=False,
        )
        self._progress.start()
        return True
