"""What a step is allowed to cost, counted: torch operations, collectives, bytes. Times are measured in bench/."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from tests.operations import Operations


def operations_added(layers, views):
    """Torch operations of a step that the wrapper adds to those of the bare module."""
    counts = []
    for wrap in (lambda net: net, lambda net: dpfuse.DataParallel(net, gradient_as_bucket_view=views)):
        model = wrap(nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]))
        for _ in range(3):
            model.zero_grad()
            with Operations() as done:
                model(torch.ones(2, 4)).sum().backward()
        counts.append(len(done.names))
    return counts[1] - counts[0]


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_the_number_of_torch_operations_does_not_depend_on_the_number_of_parameters(rank, size, views):
    few, many = operations_added(5, views), operations_added(50, views)
    assert few == many
    assert few <= 12


def operations_of_clipping(count):
    model = dpfuse.DataParallel(nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)]))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
    model.grad_norm()  # what is found out once is found out now
    with Operations() as done:
        model.clip_grad_norm_(1e-3)
    return done.names


def test_views_are_measured_and_clipped_by_the_buffer(rank, size):
    few, many = operations_of_clipping(60), operations_of_clipping(120)
    assert few == many
    assert not any("foreach" in name for name in many)


def test_a_step_sends_each_bucket_once_and_nothing_else(rank, size):
    model = dpfuse.DataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), None, 0.001, 0.0005)
    with dpfuse.time_communication(model) as recorded:
        model(torch.ones(2, 8)).sum().backward()
    with dpfuse.time_communication(model) as times:
        for _ in range(5):
            model(torch.ones(2, 8)).sum().backward()
    assert recorded.steps == 1
    assert times.steps == 5
    plan = model.bucket_plan
    # One all-reduce per bucket and step: used flags and failures travel with the last one.
    assert times.collectives == 5 * len(plan.buckets)
    report = 4 * model.reducer.buckets[-1].parts.report.numel
    assert report <= 1024 + 4 * len(plan.specs)
    assert times.nbytes == 5 * (sum(4 * bucket.numel for bucket in plan.buckets) + report)
    assert plan.nbytes == 6 * (64 + 8) * 4
    assert 0 <= times.exposed <= times.seconds + 1


@pytest.mark.parametrize("wrap", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_the_report_takes_a_kilobyte_beside_a_flag_for_each_parameter(rank, size, wrap):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
    report = model.reducer.buckets[-1].parts.report
    assert 4 * (report.numel - len(list(model.parameters()))) <= 1024


def test_no_sync_sends_nothing(rank, size):
    model = dpfuse.DataParallel(nn.Linear(8, 8))
    with dpfuse.time_communication(model) as times, model.no_sync():
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
    assert (times.steps, times.collectives, times.nbytes) == (0, 0, 0)
