"""The report: one page, complete in itself, with the numbers of the statistics in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import nostall
from nostall.cli import main
from nostall.report import chart, group, render
from nostall.stats import Stats, merge


def measured(folder: Path, rank: int, job: str) -> Stats:
    with nostall.DataLoader(
        nostall.ImageFolder(folder),
        4,
        epochs=3,
        seed=2,
        tiers=["ram:1MiB"],
        output="numpy",
        rank=rank,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        job=job,
    ) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                pass
        return loader.stats()


@pytest.fixture(scope="module")
def ranks(image_folder: Path) -> list[Stats]:
    return [measured(image_folder, rank, f"report-{rank}") for rank in range(2)]


class Outline(HTMLParser):
    """Fails on tags that do not close, and collects what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "data")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_complete_in_itself(ranks: list[Stats]) -> None:
    page = render(group([("a/r0.json", ranks[0]), ("a/r1.json", ranks[1])]), title="<mine>")
    outline = Outline()
    outline.feed(re.sub(r"<path([^>]*)/>", r"<path\1></path>", page))
    assert outline.open == []
    assert outline.loads == []
    assert "script" not in outline.seen
    assert "http" not in page and "<mine>" not in page
    total = merge(ranks)
    assert outline.seen.count("section") == 1
    # A row per epoch with its samples, two charts per rank, bytes and memory.
    assert page.count(f"<td>{total.epochs[0].samples}</td>") >= 3
    assert outline.seen.count("svg") == 2 * 2 + 2
    assert f"{total.excess:.3f}" in page


def test_ranks_are_grouped_by_job(ranks: list[Stats]) -> None:
    first, second = ranks
    runs = group([("a/1", second), ("a/0", first), ("b/0", first), ("a/2", first)])
    assert [[s.rank for s in run.ranks] for run in runs] == [[0, 1], [0], [0]]


def test_a_page_of_some_ranks_compares_nothing(ranks: list[Stats]) -> None:
    page = render(group([("r0", ranks[0])]))
    assert "1 of 2 ranks" in page
    assert "times the lower bound" not in page
    assert "cannot be compared" in page


def test_columns_are_drawn_to_scale() -> None:
    axis = chart.Axis.over(np.array([0.0, 1.0, 2.0, 10.0]))
    assert axis.columns == 4
    assert axis.column(np.array([0.0, 2.5, 9.9, 10.0])).tolist() == [0, 1, 3, 3]
    low, high = np.array([1.0, 0, 0, 2]), np.array([3.0, 0, 0, 0])
    svg = chart.columns(
        axis, [("a", "ram", low), ("b", "file", high)], marks=[], unit="u", title="t"
    )
    # 190 pixels less the margins are 146; the highest tick is 4, which the two series reach.
    heights = {
        css: [float(v) for v in re.findall(r"h[\d.]+v([\d.]+)", d)]
        for css, d in re.findall(r'class="(ram|file)" d="([^"]+)"', svg)
    }
    assert heights == {"ram": [36.5, 73.0], "file": [109.5]}


def test_the_command_writes_the_page(
    ranks: list[Stats], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"r{s.rank}.json" for s in ranks]
    for stats, file in zip(ranks, files, strict=True):
        stats.save(file)
    out = tmp_path / "out.html"
    assert main(["report", *map(str, files), "-o", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert str(out) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "status"),
    [("not json", 5), ("[]", 5), (json.dumps({"format": 99}), 5), ('{"format": 1}', 5), (None, 3)],
)
def test_a_file_that_is_no_statistics_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, status: int
) -> None:
    file = tmp_path / "r0.json"
    if content is not None:
        file.write_text(content)
    assert main(["report", str(file), "-o", str(tmp_path / "x.html")]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not (tmp_path / "x.html").exists()
