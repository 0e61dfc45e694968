"""Paths that users give: what may be one, and what may be made there."""

from __future__ import annotations

import os
from typing import Any

from nostall.errors import UsageError


def path_of(value: Any, name: str = "path", home: bool = True) -> str:
    """The path as text; with `home` ``~/`` at its start is the user's home, as a shell has it.

    Raises:
        UsageError: the argument of this name is no path.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(path, str):
        return os.path.expanduser(path) if home and (path + "/").startswith("~/") else path
    raise UsageError(f"{name} must be a path, as str or pathlib.Path, not {value!r}")


def unmounted(path: str | os.PathLike[str]) -> str:
    """Why a directory must not be made, as where no disk is mounted.

    "" if the directory right below the root of the file system is there, or where the path is relative:
    then no disk is meant. Tiers follow the same rule (native/tier/node_cache.cc).
    """
    if not os.path.isabs(path):
        return ""
    top = "/" + os.path.abspath(path).lstrip("/").partition("/")[0]
    try:
        os.stat(top)
    except FileNotFoundError:
        return (
            f"{top} is not there, and would lie on the disk of the system (is a disk not mounted? "
            f"mount it, or make {top})"
        )
    except OSError:  # the call that follows says so
        pass
    return ""
