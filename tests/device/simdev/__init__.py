"""The simulated accelerator "simdev": torch's PrivateUse1 device, built where it was not yet.

Device memory cannot be touched by the host; streams are threads that tests slow down and hold; what
no event orders, what record_stream was not told of and what the host touches before it has waited
for its copy is reported, whatever the timing. What runs here ran on no GPU.

    import simdev
    with simdev.held(stream):  # its tasks wait
        ...
    assert simdev.reports() == []

A process that imports it has no other accelerator (torch has one PrivateUse1 device, and prefers it).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import build_simdev
import torch

_Act = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p)


def _load() -> ctypes.CDLL:
    torch.utils.rename_privateuse1_backend("simdev")
    library = ctypes.CDLL(str(build_simdev.built()))
    library.simdev_speed.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double]
    library.simdev_capacity.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.simdev_pass_time.argtypes = [ctypes.c_double]
    library.simdev_fail_after.argtypes = [ctypes.c_uint64]
    library.simdev_call.argtypes = [
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t),
        *(_Act, ctypes.c_uint64),
    ]
    library.simdev_report.argtypes = [ctypes.c_char_p]
    library.simdev_reports.restype = ctypes.c_char_p
    return library


_library = _load()
_python = ctypes.PyDLL(_library._name)  # called with the GIL
_with_gil, _inside = _python.simdev_with_gil, _python.simdev_inside
_with_gil.argtypes, _with_gil.restype = [ctypes.c_ulong], ctypes.c_int64
_inside.argtypes, _inside.restype = [ctypes.c_ulong, ctypes.c_int], ctypes.c_int64


class Device(ModuleType):
    """torch.simdev: what torch asks a device's module for."""

    Stream = torch.Stream
    Event = torch.Event

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _lazy_init = staticmethod(lambda: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    device_count = staticmethod(lambda: 2)  # kDevices
    current_device = staticmethod(torch.accelerator.current_device_index)
    set_device = staticmethod(torch.accelerator.set_device_index)
    synchronize = staticmethod(torch.accelerator.synchronize)
    current_stream = staticmethod(torch.accelerator.current_stream)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @staticmethod
    def stream(stream: torch.Stream) -> Any:
        return stream

    @staticmethod
    def device(index: Any) -> Any:
        return torch.accelerator.device_index(getattr(index, "index", index))

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def get_rng_state_all() -> list[torch.Tensor]:
        return [torch.get_rng_state()] * 2

    @staticmethod
    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[-1])

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


torch._register_device_module("simdev", Device("torch.simdev"))
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _number(stream: torch.Stream | None) -> int:
    if stream is None:
        stream = torch.accelerator.current_stream()
    return stream.stream_id or stream.device_index


def hold(stream: torch.Stream | None = None) -> None:
    """The stream begins no further task until it is released."""
    _library.simdev_hold(_number(stream), 1)


def release(stream: torch.Stream | None = None) -> None:
    _library.simdev_hold(_number(stream), 0)


def release_all() -> None:
    """Every stream runs at full speed, every device has its memory, and nothing is refused."""
    _library.simdev_reset()


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    number = _number(stream)
    _library.simdev_hold(number, 1)
    try:
        yield
    finally:
        _library.simdev_hold(number, 0)


def speed(seconds: float, bytes_per_second: float = 0, stream: torch.Stream | None = None) -> None:
    """What each task of the stream takes, and of streams that are made later on its device."""
    _library.simdev_speed(_number(stream), seconds, bytes_per_second)


def capacity(size: int, device: int = 0) -> None:
    """Memory of the device in bytes."""
    _library.simdev_capacity(device, size)


def refuse_pinning(refuse: bool) -> None:
    """Whether new pinned memory is refused, as by `ulimit -l`."""
    _library.simdev_refuse_pinning(int(refuse))


def host_by_thread(each: bool) -> None:
    """Whether what one host thread waited for is unknown to the others."""
    _library.simdev_host_by_thread(int(each))


def virtual_time() -> None:
    """Until `release_all` tasks take no time: events have the time that they would have had.

    Streams and the host begin at 0; the host's time goes on by `pass_time` alone.
    """
    _library.simdev_virtual_time()


def pass_time(seconds: float) -> None:
    """What any thread enqueues from now on begins so much later."""
    _library.simdev_pass_time(seconds)


def fail_after(tasks: int) -> None:
    """The `tasks`-th task from now on is refused: the device is lost."""
    _library.simdev_fail_after(tasks)


def lose() -> None:
    """Until `release_all` every call is refused, and whoever waits is told: the device is lost."""
    _library.simdev_lose()


def call(name: str, tensor: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
    """The current stream calls `act` with a tensor of the host over the memory of a contiguous one."""
    count, kind = tensor.numel(), tensor.dtype

    def on_stream(address: int) -> None:
        try:
            memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
            act(torch.frombuffer(memory, dtype=kind))
        except BaseException as error:
            _library.simdev_report(f"{name} failed: {error}".encode())

    number = next(_numbers)
    _calls[number] = on_stream
    address, size = tensor.data_ptr(), tensor.nbytes
    _library.simdev_call(_number(None), name.encode(), address, size, _act, number)


def watch_gil() -> None:
    """From now on `with_gil` leaves out what extension modules do without the GIL.

    Of the libraries that are loaded.
    """
    _library.simdev_watch_gil()


def with_gil(thread: threading.Thread) -> float:
    """Seconds of processor time for which a living thread has had the GIL."""
    nanoseconds: int = _with_gil(thread.ident)
    return nanoseconds / 1e9


def inside(thread: threading.Thread) -> float:
    """Seconds for which a thread was in functions of the device since `watch_gil`."""
    nanoseconds: int = _inside(thread.ident, 0)
    return nanoseconds / 1e9


def inside_with_gil(thread: threading.Thread) -> float:
    """The part of `with_gil` that was in functions of the device."""
    nanoseconds: int = _inside(thread.ident, 1)
    return nanoseconds / 1e9


_numbers = itertools.count()
_calls: dict[int, Callable[[int], None]] = {}
_act = _Act(lambda number, address: _calls.pop(number)(address))


def reports() -> list[str]:
    """What went wrong since the last call."""
    text: bytes = _library.simdev_reports()
    return text.decode().splitlines()


if sys.platform != "linux":
    raise ImportError("simdev needs memfd_create, which only Linux has")
