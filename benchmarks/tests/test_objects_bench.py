"""``nostall bench objects``: the emulated store answers as S3 does; each object is read once."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import nostall
from nostall.errors import UsageError
from nostall_bench import object_store, objects, peers
from nostall_bench.object_store import CREDENTIALS, ObjectStore

obstore = pytest.importorskip("obstore")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/1.jpg", "a/2.jpg", "b/3.jpg", "empty.jpg", "odd &<name>.txt"):
        path = tmp_path / "bucket" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name == "empty.jpg" else name.encode() * 30_000)
    return tmp_path / "bucket"


@pytest.fixture
def store(folder: Path) -> Iterator[ObjectStore]:
    with ObjectStore({"data": folder}, latency=0.001) as started:
        yield started


def client(store: ObjectStore) -> object:
    return obstore.store.S3Store(
        "data",
        config={
            "endpoint": store.endpoint,
            "access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
            "secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            "region": CREDENTIALS["AWS_DEFAULT_REGION"],
        },
        client_options={"allow_http": True},
    )


def test_objects_are_listed_and_read(store: ObjectStore, folder: Path) -> None:
    s3 = client(store)
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    found = {m["path"]: m["size"] for page in obstore.list(s3) for m in page}
    assert found == {name: path.stat().st_size for name, path in files.items()}
    assert [m["path"] for page in obstore.list(s3, prefix="a") for m in page] == [
        "a/1.jpg",
        "a/2.jpg",
    ]
    assert set(obstore.list_with_delimiter(s3)["common_prefixes"]) == {"a", "b"}
    for name, path in files.items():
        assert bytes(obstore.get(s3, name).bytes()) == path.read_bytes()
    part = obstore.get(s3, "b/3.jpg", options={"range": (70_001, 150_003)}).bytes()
    assert bytes(part) == files["b/3.jpg"].read_bytes()[70_001:150_003]
    tag = obstore.head(s3, "a/1.jpg")["e_tag"]
    assert obstore.get(s3, "a/1.jpg", options={"if_match": tag}).bytes()
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(s3, "a/2.jpg", options={"if_match": tag})
    with pytest.raises(FileNotFoundError):
        obstore.head(s3, "a/none.jpg")


def test_more_objects_than_a_page_has_are_listed(tmp_path: Path) -> None:
    for number in range(1203):
        (tmp_path / f"{number:04d}").touch()
    with ObjectStore({"data": tmp_path}, latency=0) as store:
        listed = [m["path"] for page in obstore.list(client(store)) for m in page]
        assert listed == sorted(p.name for p in tmp_path.iterdir())
        assert store.counts().requests == 2


def test_latency_and_bandwidth_are_at_least_what_was_stated(folder: Path) -> None:
    size = len("b/3.jpg") * 30_000
    with ObjectStore({"data": folder}, latency=0.05, connection=1e6) as store:
        began = time.perf_counter()
        with urllib.request.urlopen(f"{store.endpoint}/data/b/3.jpg") as answer:
            assert time.perf_counter() - began >= 0.05
            assert len(answer.read()) == size
        assert time.perf_counter() - began >= 0.05 + size / 1e6
        counted = store.counts()
        assert (counted.requests, counted.bytes, counted.peak) == (1, size, 1)
        assert counted.flight_seconds >= 0.05 + size / 1e6
        assert counted.latency_seconds >= 0.05


def test_what_is_not_served_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    for method, path, status in (("PUT", "data/new", 405), ("GET", "other/key", 404)):
        request = urllib.request.Request(f"{store.endpoint}/{path}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == status
    with pytest.raises(UsageError, match="is not a directory"):
        ObjectStore({"data": tmp_path / "none"})
    with pytest.raises(UsageError, match="negative"):
        ObjectStore({"data": tmp_path}, latency=-1)


def test_a_store_that_does_not_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(object_store.sys, "executable", str(silent))
    monkeypatch.setattr(object_store, "_START_SECONDS", 0.2)
    store = ObjectStore({"data": tmp_path})
    with pytest.raises(UsageError, match=r"it says nothing for 0\.2 s"):
        store.__enter__()
    assert store._process is None


def test_runs_that_failed_are_counted_beside_those_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, calls = objects._plain, []

    def sometimes(store: ObjectStore, paths: list[str]) -> dict[str, object]:
        calls.append(paths)
        if len(calls) == 2:
            raise UsageError("it was full")
        return plain(store, paths)

    monkeypatch.setattr(objects, "_plain", sometimes)
    parser = argparse.ArgumentParser()
    objects.add_arguments(parser)
    out = tmp_path / "objects.json"
    words = f"--dir {tmp_path} --files 8 --repeats 3 --json {out} --latency-ms 1 --loaders"
    assert objects.run(parser.parse_args([*words.split(), objects.UNLIMITED])) == 0
    (found,) = json.loads(out.read_text())["latencies"].values()
    row = found["rows"][objects.UNLIMITED]
    assert len(row["runs"]) == 2 and row["failed"] == ["it was full"]
    assert "1 of 3 failed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.multi
def test_a_first_epoch_reads_every_object_once_and_later_ones_none(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    objects.add_arguments(parser)
    out = tmp_path / "objects.json"
    words = f"--dir {tmp_path} --files 40 --threads 1 --repeats 1 --json {out} --latency-ms 1 20"
    options = [*words.split(), "--loaders", "nostall, an object", "plain"]
    assert objects.run(parser.parse_args(options)) == 0
    result = json.loads(out.read_text())
    size = result["dataset"]["bytes"]
    assert [*result["latencies"]] == ["1", "20"]
    for latency, found in result["latencies"].items():
        assert not any("failed" in row for row in found["rows"].values())
        (run,) = found["rows"]["nostall, an object a sample"]["runs"]
        first, *later = run["epochs"]
        assert [e["samples"] for e in run["epochs"]] == [40, 40, 40]
        assert first["bytes"] >= size
        assert first["requests"] == 40 + 1  # and the listing
        assert all(e["requests"] == e["bytes"] == 0 for e in later)
        assert first["latency_s"] >= float(latency) / 1e3
        (plain,) = found["rows"][objects.PLAIN]["runs"]
        assert plain["epochs"][0]["requests"] == 40


def test_little_of_a_second_epoch_is_staged_when_its_clock_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = []

    def loader(*_: object, staging: int, **__: object) -> object:
        staged.append(staging)
        return contextlib.nullcontext(SimpleNamespace(epochs=lambda: iter(())))

    monkeypatch.setattr(nostall, "DataLoader", loader)
    monkeypatch.setattr(nostall, "ObjectFolder", lambda *_: None)
    (tmp_path / "class").mkdir()
    for number in range(20):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(bytes(1000))
    name = "nostall, an object a sample"
    job = peers.Job(tmp_path, tmp_path, "read", 3, batch_size=4, remote="s3://b", variant="objects")
    assert list(peers.module(name).epochs(job)) == []
    assert staged == [2 * 4 * 1000]


def test_later_epochs_are_one_mean() -> None:
    epoch = {"samples": 10, "requests": 2, "bytes": 0, "in_flight": 1, "peak": 1}
    epoch |= {"latency_s": 0.0, "cpu_seconds": 1.0}
    run = objects._run([{**epoch, "seconds": s} for s in (9.0, 0.5, 1.5)])
    found = objects.table("", {"nostall": {"runs": [run]}}, 1000, 1)
    cells = {column.header: [*column.cells] for column in found.columns}
    assert cells["later epochs"] == ["10"]


@pytest.mark.parametrize("requests", [pytest.param("auto", marks=pytest.mark.long), "5"])
def test_requests_in_flight_follow_from_measurement_or_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: str
) -> None:
    """By the store's own count. It answers so late that no machine is too slow to ask for more; the
    loader may try that several times.
    """
    for number in range(2000):
        path = tmp_path / "images" / f"{number % 4}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * 50)
    samples, latency = (2000, 1.0) if requests == "auto" else (60, 0.2)
    taken = peak = 0
    with ObjectStore({"images": tmp_path / "images"}, latency=latency) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NOSTALL_OBJECT_REQUESTS", requests)
        source = nostall.Subset(nostall.ObjectFolder("s3://images"), range(samples))
        store.counts()
        with nostall.DataLoader(source, batch_size=16, epochs=1, rank=0, world_size=1) as loader:
            for _, labels in loader:
                taken += len(labels)
                peak = max(peak, store.counts().peak)
                if peak > 48:  # more than one step
                    break
    assert (peak, taken) == (5, samples) if requests == "5" else peak > 48
