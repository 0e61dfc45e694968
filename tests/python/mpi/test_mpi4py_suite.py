"""The test suite of mpi4py with libnostall_mpi.so preloaded, under Open MPI and under MPICH.

Here are the modules that call what the library answers. All of it, by hand, in some minutes:
``python tests/python/mpi/test_mpi4py_suite.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from mpis import BUILD, MPIS, counted, run

pytestmark = pytest.mark.multi
SUITE = BUILD / "mpi4py" / "test"
# Modules, and tests to leave out: those of collectives that are not replaced.
OTHERS = [w for name in ("Gather", "Scatter", "Alltoall", "Scan") for w in ("-x", name)]
STARTED = ["-i", "test_cco_nb_buf.py", "-x", "Self", *OTHERS]
# What a communicator is, its attributes, its errors, its life; requests and operations.
AROUND = ("attributes", "comm", "comm_inter", "comm_topo", "dynproc", "errhandler", "exceptions")
AROUND += (
    "grequest",
    "group",
    "mpiapi",
    "op",
    "request",
    "session",
    "threads",
    "ulfm",
    "util_sync",
)
SEEN = [word for name in AROUND for word in ("-i", f"test_{name}.py")]
BLOCKING = ["-i", "test_cco_buf.py", "-i", "test_cco_obj.py", "-i", "test_mpimem.py"]
SELECTED = [*BLOCKING, *SEEN, *OTHERS]


def suite(which: str, ranks: int, options: list[str], timeout: float = 800, **settings: str) -> str:
    """What the suite printed; fails the test with it unless all passed on all ranks."""
    if not SUITE.exists():
        pytest.skip(f"mpi4py's test suite: {SUITE} is missing; scripts/mpi-suite fetches it")
    program = [sys.executable, "main.py", "-f", *options]
    result: subprocess.CompletedProcess[str] = run(
        which, ranks, program, SUITE, timeout, **settings
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-8000:]
    # The last word of each rank.
    assert len(re.findall(r"OK", output)) == ranks, output[-8000:]
    return output


# Seconds where there is a core for each rank; MPICH's ranks spin, so a busy machine needs minutes.
@pytest.mark.parametrize("which", MPIS)
def test_blocking_collectives_and_what_sees_communicators_and_requests_pass(which: str) -> None:
    counts = counted(suite(which, 2, SELECTED))
    assert counts["allreduce"] > 1000
    assert counts["reduce"] > 1000
    assert counts["bcast"] > 500


@pytest.mark.parametrize("which", MPIS)
def test_nonblocking_collectives_pass(which: str) -> None:
    counts = counted(suite(which, 2, STARTED, NOSTALL_MPI_NONBLOCKING="0"))
    assert counts["background"] > 1000


if __name__ == "__main__":
    for each in MPIS:
        for ranks in (2, 3):
            found = suite(each, ranks, sys.argv[1:], timeout=3600)
            print(each, ranks, "ranks:", *re.findall(r"Ran .*", found), counted(found), sep="\n  ")
