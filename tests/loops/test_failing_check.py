"""A rule that fails ends no training: the check says so once, and is off. What a rule has found still ends a step."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import dpfuse
from dpfuse.errors import DPFuseWarning, LoopWarning
from dpfuse.loop.compared_words import ComparedWords
from dpfuse.loop.local_rest import LocalRest
from dpfuse.loop.mean_equals_own import OwnAndMean
from dpfuse.loop.stepping_optimizer import SteppingOptimizer
from dpfuse.loop.watched_gradient import WatchedGradient
from tests.loops.logs import logged
from tests.loops.nets import batches, loss_of, mlp

RULES = [
    (ComparedWords, "tell"),
    (ComparedWords, "delivered"),
    (WatchedGradient, "backward_begins"),
    (WatchedGradient, "local_ends"),
    (WatchedGradient, "mean_ends"),
    (LocalRest, "before_step"),
    (OwnAndMean, "look_at"),
    (OwnAndMean, "was_equal"),
    (SteppingOptimizer, "count_local"),
]


def trained(model, rank):
    """Steps of two averages each, one with a local rest, then steps on local gradients; returns the weights.

    So every rule acts.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DPFuseWarning)
        for index, (x, y) in enumerate(batches(rank, 48)):
            with model.no_sync(enabled=index >= 35):
                loss_of(model(x), y).backward()
            if index % 2 or index >= 36:
                optimizer.step()
                optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("owner", "method"), RULES, ids=[f"{owner.__name__}.{method}" for owner, method in RULES])
def test_a_rule_that_fails_on_one_rank_ends_no_training(rank, size, owner, method):
    expected = trained(dpfuse.DataParallel(mlp(), check_training="off"), rank)
    model = dpfuse.DataParallel(mlp(), check_training="warn")
    failing = mock.patch.object(owner, method, side_effect=RuntimeError("two\nlines"))
    with logged() as said, failing if rank == 0 else nullcontext():
        found = trained(model, rank)
    assert all(map(torch.equal, found, expected))
    assert model._sync.loop.failed is (rank == 0)
    assert [record.rank for record in said] == [0] * (rank == 0)
    if rank == 0:
        text = said[0].getMessage()
        assert text.startswith("rank 0: the check of the training loop has failed with RuntimeError: two lines (at ")
        assert "\n" not in text


def test_a_check_that_is_off_holds_nothing(rank, size):
    model = dpfuse.DataParallel(mlp(), check_training="warn")
    with mock.patch.object(LocalRest, "before_step", side_effect=ValueError):
        trained(model, rank)
    gc.collect()
    ours = {id(param) for param in model.parameters()}
    assert [each for each in gc.get_objects() if type(each) is WatchedGradient and id(each.param) in ours] == []


def test_a_warning_that_the_program_has_made_an_error_is_one(rank, size):
    model = dpfuse.DataParallel(mlp(), check_training="warn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with logged() as said, warnings.catch_warnings():
        warnings.simplefilter("error", LoopWarning)
        with pytest.raises(LoopWarning, match="DPF-L01"):
            for index, (x, y) in enumerate(batches(rank, 6)):
                with model.no_sync(enabled=index % 2 == 1):
                    loss_of(model(x), y).backward()
                if index % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    assert not model._sync.loop.failed
    assert said == []
