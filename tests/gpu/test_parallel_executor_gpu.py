"""ParallelExecutor and reduce_replicas on real hardware: one GPU, and two where there are two."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from dpfuse import reduce_replicas
from dpfuse.paddle import static
from tests.paddle.programs import Regression, batch, momentum, program_of
from tests.unit.test_reduce_replicas import DTYPES, reference, replica

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def to(params, device):
    """The same parameters and gradients on a device."""
    moved = []
    for param in params:
        moved.append(torch.nn.Parameter(param.detach().to(device)))
        moved[-1].grad = param.grad.to(device)
    return moved


@pytest.mark.parametrize("dtypes", [*([dtype] for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize(
    "devices",
    [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0",) * 3, pytest.param(("cuda:0", "cuda:1"), marks=two_gpus)],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"bucket_size": 64}], ids=str)
def test_replicas_get_the_bits_of_the_reference(dtypes, devices, options):
    replicas = [to(replica(seed, dtypes), device) for seed, device in enumerate(devices)]
    expected = reference([to(params, "cpu") for params in replicas], options.get("scale", 1 / len(devices)))
    reduce_replicas(replicas, **options)
    for params in replicas:
        for param, want in zip(params, expected, strict=True):
            assert torch.equal(param.grad.cpu(), want)


def test_replicas_are_reduced_behind_the_work_of_the_current_stream():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        replicas = [[torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))] for _ in range(2)]
        for index, params in enumerate(replicas):
            torch.cuda._sleep(20_000_000)
            params[0].grad = torch.full((1 << 20,), float(index), device="cuda")
        reduce_replicas(replicas)
        torch.cuda._sleep(20_000_000)
        got = [params[0].grad.clone() for params in replicas]
    side.synchronize()
    assert all(torch.equal(grad, torch.full_like(grad, 0.5)) for grad in got)


@pytest.fixture
def scope(monkeypatch):
    monkeypatch.delenv("FLAGS_selected_gpus", raising=False)
    scope = static.Scope()
    with static.scope_guard(scope):
        yield scope


def trained(module, devices, steps):
    """Training by hand on the CPU, the mean over chunks."""
    module = copy.deepcopy(module).double()
    optimizer = momentum(list(module.parameters()))
    for step in steps:
        optimizer.zero_grad()
        rows = -(-len(step["x"]) // devices)
        for start in range(0, len(step["x"]), rows):
            part = {name: value[start : start + rows].double() for name, value in step.items()}
            (module(**part)["loss"] / devices).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=two_gpus)])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_on_gpus_is_that_of_the_mean_over_devices(count, autocast, scope, monkeypatch):
    monkeypatch.setenv("FLAGS_selected_gpus", ",".join(map(str, range(count))))
    module = Regression()
    program = program_of(module)
    program.minimize("loss", momentum)
    exe = static.ParallelExecutor(use_cuda=True, loss_name="loss", main_program=program)
    test = static.ParallelExecutor(use_cuda=True, main_program=program.clone(for_test=True), share_vars_from=exe)
    assert exe.device_count == count
    steps = [batch(seed, rows=7) for seed in range(5)]
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        for step in steps:
            loss, grad = exe.run(["loss", "inner.weight@GRAD"], step, return_numpy=False)
            assert loss.device == torch.device("cuda", 0)
            assert loss.shape == (count,)
            assert grad.shape == (4 * count, 3)
    tolerance = 0.05 if autocast else 1e-4
    for name, param in trained(module, count, steps).named_parameters():
        for value in test.run([name], steps[0], return_merged=False)[0]:
            np.testing.assert_allclose(value, param.detach(), rtol=0, atol=tolerance)
            assert np.array_equal(value, scope.find_var(name))
    assert scope.find_var("inner.weight").tensor.is_cuda


def test_a_scope_moves_between_cpu_and_gpu_with_its_optimizer(scope):
    module = Regression()
    program = program_of(module)
    program.minimize("loss", momentum)
    steps = [batch(seed) for seed in range(4)]
    on_cpu, on_gpu = static.Executor("cpu"), static.Executor("gpu:0")
    parallel = static.ParallelExecutor(use_cuda=True, loss_name="loss", main_program=program)
    on_cpu.run(program, steps[0])
    on_gpu.run(program, steps[1])
    on_cpu.run(program, steps[2])
    if parallel.device_count == 1:
        parallel.run([], steps[3])
        for name, param in trained(module, 1, steps).named_parameters():
            np.testing.assert_allclose(scope.find_var(name), param.detach(), rtol=0, atol=1e-4)
    assert not module.inner.weight.is_cuda


def test_in_the_global_scope_the_module_itself_moves(monkeypatch):
    monkeypatch.setenv("FLAGS_selected_gpus", "0")
    module = Regression()
    exe = static.ParallelExecutor(use_cuda=True, loss_name="loss", main_program=program_of(module))
    exe.run(["loss"], batch(0))
    assert module.inner.weight.is_cuda
    assert static.global_scope().find_var("inner.weight").tensor is module.inner.weight


def test_what_a_run_computed_is_ready_for_the_callers_stream(scope, monkeypatch):
    monkeypatch.setenv("FLAGS_selected_gpus", "0")

    class Slow(torch.nn.Module):
        def forward(self, x):
            torch.cuda._sleep(50_000_000)
            return x * 2

    program = static.Program()
    with static.program_guard(program):
        y = Slow()(static.data("x", [None]))
    exe = static.ParallelExecutor(use_cuda=True, main_program=program)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        (value,) = exe.run([y], {"x": torch.arange(5.0)}, return_numpy=False)
        got = value + 1
    side.synchronize()
    assert got.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]


@two_gpus
def test_without_a_choice_all_visible_gpus_are_used(scope):
    exe = static.ParallelExecutor(use_cuda=True, loss_name="loss", main_program=program_of(Regression()))
    assert exe.device_count == torch.cuda.device_count()
