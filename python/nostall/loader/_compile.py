"""Steps compiled to a native pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nostall.errors import UsageError
from nostall.loader._steps import Transform

if TYPE_CHECKING:
    from nostall import _native
    from nostall.source._source import Pixels


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
