"""A signal to any rank becomes a checkpoint of all ranks at the same step.

Ranks receive a signal at different steps, or some do not receive it. So each one that does notifies
rank 0, which requests from all ranks how many calls of `save` they have begun. A rank that has replied
begins no further one until rank 0 has sent the call at which all save; no rank has begun that one.
Threads send these messages, so a rank may wait for a collective of the training all the while. A
training that receives no signal exchanges nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from nostall.errors import Error, PeerError, UsageError
from nostall.job._stream import Listener, Stream, connect

_log = logging.getLogger("nostall")
# Ranks that do not all answer in this time are not waited for; the time until a job is killed is short.
_ANSWER_SECONDS = 20.0
_LEAST_SECONDS = 0.001
_AT_ONCE = 64  # ranks that are asked


def names_of(text: str) -> list[str]:
    """Names of signals, apart by spaces or commas, each once and in order."""
    return sorted(set(text.replace(",", " ").split()))


class Signals:
    """The signals of this process, and the call of `save` that the ranks agree on.

    Args:
        names: of the signals, apart by spaces or commas.

    Attributes:
        refusal: why it does not work in this thread; "" if it does. `meet` tells all ranks.
    """

    def __init__(self, names: str) -> None:
        self.refusal = ""
        if threading.current_thread() is not threading.main_thread():
            self.refusal = (
                f'on_signal="{names}" needs a Checkpointer that the main thread makes: Python handles '
                "signals there"
            )
        self._pid = os.getpid()
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._calls = 0
        self._held = 0
        self._stop: tuple[int, str] | None = None
        self._rank, self._key = 0, b""
        self._addresses: list[tuple[str, int]] = []
        self._listener: Listener | None = None
        self._closed = False
        self._ended = ""  # the signal of the stop, once `due` has returned it
        self._here: set[str] = set()  # signals that came to this rank
        numbers = [] if self.refusal else [signal.Signals[name] for name in names_of(names)]
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def meet(
        self,
        rank: int,
        key: bytes,
        several: bool,
        allgather: Callable[[bytes], list[bytes]],
    ) -> None:
        """All ranks exchange the addresses at which they listen.

        Raises:
            UsageError: a rank has no address, or did not make this in its main thread.
        """
        self._rank, self._key = rank, key
        note: dict[str, Any] = {}
        try:
            if self.refusal:
                raise UsageError(self.refusal)
            self._listener = Listener(self._answer, key, 3 * _ANSWER_SECONDS, several)
            note["address"] = self._listener.address
        except (Error, OSError) as error:
            note["error"] = str(error)
        notes = [json.loads(text) for text in allgather(json.dumps(note).encode())]
        for other, theirs in enumerate(notes):
            if "error" in theirs:
                raise UsageError(f"rank {other} cannot listen for signals: {theirs['error']}")
        self._addresses = [(host, port) for host, port in (n["address"] for n in notes)]
        work = self._decide if rank == 0 else self._tell
        threading.Thread(target=work, name="nostall-signals", daemon=True).start()

    def due(self) -> str:
        """Counts a call of `save`; the name of the signal if the ranks agreed on this one, else ""."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._calls += 1
            if self._stop is None:
                if self._addresses or self._came.empty():
                    return ""
                self._stop = (self._calls, self._came.get())
            call, name = self._stop
            if call != self._calls:
                return ""
            self._ended = name
            return name

    def close(self) -> None:
        """Gives the signals back to what handled them before.

        In a rank that ends by a signal, those of them that have not come here are ignored, and SIGTERM
        is in any case. The signal may still come, and a launcher sends SIGTERM to the rest when the
        first rank has ended: the process would end by it where its exit code says to go on.
        """
        self._closed = True
        self._came.put("")
        if self._listener is not None:
            self._listener.close()
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, self._after(number))

    def _after(self, number: int) -> Callable[[int, FrameType | None], Any] | int:
        """What handles a signal once this is closed."""
        number = signal.Signals(number)
        if self._ended and (number == signal.SIGTERM or number.name not in self._here):
            return signal.SIG_IGN  # a function of Python would be gone while Python ends
        before = self._before[number]
        return signal.SIG_DFL if before is None else before

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # A forked child may have to end. A closed one is called where another checkpointer had the
        # signal when it closed, or another thread than the main one closed it.
        if self._closed or os.getpid() != self._pid:
            signal.signal(number, self._after(number))
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        self._here.add(name)
        self._came.put(name)  # of a SimpleQueue: it may interrupt another put

    def _tell(self) -> None:
        """On all ranks but 0."""
        while name := self._came.get():
            try:
                with contextlib.closing(self._connect(0, _ANSWER_SECONDS)) as stream:
                    stream.send({"signal": name})
            except (OSError, PeerError) as error:
                _log.warning("rank 0 does not hear of %s: %s", name, error)

    def _connect(self, rank: int, seconds: float) -> Stream:
        return connect(self._addresses[rank], self._key, seconds)

    def _decide(self) -> None:
        """On rank 0."""
        while name := self._came.get():
            if self._stop is None:
                self._agree_or_warn(name)

    def _agree_or_warn(self, name: str) -> None:
        try:
            self._agree(name)
        except (OSError, PeerError) as error:
            _log.warning(
                "%s: the training goes on, for the ranks agree on no step: %s", name, error
            )

    def _agree(self, name: str) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        with contextlib.ExitStack() as streams:
            calls = [self._hold()]
            streams.callback(self._go_on)
            asked: dict[int, Stream] = {}

            def left() -> float:
                return max(_LEAST_SECONDS, deadline - time.monotonic())

            def ask(rank: int) -> None:
                try:
                    stream = streams.enter_context(contextlib.closing(self._connect(rank, left())))
                    stream.set_timeout(left())
                    stream.send({"hold": name})
                    stream.set_timeout(left())
                    calls.append(int(stream.receive()["calls"]))
                except (OSError, PeerError) as error:
                    raise PeerError(f"rank {rank} does not answer: {error}") from error
                asked[rank] = stream

            # At once: a rank that has answered waits for the call no longer than its listener does.
            _at_once(ask, range(1, len(self._addresses)))
            call = max(calls) + 1
            for rank, stream in asked.items():
                stream.set_timeout(_ANSWER_SECONDS)
                try:
                    stream.send({"stop": call})
                except OSError as error:
                    _log.warning("rank %d does not hear of %s: %s", rank, name, error)
            self._stop_at(call, name)
            _log.warning("%s: all ranks save at their call %d of save, and end", name, call)

    def _answer(self, question: dict[str, Any], stream: Stream) -> None:
        if "signal" in question:
            self._came.put(str(question["signal"]))
            return
        calls = self._hold()
        try:
            stream.send({"calls": calls})
            self._stop_at(int(stream.receive()["stop"]), str(question["hold"]))
        finally:
            self._go_on()

    def _hold(self) -> int:
        with self._changed:
            self._held += 1
            return self._calls

    def _stop_at(self, call: int, name: str) -> None:
        with self._changed:
            self._stop = (call, name)

    def _go_on(self) -> None:
        with self._changed:
            self._held -= 1
            self._changed.notify_all()


def _at_once(work: Callable[[int], None], items: Iterable[int]) -> None:
    """work(item) of all items, by a few threads; raises what the first that failed did.

    A process that ends does not wait for these threads, as it does for those of concurrent.futures.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    failed: list[Exception] = []

    def run() -> None:
        try:
            while not failed:
                work(waiting.get_nowait())
        except queue.Empty:
            pass
        except Exception as error:
            failed.append(error)

    threads = []
    with contextlib.suppress(RuntimeError):  # no more can be started
        for _ in range(min(_AT_ONCE, waiting.qsize()) - 1):
            thread = threading.Thread(target=run, name="nostall-signals", daemon=True)
            thread.start()
            threads.append(thread)
    run()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
