"""A file that another one replaces, by its name, while it is opened: no places of one in the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest

import nostall
from nostall.errors import IoError
from nostall.source import _arrow, _hdf5, _numpy, _records, _tokens

ROWS = 8


def write_arrow(path: Path, first: int) -> None:
    """Rows of other lengths for another `first`."""
    images = [bytes([first + i]) * (first + i) for i in range(ROWS)]
    ids = pa.array([[first + i, i] for i in range(ROWS)], pa.list_(pa.int32()))
    rows = pa.table({"image": images, "label": range(ROWS), "ids": ids})
    with path.open("wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)


def write_hdf5(path: Path, first: int) -> None:
    with h5py.File(path, "w") as file:
        file["before"] = np.zeros(first)
        file["images"] = np.full((ROWS, 4, 4), first, np.uint8)


def write_array(path: Path, first: int) -> None:
    with path.open("wb") as file:
        np.save(file, np.full((ROWS, 4), first))


KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], Any]]] = {
    "images and labels": (write_arrow, nostall.ArrowIPC),
    "columns of Arrow": (write_arrow, lambda path: nostall.ArrowIPC(path, columns=["image"])),
    "ids of Arrow": (
        write_arrow,
        lambda path: nostall.Tokens(path, column="ids", index=False),
    ),
    "HDF5": (write_hdf5, lambda path: nostall.HDF5(path, "images")),
    "columns of HDF5": (write_hdf5, lambda path: nostall.HDF5(path, columns=["images"])),
    "arrays": (write_array, lambda path: nostall.Arrays({"x": path})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_is_read_at_the_places_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Replaced just before the file is opened to be read, or just after: the samples are those of one
    of them, or the opening is refused."""
    write, opens = KINDS[kind]
    ending = {write_arrow: "arrow", write_hdf5: "h5", write_array: "npy"}[write]
    told = []
    for late in (False, True):
        path, other = tmp_path / f"{late}.{ending}", tmp_path / "other"
        write(path, 3)
        wanted = [content(opens(path))]
        write(other, 50)
        os.utime(other, (1, 1))
        wanted.append(content(opens(moved(other, ending))))
        with monkeypatch.context() as patch:
            replace_once(patch, tmp_path / f"new.{ending}", path, late)
            try:
                assert content(opens(path)) in wanted
            except IoError as error:
                told.append(str(error))
                assert told[-1] == (
                    f"{path} was replaced while it was opened: open the data set again"
                )
        assert content(opens(path)) == wanted[1]
    assert len(told) == 1


def moved(path: Path, ending: str) -> Path:
    return path.rename(path.with_name(f"new.{ending}"))


def content(source: Any) -> list[bytes]:
    if isinstance(source, nostall.Tokens):
        return [source.read(0, 2 * ROWS).tobytes()]
    return [bytes(source.read(i)) for i in range(len(source))]


def replace_once(patch: pytest.MonkeyPatch, new: Path, path: Path, late: bool) -> None:
    opens = _records.open_storage

    def replacing(*given: Any, **options: Any) -> Any:
        storage = opens(*given, **options) if late else None
        if new.exists():
            os.replace(new, path)
        return storage or opens(*given, **options)

    for module in (_arrow, _hdf5, _numpy, _records, _tokens):
        patch.setattr(module, "open_storage", replacing, raising=False)
