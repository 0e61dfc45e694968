"""``nostall index`` builds, checks and shows what is kept about every kind of dataset."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from protobuf import example, write_tfrecord
from samples import noise
from test_tar import webdataset

import nostall
from nostall import _native
from nostall.cli import _index, main
from nostall.errors import CorruptionError, IoError


def make(kind: str, root: Path) -> Path:
    root.mkdir(exist_ok=True)
    contents = noise(200)
    if kind == "lmdb":
        with lmdb.open(str(root), map_size=1 << 26) as env, env.begin(write=True) as t:
            for i, content in enumerate(contents):
                t.put(str(i).encode(), content)
    elif kind == "tar":
        webdataset(root / "a.tar", contents[:100])
        webdataset(root / "b.tar", contents[100:], 100)
    else:
        records = [
            example({"image/encoded": c, "image/class/label": i}) for i, c in enumerate(contents)
        ]
        write_tfrecord(root / "a.tfrecord", records)
    return root


OPEN = {"lmdb": nostall.LMDB, "tar": nostall.TarShards, "tfrecord": nostall.TFRecord}


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_build_check_show(
    tmp_path: Path, kind: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make(kind, tmp_path / "data")
    words = [] if where == "beside" else ["--index", str(tmp_path / "places")]
    index = True if where == "beside" else tmp_path / "places"
    files_before = sorted(tmp_path.rglob("*"))
    assert main(["index", str(root), "--check", *words]) == 1
    assert sorted(tmp_path.rglob("*")) == files_before  # --check writes nothing
    capsys.readouterr()
    assert main(["index", str(root), *words]) == 0
    out = capsys.readouterr().out
    shown = re.match(
        r"(\S+): (\w+), 200 samples of (\d+) bytes in (\d) files?, index of (\d+) bytes "
        r"\(([\d.]+) per sample\), fingerprint ([0-9a-f]{16}), made in",
        out,
    )
    assert shown, out
    store = OPEN[kind](root, index=index)
    assert store.index_reused
    assert shown[1] == store.index_file and shown[2] == kind
    assert int(shown[3]) == store.total_bytes and int(shown[4]) == len(store.storage.paths)
    assert int(shown[5]) == Path(store.index_file).stat().st_size
    assert float(shown[6]) < 12
    assert shown[7] == f"{store.fingerprint:016x}"
    assert main(["index", str(root), *words]) == 0
    assert capsys.readouterr().out.endswith(" held\n")
    assert main(["index", str(root), "--check", *words]) == 0
    assert capsys.readouterr().out == f"{store.index_file}: holds\n"


@pytest.mark.parametrize("kind", OPEN)
def test_a_change_is_seen(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(kind, tmp_path / "data")
    assert main(["index", str(root)]) == 0
    index = capsys.readouterr().out.split(":")[0]
    make(kind, root)  # again: another transaction, other times
    for file in root.glob("[!.]*"):
        os.utime(file, (1, 1))  # both may be of one tick of the file system's clock
    assert main(["index", str(root), "--check"]) == 1
    assert capsys.readouterr().out.startswith(f"{index}: ")
    assert main(["index", str(root)]) == 0
    assert "made in" in capsys.readouterr().out
    Path(index).write_bytes(b"damaged")
    assert main(["index", str(root), "--check"]) == 1
    assert "damaged" in capsys.readouterr().out


def test_options_reach_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make("tar", tmp_path / "data")
    words = ["index", str(root / "*.tar"), "--image", "seg.png,txt", "--label", ""]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["index", str(root), "--check"]) == 1
    assert "other options" in capsys.readouterr().out
    store = nostall.TarShards(str(root / "*.tar"), image=["seg.png", "txt"], label=None)
    assert store.index_reused and store.read(3) == b"not the sample"


def test_named_databases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lmdb.open(str(tmp_path / "db"), max_dbs=2) as env:
        database = env.open_db(b"train")
        with env.begin(write=True) as t:
            t.put(b"0", b"x", db=database)
    assert main(["index", str(tmp_path / "db")]) != 0
    assert "train" in capsys.readouterr().err
    assert main(["index", str(tmp_path / "db"), "--database", "train"]) == 0
    assert "lmdb, 1 sample of 1 byte in 1 file" in capsys.readouterr().out


def test_a_folder_is_still_a_folder(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = str(tmp_path / "listing")
    assert main(["index", str(image_folder), "--index", index, "--check"]) == 1
    assert f"{index}: there is none yet: nostall index" in capsys.readouterr().out
    assert main(["index", str(image_folder), "--index", index]) == 0
    assert "61 samples of 3 classes" in capsys.readouterr().out
    assert main(["index", str(image_folder), "--index", index, "--check"]) == 0


def test_files_rewritten_in_a_folder_are_listed_again(
    make_folder: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_folder(6)
    assert main(["index", str(root)]) == 0
    before = capsys.readouterr().out
    changed = root / "class1" / "003.jpg"
    size = changed.stat().st_size
    with changed.open("ab") as file:
        file.write(b"more")
    assert size in nostall.ImageFolder(root).sizes  # the folders are the same
    assert main(["index", str(root), "--check"]) == 1
    said = (
        f"1 of 6 files have another size than was listed, such as {changed} ({size + 4} bytes, not"
    )
    assert said in capsys.readouterr().out
    assert main(["index", str(root)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert said in first and first.endswith("listing the folder again")
    assert "6 samples of 2 classes" in second and second != before.rstrip()
    assert main(["index", str(root), "--check"]) == 0
    assert nostall.ImageFolder(root).total_bytes == sum(
        path.stat().st_size for path in root.rglob("*.jpg")
    )


def test_a_listing_elsewhere_of_other_extensions_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, index = tmp_path / "data", tmp_path / "listing"
    names = [root / "a" / "0.npy", root / "a" / "1.jpg", root / "b" / "2.TXT"]
    for name in names:
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(b"first")

    def opened() -> nostall.ImageFolder:
        return nostall.ImageFolder(root, index=index, extensions=[".npy", ".txt"])

    kept = nostall.FileList(names)
    assert len(opened()) == 2
    names[0].write_bytes(b"longer")
    said = "its size is not the one"
    with pytest.raises(IoError, match=said):
        opened().read(0)
    words = ["index", str(root), "--index", str(index), "--extensions", ".npy,.TXT"]
    assert main([*words, "--check"]) == 1
    assert f"1 of 2 files have another size than was listed, such as {names[0]}" in (
        capsys.readouterr().out
    )
    there: list[bool] = []
    open_folder = _native.open_folder

    def watched(**options: Any) -> Any:
        there.append(index.exists())
        return open_folder(**options)

    with monkeypatch.context() as patched:
        patched.setattr(_native, "open_folder", watched)
        assert main(words) == 0
    assert len(there) > 2 and all(there)  # at no time there is none
    assert opened().read(0) == b"longer" and len(opened()) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "listing"]
    # A list of files has no stored listing.
    with pytest.raises(IoError, match=said):
        kept.read(0)
    assert nostall.FileList(names).read(0) == b"longer"


def test_a_listing_that_cannot_be_replaced_stays(
    make_folder: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = make_folder(6)
    index = root / ".nostall-index"
    assert main(["index", str(root)]) == 0
    before = index.read_bytes()
    with (root / "class1" / "003.jpg").open("ab") as file:
        file.write(b"more")
    open_folder = _native.open_folder

    def unwritten(*, index_path: str, **options: Any) -> Any:
        if index_path and not Path(index_path).exists():
            raise IoError(f"cannot store the index {index_path}: No space left on device")
        return open_folder(index_path=index_path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(_native, "open_folder", unwritten)
        assert main(["index", str(root)]) == IoError.exit_code
    assert f"cannot store the index {index}: No space" in capsys.readouterr().err
    assert index.read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", *OPEN])
@pytest.mark.parametrize("where", ["absent", "/sys"])  # the latter as read-only data sets are
def test_an_index_that_is_asked_for_is_stored_or_refused(
    make_folder: Callable[[int], Path],
    tmp_path: Path,
    kind: str,
    where: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = make_folder(6) if kind == "folder" else make(kind, tmp_path / "data")
    index = tmp_path / where / "places"
    assert main(["index", str(root), "--index", str(index)]) == IoError.exit_code
    said = capsys.readouterr()
    assert f"cannot store the index {index}: " in said.err and "give another file" in said.err
    assert said.out == ""


def test_a_listing_that_is_kept_nowhere_names_no_file(
    make_folder: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = make_folder(6)
    monkeypatch.setattr(_index, "listing_of", lambda *_: str(root / "absent" / "listing"))
    assert main(["index", str(root)]) == 0
    assert capsys.readouterr().out.startswith("kept nowhere: 6 samples of 2 classes")
    # One that is there, and can be neither read nor replaced.
    listing = root.parent / "listing"
    (listing / "full").mkdir(parents=True)
    monkeypatch.setattr(_index, "listing_of", lambda *_: str(listing))
    assert main(["index", str(root)]) == 0
    assert capsys.readouterr().out.startswith("kept nowhere: 6 samples of 2 classes")


def test_what_does_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("tar", tmp_path / "data")
    assert main(["index", str(tmp_path / "data"), "--database", "x"]) != 0
    assert "--database does not go with a dataset of kind tar" in capsys.readouterr().err
    assert main(["index", str(tmp_path / "data"), "--extensions", ".tar"]) != 0
    assert "--extensions does not go with a dataset of kind tar" in capsys.readouterr().err
    absent = tmp_path / "train-0-of-3"
    assert main(["index", str(absent)]) != 0
    assert f"there is no {absent}" in capsys.readouterr().err
    assert main(["index", str(tmp_path / "train-*-of-3")]) != 0
    assert "--kind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.parquet", "have no index"), ("a.h5", "have no index"), ("a.bin", "pass --kind")],
)
def test_a_file_of_another_kind_is_no_folder_of_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert main(["index", str(tmp_path / name)]) != 0
    assert said in capsys.readouterr().err


def test_all_damaged_images_are_listed(
    make_folder: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_folder(150)
    paths = sorted(root.rglob("*.jpg"))
    assert main(["index", str(root), "--damaged"]) == 0
    assert "0 of 150 samples cannot be used" in capsys.readouterr().out
    half, empty, other = (paths[i] for i in (0, 80, 149))
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    empty.write_bytes(b"")
    other.write_bytes(b"no image")
    assert main(["index", str(root), "--damaged"]) == 1
    *_, first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{half} (sample 0) cannot be used: ")
    assert second.startswith(f"{empty} (sample 80) cannot be used: ")
    assert f"{other} (sample 149) cannot be used: 8 bytes that are not a JPEG" in third
    assert last == "3 of 150 samples cannot be used"


def test_images_are_looked_at_alone_and_all_may_be_damaged(
    make_folder: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # as in the shell of a node where a training runs
    root = make_folder(20)
    for path in root.rglob("*.jpg"):
        path.write_bytes(b"no image")
    assert main(["index", str(root), "--damaged"]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "20 of 20 samples cannot be used"


def test_damaged_images_of_records_are_listed(
    tmp_path: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = [path.read_bytes() for path in sorted(image_folder.rglob("*.jpg"))[:8]]
    contents[5] = contents[5][:100]
    webdataset(tmp_path / "a.tar", contents)
    assert main(["index", str(tmp_path / "a.tar"), "--damaged"]) == 1
    *_, damaged, last = capsys.readouterr().out.splitlines()
    assert damaged.startswith(f"{tmp_path / 'a.tar'}") and "(sample 5) cannot be used" in damaged
    assert last == "1 of 8 samples cannot be used"


def test_the_index_alone_is_checked_or_images_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", str(tmp_path), "--check", "--damaged"]) == 2
    assert "--check looks at the index alone" in capsys.readouterr().err


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Makes the data of a test read-only, as far as nostall asks; gives the user's cache folder."""

    def close() -> Path:
        may, data = os.access, str(tmp_path / "data")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(
            os, "access", lambda path, mode: may(path, mode) and not str(path).startswith(data)
        )
        return tmp_path / "cache" / "nostall"

    return close


