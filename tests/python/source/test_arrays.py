"""Rows of several datasets of HDF5, and of arrays of NumPy, as fields."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from field_checks import rows_in_a_loader

import nostall
from nostall import fields
from nostall.errors import CorruptionError, IoError, UsageError

COUNT = 17
RANDOM = np.random.default_rng(3)
IMAGES = RANDOM.integers(0, 255, (COUNT, 6, 4, 3), np.uint8)
GRID = RANDOM.standard_normal((COUNT, 5, 2)).astype(np.float32)
NAMES = [f"name {i} \u20ac" for i in range(COUNT)]
SOUND = [RANDOM.standard_normal(i % 4).astype(np.float64) for i in range(COUNT)]
BLOBS = [RANDOM.integers(0, 255, i % 5).astype(np.uint8) for i in range(COUNT)]


def check_rows(source: nostall.Source, wanted: dict[str, Any]) -> None:
    assert list(source.schema) == list(wanted)
    copy = pickle.loads(pickle.dumps(source))
    for opened in (source, copy):
        rows = rows_in_a_loader(opened, tiers=["ram:64KiB"])
        assert len(rows) == len(next(iter(wanted.values())))
        for i, row in enumerate(rows):
            for name, values in wanted.items():
                assert np.array_equal(row[name], values[i]), (name, i)
    last = list(wanted)[-1]
    narrow = pickle.loads(pickle.dumps(source.select([last])))
    assert list(narrow.schema) == [last]
    for row, value in zip(rows_in_a_loader(narrow), wanted[last], strict=True):
        assert np.array_equal(row[last], value)


# ------------------------------------------------------------------------------------------ HDF5


def make(path: Path, packed: bool) -> Path:
    squeezed: Any = {"chunks": (4, 6, 4, 3), "compression": "gzip"} if packed else {}
    with h5py.File(path, "w") as file:
        file.create_dataset("pictures/rgb", data=IMAGES, **squeezed)
        file["grid"] = GRID
        file["label"] = np.arange(COUNT, dtype=np.int16)
        file["fixed"] = np.array([name.encode() for name in NAMES])
        file["name"] = NAMES
        ragged = file.create_dataset("sound", (COUNT,), h5py.vlen_dtype(np.float64))
        blobs = file.create_dataset("blob", (COUNT,), h5py.vlen_dtype(np.uint8))
        for i in range(COUNT):
            ragged[i], blobs[i] = SOUND[i], BLOBS[i]
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_datasets_of_hdf5(tmp_path: Path, packed: bool) -> None:
    path = make(tmp_path / "a.h5", packed)
    source = nostall.HDF5(
        path, columns={"image": "pictures/rgb", "grid": "grid", "y": "label", "text": "fixed"}
    )
    assert source.through_library == packed
    assert source.schema["image"] == fields.Array(dtype="uint8", shape=(6, 4, 3), codec="raw")
    check_rows(source, {"image": IMAGES, "grid": GRID, "y": np.arange(COUNT), "text": NAMES})
    whole = nostall.HDF5(path, columns="all")
    assert whole.through_library
    assert whole.labels.tolist() == list(range(COUNT))
    wanted = {"blob": BLOBS, "grid": GRID, "name": NAMES, "pictures/rgb": IMAGES, "sound": SOUND}
    check_rows(whole, {**wanted, "fixed": NAMES, "label": np.arange(COUNT)})


def test_pixels_of_a_dataset_are_transformed(tmp_path: Path) -> None:
    path = make(tmp_path / "a.h5", packed=False)
    opened = [
        nostall.HDF5(path, columns={"image": "pictures/rgb"}, schema={"image": fields.Image()}),
        nostall.Arrays({"image": IMAGES}, schema={"image": fields.Image()}),
    ]
    flip = [nostall.transforms.CenterCrop((6, 4)), nostall.transforms.ToTensor()]
    for source in opened:
        rows = rows_in_a_loader(source, transforms=flip)
        assert np.array_equal(np.round(rows[5]["image"] * 255), IMAGES[5].transpose(2, 0, 1))


def test_what_hdf5_refuses(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros((4, 2), ">f4"), np.zeros((3, 2))
        file["z"], file["bad"] = np.zeros((4, 2), np.int32), np.array([b"\xff"] * 4)
        file["pairs"] = np.array([[b"a", b"bb"]] * 4)
        file.create_dataset("lists", (4, 2), h5py.vlen_dtype(np.uint8))
    path = tmp_path / "a.h5"
    for columns, schema, said in (
        (["z", "y"], {}, r"a.h5: datasets need one row for each sample: z has 4, y has 3"),
        (["x"], {}, r"a.h5, dataset x: elements of type >f4 are no field"),
        (["no"], {}, r"a.h5 has no dataset 'no'; it has: bad, lists, pairs, x, y, z"),
        (["pairs"], {}, r"a.h5, dataset pairs: a row of \(2,\) texts is no field"),
        (["lists"], {}, r"a.h5, dataset lists: values of different lengths .* not of \(4, 2\)"),
        (["bad"], {}, r"a.h5, dataset bad: b'.xff' is not UTF-8"),
        (["z"], {"z": fields.Array(shape=(2,))}, r"dataset z is int32 of shape \(2,\), which"),
        (["z"], {"z": fields.Image()}, r"dataset z is int32 of shape \(2,\), which"),
        (["z"], {"q": fields.Image()}, r"schema names the field q, which is none of"),
    ):
        with pytest.raises(UsageError, match=said):
            nostall.HDF5(path, columns=columns, schema=schema)
    with pytest.raises(UsageError, match=r"HDF5 needs either a dataset"):
        nostall.HDF5(path, "z", columns=["z"])
    source = nostall.HDF5(path, columns=["z"])
    kept = pickle.dumps(source)
    with h5py.File(path, "a") as file:
        del file["z"]
        file["z"] = np.zeros((4, 2), np.float32)
    with pytest.raises(IoError, match="changed since it was opened"):
        pickle.loads(kept)


# ----------------------------------------------------------------------------------------- NumPy


def test_arrays_in_files_maps_and_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", np.arange(COUNT))
    np.save(tmp_path / "f.npy", np.asfortranarray(GRID))
    raw = np.memmap(tmp_path / "raw", np.float32, "w+", offset=12, shape=(COUNT + 3, 5, 2))
    raw[3:] = GRID
    source = nostall.Arrays(
        {
            "image": tmp_path / "images.npy",
            "map": raw[3:],
            "reversed": np.load(tmp_path / "images.npy", mmap_mode="r")[::-1],
            "label": tmp_path / "labels.npy",
            "memory": GRID,
            "fortran": str(tmp_path / "f.npy"),
            "name": NAMES,
            "sound": SOUND,
        }
    )
    assert source.labels.tolist() == list(range(COUNT))
    wanted = {"image": IMAGES, "map": GRID, "label": np.arange(COUNT), "reversed": IMAGES[::-1]}
    check_rows(
        source,
        {
            **{name: wanted[name] for name in ("image", "map")},
            **{name: wanted[name] for name in ("reversed", "label")},
            **{"memory": GRID, "fortran": GRID, "name": NAMES, "sound": SOUND},
        },
    )
    # Rows of files are read, not held.
    assert source.total_bytes == IMAGES.nbytes + GRID.nbytes


def test_arrays_without_numbers_in_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((COUNT, 0)))
    np.savez(tmp_path / "a.npz", empty=np.zeros((COUNT, 3, 0), np.uint8), image=IMAGES)
    check_rows(nostall.Arrays({"empty": tmp_path / "a.npy"}), {"empty": np.zeros((COUNT, 0))})
    wanted = {"image": IMAGES, "empty": np.zeros((COUNT, 3, 0), np.uint8)}
    check_rows(nostall.Arrays(tmp_path / "a.npz"), wanted)


def test_npz_and_structured_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=IMAGES, grid=GRID, label=np.arange(COUNT))
    source = nostall.Arrays(tmp_path / "a.npz")
    assert source.total_bytes == IMAGES.nbytes + GRID.nbytes
    check_rows(source, {"image": IMAGES, "grid": GRID, "label": np.arange(COUNT)})
    kind = [("image", np.uint8, (6, 4, 3)), ("at", [("x", "f4"), ("grid", "f4", (5, 2))])]
    records = np.zeros(COUNT, kind)
    records["image"], records["at"]["grid"], records["at"]["x"] = IMAGES, GRID, GRID[:, 0, 0]
    np.save(tmp_path / "a.npy", records)
    wanted = {"image": IMAGES, "at.grid": GRID, "at.x": GRID[:, 0, 0]}
    mapped = nostall.Arrays(tmp_path / "a.npy")
    assert mapped.total_bytes == IMAGES.nbytes + GRID.nbytes
    check_rows(mapped, wanted)
    assert nostall.Arrays(records).total_bytes == 0
    assert set(nostall.Arrays({"r": records}).schema) == {"r.image", "r.at.x", "r.at.grid"}


def test_columns_of_a_frame_are_fields(tmp_path: Path) -> None:
    class Frame:
        """As a data frame has its columns, which is no Mapping."""

        def __init__(self, columns: dict[str, Any]) -> None:
            self.columns = columns

        def items(self) -> Any:
            return iter(self.columns.items())

    check_rows(
        nostall.Arrays(Frame({"x": GRID[:, 0, 0], "y": GRID})), {"x": GRID[:, 0, 0], "y": GRID}
    )
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = GRID[:, 0, 0]
        assert nostall.Arrays(file).select(["x"]).schema["x"] == fields.Scalar(dtype="float32")


def test_values_behind_a_mask_are_refused() -> None:
    masked = np.ma.array([[1, 2], [3, 4]], mask=[[0, 1], [0, 0]])
    with pytest.raises(UsageError, match="column x: 1 of the values are masked: fill them"):
        nostall.Arrays({"x": masked})
    with pytest.raises(UsageError, match="labels: 1 of the values are masked"):
        nostall.FileList([__file__, __file__], masked[0])
    assert len(nostall.Arrays({"x": np.ma.array([1, 2])})) == 2


def test_what_arrays_refuse(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "c.npz", x=GRID)
    np.savez(tmp_path / "o.npz", x=np.array([None, 1]))
    np.save(tmp_path / "a.npy", GRID)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-9])
    (tmp_path / "bad.npy").write_bytes(b"nothing")
    np.savez(tmp_path / "one.npz", x=np.float32(3))
    for arrays, schema, said in (
        (tmp_path / "one.npz", {}, r"one.npz, array x is one value: a field has one for each"),
        ({"x": 3}, {}, r"array x is one value"),
        (tmp_path / "c.npz", {}, r"c.npz is compressed: .* write it by numpy.savez"),
        (tmp_path / "o.npz", {}, r"o.npz, array x: pickled objects are not read"),
        (GRID, {}, r"Arrays takes arrays by the names"),
        ([GRID, GRID], {}, r"Arrays takes arrays by the names"),
        ({}, {}, r"one row for each sample: there are none"),
        ({"x": GRID, "y": [1]}, {}, r"one row for each sample: x has 17, y has 1"),
        ({"x": GRID.astype(complex)}, {}, r"array x: elements of type complex128 are no field"),
        ({"x": tmp_path / "a.npy"}, {"x": fields.Array()}, r"a.npy, array x is float32 of shape"),
        ({"x": GRID}, {"z": fields.Array()}, r"schema names the field z"),
        ({"x": {"a": 1}}, {}, r"column x is a dict: its values must stand in the order"),
        ({"x": {3, 1, 2}}, {}, r"column x is a set: its values must stand in the order"),
        ({"x": [1, None]}, {}, r"column x: sample 1 has no value: give its kind a fill="),
    ):
        with pytest.raises(UsageError, match=said):
            nostall.Arrays(arrays, schema=schema)
    with pytest.raises(UsageError, match=r'fields: Arrays\(\{"x": x, "y": y\}\)'):
        nostall.Arrays(GRID, GRID)
    with pytest.raises(CorruptionError, match=r"(cut|bad)\.npy cannot be read as .npy"):
        nostall.Arrays({"x": tmp_path / "bad.npy"})
    with pytest.raises(CorruptionError, match=r"cut\.npy cannot be read as .npy"):
        nostall.Arrays({"x": tmp_path / "cut.npy"})
    np.savez(tmp_path / "whole.npz", x=GRID)
    whole = (tmp_path / "whole.npz").read_bytes()
    for mark in (b"PK\1\2", b"\x93NUMPY"):
        (tmp_path / "damaged.npz").write_bytes(whole.replace(mark, b"\0" * len(mark)))
        with pytest.raises(CorruptionError, match=r"damaged\.npz"):
            nostall.Arrays(tmp_path / "damaged.npz")
    with pytest.raises(IoError, match=r"none\.npy does not exist"):
        nostall.Arrays({"x": tmp_path / "none.npy"})
    kept = pickle.dumps(nostall.Arrays({"x": tmp_path / "a.npy"}))
    np.save(tmp_path / "a.npy", GRID[:5])
    with pytest.raises((IoError, CorruptionError), match=r"a\.npy"):
        pickle.loads(kept)
