"""The data loader: the plan's batches, decoded, transformed and in order."""

from typing import TYPE_CHECKING

from nostall.base._lazy import lazy

if TYPE_CHECKING:
    from nostall.base._tier import Tier
    from nostall.loader import testing, transforms
    from nostall.loader._context import Context, SampleTransform
    from nostall.loader._dynamic_batches import DynamicBatches
    from nostall.loader._loader import DataLoader
    from nostall.loader._mixing import MixedLabels
    from nostall.loader._options import LoaderOptions
    from nostall.loader._records import RawBatch
    from nostall.loader._tiers import Tiers

__all__ = [
    "Context",
    "DataLoader",
    "DynamicBatches",
    "LoaderOptions",
    "MixedLabels",
    "RawBatch",
    "SampleTransform",
    "Tier",
    "Tiers",
    "testing",
    "transforms",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "nostall.base._tier": "Tier",
            ".": "testing transforms",
            "._context": "Context SampleTransform",
            "._dynamic_batches": "DynamicBatches",
            "._loader": "DataLoader",
            "._mixing": "MixedLabels",
            "._options": "LoaderOptions",
            "._records": "RawBatch",
            "._tiers": "Tiers",
        },
    )
