"""Training and reducing as real Paddle does it: recorded trajectories and reductions, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.golden_nets import LOSSES, GoldenNet, make_optimizer

GOLDEN = Path(__file__).parents[2] / "golden"
TRAJECTORIES = {case["id"]: case for case in json.loads((GOLDEN / "trajectories.json").read_text())}
REDUCTIONS = [pytest.param(case, id=case["id"]) for case in json.loads((GOLDEN / "reduce.json").read_text())]
WEIGHTS = {"float64": 1e-11, "float32": 2e-6}
LOSS = {"float64": 1e-11, "float32": 2e-5}


def assert_close(got, expected, tolerance, what):
    difference = (got.detach().double() - torch.tensor(expected, dtype=torch.float64)).abs().max().item()
    assert difference <= tolerance, f"{what} differs by {difference}"


def tensor(values, dtype):
    floats = torch.tensor(values, dtype=torch.float64)
    ids = torch.tensor(values)
    return floats.to(getattr(torch, dtype)) if ids.is_floating_point() else ids


def check_gradients(net, expected, dtype):
    for name, values in (expected or {}).items():
        grad = getattr(net, name).grad
        if values is None:
            assert grad is None, name
        else:
            assert_close(grad, values, WEIGHTS[dtype], f"gradient of {name}")


def check_weights(net, expected, dtype):
    for name, values in expected.items():
        assert_close(getattr(net, name), values, WEIGHTS[dtype], name)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("case", TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_training_follows_paddles_trajectory(rank, size, case, views):
    init = case["init_rank1"] if rank and case["init_differs"] else case["init"]
    net = GoldenNet(case, init)
    model = dpfuse.DataParallel(
        net,
        comm_buffer_size=case["comm_buffer_size"],
        last_comm_buffer_size=case["last_comm_buffer_size"],
        find_unused_parameters=case["find_unused_parameters"],
        gradient_as_bucket_view=views,
    )
    expected, dtype = case["expected"], case["dtype"]
    if case["net"] != "sparse":  # where Paddle was not told beforehand that the gradient is sparse
        assert [list(bucket.params) for bucket in model.bucket_plan.buckets] == expected["groups"][::-1]
    optimizer = make_optimizer(case["optimizer"], [param for param in net.parameters() if param.requires_grad])
    local = expected.get("grads_local_step0")
    for step, micros in enumerate(case["data"][rank]):
        use = case["use_flags"][rank][step]
        for micro, batch in enumerate(micros):
            is_last = micro == len(micros) - 1
            if step == 0 and is_last and local and case["mode"] == "no_sync":
                check_gradients(net, local[rank], dtype)
            with model.no_sync(enabled=case["mode"] == "fused" or not is_last):
                x, t = tensor(batch["x"], dtype), tensor(batch["t"], dtype)
                loss = LOSSES[case["loss"]](model(x, use), t)
                loss.backward()
            assert_close(loss, expected["losses"][rank][step][micro], LOSS[dtype], f"loss of step {step}")
        if case["mode"] == "fused":
            if step == 0:
                check_gradients(net, local[rank], dtype)
            dpfuse.fused_allreduce_gradients(model.parameters())
        if step == 0:
            check_gradients(net, expected["grads_after_sync_step0"], dtype)
        if expected["grad_is_none_before_step"] is not None:
            is_none = {name: getattr(net, name).grad is None for name in case["init"]}
            assert is_none == expected["grad_is_none_before_step"][rank][step]
        optimizer.step()
        optimizer.zero_grad(set_to_none=not case["clear_to_zero"])
        if step == 0:
            check_weights(net, expected["weights_after_step1"], dtype)
    check_weights(net, expected["final"], dtype)
    for name in ("running_mean", "running_var"):
        if name in expected:
            assert_close(getattr(net, name), expected[name][rank], 1e-6, name)


class Given(nn.Module):
    """A module whose gradients are whatever it is told."""

    def __init__(self, shapes, dtype):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True))


def reduce_like_paddle(rank, size, case):
    dtype = getattr(torch, case["dtype"])
    model = dpfuse.DataParallel(Given(case["shapes"], dtype))
    gradients = [torch.tensor(values, dtype=torch.float64).to(dtype) for values in case["local"][rank]]
    path = case["path"]
    if path != "dp":
        with model.no_sync():
            model(gradients).backward()
    if path in ("dp", "no_sync_then_dp"):
        model(gradients).backward()
    else:
        dpfuse.fused_allreduce_gradients(model.parameters(), scale=1.0 if path == "fused_scale1" else None)
    results = []
    for index, weight in enumerate(model.module.weights):
        expected = torch.tensor(case["result"][index], dtype=torch.float64)
        parts = [torch.tensor(local[index], dtype=torch.float64).abs() for local in case["local"]]
        weight_of_sum = sum(parts) * (2 if path == "no_sync_then_dp" else 1)
        relative = {"float32": 3e-7, "float64": 3e-16 * size, "bfloat16": 0.02}[case["dtype"]]
        assert weight.grad.isfinite().all()
        assert ((weight.grad.double() - expected).abs() <= relative * weight_of_sum).all()
        results.append(weight.grad.double().tolist())
    return results


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", REDUCTIONS)
def test_a_reduction_returns_what_paddles_returns(ranks, case):
    results = ranks(reduce_like_paddle, case, size=case["nranks"])
    assert all(result == results[0] for result in results)
