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

from typing import TYPE_CHECKING

from nostall.base._lazy import lazy
from nostall.loader._compile import compile
from nostall.loader._in_turn import Function
from nostall.loader._steps import Transform
from nostall.loader._usual_steps import (
    CenterCrop,
    Decode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

if TYPE_CHECKING:
    from nostall.loader._color_steps import (
        AutoAugment,
        ColorJitter,
        GaussianBlur,
        Grayscale,
        RandAugment,
        RandomAdjustSharpness,
        RandomAutocontrast,
        RandomEqualize,
        RandomErasing,
        RandomGrayscale,
        RandomInvert,
        RandomPosterize,
        RandomSolarize,
        TrivialAugmentWide,
    )
    from nostall.loader._geometry_steps import (
        ClampBoundingBoxes,
        Pad,
        RandomAffine,
        RandomCrop,
        RandomPerspective,
        RandomRotation,
        RandomVerticalFlip,
        SanitizeBoundingBoxes,
    )
    from nostall.loader._mixing import CutMix, MixUp, RandomChoice
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "nostall.loader._color_steps": "AutoAugment ColorJitter GaussianBlur Grayscale RandAugment "
            "RandomAdjustSharpness RandomAutocontrast RandomEqualize RandomErasing RandomGrayscale "
            "RandomInvert RandomPosterize RandomSolarize TrivialAugmentWide",
            "nostall.loader._geometry_steps": "ClampBoundingBoxes Pad RandomAffine RandomCrop "
            "RandomPerspective RandomRotation RandomVerticalFlip SanitizeBoundingBoxes",
            "nostall.loader._mixing": "CutMix MixUp RandomChoice",
            "nostall.loader._torchvision": "from_torchvision",
        },
        {
            "Compose": "transforms= takes the steps as a list, from_torchvision() a Compose as it is",
            "ToImage": "images are tensors without it",
            "PILToTensor": "images are tensors of uint8 without it, channels last",
            "ToDtype": "ToTensor() gives float32 from 0 to 1",
            "ConvertImageDtype": "ToTensor() gives float32 from 0 to 1",
            "Lambda": "a function is a step as it is",
        },
    )
