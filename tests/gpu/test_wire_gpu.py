"""What travels, on real hardware: another dtype, and sparse rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.wires.hard_gradients import sent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_a_narrow_wire_rounds_once(nccl, wire):
    torch.manual_seed(0)
    model = dpfuse.DataParallel(nn.Linear(1000, 300).cuda(), comm_buffer_size=0.5, wire_dtype=wire)
    twin = nn.Linear(1000, 300).cuda()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 1000, device="cuda")
    for _ in range(3):
        model.zero_grad()
        twin.zero_grad()
        model(x).square().sum().backward()
        twin(x).square().sum().backward()
        for ours, bare in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad.dtype == torch.float32
            assert torch.equal(ours.grad, bare.grad.to(wire).float())


WIRES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def gradients(model, x):
    return list(torch.autograd.grad(model.module(x).square().sum(), list(model.module.parameters())))


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_sums_in_float32_and_blocks_of_eight_bits_have_the_bits_of_the_cpu(nccl, wire):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1000, 300), nn.Tanh(), nn.Linear(300, 7)).cuda()
    model = dpfuse.DataParallel(net, comm_buffer_size=0.5, wire_dtype=(wire, torch.float32))
    x = torch.randn(8, 1000, device="cuda")
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        for param, local in zip(model.parameters(), gradients(model, x), strict=True):
            assert param.grad.dtype == torch.float32
            once = sent(local.flatten().cpu(), wire)
            assert torch.equal(param.grad.flatten().cpu(), sent(once, wire))


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_error_feedback_keeps_what_was_rounded_away_without_waiting(nccl, wire):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(500, 300), nn.Tanh(), nn.Linear(300, 7)).cuda()
    model = dpfuse.DataParallel(net, wire_dtype=(wire, torch.float32), error_feedback=True)
    names = [name for name, _ in model.module.named_parameters()]
    arrived, true = ([torch.zeros_like(p, dtype=torch.float64) for p in net.parameters()] for _ in range(2))
    steps = 8
    for step in range(steps):
        x = torch.randn(8, 500, device="cuda")
        model.zero_grad()
        loss = model(x).square().sum()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for place, (param, local) in enumerate(zip(net.parameters(), gradients(model, x), strict=True)):
            arrived[place] += param.grad.double()
            true[place] += local.double()
    kept = model.error_feedback.state_dict()["rank0"]
    for name, got, expected in zip(names, arrived, true, strict=True):
        largest = expected.abs().max().item() + 1
        assert kept[name].any()
        assert (got + kept[name].double() - expected).abs().max().item() <= 4 * steps * 2.0**-24 * largest * steps
    # A value that is not finite leaves no trace.
    model.zero_grad()
    with model.no_sync():
        model(torch.full((1, 500), float("inf"), device="cuda")).sum().backward()
    model(torch.randn(8, 500, device="cuda")).square().sum().backward()
    assert any(not param.grad.isfinite().all() for param in net.parameters())
    assert all(value.isfinite().all() for value in model.error_feedback.state_dict()["rank0"].values())


def test_16_bit_gradients_travel_as_float32(nccl):
    model = dpfuse.DataParallel(nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16), wire_dtype=torch.float32)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    model(x).sum().backward()
    local = torch.autograd.grad(model.module(x).sum(), list(model.module.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), local, strict=True))


def test_sparse_rows_arrive_beside_dense_buckets(nccl):
    torch.manual_seed(0)
    model = dpfuse.DataParallel(nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)).cuda())
    words = torch.tensor([3, 3, 7, 49], device="cuda")
    for _ in range(3):
        model.zero_grad()
        model(words).square().sum().backward()
        local = torch.autograd.grad(model.module(words).square().sum(), list(model.module.parameters()))
        table, *dense = model.parameters()
        torch.testing.assert_close(table.grad.to_dense(), local[0].to_dense())
        assert all(torch.equal(p.grad, g) for p, g in zip(dense, local[1:], strict=True))
