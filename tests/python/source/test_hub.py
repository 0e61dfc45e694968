"""hf://: files of data sets on the Hugging Face Hub, here a server that answers as the Hub does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nostall
from nostall.errors import IoError, UsageError

TOKEN, COMMIT = "hf_secret", "c0ffee"


class Hub(BaseHTTPRequestHandler):
    root: Path
    asked: list[tuple[str, str]]
    busy: list[dict[str, str]]  # the headers of refusals that come first

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.asked.append((self.command, self.path))
        resolved = f"/datasets/me/set/resolve/{COMMIT}/"
        if self.busy:
            self.answer(b"", 429, **self.busy.pop(0))
        elif path.startswith("/cdn/"):
            self.file(self.root / path.removeprefix("/cdn/"))
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(b"", 401)
        elif path == "/api/datasets/me/set/revision/main":
            self.answer(json.dumps({"sha": COMMIT}).encode())
        elif path.startswith(f"/api/datasets/me/set/tree/{COMMIT}/data"):
            self.tree("cursor" in query)
        elif path.startswith(resolved) and (self.root / path.removeprefix(resolved)).is_file():
            self.answer(b"", 302, Location=f"/cdn/{path.removeprefix(resolved)}")
        else:
            self.answer(b"", 404)

    do_HEAD = do_GET

    def tree(self, rest: bool) -> None:
        """Two pages."""
        entries = [{"type": "directory", "path": "data", "size": 0, "oid": "0"}]
        for file in sorted((self.root / "data").iterdir()):
            size = file.stat().st_size
            entries.append({"type": "file", "path": f"data/{file.name}", "size": size, "oid": "1"})
        more = (
            {}
            if rest
            else {"Link": f'<http://{self.headers["Host"]}{self.path}&cursor=x>; rel="next"'}
        )
        self.answer(json.dumps(entries[2:] if rest else entries[:2]).encode(), **more)

    def file(self, file: Path) -> None:
        data = file.read_bytes()
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        common = {"ETag": '"tag"', "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        begin, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(data))
        said = {"Content_Range": f"bytes {begin}-{end - 1}/{len(data)}"} if asked else {}
        self.answer(data[begin:end], 206 if asked else 200, **said, **common)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.root, Hub.asked, Hub.busy = tmp_path / "hub", [], []
    (Hub.root / "data").mkdir(parents=True)
    for i in range(2):
        table = pa.table({"x": np.arange(10) + 10 * i, "text": [f"t{i}{k}" for k in range(10)]})
        pq.write_table(table, Hub.root / "data" / f"train-{i}.parquet")
    (Hub.root / "data" / "other.txt").write_text("no table")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield Hub
    finally:
        server.shutdown()
        server.server_close()


def rows(data: Any) -> list[tuple[int, str]]:
    with nostall.DataLoader(data, 20, shuffle=False, tiers=[], output="numpy") as loader:
        (batch,) = loader
    return list(zip(batch["x"].tolist(), batch["text"], strict=True))


def test_files_of_the_hub_are_read_as_those_of_a_folder(hub: type[Hub]) -> None:
    columns = ["x", "text"]
    local = nostall.Parquet(sorted((hub.root / "data").glob("*.parquet")), columns=columns)
    wanted = rows(local)
    assert [x for x, _ in wanted] == list(range(20))
    found = nostall.Parquet("hf://datasets/me/set/data/train-*.parquet", columns=columns)
    assert rows(found) == wanted
    one = nostall.Parquet(["hf://datasets/me/set@main/data/train-1.parquet"], columns=columns)
    assert rows(one) == wanted[10:]
    assert not any(path.startswith("/cdn") and "txt" in path for _, path in hub.asked)


def test_all_files_of_a_repository_are_of_one_split(hub: type[Hub]) -> None:
    assert len(nostall.Parquet("hf://datasets/me/set/data", columns=["x"])) == 20
    (hub.root / "data" / "train-1.parquet").rename(hub.root / "data" / "test-0.parquet")
    with pytest.raises(
        UsageError, match=r"me/set/data has files of several splits, train and test"
    ):
        nostall.Parquet("hf://datasets/me/set/data", columns=["x"])


def test_what_is_not_there_or_not_ours_is_said(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IoError, match=r"hf://datasets/me/none.*does not exist on the Hub"):
        nostall.Parquet("hf://datasets/me/none/data/*.parquet")
    with pytest.raises(IoError, match=r"gone\.parquet"):
        nostall.Parquet(["hf://datasets/me/set/data/gone.parquet"])
    with pytest.raises(UsageError, match="write hf://datasets/OWNER/NAME/path"):
        nostall.Parquet("hf://datasets/me")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(IoError, match=r"access was denied \(status 401\).*HF_TOKEN"):
        nostall.Parquet("hf://datasets/me/set@dev/data/*.parquet")


def test_a_busy_hub_is_asked_again_after_a_pause(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    # Its own clock: other threads of this process may pause, too.
    monkeypatch.setattr("nostall.source._hub.time", SimpleNamespace(sleep=pauses.append))
    hub.busy = [{}, {"Retry_After": "7"}, {}]
    nostall.Parquet("hf://datasets/me/set/data/train-*.parquet", columns=["x", "text"])
    assert pauses == [0.5, 7.0, 2.0]
