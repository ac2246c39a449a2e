"""Captures a module's forward as a graph, by symbolic tracing."""

from __future__ import annotations

from typing import NoReturn

from torch import fx, nn

from dpfuse.paddle.static.evaluation import remember_mode

__all__ = ["captured"]


class _Tracer(fx.Tracer):
    def to_bool(self, obj: fx.Proxy) -> NoReturn:
        raise ValueError(f"control flow depends on the value of {obj.node.name!r}")

    def iter(self, obj: fx.Proxy) -> NoReturn:
        raise ValueError(f"a loop runs over the value of {obj.node.name!r}")


def captured(module: nn.Module) -> fx.Graph:
    """Return the graph of `module.forward`. Each module of torch.nn is one operation.

    Raises:
        ValueError: Tracing cannot follow the forward.

    Example:
        >>> import torch
        >>> from dpfuse.paddle.static.capture import captured
        >>> [node.op for node in captured(torch.nn.ReLU()).nodes]
        ['placeholder', 'call_function', 'output']
    """
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # forward is the user's code, and gets proxies instead of tensors
        raise ValueError(
            f"forward of {type(module).__name__} cannot be captured: {error}. Expected torch operations that are the "
            "same for every value. Decorate functions that cannot be traced with torch.fx.wrap, or build the program "
            "under program_guard, where each module is one operation."
        ) from error
    for node in graph.nodes:
        if node.op == "call_module":
            remember_mode(node, module.get_submodule(str(node.target)))
    return graph
