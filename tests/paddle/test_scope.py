"""Scopes: where parameters, buffers and the state of optimizers live."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import Regression, batch, custom, momentum, program_of, sgd


def trained_by_hand(module, steps, optimizer):
    """Losses of plain torch training, on a copy."""
    module = copy.deepcopy(module)
    optimizer = optimizer(list(module.parameters()))
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(**step)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module


def test_a_program_trains_the_users_module_in_the_global_scope(exe):
    module = Regression()
    program = program_of(module)
    program.minimize("loss", momentum)
    steps = [batch(seed) for seed in range(5)]
    losses, reference = trained_by_hand(module, steps, momentum)
    got = [exe.run(program, feed=step, fetch_list=["loss", "inner.weight"]) for step in steps]
    assert [loss.item() for loss, _ in got] == losses
    for param, want in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param, want)
    assert np.array_equal(got[-1][1], module.inner.weight.detach())
    assert static.global_scope().find_var("inner.weight").tensor is module.inner.weight


def test_in_another_scope_the_module_is_left_alone(exe):
    module = Regression()
    before = copy.deepcopy(module.state_dict())
    program = program_of(module)
    program.minimize("loss", sgd)
    scope = static.Scope()
    with static.scope_guard(scope):
        exe.run(program, feed=batch(0))
    assert static.global_scope() is not scope
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert not np.array_equal(scope.find_var(name), tensor)
    (weight,) = exe.run(program.clone(for_test=True), batch(0), ["inner.weight"], scope)
    assert np.array_equal(weight, scope.find_var("inner.weight").get_tensor())


def test_what_is_set_in_a_scope_is_used(exe):
    module = Regression()
    program, scope = program_of(module), static.Scope()
    exe.run(program, batch(0), scope=scope)
    weight = scope.find_var("inner.weight").get_tensor()
    assert weight.shape() == [4, 3]
    weight.set(np.zeros((4, 3), np.float32))
    scope.find_var("inner.bias").set(torch.zeros(4))
    (inner,) = exe.run(program, batch(0), ["inner"], scope)
    assert not inner.any()
    with pytest.raises(ValueError, match=r"'inner.bias' has shape \(4,\), got a value of shape \(5,\)"):
        scope.find_var("inner.bias").set([0.0] * 5)


def test_variables_of_ones_own_live_in_a_scope_beside_a_program(exe):
    scope = static.Scope()
    own = scope.var("epoch")
    assert scope.var("epoch") is own
    with pytest.raises(DPFuseError, match="'epoch' of the scope has no value yet"):
        own.numpy()
    own.set(3)
    exe.run(program_of(Regression()), batch(0), scope=scope)
    assert np.array(own) == 3
    assert np.array(own, dtype=np.float64).dtype == np.float64
    assert scope.local_var_names() == ["epoch", "inner.weight", "inner.bias", "outer.weight", "outer.bias"]
    scope.var("other.weight").set(1.0)
    assert scope.find_var("nothing") is None


def test_two_programs_may_not_mean_different_things_by_one_name(exe):
    first, second = program_of(Regression()), program_of(Regression())
    scope = static.Scope()
    exe.run(first, batch(0), scope=scope)
    with pytest.raises(DPFuseError, match=r"already has a variable 'inner.weight'.*scope_guard\(Scope\(\)\)"):
        exe.run(second, batch(0), scope=scope)
    exe.run(second, batch(0), scope=static.Scope())
    scope.var("mine").set(1.0)
    module = custom(lambda self, x: x * self.mine)
    module.mine = nn.Parameter(torch.ones(1))
    with pytest.raises(DPFuseError, match="already has a variable 'mine'"):
        exe.run(program_of(module, x=[1]), {"x": torch.ones(1)}, scope=scope)


def test_a_program_and_its_clone_share_variables(exe):
    other = program_of(Regression())
    one = other.clone()
    one.minimize("loss", sgd)
    before = exe.run(other, batch(0), ["loss"])[0]
    exe.run(one, batch(0))
    assert exe.run(other, batch(0), ["loss"])[0] < before


def test_the_global_scope_forgets_programs_that_are_gone(exe):
    module = Regression()
    exe.run(program_of(module), batch(0))
    assert static.global_scope().find_var("outer.bias").tensor is module.outer.bias
    del module
    gc.collect()
    assert static.global_scope().find_var("outer.bias") is None
    again = Regression()
    exe.run(program_of(again), batch(0))
    assert static.global_scope().find_var("outer.bias").tensor is again.outer.bias


def test_an_optimizer_keeps_its_state_from_one_executor_to_the_next():
    module = Regression()
    program = program_of(module)
    program.minimize("loss", momentum)
    steps = [batch(seed) for seed in range(4)]
    losses, _ = trained_by_hand(module, steps, momentum)
    got = [static.Executor("cpu").run(program, step, ["loss"])[0].item() for step in steps]
    assert got == losses


def test_a_startup_program_initialises_what_was_built_under_its_guard(exe):
    program, startup = static.Program(), static.Program()
    with static.program_guard(program, startup):
        layer = nn.Linear(2, 1)
        layer(static.data("x", [None, 2]))
    scope = static.Scope()
    assert exe.run(startup, scope=scope) == []
    assert [name.rpartition(".")[2] for name in scope.local_var_names()] == ["weight", "bias"]
    assert np.array_equal(scope.find_var(scope.local_var_names()[0]), layer.weight.detach())
