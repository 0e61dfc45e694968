"""Other choices of the samples of sources: no sample is copied, and none is read twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from nostall import _native
from nostall.base import _checks as checks
from nostall.base._words import counted
from nostall.errors import IoError, UsageError
from nostall.fields import Schema
from nostall.source._source import ItemMaker, Source, expect_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = Sequence[int] | NDArray[np.integer[Any]]

# What samples of one loader have in common: those of every source, those of arrays.
_KINDS = ("_label_type", "pixels", "schema")
_ARRAYS = ("dtype", "pixel_shape")
_APART = ". Pass offset_labels=True to give each source labels of its own"
# Epoch of the keyed permutation that divides; no training has so many.
_DIVIDING = 2**32 - 1


class View(Source):
    """Samples of other sources: what `Subset`, `Filter`, `Split` and `Concat` give.

    A view has the sizes, labels, names and checksums of the samples that it shows, and the tiers,
    ranks and positions of a loader work as with any source. Views of views become one view.

    Attributes:
        parts: the sources that hold the samples; none of them is a view.
        then: of views of `Cached`: what is called with each item, at first that of the data set. May
            be set before the view is given to a loader.
        classes: names of the classes, where the parts have them; `categories`, `dtype` and
            `pixel_shape` likewise.
        names: of the samples, where all parts have them.
    """

    native: _native.ViewSource
    classes: list[str]
    categories: dict[int, str]
    names: list[str]
    then: Callable[[Any], Any] | None
    pickles: frozenset[str]
    modules: frozenset[str]
    version: str | int | None

    def __init__(
        self,
        parts: Sequence[Source],
        offsets: Sequence[int],
        numbers: NDArray[np.uint64] | None,
    ) -> None:
        self.parts = tuple(parts)
        self._offsets = tuple(offsets)
        self.native = _native.open_view([part.native for part in parts], list(offsets), numbers)
        self.pixels = parts[0].pixels
        self._label_type = parts[0]._label_type
        self._pairs = parts[0]._pairs
        for name in _ARRAYS:
            if hasattr(parts[0], name):
                setattr(self, name, getattr(parts[0], name))
        makers = [part.item_maker for part in parts]
        self._makers = [maker for maker in makers if maker is not None]
        if self._makers:
            self.then = self._makers[0].then
            self.pickles = self._makers[0].pickles
            self.modules = frozenset().union(*(maker.modules for maker in self._makers))
            versions = [maker.version for maker in self._makers]
            self.version = None if None in versions else str(versions)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those of the data sets whose items are made."""
        return sum((maker.numbers for maker in self._makers), ())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the parts and the numbers: unpickling opens the parts again, and compares."""
        numbers, kept = self.native.numbers, self._kept()
        return _rebuild, (type(self), self.parts, self._offsets, numbers, self.fingerprint, kept)

    def __repr__(self) -> str:
        of = ", ".join(map(repr, self.parts[:2])) + (", ..." if len(self.parts) > 2 else "")
        return (
            f"<{type(self).__name__} of {of}: {counted(len(self), 'sample')}, "
            f"{self.total_bytes / 1e6:.1f} MB>"
        )

    @property
    def schema(self) -> Schema:
        """The fields of every sample: those of the parts."""
        return self.parts[0].schema

    @property
    def over_network(self) -> bool:
        """Whether one of the parts is read from an object store."""
        return any(part.over_network for part in self.parts)

    def select(self, names: Sequence[str]) -> Source:
        """The same view of parts that read these fields alone, if that saves reading; else this one.

        Raises:
            UsageError: a field is not there.
        """
        narrowed = [part.select(names) for part in self.parts]
        same = all(part is whole for part, whole in zip(narrowed, self.parts, strict=True))
        if same or any(self._offsets):  # labels of the view's own are those of whole pairs
            return self
        view = type(self).__new__(type(self))
        View.__init__(view, narrowed, self._offsets, self.native.numbers)
        view.__dict__.update(self._kept())
        return view

    def _kept(self) -> dict[str, Any]:
        """What may have been set on this view."""
        names = ("pixels", "classes", "categories", "names", "then")
        return {name: self.__dict__[name] for name in names if name in self.__dict__}

    @property
    def labels(self) -> NDArray[Any]:
        """Label of every sample, as the parts have them.

        Raises:
            UsageError: the samples have no labels.
        """
        if self._pairs and not self._makers:
            return super().labels
        return np.concatenate([part.labels for part in self.parts])[self.native.numbers]

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class."""
        return {name: i for i, name in enumerate(self.classes)}

    @property
    def item_maker(self) -> ItemMaker | None:
        """The view itself if its parts are `Cached`."""
        return self if self._makers else None

    def make(self, sample: int) -> bytes:
        """The record of an item of a `Cached` part, made anew."""
        part, there = self.native.origin(sample)
        return self._makers[part].make(there)

    def were_killed(self, sample: int) -> bool:
        """Whether processes were killed at an item of a `Cached` part, so that it was not made."""
        part, there = self.native.origin(sample)
        return self._makers[part].were_killed(there)

    def origin(self, sample: int) -> tuple[Source, int]:
        """The part that holds a sample, and its number there."""
        part, there = self.native.origin(range(len(self))[sample])
        return self.parts[part], there

    def keep_sums(self) -> None:
        """Stores the learned checksums beside the indexes of the parts."""
        for part in self.parts:
            part.keep_sums()


