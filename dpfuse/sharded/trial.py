"""Which parts of a parameter does an optimizer need? It is tried with small matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["needs_whole_tensors"]

STEPS = 3

Make = Callable[[list[Tensor]], Optimizer]


def needs_whole_tensors(kind: type[Optimizer], make: Make, like: Tensor) -> bool:
    """Whether an optimizer needs whole tensors: False if it updates each element by itself.

    A class can say so itself, with an attribute `needs_whole_tensors`. Otherwise its update of a matrix is compared
    with that of two parts of this matrix, and then its update of two matrices with that of each alone.

    Args:
        kind: the class of the optimizer.
        make: makes such an optimizer for parameters.
        like: a parameter, for dtype and device.

    Raises:
        ValueError: it needs even more: the update of one tensor depends on others.
    """
    declared = getattr(kind, "needs_whole_tensors", None)
    if declared is not None:
        return bool(declared)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> list[Tensor]:
        """A start, and the gradients of each step."""
        return [torch.randn(*shape, generator=generator).to(like) for _ in range(STEPS + 1)]

    matrix, other = numbers(4, 6), numbers(6, 4)
    reasons = []
    try:
        cut = [[each.view(-1)[part] for each in matrix] for part in (slice(0, 10), slice(10, 24))]
        (whole,) = _trained(make, [matrix])
        parts = [_trained(make, [part])[0] for part in cut]
        if _same(whole.view(-1), torch.cat(parts)):
            return False
        reasons.append("it updates an element differently in a matrix and in a part of one")
    except Exception as error:
        reasons.append(f"{type(error).__name__}: {error}")
    try:
        together = _trained(make, [matrix, other])
        alone = [_trained(make, [one])[0] for one in (matrix, other)]
        if all(map(_same, together, alone)):
            return True
        reasons.append("it updates a matrix differently if there is another one")
    except Exception as error:
        reasons.append(f"{type(error).__name__}: {error}")
    reason = "; ".join(dict.fromkeys(reasons))
    raise ValueError(
        f"optimizer_class: got {kind.__name__}, expected an optimizer that updates each element by itself, such as "
        "AdamW, or each tensor by itself, such as Muon: each rank has parts of the parameters. Tried with small "
        f"matrices: {reason}. Use {kind.__name__} itself with the wrapped model's parameters."
    )


def _trained(make: Make, all_numbers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors after some steps; each is given by its start and its gradients."""
    params = [start.clone().requires_grad_() for start, *_ in all_numbers]
    optimizer = make(params)
    for step in range(1, STEPS + 1):
        for param, numbers in zip(params, all_numbers, strict=True):
            param.grad = numbers[step].clone()
        optimizer.step()
    return [param.detach() for param in params]


def _same(one: Tensor, other: Tensor) -> bool:
    # In 16 bits, vectorised code and its remainder may round differently.
    return torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3)
