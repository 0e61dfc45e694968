"""What the processes of a job need alike is made by one of them, also when that one is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prefork
import pytest

import nostall
from nostall.base import _made_once
from nostall.base._made_once import made_once

# A rank: opens the tokens and packs them, tells what it did, and lives until it is killed. Of
# looking for documents it tells before it begins; the one that is to be killed goes no further.
RANK = """
import json, os, sys, time
import nostall
from nostall.source import _tokens

def tell(**what):
    print(json.dumps(what), flush=True)

def look(self, progress, examine=_tokens.Tokens._examine):
    tell(looks=True)
    while sys.argv[2] == "hang":
        time.sleep(1)
    return examine(self, progress)

_tokens.Tokens._examine = look
index = os.path.join(sys.argv[1], "index") if sys.argv[3] == "stored" else False
file = os.path.join(sys.argv[1], "a.bin")
tokens = nostall.Tokens(file, dtype="uint16", end=0, index=index)
packed = nostall.Packed(tokens, 128)
shared = {}
with open("/proc/self/maps") as maps:
    for line in maps:
        if "memfd:nostall-" in line:
            shared.setdefault(line.split(":")[-1].split()[0], set()).add(line.split()[4])
tell(
    documents=tokens.documents,
    fingerprint=packed.fingerprint,
    units=[packed.segments(u) for u in (0, len(packed) - 1)],
    shared={name: sorted(nodes) for name, nodes in shared.items()},
)
time.sleep(600)
"""
DOCUMENTS = 300_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    ids = np.ones((DOCUMENTS, 30), np.uint16)  # 18 MB
    ids[np.arange(DOCUMENTS), np.random.default_rng(0).integers(1, 29, DOCUMENTS)] = 0
    ids.tofile(folder / "a.bin")
    return folder


@contextlib.contextmanager
def rank(folder: Path, what: str, kept: str) -> Iterator[Any]:
    process = prefork.Process(["-c", RANK, str(folder), what, kept], stdout=prefork.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def told(process: Any) -> list[dict[str, Any]]:
    """What a rank tells, until it has its units."""
    lines: list[dict[str, Any]] = []
    while not lines or "documents" not in lines[-1]:
        lines.append(json.loads(process.stdout.readline()))
    return lines


@pytest.mark.parametrize("kept", ["stored", "nowhere"])
def test_one_process_looks_for_documents_and_packs_them(kept: str, folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(rank(folder, "hang", kept))
        assert json.loads(first.stdout.readline()) == {"looks": True}
        others = [stack.enter_context(rank(folder, "", kept)) for _ in range(3)]
        os.kill(first.pid, signal.SIGKILL)
        lines = [told(other) for other in others]
    assert sum("looks" in line for found in lines for line in found) == 1
    (one, *more) = (found[-1] for found in lines)
    assert all(other == one for other in more)
    # The packing is one file in memory, and so are the documents that are stored nowhere.
    names = {"nostall-packing"} | ({"nostall-listing"} if kept == "nowhere" else set())
    assert names <= one["shared"].keys()
    assert all(len(one["shared"][name]) == 1 for name in names)
    left = sorted(p.name for p in folder.iterdir())
    assert left == (["a.bin", "index"] if kept == "stored" else ["a.bin"])
    tokens = nostall.Tokens(
        folder / "a.bin",
        dtype="uint16",
        end=0,
        index=folder / "index" if "index" in left else False,
    )
    assert one["documents"] == tokens.documents == DOCUMENTS + 1
    packed = nostall.Packed(tokens, 128)
    assert one["fingerprint"] == packed.fingerprint
    assert one["units"] == [[list(s) for s in packed.segments(u)] for u in (0, len(packed) - 1)]
    for path in folder.glob("index"):
        path.unlink()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def opened(path: str) -> list[int]:
    """Of this process's descriptors those of a file."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):
            if os.path.realpath(f"/proc/self/fd/{fd}") == path:
                found.append(fd)
    return found


def makes(caplog: pytest.LogCaptureFixture, file: str, load: Callable[[], int | None]) -> int:
    """By a process that did not wait in vain."""
    with caplog.at_level(logging.WARNING, "nostall"):
        what = made_once(file, load, lambda: 2, 60)
    assert not caplog.messages
    return what


