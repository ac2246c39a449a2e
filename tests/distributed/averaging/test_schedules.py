"""Random delays in backward, others on every rank and in every run: the same bits, and still sent during backward."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from dpfuse.comm import collective
from dpfuse.engine.events import Watcher

LAYERS = 6
MOST = 0.002  # seconds that a hook may sleep
RUNS_PER_WRAPPER = 10


class Delayed(nn.Module):
    """A chain of layers whose gradients come late, as long as there is a generator that says how late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(LAYERS))
        self.delays: np.random.Generator | None = None
        self.last_layer_reached = 0.0  # when backward had only the layer left that was registered first
        for param in self.parameters():
            param.register_hook(self._delay)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 0:
                x.register_hook(self._stamp)
        return x

    def _delay(self, _grad: Tensor) -> None:
        if self.delays is not None:
            time.sleep(self.delays.uniform(0, MOST))

    def _stamp(self, _grad: Tensor) -> None:
        self.last_layer_reached = time.perf_counter()


class Stamps(Watcher):
    """When each bucket of a backward was sent, and when it had landed, as far as its work tells."""

    def __init__(self) -> None:
        self.sent_at: list[float] = []
        self.landed_at: list[float] = []

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        self.sent_at.append(time.perf_counter())
        self.expect(work)

    def expect(self, work: dist.Work) -> None:
        work.get_future().add_done_callback(lambda _: self.landed_at.append(time.perf_counter()))


@contextmanager
def exchanges_told_to(stamps: Stamps) -> Iterator[None]:
    """That a sum in rank order has landed is known to nobody who does not wait; its first half is more open."""
    start = collective.start_all_to_all

    def start_and_tell(*args: Any) -> dist.Work:
        work = start(*args)
        stamps.expect(work)
        return work

    with mock.patch.object(collective, "start_all_to_all", start_and_tell):
        yield


def any_schedule(rank, size, runs, options):
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
    bits, layouts, early = set(), set(), 0
    for run in range(runs):
        if run % RUNS_PER_WRAPPER == 0:
            # The first backward, whose order settles the buckets, has its delays like all others but those of run 0.
            model = dpfuse.DataParallel(Delayed(), None, 0.004, 0.0001, **options)
        stamps = Stamps()
        model._observe(stamps)
        model.module.delays = np.random.default_rng([run, rank]) if run else None
        model.zero_grad()
        with exchanges_told_to(stamps):
            model(x).square().sum().backward()
        model._observe(None)
        grads = torch.cat([param.grad.flatten() for param in model.parameters()])
        bits.add(hashlib.sha256(grads.numpy().tobytes()).hexdigest())
        if run % RUNS_PER_WRAPPER:
            layouts.add(model.bucket_plan.layout)
            # Every bucket without a gradient of the first layer was on its way before backward came to that layer.
            complete = sum(min(bucket.params) > 1 for bucket in model.bucket_plan.buckets)
            assert complete >= LAYERS - 2
            assert len(stamps.sent_at) == len(model.bucket_plan.buckets)
            assert stamps.sent_at[complete - 1] < model.module.last_layer_reached
            early += sum(landed < model.module.last_layer_reached for landed in stamps.landed_at)
    return bits, layouts, early


MODES = {
    "views": {},
    "private": {"gradient_as_bucket_view": False},
    "deterministic": {"deterministic": True},
}
CASES = [(2, 20), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 50), (4, 400)))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "runs"), CASES)
def test_no_delay_changes_a_bit_and_buckets_leave_during_backward(ranks, size, runs, mode):
    results = ranks(any_schedule, runs, MODES[mode], size=size, timeout=240)
    assert len({frozenset(bits) for bits, _, _ in results}) == 1
    for bits, layouts, early in results:
        assert len(bits) == len(layouts) == 1
        assert early, "nothing has landed before backward came to the first layer"
