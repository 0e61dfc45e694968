"""Texts made into tokens once: by real tokenizers, in parts that survive a kill."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import prefork
import pytest
from object_server import Proxy, upload

import nostall
from nostall.base import _children
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source import _texts, _tokenize, _tokenizers

pytest_plugins = ["object_fixtures"]

tokenizers = pytest.importorskip("tokenizers")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "sleeps",
]
RANDOM = np.random.default_rng(5)
TEXTS = [
    " ".join(RANDOM.choice(WORDS, int(n))) + (" äöü" if n % 3 == 0 else "")
    for n in RANDOM.integers(1, 40, 60)
]
TEXTS[7] = TEXTS[59] = ""


def trained(merges: int = 300) -> Any:
    """A small tokenizer of bytes, trained on the texts."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=merges,
        special_tokens=["<end>", "<user>", "<bot>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


TOKENIZER = trained()


def json_lines(path: Path, rows: list[Any], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return path


def documents(tokens: nostall.Tokens) -> list[list[int]]:
    return [tokens.document(d).tolist() for d in range(tokens.documents)]


def expected(tokenizer: Any = TOKENIZER, end: int | None = 0) -> list[list[int]]:
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    return [[*ids, end] if ids and end is not None else ids for ids in found]


def as_lines(folder: Path) -> dict[str, Any]:
    json_lines(folder / "a.jsonl", TEXTS[:20])
    json_lines(folder / "b.jsonl", TEXTS[20:])
    return {"files": folder}


def as_gzip(folder: Path) -> dict[str, Any]:
    lines = json_lines(folder / "a", TEXTS).read_bytes()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    return {"files": folder / "a.jsonl.gz"}


def as_parquet(folder: Path) -> dict[str, Any]:
    table = pa.table({"other": range(60), "words": TEXTS})
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    return {"files": folder / "a.parquet", "column": "words"}


def as_datasets(folder: Path) -> dict[str, Any]:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "set", num_shards=3)
    return {"files": folder / "set"}


def as_text(separator: str) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "a.txt").write_text("".join(text + separator for text in TEXTS))
        return {"files": folder / "a.txt", "separator": separator}

    return write


def as_files(folder: Path) -> dict[str, Any]:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02d}.txt").write_text(text)
    return {"files": folder}


@pytest.mark.parametrize(
    "written, divided",
    [
        (as_lines, True),
        (as_gzip, False),
        (as_parquet, True),
        (as_datasets, True),
        (as_text("<|end|>"), True),
        (as_text("\n\n"), False),  # which byte begins a separator depends on those before
        (as_files, True),
    ],
)
def test_every_format_gives_the_same_tokens(
    written: Callable[[Path], dict[str, Any]],
    divided: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tokenize, "_PART_BYTES", 700)
    (tmp_path / "in").mkdir()
    arguments = written(tmp_path / "in")
    parts: list[int] = []

    def tokenize() -> nostall.Tokens:
        return nostall.tokenize(
            tokenizer=TOKENIZER,
            cache=tmp_path / "cache",
            end="<end>",
            workers=2,
            progress=parts.append,
            **arguments,
        )

    tokens = tokenize()
    assert documents(tokens) == expected()
    assert tokens.dtype == "uint16" and tokens.vocabulary == 300
    assert parts == sorted(parts) and (parts[-1] > 2) == divided
    # Once is enough, and the index of the stream is stored too.
    monkeypatch.setattr(_tokenize, "Makers", None)
    monkeypatch.setattr(_tokenize, "_alone", None)  # nor is anything written
    again = tokenize()
    assert again.fingerprint == tokens.fingerprint and again.index_reused


def test_objects_are_tokenised(bucket: Any, proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    as_lines(tmp_path / "in")
    as_parquet(tmp_path / "in")
    upload(bucket, tmp_path / "in")
    for names, column in ((["a.jsonl", "b.jsonl"], "text"), (["a.parquet"], "words")):
        there, here = (
            nostall.tokenize(
                [f"{root}/{name}" for name in names],
                TOKENIZER,
                tmp_path / "cache",
                column=column,
                workers=1,
            )
            for root in (f"s3://{bucket.name}", tmp_path / "in")
        )
        assert there.fingerprint == here.fingerprint
        assert documents(there) == documents(here)


def test_a_tokenizer_of_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"\w+|\s+|.",
        mergeable_ranks={bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257},
        special_tokens={"<|end|>": 258},
    )
    json_lines(tmp_path / "a.jsonl", TEXTS)
    tokens = nostall.tokenize(tmp_path / "a.jsonl", encoding, tmp_path, end="<|end|>", workers=1)
    found = documents(tokens)
    assert tokens.vocabulary == 259
    assert [encoding.decode(ids[:-1]) for ids in found if ids] == [t for t in TEXTS if t]
    assert all(ids[-1] == 258 for ids in found if ids)


