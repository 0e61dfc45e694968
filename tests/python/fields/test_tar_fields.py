"""Tar shards with all members of a key, beside what tarfile and PIL read."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from samples import npy, png, shard, wav

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import CorruptionError, UsageError

SAMPLES = 24
Members = list[tuple[str, bytes]]


def key_of(i: int) -> Members:
    """The members of one key: names that only extended headers hold, other files between them."""
    rng = np.random.default_rng(i)
    key = f"part.{i % 2}/{'long' * 40}é/{i:04}"
    return [
        (f"{key}.cls", b"%d\n" % (i * 3)),
        (f"{key}.JPG", png(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8))),
        (f"{key}.json", json.dumps({"id": i, "words": ["ü"] * (i % 3)}).encode()),
        (f"{key}.depth.npy", npy(rng.random((i % 4, 2), dtype=np.float32))),
        (f"{key}.pose.npy", npy(rng.integers(0, 9, (3, 3)))),
        (f"{key}.seg.png", png(rng.integers(0, 21, (20 + i, 30), dtype=np.uint8))),
        (f"{key}.txt", f"sample {i} é".encode()),
        (f"{key}.wav", wav(5 + i)),
        (f"{key}.xyz", rng.bytes(i)),
    ]


@pytest.fixture(scope="module", params=[tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    made = []
    for number, half in enumerate((range(SAMPLES // 2), range(SAMPLES // 2, SAMPLES))):
        members: Members = [("README", b"no member of any key"), ("._junk.jpg", b"of a Mac")]
        for i in half:
            members += key_of(i)
        made.append(shard(folder / f"{number}.tar", members, request.param))
    return made


def plainly(paths: list[Path]) -> list[dict[str, bytes]]:
    """WebDataset's samples in the order of the shards, by tarfile alone."""
    found: dict[str, dict[str, bytes]] = {}
    for path in paths:
        with tarfile.open(path) as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                if stem and ending:
                    file = tar.extractfile(member)
                    assert file is not None
                    found.setdefault(f"{folder}/{stem}", {})[ending.lower()] = file.read()
    return list(found.values())


