"""Batches of token units: their values against brute force, every token once, on all worlds alike."""

from __future__ import annotations

import os
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_ranks import own_job

import nostall
from nostall.errors import CorruptionError, UsageError

ALL = ("ids", "labels", "positions", "segments", "cu_seqlens")
# No two tokens are alike, so that a batch tells which ones it has.
IDS = np.random.default_rng(1).permutation(3001).astype(np.uint16)
LENGTHS = [1, 300, 2, 64, 65, 31, 1000, 33, 500, 128, 876, 1]
BEGINS = np.concatenate([[0], np.cumsum(LENGTHS)])

Make = Callable[..., nostall.Units]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> nostall.Tokens:
    folder = tmp_path_factory.mktemp("tokens")
    for number, (begin, length) in enumerate(zip(BEGINS, LENGTHS, strict=False)):
        IDS[begin : begin + length].tofile(folder / f"{number:02d}.bin")
    return nostall.Tokens(str(folder / "*.bin"), dtype="uint16")


def made(name: str, tokens: nostall.Tokens, **options: Any) -> nostall.Units:
    kinds: dict[str, Callable[[], nostall.Units]] = {
        "windows": lambda: nostall.Windows(tokens, 64, remainder="pad", **options),
        "windows of documents": lambda: nostall.Windows(
            tokens, 64, documents=True, remainder="pad", **options
        ),
        "documents": lambda: nostall.Documents(tokens, 64, longer="split", **options),
        "packed": lambda: nostall.Packed(tokens, 64, **options),
        "concatenated": lambda: nostall.Packed(tokens, 64, packing="concatenate", **options),
    }
    return kinds[name]()


KINDS = ("windows", "windows of documents", "documents", "packed", "concatenated")


def loader(units: nostall.Units, batch: int, **options: Any) -> nostall.DataLoader:
    given = {"epochs": 1, "seed": 4, "tiers": [], "output": "numpy"} | options
    return nostall.DataLoader(units, batch, **given)


def alone(units: nostall.Units, batch: int, rank: int, world: int, **options: Any) -> Any:
    """A rank of its own node, in this process."""
    place = {"rank": rank, "world_size": world, "local_rank": 0, "local_world_size": 1}
    return loader(
        units, batch, job=own_job(f"units-{id(units)}-{world}-{rank}"), **place, **options
    )


def expected(units: nostall.Units, unit: int) -> dict[str, np.ndarray]:
    """A unit of 64 by brute force; cu_seqlens are the lengths of its segments here."""
    values = {name: np.zeros(64, np.int64) for name in ALL[:4]}
    values["labels"][:] = -100
    values["ids"][:] = 7  # what fills up
    stream = isinstance(units, nostall.Windows) and not units._arguments["documents"]
    at, lengths = 0, []
    for number, (begin, length) in enumerate(units.segments(unit)):
        here = slice(at, at + length)
        values["ids"][here] = IDS[begin : begin + length]
        values["positions"][here] = np.arange(length)
        values["segments"][here] = number + 1
        last = len(IDS) if stream else BEGINS[np.searchsorted(BEGINS, begin, "right")]
        follow = IDS[begin + 1 : min(begin + 1 + length, last)]
        values["labels"][at : at + len(follow)] = follow
        at += length
        lengths.append(length)
    values["cu_seqlens"] = np.array(lengths + ([64 - at] if at < 64 else []))
    return values


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_brute_force(kind: str, dtype: Any, tokens: nostall.Tokens) -> None:
    units = made(kind, tokens, fields=ALL, dtype=dtype, pad=7)
    with loader(units, 5, shuffle=False) as batches:
        at = 0
        for batch in batches:
            wanted = [expected(units, u % len(units)) for u in range(at, at + len(batch["ids"]))]
            for name in ALL[:4]:
                assert batch[name].dtype == dtype
                assert np.array_equal(batch[name], [w[name] for w in wanted]), name
            ends = np.cumsum(np.concatenate([w["cu_seqlens"] for w in wanted]))
            assert batch["cu_seqlens"].dtype == np.int32
            assert batch["cu_seqlens"].tolist() == [0, *ends]
            at += len(wanted)
    assert at == len(units)


