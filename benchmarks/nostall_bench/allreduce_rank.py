"""One rank of ``nostall bench allreduce``; run as a file, with one argument: its settings in JSON.

Needs NumPy and the engine that it measures, so that other environments' MPI can run it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.float32]


class Collectives(Protocol):
    """What is measured. `collective` works in place: sums, for all ranks or for rank 0, or gathers; a
    reduce_scatter has an array for its result, a part of the other."""

    rank: int

    def buffer(self, count: int) -> Buffer: ...
    def barrier(self) -> None: ...
    def prepare(self, buffer: Buffer) -> Any:
        """What collective() takes."""

    def collective(self, prepared: Any) -> None: ...
    def add(self, values: NDArray[np.float64]) -> None:
        """In place, over all ranks."""

    def end(self) -> None:
        """When all is measured."""


class Nostall:
    def __init__(self, settings: dict[str, Any]) -> None:
        from nostall.collective import Communicator

        self.rank = int(settings["rank"])
        options = settings["options"]
        self._communicator: Any = Communicator(
            settings["job"],
            self.rank,
            settings["ranks"],
            order="fixed" if options.get("fixed") else "any",
        )
        self.barrier = self._communicator.barrier
        self._shared = bool(options.get("shared"))
        self._algorithm = options.get("algorithm", "cooperative")
        self._operation = settings["operation"]
        self._ranks = int(settings["ranks"])

    def buffer(self, count: int) -> Buffer:
        if self._shared:
            shared: Buffer = self._communicator.empty(count, np.float32)
            return shared
        return np.empty(count, np.float32)

    def prepare(self, buffer: Buffer) -> Any:
        if self._operation == "allgather":
            return buffer.reshape(self._ranks, -1)[self.rank], buffer
        if self._operation == "reduce_scatter":
            return buffer, self.buffer(buffer.size // self._ranks)
        return buffer

    def collective(self, prepared: Any) -> None:
        if self._operation == "allgather":
            self._communicator.allgather(*prepared)
        elif self._operation == "reduce_scatter":
            self._communicator.reduce_scatter(prepared[0], out=prepared[1])
        elif self._operation == "reduce":
            self._communicator.reduce(prepared, algorithm=self._algorithm)
        else:
            self._communicator.allreduce(prepared, algorithm=self._algorithm)

    def add(self, values: NDArray[np.float64]) -> None:
        self._communicator.allreduce(values)

    def end(self) -> None:
        self._communicator.close()


class Gloo:
    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._distributed: Any = torch.distributed
        self.rank = int(settings["rank"])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._distributed.init_process_group(
            "gloo",
            init_method=f"file://{settings['out']}/gloo-{settings['job']}",
            rank=self.rank,
            world_size=settings["ranks"],
        )
        self.barrier = self._distributed.barrier
        self._operation = settings["operation"]
        self._ranks = int(settings["ranks"])

    def collective(self, prepared: Any) -> None:
        if self._operation == "allgather":
            mine = prepared.view(self._ranks, -1)[self.rank]
            self._distributed.all_gather_into_tensor(prepared, mine)
        elif self._operation == "reduce_scatter":
            self._distributed.reduce_scatter_tensor(*prepared)
        elif self._operation == "reduce":
            self._distributed.reduce(prepared, 0)
        else:
            self._distributed.all_reduce(prepared)

    def add(self, values: NDArray[np.float64]) -> None:
        self._distributed.all_reduce(self._torch.from_numpy(values))

    def buffer(self, count: int) -> Buffer:
        return np.empty(count, np.float32)

    def prepare(self, buffer: Buffer) -> Any:
        tensor = self._torch.from_numpy(buffer)
        if self._operation == "reduce_scatter":
            return self._torch.empty(buffer.size // self._ranks), tensor
        return tensor

    def end(self) -> None:
        # Its threads would meet the others' closed connections, or a Python that has ended.
        self.barrier()
        self._distributed.destroy_process_group()


class DeepSpeed(Gloo):
    """The operator alone; Gloo is there for what the operator cannot do."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        # It makes shared memory of this name, which it never removes.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "nostall", str(settings["job"])
        os.environ["LOCAL_SIZE"] = str(settings["ranks"])
        path = settings["options"]["library"]
        spec = importlib.util.spec_from_file_location("deepspeed_shm_comm", path)
        assert spec is not None and spec.loader is not None
        operator: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(operator)
        if operator.vector_kernel_level() < 1:
            raise RuntimeError("DeepSpeed's sums of float32 need AVX2, which this processor lacks")
        operator.initialize(settings["ranks"], self.rank)
        # Nothing may be reduced before all have the memory of all.
        self._distributed.barrier()
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_nostall_{settings['job']}_{self.rank}"
        Path("/dev/shm", name).unlink()
        self._operate = self._torch.ops.deepspeed.inference_all_reduce_
        # Gloo lets ranks leave a barrier hundreds of microseconds apart.
        nothing = self._torch.zeros(1)
        self.barrier = lambda: self._operate(nothing)

    def collective(self, prepared: Any) -> None:
        self._operate(prepared)


