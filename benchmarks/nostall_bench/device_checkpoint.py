"""``nostall bench device --modes checkpoint``: what saves of a device's state add to the steps.

A step computes for a stated time; a save moves a stated number of bytes over a bus of stated bandwidth.
Cycles of steps with a save in each run in turns with cycles without one, and their times on the
device's clock are compared. Beside `nostall.Checkpointer` (``window=True``, `attach`) stand copies by
``.cpu()`` with torch.save, and torch.distributed.checkpoint.async_save. All write to the directory of
temporary files (``TMPDIR``), and are on it before the next cycle begins. An update changes one number
of each tensor: the simulated device computes on the cores of the host.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nostall_bench import harness, simulated_device

WAYS = ("nostall", "torch.save", "torch.distributed.checkpoint.async_save")
_TENSORS = 64
_AIM = 1.02  # of steps without saves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this mode."""
    group = parser.add_argument_group("the mode checkpoint")
    group.add_argument("--state", type=float, default=1000, help="MB on the device")
    group.add_argument("--bus", type=float, nargs="+", default=[4.0, 1.0], help="GB/s")
    group.add_argument("--window", type=float, default=1000, help="ms that a step computes")
    group.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    group.add_argument("--saves", type=int, default=3, help="counted, after one other")


def report(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures, prints a table for each bandwidth."""
    ways = harness.matching(WAYS, arguments.ways)
    settings = {
        "ways": ways, "bytes": round(arguments.state * 1e6), "buses": arguments.bus,
        "compute": arguments.window / 1e3, "every": arguments.every, "saves": arguments.saves,
    }  # fmt: skip
    cycles = len(arguments.bus) * (arguments.saves + 1) * (len(ways) + 1)
    most = cycles * (arguments.every * settings["compute"] + 60)
    (found,) = harness.children("nostall_bench.device_checkpoint", [settings], timeout=240 + most)
    rows: list[dict[str, Any]] = []
    for bus, measured in zip(arguments.bus, found, strict=True):
        table = harness.table(
            f"steps with a save every {arguments.every}: {arguments.state:g} MB, which the bus of "
            f"{bus:g} GB/s carries in {measured['alone']:.2f} s; {arguments.window:g} ms of computing",
            *("", "steps with saves / without", "longest step / step", "save() holds the host, ms"),
            "on storage after, s",
        )
        for way, runs in measured["runs"].items():
            rows.append({"way": way, "bus": bus, "alone": measured["alone"], "runs": runs})
            steps = [run["without"] / arguments.every for run in runs]
            table.add_row(
                way,
                harness.spread((r["seconds"] / r["without"] for r in runs), "{:.3f}"),
                harness.spread(
                    (r["longest"] / step for r, step in zip(runs, steps, strict=True)), "{:.2f}"
                ),
                harness.spread((r["host"] * 1e3 for r in runs), "{:.1f}"),
                harness.spread((r["stored"] for r in runs), "{:.2f}"),
            )
        harness.console().print(table)
        for row in rows:
            if row["way"] == "nostall" and row["bus"] == bus:
                ratios = [r["seconds"] / r["without"] for r in row["runs"]]
                carried = measured["alone"] <= arguments.window / 1e3
                words = f"steps of nostall with saves take at most {_AIM} times those without"
                of_bus = f"that {'carries' if carried else 'cannot carry'} the state in a step"
                found = harness.spread(ratios, "{:.4f}")
                reached = statistics.median(ratios) <= _AIM
                harness.verdict(reached, f"{words}: {found}, on a bus {of_bus}")
    return rows


class _Training:
    """Steps on the simulated device, and the state that they change."""

    def __init__(self, simdev: Any, settings: dict[str, Any]) -> None:
        import torch

        self._simdev, self._compute = simdev, settings["compute"]
        self.bus = 0.0  # bytes per second
        simdev.speed(0)
        count = settings["bytes"] // _TENSORS // 4
        self.state = {
            f"weight {number}": torch.nn.Parameter(torch.zeros(count, device="simdev"))
            for number in range(_TENSORS)
        }
        firsts = [weight.detach()[:1] for weight in self.state.values()]
        self._sum = torch.zeros((), device="simdev")

        class Update(torch.optim.Optimizer):  # type: ignore[misc]
            def step(self, closure: Any = None) -> None:
                torch._foreach_add_(firsts, 1)

        self.optimizer = Update(self.state.values(), {})

    def crosses(self, stream: Any = None) -> None:
        """What the stream is given from now on crosses the bus."""
        self._simdev.speed(0, self.bus, stream)

    def bus_alone(self) -> float:
        """Seconds of copying the state, to memory that is page-locked."""
        import torch

        weights = list(self.state.values())
        host = torch.empty(weights[0].shape, pin_memory=True)
        torch.accelerator.synchronize()
        self.crosses()
        began = time.perf_counter()
        for weight in weights:
            host.copy_(weight.detach(), non_blocking=True)
        torch.accelerator.synchronize()
        self._simdev.speed(0)
        return time.perf_counter() - began

    def _moment(self) -> Any:
        import torch

        event = torch.Event(device="simdev", enable_timing=True)
        event.record(torch.accelerator.current_stream())
        return event

    def cycle(self, every: int, save: Callable[[], None] | None) -> dict[str, float]:
        """Seconds of the steps, of the longest one, and of the call that saves."""
        moments, host = [self._moment()], 0.0
        for number in range(every):
            if save is not None and number == min(2, every - 1):
                began = time.perf_counter()  # the device has two steps to do meanwhile
                save()
                host = time.perf_counter() - began
            self._simdev.speed(self._compute)
            self._sum.add_(1)
            self._simdev.speed(0)
            self.optimizer.step()
            moments.append(self._moment())
            if len(moments) > 2:
                moments[-3].synchronize()  # the host is two steps ahead, as one that logs
        moments[-1].synchronize()
        steps = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(moments)]
        return {"seconds": sum(steps), "longest": max(steps), "host": host}


def _work(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All cycles, on each bus; the ways in turns."""
    simdev = simulated_device.load()
    import torch

    torch.set_num_threads(1)
    training = _Training(simdev, settings)
    makers = dict(zip(WAYS, (_nostall, _torch, _distributed), strict=True))
    found = []
    for bus in settings["buses"]:
        training.bus = bus * 1e9
        alone = training.bus_alone()
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in settings["ways"]}
        with tempfile.TemporaryDirectory(prefix="nostall-device-") as place:
            ways = {way: makers[way](training, Path(place, way)) for way in settings["ways"]}
            for repeat in range(settings["saves"] + 1):
                without = training.cycle(settings["every"], None)["seconds"]
                for way, (save, stored, _) in ways.items():
                    run = training.cycle(settings["every"], save)
                    run |= {"without": without, "stored": stored()}
                    if repeat:  # the first one takes its memory
                        runs[way].append(run)
            for _, _, close in ways.values():
                close()
        found.append({"alone": alone, "runs": runs})
    reports = simdev.reports()
    assert not reports, reports
    return found


