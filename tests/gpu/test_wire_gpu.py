"""What travels, on real hardware: another dtype, and sparse rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse

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
