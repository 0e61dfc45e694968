"""The states of the random number generators that a training draws from."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_log = logging.getLogger("nostall")


def rng_state() -> dict[str, Any]:
    """The states of Python's `random`, NumPy's generator and, if imported, torch's on all devices."""
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        name, module = _accelerator(torch)
        if module is not None:
            state[name] = module.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Sets all generators to the states that `rng_state` returned.

    If this machine has fewer devices than the one of `rng_state`, those that it has are set, with a
    warning.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.set_rng_state(state["torch"])
        name, module = _accelerator(torch)
        states = state.get(name, ())
        here = module.device_count() if module is not None else 0
        if states and here:
            module.set_rng_state_all(states[:here])
        if len(states) > here:
            _log.warning(
                "%d of %d saved states of generators are set: this machine has no more %s devices, and "
                "draws otherwise than the training that saved them",
                here,
                len(states),
                name,
            )


def _accelerator(torch: Any) -> tuple[str, Any]:
    """Its name and torch's module for it; None where there is none with generators of its own."""
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    name = found.type if found is not None else "cuda"
    module = getattr(torch, name, None)
    usable = module is not None and hasattr(module, "get_rng_state_all") and module.is_available()
    return name, module if usable else None