# Beside every token: whether it is learned, a label of its own, and its weight.
LEARNED = (IDS % 3 > 0).astype(np.int8)
OWN = np.where(IDS % 7, IDS.astype(np.int32), -100)
WEIGHTS = (IDS / 7).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_tracks_are_packed_as_the_ids_are(
    kind: str, tokens: nostall.Tokens, tmp_path: Path
) -> None:
    tracks = {}
    for name, values in (("loss_mask", LEARNED), ("labels", OWN), ("weights", WEIGHTS)):
        values.tofile(tmp_path / f"{name}.bin")
        tracks[name] = nostall.Tokens(tmp_path / f"{name}.bin", dtype=values.dtype.name)

    def values_of(*names: str, fields: tuple[str, ...]) -> tuple[nostall.Units, dict[str, Any]]:
        arguments = tokens._arguments | {"tracks": {name: tracks[name] for name in names}}
        units = made(kind, nostall.Tokens(**arguments), fields=fields, pad=7)
        with loader(units, 5, shuffle=False, drop_last=False, tiers=["ram:4MiB"]) as batches:
            found = list(batches)
        return units, {f: np.concatenate([b[f] for b in found])[: len(units)] for f in fields}

    units, batch = values_of(
        "loss_mask", "weights", fields=("labels", "weights", "loss_mask", "ids")
    )
    assert batch["weights"].dtype == np.float32
    wanted = [expected(units, u) for u in range(len(units))]
    learned = np.append(LEARNED, 0)
    for u, values in enumerate(wanted):
        tokens_of = values["ids"]
        at = 0
        for begin, length in units.segments(u):
            here = slice(at, at + length)
            assert np.array_equal(batch["weights"][u, here], WEIGHTS[begin : begin + length])
            there = values["labels"][here] != -100
            mask = np.where(there, learned[begin + 1 : begin + 1 + length], 0)
            assert np.array_equal(batch["loss_mask"][u, here], mask)
            labels = np.where(mask, values["labels"][here], -100)
            assert np.array_equal(batch["labels"][u, here], labels)
            at += length
        assert np.array_equal(batch["ids"][u], tokens_of)
        assert not batch["weights"][u, at:].any() and not batch["loss_mask"][u, at:].any()
        assert (batch["labels"][u, at:] == -100).all()

    units, batch = values_of("labels", "loss_mask", fields=("ids", "labels"))
    own = np.append(OWN, -100)
    for u, values in enumerate(wanted):
        at = 0
        for begin, length in units.segments(u):
            there = values["labels"][at : at + length] != -100
            labels = np.where(there, own[begin + 1 : begin + 1 + length], -100)
            assert np.array_equal(batch["labels"][u, at : at + length], labels)
            at += length


