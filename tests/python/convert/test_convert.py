"""What nostall convert writes is the data set, and is read as such by nostall and by others."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pytest

import nostall
from nostall import convert
from nostall.base._locks import take_lock
from nostall.cli import main
from nostall.convert._database import datum
from nostall.convert._shards import _add, _archive
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.plan import Plan


@pytest.fixture
def folder(image_folder: Path) -> nostall.ImageFolder:
    return nostall.ImageFolder(image_folder, index=False)


def same(result: nostall.Source, folder: nostall.ImageFolder) -> bool:
    return (
        len(result) == len(folder)
        and np.array_equal(result.labels, folder.labels)
        and all(result.read(i) == folder.read(i) for i in range(len(folder)))
    )


def test_fields_that_would_be_lost_are_refused(folder: nostall.ImageFolder, tmp_path: Path) -> None:
    paths = [folder.describe(i) for i in range(len(folder))]
    several = nostall.Files({"image": paths, "mask": paths}, {"label": folder.labels})
    without = several.select(["image"])
    members = nostall.Arrays({"x": np.arange(3)})
    for write in (convert.to_lmdb, convert.to_tar):
        columns = nostall.Arrays({"x": np.arange(3), "label": np.arange(3)})
        pair = several.select(["image", "mask"])
        for source in (several, without, members, columns, pair, nostall.Subset(several, [1, 2])):
            with pytest.raises(UsageError, match="written are one field of files"):
                write(source, tmp_path / "no")
    made = nostall.Cached([1, 2, 3], makers=1)
    with pytest.raises(UsageError, match="items of"):
        convert.to_lmdb(made, tmp_path / "no")
    made.close()
    assert not list(tmp_path.glob("no*"))
    convert.to_lmdb(several.select(["image", "label"]), tmp_path / "db")
    assert same(nostall.LMDB(tmp_path / "db"), folder)


@pytest.mark.parametrize("values", ["raw", "pickled", "datum"])
def test_to_lmdb(folder: nostall.ImageFolder, tmp_path: Path, values: Any) -> None:
    done = convert.to_lmdb(folder, tmp_path / "db", values=values, commit_size="8KiB")
    assert (done.samples, done.resumed_at) == (61, 0)
    assert sorted(p.name for p in (tmp_path / "db").iterdir() if p.name[0] != ".") == [
        "classes.json",
        "data.mdb",
    ]
    stored = nostall.LMDB(tmp_path / "db", values=values)
    assert stored.index_reused
    assert same(stored, folder)
    # The labels are in the database, not in the index alone.
    assert same(nostall.LMDB(tmp_path / "db", values=values, index=False), folder)


def test_samples_lie_as_the_first_epoch_reads_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(40):
        (tmp_path / "data" / f"{i:02d}.bin").write_bytes(bytes([i + 1]) * (5000 + 100 * i))
    files = nostall.FileList(root=tmp_path / "data")
    order = Plan(samples=40, batch_size=8, world_size=2, seed=5).epoch_order(0).tolist()
    seen: list[int] = []
    result = convert.to_lmdb(
        files, tmp_path / "db", order="plan", seed=5, progress=lambda _, done: seen.append(done)
    )
    assert seen == [*range(1, 41), *range(1, 41)]
    database = nostall.LMDB(result.path)
    assert [database.read(i) for i in range(40)] == [files.read(i) for i in range(40)]
    whole = (result.path / "data.mdb").read_bytes()
    places = [whole.find(files.read(i)) for i in order]
    assert places == sorted(places)
    with nostall.DataLoader(database, 4, seed=5, epochs=1, transforms=None, tiers=[]) as loader:
        read = [
            bytes(sample)[0] - 1 for batch in next(iter(loader.epochs())) for sample in batch[0]
        ]
    assert read == order
    (tmp_path / "db2.partial").mkdir()
    left = '{"format": 2, "order": "plan of seed 5", "to": "lmdb"}'
    (tmp_path / "db2.partial" / "nostall-convert.json").write_text(left)
    with pytest.raises(UsageError, match="with other options"):
        convert.to_lmdb(files, tmp_path / "db2", order="plan", seed=6)


def test_liblmdb_reads_it(folder: nostall.ImageFolder, tmp_path: Path) -> None:
    convert.to_lmdb(folder, tmp_path / "raw")
    convert.to_lmdb(folder, tmp_path / "pickled", values="pickled")
    with (
        lmdb.open(str(tmp_path / "raw"), readonly=True, lock=False) as raw,
        lmdb.open(str(tmp_path / "pickled"), readonly=True, lock=False) as pickled,
        raw.begin() as one,
        pickled.begin() as two,
    ):
        for i in range(len(folder)):
            assert one.get(b"%08d" % i) == folder.read(i)
            assert pickle.loads(two.get(b"%08d" % i)) == (folder.read(i), folder.labels[i])


def test_datum_is_the_message_that_caffe_defines() -> None:
    assert datum(b"ab", 300) == b"\x22\x02ab\x28\xac\x02\x38\x01"
    assert datum(b"", -1) == b"\x22\x00\x28" + b"\xff" * 9 + b"\x01\x38\x01"


def test_to_tar(folder: nostall.ImageFolder, tmp_path: Path) -> None:
    done = convert.to_tar(folder, tmp_path / "shards", shard_size="40KiB")
    archives = sorted((tmp_path / "shards").glob("*.tar"))
    assert len(archives) > 3
    assert done.total_bytes == sum(p.stat().st_size for p in archives)
    with tarfile.open(archives[0]) as archive:
        assert archive.getnames()[:3] == ["00000000.jpg", "00000000.cls", "00000001.jpg"]
    assert same(nostall.TarShards(tmp_path / "shards"), folder)


def test_the_command(
    image_folder: Path,
    folder: nostall.ImageFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind, store in (("lmdb", nostall.LMDB), ("tar", nostall.TarShards)):
        dest = tmp_path / kind
        assert main(["convert", str(image_folder), str(dest), "--to", kind]) == 0
        assert "61 samples" in capsys.readouterr().out
        assert same(store(dest), folder) and store(dest).classes == folder.classes
        (dest / "classes.json").write_text('{"of": "another program"}')
        assert store(dest).classes is None
        assert main(["convert", str(image_folder), str(dest), "--to", kind]) == 2
        assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--to tar --values pickled", "--values is of --to lmdb"),
        ("--to tar --order plan", "--order is of --to lmdb"),
        ("--to tar --seed 0", "--seed is of --to lmdb"),
        ("--to tar --commit-size 1MiB", "--commit-size is of --to lmdb"),
        ("--shard-size 1MiB", "--shard-size is of --to tar"),
        ("--seed 3", "--seed is of --order plan"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert main(["convert", str(image_folder), str(tmp_path / "new"), *options.split()]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_the_command_passes_its_options_on(image_folder: Path, tmp_path: Path) -> None:
    place = [str(image_folder), str(tmp_path / "db")]
    assert main(["convert", *place, "--values", "pickled", "--order", "plan", "--seed", "3"]) == 0
    assert len(nostall.LMDB(tmp_path / "db", values="pickled")) == 61
    place[1] = str(tmp_path / "tar")
    assert main(["convert", *place, "--to", "tar", "--shard-size", "20KiB"]) == 0
    assert len(list((tmp_path / "tar").glob("*.tar"))) > 3


def test_a_class_without_images_keeps_its_label(make_folder: Any, tmp_path: Path) -> None:
    root = make_folder(6)
    (root / "class0a").mkdir()
    assert main(["convert", str(root), str(tmp_path / "db")]) == 0
    result = nostall.LMDB(tmp_path / "db")
    assert result.classes == ["class0", "class0a", "class1"] and set(result.labels) == {0, 2}


@pytest.mark.parametrize(("kind", "order"), [("lmdb", "source"), ("lmdb", "plan"), ("tar", "")])
def test_goes_on_after_kill_9(
    folder: nostall.ImageFolder, tmp_path: Path, kind: str, order: Any
) -> None:
    dest = tmp_path / "result"
    options = f"commit_size=8192, order={order!r}" if kind == "lmdb" else "shard_size=20480"
    call = f"convert.to_{kind}(nostall.ImageFolder({folder.root!r}, index=False), {str(dest)!r}, "
    slow = (
        "import time, nostall\nfrom nostall import convert\n"
        # A few samples in, each takes long enough to be killed.
        f"{call}{options}, progress=lambda _, done: time.sleep(0.0 if done < 40 else 60))"
    )
    process = subprocess.Popen([sys.executable, "-c", slow], env=os.environ)
    deadline = time.monotonic() + 120
    unfinished = dest.with_name("result.partial")

    def written() -> int:
        if kind == "tar":
            return len(list(unfinished.glob("*.tar")))
        try:
            with lmdb.open(str(unfinished), readonly=True, lock=False) as environment:
                return int(environment.stat()["entries"])
        except lmdb.Error:
            return 0

    while written() < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, "it ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not dest.exists()

    if kind == "lmdb":
        done = convert.to_lmdb(folder, dest, commit_size=8192, order=order)
        result: nostall.Source = nostall.LMDB(dest, index=False)
    else:
        done = convert.to_tar(folder, dest, shard_size=20480)
        result = nostall.TarShards(dest, index=False)
    assert 0 < done.resumed_at < 61
    assert same(result, folder)
    assert not unfinished.exists()


def interrupted(to: Any, source: nostall.Source, dest: Path) -> None:
    def stop(phase: str, done: int) -> None:
        if done == 30:
            raise KeyboardInterrupt

    small = {"shard_size": 20480} if to is convert.to_tar else {"commit_size": 8192}
    with pytest.raises(KeyboardInterrupt):
        to(source, dest, progress=stop, **small)


def test_does_not_go_on_with_another_data_set(folder: nostall.ImageFolder, tmp_path: Path) -> None:
    interrupted(convert.to_lmdb, folder, tmp_path / "db")
    other = nostall.FileList(root=folder.root)
    with pytest.raises(UsageError, match="another data set"):
        convert.to_lmdb(other, tmp_path / "db", commit_size=8192)
    with pytest.raises(UsageError, match="another data set"):
        convert.to_lmdb(folder, tmp_path / "db", values="datum")
    assert 0 < convert.to_lmdb(folder, tmp_path / "db").resumed_at <= 30


@pytest.mark.parametrize("to", [convert.to_lmdb, convert.to_tar])
@pytest.mark.parametrize("view", [False, True])
def test_does_not_go_on_where_what_it_wrote_has_changed(
    folder: nostall.ImageFolder, tmp_path: Path, to: Any, view: bool
) -> None:
    files = nostall.FileList([folder.describe(i) for i in range(61)])
    source = nostall.Subset(files, range(1, 61)) if view else files
    interrupted(to, source, tmp_path / "new")
    more = {"shard_size": 20480} if to is convert.to_tar else {}
    first, last = (Path(source.describe(i)) for i in (0, len(source) - 1))
    at = first.stat().st_mtime_ns
    os.utime(last, ns=(at, at + 10**9))
    os.utime(first, ns=(at, at + 10**9))  # of the same size
    with pytest.raises(UsageError, match=rf"{first} has changed since .* then start again"):
        to(source, tmp_path / "new", **more)
    os.utime(first, ns=(at, at))
    assert to(source, tmp_path / "new", **more).resumed_at > 0


def test_does_not_go_on_with_another_state_of_shards(
    folder: nostall.ImageFolder, tmp_path: Path
) -> None:
    convert.to_tar(folder, tmp_path / "shards")
    interrupted(convert.to_lmdb, nostall.TarShards(tmp_path / "shards"), tmp_path / "db")
    (shard,) = (tmp_path / "shards").glob("*.tar")
    at = shard.stat().st_mtime_ns
    os.utime(shard, ns=(at, at + 10**9))
    changed = nostall.TarShards(tmp_path / "shards")
    with pytest.raises(UsageError, match="another state of this one"):
        convert.to_lmdb(changed, tmp_path / "db")
    os.utime(shard, ns=(at, at))
    same_again = nostall.TarShards(tmp_path / "shards")
    assert convert.to_lmdb(same_again, tmp_path / "db").resumed_at > 0


def test_goes_on_where_only_parts_without_a_sample_in_it_have_changed(
    folder: nostall.ImageFolder, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        convert.to_tar(folder, tmp_path / name)

    def view(ids: range) -> nostall.Subset:
        shards = [nostall.TarShards(tmp_path / name) for name in ("a", "b")]
        return nostall.Subset(nostall.Concat(shards), ids)

    of_one, of_both = range(61), range(10, 71)
    interrupted(convert.to_lmdb, view(of_one), tmp_path / "one")
    interrupted(convert.to_lmdb, view(of_both), tmp_path / "both")
    (shard,) = (tmp_path / "b").glob("*.tar")
    os.utime(shard, (1, 1))
    with pytest.raises(UsageError, match="another state of this one"):
        convert.to_lmdb(view(of_both), tmp_path / "both")
    assert convert.to_lmdb(view(of_one), tmp_path / "one").resumed_at > 0


def test_goes_on_with_thousands_of_parts(folder: nostall.ImageFolder, tmp_path: Path) -> None:
    convert.to_tar(nostall.Subset(folder, [0]), tmp_path / "shard")
    shard = nostall.TarShards(tmp_path / "shard")
    many = nostall.Concat([copy.copy(shard) for _ in range(3300)])
    interrupted(convert.to_lmdb, many, tmp_path / "db")
    went_on: list[int] = []

    def stop(phase: str, done: int) -> None:
        went_on.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.to_lmdb(many, tmp_path / "db", progress=stop)
    assert went_on[0] > 1


def test_what_another_release_left_is_told_as_such(
    folder: nostall.ImageFolder, tmp_path: Path
) -> None:
    interrupted(convert.to_lmdb, folder, tmp_path / "db")
    record = tmp_path / "db.partial" / "nostall-convert.json"
    state = json.loads(record.read_text())
    del state["format"]
    record.write_text(json.dumps(state, sort_keys=True))
    with pytest.raises(UsageError, match=r"by another release of nostall: remove it"):
        convert.to_lmdb(folder, tmp_path / "db")


@pytest.mark.parametrize("to", [convert.to_lmdb, convert.to_tar])
def test_what_is_complete_gets_its_name_later(
    folder: nostall.ImageFolder, tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "new"

    def takes_the_name(phase: str, done: int) -> None:
        if (phase, done) == ("verifying", 61):
            dest.mkdir()
            (dest / "of another").touch()

    with pytest.raises(IoError, match=rf"new\.partial is complete, .* named {dest}: .* move away"):
        to(folder, dest, progress=takes_the_name)
    dest.rename(tmp_path / "other")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            to(folder, dest)
    assert to(folder, dest).resumed_at == 61
    own = {path.name for path in dest.iterdir() if path.name.startswith("nostall-convert")}
    assert not own and not dest.with_name("new.partial").exists()


@pytest.mark.parametrize("to", [convert.to_lmdb, convert.to_tar])
def test_file_systems_without_locks(
    folder: nostall.ImageFolder,
    tmp_path: Path,
    to: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    caplog.set_level(logging.WARNING, "nostall")
    assert to(folder, tmp_path / "new").samples == 61
    assert "no second process may convert to it" in caplog.text


def test_a_conversion_goes_on_although_a_child_has_its_lock(
    folder: nostall.ImageFolder, tmp_path: Path
) -> None:
    state = tmp_path / "new.partial" / "nostall-convert.json"
    kept: list[int] = []

    def stop(phase: str, done: int) -> None:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), state.stat()):
                    kept.append(os.dup(int(name)))  # as a child that is forked now has it
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.to_tar(folder, tmp_path / "new", progress=stop)
    assert convert.to_tar(folder, tmp_path / "new").samples == 61
    assert kept
    for fd in kept:
        os.close(fd)


@pytest.mark.parametrize("end", ["finishes", "is refused", "leaves another"])
def test_what_another_process_ends_meanwhile_is_not_converted_again(
    folder: nostall.ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """It ends between the first look at the place and the lock."""
    dest, partial = tmp_path / "new", tmp_path / "new.partial"

    def lock(file: int) -> bool | None:
        if end == "leaves another":
            dest.mkdir()
        else:
            (partial / "nostall-convert.json").unlink()
            partial.rename(dest) if end == "finishes" else partial.rmdir()
        return take_lock(file)

    monkeypatch.setattr(convert._work, "take_lock", lock)
    words = "another process is converting" if end == "is refused" else "new exists already"
    with pytest.raises(UsageError, match=words):
        convert.to_lmdb(folder, dest)
    assert not partial.exists()


def test_of_a_record_that_cannot_be_written_nothing_is_left(
    folder: nostall.ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IoError, match="is full"):
        convert.to_lmdb(folder, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))
    made_before = tmp_path / "new.partial"
    made_before.mkdir()
    with pytest.raises(IoError, match="is full"):
        convert.to_lmdb(folder, tmp_path / "new")
    assert made_before.is_dir() and not list(made_before.iterdir())


def test_a_folder_that_stays_does_not_hide_that_the_disk_is_full(
    folder: nostall.ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps the name of a removed file in its folder while the file is open."""

    def fails(number: int) -> Any:
        def call(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    monkeypatch.setattr(Path, "rmdir", fails(errno.ENOTEMPTY))
    with pytest.raises(IoError, match="is full"):
        convert.to_lmdb(folder, tmp_path / "new")


def test_all_endings_are_looked_at_before_the_first_sample_is_written(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.txt"):
        (tmp_path / name).write_bytes(b"x")
    files = nostall.FileList([tmp_path / "a.jpg", tmp_path / "b.txt"])
    written: list[int] = []
    with pytest.raises(UsageError, match=r"b\.txt does not end as an image does"):
        convert.to_tar(files, tmp_path / "new", progress=lambda _, done: written.append(done))
    assert not written and not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("to", [convert.to_lmdb, convert.to_tar])
def test_a_place_in_the_folder_of_images_is_refused(
    folder: nostall.ImageFolder, tmp_path: Path, to: Any
) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder.root)
    for inside in (Path(folder.root) / "new", Path(folder.root) / "class0" / "new", link / "new"):
        with pytest.raises(UsageError, match=r"new lies in .*: convert to another place"):
            to(folder, inside)
        assert not inside.with_name("new.partial").exists()


@pytest.mark.parametrize("to", [convert.to_lmdb, convert.to_tar])
@pytest.mark.parametrize("threads", [0, -1, 2.5, True])
def test_threads_that_cannot_be_are_refused(
    folder: nostall.ImageFolder, tmp_path: Path, to: Any, threads: Any
) -> None:
    with pytest.raises(UsageError, match=f"threads must be a number of at least 1, not {threads}"):
        to(folder, tmp_path / "new", threads=threads)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["lmdb", "tar"])
