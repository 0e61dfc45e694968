"""The report of a run: words, advice, page, and how a browser shows it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import prefork
import pytest
from browser import look

import nostall
from nostall import trace
from nostall.cli import main
from nostall.errors import UsageError
from nostall.observe import _processors as processors
from nostall.observe._held import Held, Watch
from nostall.observe._processors import Processors
from nostall.observe._stats import BatchRecords, EpochStats, OriginStats, Stats, merge
from nostall.observe.report import _of_statistics, page
from nostall.observe.report import _run as runs
from nostall.observe.report import _run_page as run_page
from nostall.observe.report._advice import advise, bandwidth, terms
from nostall.observe.report._digest import Digest, Spans
from nostall.observe.report._run import Loader, Rank, Run, percent


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    trace.stop()


def spans(begin: list[float], end: list[float], size: float = 0) -> Spans:
    n = len(begin)
    return Spans(np.array(begin), np.array(end), np.ones(n), np.full(n, float(size)))


def made(rank: int = 0, name: str = "nfs") -> Rank:
    """Two epochs of 10 s: 4 s compute; 6 s waiting for a source of 100 MB/s, 8 s of reading."""
    nothing = OriginStats()
    epochs = [
        EpochStats(
            e, 10.0, 6.0, 10, 100, 800_000_000,
            {"ram": nothing, "file": nothing, "peer": nothing,
             "source": OriginStats(100, 800_000_000, 8.0)}, 2.0,
        )
        for e in range(2)
    ]  # fmt: skip
    columns = {n: [1.0] * 2 for n in BatchRecords.__dataclass_fields__}
    stats = Stats(rank, 1, epochs, BatchRecords(**columns), 800_000_000, {
        "ram_tier": 0, "file_tier": 0, "staging": 250 << 20, "io_buffers": 1, "decoding": 0,
    }, threads=1, fetchers=1)  # fmt: skip
    settings = {
        "threads": 1, "fetchers": 1, "rank_cores": 1, "world_size": 1, "local_world_size": 1,
        "dataset_bytes": 800_000_000, "tiers": [], "storage": f"/data, {name}",
        "memory_bytes": 8 << 30, "staging_bytes": 256 << 20,
    }  # fmt: skip
    digest = Digest("t", rank, 1, "h", 0.0, {
        ("data", "wait for batch"): spans([2, 12], [8, 18]),
        ("data", "read source"): spans([0, 10], [8, 18], 800_000_000),
        ("compute", "forward"): spans([0, 10], [2, 12]),
        ("data", "decode"): spans([19], [20]),
    }, 0)  # fmt: skip
    return Rank(rank, [Loader(settings, stats)], digest)


def test_words_say_where_the_run_waited() -> None:
    text = runs.words(Run("run", [made(0), made(1)], None, []))
    assert text.startswith(
        "This run waited 60.0 % of its time, 12.0 of 20.0 s per rank: 60.0 % for"
    )
    assert "60.0 % for the source (/data, nfs)" in text
    assert "peers and checkpoints were not recorded" in text


def test_the_headline_names_the_best_remedy_and_its_gain() -> None:
    run = Run("run", [made()], None, [])
    line = (
        "60.0 % of the time waited for storage; a RAM tier of 1 GiB would save 20.0 % of the time"
    )
    assert run_page.headline(run) == line
    assert run_page.text(run).startswith(f"{line}.\nThis run waited 60.0 %")
    assert f'<h1 class="bad">{line}</h1>' in run_page.page([run])
    late = made(), made(1)
    for rank, seconds in zip(late, (16.0, 1.0), strict=True):
        assert rank.digest is not None
        rank.digest.spans["peers", "allreduce"] = spans([0], [seconds])
        rank.digest.spans["data", "wait for batch"] = spans([2], [2.5])
    words = run_page.headline(Run("run", list(late), None, []))
    remedy = "a rank 1 as fast as the others would save 37.5 % of the time"
    assert words == f"45.0 % of the time waited for other ranks; {remedy}"


def test_no_change_of_data_gains_more_than_was_waited_for_data() -> None:
    rank = made()
    loader = rank.loaders[0]
    loader.settings.update(rank_cores=4)
    # 30 s of decoding beside other work made an epoch of 10 s wait for half a second.
    epochs = [replace(e, stall_seconds=0.5, decode_seconds=30.0) for e in loader.stats.epochs]
    rank.loaders[0] = replace(loader, stats=replace(loader.stats, epochs=epochs))
    (threads,) = advise(Run("run", [rank], None, []), most=9)
    assert threads.change == "threads=4"
    assert threads.gain == pytest.approx(1.0)


def test_the_header_says_what_was_trained_on() -> None:
    ranks = [made(0), made(1)]
    for rank in ranks:
        (loader,) = rank.loaders
        loader.settings.update(dataset="ImageFolder", samples=1000, batch_size=32, epochs=90)
        rank.loaders[0] = replace(loader, stats=replace(loader.stats, world_size=2))
    page = run_page.page([Run("run", ranks, None, [])])
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page)[:4] == [
        ("data set", "ImageFolder, 1,000 samples, 800.0 MB"),
        ("batch", "32 a rank, 64 together"),
        ("epochs", "2 of 90"),
        ("ranks", "2"),
    ]


def test_throughput_is_drawn_with_what_bounds_it() -> None:
    rank = made()
    columns = {n: [1.0] * 2 for n in BatchRecords.__dataclass_fields__}
    batches = BatchRecords(**{**columns, "time": [1.0, 2.0], "source": [20.0, 20.0]})
    stats = rank.loaders[0].stats
    epochs = [replace(e, batches=1) for e in stats.epochs]
    rank.loaders[0] = replace(rank.loaders[0], stats=replace(stats, batches=batches, epochs=epochs))
    page = run_page.page([Run("run", [rank], None, [])])
    # 200 samples are 1.6 GB, of 100 MB/s, and 4 s of decoding by one thread.
    assert "as fast as the source gave: 12<" in page
    assert "as fast as 1 thread decoded: 50, above what is drawn<" in page
    assert page.count('<polyline class="line source limit"') == 1
    assert '<polyline class="line decode limit"' not in page


def test_a_long_run_is_drawn_from_where_its_batches_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ran(rank: int, first: int) -> Loader:
        """Of 3000 batches of 10 samples, one a second, 1000 in an epoch, those from `first` on."""
        kept = range(first, 3000)
        columns: dict[str, list[float]] = {n: [0.0] * len(kept) for n in vars(BatchRecords())}
        columns |= {"time": [float(b) for b in kept], "source": [10.0] * len(kept)}
        columns |= {"epoch": [float(b // 1000) for b in kept]}
        stats = made(rank).loaders[0].stats
        epochs = [replace(stats.epochs[0], epoch=e, batches=1000) for e in range(3)]
        batches = BatchRecords(**columns)
        return Loader({}, replace(stats, epochs=epochs, batches=batches, world_size=2))

    drawn: list[Any] = []
    monkeypatch.setattr(run_page, "lines", lambda *given: drawn.append(given) or "")
    monkeypatch.setattr(run_page, "stacks", lambda *given: drawn.append(given) or "")
    run = Run("run", [], None, [])
    flow = run_page._flow(run, [ran(0, 1200), ran(1, 1500)])
    origins = run_page._origins([ran(0, 1200).stats, ran(1, 1500).stats])
    for heading in (flow, origins):
        assert ", from 1,500 s on: of earlier batches there are sums<" in heading
    (_, (curve, *_), end, _, marks), (_, ((_, slots),), seconds, _) = drawn
    assert end == seconds == 1499 and all(slots)
    assert all(rate == pytest.approx(20, rel=0.1) for _, rate in curve.points)
    assert marks == [(500.0, "epoch 2")]
    # One that is kept whole has its time since the loader was made, and all its epochs.
    assert "on: of" not in run_page._flow(run, [ran(0, 0)])
    _, _, end, _, marks = drawn[-1]
    assert end == 2999
    assert marks == [(1000.0 * epoch, f"epoch {epoch}") for epoch in range(3)]


def test_resume_points_say_what_work_was_at_risk() -> None:
    rank = made()
    assert rank.digest is not None
    rank.digest.spans["background", "resume point, fast"] = spans([4, 10], [5, 12])
    page = run_page.page([Run("run", [rank], None, [])])
    # Until 12 s the training would have gone on from 4 s; its end, at 20 s, from 10 s.
    assert "2 checkpoints on fast storage, at most 10.0 s of work at risk" in page
    assert "on durable storage" not in page
    rank.digest.spans["background", "resume point, fast"] = spans([4, 16], [5, 17])
    assert "at most 13.0 s of work" in run_page.page([Run("run", [rank], None, [])])


def test_memory_is_that_of_all_ranks_of_the_host_that_holds_most() -> None:
    ranks = [made(0), made(1), made(2)]
    for rank, (host, own, shared) in zip(
        ranks, (("a", 1e9, 3e9), ("a", 2e9, 3e9), ("b", 4e9, 0.0)), strict=True
    ):
        held = Held([0.0, 20.0], [own, own], [shared, shared])
        rank.loaders[0].settings.update(host=host, held=held)
    page = run_page.page([Run("run", ranks, None, [])])
    assert "At the most 6.0 GB of 8.6 GB on the host that held most, a." in page


def test_memory_at_moments_that_were_rounded_to_before_the_run_is_drawn_at_its_begin() -> None:
    rank = made()
    rank.loaders[0].settings.update(held=Held([-0.04, -0.04], [1e9, 1e9], [0.0, 0.0]))
    page = run_page.page([Run("run", [rank], None, [])])
    points = re.findall(r'<polyline.*? points="(.*?)"', page[page.index("Memory over time") :])
    assert points and all(float(p.split(",")[0]) >= 0 for each in points for p in each.split())


def test_words_of_a_short_run_have_its_milliseconds() -> None:
    loader = made().loaders[0]
    assert loader.stats is not None
    epochs = [replace(e, seconds=0.05, stall_seconds=0.02) for e in loader.stats.epochs]
    short = Rank(0, [replace(loader, stats=replace(loader.stats, epochs=epochs))], None)
    text = runs.words(Run("run", [short], None, []))
    assert text.startswith("This run waited 40.0 % of its time, 0.040 of 0.100 s")


def test_loaders_in_use_at_the_same_time_count_once() -> None:
    def one(made: float | None, began: list[float], seconds: float) -> Loader:
        """A loader with an epoch of two batches, the first after a second, at each of the moments."""
        stats = alone.loaders[0].stats
        epochs = [
            replace(stats.epochs[0], epoch=i, seconds=seconds, batches=2) for i in range(len(began))
        ]
        columns = {n: [0.0] * 2 * len(began) for n in BatchRecords.__dataclass_fields__}
        columns |= {"time": [t + d for t in began for d in (1.0, 2.0)]}
        columns |= {"wait": [1.0, 0.0] * len(began)}
        stats = replace(stats, epochs=epochs, batches=BatchRecords(**columns), made=made)
        return Loader({}, stats)

    alone = made()
    train = one(1e9, [0.0, 20.0], 10.0)
    assert Rank(0, [train]).seconds == 20.0
    # A validation amid the first epoch, and one that outlasts the second.
    assert Rank(0, [train, one(1e9 + 3, [0.0, 22.0], 6.0)]).seconds == pytest.approx(21.0)
    assert Rank(0, [train, one(None, [0.0, 22.0], 6.0)]).seconds == 32.0  # of no known moment
    # Waited for in two threads: no more than all of its time.
    stats = train.stats
    waits = replace(
        train, stats=replace(stats, epochs=[replace(e, stall_seconds=9.0) for e in stats.epochs])
    )
    assert sum(Rank(0, [waits]).waits().values()) == pytest.approx(18.0)
    assert sum(Rank(0, [waits, waits]).waits().values()) == pytest.approx(20.0)
    # Of an epoch that began before the first recorded batch it is not known either.
    cut = BatchRecords(**{n: c[2:] for n, c in vars(train.stats.batches).items()})
    train = replace(train, stats=replace(train.stats, batches=cut))
    assert Rank(0, [train, one(1e9 + 23, [0.0], 2.0)]).seconds == 20.0
    assert Rank(0, [train, one(1e9 + 3, [0.0], 2.0)]).seconds == 22.0


def without_remedy(threads: int = 1, cores: int = 1) -> Rank:
    """Of its 20 s it waits 4 for decoding and 1 for idle threads; its data lies in memory."""
    rank = made()
    (loader,) = rank.loaders
    loader.settings.update(tiers=[("ram", 1 << 30, "")], threads=threads, rank_cores=cores)
    origins = {"source": OriginStats(), "ram": OriginStats(100, 800_000_000, 0.1)}
    epochs = [
        replace(e, stall_seconds=2.5, origins={**e.origins, **origins}) for e in loader.stats.epochs
    ]
    memory = {**loader.stats.memory, "staging": 0}
    stats = replace(loader.stats, epochs=epochs, memory=memory, threads=threads)
    rank.loaders[0] = replace(loader, stats=stats)
    assert rank.digest is not None
    rank.digest.spans = {
        ("data", "wait for batch"): spans([0, 4], [4, 5]),
        ("data", "decode"): spans([0] * threads, [4] * threads),
        ("compute", "forward"): spans([5], [20]),
    }
    return rank


def test_where_no_change_helps_the_report_says_why() -> None:
    run = Run("run", [without_remedy(2, 2)], None, [])
    assert advise(run) == []
    assert run_page.headline(run) == (
        "25.0 % of the time waited, most of it for decoding; all 2 cores decode already, as far as "
        "other programs leave them"
    )
    line = (
        "No change that the model knows would make this run noticeably shorter: all 2 cores decode "
        "already, as far as other programs leave them; more cores, smaller images or cheaper "
        "transforms would help."
    )
    assert f"  -> {line}" in run_page.text(run)
    assert line in run_page.page([run])
    few = run_page.headline(Run("run", [without_remedy(1, 2)], None, []))
    assert few.endswith("; decoding is fast enough on average, yet single batches came late")


def test_cores_that_others_had_or_a_limit_kept_are_the_reason() -> None:
    def told(*given: Processors, host: str = "h") -> list[str]:
        ranks = [replace(without_remedy(2, 2), rank=i) for i in range(len(given))]
        for rank, one in zip(ranks, given, strict=True):
            rank.loaders[0].settings.update(processors=one, host=host)
        run = Run("run", ranks, None, [])
        line = run_page.headline(run)
        assert line.partition("; ")[2] in run_page.advice_lines(run)[0]
        return [line.partition("; ")[2], run_page.advice_lines(run)[0].rpartition("; ")[2]]

    decode = "more cores, smaller images or cheaper transforms would help."
    alone = "running alone, or on cores of its own, would help."
    # 10 s of two cores, all of them busy: with this run, or with others.
    assert told(Processors([0, 1], 20.0, 19.0, 18.0)) == ["all 2 cores decode already", decode]
    crowded = ["other programs took about 65 % of the cores", alone]
    assert told(Processors([0, 1], 20.0, 19.0, 6.0)) == crowded
    # Others had much, and left enough.
    some = Processors([0, 1, 2, 3], 40.0, 25.0, 10.0)
    assert told(some) == ["all 2 cores decode already", decode]
    # The other ranks of a host are no other programs, whether they share its cores or divide them.
    share = Processors([0, 1], 20.0, 19.0, 9.0)
    assert told(share, share)[0] == "all 2 cores of each rank decode already"
    assert told(share, replace(share, own=3.0))[0] == "other programs took about 35 % of the cores"
    apart = Processors([2, 3], 20.0, 19.0, 18.0)
    assert told(share, apart)[0] == "other programs took about 50 % of the cores"
    unknown = "all 2 cores of each rank decode already, as far as other programs leave them"
    assert told(share, replace(apart, cores=[1, 2]))[0] == unknown
    assert told(share, Processors())[0] == unknown
    # A limit of control groups.
    held = Processors([0, 1, 2, 3], 40.0, 20.0, 19.0, 2.0, 100, 90)
    assert told(held) == [
        "the limit of 2 CPUs held the run back in 90.0 % of its periods",
        "a higher limit, smaller images or cheaper transforms would help.",
    ]
    assert told(replace(held, throttled=10)) == ["all 2 cores decode already", decode]


def busy_for(seconds: float) -> bool:
    """Uses so much time of a core."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return True


