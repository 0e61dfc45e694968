"""A kind of field of your own: a template to copy.

    python examples/own-field.py

The kind of this example is a set of class numbers, stored as bytes that zlib compresses; a batch has it
as zeros and ones, one column for each class. `decode` runs in the loader's transform threads.
"""

import zlib
from dataclasses import dataclass

import numpy as np

import nostall
from nostall import fields


@dataclass(frozen=True, kw_only=True)
class Tags(fields.Custom):
    """Which of `classes` classes a sample has: float32 (classes,)."""

    classes: int = 10
    fill: tuple | None = None

    @property
    def shape(self):
        return (self.classes,)

    def encode(self, value):
        """The stored bytes of a sequence of class numbers."""
        if not all(isinstance(tag, int) and 0 <= tag < self.classes for tag in value):
            raise nostall.errors.UsageError(
                f"Tags: {value!r} has no numbers of {self.classes} classes"
            )
        return zlib.compress(bytes(value))

    def decode(self, stored):
        """One number for each class."""
        try:
            tags = np.frombuffer(zlib.decompress(stored), np.uint8)
        except zlib.error as error:
            raise nostall.errors.CorruptionError(f"it is not compressed: {error}") from None
        if tags.size and tags.max() >= self.classes:
            raise nostall.errors.CorruptionError(f"it has the class {tags.max()} of {self.classes}")
        values = np.zeros(self.classes, np.float32)
        values[tags] = 1
        return values


def main():
    kind = Tags(classes=4, fill=())
    nostall.testing.check_field(
        kind,
        [(), (0, 3), (1,)],
        gives=[[0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 0, 0]],
        damaged=[b"no zlib", zlib.compress(b"\x09")],
        refused=[(4,)],
    )
    # A column in memory; a file or a member of an archive is of this kind in the same way.
    data = nostall.Files({}, {"tags": [(0, 3), (1,), None]}, schema={"tags": kind})
    loader = nostall.DataLoader(data, batch_size=3, epochs=1, shuffle=False, output="numpy")
    for batch in loader:
        print(batch["tags"])


if __name__ == "__main__":
    main()
