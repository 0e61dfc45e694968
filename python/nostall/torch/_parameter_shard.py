"""One rank's part of the parameters of `ParameterServers`, and the connection of a proxy to it.

Each pair of a proxy and a server has a conversation over an authenticated stream, whose messages
docs/formats/parameters.md has, and each side has a thread for it, which holds no GIL while it waits,
sends or receives. A clock counts the gradients of a group; that of a server is the least of the clocks
of groups that have not ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from nostall.base._tensors import octets_of
from nostall.errors import PeerError, UsageError
from nostall.job._stream import Stream

#: The clock of a group without more gradients, and of a server whose groups have all ended.
ENDED = 1 << 62

# Seconds after which a server that waits looks whether its proxy has given up, and in which either
# side looks for the reason of a broken connection.
_LOOK = 1.0
# Seconds in which a message goes to a server that may be stuck.
_LAST_WORD = 0.2
# A server that waits says so in each such part of the time after which the proxy takes it for stuck.
_PARTS = 4

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor."""
    return memoryview(octets_of(tensor.detach()).numpy())


def _last_words(stream: Stream) -> str:
    """The error that the other side said before the connection broke; "" if it said none."""
    with suppress(OSError, PeerError):
        stream.set_timeout(_LOOK)
        while True:
            message = stream.receive()
            if "wait" not in message:
                return str(message.get("error", ""))
    return ""


