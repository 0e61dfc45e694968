"""``nostall completion``: what the shells themselves offer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from terminal import on_terminal

from nostall.cli import main
from nostall.cli._completion import commands

# What is typed, and what may follow; files, which shells offer where nothing else does, are none.
QUESTIONS = {
    "nostall doc": "doctor",
    "nostall --v": "--version",
    "nostall checkpoints ver": "verify",
    "nostall checkpoints verify --s": "--step",
    "nostall index /data --k": "--kind",
    "nostall index /data --kind t": "tar tfrecord",
    "nostall completion -": "-h --help",
    "nostall completion ": "bash zsh fish",
    "nostall doctor --v": "",
}
BASH = """
source "$1"
while IFS= read -r typed; do
  IFS=' ' read -ra COMP_WORDS <<<"$typed"
  [[ $typed = *' ' ]] && COMP_WORDS+=('')
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _nostall
  echo "${COMPREPLY[*]}"
done <"$2" >"$3"
"""
# The line editor completes only on a terminal; what it would list goes through compadd.
ZSH = """
autoload -U compinit && compinit -D -u
source "$SCRIPT"
compadd() { local -a found; builtin compadd -O found "$@"; offered+=($found); builtin compadd "$@" }
zle-line-init() {
  while IFS= read -r typed; do
    offered=()
    BUFFER=$typed CURSOR=$#typed
    zle complete-word
    print -r -- $offered
  done <"$ASKED" >"$ANSWERS"
  exit
}
zle -N zle-line-init
"""
FISH = """
source $argv[1]
while read -l typed
  echo (complete -C $typed | cut -f 1)
end <$argv[2] >$argv[3]
"""


def answers(shell: str, script: Path, typed: list[str], folder: Path) -> list[list[str]]:
    """What the shell offers in an empty directory, its own settings left out."""
    asked, answered, empty = folder / "asked", folder / "answered", folder / "empty"
    asked.write_text("".join(f"{line}\n" for line in typed))
    empty.mkdir()
    assert shutil.which(shell), f"there is no {shell}: scripts/setup installs it"
    if shell == "zsh":
        (folder / ".zshrc").write_text(ZSH)
        places = {"SCRIPT": str(script), "ASKED": str(asked), "ANSWERS": str(answered)}
        told = on_terminal(["zsh", "-d", "-i"], cwd=empty, env={"ZDOTDIR": str(folder), **places})
        assert told[0] == 0, told[1]
    else:
        ask = {"bash": ["-c", BASH, "bash"], "fish": ["--no-config", "-c", FISH]}[shell]
        done = subprocess.run(
            [shell, *ask, script, asked, answered], cwd=empty, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in answered.read_text().splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_offer_commands_options_and_values(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / f"nostall.{shell}"
    script.write_text(capsys.readouterr().out)
    expected = {typed: set(offered.split()) for typed, offered in QUESTIONS.items()}
    for name in commands():
        first, _, second = name.rpartition(" ")
        expected.setdefault(f"nostall {first} " if first else "nostall ", set()).add(second)
    offered = answers(shell, script, list(expected), tmp_path)
    for (typed, words), found in zip(expected.items(), offered, strict=True):
        # Only bash offers options to one who typed no dash.
        plain = [word for word in found if typed[-1] != " " or word[0] != "-"]
        assert (typed, set(plain)) == (typed, words)
        assert len(plain) == len(words)
