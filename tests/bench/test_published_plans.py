"""The published plans are what their authors' programs make, and none beats the exact one."""

from __future__ import annotations

import json
import math
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dpfuse
from bench.published_plans import (
    best_cap_plan,
    capped_plan,
    ddp_plan,
    mg_wfbp_plan,
    one_bucket_plan,
    paddle_plan,
    ramp_plan,
    rival_plans,
    single_plan,
)
from bench.record_timeline import load
from bench.regret import on_gpu
from bench.simulation import simulate
from dpfuse.tune import CostTable, Timeline, optimal_plan
from tests.docs.pages import ROOT

MIB = 1 << 20
ROUNDING = 1e-11  # relative


def random_timeline(seed, count=60, kinds=2):
    rng = np.random.default_rng(seed)
    dtypes = ["float32", "bfloat16", "float64"]
    specs = [
        dpfuse.ParamSpec(str(index), (int(size),), dtypes[rng.integers(kinds)])
        for index, size in enumerate(rng.lognormal(12, 2, count))
    ]
    return Timeline(specs, np.sort(rng.random(count))[::-1].tolist(), 1.0)


def params_of(plan):
    return [bucket.params for bucket in plan.buckets]


@pytest.mark.parametrize("seed", range(20))
def test_ddps_buckets_are_those_of_torch(seed):
    timeline = random_timeline(seed)
    tensors = [
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta").as_strided(spec.shape, (0,))
        for spec in timeline.specs
    ]
    real = [torch.empty(1, dtype=tensor.dtype).expand(tensor.shape) for tensor in tensors]
    order = list(timeline.order)
    groups, _ = dist._compute_bucket_assignment_by_size([real[index] for index in order], [MIB, 25 * MIB])
    expected = [tuple(sorted(order[place] for place in group)) for group in groups]
    assert params_of(ddp_plan(timeline)) == expected


def test_paddles_buckets_are_those_that_dpfuse_begins_with():
    specs = [dpfuse.ParamSpec(str(index), (MIB,), "float32") for index in range(20)]
    timeline = Timeline.synthetic(specs, 0.01)
    assert paddle_plan(timeline).layout == dpfuse.plan_buckets(specs).layout
    assert [len(params) for params in params_of(paddle_plan(timeline))] == [5, 7, 7, 1]
    assert [len(params) for params in params_of(ddp_plan(timeline))] == [1, 7, 7, 5]


def test_one_bucket_single_gradients_and_caps():
    timeline = random_timeline(3)
    assert len(one_bucket_plan(timeline).buckets) == 2
    assert params_of(single_plan(timeline)) == [(index,) for index in timeline.order]
    assert params_of(capped_plan(timeline, 0)) == params_of(single_plan(timeline))
    assert params_of(capped_plan(timeline, math.inf)) == params_of(one_bucket_plan(timeline))
    cost = CostTable.affine(1e-3, 1e9)
    best = simulate(timeline, best_cap_plan(timeline, cost), cost).end
    assert best == min(simulate(timeline, capped_plan(timeline, 1 << power), cost).end for power in range(10))


def mg_wfbp_as_published(ready, sizes, cost):
    """Algorithm 1 with all starts computed again after each merge; layer 0 is the last to be ready."""
    layers = len(sizes)
    sizes, times, groups, group = list(sizes), [cost(float(size)) for size in sizes], [], []

    def starts():
        begin = [0.0] * layers
        begin[-1] = ready[-1]
        for layer in reversed(range(layers - 1)):
            begin[layer] = max(begin[layer + 1] + times[layer + 1], ready[layer])
        return begin

    for layer in reversed(range(1, layers)):
        group.append(layer)
        begin, following = starts()[layer], ready[layer - 1]
        if following < begin + times[layer] and (begin > following or following - begin < cost(0.0)):
            times[layer], sizes[layer - 1] = 0.0, sizes[layer - 1] + sizes[layer]
            times[layer - 1] = cost(float(sizes[layer - 1]))
        else:
            groups.append(group)
            group = []
    return [*groups, [*group, 0]]


@pytest.mark.parametrize("seed", range(40))
def test_mg_wfbp_merges_as_published(seed):
    rng = np.random.default_rng(seed)
    timeline = random_timeline(seed, count=rng.integers(1, 40), kinds=1)
    cost = CostTable.affine(10 ** rng.uniform(-4, -1), 10 ** rng.uniform(7, 9))
    expected = mg_wfbp_as_published(timeline.ready, timeline.nbytes, cost)
    assert params_of(mg_wfbp_plan(timeline, cost)) == [tuple(sorted(group)) for group in expected]


