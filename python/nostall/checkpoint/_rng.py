"""The states of the random number generators that a training draws from."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


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
    """Sets all generators to the states that `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.set_rng_state(state["torch"])
        name, module = _accelerator(torch)
        if module is not None and name in state:
            module.set_rng_state_all(state[name])


def _accelerator(torch: Any) -> tuple[str, Any]:
    """Its name and torch's module for it; None where there is none with generators of its own."""
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    name = found.type if found is not None else "cuda"
    module = getattr(torch, name, None)
    usable = module is not None and hasattr(module, "get_rng_state_all") and module.is_available()
    return name, module if usable else None
