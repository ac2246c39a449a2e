"""Some backwards run inside `torch.inference_mode()`: what dpfuse makes there is written outside of it, too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.in_place import batch

DDP, DP = dpfuse.DistributedDataParallel, dpfuse.DataParallel
KINDS = {
    "private": DDP,
    "views": DP,
    "unused": partial(DDP, find_unused_parameters=True),
    "accumulating": partial(DP, accumulate_in_buckets=True),
    "ordered": partial(DDP, deterministic=True),
    "narrow": partial(DDP, wire_dtype=torch.bfloat16, error_feedback=True),
    "checked": partial(DDP, check_finite="warn", metrics=1),
}


@pytest.mark.parametrize("inside", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_backwards_inside_and_outside_of_inference_mode(rank, size, kind, inside):
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    model, held = KINDS[kind](net), []
    for step in range(6):
        held.append(net.weight.grad)  # so that a buffer gets new memory
        model.zero_grad()
        loss = model(batch(rank, step)).sum()
        with torch.inference_mode(step == inside):
            loss.backward()
        mean = sum(batch(other, step).sum(0) for other in range(size)) / size
        close = 0.05 if kind == "narrow" else 1e-5
        torch.testing.assert_close(net.weight.grad.clone(), mean.expand(3, 6), rtol=close, atol=close)
