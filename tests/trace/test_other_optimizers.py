"""Optimizers and parameters that are not torch's plain ones: sharded, in backward, and parts of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as step_in_backward
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

import dpfuse
from dpfuse.engine.tensor_hash import hash_of
from dpfuse.trace.comparison import compare
from dpfuse.trace.process_trace import start_tracer, stop_tracer
from dpfuse.trace.signed_sum import signed_sum
from dpfuse.trace_file import read_folder

STEPS = 3


def train(folder: Path, rank: int, options: dict[str, Any] | None) -> None:
    """Train with a trace; with options, the optimizer is sharded."""
    torch.manual_seed(1)
    tracer = start_tracer(folder, sketch=True)
    try:
        model = dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), comm_buffer_size=0.0001)
        tracer.add(model)
        if options is None:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, **options)
        data = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            model(torch.randn(5, 4, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        stop_tracer()


@pytest.mark.parametrize(
    "options",
    [{}, {"step_in_backward": True}],
    ids=["usual", "stepped in backward"],
)
def test_a_sharded_optimizer_is_one_optimizer_and_has_the_weights_of_the_plain_one(options, ranks, tmp_path):
    ranks(trained, tmp_path, {"plain": None, "sharded": options})
    plain, sharded = (read_folder(tmp_path / name) for name in ("plain", "sharded"))
    for rank in range(2):
        assert [one["class"] for one in sharded[rank].optimizers] == ["ShardedOptimizer"]
        assert sharded[rank].optimizers[0]["names"] == plain[rank].optimizers[0]["names"]
        assert [line["step"] for line in sharded[rank].steps] == [*range(STEPS)]
        for ours, theirs in zip(sharded[rank].steps, plain[rank].steps, strict=True):
            assert ours["parameters"] == theirs["parameters"]
            assert ours["backwards"][0]["local"] == theirs["backwards"][0]["local"]
            assert set(ours["backwards"][0]["averaged"]["0"]) == set(ours["stepped"]) == {"-"}
            assert ours["gradient sketch"] == [0.0] * 4


def trained(rank: int, size: int, folder: Path, runs: dict[str, dict[str, Any] | None]) -> None:
    for name, options in runs.items():
        train(folder / name, rank, options)


def test_two_runs_with_a_sharded_optimizer_are_equal(ranks, tmp_path):
    ranks(trained, tmp_path, {"one": {}, "two": {}})
    assert compare(read_folder(tmp_path / "one"), read_folder(tmp_path / "two")) is None


@pytest.mark.usefixtures("group")
def test_optimizers_that_step_in_backward_are_traced(tmp_path):
    net = nn.Linear(4, 2)
    step_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    tracer = start_tracer(tmp_path)
    try:
        model = dpfuse.DistributedDataParallel(net)
        tracer.add(model)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
    finally:
        stop_tracer()
    (trace,) = read_folder(tmp_path).values()
    assert sorted(names for one in trace.optimizers for names in one["names"]) == ["bias", "weight"]
    assert len(trace.steps) == 4
    assert [len(line["backwards"]) for line in trace.steps] == [1, 0, 1, 0]


@pytest.mark.usefixtures("group")
def test_a_distributed_tensor_is_hashed_as_the_part_of_this_rank():
    values = torch.randn(3, 2)
    divided = nn.Parameter(distribute_tensor(values, init_device_mesh("cpu", (1,)), [Replicate()]))
    assert hash_of(divided) == hash_of(values)
    assert signed_sum(divided) == signed_sum(values)
