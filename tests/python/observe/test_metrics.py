"""Numbers of running loaders: Prometheus, ``nostall top``."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prefork
import pytest

import nostall
from nostall import metrics, trace
from nostall.cli import _top as top
from nostall.cli import main
from nostall.errors import IoError, UsageError
from nostall.observe import _recorder


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    metrics.close()
    trace.stop()


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    assert any("ram_tier and file_tier are the node's" in line for line in lines)
    rows = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r'nostall_\w+\{(\w+="[^"]*",?)+\} [0-9.e+-]+', r) for r in rows)
    return {r.rpartition(" ")[0]: float(r.rpartition(" ")[2]) for r in rows}


@pytest.mark.parametrize("port", [99999, -1, "9464", True, 9464.0, None])
def test_a_port_is_a_whole_number(port: Any) -> None:
    with pytest.raises(UsageError, match=f"port must be a whole number from 0 .*, not {port!r}"):
        metrics.serve(port)


@pytest.mark.parametrize("loader", [5, None, nostall.DataLoader])
def test_an_interval_is_of_a_loader(loader: Any) -> None:
    with pytest.raises(UsageError, match=r"Interval takes a nostall\.DataLoader, not "):
        metrics.Interval(loader)


def test_what_follows_the_last_batch_of_an_open_iterator_is_not_of_its_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(
        _recorder, "time", SimpleNamespace(perf_counter=lambda: now, time=time.time)
    )
    data = nostall.Arrays({"x": np.arange(12)})
    with nostall.DataLoader(data, 4, epochs=4, tiers=[]) as loader:
        batches = iter(loader)
        for seconds in (2.0, 3.0, 1.0):
            next(batches)
            now += seconds
        assert loader.stats().seconds == 6.0  # its last step is under way
        now += 100.0  # a validation, of a trainer that knows the length
        assert loader.stats().seconds == 8.0  # a step is taken to last as long as the longest
        for i, _ in enumerate(loader):
            now += 10.0 if i == 2 else 1.0
        assert [e.seconds for e in loader.stats().epochs] == [8.0, 12.0]  # that end was seen
        for _ in loader:
            now += 5.0
            break
        now += 50.0
        assert loader.stats().epochs[-1].seconds == 5.0  # the iterator is gone
        batches = iter(loader)
        next(batches)
        now += 50.0
        assert loader.stats().epochs[-1].seconds == 50.0  # two batches are left: it may be a step
    with nostall.DataLoader(data, 12, tiers=[]) as loader:
        batches = iter(loader)
        next(batches)
        now += 2.0
        assert loader.stats().seconds == 2.0  # of one batch no step is known
    with nostall.DataLoader(data, 4, tiers=[]) as loader:
        for _ in loader:
            now += 2.0
        loader.load_state_dict({**loader.state_dict(), "epoch": 1, "batch": 2})
        batches = iter(loader)
        next(batches)
        now += 9.0
        assert loader.stats().epochs[-1].seconds == 2.0  # steps of the epoch before are


def test_prometheus_sees_a_loader_while_it_runs(image_folder: Path) -> None:
    port = metrics.serve(0)
    with pytest.raises(UsageError, match="served already"):
        metrics.serve(0)
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False), 4, epochs=2, tiers=["ram:64MiB"]
    ) as loader:
        labels = f'rank="0",loader="{loader.name}"'
        for number, _ in enumerate(loader):
            if number == 2:
                rows = scrape(port)
                assert rows[f"nostall_batches_total{{{labels}}}"] == 3
        for _ in loader:
            pass
        rows = scrape(port)
        stats = loader.stats()
    assert rows[f"nostall_batches_total{{{labels}}}"] == sum(e.batches for e in stats.epochs)
    for origin in ("ram", "source"):
        key = f'nostall_samples_total{{{labels},origin="{origin}"}}'
        assert rows[key] == sum(e.origins[origin].samples for e in stats.epochs)
    stalled = rows[f"nostall_stall_seconds_total{{{labels}}}"]
    assert stalled == pytest.approx(stats.stall_seconds)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/")


def test_nothing_listens_unless_asked(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def one() -> None:
        with nostall.DataLoader(
            nostall.ImageFolder(image_folder, index=False), 4, tiers=[], output="numpy"
        ) as loader:
            next(iter(loader))

    one()
    assert metrics._server is None
    monkeypatch.setenv("NOSTALL_METRICS_PORT", "no port")
    for _ in range(2):
        one()
    assert metrics._server is None
    (said,) = [r.message for r in caplog.records if "must be a port" in r.message]
    assert "training goes on without metrics" in said
    metrics.close()
    monkeypatch.setenv("NOSTALL_METRICS_PORT", "0")
    one()
    assert metrics._server is not None
    taken = metrics._server.server_port
    assert metrics._server.server_address[0] == "127.0.0.1"
    server, metrics._server = metrics._server, None
    try:
        with pytest.raises(IoError, match=f"port {taken}"):
            metrics.serve(taken)
        # Another job of the node has the port: this one trains.
        caplog.clear()
        monkeypatch.setenv("NOSTALL_METRICS_PORT", str(taken))
        for _ in range(2):
            one()
        assert [f"port {taken}" in r.message for r in caplog.records] == [True]
    finally:
        metrics._server = server


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def closed(connection: socket.socket) -> bool:
    """Whether the server closes it; waits for that."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_a_scraper_may_add_to_the_address_and_ask_for_the_head_alone() -> None:
    address = f"http://127.0.0.1:{metrics.serve(0)}"
    with urllib.request.urlopen(f"{address}/metrics?format=prometheus") as answer:
        body = answer.read()
        assert body.startswith(b"# HELP nostall_batches_total")
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/metrics", method="HEAD")
    ) as head:
        assert head.status == 200 and head.headers["Content-Length"] == str(len(body))
        assert head.read() == b""
    with pytest.raises(urllib.error.HTTPError, match="there is only /metrics"):
        urllib.request.urlopen(f"{address}/metric?s")


