"""``nostall completion``: what the shells offer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nostall.cli import main
from nostall.cli._completion import commands

ASK = """
source "$0"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_nostall
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from contextlib import redirect_stdout

    path = tmp_path_factory.mktemp("completion") / "nostall.bash"
    with path.open("w") as out, redirect_stdout(out):
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("nostall doc", "doctor"),
        ("nostall --v", "--version"),
        ("nostall checkpoints ver", "verify"),
        ("nostall checkpoints verify --s", "--step"),
        ("nostall index /data --k", "--kind"),
        ("nostall index /data --kind t", "tar tfrecord"),
        ("nostall completion ", "-h --help bash zsh fish"),
        ("nostall doctor --v", ""),
    ],
)
def test_bash_offers_commands_options_and_values(script: Path, typed: str, offered: str) -> None:
    done = subprocess.run(
        ["bash", "-c", ASK, str(script), *typed.split(" ")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (offered, "")


def test_fish_and_zsh_are_told_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert main(["completion", "zsh"]) == 0
    zsh = capsys.readouterr().out
    assert zsh.splitlines()[0] == "autoload -U +X bashcompinit && bashcompinit"
    for name in commands():
        first, _, second = name.partition(" ")
        assert first in zsh.split('may="', 2)[2].partition('"')[0].split()
        where = f"__fish_seen_subcommand_from {first}' " if second else "__fish_use_subcommand "
        assert f"{where}-a {second or first}" in fish, name