def test_damage_is_found_before_the_result_has_its_name(
    folder: nostall.ImageFolder, tmp_path: Path, kind: str
) -> None:
    def damage(phase: str, done: int) -> None:
        if (phase, done) != ("verifying", 1):
            return
        file = next((tmp_path / "result.partial").glob("data.mdb" if kind == "lmdb" else "*0.tar"))
        data = bytearray(file.read_bytes())
        place = data.find(folder.read(7 if kind == "tar" else 60))
        data[place + 40] ^= 1
        with file.open("r+b") as changed:
            changed.write(data)

    make = convert.to_lmdb if kind == "lmdb" else convert.to_tar
    with pytest.raises((CorruptionError, IoError)):
        make(folder, tmp_path / "result", threads=1, progress=damage)  # type: ignore[operator]
    assert not (tmp_path / "result").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A real file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kind", ["lmdb", "tar"])
def test_a_full_disk_is_said_and_can_be_mended(
    tmp_path: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    root = tmp_path / "large"
    (root / "a").mkdir(parents=True)
    random = np.random.default_rng(0)
    for i in range(40):
        (root / "a" / f"{i:02d}.jpg").write_bytes(random.bytes(10_000))
    folder = nostall.ImageFolder(root, index=False)

    def make(**more: Any) -> convert.Converted:
        if kind == "lmdb":
            return convert.to_lmdb(folder, small_disk / "out", commit_size=20_000, **more)
        return convert.to_tar(folder, small_disk / "out", shard_size=50_000, **more)

    with pytest.raises(IoError, match="needs 400000 bytes more"):
        make()
    assert list(small_disk.iterdir()) == []
    capsys.readouterr()
    assert main(["convert", str(root), str(small_disk / "out"), "--to", kind]) == 3
    assert capsys.readouterr().err.startswith(f"nostall: {small_disk / 'out'} needs 400000 bytes")
    # Room that others take while it runs.
    monkeypatch.setattr(convert._work.Work, "check_room", lambda *_: None)
    with pytest.raises(IoError, match="is full") as error:
        make()
    assert error.value.errno == errno.ENOSPC
    assert not (small_disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert make().resumed_at > 0
    store = nostall.LMDB if kind == "lmdb" else nostall.TarShards
    assert same(store(small_disk / "out"), folder)


@pytest.mark.parametrize("kind", ["lmdb", "tar"])
def test_what_a_killed_conversion_left_is_no_room_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "data").mkdir()
    for i in range(20):
        (tmp_path / "data" / f"{i:02d}.jpg").write_bytes(bytes([i]) * 10_000)
    source, dest = nostall.FileList(root=tmp_path / "data"), tmp_path / "new"
    partial = tmp_path / "new.partial"
    left = partial / ("data.mdb" if kind == "lmdb" else "shard-000000.tar.partial")

    def stop(phase: str, done: int) -> None:
        if done == 15:
            raise KeyboardInterrupt

    def free(_: object) -> Any:
        used = sum(path.stat().st_blocks * 512 for path in partial.iterdir())
        return SimpleNamespace(free=400_000 - used)

    make: Any = convert.to_lmdb if kind == "lmdb" else convert.to_tar
    with pytest.raises(KeyboardInterrupt):
        make(source, dest, progress=stop)
    with left.open("ab") as file:  # what a killed transaction or archive had written
        file.write(bytes(380_000))
        os.fsync(file.fileno())
    monkeypatch.setattr(shutil, "disk_usage", free)
    assert make(source, dest).samples == 20


def test_samples_of_any_size_go_into_an_archive(tmp_path: Path) -> None:
    """Also those whose size USTAR cannot hold."""
    large = tarfile.TarInfo("00000000.jpg")
    large.size = 1 << 33
    with (tmp_path / "a.tar").open("wb") as file:
        archive = _archive(file)
        archive.addfile(large)
        file.seek(large.size, os.SEEK_CUR)
        _add(archive, "00000000.cls", b"3")
        archive.close()
    assert nostall.TarShards(tmp_path / "a.tar", index=False).sizes.tolist() == [1 << 33]


@pytest.mark.parametrize("label", [2**31, -(2**31) - 1])
def test_labels_beyond_a_datum_are_refused_before_the_work(
    folder: nostall.ImageFolder, tmp_path: Path, label: int
) -> None:
    paths = [folder.describe(i) for i in range(3)]
    source = nostall.FileList(paths, [0, label, 1])
    with pytest.raises(UsageError, match=rf"label {label} of {paths[1]} .*values=\"raw\""):
        convert.to_lmdb(source, tmp_path / "new", values="datum")
    assert not list(tmp_path.glob("new*"))
    assert convert.to_lmdb(source, tmp_path / "new").samples == 3
    assert nostall.LMDB(tmp_path / "new").labels.tolist() == [0, label, 1]


def test_a_path_need_not_be_utf_8(folder: nostall.ImageFolder, tmp_path: Path) -> None:
    dest = tmp_path / os.fsdecode(b"caf\xe9")
    convert.to_lmdb(folder, dest)
    assert same(nostall.LMDB(dest), folder)


def test_labels_that_do_not_fit_are_refused(folder: nostall.ImageFolder, tmp_path: Path) -> None:
    convert.to_lmdb(folder, tmp_path / "db")
    with (
        lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(b"__labels__", b"12345678" * 60)
    with pytest.raises(CorruptionError, match="a label for each of 61"):
        nostall.LMDB(tmp_path / "db")
    assert nostall.LMDB(tmp_path / "db", label=[5] * 61).labels.tolist() == [5] * 61


def test_parts_and_shards_keep_the_names_of_their_classes(
    folder: nostall.ImageFolder, tmp_path: Path
) -> None:
    convert.to_tar(nostall.Subset(folder, range(5)), tmp_path / "tar")
    shards = nostall.TarShards(tmp_path / "tar")
    assert shards.classes == folder.classes
    convert.to_lmdb(shards, tmp_path / "db")
    assert nostall.LMDB(tmp_path / "db").classes == folder.classes


def test_pixels_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["l"] = np.zeros((3, 8, 8, 3), np.uint8), np.arange(3)
    pixels = nostall.HDF5(tmp_path / "a.h5", "x", labels="l")
    for write in (convert.to_lmdb, convert.to_tar):
        with pytest.raises(UsageError, match="has pixels without a format of images"):
            write(pixels, tmp_path / "no")
    assert not list(tmp_path.glob("no*"))
