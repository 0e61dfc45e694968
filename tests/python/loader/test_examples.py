"""The examples of tasks: torch's batches and ours are the same, and the guide shows what they do."""

from __future__ import annotations

import re
from pathlib import Path

import prefork

ROOT = Path(__file__).parents[3]
# One process, which imports what they share once.
RUN = """
import runpy, sys
scripts, data = sys.argv[1:-1], sys.argv[-1]
for script in scripts:
    sys.argv = [script, data]
    runpy.run_path(script, run_name="__main__")
"""


def test_tasks_have_the_batches_of_torch(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guide" / "tasks.md").read_text()
    names = dict.fromkeys(re.findall(r"\(\.\./\.\./examples/([\w-]+\.py)\)", guide))
    scripts = [str(ROOT / "examples" / name) for name in ("make-data.py", *names)]
    run = prefork.run(["-c", RUN, *scripts, str(tmp_path / "data")], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the same batches") == len(names) == 8, run.stdout


def test_the_guide_shows_the_scripts() -> None:
    guide = (ROOT / "docs" / "guide" / "tasks.md").read_text()
    scripts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        assert any(block in script for script in scripts), block


def test_a_model_learns_from_texts_with_images(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "lm-images.py")
    guide = (ROOT / "docs" / "guide" / "tokens.md").read_text()
    assert "(../../examples/lm-images.py)" in guide
    run = prefork.run([script, str(tmp_path)], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr
    first, last = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", run.stdout)[0]
    assert float(last) < 0.8 * float(first)
