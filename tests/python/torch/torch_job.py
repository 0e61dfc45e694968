"""The ranks of a job and what is above them, for torch_server.py; a program for prefork's children."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
import torch_rank


def main() -> int:
    """Of the job, and of each rank, which returns its status and so ends as programs do."""
    gc.freeze()  # a rank that ends need not look through all of torch for garbage: a second of it
    request = json.loads(sys.argv[1])
    return torch_rank.run(request["what"], *start(request))


def start(request: dict[str, object]) -> tuple[int, int, int]:
    """Returns in each rank: its number, how many there are, and the port of their store."""
    folder, ranks = str(request["folder"]), int(str(request["ranks"]))
    for number in (1, 2):
        file = os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    assert isinstance(request["environment"], dict)
    os.environ.update(request["environment"])
    # The store's threads are those of a process of its own: none is missing in a rank.
    ours, theirs = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        while True:
            signal.pause()
    port = int(os.read(ours, 10))
    os.close(ours)
    os.close(theirs)
    children: list[int] = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
            return rank, ranks, port
    statuses = wait(children, float(str(request["limit"])))
    os.kill(keeper, signal.SIGKILL)
    Path(folder, "statuses").write_text(json.dumps(statuses))
    os._exit(0)


def wait(children: list[int], limit: float) -> list[int]:
    deadline = time.monotonic() + limit
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[child] for child in children]


if __name__ == "__main__":
    sys.exit(main())
