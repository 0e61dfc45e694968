"""The options of a DataLoader beside its own arguments; defaults and checks are in base/_table.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from nostall.base._options import check_fields, document, in_force, merged
from nostall.job._world import AllGather


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Rarer options of `DataLoader`; one that is not given follows nostall.toml, else the default.

    Several loaders may share them: where `dtype`, `layout`, `decode` or `workers` does nothing for one,
    it is refused as a keyword alone.

    Raises:
        UsageError: an impossible value, with its option.
    """

    staging: int | str = in_force("loader.staging")
    rank: int | None = in_force("loader.rank")
    world_size: int | None = in_force("loader.world_size")
    local_rank: int | None = in_force("loader.local_rank")
    local_world_size: int | None = in_force("loader.local_world_size")
    job: str | None = in_force("loader.job")
    threads: int | None = in_force("loader.threads")
    output: Literal["torch", "numpy", "jax"] | None = in_force("loader.output")
    device: Any = in_force("loader.device")
    device_ahead: int | str = in_force("loader.device_ahead")
    dtype: Literal["uint8", "float16", "float32"] | None = in_force("loader.dtype")
    layout: Literal["chw", "hwc"] | None = in_force("loader.layout")
    global_batch_size: int | None = in_force("loader.global_batch_size")
    scheme: Literal["uniform", "whole", "imbalanced"] = in_force("loader.scheme")
    steps: int | None = in_force("loader.steps")
    decode: bool | None = in_force("loader.decode")
    workers: Literal["threads", "processes"] = in_force("loader.workers")
    collate: Callable[[list[Any]], Any] | None = in_force("loader.collate")
    fields: Sequence[str] | None = in_force("loader.fields")
    batch: Literal["dict", "tuple"] | None = in_force("loader.batch")
    reader: Literal["auto", "io_uring", "pread"] = in_force("loader.reader")
    peers: Literal["auto", "on", "off"] | AllGather = in_force("loader.peers")
    sharing: Literal["push", "owners-read", "hdmlp"] = in_force("loader.sharing")
    copies: Literal["fixed", "next-use"] = in_force("loader.copies")
    assignment: Literal["plan", "locality"] = in_force("loader.assignment")
    calibration: str | os.PathLike[str] | None = in_force("loader.calibration")

    def __post_init__(self) -> None:
        check_fields(self, "loader")


document(LoaderOptions, "loader")


class LoaderArguments(TypedDict, total=False):
    """The fields of `LoaderOptions` as keywords of DataLoader."""

    staging: int | str
    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    job: str | None
    threads: int | None
    output: Literal["torch", "numpy", "jax"] | None
    device: Any
    device_ahead: int | str
    dtype: Literal["uint8", "float16", "float32"] | None
    layout: Literal["chw", "hwc"] | None
    global_batch_size: int | None
    scheme: Literal["uniform", "whole", "imbalanced"]
    steps: int | None
    decode: bool | None
    workers: Literal["threads", "processes"]
    collate: Callable[[list[Any]], Any] | None
    fields: Sequence[str] | None
    batch: Literal["dict", "tuple"] | None
    reader: Literal["auto", "io_uring", "pread"]
    peers: Literal["auto", "on", "off"] | AllGather
    sharing: Literal["push", "owners-read", "hdmlp"]
    copies: Literal["fixed", "next-use"]
    assignment: Literal["plan", "locality"]
    calibration: str | os.PathLike[str] | None


# What torch's DataLoader and others call them, and what there is here.
_OF_TORCH = {
    "num_workers": "pass threads=, or workers= for Python callables",
    "collate_fn": "pass collate=",
    "sampler": "the order follows from seed=, shuffle= and drop_last=, or pass order=",
    "batch_sampler": "the order follows from seed=, shuffle= and drop_last=, or pass order=",
    "prefetch_factor": "pass staging=, in bytes",
    "pin_memory": "tensors are pinned by themselves where CUDA is there, or pass device=",
    "pin_memory_device": "pass device=",
    "persistent_workers": "threads stay for all epochs by themselves",
    "generator": "pass seed=",
    "timeout": "a file system that does not answer is the kernel's to time out",
    "worker_init_fn": "threads need none",
    "multiprocessing_context": "processes are always spawned",
    "cache": "pass tiers=",
}


def with_arguments(given: LoaderOptions | None, arguments: LoaderArguments) -> LoaderOptions:
    """The options with keyword arguments in their place.

    Raises:
        UsageError: `given` is something else, or there is no such option.
    """
    return merged(LoaderOptions, given, arguments, "loader", "DataLoader", _OF_TORCH)
