"""Processes that work for a training: they end with it, in bounded time, and by no signal to a job."""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import prefork
import pytest

import nostall
from nostall.base import _children
from nostall.errors import TransformError, UsageError
from nostall.loader._processes import Processes
from nostall.source._items import decode
from nostall.source._makers import Makers

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


def pairs(samples: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    return [*zip(samples, contexts, strict=True)]


def hangs(samples: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    Path(samples[0]).touch()
    return [signal.pause()]


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 300  # two processes start first, beside other tests
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is not written"
        time.sleep(0.01)


def send_all(pids: Sequence[int | None]) -> None:
    for pid in pids:
        for number in SIGNALS:
            os.kill(pid or 0, number)


def results(processes: Processes) -> list[Any]:
    answers = processes.submit([1, 2], [3, 4], 1)
    return [result for answer in answers for result in answer.result()]


def test_a_daemon_is_told_that_it_can_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    source = nostall.Arrays({"x": np.arange(4)})
    with (
        nostall.DataLoader(source, 2, tiers=[], transforms=abs, workers="processes") as loader,
        pytest.raises(UsageError, match=r'is a daemon .*: pass workers="threads", or start it'),
    ):
        next(iter(loader))


@pytest.fixture
def started() -> Iterator[Callable[..., Processes]]:
    """Makes pools of processes, and ends them, if need be by the tests' own hand."""
    pools: list[Processes] = []

    def start(work: Any) -> Processes:
        pools.append(Processes(1, work))
        return pools[-1]

    yield start
    for pool in pools:
        for process in pool._spawn.processes:
            process.kill()
        pool.close()


@pytest.mark.multi
def test_signals_to_the_job_end_no_worker(started: Callable[..., Processes]) -> None:
    processes = started(pairs)
    answers = processes.submit([1], [2], 1)
    pids = [process.pid for process in processes._spawn.processes]
    send_all(pids)  # as it starts
    assert answers[0].result() == [(1, 2)]
    send_all(pids)
    assert results(processes) == [(1, 3), (2, 4)]
    assert [process.pid for process in processes._spawn.processes] == pids


@pytest.mark.multi
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_signals_to_the_job_end_no_maker(method: str) -> None:
    makers = Makers(["a", "b"], count=1, pickles=[], start_method=method, fewer="fewer")
    try:
        pids = makers.pids()
        send_all(pids)  # as it starts
        first = makers.make(0)
        send_all(pids)
        assert makers.make(0) == first
        assert makers.pids() == pids
    finally:
        makers.close()


def threads_of_torch(_: object, samples: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    loaded = "torch" in sys.modules
    import torch

    return [(loaded, torch.get_num_threads())]


@pytest.mark.parametrize("name", ["nothing", "float32"])
def test_a_worker_computes_in_one_thread(
    name: str, monkeypatch: pytest.MonkeyPatch, started: Callable[..., Processes]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    # A value of torch's makes the worker load it before it begins.
    given = getattr(torch, name, None)
    (answer,) = started(functools.partial(threads_of_torch, given)).submit([1], [2], 1)
    assert answer.result() == [(given is not None, 1)]


class Ended:
    """Its item: how a program, and a forked process, ended that SIGTERM was sent."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[int]:
        program = subprocess.Popen(["sleep", "600"])
        here, there = os.pipe()
        forked = os.fork()
        if forked == 0:
            os.write(there, b"on")
            time.sleep(600)
            os._exit(1)
        os.read(here, 2)
        program.terminate()
        os.kill(forked, signal.SIGTERM)
        return [program.wait(60), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]


@pytest.mark.multi
def test_what_a_worker_starts_heeds_signals() -> None:
    makers = Makers(Ended(), count=1, pickles=[], start_method="spawn", fewer="fewer")
    try:
        assert decode(np.frombuffer(makers.make(0), np.uint8), []) == [-signal.SIGTERM] * 2
    finally:
        makers.close()


LATER = """
import multiprocessing, time
from nostall.source._makers import Makers
makers = Makers("a", count=1, pickles=[], start_method="forkserver", fewer="fewer")
later = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
later.start()
later.terminate()
later.join(60)
print(later.exitcode)
later.kill()
for maker in multiprocessing.active_children():
    maker.terminate()
    maker.join()
"""


@pytest.mark.multi
def test_processes_of_a_forkserver_that_makers_started_heed_signals() -> None:
    done = prefork.run(["-c", LATER], timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n"), done.stderr


@pytest.mark.multi
def test_a_worker_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Callable[..., Processes]
) -> None:
    monkeypatch.setattr(_children, "SECONDS_TO_END", 0.2)
    processes = started(hangs)
    (answer,) = processes.submit([str(tmp_path / "begun")], [None], 1)
    await_file(tmp_path / "begun")
    closing = threading.Thread(target=processes.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(BrokenExecutor):
        answer.result()
    assert [process.exitcode for process in processes._spawn.processes] == [-signal.SIGKILL]
    assert processes.crashed() == {}


@pytest.mark.multi
def test_a_worker_may_die_beside_tasks_that_were_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Callable[..., Processes]
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    processes = started(hangs)
    *answers, last = processes.submit([str(tmp_path / "begun")] * 9, [None] * 9, 1)
    await_file(tmp_path / "begun")
    assert last.cancel()
    (process,) = processes._spawn.processes
    os.kill(process.pid or 0, signal.SIGKILL)
    for answer in answers:
        with pytest.raises(BrokenExecutor):
            answer.result()
    processes.close()
    assert not failed


ORPHANS = """
import operator, signal
from nostall.loader._processes import Processes
processes = Processes(1, operator.concat)
processes.submit([1], [2], 1)[0].result()
print(*[process.pid for process in processes._spawn.processes], flush=True)
signal.pause()
"""


@pytest.mark.multi
def test_workers_end_when_the_training_is_killed() -> None:
    training = prefork.Process(["-c", ORPHANS], stdout=PIPE, env=dict(os.environ))
    assert training.stdout is not None
    (pid,) = [int(pid) for pid in training.stdout.readline().split()]
    ended = os.pidfd_open(pid)
    training.kill()
    training.wait()
    try:
        assert select.select([ended], [], [], 60)[0], "a worker outlives the training"
    finally:
        os.close(ended)


HANGS = """
import signal, sys
from pathlib import Path
from nostall.base import _children
from nostall.loader._processes import Processes

def hangs(samples, contexts):
    Path(samples[0]).touch()
    while True:
        signal.pause()

if __name__ == "__main__":
    _children.SECONDS_TO_END = 0.2
    processes = Processes(1, hangs)
    print(processes.submit([sys.argv[1]], [None], 1)[0].result())
"""


@pytest.mark.multi
def test_a_training_that_hangs_in_a_callable_ends_by_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "begun")]
    with subprocess.Popen(command, stderr=PIPE, text=True, start_new_session=True) as training:
        try:
            await_file(tmp_path / "begun")
            os.killpg(training.pid, signal.SIGINT)
            _, told = training.communicate(timeout=60)
        finally:
            if training.poll() is None:
                os.killpg(training.pid, signal.SIGKILL)
    assert training.returncode == -signal.SIGINT
    assert told.splitlines()[-1] == "KeyboardInterrupt"


def once_more(x: Any) -> Any:
    return x


UNGUARDED = """
import os
from multiprocessing import spawn
import nostall
from test_worker_processes import once_more

root, what = os.environ["ROOT"], os.environ["WHAT"]
print("begins")
if what == "server":  # newer releases of Python let the fork server import the program
    prepared = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {**prepared(name), "main_path": __file__}
    what = "forkserver"
if what == "processes":
    folder = nostall.ImageFolder(root, index=False)
    loader = nostall.DataLoader(folder, 8, transforms=once_more, workers=what, output="numpy")
    next(iter(loader))
else:
    nostall.Cached([1, 2, 3], makers=1, start_method=what)
"""


@pytest.mark.multi
@pytest.mark.parametrize("what", ["processes", "spawn", "forkserver", "server"])
def test_a_program_that_guards_nothing_is_told_so_once(
    image_folder: Path, tmp_path: Path, what: str
) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    of_it = {"PYTHONPATH": path, "ROOT": str(image_folder), "WHAT": what}
    training = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **of_it},
    )
    assert training.returncode == 1
    # No process but the program's own has an error: of the pool, and the one that says what to do.
    assert training.stderr.count("Traceback") <= 2, training.stderr
    told = training.stderr.splitlines()[-1]
    assert told.startswith("nostall.errors."), told
    assert told.endswith(_children.WHY_UNGUARDED), told


LIBRARY = """
import sys
import nostall

def begins(x):
    return x[:4]

items = nostall.Cached([1, 2, 3], makers=1, start_method=sys.argv[2])
"""
GUARDED = """
import sys

def train():
    import nostall
    import library
    folder = nostall.ImageFolder(sys.argv[1], index=False)
    more = {"workers": "processes", "threads": 1, "tiers": [], "output": "numpy"}
    next(iter(nostall.DataLoader(folder, 8, transforms=library.begins, **more)))

if sys.argv[2] == "fork":
    import library  # which worker processes import with the program
if __name__ == "__main__":
    train()
"""


@pytest.mark.multi
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_may_import_a_module_that_starts_makers(
    image_folder: Path, tmp_path: Path, method: str
) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(GUARDED)
    command = [sys.executable, str(tmp_path / "train.py"), str(image_folder), method]
    training = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (training.returncode, training.stderr) == (0, "")


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)

    def __call__(self, x: Any) -> Any:
        return x


def test_what_a_worker_cannot_unpickle_is_printed(
    image_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    more: Any = {"transforms": Unreadable(), "workers": "processes", "threads": 1, "tiers": []}
    why = "ended with code 1: .* what it printed is above"
    with nostall.DataLoader(folder, 8, **more) as loader, pytest.raises(TransformError, match=why):
        next(iter(loader))
    assert (
        "ValueError: invalid literal for int() with base 10: 'no number'" in capfd.readouterr().err
    )


def test_processes_that_cannot_be_started_leave_their_error(
    started: Callable[..., Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: object) -> None:
        raise BlockingIOError("no more processes")

    processes = started(pairs)
    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", refused)
    with pytest.raises(BlockingIOError, match="no more processes"):
        results(processes)
    processes.close()


ENDS = """
import multiprocessing, nostall

def open_source():
    global source
    source = nostall.Cached([1, 2, 3], makers=1, start_method="fork")

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=open_source)
    child.start()
    child.join(60)
    print(child.exitcode)
    child.kill()
"""


@pytest.mark.multi
def test_a_process_of_multiprocessing_ends_that_closes_nothing() -> None:
    assert prefork.run(["-c", ENDS], timeout=90).stdout == "0\n"
