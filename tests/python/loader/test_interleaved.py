"""Texts with images: units against brute force, on all worlds alike, and what does not go together."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_ranks import own_job
from PIL import Image

import nostall
from nostall import transforms as t
from nostall.errors import CorruptionError, UsageError

IMAGE = 7  # the id of an image
LENGTH = 48
ALL = ("ids", "labels", "positions", "segments", "cu_seqlens", "images", "image_places")


class Set:
    """Random documents of text and images, in two files that end with an image, and their files."""

    def __init__(self, folder: Path, documents: int = 60) -> None:
        random = np.random.default_rng(3)
        self.documents: list[list[int]] = []
        next_id, images = 100, 0
        for number in range(documents):
            kinds = random.random(random.integers(0, 12)) < 0.2
            if number in (0, documents // 2 - 1, documents - 1):
                kinds = np.array([False, True])  # files begin with text and end with an image
            ids = []
            for is_image in kinds:
                ids.append(IMAGE if is_image else next_id)
                next_id += not is_image
            self.documents.append(ids)
            images += int(kinds.sum())
        self.costs = random.integers(1, 9, images)
        self.stored = []
        for k in range(images):
            stream = io.BytesIO()
            pixels = np.full((4 + k % 3, 5, 3), k % 251, np.uint8)
            Image.fromarray(pixels).save(stream, "png")
            self.stored.append(stream.getvalue())
            (folder / f"{k:04d}.png").write_bytes(stream.getvalue())
        rows = [d for d in self.documents if d]
        half = sum(bool(d) for d in self.documents[: documents // 2])
        self.files = []
        for name, part in (("a", rows[:half]), ("b", rows[half:])):
            ends = np.cumsum([len(d) for d in part])
            np.array([i for d in part for i in [*d, 0]], np.int32).tofile(folder / f"{name}.bin")
            self.files.append(folder / f"{name}.bin")
            assert len(ends)
        # Documents end with the id 0, which is theirs.
        self.documents = [[*d, 0] for d in rows]
        self.tokens = nostall.Tokens(self.files, dtype="int32", end=0)
        paths = sorted(p.name for p in folder.glob("*.png"))
        self.images = nostall.FileList(paths, root=folder)

    def units(self, **options: Any) -> nostall.Interleaved:
        given = {"image": IMAGE, "cost": self.costs, "fields": ALL} | options
        return nostall.Interleaved(self.tokens, self.images, LENGTH, **given)

    def expected(self, units: nostall.Interleaved, unit: int) -> dict[str, Any]:
        """A unit by brute force, from the documents that its segments begin."""
        lengths = [len(d) for d in self.documents]
        begins = np.cumsum(lengths) - lengths
        of_document = np.cumsum([0, *(d.count(IMAGE) for d in self.documents)])
        out: dict[str, Any] = {"images": [], "image_places": [], "lengths": []}
        ids, labels, positions, segments = [], [], [], []
        for number, (begin, length) in enumerate(units.segments(unit)):
            document = int(np.flatnonzero(begins == begin)[0])
            k = int(of_document[document])
            whole: list[int] = []
            for i in self.documents[document]:
                if i == IMAGE:
                    place = (len(ids) + len(whole), int(self.costs[k]))
                    out["image_places"].append(place)
                    out["images"].append(self.stored[k])
                    whole += [IMAGE] * int(self.costs[k])
                    k += 1
                else:
                    whole.append(i)
            assert len(whole) == length
            ids += whole
            labels += [-100 if i == IMAGE else i for i in whole[1:]] + [-100]
            positions += range(length)
            segments += [number + 1] * length
            out["lengths"].append(length)
        rest = LENGTH - len(ids)
        assert rest >= 0
        out["ids"], out["labels"] = ids + [9] * rest, labels + [-100] * rest
        out["positions"], out["segments"] = positions + [0] * rest, segments + [0] * rest
        out["lengths"] += [rest] * (rest > 0)
        return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Set:
    return Set(tmp_path_factory.mktemp("interleaved"))


def alone(units: nostall.Source, batch: int, rank: int, world: int, **options: Any) -> Any:
    place = {"rank": rank, "world_size": world, "local_rank": 0, "local_world_size": 1}
    given = {"seed": 4, "tiers": [], "output": "numpy", "epochs": 1} | place | options
    return nostall.DataLoader(
        units, batch, job=own_job(f"images-{id(units)}-{world}-{rank}"), **given
    )


@pytest.mark.parametrize("tiers", [[], ["ram:4MiB"]])
def test_values_are_those_of_brute_force(made: Set, tiers: list[str]) -> None:
    units = made.units(pad=9)
    seen = 0
    with alone(units, 3, 0, 1, shuffle=False, drop_last=False, tiers=tiers, epochs=2) as loader:
        for epoch in loader.epochs():
            for number, batch in enumerate(epoch):
                wanted = [
                    made.expected(units, u % len(units))
                    for u in range(3 * number, 3 * number + len(batch["ids"]))
                ]
                for name in ("ids", "labels", "positions", "segments"):
                    assert np.array_equal(batch[name], [w[name] for w in wanted]), name
                ends = np.cumsum([n for w in wanted for n in w["lengths"]])
                assert batch["cu_seqlens"].tolist() == [0, *ends]
                places = [[u, *p] for u, w in enumerate(wanted) for p in w["image_places"]]
                assert batch["image_places"].tolist() == places
                images = [i for w in wanted for i in w["images"]]
                given = batch["images"]
                assert len(given.offsets) == len(images) + 1
                assert [given.sample(i).tobytes() for i in range(len(images))] == images
                seen += len(images)
    assert seen >= 2 * len(made.stored)


def test_every_document_comes_once_and_its_images_with_it(made: Set) -> None:
    """Each text id is there once, each image once, and no document is divided."""
    units = made.units()
    found = [made.expected(units, u) for u in range(len(units))]
    ids = sorted(i for u in found for i in u["ids"] if i >= 100)
    assert ids == sorted(i for d in made.documents for i in d if i >= 100)
    assert sum(len(u["images"]) for u in found) == len(made.stored)
    assert sum(len(units.segments(u)) for u in range(len(units))) == len(made.documents)
    # Best fit by cost: not far above what all tokens need.
    total = sum(len(d) for d in made.documents) + int((made.costs - 1).sum())
    assert units.token_count == total
    assert len(units) <= -(-total // LENGTH) + 1


def rows(batch: Any) -> list[bytes]:
    """Of each unit of a batch: ids, and its images with their places."""
    places, images = batch["image_places"], batch["images"]
    return [
        ids.tobytes()
        + b"".join(
            images.sample(i).tobytes() + places[i, 1:].tobytes()
            for i in np.flatnonzero(places[:, 0] == u)
        )
        for u, ids in enumerate(batch["ids"])
    ]


def test_batches_are_the_same_on_all_worlds_and_after_a_resume(made: Set) -> None:
    units = made.units(fields=("ids", "images", "image_places"))

    with alone(units, 6, 0, 1, epochs=2, drop_last=True) as whole:
        steps = [rows(batch) for epoch in whole.epochs() for batch in epoch]
    with alone(units, 6, 0, 1, epochs=2, drop_last=True) as head:
        next(iter(head))
        state = head.state_dict()
    for world in (2, 3):
        parts = []
        for rank in range(world):
            with alone(units, 6 // world, rank, world, epochs=2, drop_last=True) as part:
                part.load_state_dict(state)
                parts.append([rows(batch) for epoch in part.epochs() for batch in epoch])
        for step, ranks in enumerate(zip(*parts, strict=True)):
            joined: list[bytes] = [b""] * 6
            for rank, mine in enumerate(ranks):
                joined[rank::world] = mine
            assert joined == steps[1 + step]


def test_images_are_decoded_with_draws_of_their_own(made: Set, tmp_path: Path) -> None:
    units = made.units(fields=("ids", "images", "image_places"))
    with alone(units, 3, 0, 1, transforms={"images": [t.Resize((6, 6))]}) as loader:
        batch = next(iter(loader))
    assert batch["images"].shape == (len(batch["image_places"]), 6, 6, 3)
    with alone(units, 3, 0, 1) as loader:
        stored = next(iter(loader))["images"]
    for i, image in enumerate(batch["images"]):
        colour = made.stored.index(stored.sample(i).tobytes()) % 251
        assert (image == colour).all()
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    for k in range(64):
        Image.fromarray(noise).save(tmp_path / f"{k:02d}.png")
    np.array([IMAGE] * 64, np.uint16).tofile(tmp_path / "a.bin")
    same = nostall.Interleaved(
        nostall.Tokens(tmp_path / "a.bin", dtype="uint16"),
        nostall.FileList([f"{k:02d}.png" for k in range(64)], root=tmp_path),
        64,
        image=IMAGE,
        cost=1,
    )
    flips = [t.RandomHorizontalFlip(0.5), t.Resize((8, 8))]
    with alone(same, 1, 0, 1, transforms={"images": flips}) as loader:
        images = next(iter(loader))["images"]
    kinds = {image.tobytes() for image in images}
    assert kinds == {noise.tobytes(), noise[:, ::-1].tobytes()}


def test_masks_and_tracks_leave_images_out(made: Set, tmp_path: Path) -> None:
    ids = np.concatenate([np.array(d) for d in made.documents])
    learned = (ids % 3 > 0).astype(np.uint8)
    weights = ids.astype(np.float32)
    tracks = {}
    for name, values in (("loss_mask", learned), ("weights", weights)):
        values.tofile(tmp_path / f"{name}.bin")
        tracks[name] = nostall.Tokens(tmp_path / f"{name}.bin", dtype=values.dtype.name)
    tokens = nostall.Tokens(made.files, dtype="int32", end=0, tracks=tracks)
    fields = ("labels", "weights", "loss_mask")
    units = nostall.Interleaved(
        tokens, made.images, LENGTH, image=IMAGE, cost=made.costs, fields=fields
    )
    with alone(units, 4, 0, 1, shuffle=False) as loader:
        batch = next(iter(loader))
    for u in range(4):
        wanted = made.expected(units, u)
        labels = [label if label % 3 else -100 for label in wanted["labels"]]
        assert batch["labels"][u].tolist() == [-100 if x == -100 else x for x in labels]
        filled = np.array(wanted["segments"]) == 0
        text = np.where((np.array(wanted["ids"]) == IMAGE) | filled, 0, wanted["ids"])
        assert batch["weights"][u].tolist() == text.tolist()


def test_the_units_are_the_golden_ones(tmp_path: Path) -> None:
    """docs/formats/units.md"""
    np.array([1, 9, 2, 0, 3, 0, 9, 9, 0, 4, 5, 0], np.uint16).tofile(tmp_path / "a.bin")
    for k in range(3):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{k}.png")
    tokens = nostall.Tokens(tmp_path / "a.bin", dtype="uint16", end=0)
    images = nostall.FileList([f"{k}.png" for k in range(3)], root=tmp_path)
    units = nostall.Interleaved(tokens, images, 8, image=9, cost=[3, 2, 4], seed=1)
    assert [units.segments(u) for u in range(len(units))] == [[(0, 6), (4, 2)], [(6, 7)], [(9, 3)]]
    with alone(units, 3, 0, 1, shuffle=False) as loader:
        batch = next(iter(loader))
    assert batch["ids"].tolist() == [
        [1, 9, 9, 9, 2, 0, 3, 0],
        [9, 9, 9, 9, 9, 9, 0, 0],
        [4, 5, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["image_places"].tolist() == [[0, 1, 3], [1, 0, 2], [1, 2, 4]]
    split = nostall.Interleaved(tokens, images, 5, image=9, cost=[3, 2, 4], seed=1, longer="split")
    assert [split.segments(u) for u in range(len(split))] == [
        [(0, 5)],
        [(7, 5)],
        [(9, 3), (4, 2)],
        [(6, 2), (3, 1)],
    ]


def pieces_of(made: Set, length: int) -> dict[int, list[tuple[int, int | None, int]]]:
    """By the token where it begins each piece of a document: (id, image, label) of its tokens."""
    pieces: dict[int, list[tuple[int, int | None, int]]] = {}
    begin = image = 0
    for document in made.documents:
        piece: list[tuple[int, int | None, int]] = []
        pieces[first := begin] = piece
        for at, token in enumerate(document):
            cost = int(made.costs[image]) if token == IMAGE else 1
            if len(piece) + cost > length:
                pieces[first := begin + at] = piece = []
            after = document[at + 1] if at + 1 < len(document) else IMAGE
            label = -100 if after == IMAGE else after
            if token == IMAGE:
                piece += [(IMAGE, image, -100)] * (cost - 1) + [(IMAGE, image, label)]
                image += 1
            else:
                piece.append((token, None, label))
        assert pieces[first] is piece
        begin += len(document)
    return pieces


@pytest.mark.parametrize("length", [8, 11, LENGTH])
def test_documents_are_split_between_images(made: Set, length: int) -> None:
    units = nostall.Interleaved(
        made.tokens, made.images, length, image=IMAGE, cost=made.costs, fields=ALL, longer="split"
    )
    pieces, seen = pieces_of(made, length), []
    with alone(units, 4, 0, 1, shuffle=False, drop_last=False) as loader:
        batches = list(loader)
    for u in range(len(units)):
        batch, row = batches[u // 4], u % 4
        tokens = []
        for number, (begin, count) in enumerate(units.segments(u)):
            seen.append(begin)
            assert len(pieces[begin]) == count
            tokens += [(*token, i, number + 1) for i, token in enumerate(pieces[begin])]
        tokens += [(0, None, -100, 0, 0)] * (length - len(tokens))
        ids, images, labels, positions, segments = zip(*tokens, strict=True)
        for name, wanted in (
            ("ids", ids),
            ("labels", labels),
            ("positions", positions),
            ("segments", segments),
        ):
            assert batch[name][row].tolist() == list(wanted), name
        mine = np.flatnonzero(batch["image_places"][:, 0] == row)
        wanted_images = sorted({k for k in images if k is not None}, key=images.index)
        assert [batch["images"].sample(i).tobytes() for i in mine] == [
            made.stored[k] for k in wanted_images
        ]
        assert batch["image_places"][mine, 1:].tolist() == [
            [images.index(k), int(made.costs[k])] for k in wanted_images
        ]
    assert sorted(seen) == sorted(begin for begin, piece in pieces.items() if piece)


def test_tracks_of_split_documents_go_on_as_labels_do(made: Set, tmp_path: Path) -> None:
    ids = np.concatenate([np.array(d) for d in made.documents])
    (ids % 3 > 0).astype(np.uint8).tofile(tmp_path / "mask.bin")
    mask = nostall.Tokens(tmp_path / "mask.bin", dtype="uint8")
    tokens = nostall.Tokens(made.files, dtype="int32", end=0, tracks={"loss_mask": mask})
    plain, masked = (
        nostall.Interleaved(
            stream, made.images, 9, image=IMAGE, cost=made.costs, fields=("labels",), longer="split"
        )
        for stream in (made.tokens, tokens)
    )
    with alone(masked, 4, 0, 1) as shaded, alone(plain, 4, 0, 1) as bare:
        for with_mask, without in zip(shaded, bare, strict=True):
            labels = without["labels"]
            learned = (labels % 3 > 0) & (labels >= 0)
            assert np.array_equal(with_mask["labels"], np.where(learned, labels, -100))


def test_what_does_not_go_together_is_refused(made: Set, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"image 2 \(.*0002\.png\) costs 0 tokens: one is the least"
    ):
        made.units(cost=np.where(np.arange(len(made.costs)) == 2, 0, made.costs))
    with pytest.raises(
        UsageError, match=r"image 1 \(.*0001\.png\) costs 49 tokens, more than length"
    ):
        made.units(cost=np.where(np.arange(len(made.costs)) == 1, LENGTH + 1, made.costs))
    with pytest.raises(UsageError, match=r"document \d+ costs \d+ tokens with its \d images, more"):
        made.units(cost=LENGTH - 1)
    with pytest.raises(UsageError, match=r"image 1 \(.*0001\.png\) costs 49 tokens.* are not cut"):
        made.units(
            cost=np.where(np.arange(len(made.costs)) == 1, LENGTH + 1, made.costs), longer="split"
        )
    with pytest.raises(UsageError, match="not float64"):
        made.units(cost=1.5)
    with pytest.raises(UsageError, match="or one for each of"):
        made.units(cost=[1, 2])
    with pytest.raises(CorruptionError, match=r"has the id 100 1 times, and .* has \d+ images"):
        made.units(image=100)
    with pytest.raises(UsageError, match="must be a source with the field image"):
        nostall.Interleaved(made.tokens, made.tokens, 8, image=7, cost=1)  # type: ignore[arg-type]
    # Documents that cost too much may be left out, with their images.
    dropped = made.units(cost=LENGTH - 1, longer="drop")
    kept = [d for d in made.documents if len(d) + d.count(IMAGE) * (LENGTH - 2) <= LENGTH]
    assert sum(len(dropped.segments(u)) for u in range(len(dropped))) == len(kept)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    made = Set(tmp_path, documents=8)
    (tmp_path / "0001.png").unlink()
    wanted = r"0001\.png: No such file"
    with alone(made.units(), 1, 0, 1) as loader, pytest.raises(CorruptionError, match=wanted):
        list(loader)


def test_batches_that_are_joined_count_their_units_on(made: Set) -> None:
    units = made.units()
    with alone(units, 2, 0, 1, shuffle=False, drop_last=True) as loader:
        batches = nostall.DynamicBatches(loader, threshold=1.0, limit=2)
        assert [batches.report(0.0) for _ in range(2)] == [1, 2]
        joined = next(next(batches.epochs())[1])
    with alone(units, len(joined["ids"]), 0, 1, shuffle=False) as loader:
        whole = next(iter(loader))
    assert len(joined["ids"]) == 4
    for name in ("ids", "cu_seqlens", "image_places"):
        assert np.array_equal(joined[name], whole[name]), name
    assert joined["images"].values.tobytes() == whole["images"].values.tobytes()
    assert joined["images"].offsets.tolist() == whole["images"].offsets.tolist()


@pytest.mark.parametrize("scheme", ["uniform", "whole", "imbalanced"])
def test_joined_batches_of_every_scheme_count_their_units_on(made: Set, scheme: str) -> None:
    units = made.units(fields=("ids", "images", "image_places"))
    options: dict[str, Any] = {"scheme": scheme, "drop_last": True}
    for rank in range(2):
        with alone(units, 2, rank, 2, **options) as loader:
            parts = [rows(batch) for batch in loader]
        with alone(units, 2, rank, 2, **options) as loader:
            batches = nostall.DynamicBatches(loader)
            batches.factor = len(parts)
            ((_, content),) = batches.epochs()
            (joined,) = content
        assert len(parts) > 1 and rows(joined) == [row for part in parts for row in part]


def test_places_of_images_are_joined_without_the_rows_of_units(made: Set) -> None:
    units = made.units(fields=("images", "image_places"))
    found = []
    for batch, factor in ((2, 3), (6, 1)):
        with alone(units, batch, 0, 1, drop_last=True) as loader:
            batches = nostall.DynamicBatches(loader)
            batches.factor = factor
            found.append(next(next(batches.epochs())[1])["image_places"].tolist())
    assert found[0] == found[1]
