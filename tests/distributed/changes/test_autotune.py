"""Buckets found while training, on real ranks: all use the same, and gradients are what they were."""

from __future__ import annotations

import copy
import pickle
from dataclasses import astuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.errors import DPFuseError
from dpfuse.tune import CostTable, autotune, optimal_plan, tuning

CHEAP = CostTable.affine(1e-6, 1e9)


def net(layers=12, width=32):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def step(model, seed, width=32):
    model.zero_grad()
    torch.manual_seed(seed)
    model(torch.randn(4, width)).square().mean().backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def judged(monkey, verdict):
    """Times are not to decide here."""
    monkey.setattr(tuning.RecordedTimes, "worse_than", lambda after, before: verdict)


def train(rank, size, face, tuned, worse):
    with pytest.MonkeyPatch.context() as monkey:
        judged(monkey, worse)
        model = getattr(dpfuse, face)(net())
        plans, grads = [], []
        result = None
        for number in range(14):
            if tuned and number == 1:
                result = dpfuse.autotune(model, steps=3, cost=CHEAP)
            grads.append(step(model, 100 * number + rank))
            plans.append(model.bucket_plan.layout)
    if tuned:
        assert result is model.tuning
        assert result.done
        # The call is agreed on in backward 1, 2 warms up, 3 to 5 are recorded, 6 warms up, 7 to 9 are recorded.
        assert plans[4] != plans[5] == plans[8] == result.plan.layout
        assert plans[9] == plans[13] == plans[4 if worse else 5]
        assert model.bucket_plan.tuned is not worse
        assert result.kept is not worse
        assert result.plan.layout == optimal_plan(result.timeline, CHEAP).layout
        assert len(result.before.total) == len(result.after.total) == 3
        assert all(0 <= exposed <= total for exposed, total in zip(*astuple(result.after), strict=True))
        assert ("the old buckets are restored" if worse else "the new buckets are kept") in result.explain()
        assert "before: " in result.explain()
        assert "after:  " in result.explain()
        assert not model._sync.recording
    return plans, grads, result and (result.before, result.after)


@pytest.mark.parametrize("worse", [False, True])
@pytest.mark.parametrize("face", ["DataParallel", pytest.param("DistributedDataParallel", marks=pytest.mark.slow)])
def test_every_rank_uses_rank_0s_plan_and_gradients_stay_what_they_were(ranks, face, worse):
    tuned, untuned = ranks(train, face, True, worse), ranks(train, face, False, worse)
    assert tuned[0][0] == tuned[1][0]
    assert tuned[0][2] == tuned[1][2]  # the same seconds, so the same verdict
    for (_, ours, _), (_, theirs, _) in zip(tuned, untuned, strict=True):
        for gradients, expected in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, gradients, expected))


def hooks_of(model):
    hooks = [hook for param in model.parameters() for hook in param._post_accumulate_grad_hooks.values()]
    return [hook.__qualname__ for hook in hooks]


def test_hooks_and_buckets_are_the_plain_ones_afterwards(rank, size):
    model = dpfuse.DataParallel(net(2, 4))
    result = autotune(model, steps=1, cost=CHEAP)
    assert all("stamped" in name for name in hooks_of(model))
    with dpfuse.time_communication(model) as times:
        count = 0
        while not result.done:
            step(model, count, 4)
            count += 1
    assert times.steps >= count  # who measures goes on measuring
    assert not any("stamped" in name for name in hooks_of(model))
    assert model._sync.grads.watch.listener is model._sync.grads.reducer
    assert model._sync.grads.events.bucket_landed == ()


def uneven(rank, size, divide_by_initial_world_size):
    model = dpfuse.DistributedDataParallel(net())
    result = autotune(model, steps=2, cost=CHEAP)
    for _ in range(3):
        with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
            for number in range(5 if rank else 2):
                step(model, number)
    assert not result.done or len(result.before.total) < 2
    for number in range(9):
        step(model, number)
    assert result.done
    return model.bucket_plan.layout, [param.grad for param in model.parameters()]


@pytest.mark.parametrize("mean_of_all", [True, False])
def test_a_rank_without_input_shadows_recorded_backwards(ranks, mean_of_all):
    (plan, grads), (other, others) = ranks(uneven, mean_of_all)
    assert plan == other
    assert all(map(torch.equal, grads, others))


def changed(rank, size, when):
    model = dpfuse.DataParallel(net())
    result = autotune(model, steps=3, cost=CHEAP)
    number = 0
    for number in range(when):
        step(model, number)
    assert not result.done
    torch.manual_seed(5)
    model.module.append(nn.Linear(32, 32))
    for number in range(when, when + 12):
        grads = step(model, number)
    assert result.done
    assert len(result.plan.specs) == 26
    assert model.bucket_plan.specs == result.plan.specs
    return model.bucket_plan.layout, result.before, grads


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", [0, 1, 3, 6, 7])
def test_a_module_that_changes_is_recorded_anew(ranks, when):
    (plan, before, grads), (other, theirs, others) = ranks(changed, when)
    assert (plan, before) == (other, theirs)
    assert all(map(torch.equal, grads, others))


