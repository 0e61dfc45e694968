"""``nostall index``: the stored listing of an image folder, which makes the next start quick."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.source import IMAGE_EXTENSIONS, ImageFolder, index_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``nostall index``."""
    parser.add_argument("action", choices=["build", "check", "show"])
    parser.add_argument("root", help="the data set, one folder per class")
    parser.add_argument("--index", help="where the listing is kept (default: as ImageFolder does)")
    parser.add_argument("--allow-empty", action="store_true", help="accept classes without files")


def run(arguments: argparse.Namespace) -> int:
    """Builds the listing anew, says whether the stored one holds, or sums it up (and stores it)."""
    if not Path(arguments.root).is_dir():
        raise UsageError(f"{arguments.root} is not a folder: name the data set's")
    path = arguments.index or index_path(arguments.root)
    if not path:
        raise UsageError(
            f"there is no place to keep the listing of {arguments.root}: name one with --index"
        )
    if arguments.action == "check":
        why = _native.check_index(arguments.root, path, list(IMAGE_EXTENSIONS), True)
        if why:
            raise CorruptionError(f"{path} does not hold: {why}; run: nostall index build")
        print(f"{path} holds")
        return 0
    if arguments.action == "build":
        Path(path).unlink(missing_ok=True)
    began = time.perf_counter()
    folder = ImageFolder(arguments.root, index=path, allow_empty=arguments.allow_empty)
    seconds = time.perf_counter() - began
    print(f"index    {path}")
    print(f"samples  {len(folder)} in {len(folder.classes)} classes")
    print(f"bytes    {folder.total_bytes} (largest file {int(folder.sizes.max())})")
    print(f"seconds  {seconds:.2f}")
    return 0
