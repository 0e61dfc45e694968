"""Asynchronous training: parameters on servers, gradients by way of proxies, with bounded staleness.

The parameters, as one flat array, are split among servers, which are ranks too. The ranks of a group
sum their gradients, in shared memory where they share a node; the first of them, their proxy, sends
the sum to the servers and hands out the parameters that come back [Pumma 2020, sec. 8.4.2].
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from nostall.errors import IoError, PeerError, UsageError
from nostall.job import _cluster as cluster
from nostall.job._rendezvous import find_rendezvous
from nostall.job._stream import Listener, connect, machine
from nostall.job._world import AllGather, World, find_world
from nostall.torch._parameter_shard import ENDED, Link, MakeOptimizer, Shard

_PURPOSE = "parameter servers"
# Bytes behind the parameters that a proxy hands out: the servers' clock, or an error.
_NOTE = 4096
_NOTE_LETTERS = _NOTE // 16  # of an error: JSON has up to twelve bytes for each
# Parts of the time limit after which a proxy that waits tells its group so.
_PARTS = 4
# Seconds in which a rank that fails tells the servers why, and in which one whose connection broke
# learns why.
_LAST_WORDS = 1.0
# Seconds of a proxy's silence that end a conversation: a rank may validate for long. What a step waits
# for has a limit of its own. No limit is longer.
_SILENCE = 7 * 86_400.0
_made = itertools.count()


class ParameterServers:
    """Trains asynchronously: `step` gives gradients to the servers, and gets parameters from them.

        servers = nostall.torch.ParameterServers(
            model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), staleness=2)
        for images, labels in loader:
            model.zero_grad()
            criterion(model(images), labels).backward()
            servers.step()
        servers.finish()

    All ranks call the constructor, `step` and `finish`; torch.distributed is initialised, with any
    backend. All begin with rank 0's parameters. Buffers of the model stay each rank's own.

    A group goes in step: its ranks' gradients are summed, and all of them get the same parameters.
    After its step k these have its own updates up to step k - 1, those of all groups up to step
    k - staleness, and later ones as they have come; until they do, the group waits. So one step's
    messages travel while the next is computed. With staleness 0 nothing is late: each optimizer makes
    one step with the mean of all ranks' gradients, as `DistributedOptimizer` does. Otherwise it makes
    one for the gradients of each group as they arrive, their sum divided by the number of all ranks.

    Args:
        model: on the CPU, its parameters of one floating type.
        make_optimizer: makes a torch optimizer for the list of parameters that it is given: on each
            server, its part of the parameters as one flat one. The update of a number must depend on
            that number alone (SGD, Adam; not LARS).
        staleness: steps that a group may be ahead of the slowest.
        groups: "node": the ranks of each node are a group; "flat": each rank is one; or lists of
            ranks, each rank in one of them. A group may span nodes, such as those of a switch.
        servers: the ranks that have a part of the parameters each; all if None.
        timeout: seconds in which no gradient comes while a rank waits for one, or in which a server
            does not answer; above 7 days it is 7 days.

    Attributes:
        optimizer: that of this rank's part, for schedulers; None if it has none.
        groups: the ranks of each group.

    Raises:
        UsageError: an argument that is impossible, or differs among ranks; parameters of several
            types, or not on the CPU; torch.distributed is not initialised.
        PeerError: ranks are missing, or cannot reach each other.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        staleness: int = 1,
        groups: Literal["node", "flat"] | Sequence[Sequence[int]] = "node",
        servers: Sequence[int] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._parameters = _trained(model)
        self._kind = self._parameters[0].dtype
        self._size = sum(p.numel() for p in self._parameters)
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise UsageError(f"staleness={staleness!r} is not a number of steps: give 0 or more")
        if not timeout > 0:
            raise UsageError(f"timeout={timeout!r} is not a number of seconds above 0")
        if math.isinf(timeout):
            raise UsageError(f"timeout={timeout!r}: a rank that died needs a limit; give seconds")
        self._staleness, self._timeout = staleness, min(float(timeout), _SILENCE)
        self._world = world = find_world()
        chosen = _chosen(servers, world.world_size, self._size)
        wanted = _checked(groups, world.world_size)
        self._name = f"parameter servers {next(_made)}"
        self._rounds = itertools.count()
        self._clock, self._is_over, self._failure = 0, False, ""
        self._seen: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._links: list[Link] = []
        self._among: Any = None
        self._free: list[torch.Tensor] = []
        self._sent: deque[tuple[int, torch.Tensor]] = deque()
        joined = self._join({"groups": wanted, "servers": chosen, "staleness": staleness})
        self.groups = _groups(wanted, joined.node_of_rank)
        self._number = next(i for i, g in enumerate(self.groups) if world.rank in g)
        self._group = self.groups[self._number]
        bounds = [self._size * i // len(chosen) for i in range(len(chosen) + 1)]
        parts = {rank: (bounds[i], bounds[i + 1]) for i, rank in enumerate(chosen)}
        self._shard: Shard | None = None
        self._listener: Listener | None = None
        addresses = self._listen(make_optimizer, parts, joined.secret)
        self._among = self._meet()
        # Handed out to the group, with a note behind them.
        self._out = torch.zeros(
            self._size * self._kind.itemsize + _NOTE, dtype=torch.uint8, device="cpu"
        )
        self._flat = self._out[:-_NOTE].view(self._kind)
        self._connect(parts, addresses, joined)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._shard.optimizer if self._shard is not None else None

    # ------------------------------------------------------------------ meeting

    def _allgather(self, mine: str) -> list[str]:
        world = self._world
        if world.world_size == 1:
            return [mine]
        gather = self._find(world)
        return [part.decode() for part in gather(mine.encode())]

    def _find(self, world: World) -> AllGather:
        name = f"{self._name} {next(self._rounds)}"
        gather = find_rendezvous(world.rank, world.world_size, name, timeout=self._timeout)
        if gather is None or not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                f"the {world.world_size} ranks of ParameterServers meet through torch.distributed: "
                "call torch.distributed.init_process_group first"
            )
        return gather

    def _join(self, settings: dict[str, Any]) -> cluster.Cluster:
        shapes = [(tuple(p.shape), str(p.dtype)) for p in self._parameters]
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        settings["model"] = f"{len(shapes)} parameters of {self._size} numbers ({digest})"
        world = self._world
        gather = self._find(world) if world.world_size > 1 else lambda mine: [mine]
        return cluster.join(world, [], gather, settings, alone=True)

    def _listen(
        self, make_optimizer: MakeOptimizer, parts: dict[int, tuple[int, int]], secret: bytes
    ) -> list[Any]:
        """Serves this rank's part. The addresses of the servers, by rank; of other ranks None."""
        several = len(set(self._allgather(machine()))) > 1
        note: dict[str, Any] = {"address": None, "error": ""}
        try:
            if self._world.rank in parts:
                begin, end = parts[self._world.rank]
                self._shard = Shard(
                    end - begin,
                    self._kind,
                    make_optimizer,
                    [group[0] for group in self.groups],
                    workers=self._world.world_size,
                    staleness=self._staleness,
                    timeout=self._timeout,
                )
                self._listener = Listener(self._shard.answer, secret, _SILENCE, several, _PURPOSE)
                note["address"] = self._listener.address
        except Exception as error:  # whatever make_optimizer raises: the other ranks are told
            note["error"] = f"{type(error).__name__}: {error}"
            self._allgather(json.dumps(note))
            raise
        notes = [json.loads(text) for text in self._allgather(json.dumps(note))]
        for rank, theirs in enumerate(notes):
            if theirs["error"]:
                self._close()
                raise PeerError(f"rank {rank} cannot serve its parameters: {theirs['error']}")
        return [theirs["address"] for theirs in notes]

    def _meet(self) -> Any:
        """The process group of this rank's group; None for a group of one."""
        limit = timedelta(seconds=self._timeout)
        mine = None
        for group in self.groups:  # all ranks name all groups, as torch wants it
            if len(group) > 1:
                made = dist.new_group(group, timeout=limit, backend="nostall")
                mine = made if group is self._group else mine
        return mine

    def _connect(
        self, parts: dict[int, tuple[int, int]], addresses: Sequence[Any], joined: cluster.Cluster
    ) -> None:
        """Gets the first parameters, which are rank 0's, when all proxies have their connections.

        A server that fails before is told as what it is, not as one that does not answer.
        """
        failure: Exception | None = None
        try:
            self._open(parts, addresses, joined)
        except Exception as error:  # no memory, for example: the other ranks are told
            failure = error
        mine = "" if failure is None else str(failure) or repr(failure)
        for rank, told in enumerate(self._allgather(mine)):
            if told:
                self._close(told)
                raise PeerError(f"rank {rank} cannot reach a server: {told}") from failure
        initial = None
        if self._world.rank == 0:  # the proxy of its group, whose ranks are sorted
            initial = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        for link in self._links:
            link.start(self._number, initial)
        self._get(lambda: min(link.answered for link in self._links) > 0)

    def _open(
        self, parts: dict[int, tuple[int, int]], addresses: Sequence[Any], joined: cluster.Cluster
    ) -> None:
        """A proxy's connections to the servers."""
        nodes = joined.node_of_rank
        for rank, (begin, end) in parts.items() if self._is_proxy else ():
            # The ranks that wait for the outcome have no longer than the whole limit.
            stream = connect(tuple(addresses[rank]), joined.secret, self._timeout / 2, _PURPOSE)
            stream.set_timeout(self._timeout)
            stream.keep_alive(self._timeout)
            far = nodes[rank] != nodes[self._world.rank]
            link = Link(rank, begin, end, self._kind, stream, self._changed, far=far)
            self._links.append(link)

    @property
    def _is_proxy(self) -> bool:
        return self._world.rank == self._group[0]

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """Gives this rank's gradients, and gets parameters that are no older than the bound allows.

        A parameter without a gradient counts as zeros.

        Raises:
            PeerError: a rank is gone or too late; all ranks raise it, with that rank's number.
            UsageError: after `finish`.
        """
        if self._is_over:
            raise UsageError("finish() ended this training: make new ParameterServers for another")
        self._exchange(active=True)

    def finish(self) -> None:
        """This rank has no more gradients; no other rank waits for it any more.

        Returns when all ranks have called it, with the last parameters, the same on all of them. The
        other ranks of its group may go on.

        Raises:
            PeerError: as `step`.
        """
        if self._is_over:
            return
        while self._exchange(active=False):
            pass
        self._is_over = True
        if self._shard is not None and not self._shard.wait_for_end(self._timeout):
            raise PeerError(
                f"the proxies of other groups have not ended their conversations with rank "
                f"{self._world.rank} for {self._timeout:g} s"
            )
        self._close()

    def stats(self) -> dict[str, Any]:
        """What this rank has counted.

        `steps`; `staleness`: how often its parameters lacked the updates of so many steps of the
        slowest group; `messages` and `bytes`, both ways, between this proxy and servers on other
        nodes, and `messages_within` and `bytes_within` on its own; and as a server `updates`, steps of
        the optimizer, and `gradients`, those of workers in them.
        """
        far = [link for link in self._links if link.far]
        near = [link for link in self._links if not link.far]
        shard = self._shard
        return {
            "steps": self._clock,
            "staleness": dict(sorted(self._seen.items())),
            "messages": sum(link.messages for link in far),
            "bytes": sum(link.bytes for link in far),
            "messages_within": sum(link.messages for link in near),
            "bytes_within": sum(link.bytes for link in near),
            "updates": shard.updates if shard is not None else 0,
            "gradients": shard.gradients if shard is not None else 0,
        }

    def _exchange(self, *, active: bool) -> int:
        """One step of the group; the ranks of it that had a gradient."""
        if self._failure:
            raise PeerError(self._failure)
        flat = self._gradient(active)
        if self._among is not None:
            self._together(lambda: dist.all_reduce(flat, group=self._among))
        workers = round(float(flat[-1]))
        clock = self._clock
        if workers:
            for link in self._links:
                link.push(clock, workers, flat)
            self._sent.append((clock, flat))
            # The first answer is that to the greeting. With staleness one gradient is on its way
            # while the next is computed; the servers keep the bound.
            answers = clock + 2 - (self._staleness > 0)
            seen = self._get(lambda: min(link.answered for link in self._links) >= answers)
            self._clock += 1
            self._seen[max(0, self._clock - seen)] += 1
        else:
            for link in self._links:
                link.finish()
            self._get(lambda: min(link.clock for link in self._links) == ENDED)
        return workers

    def _gradient(self, active: bool) -> torch.Tensor:
        """This rank's, flat, and behind it how many ranks' it is."""
        flat = self._memory()
        flat[-1] = 1.0 if active else 0.0
        if not active:
            return flat.zero_()
        at = 0
        for parameter in self._parameters:
            part = flat[at : at + parameter.numel()]
            at += parameter.numel()
            gradient = parameter.grad
            if gradient is None:
                part.zero_()
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                part.copy_(dense.detach().reshape(-1))
        return flat

    def _memory(self) -> torch.Tensor:
        """Of a gradient that all servers have answered; shared memory where there is room."""
        with self._changed:
            answered = min((link.answered for link in self._links), default=0)
        while self._sent and (not self._links or self._sent[0][0] + 1 < answered):
            self._free.append(self._sent.popleft()[1])
        if self._free:
            return self._free.pop()
        shape = torch.Size([self._size + 1])
        if self._among is not None:
            with suppress(UsageError, IoError):
                made: torch.Tensor = self._among.empty(shape, self._kind)
                return made
        return torch.empty(shape, dtype=self._kind, device="cpu")

    def _get(self, is_due: Callable[[], bool]) -> int:
        """Gets the servers' parameters when `is_due`; the least clock of the servers.

        The proxy waits, and hands them out. While it waits it tells its group so, now and then: to
        the others it would be late, where a server or another group is.
        """
        note: dict[str, Any] = {"wait": True}
        while note["wait"]:
            if self._links:
                note = self._look(is_due)
            if self._among is not None:
                note = self._hand_out(note)
        if note["error"]:
            self._fail(str(note["error"]))
        with torch.no_grad():
            at = 0
            for parameter in self._parameters:
                parameter.copy_(self._flat[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()
        return int(note["clock"])

    def _look(self, is_due: Callable[[], bool]) -> dict[str, Any]:
        """What the servers have said when `is_due`, or that it still waits for them."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(link.error for link in self._links) or is_due(), self._timeout / _PARTS
            ):
                return {"wait": True}
            error = self._cause() if any(link.error for link in self._links) else ""
            for link in self._links:
                self._flat[link.begin : link.end].copy_(link.newest)
            clock = min(link.clock for link in self._links)
        return {"wait": False, "clock": clock, "error": error[:_NOTE_LETTERS]}

    def _cause(self) -> str:
        """Why a connection failed; with `_changed`.

        A server that broke off may only have followed one that told the reason: another connection,
        or this rank's server, may have it a moment later.
        """
        deadline = time.monotonic() + _LAST_WORDS
        while not self._told() and time.monotonic() < deadline:
            self._changed.wait(_LAST_WORDS / 20)
        return self._told() or next(link.error for link in self._links if link.error)

    def _told(self) -> str:
        """The error that a server told; "" if none did."""
        mine = self._shard.error if self._shard is not None else ""
        return next((link.error for link in self._links if link.told), mine)

    def _hand_out(self, note: dict[str, Any]) -> dict[str, Any]:
        """The proxy's note, and its parameters, to its group."""
        if self._is_proxy:
            text = bytearray(json.dumps(note).encode().ljust(_NOTE))
            self._out[-_NOTE:] = torch.frombuffer(text, dtype=torch.uint8)
        self._together(lambda: dist.broadcast(self._out, self._group[0], group=self._among))
        found: dict[str, Any] = json.loads(bytes(self._out[-_NOTE:].numpy()))
        return found

    def _together(self, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except RuntimeError as error:
            self._fail(f"within the group of ranks {self._group}, counted from 0: {error}", error)

    def _fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Tells the other groups, and raises."""
        self._failure = text
        if self._shard is not None:
            self._shard.fail(text)
        self._close(text, is_broken=cause is not None)
        raise PeerError(text) from cause

    def _close(self, error: str = "", *, is_broken: bool = False) -> None:
        """Ends what this rank has open; a group that `is_broken` may have an operation under way."""
        for link in self._links if error else ():
            link.give_up(error)
        deadline = time.monotonic() + _LAST_WORDS
        for link in self._links:
            link.close(deadline)
        if self._listener is not None:
            self._listener.close()
        self._free, self._sent = [], deque()
        among, self._among = self._among, None
        if among is None:
            return
        if is_broken:
            with suppress(Exception):
                among.abort()
        with suppress(*([Exception] if error else [])):  # the error is what the user needs
            dist.destroy_process_group(among)


def _trained(model: Any) -> list[torch.nn.Parameter]:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"ParameterServers takes a module of torch, not a {type(model).__name__}")
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UsageError("no parameter of the model requires a gradient")
    for name, parameter in named:
        if parameter.device.type != "cpu":
            raise UsageError(
                f"parameter {name} is on {parameter.device}: ParameterServers trains on the CPU; "
                "DistributedOptimizer takes devices"
            )
        if parameter.dtype != named[0][1].dtype or not parameter.dtype.is_floating_point:
            raise UsageError(
                f"parameter {name} is {parameter.dtype} and {named[0][0]} {named[0][1].dtype}: "
                "parameter servers need one floating-point type for all"
            )
    return [p for _, p in named]


def _ranks(what: str, ranks: Any, world: int) -> list[int]:
    """A list of different ranks below `world`."""
    try:
        found = [int(rank) for rank in ranks]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}={ranks!r} is not a list of ranks") from error
    if not found or len(set(found)) != len(found) or not all(0 <= r < world for r in found):
        raise UsageError(f"{what}={found} is not a set of ranks below {world}")
    return sorted(found)


def _chosen(servers: Sequence[int] | None, world: int, size: int) -> list[int]:
    """The ranks that serve."""
    found = list(range(world)) if servers is None else _ranks("servers", servers, world)
    if len(found) > size:
        raise UsageError(
            f"{size} parameters cannot be split among {len(found)} servers: name fewer in servers="
        )
    return found


def _checked(groups: Any, world: int) -> str | list[list[int]]:
    if isinstance(groups, str):
        if groups not in ("node", "flat"):
            raise UsageError(f'groups={groups!r} is neither "node", "flat" nor lists of ranks')
        return groups
    try:
        parts = list(groups)
    except TypeError as error:
        raise UsageError(f"groups={groups!r} is not a list of lists of ranks") from error
    found = [_ranks("a list of groups", group, world) for group in parts]
    everyone = sorted(rank for group in found for rank in group)
    if everyone != list(range(world)):
        twice = sorted(r for r, count in Counter(everyone).items() if count > 1)
        lacking = sorted(set(range(world)) - set(everyone))
        why = f"rank {twice[0]} is in two groups" if twice else f"rank {lacking[0]} is in no group"
        raise UsageError(f"{why}: groups= needs each of the {world} ranks once")
    return found


def _groups(groups: str | list[list[int]], nodes: Sequence[int]) -> list[list[int]]:
    if not isinstance(groups, str):
        return groups
    if groups == "flat":
        return [[rank] for rank in range(len(nodes))]
    return [[r for r, n in enumerate(nodes) if n == node] for node in range(max(nodes) + 1)]
