"""What all benchmarks share: turns, spreads, files, processes; and the list of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
from importlib import metadata
from pathlib import Path

import pytest

from nostall.cli import main
from nostall.errors import UsageError
from nostall_bench import harness

CHILD = """
import subprocess, sys, time
from nostall_bench import harness

def work(settings):
    if "leaves" in settings:
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return left.pid
    if "late" in settings:
        time.sleep(600)
    if "gate" in settings:
        harness.ready()
    if settings.get("fails"):
        sys.exit("first\\nthe last words")
    return settings["value"] * 2

harness.answer(work)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "a_child"


def test_each_round_of_turns_begins_one_later() -> None:
    assert "".join(harness.turns("abc", 4)) == "abcbcacababc"
    assert list(harness.turns("", 2)) == []


def test_a_spread_is_the_median_with_its_ends() -> None:
    assert harness.spread([3, 1, 8], "{:.1f} s") == "3.0 s [1.0 s-8.0 s]"
    assert harness.spread(iter([0.5]), "{:.0%}") == "50%"
    assert harness.extent([3, 1, 8]) == {"median": 3, "min": 1, "max": 8}
    assert harness.error_bars([[3, 1, 8]]) == ([3], [[2], [5]])


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = harness.table("all [us]", "name", "rate [min-max]")
    table.add_row("a", harness.spread([1, 2]))
    harness.console().print(table)
    said = capsys.readouterr().out
    assert "all [us]" in said
    assert "rate [min-max]" in said
    assert "1.50 [1.00-2.00]" in said


def test_files_describe_the_machine(tmp_path: Path) -> None:
    harness.write(None, rows=[1])
    harness.write(tmp_path / "a.json", rows=[1])
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["rows"] == [1]
    assert {"cpu", "cores", "kernel", "python", "versions", "load"} <= found["machine"].keys()


def test_a_child_answers_or_is_named(child: str) -> None:
    assert harness.child(child, {"value": 4}) == 8
    with pytest.raises(UsageError, match=r"the way failed: the last words$"):
        harness.child(child, {"fails": True}, name="the way")


def test_nothing_is_awaited_but_the_child_itself(child: str) -> None:
    """A process that it has left behind, in a session of its own, has its output open."""
    left = [harness.child(child, {"leaves": True}), *harness.children(child, [{"leaves": True}])]
    for number in left:
        os.kill(number, signal.SIGKILL)


@pytest.mark.multi
def test_children_that_are_not_ready_in_time(child: str) -> None:
    with pytest.raises(UsageError, match=r"a rank of the way took more than 0.5 s$"):
        harness.children(child, [{"late": True}], name="the way", timeout=0.5, together=True)


@pytest.mark.multi
def test_children_run_at_once(child: str) -> None:
    # None goes on before all have come.
    ranks = [{"value": value, "gate": True} for value in (1, 2)]
    assert harness.children(child, ranks, together=True) == [2, 4]
    with pytest.raises(UsageError, match="a rank of the way failed"):
        harness.children(child, [{"value": 1}, {"fails": True}], name="the way")
    # The others, which may wait for it, are not waited for.
    with pytest.raises(UsageError, match="a rank of the way failed"):
        harness.children(child, [{"late": True}, {"fails": True}], name="the way")
    # One that ends before it is ready is not waited for.
    with pytest.raises(UsageError, match="a rank of the way failed"):
        harness.children(
            child, [{"value": 1, "gate": True}, {"fails": True}], name="the way", together=True
        )


def test_what_is_made_of_other_files_lies_elsewhere(tmp_path: Path) -> None:
    def pictures(root: Path, text: str = "1") -> Path:
        (root / "data" / "a").mkdir(parents=True)
        (root / "data" / "a" / "1.jpg").write_text(text)
        os.utime(root / "data" / "a" / "1.jpg", ns=(0, 0))
        return root / "data"

    first = pictures(tmp_path / "first")
    folders = [harness.made_of(first, tmp_path), harness.made_of(first / ".." / "data", tmp_path)]
    assert folders[0] == folders[1]
    folders.append(harness.made_of(pictures(tmp_path / "second"), tmp_path))
    os.utime(first / "a" / "1.jpg", ns=(0, 1))
    folders.append(harness.made_of(first, tmp_path))
    (first / "a" / "1.jpg").write_text("12")
    os.utime(first / "a" / "1.jpg", ns=(0, 0))
    folders.append(harness.made_of(first, tmp_path))
    (first / "a" / "1.jpg").rename(first / "a" / "2.jpg")
    folders.append(harness.made_of(first, tmp_path))
    assert len(set(folders)) == 5
    assert all(folder.parent == tmp_path for folder in folders)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("words", [["bench", "plan"], ["simulate", "sync"]])
def test_a_benchmark_that_is_ended_removes_what_it_made(
    words: list[str], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def ended(_: argparse.Namespace) -> int:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            removed.append("everything")
        return 0

    (point,) = metadata.entry_points(group="nostall.commands", name=".".join(words))
    monkeypatch.setattr(importlib.import_module(point.value), "run", ended)
    with pytest.raises(SystemExit) as status:
        main(words)
    assert status.value.code == 128 + number
    assert removed == ["everything"]
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("word", [[], ["--help"]])
def test_benchmarks_are_listed_with_a_line_each(
    word: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *word])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    points = metadata.entry_points(group="nostall.commands")
    names = [p.name.removeprefix("bench.") for p in points if p.name.startswith("bench.")]
    assert len(names) >= 14
    for name in names:
        assert re.search(rf"^  {name} +\S+ \S+.*[^.,]$", said, flags=re.M), name


def test_no_repeats_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for point in metadata.entry_points(group="nostall.commands"):
        parser = argparse.ArgumentParser()
        importlib.import_module(point.value).add_arguments(parser)
        if "--repeats" in parser.format_usage():
            assert main([*point.name.split("."), "--repeats", "0"]) == 2
            said = capsys.readouterr().err
            assert said == "nostall: --repeats must be at least 1, not 0\n"
            refused.append(point.name)
    assert "bench.device" in refused and len(refused) > 10
