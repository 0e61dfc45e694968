"""A thread of C++ that asks for the lock of this interpreter after it shut down."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# What waits for the thread is run after Python has shut down. Where the thread ends the process, the
# wait ends with it; a thread that is kept says nothing, so it has a second.
LIBRARY = """
#include <unistd.h>

#include <atomic>
#include <thread>

extern "C" int PyGILState_Ensure();
extern "C" void* PyEval_SaveThread();
extern "C" void PyEval_RestoreThread(void*);

namespace {

std::atomic<bool> started = false;
std::atomic<int> seconds = 0;

void ask() noexcept { PyEval_RestoreThread(PyEval_SaveThread()); }

[[gnu::destructor]] void wait() {
  sleep(seconds);
}

}  // namespace

extern "C" void start(int waiting) {
  seconds = waiting;
  std::thread([] {
    PyGILState_Ensure();
    for (;; started = true) ask();
  }).detach();
  while (!started) usleep(1000);
}
"""

PROGRAM = """
import atexit, ctypes, sys
from nostall import _native

kept = sys.argv[2] == "kept"
if kept:
    atexit.register(lambda: print(_native.keep_ended_threads(), flush=True))
ctypes.CDLL(sys.argv[1]).start(1 if kept else 60)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++)")
    out = tmp_path_factory.mktemp("ended") / "asks.so"
    subprocess.run(
        [compiler, "-std=c++17", "-x", "c++", "-", "-shared", "-fPIC", "-pthread", "-o", str(out)],
        input=LIBRARY,
        text=True,
        check=True,
    )
    return out


def end(library: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library), what], capture_output=True, text=True
    )


def test_a_thread_that_is_kept_does_not_abort_the_process(library: Path) -> None:
    ended = end(library, "kept")
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python keeps such threads itself")
def test_importing_nostall_changes_nothing_for_threads_of_others(library: Path) -> None:
    assert end(library, "left").returncode == -signal.SIGABRT
