"""Buckets found while training on a GPU: the recorder's times are those of events on its stream."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.tune import optimal_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_plan_is_made_from_what_the_gpu_took(nccl):
    model = dpfuse.DataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda())
    tuning = dpfuse.autotune(model, steps=2)
    x = torch.randn(256, 512, device="cuda")
    for _ in range(40):
        model.zero_grad()
        model(x).square().mean().backward()
        if tuning.done:
            break
    assert (tuning.done, tuning.error) == (True, "")
    timeline = tuning.timeline
    assert {spec.device.partition(":")[0] for spec in timeline.specs} == {"cuda"}
    assert 0 <= min(timeline.ready) < max(timeline.ready) <= timeline.backward_end < 10
    assert timeline.specs[timeline.order[0]].name.startswith("7.")
    assert all(0 <= exposed <= total for exposed, total in zip(tuning.before.exposed, tuning.before.total, strict=True))
    assert tuning.plan.layout == optimal_plan(timeline, tuning.cost).layout
