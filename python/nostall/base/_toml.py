"""Reads files of TOML."""

from __future__ import annotations

import os
import tomllib
from typing import Any

from nostall.errors import IoError, UsageError


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's tables.

    Raises:
        IoError: it cannot be read.
        UsageError: it is not TOML.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise IoError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise UsageError(f"{path} is not TOML: {error}") from error
