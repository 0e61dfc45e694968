"""Parquet and Arrow IPC as pyarrow and Hugging Face write them are read as pyarrow reads them."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checks import check_epochs, check_source

import nostall
from nostall.errors import CorruptionError, IoError, UsageError

COUNT = 60
RANDOM = np.random.default_rng(0)
CONTENTS = [RANDOM.bytes(int(n)) for n in [0, 1, *RANDOM.integers(0, 3000, COUNT - 2)]]
LABELS = [int(x) for x in RANDOM.integers(-9, 1000, COUNT)]
HF = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def table(kind: str = "hf", contents: list[Any] = CONTENTS) -> pa.Table:
    labels = pa.array(LABELS[: len(contents)], pa.int64())
    if kind == "hf":
        structs = [{"bytes": c, "path": f"{i}.jpg"} for i, c in enumerate(contents)]
        return pa.table({"image": pa.array(structs, HF), "label": labels, "id": labels})
    types = {"binary": pa.binary(), "large": pa.large_binary()}
    return pa.table({"image": pa.array(contents, types[kind]), "label": labels})


def write_ipc(
    path: Path, what: pa.Table, stream: bool = True, rows: int = 9, **options: Any
) -> Path:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with path.open("wb") as file, make(file, what.schema, **options) as writer:
        writer.write_table(what, max_chunksize=rows)
    return path


# -------------------------------------------------------------------------------------- Parquet


@pytest.mark.parametrize("kind", ["hf", "binary", "large"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet(tmp_path: Path, kind: str, compression: str) -> None:
    pq.write_table(table(kind), tmp_path / "a.parquet", row_group_size=11, compression=compression)
    source = nostall.Parquet(tmp_path / "a.parquet")
    check_source(source, CONTENTS, LABELS)
    assert source.describe(25).endswith("a.parquet, row group 2, row 3")


@pytest.mark.parametrize("open_as", [nostall.Parquet, nostall.ArrowIPC])
def test_names_that_are_no_utf8(tmp_path: Path, open_as: Any) -> None:
    path = tmp_path / os.fsdecode(b"\xff.parquet")
    write_ipc(tmp_path / "b", table())
    pq.write_table(table(), tmp_path / "a")
    (tmp_path / ("a" if open_as is nostall.Parquet else "b")).rename(path)
    check_source(open_as(path), CONTENTS, LABELS)
    assert len(open_as(path, columns=["image", "id"])) == COUNT
    path.unlink()
    with pytest.raises(IoError, match=r"does not exist|No such file"):
        open_as(path)


def test_a_folder_of_parquet_files_with_little_kept(tmp_path: Path) -> None:
    for f in range(3):
        part = table().slice(f * 20, 20)
        pq.write_table(part, tmp_path / f"train-{f}.parquet", row_group_size=6)
    for files in (tmp_path, str(tmp_path / "train-*.parquet"), sorted(tmp_path.iterdir())):
        check_source(nostall.Parquet(files, kept=1), CONTENTS, LABELS)
    assert "train-2.parquet, row group 1, row 4" in nostall.Parquet(tmp_path).describe(50)


def test_parquet_columns_by_name(tmp_path: Path) -> None:
    columns = {"jpeg": pa.array(CONTENTS, pa.binary()), "y": pa.array([True, False] * 30)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    check_source(
        nostall.Parquet(tmp_path / "a.parquet", image="jpeg", label="y"), CONTENTS, [1, 0] * 30
    )
    check_source(
        nostall.Parquet(tmp_path / "a.parquet", image="jpeg", label=None), CONTENTS, [0] * COUNT
    )


def test_a_group_is_unpacked_once_for_all_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=20)
    source = nostall.Parquet(tmp_path / "a.parquet")
    groups: list[int] = []
    read = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, *args: Any, **options: Any) -> Any:
        groups.append(group)
        return read(self, group, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    check_epochs(source, CONTENTS)
    assert sorted(groups) == [0, 1, 2]


def test_damaged_and_missing_parquet_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=20, compression="none", use_dictionary=False)
    data = path.read_bytes()
    for bad in (data[:-30], data[: len(data) // 2], b"x" * 900, b""):
        (tmp_path / "b.parquet").write_bytes(bad)
        with pytest.raises(CorruptionError, match=r"b\.parquet cannot be opened as Parquet"):
            nostall.Parquet(tmp_path / "b.parquet")
    with pytest.raises(IoError, match=r"none\.parquet does not exist"):
        nostall.Parquet(tmp_path / "none.parquet")
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(data[:place] + b"\xff" * 64 + data[place + 64 :])
    with pytest.raises(CorruptionError, match=r"a\.parquet, row group 1"):
        nostall.Parquet(path)


def test_a_parquet_file_that_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=20)
    source = nostall.Parquet(path, kept=1)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(IoError, match=r"a\.parquet, row group 2, row 5: "):
        source.read(45)


def groups() -> list[Any]:
    return [each for each in gc.get_objects() if type(each).__name__ == "_Groups"]


def test_parquet_readers_are_let_go_of(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    others = groups()  # held: a new one may have the place of one that is collected
    source = nostall.Parquet(tmp_path / "a.parquet")
    (gone,) = (weakref.ref(each) for each in groups() if each not in others)
    del source
    gc.collect()
    assert gone() is None


def test_a_row_group_may_have_more_bytes_than_arrow_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table("binary", [b"ab", b"", b"cde", b""]), tmp_path / "a.parquet")
    others = groups()
    source = nostall.Parquet(tmp_path / "a.parquet", label=None)
    (reader,) = (each for each in groups() if each not in others)
    # Two rows have 1.2 GiB, of one sparse file that nothing reads.
    hole = 1200 << 20
    with (tmp_path / "sparse").open("w+b") as file:
        file.write(b"abcde")
        file.truncate(5 + hole)
        memory = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    chunks = [
        pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(np.array(e, np.int32)), memory])
        for e in ([0, 2, 2 + hole], [2, 5, 5 + hole])
    ]
    large = pa.table({"image": pa.chunked_array(chunks)})
    monkeypatch.setattr(reader, "_read", lambda *_: large)
    assert [value.tobytes() for value in reader.read([2, 0])] == [b"cde", b"ab"]
    assert [value.nbytes for value in reader.read([1, 3])] == [hole, hole]
    assert len(source) == 4


# ------------------------------------------------------------------------------------ Arrow IPC


@pytest.mark.parametrize("kind", ["hf", "binary", "large"])
@pytest.mark.parametrize("stream", [True, False])
def test_arrow(tmp_path: Path, kind: str, stream: bool) -> None:
    write_ipc(tmp_path / "a.arrow", table(kind), stream)
    source = nostall.ArrowIPC(tmp_path / "a.arrow")
    check_source(source, CONTENTS, LABELS)
    assert "a.arrow at offset" in source.describe(25)


def test_several_arrow_files_and_slices(tmp_path: Path) -> None:
    for f in range(3):
        write_ipc(tmp_path / f"{f}.arrow", table().slice(f * 20 + 3, 17), f % 2 == 0, rows=5)
    chosen = [i for f in range(3) for i in range(f * 20 + 3, f * 20 + 20)]
    source = nostall.ArrowIPC(tmp_path)
    check_source(source, [CONTENTS[i] for i in chosen], [LABELS[i] for i in chosen])


@pytest.mark.parametrize("stream", [True, False])
def test_files_without_rows_among_others(tmp_path: Path, stream: bool) -> None:
    for first, (a, b) in enumerate([("a", "b"), ("b", "a")]):
        folder = tmp_path / str(first)
        folder.mkdir()
        write_ipc(folder / f"{a}.arrow", table(), stream)
        write_ipc(folder / f"{b}.arrow", table(contents=[]), stream)
        check_source(nostall.ArrowIPC(folder), CONTENTS, LABELS)


def test_empty_batches_and_empty_values(tmp_path: Path) -> None:
    what = table("binary", [b"", b"", b"x", b""])
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), what.schema) as writer:
        for part in (what.slice(0, 0), what.slice(0, 2), what.slice(2, 0), what.slice(2, 2)):
            for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], schema=what.schema)]:
                writer.write_batch(batch)
    check_source(nostall.ArrowIPC(tmp_path / "a.arrow"), [b"", b"", b"x", b""], LABELS[:4])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_arrow_is_refused(tmp_path: Path, codec: str, stream: bool) -> None:
    squeezable = [b"a" * 3000] * 20
    options = pa.ipc.IpcWriteOptions(compression=codec)
    path = write_ipc(
        tmp_path / "a.arrow", table("hf", squeezable), stream, rows=20, options=options
    )
    with pytest.raises(UsageError, match=r"a\.arrow is compressed"):
        nostall.ArrowIPC(path)


@pytest.mark.parametrize("stream", [True, False])
def test_no_cut_of_an_arrow_file_goes_unnoticed(tmp_path: Path, stream: bool) -> None:
    data = write_ipc(tmp_path / "a.arrow", table(), stream).read_bytes()
    cut = tmp_path / "b.arrow"
    for size in [*range(0, len(data), 997), len(data) - 1, len(data) - 8]:
        cut.write_bytes(data[:size])
        with pytest.raises(CorruptionError, match=r"b\.arrow (cannot be read|ends at byte)"):
            nostall.ArrowIPC(cut)


def test_an_arrow_file_that_changes(tmp_path: Path) -> None:
    path = write_ipc(tmp_path / "a.arrow", table())
    source = nostall.ArrowIPC(path)
    write_ipc(path, table("hf", [bytes(len(c)) for c in CONTENTS]))
    os.utime(path, (1, 1))  # both may be of one tick of the file system's clock
    with pytest.raises(IoError, match=r"a\.arrow"):
        source.read(20)


# --------------------------------------------------------------------------------- both of them


@pytest.mark.parametrize("store", [nostall.Parquet, nostall.ArrowIPC])
def test_columns_that_are_not_there_or_do_not_fit(tmp_path: Path, store: Any) -> None:
    def write(what: pa.Table) -> Path:
        if store is nostall.Parquet:
            pq.write_table(what, tmp_path / "a.x")
            return tmp_path / "a.x"
        return write_ipc(tmp_path / "a.x", what)

    path = write(table("hf"))
    with pytest.raises(UsageError, match=r"a\.x has no column 'img'; it has: image, label, id"):
        store(path, image="img")
    with pytest.raises(UsageError, match=r"no column 'y': pass label=None"):
        store(path, label="y")
    with pytest.raises(UsageError, match=r"column 'label' is int64, not binary"):
        store(path, image="label")
    with pytest.raises(UsageError, match=r"has no rows"):
        store(write(table("hf").slice(0, 0)))
    binary = pa.array([b"x", b"y"])
    with pytest.raises(UsageError, match=r"'label' is string, not integers: .*columns="):
        store(write(pa.table({"image": binary, "label": ["cat", "dog"]})))
    with pytest.raises(UsageError, match=r"a\.x.*row 1 has no label"):
        store(write(pa.table({"image": binary, "label": [1, None]})))
    with pytest.raises(UsageError, match=r"a\.x.*row 1 has no image bytes"):
        store(write(pa.table({"image": pa.array([b"x", None]), "label": [1, 2]})))
    only_path = pa.array([{"bytes": b"x", "path": "a"}, {"bytes": None, "path": "b"}], HF)
    with pytest.raises(UsageError, match=r"a\.x.*row 1 has no image bytes"):
        store(write(pa.table({"image": only_path, "label": [1, 2]})))
    no_bytes = pa.array([{"path": "a"}, {"path": "b"}])
    with pytest.raises(UsageError, match=r"no field 'bytes'"):
        store(write(pa.table({"image": no_bytes, "label": [1, 2]})))
