"""Mixtures: samples of several sources in one order, each with its share of every prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nostall.base import _checks as checks
from nostall.errors import UsageError
from nostall.source._source import Source
from nostall.source._units import Units
from nostall.source._views import Concat

Weighting = Mapping[Source, float]


@dataclass(frozen=True)
class Mixing:
    """How the sources of a mixture are mixed, in samples: what its order is made of."""

    names: tuple[str, ...]
    sources: tuple[int, ...]
    schedule: tuple[tuple[int, tuple[float, ...]], ...]
    at_end: Literal["repeat", "stop", "reweight"]
    samples: int | None


class Mixture(Concat):
    """Samples of several sources by weights: ``Mixture({web: 0.7, code: 0.2, books: 0.1})``.

    After any number of samples each source has given its share of them, to less than one sample: there
    is no chance in it. Samples of a source come in a shuffled order, a new one whenever the source
    begins again. A loader's `order` follows from the mixture, whose place is a counter, so a job goes
    on exactly on another number of ranks.

    Args:
        weights: of each source, from the first global batch on; their sum may be anything. A source
            of weight 0 gives no samples until the schedule says otherwise.
        names: of the sources, in statistics; "0", "1", ... if None.
        per: what weights count: "samples", "bytes", or "tokens" of sources that know theirs.
        temperature: weights are raised to the power 1 / temperature: 1 leaves them, more evens them
            out.
        schedule: other weights from a global batch of the job on (of each epoch, unless sources
            repeat): ``{10_000: {web: 0.5, code: 0.5}}``. A source that is not named there has weight 0.
        at_end: what happens when a source has no samples left: "repeat" (it begins again, in another
            order), "stop" (the epoch ends), or "reweight" (the others go on by their weights; an epoch
            has every sample once).
        samples: length of an epoch where sources repeat, rounded up to whole global batches; as many
            as all sources have if None.
        offset_labels: as of `Concat`.

    Raises:
        UsageError: weights are negative, infinite, NaN or all 0; sources are unlike. The loader's: the
            schedule gives a source its weight after the end of an epoch that reweighs.

    Attributes:
        mixing: the weights in samples.
    """

    def __init__(
        self,
        weights: Weighting,
        *,
        names: Sequence[str] | None = None,
        per: Literal["samples", "bytes", "tokens"] = "samples",
        temperature: float = 1.0,
        schedule: Mapping[int, Weighting] | None = None,
        at_end: Literal["repeat", "stop", "reweight"] = "repeat",
        samples: int | None = None,
        offset_labels: bool = False,
    ) -> None:
        if not isinstance(weights, Mapping):
            raise UsageError("Mixture takes a mapping from sources to weights")
        sources = list(weights)
        super().__init__(sources, offset_labels=offset_labels)
        if not checks.is_number(temperature) or not 0 < temperature < math.inf:
            raise UsageError(f"temperature must be a number above 0: {temperature!r}")
        temperature = float(temperature)
        if at_end not in ("repeat", "stop", "reweight"):
            raise UsageError(f'at_end must be "repeat", "stop" or "reweight", not {at_end!r}')
        samples = None if samples is None else checks.whole("samples", samples, 1, 2**63 - 1)
        named = _names(names, len(sources))
        later = _checked(schedule)
        steps = [(0, weights), *sorted(later.items())]
        costs = [_cost(source, per) for source in sources]
        self._mixing = Mixing(
            named,
            tuple(len(source) for source in sources),
            tuple(
                (int(step), _in_samples(sources, given, costs, temperature, step))
                for step, given in steps
            ),
            at_end,
            samples,
        )
        self._given = (weights, later)
        self._options: dict[str, Any] = {
            "names": names,
            "per": per,
            "temperature": temperature,
            "at_end": at_end,
            "samples": samples,
            "offset_labels": offset_labels,
        }

    @property
    def mixing(self) -> Mixing:
        return self._mixing

    def changed(self, step: int, weights: Weighting) -> Mixture:
        """This mixture with other weights from a global batch on, the same before it.

        Where sources repeat, a loader of the changed mixture goes on from a state of this one that was
        taken at that batch or before. Else weights change in every epoch, and no state goes with both.

        Raises:
            UsageError: the mixture changes after that step, or weights are bad.
        """
        first, later = self._given
        checks.whole("step", step, 1, 2**40 - 1)
        if any(at > step for at in later):
            raise UsageError(f"the mixture changes after step {step}: {sorted(later)}")
        changed = Mixture(first, schedule={**later, step: weights}, **self._options)
        changed.__dict__.update(super()._kept())  # what has been set since
        return changed

    def _kept(self) -> dict[str, Any]:
        names = ("_mixing", "_given", "_options")
        return {**super()._kept(), **{name: self.__dict__[name] for name in names}}


def _names(names: Any, sources: int) -> tuple[str, ...]:
    if names is None:
        return tuple(map(str, range(sources)))
    named = () if isinstance(names, str) else tuple(map(str, names))
    if len(set(named)) != len(named) or len(named) != sources:
        raise UsageError(f"names= must be {sources} different names: {names!r}")
    return named


def _checked(schedule: Any) -> dict[int, Weighting]:
    """The schedule, if it is one."""
    later = {} if schedule is None else schedule
    if not isinstance(later, Mapping):
        raise UsageError(f"schedule must be a mapping from global batches to weights: {later!r}")
    for step, weights in later.items():
        if not checks.is_whole(step) or not 0 < step < 2**40:
            raise UsageError(f"the schedule changes at a global batch from 1 on: {step!r}")
        if not isinstance(weights, Mapping):
            raise UsageError(
                f"the schedule has for step {step} no mapping from sources to weights: {weights!r}"
            )
    return dict(later)


def _cost(source: Source, per: str) -> float:
    """What a sample of the source counts on average."""
    if per == "samples":
        return 1.0
    if per == "bytes":
        return max(1, source.total_bytes) / len(source)
    if per != "tokens":
        raise UsageError(f'per must be "samples", "bytes" or "tokens", not {per!r}')
    if not isinstance(source, Units):
        raise UsageError(f'{source!r} does not know its tokens: weigh samples, or per="bytes"')
    return max(1, source.token_count) / len(source)


def _in_samples(
    sources: Sequence[Source],
    given: Weighting,
    costs: Sequence[float],
    temperature: float,
    step: int,
) -> tuple[float, ...]:
    for source, weight in given.items():
        if source not in sources:
            raise UsageError(
                f"the schedule names {source!r} from step {step} on, which is not in the mixture: give "
                "it the weight 0 at first"
            )
        if not checks.is_number(weight) or not 0 <= weight < math.inf:
            raise UsageError(
                f"the weight of {source!r} is {weight!r}: weights are finite and not negative"
            )
    found = []
    for source, cost in zip(sources, costs, strict=True):
        weight = float(given.get(source, 0.0))
        if temperature != 1.0:
            try:
                # 12 digits: the last ones of a power differ between machines.
                weight = float(f"{weight ** (1.0 / temperature):.12g}")
            except OverflowError:
                raise UsageError(
                    f"the weight {weight} of {source!r} at temperature={temperature} is beyond all "
                    "numbers: give smaller weights, of the same proportions"
                ) from None
        found.append(weight / cost)
    if not any(found):
        raise UsageError(f"all weights of the mixture are 0 from step {step} on")
    return tuple(found)
