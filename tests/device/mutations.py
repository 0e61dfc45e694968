"""The product without one of the calls that order the work of a device, each in turn.

A site is such a call in a function: of an event or a stream of torch, or of a function that is one such
call and no more. What takes it away leaves everything else as it is, arguments included.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import nostall

# Of torch's events, streams and tensors.
ORDERS = frozenset(
    ("query", "record", "record_event", "record_stream", "synchronize", "wait_event", "wait_stream")
)
# Functions of one call that orders by another name.
ALSO = frozenset(("arrive", "set_aside"))
# Modules of the product whose sites the tests take away. Their own lists have every one of them.
MODULES = (
    "nostall.checkpoint._device",
    "nostall.checkpoint._landing",
    "nostall.torch._device",
    "nostall.torch._device_gradients",
)


class Site(NamedTuple):
    module: str
    function: str
    call: str
    number: int  # of the calls of this name in the function

    def __str__(self) -> str:
        number = f" {self.number + 1}" if self.number else ""
        return f"{self.function}: {self.call}{number}"


def sites(module: str) -> dict[str, Site]:
    """All of a module, by their names."""
    return {str(site): site for site, _ in _sites(module, _tree(module))}


def files() -> set[str]:
    """The modules of the product in which something orders the work of a device."""
    root = Path(nostall.__file__).parent
    return {
        ".".join(("nostall", *path.relative_to(root).with_suffix("").parts))
        for path in root.rglob("*.py")
        if any(_called(node) in ORDERS for node in ast.walk(ast.parse(path.read_text())))
    }


@contextlib.contextmanager
def without(site: Site) -> Iterator[None]:
    """Functions that begin inside lack the call."""
    module, tree = importlib.import_module(site.module), _tree(site.module)
    ((_, call),) = [pair for pair in _sites(site.module, tree) if pair[0] == site]
    function: Any = module
    for word in site.function.split("."):
        function = getattr(function, word)
        if inspect.isfunction(function):  # those inside it are constants of its code
            break
    before = function.__code__
    changed = compile(_Taken(call).visit(tree), str(module.__file__), "exec")
    function.__code__ = _code(changed, function.__qualname__)
    try:
        yield
    finally:
        function.__code__ = before


def check(
    modules: tuple[str, ...],
    needed: Mapping[str, tuple[Callable[[], list[str]], str]],
    others: Mapping[str, str],
) -> None:
    """Each site but `others`, of which it is said why, is needed: without it the scenario tells so."""
    found = {name: site for module in modules for name, site in sites(module).items()}
    assert found.keys() == needed.keys() | others.keys(), found.keys() ^ needed.keys()
    for scenario in {str(scenario): scenario for scenario, _ in needed.values()}.values():
        assert scenario() == [], scenario
    for name, (scenario, words) in needed.items():
        with without(found[name]):
            told = scenario()
        assert any(words in line for line in told), (name, told)


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _called(node: ast.AST) -> str:
    """The name of what is called there."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _shorthands(tree: ast.Module) -> set[str]:
    """Functions of one statement that orders."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and len(node.body) == 2  # with its sentence
        and any(_called(each) in ORDERS or node.name in ALSO for each in ast.walk(node))
    }


def _sites(module: str, tree: ast.Module) -> Iterator[tuple[Site, ast.Call]]:
    short = set().union(*(_shorthands(_tree(each)) for each in MODULES))
    seen: dict[tuple[str, str], int] = {}

    def visit(node: ast.AST, function: str) -> Iterator[tuple[Site, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                if not (node is tree and child.name in short):
                    yield from visit(child, f"{function}.{child.name}".lstrip("."))
                continue
            name = _called(child)
            if isinstance(child, ast.Call) and name in (
                ORDERS if isinstance(child.func, ast.Attribute) else short
            ):
                number = seen[function, name] = seen.get((function, name), -1) + 1
                yield Site(module, function, name, number), child
            yield from visit(child, function)

    return visit(tree, "")


class _Taken(ast.NodeTransformer):
    def __init__(self, call: ast.Call) -> None:
        self._call = call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self._call:
            return self.generic_visit(node)
        if _called(node) == "set_aside":  # its value is the argument
            return node.args[0]
        parts = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return ast.copy_location(ast.Tuple([*parts, *node.args], ast.Load()), node)


def _code(code: CodeType, name: str) -> CodeType:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == name:
                return each
            if name.startswith(each.co_qualname + "."):
                return _code(each, name)
    raise KeyError(name)
