"""``nostall bench sync``: every way trains, and says what it cost."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from nostall.errors import BugError, UsageError
from nostall_bench import sync, sync_horovod, sync_rank

pytest_plugins = ["forked_children"]


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_ways_are_measured_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)  # as where it is not installed
    parser = argparse.ArgumentParser()
    sync.add_arguments(parser)
    out = tmp_path / "runs.json"
    options = (
        "--networks", "mlp", "--ways", "planned", "negotiated NBCS", "Horovod", "--repeats", "1",
        "--steps", "4", "--warm", "2", "--delay-ms", "5", "--input", "loader", "--json", str(out),
        "--plot", str(tmp_path / "runs.svg"),
    )  # fmt: skip
    arguments = parser.parse_args(options)
    assert sync.run(arguments) == 0
    told = capsys.readouterr().out
    assert "Horovod is skipped: not installed" in told
    assert "graph:" in told
    drawn = (tmp_path / "runs.svg").read_text()
    assert "<svg" in drawn
    assert "negotiated NBCS" in drawn  # matplotlib writes texts as comments beside their outlines
    written = json.loads(out.read_text())
    assert list(written["skipped"]) == ["Horovod"]
    planned, negotiated = written["runs"]
    for run in (planned, negotiated):
        assert len(run["ranks"]) == 2
        for rank in run["ranks"]:
            assert rank["seconds"] >= 4 * 0.005
            assert rank["engine_steps"] == 4
            assert rank["weights"] == planned["ranks"][0]["weights"]  # of two ranks, sums are exact
            assert 0 < rank["engine_cpu_ns"] < rank["cpu"] * 1e9
    assert planned["ranks"][0]["engine_cycles"] == 0
    assert negotiated["ranks"][0]["engine_cycles"] > 0


def test_a_thread_that_ends_is_taken_from_no_other() -> None:
    used, end = threading.Event(), threading.Event()

    def engine() -> None:
        deadline = time.thread_time() + 0.01
        while time.thread_time() < deadline:
            pass
        used.set()
        end.wait()

    thread = threading.Thread(target=engine)
    thread.start()
    used.wait()
    foreign = [thread.native_id or 0]
    before = sync_rank._threads(foreign)
    assert before[foreign[0]][0] == "engine"
    assert before[foreign[0]][1]["cpu_ns"] >= 10_000_000
    end.set()
    thread.join()
    while Path(f"/proc/self/task/{foreign[0]}").exists():  # the system's thread ends after Python's
        time.sleep(0.001)
    since = sync_rank._since(before, foreign)
    assert set(since["background"].values()) == {0}
    assert min(since["engine"].values()) >= 0  # of those that other tests have left
    assert since["training"]["cpu_ns"] > 0


def test_horovod_that_does_not_load_is_skipped_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "horovod" / "torch" / "__init__.py"
    broken.parent.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    broken.write_text("raise ImportError('mpi_lib_v2.so: undefined symbol of another torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    reason = "ImportError: mpi_lib_v2.so: undefined symbol of another torch"
    assert sync.available(["planned", "Horovod"]) == (["planned"], {"Horovod": reason})
    with pytest.raises(UsageError, match="--ways Horovod: ImportError: mpi_lib_v2"):
        sync.available(["Horovod"])

    broken.write_text("")
    assert "without its native library" in str(sync_horovod.lacking())
    broken.write_text("def init(): pass\ndef gloo_built(): return False\n")
    assert "HOROVOD_WITH_GLOO" in str(sync_horovod.lacking())


def test_nothing_is_asked_of_horovod_where_it_is_not_among_the_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise AssertionError("asked")

    monkeypatch.setattr(sync_horovod, "lacking", refuse)
    assert sync.available(["negotiated", "planned"]) == (["negotiated", "planned"], {})


def test_ranks_and_ways_must_end_with_the_same_weights() -> None:
    def run(*ranks: tuple[str, float]) -> list[dict[str, object]]:
        return [{"weights": bits, "weights_size": size} for bits, size in ranks]

    ways = ["planned", "no reduction", "DDP gloo"]
    first, alone = run(("a", 0.5), ("a", 0.5)), run(("c", 0.4), ("d", 0.7))
    sync.check("mlp", ways, [first, alone, run(("b", 0.5001), ("b", 0.5001))])
    with pytest.raises(BugError, match="mlp, DDP gloo: rank 1 ended with other weights"):
        sync.check("mlp", ways, [first, alone, run(("a", 0.5), ("b", 0.5))])
    with pytest.raises(BugError, match=r"0\.51 with DDP gloo and 0\.5 with planned"):
        sync.check("mlp", ways, [first, alone, run(("b", 0.51), ("b", 0.51))])
    with pytest.raises(BugError, match="nan with DDP gloo"):
        sync.check("mlp", ways, [first, alone, run(("b", float("nan")), ("b", float("nan")))])
