"""nostall calibrate, and starting from what it wrote."""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nodes import free_port
from procfs import OwnSharedMemory

import nostall
from nostall.base._sizes import parse_tiers
from nostall.cli import _calibrate, main
from nostall.cli._calibrate import Curve
from nostall.errors import IoError, PeerError, UsageError
from nostall.job._world import World
from nostall.loader._calibration import Calibration
from nostall_bench.slowfs import SlowFS, missing

FAST = ["--seconds", "0.15", "--max-threads", "2"]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "nostall", "calibrate", *FAST, *map(str, words)]


def test_one_node(image_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.toml"
    words = command(image_folder, "--tiers", "ram:8MiB", f"{tmp_path / 'tier'}:8MiB", "--out", out)
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = Calibration.load(out)
    assert found.nodes == 1
    assert set(found.tiers) == {"ram", str(tmp_path / "tier")}
    assert len(found.tiers["ram"]) == 2
    assert found.beta > 0
    assert found.network == 0
    assert list((tmp_path / "tier").iterdir()) == []
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False), 8, tiers=["ram:8MiB"], calibration=out
    ) as loader:
        assert sum(len(labels) for _, labels in loader) == 61


def test_threads_that_get_no_processor_in_time_count(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    over.set()
    monkeypatch.setattr(_calibrate, "_timed", lambda work, *_: work(0, over))
    assert _calibrate._Source(_calibrate._files(image_folder, b"")).read(1, 0.0) > 0
    tiers = ["ram:1MiB", f"{tmp_path / 'tier'}:1MiB"]
    for tier in parse_tiers(tiers, dataset_bytes=0, local_world_size=1):
        read, write = _calibrate.tier_curves(tier, 1000, 2, 0.0)
        assert min(read + write) > 0


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.multi
def test_two_nodes_share_the_storages_bandwidth(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    out = tmp_path / "c.toml"
    environment = {
        **os.environ,
        "NOSTALL_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}",
        "NOSTALL_SECRET": secrets.token_hex(16),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "NOSTALL_UCX_TLS": "tcp",
    }
    # Storage so slow, and files so large, that a busy machine is fast beside them.
    data = tmp_path / "data"
    data.mkdir()
    for number in range(40):
        (data / f"{number}").write_bytes(bytes(20_000))
    with SlowFS(data, tmp_path / "mounts", 2e5, 3e5, 0.0, clients=2) as storage:
        started = [
            subprocess.Popen(
                command(
                    storage.mounts[rank], "--tiers", "ram:8MiB", "--out", out, "--seconds", "1"
                ),
                env={**environment, "RANK": str(rank), "NOSTALL_NODE": f"node {rank}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in started:
            _, err = process.communicate(timeout=400)
            assert process.returncode == 0, err
    found = Calibration.load(out)
    assert found.nodes == 2
    one, two = found.source
    assert 1e5 < one < 3.2e5
    assert one * 1.1 < two < 4.8e5
    assert found.network > 0
    assert found.seconds_per_byte("source", 2) == pytest.approx(2 / (two / 2))
    assert found.seconds_per_byte("file", 2) == 0


def exchange_program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in the place of nostall-exchange."""
    program = folder / "exchange"
    program.write_text(f"#!/bin/sh\n{text}")
    program.chmod(0o755)
    monkeypatch.setattr(_calibrate, "find_program", lambda *_: program)


@pytest.mark.parametrize("silent", [[], ["serve"], ["serve", "ask"]], ids=["dead", "half", "both"])
def test_nodes_that_exchange_nothing_leave_the_bandwidth_out(
    silent: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = "|".join(silent) or "none"
    hangs = f"case $1 in {waits}) exec sleep 600;; esac\nexit 1\n"
    exchange_program(tmp_path, hangs, monkeypatch)
    monkeypatch.setattr(_calibrate, "_EXCHANGE_SECONDS", 0.2)
    told: dict[int, bytes] = {}
    meet = threading.Barrier(2)

    def rank(number: int) -> dict[str, float]:
        def allgather(mine: bytes) -> list[bytes]:
            told[number] = mine
            meet.wait(60)
            all_of_them = [told[0], told[1]]
            meet.wait(60)
            return all_of_them

        world = World(number, 2, 0, 1, "calibrate")
        return _calibrate._network(allgather, [0, 1], world, True, 1000, 0.1)

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(rank, range(2))) == [{}, {}]
    warning = capsys.readouterr().err
    assert warning.count("nodes 0 and 1 exchanged no samples, so b_c is left out") == 1


@pytest.mark.parametrize(
    "answer", ['{"megabytes_per_s": 1', '{"megabytes_per_s": 0.0, "latency_us": 0.0}']
)
def test_an_answer_that_was_cut_off_or_has_no_samples_is_none(
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exchange_program(tmp_path, f"echo there; printf '{answer}'\n", monkeypatch)
    world = World(0, 2, 0, 1, "calibrate")
    # Rank 0 is the node that asks.
    found = _calibrate._network(lambda mine: [mine, mine], [1, 0], world, True, 1000, 0.1)
    assert found == {}
    assert "exchanged no samples" in capsys.readouterr().err


def test_an_exchange_ends_with_the_error_of_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_program(tmp_path, "echo $$\nexec sleep 600\n", monkeypatch)
    started = []

    def allgather(mine: bytes) -> list[bytes]:
        started.append(int(mine))
        raise PeerError("rank 1 is gone")

    world = World(0, 2, 0, 1, "calibrate")
    with pytest.raises(PeerError):
        _calibrate._network(allgather, [0, 1], world, True, 1000, 0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(60)
            assert not thread.is_alive()


def in_turn(work: Callable[[int, threading.Event], int], threads: int, _: float) -> float:
    """In the place of `_timed`: each thread's least work."""
    over = threading.Event()
    over.set()
    return float(sum(work(thread, over) for thread in range(threads)))


def test_threads_read_different_pieces_of_few_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        read.append(offset)
        return real(descriptor, size, offset)

    piece, large = _calibrate._PIECE, tmp_path / "large"
    os.close(os.open(large, os.O_CREAT))
    os.truncate(large, 4 * piece + 5)
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(_calibrate, "_timed", in_turn)
    assert _calibrate._Source([str(large)]).read(4, 0.0) == 4 * piece
    assert sorted(read) == [0, piece, 2 * piece, 3 * piece]
    never = threading.Event()
    for shares in (1, 3, 8):
        moved = [_calibrate._read_share(str(large), s, shares, never) for s in range(shares)]
        assert sum(moved[:5]) == 4 * piece + 5
    small = [tmp_path / name for name in "abc"]
    for path in small:
        path.write_bytes(b"1" * 10)
    assert _calibrate._Source([*map(str, small)]).read(8, 0.0) == 80


def test_files_that_are_in_memory_are_read_from_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is dropped from memory before its first byte, and none is read again too early."""
    paths = [str(tmp_path / name) for name in "abcde"]
    for path in paths:
        Path(path).write_bytes(b"1" * 10)
    events: list[tuple[str, str]] = []
    advise, pread = os.posix_fadvise, os.pread

    def note(what: str, descriptor: int) -> None:
        events.append((what, os.readlink(f"/proc/self/fd/{descriptor}")))

    def advised(descriptor: int, offset: int, length: int, advice: int) -> None:
        if (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED):
            note("drop", descriptor)
        advise(descriptor, offset, length, advice)

    def read(descriptor: int, size: int, offset: int) -> bytes:
        note("read", descriptor)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(_calibrate, "_timed", in_turn)
    source = _calibrate._Source(paths)
    assert [source.read(threads, 0.0) for threads in (1, 2, 3)] == [10, 20, 30]
    turn = [*paths, paths[0]]
    assert events == [event for path in turn for event in (("drop", path), ("read", path))]


def test_nodes_read_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another node has read may come from the memory of the storage's servers."""
    here, told, meet = threading.local(), [b"", b"", b""], threading.Barrier(3)
    read: list[list[str]] = [[], [], []]
    for node in range(3):  # as mounted, and listed, on each
        for number in range(40)[:: -1 if node else 1]:
            path = tmp_path / f"mount {node}" / f"{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"1" * 10)

    def allgather(mine: bytes) -> list[bytes]:
        told[here.rank] = mine
        meet.wait(60)
        all_of_them = [*told]
        meet.wait(60)
        return all_of_them

    def read_share(path: str, *_: object) -> int:
        read[here.rank].append(os.path.basename(path))
        return 10

    # Their processes have one number, as in containers.
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(_calibrate, "find_world", lambda: World(here.rank, 3, 0, 1, "calibrate"))
    monkeypatch.setattr(_calibrate, "_allgather", lambda *_: allgather)
    monkeypatch.setattr(_calibrate, "_nodes", lambda _: [0, 1, 2])
    monkeypatch.setattr(_calibrate, "_network", lambda *_: {})
    monkeypatch.setattr(_calibrate, "_read_share", read_share)
    monkeypatch.setattr(_calibrate, "_timed", in_turn)

    def calibrated(rank: int) -> None:
        here.rank = rank
        parser = argparse.ArgumentParser()
        _calibrate.add_arguments(parser)
        words = [str(tmp_path / f"mount {rank}"), "--tiers", "--max-threads", "2"]
        _calibrate.run(parser.parse_args([*words, "--out", str(tmp_path / "c.toml")]))

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(calibrated, range(3))) == [None] * 3
    every = [name for one in read for name in one]
    assert min(map(len, read)) >= 1 and len(every) >= 9
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("place", [0, 36])
def test_nodes_share_files_out_wherever_they_begin(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int, int]] = []

    def read_share(path: str, share: int, shares: int, _: threading.Event) -> int:
        read.append((path, share, shares))
        return 10

    monkeypatch.setattr(_calibrate, "_read_share", read_share)
    monkeypatch.setattr(_calibrate, "_timed", in_turn)

    def spread(files: int) -> list[_calibrate._Source]:
        read.clear()
        sources = [_calibrate._Source([*map(str, range(files))]) for _ in range(8)]
        for node, source in enumerate(sources):
            source.spread(place % files, node, 8)
        return sources

    for node, source in enumerate(spread(48)):
        for _ in range(3 if node == 0 else 1):  # as with 1, 2, ... nodes
            source.read(2, 0.0)
    assert len(read) == 20 and len({path for path, *_ in read}) == 20
    assert {shares for *_, shares in read} == {1}
    for source in spread(3):
        source.read(2, 0.0)
    assert {*read} == {
        (str(file), share, shares)
        for file, shares in zip(range(3), (6, 5, 5), strict=True)
        for share in range(shares)
    }


def test_what_is_no_file_is_not_read_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(b"1")
    os.symlink(tmp_path / "folder" / "a", tmp_path / "link")
    os.symlink(tmp_path / "nothing", tmp_path / "broken")
    files = _calibrate._files(tmp_path, b"")
    assert {os.path.basename(path) for path in files} == {"a", "link"}
    for path in files:
        os.unlink(path)
    with pytest.raises(IoError, match=f"cannot read {files[0]}: No such file"):
        _calibrate._Source(files[:1]).read(3, 600.0)
    with pytest.raises(IoError, match=f"cannot list {tmp_path}/none: No such file"):
        _calibrate._files(tmp_path / "none", b"")


def test_ranks_wait_for_each_other_as_long_as_the_measurements_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two meetings of two ranks on a node."""
    took, waits = [0.0], []

    def timed(work: Callable[[int, threading.Event], int], threads: int, seconds: float) -> float:
        took[-1] += seconds
        return in_turn(work, threads, seconds)

    def meet(*_: object, timeout: float) -> Callable[[bytes], list[bytes]]:
        took.append(0.0)
        waits.append(timeout)
        return lambda mine: [mine, mine]

    monkeypatch.setattr(_calibrate, "_timed", timed)
    monkeypatch.setattr(_calibrate, "find_rendezvous", meet)
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a").write_bytes(b"1" * 10)
    tiers = ["--tiers", "ram:1MiB", f"{tmp_path / 'tier'}:1MiB", "--out", str(tmp_path / "out")]
    points = ["--seconds", "1000", "--max-threads", "3", "--sample-bytes", "1000"]
    assert main(["calibrate", str(tmp_path), *tiers, *points]) == 0
    assert max(took) == 2 * 2 * 3 * 1000
    assert min(waits) >= max(took) + 100


def test_a_small_shared_memory_bounds_what_is_measured_there(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "c.toml"
    data.mkdir()
    (data / "a").write_bytes(b"1" * 10)
    with OwnSharedMemory("8m") as own:
        done = subprocess.run(
            [*own.within, *command(data, "--out", out)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert Calibration.load(out).tiers.keys() == {"ram"}
        done = subprocess.run(
            [*own.within, *command(data, "--sample-bytes", "5MiB")], capture_output=True, text=True
        )
    assert done.returncode == 2
    assert "/dev/shm has 8388608 bytes free, too few to measure samples of 5242880" in done.stderr


def test_samples_have_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").touch()
    assert main(["calibrate", str(tmp_path), "--sample-bytes", "0"]) == 2
    assert "--sample-bytes 0: a sample has 1 byte or more" in capsys.readouterr().err


def test_one_more_thread_must_earn_its_place() -> None:
    assert Curve([100, 190, 200, 201]).threads == 2
    assert Curve([100, 101, 102]).threads == 1
    assert Curve([100, 150, 200, 250]).threads == 4


def test_the_best_number_of_threads_bounds_reads_of_directories(
    image_folder: Path, tmp_path: Path
) -> None:
    slow, fast, other = (str(tmp_path / name) for name in ("slow", "fast", "other"))
    out = tmp_path / "c.toml"
    head = "format = 1\n[environment]\nN = 1\n[source]\nthreads = 2\nt = [1e8]\n"
    row = '[[tiers]]\nname = "{}"\nthreads = {}\nr = [1e8, 2e8, 3e8, 4e8]\n'
    out.write_text(head + row.format("ram", 1) + row.format(slow, 3) + row.format(fast, 4))

    def tiers(*given: str, ranks: int = 1) -> str:
        with nostall.DataLoader(
            nostall.ImageFolder(image_folder, index=False), 8, tiers=list(given), calibration=out,
            rank=0, world_size=ranks, local_rank=0, local_world_size=ranks,
        ) as loader:  # fmt: skip
            return repr(loader).rpartition("[")[2]

    assert tiers("ram:8MiB", f"{slow}:8MiB") == f"ram:8MiB, {slow}:8MiB:readers=3]>"
    assert tiers(f"{slow}:8MiB", ranks=2) == f"{slow}:8MiB:readers=1]>"
    assert tiers(f"{slow}:8MiB:readers=7") == f"{slow}:8MiB:readers=7]>"
    # More than the four threads that were measured might be better still.
    assert tiers(f"{fast}:8MiB", f"{other}:8MiB") == f"{fast}:8MiB, {other}:8MiB]>"


def calibration(environment: str, t: str) -> str:
    return f"format = 1\n[environment]\n{environment}\n[source]\nthreads = 1\nt = {t}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not toml", "is not TOML"),
        ("format = 1  # \xe9", "is not TOML"),
        ("format = 9", "format is 9"),
        ("format = 1", "environment"),
        (calibration("N = 1", "[]"), "positive"),
        (calibration("N = 1", "[-1]"), "positive"),
        (calibration("N = 1", "[5, nan]"), "positive"),
        (calibration("N = 1", "[inf]"), "positive"),
        (calibration("N = 0", "[5]"), "N must be at least 1, not 0"),
        (calibration("N = inf", "[5]"), "is not a calibration"),
        (calibration("N = 2\nb_c = nan", "[5]"), "positive"),
        (calibration("N = 1\nbeta = nan", "[5]"), "positive"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=message):
        Calibration.load(path)


def test_missing_things_are_named(tmp_path: Path, make_folder: Callable[[int], Path]) -> None:
    with pytest.raises(IoError, match="cannot read"):
        Calibration.load(tmp_path / "none.toml")
    (tmp_path / "empty").mkdir()
    done = subprocess.run(command(tmp_path / "empty"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "has no files" in done.stderr
    root = make_folder(3)
    done = subprocess.run(
        command(root, "--tiers", "/proc/nostall:1MiB"), capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "/proc/nostall" in done.stderr