def batches(
    source: nostall.TarShards, **options: Any
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """(samples, batch) of two shuffled epochs."""
    options = {"output": "numpy", "seed": 3, "epochs": 2, "tiers": [], **options}
    with nostall.DataLoader(source, 5, **options) as loader:
        for epoch in loader.epochs():
            order, seen = loader.plan.rank_epoch(epoch.index, 0)[0].tolist(), 0
            for batch in epoch:
                yield order[seen : seen + 5], batch
                seen += 5
            assert seen >= len(source)


@pytest.mark.parametrize("tiers", [[], ["ram:4MiB"]])
def test_all_members_are_what_tarfile_reads(shards: list[Path], tiers: list[str]) -> None:
    source = nostall.TarShards(shards, members="all", schema={"seg.png": f.Mask()})
    assert source.schema == nostall.Schema(
        {
            "cls": f.Scalar(codec="decimal"),
            "jpg": f.Image(),
            "json": f.Json(),
            "depth.npy": f.Array(dtype="float32", shape=(None, 2)),
            "pose.npy": f.Array(dtype="int64", shape=(3, 3)),
            "seg.png": f.Mask(),
            "txt": f.Text(),
            "wav": f.Audio(),
            "xyz": f.Bytes(),
        }
    )
    plain = plainly(shards)
    assert len(source) == len(plain) == SAMPLES
    images = {}
    for samples, batch in batches(source, tiers=tiers):
        for place, sample in enumerate(samples):
            wanted = plain[sample]
            assert batch["cls"][place] == int(wanted["cls"]) == sample * 3
            assert batch["jpg"].sample(place).tobytes() == wanted["jpg"]
            assert batch["json"][place] == json.loads(wanted["json"])
            for name in ("depth.npy", "pose.npy"):
                array = np.load(io.BytesIO(wanted[name]))
                got = batch[name][place] if name == "pose.npy" else batch[name].sample(place)
                np.testing.assert_array_equal(got, array)
            mask = np.asarray(Image.open(io.BytesIO(wanted["seg.png"])))
            np.testing.assert_array_equal(batch["seg.png"].sample(place), mask)
            assert batch["txt"][place] == wanted["txt"].decode()
            assert len(batch["wav"].sample(place)) == 5 + sample
            assert batch["xyz"].sample(place).tobytes() == wanted["xyz"]
            images[sample] = wanted["jpg"]
    assert len(images) == SAMPLES
    decoded = 0
    for samples, batch in batches(
        source.select(["jpg"]), tiers=tiers, transforms={"jpg": [t.CenterCrop(20)]}
    ):
        for place, sample in enumerate(samples):
            whole = np.asarray(Image.open(io.BytesIO(images[sample])))
            top, left = round(sample / 2), 5
            np.testing.assert_array_equal(
                batch["jpg"][place], whole[top : top + 20, left : left + 20]
            )
            decoded += 1
    assert decoded == 2 * SAMPLES


def test_named_members_and_what_is_read_of_them(shards: list[Path]) -> None:
    source = nostall.TarShards(
        shards, members={"label": "cls", "image": ".jpg;jpeg;png", "caption": ["txt", "text"]}
    )
    plain = plainly(shards)
    assert list(source.schema) == ["label", "image", "caption"]
    chosen = source.select(["caption", "label"])
    image = source.select(["image"])
    # The record of one member is the member; others reach from the first to the last one.
    assert image.sizes.tolist() == [len(sample["jpg"]) for sample in plain]
    assert [image.read(i) for i in range(SAMPLES)] == [sample["jpg"] for sample in plain]
    assert chosen.total_bytes == source.total_bytes > sum(map(len, plain[0].values()))
    assert len({source.fingerprint, chosen.fingerprint, image.fingerprint}) == 3
    for one in (source, chosen, image):
        copy = pickle.loads(pickle.dumps(one))
        assert (copy.fingerprint, copy.schema) == (one.fingerprint, one.schema)
    some = nostall.Subset(source, [7, 2])
    with nostall.DataLoader(some, 2, epochs=1, shuffle=False, fields=["caption"]) as loader:
        assert [batch["caption"] for batch in loader] == [["sample 7 é", "sample 2 é"]]
    for samples, batch in batches(source, fields=["caption", "label"], tiers=["ram:1MiB"]):
        assert list(batch) == ["caption", "label"]
        assert batch["caption"] == [f"sample {i} é" for i in samples]
        assert batch["label"].tolist() == [i * 3 for i in samples]


def test_a_list_names_fields_by_their_endings(shards: list[Path]) -> None:
    schema = {"seg.png": f.Mask()}
    told = r"field seg\.png has \.png files, of labels or of pictures"
    names = ["JPG", ".seg.png", "cls"]
    with pytest.raises(UsageError, match=told):
        nostall.TarShards(shards, members=names, index=False)
    listed = nostall.TarShards(shards, members=names, schema=schema, index=False)
    endings = {"JPG": "jpg", "seg.png": "seg.png", "cls": "cls"}
    named = nostall.TarShards(shards, members=endings, schema=schema, index=False)
    assert listed.schema == named.schema
    assert list(listed.schema) == ["JPG", "seg.png", "cls"]
    assert listed.read(3) == named.read(3)


def test_places_are_kept_with_the_fields_that_were_found(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", key_of(0) + key_of(1))
    schema = {"seg.png": f.Mask()}
    first = nostall.TarShards(path, members="all", schema=schema)
    again = nostall.TarShards(path, members="all", schema={"xyz": f.Bytes(), **schema})
    assert again.index_reused and not first.index_reused
    assert (again.schema, again.fingerprint) == (first.schema, first.fingerprint)
    assert again.select(["xyz"]).read(1) == key_of(1)[-1][1]
    spaced = {"a found b": "txt", "é": "json"}
    assert not nostall.TarShards(path, members=spaced).index_reused
    assert nostall.TarShards(path, members=spaced).index_reused
    # Of version 1: made anew.
    index = Path(first.index_file)
    stored = bytearray(index.read_bytes())
    stored[4] = 1
    index.write_bytes(stored)
    assert not nostall.TarShards(path, members=spaced).index_reused


def test_a_missing_member_is_refused_or_filled(tmp_path: Path) -> None:
    members = [("1.txt", b"one"), ("1.cls", b"1"), ("2.cls", b"2"), ("3.txt", b"three")]
    path = shard(tmp_path / "a.tar", members)
    wanted = {"text": "txt", "label": "cls"}
    with pytest.raises(
        UsageError,
        match=r'a\.tar "2\.cls" .*no member \.txt \(field text\), which holds for 1 key .*fill=',
    ):
        nostall.TarShards(path, members=wanted)
    with pytest.raises(UsageError, match=r'"3\.txt" .*no member \.cls \(field cls\)'):
        nostall.TarShards(path, members="all", schema={"txt": f.Text(fill="")})
    schema = {"text": f.Text(fill="none"), "label": f.Scalar(codec="decimal", fill=-1)}
    source = nostall.TarShards(path, members=wanted, schema=schema)
    for chosen in (source, source.select(["label", "text"]), source.select(["text"])):
        for samples, batch in batches(chosen, fields=list(chosen.schema)):
            assert batch["text"] == [["one", "none", "three"][i] for i in samples]
            if "label" in batch:
                assert batch["label"].tolist() == [[1, 2, -1][i] for i in samples]
    assert source.select(["text"]).sizes.tolist() == [3, 0, 5]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            [("a.txt", b""), ("b.txt", b""), ("a.cls", b"1")],
            r"members of 'a' do not follow .*\.cls",
        ),
        ([("a.txt", b"1"), ("a.cls", b"1"), ("a.txt", b"2")], r"'a' has two members .*\.txt and"),
        (
            [("a.txt", b"1"), ("a.text", b"2")],
            r"'a' has two members .*\.txt and \.text, the second",
        ),
        ([("a.jpg", b""), ("b", b""), (".txt", b"")], r"no samples: .*\.txt, \.text, \.cls"),
    ],
)
def test_keys_that_make_no_sample_are_refused(tmp_path: Path, members: Members, words: str) -> None:
    path = shard(tmp_path / "a.tar", members)
    with pytest.raises(UsageError, match=words):
        nostall.TarShards(path, members={"text": "txt;text", "label": "cls"})


