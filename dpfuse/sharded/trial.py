"""What does an optimizer need: parts of a parameter, and its states alone? It is tried with small matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["keeps_elsewhere", "needs_whole_tensors", "widest"]

STEPS = 3

Make = Callable[[list[Tensor]], Optimizer]


def needs_whole_tensors(kind: type[Optimizer], make: Make, like: Tensor) -> bool:
    """Whether an optimizer needs whole tensors: False if it updates each element by itself.

    A class can say so itself, with an attribute `needs_whole_tensors`. Otherwise what it adds to a matrix is compared
    with what it adds to two parts of this matrix, and then that of two matrices with that of each alone.

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
    matrix, other = _numbers(4, 6, like), _numbers(6, 4, like)
    reasons = []
    try:
        cut = [[each.view(-1)[part] for each in matrix] for part in (slice(0, 10), slice(10, 24))]
        (whole,) = _trained(make, [matrix])
        parts = [_trained(make, [part])[0] for part in cut]
        if _same(whole.view(-1), torch.cat(parts), like):
            return False
        reasons.append("it updates an element differently in a matrix and in a part of one")
    except Exception as error:
        reasons.append(f"{type(error).__name__}: {error}")
    try:
        together = _trained(make, [matrix, other])
        alone = [_trained(make, [one])[0] for one in (matrix, other)]
        if all(_same(one, other, like) for one, other in zip(together, alone, strict=True)):
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


def keeps_elsewhere(make: Make, like: Tensor) -> bool:
    """Whether an optimizer's next step needs more than its `state` and its settings, such as attributes of its own.

    A step after its state has moved to another optimizer of its class is compared with one without this move.

    Args:
        make: makes such an optimizer for parameters.
        like: a parameter, for dtype and device.
    """
    matrix = _numbers(4, 6, like)
    try:
        (stayed,), (moved,) = _trained(make, [matrix]), _trained(make, [matrix], moving=True)
    except Exception:
        return False  # `needs_whole_tensors` says what is wrong, unless the class speaks for itself
    return not torch.equal(stayed, moved)


def _numbers(rows: int, columns: int, like: Tensor) -> list[Tensor]:
    """Return a start, and the gradients of each step."""
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, columns, generator=generator, device="cpu").to(like) for _ in range(STEPS + 1)]


def _trained(make: Make, all_numbers: Sequence[Sequence[Tensor]], *, moving: bool = False) -> list[Tensor]:
    """Return what some steps add to tensors; each is given by its start and its gradients.

    Args:
        moving: whether each step has an optimizer of its own, with the states and settings of the last one.
    """
    params = [start.clone().requires_grad_() for start, *_ in all_numbers]
    optimizer = make(params)
    for step in range(1, STEPS + 1):
        for param, numbers in zip(params, all_numbers, strict=True):
            param.grad = numbers[step].clone()
        optimizer.step()
        if moving:
            optimizer = _moved(optimizer, make(params))
    return [param.detach() - start for param, (start, *_) in zip(params, all_numbers, strict=True)]


def _moved(old: Optimizer, new: Optimizer) -> Optimizer:
    params = {param for group in new.param_groups for param in group["params"]}
    for param, state in old.state.items():
        if not isinstance(param, Tensor) or param not in params:
            continue  # what is kept under other keys does not move
        new.state[param] = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    for group, before in zip(new.param_groups, old.param_groups, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
    return new


def _same(one: Tensor, other: Tensor, like: Tensor) -> bool:
    """Whether two changes of the same numbers are equal but for rounding, which the dtype of `like` tells."""
    one, other = one.double(), other.double()
    # The numbers are below 4. Vectorised code and its remainder may round differently.
    rounding = 16 * torch.finfo(like.dtype).eps
    return torch.allclose(one, other, rtol=0.0, atol=rounding + 1e-3 * float(one.abs().max()))


def widest(make: Make, like: Tensor) -> Tensor:
    """Return what to try: in 32 bits, where 16 would hide small changes, if the optimizer works with that."""
    if like.itemsize > 2:
        return like
    wide = like.float()
    try:
        _trained(make, [_numbers(4, 6, wide)])
    except Exception:
        return like
    return wide
