"""Tests that run on the simulated accelerator: many in one process, which is not pytest's own.

A process that has imported simdev has no other accelerator, so that pytest's must not. A file of
such tests has functions case_*(), and is both: a test file, and the program that runs them.

    def test_on_the_device() -> None:
        cases.check(__file__)

    if __name__ == "__main__":
        cases.main(globals())
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import prefork
import pytest

LIMIT = 250.0  # seconds for all cases of a file


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


def check(file: str) -> None:
    """All cases of the file; one test, for test processes that share them out would each run all."""
    done = run(file)
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("{"), (done.returncode, done.stdout, done.stderr)
    failures = json.loads(lines[-1])
    assert failures
    failed = {name: text for name, text in failures.items() if text}
    assert not failed, "".join(f"\n{name}: {text}" for name, text in failed.items())


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
        print(name, file=sys.stderr, flush=True)
        failures[name] = ""
        try:
            module[name]()
        except BaseException:
            failures[name] = traceback.format_exc()
        simdev.release_all()
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
        left = simdev.reports()
        if left and not failures[name]:
            failures[name] = "reports that the case did not expect: " + "\n".join(left)
    print(json.dumps(failures), flush=True)
