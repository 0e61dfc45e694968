"""``nostall top`` asks the processes of its user: real ones, killed ones, and those of another user."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prefork
import pytest

import nostall
from nostall.base import _garbage
from nostall.cli import _top as top
from nostall.cli import main
from nostall.errors import UsageError
from nostall.observe import _live as live

# A training, which forks as loaders of torch do, and stops after its second batch.
TRAINS = """
import os, sys, time
import nostall

loader = nostall.DataLoader(nostall.ImageFolder(sys.argv[1], index=False), 4, tiers=[], output="numpy")
batches = iter(loader)
next(batches), next(batches)
if os.fork() == 0:
    print(os.getpid(), flush=True)  # now it has none of its parent's sockets
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is not stopped answers, however late; other tests leave loaders in cycles."""
    monkeypatch.setattr(live, "_SECONDS", 60.0)
    gc.collect()
    _garbage.await_all(None)  # closed in a thread of its own, a loader ends the listening late


@pytest.fixture
def trainings(image_folder: Path) -> Iterator[tuple[prefork.Process, prefork.Process]]:
    processes, children = [], []
    try:
        for _ in range(2):
            processes.append(
                prefork.Process(["-c", TRAINS, str(image_folder)], stdout=prefork.PIPE)
            )
        for process in processes:
            assert process.stdout is not None
            children.append(int(process.stdout.readline()))
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.__exit__()
        for child in children:
            os.kill(child, 9)


def stop(pid: int) -> None:
    """Returns once all threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T"
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        time.sleep(0.001)


def of(*processes: prefork.Process) -> dict[int, Any]:
    """What is said of these processes; those of other tests may be there too."""
    pids = [process.pid for process in processes]
    return {pid: said for pid, said in live.ask().items() if pid in pids}


STRANGER = """
import concurrent.futures.thread, contextlib, json, os, socket, sys
from nostall.observe import _live as live

os.setresuid(65534, 65534, 65534)
for name in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
        connection.connect("\\0" + name)
        assert connection.recv(1) == b"", name
assert live.ask() == {}
# Under a name that looks like one of the other user.
with socket.socket(socket.AF_UNIX) as planted:
    planted.bind("\\0" + live._NAME.format(user=sys.argv[1]) + "planted")
    planted.listen()
    print("listens", flush=True)
    sys.stdin.read()
"""


def check_another_user(pids: list[int]) -> None:
    """Another user gets no answer, and none of its own passes for one of this user."""
    names = list(live._names())
    assert len(names) >= len(pids)
    code = ["-c", STRANGER, str(os.geteuid()), *names]
    with subprocess.Popen(
        [sys.executable, *code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listens\n"
        assert any(name.endswith("planted") for name in live._names())
        found = live.ask()
        assert stranger.pid not in found and found.keys() >= set(pids)
    assert stranger.returncode == 0


def name_of(process: int) -> str | None:
    """The socket at which it listens, or has while a child of it lives."""
    for name in live._names():
        # One of another test's may end meanwhile.
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(f"\0{name}")
            if live._other_end(connection)[0] == process:
                return name
    return None


def parent(pid: int) -> int:
    return int(top.process.stat(pid)[1])


def test_top_asks_the_processes_of_its_user(
    trainings: tuple[prefork.Process, prefork.Process],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = trainings
    if os.geteuid() == 0:  # who may become another user
        check_another_user([first.pid, second.pid])
    said = of(first, second)
    assert len(said) == 2
    for (loader,) in said.values():
        assert (loader["rank"], loader["epoch"], loader["batch"], loader["samples"]) == (0, 0, 1, 8)
        assert loader["origins"] == {"ram": 0, "file": 0, "peer": 0, "source": 8}
        assert loader["seconds"] >= loader["stall_seconds"] > 0

    def shown(*names: object) -> set[str]:
        assert main(["top", *map(str, names), "--once"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        return set(out.split())

    pids = {str(first.pid), str(second.pid)}
    assert pids <= shown()
    assert pids & shown(first.pid) == {str(first.pid)}
    # The server of test processes has started both, as a launcher does.
    assert pids <= shown(parent(first.pid))

    # Of a process that is killed nothing is left, though a child of it lives.
    assert name_of(first.pid) is not None
    first.kill()
    first.wait()
    assert name_of(first.pid) is None
    assert list(of(first, second)) == [second.pid]
    stop(second.pid)
    monkeypatch.setattr(live, "_SECONDS", 1.0)
    assert live.ask()[second.pid] == []
    assert main(["top", str(second.pid), "--once"]) == UsageError.exit_code
    # Beside those of other tests that are late.
    assert re.search(rf"\b{second.pid}\b.* did not answer in time", capsys.readouterr().err)
    # What does not answer has nothing to do with another number.
    assert main(["top", "4194304", "--once"]) == UsageError.exit_code
    assert "no process 4194304 of this user has a loader" in capsys.readouterr().err
    monkeypatch.setattr(live, "ask", dict)
    for names in ([], ["4194304"]):
        assert main(["top", *names, "--once"]) == UsageError.exit_code
        assert "has a loader open here: run nostall top as the user" in capsys.readouterr().err


def test_a_process_listens_while_a_loader_is_open(image_folder: Path) -> None:
    def make() -> nostall.DataLoader:
        data = nostall.ImageFolder(image_folder, index=False)
        return nostall.DataLoader(data, 4, tiers=[], output="numpy")

    def close(loader: nostall.DataLoader) -> None:
        loader.close()

    def drop(loader: nostall.DataLoader) -> None:
        """The caller has no reference any more."""

    ends: list[Callable[[nostall.DataLoader], None]] = [close, drop]
    for end in ends:
        one, other = make(), make()
        assert live._listener is None
        next(iter(one))
        listener = live._listener
        assert listener is not None
        next(iter(other))
        one.close()
        (said,) = live.ask()[os.getpid()]
        assert said["loader"] == other.name
        (passed,) = [other]
        del other
        end(passed)
        del passed
        deadline = time.monotonic() + 60
        while live._listener is not None:  # a test elsewhere that asks has the loader meanwhile
            assert time.monotonic() < deadline
            time.sleep(0.001)
        listener.thread.join(60)
        assert not listener.thread.is_alive()
        assert os.getpid() not in live.ask()


def test_a_thread_whose_start_is_interrupted_ends(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "nostall-live":
            begun.append(thread)
            raise KeyboardInterrupt

    data = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(data, 4, tiers=[], output="numpy") as loader:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
        (thread,) = begun
        thread.join(60)
        assert not thread.is_alive() and live._listener is None
        next(iter(loader))


def test_a_training_goes_on_unobserved(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_socket(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(live.socket, "socket", no_socket)
    caplog.set_level("INFO", "nostall")
    data = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(data, 4, tiers=[], output="numpy") as loader:
        next(iter(loader))
        assert live._listener is None
    assert any("nostall top cannot see this process" in message for message in caplog.messages)
