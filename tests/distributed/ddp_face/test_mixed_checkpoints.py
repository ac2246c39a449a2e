"""mixed_precision with activation checkpoints: what runs again in backward finds the copies it ran with."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from dpfuse import DistributedDataParallel, DPFuseError

BF16, F32 = torch.bfloat16, torch.float32
SMALL = 100 / 2**20  # MB: several buckets


class Checkpointed(nn.Module):
    """Checkpointed layers, one of which runs twice and one of which is tied; what runs again is counted."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.first, self.twice, self.tied, self.head = (nn.Linear(6, 6) for _ in range(4))
        self.tied.weight = self.first.weight
        self.reentrant = reentrant
        self.runs = 0

    def piece(self, layer, x):
        self.runs += 1
        if self.failing and self.runs > 3 and layer is self.first:
            raise ArithmeticError("when it ran again")
        assert layer.weight.dtype == x.dtype
        return torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))

    failing = False

    def forward(self, x):
        self.runs = 0
        for layer in (self.first, self.twice, self.tied, self.twice):
            if self.reentrant is None:
                x = self.piece(layer, x)
            else:
                x = checkpoint(self.piece, layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)


def is_back(net: nn.Module) -> bool:
    return all(isinstance(param, nn.Parameter) and param.dtype == F32 for param in net.parameters())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_train_to_the_bits_of_casts_by_hand(rank, size, reentrant, views):
    """Without checkpoints the same casts are done by hand."""
    net = Checkpointed(reentrant)
    alone = copy.deepcopy(net)
    alone.reentrant = None
    model = DistributedDataParallel(
        net, mixed_precision=_MixedPrecision(BF16, F32), bucket_cap_mb=SMALL, gradient_as_bucket_view=views
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):
            x = batch(rank, 2 * step + micro)
            with model.no_sync(enabled=micro == 0):
                got = model(x)
            assert is_back(net)
            cast = {name: param.to(BF16) for name, param in alone.named_parameters()}
            expected = functional_call(alone, cast, (x.to(BF16),))
            assert torch.equal(got, expected)
            for outputs in (got, expected):
                outputs.float().square().sum().backward()
            assert net.runs == 8
            assert is_back(net)
        for name, param in alone.named_parameters():
            param.grad /= size
            dist.all_reduce(param.grad)
            got = net.get_parameter(name).grad
            if reentrant:  # adds the gradients of several uses in the parameter's dtype, not in the copy's
                torch.testing.assert_close(got, param.grad, rtol=0.02, atol=0.02)
            else:
                assert torch.equal(got, param.grad), name
            param.grad.copy_(net.get_parameter(name).grad)
        for optimizer in optimizers:
            optimizer.step()


def test_the_parameters_are_back_when_what_runs_again_fails(rank, size):
    net = Checkpointed(reentrant=False)
    model = DistributedDataParallel(net, mixed_precision=_MixedPrecision(BF16, F32), bucket_cap_mb=SMALL)
    model(batch(rank, 0)).sum().backward()
    outputs = model(batch(rank, 1))
    net.failing = rank == 1
    with pytest.raises(
        ArithmeticError if rank == 1 else DPFuseError, match="again" if rank == 1 else "failed on rank 1"
    ):
        outputs.sum().backward()
    assert is_back(net)
    net.failing = False
    model.zero_grad()
    model(batch(rank, 3)).sum().backward()
    everywhere = [torch.zeros_like(net.first.weight) for _ in range(size)]
    dist.all_gather(everywhere, net.first.weight.grad)
    assert torch.equal(*everywhere)


def wrapped(reentrant=False) -> DistributedDataParallel:
    return DistributedDataParallel(Checkpointed(reentrant), mixed_precision=_MixedPrecision(BF16, F32))


def test_a_graph_may_be_used_twice_and_by_autograd_grad(group):
    model, x = wrapped(), batch(0, 0)
    outputs = model(x)
    outputs.sum().backward(retain_graph=True)
    once, of_input = model.module.first.weight.grad.clone(), x.grad.clone()
    outputs.sum().backward(retain_graph=True)
    assert torch.equal(model.module.first.weight.grad, 2 * once)
    assert torch.equal(torch.autograd.grad(outputs.sum(), x)[0], of_input)
    assert is_back(model.module)


def test_two_forwards_and_then_their_backwards(group):
    model = wrapped()
    outputs = [model(batch(0, step)) for step in range(2)]
    with torch.no_grad():
        model(batch(0, 2))
    for each in outputs:
        each.sum().backward()
        assert is_back(model.module)
    together = model.module.first.weight.grad.clone()
    model.zero_grad()
    for step in range(2):
        model(batch(0, step)).sum().backward()
    assert torch.equal(model.module.first.weight.grad, together)


def test_a_parameter_replaced_between_forward_and_backward_stays(group):
    model = wrapped()
    outputs = model(batch(0, 0))
    model.module.head.bias = new = nn.Parameter(torch.ones(6))
    outputs.sum().backward()
    assert model.module.head.bias is new


def test_a_copy_between_forward_and_backward_trains_on(group):
    model = wrapped()
    outputs = model(batch(0, 0))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    outputs.sum().backward()
    for clone in copies:
        clone(batch(0, 0)).sum().backward()
        assert torch.equal(clone.module.first.weight.grad, model.module.first.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_wrapper_itself_may_be_checkpointed(group, reentrant):
    model, plain = wrapped(None), wrapped(None)
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        checkpoint(model, batch(0, 0), use_reentrant=reentrant).sum().backward()
        plain(batch(0, 0)).sum().backward()
        assert is_back(model.module)
        assert torch.equal(model.module.first.weight.grad, plain.module.first.weight.grad)
