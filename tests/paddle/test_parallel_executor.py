"""ParallelExecutor: several devices of one process, and their variables."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import (
    Regression,
    assert_like,
    batch,
    chunks,
    executor,
    momentum,
    program_of,
    reference,
    sgd,
    sharing,
    training_program,
)
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [sgd, momentum, torch.optim.AdamW], ids=["sgd", "momentum", "adamw"])
def test_training_is_that_of_the_mean_over_devices(devices, optimizer, monkeypatch):
    monkeypatch.setenv("CPU_NUM", str(devices))
    module = Regression()
    program = training_program(module, optimizer)
    exe = executor(program)
    assert exe.device_count == devices
    assert len(exe.optimizers) == devices
    steps = [batch(seed, rows=7) for seed in range(5)]
    for step in steps:
        exe.run([], step)
    assert_like(sharing(exe, program), reference(module, [chunks(step, devices) for step in steps], optimizer))


@pytest.mark.parametrize("reduce", list(static.BuildStrategy.ReduceStrategy), ids=lambda one: one.name)
def test_a_list_is_dealt_out_as_it_is(reduce):
    module = Regression()
    program = training_program(module)
    build = static.BuildStrategy()
    build.reduce_strategy = reduce
    exe = executor(program, build_strategy=build)
    steps = [[batch(2 * seed, rows=2), batch(2 * seed + 1, rows=5)] for seed in range(3)]
    for parts in steps:
        losses, y = exe.run(["loss", "y"], parts)
        assert losses.shape == (2,)
        assert y.shape == (7, 2)
    assert_like(sharing(exe, program), reference(module, steps, sgd))


def test_devices_run_at_the_same_time():
    barrier = threading.Barrier(2)

    class Meets(nn.Module):
        def forward(self, x):
            barrier.wait(timeout=patience(20))  # breaks unless both devices are in here
            return x * 2

    program = static.Program()
    with static.program_guard(program):
        y = Meets()(static.data("x", [None, 1]))
    exe = static.ParallelExecutor(False, main_program=program)
    assert exe.run([y], {"x": np.ones((2, 1), np.float32)})[0].tolist() == [[2.0], [2.0]]


def test_one_thread_runs_one_device_after_the_other_and_random_numbers_repeat():
    running, most = [], []

    class Watch(nn.Module):
        def forward(self, x):
            running.append(1)
            most.append(len(running))
            result = F.dropout(x, 0.5, True)
            running.pop()
            return result

    program = static.Program()
    with static.program_guard(program):
        y = Watch()(static.data("x", [None, 1]))
    strategy = static.ExecutionStrategy()
    strategy.num_threads = 1
    exe = static.ParallelExecutor(False, main_program=program, exec_strategy=strategy)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(exe.run([y], {"x": np.ones((64, 1), np.float32)})[0])
    assert max(most) == 1
    assert np.array_equal(*results)


def test_a_threads_settings_are_those_of_the_caller():
    program = program_of(nn.Linear(2, 2), input=[None, 2])
    exe = static.ParallelExecutor(False, main_program=program)
    feed = {"input": torch.ones(4, 2)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert exe.run(["linear"], feed, return_numpy=False)[0].dtype == torch.bfloat16
    assert exe.run(["linear"], feed, return_numpy=False)[0].dtype == torch.float32
    with torch.no_grad():
        train = executor(training_program(Regression()), scope=static.Scope())
        assert np.any(train.run(["inner.weight@GRAD"], batch(0))[0])


def test_a_test_executor_that_shares_variables_sees_every_step():
    module = Regression()
    program = training_program(module)
    exe = executor(program)
    test = sharing(exe, program)
    for seed in range(3):
        exe.run([], batch(seed))
        trained = exe.run(["y"], batch(7))[0]  # as it was before this step
        again = test.run(["inner.weight"], batch(7), return_merged=False)[0]
        assert np.array_equal(again[0], again[1])
        assert np.array_equal(again[0], static.global_scope().find_var("inner.weight"))
        assert not np.array_equal(test.run(["y"], batch(7))[0], trained)


def test_a_test_executor_that_does_not_share_goes_stale_behind_the_first_device():
    module = Regression()
    program = training_program(module)
    exe = executor(program)
    test = static.ParallelExecutor(False, main_program=program.clone(for_test=True))
    first, second = test.run(["inner.weight"], batch(0), return_merged=False)[0]
    assert np.array_equal(first, second)
    exe.run([], batch(0))
    with pytest.warns(UserWarning, match="but not on its other devices.*share_vars_from"):
        live, stale = test.run(["inner.weight"], batch(0), return_merged=False)[0]
    assert np.array_equal(stale, second)
    assert np.array_equal(live, static.global_scope().find_var("inner.weight"))
    assert not np.array_equal(live, stale)
    exe.run([], batch(0))
    assert np.array_equal(test.run(["inner.weight"], batch(0), return_merged=False)[0][1], second)  # warned once


@pytest.mark.parametrize("who", ["scope", "module", "another executor", "frozen"])
def test_what_others_do_to_the_variables_reaches_all_devices_of_a_training_executor(who):
    with static.scope_guard(static.Scope()) if who == "scope" else static.scope_guard(static.global_scope()):
        module = Regression()
        program = training_program(module, momentum)
        exe = executor(program)
        steps = [batch(seed) for seed in range(3)]
        exe.run([], steps[0])
        want = reference(module, [], momentum)
        tensors = {name: static.global_scope().find_var(name).tensor for name, _ in module.named_parameters()}
        match who:
            case "scope":
                static.global_scope().find_var("inner.weight").set(torch.zeros(4, 3))
            case "module":
                with torch.no_grad():
                    tensors["inner.weight"].zero_()
            case "another executor":
                static.Executor("cpu").run(program, steps[1])
            case "frozen":
                tensors["inner.weight"].requires_grad_(False)
        with torch.no_grad():
            for name, param in want.named_parameters():
                param.copy_(tensors[name])
        velocity = copy.deepcopy(exe.optimizers[0].state_dict())
        exe.run([], steps[2])
        optimizer = momentum(list(want.parameters()))
        optimizer.load_state_dict(velocity)
        if who == "frozen":
            want.inner.weight.requires_grad_(False)
        for part in chunks(steps[2], 2):
            (want(**part)["loss"] / 2).backward()
        optimizer.step()
        assert_like(sharing(exe, program), want)


def test_statistics_stay_each_devices_own_when_others_change_a_parameter():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    program = static.Program()
    with static.program_guard(program):
        loss = module(static.data("x", [None, 3])).square().mean()
        program.minimize(loss, sgd)
    (weight, mean) = (name for name in program.variables if name.endswith(("1.weight", "running_mean")))
    exe = static.ParallelExecutor(False, loss, program)
    x = torch.randn(8, 3)
    exe.run([], {"x": x})
    static.global_scope().find_var(weight).set(torch.ones(1, 3))
    exe.run([], {"x": x})
    with pytest.raises(DPFuseError, match="device 0"):
        exe.run([], [{"x": x[:1]}, {"x": x}])  # batch norm refuses a single row
    weights, means = exe.run([weight, mean], {"x": x}, return_merged=False)
    assert np.array_equal(*weights)
    alone = nn.BatchNorm1d(3)
    for rows in (x[4:], x[4:], x, x[4:]):
        alone(rows)
    np.testing.assert_allclose(means[1], alone.running_mean, rtol=1e-5, atol=1e-7)
    assert not np.allclose(*means)


def test_the_loss_may_be_named_by_any_of_its_names_or_be_a_variable():
    class Net(Regression):
        def forward(self, x, t):
            loss = super().forward(x, t)["loss"]
            return {"loss": loss, "cost": loss}

    program = training_program(Net())
    assert static.ParallelExecutor(False, "cost", program).run(["cost"], batch(0))[0].shape == (2,)


def test_batch_norm_statistics_are_each_devices_own_and_the_firsts_live_in_the_scope():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return {"loss": self.norm(x).square().mean()}

    program = training_program(Net())
    exe = executor(program)
    x = torch.randn(8, 3)
    means = exe.run(["norm.running_mean"], {"x": x}, return_merged=False)[0]
    for mean, rows in zip(means, x.chunk(2), strict=True):
        np.testing.assert_allclose(mean, 0.1 * rows.mean(0), rtol=1e-5, atol=1e-7)
    assert np.array_equal(static.global_scope().find_var("norm.running_mean"), means[0])
    shared = sharing(exe, program).run(["norm.running_mean"], {"x": x}, return_merged=False)[0]
    assert all(map(np.array_equal, shared, means))


def test_without_an_optimizer_gradients_are_averaged_and_nothing_is_updated():
    module = Regression()
    exe = executor(program_of(module))
    step = batch(0)
    for part in chunks(step, 2):
        (module(**part)["loss"] / 2).backward()
    for _ in range(2):
        weights, grads = exe.run(["inner.weight", "inner.weight@GRAD"], step, return_merged=False)
        for weight, grad in zip(weights, grads, strict=True):
            assert np.array_equal(weight, module.inner.weight.detach())
            np.testing.assert_allclose(grad, module.inner.weight.grad, rtol=1e-5, atol=1e-7)


class Fails(torch.autograd.Function):
    """Fails on large numbers, in forward or in backward."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.fails = bool(x.abs().max() > 1e6)
        if ctx.fails and where == "forward":
            raise LookupError("planted")
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise LookupError("planted")
        return grad, None


