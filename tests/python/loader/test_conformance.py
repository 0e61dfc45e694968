"""The public checks of sources, kinds and transforms: ours pass them, and what is wrong does not."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import prefork
import pytest
import torch
from PIL import Image
from samples import wav

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import CorruptionError, IoError, TransformError, UsageError
from nostall.loader.testing import check_field, check_source, check_transform

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZES = [5, 0, 12, 3, 8]


def png(value: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    levels = np.full((32, 32, 3) if mode == "RGB" else (32, 32), value, np.uint8)
    Image.fromarray(levels).save(file, "png")
    return file.getvalue()


# ------------------------------------------------------------------------------------ sources


class Reader(nostall.SampleReader):
    """Samples of SIZES bytes, each of its number."""

    def read(self, samples: list[int]) -> list[Any]:
        return [self.one(sample) for sample in samples]

    def one(self, sample: int) -> Any:
        return bytes([sample]) * SIZES[sample]

    def describe(self, sample: int) -> str:
        return f"number {sample}"


def custom(reader: nostall.SampleReader) -> nostall.CustomSource:
    return nostall.CustomSource(reader, SIZES, [3, 1, 4, 1, 5], identity="five")


class Interrupted(Reader):
    def one(self, sample: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        return super().one(sample)


def test_an_interrupt_ends_the_program_that_reads_and_not_the_reading() -> None:
    source = custom(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        for sample in range(len(SIZES)):
            with contextlib.suppress(IoError):
                source.read(sample)


class Pairs(nostall.FieldReader):
    def read(self, parts: list[tuple[int, str]]) -> list[bytes]:
        return [(b"t" if name == "text" else b"\x01") * (sample + 1) for sample, name in parts]

    def describe(self, sample: int) -> str:
        return f"pair {sample}"


def pairs() -> nostall.CustomFields:
    return nostall.CustomFields(
        Pairs(),
        {"text": [1, 2, 3], "data": [1, -1, 3]},
        {"label": [7, 8, 9]},
        schema={"text": f.Text(), "data": f.Bytes(fill=b"none")},
        identity="pairs",
    )


class Items:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        return {"number": i, "array": np.full((2, 3), i)}


def test_our_sources_pass(image_folder: Path, tmp_path: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    paths = sorted(image_folder.rglob("*.jpg"))
    check_source(folder, start_methods=["fork", "spawn"], most=20)
    check_source(nostall.FileList(paths, np.linspace(0, 1, len(paths))), most=20)
    check_source(nostall.Subset(folder, [5, 3, 5, 60]))
    check_source(nostall.Concat([folder, folder]), most=12)
    check_source(nostall.Files({"image": paths}, {"label": range(len(paths))}), most=12)
    (tmp_path / "a.csv").write_text("text,price\na,1.5\nb,2\n")
    check_source(nostall.Manifest(tmp_path / "a.csv"))
    check_source(custom(Reader()), start_methods=["fork"])
    check_source(pairs())
    cached = nostall.Cached(Items(), makers=1)
    try:
        check_source(cached)
    finally:
        cached.close()


class Short(Reader):
    def one(self, sample: int) -> Any:
        return bytes(SIZES[sample] - (sample == 2))


class Changing(Reader):
    """Gives other bytes from the seventh reading on."""

    def __init__(self) -> None:
        self.reads = 0

    def one(self, sample: int) -> Any:
        self.reads += 1
        return bytes([self.reads > 6]) * SIZES[sample]


class Bound(Reader):
    """Cannot be pickled rightly: a copy has lost what it reads."""

    def __init__(self) -> None:
        self.kept: bytes | None = b"\x05" * 99

    def __reduce__(self) -> Any:
        return (_without, ())

    def one(self, sample: int) -> Any:
        return (self.kept or bytes(99))[: SIZES[sample]]


def _without() -> Bound:
    made = Bound()
    made.kept = None
    return made


class OneName(Reader):
    def describe(self, sample: int) -> str:
        return "it"


class Lost(Reader):
    """Sample 1 is not there, and the error says nothing."""

    def one(self, sample: int) -> Any:
        return RuntimeError("gone") if sample == 1 else super().one(sample)


class Lacking(Reader):
    """The process has too little for the samples, one of which cannot be read anyway."""

    def __init__(self, lacks: Exception, damaged: int) -> None:
        self.lacks, self.damaged = lacks, damaged

    def one(self, sample: int) -> Any:
        return OSError(errno.EIO, "bad block") if sample == self.damaged else self.lacks


@pytest.mark.parametrize("transforms", [None, [len]])
@pytest.mark.parametrize("damaged", [-1, 0])
@pytest.mark.parametrize(
    ("lacks", "number"), [(MemoryError(), errno.ENOMEM), (OSError(errno.EMFILE, "x"), errno.EMFILE)]
)
def test_what_a_process_lacks_replaces_no_sample(
    lacks: Exception, number: int, damaged: int, transforms: Any
) -> None:
    source = custom(Lacking(lacks, damaged))
    with pytest.raises(IoError, match="cannot read number 1") as told:
        source.read(1)
    assert told.value.errno == number
    with (
        nostall.DataLoader(
            source, 1, shuffle=False, tiers=[], on_error="substitute", transforms=transforms
        ) as loader,
        pytest.raises(IoError, match="number") as told,
    ):
        next(iter(loader))
    assert told.value.errno == number


class Alone(Pairs):
    """A field is another one where it is read alone."""

    def read(self, parts: list[tuple[int, str]]) -> list[bytes]:
        alone = len({name for _, name in parts}) == 1 and parts[0][1] == "text"
        return [b"T" * len(b) if alone else b for b in super().read(parts)]


def test_wrong_sources_do_not() -> None:
    for reader, words in (
        (Short(), "cannot read number 2: it has 11 bytes instead of 12"),
        (Changing(), "number .: content has changed|read first|other content|checksum"),
        (Bound(), "a pickled copy of it has other bytes of number 0"),
        (OneName(), "two samples that differ have one name, 'it'"),
    ):
        with pytest.raises((AssertionError, nostall.errors.Error), match=words):
            check_source(custom(reader))
    check_source(custom(Lost()), unreadable=[1])
    with pytest.raises(AssertionError, match="read gives number 3, which should not be readable"):
        check_source(custom(Lost()), unreadable=[1, 3])
    one = nostall.CustomFields(
        Alone(), {"text": [1, 2], "data": [1, 2]},
        schema={"text": f.Text(), "data": f.Bytes()}, identity="",
    )  # fmt: skip
    with pytest.raises(
        AssertionError, match="field text is another one where it alone is selected"
    ):
        check_source(one)


def test_custom_sources_are_like_others() -> None:
    source = custom(Reader())
    assert source.labels.tolist() == [3, 1, 4, 1, 5] and source.read(3) == b"\x03\x03\x03"
    assert custom(Reader()).fingerprint == source.fingerprint
    other = nostall.CustomSource(Reader(), SIZES, [3, 1, 4, 1, 5], identity="six")
    assert other.fingerprint != source.fingerprint
    floating = nostall.CustomSource(Reader(), SIZES, np.float32([0.5] * 5), identity="")
    assert floating.labels.dtype == np.float32 and floating.labels.tolist() == [0.5] * 5
    fields = pairs()
    with nostall.DataLoader(fields, 3, epochs=1, shuffle=False, tiers=[], output="numpy") as loader:
        (batch,) = loader
    assert batch["text"] == ["t", "tt", "ttt"] and batch["label"].tolist() == [7, 8, 9]
    assert batch["data"].sample(1).tobytes() == b"none"
    assert fields.labels.tolist() == [7, 8, 9]
    assert list(fields.select(["data"]).sizes) == [1, 0, 3]
    for arguments, words in (
        (([1.5],), "sizes must be whole numbers"),
        (([],), "sizes must be whole numbers"),
        (([1, -1],), "sizes must be whole numbers, 0 or more"),
        (([2**63],), "sizes must be whole numbers, 0 or more and at most 92"),
        (([1, 2], [1]), "one entry per sample"),
        (([1, 2], ["a", "b"]), "labels must be integers"),
    ):
        with pytest.raises(UsageError, match=words):
            nostall.CustomSource(Reader(), *arguments, identity="")
    with pytest.raises(UsageError, match=r"groups must be whole numbers, .* at most 4294967295"):
        nostall.CustomSource(Reader(), [1, 1], identity="", groups=[0, 2**32])
    for sizes, columns, schema, words in (
        ({"a": [1]}, {"b": {"x": 1}}, {"a": f.Text()}, "column b is a dict: its values must stand"),
        ({"a": [1]}, {}, {}, "does not say of which kind the field a is"),
        ({"a": [1]}, {"a": [1]}, {"a": f.Text()}, "among the sizes and among the columns"),
        ({"a": [1]}, {"b": [1, 2]}, {"a": f.Text()}, "a has 1, b has 2"),
        ({"a": [1, -1]}, {}, {"a": f.Text()}, "sample 1 has no a"),
        ({"a": [1]}, {}, {"a": f.Text(), "c": f.Text()}, "names the field c"),
    ):
        with pytest.raises(UsageError, match=words):
            nostall.CustomFields(Pairs(), sizes, columns, schema=schema, identity="")
    with pytest.raises(UsageError, match=r"is no nostall\.SampleReader"):
        nostall.CustomSource(Pairs(), [1], identity="")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- fields

OURS: list[tuple[f.Kind, list[Any], dict[str, Any]]] = [
    (f.Image(fill=png(9)), [png(1), png(2)], {"refused": [1]}),
    (f.Mask(size=(32, 32)), [png(1, "L"), png(2, "L")], {"damaged": [b"", png(1, "L")[:-20]]}),
    (f.Mask(padded=True), [png(1, "L"), png(2, "L")], {"damaged": [b"no png"]}),
    (f.Boxes(), [np.zeros((0, 4)), [[1, 2, 3, 4]]], {"gives": [np.zeros((0, 4)), [[1, 2, 3, 4]]]}),
    (f.Keypoints(points=2, padded=True), [[[[1, 2], [3, 4]]], np.zeros((0, 2, 2))], {}),
    (f.Array(dtype="int16", shape=(2, None)), [[[1], [2]], [[1, 2], [3, 4]]], {"refused": [[1]]}),
    (f.Array(shape=(3,), codec="raw", fill=[0, 0, 0]), [[1, 2, 3], [4, 5, 6]], {"damaged": [b"1"]}),
    (f.Scalar(codec="decimal", fill=5), [3, -4], {"gives": [3, -4], "damaged": [b"x"]}),
    (f.Scalar(dtype="float32", stored="float64"), [0.5, 2], {"refused": ["a"]}),
    (f.Text(fill="none"), ["", "hélas"], {"gives": ["", "hélas"], "damaged": [b"\xff"]}),
    (f.Json(), [[1], {"a": None}], {"gives": [[1], {"a": None}], "damaged": [b"{"]}),
    (f.Bytes(padded=True), [b"abc", b""], {}),
    (f.Audio(frames=10), [wav(4), wav(20)], {"damaged": [wav(4)[:-3]]}),
]


@pytest.mark.parametrize("kind, values, more", OURS, ids=lambda v: type(v).__name__)
def test_our_kinds_pass(kind: f.Kind, values: list[Any], more: dict[str, Any]) -> None:
    check_field(kind, values, **more)


@dataclass(frozen=True)
class Reversed(f.Custom):
    """Bytes, the last one first."""

    dtype: str = "uint8"
    shape: tuple[int | None, ...] = (None,)
    padded: bool = False
    fill: bytes | None = None

    def decode(self, stored: bytes) -> Any:
        if stored.startswith(b"bad"):
            raise CorruptionError("it begins with bad")
        return np.frombuffer(stored, np.uint8)[::-1]


class Mutable(Reversed):
    __hash__ = None  # type: ignore[assignment]
    unlike: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        return self is other


class Fussy(Reversed):
    def decode(self, stored: bytes) -> Any:
        return np.frombuffer(stored, np.uint8)[:: -1 if stored[-1] else 1]


class Drawn(Reversed):
    draws: ClassVar[Iterator[int]] = itertools.count()

    def decode(self, stored: bytes) -> Any:
        return np.frombuffer(stored, np.uint8) + np.uint8(next(self.draws) % 256)


class Salted(Reversed):
    def encode(self, value: Any) -> bytes:
        return bytes(value) + random.randbytes(4)


GOOD = [b"abc", b"defgh"]


def test_kinds_of_the_users_own() -> None:
    for padded in (False, True):
        kind = Reversed(padded=padded, fill=b"xy")
        check_field(kind, GOOD, gives=[list(b"cba"), list(b"hgfed")], damaged=[b"bad"])
    data = nostall.Files({}, {"a": [b"abc", b"bad", b"de"]}, schema={"a": Reversed()})
    options: dict[str, Any] = {"epochs": 1, "shuffle": False, "tiers": [], "output": "numpy"}
    with (
        nostall.DataLoader(data, 3, **options) as loader,
        pytest.raises(CorruptionError, match=r"sample 1\) cannot be used: field a: it begins with"),
    ):
        list(loader)
    with nostall.DataLoader(data, 3, on_error="substitute", **options) as loader:
        (batch,) = loader
        assert batch["a"].sample(1).tobytes() in (b"cba", b"ed")
        assert loader.stats().epochs[0].substituted == [1]
    for kind, words in (
        (Reversed(dtype="int8"), r"decode gives uint8, and its dtype is int8"),
        (Reversed(shape=(3,)), r"array of shape \([02],\), not \(3,\)"),
        (Fussy(), "IndexError"),
    ):
        data = nostall.Files({}, {"a": [b"de", b""]}, schema={"a": kind})
        for on_error in ("raise", "substitute"):  # a fault of the kind is no damage
            with (
                nostall.DataLoader(data, 2, on_error=on_error, **options) as loader,
                pytest.raises(TransformError, match=words),
            ):
                list(loader)


def test_wrong_kinds_do_not() -> None:
    for kind, values, more, words in (
        (Mutable(), GOOD, {}, "make it a frozen dataclass"),
        (
            Fussy(),
            [b"abc", b"def"],
            {},
            "is damaged, and no CorruptionError but: (?s:.)*IndexError",
        ),
        (Drawn(), GOOD, {}, "value . is another one in a batch of its own"),
        (Salted(), GOOD, {}, "encode gives other bytes the second time"),
        (Reversed(), GOOD, {"gives": [[0], [1]]}, "value 0 is array"),
        (Reversed(), GOOD, {"damaged": [b"good"]}, "b'good' is damaged, and no CorruptionError"),
        (Reversed(), GOOD, {"refused": [b"1"]}, "encode does not refuse b'1'"),
        ("Text", GOOD, {}, r"derive its class from nostall\.fields\.Custom"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_field(kind, values, **more)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- transforms


@dataclass(frozen=True)
class Noise:
    """Adds a drawn number."""

    most: int = 50

    def __call__(self, image: Any, *, context: nostall.Context) -> Any:
        image += np.uint8(context.numpy().integers(self.most))
        return image


class Counting(Noise):
    count: ClassVar[list[int]] = [0]

    def __call__(self, image: Any, *, context: nostall.Context) -> Any:
        self.count[0] += 1
        return image + np.uint8(self.count[0])


class Growing(Noise):
    def __call__(self, image: Any, *, context: nostall.Context) -> Any:
        return image[: 10 + context.sample]


class Local(Noise):
    def __reduce__(self) -> Any:
        return Noise, (1,)


IMAGES = [np.full((32, 32, 3), level, np.uint8) for level in (3, 90)]


def test_transforms() -> None:
    files = [png(4), png(200)]
    check_transform([t.RandomResizedCrop(16), t.RandomHorizontalFlip(), t.ToTensor()], files)
    check_transform([t.RandAugment(), t.CenterCrop(8)], files, dtype="uint8", shape=(8, 8, 3))
    check_transform(Noise(), IMAGES, dtype="uint8", shape=(32, 32, 3))
    check_transform(lambda image: image[::2], IMAGES, pickled=False)
    for step, words in (
        (Counting(), "when it is called again: all that is random must come from"),
        (lambda image: image + np.uint8(random.randrange(200)), "when it is called again"),
        (Growing(), r"result 1 is of type and shape \('uint8', \(11, 32, 3\)\), not"),
        (Local(), "from a pickled copy"),
        (lambda image: image, "it cannot be pickled"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_transform(step, IMAGES)
    with pytest.raises(AssertionError, match=r"not \('float32'"):
        check_transform(Noise(), IMAGES, dtype="float32")


class Mean(Noise):
    dtype: ClassVar[Any] = np.float64

    def __call__(self, image: Any, *, context: nostall.Context) -> Any:
        return self.dtype(image.mean())


def test_transforms_may_be_told_their_type_and_shape_in_any_form() -> None:
    for dtype in (np.float64, float, np.dtype("float64"), "float64"):
        check_transform(Mean(), IMAGES, dtype=dtype, shape=())
    check_transform(Noise(), IMAGES, shape=[np.int64(32), 32, 3])
    tensors: list[Any] = [torch.zeros(2), torch.ones(2)]
    check_transform(torch.neg, tensors, dtype=torch.float32, shape=(2,), pickled=False)
    with pytest.raises(AssertionError, match=r"not \('uint8', \(\)\)"):
        check_transform(Noise(), IMAGES, shape=())
    with pytest.raises(AssertionError, match=r"not \('float64'"):
        check_transform(Noise(), IMAGES, dtype=float)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: check_transform(Noise(), []), r"samples must be one or more, not \[\]"),
        (lambda: check_transform(Noise(), IMAGES, dtype=5), "dtype must be a type of NumPy.*not 5"),
        (lambda: check_transform(Noise(), IMAGES, shape=32), "shape must be a tuple.*not 32"),  # type: ignore[arg-type]
        (lambda: check_field(Reversed(), [b"abc"]), "values must be two or more"),
        (lambda: check_field(Reversed(), [b"abc", b"abc"]), "values must be two or more"),
        (lambda: check_source(custom(Reader()), most=0), "most must be a whole number from 1"),
        (lambda: check_source(custom(Reader()), most=True), "most must be a whole number from 1"),
        (
            lambda: check_source(custom(Reader()), start_methods="fork"),
            "start_methods must be a list of texts, not 'fork'",
        ),
        (
            lambda: check_source(custom(Reader()), start_methods=["thread"]),
            "each of start_methods must be one of .*not 'thread'",
        ),
    ],
)
def test_checks_refuse_what_would_check_nothing(call: Callable[[], None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


# ---------------------------------------------------------------------------------- templates


def test_the_templates_run(image_folder: Path, tmp_path: Path) -> None:
    files = sorted(image_folder.rglob("*.jpg"))[:9]
    whole, lines = b"", []
    for i, path in enumerate(files):
        data = path.read_bytes()
        lines.append(f"{path.name},{len(whole)},{len(data)},{i % 3}\n")
        whole += data
    (tmp_path / "train.blob").write_bytes(whole)
    (tmp_path / "train.csv").write_text("".join(lines))
    for name, argument, words in (
        ("own-source.py", tmp_path, "epoch 1: 9 samples of 9"),
        ("own-field.py", "", "[1. 0. 0. 1.]"),
        ("own-transform.py", image_folder, "(16, 3, 24, 24) (16,)"),
    ):
        run = prefork.run([str(EXAMPLES / name), str(argument)], timeout=120)
        assert run.returncode == 0, run.stderr
        assert words in run.stdout