def test_what_cannot_be_kept_is_not_made_one_after_the_other(tmp_path: Path) -> None:
    """All that waited make it at once: each one comes to the barrier."""
    file, begun = str(tmp_path / "file"), threading.Event()
    at_once = threading.Barrier(3, timeout=60)
    made = []

    def first() -> int:
        begun.set()
        waits.wait(60)
        return 1

    def make() -> int:
        at_once.wait()
        return 2

    def load() -> None:
        return None

    waits = threading.Event()
    threads = [threading.Thread(target=lambda: made.append(made_once(file, load, first, 60)))]
    threads[0].start()
    assert begun.wait(60)
    # They have the lock's file open before it is taken away.
    for _ in range(3):
        threads.append(
            threading.Thread(target=lambda: made.append(made_once(file, load, make, 60)))
        )
        threads[-1].start()
    lock = os.path.realpath(f"{file}.lock")
    until(lambda: len(opened(lock)) == 4)
    waits.set()
    for thread in threads:
        thread.join()
    assert sorted(made) == [1, 2, 2, 2]
    assert not list(tmp_path.iterdir())


def test_those_that_wait_try_one_after_the_other_what_failed(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    lock = os.path.realpath(f"{file}.lock")
    begun, waits, failed = threading.Event(), threading.Event(), []

    def make() -> int:
        with open(lock) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begun.set()
        assert waits.wait(60)
        raise RuntimeError("it cannot be made")

    def one() -> None:
        try:
            made_once(file, lambda: None, make, 60)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=one) for _ in range(3)]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    until(lambda: len(opened(lock)) == 3)
    waits.set()
    for thread in threads:
        thread.join()
    assert len(failed) == 3
    assert not list(tmp_path.iterdir())
    assert made_once(file, lambda: None, lambda: 1, 60) == 1
    assert not list(tmp_path.iterdir())


def test_who_comes_late_to_what_failed_waits_for_the_next_one_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the lock of the one that failed when another has made a new one."""
    waits, goes_on, making = threading.Event(), threading.Event(), threading.Lock()
    file, late = str(tmp_path / "file"), []

    def sleep(_: float) -> None:
        waits.set()
        assert goes_on.wait(60)

    def make_late() -> int:
        assert making.acquire(blocking=False)
        making.release()
        return 3

    def fail() -> int:
        late.append(pool.submit(made_once, file, lambda: None, make_late, 60))
        assert waits.wait(60)
        raise RuntimeError("it cannot be made")

    def make() -> int:
        with making:
            waits.clear()
            goes_on.set()
            while not waits.wait(0.001):
                assert not late[0].done(), late[0].result()
        return 2

    monkeypatch.setattr(_made_once, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError):
            made_once(file, lambda: None, fail, 60)
        assert made_once(file, lambda: None, make, 60) == 2
        assert late[0].result(60) == 3
    assert not list(tmp_path.iterdir())


def test_a_turn_ends_although_a_child_has_its_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(tmp_path / "file")
    lock = os.path.realpath(f"{file}.lock")
    kept = []

    def make() -> int:
        assert os.stat(lock).st_mode & 0o777 == 0o600  # for no other user to hold
        kept.extend(os.dup(fd) for fd in opened(lock))  # as a child that is forked now has it
        os.link(lock, tmp_path / "same")
        return 1

    before = os.umask(0)
    try:
        assert made_once(file, lambda: None, make, 60) == 1
    finally:
        os.umask(before)
    os.rename(tmp_path / "same", lock)  # as a process has it that waited
    assert makes(caplog, file, lambda: None) == 2
    os.close(*kept)


def test_a_lock_that_is_taken_away_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(tmp_path / "file")
    lock = os.path.realpath(f"{file}.lock")
    found: list[int] = []
    with open(lock, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waits = threading.Thread(target=lambda: found.append(makes(caplog, file, lambda: 3)))
        waits.start()
        until(lambda: len(opened(lock)) == 2)
        os.unlink(lock)
        waits.join()
    assert found == [3]


def test_a_lock_of_another_user_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "file")
    with open(f"{file}.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert makes(caplog, file, lambda: None) == 2
    assert os.listdir(tmp_path) == ["file.lock"]


def test_nothing_is_left_where_there_are_no_locks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "refused")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert makes(caplog, str(tmp_path / "file"), lambda: None) == 2
    assert not list(tmp_path.iterdir())


def test_a_process_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    file = str(tmp_path / "file")

    def make() -> int:
        return made_once(file, lambda: None, lambda: 2, 0.2)

    assert made_once(file, lambda: None, make, 60) == 2
    # A folder that is not there has no locks.
    assert made_once(str(tmp_path / "none" / "file"), lambda: None, lambda: 3, 60) == 3
