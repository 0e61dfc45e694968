"""Global batches that grow while training converges [Pumma 2020, sec. 8.4.3].

    batches = nostall.DynamicBatches(loader, threshold=0.01, limit=16)
    for epoch, content in batches.epochs():
        for images, labels in content:
            ...                        # batches.factor times the loader's batch
        batches.report(accuracy)

A large batch consists of consecutive global batches of the plan. So the plan, its order and the tiers
stay the same, and a change takes effect at the same batch on all ranks.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.base import _checks as checks
from nostall.errors import UsageError
from nostall.fields import Padded, Ragged
from nostall.loader._loader import DataLoader
from nostall.loader._mixing import MixedLabels
from nostall.plan import whole_of_state

if TYPE_CHECKING:
    from nostall.loader._loader import Epoch

_STATE_VERSION = 1
_MOST = 2**31 - 1  # of the loader's batches in one


class DynamicBatches:
    """A loader whose batches grow.

    Args:
        loader: a `DataLoader`; its batch is the smallest one. What its batches are made of is joined:
            arrays and tensors, `Ragged` and `Padded`, lists with a value for each sample, and mappings
            and tuples of them.
        threshold: convergence rate below which the batch grows: the improvement of the reported value
            since the last report.
        grow: factor by which the batch grows each time.
        limit: greatest number of the loader's batches in one.
        smaller_is_better: the reported value is a loss.
        sawtooth: with the order `SubBatches`: the batch grows with each pass over the data in
            memory, to at most `limit` or all of it, and is small again when new data come. Reports
            grow it too.
        agree: makes one number of the ranks' reports, the same on all; their mean if None.

    Attributes:
        factor: how many of the loader's batches make one, by the reports.

    Raises:
        UsageError: arguments that contradict each other, named with their value.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        threshold: float = 0.0,
        grow: int = 2,
        limit: int = 16,
        smaller_is_better: bool = False,
        sawtooth: bool = False,
        agree: Callable[[float], float] | None = None,
    ) -> None:
        if not all(hasattr(loader, name) for name in ("plan", "epochs", "world")):
            raise UsageError(f"DynamicBatches takes a nostall.DataLoader, not {loader!r}")
        if agree is not None and not callable(agree):
            raise UsageError(f"agree must be a function, or None, not {agree!r}")
        self.loader = loader
        self.threshold = checks.number("threshold", threshold, -math.inf, math.inf)
        self.grow = checks.whole("grow", grow, 2, _MOST)
        self.limit = checks.whole("limit", limit, 1, _MOST)
        self.smaller_is_better = checks.flag("smaller_is_better", smaller_is_better)
        self.sawtooth = checks.flag("sawtooth", sawtooth)
        if self.sawtooth and not loader.plan.reuses:
            raise UsageError("sawtooth follows the reuse of data: pass order=SubBatches(...)")
        self.factor = 1
        self._last: float | None = None
        self._joining = (0, range(0))  # where the loader may be before the caller has the batch
        self._agree = agree

    def report(self, value: float) -> int:
        """Takes the quality of the model; all ranks call it. Returns the next batches' factor."""
        value = self._agreed(float(value))
        if self._last is not None:
            better = self._last - value if self.smaller_is_better else value - self._last
            # A value that is not a number does not count as progress.
            if not better >= self.threshold:
                self.factor = min(self.factor * self.grow, self.limit)
        self._last = value
        return self.factor

    def _agreed(self, value: float) -> float:
        if self._agree is not None:
            return self._agree(value)
        if self.loader.world.world_size == 1:
            return value
        from nostall.sync import reduce_gradients

        return float(reduce_gradients({"reported value": np.array([value])})["reported value"][0])

    def epochs(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """(index, batches) of each epoch from the current position on."""
        for epoch in self.loader.epochs():
            yield epoch.index, self._grouped(epoch)

    def size_at(self, epoch: int, batch: int) -> int:
        """How many of the loader's batches the one that begins with `batch` has."""
        if not self.sawtooth:
            return min(self.factor, self.loader.plan.batches_in(epoch) - batch)
        plan = self.loader.plan
        whole = plan.epoch_length // plan.native.global_batch
        _, turn, place, size = plan.pass_of(epoch, batch)
        # Never across the end of a pass, so that fresh and reused data do not mix.
        grown = self.factor * int(self.grow**turn)
        return min(grown, self.limit, size - place, max(whole - batch, 1))

    def _grouped(self, epoch: Epoch) -> Iterator[Any]:
        source, batch = iter(epoch), self.loader._begin_of(epoch.index)[1]
        while True:
            parts, counts = [], []
            size = self.size_at(epoch.index, batch)
            self._joining = (epoch.index, range(batch, batch + size + 1))
            for _ in range(size):
                part = next(source, None)
                if part is None:
                    break
                parts.append(part)
                counts.append(self.loader._samples_taken)
            if not parts:
                # The loader ends its epoch when it is asked for one batch too many.
                next(source, None)
                return
            batch += len(parts)
            if len(parts) > 1:
                parts = [self._joined(parts, counts)]
            self._joining = (0, range(0))
            yield parts.pop()

    def _joined(self, parts: Sequence[Any], counts: Sequence[int]) -> Any:
        """The batches as one; `counts` are the samples of each."""
        recipe = self.loader._recipe
        records, one = recipe.records, parts[0]
        if records is None or not records.cumulative:
            return _joined(parts, recipe.lists)
        if isinstance(one, tuple) and recipe.lists is not None:
            values = [dict(zip(records.names, part, strict=True)) for part in parts]
            return tuple(self._joined(values, counts).values())
        if not isinstance(one, Mapping):
            raise UsageError(
                f"to join batches with {records.cumulative[0]}, let collate= give a mapping"
            )
        ends = {name: [part[name] for part in parts] for name in records.cumulative if name in one}
        rest = [{name: part[name] for name in one if name not in ends} for part in parts]
        joined = _joined(rest, recipe.lists)
        return {
            name: joined[name]
            if name not in ends
            else _joined_ends(ends[name])
            if ends[name][0].ndim == 1
            else _joined_places(ends[name], counts)
            for name in one
        }

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """The loader's state and the numbers that decide the next sizes.

        It is that after the last batch handed out, also while parts of the next one are joined, and
        after one of them failed.
        """
        epoch, batch = self.loader.position
        joining, places = self._joining
        if epoch == joining and batch in places:
            batch = places.start
        return {
            "version": _STATE_VERSION,
            "loader": self.loader._state_at(epoch, batch),
            "factor": self.factor,
            "last": self._last,
            "sawtooth": self.sawtooth,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the same batches, on any number of ranks that divides the loader's batch.

        Raises:
            UsageError: the state is of another kind, or not of this loader's plan.
        """
        if not isinstance(state, Mapping) or state.get("version") != _STATE_VERSION:
            raise UsageError(
                f"not a state of DynamicBatches, from its state_dict(): {state!r:.100}"
            )
        if state.get("sawtooth") != self.sawtooth:
            raise UsageError("this state was not saved by DynamicBatches with the same sawtooth=")
        (factor,) = whole_of_state("DynamicBatches", state, "factor")
        if factor < 1:
            raise UsageError(
                "the DynamicBatches' state has factor=0: a batch has at least one of the loader's"
            )
        last = state.get("last")
        if last is not None and not checks.is_number(last):
            raise UsageError(f"the DynamicBatches' state has last={last!r}, which is no number")
        self.loader.load_state_dict(state.get("loader", {}))
        self._joining = (0, range(0))
        self.factor, self._last = factor, last


def _joined(parts: Sequence[Any], lists: str | None) -> Any:
    """Batches one after the other, as one; `lists` as `Recipe.lists`."""
    one = parts[0]
    if isinstance(one, Ragged):
        return _joined_ragged(parts)
    if isinstance(one, Padded):
        return _joined_padded(parts)
    if isinstance(one, MixedLabels):
        raise UsageError(
            "batches that were mixed have each a lam of their own and cannot be joined: pass "
            "num_classes= to MixUp and CutMix"
        )
    if isinstance(one, Mapping):
        return {name: _joined([part[name] for part in parts], lists) for name in one}
    # Of items each sample has one of the texts; a tuple that collate= gives is one of fields.
    of_samples = (list, tuple) if lists == "columns" else (list,)
    if type(one) in of_samples and all(isinstance(value, str | bytes) for value in one):
        return type(one)(itertools.chain.from_iterable(parts))
    if isinstance(one, tuple):
        values = [_joined(column, lists) for column in zip(*parts, strict=True)]
        return tuple(values) if type(one) is tuple else type(one)(*values)
    if isinstance(one, list):
        if lists == "columns":  # what collates items gives for a tuple
            return [_joined(column, lists) for column in zip(*parts, strict=True)]
        if lists is None:
            raise UsageError(
                "collate= gives a list, which may have a value for each sample or arrays of all of "
                "them: to join batches, let it give a tuple or a mapping of arrays"
            )
        return list(itertools.chain.from_iterable(parts))
    return _one_array(parts)


def _joined_ends(parts: Sequence[Any]) -> Any:
    """Where segments end in all that batches have, from 0 on."""
    out, base = [parts[0]], parts[0][-1]
    for part in parts[1:]:
        out.append(part[1:] + base)
        base = base + part[-1]
    return _one_array(out)


def _joined_places(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Places of images, whose first number is that of a unit, with so many units in each part."""
    moved = []
    for part, before in zip(parts, itertools.accumulate(counts[:-1], initial=0), strict=True):
        by = np.array([[before, 0, 0]])
        moved.append(part + (by if isinstance(part, np.ndarray) else part.new_tensor(by)))
    return _one_array(moved)


def _one_array(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts))
    raise UsageError(
        f"batches of {type(parts[0]).__name__} cannot be joined: pass transforms that give arrays"
    )


def _joined_ragged(parts: Sequence[Ragged]) -> Ragged:
    offsets, base = [], 0
    for number, part in enumerate(parts):
        offsets.append(part.offsets[min(number, 1) :] + base)
        base += int(part.offsets[-1])
    shapes = None if parts[0].shapes is None else _one_array([part.shapes for part in parts])
    return Ragged(_one_array([part.values for part in parts]), _one_array(offsets), shapes)


def _joined_padded(parts: Sequence[Padded]) -> Padded:
    longest = np.max([part.values.shape[1:] for part in parts], axis=0).tolist()
    filled = []
    for part in parts:
        shape = (len(part.values), *longest)
        numpy = isinstance(part.values, np.ndarray)
        room = np.zeros(shape, part.values.dtype) if numpy else part.values.new_zeros(shape)
        room[tuple(map(slice, part.values.shape))] = part.values
        filled.append(room)
    return Padded(_one_array(filled), _one_array([part.lengths for part in parts]))