def test_a_key_may_come_again_in_another_shard(tmp_path: Path) -> None:
    members = [("a.txt", b"1"), ("b.txt", b"2"), ("b.other", b""), ("a.other", b"")]
    paths = [shard(tmp_path / f"{i}.tar", members) for i in range(2)]
    source = nostall.TarShards(paths, members={"text": "txt"})
    assert [source.read(i) for i in range(4)] == [b"1", b"2"] * 2


def test_a_cut_archive_and_a_bad_member_are_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", key_of(0) + key_of(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:4000])
    with pytest.raises(CorruptionError, match=r"a\.tar is no sound tar archive"):
        nostall.TarShards(path, members="all", index=False)
    path.write_bytes(whole.replace(b'"id": 1', b'"id":: '))
    source = nostall.TarShards(path, members="all", schema={"seg.png": f.Mask()})
    with pytest.raises(CorruptionError, match=r"a\.tar .part\.1.*sample 1.*field json: it is not"):
        list(batches(source))
    path.write_bytes(whole.replace(b"NUMPY", b"NOMPY"))
    os.utime(path, (1, 1))  # both may be of one tick of the file system's clock
    with pytest.raises(CorruptionError, match=r"a\.tar .*field depth\.npy"):
        nostall.TarShards(path, members="all")


def test_arrays_of_every_order_are_read(tmp_path: Path) -> None:
    rows = [np.arange(6, dtype="<i4").reshape(2, 3) + i for i in range(4)]
    stored = [rows[0], np.asfortranarray(rows[1]), rows[2].astype(">i4"), rows[3].T.copy().T]
    path = shard(tmp_path / "a.tar", [(f"{i}.npy", npy(a)) for i, a in enumerate(stored)])
    source = nostall.TarShards(path, members="all")
    assert source.schema["npy"] == f.Array(dtype="int32", shape=(2, 3))
    for order, batch in batches(source, on_error="substitute"):
        assert np.array_equal(batch["npy"], [rows[sample] for sample in order])


def test_arrays_that_differ_need_a_schema(tmp_path: Path) -> None:
    arrays = [npy(np.zeros(3)), npy(np.zeros(3, np.int8))]
    path = shard(tmp_path / "a.tar", [(f"{i}.npy", array) for i, array in enumerate(arrays)])
    with pytest.raises(UsageError, match=r'"1\.npy".*int8 with 1 .* of float64 .*give schema='):
        nostall.TarShards(path, members="all")
    mixed = shard(tmp_path / "b.tar", [("0.npy", arrays[0]), ("1.txt", b"")])
    with pytest.raises(UsageError, match=r"field x \(\.npy, \.txt\) are of several kinds"):
        nostall.TarShards(mixed, members={"x": "npy;txt"})
    source = nostall.TarShards(mixed, members={"x": "npy;txt"}, schema={"x": f.Bytes()})
    assert source.read(0) == arrays[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"members": "jpg"}, 'members must be "all", '),
        ({"members": 3}, 'members must be "all", '),
        ({"members": {}}, "must name 1 to"),
        ({"members": []}, "must name 1 to"),
        ({"members": ["jpg;png"]}, "a list has one ending for each field"),
        ({"members": ["txt", "txt"]}, "an ending is named twice"),
        ({"members": {"a": ""}}, "field 'a' needs endings"),
        ({"members": {"a": "jpg", "b": "png;jpg"}}, r"\.jpg is named twice \(a, b\)"),
        ({"members": {"a": "txt"}, "image": ["jpg"]}, "image= and label= are not for it"),
        ({"members": {"a": "txt"}, "label": None}, "image= and label= are not for it"),
        ({"members": {"a": "txt"}, "schema": {"b": f.Text()}}, "field b, which has no members"),
        ({"schema": {"b": f.Text()}}, "schema= says the kinds of fields, which members= names"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    path = shard(tmp_path / "a.tar", [("a.txt", b"1")])
    with pytest.raises(UsageError, match=words):
        nostall.TarShards(path, **arguments)
