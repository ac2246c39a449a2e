"""Names of a program's variables: automatic names, names of gradients, and suggestions for wrong names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import chain, count

from torch import fx

__all__ = ["GRAD", "automatic_names", "suggestion"]

GRAD = "@GRAD"  # NAME@GRAD is the gradient of NAME


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the known names nearest to `name`, or with some known names.

    Example:
        >>> from dpfuse.paddle.static.names import suggestion
        >>> suggestion("los", ["loss", "y"])
        "Did you mean 'loss'?"
        >>> suggestion("z", ["loss", "y"])
        "Known are 'loss', 'y'."
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    if near:
        return f"Did you mean {', '.join(map(repr, near))}?"
    if not names:
        return "There are none."
    return f"Known are {', '.join(map(repr, names[:8]))}{', …' if len(names) > 8 else '.'}"


def automatic_names(graph: fx.Graph, chosen: Mapping[str, fx.Node], taken: Iterable[str]) -> dict[str, fx.Node]:
    """Return the automatic names of the values that a graph computes.

    Args:
        graph: the graph.
        chosen: nodes by names that the user chose.
        taken: names of other variables.

    Returns:
        Nodes by name. The name is the path of the module, or the name of the function, that computes the value. A
        number is added if the name is taken.

    Example:
        >>> from torch import fx, nn
        >>> from dpfuse.paddle.static.names import automatic_names
        >>> graph = fx.symbolic_trace(nn.Sequential(nn.ReLU())).graph
        >>> list(automatic_names(graph, {}, []))
        ['0']
        >>> list(automatic_names(graph, {}, ["0"]))
        ['0_1']
    """
    unavailable = {*chosen, *taken}
    names: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op not in ("get_attr", "output", "placeholder"):
            name = str(node.target) if node.op == "call_module" else node.name
            if chosen.get(name) is not node:
                numbered = (f"{name}_{number}" for number in count(1))
                name = next(one for one in chain([name], numbered) if one not in unavailable)
            unavailable.add(name)
            names[name] = node
    return names
