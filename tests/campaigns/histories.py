"""Random histories of checkpoints against an oracle of what was acknowledged.

A history is one to five jobs, each a forked process, on the same one or two directories. A job
restores the newest checkpoint, may go back to an older one, and saves at every level: steps that
rise, a step again, a step below. It is killed at a random rename, unlink, fsync, mkdir or rmdir, or
closes. Its clock jumps, its disks are full for a while, a user puts files into directories of steps.

The oracle knows what the calls have returned and the rules that the guide states, no more. A history
fails if an acknowledged save that no rule of a branch of its own has retired is not there with its
values, if `restore()` gives another checkpoint than the newest of the current branch, if a user's file
is gone, or if a job does not start.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from campaigns.outcome import Outcome, Task

FULL = "10,000 histories of up to five jobs with six saves each"
SMALL = 0.02

HISTORIES = 10_000
LEVELS = {"fast": 1, "durable": 2}
SAVES = 6
# Seconds that a rank waits for another one, which may be stopped; one that fails ends the wait.
PATIENCE = 600
CALLS = ("rename", "unlink", "fsync", "mkdir", "rmdir")


@dataclass
class Save:
    """A save that was tried: `path` are those that it continues, and itself."""

    value: int
    step: int
    path: tuple[int, ...]
    id: str = ""
    acknowledged: bool = False


@dataclass
class Oracle:
    """What the calls of all jobs have said."""

    last: int
    every: int
    saves: dict[int, Save] = field(default_factory=dict)
    # What the next save continues: values, steps rise.
    line: tuple[int, ...] = ()
    # The value that restore() must give, and those of later saves of which nothing is known.
    newest: int | None = None
    perhaps: set[int | None] = field(default_factory=set)
    # The branch that a restore of an older step has begun, before its first save.
    begin: tuple[int, ...] = ()
    replaced: set[int] = field(default_factory=set)
    # Saves that a rule may have retired, and those that were acknowledged and are certainly there.
    retired: set[int] = field(default_factory=set)
    sure: set[int] = field(default_factory=set)

    def tried(self, value: int, step: int) -> None:
        kept = [v for v in self.line if self.saves[v].step < step]
        dropped = [v for v in self.line if v not in kept]
        if dropped and self.saves[dropped[-1]].step == step:
            self.replaced.add(dropped[-1])  # the same step again on one branch: the later one stays
        self.line = (*kept, value)
        self.saves[value] = Save(value, step, self.line)
        self.perhaps.add(value)
        self.begin = ()
        self._retire()

    def acknowledged(self, value: int, id: str) -> None:
        save = self.saves[value]
        save.id, save.acknowledged = id, True
        if self.newest is None or value > self.newest or value in self.perhaps:
            later = {v for v in self.perhaps if v is not None and v > value}
            self.newest, self.perhaps = value, later
        self._retire()

    def went_back(self, value: int, certain: bool) -> None:
        path = self.saves[value].path
        self.line = path
        if certain:
            self.newest, self.perhaps = value, set()
            self.begin = path
            self._retire()
        else:
            self.perhaps.add(value)

    def _retire(self) -> None:
        for save in self.saves.values():
            if save.value not in self.retired and not self._stays(save):
                self.retired.add(save.value)
        self.sure = {s.value for s in self.saves.values() if s.id} - self.retired

    def _stays(self, save: Save) -> bool:
        if save.value in self.replaced:
            return False
        if save.step % self.every == 0:
            return True
        paths = (save.path, self.begin, *self._certain())
        return any(self._guards(path, save.value) for path in paths)

    def _certain(self) -> list[tuple[int, ...]]:
        return [
            s.path for s in self.saves.values() if s.acknowledged and s.value not in self.replaced
        ]

    def _guards(self, path: tuple[int, ...], value: int) -> bool:
        """Whether the branch that ends there keeps it, whatever became of saves that continue it."""
        longer = [s.path for s in self.saves.values() if s.path[: len(path)] == path]
        return all(value in p[-self.last :] for p in (path, *longer))


class Job:
    """The child's side: one rank or two, as threads."""

    # Levels at which a save counts as acknowledged.
    safe: tuple[str, ...] = ("fast", "durable")

    def __init__(self, orders: dict[str, Any], tell: int) -> None:
        self.orders, self.tell, self.ranks = orders, tell, orders["ranks"]
        self.barrier = threading.Barrier(self.ranks)
        self.notes = [b""] * self.ranks
        self.full: set[str] = set()
        self.failed: BaseException | None = None  # what ended a rank

    def say(self, **words: Any) -> None:
        os.write(self.tell, json.dumps(words).encode() + b"\n")

    def gather(self, rank: int) -> Any:
        def allgather(mine: bytes) -> list[bytes]:
            self.notes[rank] = mine
            self.barrier.wait(PATIENCE)
            notes = list(self.notes)
            self.barrier.wait(PATIENCE)
            return notes

        return allgather

    def run(self) -> None:
        self._break_system()
        threads = [threading.Thread(target=self._alone, args=(r,)) for r in range(1, self.ranks)]
        for thread in threads:
            thread.start()
        try:
            self._alone(0)
        except threading.BrokenBarrierError as error:
            raise self.failed or error from None
        for thread in threads:
            thread.join(PATIENCE)
        self.say(closed=True)

    def _alone(self, rank: int) -> None:
        """As a rank does, after whose failure no other one waits."""
        try:
            self._rank(rank)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                self.failed = self.failed or error
            self.barrier.abort()
            raise

    def _break_system(self) -> None:
        from nostall.checkpoint._store import Store
        from nostall.errors import IoError

        left, lock = [self.orders["kill_at"]], threading.Lock()

        def fused(call: Any) -> Any:
            def wrapped(*args: Any, **options: Any) -> Any:
                with lock:
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)

            return wrapped

        for name in CALLS:
            setattr(os, name, fused(getattr(os, name)))
        offset, clock = self.orders["clock"], time.time
        time.time = lambda: clock() + offset
        prepare, statvfs = Store.prepare, os.statvfs

        def prepare_unless_full(store: Store, step: int) -> Path:
            if store.root.name in self.full:
                failed = IoError(f"cannot write to {store.root}: No space left on device")
                failed.errno = errno.ENOSPC
                raise failed
            return prepare(store, step)

        def little_room(path: Any) -> Any:
            found = statvfs(path)
            room = 0 if "room" in self.full else 1 << 30
            values = list(found)
            values[4] = room  # f_bavail
            return os.statvfs_result(values)

        Store.prepare = prepare_unless_full  # type: ignore[method-assign]
        os.statvfs = little_room

    def _rank(self, rank: int) -> None:
        import nostall
        from nostall.errors import Error

        orders = self.orders
        world = {"rank": rank, "world_size": self.ranks, "gather": self.gather(rank), "job": "h"}
        ckpt = nostall.Checkpointer(
            orders["fast"],
            orders["durable"],
            keep=nostall.Keep(orders["last"], every=orders["every"]),
            priority="normal",
            timeout=60,
            threads=1,
            **(world if self.ranks > 1 else {}),
        )
        found = ckpt.restore()
        self._tell_found(rank, "restored", found)
        if orders["back_to"] is not None:
            if rank == 0:
                self.say(going_back=orders["back_to"])
            try:
                self._tell_found(rank, "went_back", ckpt.restore(orders["back_to"]))
            except Error as error:
                if rank == 0:
                    self.say(refused=str(error))
        saved = []
        for value, step, level, full in orders["saves"]:
            if self.ranks > 1:
                self.barrier.wait(PATIENCE)
            if rank == 0:
                self.full = set(full)
                self.say(tried=value, step=step)
            if self.ranks > 1:
                self.barrier.wait(PATIENCE)
            with contextlib.suppress(Error):
                one = ckpt.save(self.state(value, rank), step, level=level)
                saved.append((value, one))
                if rank == 0 and level in self.safe:
                    self.say(acknowledged=value, id=one.id)
        with contextlib.suppress(Error):
            ckpt.close()
        for value, one in saved:
            if rank == 0 and one.level in self.safe:
                self.say(acknowledged=value, id=one.id)

    def state(self, value: int, rank: int) -> dict[str, Any]:
        return {"value": value, "rank": rank}

    def _tell_found(self, rank: int, what: str, found: Any) -> None:
        if found is not None and found.state["rank"] != rank:
            self.say(wrong=f"rank {rank} has the state of rank {found.state['rank']}")
        if rank == 0:
            self.say(**{what: None if found is None else found.state["value"]})


