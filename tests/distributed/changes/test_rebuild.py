"""Buckets rebuilt in the observed order, sent in plan order, while backward still runs."""

from __future__ import annotations

import time
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse.comm import collective
from dpfuse.comm.waiting import board_of
from dpfuse.engine.bucket import BucketState
from dpfuse.engine.plan import plan_buckets, rebuild_plan
from dpfuse.liveness import start

KB = 1 / 1024  # MB


class Scrambled(nn.Module):
    """Layers that run in another order than that of their registration, which may depend on the rank."""

    def __init__(self, order):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.never = nn.Linear(4, 4)
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


ORDER = [3, 1, 4, 0, 2]


def rebuilt_in_rank_0s_order(rank, size):
    order = ORDER if rank == 0 else ORDER[::-1]
    model = dpfuse.DataParallel(Scrambled(order), None, 0.1 * KB, 0.05 * KB, find_unused_parameters=True)
    golden = plan_buckets(model.module, 0.1 * KB, 0.05 * KB)
    assert model.bucket_plan == golden
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    assert model.bucket_plan == golden
    model(torch.ones(2, 4)).sum().backward()
    # In backward the last layer comes first, and in each layer the bias before the weight.
    ready = [2 * layer + part for layer in reversed(ORDER) for part in (1, 0)]
    assert model.bucket_plan == rebuild_plan(golden, ready)
    assert model.bucket_plan != golden
    assert model.bucket_plan.buckets[-1].params == (10, 11)
    for step in range(3):
        model.zero_grad()
        torch.manual_seed(rank + step)
        model(torch.randn(2, 4)).sum().backward()
        mine = torch.cat([param.grad.flatten() for param in model.module.layers.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs)
    return model.bucket_plan.layout


def test_all_ranks_rebuild_in_the_order_of_rank_0_and_still_agree(ranks):
    layouts = ranks(rebuilt_in_rank_0s_order)
    assert layouts[0] == layouts[1]


def ramps(rank, size, machines):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(32)])  # 1 MB each
    theirs = nn.parallel.DistributedDataParallel(deepcopy(net))
    group = dist.new_group()  # whose ranks ask each other for their machines
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start, "host_id", lambda: f"machine {rank % machines}")
        models = [
            dpfuse.DataParallel(deepcopy(net), group=group),
            dpfuse.DistributedDataParallel(deepcopy(net), process_group=group),
            dpfuse.DistributedDataParallel(deepcopy(net), bucket_cap_mb=4, process_group=group),
            dpfuse.DataParallel(deepcopy(net), plan="greedy", group=group),
            dpfuse.DataParallel(deepcopy(net), deterministic=True, group=group),
        ]
    first = [model.bucket_plan for model in models]
    for step in range(3):
        for model in (theirs, *models):
            model.zero_grad()
            torch.manual_seed(size * step + rank)
            model(torch.randn(2, 512)).sum().backward()
        for model in models:
            for ours, torchs in zip(model.module.parameters(), theirs.module.parameters(), strict=True):
                assert torch.equal(ours.grad, torchs.grad), step
    return [[len(bucket.params) for bucket in plan.buckets] for plan in (*first, *(m.bucket_plan for m in models))]


@pytest.mark.slow
def test_the_first_synchronised_backward_makes_the_ends_of_the_order_small(ranks):
    for plans in ranks(ramps, 2):
        greedy = [6, 25, 1]
        assert plans[:5] == [greedy, greedy, [4] * 8, greedy, greedy]
        # 32 MB, full buckets of 8 MB, small ones at both ends.
        assert plans[5:7] == [[2, 4, 8, 8, 3, 4, 2, 1]] * 2
        assert max(plans[7]) == 4
        assert plans[8:] == [greedy, greedy]


@pytest.mark.slow
def test_ranks_that_share_the_cores_of_one_machine_get_few_buckets(ranks):
    for plans in ranks(ramps, 1):
        assert plans[:5] == plans[5:]


def test_ranks_that_see_their_machines_otherwise_cut_the_same_buckets(rank, size):
    net = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MB each
    group = dist.new_group()
    model = dpfuse.DataParallel(net, group=group)
    board_of(group).one_machine = rank == 0
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
    assert [len(bucket.params) for bucket in model.bucket_plan.buckets] == [1, 2, 2, 2, 1]


