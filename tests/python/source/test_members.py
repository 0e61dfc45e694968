"""Named values of TFRecord's examples and of LMDB's values as fields."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
from field_checks import rows_in_a_loader
from PIL import Image
from protobuf import example, write_tfrecord
from samples import npy

import nostall
from nostall import fields
from nostall.errors import CorruptionError, IoError, UsageError

COUNT = 21
RANDOM = np.random.default_rng(7)


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((3, 2, 3), number, np.uint8)).save(file, "png")
    return file.getvalue()


def check_rows(source: nostall.Source, rows: list[dict[str, Any]]) -> None:
    """All values, those of a copy, and those of one field alone."""
    assert list(source.schema) == list(rows[0])
    last = list(rows[0])[-1]
    narrow = pickle.loads(pickle.dumps(source)).select([last])
    assert narrow.total_bytes < source.total_bytes
    for opened in (source, pickle.loads(pickle.dumps(narrow))):
        found = rows_in_a_loader(opened, tiers=["ram:64KiB"])
        for row, wanted in zip(found, rows, strict=True):
            for name in row:
                value = wanted[name]
                got = row[name].tobytes() if isinstance(value, bytes) else row[name]
                assert np.array_equal(got, value), name


# -------------------------------------------------------------------------------------- TFRecord


def example_rows() -> list[dict[str, Any]]:
    return [
        {
            "image": png(i),
            "text": f"t\u00e9xt {i}".encode(),
            "label": i - 5,
            "score": i / 2,
            "tokens": RANDOM.integers(-(2**62), 2**62, i % 4).tolist(),
            "vector": RANDOM.standard_normal(6).astype(np.float32).tolist(),
        }
        for i in range(COUNT)
    ]


def write_examples(folder: Path, rows: list[dict[str, Any]]) -> Path:
    for i, some in enumerate((rows[:9], rows[9:])):
        write_tfrecord(folder / f"{i}.tfrecord", [example(row) for row in some])
    return folder


def test_features_of_examples(tmp_path: Path) -> None:
    rows = example_rows()
    write_examples(tmp_path, rows)
    source = nostall.TFRecord(tmp_path, features="all", schema={"text": fields.Text()})
    assert dict(source.schema) == {
        "image": fields.Image(),
        "text": fields.Text(),
        "label": fields.Scalar(codec="varint"),
        "score": fields.Scalar(dtype="float32"),
        "tokens": fields.Array(dtype="int64", codec="varint"),
        "vector": fields.Array(shape=(6,), codec="raw"),
    }
    check_rows(source, [{**row, "text": row["text"].decode()} for row in rows])
    again = nostall.TFRecord(tmp_path, features="all", schema={"text": fields.Text()})
    assert again.index_reused and again.schema == source.schema
    assert again.fingerprint == source.fingerprint
    named = nostall.TFRecord(
        tmp_path,
        features={"y": "label", "boxes": "vector", "short": "tokens"},
        schema={"y": fields.Scalar(dtype="int8"), "boxes": fields.Array(shape=(None, 2))},
    )
    found = rows_in_a_loader(named)
    assert [row["y"] for row in found] == [row["label"] for row in rows]
    assert found[3]["y"].dtype == np.int8
    assert np.array_equal(found[3]["boxes"], np.reshape(rows[3]["vector"], (3, 2)))


def test_the_first_value_that_is_not_empty_says_what_bytes_are(tmp_path: Path) -> None:
    image = b"\x89PNG\r\n\x1a\n"
    write_tfrecord(tmp_path / "a.tfrecord", [example({"x": x}) for x in (b"", image, b"")])
    assert nostall.TFRecord(tmp_path, features="all").schema["x"] == fields.Image()
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("x", (3,), h5py.vlen_dtype(np.uint8))
        data[1] = np.frombuffer(image, np.uint8)
    assert nostall.HDF5(tmp_path / "a.h5", columns=["x"]).schema["x"] == fields.Image()


def test_lists_of_features_of_sequence_examples_are_refused(tmp_path: Path) -> None:
    context = example({"image/encoded": b"x", "image/class/label": 3})
    lists = example({"frames": b"y"})
    assert lists[:1] == b"\x0a"
    write_tfrecord(tmp_path / "a.tfrecord", [context + b"\x12" + lists[1:]])
    named = nostall.TFRecord(tmp_path, features=["image/class/label"])
    assert [row["image/class/label"] for row in rows_in_a_loader(named)] == [3]
    assert nostall.TFRecord(tmp_path).read(0) == b"x"
    for features in ("all", ["image/class/label", "frames"]):
        with pytest.raises(
            UsageError, match=r'SequenceExample, whose feature list "frames" is not'
        ):
            nostall.TFRecord(tmp_path, features=features)
    # Which an index of another release may have left out.
    index = tmp_path / "index"
    table = named.native.table
    stamp = re.sub(r"members=\S+ rules 2", 'members="all"', table.stamp)
    inside, sizes = (x.reshape(1, 1) for x in (table.part_offset, table.part_length))
    places = table.offset, table.length, inside, sizes
    older = named._parts_table("tfrecord", stamp, places, np.zeros(1, np.uint32))
    assert stamp != table.stamp and older.store(str(index))[0] == 0
    with pytest.raises(UsageError, match="SequenceExample"):
        nostall.TFRecord(tmp_path, features="all", index=index)
    with pytest.raises(UsageError, match=r"\"frames\" of bytes in its context: it is a tf\.train"):
        nostall.TFRecord(tmp_path, image="frames")


def test_missing_features_take_the_fill(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"x": 1, "v": [2, 3], "f": 0.5}, {}, {"x": 3, "v": [], "f": 1.5}]
    write_tfrecord(tmp_path / "a.tfrecord", [example(row) for row in rows])
    told = r"a\.tfrecord at offset \d+ has no value of 'v', which holds for 1 record in"
    with pytest.raises(UsageError, match=told):
        nostall.TFRecord(tmp_path, features=["v"])
    for _ in range(2):  # nothing was stored that would say less
        with pytest.raises(
            UsageError, match=r"no record has a value of 'none'; names in the first one: x, v, f"
        ):
            nostall.TFRecord(tmp_path, features=["x", "none"])
    assert nostall.TFRecord(
        tmp_path, features=["none"], schema={"none": fields.Scalar(fill=5)}, index=False
    ).schema == fields.Schema({"none": fields.Scalar(fill=5)})
    kinds = {
        "x": fields.Scalar(fill=-1),
        "v": fields.Array(dtype="int64", fill=[7]),
        "f": fields.Scalar(dtype="float64", fill=0),
        "none": fields.Text(fill="nothing"),
    }
    found = rows_in_a_loader(nostall.TFRecord(tmp_path, features=list(kinds), schema=kinds))
    assert [row["x"] for row in found] == [1, -1, 3]
    assert [row["v"].tolist() for row in found] == [[2, 3], [7], []]
    assert [row["f"] for row in found] == [0.5, 0, 1.5]
    assert [row["none"] for row in found] == ["nothing"] * 3


def test_what_examples_refuse(tmp_path: Path) -> None:
    def opened(*rows: dict[str, Any], packed: bool = True, **options: Any) -> nostall.TFRecord:
        write_tfrecord(tmp_path / "a.tfrecord", [example(row, packed) for row in rows])
        return nostall.TFRecord(tmp_path, index=False, **{"features": "all", **options})

    with pytest.raises(
        UsageError, match=r"offset \d+ of .*a\.tfrecord has floats? in|has a list of"
    ):
        opened({"x": 1}, {"x": 1.5})
    with pytest.raises(UsageError, match=r'has a value of "x" that is not read: several byte'):
        opened({"x": [b"a", b"b"]})
    with pytest.raises(UsageError, match=r'has a value of "x" that is not read'):
        opened({"x": [1, 2]}, packed=False)
    assert rows_in_a_loader(opened({"x": 300}, packed=False))[0]["x"] == 300
    with pytest.raises(UsageError, match=r"'x' has lists of 2 to 2 varints, which field x is not"):
        opened({"x": [1, 2]}, schema={"x": fields.Scalar()})
    with pytest.raises(UsageError, match=r"'x' has lists of 1 to 1 floats, which field x is not"):
        opened({"x": 0.5}, schema={"x": fields.Array(dtype="float64")})
    with pytest.raises(UsageError, match=r"schema names the field y, which is none of"):
        opened({"x": 0.5}, schema={"y": fields.Array(dtype="float64")})
    with pytest.raises(UsageError, match=r"which features= names"):
        opened({"x": 0.5}, features=None, schema={"x": fields.Scalar()})
    with pytest.raises(UsageError, match=r'features= are of values="example"'):
        opened({"x": 0.5}, values="raw")
    with pytest.raises(CorruptionError, match=r"field x: a number that is none of type uint8"):
        rows_in_a_loader(opened({"x": 300}, schema={"x": fields.Scalar(dtype="uint8")}))
    with pytest.raises(CorruptionError, match=r"field x: its byte 1 is not UTF-8"):
        rows_in_a_loader(opened({"x": b"a\xff"}, schema={"x": fields.Text()}))
    with pytest.raises(CorruptionError, match=r"field x: 16 bytes are no int64 array of shape"):
        kind = fields.Array(dtype="int64", shape=(None, 3))
        rows_in_a_loader(opened({"x": [1, 2]}, schema={"x": kind}))
    write_tfrecord(tmp_path / "a.tfrecord", [b"no example"])
    with pytest.raises(CorruptionError, match=r"a\.tfrecord is no tf\.train\.Example"):
        nostall.TFRecord(tmp_path, features="all")


def test_features_that_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [example({"x": [1, 2, 3, 4]})])
    kept = pickle.dumps(nostall.TFRecord(path, features=["x"]))
    write_tfrecord(path, [example({"x": [0.5]})])
    os.utime(path, (1, 1))  # both may be of one tick of the file system's clock
    source = nostall.TFRecord(path, features=["x"])
    assert not source.index_reused
    assert source.schema["x"] == fields.Scalar(dtype="float32")
    with pytest.raises(IoError, match="changed since it was opened"):
        pickle.loads(kept)


# ------------------------------------------------------------------------------------------ LMDB


def write_lmdb(path: Path, values: list[bytes]) -> Path:
    with lmdb.open(str(path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i, value in enumerate(values):
            txn.put(str(i).encode(), value)
    return path


def npz(pack: Any = np.savez, **arrays: Any) -> bytes:
    file = io.BytesIO()
    pack(file, **arrays)
    return file.getvalue()


def test_npz_and_npy_in_lmdb(tmp_path: Path) -> None:
    # Large enough for pages of their own, and small enough for leaves.
    grids = [RANDOM.standard_normal((40, 2 + i % 3)).astype(np.float32) for i in range(COUNT)]
    ids = [np.arange(3) + i for i in range(COUNT)]
    values = [npz(grid=g, ids=n) for g, n in zip(grids, ids, strict=True)]
    source = nostall.LMDB(write_lmdb(tmp_path / "npz", values), values="npz")
    assert dict(source.schema) == {
        "grid": fields.Array(shape=(40, None)),
        "ids": fields.Array(dtype="int64", shape=(3,)),
    }
    check_rows(source, [{"grid": g, "ids": n} for g, n in zip(grids, ids, strict=True)])
    assert nostall.LMDB(tmp_path / "npz", values="npz").index_reused
    few = nostall.LMDB(tmp_path / "npz", values="npz", members={"n": "ids"})
    assert rows_in_a_loader(few)[4]["n"].tolist() == [4, 5, 6]
    # Sides that differ among samples far from the first ones.
    later = [npy(np.zeros((1 + i // 30, 2), np.float32)) for i in range(60)]
    kinds = nostall.LMDB(write_lmdb(tmp_path / "later", later), values="npy").schema
    assert kinds["array"] == fields.Array(shape=(None, 2))
    alone = nostall.LMDB(write_lmdb(tmp_path / "npy", [npy(g) for g in grids]), values="npy")
    for row, grid in zip(rows_in_a_loader(alone), grids, strict=True):
        assert np.array_equal(row["array"], grid)


def test_msgpack_in_lmdb(tmp_path: Path) -> None:
    rows = [
        {
            "image": png(i),
            "text": f"text {i}",
            "n": (-1) ** i * 2 ** (i * 3),
            "real": i / 3,
            "flag": i % 2 == 0,
            "list": list(range(i % 4)),
            "nested": {"grid": [[i, 1.5], [2, 3], [4, -5]], "name": "x" * i},
        }
        for i in range(COUNT)
    ]
    path = write_lmdb(tmp_path / "db", [msgpack.packb(row) for row in rows])
    source = nostall.LMDB(path, values="msgpack")
    flat = [
        {
            **{k: v for k, v in row.items() if k != "nested"},
            **{f"nested.{k}": v for k, v in row["nested"].items()},  # type: ignore[attr-defined]
        }
        for row in rows
    ]
    assert source.schema["nested.grid"] == fields.Array(
        dtype="float64", shape=(None, None), codec="msgpack"
    )
    assert source.schema["list"] == fields.Array(dtype="int64", codec="msgpack")
    # An empty list does not tell the dimensions of the others.
    pairs = [{"v": []}, {"v": [[1, 2]]}, {"v": [[3, 4], [5, 6]]}]
    grown = nostall.LMDB(
        write_lmdb(tmp_path / "pairs", [msgpack.packb(p) for p in pairs]), values="msgpack"
    )
    assert grown.schema["v"] == fields.Array(dtype="int64", shape=(None, None), codec="msgpack")
    assert [row["v"].tolist() for row in rows_in_a_loader(grown)] == [p["v"] for p in pairs]
    check_rows(source, flat)
    grid = fields.Array(dtype="float32", shape=(3, 2))
    dense = nostall.LMDB(
        path, values="msgpack", members=["nested.grid"], schema={"nested.grid": grid}
    )
    assert rows_in_a_loader(dense)[7]["nested.grid"].dtype == np.float32
    # A list instead of a map, as tensorpack writes it.
    pairs = write_lmdb(tmp_path / "list", [msgpack.packb([r["image"], r["n"]]) for r in rows])
    named = nostall.LMDB(pairs, values="msgpack", members={"image": "0", "label": "1"})
    assert [row["label"] for row in rows_in_a_loader(named)] == [row["n"] for row in rows]
    assert named.schema["image"] == fields.Image()


def test_missing_values_of_msgpack_take_the_fill(tmp_path: Path) -> None:
    values = [{"x": 1, "v": [1.5, 2]}, {"x": None}, {"x": 3, "v": []}]
    path = write_lmdb(tmp_path / "db", [msgpack.packb(v) for v in values])
    with pytest.raises(UsageError, match=r"has no value of 'x', which holds for 1 record in all"):
        nostall.LMDB(path, values="msgpack")
    with pytest.raises(
        UsageError, match=r"no record has a value of 'y\.z'; names in the first one: x, v"
    ):
        nostall.LMDB(path, values="msgpack", members=["x", "y.z"])
    schema = {"x": fields.Scalar(fill=-3), "v": fields.Array(dtype="float32", fill=[[9]][0])}
    found = rows_in_a_loader(nostall.LMDB(path, values="msgpack", schema=schema))
    assert [row["x"] for row in found] == [1, -3, 3]
    assert [row["v"].tolist() for row in found] == [[1.5, 2], [9], []]


def test_examples_in_lmdb(tmp_path: Path) -> None:
    rows = example_rows()
    path = write_lmdb(tmp_path / "db", [example(row) for row in rows])
    source = nostall.LMDB(path, values="example", members=["image", "label"])
    check_rows(source, [{name: row[name] for name in ("image", "label")} for row in rows])


def test_what_values_of_lmdb_refuse(tmp_path: Path) -> None:
    def opened(name: str, *values: bytes, **options: Any) -> nostall.LMDB:
        return nostall.LMDB(write_lmdb(tmp_path / name, list(values)), **options)

    packed = npz(np.savez_compressed, x=np.zeros(9))
    with pytest.raises(UsageError, match=r'"x" that is not read: .*a compressed array'):
        opened("a", packed, values="npz")
    with pytest.raises(CorruptionError, match=r"is no .npz file"):
        opened("b", packed[:-5], values="npz")
    with pytest.raises(CorruptionError, match=r"is no MessagePack map or list"):
        opened("c", msgpack.packb(7), values="msgpack")
    with pytest.raises(CorruptionError, match=r"is no MessagePack map or list"):
        opened("d", msgpack.packb({"x": "long text"})[:-3], values="msgpack")
    with pytest.raises(UsageError, match=r'has text in "x", records before it have integer'):
        opened("e", msgpack.packb({"x": 1}), msgpack.packb({"x": "1"}), values="msgpack")
    latin = msgpack.packb({b"\xe9": 1, "x": 2})
    with pytest.raises(UsageError, match=r"the name b'.xe9', which is not UTF-8: name the other"):
        opened("latin", latin, values="msgpack")
    assert list(opened("x", latin, values="msgpack", members=["x"]).schema) == ["x"]
    with pytest.raises(UsageError, match=r'"x" that is not read'):
        opened("f", msgpack.packb({"x": ["a"]}), values="msgpack")
    ragged = msgpack.packb({"x": [[1], [2, 3]]})
    with pytest.raises(CorruptionError, match=r"field x: its lists are not all of one shape"):
        rows_in_a_loader(opened("g", ragged, values="msgpack"))
    with pytest.raises(
        CorruptionError, match=r"field x: it is int64 of shape \(2,\), not int64 of"
    ):
        kind = fields.Array(dtype="int64", shape=(3,))
        one = msgpack.packb({"x": [1, 2]})
        rows_in_a_loader(opened("h", one, values="msgpack", schema={"x": kind}))
    with pytest.raises(UsageError, match=r"members= names values in npz, msgpack and example"):
        opened("i", b"", values="raw", members=["x"])
    with pytest.raises(UsageError, match=r"label= is for samples of one value"):
        opened("i", b"", values="npz", label=[1])
    with pytest.raises(UsageError, match=r"values must be one of .*\"npz\", \"msgpack\""):
        opened("i", b"", values="nzp")
    with pytest.raises(CorruptionError, match=r"field array"):
        bad = bytearray(npy(np.zeros(3, np.bool_)))
        bad[-1] = 7
        rows_in_a_loader(opened("j", bytes(bad), values="npy"))
