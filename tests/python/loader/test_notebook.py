"""What a notebook shows of data sets, loaders and statistics."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np

import nostall


class Cells(HTMLParser):
    """The rows of all tables, by their first cells; elements must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: dict[str, list[str]] = {}
        self.captions: list[str] = []
        self._open: list[str] = []
        self._row: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "br":
            self._row[-1] += "\n"
            return
        self._open.append(tag)
        if tag == "tr":
            self._row = []
        elif tag in ("td", "th"):
            self._row.append("")
        else:
            assert tag in ("table", "caption", "thead", "tbody", "p"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "tr":
            self.rows[self._row[0]] = self._row[1:]

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "caption":
            self.captions.append(data)
        elif self._open[-1] in ("td", "th"):
            self._row[-1] += data


def test_a_notebook_shows_data_sets_loaders_and_statistics(tmp_path: Path) -> None:
    for name in ("<b>", *map(str, range(11))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_bytes(b"no picture" * 100)
    folder = nostall.ImageFolder(tmp_path, index=False)
    shown = Cells(folder._repr_html_())
    assert shown.captions == [repr(folder)]
    assert shown.rows["samples"] == ["12, 12.0 kB"]
    assert shown.rows["classes"] == [f"12: {', '.join(folder.classes[:10])}, ..."]
    assert shown.rows["label"] == [repr(folder.schema["label"])]
    # Sources whose fields are their own, and views of sources.
    arrays = nostall.Arrays({"x": np.zeros((5, 3), np.float32), "y": np.arange(5)})
    for source in (arrays, nostall.Subset(arrays, [0, 3]), nostall.Concat([arrays, arrays])):
        shown = Cells(source._repr_html_())
        assert shown.rows["samples"][0].startswith(f"{len(source)}, ")
        assert shown.rows.keys() == {"samples", "x", "y"}
    with nostall.Cached([7, 8]) as items:
        assert Cells(items._repr_html_()).rows.keys() == {"samples"}
    with nostall.DataLoader(
        arrays, 2, epochs=3, seed=7, tiers=["ram:1MiB", f"{tmp_path}:1MiB"], output="numpy"
    ) as loader:
        next(iter(loader))
        shown = Cells(loader._repr_html_())
        assert shown.captions == ["DataLoader", repr(arrays)]
        assert shown.rows["batches"] == ["3 an epoch, of 2 samples"]
        assert shown.rows["job"] == ["3 epochs, seed 7"]
        assert shown.rows["position"] == ["epoch 0, batch 1"]
        assert shown.rows["rank"] == ["rank 0 of 1"]
        assert shown.rows["tiers"] == [f"ram:1MiB\n{tmp_path}:1MiB"]
        shown = Cells(loader.stats()._repr_html_())
    assert shown.captions == ["rank 0 of 1"]
    assert shown.rows["epoch"][3] == "samples" and shown.rows["0"][3] == "2"
    endless = nostall.DataLoader(arrays, 2, tiers=[], output="numpy", epochs=None)
    assert Cells(endless._repr_html_()).rows["job"][0].startswith("epochs without an end, seed ")
