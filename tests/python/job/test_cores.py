"""The cores of one rank: masks that launchers divide or leave alone, and quotas of control groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import nostall
from nostall.cli import _doctor as doctor
from nostall.job import _cores as cores
from nostall.observe import trace

RANK = """
import json, os, sys
from nostall.job import _cores as cores
if "alone" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if "together" in sys.argv:
    sys.stdin.readline()
print(cores.sharers(os.sched_getaffinity(0), 2, set()), flush=True)
sys.stdin.readline()
"""
# Starts each of the ranks with its variables and cores, and has them count when all are there.
TOGETHER = """
import json, os, subprocess, sys
words, ranks = json.loads(sys.argv[1])
running = [
    subprocess.Popen(
        words,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores),
    )
    for env, cores in ranks
]
for rank in running:
    rank.stdin.write(b"\\n")
    rank.stdin.flush()
print(json.dumps([int(rank.stdout.readline()) for rank in running]))
for rank in running:
    rank.communicate()
"""
PLACE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{n}": v for n, v in zip(
    ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "1212", strict=True
)}  # fmt: skip
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0",
         "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_JOB_ID": "7"}  # fmt: skip
TWO_TASKS = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
# Shells that stay, because something follows.
WRAPPER = ["sh", "-c", '"$@"; true', "sh"]
LAUNCHER = ["sh", "-c", f'{" ".join(f"{k}={v}" for k, v in PLACE.items())} "$@"; true', "sh"]

several_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided"
)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        n
        for n in os.environ
        if n.startswith(("RANK", "WORLD", "LOCAL_", "OMPI_", "PMI_", "SLURM_", "MASTER_"))
    ]:
        monkeypatch.delenv(name)


def run(words: list[str], env: dict[str, str], bound: bool) -> str:
    """What a line of words prints, of which the first process may be bound to a core."""
    core = min(os.sched_getaffinity(0))
    return subprocess.run(
        words,
        env={**os.environ, **env},
        preexec_fn=(lambda: os.sched_setaffinity(0, {core})) if bound else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        timeout=400,
        text=True,
    ).stdout


def sharers(words: list[str], env: dict[str, str], bound: bool, *more: str) -> int:
    """What the one rank of two that is there finds, which such a line starts."""
    return int(run([*words, sys.executable, "-c", RANK, *more], env, bound))


Ranks = list[tuple[dict[str, str], list[int]]]


def sharers_together(
    ranks: Ranks, env: dict[str, str] | None = None, *, bound: bool = False
) -> list[int]:
    """What ranks find that one process starts."""
    words = [sys.executable, "-c", RANK, "together"]
    start = [sys.executable, "-c", TOGETHER, json.dumps([words, ranks])]
    found: list[int] = json.loads(run(start, env or {}, bound))
    return found


def of_torchrun(rank: int) -> dict[str, str]:
    return PLACE | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


@several_cores
@pytest.mark.usefixtures("plain")
def test_a_mask_is_a_ranks_own_where_it_was_given_to_a_rank() -> None:
    assert sharers([], PLACE, True) == 1
    assert sharers(WRAPPER, PLACE, True) == 1
    # As scripts write torch's variables, in a wrapper and in themselves, beside the launcher's.
    assert sharers(LAUNCHER, OPEN_MPI, True) == 1
    assert sharers(LAUNCHER, {}, False, "alone") == 1


@several_cores
@pytest.mark.usefixtures("plain")
def test_a_mask_that_what_starts_the_ranks_had_is_shared_by_all() -> None:
    assert sharers(LAUNCHER, {}, True) == 2
    # Under srun, which started one process on this node, or two of which this is not the second rank.
    assert sharers(LAUNCHER, SLURM, True) == 2
    assert sharers(LAUNCHER, TWO_TASKS, True) == 2
    # No process here has more cores.
    assert sharers(LAUNCHER, {}, False) == 2


@several_cores
@pytest.mark.usefixtures("plain")
def test_ranks_that_are_bound_to_the_same_cores_are_counted() -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    zero, one = of_torchrun(0), of_torchrun(1)
    assert sharers_together([(zero, [first]), (one, [first])]) == [2, 2]
    assert sharers_together([(zero, [first]), (one, [second])]) == [1, 1]
    # Those of another job are none of its ranks.
    other = {"MASTER_PORT": "2"}
    others = [(zero | other, [first]), (one | other, [first])]
    assert sharers_together([(zero, [first]), (one, [second]), *others]) == [1, 1, 2, 2]
    # torchrun under srun, which started two on this node and bound this one.
    assert sharers_together([(zero, [first]), (one, [first])], TWO_TASKS, bound=True) == [2, 2]


@several_cores
@pytest.mark.usefixtures("plain")
def test_what_starts_ranks_may_have_few_cores_itself() -> None:
    # As where Slurm keeps cores for its own processes: this one has the first core alone.
    first, second = sorted(os.sched_getaffinity(0))[:2]
    zero, one = of_torchrun(0), of_torchrun(1)
    assert sharers_together([(zero, [first]), (one, [second])], bound=True) == [1, 1]
    assert sharers_together([(zero, [second]), (one, [second])], bound=True) == [2, 2]
    assert sharers_together([(zero, [second])], bound=True) == [1]


@several_cores
@pytest.mark.usefixtures("plain")
def test_a_rank_that_has_yet_to_be_bound_is_not_counted() -> None:
    everywhere = sorted(os.sched_getaffinity(0))
    ranks = [(of_torchrun(0), everywhere[:1]), (of_torchrun(1), everywhere)]
    assert sharers_together(ranks)[0] == 1


@pytest.mark.parametrize(
    ("ranks", "mine", "around", "own", "sharing"),
    [
        (4, 16, 64, 0, 1),
        (4, 16, 256, 0, 1),
        (4, 32, 64, 0, 2),  # two sockets
        (3, 32, 64, 0, 2),
        (8, 64, 128, 128, 4),
        (3, 21, 64, 0, 1),
        (4, 64, 128, 64, 4),  # bound to what the job has: not bound
        (4, 32, 128, 64, 2),
        (4, 63, 64, 64, 4),  # a core was given away
    ],
)
def test_ranks_that_are_not_seen_share_by_the_part_that_their_masks_are(
    ranks: int, mine: int, around: int, own: int, sharing: int
) -> None:
    sets = (set(range(count)) for count in (mine, around, own))
    assert cores.of_even_parts(ranks, *sets) == sharing


Tree = Callable[..., str]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Makes a /proc with the groups of a process and its mounts, and files of groups."""

    def make(groups: str, mounts: list[tuple[str, str, str]], files: dict[str, str]) -> str:
        lines = [
            f"30 20 0:2 {root} {tmp_path}/{place} rw shared:3 - {kind} cgroup rw,{place}\n"
            for place, kind, root in mounts
        ]
        described = {"proc/self/cgroup": groups, "proc/self/mountinfo": "".join(lines)}
        for name, text in (described | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, "latin-1")
        return str(tmp_path / "proc")

    return make


