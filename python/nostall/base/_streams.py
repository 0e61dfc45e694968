"""Streams and events of torch's accelerator that several threads use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def on_stream(torch: Any, stream: Any) -> Iterator[None]:
    """As `with stream`, which keeps in the stream what to go back to: that is one thread's alone."""
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def raise_if_lost(stream: Any) -> None:
    """A lost device refuses everything, page-locked memory too: this raises its own error."""
    if hasattr(stream, "query"):
        stream.query()


def awaited(torch: Any, device: Any, enable_timing: bool = False) -> Any:
    """An event that a thread of the host waits for.

    It asks for a wait that keeps no core busy. CUDA's events can; torch's, up to 2.15, ignore it.
    """
    return torch.Event(device=device, enable_timing=enable_timing, blocking=True)
