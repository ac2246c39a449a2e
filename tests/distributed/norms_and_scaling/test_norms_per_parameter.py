"""Norms of each parameter and of each bucket are those of the gradients one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.norms_and_scaling.test_grad_norm import CHANGES, Net, dense, trained


@pytest.mark.parametrize("face", ["views", "ddp"])
def test_norms_of_each_parameter_and_of_each_bucket(rank, size, face):
    model = trained(face, rank, Net(sparse=True), find_unused_parameters=True)
    named = dict(model.module.named_parameters())
    for change in ("untouched", "one taken away", "replaced"):
        CHANGES[change](model)
        for order in (2.0, 1.0, math.inf):
            norms = model.grad_norms(norm_type=order)
            assert list(norms) == [name for name, param in named.items() if param.grad is not None]
            for name, norm in norms.items():
                expected = torch.linalg.vector_norm(dense(named[name].grad).double(), order)
                assert norm.shape == ()
                assert float(norm) == pytest.approx(float(expected), rel=1e-6), name
            parts = model.grad_norms(by="bucket", norm_type=order)
            for place, bucket in enumerate(model.bucket_plan.buckets):
                inside = [model.bucket_plan.specs[index].name for index in bucket.params]
                grads = [dense(named[name].grad).double().flatten() for name in inside if name in norms]
                expected = torch.linalg.vector_norm(torch.cat(grads), order)
                assert float(parts[f"bucket {place}"]) == pytest.approx(float(expected), rel=1e-6)
            whole = torch.linalg.vector_norm(torch.stack([*parts.values()]), order)
            assert float(whole) == pytest.approx(float(model.grad_norm(order)), rel=1e-6)


def test_norms_of_large_and_of_other_gradients(group):
    net = nn.ParameterDict(
        {
            "large": nn.Parameter(torch.zeros(3_000_000)),
            "pairs": nn.Parameter(torch.zeros(700, dtype=torch.complex64)),
            "narrow": nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)),
            "wide": nn.Parameter(torch.zeros(5, dtype=torch.float64)),
            "frozen": nn.Parameter(torch.zeros(5), requires_grad=False),
            "bare": nn.Parameter(torch.zeros(5)),
        }
    )
    model = dpfuse.DataParallel(net)
    for name in ("large", "pairs", "narrow", "wide", "frozen"):
        net[name].grad = torch.randn(net[name].shape, dtype=net[name].dtype)
    norms = model.grad_norms()
    assert set(norms) == {"large", "pairs", "narrow", "wide", "frozen"}
    for name, norm in norms.items():
        assert norm.dtype == (torch.float64 if name == "wide" else torch.float32)
        assert float(norm) == pytest.approx(float(net[name].grad.abs().double().norm()), rel=1e-6)
    assert [name for name in model.grad_norms(by="bucket") if "bucket" not in name] == ["frozen"]
    with pytest.raises(ValueError, match="by must be 'parameter' or 'bucket', got 'layer'"):
        model.grad_norms(by="layer")
