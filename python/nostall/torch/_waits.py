"""Records what a training waits for in collectives that other threads make for it.

Those threads record the collectives as "background", for the training computes meanwhile. What it waits
for in the end is recorded here, as "peers".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.futures import Future

from nostall import _native


def give(future: Future[Any], operation: str, value: Callable[[Future[Any]], Any]) -> Future[Any]:
    """``future.then(value)``, for native code that waits for it."""
    wait = Wait.after_backward(operation)

    def end(done: Future[Any]) -> Any:
        wait.end()
        return value(done)

    return future.then(end)


class Wait:
    """A wait for an operation: what is inside a ``with``, or what `after_backward` says."""

    # The last that began its way in a backward pass: operations end in the order of their calls.
    _newest: ClassVar[Wait | None] = None

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._kind = self._began = 0

    @classmethod
    def after_backward(cls, operation: str) -> Wait:
        """A wait as DistributedDataParallel's: from the end of the backward pass under way to `end`.

        Outside of a backward pass it is none. Nor is it at the end of an inner pass, as of a re-entrant
        checkpoint of activations: others compute on, and nothing says whether the training waits.
        """
        wait = cls(operation)
        if _native.trace_on() and torch._C._current_graph_task_id() >= 0:
            cls._newest = wait
            # Also before DistributedDataParallel's own callback, which waits.
            torch.autograd.Variable._execution_engine.queue_callback(wait._begin_if_newest)
        return wait

    def _begin_if_newest(self) -> None:
        # An inner pass is within a node of the outer one.
        if self is Wait._newest and torch._C._current_autograd_node() is None:
            self._begin()

    def _begin(self) -> None:
        if _native.trace_on():
            category = "background" if _native.serves_collectives() else "peers"
            self._kind = _native.trace_kind(category, f"wait for {self._operation}")
            self._began = _native.trace_now()

    def end(self) -> None:
        """From any thread."""
        began, self._began = self._began, 0
        if began:
            _native.trace_record(self._kind, began, _native.trace_now())

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *_: Any) -> None:
        self.end()
