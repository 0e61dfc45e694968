"""A loader of nostall as an object of torch's class, for programs that take no other loader.

    model.fit(nostall.plugins.torch_loader.TorchLoader(loader))

Keras requires this class, and so does Accelerate (`nostall.plugins.accelerate`). Lightning and loops of
one's own take the loader itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch

import nostall
from nostall.base import _checks as checks
from nostall.base._words import counted
from nostall.errors import UsageError

__all__ = ["TorchLoader"]

Names: TypeAlias = Sequence[str | Sequence[str]]


def _checked(names: Any) -> tuple[str | Sequence[str], ...]:
    """The names of each member, if no two members have the same."""
    if isinstance(names, (bytes, Mapping)) or not isinstance(names, Iterable):
        raise UsageError(f"names must be a tuple of names, not {names!r}")
    given = (names,) if isinstance(names, str) else tuple(names)
    each = [
        one for of in given for one in checks.texts("names", [of] if isinstance(of, str) else of)
    ]
    if len(set(each)) != len(each):
        raise UsageError(f"names={names!r} has a name twice: one member would take another's place")
    return given


class _Ids(torch.utils.data.Sampler):
    """The samples of this rank in its next epoch, for programs that ask what the order is."""

    def __init__(self, loader: nostall.DataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[int]:
        return iter(self._of_epoch())

    def _of_epoch(self) -> list[int]:
        loader = self._loader
        # After the job programs may ask too: of its last epoch.
        epoch = min(loader._next()[0], int(loader.plan.native.epochs) - 1)
        ids, _ = loader.plan.rank_epoch(epoch, loader.world.rank)
        numbers: list[int] = ids.tolist()
        return numbers


class _Unread(torch.utils.data.Dataset):
    """In the place of a data set whose items could be read past the loader, without what it does."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, sample: int) -> Any:
        self._source._refuse_items()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols, which are this one's
            raise AttributeError(name)
        return getattr(self._source, name)


class TorchLoader(torch.utils.data.DataLoader):
    """What torch's loader has (`dataset`, `batch_size`, `drop_last`, `sampler`, `batch_sampler`, the
    length), and the batches, order and state of `loader`.

    Args:
        loader: gives the batches. What it does not do itself nothing else does: batches lie where its
            `device=` says, and its rank is the one it was made for.
        names: of the members of a batch, for programs whose batches are dictionaries, for example
            ``("pixel_values", "labels")``. A member may have several:
            ``("ids", ("labels", "targets"))``.

    Raises:
        UsageError: `loader` is another one's; in an iteration, if `names` do not fit the batches.
    """

    def __init__(self, loader: nostall.DataLoader, names: Names | None = None) -> None:
        if not isinstance(loader, nostall.DataLoader):
            kind = type(loader)
            raise UsageError(
                f"{type(self).__name__} takes a nostall.DataLoader, not {kind.__module__}."
                f"{kind.__qualname__}"
            )
        self.loader = loader
        self._batches: Any = loader  # or one of its epochs
        self._names = None if names is None else _checked(names)
        data = loader.dataset
        super().__init__(
            data if data.item_maker is None else _Unread(data),
            batch_size=loader.batch_size,
            sampler=_Ids(loader),
            drop_last=loader.drop_last,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch, or the rest of the one in which the loaded state was taken."""
        for batch in self._batches:
            yield batch if self._names is None else self._named(batch, self._names)

    def epochs(self) -> Iterator[Self]:
        """A loader of each epoch from the position to the end of the job.

            for epoch in loader.epochs():
                for batch in epoch:

        After a resume it begins with the rest of the epoch that was interrupted.

        Raises:
            UsageError: the job has no end.
        """
        return map(self._of, self.loader.epochs())

    def _of(self, epoch: Any) -> Self:
        one = copy.copy(self)
        one._batches = epoch
        return one

    @property
    def _left(self) -> int:
        """Batches of this after the last one that was handed out."""
        if self._batches is not self.loader:
            return len(self) - self.loader.position[1]
        left: int = self.loader.batches_left
        return left

    @staticmethod
    def _named(batch: Any, names: tuple[str | Sequence[str], ...]) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            raise UsageError(
                f"names={names} are for batches that are pairs or tuples; these have the names "
                f"{tuple(batch)}: leave names= out"
            )
        members = batch if isinstance(batch, (tuple, list)) else (batch,)
        if len(members) != len(names):
            raise UsageError(
                f"names={names} are {counted(len(names), 'name')} for batches of "
                f"{counted(len(members), 'member')}"
            )
        return {
            name: member
            for of_member, member in zip(names, members, strict=True)
            for name in ([of_member] if isinstance(of_member, str) else of_member)
        }

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next one, as the loader's `set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was taken."""
        self.loader.load_state_dict(state)
