"""The frameworks of the guide, with their real packages: their loops over our loader, on two ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
from pathlib import Path

import prefork
import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
# One process a rank, which imports what they share once.
RUN = """
import runpy, sys
scripts, data = sys.argv[1:-1], sys.argv[-1]
for script in scripts:
    sys.argv = [script, data]
    runpy.run_path(script, run_name="__main__")
"""


def needs(*packages: str) -> None:
    for package in packages:
        # Not imported here: that takes seconds.
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")


def unindented(text: str) -> str:
    """The page shows parts of functions at the margin."""
    return "\n".join(line.strip() for line in text.splitlines())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frameworks") / "data"
    run = prefork.run([str(EXAMPLES / "make-data.py"), str(folder)], timeout=60)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.multi
def test_frameworks_have_the_same_batches_on_two_ranks(data: Path) -> None:
    needs("pytorch_lightning", "accelerate", "transformers")
    names = ["train-lightning", "train-accelerate", "train-trainer"]
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        # What torchrun sets.
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
        env = os.environ | {k: str(v) for k, v in (numbers | job | {"GROUP_RANK": 0}).items()}
        command = ["-c", RUN, *(str(EXAMPLES / f"{name}.py") for name in names), str(data)]
        ranks.append(
            prefork.Process(
                command, torch=True, env=env, stdout=prefork.PIPE, stderr=prefork.STDOUT
            )
        )
    outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]
        assert output.count("the same batches") == len(names), output


def test_keras_has_the_same_batches(data: Path) -> None:
    needs("keras")
    run = prefork.run([str(EXAMPLES / "train-keras.py"), str(data)], torch=True, timeout=200)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "the same batches" in run.stdout


def test_the_guide_shows_the_scripts() -> None:
    guide = (ROOT / "docs" / "guide" / "frameworks.md").read_text()
    shown = re.findall(r"\(\.\./\.\./examples/([\w-]+\.py)\)", guide)
    assert sorted(shown) == sorted(path.name for path in EXAMPLES.glob("train-*.py"))
    scripts = [unindented((EXAMPLES / name).read_text()) for name in shown]
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert blocks
    for block in blocks:
        for part in block.strip("\n").split("\n\n"):
            assert any(unindented(part) in script for script in scripts), part
