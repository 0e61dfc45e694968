"""Importing nostall needs NumPy alone, and rooms reach only downwards."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import prefork

ROOT = Path(__file__).parents[3]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False
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
from nostall import *  # all that is read when it is asked for
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


# By what was added to a checkout, or put in place of a file: what the check says of it.
DAMAGES = [
    ("native/base/wrong.h", '#include "plan/plan.h"', "wrong.h:1: base/ may not use plan/"),
    ("native/source/wrong.h", '#include "tier/node_cache.h"', "source/ may not use tier/"),
    ("native/stage/wrong.h", "#include <nanobind/nanobind.h>", "no Python"),
    ("native/newroom/wrong.h", "", "native/newroom is not in the table"),
    ("native/base/CMakeLists.txt", "nostall_room(base DEPS plan)", "base may not link plan"),
    ("python/nostall/job/_top.py", "import nostall", "_top.py:1: job may not use nostall"),
    (
        "python/nostall/job/_late.py",
        "def late():\n    from nostall.loader import DataLoader",
        "_late.py:2: job may not use loader",
    ),
    (
        "python/nostall/job/_long.py",
        "def long():\n" + "    pass\n" * 80,
        "_long.py:1: long has 81 lines, at most 80",
    ),
    (
        "python/nostall/job/_wide.py",
        f"def wide({', '.join(f'p{i}=0' for i in range(13))}): pass",
        "_wide.py:1: wide has 13 parameters, at most 12",
    ),
    ("python/nostall/newroom/_wrong.py", "", "python/nostall/newroom is not in the table"),
    (
        "python/nostall/cli/_wrong.py",
        "def late():\n    from nostall_bench import slowfs",
        "_wrong.py:2: cli may not use nostall_bench",
    ),
    (
        "python/nostall/_version.py",
        "import nostall_bench",
        "_version.py:1: _version may not use nostall_bench",
    ),
    ("docs/architecture.md", "<!-- python rooms --><!-- end -->", "differs from layers.toml"),
]


def test_the_layers_are_checked(tmp_path: Path) -> None:
    whole = layers(ROOT)
    assert whole.returncode == 0, whole.stdout
    # A part of the checkout is enough to be damaged; of the other rooms their names.
    for path in (ROOT / "python" / "nostall").iterdir():
        (tmp_path / path.relative_to(ROOT).with_suffix("")).mkdir(parents=True, exist_ok=True)
    (tmp_path / "python" / "nostall" / "job").rmdir()
    for room in ("native/base", "native/source", "native/stage", "python/nostall/job", "scripts"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "architecture.md", tmp_path / "docs")
    part = layers(tmp_path)
    assert part.returncode == 0, part.stdout
    for file, text, _ in DAMAGES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    done = layers(tmp_path)
    assert done.returncode == 1
    for file, _, named in DAMAGES:
        assert named in done.stdout, file
    # And no other file: each line is of one damage.
    assert len(done.stdout.splitlines()) == len(DAMAGES), done.stdout
    table = tmp_path / "scripts" / "layers.toml"
    table.write_text(table.read_text().replace('uses = ["base"]', 'uses = ["base", "sync"]', 1))
    assert "native room trace uses sync, which is not below it" in layers(tmp_path).stdout


def reference(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "reference"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_public_names_are_listed_and_others_not_shown(tmp_path: Path) -> None:
    leave = shutil.ignore_patterns("*.so", "__pycache__")
    for part in ("python/nostall", "scripts", "docs", "examples"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=leave)
    shutil.copy(ROOT / "README.md", tmp_path)
    assert reference(tmp_path).returncode == 0, reference(tmp_path).stderr
    (tmp_path / "python/nostall/errors.py").write_text("__all__ = []\n")
    done = reference(tmp_path)
    assert done.returncode == 1
    assert "docs/reference.md differs" in done.stderr
    for file, text in (
        ("examples/wrong.py", "from nostall.job._world import World"),
        ("docs/wrong.md", "```python\nimport nostall.job\n```"),
        ("python/nostall/plan.py", "__all__ = ['Plan']\nclass Plan: pass\n"),
    ):
        (tmp_path / file).write_text(text)
    done = reference(tmp_path)
    assert done.returncode == 1
    for named in (
        "examples/wrong.py: nostall.job._world.World is not public",
        "docs/wrong.md: nostall.job is not public",
        "nostall.Plan has no docstring",
    ):
        assert named in done.stderr


def test_public_names_can_be_imported() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    modules = [m for m in re.findall(r"^## (\S+)", page, flags=re.M) if "plugins" not in m]
    short = {"nostall.testing", "nostall.transforms", "nostall.trace", "nostall.metrics"}
    code = "import nostall, importlib\n"
    for module in modules:
        found = f"importlib.import_module({module!r})" if module not in short else module
        code += f"m = {found}\nmissing = [n for n in m.__all__ if not hasattr(m, n)]\n"
        code += f"assert not missing, ({module!r}, missing)\n"
    done = prefork.run(["-c", code], torch=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_read_when_it_is_asked_for() -> None:
    done = python(
        """
import sys, numpy
before = set(sys.modules)
import nostall
own = {"nostall._version", "nostall.base", "nostall.base._lazy"}
assert not {m for m in sys.modules if m.startswith("nostall.")} - own, "eager"
assert set(nostall.__all__) <= set(dir(nostall))
for name in nostall.__all__:
    assert getattr(nostall, name) is not None, name
    assert name in vars(nostall), f"{name} is looked up again"
from nostall import *
from nostall.loader import DataLoader as same
assert DataLoader is same and nostall.collective.__name__ == "nostall.collective"
try:
    nostall.DataLoder
except AttributeError as error:
    assert "DataLoader" in str(error), error
else:
    raise AssertionError("found what is not there")
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_program_pays_at_its_start_for_what_it_uses() -> None:
    done = python(
        """
import sys, numpy
before = set(sys.modules)
import nostall
nostall.DataLoader, nostall.ImageFolder, nostall.Schema
t = nostall.transforms
t.RandomResizedCrop, t.RandomHorizontalFlip, t.ToTensor, t.Normalize
read = set(sys.modules) - before
large = {
    "concurrent.futures", "csv", "decimal", "difflib", "email", "hashlib", "html", "http",
    "multiprocessing", "random", "socket", "tomllib", "urllib.request", "xml", "zipfile",
}
assert not read & large, read & large
rare = {"_arrow", "_cached", "_manifests", "_records", "_tokens"}
assert not read & {f"nostall.source.{name}" for name in rare}, read
"""
    )
    assert done.returncode == 0, done.stderr
