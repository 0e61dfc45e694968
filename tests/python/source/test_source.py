"""Folders are listed as torchvision lists them, once, and changes are noticed."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import ImageFolder as TorchvisionFolder

import nostall
from nostall import _native, convert
from nostall import transforms as t
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._source import IMAGE_EXTENSIONS, index_path


def random_tree(root: Path, seed: int) -> None:
    """Classes with odd names, nested folders, links, and files that are no samples."""
    draw = random.Random(seed)
    names = ["zeta", "Alpha", "été", "class 10", "class 9", "_x", ".hidden", "日本"]
    for name in draw.sample(names, draw.randint(2, len(names))):
        folders = [root / name]
        for _ in range(draw.randint(0, 4)):
            folders.append(draw.choice(folders) / draw.choice(["b", "a", "B", "a.d", "a-d", "é"]))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        (folders[0] / "always.jpg").write_bytes(b"x")
        for folder in folders:
            for _ in range(draw.randint(0, 6)):
                stem = draw.choice(["1", "10", "2", "Z", "z", "ü", ".dot", "a b"])
                suffix = draw.choice([".jpg", ".JPEG", ".Png", ".txt", ".webp", ".tiff", ""])
                (folder / (stem + suffix)).write_bytes(b"x" * draw.randint(0, 9))
        if draw.random() < 0.5:
            target = root.parent / f"linked-{seed}-{name}"
            target.mkdir()
            (target / "far.jpg").write_bytes(b"far")
            (folders[0] / "link").symlink_to(target)
            (folders[0] / "link.png").symlink_to(target / "far.jpg")
    (root / "README.jpg").write_bytes(b"not in a class")


@pytest.mark.parametrize("seed", range(12))
def test_samples_are_those_of_torchvision_in_its_order(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "data"
    root.mkdir()
    random_tree(root, seed)
    theirs = TorchvisionFolder(str(root))
    ours = nostall.ImageFolder(root, index=False)
    assert ours.classes == theirs.classes
    assert ours.class_to_idx == theirs.class_to_idx
    assert [ours.describe(i) for i in range(len(ours))] == [p for p, _ in theirs.samples]
    assert ours.labels.tolist() == theirs.targets
    assert ours.sizes.tolist() == [os.path.getsize(p) for p, _ in theirs.samples]


def test_names_of_files_may_be_of_any_bytes(image_folder: Path, tmp_path: Path) -> None:
    image = next(image_folder.rglob("*.jpg")).read_bytes()
    root = os.fsdecode(os.fsencode(tmp_path) + b"/donn\xe9es")
    folder = Path(root, os.fsdecode(b"kl\xe9"))
    folder.mkdir(parents=True)
    for name in (b"a.jpg", b"b.jpg", b"caf\xe9.jpg"):
        (folder / os.fsdecode(name)).write_bytes(image)
    for _ in range(2):  # the second time from the stored listing
        data = nostall.ImageFolder(root)
        assert data.classes == [folder.name] and data.class_to_idx == {folder.name: 0}
        assert data.describe(2) == str(folder / os.fsdecode(b"caf\xe9.jpg"))
        assert data.read(2) == image
    assert pickle.loads(pickle.dumps(data)).describe(2) == data.describe(2)
    listed = nostall.FileList([data.describe(2), "a.jpg"], root=folder)
    assert [listed.read(i) for i in range(2)] == [image, image]
    columns = nostall.Files({"image": [data.describe(2)]})
    assert columns.describe(0) == data.describe(2)
    writers = {nostall.LMDB: convert.to_lmdb, nostall.TarShards: convert.to_tar}
    for number, (kind, write) in enumerate(writers.items()):
        store = tmp_path / f"store{number}"
        write(data, store)
        for _ in range(2):
            written = kind(store)
            assert written.classes == data.classes
            assert [written.read(i) for i in range(3)] == [image] * 3


def test_a_damaged_file_may_have_a_name_of_any_bytes(
    image_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "data"
    subprocess.run(["cp", "-r", str(image_folder), str(root)], check=True)
    damaged = root / "class0" / os.fsdecode(b"caf\xe9.jpg")
    damaged.write_bytes(b"no image")
    data = nostall.ImageFolder(root, index=False)
    bad = [data.describe(i) for i in range(len(data))].index(str(damaged))
    steps = [t.Resize((8, 8)), t.ToTensor()]
    options: dict[str, Any] = {"epochs": 1, "transforms": steps, "tiers": [], "output": "numpy"}
    with nostall.DataLoader(data, 8, on_error="substitute", **options) as loader:
        assert sum(len(images) for images, _ in loader) == len(data)
        assert loader.stats().epochs[0].substituted == [bad]
    assert any("caf\\xe9.jpg" in m for m in caplog.messages)
    with (
        nostall.DataLoader(data, 8, **options) as loader,
        pytest.raises(CorruptionError, match=r"caf\\xe9\.jpg"),
    ):
        list(loader)


def holds(root: Path, index: Path) -> bool:
    return not _native.check_index(
        root=str(root),
        index_path=str(index),
        extensions=list(IMAGE_EXTENSIONS),
        class_per_folder=True,
    )


def test_the_stored_listing_is_used_until_something_changes(
    image_folder: Path, tmp_path: Path
) -> None:
    root = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(image_folder), str(root)], check=True)
    (root / ".nostall-index").unlink(missing_ok=True)
    first = nostall.ImageFolder(root)
    index = Path(index_path(str(root)))
    if not index.exists():
        pytest.fail(f"{index} was not written")
    second = nostall.ImageFolder(root, index=tmp_path / "elsewhere")
    assert holds(root, tmp_path / "elsewhere")
    assert first.fingerprint == second.fingerprint
    # A folder may have changed before within the same tick of the file system's clock.
    (root / "class0" / "new.jpg").write_bytes(b"new")
    os.utime(root / "class0", (1, 1))
    assert not holds(root, tmp_path / "elsewhere")
    third = nostall.ImageFolder(root, index=tmp_path / "elsewhere")
    assert len(third) == len(first) + 1
    assert third.fingerprint != first.fingerprint
    (root / "class9").mkdir()
    (root / "class9" / "a.jpg").write_bytes(b"a")
    os.utime(root, (1, 1))
    assert nostall.ImageFolder(root, index=tmp_path / "elsewhere").classes[-1] == "class9"
    (root / "class9" / "a.jpg").unlink()
    os.utime(root / "class9", (1, 1))
    with pytest.raises(UsageError, match="class9"):
        nostall.ImageFolder(root, index=tmp_path / "elsewhere")


def test_the_next_start_takes_the_listing_beside_the_data(
    image_folder: Path, tmp_path: Path
) -> None:
    root = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(image_folder), str(root)], check=True)
    nostall.ImageFolder(root)
    assert holds(root, root / ".nostall-index")


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_damaged_listing_is_made_again(image_folder: Path, tmp_path: Path, cut: int) -> None:
    index = tmp_path / "index"
    first = nostall.ImageFolder(image_folder, index=index)
    index.write_bytes(index.read_bytes()[:cut])
    again = nostall.ImageFolder(image_folder, index=index)
    assert again.fingerprint == first.fingerprint
    assert holds(image_folder, index)


def test_a_listing_that_cannot_be_stored_is_no_error(image_folder: Path) -> None:
    assert len(nostall.ImageFolder(image_folder, index="/proc/no/place")) == 61


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="nowhere"):
        nostall.ImageFolder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no class folders"):
        nostall.ImageFolder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no samples"):
        nostall.ImageFolder(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.jpg").write_bytes(b"a")
    assert nostall.ImageFolder(tmp_path, allow_empty=True).classes == ["empty", "full"]
    (tmp_path / "full" / "loop.jpg").symlink_to("loop.jpg")
    with pytest.raises(IoError, match=r"loop\.jpg"):
        nostall.ImageFolder(tmp_path, allow_empty=True)
    (tmp_path / "full" / "loop.jpg").unlink()
    (tmp_path / "full" / "gone.jpg").symlink_to("nowhere.jpg")
    with pytest.raises(IoError, match=r"gone\.jpg is a link to a file that is not there: remove"):
        nostall.ImageFolder(tmp_path, allow_empty=True)
    (tmp_path / "full" / "gone.jpg").unlink()
    (tmp_path / "full" / "up").symlink_to(tmp_path / "full")
    with pytest.raises(UsageError, match="full/up"):
        nostall.ImageFolder(tmp_path, allow_empty=True)


def test_a_listing_with_empty_classes_is_of_those_that_allow_them(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.jpg").write_bytes(b"a")
    for _ in range(2):
        assert len(nostall.ImageFolder(tmp_path, allow_empty=True)) == 1
        with pytest.raises(UsageError, match="empty holds no samples"):
            nostall.ImageFolder(tmp_path)


def test_what_is_kept_beside_files_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    for name in ("full/a.jpg", ".hidden", ".nostall-records-0123456789ab"):
        (tmp_path / name).write_bytes(b"a")
    nostall.ImageFolder(tmp_path)
    assert (tmp_path / ".nostall-index").exists()
    files = nostall.FileList(root=tmp_path)
    assert [files.describe(i) for i in range(len(files))] == [
        str(tmp_path / name) for name in (".hidden", "full/a.jpg")
    ]


def test_file_lists(tmp_path: Path) -> None:
    for name in ("b", "a", "sub/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    files = nostall.FileList(["b", "sub/c", tmp_path / "a"], [7, 8, 9], root=tmp_path)
    assert [files.read(i) for i in range(3)] == [b"b", b"sub/c", b"a"]
    assert files.labels.tolist() == [7, 8, 9]
    every = nostall.FileList(root=tmp_path)
    assert [every.describe(i) for i in range(3)] == [str(tmp_path / n) for n in ("a", "b", "sub/c")]
    with pytest.raises(UsageError, match="2 labels for 1 paths"):
        nostall.FileList(["a"], [1, 2], root=tmp_path)
    place, where = r"^FileList: paths\[{}\] of {}: ", re.escape(str(tmp_path))
    told = f"cannot examine {where}/missing: No such file .*: was it found by a wrong pattern"
    with pytest.raises(IoError, match=rf"{place.format(1, 2)}{told}.* root='{where}'$") as caught:
        nostall.FileList(["a", "missing"], root=tmp_path)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(UsageError, match=rf"{place.format(0, 1)}{where}/sub is not a file: was"):
        nostall.FileList([tmp_path / "sub"])
    with pytest.raises(
        UsageError, match=r"^FileList: the list of files is empty: if it was found by"
    ):
        nostall.FileList([], [], root=tmp_path)
    assert isinstance(every.sizes, np.ndarray)


@pytest.mark.parametrize(
    "opened",
    [
        lambda: nostall.FileList(["s3://bucket/a.jpg"]),
        lambda: nostall.FileList(["a.jpg"], root="s3://bucket"),
        lambda: nostall.Files({"image": ["s3://bucket/a.jpg"]}),
    ],
)
def test_objects_among_files_are_refused_with_what_reads_them(opened: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"s3://bucket.* is no file: nostall\.ObjectFolder reads"):
        opened()


@pytest.mark.parametrize(
    "opened",
    [
        nostall.FileList,
        lambda files: nostall.Files({"image": files}),
        nostall.TarShards,
        nostall.TFRecord,
        nostall.Parquet,
        nostall.ArrowIPC,
        lambda files: nostall.ArrowIPC(files, columns="all"),
        nostall.Tokens,
        lambda files: nostall.Tokens(files, column="ids"),
        lambda files: nostall.tokenize(files, str.split, "cache", version="1"),
    ],
)
@pytest.mark.parametrize("files", [[], ()])
def test_an_empty_list_of_files_is_refused(
    opened: Callable[[Any], object], files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"list of files is empty|image has 0"):
        opened(files)


def test_a_pipe_is_no_sample_and_is_never_waited_for(make_folder: Callable[[int], Path]) -> None:
    root = make_folder(6)
    os.mkfifo(root / "class0" / "pipe.jpg")
    with pytest.raises(UsageError, match=r"pipe\.jpg is not a regular file"):
        nostall.ImageFolder(root, index=False)
    (root / "class0" / "pipe.jpg").unlink()
    folder = nostall.ImageFolder(root, index=False)
    Path(folder.describe(0)).unlink()
    os.mkfifo(folder.describe(0))
    with pytest.raises(IoError, match=re.escape(folder.describe(0))):
        folder.read(0)


def test_a_path_that_is_no_directory_is_told_with_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"missing/?: No such file or directory; give a directory"):
        nostall.ImageFolder(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IoError, match=r"file/?: Not a directory; give a directory"):
        nostall.ImageFolder(tmp_path / "file")


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "pictures"
    (root / "a").mkdir(parents=True)
    (root / "a" / "1.png").write_bytes(b"a picture")
    np.save(root / "values.npy", np.zeros(1, [("x", np.int64)]))
    (root / "table.csv").write_text("file\na/1.png\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(root)
    for tilde, whole in (
        (nostall.ImageFolder("~/pictures"), nostall.ImageFolder(root)),
        (nostall.FileList(root=Path("~/pictures")), nostall.FileList(root=root)),
        (nostall.FileList(["~/pictures/a/1.png"]), nostall.FileList([root / "a" / "1.png"])),
        (nostall.Files({"x": "~/pictures/a"}), nostall.Files({"x": root / "a"})),
        (nostall.Arrays("~/pictures/values.npy"), nostall.Arrays(root / "values.npy")),
        (
            nostall.Manifest("~/pictures/table.csv", {"image": "file"}),
            nostall.Manifest(root / "table.csv", {"image": "file"}),
        ),
    ):
        assert tilde.fingerprint == whole.fingerprint
        monkeypatch.setenv("HOME", "/nowhere")  # another process may have another one
        assert pickle.loads(pickle.dumps(tilde)).fingerprint == whole.fingerprint
        monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(IoError, match="pictures/~/pictures"):  # a list may be a table's
        nostall.Files({"x": ["~/pictures/a/1.png"]})
    (root / "~a").mkdir()
    (root / "~a" / "1.png").write_bytes(b"of a folder of this name")
    assert nostall.FileList(["~a/1.png"]).total_bytes == 24  # of nobody's home


def test_no_labels_are_not_the_label_0(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    with pytest.raises(UsageError, match="0 labels for 1 paths"):
        nostall.FileList(["a.jpg"], labels=[], root=tmp_path)


def of_arrays(root: Path) -> nostall.Source:
    if not (root / "x.npy").exists():
        np.save(root / "x.npy", np.zeros((4, 2)))
    return nostall.Arrays({"x": root / "x.npy", "y": np.arange(4)})


def of_tar(root: Path) -> nostall.Source:
    if not (root / "x.tar").exists():
        with tarfile.open(root / "x.tar", "w") as tar:
            member = tarfile.TarInfo("0.jpg")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"jpeg!"))
    return nostall.TarShards(root / "x.tar", label=None)


def of_lmdb(root: Path) -> nostall.Source:
    lmdb = pytest.importorskip("lmdb")
    if not (root / "data.mdb").exists():
        with lmdb.open(str(root)) as environment, environment.begin(write=True) as transaction:
            transaction.put(b"0", bytes(50))
    return nostall.LMDB(root, values="raw")


def of_parquet(compression: str) -> Callable[[Path], nostall.Source]:
    def make(root: Path) -> nostall.Source:
        pytest.importorskip("pyarrow")
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not (root / "x.parquet").exists():
            table = pa.table({"image": [bytes(50)] * 4})
            pq.write_table(table, root / "x.parquet", compression=compression, use_dictionary=False)
        return nostall.Parquet(root / "x.parquet", label=None)

    return make


def of_hdf5(**stored: Any) -> Callable[[Path], nostall.Source]:
    def make(root: Path) -> nostall.Source:
        h5py = pytest.importorskip("h5py")
        if not (root / "x.h5").exists():
            with h5py.File(root / "x.h5", "w") as file:
                file.create_dataset("x", data=np.zeros((4, 20), np.uint8), **stored)
        return nostall.HDF5(root / "x.h5", "x")

    return make


def files_below(root: Path) -> list[Path]:
    (root / "a").mkdir(exist_ok=True)
    paths = [root / "a" / f"{i}.jpg" for i in range(3)]
    for path in paths:
        if not path.exists():
            path.write_bytes(b"jpeg!")
    return paths


def of_folder(index: bool) -> Callable[[Path], nostall.Source]:
    def make(root: Path) -> nostall.Source:
        files_below(root)
        return nostall.ImageFolder(root, index=index)

    return make


def of_paths(root: Path) -> nostall.Source:
    return nostall.FileList([path.relative_to(root) for path in files_below(root)], root=root)


def of_root(root: Path) -> nostall.Source:
    files_below(root)
    return nostall.FileList(root=root)


def of_files(root: Path) -> nostall.Source:
    files_below(root)
    return nostall.Files({"image": [f"a/{i}.jpg" for i in range(3)]}, root=root)


def of_view(root: Path) -> nostall.Source:
    return nostall.Subset(nostall.Concat([of_paths(root), of_paths(root)]), [1, 5])


@pytest.mark.parametrize(
    ("open_in", "by_files"),
    [
        (of_arrays, True),
        (of_tar, True),
        (of_lmdb, True),
        (of_parquet("none"), True),
        (of_parquet("zstd"), True),
        (of_hdf5(), True),
        (of_hdf5(chunks=(2, 20), compression="gzip"), True),
        (of_paths, True),
        (of_root, True),
        (of_files, True),
        (of_view, True),
        (of_folder(index=False), False),
        (of_folder(index=True), False),
    ],
)
def test_a_stamp_follows_place_and_times(
    tmp_path: Path, open_in: Callable[[Path], nostall.Source], by_files: bool
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    first = open_in(here)
    assert open_in(here).native.stamp == first.native.stamp
    # The same files and times elsewhere.
    shutil.copytree(here, there)
    assert open_in(there).fingerprint == first.fingerprint
    assert open_in(there).native.stamp != first.native.stamp
    # By another path it is the same place.
    (tmp_path / "link").symlink_to(here)
    assert open_in(tmp_path / "link").native.stamp == first.native.stamp
    # Times of the files that hold samples.
    for path in here.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            os.utime(path, ns=(1, 1))
    assert open_in(here).fingerprint == first.fingerprint
    assert (open_in(here).native.stamp != first.native.stamp) == by_files


def of_both(root: Path) -> nostall.Source:
    return nostall.Concat([of_folder(index=False)(root), of_paths(root)], offset_labels=True)


@pytest.mark.parametrize("open_in", [of_paths, of_root, of_files, of_folder(True), of_both])
def test_a_file_that_came_and_went_beside_the_samples_is_no_other_data_set(
    tmp_path: Path, open_in: Callable[[Path], nostall.Source]
) -> None:
    """It leaves the time of its folder, which counts only where nothing else is known."""
    first = open_in(tmp_path)
    for folder in (tmp_path, tmp_path / "a"):
        (folder / "note").write_bytes(b"x")
        (folder / "note").unlink()
        os.utime(folder, ns=(1, 1))
    again = open_in(tmp_path)
    assert again.fingerprint == first.fingerprint
    assert again.native.files_stamp == first.native.files_stamp
    by_folders = isinstance(first, nostall.ImageFolder)
    assert (again.native.stamp != first.native.stamp) == by_folders


def test_with_and_without_an_index_a_folder_is_one_data_set(tmp_path: Path) -> None:
    one, other = (of_folder(index)(tmp_path).native for index in (True, False))
    assert (one.stamp, one.files_stamp) == (other.stamp, other.files_stamp)
