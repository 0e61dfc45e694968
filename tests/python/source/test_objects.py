"""Every store on an S3 server behind a proxy that spoils answers: what helps is tried again, the
rest is a clear error, and nothing wrong is served."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from checks import check_epochs, check_source
from object_server import ENVIRONMENT, Answer, Proxy, cut, error, upload
from PIL import Image
from protobuf import example, write_tfrecord
from samples import noise
from test_flight import wait_for
from test_tar import webdataset

import nostall
from nostall import transforms
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._flight import Overloaded
from nostall.source._objects import Ranges, connect, split_url

pytest_plugins = ["object_fixtures"]
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def shards(bucket: Any, tmp_path: Path) -> tuple[str, list[bytes], list[int]]:
    """(URL, samples, labels) of two tar shards."""
    contents = noise(24)
    (tmp_path / "s").mkdir()
    labels = webdataset(tmp_path / "s/a-0.tar", contents[:12])
    labels += webdataset(tmp_path / "s/a-1.tar", contents[12:], 12)
    upload(bucket, tmp_path / "s", "train/")
    return f"s3://{bucket.name}/train", contents, labels


# ------------------------------------------------------------------------------------ every store


def test_tar_shards(shards: tuple[str, list[bytes], list[int]]) -> None:
    url, contents, labels = shards
    source = nostall.TarShards(url)
    check_source(source, contents, labels, fork=False)
    assert source.describe(15).startswith(f'{url}/a-1.tar "000015.jpg" at offset ')
    assert nostall.TarShards(url).index_reused
    by_pattern = nostall.TarShards(f"{url}/a-*.tar", index=False)
    one_by_one = nostall.TarShards([f"{url}/a-0.tar", f"{url}/a-1.tar"], index=False)
    assert source.fingerprint == by_pattern.fingerprint == one_by_one.fingerprint


def test_all_members_of_tar_shards(shards: tuple[str, list[bytes], list[int]]) -> None:
    url, contents, labels = shards
    wanted = {"image": "jpg", "label": "cls", "about": "json"}
    source = nostall.TarShards(url, members=wanted)
    with nostall.DataLoader(source, 24, epochs=1, shuffle=False, output="numpy") as loader:
        (batch,) = list(loader)
    assert [batch["image"].sample(i).tobytes() for i in range(24)] == contents
    assert batch["label"].tolist() == labels
    assert batch["about"] == [{"a": 1}] * 24
    assert nostall.TarShards(url, members=wanted).index_reused


def test_lmdb(bucket: Any, tmp_path: Path) -> None:
    contents = [*noise(30), np.random.default_rng(0).bytes(200_000)]
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as env, env.begin(write=True) as t:
        for i, content in enumerate(contents):
            t.put(str(i).encode(), content)
    bucket.put_object(Key="db/data.mdb", Body=(tmp_path / "db/data.mdb").read_bytes())
    source = nostall.LMDB(f"s3://{bucket.name}/db")
    check_source(source, contents, [0] * 31, fork=False)
    assert nostall.LMDB(f"s3://{bucket.name}/db/data.mdb").index_reused


def test_tfrecords(bucket: Any, tmp_path: Path) -> None:
    contents = noise(30)
    records = [
        example({"image/encoded": c, "image/class/label": i}) for i, c in enumerate(contents)
    ]
    (tmp_path / "t").mkdir()
    write_tfrecord(tmp_path / "t/0.tfrecord", records[:15])
    write_tfrecord(tmp_path / "t/1.tfrecord", records[15:])
    upload(bucket, tmp_path / "t")
    source = nostall.TFRecord(f"s3://{bucket.name}/", check="all")
    check_source(source, contents, range(30), fork=False)


def test_a_folder_of_images(bucket: Any, make_folder: Callable[[int], Path]) -> None:
    image_folder = make_folder(20)
    upload(bucket, image_folder, "set/")
    bucket.put_object(Key="set-b/class0/x.jpg", Body=b"of another folder")
    local = nostall.ImageFolder(image_folder, index=False)
    source = nostall.ObjectFolder(f"s3://{bucket.name}/set")
    assert source.classes == local.classes
    assert source.over_network and not local.over_network
    samples = [local.read(i) for i in range(len(local))]
    check_source(source, samples, local.labels.tolist(), fork=False)
    options: dict[str, Any] = {"epochs": 2, "seed": 3, "output": "numpy", "tiers": ["ram:1MiB"]}
    steps = [transforms.RandomResizedCrop(24), transforms.ToTensor()]
    with (
        nostall.DataLoader(source, 8, transforms=steps, **options) as far,
        nostall.DataLoader(local, 8, transforms=steps, **options) as near,
    ):
        for _ in range(2):
            for (a, x), (b, y) in zip(far, near, strict=True):
                np.testing.assert_array_equal(a, b)
                np.testing.assert_array_equal(x, y)
        assert far.stats().source_bytes == source.total_bytes  # read once


def test_a_folder_of_images_has_the_labels_and_the_order_of_files(tmp_path: Path) -> None:
    from obstore import put
    from obstore.store import MemoryStore

    store = MemoryStore()
    # Objects sort by their whole names, where "-" comes before "/".
    names = ["cat-b/0.png", "cat/1.png", "cat/deep-a/2.png", "cat/deep/3.png", "cat/z.png"]
    beside = ["preview.png", "zoo.png"]
    for name in [*names, *beside]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
        put(store, f"train/{name}", name.encode())
        put(store, f"flat/{Path(name).name}", name.encode())
    local = nostall.ImageFolder(tmp_path, index=False)
    source = nostall.ObjectFolder("s3://here/train", store=store)
    assert source.classes == local.classes == ["cat", "cat-b"]
    assert source.labels.tolist() == local.labels.tolist()
    assert [source.read(i) for i in range(5)] == [local.read(i) for i in range(5)]
    flat = nostall.ObjectFolder("s3://here/flat/", store=store)
    assert (flat.classes, flat.labels.tolist()) == ([""], [0] * 7)


def test_an_object_whose_name_could_be_a_pattern(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for name in ("a[1].tar", "a1.tar"):
        webdataset(tmp_path / "s" / name, noise(3))
    upload(bucket, tmp_path / "s")
    url = f"s3://{bucket.name}"
    for name, found in (("a[1].tar", "a[1].tar"), ("a[12].tar", "a1.tar"), ("a?.tar", "a1.tar")):
        source = nostall.TarShards(f"{url}/{name}", index=False)
        assert source.describe(0).startswith(f"{url}/{found}")


def test_a_store_of_the_users_own(shards: tuple[str, list[bytes], list[int]]) -> None:
    from obstore.store import S3Store

    url, contents, labels = shards
    endpoint = os.environ.pop("AWS_ENDPOINT_URL")  # so that nothing else finds the server
    name = url.split("/")[2]
    store = S3Store(name, endpoint=endpoint, client_options={"allow_http": True})
    source = nostall.TarShards(url, store=store)
    assert [source.read(i) for i in range(24)] == contents
    assert source.labels.tolist() == labels


def test_a_profile_gives_the_credentials(
    shards: tuple[str, list[bytes], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, contents, _ = shards
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[lab]\n" + "".join(f"{name.lower()} = {ENVIRONMENT[name]}\n" for name in KEYS)
    )
    seen = []
    monkeypatch.setattr(
        Proxy,
        "authorized",
        lambda self, value: seen.append(value),
    )
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    source = nostall.TarShards(url)
    assert source.read(7) == contents[7]
    assert seen and all(f"Credential={ENVIRONMENT[KEYS[0]]}/" in value for value in seen)


# ----------------------------------------------------------------------------------- coalescing


def test_neighbours_are_read_together(proxy: Proxy, bucket: Any, tmp_path: Path) -> None:
    contents = noise(300)
    webdataset(tmp_path / "a.tar", contents)
    bucket.put_object(Key="a.tar", Body=(tmp_path / "a.tar").read_bytes())
    requests = {}
    for coalesce in (True, False):
        reading = nostall.ReadOptions(coalesce=coalesce)
        source = nostall.TarShards(f"s3://{bucket.name}/a.tar", reading=reading)
        proxy.reset()
        with nostall.DataLoader(
            source, 16, epochs=1, shuffle=False, tiers=["ram:8MiB"], output="numpy"
        ) as loader:
            i = 0
            for batch, _ in loader:
                for k in range(len(batch)):
                    assert batch[k].tobytes() == contents[i]
                    i += 1
        assert i == 300
        requests[coalesce] = len(proxy.ranges)
    nonempty = sum(len(c) > 0 for c in contents)
    assert requests[False] == nonempty
    assert requests[True] <= 75, requests


# --------------------------------------------------------------------------------------- faults


def drop(answer: Answer) -> Answer:
    answer.drop = True
    return answer


def shortened(answer: Answer) -> Answer:
    answer.body = answer.body[: len(answer.body) // 2]
    return answer


def shifted(answer: Answer) -> Answer:
    """The answer to another range than the one asked for."""
    name = next(k for k in answer.headers if k.lower() == "content-range")
    first, rest = answer.headers[name].removeprefix("bytes ").split("-")
    last, total = rest.split("/")
    answer.headers[name] = f"bytes {int(first) + 1}-{int(last) + 1}/{total}"
    return answer


SPOIL = {
    "error 500": lambda a: error(500, "InternalError"),
    "slow down": lambda a: error(503, "SlowDown"),
    "cut in the body": lambda a: cut(a, len(a.body) // 2),
    "cut before the body": lambda a: cut(a, 0),
    "no answer": drop,
    "wrong length": shortened,
    "wrong range": shifted,
}


@pytest.mark.parametrize("fault", SPOIL)
def test_faults_that_pass(
    proxy: Proxy, shards: tuple[str, list[bytes], list[int]], fault: str
) -> None:
    url, contents, labels = shards

    # Of what is asked for, a third is spoiled when it first comes, in the scan as in the epochs.
    def spoil(n: int, answer: Answer) -> Answer:
        path, _, end = proxy.ranges[n]
        again = any((p, e) == (path, end) for p, _, e in proxy.ranges[:n])
        return answer if again or n % 3 != 1 else SPOIL[fault](answer)

    proxy.spoil = spoil
    source = nostall.TarShards(url, index=False)
    assert source.labels.tolist() == labels
    check_epochs(source, contents, tiers=["ram:1MiB"])
    assert len(proxy.ranges) > 3


def test_an_answer_that_comes_late_is_asked_for_again(
    proxy: Proxy, shards: tuple[str, list[bytes], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other answer has as long, on a machine that does much else.
    monkeypatch.setenv("NOSTALL_OBJECT_TIMEOUT_S", "8")
    url, contents, _ = shards
    source = nostall.TarShards(url)
    proxy.reset()
    again = threading.Event()

    def hold(number: int, answer: Answer) -> Answer:
        if number == 0:
            again.wait(60)
        again.set()
        return answer

    proxy.spoil = hold
    assert source.read(5) == contents[5]
    assert again.is_set()


LASTING = {
    **{name: (spoil, "") for name, spoil in SPOIL.items() if name != "cut in the body"},
    "error 500": (SPOIL["error 500"], "500 Internal Server Error"),
    "wrong length": (shortened, "bytes instead of"),
    "expired credentials": (lambda a: error(400, "ExpiredToken"), "denied.*ExpiredToken.*expired"),
    "no permission": (lambda a: error(403, "AccessDenied"), "denied.*check the credentials"),
    "gone": (lambda a: error(404, "NoSuchKey"), "does not exist"),
}


@pytest.mark.parametrize("fault", LASTING)
def test_faults_that_stay(
    proxy: Proxy, shards: tuple[str, list[bytes], list[int]], fault: str
) -> None:
    url, contents, _ = shards
    spoil, text = LASTING[fault]
    source = nostall.TarShards(url)
    proxy.reset()
    proxy.spoil = lambda n, a: spoil(a)
    offset = int(source.places[1][15])
    with pytest.raises(IoError, match=rf"{url}/a-1\.tar.*offset {offset}.*{text}"):
        source.read(15)
    with pytest.raises(CorruptionError, match=rf"{url}/a-\d\.tar.*offset \d+.*{text}"):
        check_epochs(source, contents)
    with pytest.raises(IoError, match=rf"{url}/a-\d\.tar.*offset 0.*{text}"):
        nostall.TarShards(url, index=False)
    proxy.reset()
    assert source.read(15) == contents[15]


def test_a_server_that_never_answers(
    proxy: Proxy, shards: tuple[str, list[bytes], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shards[0]
    source = nostall.TarShards(url)
    # Of the requests that get no answer alone: those of the opening get theirs, however late.
    monkeypatch.setenv("NOSTALL_OBJECT_TIMEOUT_S", "0.5")
    monkeypatch.setattr(Ranges, "_store", lambda _, url: connect(split_url(url)[0]))
    told = threading.Event()

    def hold(_: int, answer: Answer) -> Answer:
        told.wait(200)
        return answer

    proxy.spoil = hold
    with pytest.raises(IoError, match=rf"{url}/a-1\.tar.*offset \d+"):
        source.read(15)
    told.set()


def test_one_bad_range_does_not_spoil_its_neighbours(
    proxy: Proxy, shards: tuple[str, list[bytes], list[int]]
) -> None:
    url, contents, _ = shards
    source = nostall.TarShards(url)
    _, offsets, _ = source.places
    proxy.reset()

    def spoil(number: int, answer: Answer) -> Answer:
        path, begin, end = proxy.ranges[number]
        hit = path.endswith("a-0.tar") and begin <= offsets[7] < end
        return error(500, "InternalError") if hit else answer

    proxy.spoil = spoil
    options: dict[str, Any] = {"tiers": ["ram:1MiB"], "output": "numpy", "epochs": 1}
    with nostall.DataLoader(source, 8, on_error="substitute", **options) as loader:
        for batch, labels in loader:
            for i, label in enumerate(labels.tolist()):
                assert batch[i].tobytes() == contents[label // 3]
        assert loader.stats().epochs[0].substituted == [7]


def test_an_object_that_is_replaced(
    bucket: Any, shards: tuple[str, list[bytes], list[int]], tmp_path: Path
) -> None:
    url, contents, _ = shards
    source = nostall.TarShards(url)
    other = [bytes(len(c)) for c in contents[:12]]  # of the same length
    webdataset(tmp_path / "new.tar", other)
    bucket.put_object(Key="train/a-0.tar", Body=(tmp_path / "new.tar").read_bytes())
    with pytest.raises(IoError, match=rf"{url}/a-0\.tar.*was replaced"):
        source.read(3)
    assert source.read(20) == contents[20]
    again = nostall.TarShards(url)
    assert not again.index_reused and again.read(3) == other[3]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_list_may_leave_out_the_quotes_of_etags(scheme: str) -> None:
    url = f"{scheme}://here/a"
    listed, asked = (Ranges([url], known=[{"size": 3, "e_tag": tag}]) for tag in ("0x1F", '"0x1F"'))
    assert listed.versions == asked.versions
    assert listed._tags == asked._tags == ['"0x1F"']  # as If-Match has it


def test_a_store_of_the_users_own_is_asked_for_the_etag_that_it_gave() -> None:
    from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

    class Mine(MemoryStore):
        pass

    class MyAzure(AzureStore):
        pass

    known = [{"size": 3, "e_tag": "0x1F"}]
    for scheme in ("s3", "az"):
        for store in (MemoryStore(), Mine()):
            assert Ranges([f"{scheme}://here/a"], store, known)._tags == ["0x1F"]
        for server in (
            GCSStore("here", skip_signature=True),
            S3Store("here", skip_signature=True),
            MyAzure("here", account_name="mine", skip_signature=True),
        ):
            assert Ranges([f"{scheme}://here/a"], server, known)._tags == ['"0x1F"']
    for store in (MemoryStore(), Mine()):
        store.put("a", b"content")
        ranges = Ranges(["az://here/a"], store)
        assert bytes(ranges.read([(0, 1, 3)])[0]) == b"ont"


def test_a_store_around_another_is_not_asked() -> None:
    """So its ETags are nobody's concern."""
    from obstore.store import MemoryStore

    class Around:
        def __init__(self) -> None:
            self._store = MemoryStore()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    with pytest.raises(IoError, match=r"az://here/a\.tar"):
        Ranges(["az://here/a.tar"], Around())


