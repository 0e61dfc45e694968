"""A source of your own: a template to copy.

    python examples/own-source.py FOLDER

The format of this example is an archive in one file, `FOLDER/train.blob`, of images one after the
other, and a table, `FOLDER/train.csv`, with a line "name,offset,length,label" for each. Sizes come
from the table, and the reader reads one range a sample. Samples of several fields are the same with
`FieldReader` and `CustomFields`.
"""

import csv
import os
import sys

import nostall


class BlobReader(nostall.SampleReader):
    """Reads ranges of one file; its file is opened anew in every process that has a copy."""

    def __init__(self, path, names, offsets, lengths):
        self.path, self.names, self.offsets, self.lengths = path, names, offsets, lengths

    def read(self, samples):
        # Called by several threads at once: os.pread has no position that they would share.
        file = os.open(self.path, os.O_RDONLY)
        try:
            return [os.pread(file, self.lengths[s], self.offsets[s]) for s in samples]
        finally:
            os.close(file)

    def describe(self, sample):
        return f"{self.path}, {self.names[sample]}"


def open_blob(folder):
    """The source: sizes and labels from the table, everything else from the reader."""
    path = os.path.abspath(os.path.join(folder, "train.blob"))
    with open(os.path.join(folder, "train.csv"), newline="") as table:
        rows = [
            (n, int(offset), int(length), int(label))
            for n, offset, length, label in csv.reader(table)
        ]
    names, offsets, lengths, labels = (list(column) for column in zip(*rows, strict=True))
    state = os.stat(path)
    return nostall.CustomSource(
        BlobReader(path, names, offsets, lengths),
        lengths,
        labels,
        # Another text whenever the samples, or their bytes, are others.
        identity=f"{path} {state.st_size} {state.st_mtime_ns}",
    )


def main(folder):
    source = open_blob(folder)
    nostall.testing.check_source(source, start_methods=["fork"])
    loader = nostall.DataLoader(source, batch_size=4, epochs=2, seed=0, output="numpy")
    for epoch in loader.epochs():
        count = sum(len(labels) for _, labels in epoch)
        print(f"epoch {epoch.index}: {count} samples of {len(source)}")


if __name__ == "__main__":
    main(sys.argv[1])
