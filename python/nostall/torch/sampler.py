"""The plan's order as a batch sampler of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data

from nostall.errors import UsageError
from nostall.plan import Plan
from nostall.world import find_world

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATE_VERSION = 1
_DECIDING = ("seed", "global_batch", "samples", "drop_last", "order")


class BatchSampler(torch.utils.data.Sampler):  # type: ignore[misc]  # torch is untyped here
    """Lists of sample ids, one per batch of this rank, in the order of ``nostall.DataLoader``.

    Each iteration is one epoch: the one after the last, or what `set_epoch` or `load_state_dict`
    chose. A library that itself divides batches among ranks (Accelerate) needs
    ``rank=0, world_size=1``.

    Args:
        samples: size of the data set.
        batch_size: samples per rank and batch.
        seed: fixes the order.
        rank, world_size: found from torch.distributed, torchrun, mpirun or Slurm where not given.
        drop_last: drop samples that do not fill the world, then the last partial batch.
        order: ``"torch"`` (DistributedSampler's), ``"keyed"``, ``"sequential"`` or sample ids.

    Raises:
        UsageError: arguments that cannot be planned, named with their value.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        order: str | Sequence[int] | NDArray[np.integer[Any]] = "torch",
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        world = find_world(rank=rank, world_size=world_size)
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.rank = world.rank
        self.world_size = world.world_size
        self.drop_last = drop_last
        self._order = order
        self._order_world = world.world_size
        self._batches = len(self._plan(0))
        self._next = (0, 0)
        self._current = (0, 0)
        self._resumed = False

    def __len__(self) -> int:
        """Batches of this rank in one epoch."""
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next to iterate; the one that was resumed keeps its position."""
        if epoch < 0:
            raise UsageError(f"epoch must not be negative: {epoch}")
        if self._resumed and epoch == self._next[0]:
            return
        self._resumed = False
        self._next = self._current = (epoch, 0)

    def __iter__(self) -> Iterator[list[int]]:
        # All in the generator, so that nothing moves before the first batch is drawn: DataLoader
        # with worker processes makes two iterators an epoch and uses one.
        epoch, start = self._next
        self._next = (epoch + 1, 0)
        self._current = (epoch, start)
        self._resumed = False
        ids, ends = self._plan(epoch).rank_epoch(epoch, self.rank)
        for batch in range(start, len(ends)):
            begin = int(ends[batch - 1]) if batch else 0
            self._current = (epoch, batch + 1)
            yield ids[begin : int(ends[batch])].tolist()

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position in the present epoch, and what it depends on; plain numbers.

        Args:
            batches: how many batches of the present epoch the training has used. Without it,
                how many were drawn: with ``num_workers > 0`` DataLoader draws ahead, so pass it
                there (or use torchdata's StatefulDataLoader, which keeps count itself).

        Raises:
            UsageError: `batches` is more than an epoch has.
        """
        epoch, drawn = self._current
        batch = drawn if batches is None else batches
        if not 0 <= batch <= self._batches:
            raise UsageError(f"an epoch has {self._batches} batches, not {batch}")
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "batch": batch,
            "order_world": self._order_world,
            "seed": self.seed,
            "global_batch": self.batch_size * self.world_size,
            "samples": self.samples,
            "drop_last": self.drop_last,
            "order": self._order if isinstance(self._order, str) else "user",
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was taken, on any number of ranks.

        The global batch must be the same: on w ranks pass ``batch_size=global_batch / w``.

        Raises:
            UsageError: the state is of another dataset, seed, order or global batch.
        """
        if state.get("version") != _STATE_VERSION:
            raise UsageError(
                f"the sampler's state has version {state.get('version')!r}, this release reads "
                f"{_STATE_VERSION}"
            )
        mine = self.state_dict()
        for key in _DECIDING:
            if state.get(key) != mine[key]:
                raise UsageError(
                    f"the sampler's state was saved with {key}={state.get(key)}, but this sampler "
                    f"has {key}={mine[key]}"
                )
        epoch, batch, order_world = (int(state[k]) for k in ("epoch", "batch", "order_world"))
        before = self._order_world, self._batches
        self._order_world = order_world
        self._batches = len(self._plan(0))
        if epoch < 0 or not 0 <= batch <= self._batches:
            self._order_world, self._batches = before
            raise UsageError(
                f"the sampler's state is at epoch {epoch}, batch {batch}, which cannot be: an "
                f"epoch has {self._batches} batches"
            )
        self._next = (epoch + 1, 0) if batch == self._batches else (epoch, batch)
        self._current = self._next
        self._resumed = True

    def _plan(self, epoch: int) -> Plan:
        return Plan(
            samples=self.samples,
            batch_size=self.batch_size,
            world_size=self.world_size,
            epochs=epoch + 1,
            seed=self.seed,
            drop_last=self.drop_last,
            order=self._order,
            order_world=self._order_world,
        )
