"""The value of each option: the argument over the environment over nostall.toml over the default.

The file is the one that NOSTALL_CONFIG names, else nostall.toml of the working directory if it is
there and no other user can write it; it is read once in a process. A variable that is empty counts
as not set. Every value is checked, and an error names where it came from.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nostall.base._table import TABLE, Option
from nostall.errors import UsageError

T = TypeVar("T")
_ROWS = {option.key: option for option in TABLE}
_log = logging.getLogger("nostall")
_CONFIG = _ROWS["config.file"].variable
_FILE = "nostall.toml"


@dataclass(frozen=True)
class Found:
    """An option's value in force, and `place`: the variable or the key of the file it is from."""

    option: Option
    value: Any
    place: str


def row(key: str) -> Option:
    """The option "section.name"."""
    return _ROWS[key]


def value(key: str, environment: Mapping[str, str] | None = None) -> Any:
    """The value in force of an option that was not given as an argument.

    Raises:
        UsageError: the value, or the file, cannot be meant.
    """
    return find(key, environment).value


def find(key: str, environment: Mapping[str, str] | None = None) -> Found:
    """As `value`, and where it came from."""
    option = _ROWS[key]
    env = os.environ if environment is None else environment
    if option.variable and (text := env.get(option.variable)):
        given = _checked(option, option.values.parse(text), option.variable)
        return Found(option, given, option.variable)
    if option.file:
        path, values = _read(env)
        if key in values:
            return Found(option, values[key], f"{path}: [{option.section}] {option.name}")
    return Found(option, option.default, "default")


def checked(key: str, given: Any) -> Any:
    """An argument as a plain value of Python.

    Numbers and flags of NumPy are taken and converted: JSON and ``is False`` do not work with them.

    Raises:
        UsageError: it cannot be meant.
    """
    return _checked(_ROWS[key], given, _ROWS[key].name)


def names(section: str) -> list[str]:
    """Of the options of a section."""
    return [option.name for option in TABLE if option.section == section]


def in_force(key: str) -> Any:
    """A field of a dataclass of options, whose default is the value in force."""
    return dataclasses.field(default_factory=functools.partial(value, key))


def check_fields(given: Any, section: str) -> None:
    """Checks the fields of a frozen dataclass of options, and makes them plain values.

    Raises:
        UsageError: a value that cannot be meant, with its option.
    """
    for field in dataclasses.fields(given):
        plain = checked(f"{section}.{field.name}", getattr(given, field.name))
        object.__setattr__(given, field.name, plain)


def merged(
    kind: type[T],
    given: T | None,
    arguments: Mapping[str, Any],
    section: str,
    owner: str,
    hints: Mapping[str, str] | None = None,
) -> T:
    """The options with keyword arguments of `owner` in their place.

    `hints` says of names that other libraries use what there is instead.

    Raises:
        UsageError: `given` is something else, or there is no such option.
    """
    if given is not None and not isinstance(given, kind):
        raise UsageError(f"options must be nostall.{kind.__name__}, or None, not {given!r}")
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in arguments:
        if name not in fields:
            hint = f": {hints[name]}" if hints and name in hints else ""
            hint = hint or suggestion(name, names(section), "{}=")
            raise UsageError(f"{owner} has no option {name}{hint}")
    return dataclasses.replace(given or kind(), **arguments)  # type: ignore[type-var]


def document(kind: Any, section: str) -> None:
    """Adds what the table says of the fields of a dataclass of options to its docstring."""
    rows = (_ROWS[f"{section}.{field.name}"] for field in dataclasses.fields(kind))
    lines = (f"    {o.name}: {o.text}; {o.values.text} (default: {o.usual})" for o in rows)
    kind.__doc__ = "\n".join((inspect.cleandoc(kind.__doc__), "", "Attributes:", *lines))


def suggestion(name: str, known: Iterable[str], form: str = "{}") -> str:
    """The end of an error about an unknown name: the known one that it looks like, if any."""
    import difflib

    near = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {form.format(near[0])}?" if near else ""


def unknown_variables() -> Iterator[str]:
    """Variables that begin with NOSTALL_ and that nothing reads, in a sentence each."""
    known = [option.variable for option in TABLE if option.variable]
    for name in sorted(os.environ):
        if name.startswith("NOSTALL_") and name not in known:
            yield f"{name} is read by nothing{suggestion(name, known)}"


def _checked(option: Option, given: Any, place: str) -> Any:
    if wrong := option.values.wrong(given):
        raise UsageError(f"{place} {wrong}" + ("" if option.secret else f", not {given!r}"))
    return given.item() if isinstance(given, np.generic) else given


def _read(environment: Mapping[str, str]) -> tuple[str, Mapping[str, Any]]:
    named = environment.get(_CONFIG, "")
    return named or _FILE, _parsed(_place(named), bool(named))


@functools.lru_cache(maxsize=8)
def _place(named: str) -> str:
    """The file's path from the root, found once: a program may change its directory later."""
    return str(Path(named or _FILE).absolute())


def _content(path: str, named: bool) -> str | None:
    """The text of the file; None if there is none, or one that others may have written.

    A file that is not named counts only if it is this user's (or root's) and no other may write it:
    working directories can be shared, and options name files that are written to.
    """
    try:
        # Without O_NONBLOCK a FIFO of that name would block for ever.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if named:
            raise UsageError(f"{_CONFIG}={path} is not there") from None
        return None
    with open(file, encoding="utf-8") as text:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a file")
        foreign = status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022
        if foreign and not named:
            _log.warning(
                "%s is not used, because other users can write it: chmod go-w, or set %s",
                path,
                _CONFIG,
            )
            return None
        return text.read()


@functools.lru_cache(maxsize=8)
def _parsed(path: str, named: bool) -> Mapping[str, Any]:
    """Values by "section.name", read once in a process."""
    try:
        if (written := _content(path, named)) is None:
            return {}
        import tomllib

        content = tomllib.loads(written)
    except UsageError:  # which is a ValueError
        raise
    except ValueError as error:  # of TOML, or of UTF-8
        raise UsageError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise UsageError(f"the options of {path} cannot be read: {error.strerror}") from error
    sections = list(dict.fromkeys(o.section for o in TABLE if o.file))
    values: dict[str, Any] = {}
    for section, keys in content.items():
        if section not in sections or not isinstance(keys, dict):
            raise UsageError(
                f"{path} has no section [{section}]"
                + (suggestion(section, sections, "[{}]") or f"; it may have {', '.join(sections)}")
            )
        for name, given in keys.items():
            option = _ROWS.get(f"{section}.{name}")
            if option is None:
                known = [o.name for o in TABLE if o.section == section and o.file]
                raise UsageError(
                    f"{path}: [{section}] has no option {name}{suggestion(name, known)}"
                )
            if not option.file:
                instead = f"set {option.variable}" if option.variable else f"pass {name}="
                raise UsageError(
                    f"{path}: [{section}] {name} is not an option of the file: {instead}"
                )
            values[option.key] = _checked(option, given, f"{path}: [{section}] {name}")
    return values
