"""ImageNet's folders and development kit give the labels and classes of torchvision."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from torchvision.datasets import imagenet as theirs

import nostall
from nostall.errors import CorruptionError, IoError, UsageError

# Numbers of ILSVRC2012 do not follow the order of the ids; the last one is a group of others.
SYNSETS = [
    (1, "n03000000", "crane, hoist", 0),
    (2, "n01000000", "tench, Tinca tinca", 0),
    (3, "n02000000", "crane", 0),
    (4, "n00000001", "thing", 3),
]
TRUTH = [2, 1, 3, 3, 1]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    data = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("gloss", object)]
    rows = np.array(
        [(n, synset, words, "", children) for n, synset, words, children in SYNSETS],
        dtype=[*kinds, ("num_children", object)],
    )
    savemat(data / "meta.mat", {"synsets": rows.reshape(-1, 1)})
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text(
        "".join(f"{number}\n" for number in TRUTH)
    )
    for _, synset, _, children in SYNSETS:
        if not children:
            (tmp_path / "train" / synset).mkdir(parents=True)
            for i in range(2):
                (tmp_path / "train" / synset / f"{synset}_{i}.JPEG").write_bytes(b"x" * (i + 1))
    (tmp_path / "val").mkdir()
    for i in range(len(TRUTH)):
        (tmp_path / "val" / f"ILSVRC2012_val_{i + 1:08}.JPEG").write_bytes(b"v" * (i + 1))
    return tmp_path


def test_labels_and_classes_are_those_of_torchvision(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(root / theirs.ARCHIVE_META["devkit"][0], "w:gz") as archive:
        archive.add(root / "ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12")
    monkeypatch.setattr(theirs, "_verify_archive", lambda *_: None)  # of the real one
    theirs.parse_devkit_archive(str(root))
    names, truth = theirs.load_meta_file(str(root))
    train, val = nostall.ImageNet(root), nostall.ImageNet(root, "val")
    known = theirs.ImageNet(str(root), split="train")
    assert train.synsets == known.wnids
    assert train.classes == val.classes == [names[synset] for synset in train.synsets]
    assert train.classes == known.classes
    assert train.labels.tolist() == known.targets
    assert val.labels.tolist() == [known.wnid_to_idx[synset] for synset in truth]
    assert val.sizes.tolist() == [1, 2, 3, 4, 5]
    assert val.class_to_idx == known.class_to_idx
    again = pickle.loads(pickle.dumps(val))
    assert again.labels.tolist() == val.labels.tolist()
    assert "of 3 classes" in repr(val)


def test_validation_images_sorted_into_folders_have_the_same_labels(root: Path) -> None:
    flat = nostall.ImageNet(root, "val")
    for i, label in enumerate(flat.labels):
        folder = root / "val" / flat.synsets[label]
        folder.mkdir(exist_ok=True)
        name = f"ILSVRC2012_val_{i + 1:08}.JPEG"
        (root / "val" / name).rename(folder / name)
    sorted_out = nostall.ImageNet(root, "val", index=False)
    by_size = dict(zip(sorted_out.sizes.tolist(), sorted_out.labels.tolist(), strict=True))
    assert [by_size[size] for size in flat.sizes.tolist()] == flat.labels.tolist()


def test_what_is_not_ilsvrc2012_is_named(root: Path) -> None:
    data = root / "ILSVRC2012_devkit_t12" / "data"
    truth = data / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("2\n1\n3\n")
    with pytest.raises(UsageError, match=r"5 images and .* has 3 lines"):
        nostall.ImageNet(root, "val")
    truth.write_text("2\n1\n4\n")
    with pytest.raises(CorruptionError, match="line 3: '4'"):
        nostall.ImageNet(root, "val")
    truth.unlink()
    with pytest.raises(IoError, match="ground_truth"):
        nostall.ImageNet(root, "val")
    (root / "train" / "n09999999").mkdir()
    (root / "train" / "n09999999" / "a.JPEG").write_bytes(b"x")
    with pytest.raises(UsageError, match="n09999999 is no synset of"):
        nostall.ImageNet(root, index=False)
    (data / "meta.mat").write_bytes(b"not MATLAB's")
    with pytest.raises(CorruptionError, match=r"meta\.mat"):
        nostall.ImageNet(root)
    with pytest.raises(IoError, match=r"meta\.mat: No such file"):
        nostall.ImageNet(root, devkit=root / "nowhere")
    with pytest.raises(UsageError, match='"train" or "val"'):
        nostall.ImageNet(root, "test")  # type: ignore[arg-type]
