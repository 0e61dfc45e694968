"""Horovod timelines: known answers to the microsecond, three dialects, damage, memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from timelines import Op, known, timeline

from nostall.cli import main
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.observe.report._timeline import as_csv, page, save, text
from nostall.observe.timelines import Analysis, analyze, is_trace

US = 1e-6
DIALECTS = ("old", "cached", "new")


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def read(tmp_path: Path, content: str) -> Analysis:
    return analyze([write(tmp_path / "timeline.json", content)])


@pytest.fixture
def answers(tmp_path: Path) -> Analysis:
    return read(tmp_path, timeline(*known()))


def test_feed_forward_runs_from_the_round_to_its_first_negotiation(answers: Analysis) -> None:
    assert [r.round for r in answers.rounds] == [1, 2]  # the first round is warm-up
    assert [r.feed_forward for r in answers.rounds] == pytest.approx([400 * US, 300 * US])
    assert answers.feed_forward == pytest.approx(350 * US)
    assert not answers.feed_forward_at_most


def test_negotiation_delay_is_the_time_in_no_negotiation_and_no_reduction(
    answers: Analysis,
) -> None:
    # Rank 0 of round 1: busy 1460-1600 and 1910-2000 of 1400-2000; of round 2: 110 idle.
    assert [(r.rank, r.rounds) for r in answers.ranks] == [(0, 2), (1, 2)]
    assert [r.average for r in answers.ranks] == pytest.approx([240 * US, 140 * US])
    assert [r.max for r in answers.ranks] == pytest.approx([370 * US, 260 * US])
    assert answers.negotiation_average == pytest.approx(190 * US)
    assert answers.negotiation_max == pytest.approx(370 * US)
    assert [r.negotiation_average for r in answers.rounds] == pytest.approx([195 * US, 185 * US])


def test_windows_and_bandwidths_of_tensors(answers: Analysis) -> None:
    bias, kernel = answers.tensors
    assert (bias.name, bias.bytes, bias.rounds) == ("dense/bias", 1000, 2)
    assert bias.window == pytest.approx(450 * US)
    assert bias.reaction == pytest.approx(1000 / (450 * US))
    assert bias.immutable_worst == pytest.approx(1000 / (550 * US))
    assert bias.immutable_best == pytest.approx(1000 / (1000 * US))
    assert bias.immutable_average == pytest.approx(1000 / (775 * US))
    assert kernel.window == 0
    assert kernel.reaction == math.inf
    assert kernel.immutable_worst == pytest.approx(2000 / (1000 * US))
    assert answers.window_average == pytest.approx(225 * US)
    assert answers.window_max == pytest.approx(450 * US)
    assert answers.reaction is not None
    assert (answers.reaction.p50, answers.reaction.max) == (bias.reaction, math.inf)
    assert answers.unbounded == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_agree_where_they_hold_the_same(
    tmp_path: Path, answers: Analysis, dialect: str
) -> None:
    got = read(tmp_path, timeline(*known(), dialect))
    assert got.tensors == answers.tensors
    if dialect != "old":
        # No negotiations of cached tensors: never a number for what waits in them.
        assert got.ranks == []
        assert got.negotiation_average is None
        assert got.negotiation_missing is not None
        assert "HOROVOD_CACHE_CAPACITY=0" in got.negotiation_missing
        assert all(r.negotiation_max is None for r in got.rounds)
        assert got.feed_forward_at_most
        assert got.feed_forward == pytest.approx((460 + 360) / 2 * US)
        shown = text(got)
        assert "not available" in shown
        assert "feed-forward, at most" in shown


def test_ticks_that_lack_in_one_round_in_two_give_no_delay(tmp_path: Path) -> None:
    got = read(tmp_path, timeline(*known(), "cached", negotiated=(0, 1)))
    assert got.negotiation_average is None
    assert got.negotiation_missing is not None


def test_fused_tensors_count_each_with_their_own_size(tmp_path: Path) -> None:
    def fused(start: int) -> list[Op]:
        return [Op(t, start, (start, start), start + 10, start + 50, "[100]") for t in range(3)]

    got = read(tmp_path, timeline(["a", "b", "c"], [fused(0), fused(100), fused(200)]))
    assert [t.bytes for t in got.tensors] == [400] * 3
    assert [r.seconds for r in got.rounds] == pytest.approx([100 * US] * 2)


def test_tensors_that_are_not_in_every_round_are_averaged_over_theirs(tmp_path: Path) -> None:
    def op(tensor: int, start: int) -> Op:
        return Op(tensor, start, (start, start), start, start + 10)

    rounds = [[op(0, t), op(2, t + 40)] for t in (0, 100, 200, 300)]
    rounds[2].insert(1, op(1, 220))
    got = read(tmp_path, timeline(["always", "once", "last"], rounds))
    by_name = {t.name: t for t in got.tensors}
    assert {n: t.rounds for n, t in by_name.items()} == {"always": 3, "once": 1, "last": 3}
    assert by_name["once"].window == pytest.approx(20 * US)


def test_excluded_tensors_and_broadcasts_make_no_rounds(tmp_path: Path) -> None:
    names, rounds = known()
    names = [*names, "metric/loss", "state"]
    for number, ops in enumerate(rounds):
        late = 1000 * (number + 1) + 20
        ops.append(Op(2, late, (late, late), late, late + 30))
        ops.append(Op(3, late, (late, late), late, late + 30, kind="BROADCAST"))
    file = write(tmp_path / "t.json", timeline(names, rounds))
    got = analyze([file], exclude=["metric*"])
    assert [r.seconds for r in got.rounds] == pytest.approx([1000 * US] * 2)
    assert [t.name for t in got.tensors] == names[:2]
    # The metric's reduction still keeps the network, so feed-forward ends with it.
    assert got.feed_forward == pytest.approx(20 * US)


def epochs(apart: bool = True, shape: str = "[]") -> str:
    """Nine rounds of 1000 us, of which every third averages two metrics: 500 us after the gradients, or
    among them."""
    names, rounds = known()
    names = [*names, "metric/loss", "metric/accuracy"]
    out = []
    for number in range(9):
        ops = [
            replace(
                op,
                negotiate=op.negotiate + 1000 * number,
                ready=[t + 1000 * number for t in op.ready],
                begin=op.begin + 1000 * number,
                end=op.end + 1000 * number,
            )
            for op in rounds[1]  # from 1400 to 2000
        ]
        if number % 3 == 2:
            first = 1000 * number + (2250 if apart else 1700)
            for tensor in (2, 3):
                late = first + 50 * (tensor - 2)
                ops.append(Op(tensor, late, (late, late), late, late + 20, shape))
        out.append(ops)
    return timeline(names, out)


def test_metrics_of_epochs_are_left_out_by_themselves(tmp_path: Path) -> None:
    file = write(tmp_path / "t.json", epochs())
    got = analyze([file])
    assert [t.name for t in got.tensors] == ["dense/bias", "dense/kernel"]
    known_to_be = analyze([file], exclude=["metric*"])
    assert replace(got, notes=[]) == replace(known_to_be, notes=[])
    assert [r.seconds for r in got.rounds] == pytest.approx([1000 * US] * 8)
    (note,) = got.notes
    assert "metric/accuracy, metric/loss are taken for no gradient" in note
    assert "--exclude ''" in note
    assert note in text(got)
    # Counted, they would move the ends of rounds, and take time from the feed-forward phases.
    counted = analyze([file], exclude=[""])
    assert len(counted.tensors) == 4
    assert counted.rounds[1].seconds == pytest.approx(1320 * US)
    assert counted.feed_forward < got.feed_forward  # type: ignore[operator]


@pytest.mark.parametrize(("apart", "shape"), [(False, "[]"), (True, "[2000]")])
def test_gradients_of_few_rounds_stay(tmp_path: Path, apart: bool, shape: str) -> None:
    # One that is reduced among the others, or is large, is of a branch that few steps take.
    got = read(tmp_path, epochs(apart, shape))
    assert len(got.tensors) == 4
    assert not got.notes


def test_every_cut_is_analysed_as_far_as_it_goes(tmp_path: Path, answers: Analysis) -> None:
    whole = timeline(*known())
    ends = 0
    for cut in range(0, len(whole), 37):
        file = write(tmp_path / "cut.json", whole[:cut])
        try:
            got = analyze([file])
        except CorruptionError as error:
            assert str(file) in str(error)
            continue
        ends += 1
        assert len(got.rounds) <= 2
        for mine, full in zip(got.rounds, answers.rounds, strict=False):
            assert mine.feed_forward == pytest.approx(full.feed_forward)
    assert ends > 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no finished reduction"),
        ("[", "no finished reduction"),
        ("[" * 100_000, "no finished reduction"),
        ('[{"ph": "B", "name": ' + '{"a": ' * 50_000, "no finished reduction"),
        ('{"traceEvents": []}', "no "),
        ("not a timeline at all", "no finished reduction"),
    ],
)
def test_foreign_files_are_refused_in_one_sentence(
    tmp_path: Path, content: str, words: str
) -> None:
    file = write(tmp_path / "odd.json", content)
    with pytest.raises(CorruptionError) as caught:
        analyze([file])
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


def test_damage_is_named_with_file_and_offset(tmp_path: Path, answers: Analysis) -> None:
    whole = timeline(*known())
    place = whole.index('{"ph": "B", "name": "MPI_ALLREDUCE", "ts": 1910')
    torn = whole[:place] + "\x00\xff{{]" + whole[place:]
    file = tmp_path / "torn.json"
    file.write_bytes(torn.encode("latin-1"))
    got = analyze([file])
    assert got.tensors == answers.tensors
    assert any(f"{file}: 1 damaged places, the first at byte {place}" in n for n in got.notes)
    cut = write(tmp_path / "cut.json", whole[:-30])
    assert any("cut off in the event at byte" in n for n in analyze([cut]).notes)


@pytest.mark.parametrize("value", ["1e400", '"x"', "null", "[]", "-9223372036854775808", "1e17"])
def test_odd_numbers_leave_their_event_out(tmp_path: Path, value: str) -> None:
    whole = timeline(*known()).replace('"ts": 2400', f'"ts": {value}')
    got = read(tmp_path, whole)
    assert got.rounds
    assert got.notes


def test_clocks_that_jump_are_told(tmp_path: Path) -> None:
    names, rounds = known()
    for op in rounds[2]:
        for field in ("negotiate", "begin", "end"):
            setattr(op, field, getattr(op, field) - 5_000_000)
        op.ready = [t - 5_000_000 for t in op.ready]
    got = read(tmp_path, timeline(names, rounds))
    assert [r.round for r in got.rounds] == [1]
    assert any("clock goes back" in n for n in got.notes)


def test_rounds_without_duration_have_no_bandwidth_that_is_a_number_too_large(
    tmp_path: Path,
) -> None:
    # Everything of a round at one moment: what divides by zero is unbounded, the rest is finite.
    rounds = [[Op(0, t, (t, t), t, t), Op(1, t, (t, t), t, t)] for t in (100, 1000, 1000, 2000)]
    got = read(tmp_path, timeline(["a", "b"], rounds))
    assert [r.seconds for r in got.rounds] == pytest.approx([900 * US, 0, 1000 * US])
    assert got.negotiation_average == 0
    assert got.unbounded == 2
    shown = text(got)
    assert "nan" not in shown.lower()
    assert "unbounded" in shown
    assert "nan" not in page(got).lower()
    for row in csv.DictReader(io.StringIO(as_csv(got))):
        assert "nan" not in row.values()


def test_events_out_of_order_and_lines_of_two_writers_are_read(
    tmp_path: Path, answers: Analysis
) -> None:
    # Tensors have their own lines of time: the order in which they were written down is no matter.
    names, rounds = known()
    lines = timeline(names, rounds).splitlines()
    head = [x for x in lines if '"ph": "M"' in x or x == "["]
    swapped = list(head)
    for ops in rounds:
        for pid in (2, 1):
            mine = timeline(names, [[op for op in ops if op.tensor == pid - 1]]).splitlines()
            swapped += [x for x in mine if x not in head]
    got = read(tmp_path, "\n".join(swapped))
    assert got.rounds == answers.rounds
    assert got.ranks == answers.ranks
    # A second process wrote into the same file: its torn line costs that event, not the rest.
    torn = "\n".join([*lines[:-5], '{"ph": "B", "name": "ALLRED', *lines[-5:]])
    got = read(tmp_path, torn)
    assert got.feed_forward == answers.feed_forward
    assert any("damaged" in n for n in got.notes)


def test_gzip_is_read_and_a_torn_stream_is_told(tmp_path: Path, answers: Analysis) -> None:
    packed = gzip.compress(timeline(*known()).encode())
    file = tmp_path / "t.json.gz"
    file.write_bytes(packed)
    assert analyze([file]).tensors == answers.tensors
    file.write_bytes(packed[:-20])
    assert any("cut off" in n for n in analyze([file]).notes)


def test_the_command_prints_and_writes_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "t.json", timeline(*known()))
    outputs = [tmp_path / f"out.{kind}" for kind in ("json", "csv", "html", "svg", "png")]
    assert main(["report", str(file), *(w for o in outputs for w in ("-o", str(o)))]) == 0
    shown = capsys.readouterr().out
    assert ["feed-forward", "350.000", "µs", "400.000", "µs"] in [
        r.split() for r in shown.splitlines()
    ]
    for explained in (
        "round:",
        "feed-forward:",
        "negotiation delay:",
        "window:",
        "immutable:",
        "p50,",
    ):
        assert f"{explained} " in shown
    data = json.loads(outputs[0].read_text())
    assert data["feed_forward"] == pytest.approx(350 * US)
    assert data["reaction"]["max"] == "unbounded"
    rows = list(csv.DictReader(outputs[1].open()))
    assert {
        r["value"] for r in rows if r["metric"] == "reaction" and r["name"] == "dense/kernel"
    } == {"unbounded"}
    assert outputs[2].read_text().count("<svg") == 1
    assert all(o.stat().st_size > 500 for o in outputs)
    assert outputs[1].read_text().splitlines()[1].startswith("run,,feed_forward,")
    early = ["-o", str(tmp_path / "early.csv"), "-o", str(tmp_path / "x.docx")]
    assert main(["report", str(file), *early]) == UsageError.exit_code
    assert not (tmp_path / "early.csv").exists()
    assert main(["report", str(file), "--exclude", "*"]) == UsageError.exit_code
    assert "--exclude * leaves no tensor of" in capsys.readouterr().err
    assert main(["report", str(file), "-o", str(tmp_path / "no" / "x.csv")]) == IoError.exit_code


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    names, rounds = known()
    names[0] = "<script>alert('x')</script>\x1b[2J"
    names[1] = "=HYPERLINK(1)"
    got = read(tmp_path, timeline(names, rounds))
    assert got.tensors[0].name == names[0]
    assert "<script" not in page(got)
    assert "\x1b" not in text(got)
    cells = {r["name"] for r in csv.DictReader(io.StringIO(as_csv(got)))}
    assert "'=HYPERLINK(1)" in cells
    assert names[1] not in cells


def test_timelines_are_told_from_statistics(tmp_path: Path) -> None:
    assert is_trace(write(tmp_path / "t.json", timeline(*known())))
    assert not is_trace(write(tmp_path / "s.json", json.dumps({"format": 2, "epochs": []})))
    with pytest.raises(IoError):
        is_trace(tmp_path / "none.json")
    with pytest.raises(IoError):
        save(read(tmp_path, timeline(*known())), str(tmp_path / "none" / "x.json"))


def large(path: Path, megabytes: int, ranks: int = 16, tensors: int = 160) -> int:
    """A timeline of at least that size; the number of its rounds."""
    names = [f"DistributedAdam_Allreduce/layer{t}/kernel" for t in range(tensors)]

    def ops(start: int) -> Sequence[Op]:
        return [
            Op(t, start + 10 * t, [start + 10 * t + r for r in range(ranks)], start + 10 * t + 20,
               start + 10 * t + 28, "[1024, 64]")
            for t in range(tensors)
        ]  # fmt: skip

    body = timeline([], [ops(0)])[2:]
    rounds = 0
    with path.open("w") as out:
        out.write(timeline(names, []))
        while out.tell() < megabytes << 20:
            out.write(shifted(body, 2000 * rounds))
            rounds += 1
    return rounds


def shifted(body: str, by: int) -> str:
    """The same events `by` microseconds later."""
    head, *parts = body.split('"ts": ')
    out = [head]
    for part in parts:
        number, rest = part.split(",", 1)
        out.append(f"{int(number) + by},{rest}")
    return '"ts": '.join(out)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    rounds = large(file, 24)
    code = (
        "import resource, sys, nostall.observe.timelines as a\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "n = len(a.analyze(sys.argv[1:]).rounds)\n"
        "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], check=True, capture_output=True, text=True
    )
    counted, grown = map(int, done.stdout.split())
    assert counted == rounds - 1
    assert grown < 64 << 10  # KiB