def test_every_field_of_ids_is_compared_with_the_vocabulary(
    tokens: nostall.Tokens, tmp_path: Path
) -> None:
    OWN.tofile(tmp_path / "labels.bin")
    few = nostall.Tokens(tmp_path / "labels.bin", dtype="int32")
    IDS.astype(np.int64).tofile(tmp_path / "wide.bin")
    wide = nostall.Tokens(tmp_path / "wide.bin", dtype="int64")
    whole = {**tokens._arguments, "index": False}
    for fields, options in (
        (("labels",), {"tracks": {}}),
        (("ids",), {"tracks": {}}),
        (("labels",), {"tracks": {"labels": few}}),
        (("other",), {"tracks": {"other": wide}}),
    ):
        opened = nostall.Tokens(**whole | options)
        # The pass over raw files would find it first.
        opened.vocabulary = 3000
        opened.tracks = {n: t._replace(vocabulary=3000) for n, t in opened.tracks.items()}
        with (
            loader(nostall.Windows(opened, 64, fields=fields), 4) as batches,
            pytest.raises(CorruptionError, match="is 3000, outside the vocabulary of 3000"),
        ):
            list(batches)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_comes_once_an_epoch_on_all_worlds(kind: str, tokens: nostall.Tokens) -> None:
    units = made(kind, tokens, fields=("ids", "segments"))
    steps: list[list[bytes]] = []
    for world in (1, 2, 3, 6):
        batches = []
        for rank in range(world):
            with alone(units, 6 // world, rank, world, drop_last=False) as part:
                batches.append([batch["ids"][batch["segments"] > 0] for batch in part])
        # What fills the last batch up depends on the world.
        steps.append(
            [np.sort(np.concatenate(step)).tobytes() for step in zip(*batches, strict=True)][:-1]
        )
        if world == 1:
            seen = np.concatenate([ids for rank in batches for ids in rank])
            assert np.array_equal(np.sort(seen), np.arange(len(IDS)))
    assert all(other == steps[0] for other in steps)


def test_a_resumed_job_continues_on_any_world(tokens: nostall.Tokens) -> None:
    units = nostall.Packed(tokens, 64)
    with alone(units, 12, 0, 1, epochs=3) as whole:
        batches = [batch["ids"] for epoch in whole.epochs() for batch in epoch]
        per_epoch = len(whole)
    state = None
    with alone(units, 12, 0, 1, epochs=3) as head:
        for _ in zip(range(3), head, strict=False):
            pass
        state = head.state_dict()
    for world in (2, 4):
        parts = []
        for rank in range(world):
            with alone(units, 12 // world, rank, world, epochs=3) as part:
                part.load_state_dict(state)
                parts.append([batch["ids"] for epoch in part.epochs() for batch in epoch])
        for step, ranks in enumerate(zip(*parts, strict=True)):
            joined = np.empty_like(batches[3 + step])
            for rank, ids in enumerate(ranks):
                joined[rank::world] = ids
            assert np.array_equal(joined, batches[3 + step])
        assert len(parts[0]) == 3 * per_epoch - 3


def test_tiers_give_the_same_units(tokens: nostall.Tokens) -> None:
    units = nostall.Packed(tokens, 64, fields=ALL)
    seen = []
    for tiers in ([], ["ram:4MiB"]):
        with loader(units, 7, epochs=2, tiers=tiers) as batches:
            seen.append([b[name].tobytes() for e in batches.epochs() for b in e for name in ALL])
            read = sum(e.origins["source"].samples for e in batches.stats().epochs)
        # Either epoch may read a unit first, since the second begins while the first is read.
        assert read == (len(units) if tiers else 2 * len(units))
    assert seen[0] == seen[1]


def test_documents_may_stay_as_long_as_they_are(tokens: nostall.Tokens) -> None:
    with loader(nostall.Documents(tokens), 5, shuffle=False) as batches:
        batch = next(iter(batches))
    assert np.diff(batch["ids"].offsets).tolist() == LENGTHS[:5]
    assert np.array_equal(batch["ids"].values, IDS[: sum(LENGTHS[:5])])
    assert batch["labels"].values[0] == -100


def test_an_id_outside_the_vocabulary_names_its_place(tmp_path: Path) -> None:
    IDS.tofile(tmp_path / "a.bin")
    tokens = nostall.Tokens(tmp_path / "a.bin", dtype="uint16", vocabulary=3001)
    changed = IDS.copy()
    changed[100] = 3001
    times = (tmp_path / "a.bin").stat()
    with (tmp_path / "a.bin").open("r+b") as file:
        file.write(changed.tobytes())
    os.utime(tmp_path / "a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with (
        loader(nostall.Windows(tokens, 64), 4, shuffle=False) as batches,
        pytest.raises(
            CorruptionError, match=r"tokens 64 to 128 of .*its token 36 is 3001, outside"
        ),
    ):
        list(batches)


def test_a_document_that_is_too_long_may_be_refused(tokens: nostall.Tokens) -> None:
    for kind in (nostall.Documents, nostall.Packed):
        with pytest.raises(UsageError, match="document 1 has 300 tokens"):
            kind(tokens, 64, longer="refuse")
    cut = nostall.Documents(tokens, 64, longer="cut")
    assert [sum(n for _, n in cut.segments(u)) for u in range(len(cut))] == [
        min(length, 64) for length in LENGTHS
    ]


def test_pieces_may_be_the_users_own(tokens: nostall.Tokens) -> None:
    units = nostall.Units(tokens, 64, [0, 2, 3], np.array([[1, 3, 10], [3, 0, 64 - 10], [6, 0, 5]]))
    with loader(units, 2, shuffle=False) as batches:
        batch = next(iter(batches))
    ids = np.concatenate([IDS[4:14], IDS[BEGINS[3] : BEGINS[3] + 54]])
    assert np.array_equal(batch["ids"][0], ids)
    assert batch["ids"][1, 5:].tolist() == [0] * 59
    with pytest.raises(UsageError, match="not inside document 1"):
        nostall.Units(tokens, 64, [0, 1], np.array([[1, 299, 2]]))
    with pytest.raises(UsageError, match="unit 1 has 65 tokens, more than length=64"):
        nostall.Units(tokens, 64, [0, 1, 3], np.array([[1, 0, 64], [1, 64, 60], [3, 0, 5]]))
    for wrong in ([[1.5, 0, 2]], [[1, 0, -2]], [[2**32 + 1, 0, 2]]):
        with pytest.raises(UsageError, match="pieces= must be whole numbers"):
            nostall.Units(tokens, 64, [0, 1], np.array(wrong))
    for offsets, pieces in (([], [[1, 0, 2]]), ([0, 1], [1, 0, 2])):
        with pytest.raises(UsageError, match="must have the shapes"):
            nostall.Units(tokens, 64, offsets, np.array(pieces))


def test_options_that_cannot_be_are_refused(tokens: nostall.Tokens) -> None:
    for match, options in {
        "fields=": {"fields": ("ids", "masks")},
        "dtype must be": {"dtype": "int16"},
        "length must be a whole number from 1 to .*, not 0": {"length": 0},
        "pad=2147483648 is no int32": {"pad": 2**31, "dtype": "int32"},
        "stride must be a whole number from 1 to .*, not 0": {"stride": 0},
        "remainder must be": {"remainder": "keep"},
    }.items():
        with pytest.raises(UsageError, match=match):
            nostall.Windows(tokens, **{"length": 64} | options)
    with pytest.raises(UsageError, match="not one unit"):
        nostall.Windows(tokens, 3001)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda s: nostall.Windows(s, 2.5), "length must be a whole number .*, not 2.5"),
        (lambda s: nostall.Windows(s, "4"), "length must be a whole number .*, not '4'"),
        (lambda s: nostall.Windows(s, None), "length must be a whole number .*, not None"),
        (lambda s: nostall.Windows(s, True), "length must be a whole number .*, not True"),
        (lambda s: nostall.Windows(s, 4, stride=1.5), "stride must be a whole number .*, not 1.5"),
        (
            lambda s: nostall.Windows(s, 4, stride=True),
            "stride must be a whole number .*, not True",
        ),
        (lambda s: nostall.Windows(s, 4, pad=1.5), "pad=1.5 is no int64"),
        (lambda s: nostall.Windows(s, 4, pad="0"), "pad='0' is no int64"),
        (lambda s: nostall.Windows(s, 4, documents="no"), "documents must be True or False"),
        (lambda s: nostall.Documents(s, "4"), "length must be a whole number .*, not '4'"),
        (lambda s: nostall.Documents(s, 0), "length must be a whole number .*, not 0"),
        (lambda s: nostall.Units(s, 2.5, [0], []), "length must be a whole number .*, not 2.5"),
        (lambda s: nostall.Packed(s, None), "length must be a whole number .*, not None"),
        (lambda s: nostall.Packed(s, 4, seed=-1), "seed must be a whole number .*, not -1"),
        (lambda s: nostall.Packed(s, 4, seed=2**64), "seed must be a whole number .*, not 18"),
        (lambda s: nostall.Clips(s, 2.5), "length must be a whole number .*, not 2.5"),
        (lambda s: nostall.Clips(s, None), "length must be a whole number .*, not None"),
        (lambda s: nostall.Clips(s, 4, stride="1"), "stride must be a whole number .*, not '1'"),
    ],
)
def test_lengths_and_strides_are_whole_numbers(
    tokens: nostall.Tokens, make: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make(tokens)


def test_lengths_and_strides_may_be_numbers_of_numpy(tokens: nostall.Tokens) -> None:
    length, stride, pad = np.int64(64), np.int32(32), np.uint8(3)
    given: list[Any] = [
        nostall.Windows(tokens, length, stride=stride, pad=pad, documents=np.bool_(True)),  # type: ignore[arg-type]
        nostall.Documents(tokens, length),  # type: ignore[arg-type]
        nostall.Packed(tokens, length, seed=np.uint64(2**63)),  # type: ignore[arg-type]
        nostall.Clips(tokens, length, stride=stride, dtype="int64"),  # type: ignore[arg-type]
    ]
    plain: list[Any] = [
        nostall.Windows(tokens, 64, stride=32, pad=3, documents=True),
        nostall.Documents(tokens, 64),
        nostall.Packed(tokens, 64, seed=2**63),
        nostall.Clips(tokens, 64, stride=32, dtype="int64"),
    ]
    for one, other in zip(given, plain, strict=True):
        assert (one.fingerprint, one.schema) == (other.fingerprint, other.schema)


def test_batches_ahead_take_little_memory(tokens: nostall.Tokens) -> None:
    windows = nostall.Windows(tokens, 64)
    with loader(windows, 2) as batches:
        assert batches.settings()["staging_bytes"] <= 16 << 20
    with loader(windows, 2, staging="70MiB") as batches:
        assert batches.settings()["staging_bytes"] == 70 << 20


def sound(path: Path, values: np.ndarray, channels: int = 1) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, values.dtype.itemsize, 16000, 0, "NONE", ""))
        file.writeframes(values.tobytes())


