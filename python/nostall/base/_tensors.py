"""The memory of torch's tensors as bytes, and back.

A tensor of one value or of none may have any stride, of which torch takes no view of another type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def octets_of(tensor: Any) -> Any:
    """The memory of a contiguous tensor: uint8 of shape (bytes,)."""
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tensor_of(octets: NDArray[np.uint8], dtype: Any, shape: tuple[int, ...]) -> Any:
    """The tensor whose memory these are, uint8 of shape (bytes,)."""
    import torch

    return torch.from_numpy(octets).as_strided(octets.shape, (1,)).view(dtype).reshape(shape)
