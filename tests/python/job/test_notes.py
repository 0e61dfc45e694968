"""What a rank notes is read by the others of its node, and ends with its process."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import prefork
import pytest

from nostall.base import _process as process
from nostall.errors import UsageError
from nostall.job import _cluster as cluster
from nostall.job import _notes as notes
from nostall.job._world import World, find_world

# One after the other, so that no two loaders live at the same time: RANK makes one with seed SEED each
# time that it is told to.
RANK = """
import sys
import nostall

data = nostall.ImageFolder(sys.argv[1], index=False)
for line in open(sys.argv[2]):
    try:
        with nostall.DataLoader(data, 4, seed=int(line), tiers=[], output="numpy") as loader:
            next(iter(loader))
        print("alike", flush=True)
    except nostall.errors.UsageError as error:
        print(error, flush=True)
"""


class Rank:
    """A process that srun would start as this rank of two."""

    def __init__(self, number: int, data: Path, folder: Path) -> None:
        orders = folder / secrets.token_hex(4)
        os.mkfifo(orders)
        self.orders = os.open(orders, os.O_RDWR)
        place = {
            "SLURM_JOB_ID": str(folder),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
        }
        self.job = find_world(environment=place).job
        self.process = prefork.Process(
            ["-c", RANK, data, orders], stdout=prefork.PIPE, env={**os.environ, **place}
        )

    def loads(self, seed: int) -> str:
        os.write(self.orders, b"%d\n" % seed)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        if self.orders >= 0:
            os.close(self.orders)
        self.orders = -1


def test_loaders_that_never_live_at_the_same_time_are_compared(
    image_folder: Path, tmp_path: Path
) -> None:
    """By ranks of srun without torch.distributed; a later start finds nothing of a killed one."""
    one, other = (Rank(number, image_folder, tmp_path) for number in range(2))
    try:
        assert one.loads(1) == other.loads(1) == "alike"
        assert other.loads(3) == "alike"
        assert "seed is 3 on rank 1 and 2 on rank 0; give all ranks the same" in one.loads(2)
    finally:
        one.kill()
        other.kill()
    again = Rank(0, image_folder, tmp_path)
    try:
        assert again.loads(5) == "alike"
    finally:
        again.kill()


def test_a_program_waits_for_the_end_of_the_one_before_it(
    image_folder: Path, tmp_path: Path
) -> None:
    """As `srun bash -c "python prepare.py; python train.py"` runs them: ranks end at several times."""
    prepare = [Rank(number, image_folder, tmp_path) for number in range(2)]
    train = None
    try:
        assert [rank.loads(1) for rank in prepare] == ["alike", "alike"]
        prepare[0].kill()
        train = Rank(0, image_folder, tmp_path)
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(train.loads, 2)
            while notes.noted(train.job, 0, " loader 0 of 2") is None:
                assert not said.done()
                time.sleep(0.01)
            with contextlib.suppress(TimeoutError):
                said.result(0.5)  # it does not come before
            prepare[1].kill()
            assert said.result(60) == "alike"
    finally:
        for rank in (*prepare, train):
            if rank is not None:
                rank.kill()


def settle(rank: int, job: str, **settings: Any) -> None:
    cluster.check_alike(World(rank, 2, rank, 2, job), "loader 0", settings)


def test_a_program_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = f"notes before {os.getpid()}"
    settle(0, job, seed=1)
    words = r"seed is 1 on rank 0 and 2 on rank 1; give all ranks the same arguments"
    with pytest.raises(UsageError, match=rf"{words}$"):
        settle(1, job, seed=2)
    monkeypatch.setattr(cluster, "SECONDS_TO_MEET", 0.1)
    monkeypatch.setattr(process, "began", lambda: float("inf"))
    with pytest.raises(UsageError, match=rf"{words}; or end process {os.getpid()}, which has not"):
        settle(1, job, seed=2)
    settle(1, job, seed=1)


def test_who_waits_for_a_program_asks_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes what is in its queue off it only where it leaves a note."""
    job = f"notes once {os.getpid()}"
    monkeypatch.setattr(notes, "_BACKLOG", 2)
    settle(0, job, seed=1)
    monkeypatch.setattr(cluster, "SECONDS_TO_MEET", 0.5)
    monkeypatch.setattr(process, "began", lambda: float("inf"))
    with pytest.raises(
        UsageError, match=rf"end process {os.getpid()}, which has not ended in 0.5 s"
    ):
        settle(1, job, seed=2)


