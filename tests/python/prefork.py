"""Processes that need not import: forked from one that has imported nostall, or torch as well.

    process = prefork.Process(["-c", code, "7"], stdout=PIPE, env=...)

is what subprocess.Popen([sys.executable, "-c", code, "7"], text=True, ...) is, less the seconds of the
imports; a script's path may stand for "-c" and its code. The child is a process of its own: arguments,
environment, directory, standard streams, process group, random numbers and `__main__` are those it is
given, and no other file is open. What is read where a process starts is what the server started with:
the search path of modules, what is preloaded, OMP_NUM_THREADS=1, TORCH_CPP_LOG_LEVEL=ERROR. Tests of
start-up, of command lines and of launchers start real processes.

To take all modules down at the end of a process takes 0.2 s, and 0.5 s with those of torch. A child
does not: its threads and its functions of atexit are waited for, its main module is dropped, and the
process leaves by _exit(2). With `whole` it ends as Python ends. With `mounts_of` it has the file
systems that the process of that number has mounted.

What a launcher starts can be forked too: `command` is one that a launcher may run, of a small process
that stands in for the forked one.

Run as a program this is the server, or such a stand-in. A caller's children end with it, and the
server with the last caller.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
# What the dynamic linker and the interpreter read at their start.
AT_START = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED")
LARGEST = 1 << 20  # bytes of a request
# Set where tests of the host run on the simulated device (tests/device/on_device.py).
ON_DEVICE = "TESTS_ON_DEVICE"


# What names the servers of this run.
_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process {os.getpid()}")


class Server:
    """A connection to the server of this run's test processes, which is started if there is none.

    Test processes that run side by side (pytest-xdist) have one server between them.
    """

    def __init__(self, torch: bool) -> None:
        self._lock = threading.Lock()
        name = address(torch)
        while True:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST)
            try:
                self._socket.connect(name)
                # Empty: the server's last caller has gone, and it goes.
                if self._socket.recv(1):
                    break
            except ConnectionRefusedError:
                start(name, torch)
            except ConnectionResetError:
                pass
            self._socket.close()
        atexit.register(self._socket.close)

    def fork(self, request: dict[str, Any], files: list[int]) -> tuple[int, int]:
        """The child's number and a descriptor of it (pidfd_open(2))."""
        message = json.dumps(request).encode()
        assert len(message) <= LARGEST
        with self._lock:
            socket.send_fds(self._socket, [message], files)
            answer, descriptors, _, _ = socket.recv_fds(self._socket, 64, 1)
        assert answer and descriptors, "the server of processes ended; its errors are above"
        return int(answer), descriptors[0]


def address(torch: bool) -> str:
    """An abstract name, of which nothing is left when no process has the socket."""
    return f"\0nostall-prefork {os.getuid()} {_run} {'torch' if torch else ''}"


def start(name: str, torch: bool) -> None:
    """A server, unless another process starts it at this moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind(name)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
            raise
        listening.listen(64)
        number = listening.fileno()
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(number), "torch" if torch else ""],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **threads, **quiet},
            start_new_session=True,
        )
    server.returncode = 0  # it ends with the last of its callers, which may be another one


@functools.cache
def server(torch: bool) -> Server:
    """The one that has torch, or not, connected to at its first use."""
    return Server(torch)


class Process:
    """A child of the server, with the names of subprocess.Popen for what it has of it."""

    stdin = None  # it is /dev/null

    def __init__(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        torch: bool = False,
        whole: bool = False,
        mounts_of: int | None = None,
    ) -> None:
        self.args = [os.fspath(word) for word in arguments]
        environment = dict(os.environ if env is None else env)
        for name in AT_START:
            assert environment.get(name) == os.environ.get(name), f"{name}: start a real process"
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        status, told = os.pipe()
        given = [told]
        try:
            for name, where in (("stdout", stdout), ("stderr", stderr)):
                if where == PIPE:
                    read, write = os.pipe()
                    setattr(self, name, os.fdopen(read, encoding="utf-8"))
                elif where == STDOUT:
                    write = os.dup(given[1])
                elif where == DEVNULL:
                    write = os.open(os.devnull, os.O_WRONLY)
                else:
                    write = os.dup({"stdout": 1, "stderr": 2}[name] if where is None else where)
                given.append(write)
            request = {
                "arguments": self.args,
                "environment": environment,
                "directory": os.fspath(cwd) if cwd else os.getcwd(),
                "whole": whole,
                "mounts of": mounts_of,
            }
            self.pid, self._pidfd = server(torch or ON_DEVICE in environment).fork(request, given)
        finally:
            for descriptor in given:
                os.close(descriptor)
        self._status: int | None = status

    def descriptor(self) -> int | None:
        """A descriptor of the process (pidfd_open(2)), unless it was waited for."""
        return None if self._status is None else os.dup(self._pidfd)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self._status is not None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            text = os.read(self._status, 64)
            os.close(self._status)
            os.close(self._pidfd)
            self._status = None
            assert text, "the server of processes ended; its errors are above"
            self.returncode = int(text)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to its pipes, when it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        # What was read of them already may be more than a line: the files' own buffers first.
        parts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        threads = []
        for name, file in (("stdout", self.stdout), ("stderr", self.stderr)):
            if file is None or file.closed:
                continue

            def read(file: IO[str] = file, part: list[str] = parts[name]) -> None:
                part.append(file.read())

            threads.append(threading.Thread(target=read, daemon=True))
            threads[-1].start()

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        for thread in threads:
            thread.join(left())
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(left())
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        return "".join(parts["stdout"]), "".join(parts["stderr"])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


def run(
    arguments: Sequence[str | os.PathLike[str]], timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with capture_output and text; what runs for longer is killed."""
    process = Process(arguments, stdout=PIPE, stderr=PIPE, **options)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def command(arguments: Sequence[str | os.PathLike[str]], torch: bool = False) -> list[str]:
    """What a launcher may start in place of `python ARGUMENTS...`.

    The forked process has the environment, the directory and the streams that the launcher gives; it
    gets the signals that end a program, and its end is the one that the launcher sees.
    """
    # One that a stand-in started would keep the launcher's streams for as long as it has callers.
    server(torch or ON_DEVICE in os.environ)
    words = [sys.executable, "-S", __file__, "stand in", _run, "torch" if torch else ""]
    return [*words, *map(os.fspath, arguments)]


