"""``nostall bench io``: pipelines that agree, disks that are watched, errors that are counted."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nostall
from nostall_bench import disk, harness, io
from nostall_bench.demo.dataset import DatasetSpec, make_dataset
from nostall_bench.pipelines import PIPELINES, Work, installed

pytest_plugins = ["forked_children"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = make_dataset(tmp_path_factory.mktemp("io") / "data", DatasetSpec(24, 2, 0, 0.3))
    bad = data / "class_000" / "bad.jpg"
    bad.write_bytes(b"\xff\xd8 this is no image")
    return sorted(str(p) for p in data.rglob("*.jpg"))


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("name", installed())
def test_every_image_comes_once(images: list[str], name: str, decode: bool, prefetch: int) -> None:
    labels = list(range(len(images)))
    work = Work(images, labels, 8, 2, decode, prefetch)
    batches = list(PIPELINES[name](work))
    seen = sorted(int(y) for _, batch in batches for y in batch)
    bad = images.index(next(p for p in images if p.endswith("bad.jpg")))
    if not decode:
        assert seen == labels
        assert work.errors == 0
        return
    assert work.errors == 1
    if name == "nostall":
        assert bad not in seen
        assert len(seen) == len(labels)
    else:
        assert seen == [y for y in labels if y != bad]
    assert all(x.shape[1:] == (3, 224, 224) for x, _ in batches)


@pytest.mark.usefixtures("forked")
def test_a_table_and_numbers_are_written(
    images: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    io.add_arguments(parser)
    data = str(Path(images[0]).parent.parent)
    options = [
        "--paths", str(tmp_path / "disk"), "--data", data, "--threads", "1", "--repeats", "2",
        "--pipelines", "nostall", "--work", "decode", "--output", str(tmp_path / "io"),
    ]  # fmt: skip
    assert io.run(parser.parse_args(options)) == 0
    (found,) = json.loads((tmp_path / "io.json").read_text())["paths"].values()
    (row,) = found["rows"]
    assert len(row["images_per_s"]) == 2
    assert row["median"] > 0
    assert row["errors"] == 1
    assert found["sequential"] > 0
    assert found["sequential_write"] > 0
    assert "posix_fadvise" in found["cold"]
    assert (tmp_path / "io.png").stat().st_size > 1000
    said = capsys.readouterr().out.replace("\n", " ")
    assert "one file in order" in said
    assert "1 (2 read)" in said  # nostall has two threads that read at least


@pytest.mark.parametrize("decode", [True, False])
def test_nostall_stages_two_batches_of_what_it_hands_out(
    images: list[str], monkeypatch: pytest.MonkeyPatch, decode: bool
) -> None:
    staged: list[int] = []

    def loader(*_: object, staging: int, **__: object) -> Any:
        staged.append(staging)
        stats = SimpleNamespace(epochs=[], fetchers=2)
        return contextlib.nullcontext(_Batches(stats))

    class _Batches(list[Any]):
        def __init__(self, stats: object) -> None:
            self.stats = lambda: stats

    monkeypatch.setattr(nostall, "DataLoader", loader)
    work = Work(images, [0] * len(images), 8, 1, decode)
    assert list(PIPELINES["nostall"](work)) == []
    mean = sum(Path(p).stat().st_size for p in images) // len(images)
    assert staged == [2 * 8 * (3 * 224 * 224 * 4 if decode else mean)]


def test_pipelines_and_threads_that_only_read_take_turns(
    images: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []

    def child(module: str, settings: dict[str, Any], *, name: str, **_: str) -> dict[str, Any]:
        turns.append(name)
        return {"images_per_s": len(turns), "errors": 0, "readers": 0, "activity": []}

    def limit(*_: object) -> dict[str, float]:
        turns.append("limit")
        return {"samples_per_s": 1.0}

    monkeypatch.setattr(harness, "child", child)
    monkeypatch.setattr(io, "find_native", lambda _: Path("nostall-limit"))
    monkeypatch.setattr(io, "run_limit", limit)
    monkeypatch.setattr(io, "sequential", lambda _: (1.0, 1.0))
    parser = argparse.ArgumentParser()
    io.add_arguments(parser)
    words = "--threads 1 --work read --pipelines nostall map --repeats 2"
    arguments = parser.parse_args(words.split())
    found = io._measure(images, tmp_path, arguments)
    assert turns == ["limit", "nostall", "map", "nostall", "map", "limit"]
    assert [(r["pipeline"], r["images_per_s"]) for r in found["rows"]] == [
        ("nostall", [2, 4]), ("map", [3, 5]),
    ]  # fmt: skip
    assert found["bound"] == {1: 1}


def test_a_file_is_written_and_read_whole_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    removed = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        lengths.append(path.stat().st_size)
        removed(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    wrote, read = disk.sequential(tmp_path, size=4 << 20, runs=2)
    assert wrote > 0 and read > 0
    assert lengths == [4 << 20]
    assert not list(tmp_path.iterdir())


def test_what_was_forgotten_is_read_from_the_device_and_seen(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(32 << 20))
    device = disk.device_of(file)
    if device is None:
        assert disk.device_of("/dev/shm") is None
        return
    assert "DONTNEED" in disk.forget([file])
    with disk.Activity(device, 0.05) as seen:
        file.read_bytes()
        time.sleep(0.1)
    starts = [0.0, *(row[0] for row in seen.rows)]
    lengths = [row[0] - start for start, row in zip(starts, seen.rows, strict=False)]
    read = sum(length * row[1] for length, row in zip(lengths, seen.rows, strict=True))
    assert read >= 0.9 * (32 << 20)
    own = [row[3] for row in seen.rows]
    if disk.cgroup_of() is None:
        assert own == [None] * len(own)
    else:
        assert all(rate is not None and rate >= 0 for rate in own)


@pytest.mark.parametrize(
    "text",
    [
        "253:0 rbytes=4096 wbytes=512 rios=1 wios=1 dbytes=0 dios=0\n8:16 rbytes=7 wbytes=8\n",
        "8:16 Read 7\n8:16 Write 8\n253:0 Read 4096\n253:0 Write 512\n253:0 Total 4608\nTotal 9\n",
        "253:0\n253:0 rbytes=4096 wbytes=512\n",
    ],
)
def test_counters_of_cgroups_of_both_versions(tmp_path: Path, text: str) -> None:
    file = tmp_path / "io.stat"
    file.write_text(text)
    assert disk.cgroup_counters(file, (253, 0)) == (4096, 512)
    assert disk.cgroup_counters(file, (9, 9)) == (0, 0)
