"""Tests that run on the simulated accelerator: many in one process, which is not pytest's own.

A process that has imported simdev has no other accelerator, so that pytest's must not. A file of
such tests has functions case_*(), and is both: a test file, and the program that runs them.

    def test_on_the_device() -> None:
        cases.check(__file__)

    if __name__ == "__main__":
        cases.main(globals())
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import prefork
import pytest

LIMIT = 800.0  # seconds for all cases of a file


def names(module: Mapping[str, Any]) -> list[str]:
    return [name for name in module if name.startswith("case_")]


def supported() -> bool:
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


def start(file: str, *arguments: str | os.PathLike[str], **options: Any) -> prefork.Process:
    """The file as a program on the device."""
    if not supported():
        pytest.skip("the simulated accelerator needs torch 2.15")
    pipes = {"stdout": prefork.PIPE, "stderr": prefork.PIPE}
    return prefork.Process([file, *arguments], torch=True, **pipes, **options)


def run(file: str, *arguments: str) -> Any:
    """The same, to its end."""
    with start(file, *arguments) as process:
        out, err = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def check(file: str, ranks: int = 1) -> None:
    """All cases of the file; one test, for test processes that share them out would each run all.

    Several ranks go through the cases side by side; each has the arguments of `join`.
    """
    with tempfile.TemporaryDirectory() as place:
        started = [
            start(file, env=environment(rank, ranks, place) if ranks > 1 else None)
            for rank in range(ranks)
        ]
        try:
            ended = [process.communicate(timeout=LIMIT) for process in started]
        finally:
            for process in started:
                process.kill()
    for rank, (out, err) in enumerate(ended):
        lines = out.splitlines()
        assert lines and lines[-1].startswith("{"), (started[rank].returncode, out, err)
        failures = json.loads(lines[-1])
        assert failures
        failed = {name: text for name, text in failures.items() if text}
        told = "".join(f"\nrank {rank}, {name}: {text}" for name, text in failed.items())
        assert not failed, told


def environment(rank: int, ranks: int, place: str) -> dict[str, str]:
    """Of a rank of a job of its own, on this node."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    job = {"NOSTALL_JOB": Path(place).name, "CASES_STORE": f"{place}/store"}
    return {**os.environ, **job, **{name: str(value) for name, value in numbers.items()}}


def join(backend: str) -> None:
    """In a rank: makes the process group of all ranks."""
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["CASES_STORE"], size)
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=size)


@contextlib.contextmanager
def recorded() -> Iterator[Path]:
    """In a case: a run of this process, recorded on the virtual clock."""
    import simdev

    import nostall

    with tempfile.TemporaryDirectory() as place:
        nostall.trace.start(place, rank=0)
        simdev.virtual_time()
        try:
            yield Path(place)
        finally:
            nostall.trace.stop()


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """What the logger of nostall says meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nostall").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("nostall").removeHandler(handler)


def main(module: Mapping[str, Any]) -> None:
    """Runs the case that is named, else all of them; what a case leaves is not the next one's."""
    import simdev
    import torch

    faulthandler.dump_traceback_later(LIMIT - 50, exit=True)
    if len(sys.argv) > 1:
        module[sys.argv[1]]()
        return
    failures = {}
    for name in names(module):
        print(f"{time.process_time():.1f} s: {name}", file=sys.stderr, flush=True)
        failures[name] = ""
        try:
            module[name]()
        except BaseException:
            failures[name] = traceback.format_exc()
            print(failures[name], file=sys.stderr, flush=True)
        simdev.release_all()
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
        left = simdev.reports()
        if left and not failures[name]:
            failures[name] = "reports that the case did not expect: " + "\n".join(left)
    print(json.dumps(failures), flush=True)
