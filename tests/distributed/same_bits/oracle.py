"""What a fixed number of micro-batches promises, in plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.distributed.same_bits.nets import NETS, batch, loss_of
from tests.distributed.same_bits.program import Case, digest, state_of

__all__ = ["added_in_sequence", "added_in_tree", "mean_of", "weights_without_dpfuse"]


def added_in_tree(values: Sequence[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return added_in_tree(values[:half]) + added_in_tree(values[half:])


def added_in_sequence(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def mean_of(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Return the mean over micro-batches, of which None has no gradient; None if all have none."""
    present = next((grad for grad in grads if grad is not None), None)
    if present is None:
        return None
    wide = torch.float64 if present.dtype == torch.float64 else torch.float32
    # Nothing is changed by an addition of -0.0.
    values = [torch.full_like(present, -0.0, dtype=wide) if grad is None else grad.to(wide) for grad in grads]
    return (added_in_tree(values) / len(grads)).to(present.dtype)


def weights_without_dpfuse(case: Case, add: Callable[[Sequence[Tensor]], Tensor] = added_in_tree) -> str:
    """Return the hash of the weights after a training of `case` in the plain loop of torch."""
    torch.manual_seed(7)
    dtype = getattr(torch, case.dtype)
    net = NETS[case.net]().to(dtype)
    params = list(net.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    for step in range(case.steps):
        micro_batches = [batch(case.net, step, number, dtype) for number in range(case.count)]
        grads = [torch.autograd.grad(loss_of(net(x), y), params) for x, y in micro_batches]
        for param, own in zip(params, zip(*grads, strict=True), strict=True):
            param.grad = (add([grad.float() for grad in own]) / case.count).to(dtype)
        optimizer.step()
    return digest(state_of(net))
