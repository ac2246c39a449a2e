"""Parameters and gradients that change in place: another shape, order or dtype in the same tensor object."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

FACES = {"paddle": dpfuse.DataParallel, "torch": dpfuse.DistributedDataParallel}
NUMBER = 6  # small parameters, which one `cat` packs on a CPU


class Net(nn.Module):
    """Each gradient is known: the number of each of its elements, times what the rank and the step say."""

    def __init__(self, large=False):
        super().__init__()
        torch.manual_seed(1)
        self.small = nn.ModuleList(nn.ParameterList([torch.randn(3, 3), torch.randn(3, 3)]) for _ in range(NUMBER))
        self.square = nn.Parameter(torch.randn(512, 512) if large else torch.randn(4, 4))

    def forward(self, factor):
        numbered = ((param, torch.arange(param.numel(), dtype=torch.double)) for param in self.parameters())
        return factor * sum((param.double() * number.view(param.shape)).sum() for param, number in numbered)


def factor_of(rank, step):
    return 1.0 + 3 * rank + step


def train(model, rank, step):
    model(factor_of(rank, step)).backward()


def check(model, size, step, times=1):
    mean = sum(factor_of(rank, step) for rank in range(size)) / size
    for name, param in model.named_parameters():
        want = times * mean * torch.arange(param.numel(), dtype=torch.double).view(param.shape)
        torch.testing.assert_close(param.grad, want.to(param.dtype), msg=lambda text, name=name: f"{name}: {text}")


def turn(grad):
    grad.t_()


def turn_data(grad):
    grad.data = grad.data.t()


def move(grad):
    grad.data = grad.data.clone()


def move_storage(grad):
    grad.set_(torch.zeros_like(grad))


def cut(grad):
    grad.data = grad.data[:2]


def shrink(grad):
    grad.resize_(2, 3)


def reshape(grad):
    grad.data = grad.data.reshape(-1)


def convert(grad):
    grad.data = grad.data.double()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("which", ["small.1.0", "square"])
@pytest.mark.parametrize("ranks_that_change", [(0, 1), (1,)], ids=str)
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "large"])
@pytest.mark.parametrize(
    "change", [turn, turn_data, move, move_storage, cut, shrink, reshape, convert], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("face", FACES)
def test_a_gradient_that_a_program_changes_is_right_in_the_next_step(
    rank, size, face, change, large, ranks_that_change, which
):
    model = FACES[face](Net(large))
    for step in range(5):
        train(model, rank, step)
        check(model, size, step)
        if step >= 2 and rank in ranks_that_change:
            change(model.module.get_parameter(which).grad)
        model.zero_grad()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("face", FACES)
def test_one_gradient_is_moved_and_another_one_turned_in_the_same_step(rank, size, face, large):
    model = FACES[face](Net(large))
    for step in range(5):
        train(model, rank, step)
        check(model, size, step)
        if step >= 2:
            move(model.module.get_parameter("small.1.0").grad)
            turn(model.module.square.grad)
        model.zero_grad()


def turned_on_rank_1(model, rank, size):
    """A gradient that is the same, in another order in memory: ranks must not add what lies in the same places."""
    for step in range(3):
        train(model, rank, step)
        model.zero_grad()
    train(model, rank, 3)
    grad = model.module.square.grad
    values = grad.clone()
    if rank == 1:
        grad.data = grad.data.t()
        grad.copy_(values)
    return model(factor_of(rank, 3))


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_private_gradient_that_one_rank_has_turned_and_accumulates(rank, size):
    model = dpfuse.DistributedDataParallel(Net())
    turned_on_rank_1(model, rank, size).backward()
    check(model, size, 3, times=2)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_view_that_one_rank_has_turned_and_accumulates_is_an_error_on_all(rank, size):
    loss = turned_on_rank_1(model := dpfuse.DataParallel(Net()), rank, size)
    with pytest.raises(dpfuse.DPFuseError, match="rank 1"):
        loss.backward()
    model.zero_grad()
    train(model, rank, 4)
    check(model, size, 4)


def grow(param):
    param.data = torch.randn(5, 3)


def cut_in_new_memory(param):
    param.data = param.data[:2].clone()


def set_to_other(param):
    with torch.no_grad():
        param.set_(torch.randn(2, 3))


def reshape_clone(param):
    param.data = param.data.reshape(9).clone()


def other_dtype(param):
    param.data = param.data.double()


PARAMETER_CHANGES = [grow, cut_in_new_memory, set_to_other, reshape_clone, other_dtype]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", PARAMETER_CHANGES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("face", FACES)
def test_a_parameter_of_another_kind_is_followed_where_all_ranks_change_it(rank, size, face, change):
    """Not only the first parameter of a module is looked at."""
    model = FACES[face](Net())
    for step in range(6):
        if step == 3:
            torch.manual_seed(7)
            change(model.module.small[1][1])
        model.zero_grad()
        train(model, rank, step)
        check(model, size, step)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", PARAMETER_CHANGES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("face", FACES)
def test_a_parameter_of_another_kind_on_one_rank_is_an_error_on_all(rank, size, face, change):
    model = FACES[face](Net())
    train(model, rank, 0)
    if rank == 1:
        change(model.module.small[1][1])
    model.zero_grad()
    out = model(factor_of(rank, 1))
    with pytest.raises(dpfuse.DPFuseError, match="rank 1"):
        out.backward()
    dist.barrier()


@pytest.mark.parametrize("face", FACES)
def test_a_parameter_that_keeps_its_address_is_an_error_on_all_ranks(rank, size, face):
    model = FACES[face](Net())
    train(model, rank, 0)
    param = model.module.small[1][1]
    param.data = param.data[:2]
    model.zero_grad()
    out = model(factor_of(rank, 1))
    with pytest.raises(dpfuse.DPFuseError, match=r"Slot 'small.1.1' got shape \(2, 3\), expected \(3, 3\)"):
        out.backward()
    dist.barrier()


@pytest.mark.parametrize("face", FACES)
def test_parameters_that_get_new_memory_in_each_step(rank, size, face):
    """As a step that is written by hand: `param.data = param.data - rate * param.grad`."""
    model = FACES[face](Net())
    before = model.bucket_plan
    for step in range(5):
        model.zero_grad()
        train(model, rank, step)
        check(model, size, step)
        for param in model.parameters():
            param.data = param.data - 0.01 * param.grad
        if step == 1:
            before = model.bucket_plan
    assert model.bucket_plan is before
