"""A trace reads gradients only, so the checks of dpfuse find what they find without one."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

import dpfuse
from dpfuse.loop.findings import findings
from dpfuse.trace.attachment import start_tracer, stop_tracer
from tests.loops.nets import batches, loss_of, mlp


def told(rank: int, size: int, folder: Path) -> list[str]:
    """Train in `no_sync()` with a trace; return the codes of the warnings."""
    findings.forget()
    tracer = start_tracer(folder)
    try:
        model = dpfuse.DistributedDataParallel(mlp())
        tracer.add(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught, model.no_sync():
            warnings.simplefilter("always")
            for x, y in batches(rank, 24):
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
    finally:
        stop_tracer()
    return [each.message.code for each in caught if isinstance(each.message, dpfuse.DPFuseWarning)]


def test_a_training_in_no_sync_is_named_under_a_trace(ranks, tmp_path):
    assert ranks(told, tmp_path) == [["DPF-L02"]] * 2
