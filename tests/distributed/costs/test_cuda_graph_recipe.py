"""How many steps docs/train/data_parallel.md asks for, without a GPU: kernels in the interpreter, a simulated capture.

In a capture no address may be uploaded and nothing may be read from the device; both are refused as on a GPU.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.engine.report import Report
from dpfuse_kernels import launcher
from tests.distributed.in_place import copied

OPTIONS = {
    "views": {},
    "private": {"gradient_as_bucket_view": False},
    "bfloat16": {"wire_dtype": torch.bfloat16},
}
EACH = ["views", "bfloat16", pytest.param("private", marks=pytest.mark.slow)]


@contextmanager
def pretended_capture():
    true, elsewhere = mock.Mock(return_value=True), property(lambda self: False)
    with (
        mock.patch.multiple("torch.cuda", is_initialized=true, is_current_stream_capturing=true),
        mock.patch("dpfuse_kernels.address_ring.HostStreams.capturing", true),
        mock.patch.object(Report, "is_on_cpu", elsewhere, create=True),
    ):
        yield


def train(rank, size, kind, steps, set_to_none, idle):
    """Steps, and then one that is captured: its error, if any, and the lists of addresses uploaded in it."""
    environment = {"DPFUSE_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    with mock.patch.dict(os.environ, environment), copied():
        launcher.jit.cache_clear()
        net = nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))
        if idle:
            net.register_parameter("idle", nn.Parameter(torch.zeros(3)))
        model = dpfuse.DataParallel(net, None, 0.001, 0.0005, find_unused_parameters=True, **OPTIONS[kind])

        def step(set_to_none=False):
            model.zero_grad(set_to_none=set_to_none)
            model(torch.full((2, 9), float(rank + 1))).sum().backward()

        def uploads():
            tables = [bucket.parts.buffer.table for bucket in model._sync.grads.reducer.buckets]
            return sum(table.launcher.ring.uploads for table in tables if table is not None)

        for _ in range(steps):
            step()
        before, error = uploads(), ""
        with pretended_capture():
            try:
                step(set_to_none)
            except dpfuse.DPFuseError as caught:
                error = str(caught)
        uploaded = uploads() - before
        if error:
            # It goes on as if nothing had been captured.
            model.zero_grad()
            step()
            step()
        launcher.jit.cache_clear()
        return error, uploaded


@pytest.mark.parametrize("kind", EACH)
def test_the_fourth_step_can_be_captured(ranks, kind):
    for error, uploaded in ranks(train, kind, 3, False, False):
        assert (error, uploaded) == ("", 0)


def test_the_third_step_may_be_too_early(ranks):
    for error, _ in ranks(train, "views", 1, False, False):
        assert "tensors are not where the last call found them" in error


def test_the_first_step_is_refused_by_name(ranks):
    for rank, (error, _) in enumerate(ranks(train, "views", 0, False, False)):
        assert f"rank {rank}: the first synchronised backward of a model is captured in a CUDA graph" in error


@pytest.mark.parametrize("kind", EACH)
def test_gradients_that_are_made_anew_are_refused_by_name(ranks, kind):
    for error, uploaded in ranks(train, kind, 4, True, False):
        assert "tensors are not where the last call found them, while a CUDA graph is being captured" in error
        assert "zero_grad(set_to_none=False)" in error
        assert uploaded == 0


def test_a_parameter_without_gradient_is_refused_by_name(ranks):
    for error, _ in ranks(train, "views", 4, False, True):
        assert "parameter 'idle' got no gradient in a backward that a CUDA graph captures" in error
