"""What `.grad` is while each rank has one part of the gradient. It has no memory, and a read raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.errors import DPFuseError

__all__ = ["RegionPart", "ShardedGradient", "used_up"]

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@dataclass(frozen=True)
class RegionPart:
    """What this rank has of the gradients in one region of a bucket.

    Args:
        part: [elements], without the padding after the last gradient.
        address: of the memory of the whole region.
        count: of the gradients.
        in_backward: whether the gradients are used up when a backward returns.
    """

    part: Tensor
    address: int
    count: int
    group: dist.ProcessGroup
    in_backward: bool = False


class ShardedGradient(Tensor):
    """Stands for a gradient of which each rank has one part; it looks like its parameter.

    torch's `GradScaler` can unscale it. Every other operation raises.

    Args:
        own: this rank's part of it, [elements], in memory order; may be empty.
        region: in which it lies.
        start: where `own` begins in the gradient, in elements.

    Source: torch's wrapper subclasses, `Tensor._make_wrapper_subclass`.
    """

    name_of_param: str
    own: Tensor
    region: RegionPart
    start: int

    @staticmethod
    def __new__(cls, param: Tensor, name: str, own: Tensor, region: RegionPart, start: int) -> ShardedGradient:
        made = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        made.name_of_param, made.own, made.region, made.start = name, own, region, start
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.name_of_param!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA:  # it calls no operation, and the new data would be ignored
            if args[1] is args[0]:  # as where `module.cpu()` converts nothing
                return None
            raise _misuse(args[0], "the setter of .data")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = [*_found_in([*args, *(kwargs or {}).values()])]
        if func is UNSCALE and len(found) == len(args[0]) and not found[0].region.in_backward:
            return _unscale(found, args[1], args[2])
        raise _misuse(found[0], str(func).removeprefix("aten.").partition(".")[0])


def _misuse(grad: ShardedGradient, what: str) -> DPFuseError:
    text = f"parameter {grad.name_of_param!r}: {what} was called on its gradient"
    if grad.region.in_backward:
        return used_up(text)
    return DPFuseError(
        f"{text}, expected no use of .grad: after a backward with a ShardedOptimizer each rank has one part of it. "
        "Clip with model.clip_grad_norm_(), read with optimizer.full_gradient(parameter), and call "
        "optimizer.zero_grad() before the next backward (without set_to_none=False)."
    )


def used_up(what: str) -> DPFuseError:
    """Return the error for the use of a gradient that was used up in backward."""
    return DPFuseError(
        f"{what}, expected no use of .grad: with step_in_backward=True, backward has updated the parameters with it. "
        "Clip with clip_by_last_norm, and call optimizer.step() and optimizer.zero_grad() before the next backward."
    )


def _unscale(grads: Sequence[ShardedGradient], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale this rank's parts, and tell all ranks whether one has a value that is not finite."""
    owns = [grad.own for grad in grads if grad.own.numel()]
    if owns:
        torch._amp_foreach_non_finite_check_and_unscale_(owns, found_inf, inv_scale)
    collective.all_reduce_max(found_inf, grads[0].region.group)


def _found_in(values: Any) -> Iterator[ShardedGradient]:
    if isinstance(values, ShardedGradient):
        yield values
    elif isinstance(values, Mapping):
        yield from _found_in(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _found_in(value)
