"""Processes that this one starts to work for it: what they do at signals, and how they end.

Ctrl-C at a terminal, and most launchers, send a signal to all processes of a job. What it means for the
training its own process decides: it may save first, for which it still needs its workers. So workers
ignore these signals. They end with their parent, or when it kills them.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import (
    connection,
    forkserver,
    parent_process,
    reduction,
    resource_tracker,
    util,
)
from typing import Any, TypeVar

from nostall.errors import UsageError

_T = TypeVar("_T")

SECONDS_TO_END = 10.0
# The exit code of a child that would start children while it imports the program, and what it means.
UNGUARDED = 87
WHY_UNGUARDED = (
    "it imports the program, which would start such processes there too: start them in a function "
    'that is called under if __name__ == "__main__"'
)
_NAME = "nostall "  # at the start of the name of a child
_SERVER = "MainProcess"  # the name of what imports the program and is no child yet: a fork server
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_registered: set[tuple[int, Callable[[], None]]] = set()


def name(what: str) -> str:
    """The name of a child, by which it knows what it is before it has been told its work."""
    return _NAME + what


def check_method(name: str, given: Any) -> None:
    """Refuses what is no way to start processes, as multiprocessing has them.

    Raises:
        UsageError: there is no such way here.
    """
    known = multiprocessing.get_all_start_methods()
    if given not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {given!r}")


def end_if_importing(start_method: str) -> None:
    """Called before children are started: ends a child that only imports the program as yet.

    Python would raise an error of a page in each of them. The parent says it once, by the exit code.
    A fork server imports the program for its children.
    """
    process = multiprocessing.current_process()
    ours = process.name.startswith((_NAME, _SERVER))
    if start_method != "fork" and ours and getattr(process, "_inheriting", False):
        os._exit(UNGUARDED)


class Handed:
    """What a child is given: pickled as the child starts, unpickled when it takes it.

    While Python itself unpickles what a process is given, the process can start no others, and does
    not know yet whether it is a daemon; a source among it needs both.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        return _Pickled, (bytes(reduction.ForkingPickler.dumps(self._value)),)

    def take(self) -> Any:
        """Once, after `begin`. What cannot be unpickled ends the child, as Python does."""
        return self._value


class _Pickled(Handed):
    def take(self) -> Any:
        data, self._value = self._value, None
        try:
            return pickle.loads(data)
        except Exception:
            traceback.print_exc()
            os._exit(1)


@contextlib.contextmanager
def started(start_method: str) -> Iterator[None]:
    """While a child starts: until it calls `begin`, signals that it is to ignore are pending.

    Raises:
        UsageError: the fork server has ended as it imported the program.
    """
    # What is started beside it would keep these signals from all that it starts later.
    if start_method != "fork":
        resource_tracker.ensure_running()
    if start_method == "forkserver":
        forkserver.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    except (EOFError, ConnectionError):
        if start_method == "forkserver" and _server_code() == UNGUARDED:
            raise UsageError(f"the fork server ended: {WHY_UNGUARDED}") from None
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _server_code() -> int | None:
    """The exit code of the fork server, if it is a child of this process and has one."""
    server = getattr(forkserver, "_forkserver", None)
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if (pid := getattr(server, "_forkserver_pid", None)) is None:
            return None
        end = os.pidfd_open(pid)
        stack.callback(os.close, end)
        if connection.wait([end], SECONDS_TO_END):
            # It stays for multiprocessing to collect.
            ended = os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
            return None if ended is None else ended.si_status
    return None


def begin() -> None:
    """In the main thread of a child: it ignores these signals, and ends with its parent."""
    for number in _IGNORED:
        # Programs that are started from here would begin with SIG_IGN, and not end by a signal.
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=_heed)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def results(
    work: Callable[..., _T],
    calls: Iterable[tuple[Any, ...]],
    processes: int,
    start_method: str,
    prepare: Callable[[], None] = begin,
) -> Generator[tuple[int, _T], None, None]:
    """What `work` returns for each of the calls, with the call's number, in the order of their ends.

    `prepare` is called first in each process, and calls `begin`. To close the iterator, an error and
    Ctrl-C kill the processes: nobody waits for what they compute. What ended before an error is given.
    """
    context = multiprocessing.get_context(start_method)
    pool = ProcessPoolExecutor(processes, context, prepare)
    running: dict[Future[_T], int] = {}
    left = enumerate(calls)
    try:
        while True:
            # Not all at once: each holds its arguments.
            with started(start_method):
                for number, call in itertools.islice(left, 2 * processes - len(running)):
                    running[pool.submit(work, *call)] = number
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(ended, key=lambda one: one.exception() is not None):
                yield running.pop(future), future.result()
    except BaseException:
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def compute_alone() -> None:
    """In a child that is one of as many as there are cores: its operations take one thread each."""
    # Read by libraries that the child has not loaded yet.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _ignore(*_: object) -> None:
    pass


def _heed() -> None:
    """In a process that a worker forks for itself."""
    for number in _IGNORED:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)


def _end_with(parent: Any) -> None:
    """Ends this process with the one that started it, also while it works."""
    connection.wait([parent.sentinel])
    os._exit(1)


def at_end(close: Callable[[], None]) -> None:
    """Calls `close` when this process ends, before it waits for threads and for children.

    multiprocessing waits for children that it has sent SIGTERM, and an executor for calls that run.
    """
    if (os.getpid(), close) in _registered:
        return
    _registered.add((os.getpid(), close))
    util.Finalize(None, close, exitpriority=100)  # in a process of multiprocessing
    threading._register_atexit(close)  # type: ignore[attr-defined] # as concurrent.futures does


def ended_by(code: int | None) -> str:
    """What a message says of a process that ended with an exit code of multiprocessing."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