def test_a_record_has_who_had_the_cores(image_folder: Path, tmp_path: Path) -> None:
    trace.start(tmp_path, 0)
    with nostall.DataLoader(nostall.ImageFolder(image_folder), 8, epochs=1, tiers=[]) as loader:
        assert len([batch for batch in loader if busy_for(0.05)]) == 8
    trace.stop()
    (rank,) = runs.read(tmp_path).ranks
    found = rank.loaders[0].settings["processors"]
    assert found.cores == sorted(os.sched_getaffinity(0))
    assert found.own > 0.3 and 0 < found.busy < found.whole + 0.01  # differences of large numbers


def test_cores_and_limits_are_counted(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    rows = [f"cpu{core} " + " ".join(str(n * ticks) for n in range(1, 11)) for core in (0, 2)]
    group = tmp_path / "group"
    files = {
        "stat": "\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *rows, "intr 1"]) + "\n",
        "self/cgroup": "0::/\n",
        "self/mountinfo": f"30 20 0:2 / {group} rw shared:3 - cgroup2 cgroup rw\n",
        "group/cpu.max": "200000 100000\n",
        "group/cpu.stat": "nr_periods 7\nnr_throttled 5\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    proc = str(tmp_path)
    found = processors.count([0, 2], proc)
    assert (found.whole, found.busy) == (2 * 36.0, 2 * 6.0)  # of programs, and without guests
    assert (found.limit, found.periods, found.throttled) == (2.0, 7, 5)
    assert processors.count([0, 1], proc).whole == 0.0


def test_where_the_first_epoch_reads_all_that_is_the_reason() -> None:
    rank = without_remedy()
    (loader,) = rank.loaders
    first, second = loader.stats.epochs
    # Of a source that is faster than the training: a tier that is kept would gain nothing.
    source = {"source": OriginStats(100, 800_000_000, 4.0)}
    first = replace(first, origins={**first.origins, **source})
    rank.loaders[0] = replace(loader, stats=replace(loader.stats, epochs=[first, second]))
    assert rank.digest is not None
    del rank.digest.spans["data", "decode"]
    rank.digest.spans["data", "read source"] = spans([0], [4], 800_000_000)
    run = Run("run", [rank], None, [])
    assert run_page.headline(run) == (
        "25.0 % of the time waited, most of it for storage; the first epoch must read everything once"
    )


def test_idle_threads_are_explained_where_they_were_waited_for() -> None:
    rank = without_remedy()
    assert "5.0 % for threads that stood idle" in runs.words(Run("run", [rank], None, []))
    assert "Threads that stood idle neither read" in run_page.page([Run("run", [rank], None, [])])
    assert "stood idle" not in runs.words(Run("run", [made()], None, []))

    assert rank.digest is not None
    rank.digest.spans["data", "decode"] = spans([0], [1.9])
    assert run_page.headline(Run("run", [rank], None, [])).endswith(
        "threads that stood idle; only 9.5 % of the time is due to reading and decoding, all that a "
        "change could shorten"
    )


def test_one_rank_waits_for_no_samples_of_others() -> None:
    rank = without_remedy()
    assert rank.digest is not None
    rank.digest.spans["data", "wait for others"] = spans([4], [5])
    alone = Run("run", [rank], None, [])
    assert alone.causes()["source"] == pytest.approx(0.05)
    assert "other ranks read" not in run_page.page([alone]) + run_page.page([alone, alone])
    assert "wait for others" not in run_page.page([alone])
    rank.loaders[0] = replace(rank.loaders[0], stats=replace(rank.loaders[0].stats, world_size=2))
    assert "5.0 % for samples that other ranks read" in runs.words(Run("run", [rank], None, []))


def test_one_rank_alone_is_told_of_no_ranks() -> None:
    run = Run("run", [made()], None, [])
    assert "Waits for checkpoints were not recorded" in runs.words(run)
    # Tables that are folded away have the columns of all runs.
    page = re.sub("<(style|table)>.*?</\\1>", "", run_page.page([run]), flags=re.S)
    for text in (runs.words(run), run_page.text(run), page):
        assert not re.search("per rank|a rank|all ranks|each rank|other ranks|peers", text)


def test_the_model_is_the_slowest_of_its_terms() -> None:
    run = Run("run", [made()], None, [])
    assert bandwidth(run) == pytest.approx(100e6)
    assert [(t.compute, t.read, t.decode, t.time) for t in terms(run, *run.loaders())] == [
        (4.0, 8.0, 2.0, 8.0)
    ] * 2
    tiers, kept = advise(run)
    assert tiers.change == 'tiers=["ram:1GiB"]'
    assert tiers.gain == pytest.approx(4.0)  # of the second epoch: 8 s become 4 s
    assert tiers.share == pytest.approx(0.2)
    assert "keep" in kept.change
    assert kept.gain == pytest.approx(4.0)  # of the first one


def test_records_without_the_memory_left_advise_a_part_of_the_machines() -> None:
    rank = made()
    rank.loaders[0].settings.update(dataset_bytes=100 << 30, memory_bytes=16 << 30)
    tiers, *_ = advise(Run("run", [rank], None, []))
    assert tiers.change == 'tiers=["ram:6GiB", "/local/disk:100GiB"]'


def test_tiers_that_are_advised_have_room() -> None:
    def advised(**settings: Any) -> list[str]:
        """Of the ranks of two hosts that share 16 GB of data, and of which one took some memory."""
        ranks = [made(r) for r in range(4)]
        for rank, left in zip(ranks, (20, 1, 10, 9), strict=True):
            (loader,) = rank.loaders
            own = {"world_size": 4, "local_world_size": 2, "host": f"h{rank.rank // 2}"}
            own |= {"dataset_bytes": 16 << 30, "memory_left": left << 30}
            loader.settings.update(own | settings)
        found = [a for a in advise(Run("run", ranks, None, []), most=9) if "tier" in a.change]
        # What is not read from the source may come from the other node.
        assert all(a.at_most for a in found)
        return [a.change.removesuffix(" (at most this gain)") for a in found]

    ram, keep = advised()
    assert ram == 'tiers=["ram:8GiB"]'
    assert keep.endswith('tiers=[..., "/local/disk:8GiB:keep"]')
    assert advised(memory_left=9 << 30)[0] == 'tiers=["ram:5GiB", "/local/disk:8GiB"]'
    assert advised(memory_left=0)[0] == 'tiers=["/local/disk:8GiB"]'
    # Where nodes exchange nothing each needs all.
    ram, keep = advised(exchange=False, memory_left=30 << 30)
    assert ram == 'tiers=["ram:16GiB"]'
    assert keep.endswith('tiers=[..., "/local/disk:16GiB:keep"]')
    half = [("kept file", 8 << 30, "/nvme")]
    assert advised(exchange=False, tiers=half) == ['tiers=["ram:5GiB", "/local/disk:16GiB"]']
    assert advised(exchange=True, tiers=half) == advised(tiers=half) == []

    file, kept, own = (
        advised(tiers=[(sort, 8 << 30, "/nvme")]) for sort in ("file", "kept file", "own file")
    )
    assert [change.endswith('mark it ":keep"') for change in file] == [True]
    assert kept == []
    assert [change.endswith(':keep"]') for change in own] == [True]


def test_advice_says_who_reads_what() -> None:
    def why(**settings: Any) -> str:
        rank = made()
        rank.loaders[0].settings.update(dataset_bytes=16 << 30, **settings)
        tiers, *others = advise(Run("run", [rank], None, []))
        assert tiers.at_most == ("world_size" in settings)
        (keep,) = [a for a in others if ":keep" in a.change]
        assert keep.why.endswith("has not read before") == (tiers.why.endswith(once))
        return tiers.why

    alone, several = "the tiers of 1 node hold 0.0 B", "the tiers of 2 nodes hold 0.0 B"
    nothing, once = "would read nothing from it", "each node would read a sample only once"
    assert why().startswith(alone) and why(exchange=False).startswith(alone)
    for settings in ({}, {"exchange": True}):
        text = why(world_size=2, **settings)
        assert text.startswith(several) and text.endswith(nothing)
    text = why(world_size=2, exchange=False)
    assert text.startswith("each node reads for itself") and text.endswith(once)


def test_a_larger_buffer_is_not_advised_where_decoding_takes_the_time() -> None:
    def slow(decode: float, staged: int = 250 << 20) -> list[str]:
        rank = made()
        loader = rank.loaders[0]
        assert loader.stats is not None
        epochs = [replace(e, decode_seconds=decode, origins={**e.origins, "source": OriginStats()})
                  for e in loader.stats.epochs]  # fmt: skip
        memory = {**loader.stats.memory, "staging": staged}
        stats = replace(loader.stats, epochs=epochs, memory=memory)
        rank.loaders[0] = replace(loader, stats=stats)
        return [a.change for a in advise(Run("run", [rank], None, []), most=9)]

    assert any("staging" in change for change in slow(0.0))
    assert not any("staging" in change for change in slow(0.0, staged=100 << 20))
    assert not any("staging" in change for change in slow(6.0))


def test_checkpoints_and_peers_are_counted_when_recorded() -> None:
    rank = made()
    assert rank.digest is not None
    rank.digest.spans["checkpoint", "save"] = spans([18], [19])
    rank.digest.spans["peers", "allreduce"] = spans([0, 0.5], [1, 2])
    run = Run("run", [rank], None, [])
    assert run.checkpoints == pytest.approx(0.05)
    assert run.peers == pytest.approx(0.1)
    assert "10.0 % for peers, 5.0 % for checkpoints" in runs.words(run)
    assert "not recorded" not in runs.words(run)


def test_a_lane_begins_and_ends_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[tuple[str, list[list[object]]]]] = []
    monkeypatch.setattr(run_page, "stacks", lambda _, lanes, *more: drawn.append(lanes) or "")
    ranks = [made(0), made(1)]
    assert ranks[1].digest is not None
    ranks[1].digest.origin += 20.0  # of 40 s in 100 slots
    run_page._lanes(Run("run", ranks, None, []))
    ((_, first), (_, second)), *_ = drawn
    assert [bool(column) for column in first] == [True] * 50 + [False] * 50
    assert [bool(column) for column in second] == [False] * 50 + [True] * 50


def test_a_rank_without_a_span_waited_for_none() -> None:
    ranks = [made(r) for r in range(4)]
    assert ranks[0].digest is not None
    ranks[0].digest.spans["checkpoint", "save"] = spans([18], [20])
    ranks[3].digest = None  # of which nothing is known
    run = Run("run", ranks, None, [])
    assert run.checkpoints == pytest.approx(2 / 60)
    table = run_page._ranks(run)
    for rank, words in enumerate(("10.0 %", "0.0 %", "0.0 %", "not recorded")):
        row = re.search(rf"<tr><td>{rank}</td>.*?</tr>", table)
        assert row is not None and f"<td>{words}</td>" in row[0]


def test_the_chart_of_waits_has_all_of_them_and_advice_fits() -> None:
    rank = made()
    assert rank.digest is not None
    rank.digest.spans["checkpoint", "save"] = spans([18], [19])
    rank.digest.spans["peers", "allreduce"] = spans([0, 0.5], [1, 2])
    run = Run("run", [rank], None, [])
    page = run_page.page([run])
    assert "<td>10.0 %</td><td>5.0 %</td>" in page  # other ranks, checkpoints
    assert f"<td>{percent(run.waited)}</td></tr>" in page
    whole = page[page.index("<svg") : page.index("</svg>")]
    bars = [(float(x), float(w)) for x, w in re.findall(r'x="(\S+)%" width="(\S+)%"', whole)]
    assert len(bars) == 4
    assert bars[0] == (0, pytest.approx(100 * (1 - run.waited)))
    assert all(a[0] + a[1] == pytest.approx(b[0], abs=0.02) for a, b in pairwise(bars))  # no gap
    assert sum(bars[-1]) == pytest.approx(100)
    assert "other ranks: 10.0 %" in whole

    assert "checkpoints: 5.0 %" in whole
    (written,) = [a.change for a in advise(run, most=9) if "checkpoint" in a.change]
    assert "nostall.Checkpointer" in written
    # Who uses it already is told something else.
    rank.digest.spans["background", "write checkpoint"] = spans([19], [20])
    changes = [a.change for a in advise(run, most=9)]
    assert any("window=True" in c for c in changes)
    assert not any("in the background" in c for c in changes)
    rank.digest.spans["checkpoint", "copy before an update"] = spans([19], [19.5])
    changes = [a.change for a in advise(run, most=9)]
    assert any(c.startswith("a larger every=") for c in changes)
    assert not any("window=True" in c for c in changes)


def test_what_was_not_recorded_is_not_called_zero() -> None:
    page = run_page.page([Run("run", [made()], None, [])])
    assert "waits for checkpoints" not in page  # there is no colour for it
    row = re.search(r"<tr><td>0</td>.*?</tr>", page[page.index("waits by cause") :])
    assert row is not None
    assert row[0].count("<td>not recorded</td>") == 1  # one rank waits for no others


def test_origins_that_never_were_are_not_in_the_legend() -> None:
    loader = made().loaders[0]
    columns = {n: [1.0] * 2 for n in BatchRecords.__dataclass_fields__}
    text = page([replace(loader.stats, batches=BatchRecords(**{**columns, "peer": [0, 0]}))])
    assert re.findall(r"</i>([^<]*)</span>", text)[-3:] == ["RAM tier", "file tier", "source"]


def test_a_phase_of_many_times_is_drawn_to_the_end() -> None:
    rank = made()
    assert rank.digest is not None
    steps = np.concatenate([np.arange(0, 5, 1e-4), np.arange(15, 20, 1e-4)])
    rank.digest.spans["compute", "forward"] = spans(steps.tolist(), (steps + 5e-5).tolist())
    marks = re.findall(
        r"<title>forward: (.*?)</title>", run_page.page([Run("run", [rank], None, [])])
    )
    assert marks == ["0.000 to 5.000 s", "15.000 to 20.000 s"]


def test_a_page_is_written_whatever_its_names_and_the_locale(tmp_path: Path) -> None:
    rank = made(name="donn\u00e9es")
    rank.loaders[0].settings["command"] = "train \udcff"  # as Python names a file that is not UTF-8
    run_page.save([Run("run", [rank], None, [])], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("ascii")
    assert "donn&#233;es" in text
    assert "train &#56575;" in text


def test_a_run_that_waits_little_is_told_that_nothing_is_to_do() -> None:
    rank = made()
    assert rank.digest is not None
    rank.digest.spans["data", "wait for batch"] = spans([2], [2.1])
    text = run_page.page([Run("run", [rank], None, [])])
    assert '<h1 class="good">Nothing to do: the training waited 0.5 % of its time</h1>' in text
    assert "<h2>Notes" not in text


def stepping(data: list[float], peers: list[float | None], later: float = 0.0) -> Run:
    """Ranks that step together, 8 steps of 2 s, `later` seconds after the trace began; waits of each
    in a step for data and for others."""
    ranks = [made(r) for r in range(len(data))]
    for rank, wait, seconds in zip(ranks, data, peers, strict=True):
        columns = {n: [wait] * 9 for n in BatchRecords.__dataclass_fields__}
        columns["time"], columns["epoch"] = [2.0 * x for x in range(9)], [0.0] * 9
        assert rank.digest is not None
        stats = replace(
            rank.loaders[0].stats,
            world_size=len(data),
            batches=BatchRecords(**columns),
            made=rank.digest.origin + later,
        )
        rank.loaders[0] = replace(rank.loaders[0], stats=stats)
        if seconds is not None:
            begin = [later + 2.0 * x for x in range(8)]
            rank.digest.spans["peers", "allreduce"] = spans(begin, [b + seconds for b in begin])
    return Run("run", ranks, None, [])


def test_the_rank_that_computes_slowly_is_named() -> None:
    text = run_page.page([stepping([0.1, 0.1, 0.1], [1.0, 1.0, 0.0])])
    assert "Rank 2 is a straggler: without waits its step takes 2.11 times as long" in text
    # Who waits for the rank that waits for data is no straggler.
    assert "straggler" not in run_page.page([stepping([0.5, 0.0], [0.0, 0.5])])
    # Without waits for each other the steps of all are as long as the slowest one's.
    assert "straggler" not in run_page.page([stepping([0.1, 1.0], [None, None])])


def test_of_two_ranks_the_slower_is_named_from_a_tenth_on() -> None:
    # Steps of 1.9 and 1.7 s without waits, the same of 1.9 and 1.8.
    said = run_page.page([stepping([0.0, 0.0], [0.1, 0.3])])
    assert "Rank 0 is a straggler: without waits its step takes 1.12 times as long" in said
    assert "straggler" not in run_page.page([stepping([0.0, 0.0], [0.1, 0.2])])


def test_the_loader_of_most_of_the_time_tells_the_straggler() -> None:
    run = stepping([0.1, 0.1, 0.1], [1.0, 1.0, 0.0])
    for rank in run.ranks:
        (training,) = rank.loaders
        # Its iterators stay open, and give more batches, each at once.
        moments = [x + y / 100 for x in (3.0, 9.0) for y in range(50)]
        columns = {n: [0.0] * 100 for n in BatchRecords.__dataclass_fields__} | {"time": moments}
        columns["epoch"] = [0.0] * 50 + [1.0] * 50
        epochs = [replace(e, seconds=99.0, batches=50) for e in training.stats.epochs]
        stats = replace(training.stats, loader="loader 0", epochs=epochs)
        stats = replace(stats, batches=BatchRecords(**columns))
        rank.loaders = [replace(training, stats=replace(training.stats, loader="loader 1"))]
        rank.loaders.insert(0, replace(training, stats=stats))
    assert "Rank 2 is a straggler" in run_page.page([run])


def test_steps_are_compared_of_one_training_whatever_else_its_ranks_loaded() -> None:
    run = stepping([0.1, 0.1, 0.1], [1.0, 1.0, 0.0])
    (training,) = run.ranks[0].loaders
    columns = {n: [0.0] * 9 for n in BatchRecords.__dataclass_fields__}
    columns["time"] = [2.5 * x for x in range(9)]
    alone = replace(training.stats, world_size=1, batches=BatchRecords(**columns))
    named = replace(training.stats, loader="loader 1")
    run.ranks[0].loaders = [replace(training, stats=alone), replace(training, stats=named)]
    assert "Rank 0 is a straggler" not in run_page.page([run])
    assert "Rank 2 is a straggler" in run_page.page([run])


def test_a_process_has_the_rank_of_its_training() -> None:
    process = made(0)
    (loader,) = process.loaders
    assert process.digest is not None
    process.loaders.append(replace(loader, stats=replace(loader.stats, rank=3, world_size=4)))
    assert (runs._rank_of(process), process.world) == (3, 4)
    # A launcher's job may have more processes than the training has ranks.
    process.rank, process.digest.world = 7, 8
    assert (runs._rank_of(process), process.world) == (7, 4)


def test_of_many_ranks_the_slow_one_is_named_though_it_waits_least_for_data() -> None:
    run = stepping([0.1] * 39 + [0.0], [1.0] * 39 + [0.0])
    slow = run.ranks[-1].digest
    assert slow is not None
    del slow.spans["data", "wait for batch"]
    page = run_page.page([run])
    assert "32 of 40 ranks" in page
    assert "Rank 39 is a straggler" in page
    assert "<tr><td>39</td>" not in page


def test_waits_outside_the_steps_name_no_straggler_and_hide_none() -> None:
    run = stepping([0.1, 0.1], [1.0, 1.0])
    for rank, end in zip(run.ranks, (17.0, 97.0), strict=True):  # after the epoch
        assert rank.digest is not None
        rank.digest.spans["peers", "barrier"] = spans([17.0], [end])
    assert "straggler" not in run_page.page([run])
    # The records have the last steps alone, the trace has all waits.
    run = stepping([0.1, 0.1, 0.1], [1.0, 1.0, 0.0], later=1000.0)
    for rank in run.ranks:
        assert rank.digest is not None
        rank.digest.spans["peers", "allreduce before"] = spans([0.0], [900.0])
        rank.digest.spans["checkpoint", "save"] = spans([1000.5, 1016], [1001.0, 1100])
    assert "Rank 2 is a straggler: without waits its step takes 2.04 times" in run_page.page([run])
    # What the trace does not have may hold waits.
    run.ranks[0].digest = None
    assert "straggler" in run_page.page([run])
    run.ranks[1].loaders[0] = replace(
        run.ranks[1].loaders[0], stats=replace(run.ranks[1].loaders[0].stats, made=None)
    )
    assert "straggler" not in run_page.page([run])


def test_a_rank_that_left_no_waits_for_the_others_is_not_blamed() -> None:
    run = stepping([0.1, 0.1], [1.0, None])
    assert not any("rank" in a.change for a in advise(run))
    run = stepping([0.1, 0.1, 0.1], [1.0, 0.0, None])
    (late,) = (a for a in advise(run, most=9) if a.change == "look at rank 1")
    # The bar, the table and the advice count it alike.
    assert run.peers == pytest.approx(8 / 3 / run.seconds)
    assert late.gain == pytest.approx(8 / 3)
    row = re.search(r"<td>2</td>(?:<td>[^<]*</td>)*", run_page.page([run]))
    assert row is not None and re.findall("<td>([^<]*)</td>", row[0])[-3] == "0.0 %"


def test_spans_of_a_category_within_each_other_count_once() -> None:
    rank = made()
    assert rank.digest is not None
    rank.digest.spans["checkpoint", "mine"] = spans([0], [8])
    rank.digest.spans["checkpoint", "save"] = spans([1, 9], [8, 10])
    assert rank.phase("checkpoint") == pytest.approx(9)


def test_without_a_trace_waits_are_shared_out_by_sums() -> None:
    rank = made()
    rank.digest = None
    waits = rank.waits()
    assert waits["source"] == pytest.approx(12 * 8 / 10)
    assert waits["decode"] == pytest.approx(12 * 2 / 10)


def test_statistics_alone_know_the_threads_of_their_loader() -> None:
    """Of 5 s of waiting each second of the source is that of 16 threads, of decoding that of 4."""
    (loader,) = made().loaders
    read = OriginStats(1000, 1_000_000_000, 320.0)
    (epoch, _) = loader.stats.epochs
    epoch = replace(epoch, samples=1000, bytes=1_000_000_000, decode_seconds=20.0,
                    origins={**epoch.origins, "source": read})  # fmt: skip
    stats = replace(loader.stats, epochs=[epoch], threads=4, fetchers=16)
    alone = _of_statistics([stats])
    assert bandwidth(alone) == pytest.approx(50e6)
    assert alone.causes()["source"] == pytest.approx(0.6 * 20 / 25)
    assert alone.causes()["decode"] == pytest.approx(0.6 * 5 / 25)
    text = page([stats])
    assert "as fast as the source gave: 50" in text and "as fast as 4 threads decoded: 200" in text
    assert "rank 0 left no trace: waits are divided by sums" in text
    merged = page([merge([stats, replace(stats, rank=1)])])
    assert "all ranks left no trace: waits are divided by sums" in merged
    assert "<td>-1</td>" not in merged and "<td>all</td>" in merged
    assert "No change" not in text
    # Loaders that read in turn are no faster together.
    assert bandwidth(_of_statistics([stats, replace(stats, loader="validation")])) == 50e6


def record(images: Path, home: Path, sleep: float = 0.0) -> None:
    trace.start(home, rank=0)
    with nostall.DataLoader(
        nostall.ImageFolder(images, index=False), 4, epochs=2, tiers=["ram:64MiB"], output="numpy"
    ) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                with trace.span("<script>alert(1)</script>"):
                    time.sleep(sleep)
    trace.stop()


KILLED = """
import os, signal, sys, nostall
from nostall.observe import metrics

metrics.LIVE_SECONDS = 0.0
data = nostall.ImageFolder(sys.argv[1], index=False)
loader = nostall.DataLoader(data, 4, epochs=9, tiers=[], threads=3, output="numpy")
for epoch in loader.epochs():
    for _ in epoch:
        if epoch.index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_leaves_its_settings_and_its_statistics_so_far(
    image_folder: Path, tmp_path: Path
) -> None:
    done = prefork.run(
        ["-c", KILLED, image_folder], env={**os.environ, "NOSTALL_TRACE": str(tmp_path)}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = runs.read(tmp_path)
    (rank,) = found.ranks
    (loader,) = rank.loaders
    data = nostall.ImageFolder(image_folder, index=False)
    assert rank.threads == loader.settings["threads"] == 3
    assert [(e.epoch, e.samples) for e in loader.stats.epochs] == [(-1, 2 * len(data)), (2, 4)]
    assert loader.stats.source_bytes > 2 * data.total_bytes
    assert found.notes[-1].startswith("rank 0 did not come to end all loaders, as after a kill")
    page = run_page.page([found])
    assert ("epochs", "3 of 9") in re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    assert "lower bound" not in page
    assert "Memory over time" in page
    # Before its first batch there are the settings alone.
    (tmp_path / "rank0.0.live.json").unlink()
    (loader,) = runs.read(tmp_path).ranks[0].loaders
    assert loader.settings["threads"] == 3 and loader.stats.epochs == []


def test_a_job_that_was_killed_before_its_first_batch_is_not_told_that_nothing_is_to_do(
    image_folder: Path, tmp_path: Path
) -> None:
    trace.start(tmp_path, rank=0)
    data = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(data, 4, epochs=1, tiers=[], output="numpy") as loader:
        trace.begin(loader)
        run = runs.read(tmp_path)  # as if it were killed here
        assert run_page.headline(run) == "No batch was taken before the record ends"
        assert run_page.advice_lines(run) == []
        page, text = run_page.page([run]), run_page.text(run)
        assert '<h1 class="bad">No batch was taken' in page
        assert "What to change" not in page and "0.0 %" not in page + text
        assert "did not come to end all loaders" in text
    trace.stop()
    # Threads may have read meanwhile.
    rank = made()
    assert rank.digest is not None
    rank.digest.spans = {("data", "read source"): spans([0], [10], 100)}
    nothing = replace(rank.loaders[0].stats, epochs=[])
    rank.loaders = [replace(rank.loaders[0], stats=nothing, ended=False)]
    assert "No batch was taken" in run_page.text(Run("run", [rank], None, []))
    # Of a program without loaders the trace says all.
    rank.loaders = []
    assert "No batch was taken" not in run_page.text(Run("run", [rank], None, []))


def test_what_a_killed_rank_did_not_tell_is_not_held_to_the_bound() -> None:
    ranks = [made(0), made(1)]
    for rank in ranks:
        (loader,) = rank.loaders
        rank.loaders = [replace(loader, stats=replace(loader.stats, world_size=2))]
    run = Run("run", ranks, None, [])
    assert "lower bound 800.0 MB; 2 of 2 ranks" in run_page.page([run])
    ranks[1].loaders[0].ended = False
    assert "lower bound" not in run_page.page([run])


def test_of_several_processes_of_a_rank_one_is_reported_with_all_that_it_left(
    image_folder: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        record(image_folder, tmp_path)
    found = runs.read(tmp_path)
    (rank,) = found.ranks
    (loader,) = rank.loaders
    assert rank.digest is not None
    of_trace = Path(rank.digest.path).name.removesuffix(".trace.json.gz")
    kept = json.loads((tmp_path / f"{of_trace}.0.run.json").read_text())
    assert loader.stats.loader == kept["name"]
    assert found.notes[0].startswith("the directory holds 2 attempts, as after restarts: number ")


def test_ranks_of_one_attempt_are_laid_side_by_side() -> None:
    def process(rank: int, origin: float, seconds: float) -> Rank:
        found = made(rank)
        assert found.digest is not None
        found.digest.origin = origin
        found.digest.spans = {("compute", "forward"): spans([0], [seconds])}
        return found

    # Of the second attempt rank 1 has little, and rank 0 more than of the first.
    first, second = [process(0, 100, 20), process(1, 101, 20)], [process(0, 200, 30)]
    second += [process(1, 202, 5)]
    ranks, notes = runs._one_of_each([*second, *first])
    assert ranks == {0: first[0], 1: first[1]}
    (note,) = notes
    assert note.startswith("the directory holds 2 attempts, as after restarts: number 1, which has")
    # A process that left no trace has its place by its loaders' begin.
    killed = process(0, 0, 1)
    killed.digest = None
    settings = killed.loaders[0].settings
    for began, place in ((150, 2), (103, 1)):
        settings["began"] = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began))
        attempts = runs._attempts([*first, *second, killed])
        assert [killed in a for a in attempts].index(True) == place - 1
    # Two at a time that call themselves alike.
    ranks, notes = runs._one_of_each([*first, process(1, 110, 30)])
    assert [ranks[r].seconds for r in (0, 1)] == [20, 30]
    (note,) = notes
    assert note.startswith("rank 1 left records of several processes: the longest is reported")
    # Those that never met, each of a rank of its own, are all of the run.
    assert runs._one_of_each([process(0, 0, 5), process(1, 100, 5)])[1] == []


def test_a_run_of_the_format_before_has_its_threads_in_its_settings(
    image_folder: Path, tmp_path: Path
) -> None:
    record(image_folder, tmp_path)
    (path,) = tmp_path.glob("*.run.json")
    kept = json.loads(path.read_text())
    threads, fetchers = kept["stats"].pop("threads"), kept["stats"].pop("fetchers")
    path.write_text(json.dumps({**kept, "stats": {**kept["stats"], "format": 7}}))
    found = runs.read(tmp_path)
    assert found.notes == []
    assert [(s.threads, s.fetchers) for s in found.stats] == [(threads, fetchers)]


def test_files_of_loaders_are_numbered_as_they_begin(image_folder: Path, tmp_path: Path) -> None:
    trace.start(tmp_path, rank=0)
    data = nostall.ImageFolder(image_folder, index=False)
    first, second = (nostall.DataLoader(data, 4, tiers=[], output="numpy") for _ in range(2))
    with first:
        with second:
            next(iter(first))
            next(iter(second))
        trace.stop()
    for number, loader in enumerate((first, second)):
        for kind, name in (("run", "name"), ("live", "loader")):
            kept = json.loads((tmp_path / f"rank0.{number}.{kind}.json").read_text())
            assert kept[name] == loader.name
    assert not list(tmp_path.glob("*.tmp"))


def test_loaders_of_a_process_stay_together_whatever_ranks_they_have(
    image_folder: Path, tmp_path: Path
) -> None:
    """Two ranks train together, and each validates all samples by itself."""
    data = nostall.ImageFolder(image_folder, index=False)
    for rank in range(2):
        trace.start(tmp_path, rank=rank, world=2)
        alone: dict[str, Any] = {"rank": 0, "world_size": 1, "output": "numpy", "tiers": []}
        for _ in range(2):
            with nostall.DataLoader(data, 4, epochs=1, **alone) as loader:
                list(loader)
        trace.stop()
    # The second process's numbers go on from the first's, which was the same here.
    for rank in range(2):
        for number in range(2):
            path = tmp_path / f"rank{rank}.{number}.run.json"
            kept = json.loads(path.read_text())
            kept["stats"]["loader"] = f"loader {number}"
            if number == 0:
                kept["stats"] |= {"rank": rank, "world_size": 2}
            path.write_text(json.dumps(kept))
    found = runs.read(tmp_path)
    assert found.notes == []
    assert [[x.stats.loader for x in r.loaders] for r in found.ranks] == [
        ["loader 0", "loader 1"],
        ["loader 0", "loader 1"],
    ]
    assert [[x.stats.rank for x in g] for g in found.loaders()] == [[0, 1], [0, 0]]
    text = run_page.page([found])
    assert text.count("Samples and origins over time: loader") == 2
    # Without a trace too.
    for path in tmp_path.glob("*.trace.json.gz"):
        path.unlink()
    assert [len(r.loaders) for r in runs.read(tmp_path).ranks] == [2, 2]


def decoding_by_eight(rank: Rank) -> None:
    """A wait of 8 s, in which 8 threads decode and one reads."""
    assert rank.digest is not None
    rank.digest.spans = {
        ("data", "wait for batch"): spans([0], [8]),
        ("data", "decode"): spans([0] * 8, [8] * 8),
        ("data", "read source"): spans([0], [8]),
        ("compute", "forward"): spans([8], [10]),
    }


def test_a_loader_that_stands_idle_adds_no_threads() -> None:
    rank = made()
    loader = rank.loaders[0]
    rank.loaders = [
        replace(loader, stats=replace(loader.stats, loader=name, threads=8))
        for name in ("training", "validation")
    ]
    decoding_by_eight(rank)
    causes = Run("run", [rank], None, []).causes()
    assert causes["decode"] == pytest.approx(0.8)
    assert causes["source"] == pytest.approx(0)


def test_threads_are_those_of_the_loaders_that_are_waited_for_together() -> None:
    rank = made()
    (loader,) = rank.loaders
    decoding_by_eight(rank)

    def using(*loaders: tuple[str, list[float], float]) -> list[Loader]:
        found = []
        for name, times, stall in loaders:
            columns = {n: [0.0] * len(times) for n in BatchRecords.__dataclass_fields__}
            (epoch, _) = loader.stats.epochs
            stats = replace(
                loader.stats, loader=name, threads=8, made=100.0,
                epochs=[replace(epoch, stall_seconds=stall)],
                batches=BatchRecords(**{**columns, "time": times}),
            )  # fmt: skip
            found.append(replace(loader, stats=stats))
        return found

    steps = [float(x) for x in range(100)]
    # Two that are zipped share the 8 threads that were busy.
    rank.loaders = using(("labelled", steps, 4.0), ("unlabelled", [x + 0.5 for x in steps], 4.0))
    assert rank.threads == 16
    assert Run("run", [rank], None, []).causes()["decode"] == pytest.approx(0.4)
    # One that gives a batch for each ten of the other, and a third beside each of its batches.
    rank.loaders = using(
        ("labelled", steps, 4.0), ("text", steps[::10], 1.0), ("sound", steps[::10], 1.0)
    )
    assert rank.threads == 24
    # Validation, in an epoch and after each, takes turns; the one that was waited for counts.
    validation = [s + x / 100 for s in (20.1, 50.1, 99.1) for x in range(10)]
    rank.loaders = using(("training", steps, 8.0), ("validation", validation, 1.0))
    rank.loaders[1] = replace(rank.loaders[1], stats=replace(rank.loaders[1].stats, threads=32))
    assert rank.threads == 8
    # So does one that takes a batch now and then.
    rank.loaders = using(("training", steps, 8.0), ("validation", [50.5, 99.5], 1.0))
    assert rank.threads == 8
    # Of a killed job single batches are not known.
    rank.loaders = using(("training", [], 8.0), ("validation", [], 1.0))
    assert rank.threads == 8
    assert Rank(0).threads == 1


def test_without_settings_no_report_says_that_nothing_can_be_changed(
    image_folder: Path, tmp_path: Path
) -> None:
    record(image_folder, tmp_path)
    for path in (*tmp_path.glob("*.run.json"), *tmp_path.glob("*.live.json")):
        path.unlink()
    run = runs.read(tmp_path)
    assert "rank 0 left no settings of loaders: one thread is taken to decode" in run.notes[0]
    rank = made()
    rank.loaders = []
    assert run_page.advice_lines(Run("run", [rank], None, [])) == []
    assert "What to change" not in run_page.page([Run("run", [rank], None, [])])
    # Waits for others do not need them.
    assert rank.digest is not None
    rank.digest.spans = {("peers", "allreduce"): spans([0], [10])}
    assert "No change" in run_page.advice_lines(Run("run", [rank], None, []))[0]


def test_of_epochs_in_one_entry_the_first_alone_must_read() -> None:
    rank, killed = made(), made(1)
    (loader,), (other,) = rank.loaders, killed.loaders
    earlier, newest = loader.stats.epochs[0], replace(loader.stats.epochs[1], epoch=5)
    read = OriginStats(100, 4_000_000_000, 40.0)
    earlier = replace(earlier, epoch=-1, seconds=50.0, stall_seconds=40.0,
                      origins={**earlier.origins, "source": read})  # fmt: skip
    rank.loaders[0] = replace(loader, stats=replace(loader.stats, epochs=[earlier, newest]))
    run = Run("run", [rank], None, [])
    tiers, kept = (
        next(a for a in advise(run, most=9) if part in a.change) for part in ("ram:", "kept")
    )
    # 4 of 5 epochs' reading of 8 s, and that of the newest as far as it computes less.
    assert tiers.change == 'tiers=["ram:1GiB"]'
    assert tiers.gain == pytest.approx(30.0 + 4.0)
    assert kept.gain == pytest.approx(8.0)
    # A rank that has all epochs one by one counts them as the other does.
    epochs = [replace(other.stats.epochs[0], epoch=e) for e in range(6)]
    stats = replace(other.stats, epochs=epochs, rank=1)
    rows = terms(run, [rank.loaders[0], replace(other, stats=stats)])
    assert [(t.epoch, t.actual) for t in rows] == [(-1, 50.0), (5, 10.0)]
    whole = merge([rank.loaders[0].stats, stats])
    assert [e.epoch for e in whole.epochs] == [-1, 5]
    assert whole.seconds == pytest.approx(60.0)


def test_waits_for_a_callable_are_waits_for_data(image_folder: Path, tmp_path: Path) -> None:
    def slow(_: object) -> np.ndarray:
        time.sleep(0.01)
        return np.zeros(1, np.float32)

    trace.start(tmp_path, rank=0)
    data = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(
        data, 4, epochs=2, transforms=slow, threads=1, output="numpy", tiers=["ram:64MiB"]
    ) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                pass
    trace.stop()
    stalled = sum(e.stall_seconds for e in loader.stats().epochs)
    run = runs.read(tmp_path)
    assert stalled >= 0.01 * len(data)
    assert run.data * run.seconds > 0.5 * stalled
    assert run.causes()["decode"] * run.seconds > 0.005 * len(data)  # reading may take any time
    assert any('workers="processes"' in a.change for a in advise(run, most=9))


def test_the_steps_of_a_record_have_their_place_in_the_trace(
    image_folder: Path, tmp_path: Path
) -> None:
    trace.start(tmp_path, rank=0)
    data = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(data, 16, epochs=1, tiers=["ram:64MiB"], output="numpy") as loader:
        for _ in loader:
            with trace.span("barrier", "peers"):
                time.sleep(0.1)
    trace.stop()
    (rank,) = runs.read(tmp_path).ranks
    steps, works, alone = run_page._steps(rank, *rank.loaders)
    assert len(steps) == len(alone) == 3
    assert works.sum() - alone.sum() > 3 * 0.05


def test_a_page_is_read_in_a_browser(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "run"
    record(image_folder, home, 0.001)
    page = tmp_path / "report.html"
    assert main(["report", str(home), "-o", str(page)]) == 0
    assert "This run waited" in capsys.readouterr().out
    text = page.read_text()
    assert f"nostall {nostall.__version__}, python" in text  # of the header of the run
    seen = look(page)
    wide = seen["wide"]
    assert wide.messages == []
    assert wide.requests == []
    assert wide.scripts == 0
    assert len(wide.figures) == 7
    assert all(w > 300 and h > 30 for w, h in wide.figures)
    assert wide.overflow <= 0
    assert "<script>alert(1)</script>" in wide.text  # as words
    assert "Memory over time" in wide.text
    for way in seen.values():
        assert way.overflow <= 0  # what is wide scrolls by itself
        assert way.contrast[0] >= 4.5, way.contrast
    assert seen["paper"].cut == 0  # nobody scrolls there
    (first, _), *others = seen["phone"].figures
    assert first < 390  # the bar of all the time: half of it would say something else
    assert all(w >= 390 for w, _ in others)


def horovod() -> str:
    """Four rounds of 100 s of one tensor: rank 1 is ready 30 s after rank 0."""
    rows = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "w$_1$"}}]
    second = 1_000_000
    for t in (0, 100 * second, 200 * second, 300 * second):
        rows += [
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": t + 60 * second, "pid": 1},
            {"ph": "X", "name": "0", "ts": t + 60 * second, "pid": 1, "dur": 0},
            {"ph": "X", "name": "1", "ts": t + 90 * second, "pid": 1, "dur": 0},
            {"ph": "E", "ts": t + 90 * second, "pid": 1},
            {"ph": "B", "name": "ALLREDUCE", "ts": t + 90 * second, "pid": 1},
            {
                "ph": "E",
                "ts": t + 100 * second,
                "pid": 1,
                "args": {"dtype": "float32", "shape": "[9]"},
            },
        ]
    return json.dumps(rows)


def test_a_timeline_beside_says_who_waits_for_whom(image_folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "run"
    record(image_folder, home)
    (home / "timeline.json").write_text(horovod())
    run = runs.read(home)
    # Rank 0 waits 30 of 100 s in every round, rank 1 never; no run of this machine is as long.
    assert run.peers == pytest.approx(0.15)
    assert "15.0 % for peers" in runs.words(run)
    (late,) = [a for a in advise(run, most=9) if a.change.startswith("look at rank")]
    assert late.change == "look at rank 1"
    page = tmp_path / "page.html"
    run_page.save([run], page)
    seen = look(page)["wide"]
    assert seen.messages == []
    assert "How long each rank waited for the others" in seen.text
    assert len(seen.figures) == 8


def test_memory_of_a_long_run_is_held_at_fewer_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    watch = Watch()
    for _ in range(3000):
        watch()
    times = watch.held.time
    assert 250 < len(times) <= 600 and len(times) == len(watch.held.own)
    assert times == sorted(times)


def test_two_runs_stand_side_by_side(image_folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(image_folder, tmp_path / name)
    page = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(page)]) == 0
    seen = look(page)["wide"]
    assert seen.messages == []
    assert "Side by side" in seen.text
    assert "than A" in seen.text
    assert len(seen.figures) == 14
    (whole, _), *_ = seen.figures  # a bar, which is as wide as its column
    assert 500 < whole < 600 and {w for w, _ in seen.figures} == {whole}
    table = re.search("<table>.*?</table>", page.read_text(), re.S)
    assert table is not None
    changes = re.findall(r"<td>([^<]*)</td></tr>", table[0])
    # Lengths and bytes change by a share of themselves, shares by points.
    assert [bool(re.fullmatch(r"[+-][\d.]+ %", changes[i])) for i in (0, 1, -1)] == [
        True,
        False,
        True,
    ]
    assert all(re.fullmatch(r"([+-][\d.]+ points)?", change) for change in changes[1:-1])
    assert changes[1].endswith(" points")
    with pytest.raises(UsageError, match="not 3"):
        run_page.page([Run("", [made()], None, [])] * 3)


def test_damaged_records_are_left_out_and_named(image_folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "run"
    record(image_folder, home)
    (home / "rank1.0.run.json").write_text('{"stats": 3}')
    (home / "rank2.0.run.json").write_text("{")
    old = json.loads((home / "rank0.0.run.json").read_text())
    assert old["held"]["time"] == sorted(old["held"]["time"]) and min(old["held"]["own"]) > 0
    old["held"]["own"].append(1.0)
    (home / "rank4.0.run.json").write_text(json.dumps(old))
    del old["held"]  # as it was once written
    (home / "rank0.0.run.json").write_text(json.dumps(old))
    (home / "rank3.trace.json.gz").write_bytes(b'{"backend": "nostall"')
    (home / "profile.json").write_text('{"traceEvents": []}')
    found = runs.read(home)
    assert [r.rank for r in found.ranks] == [0]
    assert sum("left out" in n for n in found.notes) == 5
    assert any("columns of held differ in length" in n for n in found.notes)
    assert "Memory over time" not in run_page.page([found])


def own_trace(path: Path, rank: int, *events: str, base: str = "0") -> None:
    """A trace as nostall writes it, of a wait for batches from 1 to 3 s beside the events given."""
    head = f'{{"distributedInfo": {{"backend": "nostall", "rank": {rank}, "world_size": 2}}'
    lines = [
        '{"ph": "X", "cat": "data", "name": "get batch", "ts": 1000000, "dur": 2000000}',
        *events,
    ]
    path.write_text(
        f'{head}, "baseTimeNanoseconds": {base}, "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"
    )


_WAIT = '"ph": "X", "cat": "data", "name": "get batch"'


@pytest.mark.parametrize(
    "event",
    [
        f'{_WAIT}, "ts": 1{"0" * 400}, "dur": 5',
        f'{_WAIT}, "ts": 1{"0" * 5000}, "dur": 5',
        f'{_WAIT}, "ts": "5", "dur": 5',
        f'{_WAIT}, "ts": 5, "dur": "5"',
        f'{_WAIT}, "ts": 5, "dur": 5, "args": {{"bytes": "5"}}',
        f'{_WAIT}, "ts": 5, "dur": 5, "args": 5',
        f'{_WAIT}, "ts": 1e300, "dur": 5',
        f'{_WAIT}, "ts": NaN, "dur": 5',
        f'{_WAIT}, "ts": Infinity, "dur": 5',
        f'{_WAIT}, "ts": 5, "dur": NaN',
        f'{_WAIT}, "ts": 5, "dur": -Infinity',
        f'{_WAIT}, "ts": 5, "dur": -5000000',
        f'{_WAIT}, "ts": 5, "dur": 5, "args": {{"bytes": Infinity}}',
        f'{_WAIT}, "ts": 5, "dur": 5, "args": {{"samples": 1{"0" * 400}}}',
        '"ph": "M", "name": "recorded", "args": {"dropped": Infinity}',
        f'"ph": "M", "name": "clock_offset", "args": {{"to_rank_0_ns": 1{"0" * 400}}}',
    ],
    ids=lambda event: event[:60],
)
def test_numbers_beyond_bounds_cost_the_event_that_has_them(event: str, tmp_path: Path) -> None:
    own_trace(tmp_path / "rank0.trace.json", 0, f"{{{event}}}", base="1" + "0" * 400)
    own_trace(tmp_path / "rank1.trace.json", 1)
    found = runs.read(tmp_path)
    assert [r.seconds for r in found.ranks] == [pytest.approx(2.0)] * 2
    assert [r.began for r in found.ranks] == [1.0, 1.0]
    (note,) = [n for n in found.notes if "unreadable" in n]
    assert "rank0.trace.json: 1 unreadable event left out, the first at byte" in note


def test_a_directory_without_a_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == UsageError.exit_code
    assert "NOSTALL_TRACE" in capsys.readouterr().err


def test_profile_runs_a_command_and_reports(
    image_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Training, and after each epoch validation: two loaders, the second of them iterated twice.
    code = (
        "import sys, nostall\n"
        "data = nostall.ImageFolder(sys.argv[1], index=False)\n"
        "train = nostall.DataLoader(data, 4, epochs=2, tiers=[], output='numpy')\n"
        "val = nostall.DataLoader(data, 8, shuffle=False, tiers=[], output='numpy')\n"
        "for epoch in train.epochs():\n"
        "  for _ in epoch: pass\n"
        "  for _ in val: pass\n"
        "sys.exit(7)\n"
    )
    command = ["profile", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", code]
    assert main([*command, str(image_folder)]) == 7
    said = capfd.readouterr().out
    assert "This run waited" in said
    assert said.endswith(f"\nwritten to {tmp_path / 'run' / 'report.html'}\n")
    # A loader that nobody closed leaves its statistics as well.
    kept = json.loads((tmp_path / "run" / "rank0.0.run.json").read_text())
    assert kept["stats"]["epochs"][0]["samples"] == kept["samples"]
    python = Path(sys.executable).name
    assert kept["command"] == f"{python} -c ... {shlex.quote(str(image_folder))}"
    found = runs.read(tmp_path / "run")
    assert [[x.stats.loader for x in g] for g in found.loaders()] == [["loader 0"], ["loader 1"]]
    assert [len(x.stats.epochs) for (x,) in found.loaders()] == [2, 2]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Samples and origins over time: loader 0" in page
    assert "Samples and origins over time: loader 1" in page
    # One of its files is not what `nostall report` takes.
    assert main(["report", str(tmp_path / "run" / "rank0.0.run.json")]) == UsageError.exit_code
    assert "give the run's directory" in capfd.readouterr().err
    assert main([*command, str(image_folder)]) == UsageError.exit_code
    assert "holds a run already" in capfd.readouterr().err
    assert main(["profile"]) == UsageError.exit_code
    nothing = ["profile", "-o", str(tmp_path / "none"), "--", sys.executable, "-c", "pass"]
    assert main(nothing) == 0
    assert "used no loader of nostall: nothing recorded" in capfd.readouterr().err
    nothing[-1] = "import os; os.kill(os.getpid(), 9)"
    assert main(nothing) == 128 + signal.SIGKILL
    assert "ended with status 137, and left no record of a loader" in capfd.readouterr().err
    (tmp_path / "file").touch()
    nothing[2] = str(tmp_path / "file" / "run")
    assert main([*nothing[:-1], code, str(image_folder)]) == 7
    assert f"nostall: {nothing[2]} cannot be written" in capfd.readouterr().err
    assert subprocess.run([sys.executable, "-m", "nostall", "profile", "--help"]).returncode == 0


def test_a_launcher_passes_the_directory_on_to_other_hosts(tmp_path: Path) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(
        "#!/bin/sh\n[ \"$*\" != --version ] || { echo 'mpirun (Open MPI) 5.0.11'; exit; }\n"
        f'echo "$*" > {tmp_path}/called\n'
    )
    launcher.chmod(0o755)
    home = tmp_path / "run"
    assert main(["profile", "-o", str(home), "--", str(launcher), "-n", "2", "./program"]) == 0
    called = (tmp_path / "called").read_text()
    assert called == f"-x NOSTALL_TRACE={home} -n 2 ./program\n"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_a_signal_ends_the_profiled_command_and_its_report_is_written(
    number: signal.Signals, image_folder: Path, tmp_path: Path
) -> None:
    # What it does after the signal has no limit: it waits for a line.
    code = (
        "import os, signal, sys, time, nostall\n"
        "def end(number, _):\n"
        "  os.write(1, b'ends\\n')\n"  # print() may be under way"
        "  sys.stdin.readline()\n"
        "  sys.exit(7)\n"
        "for name in ('INT', 'TERM', 'HUP', 'USR1', 'USR2'):\n"
        "  signal.signal(signal.Signals['SIG' + name], end)\n"
        "data = nostall.ImageFolder(sys.argv[1], index=False)\n"
        "with nostall.DataLoader(data, 4, tiers=[], output='numpy') as loader:\n"
        "  for _ in loader: pass\n"
        "  print('trained', flush=True)\n"
        "  parent = os.getppid()\n"
        "  while os.getppid() == parent: time.sleep(0.01)\n"  # a longer wait may miss a signal
    )
    words = ["profile", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", code]
    profile = subprocess.Popen(
        [sys.executable, "-m", "nostall", *words, str(image_folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert profile.stdin and profile.stdout
    try:
        assert profile.stdout.readline() == "trained\n"
        # As a terminal sends it, to the group of processes, and as `kill` does, to one.
        (os.killpg if number == signal.SIGINT else os.kill)(profile.pid, number)
        assert profile.stdout.readline() == "ends\n"
        said, _ = profile.communicate("go\n", timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(profile.pid, signal.SIGKILL)
        profile.wait()
    assert profile.returncode == 7
    assert "This run waited" in said
    assert (tmp_path / "run" / "report.html").exists()
