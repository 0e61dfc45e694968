"""Traces of the PyTorch profiler: known answers, a real job on Gloo, kernels of NCCL, damage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import prefork
import pytest

from nostall.cli import main
from nostall.errors import CorruptionError, UsageError
from nostall.observe.report import _timeline as report
from nostall.observe.timelines import Analysis, analyze

US = 1e-6
BASE = 1_700_000_000_000_000_000
HERE = Path(__file__).parent


def x(name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "pid": 1, "tid": 1, **more}


def gloo(launch: float, begin: float, end: float, elements: int) -> list[dict[str, Any]]:
    return [
        x("c10d::allreduce_", launch, launch + 1, cat="cpu_op",
          args={"Input Dims": [[[elements]], [], []], "Input type": ["TensorList", "", ""]}),
        x("gloo:all_reduce", begin, end, cat="user_annotation",
          args={"Input Dims": [[elements]], "Input type": ["float"]}),
    ]  # fmt: skip


def nccl(launch: float, begin: float, end: float, elements: int) -> list[dict[str, Any]]:
    return [
        x("c10d::allreduce_", launch, launch + 1, cat="cpu_op", args={}),
        x("nccl:all_reduce", launch, launch + 1, cat="user_annotation", args={}),
        x("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", begin, end,
          cat="kernel", args={"In msg nelems": elements, "dtype": "Float", "stream": 20}),
    ]  # fmt: skip


def trace(events: list[dict[str, Any]], rank: int, world: int = 2, **head: Any) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world},
        "host_name": "node",
        "baseTimeNanoseconds": BASE,
        **head,
        "traceEvents": events,
        "traceName": "t",
    }


def job(make: Any = gloo, shift: float = 0) -> list[list[dict[str, Any]]]:
    """Four rounds of two ranks, at 0, 1000, 2000, 3000; those at 1000 and 2000 count."""
    ranks: list[list[dict[str, Any]]] = [[], []]
    for start in (0, 1000, 2000, 3000):
        for rank, events in enumerate(ranks):
            at = start + (shift if rank else 0)
            events.append(x("DistributedDataParallel.forward", at + 5 * rank, at + 100))
            # Bucket 0: ready at 200 and 300, run by both at 310, ended 400 and 410.
            events += make(at + 200 + 100 * rank, at + 210 + 100 * rank, at + 400 + 10 * rank, 250)
            # Bucket 1: ready at 350 and 500, run by both at 520, ended at 700.
            events += make(at + 350 + 150 * rank, at + 410 + 110 * rank, at + 700, 500)
    return ranks


def read(tmp_path: Path, ranks: list[dict[str, Any]]) -> Analysis:
    files = []
    for number, content in enumerate(ranks):
        files.append(tmp_path / f"rank{number}.json")
        files[-1].write_text(json.dumps(content, indent=1))
    return analyze(files)


def run(name: str, category: str, stream: int, begin: float, end: float) -> dict[str, Any]:
    return x(name, begin, end, cat=category, args={"device": 0, "stream": stream})


def test_what_a_device_waits_for(tmp_path: Path) -> None:
    """Two steps of 1000 us: copy 200, compute 300, reduce 100 beside it and 100 after, save 150."""
    events = []
    for at in (0, 1000):
        events += [
            x(f"ProfilerStep#{at}", at, at + 1000, cat="user_annotation"),
            x(f"ProfilerStep#{at}", at, at + 999, cat="gpu_user_annotation"),
            run("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 9, at, at + 200),
            run("a kernel", "kernel", 7, at + 200, at + 350),
            run("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 7, at + 350, at + 500),
            run("ncclDevKernel_AllReduce_Sum", "kernel", 8, at + 400, at + 600),
            run("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 5, at + 550, at + 750),
            run("a kernel", "kernel", 7, at + 750, at + 800),
        ]
    got = read(tmp_path, [trace(events, 0, world=1)])
    (device,) = got.devices
    assert (device.rank, device.device, device.stream) == (0, 0, 7)
    assert device.waits == pytest.approx(
        {"steps": 2, "seconds": 2e-3, "input": 400 * US, "copy": 400 * US, "gradient": 200 * US,
         "checkpoint": 300 * US}
    )  # fmt: skip
    assert got.notes == []
    text = report.text(got)
    assert "rank 0, device 0, stream 7: a step on the device takes 1.000 ms" in text
    assert "without waits for copies of batches 0.800 ms" in text and "without any 0.350 ms" in text


@pytest.mark.parametrize("make", [gloo, nccl])
def test_known_answers(tmp_path: Path, make: Any) -> None:
    got = read(tmp_path, [trace(e, r) for r, e in enumerate(job(make))])
    assert [r.round for r in got.rounds] == [1, 2]
    assert got.feed_forward == pytest.approx(200 * US)
    first, second = got.tensors
    assert (first.name, first.bytes) == ("bucket 0 (250 elements)", 1000)
    assert first.window == pytest.approx((1000 - 410) * US)
    assert first.reaction == pytest.approx(1000 / (590 * US))
    assert first.immutable_worst == pytest.approx(1000 / (410 * US))
    assert second.window == pytest.approx(300 * US)
    # Of 200..1000, rank 0 is busy in 310-410 and 520-700; rank 1 also in 200-300 and 350-500.
    assert [r.average for r in got.ranks] == pytest.approx([520 * US, 330 * US])
    assert got.notes == []


def test_clocks_of_other_hosts_are_aligned(tmp_path: Path) -> None:
    first, second = job(shift=77_000)
    got = read(tmp_path, [trace(first, 0), trace(second, 1, host_name="other")])
    assert got.feed_forward == pytest.approx(200 * US, abs=11 * US)
    assert any("was moved by -77.0" in n for n in got.notes)


def test_accumulated_gradients_are_one_round(tmp_path: Path) -> None:
    ranks = job()
    for events in ranks:
        for start in (0, 1000, 2000, 3000):
            events.append(x("DistributedDataParallel.forward", start + 120, start + 150))
    got = read(tmp_path, [trace(e, r) for r, e in enumerate(ranks)])
    assert [r.seconds for r in got.rounds] == pytest.approx([1000 * US] * 2)
    assert got.feed_forward == pytest.approx(200 * US)


def test_one_rank_alone_has_no_negotiation_delays(tmp_path: Path) -> None:
    got = read(tmp_path, [trace(job()[0], 0)])
    assert got.rounds
    assert got.ranks == []
    assert got.negotiation_average is None
    assert got.negotiation_missing is not None
    assert "one file per rank" in got.negotiation_missing
    assert any("ranks 1 are missing" in n for n in got.notes)


def test_damaged_traces_tell_file_and_offset(tmp_path: Path) -> None:
    ranks = [trace(e, r) for r, e in enumerate(job())]
    files = []
    for number, content in enumerate(ranks):
        files.append(tmp_path / f"r{number}.json.gz")
        text = json.dumps(content)
        if number:
            text = text[: text.rindex('{"ph"')]  # the writer was killed
            text = text.replace('"dur": 90,', '"dur": [90],', 1)
        files[-1].write_bytes(gzip.compress(text.encode()))
    got = analyze(files)
    assert got.rounds
    assert any("unreadable" in n or "do not end" in n for n in got.notes)


_STEP = '"ph": "X", "name": "ProfilerStep#9"'
_LAUNCH = '"ph": "X", "name": "c10d::allreduce_", "ts": 1250, "dur": 1'


@pytest.mark.parametrize(
    "event",
    [
        f'{_STEP}, "ts": 1{"0" * 400}, "dur": 1',
        f'{_STEP}, "ts": 1e300, "dur": 1',
        f'{_STEP}, "ts": 1250, "dur": 1{"0" * 400}',
        f'{_STEP}, "ts": NaN, "dur": 1',
        f'{_STEP}, "ts": 1250, "dur": Infinity',
        f'{_STEP}, "ts": 1250, "dur": -5',
        f'{_STEP}, "ts": true, "dur": 1',
        '"ph": "X", "name": 5, "cat": "kernel", "ts": 1, "dur": 1, "args": {"device": 0, "stream": 1}',
        f'{_LAUNCH}, "args": {{"Input Dims": [[[1{"0" * 30}]]]}}',
        f'{_LAUNCH}, "args": {{"Input Dims": [[[1{"0" * 400}, 1{"0" * 400}]]]}}',
        f'{_LAUNCH}, "args": {{"In msg nelems": -1{"0" * 30}}}',
    ],
    ids=lambda event: event[:60],
)
def test_numbers_beyond_bounds_cost_the_event_that_has_them(tmp_path: Path, event: str) -> None:
    whole = read(tmp_path, [trace(e, r) for r, e in enumerate(job())])
    file = tmp_path / "rank1.json"
    begin, end = file.read_text().split('"traceEvents": [')
    file.write_text(f'{begin}"traceEvents": [{{{event}}}, {end}')
    got = analyze([tmp_path / "rank0.json", file])
    assert got.rounds == whole.rounds and got.ranks == whole.ranks
    (note,) = got.notes
    assert "rank1.json: 1 unreadable event left out, the first at byte" in note


def test_clocks_beyond_bounds(tmp_path: Path) -> None:
    ranks = [trace(e, r, baseTimeNanoseconds=10**30) for r, e in enumerate(job())]
    assert read(tmp_path, ranks).rounds
    whole: list[list[dict[str, Any]]] = [[], []]
    for starts in ((0, -4e15), (4000, -4e15 + 4000), (8000, 4e15 - 8000)):
        for rank, start in enumerate(starts):
            whole[rank] += [{**event, "ts": event["ts"] + start} for event in job()[rank]]
    with pytest.raises(CorruptionError, match="centuries apart"):
        read(tmp_path, [trace(e, r, host_name=f"host {r}") for r, e in enumerate(whole)])


@pytest.mark.parametrize(
    "content",
    [
        trace([], 0),
        trace([x("DistributedDataParallel.forward", 0, 1)], 0),
        trace(gloo(0, 1, 2, 3), 0),
        {"distributedInfo": [[[]]], "baseTimeNanoseconds": "x", "traceEvents": [{"ph": "X"}, 7]},
        {"distributedInfo": {"rank": [], "world_size": {}}, "traceEvents": gloo(0, 1, 2, 3)},
    ],
)
def test_traces_without_rounds_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError) as caught:
        read(tmp_path, [content])
    assert "rank0.json" in str(caught.value)


def test_a_rank_given_twice_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both of rank 0"):
        read(tmp_path, [trace(e, 0) for e in job()])


@pytest.mark.multi
def test_a_real_job_on_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outs = [tmp_path / f"rank{r}.json.gz" for r in range(2)]
    ranks = [
        prefork.Process(
            [HERE / "ddp.py", tmp_path / "store", out, str(r), "2"],
            stderr=prefork.PIPE,
            torch=True,
        )
        for r, out in enumerate(outs)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=800)
        assert process.returncode == 0, errors
    got = analyze(outs)
    assert len(got.rounds) == 4
    assert sum(t.bytes or 0 for t in got.tensors) == 4 * (128 * 128 + 128) * 4
    assert len(got.tensors) > 1
    # Rank 1 comes to each round 30 ms after rank 0.
    early, late = got.ranks
    assert early.average > late.average
    assert all(r.seconds > 0.03 for r in got.rounds)
    assert main(["report", *map(str, outs), "-o", str(tmp_path / "r.html")]) == 0
    assert "PyTorch profiler: 4 rounds" in capsys.readouterr().out
