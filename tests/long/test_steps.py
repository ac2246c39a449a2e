"""A long training with all checks on: nothing is told, and nothing grows."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

import dpfuse
from tests.clients.everything_on import OPTIONS
from tests.growth import Size

STEPS, WARM = 100_000, 5_000


class Lines(logging.Handler):
    """Counts what is logged."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.count = 0

    def emit(self, record):
        self.count += 1


def loss_of(model, inputs):
    return model(inputs).square().mean()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.ranks(timeout=2000)
def test_a_hundred_thousand_steps_tell_nothing_and_grow_nothing(rank, size):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    wire = {"wire_dtype": torch.bfloat16, "error_feedback": True}
    model = dpfuse.DataParallel(net, broadcast_buffers=True, **OPTIONS, **wire)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank))
    lines, logger = Lines(), logging.getLogger("dpfuse")
    logger.addHandler(lines)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", dpfuse.DPFuseWarning)
            for step in range(STEPS):
                rows = inputs[step % 61 : step % 61 + 3]
                with model.no_sync(enabled=step % 8 == 0):  # of every eight batches, the first two are one window
                    loss_of(model, rows).backward()
                if step % 8 == 0:
                    continue
                if step % 8 == 2:
                    model.set_gradient_weight(3)
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                if step % 1000 == 1:
                    assert model.metrics()["step"] > 0
                    with model.rank_zero_work() as mine, torch.no_grad():
                        assert not mine or model(rows).isfinite().all()
                if step == WARM + 1:
                    before, said = Size.now(), lines.count
    finally:
        logger.removeHandler(lines)
    assert not model._sync.weights.off
    assert not model._sync.differing_weights
    assert model._sync.weights._turn == STEPS * 7 // 8, "a slice was hashed behind each step"
    assert lines.count == said, "lines in the log"
    Size.now().assert_not_grown(before, megabytes=32, objects=500)
