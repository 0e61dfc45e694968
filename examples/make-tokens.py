"""Writes the tokens that the examples of language models read.

    python examples/make-tokens.py /tmp/tokens

train.bin has ids of uint16; 0 ends a document.
"""

import sys
from pathlib import Path

import numpy as np

VOCABULARY, DOCUMENTS = 64, 60


def main(root):
    rng = np.random.default_rng(0)
    documents = []
    for length in rng.integers(5, 120, DOCUMENTS):
        # Each id follows from the one before, so that a model can learn it.
        ids = (rng.integers(1, VOCABULARY) + 5 * np.arange(length)) % (VOCABULARY - 1) + 1
        documents.append(np.append(ids, 0))
    root.mkdir(parents=True, exist_ok=True)
    np.concatenate(documents).astype(np.uint16).tofile(root / "train.bin")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
