"""The data loader: the plan's batches, decoded, transformed and in order."""

# _loader         `DataLoader`: its arguments, its epochs, its state
# _options        its rarer arguments; defaults and checks of all are in nostall/base/_table.py
# _recipe         what is done to samples and batches; _records, _collected: batches of several fields
# transforms      the steps' names and parameters; _compile: steps to a native pipeline
# _torchvision, _tv_tensors, _in_turn   steps of torchvision, and callables among native steps
# _python_transforms, _processes, _codecs   callables and kinds in Python: threads, worker processes
# _producer       a thread that works ahead: _feeder, for callables; _ahead, for devices
# _jax            batches on a device of JAX; that of torch is in nostall/torch/_device.py
# _tiers          tiers that several loaders share
# testing         checks of what users write

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
