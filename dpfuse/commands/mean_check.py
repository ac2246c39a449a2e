"""The proof before the timing: after a backward every `.grad` is the mean over the ranks, to the last bit at two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.engine import collective, votes

__all__ = ["check_mean"]

ROUNDINGS = 4  # of each rank's gradient, and of the sum after it


def check_mean(name: str, module: nn.Module, backward: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Run `backward` and compare each gradient with the mean of what the ranks' engines computed in it.

    Since it is the same backward, dropout and kernels that are never the same twice do no harm. A wrapper of torch
    and one of dpfuse that both pass hold the same gradients. A mean over one or two ranks has one value; with more it
    depends on the order of the sum, and the tolerance is that of its rounding. Gradients are dropped afterwards.

    Args:
        name: of the wrapper, for the error.
        module: whose parameters are looked at.
        backward: a forward and a backward of the wrapped module.
        group: over which it averages.

    Raises:
        DPFuseError: some gradient differs, on some rank; on every rank.
    """
    with _recorded(module) as local:
        backward()

    differing: list[str] = []
    endless: list[str] = []
    for key, param in module.named_parameters():
        if not param.requires_grad:
            continue
        zeros = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        expected = local.pop(key, zeros).contiguous()  # elements in the same order, whatever the strides of a rank
        expected *= 1 / group.size()
        collective.all_reduce(expected, group).wait()
        if not torch.isfinite(expected).all():
            endless.append(key)
        got = torch.zeros_like(expected) if param.grad is None else _dense(param.grad)
        if not _equal(got, expected, group.size()):
            differing.append(key)
        param.grad = None

    def check() -> None:
        if endless:
            raise ValueError(
                f"the mean gradient of {endless[0]!r} holds NaN or infinity, which cannot be compared; expected a "
                "batch on which the loss has finite gradients"
            )
        if differing:
            more = f" and {len(differing) - 1} more" if differing[1:] else ""
            raise ValueError(
                f"the gradient of {differing[0]!r}{more} is not the mean over the ranks. Does the loss run the model "
                "that it is called with? Pass --find_unused_parameters if some parameters get no gradient, which "
                "torch's DDP must be told"
            )

    votes.agree_on_success(check, group, f"the proof of {name}")


def _equal(got: Tensor, expected: Tensor, ranks: int) -> bool:
    if ranks <= 2:
        return torch.equal(got, expected)
    if not expected.numel():
        return True
    largest = float(expected.abs().max())
    return torch.allclose(got, expected, rtol=0, atol=ROUNDINGS * ranks * torch.finfo(expected.dtype).eps * largest)


@contextmanager
def _recorded(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What the engine is about to accumulate, by parameter; some get several contributions."""
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