class History:
    """One history, and what it finds."""

    job: type[Job] = Job
    # What may fail during a save.
    faults: Sequence[tuple[str, ...]] = (
        ("fast",),
        ("durable",),
        ("fast", "durable"),
        ("room",),
    )

    def __init__(self, seed: str, home: Path, counts: Counter[str]) -> None:
        self.random = random.Random(seed)
        self.home, self.counts = home, counts
        tiers = self.random.choice([("fast", "durable"), ("durable",), ("fast",)])
        self.tiers = {t: str(home / t) for t in tiers}
        self.ranks = 2 if self.random.random() < 0.1 else 1
        every = self.random.choice([10**9, 10**9, 50])
        self.oracle = Oracle(self.random.randint(1, 3), every)
        self.users: list[Path] = []
        self.value = 0
        self.step = 0

    def run(self) -> str:
        for _ in range(self.random.randint(1, 5)):
            problem = self._job() or self._look()
            if problem:
                return problem
            self._user()
        return ""

    def _job(self) -> str:
        pid, lines = self._fork(self._orders())
        with lines:
            said = [json.loads(line) for line in lines]
        return self._end(pid, said) or self._hear(said)

    def _orders(self) -> dict[str, Any]:
        """What the next job does."""
        rand, oracle = self.random, self.oracle
        back_to = None
        if oracle.sure and rand.random() < 0.4:
            back_to = oracle.saves[rand.choice(sorted(oracle.sure))].step
            self.counts["restores of an older step"] += 1
        levels = [*(tier for tier in self.tiers if tier in self.job.safe), "memory"]
        saves = []
        step = self.step if back_to is None else back_to
        for _ in range(rand.randint(0, SAVES)):
            kind = rand.random()
            step = max(
                0,
                step + 10 if kind < 0.8 else step if kind < 0.9 else step - 10 * rand.randint(1, 4),
            )
            full = rand.choice(self.faults)
            self.value += 1
            saves.append(
                (self.value, step, rand.choice(levels), full if rand.random() < 0.15 else ())
            )
        orders = {
            "fast": self.tiers.get("fast"),
            "durable": self.tiers.get("durable"),
            "ranks": self.ranks,
            "last": oracle.last,
            "every": oracle.every,
            "back_to": back_to,
            "saves": saves,
            "clock": rand.choice([0, 0, 3600, -3600, 10**8, -(10**8)]),
            "kill_at": rand.randint(1, 25 * (1 + len(saves))) if rand.random() < 0.5 else 0,
        }
        self.counts["jobs"] += 1
        self.counts["saves"] += len(saves)
        return orders

    def _fork(self, orders: dict[str, Any]) -> tuple[int, IO[str]]:
        """A job, and what it says."""
        hear, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hear)
            logging.disable()
            status = 1
            try:
                self.job(orders, tell).run()
                status = 0
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.write(tell, json.dumps({"ended": repr(error)}).encode() + b"\n")
            finally:
                os._exit(status)
        os.close(tell)
        return pid, os.fdopen(hear)

    def _end(self, pid: int, said: list[dict[str, Any]]) -> str:
        """Waits for the end of a job, which is not to fail."""
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        killed = status == -signal.SIGKILL
        self.counts["killed"] += killed
        return f"a job ended with {status}: {said[-1:]}" if status and not killed else ""

    def _hear(self, said: list[dict[str, Any]]) -> str:
        oracle = self.oracle
        going_back: int | None = None
        for words in said:
            if "wrong" in words:
                return str(words["wrong"])
            if "restored" in words:
                value = words["restored"]
                allowed = {oracle.newest, *oracle.perhaps}
                if value not in allowed:
                    return f"restore() gave save {value}, not one of {sorted(map(str, allowed))}"
                if value is not None:
                    oracle.line = oracle.saves[value].path
                    oracle.newest = value
                    oracle.perhaps = {v for v in oracle.perhaps if v is not None and v > value}
                    oracle.saves[value].acknowledged = True
            elif "going_back" in words:
                going_back = words["going_back"]
            elif "refused" in words:
                return f"restore({going_back}) of a save that must be there: {words['refused']}"
            elif "went_back" in words:
                wanted = [v for v in oracle.line if oracle.saves[v].step == going_back]
                value = words["went_back"]
                if value not in oracle.saves or oracle.saves[value].step != going_back:
                    return f"restore({going_back}) gave save {value}"
                if wanted and wanted[0] in oracle.sure and value != wanted[0]:
                    return f"restore({going_back}) gave save {value}, not {wanted[0]} of its branch"
                oracle.went_back(value, certain=True)
                going_back = None
            elif "tried" in words:
                oracle.tried(words["tried"], words["step"])
            elif "acknowledged" in words:
                oracle.acknowledged(words["acknowledged"], words["id"])
        if going_back is not None:
            for save in oracle.saves.values():
                if save.step == going_back:
                    oracle.perhaps.add(save.value)
        self.step = max((oracle.saves[v].step for v in oracle.line), default=0)
        return ""

    def _look(self) -> str:
        """Whether all is there that must be, without any code of a checkpointer's."""
        there: set[tuple[str, int]] = set()
        for manifest in (
            p for t in self.tiers.values() for p in Path(t).glob("step-*/manifest*.json")
        ):
            values = json.loads(manifest.read_bytes())
            found = set()
            for part in values["files"]:
                with contextlib.suppress(OSError):
                    data = (manifest.parent / part["name"]).read_bytes()
                    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                    found.add(json.loads(header["__metadata__"]["nostall"])["value"])
            if len(found) == 1:
                there.add((values["id"], found.pop()))
        for value in sorted(self.oracle.sure):
            save = self.oracle.saves[value]
            if (save.id, value) not in there:
                return f"save {value} of step {save.step} was acknowledged and is lost"
        gone = [str(path) for path in self.users if not path.exists()]
        return f"the user's {gone} are gone" if gone else ""

    def _user(self) -> None:
        directories = sorted(p for t in self.tiers.values() for p in Path(t).glob("step-*"))
        if directories and self.random.random() < 0.3:
            path = self.random.choice(directories) / self.random.choice(
                ["notes.txt", "eval", ".nfs01"]
            )
            if path.name == "eval":
                path.mkdir(exist_ok=True)
                path = path / "scores.json"
            path.write_text("mine")
            self.users.append(path)
            self.counts["files of users"] += 1


def play(
    outcome: Outcome, task: Task, history: Callable[[str, Path, Counter[str]], History], figure: str
) -> Outcome:
    """Runs the histories of a task, each in a folder of its own; `figure` a number of theirs alone."""
    counts: Counter[str] = Counter()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="nostall-histories-", dir=memory) as name:
        for case in range(outcome.cases):
            home = Path(name) / f"{task.seed}-{case}"
            home.mkdir()
            problem = history(f"{task.seed} {case}", home, counts).run()
            if problem:
                outcome.failures.append(f"history {case} of seed {task.seed}: {problem}")
            shutil.rmtree(home)
    names = ("jobs", "killed", "saves", "restores of an older step", *counts, figure)
    outcome.figures = {name: counts[name] for name in names}
    return outcome


def run(task: Task) -> Outcome:
    import nostall

    assert nostall.Checkpointer  # its modules are read once, before the forks
    return play(Outcome(cases=task.count(HISTORIES)), task, History, "files of users")
