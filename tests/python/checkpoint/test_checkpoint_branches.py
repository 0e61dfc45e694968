"""Going back to an older checkpoint: branches, the order of saves, what stays and what is restored."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_checkpointer import World, ranked

import nostall
import nostall.checkpoint._store
from nostall import Keep
from nostall.checkpoint._background import BackgroundWriter
from nostall.checkpoint._format import Branch, Manifest, Part
from nostall.checkpoint._lineage import STRIDE, Lineage, add, branches, is_past
from nostall.checkpoint._retention import decide
from nostall.checkpoint._saved import Job
from nostall.checkpoint._search import Search
from nostall.checkpoint._store import Store, part_name
from nostall.cli import main
from nostall.errors import CorruptionError, IoError, UsageError

# What releases have written: a file of each version of the formats.
MANIFEST_1 = (
    '{"format": "nostall checkpoint", "version": 1, "step": 7, "id": "0123abcd-000002", "created": '
    '1700000000.5, "world_size": 1, "replicated": false, "metric": null, "software": {}, "block": '
    '4194304, "files": [{"rank": 0, "name": "rank-00000.0123abcd-000002.safetensors", "bytes": 9, '
    '"crc32c": ["0000000a"]}], "crc32c": "CRC1"}'
)
MANIFEST_2 = MANIFEST_1.replace('"version": 1', '"version": 2').replace(
    '"created"', '"sequence": 2097155, "abandoned": [[1048580, 1048590]], "created"'
)
BRANCH_1 = (
    '{"format": "nostall branch", "version": 1, "sequence": 2097156, "abandoned": [[-999999999990, '
    '1048590]], "step": 7, "id": "0123abcd-000002", "crc32c": "CRC3"}'
)


def state_of(step: int, value: int = 0) -> dict[str, Any]:
    return {"step": step, "value": value}


def saves_in(root: Path) -> list[int]:
    """Steps of all saves, those of a step that was saved twice twice."""
    return [m.step for m in Store(root, "durable").manifests()]


def run(root: Path, steps: Any, value: int = 0, back_to: int | None = None, **options: Any) -> None:
    with nostall.Checkpointer(durable=root, level="durable", **options) as ckpt:
        if back_to is not None:
            found = ckpt.restore(back_to)
            assert found is not None and found.step == back_to
        for step in steps:
            ckpt.save(state_of(step, value), step)


def newest(root: Path) -> tuple[int, int]:
    with nostall.Checkpointer(durable=root) as ckpt:
        found = ckpt.restore()
    assert found is not None
    return found.step, found.state["value"]


@pytest.mark.parametrize("tier", ["fast", "durable"])
def test_a_branch_that_a_save_has_begun_is_known_without_its_manifest(
    tmp_path: Path, tier: str
) -> None:
    places = tmp_path / "fast", tmp_path / "durable"
    for steps in ((50, 60, 70), (55,)):  # the state of 50 was loaded without restore
        with nostall.Checkpointer(*places, keep_fast=9, level="durable") as ckpt:
            for step in steps:
                ckpt.save(state_of(step), step)
    manifest = Store(tmp_path / tier, tier).directory(55) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"5", b"6"))
    with nostall.Checkpointer(**{tier: tmp_path / tier}) as ckpt:
        found = ckpt.restore()
        ckpt.save(state_of(58), 58)
    assert found is not None and found.step == 50
    with nostall.Checkpointer(**{tier: tmp_path / tier}) as ckpt:
        found = ckpt.restore()
    assert found is not None and found.step == 58


def test_the_note_of_a_drain_does_not_replace_that_of_a_later_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable, write = tmp_path / "durable", nostall.checkpoint._store._write_durably
    drains, restored = threading.Event(), threading.Event()

    def late(path: Path, data: bytes) -> None:
        if path == durable / "branch.json" and Branch.from_bytes(data, "").step == 55:
            drains.set()
            restored.wait(1)  # the restore waits for this, or is done long before
        write(path, data)

    with nostall.Checkpointer(tmp_path / "fast", durable, keep_fast=9, level="durable") as ckpt:
        for step in (50, 60, 70):
            ckpt.save(state_of(step), step)
        monkeypatch.setattr(nostall.checkpoint._store, "_write_durably", late)
        ckpt.save(state_of(55), 55, level="fast")
        assert drains.wait(60)
        found = ckpt.restore(50)
        restored.set()
    assert found is not None and found.step == 50
    assert newest(durable) == (50, 0)


def test_no_note_replaces_a_later_one(tmp_path: Path) -> None:
    store = Store(tmp_path, "durable")
    for number in (2, 1):
        store.note_branch(Branch(number, (), number, "a"))
    assert store.branch() == Branch(2, (), 2, "a")


def test_what_a_restore_goes_back_to_is_not_retired_before_its_branch_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nostall.Checkpointer(durable=tmp_path, keep=1, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
        restored, run = ckpt._lineage.restored, Search.run

        def with_a_save(search: Search, *arguments: Any) -> Any:
            found = run(search, *arguments)
            ckpt.save(state_of(2), 2)
            return found

        def late(saved: Any) -> bool:
            ckpt.wait(60)  # also for retention, where it may run
            return restored(saved)

        monkeypatch.setattr(Search, "run", with_a_save)
        monkeypatch.setattr(ckpt._lineage, "restored", late)
        ckpt.restore(1)
        monkeypatch.undo()
        ckpt.wait(60)
    assert newest(tmp_path) == (1, 0) and saves_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("keep", [Keep(1, every=50), Keep(3)])
def test_what_is_saved_after_going_back_stays_and_is_restored(tmp_path: Path, keep: Keep) -> None:
    run(tmp_path, range(10, 101, 10), keep=keep)
    with nostall.Checkpointer(durable=tmp_path, level="durable", keep=Keep(9)) as ckpt:
        if keep.every is None:
            ckpt.restore(80)
        else:
            ckpt.restore(50)
        for step in range(60, 91, 10):
            ckpt.save(state_of(step, 1), step)
            assert step in saves_in(tmp_path)
            found = ckpt.restore()
            assert found is not None and (found.step, found.state["value"]) == (step, 1)
    assert newest(tmp_path) == (90, 1)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:  # and reversibly so
        found = ckpt.restore(100)
        assert found is not None and found.state["value"] == 0
    assert newest(tmp_path) == (100, 0)


def test_going_back_is_durable_before_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, range(1, 6))
    run(tmp_path, (), back_to=3)
    assert "goes on from step 3" in caplog.text and "superseded" in caplog.text
    assert "`nostall checkpoints rm --superseded` removes it" in caplog.text
    assert newest(tmp_path) == (3, 0)
    caplog.clear()
    run(tmp_path, (), back_to=3)  # nothing is given up by that
    assert "superseded" not in caplog.text
    run(tmp_path, (4,), value=1)
    assert newest(tmp_path) == (4, 1)
    assert saves_in(tmp_path) == [1, 2, 3, 4, 4, 5]


def test_a_begin_that_cannot_be_noted_is_told_and_is_in_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, range(1, 6))
    (tmp_path / "branch.json.partial").mkdir()  # the note cannot be written
    run(tmp_path, (), back_to=3)
    assert "the next save will tell" in caplog.text
    assert newest(tmp_path) == (5, 0)
    run(tmp_path, (4,), value=1, back_to=3)
    assert newest(tmp_path) == (4, 1)


def test_a_note_that_cannot_be_read_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unread(_: Store) -> None:
        raise IoError("cannot read branch.json")

    run(tmp_path, (5,))
    with nostall.Checkpointer(durable=tmp_path, level="durable", keep=9) as ckpt:
        with monkeypatch.context() as broken:
            broken.setattr(Store, "branch", unread)
            for step in (1, 2, 3):
                ckpt.save(state_of(step), step)
        assert caplog.text.count("only the manifests of step") == 1
        ckpt.save(state_of(4), 4)
    note = Store(tmp_path, "durable").branch()
    assert note is not None and note.step == 4


def test_a_save_below_the_newest_step_begins_a_branch(tmp_path: Path) -> None:
    run(tmp_path, range(10, 60, 10), keep=2)
    run(tmp_path, (20, 30), value=1, keep=2)  # it has loaded its state by itself
    assert newest(tmp_path) == (30, 1)
    assert saves_in(tmp_path) == [20, 30, 40, 50]
    run(tmp_path, (40, 50), value=1, keep=2)
    # The old ones of these steps have a name of their own now.
    assert saves_in(tmp_path) == [40, 40, 50, 50]
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        found = ckpt.restore(50)
        assert found is not None and found.state["value"] == 1


@pytest.mark.parametrize("wrong", [{"metric": "x"}, {"state": {"a": {1}}}])
def test_a_save_that_is_refused_gives_up_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    keep = Keep(last=3, superseded=0)
    with nostall.Checkpointer(durable=tmp_path, level="durable", keep=keep) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(state_of(step), step)
        for step in (5, 30):
            with pytest.raises(UsageError):
                ckpt.save(**{"state": state_of(step), "step": step, **wrong})
        ckpt.save(state_of(40), 40)
        ckpt.wait(60)
        assert sorted(ckpt.steps()) == [20, 30, 40]
        ckpt.save(state_of(15), 15)  # this one is no mistake
        ckpt.wait(60)
        assert sorted(ckpt.steps()) == [15]


def test_superseded_ones_stay_as_long_as_their_branch_is_kept(tmp_path: Path) -> None:
    keep = Keep(2, superseded=1)
    run(tmp_path, range(10, 60, 10), keep=keep)
    run(tmp_path, (45, 47), back_to=40, keep=keep)
    assert saves_in(tmp_path) == [45, 47, 50]
    run(tmp_path, (48,), keep=Keep(2, superseded=0))
    assert saves_in(tmp_path) == [47, 48]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    fast, durable, now = tmp_path / "fast", tmp_path / "durable", time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    with nostall.Checkpointer(fast, durable, level="durable") as ckpt:
        ckpt.save(state_of(7, 1), 7)
    monkeypatch.undo()
    with nostall.Checkpointer(fast, level="fast") as ckpt:  # the durable one is of the first save
        ckpt.save(state_of(7, 2), 7)
        found = ckpt.restore()
        assert found is not None and found.state["value"] == 2
    with nostall.Checkpointer(fast, durable) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.state["value"] == 2
        ckpt.wait(60)
    assert newest(durable) == (7, 2)


def test_saves_of_a_node_that_was_away_come_before_those_made_meanwhile(tmp_path: Path) -> None:
    fast, durable, away = tmp_path / "fast", tmp_path / "durable", tmp_path / "away"
    with nostall.Checkpointer(fast, durable, level="durable") as ckpt:
        ckpt.save(state_of(1), 1)
    with nostall.Checkpointer(fast, durable, level="fast", keep=9) as ckpt:
        ckpt._background.submit_drain = lambda drain: None  # type: ignore[method-assign]
        for step in range(2, 7):
            ckpt.save(state_of(step), step)
    fast.rename(away)
    with nostall.Checkpointer(fast, durable, level="durable") as ckpt:
        found = ckpt.restore()
        assert found is not None and found.step == 1
        ckpt.save(state_of(2, 1), 2)
    with nostall.Checkpointer(away, durable) as ckpt:
        found = ckpt.restore()
        assert found is not None and (found.step, found.state["value"]) == (2, 1)


def test_ranks_go_back_together(tmp_path: Path) -> None:
    make = ranked(tmp_path, 2, level="durable", keep=1)

    def work(rank: int, gather: Any) -> Any:
        with make(rank, gather) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(state_of(step, rank), step)
        with make(rank, gather) as ckpt:
            ckpt.restore(3)
            ckpt.save(state_of(4, rank), 4)
            ckpt.restore(4)
        with make(rank, gather) as ckpt:
            ckpt.save(state_of(2, 10 + rank), 2)
        with make(rank, gather) as ckpt:
            found = ckpt.restore()
            back = ckpt.restore(4)
        with make(rank, gather) as ckpt:
            again = ckpt.restore()
            return [(f.step, f.state["value"]) for f in (found, back, again) if f]

    assert World(2).run(work) == [[(2, 10), (4, 0), (4, 0)], [(2, 11), (4, 1), (4, 1)]]


def test_ranks_number_their_saves_alike_after_they_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = BackgroundWriter.submit
    numbers: list[list[int]] = [[], []]

    def note(background: BackgroundWriter, job: Job, awaited: Any) -> None:
        numbers[background.rank].append(job.manifest.sequence)
        submit(background, job, awaited)

    monkeypatch.setattr(BackgroundWriter, "submit", note)

    def work(rank: int, gather: Any) -> None:
        with ranked(tmp_path, 2, level="durable", replicated=True)(rank, gather) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(state_of(step), step)
                gather(b"")
                ckpt.restore(1)

    assert World(2).run(work) == [None, None]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 3


def test_a_rank_without_a_part_compares_numbers_of_saves_alone(tmp_path: Path) -> None:
    store, run = Store(tmp_path, "durable"), "aaaaaaaa"
    parts = (Part(0, part_name(0, f"{run}-000001"), 0, ()),)
    earlier = Manifest(1, f"{run}-000001", 2, parts, replicated=True, sequence=9)
    store.prepare(1)
    store.publish(earlier)
    late = Manifest(2, f"{run}-000002", 2, (), replicated=True, sequence=3)
    words = store.commit(late, 1, None, timeout=0, stopped=lambda: True)
    assert "rank 0 did not complete step 2" in words
    before = Manifest(0, f"{run}-000000", 2, (), replicated=True, sequence=10)
    assert store.commit(before, 1, None, timeout=0, stopped=lambda: True) == ""


def test_all_of_the_current_branch_damaged_is_an_error_that_names_the_others(
    tmp_path: Path,
) -> None:
    run(tmp_path, (1, 2, 3), keep=1)
    run(tmp_path, (1,), keep=1)
    for path in tmp_path.glob("*1/*.safetensors"):
        path.write_bytes(b"x" * path.stat().st_size)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        with pytest.raises(
            CorruptionError, match=r"steps \[3\] are of branches that were given up"
        ):
            ckpt.restore()
        found = ckpt.restore(3)
        assert found is not None
    assert newest(tmp_path) == (3, 0)


def test_a_damaged_note_is_said_and_what_was_saved_since_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, (1, 2, 3))
    run(tmp_path, (), back_to=1)
    (tmp_path / "branch.json").write_bytes(b"{}")
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        assert "branch.json is damaged" in caplog.text
        found = ckpt.restore()
        assert found is not None and found.step == 3


def test_a_save_that_is_removed_by_hand_gives_nothing_up(tmp_path: Path) -> None:
    run(tmp_path, (50, 60, 70))
    run(tmp_path, (1,))  # without a restore, by mistake
    assert (tmp_path / "branch.json").exists()
    assert main(["checkpoints", "rm", "--step", "1", str(tmp_path)]) == 0
    assert newest(tmp_path) == (70, 0)
    run(tmp_path, (), back_to=60)
    assert main(["checkpoints", "rm", "--step", "70", str(tmp_path)]) == 0
    run(tmp_path, (70,), value=1)
    assert main(["checkpoints", "rm", "--step", "60", str(tmp_path)]) == 0
    note = Store(tmp_path, "durable").branch()  # of the restore, not of the save
    assert note is not None and note.step == 60
    run(tmp_path, (5,))
    assert main(["checkpoints", "rm", "--step", "5", str(tmp_path)]) == 0
    assert Store(tmp_path, "durable").branch() == note  # what was restored before still holds
    assert newest(tmp_path) == (70, 1)


def test_branches_in_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path)
    run(tmp_path, (1, 2, 3))
    run(tmp_path, (2,), value=1)
    assert main(["checkpoints", "ls", root]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(r[0], "superseded" in r, "current" in r) for r in rows] == [
        ("1", False, True), ("2", False, True), ("2", True, False), ("3", True, False)
    ]  # fmt: skip
    assert main(["checkpoints", "restore-dry-run", root]) == 0
    out = capsys.readouterr().out
    assert "would restore step 2" in out
    old = next(r for r in rows if r[0] == "2" and "superseded" in r)
    id = next(word for word in old if word.count("-") == 1 and len(word) == 15)
    assert main(["checkpoints", "branch", "--id", id, root]) == 0
    assert id in capsys.readouterr().out
    assert newest(tmp_path) == (2, 0)
    assert main(["checkpoints", "branch", "--step", "3", root]) == 0
    assert newest(tmp_path) == (3, 0)
    assert main(["checkpoints", "branch", "--step", "9", root]) == 2
    assert f"no undamaged checkpoint of step 9 in {root}\n" in capsys.readouterr().err
    assert main(["checkpoints", "rm", "--superseded", root]) == 0
    assert capsys.readouterr().out.count("removed") == 1
    assert main(["checkpoints", "rm", "--superseded", root]) == 0
    assert capsys.readouterr().out == f"no superseded saves in {root}\n"
    assert saves_in(tmp_path) == [1, 2, 3] and newest(tmp_path) == (3, 0)
    assert main(["checkpoints", "rm", "--step", "3", root]) == 0
    assert newest(tmp_path) == (2, 0)


# ---------------------------------------------------------------------- formats


def sealed(text: str, crc: str) -> bytes:
    return text.replace("CRC1", crc).replace("CRC3", crc).encode()


def test_manifests_of_both_versions_are_read() -> None:
    first = Manifest.from_bytes(sealed(MANIFEST_1, "21aa1984"), "golden")
    assert (first.step, first.id, first.sequence, first.abandoned) == (
        7, "0123abcd-000002", 7 - 10**12, ()
    )  # fmt: skip
    second = Manifest.from_bytes(sealed(MANIFEST_2, "e5fc1bb6"), "golden")
    assert (second.sequence, second.abandoned) == (2 * STRIDE + 3, ((STRIDE + 4, STRIDE + 14),))
    assert second.to_bytes() == Manifest.from_bytes(second.to_bytes(), "again").to_bytes()
    assert json.loads(second.to_bytes()) == json.loads(sealed(MANIFEST_2, "e5fc1bb6"))
    branch = Branch.from_bytes(sealed(BRANCH_1, "956bcce5"), "golden")
    assert branch == Branch(2 * STRIDE + 4, ((10 - 10**12, STRIDE + 14),), 7, "0123abcd-000002")
    assert json.loads(branch.to_bytes()) == json.loads(sealed(BRANCH_1, "956bcce5"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 2', '"version": 3'),
        ("[[1048580, 1048590]]", "[[1048590, 1048580]]"),
        ("[[1048580, 1048590]]", "[[1, 5], [5, 6]]"),
        ("[[1048580, 1048590]]", '["ab"]'),
        ("[[1048580, 1048590]]", "7"),
        ('"sequence": 2097155, ', ""),
        ('"sequence": 2097155', '"sequence": null'),
    ],
)
def test_a_manifest_that_makes_no_sense_is_damaged(old: str, new: str) -> None:
    assert old in MANIFEST_2
    values = json.loads(MANIFEST_2.replace(old, new))
    values.pop("crc32c")
    from nostall.checkpoint._format import _sealed

    with pytest.raises(CorruptionError, match="golden is damaged"):
        Manifest.from_bytes(_sealed(values), "golden")
    with pytest.raises(CorruptionError, match="golden is damaged"):
        Branch.from_bytes(_sealed(values), "golden")


def as_version_1(root: Path) -> None:
    """Rewrites the manifests as the release before wrote them."""
    from nostall.checkpoint._format import _sealed

    for path in root.glob("step-*/manifest.json"):
        values = json.loads(path.read_bytes())
        for name in ("sequence", "abandoned", "crc32c"):
            values.pop(name, None)
        path.write_bytes(_sealed({**values, "version": 1}))


def test_a_directory_of_an_older_release_goes_on(tmp_path: Path) -> None:
    run(tmp_path, range(1, 6), keep=9)
    as_version_1(tmp_path)
    assert newest(tmp_path) == (5, 0)
    run(tmp_path, (6,), value=1, keep=9)
    assert newest(tmp_path) == (6, 1)
    as_version_1(tmp_path)
    run(tmp_path, (5,), value=2, back_to=4, keep=2)
    assert newest(tmp_path) == (5, 2)
    # Of the branch before the two newest, of this one too.
    assert saves_in(tmp_path) == [4, 5, 5, 6]


# ---------------------------------------------------------------------- pure


def save(sequence: int, step: int, *abandoned: tuple[int, int]) -> Manifest:
    return Manifest(
        step, f"aaaaaaaa-{sequence:06d}", 1, (), sequence=sequence, abandoned=abandoned, created=0.0
    )


def test_ranges_are_joined_and_their_number_is_bounded() -> None:
    assert add((), 5, 4) == ()
    assert add(((1, 2), (8, 9)), 3, 4) == ((1, 4), (8, 9))
    assert add(((1, 2), (8, 9)), 2, 8) == ((1, 9),)
    many: tuple[tuple[int, int], ...] = ()
    for i in range(500):
        many = add(many, 10 * i, 10 * i + 1)
    assert len(many) == 100 and many[0] == (0, 4001) and many[-1] == (4990, 4991)
    assert is_past(5, 7, ((3, 4),)) and not is_past(4, 7, ((3, 4),)) and not is_past(8, 7, ())


def test_joined_ranges_supersede_no_save_that_is_there() -> None:
    kept = [10 * i + 5 for i in range(300, 500) if i % 2]
    many: tuple[tuple[int, int], ...] = ()
    for i in range(500):
        many = add(many, 10 * i, 10 * i + 1, kept)
    assert all(is_past(number, 5000, many) for number in kept)
    assert many[0][0] >= 3000  # those below the oldest save are dropped
    assert not any(is_past(10 * i, 5000, many) for i in range(302, 500))
    assert len(many) == 100  # two of them between two saves are joined

    lineage = Lineage([], None, 0)
    past = []
    for i in range(250):  # a save of each round is kept on the line, the next one is given up
        past.append(lineage.save(2 * i)[0])
        lineage.save(2 * i + 2)
        number, abandoned = lineage.save(2 * i + 1)
        past.append(number)
    assert all(is_past(n, past[-1], abandoned) for n in past)


def test_branches_are_known_whatever_is_gone() -> None:
    trunk = [save(n, n) for n in range(1, 6)]
    old = [save(n, n) for n in range(6, 9)]
    new = [save(9, 6, (6, 8)), save(10, 7, (6, 8))]
    steps = [[m.sequence for m in line] for line in branches([*trunk, *old, *new])]
    assert steps == [[10, 9, 5, 4, 3, 2, 1], [8, 7, 6, 5, 4, 3, 2, 1]]
    steps = [[m.sequence for m in line] for line in branches([old[1], new[1]])]
    assert steps == [[10], [7]]
    begin = Branch(11, ((6, 10),), 5, "x")
    steps = [[m.sequence for m in line] for line in branches([*trunk, old[2], new[1]], begin)]
    assert [line[0] for line in steps] == [5, 10, 8]
    assert sorted(decide([*trunk, *old, *new], Keep(1), begin)) == [
        "aaaaaaaa-000005", "aaaaaaaa-000008", "aaaaaaaa-000010"
    ]  # fmt: skip


def test_a_damaged_tip_tells_of_its_branch_and_keeps_no_other_from_staying() -> None:
    saves = [save(1, 1), save(2, 2), save(3, 3), save(4, 2, (2, 3))]
    stay = decide(saves, Keep(1), None, {saves[3].id})
    assert sorted(stay) == [saves[0].id, saves[2].id]


def test_saves_within_each_other_are_taken_back() -> None:
    lineage = Lineage([], None, 0)
    for step in (10, 20, 30):
        lineage.save(step)
    before = list(lineage._line), lineage._abandoned, list(lineage._known)
    outer, _ = lineage.save(5)
    inner, _ = lineage.save(6)
    lineage.take_back(inner)
    lineage.take_back(outer)
    assert (lineage._line, lineage._abandoned, list(lineage._known)) == before
    outer, _ = lineage.save(5)
    lineage.save(6)
    lineage.take_back(outer)  # the inner one stays, and so does what it continues
    assert [step for _, step in lineage._line] == [5, 6]


def test_a_lineage_numbers_saves_and_gives_up_what_came_after() -> None:
    trunk = [save(n, 10 * n) for n in range(1, 6)]
    lineage = Lineage(trunk, None, 5)
    assert lineage.save(60) == (STRIDE, ())
    assert lineage.save(60) == (STRIDE + 1, ())  # it replaces the one before
    assert lineage.save(35) == (STRIDE + 2, ((4, STRIDE + 1),))
    assert lineage.restored(trunk[4]) and not lineage.restored(trunk[4])
    assert lineage.begin() == (STRIDE + 3, ((6, STRIDE + 2),))
    assert lineage.save(60) == (STRIDE + 4, ((6, STRIDE + 2),))
    assert Lineage([save(STRIDE + 1, 1)], None, 7 * STRIDE).save(1)[0] == 8 * STRIDE


def test_a_late_drain_of_an_old_branch_does_not_replace_the_new_save(tmp_path: Path) -> None:
    store = Store(tmp_path, "durable")

    def publish(manifest: Manifest) -> Manifest:
        name = f"rank-00000.{manifest.id}.safetensors"
        (store.prepare(manifest.step) / name).write_bytes(b"")
        whole = dataclasses.replace(manifest, parts=(Part(0, name, 0, ()),))
        store.publish(whole)
        return whole

    new = publish(save(9, 6, (6, 8)))
    old = publish(save(6, 6))
    replaced = publish(save(5, 6))
    assert store.find(6, new.id) == new and store.read(6, "manifest.json") is not None
    assert [m.sequence for m in store.manifests()] == [9, 5, 6]
    store.clean()
    assert store.missing(old) == "" and store.missing(replaced) == ""
    assert sorted(decide(store.manifests(), Keep(3))) == [old.id, new.id]
    newer = publish(save(11, 6, (6, 8)))  # continues, and so replaces, the one of 9
    assert [m.sequence for m in store.manifests()] == [11, 5, 6]
    store.remove(6, newer.id)
    assert [m.sequence for m in store.manifests()] == [5, 6]
    assert not (store.directory(6) / new.parts[0].name).exists()
    for manifest in store.manifests():
        store.remove(6, manifest.id)
    assert not store.directory(6).exists()


def test_retention_takes_no_manifest_that_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, "durable")
    part = Part(0, "rank-00000.aaaaaaaa-000009.safetensors", 0, ())
    old, new = (dataclasses.replace(m, parts=(part,)) for m in (save(6, 6), save(9, 6, (6, 8))))
    store.prepare(6)
    store.publish(old)
    store.prepare(6)  # for the new one
    read = Store._read_each
    publisher = threading.Thread(target=store.publish, args=(new,))

    def look_and_publish(looking: Store, step: int, names: Any) -> Any:
        found = read(looking, step, names)
        if not publisher.ident:
            publisher.start()
            publisher.join(0.5)  # it waits for the end of the removal
        return found

    monkeypatch.setattr(Store, "_read_each", look_and_publish)
    store.remove(6, old.id)
    publisher.join(60)
    assert store.find(6, new.id) == new


@pytest.mark.parametrize("failing", [1, 2])
def test_a_directory_that_cannot_be_listed_once_keeps_what_was_superseded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: int,
) -> None:
    run(tmp_path, [1, 2])
    run(tmp_path, [2], value=1, back_to=1)
    store, listdir, lists = Store(tmp_path, "durable"), os.listdir, []
    (store.directory(2) / "rank-00007.aaaaaaaa-000001.safetensors").write_text("rubbish")
    saves = store.saves(2)
    assert len(saves) == 2

    def flaky(path: Any) -> list[str]:
        if Path(path) == store.directory(2):
            lists.append(path)
            if len(lists) == failing:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return listdir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", flaky)
        removed = store.clean()
    if failing == 1:
        assert removed == []
        assert f"left in {store.directory(2)} stays: cannot list" in caplog.text
    assert store.saves(2) == saves
    assert all(store.has_all(entry.manifest) for entry in saves if entry.manifest)


@pytest.mark.parametrize("world", [1, 2])
def test_a_restore_finds_a_save_that_is_drained_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    one = {"job": "j"}

    def save(rank: int, gather: Any) -> None:
        ranks = {"rank": rank, "world_size": world, "gather": gather, **one} if world > 1 else {}
        with nostall.Checkpointer(fast, durable, level="durable", **ranks) as ckpt:
            ckpt.save(state_of(10, 1), 10)
        with nostall.Checkpointer(fast, level="fast", keep=Keep(4), **ranks) as ckpt:
            ckpt.save(state_of(10, 2), 10)
            ckpt.save(state_of(20, 2), 20)

    assert World(world).run(save) == [None] * world
    go, listed = threading.Event(), threading.Barrier(world)
    drain, entries = BackgroundWriter._drain, Store.entries

    def wait_and_drain(background: BackgroundWriter, *what: Any) -> None:
        assert go.wait(60)
        drain(background, *what)

    def list_and_drain(store: Store) -> Any:
        """All has been drained and cleared up between the look at the durable storage and the read."""
        found = entries(store)
        if store.kind == "durable" and threading.current_thread() in restoring:
            restoring.remove(threading.current_thread())
            listed.wait(60)
            go.set()
            for background in backgrounds:
                assert background.wait(drained=True, timeout=60)
        return found

    monkeypatch.setattr(BackgroundWriter, "_drain", wait_and_drain)
    monkeypatch.setattr(Store, "entries", list_and_drain)
    restoring: list[threading.Thread] = []
    backgrounds: list[BackgroundWriter] = []

    def restore(rank: int, gather: Any) -> Any:
        ranks = {"rank": rank, "world_size": world, "gather": gather, **one} if world > 1 else {}
        with nostall.Checkpointer(fast, durable, keep=Keep(4), **ranks) as ckpt:
            backgrounds.append(ckpt._background)
            restoring.append(threading.current_thread())
            gather(b"")
            found = ckpt.restore(10)
            assert found is not None and ckpt._background.wait(drained=True, timeout=60)
            gather(b"")  # rank 0 has cleared up
            return found.state, found.tier, saves_in(fast), sorted(saves_in(durable))

    for result in World(world).run(restore):
        assert result == (state_of(10, 2), "fast", [20], [10, 20])
