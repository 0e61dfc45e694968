"""Where the native programs of the benchmarks are, and with which environment children start."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nostall
from nostall.base._programs import find_program
from nostall.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent


def find_native(name: str) -> Path | None:
    """A native program beside this package, in the checkout's build, or on the path."""
    return find_program(name, _PACKAGE)


def run_limit(
    program: Path,
    samples: Sequence[str],
    threads: int,
    epochs: int,
    mode: str,
    *,
    in_memory: bool = False,
) -> dict[str, float]:
    """What nostall-limit measures: so many threads that read samples, and make what the mode says.

    Args:
        samples: the paths of each, with tabs between them.
        in_memory: files are read before the time begins.

    Raises:
        UsageError: it failed.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listing:
        listing.write("\n".join(samples) + "\n")
        listing.flush()
        done = subprocess.run(
            [str(program), listing.name, str(threads), str(epochs), mode] + ["memory"] * in_memory,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise UsageError(f"nostall-limit failed: {done.stderr.strip()}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment and `changes`; children import the packages that run here."""
    folders = [str(_PACKAGE.parent), str(Path(nostall.__file__).resolve().parents[1])]
    # Behind what the user has chosen: all that is installed lies beside these packages.
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *dict.fromkeys(folders)])
    return {**os.environ, "PYTHONPATH": path, **changes}
