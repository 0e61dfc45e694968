"""The tests of the host, on the simulated device: pytest --device simdev tests/python/loader ...

What a test makes without naming a device lies on the device then, in its process and in those of
prefork:

- loaders send their batches there. The test gets each batch on the host, once all of it was found on
  the device; as NumPy's arrays, or bytes as they are stored, where it asked for these.
- in the rooms of MODELS torch's default device is this one: models, gradients, states. Batches stay
  there.
- arrays that a checkpoint holds are on the device when it is saved.

A test after which the device has a report fails. Tests that stay on the host are listed in
host_only.toml, with the reason, and do not run. The run ends with the number of both, and with the
names of tests that are not listed and had nothing on the device: if they are more than a tenth, it
fails.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import simdev
import torch
import torch.distributed as dist

from nostall.checkpoint import _checkpointer, _device, _landing, _tree
from nostall.loader import _loader, _recipe
from nostall.loader._records import RawBatch
from nostall.torch import _device_gradients
from nostall.torch._device import Sending

NAME = "simdev"
MODELS = ("checkpoint", "sync", "torch")
LIST = Path(__file__).with_name("host_only.toml")
TESTS = Path(__file__).resolve().parents[1] / "python"
# Where a process of prefork notes what it did there, and whether torch's default device is this one.
USED, DEFAULT = "TESTS_ON_DEVICE", "TESTS_DEFAULT_DEVICE"

_used: set[str] = set()


def _note(line: str) -> None:
    with open(os.environ[USED], "a") as file:
        file.write(line + "\n")


def _use(what: str) -> None:
    if what not in _used:
        _used.add(what)
        _note(what)


def _changed(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorates what is called in place of `owner.name`, with that as its first argument."""
    original = getattr(owner, name)

    def change(function: Callable[..., Any]) -> None:
        setattr(owner, name, lambda *args, **named: function(original, *args, **named))

    return change


def _is_default() -> bool:
    return bool(torch.get_default_device().type == NAME)


# ---------------------------------------------------------------------------- loaders


class _Chosen(str):
    """The device of a loader that was given none."""


class _Packed(NamedTuple):
    """What a RawBatch has."""

    data: Any
    offsets: Any
    lengths: Any


def _pack(samples: list[Any]) -> _Packed:
    lengths = np.array([len(sample) for sample in samples], np.uint64)
    offsets = np.cumsum(lengths, dtype=np.uint64) - lengths
    return _Packed(np.concatenate([*samples, np.empty(0, np.uint8)]), offsets, lengths)


class _Back(Sending):
    """Takes a batch that was handed over; of what lies on the device, gives what the test asked for."""

    def __init__(self, numpy: bool) -> None:
        self._numpy = numpy

    def tree(self, value: Any) -> Any:
        if isinstance(value, _Packed):
            return RawBatch(*(self._there(each).cpu().numpy() for each in value))
        if isinstance(value, torch.Tensor):
            there = self._there(value)
            return there.cpu().numpy() if self._numpy else there if _is_default() else there.cpu()
        return super().tree(value)

    def _there(self, value: torch.Tensor) -> torch.Tensor:
        assert value.device.type == NAME, f"a batch has {value.dtype} on {value.device}"
        _use("batches")
        return value

    def array(self, array: Any) -> Any:
        raise AssertionError(f"a batch has an array of NumPy, {array.dtype}")


def _loaders() -> None:
    @_changed(_recipe.Recipe, "__init__")
    def made(
        original: Any, self: Any, dataset: Any, transforms: Any, options: Any, **more: Any
    ) -> None:
        there = dataclasses.replace(options, device=_Chosen(NAME))
        if options.device is not None or options.output == "jax":
            there = options
        original(self, dataset, transforms, there, **more)
        if there is not options and not (self.program or self.stage or self._collate):
            # Bytes as they are stored, which the device takes as what collate= has made of them.
            there = dataclasses.replace(there, collate=_pack)
            original(self, dataset, transforms, there, **more)

    @_changed(_recipe, "place_of")
    def place_of(original: Any, device: Any, output: str) -> Any:
        return original(device, "torch" if isinstance(device, _Chosen) else output)

    @_changed(_loader.DataLoader, "_hand_out")
    def hand_out(original: Any, self: Any, *arguments: Any) -> Any:
        batch, options = original(self, *arguments), self._recipe._options
        if not isinstance(options.device, _Chosen):
            return batch
        return _Back(options.output == "numpy").tree(batch)


# ---------------------------------------------------------------------------- checkpoints


def _checkpoints() -> None:
    @_changed(_tree._Encoder, "_leaf")
    def leaf(original: Any, self: Any, *arguments: Any) -> Any:
        before = len(self.leaves)
        node = original(self, *arguments)
        if len(self.leaves) > before and self._host is not None:
            self.leaves[-1] = _by_the_device(self._host, self.leaves[-1])
        return node

    @_changed(_device.DeviceCopies, "enqueue")
    def enqueue(original: Any, *arguments: Any, **named: Any) -> Any:
        _use("saves")
        return original(*arguments, **named)

    @_changed(_landing._Slabs, "send")
    def send(original: Any, *arguments: Any) -> None:
        _use("restores")
        original(*arguments)

    @_changed(_checkpointer.Checkpointer, "restore")
    def restore(original: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        """What was saved as a tensor comes back to torch's default device, as to the host else."""
        found = original(self, *arguments, **named)
        if found is not None and named.get("into") is None and _is_default():
            there = _on_device(found.state)
            found = dataclasses.replace(found, state=there)
        return found


def _by_the_device(host: Callable[..., Any], leaf: Any) -> Any:
    """The array is on the device from now on, and is copied from there."""
    array = leaf.owner
    if not leaf.nbytes or (isinstance(array, torch.Tensor) and array.is_pinned()):
        return leaf
    if isinstance(array, np.ndarray):
        integers = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}
        array = torch.from_numpy(array.reshape(-1).view(integers.get(array.itemsize, "u1")).copy())
    memory = host(torch, array.to(NAME))
    return dataclasses.replace(leaf, owner=memory, address=memory.data_ptr())


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(NAME)
    if isinstance(value, dict):
        return {key: _on_device(each) for key, each in value.items()}
    return type(value)(map(_on_device, value)) if type(value) in (list, tuple) else value


