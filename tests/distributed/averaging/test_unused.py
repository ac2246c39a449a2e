"""Parameters without gradient: the right mean where somebody used them, untouched where nobody did."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dpfuse


class Branches(nn.Module):
    """Three branches; which are used is told per call. Gradient of branch i's weight: the sum of x."""

    def __init__(self):
        super().__init__()
        self.branch = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x, used):
        return sum(self.branch[index](x).sum() for index in used)


def wrap(**options):
    options.setdefault("find_unused_parameters", True)
    return dpfuse.DataParallel(Branches(), comm_buffer_size=0, last_comm_buffer_size=0, **options)


def grads(model):
    return [None if branch.weight.grad is None else branch.weight.grad.tolist()[0] for branch in model.branch]


def run(model, rank, used):
    model(torch.full((1, 2), float(rank + 1)), used[rank]).backward()


def used_on_some_rank(rank, size, views):
    model = wrap(gradient_as_bucket_view=views)
    for _ in range(4):  # through the recorded backward and the rebuilt buckets
        run(model, rank, [[0, 1], [0]])
        # Rank r's gradient is r + 1: 1 and 2 where both used it, 1 and nothing where rank 0 did.
        assert grads(model) == [[1.5, 1.5], [0.5, 0.5], None]
        model.zero_grad()
    run(model, rank, [[0], [1, 2]])
    assert grads(model) == [[0.5, 0.5], [1, 1], [1, 1]]


def used_nowhere_keeps_what_it_has(rank, size, views):
    model = wrap(gradient_as_bucket_view=views)
    for kept in (None, torch.zeros(1, 2), torch.full((1, 2), 7.0), None):
        model.branch[2].weight.grad = kept
        run(model, rank, [[0], [0, 1]])
        assert grads(model)[2] == (None if kept is None else kept.tolist()[0])
        model.zero_grad()
    # What is averaged is the whole of .grad, wherever it comes from: ranks never go on with different ones.
    model.branch[2].weight.grad = torch.full((1, 2), 7.0 + rank)
    run(model, rank, [[0], [0, 1]])
    assert grads(model)[2] == [7.5, 7.5]


def accumulated_earlier_counts_although_missing_now(rank, size, views):
    model = wrap(gradient_as_bucket_view=views)
    for _ in range(3):
        with model.no_sync():
            run(model, rank, [[0, 1], [0]])
        run(model, rank, [[0], [0]])
        assert grads(model) == [[3, 3], [0.5, 0.5], None]
        model.zero_grad()


def _backward_around(model, x):
    """A backward through the wrapper's output that reaches none of its parameters."""

    class Passing(nn.Module):
        def forward(self, x):
            return x * 2

    inner, model.module = model.module, Passing()
    output = model(x)
    model.module = inner
    output.sum().backward()


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize(
    "rule", [used_on_some_rank, used_nowhere_keeps_what_it_has, accumulated_earlier_counts_although_missing_now]
)
def test_rule(ranks, rule, views):
    ranks(rule, views)


def test_a_rank_that_uses_no_parameter_takes_part(rank, size):
    model = wrap()
    for step in range(4):
        if rank == 1 and step % 2:
            x = torch.ones(1, 2, requires_grad=True)
            _backward_around(model, x)
        else:
            run(model, rank, [[0], [0]])
        expected = [0.5, 0.5] if step % 2 else [1.5, 1.5]
        assert grads(model) == [expected, None, None]
        model.zero_grad()


def test_unused_parameters_are_named_once_and_silent_if_expected(rank, size):
    model = wrap(find_unused_parameters=False)
    with pytest.warns(UserWarning, match=r"rank \d: parameters 'branch.1.weight', 'branch.2.weight' got no") as caught:
        run(model, rank, [[0], [0]])
    assert "no rank used them, so they keep .grad as it was" in str(caught[0].message)
    assert caught[0].filename == __file__, "the place is the line of the user's backward"
    assert "find_unused_parameters=True" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, rank, [[0], [0]])
        run(wrap(), rank, [[0], [0]])
