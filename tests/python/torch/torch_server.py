"""Ranks that need not read torch: forked from one process that has read it.

    server().run("delegates", ranks=2)  # a function of torch_rank.py, on each rank

Run as a program this is that process. It takes requests from its standard input, a line of JSON each,
and answers on its standard output when all ranks of the request have ended.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """What the ranks left: their exit statuses (negative: a signal) and what they wrote."""

    statuses: list[int]
    stdout: str
    stderr: str


class Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        atexit.register(self.close)

    def run(self, what: str, ranks: int, limit: float = 100.0, **environment: str) -> Ended:
        """Ranks that run for longer than `limit` seconds are killed."""
        with tempfile.TemporaryDirectory(prefix="nostall-ranks-") as folder:
            request = {
                "what": what,
                "ranks": ranks,
                "limit": limit,
                "environment": environment,
                "folder": folder,
            }
            assert self._process.stdin is not None and self._process.stdout is not None
            print(json.dumps(request), file=self._process.stdin, flush=True)
            assert self._process.stdout.readline() == "done\n", "the server of ranks ended"
            return Ended(
                json.loads(Path(folder, "statuses").read_text()),
                Path(folder, "1").read_text(),
                Path(folder, "2").read_text(),
            )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def server() -> Server:
    """The one of this test process, started at its first use."""
    return Server()


def main() -> int:
    """Of the server, and of each rank, which returns its status and so ends as programs do."""
    import torch._dynamo  # noqa: F401 - DistributedDataParallel's: two seconds of each rank
    import torch_rank

    gc.freeze()  # a rank that ends need not look through all of torch for garbage: a second of it
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else is written between the answers
    for line in sys.stdin:
        request = json.loads(line)
        job = os.fork()
        if job == 0:
            answer.close()
            rank = start(request)
            return torch_rank.run(request["what"], *rank)
        os.waitpid(job, 0)
        print("done", file=answer, flush=True)
    os._exit(0)  # a server has nothing to clean up


def start(request: dict[str, object]) -> tuple[int, int, int]:
    """Returns in each rank: its number, how many there are, and the port of their store."""
    import torch.distributed as dist

    os.setsid()
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
    sys.path.insert(0, str(HERE))
    sys.exit(main())
