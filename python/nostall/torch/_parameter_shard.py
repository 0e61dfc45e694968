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

from nostall.errors import PeerError, UsageError
from nostall.job._stream import Stream

#: The clock of a group without more gradients, and of a server whose groups have all ended.
ENDED = 1 << 62

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())


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
        self.parameter = torch.nn.Parameter(torch.zeros(size, dtype=kind))
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

    # ------------------------------------------------------------------ conversations

    def answer(self, question: dict[str, Any], stream: Stream) -> None:
        """One proxy's conversation; returns at its end."""
        group = int(question["group"])
        stream.keep_alive(self._timeout)
        try:
            self._talk(group, bool(question["initial"]), stream)
        except OSError as error:
            self.fail(f"rank {self._leaders[group]} is gone before it finished: {error}")
        except Exception as error:  # the optimizer is the user's: it may raise anything
            told = isinstance(error, PeerError)
            self.fail(str(error) if told else f"the optimizer of a server failed: {error!r}")
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
        """Sends the parameters as they are when `is_due`."""
        with self._changed:
            while not self._error and not is_due():
                before = list(self._clocks)
                if not self._changed.wait_for(
                    lambda: self._error or is_due() or self._clocks != before,  # noqa: B023
                    self._timeout,
                ):
                    raise PeerError(self._late())
            if self._error:
                raise PeerError(self._error)
            outgoing.copy_(self.parameter.detach())
            clock = self._clock()
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
        self.optimizer.step()
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
        changed: notified when `clock`, `answered`, `newest` or `error` changed; it guards them.
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
        self.newest, self._spare = (torch.empty(end - begin, dtype=kind) for _ in range(2))
        self._stream, self._changed = stream, changed
        self._pushes: queue.SimpleQueue[_Push | dict[str, Any]] = queue.SimpleQueue()
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
        """Tells the server why no more gradients come."""
        self._pushes.put({"error": error})

    def close(self, deadline: float) -> None:
        """Ends the conversation; what it is at may end by itself until `deadline` (monotonic)."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._stream.close()

    def _run(self) -> None:
        try:
            self._receive()
            while True:
                push = self._pushes.get()
                if isinstance(push, dict):
                    self._stream.send(push)
                    if "error" in push:
                        return
                    self._receive()
                    return
                self._stream.send({"clock": push.clock, "workers": push.workers})
                self._stream.send_bytes(bytes_of(push.gradient))
                self.messages += 1
                self._receive()
        except (OSError, ValueError, KeyError, PeerError) as error:
            told = isinstance(error, PeerError)
            with self._changed:
                self.error = (
                    str(error) if told else f"rank {self.rank} is gone before it finished: {error}"
                )
                self._changed.notify_all()

    def _receive(self) -> None:
        answer = self._stream.receive()
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        self._stream.receive_into(bytes_of(self._spare))
        self.messages += 1
        with self._changed:
            self.newest, self._spare = self._spare, self.newest
            self.clock = int(answer["clock"])
            self.answered += 1
            self._changed.notify_all()
