"""What messages are made of."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import nostall
from nostall.base._words import counted, print_any_name, printable, words_of
from nostall.errors import IoError, UsageError


@pytest.mark.parametrize(
    ("number", "thing", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2, "rank", "2 ranks"),
        (1, "class", "1 class"),
        (3, "class", "3 classes"),
        (2, "batch", "2 batches"),
        (2, "epoch", "2 epochs"),
        (-1, "step", "-1 steps"),
    ],
)
def test_a_noun_follows_its_number(number: int, thing: str, text: str) -> None:
    assert counted(number, thing) == text


def test_one_of_each_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "only" / "0.bin"
    path.parent.mkdir(parents=True)
    np.zeros(5, np.uint8).tofile(path)
    folder = nostall.ImageFolder(tmp_path / "folder", extensions=[".bin"])
    assert "1 sample of 1 class, 0.0 MB" in repr(folder)
    assert "1 sample, 0.0 MB" in repr(nostall.Subset(folder, [0]))
    with nostall.DataLoader(folder, 1, epochs=1, tiers=[]) as loader:
        assert "1 batch an epoch" in repr(loader)
        assert len(list(loader)) == 1
        with pytest.raises(UsageError, match=r"this job of 1 epoch has ended"):
            next(iter(loader))
        state = {**loader.state_dict(), "epoch": 5}
        with pytest.raises(UsageError, match=r"outside this job of 1 epoch of 1 batch"):
            loader.load_state_dict(state)


def test_an_error_that_is_not_expected_is_told_with_its_kind() -> None:
    assert words_of(IoError("the disk is full")) == "the disk is full"
    assert words_of(TypeError("no number")) == "TypeError: no number"
    assert words_of(TimeoutError()) == "TimeoutError" and words_of(ValueError()) == "ValueError"


def test_a_stream_whose_file_another_took_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        there, here = os.pipe()
        os.dup2(here, out.fileno())
        os.close(here)
        monkeypatch.setattr(sys, "stdout", out)
        print_any_name()
        print("printed", flush=True)
    assert os.read(there, 100) == b"printed\n"
    os.close(there)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize(("encoding", "name"), [("utf-8", "\u20ac"), ("latin-1", "\\u20ac")])
def test_names_are_printed_alike(
    monkeypatch: pytest.MonkeyPatch, encoding: str, name: str, errors: str
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding, errors))
    print_any_name()
    print("\udcff\u20ac", end="", flush=True)
    assert printed.getvalue().decode(encoding) == printable("\udcff") + name
    with pytest.raises(UnicodeDecodeError):  # it is for what is printed
        b"\xff".decode("utf-8", "nostall.escaped")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_any_name()
