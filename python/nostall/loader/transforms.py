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

from dataclasses import dataclass

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
from nostall.loader._compile import compile
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
from nostall.loader._in_turn import Function
from nostall.loader._mixing import CutMix, MixUp, RandomChoice
from nostall.loader._steps import Step, Transform
from nostall.loader._torchvision import from_torchvision

__all__ = [
    "AutoAugment",
    "CenterCrop",
    "ClampBoundingBoxes",
    "ColorJitter",
    "CutMix",
    "Decode",
    "Function",
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
]


@dataclass(frozen=True)
class Decode(Transform):
    """Decodes to RGB; implied when it is absent."""

    def to_step(self) -> Step:
        return "Decode", {}
