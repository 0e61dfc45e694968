"""A meeting of ranks through a store of torch: an allgather that takes nothing that was left there.

Torchrun's store outlives the ranks: where some were killed at a meeting, those that are started next
find what these wrote. So rank 0 writes a random number; the others answer to it, each with a number
of its own; rank 0's last entry repeats all of these. Who comes before rank 0 may find the number of a
killed one, and answers to that in vain, until rank 0 takes its place and says so there.

Rank 0 writes its number by an exchange, and exchanges it when it ends, so of several each knows whether
another one came after it. This entry also counts the meetings that ended, and is never removed. Who
finds none or one that ended waits for the bell of that count, which rank 0 rings: an exchange does not
wake those that wait at every store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from nostall.errors import PeerError, UsageError

# Rank 0 names the missing ranks when its own wait ends, about when the wait of the others ends.
_GRACE = 10.0
_NAMED = 8

_CONNECT = 10.0  # seconds for a connection to torch's server

# Torch's server closes the connection of who sends a value of more than 8 MiB.
_PIECE = 4 << 20
_AT_ONCE = 16  # answers in one request

_LONGEST = 64  # characters of a meeting's name in keys, of which one request has as many as ranks


@dataclass(frozen=True)
class Met:
    """What all ranks gave, in their order, and a random number that no other meeting has."""

    number: str
    parts: list[bytes]


def innermost(store: Any) -> Any:
    """The store of torch beneath its prefixes."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def own_connection(store: Any, seconds: float) -> Any:
    """The store by a connection of its own: while a thread waits in one, no other thread can use it.

    Releases of torch without Store.clone, and stores written in Python, share what they have. So does
    one whose server takes no connection in `seconds`: a clone tries for the store's own time limit,
    and what is shared fails at once.
    """
    inner = innermost(store)
    try:
        if host := getattr(inner, "host", ""):
            limit = max(0.001, min(_CONNECT, seconds))
            socket.create_connection((host, inner.port), limit).close()
        return store.clone()
    except (AttributeError, OSError, RuntimeError):
        return store


def meet(store: Any, rank: int, size: int, name: str, mine: bytes, timeout: float) -> Met:
    """All ranks call this, each with its part; `name` is that of one meeting at a time.

    A rank sends few requests, however many ranks there are, unless parts are long; rank 0 reads the
    answers with one more if the store can do that, and whoever reads last removes all parts, so
    that strangers cannot read them later.

    Args:
        store: of torch.
        rank: of this process.
        size: how many ranks meet.
        name: of the meeting.
        mine: for the others.
        timeout: seconds to wait for them.

    Raises:
        PeerError: ranks are missing, and all that came are told which; or the job was started again; or
            the store fails.
        UsageError: a second process of this rank came.
    """
    if size == 1:  # there is no other rank
        return Met(secrets.token_hex(8), [mine])
    meeting = _Meeting(store, rank, size, name, timeout)
    try:
        return meeting.call(mine) if rank == 0 else meeting.answer(mine)
    except (PeerError, UsageError):
        raise
    except Exception as error:  # whatever a store raises
        raise PeerError(meeting.vain(str(error).partition("\n")[0])) from error


class _Entry(NamedTuple):
    """What is at "call": how many meetings ended, whether one is on, and its rank 0."""

    ended: int = 0
    on: bool = False
    caller: str = ""

    def __str__(self) -> str:
        return (
            f"{self.ended} {'calls' if self.on else 'ended'} {self.caller}" if self.caller else ""
        )

    @staticmethod
    def of(word: bytes) -> _Entry:
        if not word:
            return _Entry()
        ended, state, caller = bytes(word).decode().split(" ", 2)
        return _Entry(int(ended), state == "calls", caller)


class _Said(NamedTuple):
    """By one rank; `more` has the keys of the further pieces of what is long."""

    words: dict[str, Any]
    part: bytes
    more: list[str]


