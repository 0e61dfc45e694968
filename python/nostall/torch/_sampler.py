"""Batches of sample ids in the order of the plan, for torch's DataLoader."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from nostall.base._words import counted
from nostall.errors import UsageError
from nostall.job._world import find_world, refuse_late_group
from nostall.plan import ClassBalanced, Order, Plan, order_name, refuse_other_state, whole_of_state

_STATE_VERSION = 2

_log = logging.getLogger("nostall")


class BatchSampler:
    """Yields the local batches of one rank; pass it as ``batch_sampler=`` to torch's DataLoader.

    It does not count epochs: call ``set_epoch(epoch)`` before each, or all have the order of epoch 0.

    Args:
        samples: size of the dataset.
        batch_size: samples per rank and batch.
        epochs: epochs of the job.
        seed: as in ``nostall.DataLoader``.
        drop_last: as in ``nostall.DataLoader``.
        order: as in ``nostall.DataLoader``; `ClassBalanced` and `Buckets` need their labels= and
            lengths=.
        rank: of this process; found from the launcher where it is not given.
        world_size: of the job, found likewise.

    `state_dict` counts the batches that torch's DataLoader has *asked for*, which runs ahead of
    training by its prefetching; give it the number of batches trained to be exact.

    Raises:
        UsageError: an argument cannot be meant; at the first iteration, if torch.distributed has
            several ranks and the sampler was made for one alone.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        epochs: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        order: Order = "torch",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        world = find_world(rank=rank, world_size=world_size)
        self.rank, self.world_size = world.rank, world.world_size
        self._rank_found = rank is None
        self.batch_size = batch_size
        self._arguments: dict[str, Any] = {
            "samples": samples,
            "epochs": epochs,
            "seed": seed,
            "drop_last": drop_last,
            "order": order.weighted() if isinstance(order, ClassBalanced) else order,
        }
        self._order_name = order_name(self._arguments["order"])
        self._order_world = self.world_size
        self._plan = self._make_plan(self._order_world)
        self.batch_size = int(batch_size)  # also of NumPy, which JSON of a state has not
        self._arguments["order"] = self._plan.order
        self._epoch = 0
        self._start = 0
        self._asked = 0
        self._ended: int | None = None  # the epoch that the loaded state had just ended

    def _make_plan(self, order_world: int) -> Plan:
        return Plan(
            **self._arguments,
            batch_size=self.batch_size,
            world_size=self.world_size,
            order_world=order_world,
        )

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self._plan)

    def set_epoch(self, epoch: int) -> None:
        """The epoch to iterate next; the one that was interrupted keeps its position."""
        epoch = self._plan.checked_epoch(epoch)
        if epoch == self._ended:
            # The state was taken after its last batch: nothing of it is left.
            self._epoch, self._start, self._asked = epoch, len(self), len(self)
        elif epoch != self._epoch:
            self._epoch, self._start, self._asked = epoch, 0, 0
        self._ended = None

    def __iter__(self) -> Iterator[list[int]]:
        if self._rank_found:
            refuse_late_group(self.world_size, "sampler")
        if self._epoch == self._plan.native.epochs:  # a state of the job's end
            if self._epoch > 1:
                raise UsageError(
                    f"all {self._epoch} epochs of the job are over, by the state that was loaded: call "
                    "set_epoch(), or make the sampler with more epochs="
                )
            self._epoch = 0  # who counts no epochs has this one's order in each
        ids, ends = self._plan.rank_epoch(self._epoch, self.rank)
        start, self._start = self._start, 0
        self._ended = None
        begin = int(ends[start - 1]) if start else 0
        self._asked = start
        for end in ends[start:].tolist():
            self._asked += 1
            yield ids[begin:end].tolist()
            begin = end

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position after `batches` batches of the current epoch (those asked for if None).

        Raises:
            UsageError: an epoch has not so many.
        """
        if batches is not None and (type(batches) is bool or batches not in range(len(self) + 1)):
            raise UsageError(f"an epoch has {len(self)} batches: batches={batches!r} cannot be")
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "batch": self._asked if batches is None else int(batches),
            "global_batch": self.batch_size * self.world_size,
            "order_world": self._order_world,
            **{key: getattr(self._plan.native, key) for key in ("samples", "seed", "drop_last")},
            "order": self._order_name,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, also on another number of ranks.

        Raises:
            UsageError: the state is of another job.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"not a state of a sampler, from its state_dict(): {state!r:.100}")
        mine = self.state_dict()
        keys = ("version", "global_batch", "samples", "seed", "drop_last", "order")
        refuse_other_state("sampler", state, mine, keys)
        epoch, batch, order_world = whole_of_state(
            "sampler", state, "epoch", "batch", "order_world"
        )
        plan = self._make_plan(order_world)
        epochs = int(plan.native.epochs)
        if not ((epoch < epochs and batch <= len(plan)) or (epoch, batch) == (epochs, 0)):
            raise UsageError(
                f"the sampler's state is at epoch {epoch}, batch {batch}, outside this job of "
                f"{counted(epochs, 'epoch')} of {counted(len(plan), 'batch')}"
            )
        rest = plan.epoch_length % (self.batch_size * self.world_size)
        if 0 < rest < self.world_size and self.rank == 0:
            _log.warning(
                "the last batch of each epoch has %s for %d ranks, as the job began on %s, so some get "
                "none, of which torch's own collate_fn cannot make a batch: go on with at most %s, or "
                "pass a collate_fn that takes an empty list",
                counted(rest, "sample"), self.world_size, counted(order_world, "rank"),
                counted(rest, "rank"),
            )  # fmt: skip
        self._order_world, self._plan = order_world, plan
        self._ended = epoch if batch == len(self) else None
        self._epoch, self._start = (epoch + 1, 0) if batch == len(self) else (epoch, batch)
        self._asked = self._start