class Mpi:
    def __init__(self, settings: dict[str, Any]) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self.rank = MPI.COMM_WORLD.rank
        self.barrier = MPI.COMM_WORLD.Barrier
        self._operation = settings["operation"]

    def buffer(self, count: int) -> Buffer:
        return np.empty(count, np.float32)

    def prepare(self, buffer: Buffer) -> Any:
        if self._operation == "reduce_scatter":
            return buffer, np.empty(buffer.size // self._mpi.COMM_WORLD.size, np.float32)
        return [buffer, self._mpi.FLOAT]

    def collective(self, prepared: Any) -> None:
        if self._operation == "reduce_scatter":
            self._mpi.COMM_WORLD.Reduce_scatter_block(*prepared)
        elif self._operation == "allgather":
            self._mpi.COMM_WORLD.Allgather(self._mpi.IN_PLACE, prepared)
        elif self._operation == "allreduce":
            self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, prepared)
        elif self.rank == 0:
            self._mpi.COMM_WORLD.Reduce(self._mpi.IN_PLACE, prepared)
        else:
            self._mpi.COMM_WORLD.Reduce(prepared, None)

    def add(self, values: NDArray[np.float64]) -> None:
        self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, values)

    def end(self) -> None:
        pass  # mpi4py ends the MPI at exit


def _compute_until(end: int) -> None:
    while time.monotonic_ns() < end:
        pass


def _alpha_ns(count: int) -> float:
    """A message's way from one rank to another, roughly: one copy and a microsecond."""
    a, b = np.ones(count, np.float32), np.empty(count, np.float32)
    times = []
    for _ in range(5):
        begin = time.monotonic_ns()
        np.copyto(b, a)
        times.append(time.monotonic_ns() - begin)
    return 1000.0 + float(np.median(times))


def _measure(
    engine: Collectives, settings: dict[str, Any], size: int, mif: float
) -> dict[str, Any]:
    """[Mohammadalizadehbakhtevari 2021, listing 4.1 (mif 0) or 4.2]."""
    count = size // 4
    parts = settings["ranks"] if settings["operation"] in ("allgather", "reduce_scatter") else 1
    buffer = engine.buffer(count * parts)
    buffer[:] = 0
    prepared = engine.prepare(buffer)
    alpha = _alpha_ns(count)
    begin = time.monotonic_ns()
    for _ in range(3):
        engine.barrier()
        engine.collective(prepared)
    agreed = np.array([(time.monotonic_ns() - begin) / 3, alpha]) / settings["ranks"]
    engine.add(agreed)
    each, alpha = float(agreed[0]), float(agreed[1])
    late = settings["late_ms"] * 1e6
    per_call = each + mif * alpha + late
    iterations = int(min(max(settings["seconds"] * 1e9 / per_call, 5), settings["most"]))
    for _ in range(iterations // 5):
        engine.barrier()
        engine.collective(prepared)
    # All engines and repeats draw the same delays.
    draws = np.random.default_rng([int(mif), size]).random((iterations, settings["ranks"]))
    arrive = np.empty(iterations, np.int64)
    leave, cpu = arrive.copy(), arrive.copy()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    clock, cpu_clock = time.monotonic_ns, time.process_time_ns
    for i in range(iterations):
        delay = mif * alpha * draws[i, engine.rank]
        engine.barrier()
        if late and i % settings["ranks"] == engine.rank:
            time.sleep(late / 1e9)
        if delay:
            _compute_until(clock() + int(delay))
        used = cpu_clock()
        arrive[i] = clock()
        engine.collective(prepared)
        leave[i] = clock()
        cpu[i] = cpu_clock() - used
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "arrive": arrive,
        "leave": leave,
        "cpu": cpu,
        "switches": after.ru_nvcsw + after.ru_nivcsw - usage.ru_nvcsw - usage.ru_nivcsw,
        "alpha": alpha,
    }


def main(settings: dict[str, Any]) -> None:
    """Measures all sizes and imbalances, writes OUT/RANK.npz."""
    kinds: dict[str, Any]
    kinds = {"nostall": Nostall, "gloo": Gloo, "mpi": Mpi, "deepspeed": DeepSpeed}
    engine: Collectives = kinds[settings["kind"]](settings)
    results: dict[str, Any] = {}
    for size in settings["sizes"]:
        for mif in settings["mif"]:
            for key, value in _measure(engine, settings, size, mif).items():
                results[f"{size} {mif:g} {key}"] = value
    np.savez(Path(settings["out"]) / f"{engine.rank}.npz", **results)
    engine.end()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
