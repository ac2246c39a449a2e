"""What docs/train/same_bits.md promises of the default path: bits, over random models, sizes, accumulations and ranks.

The promises of `deterministic=True` are in test_deterministic.py, those of the kernels in tests/kernels.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from tests.distributed.random_models import (
    RandomModel,
    batch,
    random_sizes,
    reduced_per_bucket,
    same_bits,
    trained,
)

SIXTEEN_AND_THIRTY_TWO = (torch.float32, torch.bfloat16, torch.float16)
ALL = (*SIXTEEN_AND_THIRTY_TWO, torch.float64)


def wrapped(seed, dtypes=ALL, most=3000, **options):
    """A random model, wrapped with random sizes, and its bare twin."""
    rng = np.random.default_rng(seed)
    bare = RandomModel(seed, dtypes, most)
    options = {**random_sizes(rng), "gradient_as_bucket_view": bool(rng.random() < 0.5), **options}
    model = dpfuse.DataParallel(copy.deepcopy(bare), find_unused_parameters=True, **options)
    return model, bare


def accumulate(model, seeds, **no_sync):
    for micro, seed in enumerate(seeds):
        with model.no_sync(enabled=micro < len(seeds) - 1, **no_sync):
            model(batch(model.module, seed)).backward()


def accumulate_locally(bare, seeds):
    for seed in seeds:
        bare(batch(bare, seed)).backward()
    return [param.grad for param in trained(bare)]


def as_ddp_on_two_ranks(rank, size, seeds, most):
    for seed in seeds:
        model, bare = wrapped(seed, SIXTEEN_AND_THIRTY_TWO, most)
        twin = DistributedDataParallel(bare, gradient_as_bucket_view=bool(seed % 2))
        for step in range(3):
            data = [(seed, rank, step, micro) for micro in range(1 + (seed + step) % 4)]
            accumulate(model, data)
            for micro, key in enumerate(data):
                twin.require_backward_grad_sync = micro == len(data) - 1
                twin(batch(bare, key)).backward()
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                assert ours.grad is None or same_bits(ours.grad, theirs.grad), f"seed {seed}, step {step}"
            if step != 1:  # else two synchronised backwards add up
                model.zero_grad()
                twin.zero_grad()


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)])
def test_two_ranks_have_the_bits_of_ddp_whatever_the_model_the_sizes_and_the_accumulation(ranks, seeds):
    ranks(as_ddp_on_two_ranks, seeds, 3000, timeout=240)


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_ddp_where_gradients_are_large(ranks):
    ranks(as_ddp_on_two_ranks, range(300, 310), 1_000_000, timeout=240)


@pytest.mark.parametrize(
    ("size", "seeds"),
    [(1, range(8)), (2, range(8)), (3, range(12))]
    + [
        pytest.param(size, seeds, marks=pytest.mark.slow)
        for size, seeds in ((4, range(8)), (3, range(20, 150)), (4, range(20, 150)))
    ],
)
@pytest.mark.ranks(timeout=240)
def test_gradients_are_those_of_one_all_reduce_per_bucket_of_the_published_layout(rank, size, seeds):
    for seed in seeds:
        model, bare = wrapped(seed)
        for step in range(3):
            # The layout of the first backward is the plan's, that of all later ones the rebuilt plan's.
            plan, last = model.bucket_plan, model.reducer.buckets[-1]
            room = last.parts.report.numel if last.params else 0  # else the report travels alone
            data = [(seed, rank, step, micro) for micro in range(1 + (seed + step) % 4)]
            accumulate(model, data)
            means = reduced_per_bucket(plan, room, accumulate_locally(bare, data), size)
            for param, mean in zip(trained(model), means, strict=True):
                assert same_bits(param.grad, mean), f"seed {seed}, step {step}"
            model.zero_grad()
            bare.zero_grad()


def layout_matters(rank, size):
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    half = whole[:500].clone()
    dist.all_reduce(whole)
    dist.all_reduce(half)
    return torch.equal(whole[:500], half)


def test_on_three_ranks_the_layout_matters(ranks):
    """Or the test above could not tell the published layout from another one."""
    assert not any(ranks(layout_matters, size=3))


def the_plan_is_one(rank, size, seeds, folder):
    for seed in seeds:
        model, bare = wrapped(seed)
        accumulate(model, [(seed, rank, 0)])
        layouts = [None] * size
        dist.all_gather_object(layouts, model.bucket_plan.layout)
        assert layouts == layouts[:1] * size, f"seed {seed}"
        # Saved and loaded, a model is planned and rebuilt as the one that was saved.
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
        sizes = [model.bucket_plan.comm_buffer_size / 2**20, model.bucket_plan.last_comm_buffer_size / 2**20]
        again = dpfuse.DataParallel(bare, None, *sizes, find_unused_parameters=True)
        again.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
        accumulate(again, [(seed, rank, 0)])
        assert again.bucket_plan.layout == layouts[rank]


def test_the_plan_is_the_same_on_all_ranks_and_after_saving_and_loading(ranks, tmp_path):
    ranks(the_plan_is_one, range(6), str(tmp_path), size=3)


def in_any_order_of_arrival(rank, size, seeds, deterministic):
    for seed in seeds:
        model, _ = wrapped(seed, deterministic=deterministic)
        data = batch(model.module, (seed, rank))
        uses = list(model.module.uses)
        model(data).backward()  # from here on the layout is settled
        before = None
        for attempt in range(5):
            model.zero_grad()
            rng = np.random.default_rng([seed, rank, attempt])  # another order on every rank
            model.module.uses = uses if attempt == 0 else list(rng.permutation(uses))
            model(data).backward()
            grads = [param.grad.clone() for param in trained(model)]
            before = before or grads
            assert all(map(same_bits, grads, before)), f"seed {seed}, attempt {attempt}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_may_arrive_in_any_order_on_each_rank(ranks, size, deterministic):
    ranks(in_any_order_of_arrival, range(6), deterministic, size=size)


def by_hand_or_not(rank, size, seeds):
    """What is accumulated inside no_sync() and averaged by hand is what the wrapper averages."""
    for seed in seeds:
        automatic, bare = wrapped(seed)
        manual, _ = wrapped(seed)
        for step in range(2):
            data = [(seed, rank, step, micro) for micro in range(1 + seed % 4)]
            accumulate(automatic, data)
            with manual.no_sync():
                for key in data:
                    manual(batch(bare, key)).backward()
            dpfuse.fused_allreduce_gradients(manual.parameters(), bucket_size=2 ** (3 + seed % 16))
            for ours, theirs in zip(trained(automatic), trained(manual), strict=True):
                assert same_bits(ours.grad, theirs.grad), f"seed {seed}, step {step}"
            automatic.zero_grad()
            manual.zero_grad()


@pytest.mark.parametrize("size", [1, 2])
def test_averaging_by_hand_after_no_sync_gives_the_wrappers_bits(ranks, size):
    ranks(by_hand_or_not, range(8), size=size)
