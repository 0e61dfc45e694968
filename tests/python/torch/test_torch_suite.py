"""torch's own checks of its backends, those of the wheel that is installed, pass on ours.

torch.testing._internal.distributed.distributed_test is what torch runs for Gloo, MPI and NCCL. Here
are its checks but for those of torch_left_out.txt, which has a reason for each, on three ranks. By
hand, one or all, with the reasons of torch's own skips:
``python tests/python/torch/torch_suite.py --ranks 3 [test_all_reduce_sum]``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import prefork
import pytest

pytestmark = pytest.mark.multi
RUNNER = Path(__file__).with_name("torch_suite.py")

LEFT_OUT = Path(__file__).with_name("torch_left_out.txt")
# torch 2.15 has as many that pass.
CHECKS = 126


def run(ranks: int, *arguments: str) -> list[dict[str, Any]]:
    words = [str(RUNNER), "--ranks", str(ranks), *arguments]
    result = prefork.run(words, torch=True, whole=True)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert lines, result.stderr[-4000:]
    return lines


# Most of it is reading torch and the suite, once; a busy machine needs minutes.
@pytest.mark.long
def test_the_checks_of_torch_pass() -> None:
    import torch

    collected, *results = run(3, "--left-out", str(LEFT_OUT))
    by_name = {r["check"]: r for r in results}
    wrong = [r for r in results if r["what"] not in ("passed", "skipped", "left out")]
    assert not wrong, json.dumps(wrong, indent=1)
    # Of this torch, whatever its version: none is passed over in silence.
    assert sorted(by_name) == collected["names"]
    assert len(by_name) == len(results)
    for r in results:
        if r["what"] == "skipped":
            print(f"torch skips {r['check']}: {r['why']}")
            assert r["why"]
    passed = [r for r in results if r["what"] == "passed"]
    assert passed
    if torch.__version__.startswith("2.15."):
        assert len(passed) == CHECKS, [r for r in results if r["what"] == "skipped"]


def test_groups_of_groups_pass() -> None:
    _, *results = run(4, "test_new_subgroups_with_group_param")
    assert [r["what"] for r in results] == ["passed"], json.dumps(results, indent=1)
