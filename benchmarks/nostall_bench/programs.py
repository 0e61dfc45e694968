"""Where the native programs of the benchmarks are, and with which environment children start."""

from __future__ import annotations

import os
from pathlib import Path

import nostall
from nostall.base._programs import find_program

_PACKAGE = Path(__file__).resolve().parent


def find_native(name: str) -> Path | None:
    """A native program beside this package, in the checkout's build, or on the path."""
    return find_program(name, _PACKAGE)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment and `changes`; children import the packages that run here."""
    folders = [str(_PACKAGE.parent), str(Path(nostall.__file__).resolve().parents[1])]
    path = os.pathsep.join([*dict.fromkeys(folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **changes}
