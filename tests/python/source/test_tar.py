"""Tar shards as Python's tarfile writes them are read as tarfile reads them."""

from __future__ import annotations

import gzip
import io
import logging
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import check_epochs, check_source
from samples import add, noise, shard

import nostall
from nostall import _native
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._records import shard_paths

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def webdataset(path: Path, contents: list[bytes], first: int = 0, form: int = 2) -> list[int]:
    """A shard with the members of each sample in turn, among others; the labels."""
    members = []
    for i, content in enumerate(contents, first):
        members += [
            (f"{i:06d}.cls", str(i * 3).encode()),
            (f"{i:06d}.jpg", content),
            (f"{i:06d}.json", b'{"a": 1}'),
            (f"{i:06d}.seg.png", b"not the sample"),
        ]
    shard(path, members, form)
    return [i * 3 for i in range(first, first + len(contents))]


def names_of(source: nostall.TarShards) -> list[str]:
    """Of all members, as the scan finds them."""
    found = _native.scan_tar(storage=source.storage, keep="", threads=1, progress=None)
    return list(found[3])


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_of_tarfile(tmp_path: Path, form: int) -> None:
    contents = noise(40, form)
    labels = webdataset(tmp_path / "a.tar", contents, form=form)
    check_source(nostall.TarShards(tmp_path / "a.tar"), contents, labels)


def test_a_folder_a_pattern_and_a_list_of_shards(tmp_path: Path) -> None:
    contents = noise(60)
    labels = []
    for s in range(3):
        labels += webdataset(tmp_path / f"s-{s}.tar", contents[s * 20 : s * 20 + 20], s * 20)
    paths = [tmp_path / f"s-{s}.tar" for s in range(3)]
    for shards in (tmp_path, str(tmp_path / "s-*.tar"), paths):
        source = nostall.TarShards(shards, index=False)
        check_source(source, contents, labels)
    assert "s-1.tar" in source.describe(25) and "000025.jpg" in source.describe(25)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_other_letters_and_no_label(tmp_path: Path, form: int) -> None:
    names = [
        "a" * 300 + ".jpg",
        "folder/" * 30 + "x.png",
        "été/日本.webp",
        "b/" + "c" * 99 + ".JPG",
    ]
    contents = noise(len(names))
    shard(tmp_path / "a.tar", list(zip(names, contents, strict=True)), form)
    with pytest.raises(UsageError, match=r"no sample has a label .*\.cls.* label=None"):
        nostall.TarShards(tmp_path / "a.tar")
    source = nostall.TarShards(tmp_path / "a.tar", label=None)
    check_source(source, contents, [0] * len(names))
    assert names_of(source) == names
    assert f'a.tar "{"a" * 40}' in source.describe(0)


def test_ustar_splits_long_names(tmp_path: Path) -> None:
    name = "d" * 90 + "/" + "e" * 90 + ".jpg"
    shard(tmp_path / "a.tar", [(name, b"x")], tarfile.USTAR_FORMAT)
    assert names_of(nostall.TarShards(tmp_path / "a.tar", label=None)) == [name]


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo("no.jpg")
            member.type = kind
            tar.addfile(member)
        link = tarfile.TarInfo("folder")
        link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
        tar.addfile(link)
        add(tar, "yes.jpg", b"sample")
    source = nostall.TarShards(tmp_path / "a.tar", label=None)
    assert [source.read(i) for i in range(len(source))] == [b"sample"]


def linked(path: Path, kind: bytes, target: str, name: str = "b.jpg") -> Path:
    with tarfile.open(path, "w") as tar:
        add(tar, "a.jpg", b"sample")
        add(tar, "a.cls", b"3")
        link = tarfile.TarInfo(name)
        link.type, link.linkname = kind, target
        tar.addfile(link)
        add(tar, "b.cls", b"4")
    return path


