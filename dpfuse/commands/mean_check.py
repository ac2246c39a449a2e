"""The check before the timing: after a backward every `.grad` is the mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm import collective, votes
from dpfuse.comm.waiting import NO_LIMIT

__all__ = ["check_mean"]

ROUNDINGS = 4  # allowed for each rank: its own gradient is rounded, and so is the sum


def check_mean(name: str, module: nn.Module, backward: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Run `backward` and compare each gradient with the mean of what the ranks' engines computed in it.

    The mean and the gradients come from the same backward, so dropout and nondeterministic kernels do not matter. If a
    wrapper of torch and one of dpfuse both pass, they give the same gradients. On one or two ranks the comparison is
    exact. With more ranks the sum depends on its order, and the tolerance allows for its rounding. The gradients are
    set to None afterwards.

    Args:
        name: of the wrapper, for the error.
        module: with the parameters to check.
        backward: a forward and a backward of the wrapped module.
        group: over which it averages.

    Raises:
        DPFuseError: a gradient differs on some rank; raised on every rank.
    """
    with _recorded(module) as local:
        backward()

    differing: list[str] = []
    not_finite: list[str] = []
    for key, param in module.named_parameters():
        if not param.requires_grad:
            continue
        zeros = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        expected = local.pop(key, zeros).contiguous()  # the same order of elements on ranks with other strides
        expected *= 1 / group.size()
        collective.all_reduce(expected, group).wait(NO_LIMIT)
        if not torch.isfinite(expected).all():
            not_finite.append(key)
        got = torch.zeros_like(expected) if param.grad is None else _dense(param.grad)
        if not _equal(got, expected, group.size()):
            differing.append(key)
        param.grad = None

    def check() -> None:
        if not_finite:
            raise ValueError(
                f"the mean gradient of {not_finite[0]!r} holds NaN or infinity, which cannot be compared; expected a "
                "batch on which the loss has finite gradients"
            )
        if differing:
            more = f" and {len(differing) - 1} more" if differing[1:] else ""
            raise ValueError(
                f"the gradient of {differing[0]!r}{more} is not the mean over the ranks. Does the loss run the model "
                "that it is called with? Pass --find_unused_parameters if some parameters get no gradient, which "
                "torch's DDP must be told"
            )

    votes.agree_on_success(check, group, f"the check of {name}")


def _equal(got: Tensor, expected: Tensor, ranks: int) -> bool:
    if ranks <= 2:
        return torch.equal(got, expected)
    if not expected.numel():
        return True
    largest = float(expected.abs().max())
    return torch.allclose(got, expected, rtol=0, atol=ROUNDINGS * ranks * torch.finfo(expected.dtype).eps * largest)


@contextmanager
def _recorded(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the gradients that the autograd engine accumulates, summed by parameter."""
    found: dict[str, Tensor] = {}

    def saver(key: str) -> Callable[[Tensor], None]:
        def save(grad: Tensor) -> None:
            copy = _dense(grad).clone()
            found[key] = found[key] + copy if key in found else copy

        return save

    handles = [param.register_hook(saver(key)) for key, param in module.named_parameters() if param.requires_grad]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()