def test_a_listing_of_others_is_read_beside_data_that_is_read_only(
    make_folder: Callable[[int], Path],
    tmp_path: Path,
    read_only: Callable[[], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = make_folder(6).rename(tmp_path / "data")
    assert main(["index", str(root)]) == 0
    cache = read_only()
    assert len(nostall.ImageFolder(root)) == 6
    assert main(["index", str(root), "--check"]) == 0
    assert capsys.readouterr().out.endswith(f"{root}/.nostall-index: holds\n")
    assert not [*cache.glob("*.index")]
    with nostall.DataLoader(nostall.ImageFolder(root), 3, tiers=[], output="numpy") as loader:
        assert len(list(loader)) == 2
    assert len([*cache.glob("*.sums")]) == 1  # what was learned is kept all the same
    # Of other endings there is none, and it cannot be kept there.
    for _ in range(2):
        nostall.ImageFolder(root, extensions=[".jpg", ".none"])
    assert len([*cache.glob("*.index")]) == 1


@pytest.mark.parametrize("kind", [*OPEN, "tokens"])
def test_an_index_of_others_is_read_beside_data_that_is_read_only(
    tmp_path: Path, kind: str, read_only: Callable[[], Path]
) -> None:
    root = tmp_path / "data"
    opened: Callable[[], Any]
    if kind == "tokens":
        root.mkdir()
        np.arange(1000, dtype=np.uint16).tofile(root / "a.bin")
        opened = functools.partial(nostall.Tokens, root / "a.bin", dtype="uint16", end=7)
    else:
        opened = functools.partial(OPEN[kind], make(kind, root))
    beside = opened().index_file
    cache = read_only()
    assert opened().index_file == beside and opened().index_reused
    assert not [*cache.glob("*")]
    damaged = Path(beside)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert Path(opened().index_file).parent == cache
    assert opened().index_reused


def test_checksums_of_others_are_completed_elsewhere(
    make_folder: Callable[[int], Path], tmp_path: Path, read_only: Callable[[], Path]
) -> None:
    root = make_folder(6).rename(tmp_path / "data")
    theirs = nostall.ImageFolder(root)
    theirs.read(1)
    theirs.keep_sums()
    beside = root / ".nostall-index.sums"
    kept = beside.read_bytes()
    cache = read_only()
    for _ in range(2):
        mine = nostall.ImageFolder(root)
        known = [sample for sample in range(6) if mine.native.sums[sample]]
        assert known == [1]
    for sample in range(6):
        mine.read(sample)
    mine.keep_sums()
    assert beside.read_bytes() == kept
    (own,) = cache.glob("*.sums")
    again = nostall.ImageFolder(root)
    assert all(again.native.sums)
    bad = Path(again.describe(3))
    flipped = bytearray(bad.read_bytes())
    flipped[-1] ^= 1
    bad.write_bytes(flipped)
    with pytest.raises(CorruptionError, match=f"remove {re.escape(str(own))} and start again"):
        again.read(3)


def test_checksums_are_kept_where_those_of_others_do_not_fit(
    make_folder: Callable[[int], Path], tmp_path: Path, read_only: Callable[[], Path]
) -> None:
    root = make_folder(3).rename(tmp_path / "data")
    theirs = nostall.ImageFolder(root)
    for sample in range(3):
        theirs.read(sample)
    theirs.keep_sums()
    for image in root.rglob("*.jpg"):
        image.write_bytes(image.read_bytes()[::-1])
        os.utime(image, (1, 1))  # both may be of one tick of the file system's clock
    cache = read_only()
    mine = nostall.ImageFolder(root)
    assert not any(mine.native.sums)
    for sample in range(3):
        mine.read(sample)
    mine.keep_sums()
    assert len([*cache.glob("*.sums")]) == 1
    assert all(nostall.ImageFolder(root).native.sums)


@pytest.mark.parametrize("learns", [False, True])
def test_checksums_of_others_that_do_not_fit_are_found_so_once(
    tmp_path: Path, read_only: Callable[[], Path], learns: bool
) -> None:
    root = make("tar", tmp_path / "data")
    theirs = nostall.TarShards(root)
    for sample in range(len(theirs)):
        theirs.read(sample)
    theirs.keep_sums()
    for shard in root.glob("*.tar"):
        times = shard.stat()
        shard.write_bytes(shard.read_bytes().translate(bytes([*range(128), *range(255, 127, -1)])))
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    cache = read_only()
    mine = nostall.TarShards(root)
    assert not mine.index_reused and Path(mine.index_file).parent == cache
    if learns:
        mine.read(0)
        mine.keep_sums()
    again = nostall.TarShards(root)
    assert again.index_reused
    assert again.read(0) == mine.read(0)