CHATS = [
    [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "jumps over"},
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "sleeps"},
    ],
    [{"role": "user", "content": "brown"}, {"role": "assistant", "content": "tree"}],
    [{"role": "user", "content": "never answered"}],
]
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}"
    "<bot>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ m.content }}<end>", "{% generation %}{{ m.content }}<end>{% endgeneration %}"
)


def by_hand(messages: Any) -> tuple[list[int], list[int]]:
    """A template as a function."""
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        bot = message["role"] == "assistant"
        said = TOKENIZER.encode(message["content"]).ids + [0] * bot
        ids += [2 if bot else 1, *said]
        mask += [0, *[int(bot)] * len(said)]
    return ids, mask


@pytest.mark.parametrize("template", [PLAIN, MARKED, by_hand])
def test_chats_have_a_mask_of_what_is_learned(template: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    options: dict[str, Any] = {"chat": True}
    if callable(template):
        options = {"chat": template, "version": "1"}
    else:
        made.chat_template = template
    json_lines(tmp_path / "a.jsonl", CHATS, "messages")
    tokens = nostall.tokenize(
        tmp_path / "a.jsonl", made, tmp_path, column="messages", workers=1, **options
    )
    wanted = [by_hand(chat) for chat in CHATS]
    assert documents(tokens) == [ids for ids, _ in wanted]
    units = nostall.Documents(tokens, 32, fields=("ids", "labels", "loss_mask"))
    with nostall.DataLoader(units, 3, epochs=1, shuffle=False, tiers=[], output="numpy") as loader:
        batch = next(iter(loader))
    for row, (ids, mask) in enumerate(wanted):
        labels = [i if m else -100 for i, m in zip(ids[1:], mask[1:], strict=True)]
        assert batch["labels"][row].tolist() == labels + [-100] * (33 - len(ids))
        assert batch["loss_mask"][row].tolist() == mask[1:] + [0] * (33 - len(ids))


def test_a_template_that_does_not_tell_what_is_learned(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    made.chat_template = "{{ messages | length }}" + PLAIN
    json_lines(tmp_path / "a.jsonl", CHATS, "messages")
    with pytest.raises(UsageError, match="mark them by"):
        nostall.tokenize(tmp_path / "a.jsonl", made, tmp_path, column="messages", chat=True)
    json_lines(tmp_path / "b.jsonl", ["no messages"], "messages")
    with pytest.raises(CorruptionError, match=r"b\.jsonl, byte 0 makes no chat"):
        nostall.tokenize(tmp_path / "b.jsonl", made, tmp_path, column="messages", chat=True)


@pytest.mark.parametrize("package", ["tokenizers", "transformers"])
def test_special_tokens_in_texts_are_split_if_the_tokenizer_does(package: str) -> None:
    def found(splits: bool) -> tuple[Any, list[int]]:
        made: Any = tokenizers.Tokenizer.from_str(TOKENIZER.to_str())
        made.encode_special_tokens = splits
        if package == "transformers":
            fast: Any = pytest.importorskip("transformers").PreTrainedTokenizerFast
            made = fast(tokenizer_object=TOKENIZER, split_special_tokens=splits)
        adapter = pickle.loads(pickle.dumps(_tokenizers.tokenizer_of(made)))
        return adapter.identity, list(adapter.encode(["the <end> dog"])[0])

    whole, parts = found(False), found(True)
    assert 0 in whole[1]
    assert 0 not in parts[1]
    assert whole[0] != parts[0]


def test_what_a_tokenizer_does_per_call_is_no_part_of_it() -> None:
    transformers = pytest.importorskip("transformers")
    made: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, pad_token="<end>")
    before = _tokenizers.tokenizer_of(made).identity
    made(["the", "the lazy dog"], padding=True, truncation=True, max_length=3)
    assert _tokenizers.tokenizer_of(made).identity == before


def test_columns_of_ids_are_written_once(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [], [70_000, 5], None]
    labels = [[-100, 2, 3], [], [-100, 5], None]
    table = pa.table(
        {
            "ids": pa.array(ids, pa.list_(pa.int64())),
            "labels": pa.array(labels, pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    tokens = nostall.tokenize(
        tmp_path / "a.parquet", None, tmp_path, column="ids", tracks={"labels": "labels"}, end=9
    )
    assert documents(tokens) == [[1, 2, 3, 9], [], [70_000, 5, 9], []]
    units = nostall.Documents(tokens, 4)
    with nostall.DataLoader(units, 2, epochs=1, shuffle=False, tiers=[], output="numpy") as loader:
        batch = next(iter(loader))
    assert batch["labels"].tolist() == [[2, 3, -100, -100], [5, -100, -100, -100]]


def test_a_row_group_without_rows_has_no_document(tmp_path: Path) -> None:
    tables = [pa.table({"ids": pa.array(r, pa.list_(pa.int64()))}) for r in ([[1, 2]], [], [[3]])]
    with pq.ParquetWriter(tmp_path / "a.parquet", tables[0].schema) as file:
        for table in tables:
            file.write_table(table)
    tokens = nostall.tokenize(tmp_path / "a.parquet", None, tmp_path, column="ids", workers=1)
    assert documents(tokens) == [[1, 2], [3]]


def test_texts_of_any_length_between_separators(tmp_path: Path, monkeypatch: Any) -> None:
    texts = ["a b", "", "<|fox", "dog " * 50, "|end", "the" * 9, "last"]
    (tmp_path / "a.txt").write_text("<|end|>".join(texts))
    for block in (2, 3, 7, 1 << 20):
        monkeypatch.setattr(_texts, "_BLOCK", block)
        for most in (7, 8, 50, 10_000):
            size = (tmp_path / "a.txt").stat().st_size
            pieces = _texts.pieces_of([str(tmp_path / "a.txt")], [size], "<|end|>", most, None)
            rows = [row for p in pieces for row in _texts.rows_of_piece(p, ("",), "<|end|>", None)]
            assert [values for _, values in rows] == [[text] for text in texts]
            places = [int(place.rpartition(" ")[2]) for place, _ in rows]
            assert places == [len("<|end|>".join([*texts[:i], ""])) for i in range(len(texts))]


def test_an_index_has_places_beyond_the_sizes_type() -> None:
    index = _tokenize._index([1 << 30, 1], "int32")
    assert np.frombuffer(index, np.int64, 2, 34 + 8).tolist() == [0, 1 << 32]


KILLED = """
import sys, time
from pathlib import Path
import nostall
from nostall.source import _tokenize
_tokenize._PART_BYTES = 700
folder = Path(sys.argv[1])
def words(text):
    if "STOP" in text and (folder / "stop").exists():
        (folder / "stopped").touch()
        time.sleep(600)
    return [len(word) for word in text.split()]
made = nostall.tokenize(folder / "a.jsonl", words, folder / sys.argv[2], version="1", workers=1)
print(made.fingerprint, *made.read(0, len(made)))
"""


def test_work_that_was_killed_goes_on(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", [*TEXTS[:40], "STOP", *TEXTS[40:]])
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    (tmp_path / "stop").touch()
    first = subprocess.Popen([*command, "cut"])
    deadline = time.monotonic() + 120
    while not (tmp_path / "stopped").exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    whole = list(tmp_path.glob("cut/*/*.idx"))
    assert len(whole) > 2 and list(tmp_path.glob("cut/*/*.making"))
    times = {path: path.stat().st_mtime_ns for path in whole}
    (tmp_path / "stop").unlink()
    runs = [
        subprocess.run([*command, cache], check=True, capture_output=True, text=True, timeout=400)
        for cache in ("cut", "whole")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert {path: path.stat().st_mtime_ns for path in whole} == times
    assert not list(tmp_path.glob("cut/*/*.making"))


def test_no_part_is_waited_for_where_another_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tokenize, "_PART_BYTES", 1)
    monkeypatch.setattr(_children, "SECONDS_TO_END", 0.2)
    for name in ("bad", "slow"):
        json_lines(tmp_path / f"{name}.jsonl", [name])

    def ids(text: str) -> list[int]:
        deadline = time.monotonic() + 120
        if text == "bad":
            while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return [-1]
        (tmp_path / "begun").touch()
        while time.monotonic() < deadline:
            time.sleep(0.01)
        (tmp_path / "ended").touch()
        return [1]

    with pytest.raises(CorruptionError, match=r"bad\.jsonl.*-1 is not from 0"):
        nostall.tokenize(tmp_path, ids, tmp_path / "cache", version="1", workers=2)
    assert (tmp_path / "begun").exists() and not (tmp_path / "ended").exists()


def test_a_part_is_whole_where_another_process_writes_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)

    def words(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def both(parts: Any, *_: Any) -> None:
        others = [replace(parts, tokenizer=_tokenizers.Called(words))]

        def between(text: str) -> list[int]:
            if others:
                others.pop()._write(0)
            return words(text)

        replace(parts, tokenizer=_tokenizers.Called(between))._write(0)

    monkeypatch.setattr(_tokenize, "_run", both)
    tokens = nostall.tokenize(path, words, tmp_path / "cache", version="1")
    assert documents(tokens) == [words(text) for text in TEXTS]
    assert not list(tmp_path.glob("cache/*/*.making"))


def test_the_key_is_of_the_tokenizer_and_the_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)

    def folder(tokenizer: Any = TOKENIZER, **options: Any) -> tuple[str, int]:
        tokens = nostall.tokenize(path, tokenizer, tmp_path / "cache", workers=1, **options)
        return os.path.dirname(tokens.storage.paths[0]), tokens.fingerprint

    first = folder()
    assert folder() == first
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    assert folder(str(tmp_path / "tokenizer.json")) == folder(tmp_path / "tokenizer.json") == first
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "nostall"):
        for wrong in ("none", "nothing"):
            with pytest.raises(UsageError, match="has no column"):
                folder(column=wrong)
        assert len(caplog.records) == 2  # of the first folder alone: the others have no tokens
        other = folder(trained(280))
    assert first[0] != other[0] and first[1] != other[1]
    assert f"{first[0]} has the same texts with another value of tokenizer" in caplog.text
    monkeypatch.setattr(tokenizers, "__version__", "99.0")
    later = folder()
    assert later[0] != first[0] and later[1] != first[1]
    os.utime(path, ns=(1, 1))
    touched = folder()
    assert touched[0] != later[0] and touched[1] == later[1]
    json_lines(path, TEXTS[:50])
    assert folder()[1] != later[1]


def test_the_key_has_the_vocabulary_of_a_function(tmp_path: Path) -> None:
    """Two that are made by one function have one name."""

    def made(vocabulary: int) -> Any:
        def words(text: str) -> list[int]:
            return [len(word) % vocabulary for word in text.split()]

        words.vocabulary = vocabulary  # type: ignore[attr-defined]
        return words

    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    for words in (made(3), made(4)):
        tokens = nostall.tokenize(path, words, tmp_path / "cache", version="1")
        assert documents(tokens) == [words(text) for text in TEXTS]


def test_texts_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    before = path.stat()

    def change(_: int) -> None:
        json_lines(path, TEXTS[::-1])
        os.utime(path, ns=(1, 1))

    with pytest.raises(IoError, match=r"a\.jsonl changed while it was tokenised"):
        nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0, progress=change)
    assert not [*tmp_path.glob("cache/*/done"), *tmp_path.glob("cache/*/*.idx")]
    tokens = nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0)
    assert documents(tokens) == expected()[::-1]
    json_lines(path, TEXTS)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    tokens = nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0)
    assert documents(tokens) == expected()