def test_mg_wfbp_sends_kinds_as_they_are_complete():
    specs = [dpfuse.ParamSpec(str(index), (10**6,), dtype) for index, dtype in enumerate(["float32", "float16"] * 2)]
    timeline = Timeline(specs, [4.0, 3.0, 2.0, 1.0], 4.0)
    assert params_of(mg_wfbp_plan(timeline, CostTable.affine(1e-3, 1e9))) == [(3,), (2,), (1,), (0,)]


# Height and width of the feature maps of ResNet-50's stages, by the begin of the name; a kernel's work is its
# elements times that.
MAPS = {"conv1": 112, "bn1": 112, "layer1": 56, "layer2": 28, "layer3": 14, "layer4": 7, "fc": 1}


def network(name, backward, wire_dtype=None):
    rows = json.loads((ROOT / f"bench/sizes/{name}.json").read_text())
    specs = [dpfuse.ParamSpec(parameter, tuple(shape), "float32") for parameter, shape in rows]
    work = None
    if name == "resnet50":
        work = [spec.numel * MAPS[spec.name.split(".")[0]] ** 2 for spec in specs]
    return Timeline.synthetic(specs, backward, work=work, wire_dtype=wire_dtype)


NETWORKS = {
    "ResNet-50": network("resnet50", 0.034),
    "ResNet-50, bf16": network("resnet50", 0.017, "bfloat16"),
    "BERT-large": network("bert_large", 0.060),
    "GPT-2": network("gpt2", 0.030),
    "ViT-L": network("vit_large", 0.080),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("BERT-large", "ViT-L") else ()) for name in NETWORKS]
)
def test_no_rival_beats_the_plan_on_published_networks(name):
    timeline = NETWORKS[name]
    total = sum(timeline.nbytes)
    worst = {}
    for share in (0.25, 0.5, 1.0, 2.0):  # communication over backward
        for latency in (20e-6, 100e-6, 500e-6, 2e-3):
            cost = CostTable.affine(latency, total / (share * timeline.backward_end))
            best = simulate(timeline, optimal_plan(timeline, cost), cost).end
            for name, plan in rival_plans(timeline, cost).items():
                end = simulate(timeline, plan, cost).end
                assert end >= best * (1 - ROUNDING), name
                worst[name] = max(worst.get(name, 1.0), end / best)
    # It matters: somewhere in this grid each of them loses.
    assert all(ratio > 1.005 for ratio in worst.values())


def test_the_ramp_is_near_the_best_plan_for_a_small_model():
    recorded, _ = load("layers_300")
    timeline = on_gpu(recorded, 0.05)
    rules = {"ramp": partial(ramp_plan, ranks=2), "paddle": paddle_plan}
    worst = dict.fromkeys(rules, 1.0)
    for share in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4):
        cost = CostTable.affine(100e-6, sum(timeline.nbytes) / (share * timeline.backward_end))
        best = simulate(timeline, optimal_plan(timeline, cost), cost).end
        for name, rule in rules.items():
            worst[name] = max(worst[name], simulate(timeline, rule(timeline), cost).end / best)
    assert worst["ramp"] < 1.25 < 1.4 < worst["paddle"]


def record_backward(model, inputs, steps):
    """Ready times and ends of real backwards, by hooks and a clock."""
    params = list(model.parameters())
    marks = {}
    handles = [
        param.register_post_accumulate_grad_hook(lambda param: marks.__setitem__(id(param), time.perf_counter()))
        for param in params
    ]
    ready, ends = [], []
    for _ in range(steps):
        model.zero_grad()
        loss = model(inputs).sum()
        begin = time.perf_counter()
        loss.backward()
        ends.append([time.perf_counter() - begin])
        ready.append([[marks[id(param)] - begin for param in params]])
    for handle in handles:
        handle.remove()
    return Timeline.from_steps(dpfuse.plan_buckets(model).specs, ready, ends)


def test_no_rival_beats_the_plan_on_a_recorded_timeline():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 6), torch.nn.Linear(64, 10))
    timeline = record_backward(model, torch.randn(8, 32, 64), steps=5)
    assert 0 < min(timeline.ready) < max(timeline.ready) <= timeline.backward_end
    order = [timeline.specs[index].name for index in timeline.order]
    assert order[-1].startswith("0.layers.0.")
    for share in (0.3, 1.0, 3.0):
        for latency in (0.002, 0.02, 0.2):  # of backward
            end = timeline.backward_end
            cost = CostTable.affine(latency * end, sum(timeline.nbytes) / (share * end))
            best = simulate(timeline, optimal_plan(timeline, cost), cost).end
            for name, plan in rival_plans(timeline, cost).items():
                assert best <= simulate(timeline, plan, cost).end * (1 + ROUNDING), name