def test_files_that_tar_stored_as_hard_links_are_samples(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    contents = noise(6)
    for i in range(12):
        image, label = (tmp_path / f"files/{'d' * 200}{i:02d}.{end}" for end in ("jpg", "cls"))
        if i < 6:
            image.write_bytes(contents[i])
            label.write_text(str(i))
        else:
            image.hardlink_to(str(image).replace(f"{i:02d}.", f"{11 - i:02d}."))
            label.hardlink_to(str(label).replace(f"{i:02d}.", f"{11 - i:02d}."))
    for form in ("gnu", "pax"):
        path = tmp_path / f"{form}.tar"
        subprocess.run(
            ["tar", f"--format={form}", "--sort=name", "-cf", path, "-C", tmp_path / "files", "."],
            check=True,
        )
        source = nostall.TarShards(path)
        labels = [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
        check_source(source, [contents[i] for i in labels], labels)
        assert source.describe(7).split(" at ")[0] == source.describe(4).split(" at ")[0]
        with pytest.raises(UsageError, match=r"\.tar: member .*06\.cls' \(and 11 more\) is a link"):
            nostall.TarShards(path, members=["jpg", "cls"])


def test_files_that_tar_was_given_twice_are_samples_once(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in {"a.jpg": b"one", "a.cls": b"1", "b.jpg": b"two", "b.cls": b"2"}.items():
        (folder / name).write_bytes(content)
    given = [["a.jpg", "a.cls", "b.jpg", "b.cls", "a.jpg", "a.jpg"], [".", "a.jpg", "./b.cls"]]
    for form in ("gnu", "pax", "ustar"):
        for names in given:
            path = tmp_path / f"{form}-{len(names)}.tar"
            command = ["tar", f"--format={form}", "--sort=name", "-cf", path, "-C", folder, *names]
            subprocess.run(command, check=True)
            with tarfile.open(path) as tar:
                assert any(member.islnk() for member in tar)
            check_source(nostall.TarShards(path, index=False), [b"one", b"two"], [1, 2])
            check_source(nostall.TarShards(path, label=None, index=False), [b"one", b"two"], [0, 0])
            members = nostall.TarShards(path, members=["jpg", "cls"], index=False)
            assert len(members) == 2


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_that_are_not_followed_are_refused(tmp_path: Path, kind: bytes) -> None:
    told = r"a\.tar: member 'b\.(jpg|idx)' is a link, .* tar --dereference --hard-dereference"
    path = linked(tmp_path / "a.tar", kind, "b.cls")
    for options in ({}, {"members": ["jpg", "cls"]}, {"members": "all"}):
        with pytest.raises(UsageError, match=told):
            nostall.TarShards(path, **options)
    with pytest.raises(UsageError, match=told):
        nostall.TarShards(linked(path, kind, "b.cls", "b.idx"), label="idx")
    # What is not asked for may be one, also amid the members of a key.
    linked(path, kind, "b.cls", "z.txt")
    assert len(nostall.TarShards(path, image=["jpg"])) == 1
    assert len(nostall.TarShards(path, members={"label": "cls"})) == 2


def test_what_gnu_tar_writes(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    contents = noise(20)
    for i, content in enumerate(contents):
        (folder / f"{i:02d}.png").write_bytes(content)
    subprocess.run(
        ["tar", "--sort=name", "-cf", str(tmp_path / "a.tar"), "-C", str(folder), "."], check=True
    )
    check_source(nostall.TarShards(tmp_path / "a.tar", label=None), contents, [0] * 20)


def test_which_members_are_samples_and_labels(tmp_path: Path) -> None:
    members = [("a.input.png", b"in"), ("a.target.png", b"out"), ("a.index", b"4")]
    path = shard(tmp_path / "a.tar", members)
    source = nostall.TarShards(path, image=["target.png"], label="index")
    assert (source.read(0), source.labels.tolist()) == (b"out", [4])
    by_name = nostall.TarShards(path, image=["input.png"], label=lambda name: ord(name))
    assert by_name.labels.tolist() == [ord("a")]
    assert by_name.index_file == ""  # a function cannot be compared with the one of last time
    index = tmp_path / "index"
    nostall.TarShards(path, image=["input.png"], label=lambda name: 5, index=index)
    bare = nostall.TarShards(path, image=["input.png"], label=None, index=index)
    assert bare.labels.tolist() == [0]


def test_endings_are_compared_without_case_and_dot(tmp_path: Path) -> None:
    members = [("a.Input.PNG", b"x"), ("a.CLS", b"7"), ("b.input.png", b"y"), ("b.cls", b"8")]
    path = shard(tmp_path / "a.tar", members)
    for image, label in (("INPUT.png", "CLS"), (".input.png", ".cls"), ("Input.PNG", "Cls")):
        source = nostall.TarShards(path, image=[image], label=label, index=False)
        assert [source.read(i) for i in range(2)] == [b"x", b"y"]
        assert source.labels.tolist() == [7, 8]


def test_without_samples_the_endings_are_named_and_nothing_is_kept(tmp_path: Path) -> None:
    members = [("a.tif", b"x"), ("a.txt", b"7"), ("b.tif", b"x"), ("folder/README", b"")]
    path = shard(tmp_path / "a.tar", members)
    told = (
        r"a\.tar has no samples: no member ends with \.jpg, \.png; the first .* are \.tif, \.txt$"
    )
    for options in ({"image": ["jpg", "png"]}, {"members": {"picture": "jpg;png"}}):
        with pytest.raises(UsageError, match=told):
            nostall.TarShards(path, **options)
    with pytest.raises(UsageError, match=r"no samples: .*; none has one$"):
        nostall.TarShards(shard(path, [("README", b"")]))
    assert os.listdir(tmp_path) == ["a.tar"]


def test_places_are_kept_until_a_shard_changes(tmp_path: Path) -> None:
    contents = noise(30)
    labels = webdataset(tmp_path / "a.tar", contents)
    assert not nostall.TarShards(tmp_path / "a.tar").index_reused
    again = nostall.TarShards(tmp_path / "a.tar")
    assert again.index_reused
    check_source(again, contents, labels)
    assert not nostall.TarShards(tmp_path / "a.tar", label=None).index_reused
    changed = [bytes(len(c)) for c in contents]
    webdataset(tmp_path / "a.tar", changed)
    os.utime(tmp_path / "a.tar", (1, 1))  # both may be of one tick of the file system's clock
    source = nostall.TarShards(tmp_path / "a.tar")
    assert not source.index_reused
    assert source.read(7) == changed[7]


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_index_is_made_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    contents = noise(30)
    webdataset(tmp_path / "a.tar", contents)
    index = Path(nostall.TarShards(tmp_path / "a.tar").index_file)
    good = index.read_bytes()
    bad = {
        "cut": good[: len(good) // 2],
        "flipped": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "other": b"x" * 300,
    }
    index.write_bytes(bad[damage])
    with caplog.at_level(logging.INFO, "nostall"):
        source = nostall.TarShards(tmp_path / "a.tar")
    assert not source.index_reused and str(index) in caplog.text
    assert [source.read(i) for i in range(30)] == contents
    assert index.read_bytes() == good


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = noise(10)
    webdataset(tmp_path / "a.tar", contents)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert nostall.TarShards(tmp_path / "a.tar").index_file.startswith(str(tmp_path / "cache"))
    assert nostall.TarShards(tmp_path / "a.tar").index_reused


# ---------------------------------------------------------------------------------- bad archives


def test_a_damaged_header_is_named_with_its_offset(tmp_path: Path) -> None:
    webdataset(tmp_path / "a.tar", noise(10))
    data = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(tmp_path / "a.tar") as tar:
        offset = tar.getmembers()[9].offset
    data[offset + 130] ^= 1  # in the size
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(CorruptionError, match=rf"a\.tar.*damaged header at offset {offset}"):
        nostall.TarShards(tmp_path / "a.tar")


def test_no_cut_goes_unnoticed(tmp_path: Path) -> None:
    webdataset(tmp_path / "a.tar", noise(6))
    data = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar.getmembers())
    cut = tmp_path / "cut.tar"
    for size in range(512, end + 1, 256):
        cut.write_bytes(data[:size])
        with pytest.raises(CorruptionError, match=r"cut\.tar.*(cut off|ends without).*at offset"):
            nostall.TarShards(cut, index=False)


def test_every_flipped_header_byte_is_found_or_harmless(tmp_path: Path) -> None:
    contents = noise(5)
    labels = webdataset(tmp_path / "a.tar", contents, form=tarfile.PAX_FORMAT)
    data = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        headers = [m.offset for m in tar.getmembers()]
    random = np.random.default_rng(1)
    bad = tmp_path / "bad.tar"
    refused = 0
    for _ in range(200):
        at = int(random.choice(headers)) + int(random.integers(512))
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(random.integers(8))
        bad.write_bytes(flipped)
        try:
            source = nostall.TarShards(bad, index=False)
        except CorruptionError as error:
            assert "bad.tar" in str(error) and "offset" in str(error)
            refused += 1
            continue
        assert [source.read(i) for i in range(len(source))] == contents
        assert source.labels.tolist() == labels
    assert refused > 150


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar"])
def test_a_compressed_archive_is_refused(tmp_path: Path, name: str) -> None:
    webdataset(tmp_path / "b.tar", noise(4))
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "b.tar").read_bytes()))
    with pytest.raises(UsageError, match=rf"{name} is compressed"):
        nostall.TarShards(tmp_path / name)


def test_members_with_holes_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "holes.jpg").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
    for form in ("gnu", "pax"):
        archive = tmp_path / f"{form}.tar"
        subprocess.run(
            [
                "tar",
                f"--format={form}",
                "-S",
                "-cf",
                str(archive),
                "-C",
                str(tmp_path),
                "holes.jpg",
            ],
            check=True,
        )
        with pytest.raises(UsageError, match=r"holes\.jpg.*holes"):
            nostall.TarShards(archive)


