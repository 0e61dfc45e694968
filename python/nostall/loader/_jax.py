"""A device of JAX, or the devices of a sharding, as a place for batches."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from nostall.base._tensors import octets_of
from nostall.errors import UsageError
from nostall.loader._ahead import Finish, OfArrays, aligned
from nostall.loader._mixing import Mixed

if TYPE_CHECKING:
    from nostall import _native

_over_all: Any = jax.make_array_from_process_local_data


def place(name: Any) -> Device:
    """The device of this name, or the default one.

    Raises:
        UsageError: there is none.
    """
    if not isinstance(name, str):
        return Device(jax.local_devices()[0] if name is None else name)
    platform, _, number = name.partition(":")
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise UsageError(f"device={name!r}: {str(error).partition(chr(10))[0]}") from None
    if not (number or "0").isdecimal() or int(number or 0) >= len(devices):
        raise UsageError(f"device={name!r}: JAX finds {len(devices)} {platform} devices here")
    return Device(devices[int(number or 0)])


class Device:
    """JAX copies when it can, and holds the host's memory until then: on the CPU, where it need not
    copy, as long as the array lives.
    """

    mixes = False  # rolling a batch over several devices would move all of it

    def __init__(self, to: Any) -> None:
        self._to = to

    def memory(self, size: int) -> NDArray[np.uint8]:
        return aligned(size)

    def enter(self) -> None:
        """It has no streams."""

    def begin(self) -> Sending:
        return Sending(self._to)

    def is_full(self, error: BaseException) -> bool:
        return "RESOURCE_EXHAUSTED" in str(error)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # JAX has no events

    def pause(self) -> None:
        """There are no steps."""

    def waits(self) -> dict[str, float]:
        return {}


class Sending(OfArrays):
    """One batch: the arrays that it becomes."""

    def __init__(self, to: Any) -> None:
        self._to = to
        self._lock = threading.Lock()
        # Until they are the user's: JAX crashes if it is asked about an array that a step was donated.
        self._arrays: list[Any] = []
        self.bytes = 0

    def array(self, array: NDArray[Any]) -> jax.Array:
        if not isinstance(self._to, jax.sharding.Sharding):
            return self._keep(jax.device_put(array, self._to))
        try:
            return self._keep(_over_all(self._to, array))
        except ValueError as error:
            raise UsageError(
                f"a batch of shape {array.shape} does not divide among the devices of {self._to}: pass "
                f"drop_last=True, or another batch_size ({error})"
            ) from error

    def images(
        self, batch: _native.Batch, number: int, finish: Finish | None, mixed: Mixed | None
    ) -> jax.Array:
        assert mixed is None
        images: jax.Array = self.output(batch, number)
        if finish is None:
            return images
        # One operation after the other: compiled as one they would round once.
        scaled = jnp.multiply(images.astype(jnp.float32), np.array(finish.scale, np.float32))
        finished = jnp.add(scaled, np.array(finish.offset, np.float32)).astype(finish.dtype)
        return self._keep(finished.transpose(0, 3, 1, 2) if finish.layout == "chw" else finished)

    def both(self, array: NDArray[Any], shift: int) -> tuple[jax.Array, jax.Array]:
        return self.array(array), self.array(np.roll(array, shift, axis=0))

    def tree(self, value: Any) -> Any:
        return jax.tree.map(self._of_leaf, value, is_leaf=lambda one: type(one) is dict)

    def _of_leaf(self, leaf: Any) -> Any:
        if type(leaf) is dict:  # JAX would sort its keys
            return {key: self.tree(value) for key, value in leaf.items()}
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(leaf, torch.Tensor):
            is_plain = leaf.layout is torch.strided and not leaf.is_quantized
            return self.array(_array_of(leaf)) if is_plain else leaf
        if isinstance(leaf, np.ndarray) and _has_numbers(leaf.dtype):
            return self.array(leaf)
        return leaf

    def _keep(self, array: jax.Array) -> jax.Array:
        self._arrays.append(array)
        self.bytes += sum(shard.data.nbytes for shard in array.addressable_shards)
        return array

    def sent(self) -> None:
        """Nothing to do: JAX orders its copies."""

    def is_copied(self, wait: bool) -> bool:
        if wait:
            for array in list(self._arrays):
                try:
                    array.block_until_ready()
                except RuntimeError:
                    if not array.is_deleted():
                        raise
        with self._lock:
            if not wait and not all(array.is_ready() for array in self._arrays):
                return False
            self._arrays.clear()
            return True

    def hand_over(self) -> None:
        """What uses an array waits for it by itself; JAX holds the host's memory until it is copied."""
        with self._lock:
            self._arrays.clear()


def _has_numbers(dtype: np.dtype[Any]) -> bool:
    # NumPy calls bfloat16 void, and spans of time numbers.
    return dtype.kind in "biufc" or (dtype.kind == "V" and jnp.issubdtype(dtype, np.number))


def _array_of(tensor: Any) -> NDArray[Any]:
    """The values of a tensor; JAX names the types that NumPy alone does not have as torch does."""
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    dtype = jnp.dtype(str(plain.dtype).removeprefix("torch."))
    octets = octets_of(plain).numpy()
    array: NDArray[Any] = octets.view(dtype).reshape(tuple(plain.shape))
    return array
