"""Limits of the system, for a process that a test has forked."""

from __future__ import annotations

import ctypes
import errno
import os
import struct


def refuse_threads() -> None:
    """The kernel starts no thread for this one any more, as at a limit of processes (seccomp)."""
    clone, clone3 = {"x86_64": (56, 435), "aarch64": (220, 435)}[os.uname().machine]
    refuse, allow = 0x00050000 | errno.EAGAIN, 0x7FFF0000
    rules = [(0x20, 0, 0, 0)]  # load the number of the call
    for number in (clone, clone3):
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, refuse)]
    rules.append((0x06, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