def test_a_label_that_is_no_number(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("k.jpg", b"x"), ("k.cls", b"cat")])
    with pytest.raises(CorruptionError, match=r"a\.tar.*'k'.*'cat' at offset 1536.*not a number"):
        nostall.TarShards(path)
    missing = [("k.jpg", b"x"), ("k.cls", b"1"), ("l.jpg", b"y")]
    with pytest.raises(CorruptionError, match=r"'l'.*no label"):
        nostall.TarShards(shard(tmp_path / "b.tar", missing))


def test_two_images_of_one_sample(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("k.jpg", b"x"), ("k.png", b"y")])
    with pytest.raises(UsageError, match=r"'k' has two images.*offset 1536"):
        nostall.TarShards(path)


def test_no_image_and_no_archive(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("k.txt", b"x")])
    with pytest.raises(UsageError, match=r"a\.tar has no samples"):
        nostall.TarShards(path)
    with pytest.raises(IoError, match=r"none\.tar"):
        nostall.TarShards(tmp_path / "none.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty names no file"):
        nostall.TarShards(tmp_path / "empty")


@pytest.mark.parametrize("pattern", ["a-{000..099}.tar", "s3://bucket/a-{1,2}.tar"])
def test_braces_of_a_pattern_are_refused_with_what_to_write(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match=r"braces are not expanded: write a pattern with \*"):
        nostall.TarShards(pattern if "://" in pattern else tmp_path / pattern)


