"""A program of gfortran with libnostall_mpi.so preloaded, under Open MPI.

The wheel of Open MPI has no Fortran library, so the program calls nothing but what the library
answers; it checks its results itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mpis import counted, library, run

from nostall.observe.report import _arrivals as arrivals

pytestmark = pytest.mark.multi


def test_fortran_programs_are_answered(tmp_path: Path) -> None:
    gfortran = shutil.which("gfortran")
    if gfortran is None:
        pytest.skip("gfortran is missing; scripts/setup installs it")
    program = tmp_path / "program"
    lib = Path(sys.prefix) / "lib"
    # Linked to what answers in place of a Fortran library. The MPI must be linked, though nothing of it
    # is called: Fortran's MPI_IN_PLACE and the like are variables of its.
    source = Path(__file__).with_name("mpi_fortran.f90")
    compiler = [gfortran, "-O1", "-w", "-fallow-argument-mismatch", "-o", str(program)]
    libraries = [str(library("openmpi")), "-Wl,--no-as-needed", f"-L{lib}", "-lmpi"]
    subprocess.run([*compiler, str(source), *libraries, f"-Wl,-rpath,{lib}"], check=True)
    profiles = tmp_path / "profiles"
    result = run("openmpi", 3, [str(program)], NOSTALL_MPI_PROFILE=str(profiles))
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert (counts["allreduce"], counts["reduce"]) == (10 * 2, 10)
    assert (counts["bcast"], counts["barrier"]) == (10, 1)
    assert (counts["allgather"], counts["allgatherv"]) == (10, 20)
    assert (counts["reduce_scatter"], counts["reduce_scatter_block"]) == (10, 10)
    assert counts["background"] == 10 * 2
    assert counts["nonblocking"] == 10  # the barriers, which have no bytes
    profile = arrivals.read(arrivals.find([str(profiles)]))
    kinds = Counter(call.operation for call in profile.calls)
    assert (kinds["alltoall"], kinds["scan"], kinds["igather"]) == (10, 10, 10)
    tested = [call for call in profile.calls if call.operation == "ialltoall"]
    assert len(tested) == 10
    assert all(call.left.min() >= call.arrived.max() for call in tested)
    assert not profile.left_out