def test_a_silent_client_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_CLIENT_SECONDS", 0.05)
    port = metrics.serve(0)
    with connect(port) as silent, connect(port) as half:
        half.sendall(b"GET /met")
        assert closed(silent) and closed(half)


def test_connections_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_CLIENT_SECONDS", 600.0)
    monkeypatch.setattr(metrics, "_CONNECTIONS", 2)
    port = metrics.serve(0)
    with connect(port) as first, connect(port), connect(port) as third:
        assert closed(third)
        first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with first.makefile("rb") as answer:
            assert b"200 OK" in answer.readline()
            answer.read()
        # Its place is free a moment after its end.
        scraped, deadline = False, time.monotonic() + 60
        while not scraped and time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                scrape(port)
                scraped = True
        assert scraped


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionResetError(), []),
        (ValueError("no text"), ["cannot answer for metrics: ValueError('no text')"]),
    ],
)
def test_a_request_that_fails_is_no_traceback_of_the_training(
    error: Exception,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> str:
        raise error

    monkeypatch.setattr(metrics, "text", fails)
    with connect(metrics.serve(0)) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert closed(client)
    assert "Traceback" not in capsys.readouterr().err
    assert caplog.messages == told


def test_a_process_without_descriptors_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.serve(0)
    server = metrics._server
    assert server is not None
    paused: list[float] = []
    # Not the module's own: threads of other tests may sleep.
    monkeypatch.setattr(metrics, "time", SimpleNamespace(sleep=paused.append))

    class Exhausted:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(server, "socket", Exhausted())
    with pytest.raises(OSError, match="Too many open files"):
        server.get_request()
    assert paused == [metrics._PAUSE_SECONDS]
    monkeypatch.undo()


def test_a_loader_that_begins_amid_a_scrape_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Begins:
        name = "loader"

    class Scraped(weakref.WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                assert not metrics._lock.acquire(blocking=False)
                yield one

    one, other = Begins(), Begins()
    loaders = Scraped([one])
    monkeypatch.setattr(metrics, "_loaders", loaders)
    with pytest.raises(AttributeError):  # it has no numbers
        metrics.text()
    metrics.add(other)  # type: ignore[arg-type]
    assert len(loaders) == 2


def test_a_forked_child_serves_its_own(image_folder: Path) -> None:
    port = metrics.serve(0)
    assert metrics._server is not None
    listening = metrics._server.fileno()
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False), 4, tiers=[], output="numpy"
    ) as loader:
        next(iter(loader))
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                signal.alarm(30)  # it must not wait for a thread of its parent
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(listening)
                metrics.close()
                assert scrape(metrics.serve(0)) == {}
                metrics.close()
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert scrape(port)
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        connect(port)


