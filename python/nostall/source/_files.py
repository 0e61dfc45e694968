"""Samples of several files each, and columns beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nostall.base._paths import path_of
from nostall.errors import IoError, UsageError
from nostall.fields import Audio, Bytes, Image, Json, Kind, Scalar, Text
from nostall.source._composite import NO_PART, Composite, make_column
from nostall.source._parts import refuse_likely_mask
from nostall.source._source import IMAGE_EXTENSIONS, open_files

PathLike = str | os.PathLike[str]

#: The kind of a file by its ending, where the schema does not say it.
_BY_ENDING: dict[str, Kind] = {
    **dict.fromkeys(IMAGE_EXTENSIONS, Image()),
    **dict.fromkeys((".wav", ".flac"), Audio()),
    ".txt": Text(),
    ".json": Json(),
    ".cls": Scalar(codec="decimal"),
    **dict.fromkeys((".mp4", ".mkv", ".webm", ".avi", ".mov"), Bytes()),
}


class Files(Composite):
    """Samples of several files each: an image and its mask, a sound and its text; and columns.

    Args:
        files: by the name of the field, a list of paths with one for each sample (None where it has
            none), or a folder. Of folders the files are matched by their paths without the ending
            (``images/a/1.jpg``, ``masks/a/1.png``); the samples are those of the first folder, sorted.
        columns: by the name of the field, one value for each sample (None where it has none): an
            array, or a list of numbers, arrays, texts or bytes. They stay in memory.
        schema: the kinds of fields. Those that it does not have follow from the first file's ending
            (those of images, .wav, .flac, .txt, .json, .cls, .mp4, .mkv, .webm, .avi, .mov; videos stay
            bytes), or from the column's values.
        root: where relative paths start; the working directory if None.

    Attributes:
        names: of the samples, where the files are of folders: their paths without the ending.

    Raises:
        IoError: a file or folder cannot be examined, with its path.
        UsageError: fields differ in length, a value is missing without a ``fill`` in the schema, the
            kind of a field is not known (that of .png files in a field such as ``mask`` is not), or a
            link leads to a folder that it lies in.
    """

    def __init__(
        self,
        files: Mapping[str, PathLike | Sequence[PathLike | None]],
        columns: Mapping[str, Any] | None = None,
        *,
        schema: Mapping[str, Kind] | None = None,
        root: PathLike | None = None,
    ) -> None:
        self.root = str(Path(path_of(root, "root") if root is not None else ".").absolute())
        sought = {name: _given(paths) for name, paths in files.items()}
        self._arguments = {
            "files": sought,
            "columns": columns,
            "schema": schema,
            "root": self.root,
        }
        given = dict(schema or {})
        columns = dict({} if columns is None else columns)  # of a data frame no truth is known
        if both := sought.keys() & columns.keys():
            raise UsageError(f"field {min(both)} is named among the files and among the columns")
        if unknown := given.keys() - sought.keys() - columns.keys():
            raise UsageError(
                f"schema names the field {min(unknown)}, which has no files and no column"
            )
        self.names: list[str] = []
        paths = self._paths(sought)
        lengths = {name: len(values) for name, values in {**paths, **columns}.items()}
        if not lengths or len(set(lengths.values())) > 1 or not max(lengths.values()):
            told = ", ".join(f"{name} has {n}" for name, n in lengths.items()) or "there are none"
            raise UsageError(f"fields need one value for each sample: {told}")
        samples = next(iter(lengths.values()))
        kinds = {name: given.get(name) or _by_ending(name, found) for name, found in paths.items()}
        made = {name: make_column(name, v, given.get(name)) for name, v in columns.items()}
        part_of = np.full((samples, len(paths)), NO_PART, np.uint32)
        listed: list[str] = []
        for i, sample in enumerate(zip(*paths.values(), strict=True)):
            for place, path in enumerate(sample):
                if path is not None:
                    part_of[i, place] = len(listed)
                    listed.append(path)
        parts = None
        if listed:
            parts = open_files(self.root, listed, [])
        self._compose(parts, part_of, kinds, made, samples)

    def _paths(self, files: Mapping[str, str | list[str | None]]) -> dict[str, list[str | None]]:
        lists = {name: paths for name, paths in files.items() if not isinstance(paths, str)}
        if len(lists) == len(files):
            return lists
        if lists:
            raise UsageError(
                "files are either lists of paths or folders, and not both in one data set"
            )
        listed = {name: _tree(os.path.join(self.root, str(v))) for name, v in files.items()}
        first = next(iter(listed.values()))
        self.names = sorted(first)
        return {name: [found.get(stem) for stem in self.names] for name, found in listed.items()}


def _given(paths: PathLike | Sequence[PathLike | None]) -> str | list[str | None]:
    """A folder, or a list of paths, which may be a table's: nothing stands for a home there."""
    if isinstance(paths, (str, os.PathLike)):
        return path_of(paths, "a folder")
    return [None if path is None else path_of(path, "a file", home=False) for path in paths]


def _tree(folder: str) -> dict[str, str]:
    """Every file below, by its path from there without the ending; hidden ones are left out."""
    found: dict[str, str] = {}
    if not Path(folder).is_dir():
        raise UsageError(f"{folder} is not a folder; a list of paths, or a folder, is needed")
    for where, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            _check_link(os.path.join(where, name), folder)
        for name in files:
            if name.startswith("."):
                continue
            path = os.path.join(where, name)
            stem = os.path.splitext(os.path.relpath(path, folder))[0]
            if stem in found:
                raise UsageError(f"{found[stem]} and {path} are two files of one sample and field")
            found[stem] = path
    return found


def _refuse(error: OSError) -> None:
    raise IoError(f"{error.filename}: {error.strerror}") from None


def _check_link(path: str, top: str) -> None:
    """Refuses a link to a folder that it lies in, below `top`."""
    if not os.path.islink(path):
        return
    try:
        target = os.stat(path)
        above = path
        while len(above) > len(top):
            above = os.path.dirname(above)
            if os.path.samestat(target, os.stat(above)):
                raise UsageError(f"{path} is a link to {above}, in which it lies: it has no end")
    except OSError as error:
        _refuse(error)


#: The kind that is meant most often, of endings from which none follows.
_LIKELY = {
    ".npy": "Array(...)",
    **dict.fromkeys((".mp3", ".ogg", ".opus", ".aif", ".aiff"), "SoundFile()"),
}


def _by_ending(name: str, paths: Sequence[str | None]) -> Kind:
    first = next((path for path in paths if path is not None), "")
    ending = os.path.splitext(first)[1].lower()
    refuse_likely_mask(name, ending[1:])
    if ending in _BY_ENDING:
        return _BY_ENDING[ending]
    raise UsageError(
        f"the kind of field {name} does not follow from {first!r}: give "
        f"schema={{{name!r}: nostall.fields.{_LIKELY.get(ending, 'Bytes()')}}}"
    )