def stand_in(arguments: Sequence[str], torch: bool) -> None:
    process = Process(arguments, torch=torch)
    # The handler may run anywhere in wait(), which reads the status and closes the descriptors.
    child = os.dup(process._pidfd)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: its status tells how
            signal.pidfd_send_signal(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    status = process.wait()
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# ---------------------------------------------------------------------- the server

# What takes down that which the server has imported: torch has hundreds.
of_imports: list[weakref.finalize[Any, Any]] = []


@dataclass
class Child:
    number: int
    told: int  # where its status goes
    caller: socket.socket


def gone_callers() -> contextlib.AbstractContextManager[None]:
    """A caller that was killed leaves the server to the others; its end is read next."""
    return contextlib.suppress(BrokenPipeError, ConnectionResetError)


def serve(listening: socket.socket) -> dict[str, Any]:
    """Returns in each child, with its request; the server ends when it has no caller any more."""
    callers: set[socket.socket] = set()
    children: dict[int, Child] = {}  # by pidfd
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listening:
                    caller, _ = listening.accept()
                    with gone_callers():
                        caller.send(b"+")
                    callers.add(caller)
                    selector.register(caller, selectors.EVENT_READ)
                    continue
                if key.fd in children:
                    child = children.pop(key.fd)
                    selector.unregister(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(child.number, 0)[1])
                    with contextlib.suppress(BrokenPipeError):  # the caller asks no more
                        os.write(child.told, str(status).encode())
                    os.close(child.told)
                    os.close(key.fd)
                    continue
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                message, files = b"", []
                with gone_callers():
                    message, files, _, _ = socket.recv_fds(caller, LARGEST, 3)
                if not message:
                    for child in children.values():
                        if child.caller is caller:
                            with contextlib.suppress(ProcessLookupError):
                                os.killpg(child.number, signal.SIGKILL)
                    selector.unregister(caller)
                    caller.close()
                    callers.remove(caller)
                    if not callers:
                        os._exit(0)
                    continue
                told, out, err = files
                pid = os.fork()
                if pid == 0:
                    os.setpgid(0, 0)  # on both sides: whichever comes first
                    os.dup2(out, 1)
                    os.dup2(err, 2)
                    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                    return dict(json.loads(message))
                with contextlib.suppress(PermissionError):  # it did, and runs another program now
                    os.setpgid(pid, pid)
                os.close(out)
                os.close(err)
                pidfd = os.pidfd_open(pid)
                children[pidfd] = Child(pid, told, caller)
                selector.register(pidfd, selectors.EVENT_READ)
                with gone_callers():
                    socket.send_fds(caller, [str(pid).encode()], [pidfd])


def program(request: dict[str, Any]) -> None:
    """As `python ARGUMENTS...` in a process that has just started."""
    if request["mounts of"]:
        join_mounts(request["mounts of"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    np.random.seed()  # the standard library's is another one after a fork
    if "torch" in sys.modules:
        sys.modules["torch.distributed"].set_debug_level_from_env()
    if ON_DEVICE in os.environ:
        sys.modules["on_device"].start()
    words = request["arguments"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    if request["whole"]:
        gc.unfreeze()
        exec(code, main.__dict__)
    else:
        del main
        end(run_to_end(code))


def join_mounts(pid: int) -> None:
    new_mounts, new_user = 0x20000, 0x10000000
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = new_mounts | (0 if os.geteuid() == 0 else new_user)
    process = os.pidfd_open(pid)
    if libc.setns(process, namespaces) != 0:
        raise OSError(ctypes.get_errno(), f"cannot join the mounts of process {pid}")
    os.close(process)


def run_to_end(code: types.CodeType) -> int:
    """The status with which Python would end."""
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as told:
        if told.code is None or isinstance(told.code, int):
            return told.code or 0
        print(told.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # It holds what the frames held, until the interpreter would end.
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(status: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    for finalizer in of_imports:
        finalizer.atexit = False
    atexit._run_exitfuncs()
    sys.last_value = None
    main = weakref.ref(sys.modules.pop("__main__"))
    gc.collect()
    if (left := main()) is not None:
        left.__dict__.clear()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    ctypes.PyDLL(None).fflush(None)
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "stand in":
        _run = sys.argv[2]
        stand_in(sys.argv[4:], bool(sys.argv[3]))
    # Everything that is read more than once and starts nothing.
    import numpy as np

    import nostall.checkpoint
    import nostall.collective

    with contextlib.suppress(ImportError):
        import boto3  # noqa: F401
        import obstore.store  # noqa: F401

    if sys.argv[2] == "torch":
        import torch._dynamo
        import torch.distributed.tensor

        import nostall.torch  # noqa: F401

        torch.set_num_threads(1)
        if ON_DEVICE in os.environ:
            sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "device"))
            import on_device  # noqa: F401
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork has only one of the threads that the imports started"
    of_imports += weakref.finalize._registry  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    program(serve(socket.socket(fileno=int(sys.argv[1]))))
