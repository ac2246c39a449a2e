"""Executor: programs on one device."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import Regression, batch, custom, program_of, sgd


def test_a_program_may_grow_between_runs(exe):
    program, scope = static.Program(), static.Scope()
    with static.program_guard(program):
        x = static.data("x", [2])
        double = x * 2
    assert exe.run(program, {"x": [1.0, 2.0]}, [double], scope)[0].tolist() == [2.0, 4.0]
    with static.program_guard(program):
        more = double + nn.Identity()(x)
    assert exe.run(program, {"x": [1.0, 2.0]}, [more], scope)[0].tolist() == [3.0, 6.0]


def test_a_new_name_or_parameter_is_seen_by_the_next_run(exe):
    program = static.Program()
    layer = nn.Linear(1, 1)
    with static.program_guard(program):
        y = layer(static.data("x", [1]))
        y.name = "y"
    exe.run(program, {"x": [1.0]}, ["y"])
    y.name = "z"
    assert exe.run(program, {"x": [1.0]}, ["z"])[0] == layer(torch.ones(1)).item()
    layer.weight = nn.Parameter(torch.tensor([[7.0]]))
    assert exe.run(program, {"x": [1.0]}, ["z"])[0] == layer(torch.ones(1)).item()


def test_default_programs_are_run_where_none_is_given(exe):
    program = static.Program()
    with static.program_guard(program):
        x = static.data("x", [1])
        y = x + 1
        assert exe.run(feed={"x": [1.0]}, fetch_list=[y])[0].tolist() == [2.0]
    assert exe.run(static.default_startup_program()) == []


def test_fetched_values_are_copies_of_what_the_run_computed(exe):
    program = program_of(Regression())
    program.minimize("loss", sgd)
    scope = static.Scope()
    first = exe.run(program, batch(0), ["inner.weight", "inner", "inner@GRAD", "outer.weight@GRAD"], scope)
    kept = copy.deepcopy(first)
    exe.run(program, batch(1), scope=scope)
    assert all(np.array_equal(one, other) for one, other in zip(first, kept, strict=True))
    tensors = exe.run(program, batch(1), ["loss", "inner"], scope, return_numpy=False)
    assert [type(tensor) for tensor in tensors] == [torch.Tensor] * 2
    assert tensors[0].shape == ()
    assert not tensors[0].requires_grad


def test_gradients_of_intermediate_values(exe):
    module = Regression()
    program = program_of(module)
    program.minimize("loss", sgd)
    step = batch(0)
    inner = module.inner(step["x"]).detach().requires_grad_()
    ((module.outer(torch.tanh(inner)) - step["t"]) ** 2).mean().backward()
    (got,) = exe.run(program, step, ["inner@GRAD"], static.Scope())
    np.testing.assert_allclose(got, inner.grad, rtol=1e-6)


def test_a_run_without_gradients_leaves_the_users_alone(exe):
    module = Regression()
    module(**batch(0))["loss"].backward()
    before = module.inner.weight.grad.clone()
    exe.run(program_of(module), batch(1), ["loss"])
    assert torch.equal(module.inner.weight.grad, before)


def test_feeds_may_be_overwritten_by_the_program_but_not_for_the_user(exe):
    program = static.Program()
    with static.program_guard(program):
        x = static.data("x", [2])
        y = nn.ReLU(inplace=True)(x)
    for values in (np.array([-1.0, 1.0], np.float32), torch.tensor([-1.0, 1.0])):
        assert exe.run(program, {"x": values}, [y])[0].tolist() == [0.0, 1.0]
        assert list(values) == [-1.0, 1.0]


def test_a_value_that_was_overwritten_is_not_passed_off_as_itself(exe):
    program = program_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), input=[None, 2])
    with pytest.raises(DPFuseError, match="'0' cannot be fetched: a later operation overwrote it in place"):
        exe.run(program, {"input": torch.ones(1, 2)}, ["0"], static.Scope())
    assert exe.run(program, {"input": torch.ones(1, 2)}, ["1"], static.Scope())[0].shape == (1, 2)


def test_a_buffer_that_a_module_assigns_anew_stays_the_scopes(exe):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls = self.calls + 1
            return x * self.calls

    counter, program = Counter(), static.Program()
    with static.program_guard(program):
        y = counter(static.data("x", [1]))
    assert [exe.run(program, {"x": [2.0]}, [y])[0].item() for _ in range(3)] == [2.0, 4.0, 6.0]
    assert counter.calls.item() == 3


def test_numbers_can_be_fetched_and_other_things_not(exe):
    program = static.Program()
    with static.program_guard(program):
        x = static.data("x", [None, 2])
        rows, both = x.size(0), torch.split(x, 1, dim=1)
        half = x.bfloat16()
        half.name = "half"
    feed = {"x": [[1.0, 2.0], [3.0, 4.0]]}
    assert exe.run(program, feed, [rows])[0] == 2
    with pytest.raises(TypeError, match="'split' is a tuple; expected a tensor or a number"):
        exe.run(program, feed, [both])
    with pytest.raises(TypeError, match=r"'half' has dtype torch.bfloat16.*return_numpy=False"):
        exe.run(program, feed, [half])
    assert exe.run(program, feed, [half], return_numpy=False)[0].dtype == torch.bfloat16


def declared():
    program = static.Program()
    with static.program_guard(program):
        static.data("image", [None, 2]) * static.data("label", [None, 1], "int64")
    return program


IMAGE, LABEL = np.ones((3, 2), np.float32), np.ones((3, 1), np.int64)


@pytest.mark.parametrize(
    ("feed", "error", "text"),
    [
        ({"image": IMAGE}, ValueError, "feed lacks 'label'"),
        (None, ValueError, "feed lacks 'image', 'label'"),
        ({"image": IMAGE, "lable": LABEL}, ValueError, "feed has 'lable', which is no input.*Did you mean 'label'"),
        ({"image": IMAGE, "label": IMAGE}, ValueError, r"feed\['label'\] has dtype float32, expected int64"),
        ({"image": LABEL, "label": LABEL}, ValueError, r"feed\['image'\] has dtype int64, expected float32"),
        ({"image": IMAGE[:, :1], "label": LABEL}, ValueError, r"shape \(3, 1\), expected \(-1, 2\)"),
        ({"image": IMAGE[0], "label": LABEL}, ValueError, r"shape \(2,\), expected \(-1, 2\)"),
        ({"image": "text", "label": LABEL}, TypeError, r"feed\['image'\] is a str; expected an array"),
        ({"image": [[1.0], [1.0, 2.0]], "label": LABEL}, TypeError, r"feed\['image'\] is a list; expected an array"),
        (
            {"image": np.array(["a"]), "label": LABEL},
            TypeError,
            r"feed\['image'\] is an array of <U1; expected numbers",
        ),
        ([IMAGE, LABEL], TypeError, "feed must be a dict of arrays by name, got list"),
    ],
)
def test_a_wrong_feed_is_named(exe, feed, error, text):
    with pytest.raises(error, match=text):
        exe.run(declared(), feed)


def test_lists_of_numbers_take_the_declared_dtype(exe):
    assert exe.run(declared(), {"image": [[1, 2]], "label": [[3]]}, ["mul"])[0].tolist() == [[3.0, 6.0]]


@pytest.mark.parametrize(
    ("fetch_list", "error", "text"),
    [
        (["lost"], ValueError, "'lost' is no variable of the program. Did you mean 'loss'"),
        (["inner.wieght"], ValueError, "Did you mean 'inner.weight'"),
        (["inner.wieght@GRAD"], ValueError, "Did you mean 'inner.weight@GRAD'"),
        (["loss@GRAD"], ValueError, "'loss@GRAD' does not exist in a run without gradients"),
        ("loss", TypeError, r"must be a list of names or variables, got 'loss'; write \['loss'\]"),
        ([7], TypeError, "must be a variable or its name, got 7"),
    ],
)
def test_a_wrong_fetch_is_named(exe, fetch_list, error, text):
    with pytest.raises(error, match=text):
        exe.run(program_of(Regression()), batch(0), fetch_list, static.Scope())


def test_gradients_that_are_not_there_say_why_and_nothing_is_updated(exe):
    module = Regression()
    module.inner.requires_grad_(False)
    program, scope = program_of(module), static.Scope()
    program.minimize("loss", sgd)
    for name in ("x@GRAD", "inner.weight@GRAD", "inner@GRAD"):
        with pytest.raises(DPFuseError, match=f"'{name}' cannot be fetched: the loss does not depend"):
            exe.run(program, batch(0), [name], scope)
    assert np.array_equal(scope.find_var("outer.weight"), module.outer.weight.detach())
    exe.run(program, batch(0), scope=scope)
    assert np.array_equal(scope.find_var("inner.weight"), module.inner.weight)
    assert not np.array_equal(scope.find_var("outer.weight"), module.outer.weight.detach())


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda self, x: {"loss": self.fc(x)}, r"loss 'loss' has shape \(3, 1\)"),
        (lambda self, x: {"loss": x.sum(), "y": self.fc(x)}, r"'loss' has shape \(\), or depends on no trainable"),
        (lambda self, x: {"loss": x.size(0), "y": self.fc(x)}, "loss 'loss' has type int"),
        (lambda self, x: {"loss": x.sum()}, "minimises 'loss' but has no trainable parameter"),
        (lambda self, x: {"loss": self.fc(x).sum() @ x}, "device 0 .cpu. failed to compute 'loss': RuntimeError"),
    ],
)
def test_a_loss_that_cannot_be_minimised_says_why(exe, forward, text):
    module = custom(forward)
    module.fc = nn.Linear(2, 1)
    program = program_of(module, x=[None, 2])
    program.minimize("loss", sgd)
    with pytest.raises(DPFuseError, match=text):
        exe.run(program, {"x": torch.ones(3, 2)}, scope=static.Scope())


def test_an_optimizer_that_is_none_is_named(exe):
    program = program_of(Regression())
    program.minimize("loss", lambda params: "sgd")
    with pytest.raises(TypeError, match=r"optimizer given to minimize\(\) returned a str"):
        exe.run(program, batch(0), scope=static.Scope())


def test_lazy_parameters_are_named(exe):
    program = static.Program()
    with static.program_guard(program):
        nn.LazyLinear(2)(static.data("x", [None, 2]))
    with pytest.raises(
        DPFuseError, match="has no shape yet, because it is lazy; expected a module that has run on a batch"
    ):
        exe.run(program, {"x": [[1.0, 2.0]]})


def test_a_closed_executor_runs_no_more(exe):
    program = program_of(Regression())
    exe.run(program, batch(0), scope=static.Scope())
    exe.close()
    with pytest.raises(DPFuseError, match="closed"):
        exe.run(program, batch(0))


@pytest.mark.parametrize(
    ("place", "error", "text"),
    [
        (7, TypeError, "place must be CPUPlace"),
        ("tpu", ValueError, "place is 'tpu'"),
        ("meta", ValueError, "place is 'meta'"),
        ("gpu:0", ValueError, "no CUDA device is visible"),
        (static.CUDAPlace(0), ValueError, "no CUDA device is visible"),
    ],
)
def test_a_place_that_is_none_is_named(place, error, text, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(error, match=text):
        static.Executor(place)


@pytest.mark.parametrize("place", [None, "cpu", static.CPUPlace(), torch.device("cpu")])
def test_places(place, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert static.Executor(place).run(static.Program()) == []


def test_other_arguments_of_run_are_checked(exe):
    with pytest.raises(TypeError, match=r"program must be an instance of Program, got Linear.*program_guard"):
        exe.run(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="scope must be an instance of Scope, got dict"):
        exe.run(static.Program(), scope={})
    with pytest.raises(TypeError, match="scope must be an instance of Scope, got int"), static.scope_guard(7):
        pass
