"""Tiers that several loaders share, and tiers of the user's own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import prefork
import pytest
from loader_ranks import own_job
from procfs import abstract_sockets

import nostall
import nostall.loader._loader
from nostall import _native
from nostall.errors import IoError, UsageError
from nostall.loader.testing import check_tier

EXAMPLES = Path(__file__).parents[3] / "examples"


class Logged(nostall.SampleReader):
    """Sample s is s bytes more than 10; every read is a byte in a file."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def read(self, samples: list[int]) -> Sequence[Any]:
        with self.log.open("ab") as log:
            log.write(bytes(samples))
        return [bytes([s]) * (10 + s) for s in samples]

    def describe(self, sample: int) -> str:
        return f"sample {sample}"


@pytest.fixture
def source(tmp_path: Path) -> nostall.CustomSource:
    reader = Logged(tmp_path / "log")
    return nostall.CustomSource(reader, np.arange(40) + 10, range(40), identity=str(tmp_path))


def load(loader: nostall.DataLoader) -> list[tuple[bytes, int]]:
    return [
        (sample.tobytes(), label)
        for data, labels in loader
        for sample, label in zip(data, labels.tolist(), strict=True)
    ]


def expected(samples: Sequence[int]) -> list[tuple[bytes, int]]:
    return [(bytes([s]) * (10 + s), s) for s in samples]


def reads(tmp_path: Path) -> list[int]:
    return sorted((tmp_path / "log").read_bytes())


@pytest.mark.parametrize("kind", ["ram", "file"])
def test_loaders_of_views_hold_no_sample_twice(
    source: nostall.CustomSource, tmp_path: Path, kind: str
) -> None:
    train, validation = nostall.Subset(source, range(39, 9, -1)), nostall.Subset(source, range(20))
    where = "ram:1MiB" if kind == "ram" else f"{tmp_path}:1MiB"
    options: dict[str, Any] = {"epochs": 1, "order": "sequential", "output": "numpy"}
    with nostall.Tiers(source, [where]) as tiers, contextlib.ExitStack() as held:
        # A loader that takes samples from files has asked the source once at most, and so does not know
        # its speed: while a thread stands still files look slower, and samples would be read again.
        for _ in range(2):
            for view, samples in (
                (train, range(39, 9, -1)),
                (validation, range(20)),
                (source, range(40)),
            ):
                loader = held.enter_context(nostall.DataLoader(view, 7, tiers=tiers, **options))
                assert load(loader) == expected(samples)
        assert reads(tmp_path) == list(range(40))
        total = source.total_bytes
        assert sum(tiers.kept_bytes) == total + (24 * 40 if kind == "file" else 0)
        assert tiers.read([3, 3, 39]) == [b"\3" * 13, b"\3" * 13, b"\x27" * 49]


def test_what_does_not_fit_is_read_again(source: nostall.CustomSource, tmp_path: Path) -> None:
    with nostall.Tiers(source, ["ram:100B"]) as tiers:
        for _ in range(2):
            assert [d[0] for d in tiers.read(range(5, 0, -1))] == [5, 4, 3, 2, 1]
        # The first seven fill 91 bytes.
        assert reads(tmp_path) == [1, 2, 3, 4, 5]
        tiers.read([30, 30, 31])
        assert reads(tmp_path)[5:] == [30, 30, 31]


def _second_rank(source: nostall.Source, job: str, answer: Any) -> None:
    with nostall.Tiers(source, ["ram:1MiB"], job=job) as tiers:
        answer.send((tiers.read(range(40)), tiers.taken))