def test_a_database_that_is_replaced(bucket: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        with lmdb.open(str(tmp_path / name), map_size=1 << 24) as env, env.begin(write=True) as t:
            t.put(b"0", name.encode() * 5000)
    key = "db/data.mdb"
    bucket.put_object(Key=key, Body=(tmp_path / "a/data.mdb").read_bytes())
    source = nostall.LMDB(f"s3://{bucket.name}/db")
    assert source.read(0) == b"a" * 5000
    bucket.put_object(Key=key, Body=(tmp_path / "b/data.mdb").read_bytes())
    with pytest.raises(IoError, match="was replaced"):
        source.read(0)
    again = nostall.LMDB(f"s3://{bucket.name}/db")  # of the same transaction number
    assert not again.index_reused and again.read(0) == b"b" * 5000


def test_what_is_not_there(proxy: Proxy, bucket: Any, tmp_path: Path) -> None:
    root = f"s3://{bucket.name}"
    with pytest.raises(UsageError, match=rf"{root}/none names no file"):
        nostall.TarShards(f"{root}/none")
    with pytest.raises(IoError, match=rf"{root}/none\.tar does not exist"):
        nostall.TarShards([f"{root}/none.tar"])
    with pytest.raises(IoError, match=rf"{root}/data\.mdb does not exist"):
        nostall.LMDB(root)
    with pytest.raises(UsageError, match="has no object that ends with"):
        nostall.ObjectFolder(f"{root}/none")
    with pytest.raises(IoError, match="s3://no-such-bucket-here"):
        nostall.ObjectFolder("s3://no-such-bucket-here/x")
    Image.new("RGB", (4, 4)).save(tmp_path / "x.tar", "png")
    with pytest.raises(UsageError, match="in files or on an object store"):
        nostall.TarShards([f"{root}/none.tar", str(tmp_path / "x.tar")])


def test_a_forked_process_is_told_to_open_again(
    shards: tuple[str, list[bytes], list[int]],
) -> None:
    url, contents, _ = shards
    source = nostall.TarShards(url)
    assert source.read(1) == contents[1]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            source.read(1)
        except IoError as told:
            code = 0 if "fork" in str(told) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


# ------------------------------------------------------------------------------ requests in flight


def test_a_closed_loader_asks_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore import put
    from obstore.store import MemoryStore

    store, one = MemoryStore(), Ranges._one
    for number in range(1600):
        put(store, f"a/{number:04d}.jpg", b"%d" % number)
    begun: list[int] = []
    flights = set()
    numbers, go_on = itertools.count(1), threading.Event()

    def late(self: Ranges, asked: tuple[int, int, int]) -> Any:
        flights.add(self._flight)
        number = next(numbers)
        begun.append(number)
        assert number <= 800 or go_on.wait(60)
        return one(self, asked)

    monkeypatch.setattr(Ranges, "_one", late)
    monkeypatch.setenv("NOSTALL_OBJECT_REQUESTS", "8")
    source = nostall.ObjectFolder("s3://here", store=store)
    loader = nostall.DataLoader(source, 4, epochs=1, rank=0, world_size=1)
    next(iter(loader))
    wait_for(lambda: len(begun) == 808)
    (flight,) = flights
    closing = threading.Thread(target=loader.close)
    closing.start()
    wait_for(lambda: not flight._waiting)
    closing.join(1)
    assert closing.is_alive()  # those in flight have places in the loader's memory
    go_on.set()
    closing.join(60)
    assert len(begun) == 808


def test_opening_ends_with_the_first_failure(proxy: Proxy, bucket: Any) -> None:
    asked = []

    def deny(request: Any, forward: Callable[[], Answer]) -> Answer:
        asked.append(request)
        return error(403, "AccessDenied")

    proxy.meddle = deny
    with pytest.raises(IoError, match="access was denied"):
        nostall.TarShards([f"s3://{bucket.name}/{i}.tar" for i in range(300)])
    assert len(asked) <= 2 * 32  # those in flight when the first answer came


def test_a_store_that_asks_for_less_is_asked_for_half(
    proxy: Proxy, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "0")
    for number in range(4):
        bucket.put_object(Key=f"{number}", Body=b"content")
    ranges = Ranges([f"s3://{bucket.name}/{i}" for i in range(4)])
    asked = [(i % 4, 0, 7) for i in range(8)]
    assert ranges.read(asked) == [b"content"] * 8
    assert ranges._flight.requests == 32
    proxy.spoil = lambda n, answer: error(503, "SlowDown") if n % 8 == 3 else answer
    answers = ranges.read(asked)
    assert sum(isinstance(a, Overloaded) for a in answers) == 1
    assert ranges._flight.requests == 16


def test_a_store_that_does_not_answer_in_time_asks_for_less(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "0")
    monkeypatch.setenv("NOSTALL_OBJECT_TIMEOUT_S", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Overloaded, match=r"a\.tar cannot be read: .* timed out"):
            nostall.TarShards("s3://bucket/a.tar")
