"""The slowed file system keeps its promises: rate, saturation, exact counts, clean unmounts."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall_bench.slowfs import SlowFS, missing

pytestmark = pytest.mark.alone

MB = 1_000_000
needs_fuse = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def backing(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "backing"
    (root / "sub").mkdir(parents=True)
    for i in range(8):
        (root / "sub" / f"{i}.bin").write_bytes(os.urandom(500_000 + i))
    yield root


def read_all(root: Path) -> int:
    return sum(len(p.read_bytes()) for p in sorted((root / "sub").iterdir()))


def reaches(rate: float, measure: Callable[[], float]) -> None:
    """Once of 20 times: a machine that does other things delays what reads, or what is read."""
    found: list[float] = []
    while len(found) < 20:
        found.append(measure())
        if found[-1] == pytest.approx(rate, rel=0.15):
            return
    raise AssertionError(f"none of {found} is near {rate}")


@needs_fuse
def test_content_and_counters_are_exact(backing: Path, tmp_path: Path) -> None:
    total = sum(500_000 + i for i in range(8))
    with SlowFS(backing, tmp_path / "mnt") as fs:
        for path in sorted((backing / "sub").iterdir()):
            assert (tmp_path / "mnt" / "sub" / path.name).read_bytes() == path.read_bytes()
        assert fs.served_bytes == total
        assert fs.operations["open"] == 8
        # Files are forgotten at each open, so a second pass is served in full again.
        assert read_all(tmp_path / "mnt") == total
        assert fs.served_bytes == 2 * total


@needs_fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts without fusermount3")
def test_root_needs_no_program_of_fuse(
    backing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "umount").symlink_to(str(shutil.which("umount")))
    monkeypatch.setenv("PATH", str(programs))
    assert missing() is None
    with SlowFS(backing, tmp_path / "mnt") as fs:
        fs.drop_caches()
        assert read_all(tmp_path / "mnt") == fs.served_bytes
        assert os.path.ismount(tmp_path / "mnt")
    assert not os.path.ismount(tmp_path / "mnt")


@needs_fuse
def test_a_kept_cache_serves_once_until_dropped(backing: Path, tmp_path: Path) -> None:
    total = sum(500_000 + i for i in range(8))
    with SlowFS(backing, tmp_path / "mnt", keep_cache=True) as fs:
        read_all(tmp_path / "mnt")
        read_all(tmp_path / "mnt")
        assert fs.served_bytes == total
        fs.drop_caches()
        read_all(tmp_path / "mnt")
        assert fs.served_bytes == 2 * total


@needs_fuse
def test_one_client_gets_the_stated_bandwidth(backing: Path, tmp_path: Path) -> None:
    with SlowFS(backing, tmp_path / "mnt", bandwidth=4 * MB) as fs:

        def measure() -> float:
            began, before = time.perf_counter(), fs.served_bytes
            size = read_all(tmp_path / "mnt")
            assert fs.served_bytes - before == size
            return size / (time.perf_counter() - began)

        reaches(4 * MB, measure)


@needs_fuse
def test_clients_together_saturate_at_the_aggregate(backing: Path, tmp_path: Path) -> None:
    with SlowFS(backing, tmp_path / "mnt", bandwidth=4 * MB, aggregate=6 * MB, clients=2) as fs:
        reaches(4 * MB, lambda: fs.measure(seconds=0.6)[0])
        reaches(6 * MB, lambda: fs.measure(seconds=0.6)[1])


@needs_fuse
def test_two_clients_below_the_aggregate_do_not_disturb_each_other(
    backing: Path, tmp_path: Path
) -> None:
    with SlowFS(backing, tmp_path / "mnt", bandwidth=4 * MB, clients=2) as fs:

        def measure() -> float:
            began, before = time.perf_counter(), fs.served_bytes
            threads = [threading.Thread(target=read_all, args=(mount,)) for mount in fs.mounts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return (fs.served_bytes - before) / (time.perf_counter() - began)

        reaches(8 * MB, measure)


@needs_fuse
def test_latency_is_paid_by_every_open_and_read(backing: Path, tmp_path: Path) -> None:
    (backing / "small").write_bytes(b"x")
    with SlowFS(backing, tmp_path / "mnt", latency=0.05):
        began = time.perf_counter()
        (tmp_path / "mnt" / "small").read_bytes()
        took = time.perf_counter() - began
    assert took >= 0.1


@needs_fuse
def test_writing_is_refused(backing: Path, tmp_path: Path) -> None:
    with SlowFS(backing, tmp_path / "mnt"), pytest.raises(OSError, match="Read-only"):
        (tmp_path / "mnt" / "sub" / "new").write_bytes(b"x")


@needs_fuse
def test_a_killed_daemon_leaves_no_mount(backing: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mnt"
    with SlowFS(backing, mount) as fs:
        os.kill(fs.daemons[0], signal.SIGKILL)
        with pytest.raises(OSError, match=r"not connected|abort"):
            while True:
                (mount / "sub" / "0.bin").read_bytes()
                time.sleep(0.01)
    assert not os.path.ismount(mount)
    assert list(mount.iterdir()) == []


@needs_fuse
def test_an_error_inside_unmounts(backing: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), SlowFS(backing, tmp_path / "mnt"):
        raise KeyboardInterrupt
    assert not os.path.ismount(tmp_path / "mnt")


def test_a_missing_backing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent is not a directory"):
        SlowFS(tmp_path / "absent", tmp_path / "mnt")


@needs_fuse
def test_a_head_seeks_where_readers_take_turns(backing: Path, tmp_path: Path) -> None:
    size, piece = 16 * 65536, 65536
    (backing / "long").write_bytes(os.urandom(size))

    def seeks(order: list[tuple[int, int]]) -> int:
        """Of reads of one piece, (client, piece of the file) each."""
        with SlowFS(
            backing, tmp_path / "mnt", clients=2, servers=2, seek=10e-3, stripe=piece
        ) as fs:
            files = [os.open(m / "long", os.O_RDONLY | os.O_DIRECT) for m in fs.mounts]
            try:
                began = time.perf_counter()
                for client, index in order:
                    os.pread(files[client], piece, index * piece)
                took = time.perf_counter() - began
            finally:
                for file in files:
                    os.close(file)
            assert took >= fs.seeks * 5e-3
            return fs.seeks

    halves = [[(client, 8 * client + i) for i in range(8)] for client in (0, 1)]
    # One reader after the other: the first read of each server, and nothing else.
    assert seeks(halves[0] + halves[1]) == 2
    # In turns: every read.
    assert seeks([one for pair in zip(*halves, strict=True) for one in pair]) == 16


def test_storage_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="servers must be 0 to 64"):
        SlowFS(tmp_path, tmp_path / "mnt", servers=65)
    with pytest.raises(UsageError, match="seek and ttl must not be negative"):
        SlowFS(tmp_path, tmp_path / "mnt", seek=-1)
