"""What fleet.distributed_optimizer adds to an optimizer of torch, and that torch takes it for one of its own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.paddle.distributed import fleet
from dpfuse.paddle.distributed.fleet import session
from tests.paddle.test_fleet import net


@pytest.fixture
def optimizer(monkeypatch):
    monkeypatch.setattr(session, "_session", None)
    with pytest.warns(UserWarning, match="one process"):
        fleet.init(is_collective=True)
    return fleet.distributed_optimizer(torch.optim.Adam(net().parameters(), lr=0.5))


def test_state_and_groups_are_those_of_the_inner_optimizer(optimizer):
    inner = optimizer._inner_opt
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.inner_opt is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1
    other = fleet.distributed_optimizer(torch.optim.Adam([nn.Parameter(p.detach().clone()) for p in params], lr=0.1))
    other.set_state_dict(optimizer.state_dict())
    assert other.get_lr() == 0.5
    assert torch.equal(other.inner_opt.state_dict()["state"][0]["exp_avg"], inner.state_dict()["state"][0]["exp_avg"])
    assert "DistributedOptimizer" in repr(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.25})
    assert [group["lr"] for group in inner.param_groups] == [0.5, 0.25]


def test_gradients_are_dropped_or_set_to_zero(optimizer):
    param = optimizer.param_groups[0]["params"][0]
    for clear, left in ((lambda: optimizer.clear_grad(True), 0.0), (lambda: optimizer.zero_grad(False), 0.0)):
        param.grad = torch.ones_like(param)
        clear()
        assert (param.grad == left).all()
    for clear in (optimizer.clear_grad, optimizer.zero_grad):
        param.grad = torch.ones_like(param)
        clear()
        assert param.grad is None


def test_minimize_steps_with_the_gradients_of_a_backward(optimizer):
    params = optimizer.param_groups[0]["params"]
    loss = sum(param.square().sum() for param in params)
    with pytest.raises(dpfuse.DPFuseError, match=r"loss.backward\(\), called before"):
        optimizer.minimize(loss)
    before = params[0].detach().clone()
    loss.backward()
    operators, pairs = optimizer.minimize(loss)
    assert operators == []
    assert [id(param) for param, _ in pairs] == [id(param) for param in params]
    assert all(grad is param.grad for param, grad in pairs)
    assert not torch.equal(params[0], before)


def test_a_closure_is_handed_on(optimizer):
    params = optimizer.param_groups[0]["params"]

    def closure():
        optimizer.clear_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    expected = params[0].square().sum().item()
    assert optimizer.step(closure).item() == expected


@pytest.mark.parametrize("on", ["wrapper", "inner"])
def test_schedulers_accept_either_optimizer(optimizer, on):
    target = optimizer if on == "wrapper" else optimizer.inner_opt
    scheduler = torch.optim.lr_scheduler.StepLR(target, step_size=1, gamma=0.5)
    rates = []
    for _ in range(3):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.get_lr())
    assert rates == [0.25, 0.125, 0.0625]
    assert optimizer.state_dict()["state"][0]["step"] == 3
    with pytest.raises(dpfuse.DPFuseError, match="a scheduler sets the learning rate"):
        optimizer.set_lr(1.0)


def test_the_learning_rate_is_read_and_set(optimizer):
    optimizer.set_lr(0.125)
    assert optimizer.get_lr() == optimizer.inner_opt.param_groups[0]["lr"] == 0.125
    with pytest.raises(TypeError, match="value must be a number, got '1'"):
        optimizer.set_lr("1")
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.set_lr(2)
    assert optimizer.get_lr() == rate.item() == 2.0


def test_a_gradient_scaler_unscales_and_skips(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    param = optimizer.param_groups[0]["params"][0]
    before = param.detach().clone()
    scaler.scale(param.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, before)
    optimizer.clear_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(param.grad, torch.ones_like(param))
    assert not torch.equal(param, before)


def test_hooks_run_around_the_inner_step(optimizer):
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]


def test_an_optimizer_is_neither_copied_nor_pickled(optimizer):
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            duplicate(optimizer)
