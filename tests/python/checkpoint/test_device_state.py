"""Checkpoints of a state on the simulated device: of one moment, without a wait of the training."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))

import cases
import numpy as np
import pytest
import torch

import nostall
from nostall.checkpoint import _device

COUNT = 5000


@contextmanager
def checkpointer(**more: Any) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as root, nostall.Checkpointer(root, **more) as made:
        yield made


def device_state() -> dict[str, Any]:
    weights = torch.arange(float(COUNT), device="simdev")
    return {
        "weights": weights,
        "tied": weights,
        "half": torch.ones(3, 5, dtype=torch.bfloat16, device="simdev"),
        "turned": torch.arange(6, device="simdev").view(2, 3).t(),
        "empty": torch.empty(0, device="simdev"),
        "second": torch.full((7,), 2.0, device="simdev:1"),
        "host": np.arange(9),
        "step": 3,
    }


def copies(made: Any) -> torch.Stream:
    """The stream of the copies of device 0, which the first save makes."""
    stream: torch.Stream = made._device_streams[torch.device("simdev", 0)]
    return stream


def begun(made: Any) -> torch.Stream:
    made.save({"weights": torch.zeros(1, device="simdev")}, 0)
    made.wait()
    return copies(made)


def case_a_state_comes_back() -> None:
    import simdev

    with checkpointer() as made:
        for level in ("memory", "fast"):
            state = device_state()
            saved = made.save(state, 1, level=level)
            assert saved.copying == "from the device, before its next work"
            made.wait()
            found = made.restore().state
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert found[name].equal(value.cpu()), name
            assert found["host"].tolist() == list(range(9)) and found["step"] == 3
            assert found["tied"].data_ptr() == found["weights"].data_ptr()
            into = {
                key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
            }
            made.restore(into=into)
            assert into["second"].device == torch.device("simdev", 1)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert into[name].cpu().equal(value.cpu()), name
    assert simdev.reports() == []


def training_goes_on() -> list[str]:
    """The state changes at once after save, whose copies are held meanwhile."""
    import simdev

    with checkpointer() as made:
        stream = begun(made)
        weights = torch.zeros(COUNT, device="simdev")
        beside = np.zeros(COUNT)
        weights.add_(1)  # before save: it is in the checkpoint
        with simdev.held(stream):
            made.save({"weights": weights, "host": beside}, 1)
            weights.add_(1)
            beside += 1
            assert not stream.query()
        made.wait()
        found = made.restore(1).state
        reports = simdev.reports()
        if not reports:
            assert found["weights"].eq(1).all() and (found["host"] == 0).all()
            assert weights.cpu().eq(2).all()
    return reports


def case_save_returns_while_its_copies_are_held() -> None:
    assert training_goes_on() == []


def case_without_the_wait_for_earlier_work() -> None:
    with mock.patch.object(_device, "follow", lambda side, current: None):
        assert any("no event" in line for line in training_goes_on())


def case_without_the_wait_of_later_work() -> None:
    with mock.patch.object(_device, "hold_back", lambda current, copied: None):
        assert any("no event" in line for line in training_goes_on())


def case_without_the_wait_of_the_writer() -> None:
    with mock.patch.object(_device.DeviceCopies, "await_all", lambda self: None):
        assert any("early" in line for line in training_goes_on())


def dropped_at_once() -> list[str]:
    """A tensor of another stream is dropped, and its memory asked for again, while its copy is held."""
    import simdev

    stream, other = torch.Stream(device="simdev"), torch.Stream(device="simdev")
    copies = _device.DeviceCopies({torch.device("simdev", 0): stream})
    with other:
        weights = torch.ones(COUNT, device="simdev")
    torch.accelerator.current_stream().wait_stream(other)
    with simdev.held(stream):
        host = copies.host(torch, weights)
        copies.enqueue(torch, [])
        del copies, weights
        with other:
            again = torch.zeros(COUNT, device="simdev")
    stream.synchronize()
    if not (reports := simdev.reports()):
        assert host.eq(1).all()
    other.synchronize()
    del again
    return reports


def case_memory_of_a_dropped_tensor_is_not_reused() -> None:
    assert dropped_at_once() == []


def case_without_record_stream() -> None:
    with mock.patch.object(_device, "keep_for", lambda tensor, side: None):
        assert any("no event" in line for line in dropped_at_once())


def case_pinning_refused() -> None:
    import simdev

    simdev.refuse_pinning(True)
    with checkpointer() as made:
        made.save({"weights": torch.ones(1 << 20, device="simdev")}, 1)
        made.wait()
        assert made.restore().state["weights"].eq(1).all()


def case_an_error_in_a_copy() -> None:
    def lost(self: Any) -> None:
        raise RuntimeError("device lost")

    with checkpointer(max_failures=10) as made:
        with (
            mock.patch.object(_device.DeviceCopies, "await_all", lost),
            pytest.raises(
                nostall.errors.IoError, match=r"a copy from the device failed: .*device lost"
            ),
        ):
            made.save(device_state(), 1, level="fast")
        made.save(device_state(), 2, level="fast")
        assert made.restore().manifest.step == 2


def test_of_a_state_on_the_device() -> None:
    cases.check(__file__)


if __name__ == "__main__":
    cases.main(globals())
