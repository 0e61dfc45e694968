"""Packages that read a module when one of its names is first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, modules: Mapping[str, str], instead: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package, whose names are in these modules.

    Those of "." are modules themselves. A program needs few of all, and pays at its start for what is
    read. `instead` says of names of other libraries what serves here.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def read(name: str) -> Any:
        if name not in home:
            near = f": {instead[name]}" if instead and name in instead else ""
            # Names with "_" are asked for by Python, for modules that it then imports.
            if not near and not name.startswith("_"):
                from nostall.base._options import suggestion

                here = (n for n in vars(sys.modules[package]) if not n.startswith("_"))
                near = suggestion(name, [*home, *here])
            raise AttributeError(f"module {package!r} has no attribute {name!r}{near}")
        if home[name] == ".":
            return importlib.import_module(f".{name}", package)
        value = getattr(importlib.import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return read, lambda: sorted({*vars(sys.modules[package]), *home})
