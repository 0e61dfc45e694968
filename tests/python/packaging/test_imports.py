"""Importing nostall needs NumPy alone, and rooms reach only downwards."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_import_needs_numpy_alone_and_starts_nothing() -> None:
    done = python(
        """
import os, sys, numpy
before = len(os.listdir("/proc/self/task"))
class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {"numpy", "nostall"} and top not in sys.stdlib_module_names:
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Only())
import nostall, nostall.cli, nostall.observe.report
assert len(os.listdir("/proc/self/task")) == before, "importing started threads"
"""
    )
    assert done.returncode == 0, done.stderr


def layers(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "scripts" / "check-layers")],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("room", "line", "named"),
    [
        ("base", '#include "plan/plan.h"', "base/ may not use plan/"),
        ("source", '#include "tier/node_cache.h"', "source/ may not use tier/"),
        ("stage", "#include <nanobind/nanobind.h>", "no Python"),
        ("newroom", "", "newroom is not in the table"),
    ],
)
def test_the_layers_are_checked(tmp_path: Path, room: str, line: str, named: str) -> None:
    shutil.copytree(ROOT / "native", tmp_path / "native")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "check-layers", tmp_path / "scripts")
    assert layers(tmp_path).returncode == 0, layers(tmp_path).stdout
    (tmp_path / "native" / room).mkdir(exist_ok=True)
    (tmp_path / "native" / room / "wrong.h").write_text(line + "\n")
    done = layers(tmp_path)
    assert done.returncode == 1
    assert named in done.stdout