def test_a_folder_of_several_splits_is_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of these none is what another one is tested on.
    for name in ("train-0.tar", "training-1.tar", "test-train-2.tar", "testbed.tar"):
        webdataset(tmp_path / name, noise(2))
    assert len(nostall.TarShards(tmp_path)) == 8
    monkeypatch.chdir(tmp_path.parent)
    for name in ("val-0.tar", "set_Test_0.tar"):
        webdataset(tmp_path / name, noise(2))
        for folder in (tmp_path, f"./{tmp_path.name}", f"{tmp_path.name}//", f"{tmp_path}/."):
            told = "has files of several splits, train and (val|test): .* as .*train\\*"
            with pytest.raises(UsageError, match=told):
                nostall.TarShards(folder)
        assert len(nostall.TarShards(f"{tmp_path}/train-*")) == 2
        assert len(nostall.TarShards(sorted(tmp_path.glob("*.tar")))) == 10
        (tmp_path / name).unlink()


def test_a_pattern_finds_the_same_objects_as_files(tmp_path: Path) -> None:
    from obstore import put
    from obstore.store import MemoryStore

    store, root = MemoryStore(), tmp_path / "set"
    names = ["train-0.tar", ".train-1.tar", "train-old/x.tar", "deep/a/b/y.tar", "deep/z.tar"]
    names += [".tmp/train-2.tar", "deep/.tmp/w.tar", "train-3.tar/part"]
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shard(path, [("k.jpg", b"x")])
        put(store, f"set/{name}", path.read_bytes())
    for pattern, wanted in {
        "*.tar": ["train-0.tar"],
        "train-*": ["train-0.tar"],
        "train-*/*": ["train-3.tar/part", "train-old/x.tar"],
        ".t*.tar": [".train-1.tar"],
        ".*/*.tar": [".tmp/train-2.tar"],
        "deep/*/b/[x-y].tar": ["deep/a/b/y.tar"],
        "deep/**/?.tar": ["deep/a/b/y.tar", "deep/z.tar"],
        "**/*.tar": ["deep/a/b/y.tar", "deep/z.tar", "train-0.tar", "train-old/x.tar"],
        "deep/**": ["deep/a/b/y.tar", "deep/z.tar"],
        "**.tar": ["train-0.tar"],
    }.items():
        here = shard_paths(f"{root}/{pattern}", (".tar",))
        there = shard_paths(f"s3://b/set/{pattern}", (".tar",), store)
        assert here == [f"{root}/{name}" for name in wanted], pattern
        assert there == [f"s3://b/set/{name}" for name in wanted], pattern


