"""Gloo's connections between the ranks of a group, made again where making them fails.

Gloo connects every rank with every other when it is made. One refused connection makes it fail: on
that rank at once, on the ranks that wait for it after a timeout.
"""

from __future__ import annotations

import inspect
import logging
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from nostall.errors import PeerError, UsageError

_log = logging.getLogger("nostall")
_ATTEMPTS = 3
# All ranks connect at the same time; a longer wait means that one of them failed.
_LIMIT = timedelta(seconds=30)
# No message uses one of the last tags.
_HANG_UP_TAG = 2**31


def connect(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """torch's ProcessGroupGloo of `size` ranks, all of which call this with the same store.

    `timeout` is that of its operations. Raises PeerError, on all ranks, if three attempts failed,
    or if one died meanwhile.
    """
    if size == 1:
        return dist.ProcessGroupGloo(HashStore(), 0, 1, timeout)
    for attempt in range(1, _ATTEMPTS + 1):
        among = PrefixStore(f"attempt {attempt}", store)
        made, why = _try(among, rank, size, timeout)
        # The rank that began last ends one limit later; the first one has waited for one limit already.
        failure = _agree(among, rank, size, why, 2 * _limit(timeout))
        if not failure:
            return made
        _log.warning("connecting over Gloo failed (%s); attempt %d", failure, attempt)
    raise PeerError(
        f"{failure}, {_ATTEMPTS} times; check the host's name and firewall, or name the network "
        "interface in GLOO_SOCKET_IFNAME"
    )


def _forwarded(name: str) -> Any:
    if isinstance(getattr(dist.ProcessGroupGloo, name), property):
        return property(lambda self: getattr(self.backend, name))

    def call(self: Registered, *arguments: Any, **named: Any) -> Any:
        return getattr(self.backend, name)(*arguments, **named)

    return call


class Registered(torch._C._distributed_c10d.Backend):  # type: ignore[misc]
    """Stands in a group for the backend of a device, until that backend is dropped.

    Torch drops a registered backend only with its group. A reference to the group, such as
    DistributedDataParallel holds, would keep Gloo's threads.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__(backend.rank(), backend.size())
        self._backend = backend

    @property
    def backend(self) -> Any:
        if self._backend is None:
            raise UsageError("the process group was destroyed; make a new one")
        return self._backend

    def drop(self) -> None:
        self._backend = None

    def getBackendName(self) -> str:
        return str(self.backend.name())


def registered(backend: Any) -> Any:
    """What a group registers for the backend; itself where this torch's Backend has no constructor."""
    try:
        return Registered(backend)
    except TypeError:
        return backend


# A group that torch made from what Gloo gives here would lack what is ours.
_OF_GLOO_ALONE = {
    "merge",
    "reconfigure",
    "shrink",
    "split",
    "supports_reconfigure",
    "supports_shrinking",
    "supports_splitting",
}
_OWN = {"bound_device_id", "rank", "size", *_OF_GLOO_ALONE}
_BENEATH = {
    "_allgather_base",
    "_get_sequence_number_for_group",
    "_reduce_scatter_base",
    "_set_sequence_number_for_group",
}
for _name, _member in inspect.getmembers(dist.ProcessGroupGloo):
    _is_public = not _name.startswith("_") and _name not in _OWN
    _is_of_instances = not inspect.isclass(_member) and not inspect.isbuiltin(_member)
    if (_is_public or _name in _BENEATH) and _is_of_instances:
        setattr(Registered, _name, _forwarded(_name))


def hang_up(gloo: Any) -> None:
    """Ends the operations under way on this rank, and those that wait for it, with Gloo's errors.

    A message that is cancelled closes the connections of its context to all ranks, at once.
    """
    if gloo.size() == 1:
        return
    # Gloo has a context for each interface that is named, and deals tags out to them in turn.
    contexts = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1
    for tag in range(_HANG_UP_TAG - contexts, _HANG_UP_TAG):
        with suppress(RuntimeError):
            work = gloo.recv([torch.empty(1, device="cpu")], (gloo.rank() + 1) % gloo.size(), tag)
            work.wait(timedelta(milliseconds=1))


def _try(store: Any, rank: int, size: int, timeout: timedelta) -> tuple[Any, str]:
    """The backend, or why there is none."""
    limit = _limit(timeout)
    try:
        made = dist.ProcessGroupGloo(store, rank, size, limit)
    except RuntimeError as error:
        return None, str(error).partition("\n")[0]
    if limit != timeout:
        made.set_timeout(timeout)
    return made, ""


def _limit(timeout: timedelta) -> timedelta:
    """The timeout of connecting. Some releases of torch keep the first timeout of a backend for it."""
    can_change = hasattr(dist.ProcessGroupGloo, "set_timeout")
    return min(timeout, _LIMIT) if can_change else timeout


def _agree(store: Any, rank: int, size: int, why: str, limit: timedelta) -> str:
    """The first failure, the same text on all ranks, or "".

    Raises PeerError if a rank has not reported its result within `limit`.
    """
    # Other ranks may fail only because they waited for the first.
    if why and store.add("failures", 1) == 1:
        store.set("failure", f"rank {rank} of {size} could not connect: {why}")
    store.set(f"rank {rank}", "")
    if store.add("done", 1) == size:
        failed = store.add("failures", 0) > 0
        store.set("verdict", b"!" + bytes(store.get("failure")) if failed else b"-")
    try:
        store.wait(["verdict"], limit)
    except RuntimeError as error:
        silent: list[int] = []
        with suppress(RuntimeError):  # the store itself may be gone
            silent = [r for r in range(size) if not store.check([f"rank {r}"])]
        named = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
        raise PeerError(
            f"rank {rank} of {size} waited {limit.total_seconds():g} s for others to connect over "
            + (
                f"Gloo and never heard of rank {named}: see the errors of these"
                if silent
                else "Gloo: " + str(error).partition("\n")[0]
            )
        ) from error
    return bytes(store.get("verdict")).decode()[1:]
