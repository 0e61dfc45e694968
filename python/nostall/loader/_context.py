"""What the random draws of one sample depend on."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import random

    import torch

_ALL = 2**64


@dataclass(frozen=True)
class Context:
    """The sample that a callable is given, and generators that belong to it.

    A callable with a parameter named `context` gets one. Draws from its generators are the same
    whatever thread, process, rank or run makes them, and others in each epoch and for each callable of
    a loader. Every call of a method gives a generator at its beginning.

    Attributes:
        sample: the number of the sample in the data set.
        epoch: the epoch.
        occurrence: how often the epoch had the sample before, where the order repeats samples.
        seed: that of the loader.
        step: which of the loader's callables that take a context gets it, from 0 on.
    """

    sample: int
    epoch: int
    seed: int
    occurrence: int = 0
    step: int = 0

    def numpy(self) -> np.random.Generator:
        """A generator of NumPy."""
        key = np.array([self.seed, self.epoch], np.uint64)
        counter = np.array([0, self.occurrence, self.sample, self.step], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def python(self) -> random.Random:
        """A generator of the module random."""
        import random

        return random.Random(self._number())

    def torch(self) -> torch.Generator:
        """A generator of torch, on the CPU."""
        import torch

        return torch.Generator().manual_seed(self._number())

    def _number(self) -> int:
        return int(self.numpy().integers(_ALL, dtype=np.uint64))

    def seed_all(self) -> None:
        """Sets this process's generators of random, NumPy and torch, which may be imported later."""
        import random

        number = self._number()
        random.seed(number)
        np.random.seed(number & (2**32 - 1))
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(number)
            return
        _later.number = number
        if _later not in sys.meta_path:
            sys.meta_path.insert(0, _later)


class _Later:
    """Sets torch's generator when torch is imported, which callables may do when they are called.

    It stays until then: others may only look whether torch is there.
    """

    number = 0

    def find_spec(self, name: str, *more: Any) -> ModuleSpec | None:
        if name != "torch":
            return None
        # As importlib, which passes over those that cannot find.
        finds = (
            getattr(each, "find_spec", None) for each in list(sys.meta_path) if each is not self
        )
        found = (find(name, *more) for find in finds if find is not None)
        spec: ModuleSpec | None = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def seeded(module: Any) -> None:
                execute(module)
                with contextlib.suppress(ValueError):  # it was imported twice
                    sys.meta_path.remove(self)
                module.manual_seed(self.number)

            spec.loader.exec_module = seeded  # type: ignore[method-assign]
        return spec


_later = _Later()


class SampleTransform(Protocol):
    """A transform of the user's own: a callable with a parameter named `context`.

    It keeps nothing from one call to the next, for the loader's threads call it several at a time, in
    any order; all that is random comes from the context's generators.
    """

    def __call__(self, sample: Any, /, *, context: Context) -> Any:
        """What takes the sample's place."""


def takes_context(function: Callable[..., Any]) -> bool:
    """Whether a callable has a parameter named `context`."""
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a library, without a signature
        return False
