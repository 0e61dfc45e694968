"""Compiles DeepSpeed's allreduce over shared memory, once, and answers with the path of its library.

A process of its own: importing DeepSpeed takes seconds, and ranks that only load the library are
spared them.
"""

from __future__ import annotations

from typing import Any

from nostall_bench import harness


def build(settings: dict[str, Any]) -> str:
    """The library of ``deepspeed_shm_comm``, compiled or found in torch's cache of extensions."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    return str(ShareMemCommBuilder().load(verbose=False).__file__)


if __name__ == "__main__":
    harness.answer(build)
