"""Processes forked for tests are as those that Python starts."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import prefork
import pytest

pytestmark = pytest.mark.multi
TORCH = pytest.mark.parametrize("torch", [False, True])
LOOK = """
import atexit, json, os, random, sys, threading
import numpy
print(json.dumps({
    "name": __name__, "argv": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd(),
    "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "threads": len(os.listdir("/proc/self/task")), "group": os.getpgid(0) == os.getpid(),
    "drawn": [random.random(), numpy.random.rand(), os.urandom(4).hex()],
}), flush=True)
class Last:
    def __del__(self):
        os.write(1, b"dropped\\n")
last = Last()
atexit.register(os.write, 1, b"at exit\\n")
threading.Thread(target=lambda: os.write(1, b"thread\\n")).start()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("torch", "whole"), [(False, False), (False, True), (True, False)])
def test_a_child_begins_and_ends_as_a_process_of_its_own(
    torch: bool, whole: bool, tmp_path: Path
) -> None:
    environment = {**os.environ, "NOSTALL_ONLY_HERE": "1"}
    drawn = []
    for status in (3, 0):
        done = prefork.run(
            ["-c", LOOK, str(status)],
            timeout=60,
            env=environment,
            cwd=tmp_path,
            torch=torch,
            whole=whole,
        )
        assert done.returncode == status, done.stderr
        first, *rest = done.stdout.splitlines()
        seen = json.loads(first)
        assert (seen["name"], seen["argv"]) == ("__main__", ["-c", str(status)])
        assert seen["environment"] == environment
        assert (seen["cwd"], seen["files"]) == (str(tmp_path), [0, 1, 2])
        assert (seen["threads"], seen["group"]) == (1, True)
        assert sorted(rest) == ["at exit", "dropped", "thread"] and rest[-1] == "dropped"
        drawn += seen["drawn"]
    assert len(set(drawn)) == len(drawn)


@TORCH
def test_errors_and_signals_are_told(torch: bool) -> None:
    done = prefork.run(["-c", "def f():\n  raise ValueError('no')\nf()"], timeout=60, torch=torch)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: no"
    process = prefork.Process(
        ["-c", "import time\nprint('on', flush=True)\ntime.sleep(600)"],
        stdout=prefork.PIPE,
        torch=torch,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    assert process.poll() is None
    process.terminate()
    assert process.communicate(timeout=60) == ("", "")
    assert process.wait() == -signal.SIGTERM
    process.kill()  # of what has ended: nothing


def test_callers_that_are_killed_leave_the_server_to_the_others() -> None:
    parent = ["-c", "import os\nprint(os.getppid())"]
    server = int(prefork.run(parent, timeout=60).stdout)

    def caller() -> socket.socket:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.connect(prefork.address(torch=False))
        return connected

    def request(through: socket.socket) -> None:
        wanted = {"arguments": ["-c", ""], "environment": {}, "directory": "/", "whole": True}
        with open(os.devnull, "wb") as none:
            message = json.dumps({**wanted, "mounts of": None}).encode()
            socket.send_fds(through, [message], [none.fileno()] * 3)

    with caller() as greeted:  # and ends before it has read that
        assert select.select([greeted], [], [], 60)[0]
    os.kill(server, signal.SIGSTOP)
    try:
        caller().close()  # before it is greeted
        with caller() as asking:  # before it is answered
            request(asking)
    finally:
        os.kill(server, signal.SIGCONT)
    assert int(prefork.run(parent, timeout=60).stdout) == server


def test_what_only_a_start_reads_is_refused() -> None:
    with pytest.raises(AssertionError, match="LD_PRELOAD: start a real process"):
        prefork.Process(["-c", ""], env={**os.environ, "LD_PRELOAD": "/none.so"})


def waits_and_passes_signals_on(pid: int) -> bool:
    words = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    fields = {word[0]: word[1] for word in words if len(word) > 1}
    handled = int(fields["SigCgt:"], 16) >> (signal.SIGTERM - 1) & 1
    return bool(handled) and fields["State:"] == "S"


def test_a_signal_that_comes_with_the_end_leaves_the_status(capfd: pytest.CaptureFixture) -> None:
    code = "import os, signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\n"
    code += "print(os.getpid(), flush=True)\nwhile True: time.sleep(0.01)"
    words = prefork.command(["-c", code])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        await_that(lambda: waits_and_passes_signals_on(process.pid))
        # The stand-in, stopped amid its wait, is told of both at once.
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        os.kill(number, signal.SIGUSR1)
        await_that(lambda: not Path(f"/proc/{number}").exists())
        process.terminate()
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 7, capfd.readouterr().err


def await_that(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@TORCH
def test_a_stand_in_passes_on_what_a_launcher_gives(torch: bool, tmp_path: Path) -> None:
    code = "import os, sys, time\nprint(os.environ['GIVEN'], os.getcwd(), sys.argv, flush=True)\n"
    words = prefork.command(["-c", f"{code}sys.exit(7)", "word"], torch=torch)
    given = {**os.environ, "GIVEN": "this"}
    done = subprocess.run(
        words, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"this {tmp_path} ['-c', 'word']\n"
    waits = prefork.command(["-c", f"{code}print(os.getpid())\ntime.sleep(600)"], torch=torch)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(waits, env=given, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("this ")
            process.send_signal(number)
            assert process.wait(60) == -number
            # The forked process has the pipe until it has ended.
            assert process.stdout.read().count("\n") <= 1
    dies = prefork.command(["-c", "import os\nos.kill(os.getpid(), 9)"], torch=torch)
    assert subprocess.run(dies, timeout=60).returncode == -signal.SIGKILL
