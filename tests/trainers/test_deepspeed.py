"""The example for DeepSpeed, with the real package: `make trainers-test`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.multi
@pytest.mark.timeout(900)  # DeepSpeed compiles its communication at the first use
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
