"""scripts/slurm-suite fetches Slurm, or says why its tests are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("offered", "fetches", "said"),
    [
        ("22.05.8-4", 'touch "$2_1.deb"', ""),
        ("22.05.8-4", "echo E: 404 >&2; exit 100", "E: 404\nnostall: apt cannot fetch Slurm"),
        ("23.11.4-1", "exit 1", "nostall: apt has no Slurm 22.05 (Debian 12), but 23.11.4-1"),
        ("", "exit 1", "nostall: apt has no Slurm 22.05 (Debian 12), but none"),
    ],
)
def test_slurm_is_there_or_its_absence_is_no_error(
    tmp_path: Path, offered: str, fetches: str, said: str
) -> None:
    """With programs in the place of apt's and dpkg."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "slurm-suite", tmp_path / "scripts")
    for name, body in (
        ("apt-cache", f"[ -z '{offered}' ] || echo 'Version: {offered}'"),
        ("apt-get", f"shift; {fetches}"),
        ("dpkg", 'mkdir -p "$3/usr/bin" && touch "$3/usr/bin/srun" && chmod +x "$3/usr/bin/srun"'),
    ):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    for _ in range(2):
        done = subprocess.run(
            [tmp_path / "scripts" / "slurm-suite"],
            env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(said) and bool(done.stderr) == bool(said)
        assert (tmp_path / "build/slurm/usr/bin/srun").exists() == (not said)
