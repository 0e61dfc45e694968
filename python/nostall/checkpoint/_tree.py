"""A training's state as a tree of plain values and named arrays, and back, without pickle.

Dictionaries, lists, tuples, numbers, strings, bytes and None become JSON; arrays, tensors and long
bytes become names that point into a safetensors file. Whatever else the state holds is refused with
its place.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.base._tensors import tensor_of
from nostall.errors import CorruptionError, UsageError

# NumPy's names of safetensors' types; anything else of fixed size is kept as bytes.
_NUMPY = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NAMES = {code: name for name, code in _NUMPY.items()}
# Of an element, in bytes.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "I32": 4,
    "U64": 8,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_DEEPEST = 100
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
# Bytes that are longer are kept as an array is.
_SHORT_BYTES = 1024
# Integers of more bits are kept in hexadecimal: Python limits decimal digits, at the lowest to 640.
_SHORT_INT_BITS = 2048


@dataclass(frozen=True)
class Leaf:
    """An array of the state: where it lies now, and as what it is written.

    `address` is that of `nbytes` contiguous bytes, which `owner` keeps alive; `align` is the size of
    an element in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    address: int
    align: int
    owner: Any


class _Encoder:
    def __init__(self, host: Callable[[Any, Any], Any] | None) -> None:
        self._host = host
        self.leaves: list[Leaf] = []
        self._names: set[str] = set()
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > _DEEPEST:
            raise UsageError(f"{_place(path[:5])}... is nested deeper than {_DEEPEST} levels")
        # Before what it may be besides: a restore gives it to load_state_dict.
        loads = callable(getattr(value, "load_state_dict", None))
        if loads and callable(getattr(value, "state_dict", None)):
            return self._own_state(value, path)
        return self._value(value, path)

    def _own_state(self, value: Any, path: tuple[Any, ...]) -> Any:
        """What an object gives as its state; of a mapping its entries, if that cannot be held."""
        state = value.state_dict()
        if not isinstance(value, Mapping):
            return self._value(state, path)
        before = [*self.leaves], {*self._names}, {**self._seen}
        try:
            return self._value(state, path)
        except UsageError:
            self.leaves, self._names, self._seen = before
            return self._mapping(value, path)

    def _value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            _refuse_pairs(value, path)
            return value
        if type(value) is int:
            return value if value.bit_length() <= _SHORT_INT_BITS else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, complex) and type(value) is complex:
            return {"$complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, bytes | bytearray):
            return self._bytes(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, tuple):
            return {"$tuple": [self.encode(v, (*path, i)) for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [self.encode(v, (*path, i)) for i, v in enumerate(value)]
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._torch(torch, value, path)
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(value, jax.Array):
            return self._jax(jax, value, path)
        if callable(getattr(value, "state_dict", None)):
            return self.encode(value.state_dict(), path)
        raise UsageError(
            f"{_place(path)} is a {type(value).__module__}.{type(value).__qualname__}: checkpoints "
            "hold arrays, tensors, numbers, strings, bytes, None, dictionaries, lists, tuples and "
            "objects with a state_dict; leave it out or turn it into one of these"
        )

    def _bytes(self, value: bytes | bytearray, path: tuple[Any, ...]) -> Any:
        if len(value) <= _SHORT_BYTES:
            return {"$bytes": base64.b64encode(value).decode()}
        array = np.frombuffer(bytes(value), np.uint8)
        node = {"kind": "bytes"}
        address = array.ctypes.data
        return {"$bytes": self._leaf(node, path, "U8", array.shape, array, address, len(array))}

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        versions = getattr(value, "_metadata", None)
        if isinstance(versions, Mapping):
            return {"$dict": self._pairs(value, path), "$metadata": _without_arrays(versions)}
        if isinstance(value, Counter):  # as MultiStepLR's milestones, which a plain dict cannot be
            return {"$dict": self._pairs(value, path), "$counter": True}
        if all(type(key) is str and not key.startswith("$") for key in value):
            for key in value:
                _refuse_pairs(key, path)
            return {key: self.encode(v, (*path, key)) for key, v in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Any]:
        pairs = []
        for key, v in value.items():
            if key is not None and not isinstance(key, bool | int | float | str | tuple):
                raise UsageError(
                    f"{_place(path)} has the key {key!r} of type {type(key).__qualname__}: keys are "
                    "strings, numbers or tuples of them"
                )
            pairs.append([self.encode(key, (*path, "key")), self.encode(v, (*path, key))])
        return pairs

    def _numpy(self, value: NDArray[Any] | np.generic, path: tuple[Any, ...]) -> Any:
        _refuse_more_than_data(value, path)
        array = np.asarray(value)
        dtype = array.dtype
        if dtype.hasobject or dtype.names is not None:
            raise UsageError(
                f"{_place(path)} is an array of {dtype}: arrays of Python objects or of records "
                "cannot be checkpointed; save their columns as arrays"
            )
        if array.size and not dtype.itemsize:
            raise UsageError(f"{_place(path)} is an array of {dtype}, whose elements have no bytes")
        array = np.ascontiguousarray(array).reshape(array.shape)
        kind = "scalar" if isinstance(value, np.generic) else "numpy"
        native = dtype.isnative and dtype.name in _NUMPY
        node: dict[str, Any] = {"kind": kind}
        if not native:
            # Other libraries' types call themselves bytes there.
            name = dtype.str if np.dtype(dtype.str) == dtype else dtype.name
            node |= {"dtype": name, "shape": list(array.shape)}
        code = _NUMPY[dtype.name] if native else "U8"
        shape = array.shape if native else (array.nbytes,)
        return self._leaf(node, path, code, shape, array, array.ctypes.data, array.nbytes)

    def _jax(self, jax: Any, value: Any, path: tuple[Any, ...]) -> Any:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise UsageError(
                f"{_place(path)} is a random key of JAX: save jax.random.key_data of it, and make the "
                "key again by jax.random.wrap_key_data"
            )
        if not (value.is_fully_addressable or value.is_fully_replicated):
            raise UsageError(
                f"{_place(path)} is an array of JAX of which other processes hold parts: save it with "
                "Orbax, and the loader's state_dict() beside it"
            )
        return self._numpy(np.asarray(value), path)

    def _torch(self, torch: Any, value: Any, path: tuple[Any, ...]) -> Any:
        if type(value).__name__ == "DTensor":
            raise UsageError(
                f"{_place(path)} is a DTensor: save sharded state with torch.distributed.checkpoint "
                "and nostall.torch.checkpoint.StorageWriter, which can load it on another world size"
            )
        nested = "nested, " if value.is_nested else ""
        if (
            nested
            or value.layout != torch.strided
            or value.is_quantized
            or value.device.type == "meta"
        ):
            raise UsageError(
                f"{_place(path)} is a {nested}{value.layout} tensor of {value.dtype} on "
                f"{value.device}: only dense tensors with memory can be checkpointed"
            )
        if _has_no_memory(torch, value):
            raise UsageError(
                f"{_place(path)} is a {type(value).__module__}.{type(value).__qualname__} without "
                "memory of its own: save what it is made of as plain tensors"
            )
        tensor = value.detach()
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.device.type != "cpu":
            tensor = tensor.cpu() if self._host is None else self._host(torch, tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        node: dict[str, Any] = {"kind": "torch"}
        nbytes = tensor.numel() * tensor.element_size()
        code, shape = _NUMPY.get(name), tuple(tensor.shape)
        if code is None:
            node |= {"dtype": name, "shape": list(shape)}
            code, shape = "U8", (nbytes,)
        return self._leaf(node, path, code, shape, tensor, tensor.data_ptr(), nbytes)

    def _leaf(
        self,
        node: dict[str, Any],
        path: tuple[Any, ...],
        code: str,
        shape: tuple[int, ...],
        owner: Any,
        address: int,
        nbytes: int,
    ) -> Any:
        # Tied weights: the same memory in two places of the state is written once.
        same = (address, nbytes, code, shape, node["kind"], node.get("dtype"))
        if nbytes and same in self._seen and node["kind"] != "scalar":
            return {"$tensor": self._seen[same], **node}
        name = base = ".".join(str(p) for p in path) or "state"
        for i in range(2, len(self._names) + 3):
            if name not in self._names and name != "__metadata__":
                break
            name = f"{base}#{i}"
        self._names.add(name)
        self._seen[same] = name
        align = owner.itemsize if isinstance(owner, np.ndarray) else int(owner.element_size())
        self.leaves.append(Leaf(name, code, shape, nbytes, address, align, owner))
        return {"$tensor": name, **node}


def _refuse_pairs(text: str, path: tuple[Any, ...]) -> None:
    """Two surrogates that make a pair are in JSON the one character that the pair stands for."""
    if not text.isascii() and _PAIR.search(text):
        raise UsageError(
            f"{_place(path)} has the text {text!r} with a pair of surrogates, which comes back as one "
            "character: save its bytes, or the character itself"
        )


def _refuse_more_than_data(value: Any, path: tuple[Any, ...]) -> None:
    masked = isinstance(value, np.ma.MaskedArray)
    # These two have attributes of NumPy's own.
    own = isinstance(value, np.memmap | np.matrix)
    more = [] if own else sorted(getattr(value, "__dict__", ()))
    if not (masked or more):
        return
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    names = ".data and .mask" if masked else f"numpy.asarray() of it and {', '.join(more)}"
    raise UsageError(
        f"{_place(path)} is a {kind}, which is more than an array: save {names}, each by itself"
    )


def _has_no_memory(torch: Any, tensor: Any) -> bool:
    """Whether it is made of other tensors, or its memory was given back: its address means nothing."""
    wraps = getattr(torch.utils._python_dispatch, "is_traceable_wrapper_subclass", None)
    if wraps is not None and wraps(tensor):
        return True
    if tensor.device.type not in ("cpu", "cuda"):  # others may have no address
        return False
    try:
        return bool(tensor.numel()) and not tensor.data_ptr()
    except (RuntimeError, ValueError):  # of a wrapper; of a parameter that is not initialized
        return True


def _without_arrays(values: Mapping[Any, Any]) -> Any:
    """The node of a mapping, but for entries that hold arrays or what a checkpoint cannot."""
    pairs = []
    encoder = _Encoder(None)
    for key, value in values.items():
        with contextlib.suppress(UsageError):
            pair = [encoder.encode(key, ()), encoder.encode(value, ())]
            if not encoder.leaves:
                pairs.append(pair)
        if encoder.leaves:
            encoder = _Encoder(None)
    return {"$dict": pairs}


def called(state: Any) -> Any:
    """What a function returns, or the state itself: a module is one, though it can be called."""
    if callable(state) and not callable(getattr(state, "state_dict", None)):
        return state()
    return state


def encode(state: Any, host: Callable[[Any, Any], Any] | None = None) -> tuple[Any, list[Leaf]]:
    """The state as JSON values, and its arrays.

    ``host(torch, tensor)`` gives the memory of a device's tensor on the host; None: a copy, at once.

    Raises:
        UsageError: something that a checkpoint cannot hold, named by its place.
    """
    encoder = _Encoder(host)
    return encoder.encode(state, ()), encoder.leaves


@dataclass(frozen=True)
class Stored:
    """An array of a file: uint8 `data` of shape (bytes,), a safetensors `dtype`, a shape."""

    data: NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


def decode(tree: Any, arrays: Mapping[str, Stored], placed: Mapping[str, Any] | None = None) -> Any:
    """The state that `encode` was given; arrays are views of the memory behind `arrays`, or the
    tensors that are `placed` under their names.

    Raises:
        CorruptionError: the tree is not one of ours.
    """
    made: dict[tuple[str, str], Any] = {}
    placed = placed or {}

    def build(node: Any) -> Any:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, list):
            return [build(v) for v in node]
        if not any(key.startswith("$") for key in node):
            return {key: build(v) for key, v in node.items()}
        if "$tensor" in node:
            name, kind = node["$tensor"], node["kind"]
            if name in placed:
                return placed[name]
            if kind == "scalar" or (name, kind) not in made:
                made[name, kind] = _array(arrays[name], node)
            return made[name, kind]
        if "$tuple" in node:
            return tuple(build(v) for v in node["$tuple"])
        if "$dict" in node:
            values = {build(key): build(v) for key, v in node["$dict"]}
            if "$counter" in node:
                return Counter(values)
            if "$metadata" not in node:
                return values
            state = OrderedDict(values)  # as a module's own, which a plain dict cannot be
            state._metadata = build(node["$metadata"])  # type: ignore[attr-defined]
            return state
        if "$int" in node:
            return int(node["$int"], 16)
        if "$float" in node:
            return float(node["$float"])
        if "$complex" in node:
            return complex(*(float.fromhex(part) for part in node["$complex"]))
        if "$bytes" in node:
            kept = node["$bytes"]
            if isinstance(kept, str):
                return base64.b64decode(kept)
            return arrays[kept["$tensor"]].data.tobytes()
        raise ValueError(f"unknown node {sorted(node)}")

    try:
        return build(tree)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise CorruptionError(f"the checkpoint's tree of values cannot be read: {error}") from error


def heaviest(tree: Any) -> tuple[str, int]:
    """The place of the innermost value that takes most of the text of a tree, and its bytes."""
    path: tuple[Any, ...] = ()
    size = _text_bytes(tree)
    while True:
        sizes = [(_text_bytes(one), key, one) for key, one in _children(tree)]
        most, key, one = max(sizes, key=lambda found: found[0], default=(0, None, None))
        if 2 * most <= size:
            return _place(path), size
        path, size, tree = (*path, key), most, one


def _text_bytes(tree: Any) -> int:
    return len(json.dumps(tree, separators=(",", ":")))


def _children(node: Any) -> list[tuple[Any, Any]]:
    """The nodes in a node, by the keys that they have in the state."""
    if isinstance(node, dict):
        if "$dict" in node:
            return [(decode(key, {}), one) for key, one in node["$dict"]]
        if "$tuple" not in node:
            plain = not any(key.startswith("$") for key in node)
            return list(node.items()) if plain else []
        node = node["$tuple"]
    return list(enumerate(node)) if isinstance(node, list) else []


def import_for(tree: Any) -> float:
    """Imports torch if `decode` needs it; the seconds that this took, which the read did not."""
    if "torch" in sys.modules or not _has_torch(tree):
        return 0.0
    began = time.perf_counter()
    import torch  # noqa: F401

    return time.perf_counter() - began


def _has_torch(tree: Any) -> bool:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if "$tensor" in node and node.get("kind") == "torch":
                return True
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return False


def _array(stored: Stored, node: Mapping[str, Any]) -> Any:
    name = node.get("dtype") or _NAMES[stored.dtype]
    shape = tuple(node.get("shape", stored.shape))
    if node["kind"] == "torch":
        import torch

        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch {torch.__version__} has no dtype {name}")
        return tensor_of(stored.data, dtype, shape)
    array = stored.data.view(_dtype(name)).reshape(shape)
    return array[()] if node["kind"] == "scalar" else array


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


def _place(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)
