"""Where the native programs of a package are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def find_program(name: str, package: Path) -> Path | None:
    """A native program: beside the installed `package`, in the checkout's build/dev, or on the path."""
    checkout = package.parent.parent
    for path in (package / "bin" / name, checkout / "build" / "dev" / "bin" / name):
        if os.access(path, os.X_OK):
            return path
    found = shutil.which(name)
    return Path(found) if found else None
