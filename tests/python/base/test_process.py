"""What /proc says of a process, whatever its name is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from nostall.base import _process as process


def test_a_name_may_be_cut_within_a_character(tmp_path: Path) -> None:
    program = tmp_path / ("\u00e4" * 8)
    program.symlink_to(str(shutil.which("cat")))
    with subprocess.Popen([program], stdin=subprocess.PIPE) as running:
        assert int(process.stat(running.pid)[1]) == os.getpid()
