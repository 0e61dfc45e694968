"""The options of a Checkpointer beside its own arguments; defaults and checks are in base/_table.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from nostall.base._options import check_fields, document, in_force, merged
from nostall.job._world import AllGather


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Rarer options of `Checkpointer`; one that is not given follows nostall.toml, else the default.

    Raises:
        UsageError: an impossible value, with its option.
    """

    keep_fast: int = in_force("checkpoint.keep_fast")
    rate: int | str | None = in_force("checkpoint.rate")
    threads: int | None = in_force("checkpoint.threads")
    timeout: float = in_force("checkpoint.timeout")
    patience: float = in_force("checkpoint.patience")
    priority: Literal["normal", "low", "idle"] = in_force("checkpoint.priority")
    verify: bool = in_force("checkpoint.verify")
    windows: bool = in_force("checkpoint.windows")
    max_failures: int = in_force("checkpoint.max_failures")
    max_unsafe_seconds: float = in_force("checkpoint.max_unsafe_seconds")
    on_failure: Callable[[str], None] | None = in_force("checkpoint.on_failure")
    on_signal: str | None = in_force("checkpoint.on_signal")
    rank: int | None = in_force("checkpoint.rank")
    world_size: int | None = in_force("checkpoint.world_size")
    job: str | None = in_force("checkpoint.job")
    gather: AllGather | None = in_force("checkpoint.gather")

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")


document(CheckpointOptions, "checkpoint")


class CheckpointArguments(TypedDict, total=False):
    """The fields of `CheckpointOptions` as keywords of Checkpointer."""

    keep_fast: int
    rate: int | str | None
    threads: int | None
    timeout: float
    patience: float
    priority: Literal["normal", "low", "idle"]
    verify: bool
    windows: bool
    max_failures: int
    max_unsafe_seconds: float
    on_failure: Callable[[str], None] | None
    on_signal: str | None
    rank: int | None
    world_size: int | None
    job: str | None
    gather: AllGather | None


# What other libraries call them, and what there is here.
_OF_OTHERS = {
    "directory": "pass durable=, or fast= for fast storage",
    "dirpath": "pass durable=, or fast= for fast storage",
    "path": "pass durable=, or fast= for fast storage",
    "max_to_keep": "pass keep=",
    "save_top_k": "pass keep=nostall.Keep(best=...)",
    "every_n_train_steps": "pass every=",
}


def with_arguments(
    given: CheckpointOptions | None, arguments: CheckpointArguments
) -> CheckpointOptions:
    """The options with keyword arguments in their place.

    Raises:
        UsageError: `given` is something else, or there is no such option.
    """
    return merged(CheckpointOptions, given, arguments, "checkpoint", "Checkpointer", _OF_OTHERS)
