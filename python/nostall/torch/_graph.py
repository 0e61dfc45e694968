"""The order in which autograd will produce gradients, read off its graph before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# (parents, tensor or -1, priority), as native/sync/order.h takes them.
Node = tuple[list[int], int, int]


def backward_graph(root: Any, numbers: Mapping[int, int]) -> list[Node]:
    """The graph that ``backward()`` from `root` will run, one node per function.

    A function runs when all functions that use its output have run. Among those that can run, autograd
    takes the one with the highest sequence number first, which is the latest of the forward pass.

    Args:
        root: a tensor with a gradient function, for example the loss.
        numbers: the number of each parameter, by its ``id``.
    """
    if root.grad_fn is None:
        raise ValueError("this tensor has no graph: nothing that needs a gradient led to it")
    number: dict[Any, int] = {root.grad_fn: 0}
    nodes: list[Node] = [([], -1, _priority(root.grad_fn))]
    open_functions = [root.grad_fn]
    while open_functions:
        function = open_functions.pop()
        here = number[function]
        for following, _ in function.next_functions:
            if following is None:
                continue
            if following not in number:
                number[following] = len(nodes)
                variable = getattr(following, "variable", None)
                tensor = -1 if variable is None else numbers.get(id(variable), -1)
                nodes.append(([], tensor, _priority(following)))
                open_functions.append(following)
            parents = nodes[number[following]][0]
            if not parents or parents[-1] != here:
                parents.append(here)
    return nodes


def _priority(function: Any) -> int:
    sequence = getattr(function, "_sequence_nr", None)
    if hasattr(function, "variable") or sequence is None:
        return (1 << 62) - 1  # gradients are stored as soon as they are computed
    return min(int(sequence()), (1 << 62) - 1)