def test_all_that_lies_below_a_folder_is_of_one_split(tmp_path: Path) -> None:
    from obstore import put
    from obstore.store import MemoryStore

    store = MemoryStore()
    for name in ("train/a.tar", "test/b.tar"):
        (tmp_path / name).parent.mkdir()
        path = shard(tmp_path / name, [("k.jpg", b"x")])
        put(store, f"set/{name}", path.read_bytes())
    told = "has files of several splits, train and test: .* as "
    with pytest.raises(UsageError, match=f"{told}{tmp_path}/train/$"):
        nostall.TarShards(tmp_path / "**/*.tar")
    for url in ("s3://b/set/", "s3://b/set/**/*.tar"):
        with pytest.raises(UsageError, match=f"{told}s3://b/set/train/$"):
            nostall.TarShards(url, store=store)
    assert len(nostall.TarShards("s3://b/set/train/", store=store, label=None, index=False)) == 1


def test_what_a_pattern_names_before_any_folders_is_no_split(tmp_path: Path) -> None:
    from obstore import put
    from obstore.store import MemoryStore

    store, names = MemoryStore(), ["dev-2024/train/x/a.tar", "test/train/b.tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        path = shard(tmp_path / name, [("k.jpg", b"x")])
        put(store, f"set/{name}", path.read_bytes())
    for root, given in ((str(tmp_path), None), ("s3://b/set", store)):
        for pattern in ("*/train/**/*.tar", "*/t*/**"):
            found = shard_paths(f"{root}/{pattern}", (".tar",), given)
            assert found == [f"{root}/{name}" for name in names]
        with pytest.raises(
            UsageError, match=f"{root} has .* train and dev, test: .* as {root}/dev"
        ):
            shard_paths(f"{root}/**/*.tar", (".tar",), given)
    # However it is written.
    shard(tmp_path / "test/train/test-c.tar", [("k.jpg", b"x")])
    shard(tmp_path / "test/train/train-d.tar", [("k.jpg", b"x")])
    told = f"{tmp_path}/ has .* train and test: .* as {tmp_path}/test/train/train\\*"
    with pytest.raises(UsageError, match=told):
        shard_paths(f"{tmp_path}//*//train/**", (".tar",))


def test_any_folders_are_each_of_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "[set]"
    for name in ("[set]/2024/a.tar", "[set]/.old/b.tar", "elsewhere/deep/c.tar"):
        (tmp_path / name).parent.mkdir(parents=True)
        shard(tmp_path / name, [("k.jpg", b"x")])
    for link, to in {
        "loop": ".", "2024/up": "../..", "2023": "2024", "far": "../elsewhere", "kept": ".old",
    }.items():  # fmt: skip
        (root / link).symlink_to(to)
    wanted = ["2024/a.tar", "far/deep/c.tar", "kept/b.tar"]
    for pattern in ("**/*.tar", "**", "*/**/*.tar", "**/**/?.tar"):
        found = shard_paths(f"{tmp_path}/[[]set]/{pattern}", (".tar",))
        assert found == [f"{root}/{name}" for name in wanted], pattern
    monkeypatch.chdir(root)
    assert shard_paths("**/*.tar", (".tar",)) == wanted
    assert shard_paths("loop/**/a.tar", (".tar",)) == ["loop/2024/a.tar"]


def test_a_name_with_braces_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "a{1,2}.tar"
    webdataset(path, noise(3))
    assert len(nostall.TarShards(str(path))) == 3


def test_an_archive_that_changes_while_it_is_read(tmp_path: Path) -> None:
    contents = noise(20)
    webdataset(tmp_path / "a.tar", contents)
    source = nostall.TarShards(tmp_path / "a.tar")
    webdataset(tmp_path / "a.tar", [bytes(len(c)) for c in contents])
    os.utime(tmp_path / "a.tar", (1, 1))  # both may be of one tick of the file system's clock
    with pytest.raises((IoError, CorruptionError), match=r"a\.tar"):
        source.read(3)
    with pytest.raises((IoError, CorruptionError), match=r"a\.tar"):
        check_epochs(source, contents)


def test_a_key_that_comes_again_is_refused(tmp_path: Path) -> None:
    """As tar -r makes it: the label of the later member would be that of the earlier image."""
    members = [("a.png", b"1"), ("a.cls", b"1"), ("b.png", b"2"), ("b.cls", b"2")]
    for more, told in (
        ([("a.png", b"3"), ("a.cls", b"7")], "sample 'a' has two images"),
        ([("a.cls", b"7")], "sample 'a' has two labels"),
    ):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name, content in [*members, *more]:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        with pytest.raises(UsageError, match=told):
            nostall.TarShards(tmp_path / "a.tar", index=False)


@pytest.mark.parametrize("label", [None, len])
def test_a_key_may_come_again_where_no_text_is_found_by_it(tmp_path: Path, label: Any) -> None:
    path = shard(tmp_path / "a.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3")])
    source = nostall.TarShards(path, label=label)
    assert [source.read(i) for i in range(3)] == [b"1", b"2", b"3"]
    twice = shard(tmp_path / "b.tar", [("a.jpg", b"1"), ("a.jpg", b"3")])
    with pytest.raises(UsageError, match=r"two images.*: each key may be there once"):
        nostall.TarShards(twice, label=label)
    pairs = [("a.jpg", b"1"), ("a.png", b"3"), ("b.jpg", b"2"), ("b.png", b"4")]
    for members in (pairs, [*pairs[::2], *pairs[1::2]]):
        two = shard(tmp_path / "c.tar", members)
        with pytest.raises(UsageError, match=r"sample 'a' has two images.*image=\['png'\]"):
            nostall.TarShards(two, label=label, index=False)
        masks = nostall.TarShards(two, label=label, image=["png"], index=False)
        assert [masks.read(i) for i in range(2)] == [b"3", b"4"]


