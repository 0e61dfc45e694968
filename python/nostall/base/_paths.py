"""What may be a path, for every argument that names a file or a folder."""

from __future__ import annotations

import os
from typing import Any

from nostall.errors import UsageError


def path_of(value: Any, name: str = "path") -> str:
    """The path as text.

    Raises:
        UsageError: the argument of this name is no path.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(path, str):
        return path
    raise UsageError(f"{name} must be a path, as str or pathlib.Path, not {value!r}")
