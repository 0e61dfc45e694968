"""The examples of trainers of language models go on from their checkpoints with the same batches."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import prefork
import pytest
from test_examples import ROOT, RUN

SCRIPTS = ROOT / "examples"
NEEDED = {
    "lm-torchtitan": "torch",
    "lm-trainer": "accelerate",
    "lm-lightning": "pytorch_lightning",
    "lm-megatron": "megatron",
    "lm-jax": "jax",
}


@pytest.mark.long
def test_trainers_have_the_same_batches(tmp_path: Path) -> None:
    for package in NEEDED.values():
        # Not imported here: that takes seconds.
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    names = ["make-tokens", *NEEDED]
    scripts = [str(SCRIPTS / f"{name}.py") for name in names]
    run = prefork.run(["-c", RUN, *scripts, str(tmp_path)], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("the same batches") == len(NEEDED), run.stdout


def test_the_guide_shows_the_trainers() -> None:
    guide = (ROOT / "docs" / "guide" / "trainers.md").read_text()
    shown = re.findall(r"\(\.\./\.\./examples/([\w-]+)\.py\)", guide)
    assert shown == list(NEEDED)
    scripts = [path.read_text() for path in SCRIPTS.glob("lm-*.py")]
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        for part in block.split("\n\n\n"):
            assert any(part.strip() in script for script in scripts), part
