"""`deterministic=True`: bits that no bucket size and no order of buckets changes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.engine.plan import plan_buckets
from tests.distributed.random_models import (
    RandomModel,
    added_in_rank_order,
    batch,
    random_sizes,
    same_bits,
    trained,
)

ALL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def reduced(bare, data, **options):
    """The gradients of some accumulated batches, from a new wrapper, after the backward that settles its buckets."""
    model = dpfuse.DataParallel(copy.deepcopy(bare), find_unused_parameters=True, **options)
    for _ in range(2):
        model.zero_grad()
        for micro, seed in enumerate(data):
            with model.no_sync(enabled=micro < len(data) - 1):
                model(batch(bare, seed)).backward()
    return [param.grad for param in trained(model)]


def local(bare, data):
    bare = copy.deepcopy(bare)
    for seed in data:
        bare(batch(bare, seed)).backward()
    return [param.grad for param in trained(bare)]


@pytest.mark.parametrize(
    ("size", "seeds"),
    [(1, range(3)), (3, range(2))]
    + [
        pytest.param(size, seeds, marks=pytest.mark.slow)
        for size, few in ((2, range(5)), (3, range(2, 5)), (4, range(3)))
        for seeds in (few, range(10, 80))
    ],
)
@pytest.mark.ranks(timeout=240)
def test_every_gradient_is_the_sum_in_rank_order_whatever_the_buffer_sizes(rank, size, seeds):
    changed = 0  # gradients that the default would have changed
    for seed in seeds:
        rng = np.random.default_rng(seed)
        bare = RandomModel(seed, ALL)
        data = [(seed, rank, micro) for micro in range(1 + seed % 4)]
        expected = [added_in_rank_order(grad, size) for grad in local(bare, data)]
        for _ in range(4):
            options = {**random_sizes(rng), "gradient_as_bucket_view": bool(rng.random() < 0.5)}
            for grad, wanted in zip(reduced(bare, data, deterministic=True, **options), expected, strict=True):
                assert same_bits(grad, wanted), f"seed {seed}, {options}"
            changed += sum(not same_bits(*pair) for pair in zip(reduced(bare, data, **options), expected, strict=True))
    # On two ranks there is one order only, which is the default's: all agree, in 16 bits as well.
    assert (changed > 0) == (size > 2)


@pytest.mark.ranks(size=3)
def test_large_private_gradients_are_not_reduced_in_place(rank, size):
    """Some that the default would reduce where they lie."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(700, 800), nn.ReLU(), nn.Linear(800, 3))
    x = torch.randn(4, 700, generator=torch.Generator().manual_seed(rank))
    bare = copy.deepcopy(net)
    bare(x).square().sum().backward()
    expected = [added_in_rank_order(param.grad, size) for param in bare.parameters()]
    for views in (False, True):
        model = dpfuse.DataParallel(copy.deepcopy(net), deterministic=True, gradient_as_bucket_view=views)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            assert all(same_bits(p.grad, wanted) for p, wanted in zip(model.parameters(), expected, strict=True))
        assert sum(bucket.parts.exchange.bytes_in_place for bucket in model.reducer.buckets) == 0


@pytest.mark.ranks(size=3)
def test_no_bit_depends_on_the_order_of_buckets_which_is_not_rebuilt(rank, size):
    bare = RandomModel(13)
    model = dpfuse.DataParallel(copy.deepcopy(bare), None, 1e-3, 1e-3, deterministic=True)
    golden = model.bucket_plan
    alone = plan_buckets(golden.specs, 0, 0)
    others = [alone, replace(alone, buckets=alone.buckets[::-1]), plan_buckets(golden.specs, math.inf, math.inf)]
    expected = [added_in_rank_order(grad, size) for grad in local(bare, [(rank,)])]
    layouts = set()
    for attempt in range(6):
        if attempt > 2:  # as autotune brings other buckets
            model._sync.grads.use_plan(others.pop())
        else:
            assert model.bucket_plan == golden
        model.zero_grad()
        model.module.uses = list(np.random.default_rng([attempt, 0]).permutation(bare.uses))
        model(batch(bare, (rank,))).backward()
        layouts.add(model.bucket_plan.layout)
        for param, wanted in zip(trained(model), expected, strict=True):
            assert same_bits(param.grad, wanted), f"attempt {attempt}"
    assert len(layouts) == 4