def test_what_cannot_be_tokenised_is_named(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)

    def refused(kind: type[Exception], match: str, **options: Any) -> None:
        arguments = {
            "files": path,
            "tokenizer": TOKENIZER,
            "cache": tmp_path,
            "workers": 1,
        } | options
        with pytest.raises(kind, match=match):
            nostall.tokenize(**arguments)

    refused(UsageError, r"a\.jsonl, byte 0 has no column 'none'; it has: text", column="none")
    refused(UsageError, r"one column, not \['a', 'b'\]: .*chat=.*tracks=", column=["a", "b"])
    refused(UsageError, "end='<none>' is no token", end="<none>")
    refused(UsageError, "end=300 is no token", end=300)
    refused(UsageError, "has no version of its own", tokenizer=str.split)
    refused(UsageError, "tokenizer= is int", tokenizer=3)
    refused(UsageError, "no chat template", chat=True)
    refused(UsageError, r"tracks= are columns beside ids", tracks={"labels": "text"})
    refused(CorruptionError, "the values of bin are no list", tokenizer=str.split, version="1")
    path.write_text('{"text": "a"}\n{"text":')
    refused(CorruptionError, r"a\.jsonl, byte 14 is no JSON")
    path.write_text('{"text": 3}\n')
    refused(CorruptionError, r"a\.jsonl, byte 0 has no text, but int")
    path.write_text('{"text": [1, -2]}\n')
    refused(CorruptionError, r"byte 0: -2 is not from 0 to 2147483647", tokenizer=None)
    path.write_text('{"text": [1, 2], "labels": [1]}\n')
    tracks = {"tokenizer": None, "tracks": {"labels": "labels"}}
    refused(CorruptionError, r"byte 0: 2 ids, but \[1\] values of labels", **tracks)
    for end in (None, 1):
        ids = {"tokenizer": None, "end": end}
        path.write_text('{"text": [3, 1.5]}\n')
        refused(CorruptionError, "byte 0: the values of bin are no list of whole numbers", **ids)
        path.write_text('{"text": 7}\n')
        refused(CorruptionError, "byte 0: the values of bin are no list of whole numbers", **ids)
        path.write_text('{"text": [[1], [2, 3]]}\n')
        refused(CorruptionError, "byte 0: the values of bin are no list of whole numbers", **ids)
        short = {"chat": lambda chat: (chat, []), "version": "1", "end": end}
        path.write_text('{"text": [1, 2]}\n')
        refused(CorruptionError, r"byte 0: 2 ids, but \[0\] values of loss_mask", **short)
    refused(
        UsageError, "none.json cannot be opened as a tok", tokenizer=str(tmp_path / "none.json")
    )
    path.write_text("")
    refused(UsageError, "the files have no texts")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    refused(CorruptionError, r"a\.txt is not UTF-8", files=tmp_path / "a.txt")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}')[:-9])
    refused(CorruptionError, r"b\.jsonl\.gz, byte 0: Compressed", files=tmp_path / "b.jsonl.gz")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"the fox")[:-9])
    refused(CorruptionError, r"c\.txt\.gz: Compressed file ended", files=tmp_path / "c.txt.gz")
    for ending in ("txt", "jsonl"):
        damaged = tmp_path / f"d.{ending}.gz"
        damaged.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 20)
        refused(CorruptionError, rf"d\.{ending}\.gz.*: Error -3 while decompressing", files=damaged)
    json_lines(path, TEXTS)

    def broken(text: str) -> list[int]:
        return [len(text) // 0]

    refused(
        CorruptionError,
        r"a\.jsonl, byte 0 cannot be tokenised: ZeroDivisionError",
        tokenizer=broken,
        version="1",
    )
    at = len(json_lines(path, TEXTS[:5]).read_bytes())
    json_lines(path, [*TEXTS[:5], "half \ud800 of a pair", *TEXTS[5:]])
    refused(CorruptionError, rf"a\.jsonl, byte {at} cannot be tokenised: TypeError")

    def full(text: str) -> list[int]:
        raise MemoryError

    refused(IoError, "MemoryError", tokenizer=full, version="1")


def as_json_gzip(folder: Path) -> None:
    for ending in ("json", "ndjson"):
        rows = json_lines(folder / "a", TEXTS).read_bytes()
        (folder / f"c4-train.00000.{ending}.gz").write_bytes(gzip.compress(rows))
    (folder / "a").unlink()


def test_json_lines_that_are_compressed_are_found_in_a_folder(tmp_path: Path) -> None:
    as_json_gzip(tmp_path)
    tokens = nostall.tokenize(tmp_path, TOKENIZER, tmp_path / "cache", end=0)
    assert documents(tokens) == expected() * 2


def test_endings_count_in_any_letters(tmp_path: Path) -> None:
    json_lines(tmp_path / "A.JSONL", TEXTS)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "B.PARQUET")
    tokens = nostall.tokenize(tmp_path, TOKENIZER, tmp_path / "cache", end=0)
    assert documents(tokens) == expected() * 2