def test_copies_are_neither_recorded_nor_tuned(rank, size):
    model = dpfuse.DataParallel(net(4, 4), plan="auto")
    for number in range(4):
        step(model, number, 4)
    if rank == 0:  # a copy on one rank, say for an average of the weights, communicates nothing
        assert copy.deepcopy(model).tuning is None
    dist.barrier()
    twin = pickle.loads(pickle.dumps(model))
    assert twin.tuning is None
    assert not twin._sync.recording
    for number in range(4, 14):
        for one, other in zip(step(model, number, 4), step(twin, number, 4), strict=True):
            assert torch.equal(one, other)
    assert model.tuning.done
    assert not twin.bucket_plan.tuned
    assert copy.deepcopy(model).tuning is None


class Sides(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=sparse)
        self.sides = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, words, side):
        return self.sides[side](self.words(words))


@pytest.mark.parametrize("sparse", [False, True])
def test_unused_and_sparse_parameters_are_tuned_with_the_others(rank, size, sparse):
    torch.manual_seed(0)
    model = dpfuse.DataParallel(Sides(sparse), find_unused_parameters=True)
    plain = dpfuse.DataParallel(copy.deepcopy(model.module), find_unused_parameters=True)
    result = autotune(model, steps=2, cost=CHEAP)
    for _ in range(12):
        for one in (model, plain):
            one.zero_grad()
            one(torch.arange(rank, rank + 4), rank).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad.to_dense(), theirs.grad.to_dense())
    assert result.done
    names = [spec.name for spec in result.timeline.specs]
    assert result.timeline.ready[names.index("sides.2.bias")] == result.timeline.backward_end
    assert "ms exposed" in result.explain()


def test_backwards_inside_no_sync_do_not_count(rank, size):
    model, plain = dpfuse.DataParallel(net(4, 4)), dpfuse.DataParallel(net(4, 4))
    result = None
    for number in range(10):
        for one in (model, plain):
            one.zero_grad()
            for micro in range(3):
                if one is model and (number, micro) == (1, 1):
                    result = autotune(model, steps=3, cost=CHEAP)  # with gradients waiting to be averaged
                with one.no_sync(enabled=micro < 2):
                    torch.manual_seed(10 * number + micro + 1000 * rank)
                    one(torch.randn(2, 4)).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert result.done
    assert len(result.before.total) == 3


def interrupted(rank, size, everywhere, when):
    model = dpfuse.DataParallel(net(4, 4))
    result = autotune(model, steps=2, cost=CHEAP)
    for number in range(when):
        step(model, number, 4)
    model.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    if everywhere or rank == 1:
        handle = model.module[1].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    else:
        with pytest.raises(DPFuseError):
            loss.backward()
    for number in range(8):
        grads = step(model, number, 4)
    assert result.done
    return model.bucket_plan.layout, result.before, grads


@pytest.mark.one_in(2)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("when", [0, 1, 2, 3, 5])
def test_a_backward_that_raised_does_not_count(ranks, everywhere, when):
    (plan, before, grads), (other, theirs, others) = ranks(interrupted, everywhere, when)
    assert (plan, before) == (other, theirs)
    assert all(map(torch.equal, grads, others))


def with_fewer_parameters(rank, size):
    model = dpfuse.DataParallel(net(6, 4), find_unused_parameters=True)
    step(model, 0, 4)
    del model.module[5]
    model.module[4].requires_grad_(False)
    result = autotune(model, steps=1, cost=CHEAP)
    for number in range(8):
        grads = step(model, number, 4)
    assert result.done
    return grads


def test_parameters_that_were_frozen_or_removed_before_do_no_harm(ranks):
    grads, others = ranks(with_fewer_parameters)
    assert all(map(torch.equal, grads, others))


def twice(rank, size):
    model = dpfuse.DataParallel(net())
    with pytest.MonkeyPatch.context() as monkey:
        judged(monkey, False)
        for cost in (CHEAP, CostTable.affine(1.0, 1e9)):
            before = model.bucket_plan
            result = autotune(model, steps=1, cost=cost)
            number = 0
            while not result.done:
                step(model, number)
                number += 1
                if cost is not CHEAP and model.bucket_plan is not result.plan:
                    assert model.bucket_plan is before  # what is in use is recorded, not the rule's buckets
    assert len(model.bucket_plan.buckets) == 1
    return model.bucket_plan.layout


def test_tuned_buckets_can_be_tuned_again(ranks):
    plan, other = ranks(twice)
    assert plan == other


def test_worse_is_what_grew_by_more_than_two_percent_of_backward():
    Times = tuning.RecordedTimes
    before = Times((0.010, 0.011, 0.012), (0.100, 0.101, 0.102))
    assert not Times((0.012, 0.011, 0.013), (0.101, 0.102, 0.103)).worse_than(before)
    assert not Times((0.001, 0.001, 0.001), (0.090, 0.091, 0.092)).worse_than(before)
    assert Times((0.015, 0.016, 0.017), (0.100, 0.101, 0.102)).worse_than(before)  # only what is exposed
    assert Times((0.001, 0.001, 0.001), (0.110, 0.111, 0.112)).worse_than(before)  # only the whole
    assert Times((0.001, 0.014, 0.040), (0.080, 0.104, 0.130)).worse_than(before)  # noise is no proof of being better


def test_of_the_exposed_time_that_of_the_last_rank_counts():
    ends_and_deliveries = torch.tensor([[[0.0, 5.0, 9.0], [0.0, 8.0, 9.5]]]).double().numpy()
    assert tuning.RecordedTimes.of(ends_and_deliveries) == tuning.RecordedTimes((1.5,), (9.5,))
