"""The example of an elastic job: a rank is lost, and fewer train the rest of the samples."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import prefork
import pytest
from nodes import free_port

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "elastic.py"
# The example, of which a rank is lost in step 4.
LOST = """
import os, runpy, signal, sys
from torch import distributed
import nostall

save, all_reduce, saves = nostall.Checkpointer.save, distributed.all_reduce, []

def saved(self, state, step):
    saves.append(save(self, state, step))

def reduced(tensor):
    if distributed.get_world_size() == 3 and distributed.get_rank() == 2 and len(saves) == 3:
        saves[-1].wait("durable")
        print("rank 2 is lost", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(tensor)

nostall.Checkpointer.save, distributed.all_reduce = saved, reduced
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.multi
def test_a_lost_rank_loses_no_sample(tmp_path: Path) -> None:
    made = prefork.run([str(ROOT / "examples" / "make-data.py"), str(tmp_path)], timeout=60)
    assert made.returncode == 0, made.stderr
    (tmp_path / "lost.py").write_text(LOST)

    def started(ranks: int) -> subprocess.CompletedProcess[str]:
        # Each time a job of its own: in which order torchrun's agents notice that one is gone, and
        # whether a rank then waits for it, depends on the machine.
        command = [
            "-c",
            "from torch.distributed import run\nrun.main()",
            f"--nproc-per-node={ranks}",
        ]
        command += [f"--master-port={free_port()}", "--monitor-interval=0.1", "--no-python"]
        folders = [str(tmp_path), str(tmp_path / "checkpoints")]
        command += prefork.command([tmp_path / "lost.py", EXAMPLE, *folders], torch=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return prefork.run(command, torch=True, timeout=800, env=environment)

    first = started(3)
    # torchrun names the rank whose end it sees first, and that may be another one's.
    assert first.returncode != 0 and "rank 2 is lost" in first.stdout, first.stderr[-6000:]
    assert first.stdout.count("3 ranks go on at step 0") == 3
    second = started(2)
    assert second.returncode == 0, second.stderr[-6000:]
    assert second.stdout.count("2 ranks go on at step 3") == 2, second.stdout
    assert second.stdout.count("2 ranks: each sample was trained once an epoch") == 2


def test_the_guide_shows_the_example() -> None:
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text()
    section = guide.partition("## Elastic jobs")[2].partition("\n## ")[0]
    script = EXAMPLE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks and all(block in script for block in blocks)
