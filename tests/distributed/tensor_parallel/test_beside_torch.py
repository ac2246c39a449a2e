"""Torch's `replicate` makes every parameter a DTensor over both dimensions. The whole tensors are the same, bitwise."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.tensor import DTensor

import dpfuse
from tests.distributed.tensor_parallel.models import (
    FACES,
    Everything,
    Sequence,
    Tied,
    Transformer,
    loss_of,
    made,
    mesh_of_four,
    whole,
    words_of,
)


def train_both(rank, size, kind):
    mesh = mesh_of_four()
    theirs, ours = made(kind, mesh["tp"]), made(kind, mesh["tp"])
    torch_replicate(theirs, mesh=mesh["dp"])
    dpfuse.replicate(ours, mesh=mesh["dp"])
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2, foreach=False) for net in (theirs, ours)]
    for step in range(4):
        words = words_of(mesh.get_local_rank("dp"), step)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            losses = [loss_of(net, words) for net in (theirs, ours)]
        for loss in losses:
            loss.backward()
        for name, param in theirs.named_parameters():
            assert torch.equal(whole(ours.get_parameter(name).grad), whole(param.grad)), f"{step}: gradient of {name}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, value in theirs.state_dict().items():
            assert torch.equal(whole(ours.state_dict()[name]), whole(value)), f"{step}: {name}"


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in (Tied, Sequence, Transformer)), Everything]
)
def test_whole_tensors_are_those_of_torch(ranks, kind):
    ranks(train_both, kind, size=4)


def clip_both(rank, size, kind, face, order):
    mesh = mesh_of_four()
    net, alone = made(kind, mesh["tp"]), made(kind)
    model = FACES[face](net, mesh)
    loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    for replica in range(2):
        (loss_of(alone, words_of(replica, 0)) / 2).backward()
    parts = model.grad_norms(norm_type=order)
    assert list(parts) == [name for name, _ in alone.named_parameters()]
    for name, param in alone.named_parameters():
        torch.testing.assert_close(parts[name], torch.linalg.vector_norm(param.grad, order), rtol=1e-4, atol=1e-6)
    norm = model.clip_grad_norm_(0.01, order)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01, order))
    for name, param in net.named_parameters():
        torch.testing.assert_close(whole(param.grad), alone.get_parameter(name).grad, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(model.grad_norm(order).item(), 0.01, rtol=1e-3, atol=0)
    return norm.item()


@pytest.mark.parametrize(
    ("kind", "face", "order"),
    [(Tied, "DataParallel", 2.0), (Sequence, "views", 1.0), (Everything, "DistributedDataParallel", float("inf"))],
)
def test_clipping_is_that_of_the_whole_model(ranks, kind, face, order):
    assert len(set(ranks(clip_both, kind, face, order, size=4))) == 1


@pytest.mark.ranks(size=4)
def test_the_lines_for_clipping_by_hand_work_under_each_wrapper(rank, size):
    mesh = mesh_of_four()
    net, alone = made(Tied, mesh["tp"]), made(Tied)
    model = FACES["DistributedDataParallel"](net, mesh)
    loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    with pytest.raises(RuntimeError, match="mixed"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    grads = [param.grad for param in net.parameters() if param.grad is not None]
    norms = [torch.linalg.vector_norm(grad.full_tensor() if isinstance(grad, DTensor) else grad) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    torch.testing.assert_close(norm, model.grad_norm())
    for grad in grads:
        grad.mul_((0.01 / (norm + 1e-6)).clamp(max=1.0))
    torch.testing.assert_close(model.grad_norm().item(), 0.01, rtol=1e-3, atol=0)
    for replica in range(2):
        (loss_of(alone, words_of(replica, 0)) / 2).backward()
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([param.grad for param in alone.parameters()]))


@pytest.mark.ranks(size=4)
def test_a_norm_of_an_order_below_0_is_refused(rank, size):
    mesh = mesh_of_four()
    model = FACES["DataParallel"](made(Tied, mesh["tp"]), mesh)
    loss_of(model, words_of(0, 0)).backward()
    with pytest.raises(ValueError, match=r"norm_type must be above 0 where parameters are DTensors, got -1"):
        model.clip_grad_norm_(1.0, -1.0)