@pytest.mark.parametrize("beside", ["b.jsonl.zst", "b.csv.gz", "b.jsonlines", "README.txt"])
@pytest.mark.parametrize("given", ["", "*", "**"])
def test_a_folder_of_which_files_would_be_left_out_is_refused(
    tmp_path: Path, beside: str, given: str
) -> None:
    as_json_gzip(tmp_path)
    (tmp_path / beside).write_text("a plain text")
    words = "has plain texts" if "txt" in beside else "does not end as"
    for separator in (None, "--"):
        with pytest.raises(UsageError, match=words) as error:
            nostall.tokenize(
                tmp_path / given, TOKENIZER, tmp_path / "cache", separator=separator, workers=1
            )
        assert beside in str(error.value)
    chosen = nostall.tokenize(tmp_path / "*.json.gz", TOKENIZER, tmp_path / "cache", end=0)
    assert documents(chosen) == expected()


def test_objects_that_would_be_left_out_are_refused(
    bucket: Any, proxy: Proxy, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    as_lines(tmp_path / "in")
    (tmp_path / "in" / "c.jsonl.zst").touch()
    upload(bucket, tmp_path / "in")
    with pytest.raises(UsageError, match=r"c\.jsonl\.zst does not end as"):
        nostall.tokenize(f"s3://{bucket.name}", TOKENIZER, tmp_path / "cache", workers=1)


@pytest.mark.parametrize("name", ["part-00000", "a.csv", "a.jsonlines", "a.md"])
def test_what_a_file_of_another_ending_holds_is_asked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("the fox")
    for files in (tmp_path / name, [tmp_path / name], f"{tmp_path}/{name[0]}*"):
        with pytest.raises(UsageError, match=rf"{name} does not end as .*separator="):
            nostall.tokenize(files, TOKENIZER, tmp_path / "cache", column="other")
        tokens = nostall.tokenize(files, TOKENIZER, tmp_path / "cache", separator="")
        assert documents(tokens) == [TOKENIZER.encode("the fox").ids]


def test_texts_of_several_endings_are_read_by_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.txt", "b.md", "c"):
        (folder / name).write_text("the fox")
    with pytest.raises(UsageError, match=r"b\.md does not end as .*separator="):
        nostall.tokenize(folder / "*", TOKENIZER, tmp_path / "cache")
    tokens = nostall.tokenize(folder / "*", TOKENIZER, tmp_path / "cache", separator="")
    assert documents(tokens) == [TOKENIZER.encode("the fox").ids] * 3
    (folder / "d.zst").touch()
    with pytest.raises(UsageError, match=r"d\.zst does not end as"):
        nostall.tokenize(folder / "*", TOKENIZER, tmp_path / "cache", separator="")
    (folder / "d.zst").unlink()
    json_lines(folder / "e.jsonl", TEXTS)
    with pytest.raises(UsageError, match=r"plain texts \(.*a\.txt\) beside .*e\.jsonl"):
        nostall.tokenize(folder / "*", TOKENIZER, tmp_path / "cache", separator="")


def test_a_list_may_have_plain_texts_beside_columns(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("the fox")
    listed = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    tokens = nostall.tokenize(listed, TOKENIZER, tmp_path / "cache", end=None)
    assert documents(tokens) == [*expected(end=None), TOKENIZER.encode("the fox").ids]


def test_tokenizers_whose_content_is_not_known_need_a_version(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    python = transformers.ByT5Tokenizer()
    with pytest.raises(
        UsageError, match="ByT5Tokenizer, which is written in Python, has no version"
    ):
        nostall.tokenize(path, python, tmp_path / "cache")
    tokens = nostall.tokenize(path, python, tmp_path / "cache", version="1")
    assert documents(tokens)[0] == python(TEXTS[0], add_special_tokens=False)["input_ids"]


def test_a_machine_that_stopped_leaves_a_cache_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    synced: set[int] = set()
    named: dict[str, int] = {}
    fsync, rename = os.fsync, os.replace

    def syncs(file: int) -> None:
        fsync(file)
        synced.add(os.fstat(file).st_ino)

    def renames(source: str, to: str) -> None:
        named[os.path.basename(to)] = os.stat(source).st_ino
        rename(source, to)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", renames)
    tokens = nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0)
    assert named["done"] in synced
    (done,) = tmp_path.glob("cache/*/done")
    whole = done.read_text()
    done.write_text("")
    monkeypatch.setattr(_tokenize, "Makers", None)  # all parts are there
    again = nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0)
    assert again.fingerprint == tokens.fingerprint and done.read_text() == whole


def test_file_systems_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    caplog.set_level(logging.WARNING, "nostall")
    first = nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0)
    assert "its file system has no locks" in caplog.text
    assert documents(first) == expected()
    (done,) = tmp_path.glob("cache/*/done")
    done.unlink()
    of_another = done.with_name("of-another.making")
    of_another.touch()
    nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0)
    assert of_another.exists()
    monkeypatch.undo()
    done.unlink()
    nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0)
    assert not of_another.exists()