class _Meeting:
    def __init__(self, store: Any, rank: int, size: int, name: str, timeout: float) -> None:
        self._timeout, self._began = timeout, time.monotonic()
        self._deadline = self._began + timeout
        self._store, self._rank, self._size = own_connection(store, timeout), rank, size
        self._name = name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "..."
        known = name if len(name) <= _LONGEST else hashlib.sha256(name.encode()).hexdigest()
        self._at = f"nostall/{known}/{size}"
        self._me = f"{secrets.token_hex(8)} process {os.getpid()} of {socket.gethostname()}"
        self._extended = hasattr(store, "has_extended_api") and store.has_extended_api()

    def call(self, mine: bytes) -> Met:
        entry = self._take_over()
        keys = [self._key(self._me, rank) for rank in range(1, self._size)]
        try:
            self._wait(keys)
        except Exception as error:  # whatever a store raises
            missing = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
            if missing:
                told = self._missing(missing, error)
                self._end(entry)
                self._say(self._key(self._me, "all"), {"error": told})
                came = [key for rank, key in enumerate(keys, 1) if rank not in missing]
                with contextlib.suppress(Exception):
                    self._remove(
                        [key for said in self._hear(came, self._get) for key in said.more] + came
                    )
                raise PeerError(told) from error
        answers = [_Said({"from": self._me}, mine, []), *self._hear(keys, self._get)]
        for answer in answers:
            if "after" in answer.words:
                raise self._second(answer.words["after"])
        self._end(entry)
        self._remove([self._bell(entry)])
        parts = [answer.part for answer in answers]
        last = {
            "from": [answer.words["from"] for answer in answers],
            "lengths": [len(part) for part in parts],
            "more": [key for answer in answers for key in answer.more],
        }
        more = self._say(self._key(self._me, "all"), last, b"".join(parts))
        return self._read(self._me, parts, last["more"] + more)

    def answer(self, mine: bytes) -> Met:
        entry = self._entry()
        left = entry.on
        while True:
            while not entry.on:
                self._wait([self._bell(entry)])
                entry = self._entry()
            self._say(self._key(entry.caller, self._rank), {"from": self._me}, mine)
            self._wait([self._key(entry.caller, "all")], _GRACE)
            [last] = self._hear([self._key(entry.caller, "all")], self._get_left)
            if "after" not in last.words:
                break
            after = last.words["after"]
            if not left:  # it came while this rank waited, and another one came after it
                raise PeerError(
                    f"rank {self._rank} met {_process(entry.caller)} as rank 0 of {self._size}, and "
                    f"{_process(after)} came in its place: the job was started again, or two "
                    "processes have this rank"
                )
            left = False
            entry = self._entry()
        if "error" in last.words:
            raise PeerError(last.words["error"])
        other = last.words["from"][self._rank]
        if other != self._me:
            raise self._second(other)
        parts, start = [], 0
        for length in last.words["lengths"]:
            parts.append(last.part[start : start + length])
            start += length
        return self._read(entry.caller, parts, last.words["more"] + last.more)

    def vain(self, why: str) -> str:
        if self._rank == 0:
            return f'rank 0 could not meet the others for "{self._name}": {why}'
        return (
            f"rank {self._rank} waited {self._waited():g} s in vain for rank 0 of {self._size}, to "
            f'meet for "{self._name}" ({why}): see its own error'
        )

    @property
    def _called(self) -> str:
        return f"{self._at}/call"

    def _bell(self, entry: _Entry) -> str:
        return f"{self._at}/bell {entry.ended}"

    def _key(self, caller: str, end: object) -> str:
        return f"{self._at}/{_number(caller)}/{end}"

    def _entry(self) -> _Entry:
        there = self._store.check([self._called])
        return _Entry.of(self._store.get(self._called)) if there else _Entry()

    def _take_over(self) -> _Entry:
        """Says that this is rank 0, here and to those that wait for another one."""
        former = _Entry()
        while True:
            mine = _Entry(former.ended, True, self._me)
            there = self._exchange(former, mine)
            if there == mine:
                break
            former = there
        if former.on:  # its process has gone, or will see this
            [word] = _pieces("", {"after": self._me}, b"", self._me).values()
            keys = [self._key(former.caller, end) for end in (*range(1, self._size), "all")]
            if self._extended:
                self._store.multi_set(keys, [word] * len(keys))
            else:
                for key in keys:
                    self._store.set(key, word)
        self._store.set(self._bell(mine), self._me)
        return mine

    def _end(self, mine: _Entry) -> None:
        """Who comes now waits for the next meeting."""
        ended = _Entry(mine.ended + 1, False, self._me)
        there = self._exchange(mine, ended)
        if there != ended:
            raise self._second(there.caller)

    def _exchange(self, former: _Entry, wanted: _Entry) -> _Entry:
        try:
            return _Entry.of(self._store.compare_set(self._called, str(former), str(wanted)))
        except Exception:  # a store that cannot, or one that fails here too
            there = self._entry()
            if there != former:
                return there
            self._store.set(self._called, str(wanted))
            return wanted

    def _wait(self, keys: list[str], grace: float = 0.0) -> None:
        seconds = max(0.001, self._deadline + grace - time.monotonic())
        self._store.wait(keys, timedelta(seconds=seconds))

    def _say(self, key: str, words: dict[str, Any], part: bytes = b"") -> list[str]:
        """Returns the keys of further pieces."""
        pieces = _pieces(key, words, part, self._me)
        for piece in reversed(pieces):  # who finds the first one finds all
            self._store.set(piece, pieces[piece])
        return [piece for piece in pieces if piece != key]

    def _hear(
        self, keys: Sequence[str], get: Callable[[Sequence[str]], list[bytes]]
    ) -> list[_Said]:
        firsts = [first.split(b" ", 2) for first in get(keys)]
        more = [
            _more(key, number.decode(), int(count))
            for key, (count, number, _) in zip(keys, firsts, strict=True)
        ]
        said = []
        for (_, _, start), further in zip(firsts, more, strict=True):
            # Pieces one by one: the server builds each answer whole, for all that ask at once.
            pieces = (piece for key in further for piece in get([key]))
            words, _, part = b"".join([start, *pieces]).partition(b"\n")
            said.append(_Said(json.loads(words), part, further))
        return said

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if not self._extended:
            return [bytes(self._store.get(key)) for key in keys]
        groups = [keys[start : start + _AT_ONCE] for start in range(0, len(keys), _AT_ONCE)]
        return [bytes(value) for group in groups for value in self._store.multi_get(group)]

    def _get_left(self, keys: Sequence[str]) -> list[bytes]:
        """What is at `keys` now, without waiting.

        If two processes have this rank, the meeting takes one of them. The last reader does not count
        the other, and may have removed these entries, for which a get would wait.
        """
        values = []
        for key in keys:
            try:  # It changes nothing: no entry has this value.
                value = bytes(self._store.compare_set(key, self._me, self._me))
            except Exception:  # a store that cannot, or one that fails here too
                value = bytes(self._store.get(key))
            if value == self._me.encode():
                raise self._second("- another process")
            values.append(value)
        return values

    def _read(self, caller: str, parts: list[bytes], more: Sequence[str]) -> Met:
        read = self._key(caller, "read")
        if self._store.add(read, 1) == self._size:
            ends = (*range(1, self._size), "all")
            self._remove([*more, *(self._key(caller, end) for end in ends), read])
        return Met(_number(caller), parts)

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(Exception):  # not every store can
                self._store.delete_key(key)

    def _second(self, other: str) -> UsageError:
        return UsageError(
            f"{_process(self._me)} and {_process(other)} both are rank {self._rank} of {self._size} "
            f'where the ranks meet for "{self._name}": unless the job was started again, give each '
            "process a rank= of its own, or leave rank= and world_size= out; parts of a job that "
            "have the same ranks each need an allgather of their own (gather= of a Checkpointer, "
            "peers= of a DataLoader)"
        )

    def _waited(self) -> float:
        """Seconds: the time limit, but for milliseconds that a store rounds, or less if it failed."""
        seconds = time.monotonic() - self._began
        return self._timeout if seconds > 0.9 * self._timeout else round(seconds, 3)

    def _missing(self, ranks: list[int], error: Exception) -> str:
        if self._waited() < self._timeout:
            return self.vain(str(error).partition("\n")[0])
        named = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
        return (
            f"{len(ranks)} of {self._size} ranks have not come in {self._timeout:g} s to meet for "
            f'"{self._name}": {named}; see their errors'
        )


def _pieces(key: str, words: dict[str, Any], part: bytes, me: str) -> dict[str, bytes]:
    """Of what `me` says at `key`. The first one tells the others, which have its number: another
    process may say something there."""
    said = json.dumps(words).encode() + b"\n" + part
    parts = [said[start : start + _PIECE] for start in range(0, len(said), _PIECE)]
    parts[0] = f"{len(parts)} {_number(me)} ".encode() + parts[0]
    return dict(zip([key, *_more(key, _number(me), len(parts))], parts, strict=True))


def _more(key: str, number: str, count: int) -> list[str]:
    return [f"{key}/{number}/{piece}" for piece in range(1, count)]


def _number(word: str) -> str:
    return word.partition(" ")[0]


def _process(word: str) -> str:
    return word.partition(" ")[2]
