"""Sources and checkpoints on servers of the protocols of S3, Azure and Google: `make stores-test`."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import check_source
from object_server import Answer, Request
from samples import noise
from store_servers import SCHEMES, GoogleProxy, Place, place_of
from test_checkpoint_objects import Ranks, is_whole, state_of, steps_on, store_at
from test_tar import webdataset

import nostall
from nostall import Keep
from nostall.base import _object_client as client
from nostall.checkpoint import _transfer
from nostall.checkpoint._open import open_store
from nostall.cli import main
from nostall.errors import IoError, UsageError

_numbers = itertools.count()


# A worker has a server of its own.
_SERVERS = [pytest.param(scheme, marks=pytest.mark.xdist_group(scheme)) for scheme in SCHEMES]


@pytest.fixture(scope="module", params=_SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Place]:
    with place_of(request.param) as place:
        yield place


@pytest.fixture
def place(server: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "2")
    monkeypatch.setattr(_transfer, "_CHUNK", 5 << 20)  # the least that S3 takes
    server.proxy.reset()
    yield server
    server.proxy.reset()


@pytest.fixture
def bucket(place: Place) -> str:
    """The URL of a bucket of the test's own."""
    name = f"bucket-{next(_numbers)}"
    place.make(name)
    return f"{place.scheme}://{name}"


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/runs/one"


@pytest.fixture
def make(url: str, tmp_path: Path) -> Callable[..., nostall.Checkpointer]:
    def made(fast: str = "fast", **options: Any) -> nostall.Checkpointer:
        options = {"priority": "normal", "level": "durable", **options}
        return nostall.Checkpointer(tmp_path / fast, url, **options)

    return made


def upload(bucket: str, files: Path, below: str) -> None:
    obstore, store = client.client(bucket), client.connect(bucket)
    for path in sorted(p for p in files.rglob("*") if p.is_file()):
        obstore.put(store, below + str(path.relative_to(files)), path.read_bytes())


def names(bucket: str) -> list[str]:
    """Of all objects in steps."""
    pages = client.client(bucket).list(client.connect(bucket))
    keys = [meta["path"] for page in pages for meta in page]
    return sorted(key.rpartition("/")[2] for key in keys if "/step-" in key)


# ---------------------------------------------------------------------------------------- sources


def test_tar_shards(place: Place, bucket: str, tmp_path: Path) -> None:
    contents = noise(24)
    (tmp_path / "s").mkdir()
    labels = webdataset(tmp_path / "s/a-0.tar", contents[:12])
    labels += webdataset(tmp_path / "s/a-1.tar", contents[12:], 12)
    upload(bucket, tmp_path / "s", "train/")
    source = nostall.TarShards(f"{bucket}/train")
    check_source(source, contents, labels, fork=False)
    assert place.proxy.ranges
    # What a list says of an object is what the object says of itself.
    named = [f"{bucket}/train/a-0.tar", f"{bucket}/train/a-1.tar"]
    assert nostall.TarShards(named).index_reused
    assert nostall.TarShards(named, index=False).fingerprint == source.fingerprint
    others = [bytes(len(content)) for content in contents[:12]]
    webdataset(tmp_path / "s/a-0.tar", others)
    upload(bucket, tmp_path / "s", "train/")
    with pytest.raises(IoError, match=rf"{bucket}/train/a-0\.tar.*was replaced"):
        source.read(3)
    assert nostall.TarShards(f"{bucket}/train").read(3) == others[3]


