"""Programs: what is recorded, and what its parts are called."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfuse.paddle import static
from tests.paddle.programs import program_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(7, 7)

    def forward(self, x, t):
        h = F.dropout(self.drop(self.body(x)), 0.5, self.training)
        y = self.head(h)
        return {"y": y, "loss": F.mse_loss(y, t), "again": y}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def run(program, fetch_list, scope=None, **feed):
    return static.Executor("cpu").run(program, feed, fetch_list, scope=scope or static.Scope())


def test_a_built_program_names_its_variables():
    program = program_of(Net())
    assert list(program.feeds) == ["x", "t"]
    assert {name: isinstance(one, nn.Parameter) for name, one in program.variables.items()} == {
        **dict.fromkeys(["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"], True),
        **dict.fromkeys(["head.weight", "head.bias"], True),
        **dict.fromkeys(["body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"], False),
    }
    values = ["x", "t", "body", "drop", "dropout", "head", "mse_loss", "y", "loss", "again"]
    assert list(program.nodes) == values


def test_every_name_of_a_value_can_be_fetched():
    x, t = torch.randn(5, 3), torch.randn(5, 2)
    y, again, head = run(program_of(Net().eval()), ["y", "again", "head"], x=x, t=t)
    assert np.array_equal(y, again)
    assert np.array_equal(y, head)


def test_a_module_called_twice_names_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(torch.relu(self.fc(x)))

    module = Twice()
    x = torch.randn(3, 2)
    first, second = run(program_of(module, x=[None, 2]), ["fc", "fc_1"], x=x)
    np.testing.assert_array_equal(first, module.fc(x).detach())
    np.testing.assert_array_equal(second, module(x).detach())


def test_tied_weights_are_one_variable_under_each_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return {"loss": self.second(self.first(x)).sum()}

    module = Tied()
    program = program_of(module, x=[None, 2])
    program.minimize("loss", sgd)
    scope = static.Scope()
    one, other = run(program, ["first.weight", "second.weight@GRAD"], scope, x=torch.ones(1, 2))
    module(torch.ones(1, 2))["loss"].backward()
    torch.testing.assert_close(torch.tensor(other), module.first.weight.grad)
    assert np.array_equal(one, scope.find_var("second.weight"))
    assert scope.find_var("first.weight").tensor is scope.find_var("second.weight").tensor


def test_a_built_program_is_what_the_documents_show():
    train_program, startup_program = static.Program(), static.Program()
    torch.manual_seed(0)
    with static.program_guard(train_program, startup_program):
        assert static.default_main_program() is train_program
        assert static.default_startup_program() is startup_program
        data = static.data(name="X", shape=[None, 1], dtype="float32")
        layer = nn.Linear(1, 10)
        hidden = layer(data)
        loss = torch.mean(hidden)
        test_program = static.default_main_program().clone(for_test=True)
        train_program.minimize(loss, sgd)
    assert static.default_main_program() is not train_program
    exe = static.Executor("cpu")
    assert exe.run(startup_program) == []
    weight = f"{hidden.name}.weight"
    assert np.array_equal(static.global_scope().find_var(weight), layer.weight.detach())
    x = np.random.default_rng(0).random((10, 1), "float32")
    want = layer(torch.tensor(x)).mean().item()
    (trained,) = exe.run(train_program, feed={"X": x}, fetch_list=[loss.name])
    (tested,) = exe.run(test_program, feed={"X": x}, fetch_list=[loss])
    assert trained == pytest.approx(want)
    assert tested == pytest.approx(layer(torch.tensor(x)).mean().item())
    assert tested < trained


def test_a_recorded_program_computes_what_python_computes():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    weight = nn.Parameter(torch.randn(2, 3))
    constant = torch.tensor([1.0, 2.0])
    program = static.Program()
    with static.program_guard(program):
        x = static.data("x", [-1, 2])
        h = net(x)
        both = torch.cat([net[0](x), h], dim=1)[:, 1:4]
        y = (F.linear(h, weight) * constant - x / 2).sum(1, keepdim=True) + both.abs().max()
        first, second = torch.split(both, [1, 2], dim=1)
        y = y.view(y.shape[0], -1) + first + second.mean()
        y.name = "y"
    inputs = torch.randn(4, 2)
    h = net(inputs)
    both = torch.cat([net[0](inputs), h], dim=1)[:, 1:4]
    want = (F.linear(h, weight) * constant - inputs / 2).sum(1, keepdim=True) + both.abs().max()
    want = want + both[:, :1] + both[:, 1:].mean()
    (got,) = run(program, [y], x=inputs)
    np.testing.assert_array_equal(got, want.detach())
    held = sorted((name, isinstance(one, nn.Parameter)) for name, one in program.variables.items())
    patterns = [
        (r"constant_\d+", False),
        (r"parameter_\d+", True),
        (r"sequential_\d+\.0\.bias", True),
        (r"sequential_\d+\.0\.weight", True),
    ]
    for (name, trained), (pattern, want) in zip(held, patterns, strict=True):
        assert re.fullmatch(pattern, name)
        assert trained is want


def test_a_custom_module_is_one_operation_whatever_it_does():
    class Branches(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x * 2
            return -x

    program = static.Program()
    with static.program_guard(program):
        y = Branches()(static.data("x", [2]))
    for values in ([1.0, 2.0], [-1.0, -2.0]):
        assert run(program, [y], x=torch.tensor(values))[0].tolist() == Branches()(torch.tensor(values)).tolist()


def test_modules_without_variables_work_as_always_inside_a_guard_and_after_it():
    call = nn.Module.__call__
    with pytest.raises(KeyError), static.program_guard(static.Program()):
        assert nn.Linear(2, 1)(torch.ones(1, 2)).shape == (1, 1)
        with static.program_guard(static.Program()):
            pass
        assert nn.Module.__call__ is not call
        raise KeyError
    assert nn.Module.__call__ is call


def test_a_test_clone_evaluates_and_its_origin_goes_on_training():
    module = Net()
    program = program_of(module)
    test = program.clone(for_test=True)
    x, t = torch.randn(5, 3), torch.randn(5, 2)
    scope = static.Scope()
    before = run(test, ["y", "body.1.running_mean"], scope, x=x, t=t)
    module.eval()
    with torch.no_grad():
        np.testing.assert_array_equal(before[0], module(x, t)["y"])
    assert np.array_equal(before[1], np.zeros(4))
    (statistics,) = run(program, ["body.1.running_mean"], scope, x=x, t=t)
    assert not np.array_equal(statistics, np.zeros(4))
    assert run(test, ["body.1.num_batches_tracked"], scope, x=x, t=t)[0] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.9, True),
        lambda x: F.dropout(x),
        lambda x: F.dropout(x, p=0.9, training=True),
        lambda x: torch.dropout(x, 0.9, True),
        lambda x: F.alpha_dropout(x, training=True),
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True, eps=1e-9),
        lambda x: F.scaled_dot_product_attention(x[None], x[None] * 1e9, x[None], dropout_p=0.5)[0],
    ],
    ids=["positional", "default", "keyword", "torch", "alpha", "batch_norm", "attention"],
)
def test_functions_evaluate_in_a_test_clone(function):
    program = static.Program()
    with static.program_guard(program):
        y = function(static.data("x", [4, 3])) * 1
    x = torch.eye(4, 3) + torch.arange(4.0)[:, None] * torch.ones(3) * 10
    if "scaled_dot_product_attention" in program.nodes:
        first, second = (run(program.clone(for_test=True), [y], x=x)[0] for _ in range(2))
        assert np.array_equal(first, second)
    else:
        assert np.array_equal(run(program.clone(for_test=True), [y], x=x)[0], x)


def test_a_new_name_is_shown_and_the_old_ones_are_understood():
    program = static.Program()
    layer = nn.Linear(2, 1)
    with static.program_guard(program):
        y = layer(static.data("x", [2]))
        automatic = y.name
        y.name = "first"
        program.minimize(y, sgd)
        y.name = "second"
    assert y.name == "second"
    assert repr(y) == "Variable('second')"
    scope = static.Scope()
    values = run(program, [automatic, "first", "second", y], scope, x=torch.ones(2))
    assert all(value == values[0] for value in values)
    assert np.array_equal(scope.find_var(f"{automatic}.bias"), layer.bias.detach() - 0.1)


def test_a_clone_keeps_names_and_optimizer_but_no_later_change():
    program = static.Program()
    with static.program_guard(program):
        x = static.data("x", [2])
        y = x * 2
        y.name = "twice"
        program.minimize(y, sgd)
        clone, test = program.clone(), program.clone(for_test=True)
        y + 1
    assert list(clone.nodes) == ["x", "mul", "twice"]
    assert clone.objective is program.objective
    assert test.objective is None
    assert list(program.nodes) == ["x", "mul", "twice", "add"]
