"""Image transforms with torchvision's names and parameters, run by the native pipeline.

Each transform is a frozen dataclass that only describes a step; `compile` turns a sequence of them
into a `Pipeline`, which decodes and transforms an encoded image in one pass.
Random draws depend on (seed, epoch, sample) alone. Geometry moves the masks, boxes and keypoints of
a sample too.

Units, of all of them: sizes and paddings are pixels, sizes in the order (height, width); angles are
degrees; probabilities `p` are between 0 and 1; levels are 0 to 255. `fill` is the level of places
that get no pixel: a number for images and masks, three numbers for images (masks get 0), or
``{"image": ..., "mask": ...}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nostall.errors import UsageError
from nostall.loader._color_steps import (
    AutoAugment,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Normalize,
    RandAugment,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
    ToTensor,
    TrivialAugmentWide,
)
from nostall.loader._geometry_steps import (
    CenterCrop,
    ClampBoundingBoxes,
    Pad,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomPerspective,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    SanitizeBoundingBoxes,
)
from nostall.loader._mixing import CutMix, MixUp, RandomChoice
from nostall.loader._steps import Step, Transform
from nostall.loader._torchvision import from_torchvision

if TYPE_CHECKING:
    from nostall import _native
    from nostall.source._source import Pixels

__all__ = [
    "AutoAugment",
    "CenterCrop",
    "ClampBoundingBoxes",
    "ColorJitter",
    "CutMix",
    "Decode",
    "GaussianBlur",
    "Grayscale",
    "MixUp",
    "Normalize",
    "Pad",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomAutocontrast",
    "RandomChoice",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Resize",
    "SanitizeBoundingBoxes",
    "ToTensor",
    "Transform",
    "TrivialAugmentWide",
    "compile",
    "from_torchvision",
    "is_native",
]


@dataclass(frozen=True)
class Decode(Transform):
    """Decodes to RGB; implied when it is absent."""

    def to_step(self) -> Step:
        return "Decode", {}


def is_native(transforms: Iterable[object]) -> bool:
    """Whether every one of `transforms` can run in the native pipeline."""
    return all(isinstance(transform, Transform) for transform in transforms)


def compile(
    transforms: Sequence[Transform],
    *,
    dtype: str | None = None,
    layout: str | None = None,
    pixels: Pixels | None = None,
) -> _native.Pipeline:
    """Compiles `transforms` into one native pipeline, to be shared by threads.

    It takes encoded images, or with `pixels` samples that are pixels as it says.

    dtype is "uint8", "float16" or "float32", layout "chw" or "hwc"; the defaults are float32 chw
    with `ToTensor` and uint8 hwc without. Raises UsageError if the images would differ in size.
    """
    from nostall import _native

    for transform in transforms:
        if not isinstance(transform, Transform):
            raise UsageError(f"{transform!r} is not a transform of nostall.transforms")
    steps = [transform.to_step() for transform in transforms]
    if pixels is None:
        return _native.compile_pipeline(steps, dtype, layout)
    described = {
        "height": pixels.height,
        "width": pixels.width,
        "channels": pixels.channels,
        "channels_first": pixels.layout == "chw",
        "bgr": pixels.order == "bgr",
    }
    return _native.compile_pipeline(steps, dtype, layout, pixels=described)
