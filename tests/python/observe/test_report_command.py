"""Importing, sizes, the command line, statistics and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from loader_ranks import one_rank

import nostall
from nostall.base._sizes import TierSpec, parse_size, parse_tiers
from nostall.cli import main
from nostall.errors import CorruptionError, UsageError
from nostall.observe._stats import Stats, merge
from nostall.observe.report import page


def test_import_needs_numpy_alone_and_starts_nothing() -> None:
    code = """
import sys
for name in ("torch", "rich", "matplotlib", "mpi4py", "PIL"):
    sys.modules[name] = None
import os, nostall
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started"
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GiB", 20 << 30), ("1.5 kB", 1500), ("7", 7), ("512k", 512 << 10), (42, 42)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "20 parsecs", "-3", "1e9"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_tiers(tmp_path: Path) -> None:
    tiers = parse_tiers(["ram:1GiB", f"{tmp_path}:2GiB:keep"], dataset_bytes=0, local_world_size=1)
    assert tiers == [
        TierSpec("ram", 1 << 30),
        TierSpec("file", 2 << 30, str(tmp_path), True),
    ]
    (auto,) = parse_tiers("auto", dataset_bytes=1000, local_world_size=1)
    assert auto == TierSpec("ram", 1000, modest=True)
    for text, message in (
        ("20GiB", "is not a tier"),
        ("ram:1GiB:keep", "cannot outlive"),
        ("rom:1GiB", r"\./rom:1GiB"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_tiers([text], dataset_bytes=0, local_world_size=1)


def run_job(root: Path, rank: int, world: int) -> Stats:
    with nostall.DataLoader(
        nostall.ImageFolder(root),
        8,
        epochs=2,
        tiers=["ram:1MiB"],
        **one_rank(rank, world),
    ) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                pass
        return loader.stats()


def test_statistics_survive_the_disk_and_add_up(image_folder: Path, tmp_path: Path) -> None:
    ranks = [run_job(image_folder, r, 2) for r in range(2)]
    for rank in ranks:
        rank.save(tmp_path / f"{rank.rank}.json")
        assert Stats.load(tmp_path / f"{rank.rank}.json") == rank
    whole = merge(ranks)
    assert whole.samples == 2 * 62
    assert whole.source_bytes == sum(r.source_bytes for r in ranks)
    assert whole.stall_seconds <= whole.seconds
    assert len(whole.batches.wait) == 2 * 2 * 4
    assert "all" in str(whole)
    assert whole.table().row_count == 3
    with pytest.raises(UsageError):
        merge([])
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CorruptionError, match=r"bad\.json"):
        Stats.load(tmp_path / "bad.json")
    for damage in ({"format": 9}, {"format": 8}, {"format": 8, "epochs": [3]}):
        with pytest.raises(CorruptionError):
            Stats.from_dict(damage)


def test_report_is_one_file_that_asks_nobody(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        # In a process of its own each rank's loader would be the first.
        replace(run_job(image_folder, rank, 2), loader="loader 0").save(tmp_path / f"{rank}.json")
    out = tmp_path / "report.html"
    command = ["report", str(tmp_path / "0.json"), str(tmp_path / "1.json"), "-o", str(out)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    assert main(command) == 0
    assert capsys.readouterr().out == f"written to {out} (in the place of an older one)\n"
    text = out.read_text()
    assert "<svg" in text
    assert "lower bound" in text
    for asks in ("<script", "stylesheet", "<img", "src=", "@import"):
        assert asks not in text
    assert page([Stats.load(tmp_path / "0.json")]).count("<svg") == 3


def test_errors_are_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert main(["report", str(tmp_path / "x.json")]) == CorruptionError.exit_code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "x.json" in captured.err
    # A timeline with nothing to analyse, as the guide says it.
    (tmp_path / "x.json").write_text(
        '[{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "w"}}]'
    )
    assert main(["report", str(tmp_path / "x.json")]) == CorruptionError.exit_code
    guide = Path(__file__).parents[3] / "docs" / "guide" / "timeline.md"
    assert f"is an error (exit status {CorruptionError.exit_code})" in guide.read_text()


def test_index_command(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = str(tmp_path / "index")
    arguments = ["index", str(image_folder), "--index", index]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert "61 samples of 3 classes" in capsys.readouterr().out
    assert main([*arguments, "--check"]) == 0


def test_doctor_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "io_uring" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nostall", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "doctor" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "matplotlib", "rich", "PIL"}


def test_saved_statistics_are_plain_json(image_folder: Path, tmp_path: Path) -> None:
    stats = run_job(image_folder, 0, 1)
    stats.save(tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    assert data["format"] == 8
    assert data["source_bytes"] == stats.source_bytes == stats.lower_bound_bytes
