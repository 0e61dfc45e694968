"""Records of items read: one by one, or put together as the arrays of a batch.

Reading a record executes nothing; a pickle is read only if its class was allowed by name.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.base._tensors import tensor_of
from nostall.errors import CorruptionError, UsageError
from nostall.source._item_record import (
    PALETTE,
    UNKNOWN_TO_NUMPY,
    VISION,
    Leaf,
    RecordLayout,
    layout,
    values_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def admit(modules: frozenset[str]) -> None:
    """Imports the modules of named tuples that the data set of this job gives."""
    for module in modules:
        importlib.import_module(module)


def _class_named(name: str) -> Any:
    module, _, rest = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in rest.split("."):
        found = getattr(found, part, None)
    return found


def decode(record: NDArray[np.uint8], allowed: frozenset[str] = frozenset()) -> Any:
    """The item of a record, with memory of its own. `allowed` names classes that may be unpickled.

    Raises:
        CorruptionError: the bytes are no record.
    """
    found, record = layout(record)
    return _built(found.tree, _read_all(found, record, allowed))


def _read_all(found: RecordLayout, record: NDArray[np.uint8], allowed: frozenset[str]) -> list[Any]:
    return [
        _read(leaf, data, allowed)
        for leaf, data in zip(found.leaves, values_of(found, record), strict=True)
    ]


def _read(leaf: Leaf, data: NDArray[np.uint8], allowed: frozenset[str]) -> Any:
    try:
        return _READ[leaf.kind](leaf, data, allowed)
    except CorruptionError:
        raise
    except Exception as error:  # whatever numpy, torch, PIL or a pickle say to such bytes
        raise CorruptionError(f"a record has an impossible value: {error}") from error


def _built(tree: Any, values: list[Any]) -> Any:
    if isinstance(tree, int):
        return values[tree]
    if "d" in tree:
        return {key: _built(child, values) for key, child in tree["d"]}
    if "o" in tree:
        return _record_class(tree["o"])(*[_built(child, values) for child in tree["v"]])
    if "l" in tree:
        return [_built(child, values) for child in tree["l"]]
    return tuple(_built(child, values) for child in tree["u"])


@functools.lru_cache(maxsize=256)
def _record_class(name: str) -> Any:
    found = _class_named(name)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise CorruptionError(
            f"a record names {name} as a named tuple, and there is none of that name"
        )
    return found


Read = Callable[[Leaf, "NDArray[np.uint8]", frozenset[str]], Any]


def _read_tensor(leaf: Leaf, data: NDArray[np.uint8], _: frozenset[str]) -> Any:
    import torch

    dtype, shape = leaf.arguments[-2:]
    return tensor_of(data.copy(), getattr(torch, dtype), tuple(shape))


def _read_vision(leaf: Leaf, data: NDArray[np.uint8], allowed: frozenset[str]) -> Any:
    from torchvision import tv_tensors

    tensor = _read_tensor(leaf, data, allowed)
    name, more = leaf.arguments[:2]
    if name not in VISION or not more.keys() <= set(VISION[name]):
        raise CorruptionError(f"a record names the tensor {name} of torchvision, with {list(more)}")
    if "canvas_size" in more:
        more = {**more, "canvas_size": tuple(more["canvas_size"])}
    return getattr(tv_tensors, name)(tensor, **more)


def _read_array(leaf: Leaf, data: NDArray[np.uint8], _: frozenset[str]) -> Any:
    numbers, shape = leaf.arguments
    return data.copy().view(numbers).reshape(shape)


def _read_picture(leaf: Leaf, data: NDArray[np.uint8], _: frozenset[str]) -> Any:
    from PIL import Image

    mode, size = leaf.arguments
    if mode != "P":
        return Image.frombytes(mode, size, data.tobytes())
    picture = Image.frombytes("P", size, data[:-PALETTE].tobytes())
    picture.putpalette(data[-PALETTE:].tobytes(), "RGB")
    return picture


# Without these no object can be made anew.
_OBJECTS = frozenset(("builtins.object", "copyreg._reconstructor", "collections.OrderedDict"))


class _Unpickler(pickle.Unpickler):
    """Finds classes and functions that were allowed by name, and no others."""

    def __init__(self, data: bytes, allowed: frozenset[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed | _OBJECTS

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._allowed:
            raise CorruptionError(
                f"a pickle asks for {module}.{name}: if it may, name it in pickles= as well"
            )
        return super().find_class(module, name)


def _read_pickle(leaf: Leaf, data: NDArray[np.uint8], allowed: frozenset[str]) -> Any:
    if leaf.arguments[0] not in allowed:
        raise CorruptionError(
            f"a record holds a pickled {leaf.arguments[0]}, which was not allowed"
        )
    return _Unpickler(data.tobytes(), allowed).load()


_READ: dict[str, Read] = {
    "z": lambda leaf, data, allowed: None,
    "b": lambda leaf, data, allowed: bool(data[0]),
    "i": lambda leaf, data, allowed: int.from_bytes(data.tobytes(), "little", signed=True),
    "f": lambda leaf, data, allowed: struct.unpack("<d", data.tobytes())[0],
    "s": lambda leaf, data, allowed: data.tobytes().decode("utf-8", "surrogatepass"),
    "y": lambda leaf, data, allowed: data.tobytes(),
    "g": lambda leaf, data, allowed: data.copy().view(leaf.arguments[0])[0],
    "n": _read_array,
    "t": _read_tensor,
    "v": _read_vision,
    "p": _read_picture,
    "k": _read_pickle,
}


def collate(
    records: Sequence[NDArray[np.uint8]], output: str, allowed: frozenset[str] = frozenset()
) -> Any:
    """The items of a batch as one item of arrays, as torch's default_collate makes it.

    Tensors, arrays and numbers get a first dimension; texts and bytes become lists, but tuples where an
    item has them in a tuple or a list; containers stay. `output` is "torch", or "numpy" for arrays in
    the places of the tensors, but of those of types that NumPy does not have, as bfloat16.

    Raises:
        CorruptionError: the bytes are no records.
        UsageError: the items cannot be put together; says which.
    """
    layouts, wholes = zip(*(layout(record) for record in records), strict=True)
    first = layouts[0]
    if any(other is not first for other in layouts) or any(
        not _is_column(leaf, output) for leaf in first.leaves
    ):
        items = [
            _built(found.tree, _read_all(found, whole, allowed))
            for found, whole in zip(layouts, wholes, strict=True)
        ]
        return collate_items(items, output)
    others: list[list[NDArray[np.uint8]]] = []
    if not all(leaf.sized for leaf in first.leaves):
        others = [values_of(first, whole) for whole in wholes]
    columns: list[Any] = []
    for i, leaf in enumerate(first.leaves):
        if leaf.sized:
            columns.append(_COLUMNS[leaf.kind](leaf, _column(wholes, leaf), output))
        else:
            columns.append([_read(leaf, values[i], frozenset()) for values in others])
    return _gathered(first.tree, columns)


def _is_column(leaf: Leaf, output: str) -> bool:
    """Whether the values of a batch make one array, or a list of texts."""
    if leaf.kind in ("n", "g") and output == "torch":
        numbers = leaf.arguments[0]
        return numbers.kind in "biufc" and numbers.char not in "gG"  # torch has no others
    return leaf.kind in _COLUMNS


def _column(wholes: Sequence[NDArray[np.uint8]], leaf: Leaf) -> NDArray[np.uint8]:
    """The bytes of one value in every record, shape (n, size)."""
    column = np.empty((len(wholes), leaf.size), np.uint8)
    for to, whole in zip(column, wholes, strict=True):
        to[:] = whole[leaf.begin : leaf.begin + leaf.size]
    return column


def _as_output(values: NDArray[Any], output: str) -> Any:
    if output == "numpy":
        return values
    import torch

    return torch.from_numpy(values)


def _tensors(leaf: Leaf, column: NDArray[np.uint8], output: str) -> Any:
    dtype, shape = leaf.arguments
    if output == "numpy" and dtype not in UNKNOWN_TO_NUMPY:
        return column.view(dtype).reshape(len(column), *shape)
    import torch

    return tensor_of(column.reshape(-1), getattr(torch, dtype), (len(column), *shape))


_COLUMNS: dict[str, Callable[[Leaf, NDArray[np.uint8], str], Any]] = {
    "t": _tensors,
    "n": lambda leaf, column, output: _as_output(
        column.view(leaf.arguments[0]).reshape(len(column), *leaf.arguments[1]), output
    ),
    "g": lambda leaf, column, output: _as_output(column.view(leaf.arguments[0])[:, 0], output),
    "i": lambda leaf, column, output: _as_output(column.view(np.int64)[:, 0], output),
    "f": lambda leaf, column, output: _as_output(column.view(np.float64)[:, 0], output),
    "b": lambda leaf, column, output: _as_output(column.view(np.bool_)[:, 0], output),
    "s": lambda leaf, column, output: None,
    "y": lambda leaf, column, output: None,
}


def _gathered(tree: Any, columns: list[Any]) -> Any:
    """As `_built`, but a tuple becomes a list: default_collate makes one."""
    if isinstance(tree, int):
        return columns[tree]
    if "d" in tree:
        return {key: _gathered(child, columns) for key, child in tree["d"]}
    if "o" in tree:
        return _record_class(tree["o"])(*_in_sequence(tree["v"], columns))
    return _in_sequence(tree["l" if "l" in tree else "u"], columns)


def _in_sequence(children: list[Any], columns: list[Any]) -> list[Any]:
    """Values of a tuple or a list, whose texts default_collate leaves as zip() gives them."""
    values = [_gathered(child, columns) for child in children]
    for place, child in enumerate(children):
        if isinstance(child, int) and isinstance(values[place], list):
            values[place] = tuple(values[place])
    return values


def collate_items(items: Sequence[Any], output: str) -> Any:
    """Items put together as `collate` does with records.

    Raises:
        UsageError: they cannot be.
    """
    try:
        if output == "numpy":
            return _numpy_collate(list(items))
        from torch.utils.data import default_collate

        return default_collate(list(items))
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        raise UsageError(
            f"the items of a batch cannot be put together: {error}; pass collate=, which gets "
            "their list"
        ) from error


def unlike(items: Sequence[Any]) -> tuple[int, str] | None:
    """The place of the first item that is not like the first one, and how it differs."""
    for place, item in enumerate(items):
        if how := _difference(items[0], item, ""):
            return place, how
    return None


def _difference(first: Any, other: Any, where: str) -> str | None:
    inside = f" at {where}" if where else ""
    if isinstance(first, dict) and isinstance(other, dict):
        if first.keys() != other.keys():
            return f"has the keys {list(other)}{inside}, and not {list(first)}"
        parts = [(first[key], other[key], f"{where}[{key!r}]") for key in first]
    elif isinstance(first, tuple | list) and isinstance(other, tuple | list):
        if len(first) != len(other):
            return f"has {len(other)} values{inside}, and not {len(first)}"
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(first, other, strict=True))]
    else:
        parts = []
        shapes = [getattr(value, "shape", None) for value in (first, other)]
        plain = all(isinstance(value, int | float | np.generic) for value in (first, other))
        if type(first) is not type(other) and not plain:
            return f"is {type(other).__name__}{inside}, and not {type(first).__name__}"
        if shapes[0] != shapes[1] and not plain:
            return (
                f"has the shape {tuple(shapes[1] or ())}{inside}, and not {tuple(shapes[0] or ())}"
            )
    return next((how for part in parts if (how := _difference(*part))), None)


def _numpy_collate(items: Sequence[Any]) -> Any:
    first = items[0]
    if isinstance(first, dict):
        if any(item.keys() != first.keys() for item in items):
            raise ValueError("dictionaries with other keys")
        return {key: _numpy_collate([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        if any(len(item) != len(first) for item in items):
            raise ValueError("sequences of other lengths")
        columns = [_numpy_collate(column) for column in zip(*items, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    if isinstance(first, str | bytes):
        return items  # a list, or the tuple that zip() gives
    if type(first).__module__ == "torch":
        torch = sys.modules["torch"]
        if str(first.dtype).removeprefix("torch.") in UNKNOWN_TO_NUMPY:
            return torch.stack(items)
    elif not isinstance(first, int | float | np.generic | np.ndarray):
        raise TypeError(f"{type(first).__name__} makes no array")
    return np.stack([np.asarray(item) for item in items])
