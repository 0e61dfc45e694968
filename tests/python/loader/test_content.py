"""The content of a data set that changes: between jobs, in what was kept, while a job runs."""

from __future__ import annotations

import io
import os
import pwd
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nostall
from nostall import transforms as t
from nostall.errors import CorruptionError
from nostall.source._source import cache_folder

SAMPLES, SIZE = 40, 600


def write_version(root: Path, version: int) -> dict[str, bytes]:
    """Files of the same names and sizes, each version with other bytes; what is in each."""
    contents = {}
    for i in range(SAMPLES):
        path = root / f"class{i % 2}" / f"{i:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        contents[str(path)] = np.random.default_rng([version, i]).bytes(SIZE)
        path.write_bytes(contents[str(path)])
    return contents


def corner(image: Any) -> Any:
    return image[:4, :4]


def epoch(
    root: Path, tiers: list[str], **options: object
) -> tuple[dict[str, bytes], nostall.observe._stats.Stats]:
    """The bytes of every sample, by path, as one epoch of a job hands them out."""
    source = nostall.ImageFolder(root)
    got = {}
    with nostall.DataLoader(
        source, 8, tiers=tiers, shuffle=False, output="numpy", **options
    ) as loader:  # type: ignore[arg-type]
        at = 0
        for batch, _ in loader:
            for sample in batch:
                got[source.describe(at)] = bytes(sample)
                at += 1
        return got, loader.stats()


def test_a_kept_tier_of_another_version_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, tiers = tmp_path / "data", [f"{tmp_path / 'tier'}:1MiB:keep"]
    first = write_version(root, 1)
    assert epoch(root, tiers)[0] == first
    got, stats = epoch(root, tiers)
    assert got == first and stats.epochs[0].origins["source"].samples == 0
    # A copy of other content over it, times and all.
    times = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    second = write_version(root, 2)
    for path, ns in times.items():
        os.utime(path, ns=(ns, ns))
    got, stats = epoch(root, tiers)
    # Some may come back from the tier already, which the same epoch fills.
    assert got == second and stats.epochs[0].origins["source"].samples > 0
    assert "the kept tier is of another version of the data set" in caplog.text
    assert epoch(root, tiers)[0] == second


MANY = 400


def write_rows(path: Path, version: int) -> list[bytes]:
    """A file of compressed rows, a fifth of which is of the version; what each row is."""
    rows = [
        np.random.default_rng([version if i % 5 == 0 else 0, i])
        .integers(0, 99, 30)
        .astype(np.uint8)
        for i in range(MANY)
    ]
    if path.suffix == ".parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        import pyarrow as pa

        pq.write_table(pa.table({"image": [row.tobytes() for row in rows]}), path)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.stack(rows), chunks=(8, 30), compression="gzip")
    return [row.tobytes() for row in rows]


@pytest.mark.parametrize("name", ["a.parquet", "a.h5"])
def test_rows_that_were_corrected_are_not_served_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path, tiers = tmp_path / name, [f"{tmp_path / 'tier'}:1MiB:keep"]

    def served() -> list[bytes]:
        source = (
            nostall.HDF5(path, "x") if name.endswith("h5") else nostall.Parquet(path, label=None)
        )
        with nostall.DataLoader(source, 8, tiers=tiers, shuffle=False, output="numpy") as loader:
            return [bytes(row) for batch, _ in loader for row in batch]

    first = write_rows(path, 1)
    assert served() == first
    second = write_rows(path, 2)
    assert first != second
    assert served() == second
    assert "the files of the data set lay elsewhere or had other times" in caplog.text