class Failing(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        return Fails.apply(x, self.where)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_when_one_device_fails_it_is_named_and_no_device_takes_a_step(where):
    net, program = Regression(), static.Program()
    with static.program_guard(program):
        x, t = static.data("x", [None, 3]), static.data("t", [None, 2])
        loss = (net.outer(Failing(where)(net.inner(x))) - t).square().mean()
        loss.name = "loss"
        program.minimize(loss, momentum)
    exe = executor(program)
    test = sharing(exe, program)
    names = list(program.variables)
    exe.run([], batch(0))
    before = test.run(names, batch(0))
    step = batch(1)
    step["x"][-1] = 1e9
    what = {"forward": r"to compute 'failing_\d+'", "backward": "in the backward of 'loss'"}[where]
    with pytest.raises(DPFuseError, match=rf"device 1 \(cpu\) failed {what}: LookupError: planted") as caught:
        exe.run([], step)
    assert isinstance(caught.value.__cause__, LookupError)
    assert all(map(np.array_equal, before, test.run(names, batch(0))))
    exe.run([], batch(2))
    assert not np.array_equal(before[0], test.run(names, batch(0))[0])


def test_sparse_gradients_are_named():
    program = static.Program()
    with static.program_guard(program):
        loss = nn.Embedding(5, 3, sparse=True)(static.data("i", [None], "int64")).mean()
    exe = static.ParallelExecutor(False, loss.name, program)
    with pytest.raises(TypeError, match=r"replicas\[0\], embedding_\d+.weight .*sparse_coo gradient.*sparse=False"):
        exe.run([], {"i": np.arange(4)})
