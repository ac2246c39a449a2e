"""Is an optimizer elementwise? It is tried with a small matrix, as a whole and in two parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.sharded.shard import settings_of

__all__ = ["refuse_others"]

STEPS = 3


def refuse_others(plain: Optimizer, group: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    """Raise ValueError if an optimizer of this class does not update each element by itself.

    Args:
        plain: an optimizer of the class.
        group: one of its parameter groups.
        keywords: arguments of the class.
    """
    kind, settings, like = type(plain), settings_of(group), group["params"][0]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator).to(like)
    grads = [torch.randn(4, 6, generator=generator).to(like) for _ in range(STEPS)]
    try:
        whole = _trained(kind, settings, keywords, start, grads)
        parts = [
            _trained(kind, settings, keywords, start.view(-1)[part], [grad.view(-1)[part] for grad in grads])
            for part in (slice(0, 10), slice(10, 24))
        ]
        # In 16 bits, vectorised code and its remainder may round differently.
        same = torch.allclose(whole.view(-1).float(), torch.cat(parts).float(), rtol=1e-2, atol=1e-3)
        reason = "" if same else "it updates an element differently in a matrix and in a part of one"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise ValueError(
            f"optimizer_class: got {kind.__name__}, expected an optimizer that updates each element by itself, such as "
            f"SGD or AdamW: each rank has parts of the parameters. Tried with a 4 x 6 matrix: {reason}. Use "
            f"{kind.__name__} itself with the wrapped model's parameters."
        )


def _trained(
    kind: type[Optimizer], settings: Mapping[str, Any], keywords: Mapping[str, Any], start: Tensor, grads: list[Tensor]
) -> Tensor:
    param = start.clone().requires_grad_()
    optimizer = kind([{"params": [param], **settings}], **keywords)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()
