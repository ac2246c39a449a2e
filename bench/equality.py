"""Proofs that come before any timing: what is timed computes the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.baselines import PACKS, UNPACKS, PackSet

__all__ = ["prove_buffers", "prove_gradients", "prove_packs"]

STEPS = 3  # dpfuse's first synchronised backward only records, and rebuilds the buckets at its end


def prove_gradients(
    name: str,
    module: nn.Module,
    backward: Callable[[], None],
    *,
    averaged: bool,
    wire: torch.dtype | None = None,
) -> None:
    """Prove that after a backward every `.grad` is the mean over the ranks of what the engine computed.

    The local gradients are seen by hooks in the very same backward, so a model whose backward is not
    reproducible can be proved too. At one or two ranks the mean has one value, and every bit must agree; a sum
    of more depends on the order, so there the usual tolerance holds.

    Args:
        name: of the contender, for the error.
        module: whose parameters are looked at.
        backward: a forward and a backward.
        averaged: whether the gradients are to be averaged, or local.
        wire: dtype in which averaged gradients travel, if it is not their own.

    Raises:
        AssertionError: some gradient differs.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    for _ in range(STEPS):
        local: dict[int, Tensor] = {}
        handles = [param.register_hook(_saver(local, index)) for index, param in enumerate(params)]
        backward()
        for handle in handles:
            handle.remove()
        used = sorted(local)
        expected = torch.cat([local[index].reshape(-1) for index in used])
        if averaged:
            sent = (expected * (1 / dist.get_world_size())).to(wire or expected.dtype)
            dist.all_reduce(sent)
            expected = sent.to(expected.dtype)
        grads = [params[index].grad for index in used]
        got = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
        equal = torch.equal if dist.get_world_size() <= 2 else torch.allclose
        assert equal(got, expected), f"{name}: the gradients are not the mean over the ranks"
        for param in params:
            param.grad = None


def _saver(saved: dict[int, Tensor], index: int) -> Callable[[Tensor], None]:
    # The engine calls it before it accumulates; what returns None changes nothing.
    def save(grad: Tensor) -> None:
        saved[index] = grad.clone()

    return save


def prove_buffers(name: str, wrapped: nn.Module, x: Tensor) -> None:
    """Prove that a forward sends rank 0's buffers to all ranks, after every rank has changed its own.

    Raises:
        AssertionError: some element differs.
    """
    for buffer in wrapped.buffers():
        buffer.fill_(dist.get_rank() + 7)
    wrapped(x)
    assert all(bool((buffer == 7).all()) for buffer in wrapped.buffers()), f"{name}: buffers are not rank 0's"


def prove_packs(data: PackSet) -> None:
    """Prove that every pack holds exactly the tensors times the factor, and every unpack exactly the tensors.

    Raises:
        AssertionError: some element differs, or was not written.
    """
    for name, (pack, scaled) in PACKS.items():
        data.table.flat.fill_(float("nan"))
        for got, source in zip(data.split(pack(data)), data.sources, strict=True):
            expected = source * data.scale if scaled else source
            assert torch.equal(got, expected), f"{name}: a tensor of shape {tuple(source.shape)} differs"
    for name, (unpack, pack) in UNPACKS.items():
        pack(data)
        for target in data.targets:
            target.fill_(float("nan"))
        unpack(data)
        for got, source in zip(data.targets, data.sources, strict=True):
            assert torch.equal(got, source), f"{name}: a tensor of shape {tuple(source.shape)} differs"
