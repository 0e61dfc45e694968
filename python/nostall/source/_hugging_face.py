"""The files of a data set that Hugging Face's `datasets` wrote, on this machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from nostall.base._paths import path_of
from nostall.errors import CorruptionError, UsageError


def dataset_files(files: Any, split: str | None) -> list[str] | None:
    """The Arrow files of a folder of `datasets` in the order of their rows; None if it is none.

    A folder that ``save_to_disk`` wrote has a list of its files, a folder of such folders a list of
    its splits; one of the cache has files that are named by their splits.

    Raises:
        UsageError: it has several splits and none is named, or not this one, or it has no rows, or
            indices beside its files say which rows it has.
        CorruptionError: a description is damaged, or a file of it is not there.
    """
    one = isinstance(files, (str, os.PathLike))
    folder = Path(path_of(files)) if one else Path()
    if one and folder.is_dir():
        if (folder / "dataset_dict.json").is_file():
            splits = _described(folder / "dataset_dict.json", "splits")
            folder = folder / _chosen(folder, [str(name) for name in splits], split)
            split = None
        if (folder / "state.json").is_file():
            _refuse_split(folder, split)
            listed = _described(folder / "state.json", "_data_files")
            _refuse_indices(folder / "state.json")
            return _there(folder, [folder / entry["filename"] for entry in listed])
        if (folder / "dataset_info.json").is_file():
            splits = _described(folder / "dataset_info.json", "splits")
            name = _chosen(folder, [str(name) for name in splits], split)
            return _cached(folder, name)
    _refuse_split(files, split)
    return None


def _described(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text())[key]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{path} is no description of a data set: {error!r}") from None


def _refuse_indices(state: Path) -> None:
    """Early releases of `datasets` stored beside all rows which of them a data set has."""
    for key, value in json.loads(state.read_text()).items():
        if key.startswith("_indices") and value:
            raise UsageError(
                f"{state} has {key}, so the rows of the data set are others than those of its files: "
                "load it by datasets, and save it again after flatten_indices()"
            )


def _chosen(folder: Path, splits: list[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        given = "split=" if split is None else f"split={split!r}"
        raise UsageError(
            f"{folder} has the splits {', '.join(splits)}: name one of them, not {given}"
        )
    return split


def _refuse_split(folder: object, split: str | None) -> None:
    if split is not None:
        raise UsageError(f"split={split!r}: {folder} has no splits")


def _cached(folder: Path, split: str) -> list[str]:
    """The files of a split in a folder of the cache: one, or numbered ones."""
    named = re.compile(rf"(?!cache-).*-{re.escape(split)}(-(\d{{5}})-of-(\d{{5}}))?\.arrow")
    found = {path: named.fullmatch(path.name) for path in sorted(folder.iterdir())}
    matches = {path: match for path, match in found.items() if match}
    counts = {int(match[3] or 1) for match in matches.values()}
    if len(counts) != 1 or counts != {len(matches)}:
        raise CorruptionError(
            f"{folder} has {len(matches)} files of the split {split!r}, of "
            f"{max(counts, default=1)}: load the data set again"
        )
    return [str(path) for path in matches]


def _there(folder: Path, paths: list[Path]) -> list[str]:
    if not paths:
        raise UsageError(f"{folder} has no rows: its state.json names no files")
    for path in paths:
        if not path.is_file():
            raise CorruptionError(f"{folder}/state.json names {path.name}, which is not there")
    return [str(path) for path in paths]
