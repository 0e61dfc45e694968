"""Sweeps, the command line, files of results, examples, records of runs."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import scenario, tables

import nostall
from nostall.cli import main
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.simulate import _check as check
from nostall.simulate import _results as results
from nostall.simulate._sweep import Point, cheapest, points_of, price_of, scaling, sweep

ROOT = Path(__file__).parents[3]
OWN = f"{ROOT / 'examples' / 'simulate-own-policy.py'}:Replicated"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(nostall.__file__).parents[1])}
GRID = {"d.1": [0, 60, 120], "d.2": [0, 100]}


def write_scenario(
    path: Path, policies: Sequence[Any] = ("lower-bound", "hdmlp", "nostall")
) -> Path:
    """The small scenario as a file."""
    data = tables(policies=list(policies))

    def value(v: object) -> str:
        if isinstance(v, dict):
            return "{" + ", ".join(f'"{k}" = {value(x)}' for k, x in v.items()) + "}"
        return json.dumps(v) if not isinstance(v, list) else f"[{', '.join(map(value, v))}]"

    lines = [f"policies = {value(data.pop('policies'))}"]
    for name, table in data.items():
        lines += [f"[{name}]", *(f'"{k}" = {value(v)}' for k, v in table.items())]
    path.write_text("\n".join(lines))
    return path


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    one = scenario(policies=["hdmlp", "nostall"])
    state = tmp_path / "points.jsonl"
    whole = sweep(one, [GRID], ["consistent"], state=state)
    assert [p.values for p in whole] == points_of([GRID]) and len(whole) == 6
    lines = state.read_text().splitlines()
    # Killed while it wrote the fifth point.
    state.write_text("\n".join(lines[:4]) + "\n" + lines[4][:30])
    seen: list[tuple[int, int]] = []
    again = sweep(
        one, [GRID], ["consistent"], state=state, progress=lambda *at: seen.append(at), processes=2
    )
    assert again == whole
    assert seen[0] == (4, 6) and seen[-1] == (6, 6) and len(seen) == 3
    # What was written behind the part of a line is found again.
    sweep(one, [GRID], ["consistent"], state=state, progress=lambda *at: seen.append(at))
    assert seen[3:] == [(6, 6)]
    # Policies of a file work in other processes too, also two of one file.
    own = scenario(policies=["nostall", OWN, OWN])
    assert len(sweep(own, [GRID], ["consistent"], processes=2)) == 6
    # Points of another training are not taken for this one's.
    other = scenario(policies=["hdmlp", "nostall"], training={"E": 4})
    assert sweep(other, [GRID], ["consistent"], state=state) != whole


STOPS = """
import os, pathlib, time
import nostall.simulate as s
from nostall.errors import UsageError

class Stops(s.Policy):
    title = "Stops"

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def decide(self, job):
        room = job.environment.classes[1].capacity
        if 1 <= room < 2:
            (self.folder / f"{os.getpid()}.pid").touch()
            time.sleep(600)
        state = self.folder / "points"
        while room == 2 and not (state.exists() and state.stat().st_size):
            time.sleep(0.01)
        if room == 2:
            raise UsageError("cannot be")
        return s.make_policy("lower-bound").decide(job)
