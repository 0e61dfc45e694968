"""Items of a data set in Python written as records (_item_record.py)."""

from __future__ import annotations

import json
import pickle
import struct
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from nostall.base._tensors import octets_of
from nostall.errors import UsageError
from nostall.source._item_record import (
    BEGIN,
    HEAD,
    LARGEST,
    LENGTH,
    MODES,
    PALETTE,
    VISION,
    Template,
    aligned,
)


def _home(kind: type) -> str:
    # What a spawned process calls the program that the user started.
    return "__main__" if kind.__module__ == "__mp_main__" else kind.__module__


def _name_of(kind: type) -> str:
    return f"{_home(kind)}.{kind.__qualname__}"


class _Writer:
    """Takes an item apart into its template, its sized values and its other values."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self.sized: list[Any] = []  # bytes-like, in the order of the template
        self.others: list[bytes] = []

    def _other(self, data: bytes) -> None:
        self.sized.append(LENGTH.pack(len(data)))
        self.others.append(data)

    def take(self, value: Any, where: str) -> Template:
        """The template of `value`, which lies at `where` in the item."""
        kind = type(value)
        simple = self._simple(kind, value)
        if simple is not None:
            return simple
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            return self._tensor(value, where)
        if kind is dict:
            return {
                "d": [[_key(k, where), self.take(v, f"{where}[{k!r}]")] for k, v in value.items()]
            }
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = [
                self.take(v, f"{where}.{f}") for f, v in zip(value._fields, value, strict=True)
            ]
            return {"o": f"{_home(kind)}:{kind.__qualname__}", "v": fields}
        if kind is list or kind is tuple:
            return {
                "l" if kind is list else "u": [
                    self.take(v, f"{where}[{i}]") for i, v in enumerate(value)
                ]
            }
        if "PIL.Image" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image):
            return self._picture(value, where)
        return self._pickled(value, where)

    def _simple(self, kind: type, value: Any) -> Template:
        if value is None:
            return "z"
        if kind is bool:
            self.sized.append(b"\1" if value else b"\0")
            return "b"
        if kind is int and -(2**63) <= value < 2**63:
            self.sized.append(value.to_bytes(8, "little", signed=True))
            return "i"
        if kind is float:
            self.sized.append(struct.pack("<d", value))
            return "f"
        if kind is str:
            self._other(value.encode("utf-8", "surrogatepass"))
            return "s"
        if kind is bytes:
            self._other(value)
            return "y"
        return None

    def _array(self, value: Any, where: str) -> Template:
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            raise UsageError(f"{where} is a {_name_of(type(value))}: give a plain array of it")
        if value.dtype.kind not in "biufcSUmM":
            raise UsageError(
                f"{where} is an array of type {value.dtype}, which is not numbers: convert it"
            )
        plain = value.astype(value.dtype.newbyteorder("<"), copy=False)
        self.sized.append(np.ascontiguousarray(plain).reshape(-1).view(np.uint8))
        if isinstance(value, np.generic):
            return ["g", plain.dtype.str]
        return ["n", plain.dtype.str, list(value.shape)]

    def _tensor(self, value: Any, where: str) -> Template:
        torch = sys.modules["torch"]
        if value.layout is not torch.strided or value.is_quantized or value.is_complex():
            raise UsageError(f"{where} is a tensor that is not dense and real: convert it")
        # As a plain tensor: a subclass may give itself another meaning of every operation.
        plain = value.detach().as_subclass(torch.Tensor).cpu().contiguous()
        self.sized.append(octets_of(plain).numpy())
        template = ["t", str(plain.dtype).removeprefix("torch."), list(plain.shape)]
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return template
        name = _name_of(kind)
        if not name.startswith("torchvision.tv_tensors.") or kind.__name__ not in VISION:
            raise UsageError(f"{where} is a {name}: give a plain tensor of it")
        # Earlier torchvisions lack some.
        more = {m: getattr(value, m) for m in VISION[kind.__name__] if hasattr(value, m)}
        if "format" in more:
            more["format"] = more["format"].name
        return ["v", kind.__name__, more, template]

    def _picture(self, value: Any, where: str) -> Template:
        data = value.tobytes()
        if "transparency" in value.info or (value.mode == "P" and value.palette.mode != "RGB"):
            raise UsageError(f"{where} is an image with transparency: convert it to RGBA or RGB")
        if value.mode == "P":
            palette = bytes(value.getpalette("RGB") or b"")
            data += palette.ljust(PALETTE, b"\0")
        elif value.mode not in MODES:
            raise UsageError(f"{where} is an image of mode {value.mode}: convert it")
        self.sized.append(data)
        return ["p", value.mode, *value.size]

    def _pickled(self, value: Any, where: str) -> Template:
        name = _name_of(type(value))
        if name not in self._allowed:
            raise UsageError(
                f"{where} is a {name}, which cannot be stored: give tensors, arrays, numbers, texts, "
                f"bytes, images and containers of them, or allow its pickle by pickles=[{name!r}]"
            )
        self._other(pickle.dumps(value, protocol=5))
        return ["k", name]


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str | int | float | bool) or key is None:
        return key
    raise UsageError(f"{where} has the key {key!r}: keys must be texts or numbers")


def encode(item: Any, allowed: Iterable[str] = ()) -> bytes:
    """The record of an item.

    Raises:
        UsageError: a part of it cannot be stored; says which.
    """
    writer = _Writer(frozenset(allowed))
    template = json.dumps(writer.take(item, "the item"), separators=(",", ":")).encode()
    parts: list[Any] = []
    at = aligned(HEAD.size + len(template), BEGIN)
    parts.append(template.ljust(at - HEAD.size, b" "))
    for value in writer.sized:
        size = len(value)
        parts += [value, bytes(aligned(size) - size)]
        at += aligned(size)
    parts += writer.others
    at += sum(map(len, writer.others))
    if at > LARGEST:
        raise UsageError(f"the item has {at} bytes: one record holds less than 4 GiB")
    return b"".join([HEAD.pack(len(template), at), *parts])
