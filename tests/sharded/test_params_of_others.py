"""A gradient of a parameter that the wrapped model does not average is an error of the optimizer's step."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import dpfuse
from dpfuse.errors import DPFuseError

X = torch.ones(2, 4)
ONE_GROUP = "a parameter of shape (1, 4) in parameter group 0 has a gradient, and the wrapped model does not average it"


def two_models(rank):
    body, head = dpfuse.DataParallel(nn.Linear(4, 4)), dpfuse.DataParallel(nn.Linear(4, 1))
    optimizer = dpfuse.ShardedOptimizer(body, optim.SGD, [*body.parameters(), *head.parameters()], lr=0.1)
    head(body(X)).sum().backward()
    return optimizer


def loss_with_parameters(rank):
    body, head = dpfuse.DataParallel(nn.Linear(4, 4)), nn.Linear(4, 1)
    optimizer = dpfuse.ShardedOptimizer(body, optim.SGD, [*body.parameters(), *head.parameters()], lr=0.1)
    head(body(X)).sum().backward()
    return optimizer


def in_backward(rank):
    body, head = dpfuse.DataParallel(nn.Linear(4, 4)), nn.Linear(4, 1)
    params = [*body.parameters(), *head.parameters()]
    optimizer = dpfuse.ShardedOptimizer(body, optim.SGD, params, lr=0.1, step_in_backward=True)
    head(body(X)).sum().backward()
    return optimizer


def added_group(rank):
    body, head = dpfuse.DataParallel(nn.Linear(4, 4)), nn.Linear(4, 1)
    optimizer = dpfuse.ShardedOptimizer(body, optim.SGD, lr=0.1)
    head(body(X)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [head.weight]})
    head(body(X)).sum().backward()
    return optimizer


PROGRAMS = {"two models": two_models, "a loss": loss_with_parameters, "in backward": in_backward}


def told(rank, size, name):
    optimizer = {**PROGRAMS, "an added group": added_group}[name](rank)
    with pytest.raises(DPFuseError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("name", [*PROGRAMS, "an added group"])
@pytest.mark.filterwarnings("ignore:DPF")
def test_a_gradient_of_others_is_an_error(ranks, name):
    expected = ONE_GROUP.replace("group 0", "group 1") if name == "an added group" else ONE_GROUP
    assert all(expected in text for text in ranks(told, name))


def frozen(rank, size):
    """Frozen parameters may be in the groups, and be trained later."""
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(True))
    model.module[0].requires_grad_(False)
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    for step in range(4):
        if step == 2:
            model.module[0].requires_grad_(True)
        before = model.module[0].weight.detach().clone()
        model(X + rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(before, model.module[0].weight) == (step < 2)


def test_frozen_parameters_may_be_in_the_groups(ranks):
    ranks(frozen)


def ignored(rank, size, zeros):
    """What the wrapper leaves alone has an optimizer of its own; a step with zeros is that of a checkpoint."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if not zeros:
        dpfuse.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    model = dpfuse.DistributedDataParallel(net)
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    if zeros:
        net[0].requires_grad_(False)
        model(X + rank).sum().backward()
        net[0].requires_grad_(True)
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
    else:
        model(X + rank).sum().backward()
        assert not any(net[0].weight is param for group in optimizer.param_groups for param in group["params"])
    optimizer.step()


@pytest.mark.parametrize("zeros", [False, True])
def test_what_is_left_alone_and_what_is_zero_is_no_error(ranks, zeros):
    ranks(ignored, zeros)


def stale(rank, size, ours):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if ours:
        model = dpfuse.DataParallel(net)
        optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.5)
    else:
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):  # buckets settle
        model(X + rank).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(X + rank).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return "modified by an inplace operation" in str(caught.value)


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "dpfuse"])
def test_a_graph_with_the_old_values_is_refused(ranks, ours):
    assert ranks(stale, ours) == [True, True]


class Growing(optim.Optimizer):
    """Adam whose counter of steps is in its group from the first step on, as in several packages."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = count = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].lerp_(param.grad.square(), 1e-3)
                scale = (state["square"] / (1 - 0.999**count)).sqrt() + 1e-8
                param.sub_(group["lr"] * state["mean"] / (1 - 0.9**count) / scale)


def counted(rank, size, ours):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if ours:
        model = dpfuse.DataParallel(net, comm_buffer_size=0.0001, last_comm_buffer_size=0.00005)
        optimizer = dpfuse.ShardedOptimizer(model, Growing)
    else:
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = Growing(model.parameters())
    for step in range(8):
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        model(X + rank + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict()["param_groups"][0]["step"], [param.detach() for param in net.parameters()]


def test_a_setting_that_a_step_adds_is_kept(ranks):
    for (count, params), (their_count, theirs) in zip(ranks(counted, True), ranks(counted, False), strict=True):
        assert count == their_count == 8
        assert all(torch.equal(one, other) for one, other in zip(params, theirs, strict=True))
