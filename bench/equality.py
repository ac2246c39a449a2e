"""Proofs before any timing: all contenders compute the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.baselines import PACKS, UNPACKS, PackSet
from bench.models import Workload
from bench.peers import Peer

__all__ = ["prove_buffers", "prove_contender", "prove_gradients", "prove_packs", "prove_peer"]

STEPS = 3  # dpfuse's first synchronised backward only records, and then rebuilds the buckets
NEAR = 1e-2  # of the norm of the gradients: two backwards on CUDA may add in other orders


def prove_contender(
    name: str,
    module: nn.Module,
    wrapped: nn.Module,
    workload: Workload,
    *,
    averaged: bool,
    wire: torch.dtype | None = None,
    backward: Callable[[], None],
) -> None:
    """Prove the gradients of a contender, in the way that its kind of wrapper allows.

    Args:
        name: of the contender, for the error.
        module: the copy of the workload's module inside `wrapped`.
        wrapped: the contender.
        workload: the model, with equal weights on all ranks, and its loss.
        averaged: whether the gradients are averaged, or local. Those of a `Peer` always are.
        wire: dtype in which gradients are sent, if it is not their own.
        backward: runs a forward and a backward.

    Raises:
        AssertionError: A gradient differs.
    """
    if isinstance(wrapped, Peer):
        prove_peer(name, wrapped, workload)
    else:
        prove_gradients(name, module, backward, averaged=averaged, wire=wire)


def prove_gradients(
    name: str,
    module: nn.Module,
    backward: Callable[[], None],
    *,
    averaged: bool,
    wire: torch.dtype | None = None,
) -> None:
    """Prove that after a backward every `.grad` is the mean over the ranks of the local gradients.

    Hooks record the local gradients in the same backward. So the proof also works for a model with an irreproducible
    backward. With one or two ranks all bits must be equal. With more ranks the sum depends on the order, so there is
    the usual tolerance.

    Args:
        name: of the contender, for the error.
        module: the module with the parameters.
        backward: runs a forward and a backward.
        averaged: whether the gradients are averaged, or local.
        wire: dtype in which gradients are sent, if it is not their own.

    Raises:
        AssertionError: A gradient differs.
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
    # Autograd calls this hook before it accumulates. A hook that returns None changes nothing.
    def save(grad: Tensor) -> None:
        saved[index] = grad.clone()

    return save


def _are_near(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).norm() <= NEAR * expected.norm())


def prove_peer(name: str, peer: Peer, workload: Workload) -> None:
    """Prove that after a backward the whole gradients of `peer` are the mean over the ranks of the local gradients.

    The local gradients are those of a bare copy of the model, because a peer may exchange the parameters, with their
    hooks. With one or two ranks on a CPU all bits must be equal, with more ranks there is the usual tolerance. On CUDA
    two backwards of one model may differ, so there the difference must be small beside the gradients as a whole.

    Args:
        name: of the contender, for the error.
        peer: wraps a copy of the workload's module.
        workload: the model, with equal weights on all ranks, and its loss.

    Raises:
        AssertionError: A gradient differs.
    """
    bare = copy.deepcopy(workload.module)
    workload.loss(bare).backward()
    expected = torch.cat([param.grad.reshape(-1) for param in bare.parameters() if param.grad is not None])
    expected.mul_(1 / dist.get_world_size())
    dist.all_reduce(expected)
    equal = _are_near if expected.is_cuda else torch.equal if dist.get_world_size() <= 2 else torch.allclose
    for _ in range(STEPS):
        peer.backward(workload.loss(peer))
        got = torch.cat([grad.reshape(-1) for grad in peer.gradients()])
        assert equal(got, expected), f"{name}: the gradients are not the mean over the ranks"
        for param in peer.parameters():
            param.grad = None


def prove_buffers(name: str, wrapped: nn.Module, x: Tensor) -> None:
    """Prove that a forward sends rank 0's buffers to all ranks. Every rank changes its buffers before.

    Raises:
        AssertionError: An element differs.
    """
    for buffer in wrapped.buffers():
        buffer.fill_(dist.get_rank() + 7)
    wrapped(x)
    assert all(bool((buffer == 7).all()) for buffer in wrapped.buffers()), f"{name}: buffers are not rank 0's"


def prove_packs(data: PackSet) -> None:
    """Prove that every pack gives exactly the tensors times the factor, and every unpack exactly the tensors.

    Raises:
        AssertionError: An element differs, or was not written.
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
