"""nostall under a real Slurm: its daemons run here, as two nodes, of the packages in build/slurm.

Each node has an address of this machine for a name, and is named to nostall, so that samples travel.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import prefork
import pytest
from nodes import free_port

import nostall

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "build" / "slurm" / "usr"
LIBRARIES = SLURM / "lib" / f"{platform.machine()}-linux-gnu"
NODES = ("127.0.0.1", "127.0.0.2")
EXAMPLE = ROOT / "examples" / "train-slurm.py"
CONFIGURATION = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=15
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
TaskProlog={home}/prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SwitchType=switch/none
KillWait=300
MessageTimeout=100
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
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
            "MASTER_PORT": str(free_port()),
            # A machine that does other things must not make a peer look lost.
            "NOSTALL_PEER_TIMEOUT_MS": "60000",
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

    def state(self, job: str) -> str:
        return self.said("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    def limit(self, job: str, time_limit: str) -> bool:
        """Sets the job's time limit, where Slurm takes it: not of a job that is being requeued."""
        done = self.run("scontrol", "update", f"JobId={job}", f"TimeLimit={time_limit}")
        return done.returncode == 0

    def limit_soon(self, job: str, submitted: float) -> None:
        """Sets a limit of which Slurm, which looks every 30 s, signals within a minute or two."""
        assert self.limit(job, str(int((time.monotonic() - submitted) // 60) + 2))

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400
        while not holds():
            assert time.monotonic() < deadline, f"in vain for: {what}\n{self.logs()}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("slurm")
    for folder in ("state", *NODES):
        (home / folder).mkdir()
    text = CONFIGURATION.format(
        name=f"test{os.getpid()}",
        host=socket.gethostname().partition(".")[0],
        ports=sorted(free_port() for _ in range(3)),
        user=getpass.getuser(),
        home=home,
        nodes=NODES,
        plugins=LIBRARIES / "slurm-wlm",
    )
    (home / "slurm.conf").write_text(text)
    prolog = home / "prolog"
    prolog.write_text('#!/bin/sh\necho "export NOSTALL_NODE=$SLURMD_NODENAME"\n')
    prolog.chmod(0o755)
    made = Cluster(home)
    step = SLURM / "sbin" / "slurmstepd-wlm"
    commands = [[SLURM / "sbin" / "slurmctld-wlm", "-D"]] + [
        [SLURM / "sbin" / "slurmd-wlm", "-D", "-N", node, "-d", step] for node in NODES
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
    assert re.search(rf"^on {NODES[0]} +rank 0, 1; ", said, re.M), said
    assert re.search(rf"^on {NODES[1]} +rank 2; .*UCX may take ", said, re.M), said
    assert said.count("vector code") == 1, "rank 0 alone prints"


def printed_scripts() -> list[str]:
    """Of ranks that srun starts, and of ranks that torchrun starts."""
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text()
    found = re.findall(r"```\n(#!/bin/bash\n#SBATCH.*?)```", guide, re.S)
    assert len(found) == 2, "the guide has two scripts of sbatch"
    return found


def steps(logs: Path, rank: int) -> list[list[int]]:
    """Whole lines of a rank's log: starts of the job, step, labels."""
    log = logs / f"{rank}.log"
    text = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return [[int(word) for word in line.split()] for line in text.splitlines()]


def saved(folder: Path) -> list[int]:
    """Steps of complete checkpoints."""
    return sorted(int(p.parent.name.rpartition("-")[2]) for p in folder.glob("ckpt/*/*manifest*"))


@pytest.mark.long
def test_training_of_guide_goes_on_exactly_after_time_limit_requeue_and_cancel(
    cluster: Cluster,
) -> None:
    """The guide's script and example on two nodes of two ranks, which find all by themselves."""
    folder, ranks = cluster.home / "job", range(4)
    data, logs = folder / "data", folder / "logs"
    logs.mkdir(parents=True)
    made = prefork.run(
        [str(ROOT / "examples" / "make-data.py"), str(data)], torch=True, timeout=800
    )
    assert made.returncode == 0, made.stderr
    doctor = ["-c", "import sys\nfrom nostall.cli import main\nsys.exit(main(['doctor']))"]
    rank = [Path(__file__).with_name("slurm_rank.py"), logs]
    train = [*rank, EXAMPLE, data, folder / "ckpt", "10000"]
    script = printed_scripts()[0]
    for printed, words in (
        ("nostall doctor", doctor),
        ("python examples/train-slurm.py /data /pfs/ckpt", train),
    ):
        assert f"srun {printed}\n" in script
        words = shlex.join(prefork.command(words, torch=True))
        script = script.replace(f"srun {printed}\n", f"srun {words}\n")
    (folder / "train.sbatch").write_text(script)
    submitted = time.monotonic()
    submit = ["sbatch", "-D", folder, "--ntasks-per-node=2", folder / "train.sbatch"]
    (number,) = re.findall(r"\d+", cluster.said(*submit))

    def ran(start: int) -> bool:
        return all(sum(s[0] == start for s in steps(logs, r)) >= 5 for r in ranks)

    def said_by_job() -> str:
        return (folder / "train.log").read_text()

    cluster.wait("five batches", lambda: ran(0))
    cluster.limit_soon(number, submitted)
    cluster.wait("the signal", lambda: "SIGUSR1: all ranks save" in said_by_job())
    cluster.wait("a later time limit", lambda: cluster.limit(number, "04:00:00"))
    cluster.wait("five batches after the requeue", lambda: ran(1))
    cluster.said("scancel", number)
    cluster.wait("the end", lambda: cluster.state(number) == "CANCELLED")
    cluster.wait("the last checkpoint", lambda: saved(folder)[-1] == steps(logs, 0)[-1][1])

    took = [steps(logs, rank) for rank in ranks]
    (last,) = {log[-1][1] for log in took}
    plan = nostall.Plan(samples=14, batch_size=2, world_size=4, epochs=10_000, seed=0)
    for rank, log in enumerate(took):
        assert [s[1] for s in log] == list(range(1, last + 1)), "no batch twice, none left out"
        epochs = range(-(-last // plan.batches_in(0)))
        expected = [sample for epoch in epochs for sample in plan.rank_epoch(epoch, rank)[0]]
        seen = [sample for s in log for sample in s[2:]]
        assert seen == expected[: len(seen)]

    there = sum(path.stat().st_size for path in data.glob("images/*.jpg"))
    for start in range(2):
        said = [json.loads((logs / f"{rank}.{start}.json").read_text()) for rank in ranks]
        assert [s["peers"]["nodes"] for s in said] == [2] * 4
        names = ("pushed", "received", "fetched", "served")
        assert any(s["peers"][name] for s in said for name in names), said
        for node in (said[:2], said[2:]):
            assert sum(s["source_bytes"] for s in node) <= there, "a node reads a sample once"


@pytest.mark.long
def test_ranks_of_torchrun_in_a_step_save_before_the_time_limit_and_go_on(cluster: Cluster) -> None:
    """The guide's script, on nodes that have neither GPUs nor so many cores."""
    folder = cluster.home / "torchrun"
    data, kept, logs = folder / "data", folder / "ckpt", folder / "logs"
    logs.mkdir(parents=True)
    train = [Path(__file__).with_name("slurm_rank.py"), logs, EXAMPLE, data, kept, "200"]
    words = shlex.join(["--no-python", *prefork.command(train, torch=True)])
    made = prefork.run(
        [str(ROOT / "examples" / "make-data.py"), str(data)], torch=True, timeout=800
    )
    assert made.returncode == 0, made.stderr
    script = printed_scripts()[1]
    for printed, here in (
        ("#SBATCH --gpus-per-node=8\n#SBATCH --cpus-per-task=64\n", ""),
        ("--nproc-per-node=8", "--nproc-per-node=1"),
        # Few batches, for all are made ahead of the steps.
        ("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --export=ALL,PAUSE_SECONDS=0.5\n"),
        ('"$first:29400"', f'"$first:{free_port()}"'),
        ("examples/train-slurm.py /data /pfs/ckpt", words),
    ):
        assert script.count(printed) == 1
        script = script.replace(printed, here)
    (folder / "train.sbatch").write_text(script)
    submitted = time.monotonic()
    (number,) = re.findall(r"\d+", cluster.said("sbatch", "-D", folder, folder / "train.sbatch"))

    def said() -> str:
        return (folder / "train.log").read_text()

    cluster.wait("a step of each rank", lambda: all(steps(logs, rank) for rank in range(2)))
    cluster.limit_soon(number, submitted)
    cluster.wait("the signal", lambda: "SIGTERM: all ranks save at their call" in said())
    cluster.wait("a later time limit", lambda: cluster.limit(number, "04:00:00"))
    goes_on = re.compile(r"^going on at step (\d+)$\n", re.M)
    cluster.wait("the start after the requeue", lambda: bool(goes_on.search(said())))
    assert "closing signal SIGTERM" in said(), "torchrun sends it on"
    (last,) = re.findall(r"all ranks save at their call (\d+) of save", said())
    assert goes_on.findall(said()) == [last] and int(last) in saved(folder)
    cluster.said("scancel", number)
    cluster.wait("the end", lambda: cluster.state(number) == "CANCELLED")


# A rank without torch: a file says its process, the batches that it has had, and the nodes it knows.
READER = """
import os, sys, time
from pathlib import Path
import nostall

data, folder, step = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
mine = f"{step}.{os.environ['SLURM_PROCID']}"
paths, taken = sorted(data.rglob("*.jpg")), 0
with nostall.DataLoader(nostall.FileList(paths, range(len(paths))), 2, output="numpy") as loader:
    while not (folder / "end").exists():
        for _ in loader:
            taken += 1
            nodes = loader.stats().peers["nodes"]
            (folder / f"{mine}.new").write_text(f"{os.getpid()} {taken} {nodes}")
            (folder / f"{mine}.new").replace(folder / mine)
            time.sleep(0.02)
"""


def named_memory(process: int) -> list[str]:
    """Files of shared memory that the process has mapped and that would outlive it."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm" in line and not line.endswith("(deleted)")]


def test_of_two_steps_at_once_a_killed_one_leaves_nothing_and_the_other_goes_on(
    cluster: Cluster, image_folder: Path
) -> None:
    """The ranks of a step meet in the home, beside those of the other step of the job."""
    folder = cluster.home / "steps"
    folder.mkdir()
    rank = shlex.join(prefork.command(["-c", READER, image_folder, folder], torch=True))
    script = f"for step in 0 1; do srun --overlap {rank} $step & echo $! >$step.pid; done; wait"
    (folder / "two.sbatch").write_text(f"#!/bin/sh\n{script}\n")
    submit = ["sbatch", "-N2", "-n2", "-o", "two.log", "-D", folder, folder / "two.sbatch"]
    (number,) = re.findall(r"\d+", cluster.said(*submit))

    def said(step: int) -> list[list[int]]:
        files = [folder / f"{step}.{rank}" for rank in range(2)]
        return [[int(word) for word in f.read_text().split()] for f in files if f.exists()]

    def goes_on(step: int, since: int = 0) -> bool:
        now = said(step)
        return len(now) == 2 and all(taken >= since + 5 for _, taken, _ in now)

    cluster.wait("both steps", lambda: goes_on(0) and goes_on(1))
    killed = [process for process, *_ in said(0)]
    assert [nodes for *_, nodes in said(0) + said(1)] == [2] * 4
    assert [named_memory(process) for process in killed] == [[], []]
    os.kill(int((folder / "0.pid").read_text()), signal.SIGKILL)
    gone = lambda: not any(Path(f"/proc/{process}").exists() for process in killed)  # noqa: E731
    cluster.wait("the end of the ranks whose srun was killed", gone)
    had = max(taken for _, taken, _ in said(1))
    cluster.wait("more batches of the other step", lambda: goes_on(1, had))
    (folder / "end").touch()
    cluster.wait("the end", lambda: not cluster.said("squeue", "-h", "-j", number).strip())
    assert os.listdir(cluster.home / "own" / "nostall" / "meet") == []
