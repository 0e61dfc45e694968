"""scripts/check-docs finds links, names of files and citations that lead nowhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "scripts" / "check-docs")],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of the check and the references alone, which passes."""
    for part in ("scripts/check-docs", "docs/references.md"):
        (tmp_path / part).parent.mkdir()
        shutil.copy(ROOT / part, tmp_path / part)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "right.py").write_text(
        '"""As [Böhringer 2020, sec. 3.1] and [Li\n2019]: a seed."""\n'
    )
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("page.md", "[there](gone.md)", "page.md: the link to gone.md leads nowhere"),
        ("page.md", "[there](docs/references.md#gone)", "names no heading"),
        ("page.md", "see `native/gone.cc`", "there is no native/gone.cc"),
        ("code.h", "// as native/gone.cc does", "code.h:1: there is no native/gone.cc"),
        ("code.h", "// as [Nobody 2020,\n// sec. 1]", "does not define [Nobody 2020]"),
        ("code.cc", "int main() {}", "code.cc:1: say in a comment what the file does"),
        ("code.py", '"""The seed\'s figure."""', "cite the work"),
        ("code.h", "//\n// as [Li 2020]", "code.h:2: docs/references.md does not define [Li 2020]"),
        ("code.h", "// (seed\n// lmdbio-and-horovod, 6.1)", "cite the work"),
        ("code.py", '"""As equation 3.8 (seed, 3.2.1)."""', "cite the work"),
        ("page.md", "**The thesis.** It says", "cite the work"),
    ],
)
def test_what_leads_nowhere_is_named(checkout: Path, file: str, text: str, named: str) -> None:
    (checkout / file).write_text(text + "\n")
    done = check(checkout)
    assert done.returncode == 1
    assert named in done.stdout
