"""The example of an elastic job: a node is lost, and the other one trains the rest of the samples."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import prefork
import pytest
from nodes import free_port

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "elastic.py"
# The example on a node: the second one, its agent and its rank, is killed in step 4.
NODE = """
import os, runpy, signal, sys, time
from pathlib import Path
from torch import distributed
import nostall

lost, second = Path(sys.argv[1]), "SECOND" in os.environ
save, all_reduce, saves = nostall.Checkpointer.save, distributed.all_reduce, []

def saved(self, state, step):
    saves.append(save(self, state, step))

def reduced(tensor):
    # An agent that joins late has the others begin anew.
    while distributed.get_world_size() == 2 and not lost.exists():
        time.sleep(0.05)
    if second and len(saves) == 3:
        saves[-1].wait("durable")
        lost.touch()
        for process in (int(os.environ["AGENT"]), os.getpid()):
            os.kill(process, signal.SIGKILL)
    all_reduce(tensor)

nostall.Checkpointer.save, distributed.all_reduce = saved, reduced
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
AGENT = """
import os
from torch.distributed import run

os.environ["AGENT"] = str(os.getpid())
run.main()
"""


@pytest.mark.multi
@pytest.mark.long
def test_a_lost_node_loses_no_sample(tmp_path: Path) -> None:
    """Two agents of one torchrun job, of two ranks and of one; the first restarts its ranks."""
    made = prefork.run([str(ROOT / "examples" / "make-data.py"), str(tmp_path)], timeout=400)
    assert made.returncode == 0, made.stderr
    (tmp_path / "node.py").write_text(NODE)
    lost, port = tmp_path / "lost", free_port()

    def started(ranks: int, host: int, **variables: str) -> prefork.Process:
        command = ["-c", AGENT, "--nnodes=1:2", f"--nproc-per-node={ranks}", "--max-restarts=3"]
        command += ["--rdzv-backend=c10d", "--rdzv-id=job1", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command += [f"--rdzv-conf=is_host={host},last_call_timeout=1", "--local-addr=127.0.0.1"]
        command += ["--monitor-interval=0.1", "--no-python"]
        words = [tmp_path / "node.py", lost, EXAMPLE, tmp_path, tmp_path / "checkpoints"]
        command += prefork.command(words, torch=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        pipes = {"stdout": prefork.PIPE, "stderr": prefork.PIPE}
        return prefork.Process(command, torch=True, env=environment, **pipes)

    with started(1, 0, SECOND="1") as second, started(2, 1) as first:
        try:
            said, errors = first.communicate(timeout=400)
            of_second, _ = second.communicate(timeout=60)
        finally:
            first.kill()
            second.kill()
    assert first.returncode == 0, errors[-6000:]
    assert second.returncode == -signal.SIGKILL
    assert (said + of_second).count("3 ranks go on at step 0") == 3
    assert said.count("2 ranks go on at step 3") == 2, said
    assert said.count("2 ranks: each sample was trained once an epoch") == 2


@pytest.mark.parametrize(
    ("heading", "script"),
    [("Elastic jobs", EXAMPLE), ("Slurm", EXAMPLE.with_name("train-slurm.py"))],
)
def test_the_guide_shows_the_example(heading: str, script: Path) -> None:
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text()
    section = guide.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks and all(block in script.read_text() for block in blocks)
