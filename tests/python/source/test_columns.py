"""Columns of Parquet and Arrow as fields: every type, nulls, structs, what is read, what is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from field_checks import rows_in_a_loader
from PIL import Image
from test_arrow import write_ipc

import nostall
from nostall import fields
from nostall.errors import CorruptionError, IoError, UsageError

COUNT = 23
RANDOM = np.random.default_rng(5)
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((2, 3, 3), number, np.uint8)).save(file, "png")
    return file.getvalue()


def wide_table() -> pa.Table:
    n = range(COUNT)
    ragged = [RANDOM.integers(-9, 9, i % 4).tolist() for i in n]
    boxes = [[[i, 0, i + 1, k] for k in range(i % 3)] for i in n]
    return pa.table(
        {
            "image": pa.array([{"bytes": png(i), "path": f"{i}.png"} for i in n], FILE),
            "caption": pa.array([f"caption {i} \u20ac" * (i % 3) for i in n]),
            "long": pa.array([f"{i}" for i in n], pa.large_string()),
            "blob": pa.array([bytes([i]) * i for i in n], pa.large_binary()),
            "code": pa.array([bytes([i, 7]) for i in n], pa.binary(2)),
            "label": pa.array([i % 7 for i in n], pa.int64()),
            "small": pa.array([i - 9 for i in n], pa.int8()),
            "flag": pa.array([i % 2 == 0 for i in n]),
            "price": pa.array([i / 4 for i in n], pa.float32()),
            "tokens": pa.array(ragged, pa.list_(pa.int32())),
            "wide": pa.array(ragged, pa.large_list(pa.int64())),
            "vector": pa.array([[i, i + 0.5] for i in n], pa.list_(pa.float32(), 2)),
            "matrix": pa.array(
                [[[i, 1], [2, 3], [4, 5]] for i in n], pa.list_(pa.list_(pa.float64(), 2), 3)
            ),
            "nested": pa.array(boxes, pa.list_(pa.list_(pa.float32()))),
            "objects": pa.array(
                [{"bbox": b, "info": {"name": f"n{i}", "k": i}} for i, b in enumerate(boxes)],
                pa.struct(
                    [
                        ("bbox", pa.list_(pa.list_(pa.float32(), 4))),
                        ("info", pa.struct([("name", pa.string()), ("k", pa.uint16())])),
                    ]
                ),
            ),
        }
    )


KINDS = {
    "image": fields.Image(),
    "caption": fields.Text(),
    "long": fields.Text(),
    "blob": fields.Bytes(),
    "code": fields.Bytes(),
    "label": fields.Scalar(),
    "small": fields.Scalar(dtype="int8"),
    "flag": fields.Scalar(dtype="bool"),
    "price": fields.Scalar(dtype="float32"),
    "tokens": fields.Array(dtype="int32", codec="raw"),
    "wide": fields.Array(dtype="int64", codec="raw"),
    "vector": fields.Array(shape=(2,), codec="raw"),
    "matrix": fields.Array(dtype="float64", shape=(3, 2), codec="raw"),
    "nested": fields.Array(shape=(None, 4), codec="raw"),
    "objects.bbox": fields.Array(shape=(None, 4), codec="raw"),
    "objects.info.name": fields.Text(),
    "objects.info.k": fields.Scalar(dtype="uint16"),
}


def write(path: Path, what: pa.Table, how: str, rows: int = 5) -> Path:
    if how == "parquet":
        pq.write_table(what, path, row_group_size=rows)
        return path
    return write_ipc(path, what, how == "stream", rows=rows)


def store(how: str) -> Any:
    return nostall.Parquet if how == "parquet" else nostall.ArrowIPC


def expected(row: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        row = row[part]
    return row["bytes"] if name == "image" else row


@pytest.mark.parametrize("how", ["parquet", "file", "stream"])
def test_every_type_comes_back(tmp_path: Path, how: str) -> None:
    table = wide_table()
    ending = "parquet" if how == "parquet" else "arrow"
    write(tmp_path / f"a.{ending}", table.slice(0, 9), how)
    write(tmp_path / f"b.{ending}", table.slice(9), how)
    source = store(how)(tmp_path, columns="all")
    assert dict(source.schema) == KINDS
    assert source.labels.tolist() == table["label"].to_pylist()
    assert len(source) == COUNT
    found = rows_in_a_loader(source, tiers=["ram:1MiB"])
    copy = pickle.loads(pickle.dumps(source.select(["caption", "nested", "label"])))
    assert set(copy.schema) == {"caption", "nested", "label"}
    assert copy.total_bytes < source.total_bytes
    few = rows_in_a_loader(copy)
    for i, row in enumerate(table.to_pylist()):
        for name in source.schema:
            value = expected(row, name)
            got = found[i][name]
            if isinstance(value, bytes):
                assert got.tobytes() == value, name
            else:
                assert np.array_equal(got, np.reshape(value, np.shape(got))), name
        assert few[i]["caption"] == row["caption"]
        assert few[i]["label"] == row["label"]


def test_fields_by_other_names_and_kinds(tmp_path: Path) -> None:
    source = nostall.ArrowIPC(
        write(tmp_path / "a.arrow", wide_table(), "file"),
        columns={"boxes": "objects.bbox", "picture": "image", "y": "small", "text": "blob"},
        schema={
            "boxes": fields.Boxes(),
            "y": fields.Scalar(dtype="float64"),
            "text": fields.Bytes(padded=True),
        },
    )
    loader = nostall.DataLoader(
        source,
        4,
        shuffle=False,
        batch="dict",
        output="numpy",
        transforms={
            ("picture", "boxes"): [nostall.transforms.CenterCrop(2), nostall.transforms.ToTensor()]
        },
    )
    batch = next(iter(loader))
    loader.close()
    assert batch["picture"].shape == (4, 3, 2, 2)
    assert batch["boxes"].sample(2).tolist() == [[2, 0, 2, 0], [2, 0, 2, 1]]
    assert batch["y"].tolist() == [-9.0, -8.0, -7.0, -6.0]
    assert batch["text"].lengths.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["parquet", "stream"])
def test_missing_values_take_the_fill(tmp_path: Path, how: str) -> None:
    table = pa.table(
        {
            "x": pa.array([1, None, 3]),
            "t": pa.array(["a", None, "c"]),
            "v": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            "s": pa.array(
                [{"r": [1]}, None, {"r": None}], pa.struct([("r", pa.list_(pa.int32()))])
            ),
        }
    )
    path = write(tmp_path / "a", table, how)
    for name in ("x", "t", "v", "s.r"):
        row = 1
        with pytest.raises(UsageError, match=rf"a(, row group 0)?, row {row} has no {name}"):
            store(how)(path, columns=[name])
    filled = store(how)(
        path,
        columns="all",
        schema={
            "x": fields.Scalar(fill=-1),
            "t": fields.Text(fill="none"),
            "v": fields.Array(shape=(2,), fill=np.zeros(2, np.float32)),
            "s.r": fields.Array(dtype="int32", fill=np.array([7, 7], np.int32)),
        },
    )
    rows = rows_in_a_loader(filled)
    assert [row["x"] for row in rows] == [1, -1, 3]
    assert [row["t"] for row in rows] == ["a", "none", "c"]
    assert [row["v"].tolist() for row in rows] == [[1, 2], [0, 0], [3, 4]]
    assert [row["s.r"].tolist() for row in rows] == [[1], [7, 7], [7, 7]]


def test_lists_of_a_fixed_size_are_read_when_they_are_needed(tmp_path: Path) -> None:
    """Opening looks at the footer alone, where that says that no number is missing."""
    path = tmp_path / "a.parquet"
    table = wide_table().select(["vector", "label"])
    inner = pa.array(
        [{"v": [i, i]} for i in range(COUNT)], pa.struct([("v", pa.list_(pa.int16(), 2))])
    )
    table = table.append_column("of", inner)
    names = ["vector", "of.v"]
    for counted in (True, False):
        pq.write_table(table, path, row_group_size=9, write_statistics=counted)
        source = nostall.Parquet(path, columns=names)
        assert source.schema["vector"] == fields.Array(dtype="float32", shape=(2,), codec="raw")
        rows = rows_in_a_loader(source)
        assert [row["vector"].tolist() for row in rows] == table["vector"].to_pylist()
        assert [row["of.v"].tolist() for row in rows] == [[i, i] for i in range(COUNT)]
        footer = int.from_bytes(path.read_bytes()[-8:-4], "little") + 8
        with path.open("r+b") as file:
            file.seek(4)
            file.write(bytes(path.stat().st_size - footer - 4))
        if counted:
            with pytest.raises(IoError, match="row group 1"):
                nostall.Parquet(path, columns=names).read(9)
        else:
            with pytest.raises(CorruptionError, match="row group 0"):
                nostall.Parquet(path, columns=names)


def test_bytes_are_images_by_their_first_value(tmp_path: Path) -> None:
    values = {}
    for format in ("JPEG", "PNG", "WEBP", "BMP", "TIFF"):
        file = io.BytesIO()
        Image.new("RGB", (4, 4)).save(file, format)
        values[format] = [file.getvalue()]
    pq.write_table(pa.table({**values, "text": [b"BM is no image"]}), tmp_path / "a.parquet")
    schema = nostall.Parquet(tmp_path / "a.parquet", columns="all").schema
    assert dict(schema) == {**dict.fromkeys(values, fields.Image()), "text": fields.Bytes()}


def test_only_chosen_columns_are_read(tmp_path: Path) -> None:
    big = [RANDOM.bytes(200_000) for _ in range(20)]
    table = pa.table({"image": big, "text": [f"t{i}" for i in range(20)]})

    def read_of(action: Any) -> int:
        def total() -> int:
            return int(Path("/proc/self/io").read_text().split()[1])

        before = total()
        action()
        return total() - before

    def rows(source: nostall.Source) -> None:
        rows_in_a_loader(source, reader="pread")  # the kernel does not count those of io_uring

    for how in ("parquet", "file"):
        path = write(tmp_path / how, table, how, rows=4)
        rows(store(how)(path, columns=["text"]))  # the first one imports modules
        few = store(how)(path, columns=["text"])
        assert read_of(lambda s=few: rows(s)) < 400_000
        assert read_of(lambda p=path, h=how: store(h)(p, columns=["text"])) < 400_000
        both = store(how)(path, columns=["image", "text"])
        assert read_of(lambda s=both: rows(s.select(["text"]))) < 400_000
        assert read_of(lambda s=both: rows(s)) > 4_000_000


def test_rows_of_a_group_come_together(tmp_path: Path) -> None:
    table = pa.concat_tables([wide_table()] * 10)
    path = write(tmp_path / "a.parquet", table, "parquet", rows=60)
    source = nostall.Parquet(path, columns=["image", "caption", "tokens"], kept=1)
    reads: Counter[tuple[str, int]] = Counter()
    read = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, columns: list[str]) -> Any:
        reads[columns[0], group] += 1
        return read(self, group, columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pq.ParquetFile, "read_row_group", counted)
        rows_in_a_loader(source, tiers=["ram:1MiB"], shuffle=True, threads=1)
    names = ("image.bytes", "caption", "tokens")
    assert set(reads) == {(name, group) for name in names for group in range(4)}
    # Two threads read. One that is late has samples of a group that the other has done with, at both
    # ends of it. Where rows do not come together a group is read twenty times.
    assert max(reads.values()) <= 5


def test_numbers_alone_and_views(tmp_path: Path) -> None:
    table = wide_table()
    path = write(tmp_path / "a", table, "parquet")
    numbers = nostall.Parquet(path, columns=["label", "price"])
    assert numbers.total_bytes == 0
    rows = rows_in_a_loader(numbers, tiers=["ram:1MiB"])
    assert [row["price"] for row in rows] == table["price"].to_pylist()
    names = ["caption", "vector", "label"]
    both = nostall.Concat(
        [
            nostall.Parquet(path, columns=names),
            nostall.ArrowIPC(write(tmp_path / "b", table, "file"), columns=names),
        ]
    )
    few = nostall.Filter(both, labels=[2, 3])
    wanted = [row for row in table.to_pylist() if row["label"] in (2, 3)] * 2
    for row, value in zip(rows_in_a_loader(few), wanted, strict=True):
        assert row["caption"] == value["caption"]
        assert row["vector"].tolist() == value["vector"]


@pytest.mark.parametrize("how", ["parquet", "file"])
def test_what_is_refused(tmp_path: Path, how: str) -> None:
    opens = store(how)

    def written(name: str, **columns: Any) -> Path:
        return write(tmp_path / name, pa.table(columns), how)

    good = written("good", x=[1, 2], t=["a", "b"], v=[[1, 2], [3]])
    with pytest.raises(UsageError, match=r"good has no column 'y'; it has: x, t, v"):
        opens(good, columns=["y"])
    with pytest.raises(UsageError, match=r"column of 'x.a' has no field 'a'; it is int64"):
        opens(good, columns=["x.a"])
    with pytest.raises(UsageError, match='columns must be "all"'):
        opens(good, columns="x")
    with pytest.raises(UsageError, match=r"schema names the field z, which is none of"):
        opens(good, columns=["x"], schema={"z": fields.Scalar()})
    with pytest.raises(UsageError, match=r"columns= names all fields"):
        opens(good, columns=["x"], label="t")
    with pytest.raises(UsageError, match=r"columns= names"):
        opens(good, schema={"x": fields.Scalar()})
    for name, kind, said in (
        ("x", fields.Text(), "int64, which field x is not"),
        ("t", fields.Image(), "string, which field t is not"),
        ("v", fields.Array(dtype="float32"), r"int64\[\], which field v is not"),
        ("v", fields.Array(dtype="int64", shape=(None, 2)), r"int64\[\], which field v is not"),
    ):
        with pytest.raises(UsageError, match=rf"good: column '{name}' is {said}"):
            opens(good, columns=[name], schema={name: kind})

    other = written("other", x=[1.5], t=["c"])
    with pytest.raises(
        UsageError, match=r"other: column 'x' is double, in .*good it is int64: all files need"
    ):
        opens([good, other], columns=["x"])
    with pytest.raises(UsageError, match=r"other has no column 'v'; it has: x, t"):
        opens([good, other], columns=["v"])
    for bad in (
        pa.array([1, 2], pa.timestamp("s")),
        pa.array([["a"], []], pa.list_(pa.string())),
        pa.array([[True], []]),
        pa.array([[{"a": 1}], []]),
    ):
        with pytest.raises(UsageError, match=r"bad: column 'x' is .*: numbers, lists of numbers"):
            opens(written("bad", x=bad), columns=["x"])
    with pytest.raises(UsageError, match=r"row 1: a list of column 'x' has a null in it"):
        opens(written("bad", x=[[1], [2, None]]), columns=["x"])
    with pytest.raises(UsageError, match=r"lists of 1 and of 2 inside its lists"):
        opens(written("bad", x=[[[1]], [[2, 3]]]), columns=["x"])
    one, two = written("one", x=[[[1]]]), written("two", x=[[[2, 3]]])
    with pytest.raises(UsageError, match=r"two.*: column .x. has lists of 1 before, and of 2 here"):
        opens([one, two], columns=["x"])
    with pytest.raises(UsageError, match=r"empty has no rows"):
        opens(written("empty", x=pa.array([], pa.int32())), columns=["x"])


@pytest.mark.parametrize("how", ["parquet", "file"])
def test_values_that_are_found_bad_later(tmp_path: Path, how: str) -> None:
    opens = store(how)
    table = pa.table(
        {"t": pa.array([b"good", b"\xff\xfe"]).cast(pa.string(), safe=False), "v": [[1, 2], [3]]}
    )
    path = write(tmp_path / "a", table, how)
    with pytest.raises(CorruptionError, match="field t: its byte 0 is not UTF-8"):
        rows_in_a_loader(opens(path, columns=["t"]))
    schema = {"v": fields.Array(dtype="int64", shape=(2,))}
    with pytest.raises(CorruptionError, match=r"field v: 8 bytes are no int64 array of shape"):
        rows_in_a_loader(opens(path, columns=["v"], schema=schema))


@pytest.mark.parametrize("how", ["parquet", "file"])
def test_another_schema_than_at_the_opening(tmp_path: Path, how: str) -> None:
    values = [[1, 2], [3, 4]]
    path = write(tmp_path / "a", pa.table({"v": pa.array(values, pa.list_(pa.int32(), 2))}), how)
    kept = pickle.dumps(store(how)(path, columns=["v"]))
    write(path, pa.table({"v": pa.array(values, pa.list_(pa.float32(), 2))}), how)
    os.utime(path, (1, 1))  # both may be of one tick of the file system's clock
    with pytest.raises(IoError, match="changed since it was opened"):
        pickle.loads(kept)


# ----------------------------------------------------------------- Hugging Face's own directories


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The package, which must never ask a server, and a data set of three features."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
            "objects": {"bbox": datasets.List(datasets.List(datasets.Value("float32"), length=4))},
            "grid": datasets.Array2D((2, 3), "float32"),
        }
    )
    rows = [
        {
            "image": {"bytes": png(i), "path": None},
            "label": i % 2,
            "text": f"row {i}",
            "objects": {"bbox": [[i, 0, i + 1, 2]] * (i % 3)},
            "grid": np.full((2, 3), i, np.float32),
        }
        for i in range(11)
    ]
    yield datasets, datasets.Dataset.from_list(rows, features=features)
    patch.undo()


def check_hub(source: nostall.ArrowIPC, numbers: list[int]) -> None:
    assert source.classes == ["cat", "dog"]
    assert source.schema["image"] == fields.Image()
    assert source.schema["grid"] == fields.Array(shape=(None, 3), codec="raw")
    assert source.labels.tolist() == [i % 2 for i in numbers]
    for i, row in zip(numbers, rows_in_a_loader(source), strict=True):
        assert row["image"].tobytes() == png(i)
        assert row["text"] == f"row {i}"
        assert row["objects.bbox"].tolist() == [[i, 0, i + 1, 2]] * (i % 3)
        assert row["grid"].tolist() == [[i] * 3] * 2


def test_what_datasets_save_to_disk(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, data = hub
    data.save_to_disk(tmp_path / "one", num_shards=3)
    check_hub(nostall.ArrowIPC(tmp_path / "one", columns="all"), list(range(11)))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"one has no splits"):
        nostall.ArrowIPC("~/one", columns="all", split="train")
    check_hub(nostall.ArrowIPC("~/one", columns="all"), list(range(11)))
    pairs = nostall.ArrowIPC(tmp_path / "one")
    assert pairs.read(4) == png(4)
    assert pairs.classes == ["cat", "dog"]
    assert nostall.ArrowIPC(tmp_path / "one", label=None).classes is None
    chosen = [7, 2, 9]
    both = datasets.DatasetDict({"train": data, "test": data.select(chosen)})
    both.save_to_disk(tmp_path / "both")
    check_hub(nostall.ArrowIPC(tmp_path / "both", columns="all", split="test"), chosen)
    with pytest.raises(UsageError, match=r"both has the splits train, test: name one of them"):
        nostall.ArrowIPC(tmp_path / "both", columns="all")
    with pytest.raises(UsageError, match=r"one has no splits"):
        nostall.ArrowIPC(tmp_path / "one", columns="all", split="train")
    state = tmp_path / "one" / "state.json"
    said = json.loads(state.read_text())
    state.write_text(json.dumps(said | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(UsageError, match=r"state\.json has _indices_data_files, .*flatten_indices"):
        nostall.ArrowIPC(tmp_path / "one", columns="all")
    state.write_text(json.dumps(said | {"_indices_data_files": []}))
    check_hub(nostall.ArrowIPC(tmp_path / "one", columns="all"), list(range(11)))
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(CorruptionError, match=r"names data-00001-of-00003.arrow, which is not"):
        nostall.ArrowIPC(tmp_path / "one", columns="all")
    (tmp_path / "one" / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(UsageError, match=r"one has no rows: its state\.json names no files"):
        nostall.ArrowIPC(tmp_path / "one", columns="all")


def test_the_cache_of_datasets(hub: Any, tmp_path: Path) -> None:
    datasets, data = hub
    for name, rows in (("train", range(11)), ("test", [3, 1])):
        data.select(rows).to_parquet(str(tmp_path / f"{name}.parquet"))
    files = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "test")}
    loaded = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    folder = Path(loaded["train"].cache_files[0]["filename"]).parent
    loaded["train"].map(lambda row: {"more": 1})  # leaves a file of its own there
    assert len(list(folder.glob("*.arrow"))) == 3
    check_hub(nostall.ArrowIPC(folder, columns="all", split="train"), list(range(11)))
    check_hub(nostall.ArrowIPC(folder, columns="all", split="test"), [3, 1])
    parquet = nostall.Parquet(tmp_path / "train.parquet", columns=["image", "grid"])
    assert rows_in_a_loader(parquet)[5]["grid"].tolist() == [[5] * 3] * 2
