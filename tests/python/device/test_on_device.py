"""The tests of the host on the simulated device: what fails such a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import prefork
import pytest

TESTS = """
import numpy as np
import pytest
import torch
import nostall
from nostall import transforms as t
from nostall.torch import _device

def loading(image_folder, **more):
    steps = [t.Resize((8, 8)), t.ToTensor()]
    source = nostall.ImageFolder(image_folder, index=False)
    return nostall.DataLoader(source, 8, transforms=steps, tiers=[], **more)

def labels(image_folder, **more):
    with loading(image_folder, **more) as loader:
        return [part for _, part in loader]

def test_on_it(image_folder):
    assert all(isinstance(part, np.ndarray) for part in labels(image_folder, output="numpy"))
    assert {part.device.type for part in labels(image_folder)} == {"cpu"}
    assert {part.device.type for part in labels(image_folder, device="simdev")} == {"simdev"}

def test_not_on_it(image_folder):
    assert nostall.ImageFolder(image_folder, index=False).read(0)

def test_without_a_wait(image_folder, monkeypatch):
    import simdev
    monkeypatch.setattr(_device.Sending, "wait_on", lambda self, stream: None)
    begin = _device.Sending.__init__
    first = iter([True])
    def held(self, to):
        if next(first, False):
            simdev.hold(to.stream)
        begin(self, to)
    monkeypatch.setattr(_device.Sending, "__init__", held)
    with loading(image_folder) as loader:
        running = iter(loader)
        try:
            next(running)  # while no thread has seen it copied
        finally:
            simdev.release_all()

def test_of_a_process(image_folder):
    import prefork
    code = "import sys, torch; sys.path[:0] = sys.argv[1:]; import test_on; test_on.run(sys.argv[2])"
    done = prefork.run(["-c", code, __file__.rpartition("/")[0], str(image_folder)])
    assert done.returncode == 0, done.stderr

def run(image_folder):
    assert len(labels(image_folder)) == 8
"""


@pytest.mark.long
def test_what_fails_a_run(tmp_path: Path) -> None:
    (tmp_path / "test_on.py").write_text(TESTS)
    root = Path(__file__).resolve().parents[3]
    words = ["-c", "import pytest, sys\nsys.exit(pytest.main(sys.argv[1:]))"]
    words += ["-c", str(root / "pyproject.toml"), "--device", "simdev"]
    words += ["-p", "conftest", "-p", "no:cacheprovider", str(tmp_path / "test_on.py")]
    run, nothing = (
        prefork.run(
            [*words, *chosen],
            torch=True,
            timeout=800,
            cwd=root,
            # A run of its own, whose processes are not those of this one.
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        )
        for chosen in ((), ("-k", "test_not_on_it"))
    )
    assert "1 passed" in nothing.stdout and nothing.returncode == 1, nothing.stdout
    assert "3 passed" in run.stdout and "1 failed" in run.stdout, run.stdout + run.stderr
    assert "no event" in run.stdout
    assert "2 tests ran on simdev, 0 stay on the host" in run.stdout
    told = run.stdout.partition(
        "1 had nothing there and are not listed: too many, and the run fails\n"
    )[2]
    assert "::test_not_on_it" in told.splitlines()[0]


def test_every_place_that_orders_a_device_is_known() -> None:
    """Those in mutations.MODULES are taken away, each in turn, by the tests on the device."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))
    import mutations

    others = {
        "nostall.base._device_clock",  # reads times, which order nothing
        "nostall.base._streams",  # asks whether a device is lost
        "nostall.torch._group",  # passes on what torch.distributed asks for
        "nostall.torch._optimizer",  # Horovod's word for the end of a step
    }
    assert mutations.files() == {*mutations.MODULES, *others}
