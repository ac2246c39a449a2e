"""The hooks around the steps of optimizers: one for all users, gone with the last, and never an error of a step."""

from __future__ import annotations

from collections import OrderedDict
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, optimizer

import dpfuse
from dpfuse.engine import optimizer_step_hook
from tests.freed import still_held


class User:
    """Calls a function with each optimizer that is about to step."""

    def __init__(self, act):
        self.before_step = act
        optimizer_step_hook.call_before_steps(self)


@pytest.fixture
def hooks(monkeypatch):
    """The hooks that torch has for all optimizers; there is no user at first, since other tests may have left some."""
    found = OrderedDict()
    monkeypatch.setattr(optimizer, "_global_optimizer_pre_hooks", found)
    before = optimizer_step_hook._StepHook(optimizer.register_optimizer_step_pre_hook, "before_step")
    monkeypatch.setattr(optimizer_step_hook, "_before", before)
    return found


def sgd():
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return SGD([param], lr=1.0)


def test_users_share_one_hook_which_goes_with_the_last(hooks):
    calls = []
    users = [User(lambda optimizer, name=name: calls.append((name, optimizer))) for name in "ab"]
    optimizer_step_hook.call_before_steps(users[0])  # once more
    assert len(hooks) == 1
    first, second = sgd(), sgd()
    first.step()
    second.step()
    assert calls == [("a", first), ("b", first), ("a", second), ("b", second)]
    del users[0]
    first.step()
    assert calls[4:] == [("b", first)]
    users.clear()
    assert not hooks
    first.step()
    assert len(calls) == 5
    users = [User(lambda optimizer: calls.append(("c", optimizer)))]
    first.step()
    assert calls[5:] == [("c", first)]


def test_users_behind_a_step_see_what_it_has_done(monkeypatch):
    found = OrderedDict()
    monkeypatch.setattr(optimizer, "_global_optimizer_post_hooks", found)
    after = optimizer_step_hook._StepHook(optimizer.register_optimizer_step_post_hook, "after_step")
    monkeypatch.setattr(optimizer_step_hook, "_after", after)
    seen = []

    class Looks:
        def after_step(self, stepped):
            seen.append(stepped.param_groups[0]["params"][0].tolist())

    user = Looks()
    optimizer_step_hook.call_after_steps(user)
    assert len(found) == 1
    sgd().step()
    assert seen == [[0.0, 0.0]]
    del user
    assert not found
    sgd().step()
    assert len(seen) == 1


def test_steps_of_a_part_of_another_optimizer_are_not_told(hooks):
    calls = []
    user = User(calls.append)
    part, whole = sgd(), sgd()
    optimizer_step_hook.leave_steps_untold(part)
    part.step()
    whole.step()
    assert calls == [whole]
    del user


def test_an_error_of_a_user_stops_the_step(hooks):
    user = User(lambda optimizer: 1 / 0)
    stepping = sgd()
    with pytest.raises(ZeroDivisionError):
        stepping.step()
    assert torch.equal(stepping.param_groups[0]["params"][0].detach(), torch.ones(2))
    del user
    stepping.step()
    assert torch.equal(stepping.param_groups[0]["params"][0].detach(), torch.zeros(2))


def test_the_last_user_may_go_while_an_optimizer_steps(hooks):
    users = []
    users.append(User(lambda optimizer: users.clear()))
    sgd().step()
    assert not users
    assert not hooks


@pytest.mark.parametrize("place", ["before", "behind"])
def test_beside_hooks_of_others_the_last_user_may_go_as_well_and_the_next_is_called_once(hooks, place):
    users, others, calls = [], [], []

    def other(*_):
        others.append(len(hooks))
        users.clear()

    if place == "before":
        optimizer.register_optimizer_step_pre_hook(other)
    users.append(User(lambda optimizer: users.clear()))
    if place == "behind":
        optimizer.register_optimizer_step_pre_hook(other)
    stepping = sgd()
    stepping.step()
    stepping.step()
    assert others == [2, 2]
    again = User(calls.append)
    stepping.step()
    assert calls == [stepping]
    del again


def test_a_freed_model_leaves_no_hook(hooks):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = dpfuse.DataParallel(nn.Linear(2, 2), accumulate_in_buckets=True)
        assert len(hooks) == 1
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        params = [*model.parameters()]
        with pytest.raises(dpfuse.DPFuseError, match=r"SGD\.step\(\) was called while gradients of parameter"):
            SGD(params, lr=1.0).step()
        reducer = ref(model.reducer)
        del model
        assert still_held([reducer]) == []
        assert not hooks
        SGD(params, lr=1.0).step()
    finally:
        dist.destroy_process_group()