class Shard:
    """What a server has, and what it does with gradients.

    With staleness 0 a clock's gradients are summed in the order of groups and make one step of the
    optimizer; else each group's make one as they arrive.

    Args:
        size, kind: of the parameters.
        make_optimizer: is given the one parameter.
        leaders: the rank that speaks for each group.
        workers: all ranks; what a gradient is divided by.
        staleness: see `ParameterServers`.
        timeout: seconds in which no group gives a gradient while one waits for it.
    """

    def __init__(
        self,
        size: int,
        kind: torch.dtype,
        make_optimizer: MakeOptimizer,
        leaders: Sequence[int],
        *,
        workers: int,
        staleness: int,
        timeout: float,
    ) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(size, dtype=kind, device="cpu"))
        self.optimizer = make_optimizer([self.parameter])
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"make_optimizer returned a {type(self.optimizer).__name__}, not an optimizer of torch"
            )
        self.updates = 0
        self.gradients = 0
        self._leaders, self._workers = list(leaders), workers
        self._staleness, self._timeout = staleness, timeout
        self._changed = threading.Condition()
        # Guarded by it:
        self._clocks = [0] * len(self._leaders)
        self._given: dict[int, torch.Tensor] = {}  # gradients by group, with staleness 0
        self._is_set = False
        self._talking = len(self._leaders)
        self._error = ""

    @property
    def error(self) -> str:
        """Why it serves no more; "" while it does."""
        return self._error

    # ------------------------------------------------------------------ conversations

    def answer(self, question: dict[str, Any], stream: Stream) -> None:
        """One proxy's conversation; returns at its end."""
        group = int(question["group"])
        stream.keep_alive(self._timeout)
        try:
            self._talk(group, bool(question["initial"]), stream)
        except OSError as error:
            gone = f"rank {self._leaders[group]} is gone before it finished: {error}"
            self.fail(_last_words(stream) or gone)
        except Exception as error:  # the proxy is told, whatever it is
            self.fail(str(error) if isinstance(error, PeerError) else f"a server failed: {error!r}")
            with suppress(OSError):
                stream.send({"error": self._error})
        finally:
            with self._changed:
                self._talking -= 1
                self._changed.notify_all()

    def _talk(self, group: int, initial: bool, stream: Stream) -> None:
        incoming, outgoing = (torch.empty_like(self.parameter.detach()) for _ in range(2))
        if initial:
            stream.receive_into(bytes_of(incoming))
            with self._changed, torch.no_grad():
                self.parameter.copy_(incoming)
                self._is_set = True
                self._changed.notify_all()
        self._reply(stream, outgoing, lambda: self._is_set)
        while "end" not in (message := stream.receive()):
            if "error" in message:
                raise PeerError(str(message["error"]))
            clock = int(message["clock"])
            stream.receive_into(bytes_of(incoming))
            self._take(group, clock, int(message["workers"]), incoming)
            # The group uses this answer in its next step, or in this one without staleness.
            due = clock + 1 - max(0, self._staleness - 1)
            self._reply(stream, outgoing, lambda: self._clock() >= due)  # noqa: B023
        with self._changed:
            self._clocks[group] = ENDED
            self._complete()
            self._changed.notify_all()
        self._reply(stream, outgoing, lambda: self._clock() == ENDED)

    def _reply(self, stream: Stream, outgoing: torch.Tensor, is_due: Callable[[], bool]) -> None:
        """Sends the parameters as they are when `is_due`; until then says now and then "wait"."""
        moved = said = time.monotonic()
        before: list[int] = []
        while True:
            pause = self._timeout / _PARTS
            with self._changed:
                if self._clocks != before:
                    moved, before = time.monotonic(), list(self._clocks)
                self._changed.wait_for(
                    lambda: self._error or is_due() or self._clocks != before,  # noqa: B023
                    min(pause, _LOOK),
                )
                if self._error:
                    raise PeerError(self._error)
                if is_due():
                    outgoing.copy_(self.parameter.detach())
                    clock = self._clock()
                    break
                if self._clocks == before and time.monotonic() - moved >= self._timeout:
                    raise PeerError(self._late())
            if stream.has_news():  # it is not the proxy's turn: it gives up, or is gone
                raise PeerError(str(stream.receive().get("error", "a proxy spoke out of turn")))
            if time.monotonic() - said >= pause:
                said = time.monotonic()
                stream.send({"wait": True})
        stream.send({"clock": clock})
        stream.send_bytes(bytes_of(outgoing))

    def _late(self) -> str:
        if not self._is_set:
            return f"rank 0 has not given its parameters for {self._timeout:g} s"
        slowest = self._leaders[self._clocks.index(self._clock())]
        return (
            f"rank {slowest} has not given gradient {self._clock()} for {self._timeout:g} s while "
            "others wait for it; is it alive? A longer timeout= waits longer"
        )

    # ------------------------------------------------------------------ updates

    def _clock(self) -> int:
        return min(self._clocks)

    def _take(self, group: int, clock: int, workers: int, gradient: torch.Tensor) -> None:
        with self._changed:
            if clock != self._clocks[group]:
                raise PeerError(
                    f"rank {self._leaders[group]} gave gradient {clock} where {self._clocks[group]} "
                    "was to come"
                )
            if not self._error:
                self._clocks[group] += 1
                self.gradients += workers
                self._given[group] = gradient
                self._complete()
            self._changed.notify_all()

    def _complete(self) -> None:
        """Makes the step that is due, if one is."""
        all_groups = [g for g, clock in enumerate(self._clocks) if clock != ENDED]
        if not self._given or (self._staleness == 0 and sorted(self._given) != all_groups):
            return
        # The memory is that of conversations, which wait for this step, or make it.
        first, *others = (self._given[group] for group in sorted(self._given))
        for other in others:
            first.add_(other)
        self._given = {}
        self.parameter.grad = first.div_(self._workers)
        try:
            self.optimizer.step()
        except Exception as error:  # it is the user's: it may raise anything
            # All conversations find the reason when they get the lock.
            self.fail(f"the optimizer of a server failed: {error!r}")
            raise PeerError(self._error) from error
        self.parameter.grad = None
        self.updates += 1

    # ------------------------------------------------------------------ the end

    def fail(self, error: str) -> None:
        """Tells it to every proxy that waits, or comes later; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait_for_end(self, timeout: float) -> bool:
        """Whether all conversations have ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._talking == 0, timeout)


class _Told(Exception):
    """The error that a server said."""


@dataclass
class _Push:
    clock: int
    workers: int
    gradient: torch.Tensor  # the server's part


