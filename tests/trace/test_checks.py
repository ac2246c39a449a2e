"""A trace reads gradients only, so the checks of dpfuse find what they find without one."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

import dpfuse
from dpfuse.findings import findings
from dpfuse.trace.process_trace import start_tracer, stop_tracer
from tests.loops.nets import batches, loss_of, mlp


def told(rank: int, size: int, folder: Path) -> list[str]:
    """Train in `no_sync()` with a trace; return the codes of what was logged."""
    findings.forget()
    tracer = start_tracer(folder)
    try:
        model = dpfuse.DistributedDataParallel(mlp())
        tracer.add(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with mock.patch.object(findings, "note") as note, model.no_sync():
            for x, y in batches(rank, 24):
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
    finally:
        stop_tracer()
    return [call.args[0] for call in note.call_args_list]


def test_a_training_in_no_sync_is_named_under_a_trace(ranks, tmp_path):
    assert ranks(told, tmp_path) == [["DPF-L02"]] * 2
