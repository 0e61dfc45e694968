"""Transforms of albumentations, which are called with the names of what they take."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

from nostall.errors import UsageError
from nostall.fields import Kind
from nostall.loader._context import Context

_HOME = "albumentations."
_TARGETS = ("bboxes", "image", "keypoints", "mask")


class Named:
    """Calls a transform with an image, or with the fields of a sample by their names; can be pickled.

    Transforms keep a generator, from which all threads would draw: each has a transform of its own, and
    its generator is that of the sample.

    Args:
        step: the transform.
        kinds: of the fields; None: it gets an image alone.
    """

    def __init__(self, step: Callable[..., Any], kinds: Mapping[str, Kind] | None) -> None:
        self._step = step
        self._whole = kinds is not None
        self._own = threading.local()
        self.__name__ = type(step).__name__
        targets = sorted(getattr(step, "available_keys", _TARGETS))
        for name, kind in (kinds or {}).items():
            if kind.transformed and name not in targets:
                raise UsageError(
                    f"field {name}: {self.__name__} of albumentations would leave it as it is, for it "
                    f"changes {', '.join(targets)}: rename the field, name it in additional_targets=, "
                    "or leave it out by fields="
                )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _own=threading.local())

    def __call__(self, sample: Any, context: Context) -> Any:
        if not hasattr(self._own, "step"):
            self._own.step = copy.deepcopy(self._step)
        step = self._own.step
        if hasattr(step, "set_random_seed"):  # older ones draw from the module random
            step.set_random_seed(context.python().getrandbits(32))
        return step(**sample) if self._whole else step(image=sample)["image"]


def named(step: Any, kinds: Mapping[str, Kind] | None) -> Any:
    """The step as others are called; those of albumentations refuse a lone sample.

    A subclass with a call of its own takes what its author said.
    """
    caller = next((kind for kind in type(step).__mro__ if "__call__" in vars(kind)), type(step))
    return Named(step, kinds) if f"{caller.__module__}.".startswith(_HOME) else step