class Subset(View):
    """The samples of a source with these numbers, in this order: ``Subset(source, range(1000))``.

    Args:
        source: any source, or a view.
        ids: numbers of samples; one may come several times, and is then as many samples.

    Raises:
        UsageError: there are no numbers, or one that no sample has.
    """

    def __init__(self, source: Source, ids: Ids) -> None:
        _check(source, "Subset")
        chosen = np.asarray(ids)
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
            hint = ": pass a mask to Filter" if chosen.dtype.kind == "b" else ""
            raise UsageError(
                "the ids of a Subset must be one sequence of integers, not "
                f"{chosen.dtype} of shape {chosen.shape}{hint}"
            )
        if not chosen.size:
            raise UsageError("the ids of a Subset are empty: it needs at least one sample")
        wrong = chosen[(chosen < 0) | (chosen >= len(source))]
        if wrong.size:
            raise UsageError(
                f"the ids of a Subset name sample {wrong[0]}, but {source!r} has samples 0 to "
                f"{len(source) - 1}"
            )
        _show(self, source, chosen.astype(np.uint64))


class Filter(View):
    """The samples of a source that have one of these labels, or for which a mask is true.

    Args:
        source: any source, or a view.
        labels: numbers, or names of classes where the source has `classes`. The labels stay what they
            are.
        mask: one truth value per sample.

    Raises:
        UsageError: neither or both are given, nothing is left, a class is not there, or the mask has
            another length.
    """

    def __init__(
        self,
        source: Source,
        *,
        labels: Sequence[float | str] | NDArray[Any] | None = None,
        mask: Sequence[bool] | NDArray[np.bool_] | None = None,
    ) -> None:
        _check(source, "Filter")
        if (labels is None) == (mask is None):
            raise UsageError("Filter needs either labels= or mask=")
        if labels is not None:
            labels = _listed(labels)
            wanted = np.array([_label_of(source, label) for label in labels], source._label_type)
            chosen = np.isin(source.labels, wanted)
        else:
            chosen = np.asarray(mask)
            if chosen.dtype != np.bool_ or chosen.shape != (len(source),):
                raise UsageError(
                    f"mask= must have one truth value for each of the {len(source)} samples, not "
                    f"{chosen.dtype} of shape {chosen.shape}"
                )
        left = np.flatnonzero(chosen)
        if not left.size:
            why = f"with labels={labels!r}" if labels is not None else "by the mask"
            raise UsageError(f"Filter {why} leaves no sample of {source!r}")
        _show(self, source, left.astype(np.uint64))


