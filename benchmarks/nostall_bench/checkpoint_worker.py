"""One training of ``nostall bench checkpoint``: python -m nostall_bench.checkpoint_worker SETTINGS.

Prints one line of JSON: the time of every step and of every save's call, and when all was durable.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nostall_bench import harness

# A save returns what is to be awaited before the state is safe, or None.
Save = Callable[[dict[str, Any], int], Any]


def tensors(total: int) -> dict[str, Any]:
    """`total` bytes of float32 in 75 tensors, a few of them most of it, as in AlexNet."""
    import torch

    weights = np.geomspace(1, 20_000, 75)
    counts = (weights / weights.sum() * total / 4).astype(int)
    return {f"layer{i}.weight": torch.full((int(n),), float(i)) for i, n in enumerate(counts)}


def step(state: dict[str, Any]) -> None:
    """Reads and writes all of the state, as an optimizer does, and computes a little."""
    import torch

    with torch.no_grad():
        for tensor in state.values():
            tensor.mul_(0.999).add_(1e-3)


def _sync(path: Path) -> None:
    for name in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


class Method:
    """How one way of checkpointing saves; `finish` returns once all is durable. This saves nothing."""

    def __init__(self, fast: Path, slow: Path, target: str) -> None:
        self.fast, self.slow = fast, slow
        self.directory = fast if target == "fast" else slow

    def save(self, state: dict[str, Any], number: int) -> None:
        """Saves the state as checkpoint `number`."""

    def before_update(self) -> None:
        """Called before every step changes the state."""

    def finish(self) -> None:
        """Until everything is durable."""

    def path(self, number: int) -> Path:
        """Where a checkpoint goes. A thread removes the one before the last, as nostall's does."""
        old = self.directory / f"checkpoint-{number - 2}"
        threading.Thread(target=_remove, args=(old,)).start()
        return self.directory / f"checkpoint-{number}"


class TorchSave(Method):
    """torch.save and fsync, at once."""

    def save(self, state: dict[str, Any], number: int) -> None:
        import torch

        path = self.path(number)
        torch.save(state, path)
        _sync(path)


class TorchSaveBurst(Method):
    """The burst buffer of [Chien 2018]: torch.save and fsync to fast storage, `cp` to the slow one."""

    def __init__(self, fast: Path, slow: Path, target: str) -> None:
        super().__init__(fast, slow, "fast")
        self._copies: list[subprocess.Popen[bytes]] = []

    def save(self, state: dict[str, Any], number: int) -> None:
        import torch

        path = self.path(number)
        torch.save(state, path)
        _sync(path)
        self._copies.append(subprocess.Popen(["cp", str(path), str(self.slow / "copy")]))

    def finish(self) -> None:
        for copy in self._copies:
            copy.wait()
        os.sync()


class Safetensors(Method):
    """safetensors' save_file and fsync."""

    def save(self, state: dict[str, Any], number: int) -> None:
        from safetensors.torch import save_file

        path = self.path(number)
        save_file(state, path)
        _sync(path)


class Dcp(Method):
    """torch.distributed.checkpoint.save; `threads` of its writer."""

    def __init__(self, fast: Path, slow: Path, target: str) -> None:
        super().__init__(fast, slow, target)
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{slow}/rendezvous-{os.getpid()}", rank=0, world_size=1
        )

    def save(self, state: dict[str, Any], number: int) -> None:
        import torch.distributed.checkpoint as dcp

        path = self.path(number)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
        _sync(path)