def test_clips_are_of_one_recording(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    recordings = [
        random.integers(-32768, 32767, n).astype(np.int16) for n in (100, 7, 64, 250, 0, 65)
    ]
    for number, values in enumerate(recordings):
        sound(tmp_path / f"{number}.wav", values)
    stream = nostall.Tokens(tmp_path)
    for stride in (1, 20, 64, 90):
        for remainder in ("drop", "pad"):
            clips = nostall.Clips(stream, 64, stride=stride, remainder=remainder)  # type: ignore[arg-type]
            wanted = []
            for values in filter(len, recordings):
                at = 0
                while at + 64 <= len(values):
                    wanted.append(values[at : at + 64])
                    at += stride
                # Until all of the recording is in a clip, or passed by the stride.
                left = at < len(values) and (at == 0 or at - stride + 64 < len(values))
                if remainder == "pad" and left:
                    rest = values[at : at + 64]
                    wanted.append(np.pad(rest, (0, 64 - len(rest))))
            with loader(clips, 3, shuffle=False) as batches:
                found = np.concatenate([b["clip"] for b in batches])[: len(clips)]
            assert found.dtype == np.float32
            assert np.array_equal(found, wanted[: len(found)]) and len(clips) == len(wanted)
    np.save(tmp_path / "real.npy", np.linspace(0, 1, 100, dtype=np.float32))
    real = nostall.Tokens(tmp_path / "real.npy")
    with loader(nostall.Clips(real, 50), 2, shuffle=False) as batches:
        assert np.array_equal(next(iter(batches))["clip"].ravel(), real.read(0, 100))
    with pytest.raises(UsageError, match="dtype='int32' is none for recordings of float32"):
        nostall.Clips(real, 50, dtype="int32")
    with pytest.raises(UsageError, match="no recording has 300 numbers"):
        nostall.Clips(stream, 300)


@pytest.mark.parametrize(("dtype", "silence"), [("uint8", 128), ("int16", 0)])
def test_clips_are_filled_up_with_silence(tmp_path: Path, dtype: str, silence: int) -> None:
    sound(tmp_path / "a.wav", np.arange(1, 11, dtype=dtype))
    clips = nostall.Clips(nostall.Tokens(tmp_path), 8, remainder="pad")
    with loader(clips, 2, shuffle=False) as batches:
        (found,) = [batch["clip"].tolist() for batch in batches]
    assert found == [[*range(1, 9)], [9, 10, *[silence] * 6]]


@pytest.mark.parametrize("size", [4040, 4061, 5000, 20_001])
def test_the_samples_of_a_sound_may_begin_late(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.wav"
    sound(path, np.arange(10, dtype=np.int16))
    whole = path.read_bytes()
    more = b"bext" + size.to_bytes(4, "little") + bytes(size + size % 2)
    for at in (12, 36):  # before what says the format, and after it
        path.write_bytes(whole[:at] + more + whole[at:])
        assert nostall.Tokens(path).read(0, 10).tolist() == list(range(10))


def test_sounds_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    sound(path, np.zeros(100, np.int16), channels=2)
    with pytest.raises(UsageError, match="has 2 channels of 16 bits"):
        nostall.Tokens(path)
    sound(path, np.zeros(100, np.int16))
    whole = path.read_bytes()
    for match, data in {
        "has 243 bytes, its header tells of 244: it was cut": whole[:-1],
        "is no WAV file": b"RIFX" + whole[4:],
        "has no sound: none of its chunks is data": whole[:36],
    }.items():
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match=match):
            nostall.Tokens(path)