@pytest.mark.ranks(size=3)
def test_autotune_may_plan_again(rank, size):
    bare = RandomModel(7, ALL)
    model = dpfuse.DataParallel(copy.deepcopy(bare), deterministic=True, find_unused_parameters=True)
    expected = [added_in_rank_order(grad, size) for grad in local(bare, [(rank,)])]
    tuning = dpfuse.autotune(model, steps=2)
    for step in range(6):
        model.zero_grad()
        model(batch(bare, (rank,))).backward()
        for param, wanted in zip(trained(model), expected, strict=True):
            assert same_bits(param.grad, wanted), f"step {step}"
    assert tuning.done


def by_hand(rank, size, seeds):
    for seed in seeds:
        bare = RandomModel(seed, ALL)
        data = [(seed, rank, micro) for micro in range(1 + seed % 3)]
        wrapped = reduced(bare, data, deterministic=True, comm_buffer_size=1e-3)
        manual = dpfuse.DataParallel(copy.deepcopy(bare), deterministic=bool(seed % 2))
        with manual.no_sync():
            for key in data:
                manual(batch(bare, key)).backward()
        dpfuse.fused_allreduce_gradients(manual.parameters(), bucket_size=2 ** (seed % 16), deterministic=True)
        for param, wanted in zip(trained(manual), wrapped, strict=True):
            assert same_bits(param.grad, wanted), f"seed {seed}"


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_averaging_by_hand_gives_the_wrappers_bits_on_any_number_of_ranks(ranks, size):
    ranks(by_hand, range(6), size=size)


def sixteen_bits(rank, size, dtype, scale):
    """The mean error over that of the default, both against float64."""
    u = torch.finfo(dtype).eps / 2
    grad = torch.randn(200_000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    parts = [torch.empty_like(grad) for _ in range(size)]
    dist.all_gather(parts, grad)
    exact = torch.stack(parts).double() * (scale or 1 / size)
    total, magnitude = exact.sum(0), exact.abs().sum(0)
    errors = []
    for deterministic in (True, False):
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        dpfuse.fused_allreduce_gradients([param], scale=scale, deterministic=deterministic)
        errors.append((param.grad.double() - total).abs())
    # Each part is rounded at most once before the sum, and the sum once; the ring rounds after each addition.
    bound = 1.01 * u * (magnitude + total.abs()) + torch.finfo(dtype).smallest_normal
    assert (errors[0] <= bound).all()
    return (errors[0].mean() / errors[1].mean()).item()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "scale", "limit"), [(3, 1.0, 0.74), (4, 1.0, 0.64), (4, None, 0.64), (3, None, 0.87)])
def test_the_error_of_16_bit_gradients_is_well_below_that_of_a_ring(ranks, size, scale, limit, dtype):
    # A third of a 16-bit number is rounded before it travels, either way, which the last row shows.
    (ratio,) = set(ranks(sixteen_bits, dtype, scale, size=size))
    assert ratio < limit


class Given(nn.Module):
    """One parameter, whose gradient is whatever it is told, and one that is never used."""

    def __init__(self, like):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(like))
        self.other = nn.Parameter(torch.zeros(7, dtype=like.dtype))

    def forward(self, gradient):
        return (self.weight * gradient.conj()).real.sum()


def gradient_of(part, **options):
    model = dpfuse.DataParallel(Given(part), find_unused_parameters=True, deterministic=True, **options)
    for _ in range(2):
        model.zero_grad()
        model(part).backward()
    assert model.other.grad is None  # the flags survive every wire and factor
    return model.weight.grad


@pytest.mark.ranks(size=3)
def test_wires_factors_and_complex_numbers_are_as_ever(rank, size):
    parts = [torch.randn(500, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for wire in (torch.bfloat16, torch.float16):
        narrow = [(part * (1 / size)).to(wire).float() for part in parts]
        total = (narrow[0] + narrow[1]) + narrow[2]
        assert same_bits(gradient_of(parts[rank], wire_dtype=wire), total.to(wire).float())
    assert same_bits(gradient_of(parts[rank], gradient_scale=1.0), (parts[0] + parts[1]) + parts[2])
    # float16 holds 40000, and not the sum: it must not be formed there.
    large = torch.full((500,), 40000.0)
    assert gradient_of(large, gradient_scale=1.0, wire_dtype=torch.float16).tolist() == [120000.0] * 500
    pairs = [torch.view_as_complex(part.view(-1, 2)) for part in parts]
    scaled = [part * (1 / size) for part in parts]
    total = (scaled[0] + scaled[1]) + scaled[2]
    for views in (True, False):
        got = gradient_of(pairs[rank], gradient_as_bucket_view=views)
        assert same_bits(torch.view_as_real(got).flatten(), total)
