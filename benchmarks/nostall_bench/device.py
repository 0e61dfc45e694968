"""``nostall bench device``: what steps take on a device, against the slowest of its parts alone; what
saves add to them (`device_checkpoint`); what a batch that is ready costs (`device_cost`).

In each combination a sample takes a stated time to decode, a batch to cross the bus, and a step to
compute; a loop that hides two of them behind the third takes as long as the slowest. Beside nostall
with device= run torch's loop (``pin_memory=True``, ``.to(non_blocking=True)``) and a hand-written
prefetcher (a stream of its own, ``wait_stream``, ``record_stream``), each with two workers, in turns
and in one process. There the parts are measured alone too, so that late timers count on both sides.

The device is the simulated one of the tests (a checkout of nostall is needed), whose operations and
copies take the time that they are given: it shows what is hidden, and says nothing of the speed of a
GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench import device_checkpoint, device_cost, harness, simulated_device

_MODES = ("steps", "checkpoint", "cost")
WAYS = ("nostall", "hand-written prefetcher", "torch")
COMPUTE = (10.0, 20.0, 40.0)  # milliseconds
COPY = (5.0, 15.0)
DECODE = (2.0, 8.0, 15.0, 30.0)
_BATCH = _WORKERS = 2  # each worker has one sample of each batch, or every other batch
_NUMBERS = 1 << 15  # float32 of a sample
_WARM = 6  # steps that are not counted
_AIM = 1.01  # of the slowest part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench device``."""
    for name, times in (("compute", COMPUTE), ("copy", COPY), ("decode", DECODE)):
        parser.add_argument(
            f"--{name}", type=float, nargs="+", default=times, help="milliseconds of a step"
        )
    parser.add_argument("--steps", type=int, default=20, help=f"counted, after {_WARM} others")
    harness.add_repeats(parser, 3, "of each combination")
    parser.add_argument(
        "--modes", nargs="+", choices=_MODES, default=_MODES[:1], help="what is measured"
    )
    parser.add_argument("--batches", type=int, default=300, help="of the mode cost")
    device_checkpoint.add_arguments(parser)
    parser.add_argument("--ways", nargs="+", help="some of those measured: parts of their names")
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables."""
    rows: list[dict[str, Any]] = []
    if "steps" in arguments.modes:
        rows += _steps(arguments)
    if "checkpoint" in arguments.modes:
        rows += device_checkpoint.report(arguments)
    if "cost" in arguments.modes:
        ways = harness.matching(device_cost.WAYS, arguments.ways)
        rows += device_cost.report(ways, arguments.batches)
    harness.write(arguments.json, rows=rows)
    return 0


def _steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    combined = list(itertools.product(arguments.compute, arguments.copy, arguments.decode))
    ways = harness.matching(WAYS, arguments.ways)
    repeats = arguments.repeats
    settings = {"ways": ways, "combinations": combined * repeats, "steps": arguments.steps}
    most = len(ways) * repeats * sum(map(sum, combined)) * (arguments.steps + _WARM) / 1e3
    (found,) = harness.children("nostall_bench.device", [settings], timeout=240 + 2 * most)
    rows = [{"way": way, "runs": found[way]} for way in ways]
    table = harness.table(
        f"steps on the simulated device, {len(combined)} combinations, {repeats} runs of each",
        *("", "of the slowest part: median", "least", "most", "within 1 %"),
        *("all runs: least", "most"),
    )
    verdicts: list[tuple[bool, str]] = []
    for row in rows:
        every = [each["step"] / each["slowest"] for each in row["runs"]]
        middle = [statistics.median(every[i :: len(combined)]) for i in range(len(combined))]
        within = f"{sum(ratio <= _AIM for ratio in middle)} of {len(middle)}"
        least, most_of_all = f"{min(every):.3f}", f"{max(every):.3f}"
        numbers = (f"{of(middle):.3f}" for of in (statistics.median, min, max))
        table.add_row(row["way"], *numbers, within, least, most_of_all)
        if row["way"] == "nostall":
            words = f"steps of nostall within 1 % of the slowest part in {within} combinations"
            spread = (
                f"medians of {repeats} runs up to {max(middle):.3f}; all {least} to {most_of_all}"
            )
            verdicts.append((max(middle) <= _AIM, f"{words} ({spread})"))
    harness.console().print(table)
    for verdict in verdicts:
        harness.verdict(*verdict)
    return rows


class _Samples:
    """A data set of torch, and what nostall calls for each sample: both wait as if they decoded."""

    def __init__(self, seconds: float, count: int) -> None:
        import torch

        self._seconds = seconds
        self._count = count
        self._sample = torch.ones(_NUMBERS)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self(None)

    def __call__(self, raw: Any) -> Any:
        time.sleep(self._seconds)
        return self._sample


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """All combinations, each by all ways in turn."""
    simdev = simulated_device.load()
    import torch

    torch.set_num_threads(1)
    every = dict(zip(WAYS, (_nostall, _prefetched, _torch), strict=True))
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in settings["ways"]}
    for compute, copy, decode in settings["combinations"]:
        step = _Step(simdev, compute / 1e3, _BATCH * _NUMBERS * 4 / (copy / 1e3))
        alone = {
            "compute": step.alone(),
            "copy": step.copy_alone(),
            "decode": _decode_alone(decode / 1e3),
        }
        parts = {
            "stated": {"compute": compute, "copy": copy, "decode": decode},
            "alone": {part: seconds * 1e3 for part, seconds in alone.items()},
            "slowest": max(alone.values()) * 1e3,
        }
        samples = _Samples(decode / 1e3, (settings["steps"] + _WARM) * _BATCH)
        for way, taken in runs.items():
            with tempfile.TemporaryDirectory(prefix="nostall-device-") as place:
                seconds = step.loop(every[way](samples, step, Path(place)))
            taken.append({**parts, "step": seconds * 1e3})
    reports = simdev.reports()
    assert not reports, reports
    return runs


class _Step:
    """What a step computes, and how fast copies are."""

    def __init__(self, simdev: Any, compute: float, bandwidth: float) -> None:
        import torch

        self._simdev = simdev
        self._compute = compute
        self._bandwidth = bandwidth
        simdev.speed(0)
        self._sum = torch.zeros((), device="simdev")
        self._one = torch.ones((1, 1), device="simdev")

    def copies(self, stream: Any = None) -> None:
        """What the stream is given from now on are copies."""
        self._simdev.speed(0, self._bandwidth, stream)

    def __call__(self, batch: Any) -> Any:
        """One operation, of which the event is given."""
        import torch

        self._simdev.speed(self._compute)
        self._sum.add_(batch[0, 0])
        done = torch.Event(device="simdev", enable_timing=True)
        done.record(torch.accelerator.current_stream())
        return done

    def loop(self, batches: Iterator[Any]) -> float:
        """Seconds of a step on the device's clock; the host is two steps ahead, as one that logs."""
        done: list[Any] = []
        for batch in batches:
            done.append(self(batch))
            del batch
            if len(done) > 2:
                done[-3].synchronize()
        done[-1].synchronize()
        counted: float = done[_WARM - 1].elapsed_time(done[-1])
        return counted / 1e3 / (len(done) - _WARM)

    def alone(self) -> float:
        return self.loop(iter([self._one] * (_WARM + 10)))

    def copy_alone(self) -> float:
        import torch

        self.copies()
        host = torch.ones(_BATCH, _NUMBERS).pin_memory()
        there = torch.empty_like(host, device="simdev")
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            there.copy_(host, non_blocking=True)
        torch.accelerator.synchronize()
        return (time.perf_counter() - begin) / 10


