"""Mistakes that a person makes with a ShardedOptimizer in one process. Runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfuse import DataParallel, DPFuseError, ShardedOptimizer
from tests.mistakes.mistakes import Mistake, net, train

__all__ = ["MISTAKES"]

ADAMW = torch.optim.AdamW


def made(what: str, got: str, expected: str, remedy: str, error: Any = ValueError, **options: Any) -> Mistake:
    kind = options.pop("kind", ADAMW)
    return Mistake(lambda _: ShardedOptimizer(DataParallel(net()), kind, **options), error, what, got, expected, remedy)


def used(action: Any, error: Any, *parts: str) -> Mistake:
    """A mistake with an optimizer that has made no step."""
    return Mistake(lambda _: action(ShardedOptimizer(DataParallel(net()), ADAMW)), error, *parts)


def after_backward(action: Any, *parts: str) -> Mistake:
    """A mistake with a model whose gradients are divided among the ranks."""

    def run(_: Path) -> None:
        model = DataParallel(net())
        optimizer = ShardedOptimizer(model, ADAMW)
        action(train(model, 1))
        optimizer.step()

    return Mistake(run, DPFuseError, *parts)


MISTAKES: dict[str, Mistake] = {
    "an optimizer instead of its class": made(
        "optimizer_class",
        "got an instance of AdamW",
        "expected the class of an optimizer",
        "ShardedOptimizer(model, torch.optim.AdamW, lr=...)",
        TypeError,
        kind=ADAMW(net().parameters()),
    ),
    "an optimizer by its name": made(
        "optimizer_class", "got 'AdamW'", "expected the class", "arguments by keyword", TypeError, kind="AdamW"
    ),
    "a layer as an optimizer": made(
        "optimizer_class", "Linear", "expected the class of an optimizer", "Pass the class", TypeError, kind=nn.Linear
    ),
    "a sharded optimizer of a bare module": Mistake(
        lambda _: ShardedOptimizer(net(), ADAMW),
        TypeError,
        "ShardedOptimizer: model",
        "got Sequential",
        "must be wrapped by dpfuse",
        "Pass the result of",
    ),
    "an optimizer of all tensors at once": made(
        "optimizer_class",
        "got LBFGS",
        "expected an optimizer that updates each element by itself",
        "Use LBFGS itself",
        kind=torch.optim.LBFGS,
    ),
    "copies in sixteen bits": made(
        "master_dtype",
        "got torch.bfloat16",
        "must be torch.float32 or None",
        "leave it out",
        master_dtype=torch.bfloat16,
    ),
    "a sharded optimizer of some parameters": Mistake(
        lambda _: ShardedOptimizer(model := DataParallel(net()), ADAMW, [model.module[0].weight]),
        ValueError,
        "in no parameter group",
        "parameter '0.bias' and 2 more",
        "expected all of them",
        "add a group",
    ),
    "a narrow wire with a sharded optimizer": Mistake(
        lambda _: ShardedOptimizer(DataParallel(net(), wire_dtype=torch.bfloat16), ADAMW),
        ValueError,
        "a ShardedOptimizer was made",
        "with wire_dtype=torch.bfloat16",
        "expected one of the two",
        "Leave out one",
    ),
    "the norm of a sharded gradient": after_backward(
        lambda model: model.module[0].weight.grad.norm(),
        "parameter '0.weight'",
        "linalg_vector_norm was called on its gradient",
        "expected no use of .grad",
        "full_gradient",
    ),
    "clipping by torch with a sharded optimizer": after_backward(
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "after a backward with a ShardedOptimizer",
        "was called on its gradient",
        "expected no use of .grad",
        "Clip with model.clip_grad_norm_()",
    ),
    "a gradient by its name": used(
        lambda optimizer: optimizer.full_gradient("0.weight"),
        TypeError,
        "full_gradient",
        "got a str",
        "expected a parameter",
        "model.module.get_parameter(name)",
    ),
    "the state of an optimizer by its path": used(
        lambda optimizer: optimizer.load_state_dict("optimizer.pt"),
        TypeError,
        "load_state_dict",
        "got a str",
        "expected what state_dict()",
        "load_state_dict(torch.load(path))",
    ),
    "the state of a model for an optimizer": used(
        lambda optimizer: optimizer.load_state_dict(net().state_dict()),
        ValueError,
        "load_state_dict",
        "got a dict without 'state' or 'param_groups'",
        "expected what state_dict() of this optimizer",
        "Pass the state dict of an optimizer",
    ),
}
