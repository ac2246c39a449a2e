"""What paddle.DataParallel has beyond dpfuse.DataParallel, and how it behaves on a single process."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import dpfuse
import dpfuse.paddle as paddle


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@pytest.fixture
def alone():
    """A wrapper without process group, whose one warning has been caught."""
    with pytest.warns(UserWarning, match="no process group"):
        return paddle.DataParallel(net())


def test_positional_arguments_are_paddles():
    expected = [
        ("layers", inspect.Parameter.empty),
        ("strategy", None),
        ("comm_buffer_size", 25),
        ("last_comm_buffer_size", 1),
        ("find_unused_parameters", False),
        ("group", None),
    ]
    parameters = inspect.signature(paddle.DataParallel).parameters.values()
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == expected


def test_one_process_passes_through_with_exactly_one_warning():
    layers = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = paddle.DataParallel(layers)
        x = torch.ones(5, 4)
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
    assert [warning.category for warning in caught] == [UserWarning]
    assert caught[0].filename == __file__
    reference = net()
    for _ in range(2):
        reference(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(layers.parameters(), reference.parameters(), strict=True))


def test_the_wrapped_module_is_found_by_paddles_name(alone):
    assert alone._layers is alone.module
    assert isinstance(alone, dpfuse.DataParallel)


def test_deprecated_methods_do_nothing_and_say_so(alone):
    loss = torch.tensor(2.0)
    with pytest.warns(DeprecationWarning, match="scale_loss"):
        assert alone.scale_loss(loss) is loss
    with pytest.warns(DeprecationWarning, match="apply_collective_grads"):
        assert alone.apply_collective_grads() is None


def test_the_deprecated_strategy_is_ignored_with_a_warning():
    with pytest.warns() as caught:
        paddle.DataParallel(net(), object())
    assert {warning.category for warning in caught} == {UserWarning, DeprecationWarning}


def test_gradients_are_dropped_or_set_to_zero(alone):
    alone(torch.ones(5, 4)).sum().backward()
    alone.clear_gradients(set_to_zero=True)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in alone.parameters())
    alone.clear_gradients()
    assert all(p.grad is None for p in alone.parameters())


def test_state_dict_takes_paddles_arguments_by_position(alone):
    names = list(net().state_dict())
    destination = OrderedDict(other=torch.zeros(1))
    assert alone.state_dict(destination, True, "net.") is destination
    assert list(destination) == ["other", *(f"net.{name}" for name in names)]
    assert alone.state_dict(include_sublayers=False) == {}
    assert list(alone.state_dict()) == names


def test_a_parent_module_saves_and_loads_through_the_wrapper(alone):
    parent = nn.ModuleDict({"body": alone})
    state = {name: value + 1 for name, value in parent.state_dict().items()}
    assert next(iter(state)) == "body.0.weight"
    parent.load_state_dict(state)
    assert torch.equal(alone.module[0].weight, state["body.0.weight"])


@pytest.mark.parametrize("name", ["set_state_dict", "set_dict", "load_dict"])
def test_all_of_paddles_names_load_arrays(alone, name):
    state = {key: np.full_like(value.numpy(), 2) for key, value in alone.state_dict().items()}
    assert getattr(alone, name)(state) == ([], [])
    assert all((value == 2).all() for value in alone.state_dict().values())


def sizes(rank, size, comm, last):
    try:
        model = paddle.DataParallel(nn.Linear(4, 3), comm_buffer_size=comm, last_comm_buffer_size=last)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return [bucket.params for bucket in model.bucket_plan.buckets]


@pytest.mark.parametrize(
    ("comm", "last", "expected"),
    [
        (0, 0, [(1,), (0,)]),
        (25, 1, [(0, 1)]),
        (25, 0.00001, [(1,), (0,)]),
        (-1, 1, ("ValueError", "comm_buffer_size")),
        (25, -0.5, ("ValueError", "last_comm_buffer_size")),
        ("25", 1, ("TypeError", "comm_buffer_size")),
    ],
)
def test_buffer_sizes_may_be_fractions_and_zero_but_not_negative(ranks, comm, last, expected):
    for result in ranks(sizes, comm, last):
        if isinstance(expected, tuple):
            assert result[0] == expected[0]
            assert expected[1] in result[1]
        else:
            assert [tuple(params) for params in result] == expected


def test_distributed_has_paddles_names():
    names = ("init_parallel_env", "spawn", "ParallelEnv", "get_rank", "get_world_size")
    assert all(getattr(paddle.distributed, name) is getattr(dpfuse, name) for name in names)
    assert paddle.distributed.fleet.utils.hybrid_parallel_util.fused_allreduce_gradients