def test_gradients_in_the_old_buffers_are_not_lost(rank, size):
    model = dpfuse.DataParallel(Scrambled(ORDER), None, 0.1 * KB, 0.05 * KB, find_unused_parameters=True)
    x = torch.full((2, 4), rank + 1.0)
    model(x).sum().backward()
    first = [param.grad for param in model.module.layers.parameters()]
    values = [gradient.clone() for gradient in first]
    # Accumulating into the old views, in a synchronised backward that already uses the new buffers.
    model(x).sum().backward()
    for param, view, value in zip(model.module.layers.parameters(), first, values, strict=True):
        assert param.grad is not view
        torch.testing.assert_close(param.grad, 2 * value)


def test_buckets_are_sent_in_plan_order_whatever_becomes_ready_first(rank, size):
    """Rank 1 gets its gradients ready in the opposite order, and late."""
    model = dpfuse.DataParallel(Scrambled(ORDER if rank == 0 else ORDER[::-1]), None, 0, 0, find_unused_parameters=True)
    sent = []
    original = collective.all_reduce

    def recorded(flat, group):
        buckets = model.reducer.buckets
        sent.append(next(i for i, b in enumerate(buckets) if b.parts.buffer.flat is flat))
        return original(flat, group)

    collective.all_reduce = recorded
    try:
        for step in range(4):
            for param in model.module.layers.parameters():
                param.register_hook(lambda g: time.sleep(0.001 * torch.rand(()).item()))
            torch.manual_seed(step)
            model(torch.randn(2, 4)).sum().backward()
            assert sent == list(range(12))
            sent.clear()
            model.zero_grad()
    finally:
        collective.all_reduce = original


def test_buckets_are_sent_while_backward_still_runs(rank, size):
    model = dpfuse.DataParallel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), None, 0, 0)
    states = []
    model.module[0].bias.register_hook(lambda _: states.append([b.state for b in model.reducer.buckets]))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    recorded, *later = states
    assert set(recorded) == {BucketState.FREE}  # the first backward is recorded, and reduced at its end
    for seen in later:  # when the first layer's gradient arrives, those of all later layers are under way
        assert [state is BucketState.FLIGHT for state in seen] == [True] * 10 + [False] * 2


class Repeating(nn.Module):
    """A layer that runs several times under reentrant checkpointing: a ready mark for each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = checkpoint(self.first, x, use_reentrant=True)
        return self.second(x)


def expected_mean(model, xs, times):
    """Gradients of plain, unwrapped layers, averaged by torch alone."""
    bare = Repeating()
    bare.load_state_dict(model.state_dict())
    y = xs
    for _ in range(times):
        y = bare.first(y)
    bare.second(y).sum().backward()
    means = [param.grad / dist.get_world_size() for param in bare.parameters()]
    for value in means:
        dist.all_reduce(value)
    return means


def test_a_parameter_that_fires_several_times_is_learned_in_the_first_backward(rank, size):
    model = dpfuse.DataParallel(Repeating(), None, 0, 0)
    for step in range(4):
        x = torch.full((2, 4), rank + 1.0 + step, requires_grad=True)
        times = 3 if step < 3 else 2  # fewer than learned: the bucket just waits for the end
        model(x, times).sum().backward()
        expected = expected_mean(model, x.detach(), times)
        torch.testing.assert_close([param.grad for param in model.module.parameters()], expected)
        model.zero_grad()


def test_a_ready_mark_after_the_bucket_was_sent_is_an_error_on_every_rank(rank, size):
    model = dpfuse.DataParallel(Repeating(), None, 0, 0)
    x = torch.full((2, 4), rank + 1.0, requires_grad=True)
    for _ in range(2):
        model(x, 1).sum().backward()
        model.zero_grad()
    more = 1 + rank  # only rank 1 deviates
    if rank == 1:
        with pytest.raises(dpfuse.DPFuseError, match=r"on rank 1 parameters? 'first.* became ready after"):
            model(x, more).sum().backward()
    else:
        with pytest.raises(dpfuse.DPFuseError, match="failed on rank 1 of 2, so rank 0 has no averaged"):
            model(x, more).sum().backward()
    model.zero_grad()
    model(x, 1).sum().backward()
    torch.testing.assert_close([p.grad for p in model.module.parameters()], expected_mean(model, x.detach(), 1))