def test_a_folder_of_images(
    bucket: str, make_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = make_folder(12)
    upload(bucket, folder, "set/")
    local = nostall.ImageFolder(folder, index=False)
    source = nostall.ObjectFolder(f"{bucket}/set")
    assert source.classes == local.classes
    samples = [local.read(i) for i in range(len(local))]
    check_source(source, samples, local.labels.tolist(), fork=False)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/000.jpg").write_bytes(bytes(len(samples[0])))
    upload(bucket, tmp_path / "new", "set/class0/")
    with pytest.raises(IoError, match=rf"{bucket}/set/class0/000\.jpg.*was replaced"):
        source.read(0)
    with pytest.raises(UsageError, match="has no object that ends with"):
        nostall.ObjectFolder(f"{bucket}/none")
    with pytest.raises(IoError, match=rf"{bucket}/none\.tar does not exist"):
        nostall.TarShards([f"{bucket}/none.tar"])


# ------------------------------------------------------------------------------------ checkpoints


def test_saves_in_one_request_and_in_several(
    place: Place, bucket: str, make: Any, url: str
) -> None:
    parts: list[str] = []

    def count(request: Request, forward: Callable[[], Answer]) -> Answer:
        if place.is_part(request):
            parts.append(request.path)
        return forward()

    bits = np.random.default_rng(0).integers(0, 256, 12 << 20, np.uint8)
    with make(keep=2) as ckpt:
        for step in (1, 2):
            saved = ckpt.save(state_of(step), step)
            assert saved is not None and saved.problems == []
        place.proxy.meddle = count
        ckpt.save({"bits": bits, "step": 3}, 3)
        assert len(parts) == 3
        ckpt.wait(60)
    assert steps_on(url) == [2, 3]
    kinds = [name.partition("-")[0] for name in names(bucket)]
    assert kinds == ["manifest", "manifest", "rank", "rank"]  # no part of step 1 is left
    if isinstance(place.proxy, GoogleProxy):
        assert place.proxy.uploads == 0
    with make("other") as ckpt:
        into = {"bits": np.zeros_like(bits), "step": 0}
        assert ckpt.restore(into=into).tier == "durable"
        assert into["step"] == 3 and (into["bits"] == bits).all()
        assert is_whole(ckpt.restore(2), 2)


def test_nothing_is_written_over(url: str) -> None:
    one, other = store_at(url), store_at(url)
    key = one.key("claimed")
    won: list[int] = []

    def claim(number: int) -> None:
        if (one, other)[number % 2]._create(key, b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and one._read(key) == b"%d" % won[0]
    assert one._create(key, b"%d" % won[0])  # its answer was lost, and it asks again


def test_a_branch_and_retention(make: Any, url: str) -> None:
    with make(keep=Keep(2, every=4)) as ckpt:
        for step in range(1, 7):
            ckpt.save(state_of(step), step)
        ckpt.wait(60)
        assert steps_on(url) == [4, 5, 6]
        assert is_whole(ckpt.restore(4), 4)
    with make("elsewhere", keep=Keep(2, every=4)) as ckpt:
        assert is_whole(ckpt.restore(), 4)
        ckpt.save({"w": np.full(1000, 6.0), "step": 60}, 6)
        ckpt.wait(60)
        assert steps_on(url) == [4, 5, 6, 6]
        assert ckpt.restore(6).state["step"] == 60


def test_a_job_takes_the_store_over(make: Any, url: str) -> None:
    with make(max_failures=100) as first:
        first.save(state_of(1), 1)
        with make("two") as second:
            assert is_whole(second.restore(), 1)
            with pytest.raises(IoError, match="taken over by process"):
                first.save(state_of(2), 2)
            second.save(state_of(3), 3)
        assert steps_on(url) == [1, 3]
        assert open_store(url, "durable").other_owner() == ""


@pytest.mark.multi
@pytest.mark.parametrize("kept", [False, True])
def test_a_process_that_is_killed_in_mid_upload(
    place: Place, bucket: str, url: str, tmp_path: Path, kept: bool
) -> None:
    job = Ranks(tmp_path, url)
    arrived, go_on, parts = threading.Event(), threading.Event(), itertools.count()

    def hold(request: Request, forward: Callable[[], Answer]) -> Answer:
        if place.is_part(request) and next(parts) == 1:
            arrived.set()
            go_on.wait(60)
        return forward()

    assert job.restored([1]) == [None]
    place.proxy.meddle = hold
    (process,) = job.start([2], size=3_000_000)
    try:
        assert arrived.wait(60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        go_on.set()
    place.proxy.meddle = None
    assert steps_on(url) == [1] and len(names(bucket)) == 2  # what came of step 2 is no object
    if not kept:
        (tmp_path / "fast").rename(tmp_path / "gone")
    assert job.restored([]) == ([[2, "fast", True]] if kept else [[1, "durable", True]])
    assert steps_on(url) == ([1, 2] if kept else [1])
    assert len(names(bucket)) == (4 if kept else 2)


def test_commands(make: Any, url: str, tmp_path: Path, capsys: Any) -> None:
    with make() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step)
    fast = str(tmp_path / "fast")
    for arguments, said in (
        (["ls", url], "3"),
        (["verify", fast, url], f"verified in {url}"),
        (["restore-dry-run", url], f"would restore step 3 from {url}"),
        (["rm", "--step", "2", url], ""),
        (["branch", "--step", "1", url], ""),
        (["rm", "--superseded", url], ""),
        (["drain", fast, url], ""),
    ):
        assert main(["checkpoints", *arguments]) == 0
        assert said in capsys.readouterr().out
    assert steps_on(url) == [1, 3]


def test_a_bucket_that_is_not_there_is_named(place: Place, tmp_path: Path) -> None:
    if place.scheme != "gs":  # whose server has other words than Google's
        with pytest.raises(IoError, match=r"://no-bucket-here does not exist: make the bucket"):
            nostall.Checkpointer(tmp_path / "fast", f"{place.scheme}://no-bucket-here/run")
