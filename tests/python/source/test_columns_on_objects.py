"""Formats that a library reads, on an S3 server: the same samples, few requests, clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from checks import check_epochs, check_source
from object_server import Proxy, cut, error, upload
from test_arrow import CONTENTS, LABELS, table, write_ipc

import nostall
from nostall.errors import CorruptionError, IoError, UsageError

pytest_plugins = ["object_fixtures"]

IMAGES = np.random.default_rng(0).integers(0, 255, (40, 8, 6, 3), np.uint8)


@pytest.fixture
def columns(bucket: Any, tmp_path: Path) -> str:
    """Folders of Parquet files, Arrow files and streams, and an HDF5 file, of the same bucket."""
    for name in ("parquet", "files", "streams"):
        (tmp_path / name).mkdir()
    for half in range(2):
        part = table().slice(half * 30, 30)
        pq.write_table(part, tmp_path / f"parquet/{half}.parquet", row_group_size=7)
        write_ipc(tmp_path / f"files/{half}.arrow", part, stream=False)
        write_ipc(tmp_path / f"streams/{half}.arrow", part)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = IMAGES
        file.create_dataset("packed", data=IMAGES, chunks=(5, 8, 6, 3), compression="gzip")
        file["labels"] = np.arange(40)
    upload(bucket, tmp_path)
    return f"s3://{bucket.name}"


def test_parquet(columns: str) -> None:
    assert len(CONTENTS) == 60
    source = nostall.Parquet(f"{columns}/parquet")
    check_source(source, CONTENTS, LABELS, fork=False)
    assert source.describe(37).startswith(f"{columns}/parquet/1.parquet, row group 1")


@pytest.mark.parametrize("kind", ["files", "streams"])
def test_arrow(columns: str, proxy: Proxy, tmp_path: Path, kind: str) -> None:
    source = nostall.ArrowIPC(f"{columns}/{kind}")
    check_source(source, CONTENTS, LABELS, fork=False)
    local = nostall.ArrowIPC(tmp_path / kind)
    assert [list(x) for x in source.places] == [list(x) for x in local.places]
    proxy.reset()
    again = nostall.ArrowIPC(f"{columns}/{kind}")
    assert again.index_reused
    assert proxy.ranges == []
    with pytest.raises(UsageError, match="no column 'lable'"):
        nostall.ArrowIPC(f"{columns}/{kind}", label="lable")


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_hdf5(columns: str, name: str) -> None:
    source = nostall.HDF5(f"{columns}/a.h5", name, labels="labels")
    assert source.through_library == (name == "packed")
    check_source(source, [i.tobytes() for i in IMAGES], range(40), fork=False)


def test_values_in_another_file_than_the_object_are_refused(bucket: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["images"] = IMAGES
        for name, where in (("virtual", "a.h5"), ("own", ".")):
            layout = h5py.VirtualLayout(IMAGES.shape, np.uint8)
            layout[...] = h5py.VirtualSource(where, "images", IMAGES.shape)
            file.create_virtual_dataset(name, layout)
        file["linked"] = h5py.ExternalLink("a.h5", "/images")
        file.create_dataset("raw", (40, 3), np.uint8, external=[("a.h5", 0, 120)])
    upload(bucket, tmp_path)
    url = f"s3://{bucket.name}/main.h5"
    assert nostall.HDF5(url, "own").read(7) == IMAGES[7].tobytes()
    for name in ("virtual", "linked", "raw"):
        with pytest.raises(
            UsageError, match=rf"{url}, dataset {name}: .*the file a\.h5, .*open that"
        ):
            nostall.HDF5(url, name)


def test_small_pieces_are_not_asked_for_alone(columns: str, proxy: Proxy) -> None:
    nostall.HDF5(f"{columns}/a.h5", "packed", labels="labels")
    assert 1 <= len(proxy.ranges) <= 3
    proxy.reset()
    nostall.Parquet(f"{columns}/parquet/0.parquet")
    assert len(proxy.ranges) <= 3


OPEN = {
    "parquet": lambda url: nostall.Parquet(f"{url}/parquet/0.parquet"),
    "arrow": lambda url: nostall.ArrowIPC(f"{url}/files/0.arrow"),
    "stream": lambda url: nostall.ArrowIPC(f"{url}/streams/0.arrow"),
    "hdf5": lambda url: nostall.HDF5(f"{url}/a.h5", "packed"),
}


@pytest.mark.parametrize("kind", OPEN)
def test_a_server_that_fails_is_not_taken_for_damage(columns: str, proxy: Proxy, kind: str) -> None:
    proxy.spoil = lambda n, answer: error(403, "AccessDenied")
    with pytest.raises(IoError, match=rf"{columns}/.* at offset \d+: access was denied"):
        OPEN[kind](columns)
    proxy.spoil = lambda n, answer: cut(answer, len(answer.body) // 2) if n == 0 else answer
    OPEN[kind](columns)  # once is tried again


@pytest.mark.parametrize("kind", ["parquet", "hdf5"])
def test_a_server_that_fails_later(
    columns: str, proxy: Proxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nostall.source._object_file._BLOCK", 512)  # these files are small
    source = OPEN[kind](columns)
    expected = [source.read(i) for i in range(len(source))]
    source = OPEN[kind](columns)  # without what the other kept
    proxy.spoil = lambda n, answer: error(403, "AccessDenied")
    with pytest.raises(IoError, match="access was denied"):
        source.read(3)
    with pytest.raises(CorruptionError, match="access was denied"):
        check_epochs(source, expected)
    proxy.reset()
    check_epochs(source, expected)


@pytest.mark.parametrize("kind", OPEN)
def test_objects_that_are_damaged_or_gone(
    bucket: Any, columns: str, tmp_path: Path, kind: str
) -> None:
    for path in tmp_path.rglob("*.*"):
        if path.suffix in (".parquet", ".arrow", ".h5"):
            key = str(path.relative_to(tmp_path))
            bucket.put_object(Key=key, Body=path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptionError, match=columns):
        OPEN[kind](columns)
    bucket.objects.delete()
    with pytest.raises((IoError, UsageError), match=columns):
        OPEN[kind](columns)