def test_a_folder_is_free_although_a_child_has_its_lock(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    kept: list[int] = []

    def fork(_: int) -> None:  # as a child that is forked now has it
        (lock,) = tmp_path.glob("cache/*/lock")
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), lock.stat()):
                    kept.append(os.dup(int(name)))

    nostall.tokenize(path, TOKENIZER, tmp_path / "cache", end=0, progress=fork)
    (lock,) = tmp_path.glob("cache/*/lock")
    with open(lock) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert kept
    for fd in kept:
        os.close(fd)


def test_a_row_group_is_unpacked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_texts, "_ROWS_AT_ONCE", 7)
    rows: list[int] = []
    of_table = _texts._of_table

    def counted(table: Any, *more: Any) -> Any:
        rows.append(table.num_rows)
        return of_table(table, *more)

    monkeypatch.setattr(_texts, "_of_table", counted)
    pq.write_table(pa.table({"ids": [[i] for i in range(20)]}), tmp_path / "a.parquet")
    found = _texts.rows_of_piece(
        _texts.Piece(str(tmp_path / "a.parquet"), 0, 1, 1), ["ids"], None, None
    )
    assert [(place.rpartition(", ")[2], list(values[0])) for place, values in found] == [
        (f"row {i}", [i]) for i in range(20)
    ]
    assert rows == [7, 7, 6]