class Concat(View):
    """The samples of several sources, one source after the other.

    Args:
        sources: sources or views, whose samples and labels are of one kind.
        offset_labels: True gives each source labels of its own: the first label of a source follows
            the last one of the source before it, and `classes` are the lists laid end to end. Without
            it sources with `classes` must have equal ones.

    Raises:
        UsageError: there are no sources, or they differ, with both values.
    """

    def __init__(
        self, sources: Sequence[Source], *more: Never, offset_labels: bool = False
    ) -> None:
        if more or isinstance(sources, Source):
            raise UsageError("Concat takes a list of sources: Concat([a, b])")
        sources, what = list(sources), type(self).__name__
        if not sources:
            raise UsageError(f"{what} needs at least one source")
        for source in sources:
            _check(source, what)
        for number, source in enumerate(sources[1:], 1):
            _refuse_unlike(sources[0], source, number)
        first = getattr(sources[0], "classes", None)
        added = [0] * len(sources)
        if checks.flag("offset_labels", offset_labels):
            added = _offsets(sources)
            lists = [getattr(source, "classes", None) for source in sources]
            if first is not None:
                first = [name for classes in lists for name in classes or ()]
        else:
            hint = _APART if sources[0]._pairs else ""
            for number, source in enumerate(sources[1:], 1):
                _refuse_other_classes(first, getattr(source, "classes", None), number, hint)
        _lay(self, sources, added)
        _take_over(self, sources[0])
        if first is not None:
            self.classes = list(first)
        named = [_names_of(source) for source in sources]
        if any(named):
            self.names = [n for names in named for n in names] if all(named) else []


def Split(
    source: Source, fraction: float, seed: int = 0, *, stratify: bool = False
) -> tuple[Subset, Subset]:
    """A source in two parts by chance: ``train, validation = Split(source, 0.9)``.

    The first part has exactly ``floor(fraction * len(source) + 0.5)`` samples, the second all others;
    both in the order of the source. Which they are depends on the number of samples, fraction and
    seed alone (with `stratify` on the labels too), and is the same in each release.

    Args:
        source: any source, or a view.
        fraction: of the first part, between 0 and 1.
        seed: which samples are drawn.
        stratify: True draws from each label this fraction, rounded so that the whole is exact.

    Raises:
        UsageError: a part would be empty.
    """
    _check(source, "Split")
    if not checks.is_number(fraction) or not 0 < fraction < 1:
        raise UsageError(f"fraction must lie between 0 and 1, both excluded: {fraction!r}")
    fraction, seed = float(fraction), checks.whole("seed", seed, 0, 2**64 - 1)
    stratify = checks.flag("stratify", stratify)
    count = len(source)
    first = int(np.floor(fraction * count + 0.5))
    if not 0 < first < count:
        raise UsageError(
            f"fraction={fraction} of {count} samples leaves a part empty: the first would have {first}"
        )
    spec = _native.JobSpec()
    spec.samples, spec.seed, spec.order = count, seed, _native.OrderKind.keyed
    drawn = _native.epoch_order(spec, _DIVIDING)
    taken = np.zeros(count, bool)
    taken[_stratified(source.labels, drawn, fraction, first) if stratify else drawn[:first]] = True
    return Subset(source, np.flatnonzero(taken)), Subset(source, np.flatnonzero(~taken))


def _stratified(
    labels: NDArray[Any], drawn: NDArray[np.uint64], fraction: float, first: int
) -> NDArray[np.uint64]:
    """The first ones drawn of each label; the largest remainders get what rounding down leaves."""
    _, kinds, counts = np.unique(labels, return_inverse=True, return_counts=True)
    exact = fraction * counts
    quota = np.floor(exact).astype(np.int64)
    missing = first - int(quota.sum())
    quota[np.argsort(quota - exact, kind="stable")[:missing]] += 1
    of_drawn = kinds[drawn]
    by_kind = np.argsort(of_drawn, kind="stable")
    begins = np.cumsum(counts) - counts
    place = np.arange(len(drawn)) - begins[of_drawn[by_kind]]
    chosen = by_kind[place < quota[of_drawn[by_kind]]]
    return np.asarray(drawn[chosen], np.uint64)


