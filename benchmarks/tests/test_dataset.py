"""The synthetic dataset repeats bit for bit, decodes, and has ImageNet's file sizes."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from signal import SIG_DFL, SIGINT, SIGKILL, SIGTERM, getsignal, raise_signal

import numpy as np
import pytest
from PIL import Image

from nostall.cli import main
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.demo import experiment
from nostall_bench.demo.dataset import DatasetSpec, digest, make_dataset
from nostall_bench.programs import child_environment


def test_equal_specs_give_equal_bytes_whatever_the_processes(tmp_path: Path) -> None:
    spec = DatasetSpec(files=16, classes=4, seed=7, scale=0.25)
    one = make_dataset(tmp_path / "one", spec, processes=1)
    two = make_dataset(tmp_path / "two", spec, processes=2)
    other = make_dataset(
        tmp_path / "other", DatasetSpec(files=16, classes=4, seed=8, scale=0.25), processes=1
    )
    assert digest(one) == digest(two)
    assert digest(one) != digest(other)


def test_files_decode_and_have_the_stated_sizes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    root = make_dataset(
        tmp_path / "data",
        DatasetSpec(files=60, classes=10),
        progress=lambda done, total: seen.append((done, total)),
    )
    paths = sorted(root.rglob("*.jpg"))
    assert len(paths) == 60
    assert (seen[0], seen[-1]) == ((0, 60), (60, 60))
    assert sorted(p.name for p in root.iterdir()) == [f"class_{i:03d}" for i in range(10)]
    sizes = np.array([p.stat().st_size for p in paths])
    assert 85_000 < sizes.mean() < 105_000
    assert sizes.min() > 25_000
    assert sizes.max() < 200_000
    shapes = []
    for path in paths:
        with Image.open(path) as image:
            image.load()
            assert image.mode == "RGB"
            assert image.layer[0][1:3] == (2, 2)  # 4:2:0
            shapes.append(image.size)
    assert np.mean(shapes, axis=0) == pytest.approx([450, 375], abs=25)
    assert len(set(shapes)) > 50


def test_a_complete_dataset_is_kept_and_another_refused(tmp_path: Path) -> None:
    spec = DatasetSpec(files=8, classes=2, scale=0.2)
    root = make_dataset(tmp_path / "data", spec, processes=1)
    before = [p.stat().st_mtime_ns for p in sorted(root.rglob("*.jpg"))]
    make_dataset(root, spec, processes=1)
    assert [p.stat().st_mtime_ns for p in sorted(root.rglob("*.jpg"))] == before
    with pytest.raises(UsageError, match="different dataset"):
        make_dataset(root, DatasetSpec(files=9, classes=2, scale=0.2))


@pytest.mark.multi
def test_ctrl_c_ends_the_making_at_once(tmp_path: Path) -> None:
    spec = "DatasetSpec(1_000_000, 2, scale=0.1)"  # an hour
    program = f"make_dataset({str(tmp_path / 'data')!r}, {spec}, processes=2)"
    making = subprocess.Popen(
        [sys.executable, "-c", f"from nostall_bench.demo.dataset import *; {program}"],
        env=child_environment(), stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        while making.poll() is None and not list((tmp_path / "data").glob("*/*.jpg")):
            time.sleep(0.01)
        os.killpg(making.pid, SIGINT)
        # The error of this process alone, and none of those that worked for it.
        assert making.communicate(timeout=60)[1].count(b"Traceback") == 1
        assert making.returncode == -SIGINT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(making.pid, SIGKILL)


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty"):
        make_dataset(tmp_path / "data", DatasetSpec(files=4, classes=2))
    assert (tmp_path / "data" / "thesis.tex").read_text() == "years of work"


def test_the_demo_says_what_it_makes_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = DatasetSpec(files=8, classes=2, scale=0.2)

    def said() -> str:
        return " ".join(capsys.readouterr().out.split())

    class Begun(Exception):
        pass

    def no_pool(*_: object, **__: object) -> None:
        raise Begun

    with monkeypatch.context() as patched:
        patched.setattr("nostall_bench.demo.dataset.children.results", no_pool)
        with pytest.raises(Begun):
            experiment._dataset(tmp_path / "data", spec, harness.console())
    assert said().startswith("making 8 pictures in ")
    make_dataset(tmp_path / "data", spec, processes=1)
    experiment._dataset(tmp_path / "data", spec, harness.console())
    assert "making" not in said()


def test_a_demo_that_is_ended_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> None:
        raise_signal(SIGTERM)

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(experiment, "_train", ended)
    words = ["demo", "--dir", str(tmp_path / "demo"), "--files", "8", "--classes", "2"]
    with pytest.raises(SystemExit, match="143"):
        main(words)
    assert getsignal(SIGTERM) is SIG_DFL
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]


def test_the_demo_asks_first_whether_it_can_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nostall_bench.slowfs.missing", lambda: "fusermount3 is not installed")
    with pytest.raises(UsageError, match="cannot emulate slow storage: fusermount3 is not"):
        experiment.run(argparse.Namespace(dir=tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()  # no picture was made in vain
