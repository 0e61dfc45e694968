"""Loaders find their place, and share the tiers of their node, under launchers that do not say it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import prefork
import pytest
from loader_ranks import own_job
from nodes import free_port

from nostall.errors import UsageError
from nostall.job import _meeting, _place
from nostall.job._meeting import Met
from nostall.job._place import find_place

START = '''
import json, logging, os, sys, time
from pathlib import Path
import nostall

logging.basicConfig(format="%(message)s")

def load(folder, out, ranks=2, **options):
    """What one process read, in a file of its own; the tiers stay until all ranks have read."""
    data = nostall.ImageFolder(folder, index=False)
    with nostall.DataLoader(
        data, 5, epochs=2, tiers=["ram:16MiB"], output="numpy", peers="off", **options
    ) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                pass
        world, stats = loader.world, loader.stats()
        told = {
            "place": [world.rank, world.world_size, world.local_rank, world.local_world_size],
            "job": world.job, "source": stats.source_bytes, "total": data.total_bytes,
            "threads": loader.settings()["threads"],
        }
        Path(out, f"{os.getpid()}.part").write_text(json.dumps(told))
        os.rename(Path(out, f"{os.getpid()}.part"), Path(out, f"{os.getpid()}.json"))
        deadline = time.monotonic() + 60
        while len(list(Path(out).glob("*.json"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.005)
'''
OF_LAUNCHERS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|MASTER_ADDR|MASTER_PORT)$"
    r"|(OMPI|PMI|PMIX|SLURM|TORCHELASTIC)_"
)


def clean() -> dict[str, str]:
    """The environment without what a launcher sets."""
    return {k: v for k, v in os.environ.items() if not OF_LAUNCHERS.match(k)}


def told(out: Path) -> list[dict[str, Any]]:
    results = [json.loads(path.read_text()) for path in out.glob("*.json")]
    return sorted(results, key=lambda r: r["place"])


def run_together(
    program: str,
    *arguments: list[str],
    envs: list[dict[str, str]] | None = None,
    torch: bool = False,
) -> list[str]:
    """What processes of the program wrote, one for each list of arguments."""
    started, said = [], []
    try:
        for number, words in enumerate(arguments):
            started.append(
                prefork.Process(
                    ["-c", START + program, *words],
                    env=envs[number] if envs else clean(),
                    torch=torch,
                    stdout=prefork.PIPE,
                    stderr=prefork.STDOUT,
                )
            )
        for process in started:
            out, _ = process.communicate(timeout=400)
            said.append(out)
        assert not any(process.returncode for process in started), "\n".join(said)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return said


def check_one_copy(results: list[dict[str, Any]]) -> None:
    """Both ranks of a node are of one job, and read each sample once."""
    assert [r["place"] for r in results] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert len({r["job"] for r in results}) == 1
    assert sum(r["source"] for r in results) == results[0]["total"]


@pytest.mark.multi
def test_ranks_that_torch_forks(image_folder: Path, tmp_path: Path) -> None:
    """As torch.multiprocessing.spawn and notebooks start them: nothing is in the environment."""
    program = """
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, folder, out):
    dist.init_process_group("gloo", init_method=f"file://{out}/init", rank=rank, world_size=2)
    load(folder, out)
    dist.destroy_process_group()