def _check(source: Any, what: str) -> None:
    expect_source(what, source)
    if source.mixing is not None:
        raise UsageError(
            f"{what} does not go with a Mixture, which has an order of its own: choose samples of its "
            "sources, and mix those"
        )


def _show(view: View, source: Source, ids: NDArray[np.uint64]) -> None:
    """Makes `view` show these samples of `source`, of its parts if it is a view itself."""
    if isinstance(source, View):
        View.__init__(view, source.parts, source._offsets, source.native.numbers[ids])
    else:
        View.__init__(view, [source], [0], ids)
    _take_over(view, source)
    if (classes := getattr(source, "classes", None)) is not None:
        view.classes = list(classes)
    if names := _names_of(source):
        view.names = [names[i] for i in ids.tolist()]


def _take_over(view: View, source: Source) -> None:
    """What may have been set on a source after it was opened."""
    view.pixels = source.pixels
    if (categories := getattr(source, "categories", None)) is not None:
        view.categories = dict(categories)
    if (maker := source.item_maker) is not None:
        view.then = maker.then


def _names_of(source: Source) -> list[str]:
    """The names of the samples; of none if the source has none."""
    names: list[str] = getattr(source, "names", [])
    return names if len(names) == len(source) else []


def _lay(view: View, sources: list[Source], added: list[int]) -> None:
    """Makes `view` show all samples of `sources`, one after the other."""
    parts: list[Source] = []
    offsets: list[int] = []
    numbers: list[NDArray[np.uint64]] = []
    begin: dict[tuple[int, int], int] = {}
    whole = not any(isinstance(source, View) for source in sources)
    end = 0
    for source, more in zip(sources, added, strict=True):
        inner = (
            zip(source.parts, source._offsets, strict=True) if isinstance(source, View) else None
        )
        starts, lengths = [], []
        for part, offset in inner or [(source, 0)]:
            key = (id(part), offset + more)
            if key not in begin or whole:
                begin[key] = end
                parts.append(part)
                offsets.append(offset + more)
                end += len(part)
            starts.append(begin[key])
            lengths.append(len(part))
        if isinstance(source, View):
            inside = np.cumsum([0, *lengths]).astype(np.uint64)
            of = source.native.numbers
            part_of = np.searchsorted(inside, of, side="right") - 1
            numbers.append(of - inside[part_of] + np.asarray(starts, np.uint64)[part_of])
        elif not whole:
            numbers.append(np.arange(starts[0], starts[0] + len(source), dtype=np.uint64))
    View.__init__(view, parts, offsets, None if whole else np.concatenate(numbers))


def _refuse_unlike(one: Source, other: Source, number: int) -> None:
    for name in _KINDS + _ARRAYS:
        ours, theirs = getattr(one, name, None), getattr(other, name, None)
        if ours != theirs:
            what = "labels of type" if name == "_label_type" else name
            raise UsageError(
                f"unlike samples cannot be put together: the first source has {what} {ours}, "
                f"source {number} has {what} {theirs}"
            )
    _refuse_other_fills(one.schema, other.schema, number)
    _refuse_other_categories(one, other, number)
    ours, theirs = one.item_maker, other.item_maker
    if (ours is None) != (theirs is None):
        raise UsageError(
            f"items and bytes cannot be put together: of {one!r} and {other!r} only one is Cached"
        )
    if ours is not None and theirs is not None:
        for name in ("then", "pickles"):
            mine, its = getattr(ours, name), getattr(theirs, name)
            if mine != its:
                raise UsageError(
                    "sources that are put together have one then= and the same pickles=: the first "
                    f"source has {name}={mine!r}, source {number} has {name}={its!r}"
                )


