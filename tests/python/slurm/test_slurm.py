"""nostall under a real Slurm: its daemons run here, as two nodes, of the packages in build/slurm."""

from __future__ import annotations

import getpass
import itertools
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes import free_port
from slurm_rank import batches

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "build" / "slurm" / "usr"
LIBRARIES = SLURM / "lib" / f"{platform.machine()}-linux-gnu"
CONFIGURATION = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def only_loopback() -> bool:
    """Slurm resolves names with AI_ADDRCONFIG, which wants another address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return True
    return False


pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(not (SLURM / "bin" / "srun").exists(), reason="no Slurm in build/slurm"),
    pytest.mark.skipif(only_loopback(), reason="no address but the loopback one, and no route"),
]


class Cluster:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("NOSTALL_", "SLURM_"))},
            "SLURM_CONF": str(home / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{LIBRARIES / 'slurm-wlm'}:{LIBRARIES}",
            "PATH": f"{SLURM / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(home / "own"),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        }

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(c) for c in command], env=self.env, cwd=self.home, text=True, capture_output=True
        )

    def said(self, *command: str | Path) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"== {p}\n{p.read_text()[-3000:]}" for p in self.home.rglob("*.log"))

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, f"in vain for: {what}\n{self.logs()}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("slurm")
    for folder in ("state", "n1", "n2"):
        (home / folder).mkdir()
    text = CONFIGURATION.format(
        name=f"test{os.getpid()}",
        host=socket.gethostname().partition(".")[0],
        ports=sorted(free_port() for _ in range(3)),
        user=getpass.getuser(),
        home=home,
        plugins=LIBRARIES / "slurm-wlm",
    )
    (home / "slurm.conf").write_text(text)
    made = Cluster(home)
    step = SLURM / "sbin" / "slurmstepd-wlm"
    commands = [[SLURM / "sbin" / "slurmctld-wlm", "-D"]] + [
        [SLURM / "sbin" / "slurmd-wlm", "-D", "-N", node, "-d", step] for node in ("n1", "n2")
    ]
    daemons = []
    try:
        for command in commands:
            daemons.append(
                subprocess.Popen(
                    command, env=made.env, cwd=home,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        idle = lambda: "idle 2" in made.run("sinfo", "-h", "-o", "%t %D").stdout  # noqa: E731
        made.wait("two nodes", idle)
        yield made
    finally:
        made.run("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + 60
        while made.run("squeue", "-h").stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.1)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def test_doctor_says_which_rank_is_on_which_node_and_that_they_meet(cluster: Cluster) -> None:
    said = cluster.said("srun", "-N2", "-n3", sys.executable, "-m", "nostall", "doctor")
    assert re.search(r"^this process +rank 0 of 3, local rank 0 of 2,", said, re.M), said
    assert re.search(r"^ranks +all 3 have met", said, re.M), said
    assert re.search(r"^on n1 +rank 0, 1; ", said, re.M), said
    assert re.search(r"^on n2 +rank 2; .*UCX ", said, re.M), said
    assert said.count("vector code") == 1, "rank 0 alone prints"


def printed_script() -> str:
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text()
    found = re.search(r"```\n(#!/bin/bash\n#SBATCH.*?)```", guide, re.S)
    assert found, "the guide has no script of sbatch"
    return found[1]


def steps(folder: Path, rank: int) -> list[list[int]]:
    """Whole lines of a rank's log: restart, step, labels."""
    log = folder / f"rank{rank}.log"
    text = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return [[int(word) for word in line.split()] for line in text.splitlines()]


def saved(folder: Path) -> list[int]:
    """Steps of complete checkpoints."""
    return sorted(int(p.parent.name.rpartition("-")[2]) for p in folder.glob("ckpt/*/*manifest*"))


@pytest.mark.long
def test_script_of_guide_goes_on_exactly_after_signal_requeue_and_cancel(cluster: Cluster) -> None:
    """SIGUSR1, as before the time limit, to one of two nodes' ranks or all; then scancel."""
    folder = cluster.home / "job"
    folder.mkdir()
    own = f'"{sys.executable}"'
    script = printed_script().replace("srun python train.py", f"srun {own} -m slurm_rank {folder}")
    script = script.replace("srun nostall doctor", f"srun {own} -m nostall doctor")
    (folder / "train.sbatch").write_text(script)
    (number,) = re.findall(r"\d+", cluster.said("sbatch", "-D", folder, folder / "train.sbatch"))

    def ran(restart: int) -> bool:
        return all(sum(s[0] == restart for s in steps(folder, r)) >= 5 for r in (0, 1))

    state = lambda: cluster.said("squeue", "-h", "-t", "all", "-j", number, "-o", "%T").strip()  # noqa: E731
    cluster.wait("five batches", lambda: ran(0))
    cluster.said("scancel", "--signal=SIGUSR1", number)
    cluster.wait("five batches after a requeue", lambda: ran(1))
    cluster.said("scancel", number)
    cluster.wait("the end", lambda: state() == "CANCELLED")
    cluster.wait("the last checkpoint", lambda: len(saved(folder)) == 2)
    logs = [steps(folder, rank) for rank in (0, 1)]
    first = [max(s[1] for s in log if s[0] == 0) for log in logs]
    last = [log[-1][1] for log in logs]
    assert first[0] == first[1] and last[0] == last[1], "both ranks end at one step"
    assert saved(folder) == [first[0], last[0]]
    for rank, log in enumerate(logs):
        assert [s[1] for s in log] == list(range(1, last[0] + 1)), "no batch twice, none left out"
        with batches(2, rank) as loader:
            stream = (np.asarray(b["x"]) for e in loader.epochs() for b in e)
            expected = [list(labels) for labels in itertools.islice(stream, last[0])]
        assert [s[2:] for s in log] == expected
