"""What nostall raises. Every message names the path, the rank or the value, and the remedy."""

from __future__ import annotations

__all__ = [
    "BugError",
    "CorruptionError",
    "Error",
    "IoError",
    "PeerError",
    "SignalExit",
    "StoppedError",
    "TransformError",
    "UsageError",
]


class Error(Exception):
    """Base of all errors of nostall; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(Error, ValueError):
    """The call or the configuration cannot be carried out as asked."""

    exit_code = 2


class IoError(Error, OSError):
    """The operating system refused an operation."""

    exit_code = 3


class PeerError(Error, RuntimeError):
    """Another process of this job died, lags, or does not agree with this one."""

    exit_code = 4


class CorruptionError(Error, ValueError):
    """Bytes are not what they should be."""

    exit_code = 5


class TransformError(Error, RuntimeError):
    """The user's own callable failed for a sample.

    Its exception is the cause; of one in a worker process the message has the text and the traceback.
    """

    exit_code = 6


class StoppedError(Error, RuntimeError):
    """The work was stopped by the user."""

    exit_code = 130


class SignalExit(SystemExit):
    """A signal ends the training, after a checkpoint; exit code 75: the job may be run again."""

    def __init__(self, signal: str) -> None:
        super().__init__(75)  # EX_TEMPFAIL of sysexits.h
        self.signal = signal


class BugError(Error, RuntimeError):
    """An invariant of nostall is broken; please report it."""

    exit_code = 70


# What Python raises for a value in a file that has another type or size than it should. Readers turn
# it into a CorruptionError.
UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
