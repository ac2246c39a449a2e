"""State dicts: torch's own form, any number of ranks, checkpoints, and states that move with the buckets."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dpfuse
from dpfuse import plan_buckets
from dpfuse.sharded import elementwise_shard
from tests.sharded.against_ddp import batch, bits_differ, network, trained_beside

SETTINGS = {"lr": 0.01, "weight_decay": 0.1}


def train(model, optimizer, steps, rank):
    for step in steps:
        model(batch(step, rank, torch.float32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [param.detach().clone() for param in model.module.parameters()]


def saved(rank, size):
    """The state of a plain optimizer and of a sharded one after the same steps, and the model."""
    _, theirs, _, plain, sharded = trained_beside(optim.AdamW, 5, **SETTINGS)
    return theirs.module.state_dict(), plain.state_dict(), sharded.state_dict()


def resumed(rank, size, model_state, state):
    """Weights after five more steps: of the plain optimizer, and of a sharded one, both of which load `state`."""
    seen = []
    for kind in (lambda model: dpfuse.ShardedOptimizer(model, optim.AdamW, lr=9.0), None):
        net = network()
        net.load_state_dict(model_state)
        model = dpfuse.DataParallel(net, comm_buffer_size=0.1, last_comm_buffer_size=0.02)
        optimizer = optim.AdamW(model.parameters(), lr=9.0) if kind is None else kind(model)
        optimizer.load_state_dict(copy.deepcopy(state))
        assert optimizer.param_groups[0]["lr"] == SETTINGS["lr"]
        train(model, optimizer, range(5, 10), rank)
        seen.append(weights(model))
    return bits_differ(*seen), seen[0]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_state_is_loaded_by_any_number_of_ranks_and_by_the_plain_optimizer(ranks, size):
    model_state, plain, sharded = ranks(saved)[0]
    results = [ranks(resumed, model_state, state, size=size) for state in (plain, sharded)]
    for one, other in zip(*results, strict=True):
        assert not bits_differ(one[1], other[1])
        assert size == 3 or not (one[0] or other[0])  # three summands have an order


def through_a_checkpoint(rank, size, folder):
    net = network()
    start = copy.deepcopy(net)
    model = dpfuse.DataParallel(net)
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, **SETTINGS)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, range(3), rank)
    scheduler.step()
    dpfuse.save_checkpoint(folder, model, optimizer, step=3, scheduler=scheduler)
    train(model, optimizer, range(3, 6), rank)
    again = dpfuse.DataParallel(start)
    resumed = dpfuse.ShardedOptimizer(again, optim.AdamW, lr=5.0)
    schedule = optim.lr_scheduler.StepLR(resumed, 2)
    assert dpfuse.load_checkpoint(folder, again, resumed, scheduler=schedule).step == 3
    train(again, resumed, range(3, 6), rank)
    return bits_differ(weights(model), weights(again))


def test_a_checkpoint_resumes_with_the_same_bits(ranks, tmp_path):
    assert ranks(through_a_checkpoint, str(tmp_path)) == [False, False]


def through_dcp(rank, size, folder, fresh):
    """torch's distributed checkpoint, with its own functions for the state dicts."""
    net = network()
    start = copy.deepcopy(net)
    model = dpfuse.DistributedDataParallel(net)
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, **SETTINGS)
    train(model, optimizer, range(3), rank)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    train(model, optimizer, range(3, 6), rank)
    again = dpfuse.DistributedDataParallel(start)
    resumed = dpfuse.ShardedOptimizer(again, optim.AdamW, **SETTINGS)
    if not fresh:
        train(again, resumed, [77], rank)
    found = dict(zip(("model", "optimizer"), get_state_dict(again, resumed), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(again, resumed, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    train(again, resumed, range(3, 6), rank)
    return bits_differ(weights(model), weights(again))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_distributed_checkpoint_of_torch_resumes_with_the_same_bits(ranks, tmp_path, fresh):
    assert ranks(through_dcp, str(tmp_path / "checkpoint"), fresh) == [False, False]


def planned_anew(rank, size):
    """Whether weights differ where another plan is used after three steps, before or behind a backward."""
    seen = []
    for moment in ("never", "between", "behind backward"):
        model = dpfuse.DataParallel(network(), comm_buffer_size=0.1, last_comm_buffer_size=0.02)
        optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, **SETTINGS)
        plan = plan_buckets(model.module, comm_buffer_size=0, last_comm_buffer_size=0)
        train(model, optimizer, range(3), rank)
        if moment == "between":
            model._sync.grads.use_plan(plan)
        model(batch(3, rank, torch.float32)).square().mean().backward()
        if moment == "behind backward":
            model._sync.grads.use_plan(plan)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(4, 8), rank)
        seen.append(weights(model))
        counts = len(model.bucket_plan.buckets)
        assert (counts == len(plan.buckets)) == (moment != "never")
    return bits_differ(seen[0], seen[1]), bits_differ(seen[0], seen[2])


def test_states_move_with_the_buckets(ranks):
    assert ranks(planned_anew) == [(False, False)] * 2


class Branches(nn.Module):
    """The middle layer is left out in some steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x, skip):
        x = torch.tanh(self.first(x))
        return self.last(x if skip else torch.tanh(self.middle(x)))


def unused_sometimes(rank, size, skips, cached):
    with mock.patch.object(elementwise_shard, "CACHED", cached):
        return compared_with_ddp(rank, skips)


def compared_with_ddp(rank, skips):
    ours, theirs = Branches(), Branches()
    model = dpfuse.DataParallel(ours, find_unused_parameters=True)
    peer = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    sharded = dpfuse.ShardedOptimizer(model, optim.AdamW, **SETTINGS)
    plain = optim.AdamW(peer.parameters(), **SETTINGS)
    for step, skipping in enumerate(skips):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(2 * step + rank))
        for one, optimizer in ((model, sharded), (peer, plain)):
            one(x, rank in skipping).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = sharded.state_dict()["state"]
    steps = [int(state[index]["step"]) for index in range(6)]
    expected, found = (
        [value for index in range(6) for value in one.state_dict()["state"][index].values()] for one in (plain, sharded)
    )
    differ = bits_differ([*ours.parameters()], [*theirs.parameters()])
    return differ or bits_differ(expected, found), steps


@pytest.mark.parametrize("cached", [1 << 20, 400, pytest.param(4, marks=pytest.mark.slow)])
def test_a_parameter_that_no_rank_uses_keeps_its_state(ranks, cached):
    """Also where the elements of a parameter are updated a hundred, or one, at a time."""
    both, one, none = {0, 1}, {1}, set()
    for differ, steps in ranks(unused_sometimes, [none, both, none, one, both, none], cached):
        assert not differ
        assert steps == [6, 6, 4, 4, 6, 6]


def frozen_and_unfrozen(rank, size):
    """Fine-tuning: the first layer is frozen at first, then added to the optimizer; later the last one is frozen."""
    seen = []
    for kind in ("sharded", "plain"):
        net = Branches()
        net.first.requires_grad_(False)
        if kind == "plain":
            model = dpfuse.DataParallel(net)
            optimizer = optim.AdamW(filter(lambda p: p.requires_grad, net.parameters()), **SETTINGS)
        else:
            model = dpfuse.DataParallel(net)
            optimizer = dpfuse.ShardedOptimizer(
                model, optim.AdamW, filter(lambda p: p.requires_grad, net.parameters()), **SETTINGS
            )
        for step in range(9):
            if step == 3:
                net.first.requires_grad_(True)
                optimizer.add_param_group({"params": list(net.first.parameters()), "lr": 0.003})
            if step == 6:
                net.last.requires_grad_(False)
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(2 * step + rank))
            model(x, False).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        seen.append(([*net.parameters()], [state["state"][i][key] for i in range(6) for key in ("step", "exp_avg")]))
    return [bits_differ(one, other) for one, other in zip(*seen, strict=True)]


def test_freezing_and_unfreezing_are_followed(ranks):
    assert ranks(frozen_and_unfrozen) == [[False, False]] * 2
