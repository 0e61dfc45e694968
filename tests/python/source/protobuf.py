"""Just enough of protocol buffers, TFRecord and CRC32C to write data sets, in plain Python."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def example(features: dict[str, Any], packed: bool = True) -> bytes:
    """A tf.train.Example, of bytes, numbers, and lists of one of them."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        elif isinstance(value, float):
            feature = field(2, field(1, struct.pack("<f", value)))
        elif isinstance(value, list) and any(isinstance(v, float) for v in value):
            feature = field(2, field(1, struct.pack(f"<{len(value)}f", *value)))
        elif isinstance(value, list) and any(isinstance(v, bytes) for v in value):
            feature = field(1, b"".join(field(1, v) for v in value))
        else:
            numbers = [value] if isinstance(value, int) else value
            if packed:
                content = field(1, b"".join(varint(n) for n in numbers))
            else:
                content = b"".join(field(1, n) for n in numbers)
            feature = field(3, content)
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def datum(
    data: bytes, label: int, shape: tuple[int, int, int] = (0, 0, 0), encoded: bool = False
) -> bytes:
    """Caffe's Datum; shape is (channels, height, width)."""
    out = b"".join(field(i + 1, n) for i, n in enumerate(shape) if n)
    out += field(4, data) + field(5, label)
    return out + (field(7, 1) if encoded else b"")


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def write_tfrecord(path: Path, records: list[bytes]) -> list[int]:
    """Where each record's bytes begin."""
    places = []
    out = bytearray()
    for record in records:
        length = struct.pack("<Q", len(record))
        out += length + struct.pack("<I", masked_crc32c(length))
        places.append(len(out))
        out += record + struct.pack("<I", masked_crc32c(record))
    path.write_bytes(out)
    return places