def test_processes_share_and_keep_what_the_others_read(
    source: nostall.CustomSource, tmp_path: Path
) -> None:
    start = multiprocessing.get_context("fork")
    with nostall.Tiers(source, ["ram:1MiB"], job=own_job("shared by two")) as tiers:
        for _ in range(2):
            here, there = start.Pipe(duplex=False)
            process = start.Process(
                target=_second_rank, args=(source, own_job("shared by two"), there)
            )
            process.start()
            there.close()
            assert here.poll(60)
            data, taken = here.recv()
            process.join()
            assert data == [data for data, _ in expected(range(40))]
        assert taken == {"ram": 40, "file": 0, "source": 0}
        copy = pickle.loads(pickle.dumps(tiers))
        assert copy.read([7]) == tiers.read([7]) == [b"\7" * 17]
        assert copy.native is tiers.native
    assert reads(tmp_path) == list(range(40))


class Stopping(Logged):
    """With pipes: tells that it reads sample 9, and goes on when the other side has gone."""

    def __init__(self, log: Path, pipes: tuple[int, int] | None = None) -> None:
        super().__init__(log)
        self.pipes = pipes

    def read(self, samples: list[int]) -> Sequence[Any]:
        if self.pipes and 9 in samples:
            os.write(self.pipes[0], b"9")
            os.read(self.pipes[1], 1)
        return super().read(samples)


def test_the_others_go_on_where_a_process_dies(tmp_path: Path) -> None:
    """Killed while it reads samples for the tiers: the first process, which has all files."""

    def open_source(reader: nostall.SampleReader) -> nostall.CustomSource:
        return nostall.CustomSource(reader, np.arange(40) + 10, range(40), identity=str(tmp_path))

    told, tell = os.pipe()
    gone, go = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(go)
            own = open_source(Stopping(tmp_path / "log", (tell, gone)))
            with nostall.Tiers(own, ["ram:1MiB"], job=own_job("dies")) as tiers:
                tiers.read(range(5))
                os.write(tell, b"5")
                os.read(gone, 1)
                tiers.read(range(5, 15))
        finally:
            os._exit(1)
    assert os.read(told, 1) == b"5"
    source = open_source(Stopping(tmp_path / "log"))
    with nostall.Tiers(source, ["ram:1MiB"], job=own_job("dies")) as tiers:
        assert tiers.read(range(5)) == [data for data, _ in expected(range(5))]
        assert tiers.taken == {"ram": 5, "file": 0, "source": 0}
        os.write(go, b"!")
        assert os.read(told, 1) == b"9"
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        # What it had begun to read is read by the others, and it is missed by nobody.
        with nostall.DataLoader(source, 8, tiers=tiers, epochs=2, output="numpy") as loader:
            for _ in range(2):
                assert sorted(load(loader)) == sorted(expected(range(40)))
        assert sum(tiers.kept_bytes) == source.total_bytes
        # Who comes now gets the files from who is left.
        here, there = multiprocessing.Pipe(duplex=False)
        start = multiprocessing.get_context("fork")
        (
            process := start.Process(target=_second_rank, args=(source, own_job("dies"), there))
        ).start()
        there.close()
        assert here.poll(60)
        assert here.recv()[1] == {"ram": 40, "file": 0, "source": 0}
        process.join()
    assert reads(tmp_path) == list(range(40))
    for descriptor in (told, tell, gone, go):
        os.close(descriptor)


def test_other_sources_and_bad_samples_are_refused(
    source: nostall.CustomSource, tmp_path: Path, make_folder: Callable[[int], Path]
) -> None:
    root = make_folder(3)
    folder = nostall.ImageFolder(root, index=False)
    with nostall.Tiers(folder, ["ram:1MiB"]) as tiers:
        loader = nostall.DataLoader(source, 4, tiers=tiers, epochs=1, output="numpy")
        with pytest.raises(UsageError, match="these tiers are of <ImageFolder"):
            next(iter(loader))
        (root / "class0" / "002.jpg").unlink()
        with pytest.raises(nostall.errors.IoError, match=r"002\.jpg: No such file"):
            tiers.read([0, 1, 2])
        whole = (root / "class0" / "000.jpg").read_bytes()
        assert tiers.read([0]) == [whole]
        with pytest.raises(IndexError):
            tiers.read([3])
        with pytest.raises(UsageError, match="cannot travel between nodes"):
            list(nostall.DataLoader(folder, 1, tiers=tiers, epochs=1, peers="on"))
        for given in ({"sharing": "owners-read"}, {"assignment": "locality"}):
            with pytest.raises(UsageError, match=f"{next(iter(given))}=.* has no effect"):
                list(nostall.DataLoader(folder, 1, tiers=tiers, epochs=1, **given))