class Link:
    """A proxy's connection to one server: gradients go, and parameters come, in a thread.

    Args:
        rank: of the server.
        begin, end: the server's part of the flat parameters.
        stream: to it.
        changed: notified when `clock`, `answered`, `newest`, `error` or `told` changed; it guards them.
        far: whether the server is on another node.
    """

    def __init__(
        self,
        rank: int,
        begin: int,
        end: int,
        kind: torch.dtype,
        stream: Stream,
        changed: threading.Condition,
        *,
        far: bool,
    ) -> None:
        self.rank, self.begin, self.end, self.far = rank, begin, end, far
        self.messages = 0
        self.clock = -1
        self.answered = 0
        self.error = ""
        self.told = False  # the error, by the server
        self.newest, self._spare = (
            torch.empty(end - begin, dtype=kind, device="cpu") for _ in range(2)
        )
        self._stream, self._changed = stream, changed
        self._pushes: queue.SimpleQueue[_Push | dict[str, Any]] = queue.SimpleQueue()
        self._last: dict[str, Any] = {}
        self._sending = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"nostall-parameters-{rank}", daemon=True
        )

    @property
    def bytes(self) -> int:
        """Sent and received."""
        return self._stream.bytes

    def start(self, group: int, initial: torch.Tensor | None) -> None:
        """Asks for the first parameters; `initial` are all parameters where rank 0 is."""
        self._stream.send({"group": group, "initial": initial is not None})
        if initial is not None:
            self._stream.send_bytes(bytes_of(initial[self.begin : self.end]))
            self.messages += 1
        self._thread.start()

    def push(self, clock: int, workers: int, flat: torch.Tensor) -> None:
        """Sends the server's part of a gradient, whose memory must stay until it is answered."""
        self._pushes.put(_Push(clock, workers, flat[self.begin : self.end]))

    def finish(self) -> None:
        """No more gradients come."""
        self._pushes.put({"end": True})

    def give_up(self, error: str) -> None:
        """Tells the server why no more gradients come, at the latest in `close`."""
        self._last = {"error": error}
        self._pushes.put(self._last)

    def close(self, deadline: float) -> None:
        """Ends the conversation; what it is at may end by itself until `deadline` (monotonic)."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            # The thread waits for an answer, or is amid a gradient, behind which nothing would be read.
            if self._last and self._thread.is_alive() and self._sending.acquire(timeout=_LAST_WORD):
                with suppress(OSError):
                    self._stream.set_timeout(_LAST_WORD)
                    self._stream.send(self._last)
                self._sending.release()
        self._stream.close()

    def _run(self) -> None:
        try:
            self._receive()
            while True:
                push = self._pushes.get()
                if isinstance(push, dict):
                    with self._sending:
                        self._stream.send(push)
                    if "error" in push:
                        return
                    self._receive()
                    return
                with self._sending:
                    self._stream.send({"clock": push.clock, "workers": push.workers})
                    self._stream.send_bytes(bytes_of(push.gradient))
                self.messages += 1
                self._receive()
        except _Told as error:
            self._fail(str(error), told=True)
        except TimeoutError:
            self._fail(
                f"rank {self.rank} has said nothing for {self._stream.timeout:g} s; is it alive? "
                "A longer timeout= waits longer"
            )
        except (OSError, ValueError, KeyError, PeerError) as error:
            words = "" if isinstance(error, PeerError) else _last_words(self._stream)
            gone = f"rank {self.rank} is gone before it finished: {error}"
            self._fail(words or gone, told=bool(words))

    def _fail(self, error: str, *, told: bool = False) -> None:
        with self._changed:
            self.error, self.told = error, told
            self._changed.notify_all()

    def _receive(self) -> None:
        while "wait" in (answer := self._stream.receive()):
            pass
        if "error" in answer:
            raise _Told(str(answer["error"]))
        self._stream.receive_into(bytes_of(self._spare))
        self.messages += 1
        with self._changed:
            self.newest, self._spare = self._spare, self.newest
            self.clock = int(answer["clock"])
            self.answered += 1
            self._changed.notify_all()
