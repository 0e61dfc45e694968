"""The example for DeepSpeed and its allreduce, with the real package: `make trainers-test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.multi
def test_a_checkpoint_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for words in ([EXAMPLES / "make-data.py"], [*launch, EXAMPLES / "train-deepspeed.py"]):
        done = subprocess.run(
            [sys.executable, *words, tmp_path],
            capture_output=True,
            text=True,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("the same batches") == 2


@pytest.mark.multi
def test_its_allreduce_is_measured_beside_ours_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["-m", "nostall", "bench", "allreduce", "--engines", "nostall", "deepspeed"]
    words += ["--ranks", "2", "--sizes", "64", "64KiB", "2MiB", "--mif", "0", "5", "--repeats", "1"]
    words += ["--seconds", "0.02", "--json", str(out)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    rows = json.loads(out.read_text())["rows"]
    assert {(r["engine"], r["size"], r["mif"]) for r in rows} == {
        (e, size, mif)
        for e in ("nostall", "deepspeed")
        for size in (64, 64 << 10, 2 << 20)
        for mif in (0.0, 5.0)
    }
    assert all(row["in_call"] > 0 for row in rows)
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_nostall_*"))
