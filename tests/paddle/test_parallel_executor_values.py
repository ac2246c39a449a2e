"""ParallelExecutor: what is fed, what is fetched, and how long values are kept."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import Regression, batch, chunks, executor, program_of, training_program

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.mark.parametrize(
    ("name", "merged", "each"),
    [
        ("x", (6, 3), (3, 3)),
        ("inner", (6, 4), (3, 4)),
        ("inner@GRAD", (6, 4), (3, 4)),
        ("loss", (2,), ()),
        ("loss@GRAD", (2,), ()),
        ("inner.weight", (8, 3), (4, 3)),
        ("inner.weight@GRAD", (8, 3), (4, 3)),
    ],
)
def test_values_of_the_devices_are_put_one_behind_the_other(name, merged, each):
    exe = executor(training_program(Regression()))
    (whole,) = exe.run([name], batch(0))
    assert isinstance(whole, np.ndarray)
    assert whole.shape == merged
    (parts,) = exe.run([name], batch(0), return_numpy=False, return_merged=False)
    assert [type(part) for part in parts] == [torch.Tensor] * 2
    assert [tuple(part.shape) for part in parts] == [each] * 2


def test_values_that_do_not_fit_together_can_be_fetched_apart():
    program = static.Program()
    with static.program_guard(program):
        y = static.data("x", [None, 1]).T * 1
    exe = static.ParallelExecutor(False, main_program=program)
    feed = {"x": np.ones((3, 1), np.float32)}
    with pytest.raises(ValueError, match=r"'mul' have shapes \[\(1, 2\), \(1, 1\)\].*return_merged=False"):
        exe.run([y], feed)
    assert [part.shape for part in exe.run([y], feed, return_merged=False)[0]] == [(1, 2), (1, 1)]


def test_fetched_parameters_are_those_after_the_step_and_copies():
    module = Regression()
    exe = executor(training_program(module), scope=static.global_scope())
    (weights,) = exe.run(["outer.bias"], batch(0), return_numpy=False, return_merged=False)
    kept = weights[0].clone()
    exe.run([], batch(1))
    assert torch.equal(weights[0], kept)
    assert not np.array_equal(static.global_scope().find_var("outer.bias"), kept)


def scaled(strategy):
    build = static.BuildStrategy()
    build.gradient_scale_strategy = strategy
    return build


def test_the_gradient_of_the_loss_may_be_one_or_fed():
    scales = static.BuildStrategy.GradientScaleStrategy
    program = program_of(Regression())
    step, name = batch(0), "inner.weight@GRAD"
    mean = executor(program).run([name], step, return_merged=False)[0][0]
    total = executor(program, build_strategy=scaled(scales.One)).run([name], step, return_merged=False)[0][0]
    np.testing.assert_allclose(total, 2 * mean, rtol=1e-6)
    exe = executor(program, build_strategy=scaled(scales.Customized))
    seeds = np.array([0.5, 0.0], np.float32)
    fed, loss = exe.run([name, "loss@GRAD"], {**step, "loss@GRAD": seeds}, return_merged=False)
    first = executor(program, build_strategy=scaled(scales.One)).run(
        [name], [chunks(step, 2)[0]] * 2, return_merged=False
    )[0]
    np.testing.assert_allclose(fed[0], first[0] / 4, rtol=1e-6)
    assert [value.item() for value in loss] == [0.5, 0.0]
    parts = [{**part, "loss@GRAD": seed} for part, seed in zip(chunks(step, 2), seeds, strict=True)]
    assert np.array_equal(exe.run([name], parts, return_merged=False)[0], fed)
    for wrong in (step, {**step, "loss@GRAD": seeds[:1]}, parts[:1]):
        with pytest.raises(ValueError, match="values of 'loss@GRAD', expected one for each of the 2 devices"):
            exe.run([], wrong)


class Witness(nn.Module):
    """Remembers what it computed, without keeping it alive."""

    seen: list = []  # noqa: RUF012

    def forward(self, x):
        result = x * 3
        Witness.seen.append(weakref.ref(result))
        return result


def witnessed(strategy=None):
    Witness.seen.clear()
    program = static.Program()
    with static.program_guard(program):
        hidden = Witness()(nn.Linear(1, 1)(static.data("x", [None, 1])))
        loss = hidden.mean()
    exe = static.ParallelExecutor(False, loss.name, program, exec_strategy=strategy)
    return exe, hidden


def alive():
    return [ref() is not None for ref in Witness.seen]


def test_local_scopes_can_be_dropped_and_nobody_notices():
    exe, hidden = witnessed()
    feed = {"x": np.arange(4, dtype=np.float32)[:, None]}
    fetches = [hidden, f"{hidden.name}@GRAD"]
    before = exe.run(fetches, feed)
    assert alive() == [True, True]
    exe.drop_local_exe_scopes()
    assert alive() == [False, False]
    after = exe.run(fetches, feed)
    assert all(map(np.array_equal, before, after))


def test_local_scopes_are_dropped_after_every_so_many_runs():
    strategy = static.ExecutionStrategy()
    strategy.num_iteration_per_drop_scope = 3
    exe, hidden = witnessed(strategy)
    feed = {"x": np.ones((2, 1), np.float32)}
    for run in range(1, 7):
        Witness.seen.clear()
        exe.run([hidden], feed)
        assert alive() == [run % 3 != 0] * 2


def test_an_executor_keeps_the_settings_it_was_made_with():
    strategy = static.ExecutionStrategy()
    exe, hidden = witnessed(strategy)
    strategy.num_iteration_per_drop_scope = 1
    exe.run([hidden], {"x": np.ones((2, 1), np.float32)})
    assert alive() == [True, True]


def test_values_that_are_not_fetched_are_let_go_during_the_run():
    exe, _ = witnessed()
    exe.run([], {"x": np.ones((2, 1), np.float32)})
    assert alive() == [False, False]


def test_a_test_program_leaves_devices_idle():
    exe = static.ParallelExecutor(False, main_program=program_of(Regression()))
    loss, y = exe.run(["loss", "y"], batch(0, rows=1))
    assert loss.shape == (1,)
    assert y.shape == (1, 2)


def test_one_device_is_fed_whatever_the_program_takes(monkeypatch):
    monkeypatch.setenv("CPU_NUM", "1")
    program = static.Program()
    with static.program_guard(program):
        y = static.data("table", [3, 2])[static.data("rows", [None], "int64")] * static.data("factor", [])
    exe = static.ParallelExecutor(False, main_program=program)
    feed = {"table": np.eye(3, 2, dtype=np.float32), "rows": np.array([0, 1, 1, 2]), "factor": np.float32(2)}
    assert exe.run([y], feed)[0].tolist() == [[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [0.0, 0.0]]


X, T = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("feed", "error", "text"),
    [
        ({"x": X, "t": T[:3]}, ValueError, r"different lengths, \{'x': 4, 't': 3\}.*one dict per device"),
        ({"x": X, "t": np.float32(1)}, ValueError, r"feed\['t'\] has shape \(\), expected \(-1, 2\)"),
        ({"x": X[:0], "t": T[:0]}, ValueError, "no rows in 'x'"),
        ({"x": X[:1], "t": T[:1]}, DPFuseError, "1 samples of 'x' make only 1 chunks of 1, less than the 2 devices"),
        ([{"x": X, "t": T}], ValueError, "feed is a list of 1, expected one dict for each of the 2 devices"),
        ([{"x": X, "t": T}] * 3, ValueError, "feed is a list of 3"),
        ([{"x": X, "t": T}, [X, T]], TypeError, r"feed\[1\] must be a dict of arrays by name, got list"),
        ([{"x": X, "t": T}, {"x": X}], ValueError, r"feed\[1\] lacks 't'"),
        ([{"x": X, "t": T}, {"x": X, "T": T}], ValueError, r"feed\[1\] has 'T'.*Known are"),
        (X, TypeError, "feed must be a dict of arrays by name, got ndarray"),
    ],
)
def test_a_wrong_feed_is_named_and_nothing_runs(feed, error, text):
    exe = executor(training_program(Regression()))
    before = static.global_scope().find_var("outer.bias").numpy()
    with pytest.raises(error, match=text):
        exe.run(["loss"], feed)
    assert np.array_equal(static.global_scope().find_var("outer.bias"), before)


def test_a_number_cannot_be_cut_for_several_devices():
    program = static.Program()
    with static.program_guard(program):
        static.data("x", [None]) * static.data("factor", [])
    exe = static.ParallelExecutor(False, main_program=program)
    with pytest.raises(ValueError, match=r"feed\['factor'\] has no dimension along which"):
        exe.run(["mul"], {"x": np.ones(4, np.float32), "factor": np.float32(2)})


@pytest.mark.parametrize(
    ("fetch_list", "error", "text"),
    [
        (["los"], ValueError, "fetch_list: 'los' is no variable of the program. Did you mean 'loss'"),
        (["x@GRAD"], DPFuseError, "'x@GRAD' cannot be fetched: the loss does not depend"),
    ],
)
def test_a_wrong_fetch_is_named(fetch_list, error, text):
    with pytest.raises(error, match=text):
        executor(training_program(Regression())).run(fetch_list, batch(0))


def test_gradients_need_a_loss():
    exe = static.ParallelExecutor(False, main_program=program_of(Regression()))
    with pytest.raises(ValueError, match=r"'loss@GRAD' does not exist in a run without gradients.*loss_name"):
        exe.run(["loss@GRAD"], batch(0))


def test_feed_dict_is_the_old_name_of_feed():
    exe = executor(program_of(Regression()))
    with pytest.warns(DeprecationWarning, match="feed_dict is the old name of feed"):
        old = exe.run(["y"], feed_dict=batch(0))
    assert np.array_equal(old[0], exe.run(["y"], feed=batch(0))[0])
    with pytest.raises(ValueError, match="got feed and feed_dict"):
        exe.run(["y"], batch(0), batch(0))
