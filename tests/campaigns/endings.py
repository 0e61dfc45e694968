"""Programs of two ranks over the torch.distributed backend, ended in every way that programs end.

A program does gather, scatter, all_to_all_single, all_gather_object and asynchronous work, some of it
pending, and ends with or without destroying its group: by returning, an exception, sys.exit, SIGTERM
(handled or not), os._exit, after a fork, or because its peer was killed.
A case fails if a rank's exit status is not the one that its program meant, if a rank does not end, or
if a byte of /dev/shm is still in use: what ranks share there has no name, and stays for as long as a
process has it open. The campaign has a /dev/shm of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from pathlib import Path

from campaigns.outcome import Outcome, Task
from campaigns.private import SHM, bytes_in, private_storage

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "torch"))

import torch_server

FULL = "200 programs of two ranks, 18 endings in turn"
SMALL = 0.09

# The exit statuses of rank 0 and rank 1; None where it depends on who is first.
ENDINGS: dict[str, tuple[int | None, int | None]] = {
    "destroy": (8, 8),
    "return": (8, 8),
    "return, pending": (8, 8),
    "exception": (1, 1),
    "exception, pending": (1, 1),
    "exit": (3, 3),
    "exit, pending": (3, 3),
    "term": (-15, -15),
    "term handled": (9, 9),
    "term handled, pending": (9, 9),
    "_exit": (4, 4),
    "daemons wait": (8, 8),
    "daemons compute": (8, 8),
    "fork": (5, 5),
    "fork, destroy": (5, 5),
    "fork, pending": (5, 5),
    "peer killed, waits": (6, -9),
    "peer killed": (6, -9),
}


SETTLE = 60.0  # seconds for what a killed rank's children still hold


def left() -> int:
    """Bytes of /dev/shm that are in use, once they do not go by themselves."""
    deadline = time.monotonic() + SETTLE
    while (used := bytes_in(SHM)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return used


def finds_a_leak() -> bool:
    """Whether an open file without a name counts as left."""
    planted = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.write(planted, b"leak")
        return bytes_in(SHM) > 0
    finally:
        os.close(planted)


def run(task: Task) -> Outcome:
    outcome = Outcome()
    if missing := private_storage([SHM]):
        return Outcome(missing=missing)
    if not finds_a_leak():
        return Outcome(failures=["a file that is left in /dev/shm would not be found"])
    draw = random.Random(task.seed)
    statuses: dict[str, int] = {}
    for ending in itertools.islice(itertools.cycle(ENDINGS), task.count(200, len(ENDINGS))):
        seed, nodes = draw.randrange(1 << 30), draw.choice([1, 1, 2])
        ended = torch_server.run("end", 2, 300, ENDING=ending, SEED=str(seed), NODES=str(nodes))
        outcome.cases += 1
        case = f"{ending!r}, seed {seed}, {nodes} nodes"
        if tuple(ended.statuses) != ENDINGS[ending]:
            wanted, told = ENDINGS[ending], ended.stderr[-2000:]
            outcome.failures.append(f"{case}: {ended.statuses}, not {list(wanted)}: {told}")
        if used := left():
            outcome.failures.append(f"{case}: {used} bytes are left in /dev/shm")
        for status in ended.statuses:
            statuses[str(status)] = statuses.get(str(status), 0) + 1
    outcome.figures["aborted (-6)"] = statuses.get("-6", 0)
    return outcome
