"""How many functions of ours a gradient passes on its way from its ready hook to the collective."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import dpfuse
import dpfuse_kernels

INLINED = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # no calls from Python 3.12 on
CALLS = 13
WHOLE = 54  # of a backward with two buckets
FOLDERS = tuple(str(Path(module.__file__).parent) for module in (dpfuse, dpfuse_kernels))


def calls_in_backward(model):
    """The function of each call of ours in one backward, in order."""
    calls = []

    def note(frame, event, _argument):
        ours = frame.f_code.co_filename.startswith(FOLDERS) and frame.f_code.co_name not in INLINED
        if event == "call" and ours:
            calls.append(frame.f_code.co_name)

    loss = model(torch.ones(1, 4)).sum()
    sys.setprofile(note)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return calls


def test_the_way_from_the_hook_to_the_collective_does_not_grow(group):
    """These numbers are what is reached, and may only fall."""
    layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    model = dpfuse.DataParallel(nn.Sequential(*layers), None, 1e-5, 1e-5)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
    assert len(model.bucket_plan.buckets) == 2
    model.zero_grad()
    calls = calls_in_backward(model)
    way = calls[calls.index("mark_sentinel") : calls.index("all_reduce") + 1]
    assert len(way) <= CALLS, way
    assert len(calls) <= WHOLE
