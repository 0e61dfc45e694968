"""A meeting of ranks through a store of torch: an allgather that takes nothing that was left there.

Torchrun's store outlives the ranks: where some were killed at a meeting, those that are started next
find what these wrote. So rank 0 writes a random number; the others answer to it, each with a number
of its own; rank 0's last entry repeats all of these. Who comes before rank 0 may find the number of a
killed one, and answers to that in vain, until rank 0 takes its place and says so there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nostall.errors import PeerError, UsageError

# Rank 0 names the missing ranks when its own wait ends, about when the wait of the others ends.
_GRACE = 10.0
_NAMED = 8


@dataclass(frozen=True)
class Met:
    """What all ranks gave, in their order, and a random number that no other meeting has."""

    number: str
    parts: list[bytes]


def meet(store: Any, rank: int, size: int, name: str, mine: bytes, timeout: float) -> Met:
    """All ranks call this, each with its part; `name` is that of one meeting at a time.

    With each kind of store a rank sends few requests, however many ranks there are; rank 0 reads the
    answers with one more if the store can do that, and whoever reads last removes all entries, so
    that strangers cannot read them later.

    Args:
        store: of torch.
        rank: of this process.
        size: how many ranks meet.
        name: of the meeting.
        mine: for the others.
        timeout: seconds to wait for them.

    Raises:
        PeerError: ranks are missing, and all that came are told which; or the job was started again.
        UsageError: a second process of this rank came.
    """
    if size == 1:  # there is no other rank
        return Met(secrets.token_hex(8), [mine])
    meeting = _Meeting(store, rank, size, name, timeout)
    return meeting.call(mine) if rank == 0 else meeting.answer(mine)


class _Meeting:
    def __init__(self, store: Any, rank: int, size: int, name: str, timeout: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._name, self._timeout = name, timeout
        self._deadline = time.monotonic() + timeout
        self._me = f"{secrets.token_hex(8)} process {os.getpid()} of {socket.gethostname()}"

    def call(self, mine: bytes) -> Met:
        self._take_over()
        keys = [self._key(self._me, rank) for rank in range(1, self._size)]
        try:
            self._wait(keys)
            many = hasattr(self._store, "has_extended_api") and self._store.has_extended_api()
            given = self._store.multi_get(keys) if many else [self._store.get(key) for key in keys]
        except Exception as error:  # whatever a store raises
            told = self._missing(keys, error)
            with contextlib.suppress(Exception):
                self._store.delete_key(self._called)
                self._store.set(self._key(self._me, "all"), json.dumps({"error": told}))
            raise PeerError(told) from error
        answers = [{"from": self._me, "part": mine.hex()}, *map(json.loads, given)]
        for answer in answers:
            if "after" in answer:
                raise self._second(answer["after"])
        with contextlib.suppress(Exception):  # not every store can
            self._store.delete_key(self._called)  # so what is found there was left
        last = {key: [answer[key] for answer in answers] for key in ("from", "part")}
        self._store.set(self._key(self._me, "all"), json.dumps(last))
        return self._read(self._me, last)

    def answer(self, mine: bytes) -> Met:
        word = json.dumps({"from": self._me, "part": mine.hex()})
        left = self._store.check([self._called])
        while True:
            try:
                self._wait([self._called])
                caller = bytes(self._store.get(self._called)).decode()
                self._store.set(self._key(caller, self._rank), word)
                self._wait([self._key(caller, "all")], _GRACE)
                last = json.loads(self._store.get(self._key(caller, "all")))
            except Exception as error:  # whatever a store raises
                raise PeerError(
                    f"rank {self._rank} waited {self._timeout:g} s in vain for rank 0 of "
                    f'{self._size}, to meet for "{self._name}" ({_first_line(error)}): see its own '
                    "error"
                ) from error
            if "after" not in last:
                break
            if not left:  # it came while this rank waited, and another one came after it
                raise PeerError(
                    f"rank {self._rank} met {_process(caller)} as rank 0 of {self._size}, and "
                    f"{_process(last['after'])} came in its place: the job was started again, or two "
                    "processes have this rank"
                )
            left = False
        if "error" in last:
            raise PeerError(last["error"])
        if last["from"][self._rank] != self._me:
            raise self._second(last["from"][self._rank])
        return self._read(caller, last)

    @property
    def _called(self) -> str:
        return f"nostall/{self._name}/{self._size}/call"

    def _key(self, caller: str, end: object) -> str:
        return f"nostall/{self._name}/{self._size}/{caller.split()[0]}/{end}"

    def _take_over(self) -> None:
        """Says that this is rank 0, here and to those that wait for another one."""
        former = ""
        while (there := self._exchange(former)) != self._me:
            former = "" if there == former else there  # the former one has gone
        if former:
            for end in (*range(1, self._size), "all"):
                self._store.set(self._key(former, end), json.dumps({"after": self._me}))

    def _exchange(self, former: str) -> str:
        return bytes(self._store.compare_set(self._called, former, self._me)).decode()

    def _wait(self, keys: list[str], grace: float = 0.0) -> None:
        seconds = max(0.001, self._deadline + grace - time.monotonic())
        self._store.wait(keys, timedelta(seconds=seconds))

    def _read(self, caller: str, last: dict[str, list[str]]) -> Met:
        read = self._key(caller, "read")
        if self._store.add(read, 1) == self._size:
            for end in (*range(1, self._size), "all", "read"):
                with contextlib.suppress(Exception):  # not every store can
                    self._store.delete_key(self._key(caller, end))
        return Met(caller.split()[0], [bytes.fromhex(part) for part in last["part"]])

    def _second(self, other: str) -> UsageError:
        return UsageError(
            f"{_process(self._me)} and {_process(other)} both are rank {self._rank} of {self._size} "
            f'where the ranks meet for "{self._name}": give each process a rank= of its own, or leave '
            "rank= and world_size= out"
        )

    def _missing(self, keys: list[str], error: Exception) -> str:
        ranks = []
        with contextlib.suppress(Exception):  # the process that has the store may be gone
            ranks = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
        if not ranks:
            return f'rank 0 could not meet the others for "{self._name}": {_first_line(error)}'
        named = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
        return (
            f"{len(ranks)} of {self._size} ranks have not come in {self._timeout:g} s to meet for "
            f'"{self._name}": {named}; see their errors'
        )


def _process(word: str) -> str:
    return word.partition(" ")[2]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
