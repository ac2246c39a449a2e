"""Which parameters a backward will reach, asked while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfuse.engine.autograd import unreached


def asked(loss_of, params, run=torch.Tensor.backward):
    """Return the places of the parameters that a backward of this loss is not to reach, asked when it begins."""
    found = []
    loss = loss_of()
    loss.register_hook(
        lambda grad: found.append(
            [place for place, param in enumerate(params) if any(param is other for other in unreached(params))]
        )
    )
    run(loss)
    return found[0]


@pytest.fixture
def params():
    return [nn.Parameter(torch.ones(2)) for _ in range(4)]


def test_parameters_that_are_not_in_the_graph(params):
    assert asked(lambda: (params[0] * params[2]).sum(), params) == [1, 3]
    assert asked(lambda: sum(param.sum() for param in params), params) == []
    assert [param.grad is None for param in params] == [False] * 4


def test_a_frozen_parameter_is_not_reached_although_the_graph_was_made_before(params):
    def loss():
        made = (params[0] * params[1] * params[2] * params[3]).sum()
        params[1].requires_grad_(False)
        return made

    assert asked(loss, params) == [1]
    for param in params:
        param.requires_grad_(False)
    inputs = torch.ones(2, requires_grad=True)
    assert asked(lambda: (inputs * params[0]).sum(), params) == [0, 1, 2, 3]


def test_only_the_named_inputs_of_a_backward(params):
    loss = lambda: (params[0] * params[1] * params[2]).sum()  # noqa: E731
    assert asked(loss, params, lambda made: made.backward(inputs=[params[1]])) == [0, 2, 3]


def test_what_accumulates_nothing_reaches_everything(params):
    inputs = torch.ones(2, requires_grad=True)
    loss = lambda: (params[0] * inputs).sum()  # noqa: E731
    for wanted in (params[0], inputs):
        assert asked(loss, params, lambda made, wanted=wanted: torch.autograd.grad(made, wanted)) == []


def test_outside_of_a_backward_all_count_as_reached(params):
    assert unreached(params) == []


def test_a_converted_parameter_is_found(params):
    """It has another node in the graph."""
    loss = lambda: (params[0] * params[1]).sum()  # noqa: E731
    assert asked(loss, params) == [2, 3]
    for param in params:
        param.grad, param.data = None, param.data.double()
    assert asked(loss, params) == [2, 3]


def test_a_second_backward_through_a_graph_that_was_kept(params):
    made = (params[0] * params[1]).sum()
    assert asked(lambda: made, params, lambda loss: loss.backward(retain_graph=True)) == [2, 3]
    assert asked(lambda: made, params) == [2, 3]


def test_a_reentrant_checkpoint_hides_what_it_reaches(params):
    inputs = torch.ones(2, requires_grad=True)
    for reentrant, hidden in ((True, [0, 2, 3]), (False, [2, 3])):
        loss = lambda: (checkpoint(lambda x: x * params[0], inputs, use_reentrant=reentrant) * params[1]).sum()  # noqa: B023, E731
        assert asked(loss, params) == hidden


def test_no_node_of_the_graph_is_kept(params):
    """Kept nodes would hold their streams, and torch refuses to swap their parameters."""
    asked(lambda: (params[0] * params[1]).sum(), params)
    other = nn.Parameter(torch.zeros(2))
    params[0].grad = None
    torch.utils.swap_tensors(params[0], other)
    assert not params[0].any()