def _decode_alone(seconds: float) -> float:
    def some() -> None:
        for _ in range(10):
            time.sleep(seconds)

    threads = [threading.Thread(target=some) for _ in range(_WORKERS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - begin) / 10


def _nostall(samples: _Samples, step: _Step, place: Path) -> Iterator[Any]:
    import nostall

    paths = [place / f"{number}.raw" for number in range(len(samples))]
    for path in paths:
        path.write_bytes(b"sample")
    with nostall.DataLoader(
        nostall.FileList(paths),
        _BATCH,
        epochs=1,
        transforms=samples.__call__,
        decode=False,
        tiers=[],
        threads=_WORKERS,
        device="simdev",
    ) as loader:
        recipe: Any = loader._recipe
        step.copies(recipe.place.stream)
        for values, _ in loader:
            yield values


def _loader(samples: _Samples) -> Any:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        samples,
        _BATCH,
        num_workers=_WORKERS,
        pin_memory=True,
        multiprocessing_context="fork",
    )
    return loader


def _torch(samples: _Samples, step: _Step, place: Path) -> Iterator[Any]:
    for values in _loader(samples):
        step.copies()
        yield values.to("simdev", non_blocking=True)


def _prefetched(samples: _Samples, step: _Step, place: Path) -> Iterator[Any]:
    """As in many examples: the next batch is sent while the step of this one is under way."""
    import torch

    side = torch.Stream(device="simdev")
    step.copies(side)
    host = iter(_loader(samples))

    def following() -> Any:
        values = next(host, None)
        if values is None:
            return None
        with side:
            return values.to("simdev", non_blocking=True)

    ahead = following()
    while ahead is not None:
        current = torch.accelerator.current_stream()
        current.wait_stream(side)
        ahead.record_stream(current)
        values, ahead = ahead, None
        yield values
        ahead = following()


if __name__ == "__main__":
    harness.answer(_work)
