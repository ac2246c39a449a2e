"""Counts, norms and clipping on real hardware: exact, by the bucket, and without waiting for the device."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse_kernels import flatten, multiply, squared_norm
from dpfuse_kernels.flatten import flatten_reference
from tests.kernels.layouts import DTYPES, PAIRS, guarded, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMELS = (1, 7, 4096, 8195, 1_000_003, 16, 0)


def randoms(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).cuda() for n in NUMELS]


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_counts_are_those_of_the_reference_and_packing_keeps_its_bits(dtype, wire):
    tensors = randoms(dtype)
    for tensor in tensors:
        if tensor.numel() > 7:
            tensor[0], tensor[-1], tensor[tensor.numel() // 2] = math.nan, math.inf, -math.inf
    results = []
    for pack in (flatten, flatten_reference):
        table = guarded(tensors, dtype, wire, gap=3).table
        counts = torch.zeros(len(tensors), dtype=torch.int32, device="cuda")
        pack(tensors, table, scale=1 / 3, counts=counts)
        assert counts.tolist() == [3 * (tensor.numel() > 7) for tensor in tensors]
        results.append([view.nan_to_num() for view in table.views])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_exact_and_repeat_their_bits_and_products_are_rounded_once(dtype):
    tensors = randoms(dtype)
    table = guarded(tensors, dtype, dtype).table
    first, second = (float(squared_norm(tensors, table)) for _ in range(2))
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert first == second == pytest.approx(exact, rel=1e-12 if dtype == torch.float64 else 1e-6)
    for factor in (1 / 3, 1.0, math.nan):
        number = torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32), device="cuda")
        # torch's own product of 16-bit tensors on a GPU rounds the number to 16 bits first.
        wanted = [(tensor.to(number.dtype) * number).to(dtype) for tensor in tensors]
        multiply(tensors, table, number)
        for got, want in zip(tensors, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def network(views, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(130, 130) for _ in range(20)]).cuda()
    return dpfuse.DataParallel(net, None, 0.3, 0.1, gradient_as_bucket_view=views, **options)


@pytest.mark.parametrize("views", [True, False])
def test_clipping_is_torchs_and_waits_for_nothing(nccl, views):
    model = network(views)
    x = torch.randn(8, 130, device="cuda")
    for step in range(5):
        model.zero_grad()
        model(x).square().mean().backward()
        twins = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
        for twin, param in zip(twins, model.parameters(), strict=True):
            twin.grad = param.grad.clone()
        limit = float(torch.nn.utils.get_total_norm([twin.grad for twin in twins])) / (2 if step % 2 else 0.5)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            norm = model.clip_grad_norm_(limit)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        theirs = torch.nn.utils.clip_grad_norm_(twins, limit)
        assert float(norm) == pytest.approx(float(theirs), rel=1e-6)
        for param, twin in zip(model.parameters(), twins, strict=True):
            torch.testing.assert_close(param.grad, twin.grad, rtol=2e-6, atol=0)


def test_clipping_launches_once_per_bucket_and_direction(nccl):
    model = network(True)
    x = torch.randn(8, 130, device="cuda")
    for _ in range(5):
        model.zero_grad()
        model(x).square().mean().backward()
        model.clip_grad_norm_(1e-3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model.clip_grad_norm_(1e-4)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    buckets = len(model.bucket_plan.buckets)
    assert sum("_squared_norm_kernel" in name for name in names) == buckets
    assert sum("_multiply_kernel" in name for name in names) == buckets


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("mode", ["warn", "raise"])
def test_nan_is_told_when_the_next_backward_ends(nccl, views, mode):
    model = network(views, check_finite=mode)
    x = torch.randn(8, 130, device="cuda")
    told = []
    for step in range(1, 8):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loss = model(x).square().mean()
                (loss * (math.nan if step == 4 else 1.0)).backward()
                told.append("; ".join(str(warning.message) for warning in caught))
            except dpfuse.DPFuseError as error:
                told.append(str(error))
    assert [bool(text) for text in told] == [False] * 4 + [True] + [False] * 2
    numbers = sum(param.numel() for param in model.parameters())
    assert f"in synchronised backward 4 this rank sent {numbers} gradient values" in told[4]


def test_a_captured_step_clips(nccl):
    model = network(True, check_finite="warn")
    x = torch.randn(8, 130, device="cuda")

    def step():
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        return model.clip_grad_norm_(1e-3)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(11):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step()
    for _ in range(5):
        graph.replay()
    assert float(norm) > 1e-3
    assert float(model.grad_norm()) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("views", [True, False])
def test_the_scalers_steps_are_torchs_and_unscaling_waits_for_nothing(nccl, views):
    ours, theirs = network(views), network(views)
    scalers = [
        dpfuse.GradScaler(model=ours, init_scale=2.0**10, growth_interval=3),
        torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3),
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in (ours, theirs)]
    scales = []
    for step in range(12):
        x = torch.randn(8, 130, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for model, scaler, optimizer in zip((ours, theirs), scalers, optimizers, strict=True):
            model.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(x).square().mean() * (math.inf if step in (4, 5, 8) else 1.0)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step > 2 and model is ours else "default")
            try:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        scales.append([scaler.get_scale() for scaler in scalers])
        assert scales[-1][0] == scales[-1][1]
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len({one for one, _ in scales}) > 2


def test_unscaling_launches_no_kernel_over_the_gradients(nccl):
    model = network(True)
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(8, 130, device="cuda")
    for _ in range(5):
        model.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.update(8.0)
    launched = {}
    theirs = torch.amp.GradScaler("cuda", init_scale=8.0)
    theirs.scale(torch.ones(1, device="cuda"))  # it makes its tensors
    for name, one in (("dpfuse", scaler), ("torch", theirs)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            one.unscale_(optimizer)
            torch.cuda.synchronize()
        launched[name] = [event.name for event in profile.events() if "multi_tensor_apply" in event.name]
    assert launched["torch"], "torch's scaler reads and writes every gradient"
    assert launched["dpfuse"] == []


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weight_is_a_factor_of_the_pack_and_nobody_waits_for_it(nccl, views, reduction):
    model = network(views)
    x = torch.randn(8, 130, device="cuda")
    for step in range(6):
        model.zero_grad()
        twins = torch.autograd.grad(model.module(x).square().mean(), list(model.parameters()))
        weight = torch.tensor(float(step + 1), device="cuda") if step % 2 else step + 1
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            model.set_gradient_weight(weight, reduction)
            (model(x).square().mean() * (step + 1 if reduction == "sum" else 1)).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for param, twin in zip(model.parameters(), twins, strict=True):
            torch.testing.assert_close(param.grad, twin, rtol=1e-5, atol=1e-7)
    model.zero_grad()
    model.set_gradient_weight(0)
    model(x).square().mean().backward()
    assert all(param.grad.isnan().all() for param in model.parameters())
    model.zero_grad()
    with pytest.raises(dpfuse.DPFuseError, match=r"in synchronised backward 7 the weights that .* make no mean"):
        model(x).square().mean().backward()


def test_a_captured_backward_unscales_by_the_scale_of_each_replay(nccl):
    model = network(True)
    scaler = dpfuse.GradScaler(model=model, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, factor = torch.randn(8, 130, device="cuda"), torch.ones((), device="cuda")

    def step():
        model.zero_grad(set_to_none=False)
        scaler.scale(model(x).square().mean() * factor).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(11):
            step()
            scaler.step(optimizer)
            scaler.update(8.0)
        expected = [param.grad.clone() for param in model.parameters()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for bad in (False, True, False):
        factor.fill_(math.inf if bad else 1.0)
        before = scaler.get_scale()
        graph.replay()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == before * (0.5 if bad else 1.0)
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-6, atol=0)
