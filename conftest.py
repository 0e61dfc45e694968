"""What the Python tests share: the budget of skips, and small real data sets of JPEG files."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

# Before NumPy reads it: threads that wait in a loop take the cores of other tests.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import hypothesis
import numpy as np
import pytest
from PIL import Image

# How quickly examples are drawn and tried says nothing of the product. The same ones are tried in each
# run; pytest --hypothesis-profile=default draws others.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


# Where Open MPI's launchers keep their files: a directory of this worker.
LAUNCHERS = pytest.StashKey[Path]()
BASE = "PRTE_MCA_prte_tmpdir_base"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skips",
        type=int,
        default=0 if os.environ.get("CI") else None,
        help="the most tests that may skip; more end the run with status 1 (in CI: 0, else no limit)",
    )
    parser.addoption(
        "--device",
        choices=["simdev"],
        help="runs tests of the host on the simulated device (tests/device/on_device.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Shells ignore SIGINT for what runs behind them, and nohup SIGHUP: tests are to hear both.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    launchers = Path(tempfile.mkdtemp(prefix="prte-"))
    config.stash[LAUNCHERS] = launchers
    config.add_cleanup(lambda: shutil.rmtree(launchers, ignore_errors=True))
    os.environ[BASE] = str(launchers)
    # What earlier tests left in cycles may have threads: a forked child, which lacks them, ends where
    # its collector frees that.
    os.register_at_fork(after_in_child=gc.freeze)
    if config.getoption("--device"):
        sys.path.insert(0, str(Path(__file__).parent / "tests" / "device"))
        import on_device

        config.pluginmanager.register(on_device.Plugin(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests come first: one that begins late keeps the last worker busy alone.

    Of worksteal's parts, one of the items for each worker, each begins with its share of them.
    """
    workers: int = getattr(config, "workerinput", {}).get("workercount", 0)
    if not workers:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    left, parts = len(items), []
    for worker in range(workers):
        first = long[worker::workers]
        size = left // (workers - worker)
        parts += first + list(islice(others, max(0, size - len(first))))
        left -= size
    items[:] = [*parts, *others]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # the collector need not look through all that was imported, torch among it


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    skipped, budget = terminalreporter.stats.get("skipped", []), config.getoption("--skips")
    limit = "no limit" if budget is None else f"{budget} allowed"
    terminalreporter.write_line(f"{len(skipped)} tests skipped ({limit})")
    for report in skipped:
        terminalreporter.write_line(f"  {report.nodeid}: {report.longrepr[2]}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    budget = session.config.getoption("--skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if budget is None or reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return
    if len(reporter.stats.get("skipped", [])) > budget:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def no_files_of_killed_launchers(pytestconfig: pytest.Config) -> Iterator[None]:
    """A launcher of Open MPI that is killed leaves files named by its process number, and one that gets
    the same number later ends with "listener thread failed to start"; a run uses all numbers several
    times.
    """
    yield
    for left in pytestconfig.stash[LAUNCHERS].iterdir():
        shutil.rmtree(left, ignore_errors=True)


@pytest.fixture(autouse=True)
def unbroken_tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a narrow table of a benchmark breaks its words depends on what was measured."""
    if "benchmarks" in request.path.parts:
        from rich.console import Console

        monkeypatch.setattr("nostall_bench.harness.console", lambda width=0: Console(width=1000))


def write_jpeg(path: Path, value: int, size: tuple[int, int] = (40, 30)) -> None:
    """A JPEG whose content, and so whose length, depends on `value`."""
    random = np.random.default_rng(value)
    coarse = random.integers(0, 255, (4 + value % 5, 6, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize(size, Image.Resampling.BILINEAR).save(path, quality=85)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """61 JPEG files in 3 classes; 61 is prime, so nothing divides it."""
    root = tmp_path_factory.mktemp("images")
    for i in range(61):
        write_jpeg(root / f"class{i % 3}" / f"{i:03d}.jpg", i)
    return root


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[[int], Path]:
    """Makes a private folder of the given number of files, for tests that damage it."""

    def make(count: int) -> Path:
        root = tmp_path / "private"
        for i in range(count):
            write_jpeg(root / f"class{i % 2}" / f"{i:03d}.jpg", i)
        return root

    return make
