"""A fixture: children of a benchmark that are forked from the process that has read torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

import prefork
import pytest


def fork(
    command: list[str],
    *,
    env: dict[str, str],
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    **more: Any,
) -> prefork.Process | subprocess.Popen[bytes]:
    """`python -m MODULE ...` or `python SCRIPT ...` in a child of the process that has read torch.

    A launcher is started as it is.
    """
    python, *words = command
    if python != sys.executable:
        return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, **more)
    # A forked child leads a group of its own, and has no standard input and no other file.
    assert more.keys() <= {"start_new_session", "stdin", "pass_fds"}, more
    if words[0] == "-m":
        run = f"import runpy; runpy.run_module({words[1]!r}, run_name='__main__', alter_sys=True)"
        words = ["-c", run, *words[2:]]
    same = {name: os.environ[name] for name in prefork.AT_START if name in os.environ}
    return prefork.Process(
        words,
        env={**{k: v for k, v in env.items() if k not in prefork.AT_START}, **same},
        stdout=stdout.fileno() if stdout else None,
        stderr=stderr.fileno() if stderr else None,
        torch=True,
    )


class Subprocess:
    """The module, but for how processes start."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self.Popen = start

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's children need not import torch, some seconds each."""
    started: dict[int, prefork.Process] = {}
    open_any = os.pidfd_open

    def start(command: list[str], **options: Any) -> prefork.Process | subprocess.Popen[bytes]:
        process = fork(command, **options)
        if isinstance(process, prefork.Process):
            started[process.pid] = process
        return process

    def pidfd_open(pid: int, flags: int = 0) -> int:
        """Of a child, also where the server has waited for it; one of subprocess would be there."""
        process = started.get(pid)
        own = process.descriptor() if process is not None else None
        return open_any(pid, flags) if own is None else own

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    for module in ("harness", "sync", "allreduce"):
        monkeypatch.setattr(f"nostall_bench.{module}.subprocess", Subprocess(start))
