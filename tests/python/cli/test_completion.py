"""``nostall completion``: what the shells themselves offer."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Sequence
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


def answers(
    shell: str, script: Path, typed: list[str], folder: Path, files: Sequence[str] = ()
) -> list[list[str]]:
    """What the shell offers in a directory of these files alone, its own settings left out."""
    asked, answered, empty = folder / "asked", folder / "answered", folder / "empty"
    asked.write_text("".join(f"{line}\n" for line in typed))
    empty.mkdir()
    for name in files:
        (empty / name).touch()
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


def script_of(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    script = folder / f"nostall.{shell}"
    script.write_text(capsys.readouterr().out)
    return script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_offer_commands_options_and_values(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(shell, tmp_path, capsys)
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


def test_fish_offers_files_only_where_one_may_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of("fish", tmp_path, capsys)
    typed = ["nostall checkpoints ", "nostall checkpoints verify ", "nostall report "]
    names, *others = answers("fish", script, typed, tmp_path, ["a.file"])
    assert "verify" in names and "a.file" not in names
    assert others == [["a.file"], ["a.file"]]


def test_what_is_not_installed_is_listed_as_such_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setenv("COLUMNS", "1000")  # no line is broken
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert {"demo", "bench"} <= commands().keys()
    for name in ("demo", "bench"):
        assert commands()[name].text.endswith("(needs nostall-bench)")
        assert commands()[name].text in listed
    assert listed.count("nostall-bench") == 2