mp.start_processes(main, sys.argv[1:], nprocs=2, start_method="fork")
"""
    run_together(program, [str(image_folder), str(tmp_path)], torch=True)
    results = told(tmp_path)
    check_one_copy(results)
    cores = len(os.sched_getaffinity(0))
    assert all(r["threads"] == max(1, cores // 2) for r in results)


@pytest.mark.multi
def test_a_loader_of_one_process_alone_waits_for_none(image_folder: Path, tmp_path: Path) -> None:
    """As for a validation on the first rank, of a job whose launcher says nothing."""
    program = """
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, folder, out):
    dist.init_process_group("gloo", init_method=f"file://{out}/init", rank=rank, world_size=2)
    if rank == 0:
        load(folder, out, ranks=1, rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()

mp.start_processes(main, sys.argv[1:], nprocs=2, start_method="fork")
"""
    run_together(program, [str(image_folder), str(tmp_path)], torch=True)
    (result,) = told(tmp_path)
    assert result["place"][:2] == [0, 1]
    assert result["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


def test_ranks_that_are_one_process_each_need_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others share by the node's memory, whatever their place."""
    for name in [name for name in os.environ if OF_LAUNCHERS.match(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_place(rank=0, world_size=2).processes == 4
    with pytest.raises(UsageError, match="nothing tells which ranks share a node"):
        find_place(rank=0, world_size=2, one_each=True)


@pytest.mark.multi
def test_deepspeeds_launcher(image_folder: Path, tmp_path: Path) -> None:
    """Its variables, without a process group."""
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    envs = [{**clean(), **common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    words = [str(image_folder), str(tmp_path)]
    run_together("load(*sys.argv[1:])", words, words, envs=envs)
    check_one_copy(told(tmp_path))


@pytest.mark.multi
def test_an_unknown_launcher(image_folder: Path, tmp_path: Path) -> None:
    """Ranks that are told all share the tiers of their node."""
    program = """
rank = int(sys.argv[3])
load(*sys.argv[1:3], rank=rank, world_size=2, local_rank=rank, local_world_size=2, job=sys.argv[4])
"""
    words = [str(image_folder), str(tmp_path)]
    job = own_job("unknown launcher")
    run_together(program, [*words, "0", job], [*words, "1", job])
    check_one_copy(told(tmp_path))


@pytest.mark.multi
def test_nodes_are_found_where_variables_name_the_rank_alone(
    image_folder: Path, tmp_path: Path
) -> None:
    """As pods of Kubernetes have them without torchrun; three processes stand for two nodes."""
    program = """
import torch.distributed as dist

dist.init_process_group("gloo")
load(*sys.argv[1:], ranks=3)
dist.destroy_process_group()
"""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    envs = [
        {**clean(), **address, "RANK": str(rank), "WORLD_SIZE": "3", "NOSTALL_NODE": node}
        for rank, node in enumerate(["a", "a", "b"])
    ]
    words = [str(image_folder), str(tmp_path)]
    run_together(program, words, words, words, envs=envs, torch=True)
    results = told(tmp_path)
    assert [r["place"] for r in results] == [[0, 3, 0, 2], [1, 3, 1, 2], [2, 3, 0, 1]]
    assert results[0]["job"] == results[1]["job"] != results[2]["job"]


def test_without_a_group_the_remedy_is_named(image_folder: Path, tmp_path: Path) -> None:
    program = """
from nostall.errors import UsageError
try:
    load(*sys.argv[1:])
except UsageError as error:
    print(error)
load(*sys.argv[1:], ranks=1, local_rank=0, local_world_size=1, job=sys.argv[2])
"""
    env = {**clean(), "RANK": "1", "WORLD_SIZE": "2"}
    (said,) = run_together(program, [str(image_folder), str(tmp_path)], envs=[env])
    assert said.startswith(
        "RANK and WORLD_SIZE are set without LOCAL_RANK and LOCAL_WORLD_SIZE, so that nothing tells "
        "which ranks share a node: initialise torch.distributed before, or pass local_rank=, "
    )
    (result,) = told(tmp_path)
    assert result["place"] == [1, 2, 0, 1]


@pytest.mark.multi
def test_ranks_that_make_no_loader_are_named(tmp_path: Path) -> None:
    program = """
import torch.distributed as dist
from nostall.errors import PeerError
from nostall.job._place import find_place

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/init", rank=rank, world_size=2)
if rank == 0:
    try:
        find_place(timeout=0.1)
    except PeerError as error:
        print(error)
dist.barrier()
place = find_place()
assert (place.local_rank, place.local_world_size) == (rank, 2), place
assert find_place() == place
dist.barrier()
dist.destroy_process_group()
"""
    said, _ = run_together(program, ["0", str(tmp_path)], ["1", str(tmp_path)], torch=True)
    assert '1 of 2 ranks have not come in 0.1 s to meet for "nodes of ranks": 1; see' in said
    assert "pass local_rank=, local_world_size= and job=" in said


def test_threads_meet_once_and_keep_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        pass

    def find() -> None:
        assert _place._nodes_of_ranks(stores[0], 0, 2, "here", 60) == ["here", "there"]

    def meet(*_: Any) -> Met:
        met.append("")
        if len(met) == 1:
            other.start()
            other.join(0.2)  # it ends here if it does not wait for this one
        return Met("", [b"here", b"there"])

    met: list[str] = []
    stores = [Store()]
    other = threading.Thread(target=find)
    monkeypatch.setattr(_place, "_found", None)
    monkeypatch.setattr(_meeting, "meet", meet)
    find()
    other.join()
    assert len(met) == 1
    kept = weakref.ref(stores.pop())
    assert kept() is None


@pytest.mark.multi
def test_a_group_that_was_destroyed_leaves_the_port_to_the_next() -> None:
    program = """
import socket
import torch.distributed as dist
from nostall.job._place import find_place

address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

def is_served():
    with socket.socket() as caller:
        return caller.connect_ex(address) == 0

dist.init_process_group("gloo")
find_place()
dist.destroy_process_group()
deadline = time.monotonic() + 60
while os.environ["RANK"] == "0" and is_served():
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    envs = [{**clean(), **address, "RANK": rank} for rank in "01"]
    run_together(program, [], [], envs=envs, torch=True)


@pytest.mark.multi
def test_two_processes_of_one_rank_do_not_meet(tmp_path: Path) -> None:
    """The second one may have been started in the place of the first; this is told."""
    program = """
import threading
import torch.distributed as dist
from nostall.errors import UsageError
from nostall.job._rendezvous import find_rendezvous

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/init", rank=rank, world_size=3)
store = dist.distributed_c10d._get_default_store()
meet = find_rendezvous(max(0, rank - 1), 2, "test")
if rank == 0:
    def wait():
        try:
            meet(b"0")
        except UsageError as error:
            print(error)

    thread = threading.Thread(target=wait)
    thread.start()
store.wait(["nostall/test/2/call"])
called = store.get("nostall/test/2/call")
dist.barrier()
while rank == 2 and store.get("nostall/test/2/call") == called:  # else it may meet the first
    time.sleep(0.001)
if rank > 0:
    assert meet(str(rank).encode()) == [b"1", b"2"]
if rank == 0:
    thread.join()
dist.barrier()
dist.destroy_process_group()
"""
    words = [[str(rank), str(tmp_path)] for rank in range(3)]
    said, _, _ = run_together(program, *words, torch=True)
    assert re.search(
        r'process \d+ of .* both are rank 0 of 2 where the ranks meet for "test"', said
    )


@pytest.mark.long
@pytest.mark.multi
def test_processes_of_jax(image_folder: Path, tmp_path: Path) -> None:
    """They read different samples, and are told that nothing says whether they share a node."""
    pytest.importorskip("jax", reason="jax is not installed")
    program = """
import jax
from nostall.errors import UsageError

early = nostall.DataLoader(nostall.ImageFolder(sys.argv[1], index=False), 5, tiers=[])
rank = int(sys.argv[3])
jax.distributed.initialize(sys.argv[4], num_processes=2, process_id=rank)
try:
    next(iter(early))
except UsageError as error:
    assert f"jax.distributed, which was initialised later, has rank {rank} of 2" in str(error), error
else:
    sys.exit("a loader of one rank reads in a job of two")
load(*sys.argv[1:3])
"""
    address = f"127.0.0.1:{free_port()}"
    words = [str(image_folder), str(tmp_path)]
    envs = [{**clean(), "JAX_PLATFORMS": "cpu"}] * 2
    said = run_together(program, [*words, "0", address], [*words, "1", address], envs=envs)
    assert [r["place"] for r in told(tmp_path)] == [[0, 2, 0, 1], [1, 2, 0, 1]]
    warning = "jax.distributed has 2 ranks, and no launcher's variables go with them: each process"
    assert [text.count(warning) for text in said] == [1, 0]


@pytest.mark.multi
def test_processes_of_one_rank_share_their_node(image_folder: Path, tmp_path: Path) -> None:
    """With tensor parallelism several processes read the same samples, or one of them reads alone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--no-python"]
    script = Path(__file__).with_name("parted.py")
    command += prefork.command([script, image_folder, tmp_path], torch=True)
    run = subprocess.run(command, capture_output=True, text=True, timeout=800, env=clean())
    assert run.returncode == 0, run.stderr
    read = {
        way: [json.loads(path.read_text()) for path in sorted((tmp_path / way).iterdir())]
        for way in ("together", "apart", "first")
    }
    assert {way: len(processes) for way, processes in read.items()} == {
        "together": 4,
        "apart": 4,
        "first": 2,
    }
    (total,) = {r["total"] for processes in read.values() for r in processes}
    for processes in (read["together"], read["first"]):
        assert sum(r["source"] for r in processes) == total
    # A node reads what its rank needs, and each sample of it once.
    nodes = [sum(r["source"] for r in read["apart"][n : n + 2]) for n in (0, 2)]
    assert all(total / 2 < node <= total for node in nodes)
    assert "rank 0 of 2 in 4 processes, tiers [ram:" in read["together"][0]["repr"]
    words = (
        "samples do not travel between nodes, for rank 0 of 2 was passed in a job of 4 processes"
    )
    assert run.stderr.count(words) == 1