def test_no_document_of_many_is_left_out(tmp_path: Path) -> None:
    """More than a tokenizer gets at once."""
    numbers = json_lines(tmp_path / "ids.jsonl", [[i] for i in range(2000)], "ids")
    tokens = nostall.tokenize(numbers, None, tmp_path / "ids", column="ids")
    assert documents(tokens) == [[i] for i in range(2000)]
    texts = [f"{i} {TEXTS[i % 50]}" for i in range(1025)]
    tokens = nostall.tokenize(
        json_lines(tmp_path / "texts.jsonl", texts), TOKENIZER, tmp_path / "texts"
    )
    found = TOKENIZER.encode_batch(texts, add_special_tokens=False)
    assert documents(tokens) == [encoding.ids for encoding in found]


def test_no_text_is_cut_or_filled_up_as_a_model_needs_it(tmp_path: Path) -> None:
    cutting = trained()
    cutting.enable_truncation(max_length=3)
    cutting.enable_padding(length=8)
    tokens = nostall.tokenize(
        **as_lines(tmp_path), tokenizer=cutting, cache=tmp_path / "cache", end=0
    )
    assert documents(tokens) == expected()
    assert cutting.truncation is not None  # it is the user's


def test_the_first_example_of_the_guide_runs_without_a_package(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "tokens.md").read_text()
    texts = guide.partition("\n## Texts\n")[2]
    example = "import nostall\n" + re.findall(r"```python\n(.*?)```", texts, re.S)[0]
    (tmp_path / "book.txt").write_text("\n\n".join(TEXTS * 20))
    hidden = (
        "import sys\nsys.modules |= dict.fromkeys(('tokenizers', 'transformers', 'tiktoken'))\n"
    )
    run = prefork.run(["-c", hidden + example], cwd=tmp_path, timeout=800)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].count("8, 256") == 2, run.stdout
    (kept,) = (tmp_path / "tokens").rglob("*.bin")
    assert np.fromfile(kept, np.int32).tolist() == [
        i for text in TEXTS * 20 if text for i in (*text.encode(), 0)
    ]
