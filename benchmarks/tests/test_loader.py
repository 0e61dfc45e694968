"""``nostall bench loader --quick`` measures what is installed and names what is not."""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.cli import main
from nostall.errors import UsageError
from nostall_bench import harness, loader, peers, slowfs, worker
from nostall_bench.records import FIELDS

pytest_plugins = ["forked_children"]


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    loader.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_quick_measures_nostall_and_torch(tmp_path: Path) -> None:
    modes = ("transform", "fields", "recipe", "cached")
    options = ("--quick", "--dir", str(tmp_path), "--threads", "1", "--modes", *modes)
    names = ("nostall", "torch, workers, PIL", "NumPy")
    assert loader.run(parse(*options, "--loaders", *names)) == 0
    result = json.loads((tmp_path / "loader.json").read_text())
    assert [*result["modes"]] == ["transform", *FIELDS, "recipe", "cached"]
    for mode, rows in result["modes"].items():
        torch = "torch, workers, " + ("NumPy" if mode in ("array", "wav") else "PIL")
        assert {"nostall", torch} <= set(rows)
        assert (loader.LOOP in rows) == (mode in loader.LOOPS)
        assert ("nostall, tar shards" in rows) == (loader.IN_MEMORY in rows) == (mode in FIELDS)
        for name, row in rows.items():
            assert "failed" not in row, row
            (only,) = row["runs"]
            assert only["samples_per_s"] > 0
            if name not in (loader.LOOP, loader.IN_MEMORY):
                assert only["samples"] == 128
                assert only["pss_bytes"] > 0
    assert result["machine"]["cores"] >= 1


def test_a_loader_that_is_ahead_of_the_loop_is_named() -> None:
    rows = {
        name: {"runs": [{"samples_per_s": rate}], "samples_per_s": {"median": rate}}
        for name, rate in {loader.LOOP: 100.0, loader.IN_MEMORY: 300.0, "nostall": 125.0}.items()
    }
    rows |= {"DALI, CPU": {"missing": "not installed"}}
    assert loader.passed(rows) == {"nostall": 1.25}
    assert loader.passed({"nostall": rows["nostall"]}) == {}


def test_samples_that_fill_dalis_last_batch_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipeline:
        def build(self) -> None: ...
        def run(self) -> tuple[range, range]:
            return range(4), range(4)

    made: Any = SimpleNamespace(
        fn=None, types=None, pipeline_def=lambda **_: lambda _: Pipeline, rand_augment=None
    )
    for name in ("nvidia", "nvidia.dali", "nvidia.dali.auto_aug"):
        monkeypatch.setitem(sys.modules, name, made)
    folder = tmp_path / "class"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.jpg").touch()
    job = peers.Job(tmp_path, tmp_path, "read", epochs=2, batch_size=4)
    assert [list(epoch) for epoch in peers.module("DALI, CPU").epochs(job)] == [[4, 4, 4]] * 2


def test_imports_take_no_part_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def perf_counter() -> float:
        seen.append("clock")
        return float(len(seen))

    def import_module(name: str) -> Any:
        seen.append(name)
        return peer

    peer = SimpleNamespace(REQUIRES=("json",), IMPORTS=("csv",), epochs=lambda _: [[1]])
    monkeypatch.setattr(peers, "module", lambda _: peer)
    monkeypatch.setattr(worker.time, "perf_counter", perf_counter)
    monkeypatch.setattr(worker.importlib, "import_module", import_module)
    settings = {"data": "", "prepared": "", "mode": "read", "threads": 1, "tiers": []}
    settings |= {"warm": 0, "measured": 1, "ahead": 0, "loader": "nostall"}
    worker.measure(settings)
    assert seen == ["json", "csv", "clock", "clock"]


def test_runs_that_failed_are_counted_beside_those_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def sometimes(name: str, *_: object) -> dict[str, float]:
        calls.append(name)
        if len(calls) in (1, 3, 4):
            raise UsageError("it was full")
        return {"samples_per_s": 100.0, "cpu_ms_per_sample": 1.0, "pss_bytes": 1e6}

    monkeypatch.setattr(loader, "_run_worker", sometimes)
    monkeypatch.setattr(peers, "absent", lambda _: [])
    names = ["nostall", "torch, workers, PIL"]
    words = ("recipe", names, tmp_path, [], tmp_path, parse(), 2, harness.console())
    rows = loader._mode(*words)
    found = [*loader.table("recipe", rows).columns[0].cells]
    assert calls == [*names, *names[::-1]]
    assert found == [
        "torch, workers, PIL (1 of 2 failed: it was full)",
        "nostall (2 of 2 failed: it was full)",
    ]


@pytest.mark.skipif(slowfs.missing() is not None, reason=str(slowfs.missing()))
@pytest.mark.parametrize("kept", [False, True])
def test_a_cold_table_says_what_memory_its_storage_leaves(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def run(*words: Any) -> dict[str, float]:
        storage = words[-1]
        seen.append(storage.keep_cache)
        measured = {"samples_per_s": 1.0, "cpu_ms_per_sample": 1.0, "pss_bytes": 1.0}
        return {**measured, "storage_bytes": 1.0}

    monkeypatch.setattr(loader, "_run_worker", run)
    arguments = parse(*(["--keep-cache"] if kept else []))
    (tmp_path / "data").mkdir()
    rows = loader._mode(
        "cold", ["nostall"], tmp_path / "data", [], tmp_path, arguments, 1, harness.console()
    )
    assert seen == [kept] * 2  # tiers for all, and for half
    assert loader.table("cold", rows, kept).caption == slowfs.memory_words(kept)
    assert loader.table("transform", rows).caption is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.module("DALI, CPU"), "REQUIRES", ("no_such_package",))
    assert peers.absent("DALI, CPU") == ["no_such_package"]


def test_an_unknown_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no loader matches"):
        loader.run(parse("--quick", "--dir", str(tmp_path), "--loaders", "nonesuch"))


def test_peers_read_what_was_made_of_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, str]] = []

    def child(_: str, settings: dict[str, Any], **__: object) -> list[dict[str, float]]:
        read.append((settings["data"], settings["prepared"]))
        return [dict.fromkeys(("seconds", "samples", "cpu_seconds", "pss_bytes"), 1.0)]

    monkeypatch.setattr(harness, "child", child)
    monkeypatch.setattr(loader, "find_native", lambda _: None)
    monkeypatch.setattr(peers, "absent", lambda _: [])
    words = ["bench", "loader", "--dir", str(tmp_path), "--modes", "read", "--repeats", "1"]
    for home in ("one", "two"):
        data = tmp_path / home / "train"
        (data / "a").mkdir(parents=True)
        (data / "a" / "1.jpg").write_text(home)
        assert main([*words, "--data", str(data), "--loaders", "WebDataset"]) == 0
        with tarfile.open(Path(read[-1][1]) / "000000.tar") as shard:
            picture = shard.extractfile("00000000.jpg")
            assert picture is not None and picture.read() == home.encode()
    # Nothing is made for a loader that reads the files.
    before = sorted(tmp_path.glob("made-*/*"))
    (data / "a" / "2.jpg").write_text("more")
    assert main([*words, "--data", str(data), "--loaders", "nostall"]) == 0
    assert read[-1] == (str(data), str(data))
    assert sorted(tmp_path.glob("made-*/*")) == before
