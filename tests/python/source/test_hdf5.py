"""HDF5 datasets as h5py writes them are read as h5py reads them."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from checks import check_epochs, check_source

import nostall
from nostall.errors import CorruptionError, IoError, UsageError

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 255, (50, 8, 6, 3), dtype=np.uint8)
LABELS = RANDOM.integers(-5, 1000, 50)


def make(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=PIXELS, **options)
        file["labels"] = LABELS
    return path


LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "contiguous": ({}, False),
    "chunks of one sample": ({"chunks": (1, 8, 6, 3)}, False),
    "chunks of seven": ({"chunks": (7, 8, 6, 3)}, False),
    "chunks that cut samples": ({"chunks": (4, 3, 6, 3)}, True),
    "gzip": ({"chunks": (7, 8, 6, 3), "compression": "gzip"}, True),
    "lzf and shuffled": ({"chunks": (7, 8, 6, 3), "compression": "lzf", "shuffle": True}, True),
    "checksums": ({"chunks": (7, 8, 6, 3), "fletcher32": True}, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(tmp_path: Path, layout: str) -> None:
    options, through_library = LAYOUTS[layout]
    source = nostall.HDF5(make(tmp_path / "a.h5", **options), "images", labels="labels")
    assert source.through_library == through_library
    assert source.pixel_shape == (8, 6, 3) and source.dtype == np.uint8
    check_source(source, [p.tobytes() for p in PIXELS], LABELS.tolist())
    assert "a.h5" in source.describe(3)


@pytest.mark.parametrize("options", [{}, {"chunks": (7, 8, 6, 3)}])
def test_a_user_block_before_the_file(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        file.create_dataset("images", data=PIXELS, **options)
    source = nostall.HDF5(tmp_path / "a.h5", "images")
    assert [source.read(i) for i in range(50)] == [p.tobytes() for p in PIXELS]
    assert source.through_library == ("chunks" in options)


def test_encoded_images_of_different_lengths(tmp_path: Path) -> None:
    contents = [RANDOM.bytes(int(n)) for n in [0, 1, *RANDOM.integers(0, 5000, 48)]]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("group/jpeg", (50,), h5py.vlen_dtype(np.uint8))
        for i, content in enumerate(contents):
            data[i] = np.frombuffer(content, np.uint8)
    source = nostall.HDF5(tmp_path / "a.h5", "group/jpeg", labels=list(range(50)))
    assert source.through_library
    check_source(source, contents, range(50))


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": (4,)}])
def test_strings_of_one_length_keep_their_zeros(tmp_path: Path, options: dict[str, Any]) -> None:
    contents = [b"ab\0\0", b"\0\0\0\0", b"abcd", b"\0bcd", b"a\0\0d"]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.array(contents, "S4"), **options)
    check_source(nostall.HDF5(tmp_path / "a.h5", "x"), contents, [0] * 5)


def test_floats_big_endian_numbers_and_compact_datasets(tmp_path: Path) -> None:
    values = RANDOM.normal(size=(9, 4)).astype(">f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = values
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((9, 4))
        h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32BE, space, plist)
        file["compact"][...] = values
    for name in ("plain", "compact"):
        source = nostall.HDF5(tmp_path / "a.h5", name)
        assert source.dtype == values.dtype
        check_source(source, [v.tobytes() for v in values], [0] * 9)


def test_what_was_never_written_has_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("x", (10, 4), np.uint8, chunks=(2, 4), fillvalue=7)
        data[3] = 1
    expected = [bytes([1] * 4) if i == 3 else bytes([7] * 4) for i in range(10)]
    check_source(nostall.HDF5(tmp_path / "a.h5", "x"), expected, [0] * 10)


def test_datasets_that_other_files_hold(tmp_path: Path) -> None:
    make(tmp_path / "a.h5")
    layout = h5py.VirtualLayout(PIXELS.shape, np.uint8)
    layout[...] = h5py.VirtualSource(str(tmp_path / "a.h5"), "images", PIXELS.shape)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("v", layout)
    source = nostall.HDF5(tmp_path / "v.h5", "v")
    assert source.through_library and source.read(9) == PIXELS[9].tobytes()


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_datasets_behind_external_links(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "parts").mkdir()
    make(tmp_path / "parts" / "a.h5", **options)
    other = np.zeros_like(PIXELS)
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file.create_dataset("images", data=other, **options)
        file["part"] = h5py.ExternalLink("parts/a.h5", "/")
        file["other"] = h5py.ExternalLink("parts/a.h5", "/images")
    source = nostall.HDF5(tmp_path / "main.h5", "part/images", labels="part/labels")
    check_source(source, [p.tobytes() for p in PIXELS], LABELS.tolist())
    assert "a.h5" in source.describe(3)
    both = nostall.HDF5(tmp_path / "main.h5", columns=["images", "other"])
    with nostall.DataLoader(both, 50, shuffle=False, tiers=[], output="numpy") as loader:
        (batch,) = loader
    assert np.array_equal(batch["other"], PIXELS) and np.array_equal(batch["images"], other)


def shown_by(path: Path, name: str, where: str) -> None:
    layout = h5py.VirtualLayout(PIXELS.shape, np.uint8)
    layout[...] = h5py.VirtualSource(where, name, PIXELS.shape)
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("v", layout)


@pytest.mark.parametrize("way", ["virtual", "moved", "blocks", "linked", "raw"])
def test_another_state_of_the_files_that_have_the_values(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "a0.h5"
    make(part)
    if way == "raw":
        PIXELS.tofile(part)
        with h5py.File(tmp_path / "v.h5", "w") as file:
            where = [(str(part), 0, PIXELS.nbytes)]
            file.create_dataset("v", PIXELS.shape, np.uint8, external=where)
    elif way == "linked":
        with h5py.File(tmp_path / "v.h5", "w") as file:
            file["linked"] = h5py.ExternalLink("a0.h5", "/images")
        shown_by(tmp_path / "v.h5", "linked", ".")
    elif way == "blocks":
        rows = h5py.h5s.create_simple(PIXELS.shape, (h5py.h5s.UNLIMITED, *PIXELS.shape[1:]))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        of_blocks = rows.copy()
        count = (h5py.h5s.UNLIMITED, 1, 1, 1)
        of_blocks.select_hyperslab((0, 0, 0, 0), count, PIXELS.shape, PIXELS.shape)
        one = h5py.h5s.create_simple(PIXELS.shape)
        plist.set_virtual(of_blocks, b"a%b.h5", b"images", one)
        with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
            h5py.h5d.create(file.id, b"v", h5py.h5t.NATIVE_UINT8, rows, plist)
    elif way == "moved":
        shown_by(tmp_path / "v.h5", "images", "/not/there/a0.h5")
    else:
        shown_by(tmp_path / "v.h5", "images", "a0.h5")
    path = tmp_path / "v.h5"
    # Files of the same names elsewhere, and what the parts show in turn, are of no account.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("a0.h5").write_bytes(b"no HDF5")
    before = nostall.HDF5(path, "v").native
    assert before.read(9) == PIXELS[9].tobytes()
    assert before.stamp == nostall.HDF5(path, "v").native.stamp
    if way == "raw":
        np.zeros_like(PIXELS).tofile(part)
    else:
        with h5py.File(part, "r+") as file:
            file["images"][9] = 0
    after = nostall.HDF5(path, "v").native
    assert after.stamp != before.stamp and after.fingerprint == before.fingerprint


# --------------------------------------------------------------------------------- bad datasets


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    make(tmp_path / "a.h5")
    with pytest.raises(UsageError, match=r"a\.h5 has no dataset 'image'; it has: images, labels"):
        nostall.HDF5(tmp_path / "a.h5", "image")
    with pytest.raises(UsageError, match=r"no dataset 'y'"):
        nostall.HDF5(tmp_path / "a.h5", "images", labels="y")


def test_labels_that_do_not_fit(tmp_path: Path) -> None:
    make(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["names"] = np.array(["cat"] * 50, "S3")
    with pytest.raises(UsageError, match=r"a\.h5: 3 labels for 50 samples"):
        nostall.HDF5(tmp_path / "a.h5", "images", labels=[1, 2, 3])
    with pytest.raises(
        UsageError, match=r"a\.h5: labels of type \|S3 are not integers: pass columns="
    ):
        nostall.HDF5(tmp_path / "a.h5", "images", labels="names")


def test_a_filter_that_is_not_installed(tmp_path: Path) -> None:
    blosc = 32001
    with h5py.File(tmp_path / "a.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2, 4))
        plist.set_filter(blosc, h5py.h5z.FLAG_OPTIONAL, (0,) * 7)
        space = h5py.h5s.create_simple((10, 4))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, plist)
    with pytest.raises(UsageError, match=r"a\.h5, dataset /?x: .*filter 32001 .*hdf5plugin"):
        nostall.HDF5(tmp_path / "a.h5", "x")


def test_kinds_that_are_not_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["scalar"] = 3
        file["empty"] = np.zeros((0, 4), np.uint8)
        file.create_dataset("reference", (3,), h5py.ref_dtype)
        named = np.dtype([("id", np.int32), ("name", h5py.string_dtype())])
        file["named"] = np.array([(1, "a"), (2, "b")], named)
        file.create_dataset("lists of texts", (3,), h5py.vlen_dtype(h5py.string_dtype()))
    for name, text in (
        ("scalar", "no samples"),
        ("empty", "no samples"),
        ("reference", "not read"),
        ("named", "not read"),
        ("lists of texts", "not read"),
    ):
        with pytest.raises(UsageError, match=rf"a\.h5, dataset {name}: .*{text}"):
            nostall.HDF5(tmp_path / "a.h5", name)


def test_files_that_are_no_hdf5_or_cut(tmp_path: Path) -> None:
    make(tmp_path / "a.h5")
    data = (tmp_path / "a.h5").read_bytes()
    for bad in (data[:-100], data[:300], b"x" * 5000, b""):
        (tmp_path / "b.h5").write_bytes(bad)
        with pytest.raises(CorruptionError, match=r"b\.h5 cannot be opened as HDF5"):
            nostall.HDF5(tmp_path / "b.h5", "images")
    with pytest.raises(IoError, match=r"none\.h5 does not exist"):
        nostall.HDF5(tmp_path / "none.h5", "images")


@pytest.mark.parametrize("filters", [{"compression": "gzip"}, {"fletcher32": True}])
def test_a_damaged_chunk_is_named(tmp_path: Path, filters: dict[str, Any]) -> None:
    make(tmp_path / "a.h5", chunks=(10, 8, 6, 3), **filters)
    with h5py.File(tmp_path / "a.h5") as file:
        chunk = file["images"].id.get_chunk_info(2)
    data = bytearray((tmp_path / "a.h5").read_bytes())
    middle = chunk.byte_offset + chunk.size // 2
    data[middle] ^= 0xFF
    (tmp_path / "a.h5").write_bytes(data)
    source = nostall.HDF5(tmp_path / "a.h5", "images")
    assert source.read(5) == PIXELS[5].tobytes()
    with pytest.raises(IoError, match=r"a\.h5, dataset images, index 25.*HDF5 library says"):
        source.read(25)
    with pytest.raises(CorruptionError, match=r"a\.h5, dataset images, index 2\d"):
        check_epochs(source, [p.tobytes() for p in PIXELS])


def test_a_file_that_goes_away_or_changes(tmp_path: Path) -> None:
    make(tmp_path / "a.h5", chunks=(10, 8, 6, 3), compression="gzip")
    source = nostall.HDF5(tmp_path / "a.h5", "images")
    (tmp_path / "a.h5").unlink()
    with pytest.raises(IoError, match=r"a\.h5, dataset images, index 1.*not exist"):
        source.read(1)
    make(tmp_path / "b.h5")
    placed = nostall.HDF5(tmp_path / "b.h5", "images")
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["images"][3] = 0
        file["more"] = PIXELS
    with pytest.raises(IoError, match=r"b\.h5.*(changed|written)"):
        placed.read(3)


def libraries() -> list[Any]:
    return [each for each in gc.get_objects() if type(each).__name__ == "_Library"]


def test_readers_are_let_go_of(tmp_path: Path) -> None:
    make(tmp_path / "a.h5", chunks=(10, 8, 6, 3), compression="gzip")
    others = libraries()  # held: a new one may have the place of one that is collected
    source = nostall.HDF5(tmp_path / "a.h5", "images")
    source.read(3)
    (gone,) = (weakref.ref(each) for each in libraries() if each not in others)
    del source
    gc.collect()
    assert gone() is None
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "uint16", "bool"])
def test_arrays_of_numbers_are_no_images_for_transforms(tmp_path: Path, dtype: str) -> None:
    from nostall import transforms as t

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.ones((6, 8, 8, 3), dtype)
    source = nostall.HDF5(tmp_path / "a.h5", "x")
    callables: dict[str, Any] = {"transforms": lambda image: image, "decode": True}
    for options in ({"transforms": [t.ToTensor()]}, {"transforms": [t.Resize((4, 4))]}, callables):
        for data in (source, nostall.Subset(source, range(4))):
            with pytest.raises(UsageError, match=f"arrays of {dtype}, .*open them with columns="):
                nostall.DataLoader(data, 2, tiers=[], output="numpy", **options)
    with nostall.DataLoader(
        nostall.HDF5(tmp_path / "a.h5", columns=["x"]), 2, tiers=[], output="numpy"
    ) as loader:
        assert next(iter(loader))["x"].dtype == dtype


def test_a_type_that_numpy_lacks_is_converted_by_the_library(tmp_path: Path) -> None:
    narrow = h5py.h5t.IEEE_F32LE.copy()
    narrow.set_fields(15, 7, 8, 0, 7)
    narrow.set_size(2)
    narrow.set_ebias(127)
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple(values.shape)
        data = h5py.h5d.create(file.id, b"x", narrow, space)
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    source = nostall.HDF5(tmp_path / "a.h5", columns=["x"])
    with nostall.DataLoader(source, 4, shuffle=False, tiers=[], output="numpy") as loader:
        (batch,) = loader
    assert np.array_equal(batch["x"], values)


@pytest.mark.parametrize("precision, offset", [(12, 4), (12, 0)])
def test_integers_of_fewer_bits_are_converted(tmp_path: Path, precision: int, offset: int) -> None:
    narrow = h5py.h5t.STD_I16LE.copy()
    narrow.set_precision(precision)
    narrow.set_offset(offset)
    values = np.arange(-6, 6, dtype=np.int16).reshape(4, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = h5py.h5d.create(file.id, b"x", narrow, h5py.h5s.create_simple(values.shape))
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    source = nostall.HDF5(tmp_path / "a.h5", "x")
    check_source(source, [v.tobytes() for v in values], [0] * 4)


@pytest.mark.parametrize("pad", [h5py.h5t.STR_NULLTERM, h5py.h5t.STR_SPACEPAD])
def test_texts_that_end_within_their_bytes_are_converted(tmp_path: Path, pad: int) -> None:
    ended = h5py.h5t.C_S1.copy()
    ended.set_size(6)
    ended.set_strpad(pad)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = h5py.h5d.create(file.id, b"x", ended, h5py.h5s.create_simple((2,)))
        behind = b"\0xyz" if pad == h5py.h5t.STR_NULLTERM else b"    "
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([b"ab" + behind, b"cd"], "S6"), ended)
    source = nostall.HDF5(tmp_path / "a.h5", "x")
    check_source(source, [b"ab\0\0\0\0", b"cd\0\0\0\0"], [0] * 2)


def test_types_that_numpy_has_are_read_from_the_file(tmp_path: Path) -> None:
    named = np.dtype([("id", "<i2"), ("at", ">f4", (2,)), ("ok", "?")], align=True)
    kinds: dict[str, Any] = {
        "half": "f2",
        "bool": "?",
        "enum": h5py.enum_dtype({"A": 0, "B": 1}, "i2"),
        "text": h5py.string_dtype("utf-8", 5),
        "bytes": "S4",
        "opaque": "V3",
        "named": named,
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, dtype in kinds.items():
            file.create_dataset(name, data=np.zeros((3, 2), dtype), dtype=dtype)
        tagged = h5py.h5t.create(h5py.h5t.OPAQUE, 5)
        tagged.set_tag(b"of another program")
        h5py.h5d.create(file.id, b"tagged", tagged, h5py.h5s.create_simple((3,))).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.zeros(3, "V5"), tagged
        )
        held = h5py.h5t.create(h5py.h5t.COMPOUND, 5 + 1)
        held.insert(b"tagged", 0, tagged)
        held.insert(b"flags", 5, h5py.h5t.STD_B8LE)
        there = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        there.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        for name, kind in {"held": held, "flags": h5py.h5t.STD_B16LE}.items():
            h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((3,)), there)
    for name in [*kinds, "tagged", "held", "flags"]:
        assert not nostall.HDF5(tmp_path / "a.h5", name).through_library, name


def test_a_file_that_the_program_has_open_can_be_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((3, 2), np.uint8)
    with h5py.File(tmp_path / "a.h5"):
        assert len(nostall.HDF5(tmp_path / "a.h5", "x")) == 3


def test_labels_beyond_64_bits_with_a_sign_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((2, 2), np.uint8)
        file["l"] = np.array([1, 2**63 + 5], np.uint64)
    with pytest.raises(
        UsageError, match=r"labels must be less than 2\*\*63, not 92233720368547758"
    ):
        nostall.HDF5(tmp_path / "a.h5", "x", labels="l")
