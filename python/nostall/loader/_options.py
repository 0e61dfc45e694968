"""What the options of a DataLoader may be: one table of checks, one sentence for each refusal."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from nostall.base._sizes import TierSpec
from nostall.errors import UsageError

# Says what is wrong with a value, None if nothing is.
_Check = Callable[[Any], str | None]


def _integer(least: int, most: int) -> _Check:
    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            return f"must be an integer from {least} to {most}"
        if value < least:
            return f"must be at least {least}"
        return f"must be at most {most}" if value > most else None

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, (bool, np.bool_)) else "must be True or False"


def _one_of(*choices: str) -> _Check:
    names = [f'"{c}"' for c in choices]
    text = f"must be {', '.join(names[:-1])} or {names[-1]}"
    return lambda value: None if isinstance(value, str) and value in choices else text


def _function(value: Any) -> str | None:
    return None if callable(value) else "must be a function"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be text"


def _peers(value: Any) -> str | None:
    return None if callable(value) else _one_of("auto", "on", "off")(value)


def _tiers(value: Any) -> str | None:
    if isinstance(value, str):
        return None
    good = isinstance(value, (list, tuple)) and all(isinstance(t, (str, TierSpec)) for t in value)
    return None if good else 'must be "auto", a tier as text, or a list of tiers'


def _or_none(check: _Check) -> _Check:
    def checked(value: Any) -> str | None:
        wrong = None if value is None else check(value)
        return f"{wrong}, or None" if wrong and not wrong.startswith("must be at ") else wrong

    return checked


CHECKS: dict[str, _Check] = {
    "batch_size": _integer(1, 2**31 - 1),
    "epochs": _or_none(_integer(1, 2**31 - 1)),
    "seed": _integer(0, 2**64 - 1),
    "shuffle": _or_none(_flag),
    "drop_last": _flag,
    "tiers": _tiers,
    "on_error": _one_of("raise", "substitute"),
    "rank": _or_none(_integer(0, 2**31 - 1)),
    "world_size": _or_none(_integer(1, 2**31 - 1)),
    "local_rank": _or_none(_integer(0, 2**31 - 1)),
    "local_world_size": _or_none(_integer(1, 2**31 - 1)),
    "job": _or_none(_text),
    "threads": _or_none(_integer(1, 1024)),
    "output": _or_none(_one_of("torch", "numpy")),
    "dtype": _or_none(_one_of("uint8", "float16", "float32")),
    "layout": _or_none(_one_of("chw", "hwc")),
    "scheme": _one_of("uniform", "whole", "imbalanced"),
    "decode": _or_none(_flag),
    "workers": _one_of("threads", "processes"),
    "collate": _or_none(_function),
    "reader": _one_of("auto", "io_uring", "pread"),
    "peers": _peers,
    "sharing": _one_of("push", "owners-read"),
    "assignment": _one_of("plan", "locality"),
}

# What torch's DataLoader calls them, and what there is here.
_OF_TORCH = {
    "num_workers": "pass threads=, or workers= for Python callables",
    "collate_fn": "pass collate=",
    "sampler": "the order follows from seed=, shuffle= and drop_last=, or pass order=",
    "batch_sampler": "the order follows from seed=, shuffle= and drop_last=, or pass order=",
    "prefetch_factor": "pass staging=, in bytes",
    "pin_memory": "tensors are pinned by themselves where CUDA is there",
    "persistent_workers": "threads stay for all epochs by themselves",
    "generator": "pass seed=",
    "timeout": "a file system that does not answer is the kernel's to time out",
    "worker_init_fn": "threads need none",
    "multiprocessing_context": "processes are always spawned",
}


def check(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks all that the table names, and gives it as plain values of Python.

    Numbers and flags of NumPy are taken, but neither JSON nor ``is False`` knows them.

    Raises:
        UsageError: a value that cannot be meant, with its option.
    """
    plain: dict[str, Any] = {}
    for name, test in CHECKS.items():
        if name not in given:
            continue
        value = given[name]
        if wrong := test(value):
            raise UsageError(f"{name} {wrong}, not {value!r}")
        plain[name] = value.item() if isinstance(value, np.generic) else value
    return plain


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Says what to pass instead of an option that there is not.

    Raises:
        UsageError: `unknown` is not empty.
    """
    for name in unknown:
        near = difflib.get_close_matches(name, list(known), 1)
        hint = _OF_TORCH.get(name) or (f"did you mean {near[0]}=?" if near else "")
        raise UsageError(f"DataLoader has no option {name}" + (f": {hint}" if hint else ""))