# ---------------------------------------------------------------------------- gradients and models


def _gradients() -> None:
    for owner, name in (
        (_device_gradients, "make"),
        (_device_gradients, "reduces"),
    ):

        @_changed(owner, name)
        def call(original: Any, *arguments: Any) -> Any:
            _use("gradients")
            return original(*arguments)

    @_changed(dist, "init_process_group")
    def init(original: Any, backend: Any = None, *arguments: Any, **named: Any) -> Any:
        if backend == "gloo" and _is_default():
            import simdev.group  # noqa: F401

            backend = f"cpu:gloo,{NAME}:simgloo"
        return original(backend, *arguments, **named)


def _values() -> None:
    """What tests look at comes to the host, and generators have drawn what was enqueued before."""

    @_changed(torch.Tensor, "numpy")
    def numpy(original: Any, self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return original(self.cpu() if self.device.type == NAME else self, *arguments, **named)

    @_changed(torch.Tensor, "__array__")
    def array(original: Any, self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return original(self.cpu() if self.device.type == NAME else self, *arguments, **named)

    process = os.getpid()
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):

        @_changed(torch, name)
        def generator(original: Any, *arguments: Any) -> Any:
            if os.getpid() == process:  # a worker of torch's loader has no device
                torch.accelerator.synchronize()
            return original(*arguments)


def install() -> None:
    """In a process that runs tests, or was started by one."""
    _loaders()
    _checkpoints()
    _gradients()
    _values()


def start() -> None:
    """In a process that a test started: before its program."""
    install()
    process = os.getpid()
    if os.environ.get(DEFAULT):
        torch.set_default_device(NAME)

    @atexit.register
    def end() -> None:
        if os.getpid() == process and _used:
            for line in _reports():
                _note(f"report: {line}")


def _reports() -> list[str]:
    simdev.release_all()
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    return simdev.reports()


# ---------------------------------------------------------------------------- pytest's part


def _file(item: pytest.Item) -> str:
    path = item.path
    return str(path.relative_to(TESTS) if path.is_relative_to(TESTS) else path.name)


def _listed() -> dict[str, str]:
    """By name of a test, of one of its parameters or of a file, why it stays on the host."""
    listed = {}
    for entry in tomllib.loads(LIST.read_text())["stays"]:
        for name in entry["tests"]:
            assert name not in listed, f"{LIST.name} lists {name} twice"
            listed[name] = entry["why"]
    return listed


class Plugin:
    """Of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._place = tempfile.TemporaryDirectory()
        self._file = Path(self._place.name) / "used"
        os.environ[USED] = str(self._file)
        self._left = self._ran = 0
        self._without: list[str] = []  # names of tests that had nothing there
        install()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        listed, found = _listed(), set()
        stay, go = [], []
        for item in items:
            file = _file(item)
            names = {
                file,
                f"{file}::{getattr(item, 'originalname', item.name)}",
                f"{file}::{item.name}",
            }
            found |= names
            (stay if names & listed.keys() else go).append(item)
        files = {name for name in found if "::" not in name}
        gone = [name for name in listed if name.partition("::")[0] in files and name not in found]
        if gone and not any("::" in argument for argument in self._config.args):
            raise pytest.UsageError(f"{LIST.name} lists tests that are not there: {gone}")
        items[:] = go
        self._left = len(stay)
        self._config.hook.pytest_deselected(items=stay)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._file.write_text("")
        _used.clear()
        with contextlib.ExitStack() as room:
            if _file(item).partition("/")[0] in MODELS:
                room.enter_context(mock.patch.dict(os.environ, {DEFAULT: "1"}))
                room.enter_context(torch.device(NAME))
            try:
                return (yield)
            finally:
                _reports()  # of a test that has failed: not the next one's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        self._check_reports()
        item.user_properties.append((NAME, bool(self._file.read_text())))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        result = yield
        self._check_reports()
        return result

    def _check_reports(self) -> None:
        told = [line for line in self._file.read_text().splitlines() if line.startswith("report: ")]
        told += _reports()
        if told:
            pytest.fail("\n".join(told), pytrace=False)

    # What the processes of pytest-xdist have to tell goes to the first.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and (was := dict(report.user_properties).get(NAME)) is not None:
            self._ran += was
            self._without += [] if was else [report.nodeid]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left"] = self._left
        elif self._too_many() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _too_many(self) -> bool:
        return len(self._without) * 9 > self._ran

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left = max(self._left, getattr(node, "workeroutput", {}).get("left", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"{self._ran} tests ran on {NAME}, {self._left} stay on the host ({LIST.name}), "
            f"{len(self._without)} had nothing there and are not listed"
            + (": too many, and the run fails" if self._too_many() else "")
        )
        for name in self._without:
            terminalreporter.write_line(f"  {name}")
