"""A sharded optimizer on a GPU: NCCL carries the parts, and weights are those of the plain optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

import dpfuse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CLOSE = 1e-6  # foreach operations of short and of joined tensors may round differently


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 600), nn.GELU(), nn.Linear(600, 500), nn.GELU(), nn.Linear(500, 10)).cuda()


@pytest.mark.parametrize("fused", [False, True])
def test_one_rank_trains_as_with_the_plain_optimizer(nccl, fused):
    net = network()
    model = dpfuse.DataParallel(copy.deepcopy(net), comm_buffer_size=0.5, last_comm_buffer_size=0.1)
    sharded = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=1e-3, fused=fused)
    plain = optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    for step in range(10):
        x = torch.randn(32, 64, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
        for one, optimizer in ((model, sharded), (net, plain)):
            one(x).square().mean().backward()
            norm = model.clip_grad_norm_(0.1) if one is model else nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            assert norm > 0
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), net.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=CLOSE)
    assert sharded.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}], ids=str)
def test_float32_copies_are_those_of_an_update_by_hand(nccl, options):
    net = network().bfloat16()
    model = dpfuse.DataParallel(copy.deepcopy(net), comm_buffer_size=0.5, last_comm_buffer_size=0.1)
    sharded = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=1e-3, master_dtype=torch.float32, **options)
    copies = [nn.Parameter(param.detach().float()) for param in net.parameters()]
    plain = optim.AdamW(copies, lr=1e-3)
    for step in range(5):
        x = torch.randn(32, 64, generator=torch.Generator("cuda").manual_seed(step), device="cuda").bfloat16()
        for one in (model, net):
            one(x).float().square().mean().backward()
        for param, own in zip(net.parameters(), copies, strict=True):
            own.grad = param.grad.float()
        plain.step()
        with torch.no_grad():
            for param, own in zip(net.parameters(), copies, strict=True):
                param.copy_(own)
        net.zero_grad()
        sharded.step()
        sharded.zero_grad()
    states = sharded.state_dict()["state"]
    for index, own in enumerate(copies):
        assert torch.allclose(states[index]["master_param"], own, rtol=1e-2, atol=1e-4)
    for ours, theirs in zip(model.parameters(), net.parameters(), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=1e-3)


def test_muon_has_whole_matrices(nccl):
    net = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4))).cuda()
    model = dpfuse.DataParallel(copy.deepcopy(net))
    sharded, plain = dpfuse.ShardedOptimizer(model, optim.Muon, lr=0.02), optim.Muon(net.parameters(), lr=0.02)
    for step in range(5):
        x = torch.randn(32, 128, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
        for one, optimizer in ((model, sharded), (net, plain)):
            one(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_in_backward_is_that_of_a_step_after_it(nccl):
    seen = []
    for options in ({}, {"step_in_backward": True}):
        model = dpfuse.DataParallel(network(), comm_buffer_size=0.2, last_comm_buffer_size=0.1)
        optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=1e-3, **options)
        for step in range(10):
            x = torch.randn(32, 64, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append([param.detach() for param in model.module.parameters()])
    assert all(map(torch.equal, *seen))


def test_a_scaler_skips_a_step(nccl):
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(torch.full((4, 64), torch.inf, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, before, model.parameters()))
    assert scaler.get_scale() == 2.0**15
