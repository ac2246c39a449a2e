"""A backward fails on one rank, with reports that are read one backward later, as on a GPU: no rank steps alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import dpfuse
from tests.distributed.failures.test_spoiler import as_on_a_gpu

SHARDED = {
    "a step": {},
    "a step with masters": {"master_dtype": torch.float32},
}


def wrapped():
    torch.manual_seed(0)
    return dpfuse.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def one_fails(rank, size, options, which):
    """Return what each rank has heard in which step. Of two models one has a sharded optimizer, and one fails once."""
    heard = []
    with as_on_a_gpu():
        models = [wrapped()]
        optimizers = [dpfuse.ShardedOptimizer(models[0], optim.AdamW, lr=0.1, **options)]
        models.append(wrapped())
        optimizers.append(optim.SGD(models[1].parameters(), lr=0.1))
        for step in range(6):
            planted = None
            if step == 3 and rank == 1:
                planted = models[which].module[0].register_full_backward_hook(lambda *_: 1 / 0)
            try:
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(torch.ones(2, 8)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
            except (ZeroDivisionError, dpfuse.DPFuseError) as error:
                heard.append((step, type(error).__name__, "one backward late" in str(error)))
            finally:
                if planted is not None:
                    planted.remove()
        values = [param.detach().double().sum().item() for model in models for param in model.parameters()]
    return heard, values


@pytest.mark.parametrize("which", [0, 1], ids=["sharded", "another model"])
@pytest.mark.parametrize("kind", SHARDED)
def test_every_rank_hears_in_the_same_backward(ranks, kind, which):
    (here, own), (there, other) = ranks(one_fails, SHARDED[kind], which)
    assert (here, there) == ([(3, "DPFuseError", False)], [(3, "ZeroDivisionError", False)])
    assert own == other
    assert all(value == value for value in own), "no NaN"


def test_every_rank_hears_in_the_same_backward_where_the_step_adds_up_a_norm(ranks):
    options = {"step_in_backward": True, "clip_by_last_norm": 1.0}
    (here, _), (there, _) = ranks(one_fails, options, 0)
    half = [(step, "DPFuseError", False) for step in (4, 5)]  # the parameters are half updated
    assert here == [(3, "DPFuseError", False), *half]
    assert there == [(3, "ZeroDivisionError", False), *half]


def only_updated_in_backward(rank, size):
    waits = []
    with as_on_a_gpu():
        model = wrapped()
        optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1, step_in_backward=True)
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            waits.append(model._sync.grads.reducer.in_use.report.was_read)
            optimizer.step()
            optimizer.zero_grad()
    return waits


def test_updates_in_backward_wait_for_no_report_after_the_first(ranks):
    assert ranks(only_updated_in_backward) == [[True, False, False, False]] * 2
