"""TFRecord files, written after their specification, are read and their checksums compared."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from checks import check_source
from protobuf import example, masked_crc32c, write_tfrecord
from samples import noise

import nostall
from nostall.errors import CorruptionError, IoError, UsageError


def examples(contents: list[bytes], first: int = 0, packed: bool = True) -> list[bytes]:
    return [
        example(
            {
                "image/height": 30,
                "image/encoded": content,
                "image/format": b"jpeg",
                "image/class/label": [first + i, 7],
                "image/score": 0.5,
            },
            packed,
        )
        for i, content in enumerate(contents)
    ]


def test_the_checksum_is_crc32c() -> None:
    # The check value of the CRC catalogue for "123456789", unmasked.
    masked = masked_crc32c(b"123456789")
    unmasked = (masked - 0xA282EAD8) & 0xFFFFFFFF
    assert (unmasked >> 17 | unmasked << 15) & 0xFFFFFFFF == 0xE3069283


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("check", ["lengths", "all"])
def test_examples(tmp_path: Path, packed: bool, check: str) -> None:
    contents = noise(50)
    write_tfrecord(tmp_path / "a.tfrecord", examples(contents, packed=packed))
    source = nostall.TFRecord(tmp_path / "a.tfrecord", check=check)
    check_source(source, contents, range(50))
    assert "a.tfrecord at offset" in source.describe(3)


def test_several_files_raw_records_and_large_ones(tmp_path: Path) -> None:
    contents = [*noise(40), np.random.default_rng(1).bytes(700_000), b""]
    for f in range(3):
        write_tfrecord(tmp_path / f"train-{f:05d}-of-00003", contents[f * 14 : f * 14 + 14])
    source = nostall.TFRecord(str(tmp_path / "train-*-of-00003"), values="raw", check="all")
    check_source(source, contents, [0] * 42)


def test_other_features_and_no_label(tmp_path: Path) -> None:
    records = [example({"jpeg": b"a" * n, "y": -n}) for n in range(1, 9)]
    write_tfrecord(tmp_path / "a.tfrecord", records)
    source = nostall.TFRecord(tmp_path / "a.tfrecord", image="jpeg", label="y")
    check_source(source, [b"a" * n for n in range(1, 9)], [-n for n in range(1, 9)])
    bare = nostall.TFRecord(tmp_path / "a.tfrecord", image="jpeg", label=None)
    assert not bare.index_reused and bare.labels.tolist() == [0] * 8


def test_places_are_kept_until_a_file_changes(tmp_path: Path) -> None:
    contents = noise(30)
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, examples(contents))
    assert not nostall.TFRecord(path).index_reused
    assert nostall.TFRecord(path).index_reused
    assert not nostall.TFRecord(path, check="all").index_reused
    changed = [bytes(len(c)) for c in contents]
    write_tfrecord(path, examples(changed))
    os.utime(path, (1, 1))  # both may be of one tick of the file system's clock
    source = nostall.TFRecord(path, check="all")
    assert not source.index_reused and source.read(5) == changed[5]


def test_a_wrong_checksum_is_named_with_record_and_offset(tmp_path: Path) -> None:
    contents = noise(20)
    path = tmp_path / "a.tfrecord"
    places = write_tfrecord(path, contents)
    data = bytearray(path.read_bytes())
    data[places[9] + 2] ^= 4
    path.write_bytes(data)
    start = places[9] - 12
    with pytest.raises(CorruptionError, match=rf"a\.tfrecord: record 9 at offset {start} .*CRC"):
        nostall.TFRecord(path, values="raw", check="all")
    data[places[9] + 2] ^= 4
    data[start] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=rf"record 9 at offset {start} .*length.*CRC"):
        nostall.TFRecord(path, values="raw")


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, examples(noise(4)))
    data = path.read_bytes()
    random = np.random.default_rng(2)
    for _ in range(200):
        flipped = bytearray(data)
        flipped[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
        path.write_bytes(flipped)
        with pytest.raises(CorruptionError, match=r"a\.tfrecord.* offset "):
            nostall.TFRecord(path, check="all", index=False)


def test_no_cut_inside_a_record_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    places = write_tfrecord(path, noise(4))
    data = path.read_bytes()
    whole = {0, *(p - 12 for p in places)}  # between two records a file has no mark
    for size in sorted(set(range(1, len(data), 97)) - whole):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptionError, match=r"a\.tfrecord: record \d at offset \d+ .*cut"):
            nostall.TFRecord(path, values="raw", index=False)


def test_what_is_no_tfrecord(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, noise(4))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(CorruptionError, match="no TFRecord file, or it is compressed"):
        nostall.TFRecord(path)
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="no samples"):
        nostall.TFRecord(path)
    with pytest.raises(IoError, match=r"none\.tfrecord"):
        nostall.TFRecord(tmp_path / "none.tfrecord")
    with pytest.raises(UsageError, match="names no file"):
        nostall.TFRecord(str(tmp_path / "*.none"))


def test_features_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    good = example({"image/encoded": b"x", "image/class/label": 1})
    bad = example({"image/encoded": b"x"})
    start = write_tfrecord(path, [good, bad])[1]
    with pytest.raises(
        UsageError, match=rf'offset {start} of .*a\.tfrecord has no feature "image/class/label"'
    ):
        nostall.TFRecord(path)
    assert len(nostall.TFRecord(path, label=None)) == 2
    with pytest.raises(
        UsageError,
        match=r'"picture" of bytes; the first record has: image/encoded, image/class/label\. image=',
    ):
        nostall.TFRecord(path, image="picture")
    unread = example({"image/encoded": b"x"}).replace(b"image/encoded", b"\xffmage/encoded")
    write_tfrecord(path, [unread])
    with pytest.raises(UsageError, match=r"has: nothing that can be named\. image= and"):
        nostall.TFRecord(path)
    start = write_tfrecord(path, [b"\xff" * 30])[0]
    with pytest.raises(CorruptionError, match=rf"offset {start} of .*is no tf\.train\.Example"):
        nostall.TFRecord(path)


@pytest.mark.parametrize("values", ["example", "raw"])
def test_the_files_own_checksums_are_compared_at_every_reading(tmp_path: Path, values: str) -> None:
    contents = noise(20, seed=1)
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, examples(contents))
    kinds: dict[str, object] = {"values": values, "index": False}
    source = nostall.TFRecord(path, **kinds)  # type: ignore[arg-type]
    # Known before any record was read.
    assert source.native.sums.all()
    if values == "example":
        assert [source.read(i) for i in range(20)] == contents
    _, offset, length = source.places
    bad = int(np.flatnonzero(np.array([len(c) for c in contents]))[4])
    with path.open("r+b") as file:
        file.seek(int(offset[bad]) + int(length[bad]) // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 16]))
    opened = nostall.TFRecord(path, **kinds)  # type: ignore[arg-type]
    with (
        nostall.DataLoader(opened, 5, tiers=[], output="numpy") as loader,
        pytest.raises(CorruptionError, match=rf"a\.tfrecord at offset {offset[bad]}.*CRC32C"),
    ):
        list(loader)


@pytest.mark.parametrize("values", ["example", "raw"])
def test_an_index_without_its_checksums_does_not_hold(tmp_path: Path, values: str) -> None:
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, examples([b"x" * 999] * 5))
    _, offset, length = nostall.TFRecord(path, values=values, index=False).places  # type: ignore[arg-type]
    data = bytearray(path.read_bytes())
    data[int(offset[3] + length[3] // 2)] ^= 1
    path.write_bytes(data)
    for reused in (False, True, False):
        source = nostall.TFRecord(path, values=values)  # type: ignore[arg-type]
        assert source.index_reused == reused
        with pytest.raises(CorruptionError, match="CRC32C"):
            source.read(3)
        if reused:
            Path(f"{source.index_file}.sums").unlink()


def test_an_index_that_no_checksums_were_found_with_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    record = {"image/encoded": b"x", "image/class/label": 1, "more": b"y" * 20_000}
    write_tfrecord(path, [example(record)] * 3)
    assert not nostall.TFRecord(path).native.sums.any()
    assert nostall.TFRecord(path).index_reused