# Each gives what saves, what waits until it is on storage and says how long that took, and the end.
_Way = tuple[Callable[[], None], Callable[[], float], Callable[[], object]]


def _nostall(training: _Training, place: Path) -> _Way:
    import torch

    import nostall

    made = nostall.Checkpointer(place, keep=1)
    made.attach(training.optimizer)
    made.save({"first": torch.zeros(1, device="simdev")}, 0, level="fast")  # makes the stream
    for stream in made._device_streams.values():
        training.crosses(stream)
    state = {name: weight.detach() for name, weight in training.state.items()}
    steps = itertools.count(1)

    def save() -> None:
        made.save(state, next(steps), window=True)

    def stored() -> float:
        made.wait()
        seconds = made.history[-1].fast_seconds
        assert seconds is not None
        return seconds

    return save, stored, made.close


def _torch(training: _Training, place: Path) -> _Way:
    import torch

    place.mkdir()
    took = []

    def save() -> None:
        began = time.perf_counter()
        training.crosses()
        host = {name: weight.detach().cpu() for name, weight in training.state.items()}
        torch.save(host, place / "state.pt")
        took.append(time.perf_counter() - began)

    return save, lambda: took[-1], lambda: None


def _distributed(training: _Training, place: Path) -> _Way:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    under_way: list[Any] = []
    took: list[float] = []

    def save() -> None:
        training.crosses()
        state = {name: weight.detach() for name, weight in training.state.items()}
        began = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=place)
        future.add_done_callback(lambda _: took.append(time.perf_counter() - began))
        under_way.append(future)

    def stored() -> float:
        under_way.pop().result()
        shutil.rmtree(place)
        return took[-1]

    return save, stored, dist.destroy_process_group


if __name__ == "__main__":
    harness.answer(_work)