def test_each_level_of_the_unified_hierarchy_has_a_quota(tree: Tree, tmp_path: Path) -> None:
    files = {
        "all/pods/a/cpu.max": "max 100000\n",
        "all/pods/cpu.max": "750000 100000\n",
        "all/cpu.max": "6400000 100000\n",
        "all/cpuset.cpus.effective": "0-95\n",
        "all/pods/cpuset.cpus.effective": "0-2,8,16-17\n",
    }
    proc = tree("3:cpu:/elsewhere\n0::/pods/a\n", [("all", "cgroup2", "/")], files)
    assert cores.quota(proc) == (7.5, tmp_path / "all/pods/cpu.max")
    assert cores.cpuset(proc) == {0, 1, 2, 8, 16, 17}


def test_each_level_of_a_controllers_own_hierarchy_has_a_quota(tree: Tree, tmp_path: Path) -> None:
    mounts = [(name, "cgroup", "/") for name in ("cpu,cpuacct", "cpuset", "memory")]
    files = {f"cpu,cpuacct/{at}cpu.cfs_period_us": "50000\n" for at in ("", "job/", "job/step/")}
    files |= {f"cpu,cpuacct/{at}cpu.cfs_quota_us": "-1\n" for at in ("", "job/step/")}
    files |= {"cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n", "cpuset/effective": ""}
    files |= {"cpuset/set/cpuset.effective_cpus": "4-7\n", "memory/job/step/cpu.max": "1 1\n"}
    groups = "9:cpu,cpuacct:/job/step\n8:cpuset:/set\n4:memory:/job/step\n0::/\n"
    proc = tree(groups, mounts, files)
    assert cores.quota(proc) == (4.0, tmp_path / "cpu,cpuacct/job/cpu.cfs_quota_us")
    assert cores.cpuset(proc) == {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("group", "quota"),
    [("/docker/abc", 8), ("/docker/abc/inner", 2), ("/docker/other", 8), ("/../..", 8)],
)
def test_a_containers_mount_shows_a_part_of_the_hierarchy(
    tree: Tree, group: str, quota: int
) -> None:
    files = {"all/cpu.max": "800000 100000\n", "all/inner/cpu.max": "200000 100000\n"}
    found = cores.quota(tree(f"0::{group}\n", [("all", "cgroup2", "/docker/abc")], files))
    assert found is not None
    assert found[0] == quota


