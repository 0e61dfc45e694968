"""A dataset provider of Megatron-LM: train, validation and test by a split string; keys of get_batch.

    python examples/lm-megatron.py /tmp/tokens

Megatron's own package writes the files, splits them and makes the masks that ours are compared with.
"""

import sys

import numpy as np
import torch
from megatron.core.datasets import blended_megatron_dataset_config as splits
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

import nostall

LENGTH, BATCH, STEPS, SPLIT, END = 32, 4, 6, "80,15,5", 0


def train_valid_test_datasets(prefix, split):
    """Windows of the documents of each part, as large as Megatron makes it; None for an empty part."""
    tokens = nostall.Tokens(f"{prefix}.bin")
    units = nostall.Windows(
        tokens, LENGTH, documents=True, fields=("ids", "labels", "positions", "segments")
    )
    shares = splits.parse_and_normalize_split(split)
    ends = np.concatenate([[0], np.cumsum(tokens.lengths, dtype=np.int64)])
    found = []
    for part in splits.convert_split_vector_to_split_matrix(shares):
        if part is None:
            found.append(None)
            continue
        first, last = (int(ends[round(share * tokens.documents)]) for share in part)
        # A window has no token of another part, its last label included.
        found.append(nostall.Subset(units, range(-(-first // LENGTH), (last - 1) // LENGTH)))
    return found


def get_batch(iterator):
    """The keys of Megatron's get_batch, in its order."""
    batch = next(iterator)
    segments = batch["segments"]
    before = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    same = segments[:, :, None] == segments[:, None, :]
    learned = batch["labels"] != -100
    return {
        "tokens": batch["ids"],
        "labels": batch["labels"].clamp(min=0),
        "loss_mask": learned.float(),
        "attention_mask": ~(same & before)[:, None],
        "position_ids": batch["positions"],
    }


def check(batch):
    """That masks and positions are Megatron's, reset at the ends of documents."""
    for row in range(BATCH):
        attention, loss, positions = _get_ltor_masks_and_position_ids(
            batch["tokens"][row], END, True, True, True, True
        )
        assert torch.equal(batch["attention_mask"][row], attention)
        assert torch.equal(batch["loss_mask"][row], loss)
        assert torch.equal(batch["position_ids"][row], positions)


def write(root):
    """The documents of train.bin as Megatron's tools write them."""
    ids = np.fromfile(f"{root}/train.bin", np.uint16)
    builder = IndexedDatasetBuilder(f"{root}/megatron.bin", dtype=np.uint16)
    for document in np.split(ids, np.flatnonzero(ids == END)[:-1] + 1):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{root}/megatron.idx")


def main(root):
    write(root)
    train, valid, test = train_valid_test_datasets(f"{root}/megatron", SPLIT)
    assert len(train) > len(valid) > len(test) > 0
    # In Megatron: rank=parallel_state.get_data_parallel_rank(), and the size of that group.
    with nostall.DataLoader(train, BATCH, steps=STEPS, seed=0, rank=0, world_size=1) as loader:
        iterator = iter(loader)
        for _ in range(STEPS):
            check(get_batch(iterator))
    print(f"megatron: {len(train)}, {len(valid)} and {len(test)} windows, the same batches")


if __name__ == "__main__":
    main(sys.argv[1])
