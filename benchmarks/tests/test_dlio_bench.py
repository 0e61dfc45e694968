"""``nostall bench dlio`` without DLIO; in DLIO it runs by `make dlio-test`."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nostall.errors import UsageError
from nostall_bench import dlio, programs
from nostall_bench.accelerator import Profile

WORKLOAD = dlio.Workload("w", Profile(1000, 10, 0.5, 0.9), epochs=3, spread=20.5, samples=4)


def test_files_are_of_whole_batches_for_all_ranks() -> None:
    # 100,000 bytes are 100 samples: 4 batches of 10 for each of 3 ranks, in files of 4.
    assert WORKLOAD.files(100_000, 3) == 30
    assert WORKLOAD.files(120_000, 3) == 30
    assert WORKLOAD.files(120_001, 3) == 38


def test_records_are_the_workloads_own_unless_they_are_scaled(tmp_path: Path) -> None:
    given = WORKLOAD.overrides(tmp_path, 7, tmp_path, 1.0)
    assert given[0] == "workload=w"
    assert "++workload.dataset.num_files_train=7" in given
    assert not any("record_length" in word for word in given)
    scaled = WORKLOAD.overrides(tmp_path, 7, tmp_path, 0.5)
    assert "++workload.dataset.record_length=1000" in scaled
    assert "++workload.dataset.record_length_stdev=20" in scaled


def test_children_import_what_the_user_has_put_before_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.py").write_text("chosen = True\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import nostall, nostall_bench, pytest; print(pytest.chosen)"
    environment = programs.child_environment()
    subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path.parent, check=True
    )


@pytest.mark.skipif(
    importlib.util.find_spec("dlio_benchmark") is not None, reason="DLIO is installed"
)
def test_without_dlio_it_says_what_it_runs(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    dlio.add_arguments(parser)
    with pytest.raises(UsageError, match="install dlio-benchmark"):
        dlio.run(parser.parse_args(["--dir", str(tmp_path)]))


def test_data_that_take_too_long_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dlio_benchmark").mkdir()
    pid = tmp_path / "pid"
    (tmp_path / "dlio_benchmark" / "main.py").write_text(
        "import os, subprocess, time\n"
        f"with open({f'{pid}.new'!r}, 'w') as file:\n"
        "    file.write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        f"os.rename({f'{pid}.new'!r}, {str(pid)!r})\n"
        "time.sleep(600)\n"
    )
    began = time.monotonic()

    class Begun(subprocess.Popen[Any]):
        """The limit counts from when DLIO runs, however long Python takes to start."""

        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            while not pid.exists():
                assert self.poll() is None and time.monotonic() - began < 200
                time.sleep(0.01)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(dlio, "_TIMEOUT", 1.0)
    with pytest.raises(UsageError, match=r"did not generate 0 MB in .* within 1 s: give a folder"):
        dlio._generated(tmp_path, WORKLOAD, 5, 1.0)
    assert time.monotonic() - began < 200 and not list(tmp_path.rglob("complete"))
    child = Path(f"/proc/{pid.read_text()}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() - began < 200  # what DLIO has started is ended too
        time.sleep(0.05)
