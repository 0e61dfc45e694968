"""MixUp and CutMix: the last step of a list of transforms, done to whole batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.errors import UsageError
from nostall.fields import Scalar, Schema
from nostall.loader._steps import Step, Transform, between, keep_whole, numbers, probability

if TYPE_CHECKING:
    from nostall.loader._ahead import Hand


class MixedLabels(NamedTuple):
    """The labels of a mixed batch, where ``num_classes`` is not given.

    The loss of a batch is ``lam * loss(outputs, labels) + (1 - lam) * loss(outputs, others)``.

    Attributes:
        lam: how much of each sample is its own, 0 to 1.
        labels: the label of each sample.
        others: the label of the one that it is mixed with.
    """

    lam: float
    labels: Any
    others: Any


class Mixed(NamedTuple):
    """How the images of a batch are mixed, each with the one `shift` places before it."""

    kind: str  # mixup or cutmix
    lam: float
    box: tuple[int, int, int, int]  # x, y, width, height: cutmix
    shift: int


class BatchTransform(Transform):
    """Base of the steps that are done to whole batches."""

    num_classes: int | None
    p: float
    labels: str | None

    def to_step(self) -> Step:
        raise UsageError(
            f"{type(self).__name__} mixes the samples of a batch: it stands once, at the end of "
            "transforms= of a DataLoader"
        )

    @abstractmethod
    def _mixers(self) -> list[tuple[str, float, float]]:
        """(kind, alpha, weight) of each."""

    def _check(self) -> None:
        if self.num_classes is not None:
            keep_whole(self, "num_classes", 1, 2**24)
        probability(self, self.p)


@dataclass(frozen=True, kw_only=True)
class MixUp(BatchTransform):
    """Each image of a batch becomes lam times itself and 1 - lam times another one.

    Args:
        alpha: lam is drawn from the distribution Beta(alpha, alpha), once for each global batch.
        num_classes: labels become probabilities, float32 (n, num_classes). Without it they become
            `MixedLabels`.
        p: probability that a batch is mixed; one that is not has lam 1.
        labels: the field of the labels, where a sample has several fields; None if it has one number,
            or one that is called label or labels.
    """

    alpha: float = 1.0
    num_classes: int | None = None
    p: float = 1.0
    labels: str | None = None

    def __post_init__(self) -> None:
        between(self, "alpha", self.alpha, 1e-6, 1e6)
        self._check()

    def _mixers(self) -> list[tuple[str, float, float]]:
        return [("mixup", float(self.alpha), 1.0)]


@dataclass(frozen=True, kw_only=True)
class CutMix(BatchTransform):
    """A box of each image of a batch comes from another one, and its part of the label.

    Arguments are those of `MixUp`; 1 - lam is the box's part of the image.
    """

    alpha: float = 1.0
    num_classes: int | None = None
    p: float = 1.0
    labels: str | None = None

    def __post_init__(self) -> None:
        between(self, "alpha", self.alpha, 1e-6, 1e6)
        self._check()

    def _mixers(self) -> list[tuple[str, float, float]]:
        return [("cutmix", float(self.alpha), 1.0)]


@dataclass(frozen=True)
class RandomChoice(BatchTransform):
    """One of several `MixUp` and `CutMix` for each batch; `p` are their weights, equal if None.

    Their num_classes, p and labels must be equal.
    """

    transforms: Sequence[BatchTransform]
    p: Any = None

    def __post_init__(self) -> None:
        steps = tuple(self.transforms)
        object.__setattr__(self, "transforms", steps)
        if not steps or not all(isinstance(step, (MixUp, CutMix)) for step in steps):
            raise UsageError(f"RandomChoice: {steps!r} must be some of MixUp and CutMix")
        for name in ("num_classes", "p", "labels"):
            given = {getattr(step, name) for step in steps}
            if len(given) > 1:
                raise UsageError(f"RandomChoice: {name} differs: {', '.join(map(str, given))}")
        if self.p is not None:
            weights = numbers(self.p)
            if len(weights) != len(steps) or min(weights) < 0 or not 0 < sum(weights) < np.inf:
                raise UsageError(
                    f"RandomChoice: p {self.p!r} must have a weight, 0 or more, for each of "
                    f"{len(steps)} steps"
                )
            object.__setattr__(self, "p", weights)

    def _mixers(self) -> list[tuple[str, float, float]]:
        weights = self.p or [1.0] * len(self.transforms)
        kinds = [step._mixers()[0] for step in self.transforms]
        return [
            (kind, alpha, weight) for (kind, alpha, _), weight in zip(kinds, weights, strict=True)
        ]


class Mix:
    """How a loader mixes its batches.

    An image is mixed with the one `shift` places before it in the local batch, around its end.
    """

    def __init__(self, step: BatchTransform, shift: int) -> None:
        self.step = step.transforms[0] if isinstance(step, RandomChoice) else step
        self.native = _native.compile_mixing(
            step._mixers(), p=self.step.p, classes=self.step.num_classes or 0, shift=shift
        )

    def of_batch(
        self, images: Sequence[int], labels: int | None, draws_only: bool
    ) -> _native.BatchMix:
        """As a program takes it: the places of its images and of its labels among the fields.

        With `draws_only` the images stay as they are: a device mixes them as `mixed` says.
        """
        native = _native.BatchMix()
        native.draws_only = draws_only
        native.mixing = self.native
        native.images = list(images)
        if labels is not None and self.native.classes:
            native.labels = labels
        return native

    def mixed(self, batch: _native.Batch) -> Mixed | None:
        """How the images of a batch are to be mixed, if they are."""
        kind, lam, box = batch.mixture
        shift = self.native.shift % max(1, len(batch))
        return None if kind == "none" or shift == 0 else Mixed(kind, lam, box, shift)

    def labelled(self, lam: float, targets: Any, labels: NDArray[Any], to: Hand) -> Any:
        """What stands for the labels of a batch; `targets` are probabilities, if there are any."""
        if self.native.classes:
            return to.array(targets)
        return MixedLabels(lam, *to.both(labels, self.native.shift))

    def images_of(
        self, data: Any, labels: NDArray[Any], seed: int, epoch: int, batch: int
    ) -> tuple[float, Any]:
        """Mixes images that callables made, in place; gives lam and the targets."""
        shape = np.shape(data)
        if len(shape) != 4 or 3 not in (shape[1], shape[3]):
            raise UsageError(
                f"{type(self.step).__name__} mixes images, (n, 3, height, width) or (n, height, "
                f"width, 3), and the callables give a batch of shape {tuple(shape)}"
            )
        whole = np.zeros(len(labels), np.int64)
        if self.native.classes:
            if labels.dtype.kind not in "iu":
                raise UsageError(
                    f"{type(self.step).__name__}: num_classes= is for labels that are classes, and "
                    f"these are {labels.dtype}: leave it out"
                )
            whole = labels.astype(np.int64)
        images = np.asarray(data)
        # Those of a transposed array may lie in another order, and batches of them too.
        mixed = np.ascontiguousarray(images)
        lam, targets = self.native.apply(mixed, whole, seed=seed, epoch=epoch, batch=batch)
        if mixed is not images:
            images[...] = mixed
        return lam, targets

    def labels_in(self, schema: Schema) -> str:
        """The field of the labels."""
        numbers = [name for name, kind in schema.items() if isinstance(kind, Scalar)]
        named = [name for name in numbers if name in ("label", "labels")]
        chosen = [self.step.labels] if self.step.labels is not None else named or numbers
        if len(chosen) != 1 or chosen[0] not in numbers:
            raise UsageError(
                f"{type(self.step).__name__}: of which field are the labels? Pass labels=, one of "
                f"{', '.join(numbers) or 'those that are numbers: there are none'}"
            )
        return str(chosen[0])


def split(transforms: Any) -> tuple[Any, BatchTransform | None]:
    """The steps for samples, and the one for batches that ends them."""
    listed = isinstance(transforms, (list, tuple)) and len(transforms) > 0
    if listed and isinstance(transforms[-1], BatchTransform):
        return transforms[:-1], transforms[-1]
    return transforms, None