def test_without_control_groups_there_is_no_quota(tree: Tree, tmp_path: Path) -> None:
    assert cores.quota(str(tmp_path / "no proc")) is None
    assert cores.quota(tree("0::/\n", [("all", "cgroup2", "/")], {})) is None
    assert cores.cpuset(tree("0::/\n", [("all", "cgroup2", "/")], {})) == set()


def test_mounts_and_groups_may_have_any_name(tree: Tree, tmp_path: Path) -> None:
    files = {"all/cpu.max": "800000 100000\n", "all/cpuset.cpus.effective": "0-3\n"}
    files |= {"all/a\x85b/cpu.max": "200000 100000\n", "all/a\x85b/cpuset.cpus.effective": "\n"}
    mounts = [("all", "cgroup2", "/"), ("caf\xe9\x0c\x85", "vfat", "/caf\xe9")]
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / os.fsdecode(b"a\x85b")).symlink_to(tmp_path / "all/a\x85b")
    proc = tree("0::/a\x85b\n", mounts, files)
    found = cores.quota(proc)
    assert found is not None
    assert found[0] == 2
    assert cores.cpuset(proc) == {0, 1, 2, 3}


def test_what_is_no_table_of_mounts_limits_nothing(tree: Tree, tmp_path: Path) -> None:
    proc = tree("0::/\n", [("all", "cgroup2", "/")], {"all/cpu.max": "800000 100000\n"})
    (tmp_path / "proc/self/mountinfo").write_text("none\n")
    assert cores.quota(proc) is None


def masks(monkeypatch: pytest.MonkeyPatch, mine: int, others: int) -> None:
    """This process has so many cores, all others that many, and no control group says anything."""
    own = (0, os.getpid())
    found = {True: set(range(mine)), False: set(range(others))}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: found[pid in own])
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "cpuset", lambda _: set())
    monkeypatch.setattr(cores, "quota", lambda _: None)


def test_a_rank_has_its_share_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    masks(monkeypatch, 64, 64)
    assert cores.share(1) == cores.Cores(64, "")
    assert cores.share(4) == cores.Cores(16, "64 of the machine's 64 cores may be used, by 4 ranks")
    assert cores.share(100).count == 1
    masks(monkeypatch, 16, 64)
    why = "16 of the machine's 64 cores may be used; the launcher bound this rank to them"
    assert cores.share(4) == cores.Cores(16, why)
    monkeypatch.setattr(cores, "quota", lambda _: (9.5, Path("/sys/cpu.max")))
    assert cores.share(1) == cores.Cores(10, "/sys/cpu.max allows 9.5 CPUs")
    assert cores.share(4) == cores.Cores(2, "/sys/cpu.max allows 9.5 CPUs, for 4 ranks")
    assert cores.share(40).count == 1


@pytest.mark.usefixtures("plain")
def test_threads_are_as_many_as_the_ranks_own_cores(
    monkeypatch: pytest.MonkeyPatch, image_folder: Path, tmp_path: Path
) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    masks(monkeypatch, 6, 64)
    data = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(data, 4, tiers=[], seed=0, output="numpy", peers="off") as loader:
        assert loader.settings()["threads"] == 6
        assert trace.describe(loader)["rank_cores"] == 6
    with nostall.Checkpointer(fast=tmp_path, rank=0, world_size=1) as checkpointer:
        assert checkpointer._threads == 6
    assert dict(doctor.findings())["cores"].startswith("6: 6 of the machine's 64 cores")
