"""Random histories of checkpoints on an object store against an oracle of what was acknowledged.

The histories are those of `histories`, with a fast directory and an S3 server. A job is killed
before, in the middle of, or after a random request. During some saves the store refuses every request,
or loses answers: the request is carried out, and the client gets an error. Some jobs are stopped at a
random request, from the one on by which they own the store; another job, on another node, begins, saves
and ends, or is killed; then the first goes on. Between jobs the fast directory is lost now and then, as
with its node.

A save counts as acknowledged where level durable was. A history fails if such a save that no rule has
retired is not on the store with its values, if `restore()` gives another checkpoint than the newest of
the current branch, or if a job does not start. What the stopped job is told after the other one has
begun must hold for the other one, as if it had been told before.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from campaigns.histories import History, Job, play
from campaigns.outcome import Outcome, Task

FULL = "2,000 histories of up to five jobs with six saves each"
SMALL = 0.01

HISTORIES = 2_000
BUCKET = "checkpoints"
CALLS = ("put", "get", "head", "delete", "list")
# What a job may end with that was stopped.
REFUSALS = ("PeerError", "LostStoreError", "IoError", "CorruptionError", "UsageError", "Un")
HERE = Path(__file__).parent


class Failed(Exception):
    """What a client raises for a request."""


class Faulty:
    """The module obstore, whose requests may fail or be the last of their process."""

    def __init__(self, obstore: Any, job: ObjectJob) -> None:
        self._obstore, self._job = obstore, job

    def __getattr__(self, name: str) -> Any:
        real, job = getattr(self._obstore, name), self._job
        if name not in CALLS:
            return real

        def call(*args: Any, **options: Any) -> Any:
            job.count()
            fault = job.fault()
            if fault == "refused":
                raise Failed("Server returned non-2xx status code: 503: SlowDown")
            if name == "put" and not isinstance(args[2], bytes):
                args = (*args[:2], job.counted(args[2]), *args[3:])
            answer = real(*args, **options)
            if name == "list":
                answer = list(answer)  # the request itself
            job.count()
            if fault == "lost":
                raise Failed("connection closed before message completed")
            return answer

        return call


class ObjectJob(Job):
    """The child's side."""

    safe = ("durable",)

    def __init__(self, orders: dict[str, Any], tell: int) -> None:
        super().__init__(orders, tell)
        self._left, self._lock = orders["kill_at"], threading.Lock()
        self._before_pause, self._owns = orders["pause_at"], False
        self._random = random.Random(orders["clock"] + len(orders["saves"]))

    def _break_system(self) -> None:
        from nostall.base import _object_client as client
        from nostall.checkpoint import _transfer
        from nostall.checkpoint._objects import ObjectStore

        _transfer._CHUNK = 5 << 20  # the least that S3 takes
        if self.orders["pause_at"]:
            threading.excepthook = lambda _: None  # a second rank is refused as the first one is
        own = ObjectStore.own

        def owning(store: ObjectStore) -> None:
            own(store)
            self._owns = True

        ObjectStore.own = owning  # type: ignore[method-assign]
        connect = client.client
        client.client = lambda url: Faulty(connect(url), self)
        offset, clock = self.orders["clock"], time.time
        time.time = lambda: clock() + offset

    def count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._owns:
                self._before_pause -= 1
                if self._before_pause == 0:
                    self.say(paused=True)
                    os.kill(os.getpid(), signal.SIGSTOP)

    def counted(self, blocks: Any) -> Any:
        for block in blocks:
            self.count()
            yield block

    def fault(self) -> str:
        """What becomes of this request."""
        with self._lock:
            if "refused" in self.full:
                return "refused"
            if "lost" in self.full and self._random.random() < 0.3:
                return "lost"
        return ""

    def state(self, value: int, rank: int) -> dict[str, Any]:
        import numpy as np

        # Some are uploaded in several requests.
        return {"value": value, "rank": rank, "w": np.full(700_000 if value % 4 == 0 else 1, value)}