def _complete(running: Any) -> None:
    """Until what async_save has returned is written, if anything was."""
    if running is not None:
        getattr(running, "upload_completion", running).result()


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save as it is by default."""

    def __init__(self, fast: Path, slow: Path, target: str) -> None:
        super().__init__(fast, slow, target)
        self._running: Any = None

    def _start(self, state: dict[str, Any], path: Path) -> Any:
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(state, checkpoint_id=path)

    def save(self, state: dict[str, Any], number: int) -> None:
        _complete(self._running)
        self._running = self._start(state, self.path(number))

    def finish(self) -> None:
        _complete(self._running)


class DcpBurst(DcpAsync):
    """async_save to fast storage; `cp` copies to the slow one behind, once all is written.

    Two checkpoints stay on each, as with the others.
    """

    def __init__(self, fast: Path, slow: Path, target: str) -> None:
        super().__init__(fast, slow, target)
        self._copies: dict[Path, Future[Any]] = {}
        self._pool = ThreadPoolExecutor()

    def _start(self, state: dict[str, Any], path: Path) -> Any:
        running = super()._start(state, path)
        self._copies[path] = self._pool.submit(self._copy, running, path, self._old)
        return running

    def _copy(self, running: Any, path: Path, old: str) -> None:
        _complete(running)
        subprocess.run(["cp", "-r", path, self.slow], check=True)
        shutil.rmtree(self.slow / old, ignore_errors=True)  # the first two replace none

    def path(self, number: int) -> Path:
        self._old = f"checkpoint-{number - 2}"
        copy = self._copies.pop(self.directory / self._old, None)
        if copy is not None:
            copy.result()  # what it reads is removed now, and what it wrote after the next copy
        return super().path(number)

    def finish(self) -> None:
        super().finish()
        for copy in self._copies.values():
            copy.result()
        os.sync()


class DcpReused(DcpAsync):
    """async_save with a stager that reuses shared memory."""

    def __init__(self, fast: Path, slow: Path, target: str) -> None:
        super().__init__(fast, slow, target)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def _start(self, state: dict[str, Any], path: Path) -> Any:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path)
        return dcp.async_save(state, storage_writer=writer, async_stager=self._stager)


class Nostall(Method):
    """nostall.Checkpointer; `target` names tiers and level."""

    def __init__(self, fast: Path, slow: Path, target: str) -> None:
        super().__init__(fast, slow, target)
        import nostall

        self._window = target == "window"
        tiers: dict[str, Any] = {
            "slow": {"durable": slow},
            "window": {"durable": slow},
            "fast": {"fast": fast},
            "burst": {"fast": fast, "durable": slow},
            "burst-fast": {"fast": fast, "durable": slow},
        }[target]
        level: Any = "fast" if target in ("fast", "burst-fast") else "memory"
        self._checkpointer = nostall.Checkpointer(
            **tiers, keep=2, level=level, rank=0, world_size=1
        )

    def prepare(self, state: dict[str, Any]) -> None:
        self._checkpointer.prepare(state)

    def save(self, state: dict[str, Any], number: int) -> None:
        self._checkpointer.save(state, number, window=self._window)

    def before_update(self) -> None:
        self._checkpointer.before_update()

    def finish(self) -> None:
        self._checkpointer.wait()


METHODS: dict[str, tuple[type[Method], str]] = {
    "none": (Method, "slow"),
    "torch.save+fsync, slow": (TorchSave, "slow"),
    "torch.save+fsync, fast": (TorchSave, "fast"),
    "torch.save+fsync, fast, cp": (TorchSaveBurst, "fast"),
    "safetensors+fsync, slow": (Safetensors, "slow"),
    "DCP save, slow": (Dcp, "slow"),
    "DCP async_save, slow": (DcpAsync, "slow"),
    "DCP async_save reused stager, slow": (DcpReused, "slow"),
    "DCP async_save, fast, cp": (DcpBurst, "fast"),
    "nostall memory, slow": (Nostall, "slow"),
    "nostall window, slow": (Nostall, "window"),
    "nostall fast, fast": (Nostall, "fast"),
    "nostall memory, burst buffer": (Nostall, "burst"),
    "nostall fast, burst buffer": (Nostall, "burst-fast"),
}


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains; the numbers."""
    import torch

    torch.set_num_threads(settings["threads"])
    wait = _compute if settings["busy"] else (lambda _, seconds: time.sleep(seconds))
    made, target = METHODS[settings["method"]]
    fast, slow = Path(settings["fast"]), Path(settings["slow"])
    state = tensors(settings["bytes"])
    method = made(fast, slow, target)
    if isinstance(method, Nostall):
        method.prepare(state)
    # A first save finds memory, imports and starts processes, once in a training.
    method.save(state, 0)
    method.finish()
    copy = np.empty(settings["bytes"] // 4, np.float32)
    largest = state["layer74.weight"].numpy()
    for _ in range(3):
        step(state)
        began = time.perf_counter()
        np.copyto(copy[: largest.size], largest)
        memcpy = (time.perf_counter() - began) * settings["bytes"] / largest.nbytes
    quiet = []
    cpu = _cpu_seconds()
    for _ in range(max(1, settings["every"] // 2)):
        began = time.perf_counter()
        wait(state, settings["compute"])
        step(state)
        quiet.append(time.perf_counter() - began)
    cpu_step = (_cpu_seconds() - cpu) / len(quiet)
    cpu = _cpu_seconds()
    steps, calls = [], []
    origin = time.time()
    for i in range(settings["iterations"]):
        began = time.perf_counter()
        wait(state, settings["compute"])
        method.before_update()
        step(state)
        steps.append(time.perf_counter() - began)
        if (i + 1) % settings["every"] == 0 and settings["method"] != "none":
            began = time.perf_counter()
            method.save(state, 1 + i // settings["every"])
            calls.append(time.perf_counter() - began)
    ended = time.time()
    method.finish()
    extra_cpu = _cpu_seconds() - cpu - cpu_step * settings["iterations"]
    return {
        "cpu": extra_cpu / max(1, len(calls)),
        "origin": origin,
        "train_seconds": ended - origin,
        "durable_seconds": time.time() - origin,
        "steps": steps,
        "calls": calls,
        "quiet": statistics.median(quiet),
        "memcpy": memcpy,
    }


def _cpu_seconds() -> float:
    """Of this process, all threads, and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _compute(state: dict[str, Any], seconds: float) -> None:
    """Forward and backward pass on the processor, for `seconds`."""
    import torch

    end = time.perf_counter() + seconds
    weight = state["layer70.weight"][: 512 * 512].reshape(512, 512)
    x = torch.zeros(256, 512)
    while time.perf_counter() < end:
        x = x @ weight * 0.0


if __name__ == "__main__":
    harness.answer(work)
    os._exit(0)
