"""Paddle's recorded trajectories, reductions and groups, through the names of the Paddle wing.

How the core treats views and private gradients is in tests/distributed/averaging/test_paddle_trajectories.py. It runs
every case. Here each case runs once, and in `make test` only every third one of those with plain backwards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse.paddle as paddle
from dpfuse.paddle.distributed.fleet.utils.hybrid_parallel_util import (
    fused_allreduce_gradients,
    fused_allreduce_gradients_with_group,
)
from tests.distributed.averaging.test_paddle_trajectories import Given, check_gradients, check_weights, tensor
from tests.distributed.golden_nets import LOSSES, GoldenNet, make_optimizer

GOLDEN = Path(__file__).parent.parent / "golden"


def cases(name):
    return [pytest.param(case, id=case["id"]) for case in json.loads((GOLDEN / f"{name}.json").read_text())]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", cases("trajectories"))
def test_training_follows_paddles_trajectory(rank, size, case):
    net = GoldenNet(case, case["init_rank1"] if rank and case["init_differs"] else case["init"])
    options = ("comm_buffer_size", "last_comm_buffer_size", "find_unused_parameters")
    model = paddle.DataParallel(net, **{name: case[name] for name in options})
    optimizer = make_optimizer(case["optimizer"], [param for param in net.parameters() if param.requires_grad])
    for step, micros in enumerate(case["data"][rank]):
        for micro, batch in enumerate(micros):
            with model.no_sync(enabled=case["mode"] == "fused" or micro < len(micros) - 1):
                x, t = tensor(batch["x"], case["dtype"]), tensor(batch["t"], case["dtype"])
                LOSSES[case["loss"]](model(x, case["use_flags"][rank][step]), t).backward()
        if case["mode"] == "fused":
            fused_allreduce_gradients(model.parameters(), None)
        if step == 0:
            check_gradients(net, case["expected"]["grads_after_sync_step0"], case["dtype"])
        optimizer.step()
        model.clear_gradients(set_to_zero=case["clear_to_zero"])
    check_weights(net, case["expected"]["final"], case["dtype"])


def reduce(rank, size, case):
    dtype = getattr(torch, case["dtype"])
    model = paddle.DataParallel(Given(case["shapes"], dtype))
    gradients = [torch.tensor(values, dtype=torch.float64).to(dtype) for values in case["local"][rank]]
    path = case["path"]
    if path != "dp":
        with model.no_sync():
            model(gradients).backward()
    if path in ("dp", "no_sync_then_dp"):
        model(gradients).backward()
    elif path == "fused":
        fused_allreduce_gradients(model.parameters(), None)
    else:
        fused_allreduce_gradients_with_group(model.parameters(), None, scale=1.0)
    relative = {"float32": 3e-7, "float64": 3e-16 * size, "bfloat16": 0.02}[case["dtype"]]
    for index, weight in enumerate(model._layers.weights):
        expected = torch.tensor(case["result"][index], dtype=torch.float64)
        summands = [torch.tensor(local[index], dtype=torch.float64).abs() for local in case["local"]]
        tolerance = relative * sum(summands) * (2 if path == "no_sync_then_dp" else 1)
        assert ((weight.grad.double() - expected).abs() <= tolerance).all()
    return [weight.grad.double().tolist() for weight in model._layers.weights]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", cases("reduce"))
def test_a_reduction_returns_what_paddles_returns(ranks, case):
    results = ranks(reduce, case, size=case["nranks"])
    assert all(result == results[0] for result in results)


class Listed(nn.Module):
    """Parameters of given shapes, each in a module of its own, and nothing to compute."""

    def __init__(self, params):
        super().__init__()
        for index, param in enumerate(params):
            value = torch.zeros(param["shape"], dtype=getattr(torch, param["dtype"]))
            if param.get("sparse"):
                self.add_module(str(index), nn.Embedding(*value.shape, sparse=True, _weight=value))
                continue
            self.add_module(str(index), child := nn.Module())
            child.weight = nn.Parameter(value, requires_grad=param.get("trainable", True))


@pytest.mark.parametrize("case", cases("dp_groups"))
def test_the_wrappers_buckets_are_paddles_groups(case):
    layers = Listed(case["parameters"])
    with pytest.warns(UserWarning, match="no process group"):
        model = paddle.DataParallel(layers, None, case["comm_buffer_size"], case["last_comm_buffer_size"])
    plan = model.bucket_plan
    assert [list(bucket.params) for bucket in plan.buckets] == case["comm_order"]
    assert [plan.last_comm_buffer_size, plan.comm_buffer_size] == case["limits_used"]


def reduce_in_groups(rank, size, all_cases):
    """Of each case: dtype and number of elements of every all-reduce, and whether the means are right."""
    sent = []
    allreduce = dist.ProcessGroup.allreduce
    as_it_was = vars(dist.ProcessGroup)["allreduce"]  # what the attribute gives would not bind again

    def record(group, tensors, options):
        sent.extend((str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in tensors)
        return allreduce(group, tensors, options)

    results = []
    dist.ProcessGroup.allreduce = record
    try:
        for case in all_cases:
            params = list(Listed(case["params"]).parameters())
            for param in params:
                param.grad = torch.full_like(param, rank + 1)
            sent.clear()
            fused_allreduce_gradients_with_group(params, dist.group.WORLD, case["group_size"])
            results.append((list(sent), all((param.grad == 1.5).all() for param in params)))
    finally:
        dist.ProcessGroup.allreduce = as_it_was
    return results


def test_manual_reductions_are_sent_in_paddles_groups(ranks):
    groups = [case.values[0] for case in cases("build_groups")]
    for results in ranks(reduce_in_groups, groups):
        for case, (sent, right) in zip(groups, results, strict=True):
            assert right, case["id"]
            # The report of failures rides in the last group if that is float32, and else travels alone.
            report = 256 + len(case["params"])  # numbers: at most 1 KB, and a flag for each parameter
            groups_sent = sent[: len(case["groups"])]
            alone = [("float32", numel) for _, numel in sent[len(case["groups"]) :]]
            assert sent == [*groups_sent, *alone], case["id"]
            assert len(alone) <= 1, case["id"]
            assert all(numel <= report for _, numel in alone), case["id"]
            assert [dtype for dtype, _ in groups_sent] == case["coalesced_dtype"], case["id"]
            slots = [len(group) * 16 for group in case["groups"]]  # what the padding of a slot may add, in bytes
            slots[-1] += 0 if alone else report
            for (_, numel), expected, padding in zip(groups_sent, case["coalesced_numel"], slots, strict=True):
                assert expected <= numel <= expected + padding, case["id"]
