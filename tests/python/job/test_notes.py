"""What a rank notes is read by the others of its node, and ends with its process."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from pathlib import Path

import prefork
import pytest

from nostall.job import _notes as notes

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
        self.process = prefork.Process(
            ["-c", RANK, data, orders],
            stdout=prefork.PIPE,
            env={
                **os.environ,
                "SLURM_JOB_ID": str(folder),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_PROCID": str(number),
                "SLURM_LOCALID": str(number),
            },
        )

    def loads(self, seed: int) -> str:
        os.write(self.orders, b"%d\n" % seed)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.orders)


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


def test_notes_are_those_of_one_job_and_rank_and_of_the_newest_jobs() -> None:
    def job(number: int) -> str:
        return f"notes {os.getpid()} {number}"

    notes.note(job(0), 0, "loader 0", {"seed": 1})
    assert notes.noted(job(0), 0, "loader 0") == {"seed": 1}
    assert notes.noted(job(0), 0, "loader 1") is None
    assert notes.noted(job(0), 1, "loader 0") is None
    assert notes.noted(job(1), 0, "loader 0") is None
    files = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        notes.note(job(number), 0, "loader 0", number)
    assert notes.noted(job(0), 0, "loader 0") is None
    assert notes.noted(job(49), 0, "loader 0") == 49
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
            notes._read(notes._address(job, 0))
        assert notes.noted(job, 0, "loader 0") is None
        with pytest.raises(OSError, match="in use"):
            notes.note(job, 0, "loader 0", 1)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(ready)
