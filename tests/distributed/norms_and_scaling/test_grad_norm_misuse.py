"""grad_norm and clip_grad_norm_ where they cannot answer: in a backward, with other arguments, of shards."""

from __future__ import annotations

import math

import pytest
import torch

import dpfuse
from tests.distributed.norms_and_scaling.test_grad_norm import Net, check, trained


def test_a_norm_in_the_middle_of_a_backward_is_refused(rank, size):
    model = trained("views", rank)
    seen = []

    def ask(grad):
        with pytest.raises(dpfuse.DPFuseError, match=rf"rank {rank}: .* while a backward is REDUCING, expected it"):
            model.grad_norm()
        seen.append(1)

    model.zero_grad()
    loss = model(rank)
    loss.register_hook(ask)
    handle = model.module.first.register_hook(ask)
    loss.backward()
    handle.remove()
    assert len(seen) == 2
    check(model)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_of_a_backward_that_raised_are_refused(rank, size, sharded):
    """By a norm, and by the step of a sharded optimizer, which reads them. The next batch is trained."""
    model = dpfuse.DataParallel(Net())
    optimizer = (dpfuse.ShardedOptimizer if sharded else lambda _, kind, **how: kind(model.parameters(), **how))(
        model, torch.optim.SGD, lr=0.1
    )
    model(rank).backward()
    optimizer.step()
    optimizer.zero_grad()

    def fail(grad):
        raise ValueError("a bad batch")

    loss = model(rank)
    handle = model.module.first.register_hook(fail)
    with pytest.raises(ValueError, match="a bad batch"):
        loss.backward()
    handle.remove()
    for need in (model.grad_norm, *([optimizer.step] if sharded else [])):
        with pytest.raises(dpfuse.DPFuseError, match=rf"rank {rank}: the gradients are needed for .* call zero_grad"):
            need()
    optimizer.zero_grad()
    model(rank).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("1",), TypeError, r"max_norm must be a number, got '1' of type str"),
        ((True,), TypeError, r"max_norm must be a number, got True"),
        ((-1.0,), ValueError, r"max_norm must be 0 or more, got -1\.0"),
        ((math.nan,), ValueError, r"max_norm must be 0 or more, got nan"),
        ((1.0, "2"), TypeError, r"norm_type must be a number, got '2' of type str"),
        ((1.0, math.nan), ValueError, r"norm_type must be a number such as 2\.0"),
    ],
)
def test_arguments_that_are_no_such_numbers(group, arguments, error, text):
    model = dpfuse.DataParallel(Net())
    with pytest.raises(error, match=text):
        model.clip_grad_norm_(*arguments)
