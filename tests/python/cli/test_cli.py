"""What the command line does when things go wrong around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nostall.cli._doctor
from nostall.cli import main


@pytest.mark.parametrize(
    ("content", "status"), [("not json", 5), ("[]", 5), ('{"format": 99}', 5), (None, 3)]
)
def test_a_file_that_is_no_statistics_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, status: int
) -> None:
    file = tmp_path / "r0.json"
    if content is not None:
        file.write_text(content)
    page = tmp_path / "page.html"
    assert main(["report", str(file), "-o", str(page)]) == status
    assert capsys.readouterr().err.count("\n") == 1
    assert not page.exists()


def test_interruption_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(nostall.cli._doctor, "run", interrupted)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize("words", ["bench", "demo --files 3", "simulate sync", "bench loader"])
def test_commands_of_the_benchmarks_say_what_brings_them(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    named = words.partition(" --")[0]
    assert said.startswith(f"nostall: nostall {named} is a command of nostall-bench: pip install")
    assert said.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "nostall", "doctor"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


def test_doctor_lives_with_a_launcher_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "9", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    assert "rank 9 is not in a world of 4" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.strip() == f"nostall {nostall.__version__}"


def test_a_report_that_cannot_be_written_is_named(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = tmp_path / "r0.json"
    with nostall.DataLoader(nostall.ImageFolder(image_folder, index=False), 8, tiers=[]) as loader:
        for _ in loader:
            pass
        loader.stats().save(stats)
    page = tmp_path / "nowhere" / "page.html"
    assert main(["report", str(stats), "-o", str(page)]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(page) in error
