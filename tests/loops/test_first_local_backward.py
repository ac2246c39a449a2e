"""The first backward of a long training that is not synchronised: what its gradient held before is judged right."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import dpfuse
from dpfuse.errors import DPFuseError
from dpfuse.findings import findings
from tests.loops.nets import batches, loss_of, mlp

SETTLED = 8  # steps, after which no average is marked


def settled(rank, views=True):
    """A model whose steps were all averaged so far, its optimizer, and batches."""
    findings.forget()
    model = dpfuse.DataParallel(mlp(), gradient_as_bucket_view=views, check_training="raise")
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), batches(rank, 40)
    for _ in range(SETTLED):
        step(model, optimizer, loader)
    assert model._sync.loop.watched
    assert model._sync.loop.marked == []
    return model, optimizer, loader


def backward(model, loader, *, sync):
    x, y = next(loader)
    with model.no_sync(enabled=not sync):
        loss_of(model(x), y).backward()


def step(model, optimizer, loader, *syncs, to_none=True):
    """Backwards that were synchronised or not, then a step."""
    optimizer.zero_grad(set_to_none=to_none)
    for sync in syncs or (True,):
        backward(model, loader, sync=sync)
    optimizer.step()


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_what_it_adds_to_a_mean_is_an_error_two_averages_later(rank, size, views, to_none):
    training = settled(rank, views)
    step(*training, True, False, to_none=to_none)
    step(*training, True)
    with pytest.raises(DPFuseError, match=f"DPF-L01: rank {rank}: SGD has stepped on gradients that are not the mean"):
        step(*training, True)


def test_what_it_adds_to_a_mean_that_is_kept_behind_a_step_is_found_too(rank, size):
    model, optimizer, loader = training = settled(rank)
    backward(model, loader, sync=False)
    optimizer.step()
    step(*training)
    with pytest.raises(DPFuseError, match="DPF-L01"):
        step(*training)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("steps", [True, False])
def test_of_zeros_nothing_is_suspected(rank, size, to_none, steps):
    """A logged gradient, between two steps or in place of one."""
    model, optimizer, loader = settled(rank)
    if not steps:
        backward(model, loader, sync=True)
    with mock.patch.object(model._sync.loop, "_suspect") as suspect:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            backward(model, loader, sync=False)
            optimizer.step()
    assert suspect.mock_calls == []


def test_a_gradient_that_a_backward_without_an_output_has_made_is_no_mean(rank, size):
    model, optimizer, loader = settled(rank)
    with mock.patch.object(model._sync.loop, "_suspect") as suspect:
        for _ in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                sum(param.square().sum() for param in model.module.parameters()).backward()
            backward(model, loader, sync=False)
            optimizer.step()
    assert suspect.mock_calls == []


def test_steps_on_local_gradients_are_counted_from_the_first_one_on(rank, size):
    training = settled(rank)
    with mock.patch.object(findings, "note") as note:
        for number in range(20):
            assert note.mock_calls == [], number
            step(*training, False)
    assert [call.args[0] for call in note.call_args_list] == ["DPF-L02"]
