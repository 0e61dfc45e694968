"""Runs a command on a terminal of its own, as a person has it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def on_terminal(
    command: Sequence[str | os.PathLike[str]],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Its status, and all that it wrote to the terminal."""
    own, its = os.openpty()
    with open(own, "rb", buffering=0) as shown:
        process = subprocess.Popen(
            command,
            stdin=its,
            stdout=its,
            stderr=its,
            cwd=cwd,
            env={**os.environ, "TERM": "xterm", **(env or {})},
            start_new_session=True,
        )
        os.close(its)
        text = b""
        try:
            while some := shown.read(65536):
                text += some
        except OSError:  # no process has the terminal any more
            pass
        return process.wait(), text.decode(errors="replace")
