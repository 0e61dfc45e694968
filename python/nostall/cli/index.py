"""Builds, checks or shows the stored listing of a class-per-folder dataset."""

from __future__ import annotations

import argparse

from nostall import _native
from nostall.source import IMAGE_EXTENSIONS, ImageFolder, index_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall index``."""
    parser.add_argument("root", help="the dataset")
    parser.add_argument(
        "--index", help="where the listing is kept; beside the dataset if not given"
    )
    parser.add_argument("--check", action="store_true", help="only say whether it still holds")


def run(arguments: argparse.Namespace) -> int:
    """0, or 1 if the stored listing does not hold (--check)."""
    where = arguments.index or True
    path = index_path(arguments.root, where)
    if arguments.check:
        reason = _native.check_index(
            root=arguments.root,
            index_path=path,
            extensions=list(IMAGE_EXTENSIONS),
            class_per_folder=True,
        )
        print(f"{path}: {reason or 'holds'}")
        return 1 if reason else 0
    folder = ImageFolder(arguments.root, index=where, allow_empty=True)
    print(
        f"{path}: {len(folder)} samples of {len(folder.classes)} classes, "
        f"{folder.total_bytes} bytes, fingerprint {folder.fingerprint:016x}"
    )
    return 0
