"""``nostall bench tokens`` and ``nostall demo tokens``, small; their peers give what they stand for."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import nostall
from nostall.errors import UsageError
from nostall_bench import demo, harness, slowfs, token_peers, tokens
from nostall_bench.demo import tokens as demo_tokens

pytest_plugins = ["forked_children"]


def parse(module: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_a_small_run_measures_windows_and_packing(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--dir", str(tmp_path), "--tokens", "60000", "--length", "128", "--seconds", "0.05"]
    words += ["--modes", "windows", "packed", "--loaders", "nostall", "--repeats", "1"]
    assert tokens.run(parse(tokens, *words, "--json", str(out))) == 0
    modes = json.loads(out.read_text())["modes"]
    for mode in ("windows", "packed"):
        assert set(modes[mode]) == {tokens.LOOP, "nostall"}
        for row in modes[mode].values():
            assert "failed" not in row
            assert row["runs"][0]["tokens_per_s"] > 0
    assert modes["windows"]["nostall"]["runs"][0]["waste"] == 0
    assert modes["packed"]["nostall"]["runs"][0]["waste"] < 0.05


def test_runs_that_failed_are_counted_beside_those_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def sometimes(*_: object, name: str, **__: object) -> dict[str, float]:
        calls.append(name)
        if name == "Grain" or len(calls) == 2:
            raise UsageError(f"{name} failed: it was full")
        return {"tokens_per_s": 1e6, "waste": 0.0, "cpu_ns": 1.0, "pss_bytes": 1e6}

    monkeypatch.setattr(harness, "child", sometimes)
    monkeypatch.setattr(tokens, "_loop", lambda *_: sometimes(name=tokens.LOOP))
    rows = tokens._warm("windows", tmp_path, ["nostall", "Grain"], parse(tokens, "--repeats", "2"))
    names = [*tokens.table("windows", rows, parse(tokens)).columns[0].cells]
    assert calls == [tokens.LOOP, "nostall", "Grain", "nostall", "Grain", tokens.LOOP]
    assert names == [
        tokens.LOOP,
        "nostall (1 of 2 failed: nostall failed: it was full)",
        "Grain (2 of 2 failed: Grain failed: it was full)",
    ]


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_many_files_are_indexed_packed_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--scale", "--files", "3", "--documents", "60000", "--dir", str(tmp_path)]
    words += ["--ranks", "1", "2"]
    assert tokens.run(parse(tokens, *words, "--json", str(out))) == 0
    found = json.loads(out.read_text())["scale"]
    assert found["documents"] == 60_000
    assert found["state_bytes"] < 200
    assert min(found.values()) >= 0
    assert {"resume_1_ms", "resume_2_ms"} < found.keys()


def test_peers_give_batches_of_the_data(tmp_path: Path) -> None:
    data = tmp_path / "tokens.bin"
    token_peers.make(data, 20_000)
    job = token_peers.Job(data, 100, 3, 1)
    ways = token_peers.LOADERS["windows"]
    for name in ("nanoGPT's get_batch", "torch, memory map", "Megatron's dataset"):
        assert [(n, count()) for n, count in islice(ways[name](job), 70)] == [(300, 300)] * 70
    # Megatron's samples are the shuffled documents end to end: every id once, to a sample's length.
    megatron = token_peers._Megatron(job)
    found = np.concatenate([megatron[i] for i in range(len(megatron))])
    assert len(found) == 20_000
    ids = np.fromfile(data, np.uint16)
    assert np.array_equal(np.sort(found), np.sort(ids))
    ends = np.flatnonzero(ids == token_peers.END)
    first = int(megatron._order[0])
    begin = 0 if first == 0 else int(ends[first - 1]) + 1
    document = ids[begin : int(ends[first]) + 1]
    assert np.array_equal(found[: len(document)], document)


def test_the_threads_given_are_those_of_every_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "tokens.bin"
    token_peers.make(data, 2_000)
    asked = []

    def loader(*_: object, threads: int, **__: object) -> Any:
        asked.append(threads)
        ids = SimpleNamespace(numel=lambda: 200)
        return contextlib.nullcontext([{"ids": ids, "segments": ids}])

    monkeypatch.setattr(nostall, "DataLoader", loader)
    for way in ("windows", "packed"):
        next(token_peers.LOADERS[way]["nostall"](token_peers.Job(data, 100, 2, 3)))
    assert asked == [3, 3]
    given = []

    def workers(*_: object, num_workers: int, persistent_workers: bool, **__: object) -> Any:
        given.append((num_workers, persistent_workers))
        return [torch.zeros(2, 100)]

    monkeypatch.setattr("torch.utils.data.DataLoader", workers)
    made = SimpleNamespace(
        StreamingDataset=lambda *_, **__: None, TokensLoader=lambda length: length
    )
    for module in ("litdata", "litdata.streaming", "litdata.streaming.item_loader"):
        monkeypatch.setitem(sys.modules, module, made)
    ways = token_peers.LOADERS["windows"]
    for name in ("torch, memory map", "Megatron's dataset", "litdata"):
        for own in (name, f"{name}, workers"):
            next(ways[own](token_peers.Job(data, 100, 2, 3)))
    assert given == [(0, False), (3, True)] * 3


def _longer(before: tuple[Path, int], file: tuple[Path, int]) -> tuple[Path, int]:
    """A file, and the bytes of all up to it."""
    return file[0], before[1] + file[1]


def test_grains_import_takes_no_part_of_the_demos_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def perf_counter() -> float:
        seen.append("clock")
        return float(len(seen))

    monkeypatch.setattr("torch.optim.AdamW", lambda *_: None)  # compilers are imported for it
    monkeypatch.setattr(demo_tokens.time, "perf_counter", perf_counter)
    monkeypatch.setattr(demo_tokens.importlib, "import_module", seen.append)
    demo_tokens._train({"loader": "Grain", "seed": 0, "steps": 0})
    assert seen == ["grain", "clock", "clock"]


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(slowfs.missing() is not None, reason=str(slowfs.missing()))
def test_the_demo_trains_on_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As little text as there may be: the storage is as slow as the training.
    files = itertools.accumulate(((f, f.stat().st_size) for f in demo_tokens.text()), _longer)
    few = [f for f, size in files if size < 1.5e6]
    monkeypatch.setattr(demo_tokens, "text", lambda: few)
    monkeypatch.setattr(demo_tokens, "loaders", lambda: ["torch", "nostall"])
    words = ["tokens", "--dir", str(tmp_path), "--steps", "3"]
    assert demo.run(parse(demo, *words, "--latency-ms", "0", "--workers", "1")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "(four times what the training needs if only the pages of 4 KB are read that hold" in said
    )
    assert re.search(r"a memory map of it reads (\d+ KB|ahead) for a window; no page cache", said)
    results = json.loads((tmp_path / "tokens" / "demo.json").read_text())
    assert results["torch"]["loss"] == results["nostall"]["loss"]
    for loader in ("torch", "nostall"):
        assert results[loader]["storage_bytes"] > 0
        assert 0 < results[loader]["stalled"] < results[loader]["seconds"]
