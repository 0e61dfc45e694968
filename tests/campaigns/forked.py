"""A child that does one thing and ends without the clean-up of its parent's interpreter."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def fork(work: Callable[[], None]) -> int:
    """The child's process number; its status is 1, and its error told, if `work` raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid
