"""Checkpoints of a state on the simulated device: of one moment, without a wait of the training."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))

import cases
import mutations
import numpy as np
import pytest
import torch

import nostall
from nostall.base import _device_clock
from nostall.checkpoint import _device, _landing

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


def window(attached: bool = True, clamps: bool = False) -> tuple[list[str], list[str]]:
    """Saves with `window` while the copies are held; the save's problems, and the device's reports."""
    import simdev

    with checkpointer() as made:
        stream = begun(made)
        weight = torch.nn.Parameter(torch.zeros(COUNT, device="simdev"))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        if attached:
            made.attach(optimizer)
        with simdev.held(stream):
            saved = made.save({"weight": weight, "tied": weight}, 1, window=True)
            (weight * 3).sum().backward()
            if clamps:
                with torch.no_grad():
                    weight.add_(5)
            passed, updated = torch.Event(device="simdev"), torch.Event(device="simdev")
            passed.record()
            if not attached:
                made.before_update()
            optimizer.step()
            updated.record()
            passed.synchronize()  # which ends although the copies are held
        made.wait()
        assert saved.copying == "from the device, before an update"
        reports = simdev.reports()
        if not saved.problems and not reports:
            updated.synchronize()  # the update runs, for the copies have ended
            assert made.restore(1).state["weight"].eq(0).all()
            assert weight.detach().cpu().eq(-3).all()
        made.save({"weight": weight}, 2)  # so that the newest one is safe
        return saved.problems, reports


def case_a_window_holds_the_update_alone() -> None:
    assert window() == window(attached=False) == ([], [])


def case_a_weight_that_changes_in_its_window_is_not_saved() -> None:
    problems, reports = window(clamps=True)
    assert len(problems) == 1 and "weight changed before the update" in problems[0]
    assert any("no event" in line for line in reports)  # as it is


def case_what_no_optimizer_changes_is_waited_for_at_once() -> None:
    """As batch norm's statistics; and so are, from the next save on, weights that changed otherwise."""
    import simdev

    with checkpointer() as made:
        weight = torch.nn.Parameter(torch.zeros(COUNT, device="simdev"))
        mean = torch.zeros(7, device="simdev")
        optimizer = torch.optim.SGD([weight], lr=1.0)
        made.attach(optimizer)
        made._unsteady.add("other")
        other = torch.nn.Parameter(torch.zeros(9, device="simdev"))
        optimizer.add_param_group({"params": [other]})
        for step in range(3):
            made.save({"weight": weight, "mean": mean, "other": other}, step, window=True)
            with torch.no_grad():
                mean.add_(1)
                other.add_(1)
            (weight * 3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            made.wait()
            found = made.restore(step).state
            assert found["weight"].eq(-3 * step).all()
            assert found["mean"].eq(step).all() and found["other"].eq(step).all()
    assert simdev.reports() == []


def case_a_save_is_waited_for_on_the_devices_clock() -> None:
    import simdev

    with cases.recorded(), checkpointer() as made:
        copying, stream = begun(made), torch.accelerator.current_stream()
        weight = torch.nn.Parameter(torch.zeros(COUNT, device="simdev"))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        made.attach(optimizer)
        weight.grad = torch.zeros_like(weight)
        other = torch.zeros(1, device="simdev")
        simdev.speed(0.006, stream=copying)
        for step, window in ((1, False), (2, True)):
            with _device_clock.waiting(torch, stream.device, "input"):
                pass
            made.save({"weight": weight}, step, window=window)
            simdev.speed(0.004)
            simdev.call("compute", other, lambda host: None)
            simdev.speed(0)
            optimizer.step()
            made.wait()
        _device_clock.end_step(torch, stream.device)
        _device_clock.settle()
        waits = _device_clock.waits_of(stream.device)
    # The first is waited for at once, the second, beside which 4 ms are computed, by the update.
    assert waits["checkpoint"] == pytest.approx(0.006 + 0.002)
    assert waits["seconds"] == pytest.approx(0.010 + 0.006)


def several_steps(free: bool = True) -> tuple[list[str], float]:
    """Two saves of what the bus carries in 10 ms, in steps of 4 ms; reports, and what steps waited."""
    import simdev

    with (
        cases.recorded(),
        mock.patch.object(_device, "_PIECE", COUNT * 4 // 5),
        checkpointer() as made,
    ):
        copying, stream = begun(made), torch.accelerator.current_stream()
        weight = torch.nn.Parameter(torch.zeros(COUNT, device="simdev"))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        made.attach(optimizer)
        weight.grad = torch.full_like(weight, -1)
        other, early = torch.zeros(1, device="simdev"), []
        simdev.speed(0.002, stream=copying)
        if not free:
            gc.collect()  # what earlier cases left in cycles would be room for a copy, once freed
            simdev.capacity(torch.accelerator.memory_allocated())
        for first in (0, 3):
            with _device_clock.waiting(torch, stream.device, "input"):
                pass
            with simdev.held(copying):
                saved = made.save({"weight": weight}, first, window=True)
                for _ in range(3):
                    simdev.speed(0.004)
                    simdev.call("compute", other, lambda host: None)
                    simdev.speed(0)
                    optimizer.step()
                    if free:  # of the size of what was set aside
                        early.append(torch.zeros(COUNT // 5, device="simdev"))
            made.wait()
            torch.accelerator.synchronize()  # the window is measured once its update has begun
        simdev.capacity(1 << 30)
        _device_clock.end_step(torch, stream.device)
        _device_clock.settle()
        if not (reports := simdev.reports()):
            assert weight.detach().eq(6).all().item()
            assert all(made.restore(first).state["weight"].eq(first).all() for first in (0, 3))
        words = "the bus carries 0 of 0 MiB before" if free else "no memory for another copy"
        assert words in saved.copying, saved.copying
        return reports, _device_clock.waits_of(stream.device)["checkpoint"]


def case_a_copy_takes_several_steps() -> None:
    """The first update waits for 6 ms; the second, whose window is known to be short, not at all."""
    assert several_steps() == ([], pytest.approx(0.006))


def case_without_memory_for_a_copy_on_the_device() -> None:
    assert several_steps(free=False) == ([], pytest.approx(0.012))

    def refused(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("none")

    with mock.patch.object(_device, "set_aside", refused):
        assert several_steps() == ([], pytest.approx(0.012))


def case_without_an_update_the_writer_copies_the_rest() -> None:
    import simdev

    with checkpointer() as made, mock.patch.object(_device, "_PIECE", COUNT * 4 // 5):
        stream = begun(made)
        pace = made._device_paces[stream.device] = _device.Pace()
        pace.rate, pace.window = 1e4, 1.0  # 9 of 20 kB
        weight = torch.nn.Parameter(torch.ones(COUNT, device="simdev"))
        saved = made.save({"weight": weight}, 1, window=True)
        saved.wait("fast")
        with torch.no_grad():
            made.before_update()
            weight.add_(1)
        assert made.restore().state["weight"].eq(1).all()
    assert simdev.reports() == []


def case_a_pace_that_was_found_slow_once_is_measured_again() -> None:
    import simdev

    with cases.recorded(), checkpointer() as made:
        stream = begun(made)
        pace = made._device_paces[stream.device] = _device.Pace()
        pace.rate, pace.window = 1.0, 1.0
        weight = torch.nn.Parameter(torch.ones(COUNT, device="simdev"))
        simdev.speed(0.002, stream=stream)
        for step in (1, 2):
            made.save({"weight": weight}, step, window=True)
            made.before_update()
            made.wait()
            torch.accelerator.synchronize()
        assert pace.rate == pytest.approx(weight.nbytes / 0.002)


def case_an_update_before_its_copies_begin() -> None:
    assert _device.choose_early(100 << 20, 1e9, -0.05, 1 << 40) == (
        0,
        "the bus carries 0 of 100 MiB before the update",
    )


def long_state() -> dict[str, Any]:
    """Of several blocks, on two devices and the host."""
    return {
        "first": torch.arange(6 << 20, device="simdev") % 1000,
        "host": np.arange(3 << 20),
        "weights": torch.arange(4.0 * (1 << 20), device="simdev"),
        "second": torch.full((7,), 2.0, device="simdev:1"),
        "bytes": np.arange(9, dtype=np.uint8),
    }


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    make = {np.ndarray: np.zeros_like, torch.Tensor: torch.zeros_like}
    return {name: make[type(value)](value) for name, value in state.items()}


def same(found: dict[str, Any], state: dict[str, Any]) -> bool:
    def host(value: Any) -> Any:
        return value.cpu().numpy() if isinstance(value, torch.Tensor) else value

    return all(np.array_equal(host(found[name]), host(value)) for name, value in state.items())


def restored() -> list[str]:
    """Into tensors that are being made, and used at once, in slabs of a block."""
    import simdev

    with checkpointer() as made, mock.patch.object(_landing, "_SLAB_BLOCKS", 1):
        state = long_state()
        made.save(state, 1, level="fast")
        into = emptied(state)
        found = made.restore(into=into).state
        into["weights"].add_(1)
        if not (reports := simdev.reports()):
            into["weights"].sub_(1)
            assert same(into, state)
            assert found["weights"].data_ptr() == into["weights"].data_ptr()
    return reports


def case_a_state_lands_on_its_devices() -> None:
    assert restored() == []


@contextmanager
def landing_while_held() -> Iterator[Steps]:
    """What a thread that restores does while no copy begins, until the caller lets them begin.

    It is "begin" and "sent" for each slab, "wait" where the thread waits for the copies of one, and
    "end".
    """
    import simdev

    did, sending, awaiting = Steps(), _landing._Slabs.send, _landing.await_copies

    def send(*arguments: Any) -> None:
        did.append("begin")
        sending(*arguments)
        did.append("sent")

    def wait(copied: Any) -> None:
        if copied:
            did.append("wait")
        awaiting(copied)

    with (
        checkpointer() as made,
        mock.patch.object(_landing, "_SLAB_BLOCKS", 1),
        mock.patch.object(_landing._Slabs, "send", send),
        mock.patch.object(_landing, "await_copies", wait),
    ):
        stream = begun(made)
        state = {"weights": torch.arange(6 << 20, device="simdev")}
        made.save(state, 1, level="fast")
        into = emptied(state)

        def restore() -> None:
            made.restore(1, into=into)
            did.append("end")

        thread = threading.Thread(target=restore)
        with simdev.held(stream):
            thread.start()
            yield did
        thread.join()
        assert same(into, state) and did[-1] == "end"


class Steps(list[str]):
    """What a thread did; another one waits until it did one of these."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def append(self, step: str) -> None:
        with self._changed:
            super().append(step)
            self._changed.notify()

    def until(self, *steps: str, limit: float = 100) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: any(step in self for step in steps), limit)


def case_blocks_are_read_while_others_are_copied() -> None:
    with landing_while_held() as did:
        assert did.until("wait", "end")
        # It waits there: nothing follows, unless the wait is none.
        assert not did.until("end", limit=0.2)
        assert did == ["begin", "sent"] * _landing._SLABS + ["wait"]


def case_without_page_locked_memory() -> None:
    with mock.patch.object(_landing, "pinned", lambda *_: None), landing_while_held() as did:
        assert did.until("begin", "end")
        assert not did.until("sent", "end", limit=0.2)
        assert did == ["begin"]


def case_a_state_that_does_not_fit_changes_nothing() -> None:
    with checkpointer() as made:
        state = device_state()
        made.save(state, 1, level="fast")
        into = {**state, "weights": torch.zeros(COUNT, device="simdev"), "second": torch.zeros(8)}
        with pytest.raises(
            nostall.errors.UsageError, match=r"state\['second'\] is of shape \(8,\)"
        ):
            made.restore(into=into)
        assert into["weights"].eq(0).all()


def case_torchs_default_device() -> None:
    import simdev

    from nostall.torch._device import Device

    with torch.device("simdev"), cases.warnings() as said:
        for pins in (True, False):
            simdev.refuse_pinning(not pins)
            with checkpointer() as made:
                made.save({"weights": torch.ones(COUNT)}, 1, level="fast")
                into = {"weights": torch.zeros(COUNT)}
                with mock.patch.object(_landing, "_ways", wraps=_landing._ways) as ways:
                    made.restore(into=into)
                assert ways.called and into["weights"].eq(1).all()
            if pins:
                assert Device(torch.device("simdev:0")).memory(64).nbytes == 64
                assert not said
        assert all("host memory cannot be page-locked" in line for line in said)


def case_objects_that_refuse_a_state_leave_the_rest_as_it_is() -> None:
    with checkpointer() as made:

        def state(width: int, second: bool) -> dict[str, Any]:
            torch.manual_seed(0)
            model = torch.nn.Linear(3, width, bias=second).to("simdev")
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            given = torch.zeros(COUNT, device="simdev")
            return {"nested": [{"model": model}], "optimizer": optimizer, "weights": given}

        saved = state(3, second=True)
        saved["weights"].add_(1)
        made.save(saved, 1, level="fast")
        for into, error in (
            (state(4, second=True), nostall.errors.UsageError),
            (state(3, second=False), nostall.errors.UsageError),
            (
                {**state(3, second=True), "optimizer": state(3, second=False)["optimizer"]},
                ValueError,
            ),
        ):
            with pytest.raises(error):
                made.restore(into=into)
            assert into["weights"].eq(0).all()


def case_restore_in_a_window() -> None:
    with checkpointer() as made:
        for device in ("cpu", "simdev"):
            weight = torch.nn.Parameter(torch.ones(COUNT, device=device))
            made.attach(torch.optim.SGD([weight], lr=1.0))
            made.save({"weight": weight}, 1, level="fast")
            with torch.no_grad():
                weight.add_(1)
            saved = made.save({"weight": weight}, 2, window=True)
            made.restore(1, into={"weight": weight})
            assert made._window is None and weight.eq(1).all()
            made.wait()
            assert saved.problems == []


class Written:
    """It writes to its tensor before it reads what it is given."""

    def __init__(self, value: float = 0.0) -> None:
        self.total = torch.full((COUNT,), value, device="simdev")

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.zero_().add_(state["total"].to("simdev"))


class WrittenModule(torch.nn.Module):
    """The same, in a module's extra state."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((COUNT,), value, device="simdev"))
        self.written = Written(value)

    def get_extra_state(self) -> Any:
        return self.written.state_dict()

    def set_extra_state(self, state: Any) -> None:
        self.written.load_state_dict(state)


class WrittenOptimizer(torch.optim.SGD):
    """The same, in an optimizer with another state."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1, device="simdev"))])
        self.written = Written(value)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.written.total, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.written.load_state_dict({"total": state["slow"]})


def case_objects_that_write_before_they_read() -> None:
    with checkpointer() as made:
        kinds = {"plain": Written, "module": WrittenModule, "optimizer": WrittenOptimizer}
        made.save({name: kind(5.0) for name, kind in kinds.items()}, 1, level="fast")
        into: dict[str, Any] = {name: kind() for name, kind in kinds.items()}
        made.restore(into=into)
        assert into["plain"].total.eq(5).all()
        assert into["module"].weight.eq(5).all() and into["module"].written.total.eq(5).all()
        assert into["optimizer"].written.total.eq(5).all()


def case_objects_whose_state_cannot_be_asked_for() -> None:
    """As that of ZeroRedundancyOptimizer before it is consolidated."""

    def refused(*_: Any) -> Any:
        raise RuntimeError("not consolidated")

    class Sharded(Written):
        state_dict = refused

    with checkpointer() as made:
        model = torch.nn.Linear(3, 3).to("simdev")
        state = {"model": model, "other": Written(5.0), "w": torch.ones(3, device="simdev")}
        made.save(state, 1, level="fast")
        hooked = torch.nn.Linear(3, 3).to("simdev")
        hooked.register_state_dict_pre_hook(refused)
        into = {"model": hooked, "other": Sharded(), "w": torch.zeros(3, device="simdev")}
        with mock.patch.object(_landing, "_ways", wraps=_landing._ways) as ways:
            made.restore(into=into)
        assert len(ways.call_args.args[0]) == 1  # w, and what the objects have goes by the host
        assert hooked.weight.equal(model.weight) and into["other"].total.eq(5).all()


def case_where_the_accelerator_is_missing() -> None:
    """Of a torch that is built for it: no state is asked for."""
    with checkpointer() as made:
        model = torch.nn.Linear(3, 3)
        made.save({"model": model}, 1, level="fast")
        into = {"model": torch.nn.Linear(3, 3)}
        with (
            mock.patch.object(torch.accelerator, "is_available", lambda: False),
            mock.patch.object(
                torch._C, "_accelerator_getAccelerator", lambda: torch.device("simdev")
            ),
            mock.patch.object(torch.nn.Module, "state_dict", side_effect=AssertionError),
        ):
            made.restore(into=into)
        assert into["model"].weight.equal(model.weight)


def case_damage_is_found_before_it_lands() -> None:
    with checkpointer() as made, mock.patch.object(_landing, "_SLAB_BLOCKS", 1):
        state = long_state()
        made.save(state, 1, level="fast")
        into = emptied(state)
        made.save({**state, "weights": state["weights"] + 1}, 2, level="fast")
        (file,) = made.fast.directory(2).glob("*.safetensors")
        with file.open("r+b") as stored:
            stored.seek(-(3 << 20), os.SEEK_END)
            stored.write(b"damage")
        with cases.warnings() as said:
            assert made.restore(into=into).step == 1
        assert any("in them: weights" in line for line in said)
        assert same(into, state)


def case_a_copy_that_the_device_refuses() -> None:
    """The file is read to the host then, and copied from there; it is not taken for damaged."""
    import simdev

    with checkpointer() as made, cases.warnings() as said:
        weights = torch.ones(COUNT, device="simdev")
        made.save({"weights": weights}, 1, level="fast")
        into = {"weights": torch.zeros(COUNT, device="simdev")}
        simdev.fail_after(1)
        assert made.restore(into=into).state["weights"].device.type == "cpu"
        assert into["weights"].eq(1).all()
        (line,) = said
        assert "by way of ordinary memory" in line and "device lost" in line


def case_no_memory_for_a_second_tensor() -> None:
    """Of one that is not contiguous: it is read to the host, and copied from there."""
    import simdev

    with checkpointer() as made, cases.warnings() as said:
        rows, columns = 7, 543210  # more than what other cases may leave
        weights = torch.arange(1.0 * rows * columns, device="simdev").view(rows, columns)
        made.save({"weights": weights.t()}, 1, level="fast")
        into = torch.zeros(rows, columns, device="simdev").t()
        gc.collect()
        torch.accelerator.synchronize()
        simdev.capacity(torch.accelerator.memory_allocated())
        made.restore(into={"weights": into})
        (line,) = said
        assert "by way of ordinary memory" in line and "out of memory" in line
        simdev.capacity(1 << 30)
        assert into.equal(weights.t())


def case_an_error_of_nostall_is_not_the_devices() -> None:
    with checkpointer() as made:
        made.save({"weights": torch.ones(COUNT, device="simdev")}, 1, level="fast")
        stopped = nostall.errors.StoppedError("stopped")
        with (
            mock.patch.object(_landing, "_send", side_effect=stopped),
            pytest.raises(nostall.errors.CorruptionError, match="restored: stopped"),
        ):
            made.restore(into={"weights": torch.zeros(COUNT, device="simdev")})


def case_two_threads_that_save() -> None:
    """Each with a checkpointer of its own, over the same streams."""
    import simdev

    with checkpointer() as first, checkpointer() as second:
        begun(first)
        second._device_streams = first._device_streams
        failed: list[BaseException] = []

        def save(made: Any) -> None:
            try:
                for step in range(1, 20):
                    made.save({"weights": torch.full((COUNT,), step, device="simdev")}, step)
                    current = torch.accelerator.current_stream()
                    assert current == default, (current, default)
            except BaseException as error:
                failed.append(error)

        default = torch.accelerator.current_stream()
        threads = [threading.Thread(target=save, args=(made,)) for made in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        for made in (first, second):
            made.wait()
            assert made.restore(19).state["weights"].eq(19).all()
    assert simdev.reports() == []


def case_generators_and_mixed_precision() -> None:
    """A training goes on with the same bits: dropout, loss scale, optimizer, weights."""
    import simdev

    from nostall.checkpoint import rng_state, set_rng_state

    def make() -> dict[str, Any]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        model = model.to("simdev")
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("simdev")}

    def train(state: dict[str, Any], steps: range) -> list[torch.Tensor]:
        for step in steps:
            state["optimizer"].zero_grad()
            x = torch.full((4, 8), float(step)).to("simdev")
            with torch.autocast("simdev", dtype=torch.bfloat16):
                loss = state["model"](x).square().mean()
            scale = float("inf") if step == 1 else 1.0  # a step that the scaler leaves out
            state["scaler"].scale(loss * scale).backward()
            state["scaler"].step(state["optimizer"])
            state["scaler"].update()
        return [p.detach().cpu().clone() for p in state["model"].parameters()]

    with checkpointer() as made:
        state = make()
        train(state, range(3))
        rng = rng_state()
        assert len(rng["simdev"]) == 2
        made.save({**state, "rng": rng}, 3)
        expected = train(state, range(3, 6))
        made.wait()
        again: dict[str, Any] = {**make(), "rng": None}
        with mock.patch.object(_landing, "_ways", wraps=_landing._ways) as ways:
            made.restore(into=again)
        landed = ways.call_args.args[0]
        assert len(landed) == 3 * len(list(state["model"].parameters()))  # with AdamW's averages
        set_rng_state(again["rng"])
        assert again["scaler"].get_scale() == 2.0**15
        for mine, theirs in zip(train(again, range(3, 6)), expected, strict=True):
            assert mine.equal(theirs)
    assert simdev.reports() == []


def dropped_at_once() -> list[str]:
    """A tensor of another stream is dropped, and its memory asked for again, while its copy is held."""
    import simdev

    stream, other = torch.Stream(device="simdev"), torch.Stream(device="simdev")
    copies = _device.DeviceCopies({torch.device("simdev", 0): stream}, {})
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


def damaged_or_reported() -> list[str]:
    import simdev

    try:
        return restored()
    except nostall.errors.CorruptionError as error:
        return [str(error)]
    finally:
        torch.accelerator.synchronize()
        simdev.reports()


NEEDED = {
    "DeviceCopies.enqueue: follow": (training_goes_on, "no event"),
    "DeviceCopies.enqueue: hold_back": (training_goes_on, "no event"),
    "DeviceCopies._copy: record": (training_goes_on, "no event"),
    "DeviceCopies.await_all: synchronize": (training_goes_on, "early"),
    "DeviceCopies.release: hold_back": (lambda: window()[1], "no event"),
    "DeviceCopies.release: set_aside": (lambda: several_steps()[0], "no event"),
    "DeviceCopies.release: follow_aside": (lambda: several_steps()[0], "no event"),
    "DeviceCopies._copy: keep_for": (dropped_at_once, "no event"),
    "_Slabs.__init__: follow": (restored, "no event"),
    "_Slabs.free: await_copies": (damaged_or_reported, "Bad address"),
    "_Slabs.send: record": (damaged_or_reported, "Bad address"),
    "_Slabs.finish: await_end": (restored, "no event"),
}
MEASURES = "nothing is ordered by it: how fast the bus is, is measured by it"
PACES = (
    "what it waits for is waited for again: an update waits for a piece of the rest, not for all"
)
OTHERS = {
    "Pace.look: query": MEASURES,
    "_moment: record": MEASURES,
    "DeviceCopies._copy_the_rest: synchronize": PACES,
    "DeviceCopies._copy_the_rest: synchronize 2": PACES,
}


def case_without_any_one_wait_or_record_stream() -> None:
    modules = ("nostall.checkpoint._device", "nostall.checkpoint._landing")
    mutations.check(modules, NEEDED, OTHERS)


def case_pinning_refused() -> None:
    import simdev

    simdev.refuse_pinning(True)
    with checkpointer() as made:
        made.save({"weights": torch.ones(1 << 20, device="simdev")}, 1)
        made.wait()
        into = {"weights": torch.zeros(1 << 20, device="simdev")}
        made.restore(into=into)
        assert into["weights"].eq(1).all()


def case_a_lost_device() -> None:
    import simdev

    with checkpointer(max_failures=10) as made:
        weights = torch.ones(COUNT, device="simdev")
        made.save({"weights": weights}, 1)
        made.wait()
        simdev.fail_after(1)
        with pytest.raises(RuntimeError, match="device lost"):
            made.save({"weights": weights}, 2)
        simdev.release_all()
        made.save({"weights": weights}, 3, level="fast")
        assert made.steps().keys() == {1, 3}


def case_a_device_that_is_lost_for_good() -> None:
    """While a save copies: it fails, and what was saved before is there."""
    import simdev

    for window in (False, True):
        newest = pytest.raises(
            nostall.errors.IoError, match="newest checkpoint, of step 2, is safe"
        )
        with cases.warnings() as said, newest, checkpointer(max_failures=10) as made:
            stream = begun(made)
            weight = torch.nn.Parameter(torch.ones(COUNT, device="simdev"))
            made.attach(optimizer := torch.optim.SGD([weight], lr=1.0))
            weight.grad = torch.ones_like(weight)
            made.save({"weight": weight}, 1, level="fast")
            with simdev.held(stream):
                saved = made.save({"weight": weight}, 2, window=window)
                simdev.lose()
            lost = pytest.raises(RuntimeError, match="device lost")
            if window:
                with lost:
                    optimizer.step()
            with pytest.raises(nostall.errors.IoError, match=r"copy from the device .*device lost"):
                saved.wait("fast")
            with lost:
                made.save({"weight": weight}, 3)
            with lost:
                made.restore(into={"weight": weight})
            # Another process, or the host, goes on from there.
            assert made.restore().state["weight"].eq(1).all()
            assert made.steps().keys() == {0, 1}
        assert not any("cannot be page-locked" in line for line in said), said
        simdev.release_all()
    torch.accelerator.synchronize()
    simdev.reports()


def case_a_device_that_is_not_torchs_accelerator() -> None:
    """Its tensors are copied by the call, or refused where there is nothing to copy."""
    with checkpointer() as made:
        with pytest.raises(nostall.errors.UsageError, match=r"state\['w'\] .* on meta"):
            made.save({"w": torch.zeros(3, device="meta")}, 1)
        nothing = mock.patch.object(torch.accelerator, "current_accelerator", lambda: None)
        with nothing:
            saved = made.save({"w": torch.ones(3, device="simdev")}, 2, level="fast")
        assert saved.copying == "in the call"
        assert made.restore().state["w"].eq(1).all()


def case_a_forked_child_is_refused() -> None:
    with checkpointer() as made:
        begun(made)
        child = os.fork()
        if child == 0:
            try:
                made.save({"w": np.zeros(1)}, 2)
            except nostall.errors.UsageError as error:
                os._exit(0 if "forked process" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


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
