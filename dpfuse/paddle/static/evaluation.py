"""Training and evaluation mode of recorded calls. A module has a mode; a function has an argument for it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn

__all__ = ["in_evaluation_mode", "remember_mode", "set_mode"]

MODE = "dpfuse: training"  # key in the metadata of a node

DROPOUTS = (
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)

# Functions written in C++ have no signature: position and name of the argument, and its value in evaluation.
BUILT_IN: dict[Any, tuple[int, str, Any]] = {
    **dict.fromkeys(DROPOUTS, (2, "train", False)),
    torch.batch_norm: (5, "training", False),
    torch.rrelu: (3, "training", False),
    torch.rrelu_: (3, "training", False),
    torch.nn.functional.scaled_dot_product_attention: (4, "dropout_p", 0.0),
}


def in_evaluation_mode(node: fx.Node) -> None:
    """Put a recorded call of `F.dropout`, `F.batch_norm` or a similar function in evaluation mode.

    Other calls do not change.
    """
    if node.op != "call_function":
        return
    if node.target in BUILT_IN:
        place, name, value = BUILT_IN[node.target]
    else:
        try:
            parameters = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return
        if "training" not in parameters:
            return
        place, name, value = parameters.index("training"), "training", False
    if len(node.args) > place:
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def remember_mode(node: fx.Node, module: nn.Module) -> None:
    """Record the mode of a module and of its submodules at the time of its call."""
    node.meta[MODE] = [inner.training for inner in module.modules()]


def set_mode(node: fx.Node, module: nn.Module) -> None:
    """Give a copy of a module the mode that was recorded with its call."""
    for inner, training in zip(module.modules(), node.meta[MODE], strict=False):
        inner.training = training