def test_a_rank_that_too_many_ask_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    job = f"notes full {os.getpid()}"
    monkeypatch.setattr(notes, "_BACKLOG", 2)
    notes.note(job, 0, "loader 0 of 2", 1)
    with pytest.raises(BlockingIOError):
        for _ in range(4):
            assert notes.noted(job, 0, "loader 0 of 2") is not None
    settle(1, job, seed=1)  # compares nothing
    notes.note(job, 0, "loader 1 of 2", 1)
    assert notes.noted(job, 0, "loader 0 of 2") is not None


def test_who_waits_sees_another_note() -> None:
    job = f"notes change {os.getpid()}"
    notes.note(job, 0, "loader 0", 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(notes.await_change, job, 0, os.getpid(), 600)
        while not waiting.done():
            notes.note(job, 0, "loader 1", 1)
            time.sleep(0.01)
        waiting.result()


PROGRAM = """
import sys
from nostall.job import _cluster as cluster
from nostall.job._world import World

cluster.check_alike(World(0, 2, 0, 2, sys.argv[1]), "loader 0", {})
"""


def test_a_program_that_a_rank_starts_is_told_whose_rank_it_has() -> None:
    job = f"notes started {os.getpid()}"
    settle(0, job)
    program = [sys.executable, "-c", PROGRAM, job]
    # Nor where something is between them, as a shell.
    for command in (program, ["sh", "-c", 'set -e; "$@"; :', "sh", *program]):
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        assert f"rank 0 (process {os.getpid()}) made loaders and started this process" in said
        assert "pass rank=0 and world_size=1" in said
    # Another job has notes of its own, and a forked child may be what its parent makes of it.
    said = subprocess.run([*program[:-1], "other"], check=True, capture_output=True).stderr
    assert not said
    child = os.fork()
    if child == 0:
        try:
            settle(0, job)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_notes_are_those_of_one_job_and_rank_and_of_the_newest_jobs() -> None:
    def job(number: int) -> str:
        return f"notes {os.getpid()} {number}"

    notes.note(job(0), 0, "loader 0", {"seed": 1})
    found = notes.noted(job(0), 0, "loader 0")
    assert found is not None
    assert (found.content, found.process) == ({"seed": 1}, os.getpid())
    assert process.began() < found.left <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert notes.noted(job(0), 0, "loader 1") is None
    assert notes.noted(job(0), 1, "loader 0") is None
    assert notes.noted(job(1), 0, "loader 0") is None
    files = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        notes.note(job(number), 0, "loader 0", number)
    assert notes.noted(job(0), 0, "loader 0") is None
    last = notes.noted(job(49), 0, "loader 0")
    assert last is not None and last.content == 49
    assert len(os.listdir("/proc/self/fd")) < files + 20


def test_a_forked_child_keeps_no_names_of_its_parent() -> None:
    job = f"notes fork {os.getpid()}"
    notes.note(job, 0, "loader 0", 1)
    child = os.fork()
    if child == 0:
        os._exit(0 if not notes._mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="root, to be another user, is missing")
def test_another_user_who_has_the_name_is_not_believed() -> None:
    job = f"notes of others {os.getpid()}"
    ready, say = os.pipe()
    other = os.fork()
    if other == 0:
        # The name has this user's number, whoever takes it.
        address = notes._address(job, 0)
        try:
            os.setuid(61001)
            taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            taken.bind(address)
            taken.listen()
            os.write(say, b".")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(say)  # so that the end of the other is one of the pipe
        assert os.read(ready, 1) == b"."
        with pytest.raises(PermissionError, match="user 61001 has @nostall-"):
            notes._owner(notes._address(job, 0))
        assert notes.noted(job, 0, "loader 0") is None
        with pytest.raises(OSError, match="in use"):
            notes.note(job, 0, "loader 0", 1)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(ready)
