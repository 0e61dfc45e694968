"""The plug-ins in DLIO itself, on a small unet3d_h100: `make dlio-test`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nostall

LOADER = (
    "++workload.reader.data_loader_classname=nostall.plugins.dlio.DataLoader",
    "++workload.reader.data_loader_sampler=index",
    "++workload.checkpoint.checkpoint_mechanism_classname=nostall.plugins.dlio.Checkpointing",
)
SMALL = {
    "workflow.generate_data": True, "dataset.num_files_train": 12, "dataset.record_length": 40_000,
    "dataset.record_length_stdev": 8_000, "dataset.record_length_resize": 4096,
    # The names of these in DLIO 3.
    "dataset.record_length_bytes": 40_000, "dataset.record_length_bytes_stdev": 8_000,
    "dataset.record_length_bytes_resize": 4096,
    "reader.batch_size": 4, "reader.read_threads": 1, "train.epochs": 3,
    "train.computation_time": 0.01, "checkpoint.checkpoint_after_epoch": 1,
    "checkpoint.epochs_between_checkpoints": 1, "checkpoint.model_size": 100_000,
}  # fmt: skip


def dlio(home: Path, *overrides: str, **environment: str) -> dict[str, Any]:
    """Runs the workload; what DLIO's own summary says."""
    folders = [Path(nostall.__file__).parent.parent, Path(__file__).parent]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "dlio_benchmark.main", "workload=unet3d_h100",
         *(f"++workload.{k}={v}" for k, v in SMALL.items()),
         "++workload.output.folder=out", *overrides],
        cwd=home, capture_output=True, text=True,
        env={**os.environ, **environment, "PYTHONPATH": path, "NOSTALL_TRACE": str(home / "run")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((home / "out" / "summary.json").read_text())
    return found


@pytest.mark.multi
def test_a_workload_runs_on_loader_and_checkpoints(tmp_path: Path) -> None:
    summary = dlio(tmp_path, *LOADER, NOSTALL_DLIO_TIERS="ram:50MB")
    assert len(summary["metric"]["train_au_percentage"]) == 3
    size = sum(p.stat().st_size for p in (tmp_path / "data/unet3d/train").iterdir())
    ran = json.loads((tmp_path / "run" / "rank0.0.run.json").read_text())
    epochs = ran["stats"]["epochs"]
    assert [e["samples"] for e in epochs] == [12] * 3
    assert [e["origins"]["source"]["bytes"] for e in epochs] == [size, 0, 0]
    with nostall.Checkpointer(durable=tmp_path / "checkpoints/unet3d/rank0") as saved:
        restored = saved.restore()
    assert restored is not None
    assert restored.step == 3_000_003
    assert restored.state["model-3-3-0"]["a"].nbytes == 100_000


@pytest.mark.multi
def test_its_own_loader_runs_on_the_reader(tmp_path: Path) -> None:
    summary = dlio(tmp_path, "++workload.reader.reader_classname=nostall.plugins.dlio.Reader")
    assert len(summary["metric"]["train_au_percentage"]) == 3
    assert "Discovered custom data reader Reader" in (tmp_path / "out" / "dlio.log").read_text()


# Format -> DLIO's own reader that writes down what it reads, and samples of a file. The index of
# mmap_indexed_binary is read as bytes by its own reader of DLIO 2.0.0; its files are those of
# indexed_binary.
READERS = {
    "npz": ("Npz", 1), "npy": ("Npy", 1), "png": ("Image", 1), "jpeg": ("Image", 1),
    "hdf5": ("Hdf5", 3), "indexed_binary": ("IndexedBinary", 3),
    "mmap_indexed_binary": ("IndexedBinary", 3),
}  # fmt: skip


def recorded(home: Path, *options: str, **given: Any) -> list[tuple[str, ...]]:
    """What a run of one worker or more wrote down, sorted."""
    folder = home / "record"
    folder.mkdir()
    dlio(home, *(f"++workload.{k}={v}" for k, v in given.items()), *options, RECORD=str(folder))
    lines = [tuple(line.split()) for p in folder.iterdir() for line in p.read_text().splitlines()]
    shutil.rmtree(folder)
    return sorted(lines)


@pytest.mark.multi
@pytest.mark.parametrize("kind", READERS)
def test_samples_are_those_of_dlios_own_reader(tmp_path: Path, kind: str) -> None:
    reader, each = READERS[kind]
    workload = {
        "dataset.format": kind, "dataset.num_samples_per_file": each, "train.epochs": 1,
        "workflow.checkpoint": False,
    }  # fmt: skip
    as_made = {"workflow.generate_data": False}
    by = "++workload.reader.reader_classname=recorded."
    own = recorded(tmp_path, f"{by}{reader}", **workload)
    assert len(own) == 12 * each
    ours = recorded(tmp_path, f"{by}Reader", **workload, **as_made)
    assert ours == own
    options = ("++workload.reader.data_loader_classname=recorded.DataLoader", LOADER[1])
    loaded = recorded(tmp_path, *options, **workload, **as_made)
    assert loaded == sorted((digest,) for _, _, digest in own)


@pytest.mark.multi
@pytest.mark.skipif(
    importlib.util.find_spec("dlio_benchmark.reader.parquet_reader") is None,
    reason="DLIO 2 has no Parquet: make dlio-test DLIO=the path of DLIO 3",
)
def test_rows_of_parquet_are_those_in_the_files(tmp_path: Path) -> None:
    """DLIO's own readers of Parquet count bytes, and unpack nothing."""
    from pyarrow import parquet

    workload = {
        "dataset.format": "parquet", "dataset.num_samples_per_file": 8, "train.epochs": 1,
        "dataset.parquet.row_group_size": 3, "dataset.record_length_bytes_stdev": 0,
        "workflow.checkpoint": False,
    }  # fmt: skip
    options = ("++workload.reader.data_loader_classname=recorded.DataLoader", LOADER[1])
    loaded = recorded(tmp_path, *options, **workload)
    files = (tmp_path / "data/unet3d/train").iterdir()
    rows = [row for file in files for row in parquet.read_table(file)["data"].to_pylist()]
    assert len(rows) == 96
    assert loaded == sorted((hashlib.sha256(bytes(row)).hexdigest(),) for row in rows)