def test_loaders_that_begin_at_once_start_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Begins:
        world = SimpleNamespace(local_rank=0)

    held: list[bool] = []
    server_type = metrics._server_type

    def noted() -> Any:
        held.append(metrics._lock.locked())
        return server_type()

    monkeypatch.setenv("NOSTALL_METRICS_PORT", "0")
    monkeypatch.setattr(metrics, "_server_type", noted)
    monkeypatch.setattr(metrics, "_loaders", weakref.WeakSet())
    metrics.add(Begins())  # type: ignore[arg-type]
    assert held == [True]


def test_numbers_are_those_of_statistics() -> None:
    with pytest.raises(UsageError, match=r"give the loader's stats\(\), not list"):
        metrics.scalars([])  # type: ignore[arg-type]


def test_top_asks_a_job_that_is_not_recorded(
    image_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(top, "_ANSWER_SECONDS", 60.0)
    port = metrics.serve(0, "127.0.0.2")
    address = f"127.0.0.2:{port}"
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False), 4, tiers=[], output="numpy"
    ) as loader:
        batches = iter(loader)
        next(batches)
        before = top.scrape([address])
        next(batches)
        assert main(["top", address, "--once"]) == 0
        now = top.scrape([address])
        samples = [look[f"{address} {loader.name}"]["samples"] for look in (before, now)]
        assert samples == [4, 8]
        origins = now[f"{address} {loader.name}"]["origins"]
        assert origins == {"ram": 0, "file": 0, "peer": 0, "source": 8}
    shown = capsys.readouterr().out
    assert "1 loader, since the start" in shown
    assert {"samples/s", "source", "100%"} <= set(shown.split())
    assert main(["top", address, "--once", "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    # No batch was asked for meanwhile.
    assert "1 loader, of the last 0.1 s" in shown and "100%" not in shown.split()
    metrics.close()
    assert main(["top", address, "--once"]) == IoError.exit_code
    said = capsys.readouterr().err
    assert f"metrics at {address} (Connection refused): start" in said
    assert "NOSTALL_METRICS_PORT" in said
    assert top.scrape([address], refuse=False) == {}


def test_top_shows_what_a_recorded_run_does(
    image_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace.start(tmp_path, rank=0)
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False), 4, tiers=[], output="numpy"
    ) as loader:
        next(iter(loader))
        (path,) = tmp_path.glob("*.live.json")
        said = json.loads(path.read_text())
        assert (said["rank"], said["epoch"], said["batch"], said["samples"]) == (0, 0, 0, 4)
        name = loader.name
    (tmp_path / "rank1.0.live.json").write_text("{")
    assert main(["top", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "1 loader" in shown and "1 loaders" not in shown
    # Not cut where a terminal has 80 columns.
    assert {"samples/s", "source", "ready", "ago"} <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    now = top.read(tmp_path)
    # Two looks: the rate is that between them.
    old = {k: {**v, "time": v["time"] - 1, "samples": 0, "seconds": v["seconds"] - 2,
               "stall_seconds": v["stall_seconds"] - 1, "origins": dict.fromkeys(v["origins"], 0)}
           for k, v in now.items()}  # fmt: skip
    live = {k: {name: x for name, x in v.items() if name != "ended"} for k, v in now.items()}
    cells = [list(c.cells) for c in top.table(live, old, 1.0).columns]
    assert [str(c[0]) for c in cells][:6] == [
        "0",
        name.removeprefix("loader "),
        "0",
        "0",
        "2",
        "50%",
    ]
    # A record that is not written anew keeps its rate, and what has one record has none.
    assert top.before(live, old, {}) == old
    assert top.before(live, live, old) == old
    assert top.before(live, {}, old) == {}
    for older in ({}, live):
        assert list(top.table(live, older, 1.0).columns[4].cells) == [""]
    # The loader is closed, which its record says: its rate is that of all its time.
    rates = [list(top.table(now, older, 1.0).columns[4].cells) for older in (old, None)]
    assert rates[0] == rates[1] != [""]
    (ended,) = (one["ended"] for one in now.values())
    assert ended >= said["time"]
    assert "ended" in shown.split()
    # It ended today, or just before midnight.
    told_at = [time.strftime(form, time.localtime(ended)).split() for form in ("%H:%M", "%d %b")]
    assert any(set(words) <= set(shown.split()) for words in told_at)
    long_ago = {k: {**v, "ended": ended - 2 * 86400} for k, v in now.items()}
    told = list(top.table(long_ago, None, 1.0).columns[-1].cells)
    assert told == [time.strftime("ended\n%d %b", time.localtime(ended - 2 * 86400))]
    assert main(["top", str(tmp_path / "none"), "--once"]) == UsageError.exit_code
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert main(["top", str(tmp_path / "empty"), "--once"]) == UsageError.exit_code
    assert "empty: no loader has told what it does" in capsys.readouterr().err
    assert main(["top", "node:99999", "--once"]) == UsageError.exit_code
    assert "node:99999: ports are numbers up to 65535" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Path("9464").mkdir()
    assert main(["top", "9464", "9465", "--once"]) == UsageError.exit_code
    assert "no directory 9465" in capsys.readouterr().err


def test_top_shows_a_run_that_ended_up_to_its_last_batch(
    image_folder: Path, tmp_path: Path
) -> None:
    trace.start(tmp_path, rank=0)
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder, index=False), 4, epochs=2, tiers=[], output="numpy"
    ) as loader:
        taken = [sum(len(labels) for _, labels in epoch) for epoch in loader.epochs()]
    trace.stop()
    (said,) = top.read(tmp_path).values()
    assert "ended" in said
    assert (said["epoch"], said["batch"]) == (1, len(loader) - 1)
    assert said["samples"] == said["origins"]["source"] == sum(taken)


LIVES = """
import sys, time
import nostall

loader = nostall.DataLoader(nostall.ImageFolder(sys.argv[1], index=False), 4, tiers=[])
next(iter(loader))
print("reads", flush=True)
time.sleep(100)
"""


def test_top_tells_a_killed_run_from_one_that_lives(image_folder: Path, tmp_path: Path) -> None:
    with prefork.Process(
        ["-c", LIVES, str(image_folder)],
        stdout=prefork.PIPE,
        env={**os.environ, "NOSTALL_TRACE": str(tmp_path)},
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "reads\n"
        (live,) = top.read(tmp_path).values()
        assert "ended" not in live
        run.kill()
        run.wait()
    (dead,) = top.read(tmp_path).values()
    assert dead["ended"] == live["time"]
    # Its number may be another process's by then; of another machine nothing is known.
    (path,) = tmp_path.glob("*.live.json")
    path.write_text(json.dumps({**live, "pid": os.getpid()}))
    assert "ended" in top.read(tmp_path)[path.name]
    elsewhere = {**live["process"], "numbers": "another boot"}
    path.write_text(json.dumps({**live, "process": elsewhere}))
    assert "ended" not in top.read(tmp_path)[path.name]