def _refuse_other_fills(ours: Schema, theirs: Schema, number: int) -> None:
    for name, kind in ours.items():
        fills = [k.fill if k.fill is None else k.encode(k.fill) for k in (kind, theirs[name])]
        if fills[0] != fills[1]:
            raise UsageError(
                f"unlike samples cannot be put together: field {name} of the first source has "
                f"fill={kind.fill!r}, that of source {number} has fill={theirs[name].fill!r}"
            )


def _refuse_other_categories(one: Source, other: Source, number: int) -> None:
    ours, theirs = (getattr(source, "categories", None) for source in (one, other))
    if ours == theirs:
        return
    if ours is None or theirs is None:
        lacking = "the first source" if ours is None else f"source {number}"
        raise UsageError(
            f"it cannot be told whether labels mean the same: {lacking} has no categories, the other "
            "has"
        )
    at = min(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    raise UsageError(
        f"the sources have other categories: {at} is {ours.get(at)!r} in the first and "
        f"{theirs.get(at)!r} in source {number}"
    )


def _refuse_other_classes(
    ours: list[str] | None, theirs: list[str] | None, number: int, hint: str
) -> None:
    if ours == theirs:
        return
    if ours is None or theirs is None:
        lacking = "the first source" if ours is None else f"source {number}"
        raise UsageError(
            f"it cannot be told whether labels mean the same: {lacking} has no classes, the other "
            f"has; where they do, set its .classes to the other's{hint}"
        )
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    differ = (
        f"{len(ours)} classes and {len(theirs)}"
        if at is None
        else f"label {at} is {ours[at]!r} in the first and {theirs[at]!r} in source {number}"
    )
    raise UsageError(f"the sources have other classes: {differ}{hint}")


def _offsets(sources: list[Source]) -> list[int]:
    """What to add to the labels of each source."""
    if not sources[0]._pairs:
        raise UsageError(f"offset_labels=True changes labels, but samples are {sources[0].schema}")
    if sources[0]._label_type.kind == "f":
        raise UsageError("offset_labels=True numbers classes, but these labels are floating-point")
    added = [0]
    for source in sources[:-1]:
        classes = getattr(source, "classes", None)
        labels = len(classes) if classes is not None else int(source.labels.max()) + 1
        added.append(added[-1] + labels)
    return added


def _listed(labels: Any) -> list[Any]:
    """Labels in their order, of which sets have none that counts; one alone too."""
    if isinstance(labels, (set, frozenset)):
        return list(labels)
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu().numpy()
    return list(np.asarray(labels, object).ravel())


def _label_of(source: Source, label: Any) -> int | float:
    classes: list[str] = getattr(source, "classes", [])
    if isinstance(label, str):
        if label not in classes:
            raise UsageError(f"{source!r} has no class {label!r}")
        return classes.index(label)
    refused = UsageError(
        f"{source!r} has labels of type {source._label_type}, and none is {label!r}"
    )
    if not checks.is_number(label) and not isinstance(label, (bool, np.bool_)):
        raise refused
    if source._label_type.kind == "f":
        return float(label)
    whole = int(label) if math.isfinite(label) else 2**63
    if whole != label or not -(2**63) <= whole < 2**63:
        raise refused
    if classes and not 0 <= whole < len(classes) and whole not in source.labels:
        raise UsageError(f"{source!r} has {counted(len(classes), 'class')}, and none is {label!r}")
    return whole


def _rebuild(
    kind: type[View],
    parts: tuple[Source, ...],
    offsets: tuple[int, ...],
    numbers: NDArray[np.uint64],
    fingerprint: int,
    kept: dict[str, Any],
) -> View:
    view = kind.__new__(kind)
    View.__init__(view, parts, offsets, numbers)
    if view.fingerprint != fingerprint:
        raise IoError(
            f"{view!r} changed since it was opened: start again, every process must see the same files"
        )
    view.__dict__.update(kept)
    return view
