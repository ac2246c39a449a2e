"""Accumulation in the buckets on real hardware: right, one launch per bucket, no waiting, and the memory it is for."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.engine.feeds import accumulating

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOW = 4


def network(dtype=torch.float32, width=130, depth=12):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).to("cuda", dtype)


def wrap(net, **options):
    return dpfuse.DataParallel(net, None, 0.3, 0.1, accumulate_in_buckets=True, **options)


def inputs(step, micro, dtype=torch.float32, width=130):
    generator = torch.Generator().manual_seed(10 * step + micro)
    return torch.randn(8, width, generator=generator).to("cuda", dtype)


def window(model, step, dtype=torch.float32):
    for micro in range(WINDOW):
        with model.no_sync(enabled=micro < WINDOW - 1):
            value = model(inputs(step, micro, dtype)).square().mean()
        value.backward()
        if micro < WINDOW - 1:
            assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_float32(nccl, dtype, views):
    model = wrap(network(dtype), gradient_as_bucket_view=views)
    bare = copy.deepcopy(model.module)
    for step in range(4):
        sums = [torch.zeros_like(param, dtype=torch.float32) for param in bare.parameters()]
        for micro in range(WINDOW):
            bare.zero_grad()
            bare(inputs(step, micro, dtype)).square().mean().backward()
            for total, param in zip(sums, bare.parameters(), strict=True):
                total += param.grad
        window(model, step, dtype)
        for param, total in zip(model.parameters(), sums, strict=True):
            assert torch.equal(param.grad, total.to(dtype))
        model.zero_grad(set_to_none=step % 2 == 0)


def test_a_window_launches_once_per_bucket_and_batch_and_waits_for_nothing(nccl):
    model = wrap(network())
    for step in range(3):
        window(model, step)
        model.zero_grad()
    batches = [inputs(5, micro) for micro in range(WINDOW)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with patch.object(accumulating, "flatten", wraps=accumulating.flatten) as added:
            for micro, x in enumerate(batches):
                with model.no_sync(enabled=micro < WINDOW - 1):
                    value = model(x).square().mean()
                value.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The first of the window overwrites, as every pack does.
    assert added.call_count == (WINDOW - 1) * len(model.bucket_plan.buckets)


def test_gradients_written_on_another_stream_are_added_rightly(nccl):
    model = wrap(network())
    bare, side = copy.deepcopy(model.module), torch.cuda.Stream()
    for step in range(4):
        bare.zero_grad()
        for micro in range(WINDOW):
            x = inputs(step, micro)
            bare(x).square().mean().backward()
            side.wait_stream(torch.cuda.current_stream())
            with model.no_sync(enabled=micro < WINDOW - 1):
                with torch.cuda.stream(side):
                    half = model.module[:6](x)
                    torch.cuda._sleep(2_000_000)
                torch.cuda.current_stream().wait_stream(side)
                value = model.module[6:](half).square().mean()
                value.backward()
        for param, other in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)
        model.zero_grad()


def peak(accumulates):
    net = network(width=1024, depth=24)
    model = dpfuse.DataParallel(net, None, 5, 1, accumulate_in_buckets=accumulates)
    nbytes = sum(param.numel() * 4 for param in net.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        for micro in range(WINDOW):
            with model.no_sync(enabled=micro < WINDOW - 1):
                value = model(inputs(step, micro, width=1024)).square().mean()
            value.backward()
        model.zero_grad()
    return (torch.cuda.max_memory_allocated() - before) / nbytes


def test_a_window_needs_half_the_memory_for_gradients(nccl):
    # The buffers are there before the first step; without the option gradients lie beside them.
    without = peak(accumulates=False)
    assert without > 0.99
    assert peak(accumulates=True) < without - 0.8


def test_a_captured_local_backward_is_refused(nccl):
    model = wrap(network())
    for step in range(3):
        window(model, step)
        model.zero_grad()
    x = inputs(0, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), model.no_sync():
        model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.discard_accumulated()
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(dpfuse.DPFuseError, match="while a CUDA graph is captured")
    with torch.cuda.graph(graph), refused, model.no_sync():
        model(x).square().mean().backward()
