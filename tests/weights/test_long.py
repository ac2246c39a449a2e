"""A long training with all checks on: nothing is told, and nothing grows."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dpfuse

STEPS, WARM = 100_000, 5_000


def resident():
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def grown():
    return resident(), len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
@pytest.mark.ranks(timeout=1000)
def test_a_hundred_thousand_steps_tell_nothing_and_grow_nothing(rank, size):
    torch.manual_seed(0)
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank))
    before = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpfuse.DPFuseWarning)
        for step in range(STEPS):
            model(inputs[step % 61 : step % 61 + 3]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == WARM:
                before = grown()
    after = grown()
    assert not model._sync.weights.off
    assert not model._sync.differing_weights
    assert model._sync.weights._turn == STEPS, "a slice was hashed behind each step"
    assert after[1:] == before[1:], "descriptors and threads"
    assert after[0] - before[0] < 8 << 20, "bytes of memory"