class ObjectHistory(History):
    """One history, and what it finds."""

    job = ObjectJob
    # Whether any save is on another branch than the one before, and whether a job is stopped.
    _branched = False
    _paused = False
    faults = (("refused",), ("lost",))

    def __init__(self, seed: str, home: Path, counts: Counter[str], s3: Any) -> None:
        super().__init__(seed, home, counts)
        self._s3, self._prefix = s3, home.name
        self._nodes = 0
        self.tiers = {"durable": f"s3://{BUCKET}/{self._prefix}"}
        self._take_node()

    def _take_node(self) -> None:
        """The next job is on another node, with a fast directory of its own."""
        self.tiers["fast"] = str(self.home / f"fast{self._nodes}")
        self._nodes += 1
        # What was only on the other one is gone, also what retired a save that the store has; and so
        # may be the note of a branch that the store did not take.
        oracle = self.oracle
        # Acknowledged, also if a later one has retired it: then that one is there.
        told = [v for v, save in oracle.saves.items() if save.id]
        least = max(told, default=0) if not self._branched else 0
        known = (*oracle.perhaps, *oracle.saves)
        oracle.perhaps = {v for v in known if v is not None and v >= least}
        if not told:
            oracle.perhaps.add(None)

    def _orders(self) -> dict[str, Any]:
        orders = super()._orders()
        self._branched |= orders["back_to"] is not None
        rising = [save[1] for save in orders["saves"]]
        self._branched |= rising != sorted(set(rising)) or any(s <= self.step for s in rising)
        pauses = not self._paused and self.random.random() < 0.4
        orders["pause_at"] = self.random.randint(1, 30 * (1 + len(rising))) if pauses else 0
        return orders

    def _job(self) -> str:
        pid, lines = self._fork(self._orders())
        said: list[dict[str, Any]] = []
        problem, going_back = "", set[int]()
        later: tuple[str, list[dict[str, Any]]] | None = None
        with lines:
            for line in lines:
                words = json.loads(line)
                if "paused" not in words:
                    said.append(words)
                    continue
                # Another thread may have met the job's last request before all of them stopped.
                os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                problem = self._hear(said)
                if not any("went_back" in w for w in said):
                    going_back = {w["going_back"] for w in said if "going_back" in w}
                said = []
                later = self._meanwhile()
                os.kill(pid, signal.SIGCONT)
        ended = self._end(pid, said)
        if later is None or self._last_owner() == pid:
            # The other one was killed before it had the store.
            said = [*({"going_back": step} for step in going_back), *said]
            return problem or ended or (later or ("", []))[0] or self._hear(said)
        if ended and not str(said[-1].get("ended")).startswith(REFUSALS):
            return ended
        if any({"restored", "going_back", "went_back"} & words.keys() for words in said):
            # It has seen what the other one did, and can complete nothing any more.
            if any("acknowledged" in words for words in said):
                return f"a job was told that its save is durable after another one began: {said}"
            said = []
        said = [words for words in said if "refused" not in words]
        problem = problem or self._hear(said) or later[0] or self._hear(later[1])
        # Its note may have come without its being told.
        self.oracle.perhaps |= {v for v, s in self.oracle.saves.items() if s.step in going_back}
        return problem

    def _meanwhile(self) -> tuple[str, list[dict[str, Any]]]:
        """Runs another job, on another node; how it failed, and what it has said."""
        self._take_node()
        self._paused = True
        pid, lines = self._fork(self._orders())
        with lines:
            said = [json.loads(line) for line in lines]
        self._paused = False
        self.counts["jobs stopped while another one ran"] += 1
        return self._end(pid, said), said

    def _last_owner(self) -> int:
        """The process of the job that has the store."""
        found = self._s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{self._prefix}/.owners/")
        keys = [entry["Key"] for entry in found.get("Contents", ())]
        return int(json.loads(self._get(max(keys)))["pid"]) if keys else 0

    def _get(self, key: str) -> bytes:
        return bytes(self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def _look(self) -> str:
        """Whether all is there that must be, without any code of a checkpointer's."""
        found = self._s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{self._prefix}/step-")
        keys = [entry["Key"] for entry in found.get("Contents", ())]
        there: set[tuple[str, int]] = set()
        for key in (key for key in keys if re.search(r"/manifest[^/]*\.json$", key)):
            values = json.loads(self._get(key))
            if "given up" in values:  # of an attempt that nobody acknowledged
                continue
            values_found = set()
            for part in values["files"]:
                name = f"{key.rpartition('/')[0]}/{part['name']}"
                data = self._get(name) if name in keys else b""
                if len(data) == part["bytes"]:
                    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                    values_found.add(json.loads(header["__metadata__"]["nostall"])["value"])
                else:
                    values_found.add(-1)
            if len(values_found) == 1:
                there.add((values["id"], values_found.pop()))
        for value in sorted(self.oracle.sure):
            save = self.oracle.saves[value]
            if (save.id, value) not in there:
                return f"save {value} of step {save.step} was acknowledged and is lost"
        return ""

    def _user(self) -> None:
        """The node is lost with its fast directory."""
        if self.random.random() < 0.5:
            return
        shutil.rmtree(self.tiers["fast"], ignore_errors=True)
        self.counts["fast directories lost"] += 1
        self._take_node()


def run(task: Task) -> Outcome:
    tests = HERE.parent / "python"
    sys.path[:0] = [str(tests), str(tests / "job"), str(tests / "mpi")]
    try:
        import boto3
        import moto  # noqa: F401
        import obstore.store  # noqa: F401
    except ImportError as error:
        return Outcome(missing=f"the package {error.name}")
    from object_server import ENVIRONMENT, s3_server

    import nostall

    assert nostall.Checkpointer  # their modules are read once, before the forks

    with s3_server() as port:
        server = f"http://127.0.0.1:{port}"
        os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=server)
        s3 = boto3.client("s3", endpoint_url=server)
        s3.create_bucket(Bucket=BUCKET)
        return play(
            Outcome(cases=task.count(HISTORIES)),
            task,
            lambda seed, home, counts: ObjectHistory(seed, home, counts, s3),
            "fast directories lost",
        )