@pytest.mark.parametrize("kind", ["shard", "files"])
def test_one_row_that_was_changed_on_purpose_is_not_served_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Too few for a probe to find; a shard that was only touched costs the tier, and no more."""
    tiers = [f"{tmp_path / 'tier'}:1MiB:keep"]
    rows = np.random.default_rng(5).integers(0, 99, (2000, 30)).astype(np.uint8)

    def write(changed: int = 0) -> None:
        if kind == "shard":
            np.save(tmp_path / "rows.npy", rows)
            os.utime(tmp_path / "rows.npy", ns=(changed, changed))
        else:
            (tmp_path / "rows").mkdir(exist_ok=True)
            for i, row in enumerate(rows[:200]):
                path = tmp_path / "rows" / str(i)
                path.write_bytes(row.tobytes())
                os.utime(path, ns=(changed, changed if i == 77 else 0))

    def served() -> tuple[bytes, int]:
        caplog.clear()
        if kind == "shard":
            source: nostall.Source = nostall.Arrays({"x": tmp_path / "rows.npy"})
        else:
            source = nostall.FileList([tmp_path / "rows" / str(i) for i in range(200)])
        with nostall.DataLoader(source, 8, tiers=tiers, shuffle=False, output="numpy") as loader:
            batches = (batch["x"] if kind == "shard" else batch[0] for batch in loader)
            got = b"".join(bytes(row) for rows in batches for row in rows)
            return got, loader.stats().epochs[0].origins["source"].samples

    def all_rows() -> bytes:
        return rows.tobytes() if kind == "shard" else rows[:200].tobytes()

    write()
    assert served()[0] == all_rows()
    assert served() == (all_rows(), 0)
    rows[77] += 1
    write(changed=1)
    assert served()[0] == all_rows()
    assert "tier: the kept tier was filled when the files of the data set lay" in caplog.text
    write(changed=2)
    assert served()[0] == all_rows()
    assert served() == (all_rows(), 0)
    assert not caplog.text


def test_a_folder_that_something_was_added_to_keeps_what_was_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, tiers = tmp_path / "data", [f"{tmp_path / 'tier'}:1MiB:keep"]
    contents = write_version(root, 1)
    epoch(root, tiers)
    caplog.clear()
    (root / "class1" / "notes.txt").touch()
    got, stats = epoch(root, tiers)
    assert got == contents and stats.epochs[0].origins["source"].samples == 0
    assert f"none of {SAMPLES} samples differs of {SAMPLES} that it holds" in caplog.text
    # It says what to remove.
    kept = list((tmp_path / "tier").glob("nostall-*/*.tier*"))
    assert len(kept) == 2 and all(str(path) in caplog.text for path in kept)
    caplog.clear()
    assert epoch(root, tiers)[0] == contents
    assert not caplog.text


def test_a_data_set_that_moved_keeps_what_was_kept(tmp_path: Path) -> None:
    tiers = [f"{tmp_path / 'tier'}:1MiB:keep"]
    contents = write_version(tmp_path / "data", 1)
    epoch(tmp_path / "data", tiers)
    shutil.move(tmp_path / "data", tmp_path / "moved")
    got, stats = epoch(tmp_path / "moved", tiers)
    assert sorted(got.values()) == sorted(contents.values())
    assert stats.epochs[0].origins["source"].samples == 0


@pytest.mark.parametrize("tiers", [[], ["ram:1MiB"]])
def test_a_byte_that_changed_since_the_last_job_is_named(tmp_path: Path, tiers: list[str]) -> None:
    root = tmp_path / "data"
    contents = write_version(root, 1)
    epoch(root, tiers)
    assert (root / ".nostall-index.sums").exists()
    bad = root / "class1" / "003.jpg"
    flipped = bytearray(contents[str(bad)])
    flipped[77] ^= 1
    bad.write_bytes(flipped)
    with pytest.raises(
        CorruptionError, match=r"class1/003\.jpg.*not those that were read first"
    ) as e:
        epoch(root, tiers)
    assert str(root / ".nostall-index.sums") in str(e.value)
    with pytest.raises(CorruptionError, match="not those that were read first"):
        nostall.ImageFolder(root).read(21)
    got, stats = epoch(root, tiers, on_error="substitute")
    assert stats.epochs[0].substituted and got[str(bad)] != bytes(flipped)
    # It was meant: the error says what to do.
    (root / ".nostall-index.sums").unlink()
    assert epoch(root, tiers)[0] == {**contents, str(bad): bytes(flipped)}


@pytest.mark.parametrize("tiers", [[], ["ram:1MiB"]])
@pytest.mark.parametrize("on_error", ["raise", "substitute"])
@pytest.mark.parametrize("first", ["nothing", "raw bytes"])
@pytest.mark.parametrize("decoded", ["native", "threads", "processes"])
def test_a_file_that_could_not_be_decoded_may_be_repaired(
    make_folder: Callable[[int], Path], decoded: str, first: str, on_error: Any, tiers: list[str]
) -> None:
    """Its checksum is not kept, also where a job that decodes nothing had learned it."""
    root = make_folder(12)
    bad = root / "class0" / "004.jpg"
    whole = bad.read_bytes()
    bad.write_bytes(bytes(len(whole)))
    if first == "raw bytes":
        epoch(root, tiers)
    options: dict[str, Any] = {
        "transforms": [t.CenterCrop(8), t.ToTensor()] if decoded == "native" else corner
    }
    if decoded != "native":
        options |= {"decode": True, "workers": decoded, "threads": 1}

    def run(on_error: Any) -> list[int]:
        source = nostall.ImageFolder(root)
        with nostall.DataLoader(
            source, 4, epochs=2, tiers=tiers, output="numpy", on_error=on_error, **options
        ) as loader:
            assert sum(len(labels) for e in loader.epochs() for _, labels in e) == 2 * 12
            return [sample for e in loader.stats().epochs for sample in e.substituted]

    if on_error == "raise":
        with pytest.raises(CorruptionError, match=r"class0/004\.jpg"):
            run(on_error)
    else:
        assert run(on_error)
    bad.write_bytes(whole)
    assert run("raise") == []
    # Now its checksum is known.
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    bad.write_bytes(flipped)
    with pytest.raises(CorruptionError, match="not those that were read first"):
        run("raise")


def test_what_cannot_be_decoded_costs_a_kept_tier_only_itself(
    make_folder: Callable[[int], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_folder(12)
    bad = root / "class0" / "004.jpg"
    whole = bad.read_bytes()
    bad.write_bytes(bytes(len(whole)))

    def run() -> tuple[list[int], int]:
        with nostall.DataLoader(
            nostall.ImageFolder(root),
            4,
            epochs=1,
            tiers=[f"{tmp_path / 'tier'}:1MiB:keep"],
            transforms=[t.CenterCrop(8), t.ToTensor()],
            output="numpy",
            on_error="substitute",
        ) as loader:
            for _ in loader:
                pass
            told = loader.stats().epochs[0]
            return sorted(told.substituted), told.origins["source"].samples

    run()
    os.utime(bad.parent)  # so that one sample that differs is enough to give the tier up
    assert run() == ([2], 1)
    assert "starts empty" not in caplog.text
    bad.write_bytes(whole)
    assert run() == ([], 1)
    assert run() == ([], 0)


def test_a_transform_in_python_gets_no_wrong_bytes(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_version(root, 1)
    epoch(root, [])
    bad = root / "class0" / "004.jpg"
    bad.write_bytes(bytes(SIZE))
    with (
        nostall.DataLoader(nostall.ImageFolder(root), 8, tiers=[], transforms=len) as loader,
        pytest.raises(CorruptionError, match=r"class0/004\.jpg"),
    ):
        list(loader)


def write_tar(path: Path, lengths: list[int]) -> list[bytes]:
    contents = [bytes([i]) * length for i, length in enumerate(lengths)]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, content in enumerate(contents):
            member = tarfile.TarInfo(f"{i:03}.jpg")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return contents


def test_places_of_another_archive_of_the_same_name_size_and_time_are_found_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [100, 2000] * 10)
    status = path.stat()
    with nostall.DataLoader(nostall.TarShards(path, label=None), 5, tiers=[]) as loader:
        list(loader)
    assert nostall.TarShards(path, label=None).index_reused
    other = write_tar(path, [2000, 100] * 10)
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    store = nostall.TarShards(path, label=None)
    assert not store.index_reused
    assert [store.read(i) for i in range(20)] == other
    assert "samples have another content than the one that was read first" in caplog.text


def test_an_index_that_no_index_can_be_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "data"
    contents = write_version(root, 1)
    epoch(root, [])
    index = root / ".nostall-index"
    for name in (".nostall-index", ".nostall-index.sums"):
        os.truncate(root / name, 1 << 42)
        assert epoch(root, [])[0] == contents
        (root / name).unlink(missing_ok=True)
        os.mkfifo(root / name)
        assert epoch(root, [])[0] == contents
    assert index.is_file() and index.stat().st_size < 1 << 20


def test_a_user_without_home_keeps_no_index(
    make_folder: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_: int) -> pwd.struct_passwd:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(os, "access", lambda *_: False)  # read-only data
    assert cache_folder() is None
    assert len(nostall.ImageFolder(make_folder(4))) == 4


def test_a_shard_that_is_touched_while_a_job_runs_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    contents = write_tar(path, [100, 2000] * 10)
    got = []
    with nostall.DataLoader(
        nostall.TarShards(path, label=None),
        4,
        epochs=2,
        tiers=[],
        shuffle=False,
        staging=1,
        output="numpy",
    ) as loader:
        for epoch in loader.epochs():
            for batch, _ in epoch:
                got += [bytes(sample) for sample in batch]
                path.touch()
    assert got == contents + contents


def test_a_shard_that_grew_while_a_job_runs_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [100, 2000] * 10)
    with (
        nostall.DataLoader(
            nostall.TarShards(path, label=None), 4, epochs=2, tiers=[], staging=1
        ) as loader,
        pytest.raises(CorruptionError, match="its size changed from"),
    ):
        for epoch in loader.epochs():
            for _ in epoch:
                with path.open("ab") as file:
                    file.write(bytes(512))