def test_an_index_by_older_rules_is_made_again(tmp_path: Path) -> None:
    """A node that has one is to find what a node without one finds."""
    members = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.png", b"3"), ("b.png", b"4")]
    path, index = shard(tmp_path / "a.tar", members), tmp_path / "index"

    def store_older(image: list[str]) -> int:
        source = nostall.TarShards(path, label=None, image=image[:1], index=False)
        _, offset, size, names, *_ = _native.scan_tar(
            storage=source.storage, keep="", threads=1, progress=None
        )
        chosen = [i for i, name in enumerate(names) if name.endswith(tuple(image))]
        stamp = f"image={','.join(image)} labels="
        table = source._table("tar", stamp, offset=offset[chosen], length=size[chosen])
        assert table.store(str(index))[0] == 0
        return source._native_of(table, nostall.ReadOptions()).fingerprint

    store_older(["jpg", "png"])
    with pytest.raises(UsageError, match="sample 'a' has two images"):
        nostall.TarShards(path, label=None, image=["jpg", "png"], index=index)
    older = store_older(["png"])
    again = [nostall.TarShards(path, label=None, image=["png"], index=index) for _ in range(2)]
    assert [source.index_reused for source in again] == [False, True]
    # States and tiers of the same samples still hold.
    assert [source.native.fingerprint for source in again] == [older] * 2


def test_an_index_that_lacks_links_is_made_again(tmp_path: Path) -> None:
    path, index = linked(tmp_path / "a.tar", tarfile.LNKTYPE, "a.jpg"), tmp_path / "index"
    source = nostall.TarShards(path, index=False)
    table = source.native.table
    stamp = table.stamp.replace(" rules 3", "")
    older = source._table("tar", stamp, offset=table.offset[:1], length=table.length[:1])
    assert stamp != table.stamp and older.store(str(index))[0] == 0
    assert len(nostall.TarShards(path, index=index)) == len(source) == 2


def test_labels_that_are_no_integers_are_refused(tmp_path: Path) -> None:
    webdataset(tmp_path / "a.tar", noise(3))
    with pytest.raises(UsageError, match="what label= returns must be integers, not float64"):
        nostall.TarShards(tmp_path / "a.tar", label=lambda key: 0.7)
