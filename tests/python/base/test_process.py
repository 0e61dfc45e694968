"""What /proc says of a process, whatever its name is."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from nostall.base import _process as process


def test_a_name_may_be_cut_within_a_character(tmp_path: Path) -> None:
    program = tmp_path / ("\u00e4" * 8)
    program.symlink_to(str(shutil.which("cat")))
    with subprocess.Popen([program], stdin=subprocess.PIPE) as running:
        assert int(process.stat(running.pid)[1]) == os.getpid()


def test_a_process_did_not_begin_before_it_was_started() -> None:
    for _ in range(20):  # at several places of a tick of 10 ms
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        child = os.fork()
        if child == 0:
            try:
                os._exit(not before <= process.began() <= before + 60)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        time.sleep(0.003)
