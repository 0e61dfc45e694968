"""The process of one campaign. Not in __main__, which a spawned process does not find by its name."""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import traceback

from campaigns.outcome import Outcome, Task


def serve(name: str, task: Task, answer: multiprocessing.connection.Connection) -> None:
    os.setsid()
    try:
        answer.send(importlib.import_module(f"campaigns.{name}").run(task))
    except BaseException:
        answer.send(Outcome(cases=0, failures=[traceback.format_exc()]))
