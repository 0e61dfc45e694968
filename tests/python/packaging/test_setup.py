"""scripts/setup, with an apt and a dpkg of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "scripts" / "setup"
# As the real ones: what is installed is shown without lists, and only lists have what is offered.
COMMANDS = {
    "id": "echo 0",
    "dpkg-query": 'case "$4" in make | g++) echo install ok installed ;; *) exit 1 ;; esac',
    "apt-cache": """
        if [ -e lists ]; then echo "$2 | 1.0 | http://deb.example main Packages"; exit 0; fi
        [ "$1 $2" = "show make" ]""",
    "apt-get": 'echo "$@" >>asked; if [ "$1" = update ]; then touch lists; fi',
}


@pytest.mark.parametrize("lists", [False, True])
def test_nothing_is_left_out_for_want_of_lists(tmp_path: Path, lists: bool) -> None:
    for name, script in COMMANDS.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    if lists:
        (tmp_path / "lists").touch()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run([SETUP, "build"], cwd=tmp_path, env=env, check=True, capture_output=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:-1] == ["update -qq"] * (1 if lists else 2)
    for package in ("libsimgrid-dev", "chromium", "ccache", "libjpeg-dev"):
        assert package in asked[-1].split()
    assert "make" not in asked[-1].split()