"""


def stopping(folder: Path) -> dict[str, str]:
    """Computes for ever with d.1 from 1 on, and refuses d.1 = 2 once a point is stored."""
    (folder / "stops.py").write_text(STOPS)
    return {"name": f"{folder / 'stops.py'}:Stops", "folder": str(folder)}


def ended(folder: Path) -> bool:
    """Whether the processes that computed for ever have ended."""
    found = [int(path.stem) for path in folder.glob("*.pid")]
    for number in found:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(number)
            try:
                if not select.select([descriptor], [], [], 60)[0]:
                    os.kill(number, signal.SIGKILL)
                    return False
            finally:
                os.close(descriptor)
    return bool(found)


@pytest.mark.multi
def test_a_refused_point_ends_a_sweep_at_once(tmp_path: Path) -> None:
    one = scenario(policies=[stopping(tmp_path)])
    grid, state = {"d.1": [0, 1, 2, 3]}, tmp_path / "points"
    with pytest.raises(UsageError, match="cannot be"):
        sweep(one, [grid], ["consistent"], state=state, processes=2)
    assert ended(tmp_path)
    assert '"d.1": 0' in state.read_text()
    # What can be known before is refused before.
    state.unlink()
    with pytest.raises(UsageError):
        sweep(scenario(), [{"B": [40, 5000]}], ["consistent"], state=state)
    assert not state.exists()


@pytest.mark.multi
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_sweep_that_is_ended_leaves_no_process(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    path = write_scenario(tmp_path / "one.toml", [stopping(tmp_path)])
    state = tmp_path / "points"
    words = ["simulate", str(path), "--sweep", "d.1=0,1,1.1,1.2"]
    words += ["--processes", "2", f"--state={state}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nostall", *words], env=ENVIRONMENT, start_new_session=True
    )
    while process.poll() is None and not (
        list(tmp_path.glob("*.pid")) and state.exists() and "\n" in state.read_text()
    ):
        time.sleep(0.01)
    # Ctrl-C at a terminal goes to the whole group.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    try:
        assert process.wait(60) == status
        assert ended(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert state.read_text().count("\n") == 1


def test_a_sweep_takes_no_points_of_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, path = tmp_path / "points.jsonl", tmp_path / "own.py"
    text = (
        "import nostall.simulate as s\n"
        "class Own(s.Policy):\n"
        "    title = 'Own'\n"
        "    def decide(self, job):\n"
        "        return s.make_policy('POLICY').decide(job)\n"
    )

    def points(policy: str) -> tuple[list[Point], list[int]]:
        path.write_text(text.replace("POLICY", policy))
        done: list[int] = []
        found = sweep(
            scenario(policies=[f"{path}:Own"]), [GRID], ["consistent"], state=state,
            progress=lambda ended, _: done.append(ended),
        )  # fmt: skip
        return found, done

    first, done = points("lower-bound")
    assert done[0] == 0
    other, done = points("naive")
    assert done[0] == 0 and other != first
    again, done = points("lower-bound")
    assert done == [6] and again == first
    monkeypatch.setattr("nostall.simulate._sweep.__version__", "0.0.1")
    assert points("lower-bound")[1][0] == 0


def test_the_cheapest_machine() -> None:
    points = sweep(scenario(policies=["nostall"]), [GRID], ["consistent"])
    column = "nostall/consistent"
    prices = {"d.1": 5.0, "d.2": 1.0}
    bound = min(p.read_once_bound for p in points)
    found = cheapest(points, prices, 4, column=column, within=0.05, bound=bound)
    assert found is not None
    point, price = found
    assert price == 4 * (5.0 * point.values["d.1"] + 1.0 * point.values["d.2"])
    for p in points:
        if p.seconds[column] <= 1.05 * bound:
            assert price_of(p.values, prices, 4) >= price
    assert cheapest(points, prices, 4, column=column, within=0, bound=bound / 2) is None
    for within in (-0.5, math.nan, "5"):
        with pytest.raises(UsageError, match=f"within must be a number from 0 .*, not {within!r}"):
            cheapest(points, prices, 4, column=column, within=within)  # type: ignore[arg-type]
    for price in (math.nan, math.inf, -1.0, "1", True):
        with pytest.raises(UsageError, match=f"the price of .* must be a number.*, not {price!r}"):
            cheapest(points, dict.fromkeys(prices, price), 4, column=column, within=1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"there is a price for d\.0"):
        cheapest(points, {"d.0": 1.0}, 4, column=column, within=1.0)
    with pytest.raises(UsageError, match="there is no hdmlp"):
        cheapest(points, prices, 4, column="hdmlp", within=1.0)


@pytest.mark.parametrize("mode", ["as-published", "consistent"])
def test_slow_machines_are_not_near_a_bound_of_their_own(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_scenario(tmp_path / "mine.toml")
    words = ["--sweep", "c=20,100", "--price", "c=1", "--policy", "lower-bound", "--mode", mode]
    for within, machine in (("5", "c=100 for 400"), ("500", "c=20 for 80")):
        assert main(["simulate", str(path), *words, "--within", within]) == 0
        assert f": {machine}," in capsys.readouterr().out


def test_a_file_system_measured_with_fewer_nodes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_scenario(tmp_path / "mine.toml")
    said = "t is known up to N = 4: 8 nodes are taken to get no more from the file system"
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    one = ["simulate", str(path), "--policy", "lower-bound"]
    for words in (["--set", "N=8"], ["--nodes", "8", "4", "5"], ["--sweep", "N=4,8,5"]):
        assert main([*one, *words]) == 0
        shown = capsys.readouterr().out
        assert shown.count("t is known") == 1
        assert f"{said}, 146 MB/s together" in shown
        if "--nodes" not in words:
            assert main([*one, *words, f"--html={page}", f"--json={data}"]) == 0
            assert page.read_text().count(said) == 1
            (line,) = json.loads(data.read_text())["assumed"]
            assert line.startswith(said)
            capsys.readouterr()
    for words in ([], ["--nodes", "2", "4"], ["--sweep", "N=2,4"]):
        assert main([*one, *words]) == 0
        assert "t is known" not in capsys.readouterr().out


def test_strong_and_weak_scaling() -> None:
    one = scenario(policies=["lower-bound", "nostall"])
    strong = scaling(one, [1, 2, 4], ["consistent"])
    times = [strong[n][1].seconds for n in (1, 2, 4)]
    assert times[0] > times[1] > times[2]
    weak = scaling(one, [4, 8], ["consistent"], weak=True)
    assert weak[8][0].seconds == pytest.approx(weak[4][0].seconds, rel=0.05)
    with pytest.raises(UsageError, match="at least one node"):
        scaling(one, [0], ["consistent"])


def test_the_command_line_writes_all_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = write_scenario(tmp_path / "mine.toml")
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "csv", "html")]
    assert main(["simulate", str(path), *files]) == 0
    shown = capsys.readouterr().out
    assert "fastest first, consistent: Lower bound, nostall, HDMLP" in shown
    data = json.loads((tmp_path / "json").read_text())
    assert len(data["outcomes"]) == 6 and len(data["outcomes"][0]["batch_seconds"]) == 90
    rows = list(csv.DictReader((tmp_path / "csv").open()))
    assert [r["policy"] for r in rows[::2]] == ["Lower bound", "HDMLP", "nostall"]
    page = (tmp_path / "html").read_text()
    assert page.count("<svg") == 4 and "http" not in page.split("<svg")[0]
    assert main(["simulate", str(path), "--nodes", "2", "4", "--mode", "consistent"]) == 0
    assert "speed-up" in capsys.readouterr().out
    sweeps = ["--sweep", "d.1=0,120", "--sweep", "d.2=0,100", "--price", "d.1=1"]
    assert main(["simulate", str(path), *sweeps, "--policy", "nostall", files[2]]) == 0
    assert "nostall/consistent: cheapest within 5 %" in capsys.readouterr().out
    assert (tmp_path / "html").read_text().count("<svg") == 2
    assert main(["simulate", "--list"]) == 0
    assert "environment, scenario-1" in capsys.readouterr().out


def test_the_command_line_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for words, names in (
        (["simulate"], "which scenario?"),
        (["simulate", "scenario-5"], "there is no scenario scenario-5"),
        (["simulate", "scenario-1", "--set", "c"], '"c" is not KEY=VALUE'),
        (["simulate", "scenario-1", "--policy", "best"], 'there is no policy "best"'),
        (["simulate", "scenario-1", "--policy", "lbann,preload=true"], "has no option preload"),
    ):
        assert main(words) == 2
        assert names in capsys.readouterr().err


def test_a_price_that_cannot_be_is_refused_before_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, state = write_scenario(tmp_path / "mine.toml"), tmp_path / "state"
    words = ["simulate", str(path), "--sweep", "d.1=0,120", f"--state={state}"]
    for price, names in (
        ("d.2=1", "there is a price for d.2, which the sweep does not set"),
        ("d.1=-1", "the price of d.1 must be a number from 0 on, not -1"),
        ("d.1=nan", "the price of d.1 must be a number from 0 on, not nan"),
    ):
        assert main([*words, "--price", price]) == 2
        assert names in capsys.readouterr().err
    assert not state.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("FILE --price d.1=1", "--price does nothing without a sweep: add --sweep"),
        ("FILE --within 0", "--within does nothing without a sweep: add --sweep"),
        ("FILE --state points", "--state does nothing without a sweep: add --sweep"),
        ("FILE --weak", "--weak does nothing without --nodes: add --nodes"),
        ("FILE --sweep d.1=0,1 --weak", "--weak does nothing without --nodes: add --nodes"),
        ("FILE --sweep d.1=0,1 --no-sweep", "--no-sweep does nothing beside --sweep: leave"),
        ("FILE --nodes 2 --sweep d.1=0,1", "--sweep does nothing beside --nodes: leave"),
        ("FILE --nodes 2 --price d.1=1", "--price does nothing beside --nodes: leave"),
        ("FILE --nodes 2 --state points", "--state does nothing beside --nodes: leave"),
        ("FILE --nodes 2 --json out", "--json does nothing beside --nodes: leave"),
        ("FILE --check runs", "a scenario does nothing beside --check: leave"),
        ("--check runs --mode both", "--mode does nothing beside --check: leave"),
        ("--check runs --policy nostall", "--policy does nothing beside --check: leave"),
        ("--check runs --set N=2", "--set does nothing beside --check: leave"),
        ("--list --html out", "--html does nothing beside --list: leave"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_scenario(tmp_path / "mine.toml"))
    assert main(["simulate", *words.replace("FILE", path).split()]) == 2
    assert says in capsys.readouterr().err


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="cannot write"):
        results.write(tmp_path / "none" / "x", "text")
    with pytest.raises(IoError, match="Is a directory"):
        sweep(scenario(policies=["nostall"]), [{"d.1": [0]}], ["consistent"], state=tmp_path)


@pytest.mark.parametrize("example", ["simulate-own-policy.py", "buy-ssd-or-ram.py"])
def test_examples(example: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    assert "nostall" in done.stdout


def record(folder: Path, directory: Path, capacity: int) -> None:
    """A real run of the loader on one node, recorded."""
    dataset = nostall.ImageFolder(str(folder), index=False)
    with nostall.DataLoader(
        dataset, 8, epochs=3, seed=5, tiers=[f"ram:{capacity}"], rank=0, world_size=1,
        local_rank=0, local_world_size=1, output="numpy",
    ) as loader:  # fmt: skip
        for epoch in loader.epochs():
            for _ in epoch:
                pass
        stats = loader.stats()
    check.record_run(
        directory / f"tier-{capacity}{check.SUFFIX}",
        environment=check.machine_of_run(
            nodes=1, source=[2e8], link=2e8, tiers=[capacity], staging=256 << 20
        ),
        sizes=dataset.sizes.tolist(),
        training={"E": 3, "B": 8, "seed": 5},
        step_seconds=0.001,
        epoch_seconds=[e.seconds for e in stats.epochs],
        origin_bytes={
            o: sum(e.origins[o].bytes for e in stats.epochs) for o in stats.epochs[0].origins
        },
    )


def test_predicts_the_bytes_of_real_runs(image_folder: Path, tmp_path: Path) -> None:
    total = nostall.ImageFolder(str(image_folder), index=False).total_bytes
    for share in (2.0, 0.5):
        record(image_folder, tmp_path, int(total * share))
    found = check.check(tmp_path)
    assert len(found) == 2
    for run in found:
        assert abs(run.bytes_error) < 0.03
        assert run.predicted_seconds > 0 and len(run.predicted_epochs) == 3
    assert "predicted" in check.text(found)


def test_a_loaders_record_is_not_called_damaged(image_folder: Path, tmp_path: Path) -> None:
    nostall.trace.start(tmp_path)
    dataset = nostall.ImageFolder(image_folder, index=False)
    try:
        with nostall.DataLoader(dataset, 8, epochs=1, output="numpy") as loader:
            next(iter(loader))
    finally:
        nostall.trace.stop()
    with pytest.raises(UsageError, match=r"of a recorded run left, .* bench nodes --record"):
        check.check(tmp_path)


def test_damaged_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="cannot read"):
        check.check(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no records"):
        check.check(tmp_path)
    path = tmp_path / f"a{check.SUFFIX}"
    for content, names in (
        ("{", "is not a record of a run"),
        ("[]", "is not a record of format 1"),
        ('{"format": 1}', "is damaged"),
        (
            '{"format": 1, "measured": {"epoch_seconds": [1], "bytes": {}}, "environment": {}}',
            "missing N",
        ),
    ):
        path.write_text(content)
        with pytest.raises((CorruptionError, UsageError), match=names) as caught:
            check.check(tmp_path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("table", "changes", "says"),
    [
        ("measured", {"epoch_seconds": []}, "epoch_seconds must be E = 2 positive numbers"),
        ("measured", {"epoch_seconds": [1.0]}, "epoch_seconds must be E = 2 positive numbers"),
        ("measured", {"epoch_seconds": [1.0, 0.0]}, "epoch_seconds must be"),
        ("measured", {"epoch_seconds": [1.0, float("nan")]}, "epoch_seconds must be"),
        ("measured", {"epoch_seconds": [1.0, 10**400]}, "too large"),
        ("measured", {"bytes": {}}, "bytes must not be negative, and not all 0"),
        ("measured", {"bytes": {"source": 0}}, "bytes must not be"),
        ("measured", {"bytes": {"source": 9, "ram": -5}}, "bytes must not be"),
        ("training", {"B": 0}, "training.B: must be a whole number from 1 to 2147483647, not 0"),
        ("training", {"E": 10**9}, "epoch_seconds must be"),
        ("training", {"E": 10**30}, "training.E: must be a whole number from 1 to 2147483647"),
        (
            "training",
            {"seed": -1},
            "training.seed: must be a whole number from 0 to 18446744073709",
        ),
        ("", {"sizes": []}, "is damaged"),
        ("", {"sizes": [5.0, float("nan")] * 20}, "sizes must be numbers from 0 on"),
        ("", {"sizes": [-5] * 40}, "sizes must be numbers from 0 on"),
        ("", {"step_seconds": float("nan")}, "is damaged"),
    ],
)
def test_records_with_numbers_that_cannot_be_are_named(
    table: str, changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{check.SUFFIX}"
    check.record_run(
        path,
        environment=check.machine_of_run(
            nodes=1, source=[2e8], link=2e8, tiers=[100], staging=256 << 20
        ),
        sizes=[5] * 40,
        training={"E": 2, "B": 8, "seed": 5},
        step_seconds=0.001,
        epoch_seconds=[1.0, 1.0],
        origin_bytes={"source": 200, "ram": 200},
    )
    assert check.check_run(path).measured_seconds == 2.0
    data = json.loads(path.read_text())
    (data[table] if table else data).update(changes)
    path.write_text(json.dumps(data))
    with pytest.raises((CorruptionError, UsageError), match=says) as caught:
        check.check(tmp_path)
    assert str(path) in str(caught.value)