def test_closed_tiers_are_not_entered_again(source: nostall.CustomSource) -> None:
    tiers = nostall.Tiers(source, ["ram:1MiB"])
    loader = nostall.DataLoader(source, 4, tiers=tiers, epochs=1, output="numpy")
    batches = iter(loader)
    next(batches)
    tiers.close()
    tiers.close()
    with pytest.raises(UsageError, match=r"are closed: make nostall\.Tiers again"):
        tiers.read([1])
    assert len(list(batches)) == 9  # a loader that has them goes on


def test_a_view_in_shared_tiers_takes_no_memory_for_objects() -> None:
    numbers = np.arange(1, 200_000)
    whole = nostall.Arrays({"x": np.arange(200_000, dtype=np.int32)})
    view = nostall.Subset(whole, numbers)
    tracemalloc.start()
    try:
        with (
            nostall.Tiers(whole, ["ram:2MiB"], job=own_job("view")) as tiers,
            nostall.DataLoader(
                view, 4, tiers=tiers, epochs=1, shuffle=False, output="numpy"
            ) as loader,
        ):
            tracemalloc.reset_peak()
            batch = next(iter(loader))
            _, peak = tracemalloc.get_traced_memory()
    finally:
        # After the loader's threads: one that takes the GIL meanwhile crashes CPython (issue 128679).
        tracemalloc.stop()
    assert batch["x"].tolist() == [1, 2, 3, 4]
    assert peak < 16 * len(numbers)  # a list of them takes 40 bytes for each


def _by_closing(source: nostall.Source) -> Callable[[], None]:
    return nostall.Tiers(source, ["ram:1MiB"], job=own_job("left slowly")).close


def _by_the_end_of_a_configuration(source: nostall.Source) -> Callable[[], None]:
    last = [_native.LoaderConfig()]
    with nostall.Tiers(source, ["ram:1MiB"], job=own_job("left slowly too")) as tiers:
        last[0].share(tiers.native, np.zeros(0, np.uint64))
    return last.clear


@pytest.mark.parametrize("enter", [_by_closing, _by_the_end_of_a_configuration])
def test_other_threads_go_on_while_one_leaves(
    source: nostall.CustomSource, enter: Callable[[nostall.Source], Callable[[], None]]
) -> None:
    before = abstract_sockets(os.getpid())
    leave = enter(source)
    (giving,) = (n for n in abstract_sockets(os.getpid()) - before if n.startswith("@nostall-"))
    # Another process of the job has the turn: it ends when the one that leaves has come.
    turn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    turn.bind("\0" + giving[1:].rsplit("-", 1)[0] + "-turn")
    turn.listen()
    offered = []

    def end_the_turn() -> None:
        caller, _ = turn.accept()
        offered.append(giving in abstract_sockets(os.getpid()))  # until it has left
        turn.close()
        caller.close()

    holder = threading.Thread(target=end_the_turn)
    holder.start()
    leave()
    holder.join()
    assert offered == [True]


