"""The wire suite counts bytes, and times no wrapper whose gradients are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import bench_wire
from bench.bench_wire import BARE, WRAPS, time_networks
from bench.goals import Entry, judge
from bench.models import Workload
from bench.network import simulated_network
from bench.step_time import Effort
from dpfuse.comm import collective

CONTENDERS = (BARE, "DDP view", "DDP bf16 hook", "dpfuse float32", "dpfuse bf16", "dpfuse e4m3")


@pytest.fixture
def small(monkeypatch):
    """One layer of 64 x 64 and few contenders."""

    def workload(count: int, features: int, rows: int) -> Workload:
        inputs = torch.randn(rows, 64)
        return Workload(nn.Linear(64, 64), lambda model: model(inputs).square().sum())

    monkeypatch.setattr(bench_wire, "_workload", workload)
    monkeypatch.setattr(bench_wire, "WRAPS", {name: WRAPS[name] for name in CONTENDERS})


@pytest.mark.usefixtures("small")
def test_every_contender_is_timed_and_its_bytes_are_judged():
    results = time_networks(Effort(2, 1, 0), "cpu")
    assert set(results) == set(bench_wire.LOADS)
    for case, contenders in results.items():
        assert tuple(contenders) == CONTENDERS
        assert contenders["DDP view"]["bytes"] == contenders["DDP view"]["gradient_bytes"] == 4 * (64 * 64 + 64)
        assert contenders["DDP bf16 hook"]["bytes"] * 2 == contenders["DDP view"]["bytes"]
        entries = [Entry("wire", case, name, 1.0, 0.0, 0.0, 2, dict(result)) for name, result in contenders.items()]
        bytes_sent = {row.what: row for row in judge(entries) if row.what.startswith("bytes")}
        bf16 = bytes_sent["bytes sent, dpfuse bf16 / gradients"]
        assert bf16.goal is not None
        report = 1024 / contenders["DDP view"]["bytes"]  # at most; beside so small a bucket it counts
        assert 0.5 <= bf16.value < 0.5 + report
        assert bytes_sent["bytes sent, dpfuse float32 / gradients"].goal is None


@pytest.mark.usefixtures("small")
def test_wrong_gradients_are_found_before_anything_is_timed(monkeypatch):
    def doubled(module: nn.Module) -> nn.Module:
        def double(param: torch.Tensor) -> None:
            param.grad.mul_(2)

        for param in module.parameters():
            param.register_post_accumulate_grad_hook(double)
        return module

    monkeypatch.setitem(bench_wire.WRAPS, "dpfuse bf16", doubled)
    with pytest.raises(AssertionError, match="dpfuse bf16: gradients are off by 1, more than"):
        time_networks(Effort(1, 1, 0), "cpu")


def test_a_gathering_counts_as_half_an_all_reduce():
    with simulated_network() as network:
        collective.all_reduce(torch.zeros(8), network).wait()
        assert network.sent == 32
        collective.start_all_to_all(torch.zeros(8), torch.zeros(8), network).wait()
        assert network.sent == 48
        collective.start_all_gather_into(torch.zeros(8), torch.zeros(8), network).wait()
        assert network.sent == 64
