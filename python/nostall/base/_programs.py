"""Where the native programs of the benchmarks are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def find_native(name: str) -> Path | None:
    """A native program beside the package, in the checkout's build, or on the path."""
    package = Path(__file__).resolve().parent
    folder = name.removeprefix("nostall-")
    for path in (
        package / "bin" / name,
        package.parent.parent / "build" / "dev" / "bench" / folder / name,
    ):
        if os.access(path, os.X_OK):
            return path
    found = shutil.which(name)
    return Path(found) if found else None
