"""The benchmark of training steps: every contender trains as DDP does, and one that does not is seen."""

from __future__ import annotations

import copy

import pytest
import torch

import bench.bench_sharded as suite
from bench.goals import Entry, judge
from bench.models import layers
from bench.step_time import Effort


def few_steps(rank, size):
    torch.manual_seed(rank)
    workload = layers(3, 16)
    for param in workload.module.parameters():
        torch.distributed.broadcast(param.data, 0)
    trained = {name: train(copy.deepcopy(workload)) for name, train in suite.CONTENDERS.items()}
    suite._prove(trained)
    alone = suite.Trained(lambda: None, lambda: [param.detach() for param in workload.module.parameters()])
    with pytest.raises(AssertionError, match="idle: the weights differ from DDP's"):
        suite._prove({suite.REFERENCE: trained[suite.REFERENCE], "idle": alone})
    return sorted(trained)


def test_every_contender_trains_as_ddp_does_and_an_idle_one_is_seen(ranks):
    expected = sorted(suite.CONTENDERS)
    assert ranks(few_steps) == [expected] * 2
    assert {"DDP with ZeroRedundancyOptimizer", "FSDP2 sharded, gathered once", "dpfuse sharded"} <= set(expected)


def test_a_network_delays_what_is_not_under_computation(monkeypatch):
    monkeypatch.setattr(suite, "layers", lambda count, features, rows: layers(3, 64, rows))
    fast, slow = (suite._time_network(20e-6, load, Effort(3, 1, 1)) for load in (0.25, 200))
    assert set(fast) == set(suite.IN_NETWORKS)
    for name in fast:
        assert slow[name]["wall"] > fast[name]["wall"]


@pytest.mark.parametrize(
    ("case", "seconds", "met"),
    [
        ("CNN", 0.59, [True, True]),
        ("CNN", 0.61, [True, False]),
        ("CNN", 1.01, [False, False]),
        ("network 100 us, 1 backward", 0.69, [True]),
        ("network 100 us, 1 backward", 0.71, [False]),
        ("network 100 us, 0.5 backward", 0.71, [True]),
    ],
)
def test_goals(case, seconds, met):
    names = suite.IN_NETWORKS if case.startswith("network") else suite.CONTENDERS
    entries = [
        Entry("sharded", case, name, seconds if "dpfuse sharded" in name else 1.0, 1.0, 0.0, 5, {}) for name in names
    ]
    ours = [one for one in judge(entries) if "dpfuse sharded /" in one.what and one.met is not None]
    assert [one.met for one in ours] == met
