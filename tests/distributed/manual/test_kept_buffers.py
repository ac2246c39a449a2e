"""Buffers that averaging by hand keeps for the next call: ranks need not keep the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse


def params_with(grad, count=2):
    params = [nn.Parameter(torch.zeros(grad.shape)) for _ in range(count)]
    for param in params:
        param.grad = grad.clone(memory_format=torch.preserve_format)
    return params


def fill(params, value):
    for param in params:
        param.grad.fill_(value)


def average(params, rank, size, **options):
    fill(params, float(rank + 1))
    dpfuse.fused_allreduce_gradients(params, **options)
    mean = (size + 1) / 2
    assert all(param.grad.eq(mean).all() for param in params)


def other_strides_on_one_rank(rank, size):
    params = params_with(torch.zeros(4, 6))
    average(params, rank, size)
    if rank == 1:
        params[0].grad = torch.zeros(6, 4).t()
    average(params, rank, size)


def other_parameters_on_one_rank(rank, size):
    params = params_with(torch.zeros(4, 6))
    average(params, rank, size)
    if rank == 0:
        params = params_with(torch.zeros(4, 6))
    average(params, rank, size)
    average(params, rank, size)


def a_refused_call_on_one_rank(rank, size):
    """A rank that refuses its arguments keeps nothing for that call, and its peers do."""
    params = params_with(torch.zeros(4, 6))
    average(params, rank, size)
    for step in range(6):
        bad = [*params_with(torch.zeros(2 + step)), *(["no tensor"] if rank == 0 else [])]
        with pytest.raises((TypeError, dpfuse.DPFuseError), match=r"is a str"):
            dpfuse.fused_allreduce_gradients(bad)
    average(params, rank, size)


@pytest.mark.parametrize("job", [other_strides_on_one_rank, other_parameters_on_one_rank, a_refused_call_on_one_rank])
def test_a_rank_that_has_kept_other_buffers_than_its_peers_averages_with_them(ranks, job):
    ranks(job, timeout=20)