def test_a_loader_that_cannot_work_enters_no_tiers(
    source: nostall.CustomSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = nostall.DataLoader(source, 8, tiers=["ram:1MiB"], output="numpy", job=own_job("depth"))
    number = 0xCBF29CE484222325  # FNV-1a of the name
    for byte in f"tiers /dev/shm {loader._job}".encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    name = f"nostall-{os.geteuid()}-{number:016x}-0"
    # Who enters waits for the turn.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as turn, monkeypatch.context() as m:
        turn.bind(f"\0{name}-turn")
        turn.listen()
        m.setattr(nostall.loader._loader, "_READS_IN_FLIGHT", 0)
        with pytest.raises(UsageError, match="depth must be at least 1"):
            next(iter(loader))
    assert len(load(loader)) == 40
    assert f"@{name}-0" in abstract_sockets(os.getpid())
    loader.close()


# ------------------------------------------------------------------------- tiers of one's own


class Kept(nostall.Tier):
    """A dictionary of this process."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        super().__init__(capacity)
        self.data: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self.data[key] = data

    def get(self, key: str) -> Any:
        return self.data.get(key)


def test_a_dropped_or_wrong_value_is_read_from_the_source(
    source: nostall.CustomSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, each = Kept(), [data for data, _ in expected(range(40))]
    with nostall.Tiers(source, ["ram:65B", tier]) as tiers:
        assert tiers.read(range(40)) == each
        assert len(tier.data) == 35  # those after the first five, which are 60 bytes
        assert all(key.startswith(f"nostall/{source.fingerprint:016x}/") for key in tier.data)
        assert tiers.read(range(40)) == each
        assert reads(tmp_path) == list(range(40))
        key = f"nostall/{source.fingerprint:016x}/30"
        del tier.data[key]
        assert tiers.read(range(40)) == each
        assert tiers.read(range(40)) == each  # it was put again
        assert reads(tmp_path).count(30) == 3
        assert tier.data[key] == each[30]
        assert not caplog.messages
        tier.data[key[:-2] + "31"] = b"?" * 41
        tier.data[key[:-2] + "32"] = b"short"
        assert tiers.read(range(40)) == each
    assert len(caplog.messages) == 1
    assert "in the tier Kept" in caplog.messages[0]


def test_another_object_of_the_class_is_another_tier(source: nostall.CustomSource) -> None:
    each = [data for data, _ in expected(range(40))]
    one, other = Kept(), Kept()
    with nostall.Tiers(source, one) as first, nostall.Tiers(source, other) as second:
        for _ in range(2):  # a sample that the other's tier has is missed first
            assert first.read(range(40)) == each
            assert second.read(range(40)) == each
        assert second.read(range(40)) == each
        assert sorted(one.data) == sorted(other.data) and len(one.data) == 40
        for wrong in (-1, 40):
            with pytest.raises(IndexError, match=f"sample {wrong}: .* 40 samples, 0 to 39"):
                first.read([3, wrong])
        same = nostall.Tiers(source, one)
        assert same.native is first.native
        same.close()


class Full(Kept):
    def put(self, key: str, data: bytes) -> None:
        raise OSError(28, "no room")


def test_a_tier_that_raises_is_told_once_and_does_without(
    source: nostall.CustomSource, caplog: pytest.LogCaptureFixture
) -> None:
    with nostall.DataLoader(source, 8, tiers=Full(), epochs=2, output="numpy") as loader:
        for _ in range(2):
            assert sorted(load(loader)) == sorted(expected(range(40)))
    full = "cannot keep samples in the tier Full: OSError: [Errno 28] no room; the sample is read"
    # Two threads fail side by side: the one that was first may be the last to say so.
    (first, then) = sorted(caplog.messages, key=lambda message: "takes no more" in message)
    assert full in first and "takes no more samples" in then


@pytest.mark.parametrize("method", ["put", "get"])
def test_ctrl_c_in_a_tier_ends_the_program(source: nostall.CustomSource, method: str) -> None:
    class Interrupted(Kept):
        pressed = False

    def interrupt(tier: Interrupted, *arguments: Any) -> Any:
        if not tier.pressed:
            tier.pressed = True
            raise KeyboardInterrupt
        return getattr(Kept, method)(tier, *arguments)

    setattr(Interrupted, method, interrupt)
    assert threading.current_thread() is threading.main_thread()
    with nostall.Tiers(source, Interrupted()) as tiers:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(2):
                # The source reads in Python too.
                with contextlib.suppress(IoError):
                    tiers.read(range(40))
        assert tiers.read(range(40)) == [data for data, _ in expected(range(40))]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no room for /data/caf\udce9"), "ValueError: no room for /data/caf\\udce9"),
        (Unspeakable(), "Unspeakable: Unspeakable"),
    ],
)
def test_a_tier_may_raise_what_has_no_text(
    source: nostall.CustomSource, caplog: pytest.LogCaptureFixture, error: Exception, told: str
) -> None:
    class Raises(Kept):
        def put(self, key: str, data: bytes) -> None:
            if key.endswith("/1"):
                raise error
            super().put(key, data)

        def get(self, key: str) -> Any:
            raise error

    each = [data for data, _ in expected(range(40))]
    with nostall.Tiers(source, Raises()) as tiers:
        assert tiers.read(range(40)) == each
        assert tiers.read(range(40)) == each
    (kept, read) = caplog.messages
    assert f"cannot keep samples in the tier Raises: {told}; the sample" in kept
    assert f"in the tier Raises: {told}; it is read from the source instead" in read


class Forgets(Kept):
    def get(self, key: str) -> Any:
        return None if key.endswith("/1") else super().get(key)


class First(Kept):
    def put(self, key: str, data: bytes) -> None:
        self.data.setdefault(key, data)


class Everything(Kept):
    def get(self, key: str) -> Any:
        return self.data.get(key, b"")


def test_the_check_says_what_does_not_hold() -> None:
    check_tier(Kept())
    for tier, words in (
        (Forgets(), "what was put is not there"),
        (First(), "what was put is not what get"),
        (Everything(), "something that was never put"),
        (Kept(1000), "its capacity is 1000"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_tier(tier)
    # A process of its own has a copy of the dictionary.
    with pytest.raises(AssertionError, match="what a process that was started by fork put is not"):
        check_tier(Kept(), start_methods=["fork"])
    with pytest.raises(UsageError, match="capacity '1' must be bytes"):
        Kept("1")  # type: ignore[arg-type]


def test_the_template_runs(image_folder: Path) -> None:
    run = prefork.run([str(EXAMPLES / "own-tier.py"), str(image_folder)], timeout=120)
    assert run.returncode == 0, run.stderr
    assert "epoch 1: 61 samples" in run.stdout


def test_a_second_loader_of_the_same_data_is_told_what_is_held_twice(
    source: nostall.CustomSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only such data as two living loaders have in tiers of their own, and once."""
    monkeypatch.setattr(nostall.loader._tiers, "_WORTH_TELLING", 1)

    def begun(data: Any, **options: Any) -> nostall.DataLoader:
        loader = nostall.DataLoader(
            data, 4, **({"tiers": ["ram:1MiB"], "output": "numpy"} | options)
        )
        next(iter(loader))
        return loader

    def told(first: Any, second: Any, **tiers: Any) -> str:
        caplog.clear()
        monkeypatch.setattr(nostall.loader._tiers, "_told", set())
        with begun(first, **tiers):
            for _ in range(2):
                begun(second, **tiers).close()
        begun(second).close()
        assert len(caplog.records) <= 1
        return caplog.text

    train, validation = nostall.Split(source, 0.9)
    assert "give both the same tiers=nostall.Tiers(...), or close" in told(source, source)
    assert told(train, source) and told(train, train)
    assert not told(train, validation)
    assert not told(source, source, tiers=[]) and told(source, source, job=own_job("same"))
    caplog.clear()
    place: dict[str, Any] = {"world_size": 2, "local_world_size": 2, "job": own_job("ranks")}
    ranks = [begun(source, rank=i, local_rank=i, peers="off", **place) for i in range(2)]
    assert not caplog.records
    for rank in ranks:
        rank.close()
    with nostall.Tiers(source, ["ram:1MiB"]) as shared:
        assert not told(source, source, tiers=shared)
    caplog.clear()
    monkeypatch.setattr(nostall.loader._tiers, "_told", set())
    loader = begun(source)
    loader = nostall.DataLoader(source, 4, tiers=["ram:1MiB"])  # as a cell that is run again
    next(iter(loader))
    loader.close()
    assert not caplog.records
    half = nostall.Subset(source, range(20, 40))
    specs = nostall.base._sizes.parse_tiers(["ram:1MiB"], dataset_bytes=0, local_world_size=1)
    overlap = nostall.Subset(source, range(10, 30))
    assert nostall.loader._tiers.held_twice(half, specs, overlap, specs) == sum(range(30, 40))


def cameras(tmp_path: Path) -> list[Path]:
    """Two files of one name, size and time; camera i has 4 rows of i + 1."""
    paths = [tmp_path / f"camera{i}" / "frames.npy" for i in range(2)]
    for i, path in enumerate(paths):
        path.parent.mkdir()
        np.save(path, np.full((4, 3), i + 1, np.uint8))
        os.utime(path, ns=(10**18, 10**18))
    return paths


def test_data_sets_of_the_same_names_and_times_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = cameras(tmp_path)
    first, second = sources = [nostall.Arrays({"x": path}) for path in paths]
    assert first.fingerprint == second.fingerprint
    with nostall.Tiers(first) as tiers, nostall.Tiers(second) as others:
        assert tiers.read([0]) == [b"\1" * 3] and others.read([0]) == [b"\2" * 3]
        with pytest.raises(UsageError, match="of another source"):
            next(iter(nostall.DataLoader(second, 2, tiers=tiers, epochs=1)))
    specs = nostall.base._sizes.parse_tiers(["ram:1GiB"], dataset_bytes=0, local_world_size=1)
    monkeypatch.setattr(nostall.loader._tiers, "_WORTH_TELLING", 1)
    assert nostall.loader._tiers.held_twice(first, specs, first, specs)
    assert not nostall.loader._tiers.held_twice(first, specs, second, specs)
    # Whatever the working directory is.
    with contextlib.ExitStack() as held:
        for path, source in zip(paths, sources, strict=True):
            monkeypatch.chdir(path.parent)
            opened = nostall.Arrays({"x": "frames.npy"})
            assert opened.native.stamp == source.native.stamp
            tiers = held.enter_context(nostall.Tiers(opened))
            assert tiers.read([0]) == [source.read(0)]


def test_a_file_that_is_written_again_is_another_data_set(tmp_path: Path) -> None:
    """While the data set of the state before is still there."""
    rounds = []
    for i in range(3):
        np.save(tmp_path / "features.npy", np.full((4, 3), i, np.uint8))
        os.utime(tmp_path / "features.npy", ns=(i, i))
        data = nostall.torch.Dataset(nostall.Arrays({"x": tmp_path / "features.npy"}))
        rounds.append(data)
        assert [item["x"].tolist() for item in data.__getitems__([0, 3])] == [[i] * 3] * 2


def test_ranks_with_shards_of_their_own_get_their_own_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place: dict[str, Any] = {"world_size": 2, "local_world_size": 2, "job": own_job("shards")}
    with contextlib.ExitStack() as held:
        ranks = [
            held.enter_context(
                nostall.DataLoader(
                    nostall.Arrays({"x": path}),
                    2,
                    tiers=["ram:1MiB"],
                    epochs=2,
                    output="numpy",
                    peers="off",
                    rank=i,
                    local_rank=i,
                    **place,
                )
            )
            for i, path in enumerate(cameras(tmp_path))
        ]
        epochs = [[np.unique(batch["x"]).tolist() for batch in rank] for rank in ranks * 2]
    assert epochs == [[[1]], [[2]]] * 2
    assert "lies elsewhere" in caplog.text and "local rank 1 has no tiers" in caplog.text
