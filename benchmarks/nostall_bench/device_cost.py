"""What a batch that is ready costs: the time of next(), and that for which Python threads have the GIL.

Beside nostall with device= runs torch's loop (``pin_memory=True``, ``.to(non_blocking=True)``) on the
same images, which its workers have made floats. Each waits until a batch is ready, and then asks for
it.

The time with the GIL is processor time: of next(), and of all other threads of Python between two
batches. Of both, the part that is spent inside the simulated device is said apart: a GPU has a driver
there, which takes a time of its own. Watching takes part in what is left, which is an upper bound.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall_bench import harness, simulated_device

WAYS = ("nostall", "torch")
# Microseconds, of nostall without the device.
LIMITS = {"next": 50, "gil": 100}
_NAMES = {"next": "next()", "gil": "with the GIL"}
_SIDE = 64  # pixels
_BATCH = 32
_WARM = 20  # batches that are not counted
_MEAN = _STD = (0.5, 0.5, 0.5)


def report(ways: Sequence[str], batches: int) -> list[dict[str, Any]]:
    """Measures, prints the table."""
    (rows,) = harness.children(
        "nostall_bench.device_cost", [{"ways": list(ways), "batches": batches}], timeout=600
    )
    table = harness.table(
        f"a batch that is ready, on the simulated device, {batches} batches",
        *("", "microseconds", "median", "95 %", "in the device"),
        *("without: median", "95 %", "at most"),
    )
    for row in rows:
        for key, name in _NAMES.items():
            cost = row[key]
            numbers = (cost["median"], cost["p95"], cost["device"])
            own = (cost["own"]["median"], cost["own"]["p95"])
            limit = str(LIMITS[key]) if row["way"] == "nostall" else ""
            table.add_row(row["way"], name, *(f"{us:.1f}" for us in (*numbers, *own)), limit)
    harness.console().print(table)
    for row in rows:
        for key, most in LIMITS.items() if row["way"] == "nostall" else ():
            own = row[key]["own"]["median"]
            words = f"{_NAMES[key]} of a batch that is ready, at most {most} us without the device"
            late = row[key]["own"]["p95"]
            harness.verdict(own <= most, f"{words}: median {own:.1f}, 95 % of batches {late:.1f}")
    found: list[dict[str, Any]] = rows
    return found


def _work(settings: dict[str, Any]) -> list[dict[str, Any]]:
    simdev = simulated_device.load()
    import torch

    import nostall  # noqa: F401  # before the calls of libraries are watched

    torch.set_num_threads(1)
    every = {"nostall": _nostall, "torch": _torch}
    rows = []
    for way in settings["ways"]:
        with tempfile.TemporaryDirectory(prefix="nostall-cost-") as place:
            loop = every[way](settings["batches"] + _WARM, Path(place))
            rows.append({"way": way, **_measured(simdev, loop)})
    reports = simdev.reports()
    assert not reports, reports
    return rows


def _measured(simdev: Any, loop: Iterator[Callable[[], Any]]) -> dict[str, Any]:
    """Of a loop that gives, whenever a batch is ready, what takes it."""
    import torch

    mine = threading.current_thread()
    times: list[_Cost] = []
    held: list[_Cost] = []
    before: dict[int, _Cost] = {}
    for take in loop:
        if not times:
            simdev.watch_gil()  # all libraries are there
        others = [thread for thread in threading.enumerate() if thread is not mine]
        now = {thread.native_id or 0: _held(simdev, thread) for thread in others}
        waited = [now[thread] - before[thread] for thread in now.keys() & before.keys()]
        before = now
        own, inside = _held(simdev, mine), simdev.inside(mine)
        began = time.perf_counter()
        batch = take()
        ended = time.perf_counter()
        times.append(_Cost(ended - began, simdev.inside(mine) - inside))
        held.append(sum(waited, _held(simdev, mine) - own))
        del batch
        torch.accelerator.synchronize()
    return {"next": _spread(times[_WARM:]), "gil": _spread(held[_WARM:])}


@dataclass(frozen=True)
class _Cost:
    """Seconds, and those of them inside the device."""

    all: float
    device: float

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.all + other.all, self.device + other.device)

    def __sub__(self, other: _Cost) -> _Cost:
        return _Cost(self.all - other.all, self.device - other.device)


def _held(simdev: Any, thread: threading.Thread) -> _Cost:
    return _Cost(simdev.with_gil(thread), simdev.inside_with_gil(thread))


def _spread(costs: Sequence[_Cost]) -> dict[str, Any]:
    return {
        **_middle([cost.all for cost in costs]),
        "device": statistics.median(cost.device for cost in costs) * 1e6,
        "own": _middle([cost.all - cost.device for cost in costs]),
    }


def _middle(seconds: Sequence[float]) -> dict[str, float]:
    found = sorted(each * 1e6 for each in seconds)
    return {
        "median": statistics.median(found),
        "p95": found[-(len(found) // 20) - 1],  # one in twenty takes longer
    }


def _images(place: Path, count: int) -> list[Path]:
    paths = [place / f"{number}.raw" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number % 256]) * (3 * _SIDE * _SIDE))
    return paths


def _nostall(batches: int, place: Path) -> Iterator[Callable[[], Any]]:
    import nostall
    from nostall import transforms as t

    source = nostall.FileList(_images(place, _BATCH))
    source.pixels = nostall.Pixels(_SIDE, _SIDE)
    with nostall.DataLoader(
        source,
        _BATCH,
        order=[*range(_BATCH)] * batches,
        epochs=1,
        transforms=[t.ToTensor(), t.Normalize(_MEAN, _STD)],
        tiers=[],
        threads=1,
        device="simdev",
        staging=4 * _BATCH * 3 * _SIDE * _SIDE,  # the slabs come again and again
        device_ahead=4 * _BATCH * 3 * _SIDE * _SIDE * 4,
    ) as loader:
        running = iter(loader)
        yield lambda: next(running)
        ahead: Any = loader._ahead
        full = 1
        for _ in range(batches - 1):
            # Until the thread that sends batches has made up for what was taken, and waits for room
            # again, or has sent all.
            while not (ahead._error or (ahead._held_up and len(ahead._ready) >= full)):
                time.sleep(0.001)
            full = max(full, len(ahead._ready))
            yield lambda: next(running)


def _torch(batches: int, place: Path) -> Iterator[Callable[[], Any]]:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        _Samples(batches * _BATCH),
        _BATCH,
        num_workers=2,
        pin_memory=True,
        multiprocessing_context="fork",
    )
    running = iter(loader)

    def take() -> Any:
        return [tensor.to("simdev", non_blocking=True) for tensor in next(running)]

    for _ in range(batches):
        while running._data_queue.empty() and len(running._task_info[running._rcvd_idx]) < 2:
            time.sleep(0.001)
        time.sleep(0.002)  # the threads go on to the next batch
        yield take


class _Samples:
    """A data set of torch: floats, and a label."""

    def __init__(self, count: int) -> None:
        import torch

        self._count = count
        self._sample = torch.ones(3, _SIDE, _SIDE)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._sample, index % 10


if __name__ == "__main__":
    harness.answer(_work)
