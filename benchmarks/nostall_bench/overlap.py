"""``nostall bench overlap``: how well the reductions of a device's gradients hide behind backward.

Two ranks train a chain of linear layers whose gradients a process group of the device reduces. The
devices' own clocks give, in each step, when each group of gradients was complete and when backward
ended; how long each group's allreduce takes alone is measured before. From these follows the ideal:
each group begins when it is complete on both ranks and the one before is done. The table holds what
steps took against it, beside DistributedDataParallel with buckets of the same size, and against
backward with all reductions behind it.

With ``--late-ms`` one rank after the other begins its backward pass that much later. Times count from
its begin to the end of both ranks, so that the delay itself is in none of them; the calls of the other
rank, ``backward()`` and ``synchronize()``, are timed on its host, which has no reason to wait.

``--device cuda`` takes a GPU for each rank. ``--device simdev`` is the simulated device of the tests
(a checkout of nostall is needed), with a stated time for each operation and bandwidth of its links:
it shows what the order of reductions hides, and says nothing of the speed of a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

from nostall_bench import harness, simulated_device
from nostall_bench.launch import environment

_WARM = 5  # steps that are not counted
_AIM = 1.02  # of the ideal
WAYS = ("nostall", "DistributedDataParallel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench overlap``."""
    parser.add_argument("--device", choices=("simdev", "cuda"), default="simdev")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256, help="of each layer")
    parser.add_argument("--threshold", type=int, default=1 << 19, help="bytes of a group")
    parser.add_argument("--steps", type=int, default=15, help=f"of which {_WARM} are not counted")
    parser.add_argument("--operation-ms", type=float, default=20, help="simdev: of each operation")
    parser.add_argument("--bandwidth", type=float, default=4, help="simdev: of reductions, MB/s")
    parser.add_argument(
        "--late-ms", type=float, nargs="+", default=(0.0, 100.0), help="of one rank in each step"
    )
    parser.add_argument("--ways", nargs="+", help="some of those measured: parts of their names")
    harness.add_repeats(parser, 3)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table."""
    ways = harness.matching(WAYS, arguments.ways)
    runs: dict[tuple[str, float], list[dict[str, float]]] = {
        (way, late): [] for late in arguments.late_ms for way in ways
    }
    for way in harness.turns(ways, arguments.repeats):
        with tempfile.TemporaryDirectory(prefix="nostall-overlap-") as place:
            settings = {
                **{key: vars(arguments)[key] for key in _KEYS},
                "way": way,
                "store": f"{place}/store",
                "job": f"overlap-{os.getpid()}-{time.monotonic_ns()}",
            }
            ranked = [{**settings, "rank": rank} for rank in range(2)]
            found = harness.children("nostall_bench.overlap", ranked, timeout=300)
            for late, steps in zip(arguments.late_ms, zip(*found, strict=True), strict=True):
                runs[way, late].append(max(steps, key=lambda each: each["of_ideal"]))
    table = harness.table(
        f"gradients on {arguments.device}, two ranks",
        *("", "one rank late by", "backward and reductions", "of the ideal", "backward alone"),
        *("one after the other", "calls of the other rank"),
    )
    for (way, late), each in runs.items():
        table.add_row(
            way,
            f"{late:g} ms",
            harness.spread((r["step"] for r in each), "{:.1f} ms"),
            harness.spread((r["of_ideal"] for r in each), "{:.4f}"),
            harness.spread((r["backward"] for r in each), "{:.1f} ms"),
            harness.spread((r["in_turn"] for r in each), "{:.1f} ms"),
            harness.spread((r["calls"] for r in each), "{:.1f} ms"),
        )
    harness.console().print(table)
    for (way, late), each in runs.items():
        if way == "nostall":
            ratios = [r["of_ideal"] for r in each]
            words = f"gradients of nostall within 2 % of the ideal, one rank late by {late:g} ms"
            words += f": {harness.spread(ratios, '{:.4f}')} times it"
            harness.verdict(statistics.median(ratios) <= _AIM, words)
    rows = [{"way": way, "late_ms": late, "runs": each} for (way, late), each in runs.items()]
    harness.write(arguments.json, rows=rows)
    return 0


_KEYS = ("device", "layers", "width", "threshold", "steps", "operation_ms", "bandwidth", "late_ms")


def _work(settings: dict[str, Any]) -> list[dict[str, float]]:
    """One rank; medians for each delay."""
    os.environ.update(environment(settings["rank"], 2, settings["job"]))
    import torch
    import torch.distributed as dist

    device = torch.device(settings["device"], 0) if settings["device"] == "cuda" else None
    if device is None:
        simdev = simulated_device.load()
        groups = importlib.import_module("simdev.group").SimGloo.made
        backend, device = "cpu:gloo,simdev:simgloo", torch.device("simdev", 0)
    else:
        groups = []
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", settings["rank"])
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = dist.FileStore(settings["store"], 2)
    dist.init_process_group(backend, store=store, rank=settings["rank"], world_size=2)
    torch.manual_seed(0)
    width = settings["width"]
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(settings["layers"]))
    ).to(device)
    train = _Train(settings, model, device)
    data = torch.randn(8, width).to(device)
    for step in range(_WARM):
        if step == 3 and settings["device"] == "simdev":  # every stream has been made
            for group in groups:
                for stream in group.streams.values():
                    simdev.speed(0, settings["bandwidth"] * 1e6, stream)
            simdev.speed(settings["operation_ms"] / 1e3)
        if step == 4:
            train.measure_alone()
        train.step(data, 0)
    medians = []
    for late in settings["late_ms"]:
        steps = [
            train.step(data, late if settings["rank"] == step % 2 else 0)
            for step in range(settings["steps"] - _WARM)
        ]
        medians.append({key: statistics.median(step[key] for step in steps) for key in steps[0]})
    # Gloo's threads would meet the other rank's closed connections, or a Python that has ended.
    dist.barrier()
    del train
    dist.destroy_process_group()
    groups.clear()
    gc.collect()
    return medians


class _Train:
    def __init__(self, settings: dict[str, Any], model: Any, device: Any) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import nostall.torch

        self.device, self.model = device, model
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.ready: list[tuple[Any, int]] = []  # an event for each group, and its bytes
        self.alone: dict[int, float] = {}  # milliseconds by bytes
        if settings["way"] == "nostall":
            options = nostall.torch.SyncOptions(threshold=settings["threshold"])
            self.optimizer = nostall.torch.DistributedOptimizer(
                self.optimizer, model.named_parameters(), options
            )
        else:
            self.model = DistributedDataParallel(
                model,
                bucket_cap_mb=settings["threshold"] / (1 << 20),
                gradient_as_bucket_view=True,
                static_graph=True,
            )
            # torch compares annotations with its own classes, and takes what has none.
            self.model.register_comm_hook(self, lambda train, bucket: _observed(train, bucket))

    def mark(self) -> Any:
        """An event of the stream that computes."""
        import torch

        event = torch.Event(device=self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def step(self, data: Any, late: float) -> dict[str, float]:
        """In milliseconds; `late` is what this rank waits before its backward pass."""
        import torch

        from nostall.torch import _device_gradients

        reduce = _device_gradients.CollectiveSync._reduce

        def watched(sync: Any, turn: Any) -> None:
            self.ready.append((self.mark(), turn.buffer.nbytes))
            reduce(sync, turn)

        self.ready = []
        loss = self.model(data).square().mean()
        torch.accelerator.synchronize(self.device)
        torch.distributed.barrier()
        time.sleep(late / 1e3)
        begin = self.mark()
        begin.synchronize()
        # The clock that both ranks have.
        began = time.monotonic() * 1e3
        with mock.patch.object(_device_gradients.CollectiveSync, "_reduce", watched):
            loss.backward()
            backward = self.mark()  # for DistributedDataParallel this is after its waits
            if hasattr(self.optimizer, "synchronize"):
                self.optimizer.synchronize()
        calls = time.monotonic() * 1e3 - began
        end = self.mark()
        end.synchronize()
        if hasattr(self.optimizer, "synchronize"):
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()
            backward = self.ready[-1][0]
        self.optimizer.zero_grad()
        mine = {
            "began": began,
            "ready": [began + begin.elapsed_time(event) for event, _ in self.ready],
            "computed": began + begin.elapsed_time(backward),
            "ended": began + begin.elapsed_time(end),
            "calls": calls,
        }
        ranks: list[Any] = [None, None]
        torch.distributed.all_gather_object(ranks, mine)
        return self._against_the_ideal(ranks)

    def _against_the_ideal(self, ranks: list[dict[str, Any]]) -> dict[str, float]:
        began, computed, ended = (
            max(rank[key] for rank in ranks) for key in ("began", "computed", "ended")
        )
        alone = [self.alone.get(size, 0.0) for _, size in self.ready]
        done = 0.0
        for ready, takes in zip(
            zip(*(rank["ready"] for rank in ranks), strict=True), alone, strict=True
        ):
            done = max(done, *ready) + takes
        early = min(ranks, key=lambda rank: rank["began"])
        return {
            "step": ended - began,
            "backward": computed - began,
            "of_ideal": (ended - began) / (max(done, computed) - began),
            "in_turn": computed - began + sum(alone),
            "calls": early["calls"],
        }

    def measure_alone(self) -> None:
        """The milliseconds of each group's allreduce when nothing else goes on."""
        import torch
        import torch.distributed as dist

        group = None
        if hasattr(self.optimizer, "gradient_sync"):
            group = self.optimizer.gradient_sync._group
        for size in sorted({size for _, size in self.ready}):
            memory = torch.zeros(size // 4, device=self.device)
            found = []
            for _ in range(5):
                torch.accelerator.synchronize(self.device)
                dist.barrier()
                begin = self.mark()
                dist.all_reduce(memory, group=group, async_op=True).wait()
                end = self.mark()
                end.synchronize()
                found.append(begin.elapsed_time(end))
            self.alone[size] = statistics.median(found)


def _observed(train: _Train, bucket: Any) -> Any:
    import torch.distributed as dist

    buffer = bucket.buffer()
    train.ready.append((train.mark(), buffer.nbytes))
    buffer.mul_(0.5)
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


if __name__ == "__main__":
    harness.answer(_work)
