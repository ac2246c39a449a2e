"""A checkpoint holds no gradients: inside a window of `no_sync()` it warns of that, and nowhere else."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dpfuse


class Program:
    """A wrapped model, its optimizer, and the parts of a loop."""

    def __init__(self, **options):
        self.model = dpfuse.DataParallel(nn.Linear(4, 2), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self, *, sync=True):
        with self.model.no_sync(enabled=not sync):
            self.model(torch.ones(3, 4)).sum().backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def inside(one):
    one.step()
    one.backward(sync=False)


def inside_on_rank_1(one):
    one.step()
    if one.model._sync.grads.group.rank() == 1:
        one.backward(sync=False)


def after_a_synchronised_backward(one):
    one.step()
    one.backward(sync=False)
    one.backward()


def after_a_step(one):
    inside(one)
    one.backward()
    one.optimizer.step()


def gradients_were_zeroed(one):
    inside(one)
    one.optimizer.zero_grad(set_to_none=False)


def gradients_were_dropped(one):
    inside(one)
    one.optimizer.zero_grad()


def averaged_by_hand(one):
    for _ in range(2):
        one.backward(sync=False)
        dpfuse.fused_allreduce_gradients(one.model.parameters())
        one.optimizer.step()


def weights_averaged_in_place_of_gradients(one):
    for _ in range(2):
        one.backward(sync=False)
        one.optimizer.step()


def no_optimizer_of_torch(one):
    one.backward(sync=False)
    with torch.no_grad():
        for param in one.model.parameters():
            param -= 0.1 * param.grad


def another_optimizer_has_stepped(one):
    """As a discriminator through which the generator's loss goes."""
    inside(one)
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=0.1).step()


def a_parameter_that_no_optimizer_holds(one):
    one.optimizer.param_groups[0]["params"].pop()
    inside(one)
    one.optimizer.step()


WINDOWS = (inside, inside_on_rank_1)
OTHERS = (
    after_a_synchronised_backward, after_a_step, gradients_were_zeroed, gradients_were_dropped, averaged_by_hand,
    weights_averaged_in_place_of_gradients, no_optimizer_of_torch, another_optimizer_has_stepped,
    a_parameter_that_no_optimizer_holds,
)  # fmt: skip


def saved(rank, size, do, folder, options=None):
    one = Program(**options or {})
    do(one)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        name = dpfuse.save_checkpoint(folder, one.model, one.optimizer, step=1).name
    assert name == "step-0000000001.pt"
    return [str(each.message) for each in seen if "save_checkpoint" in str(each.message)]


@pytest.mark.parametrize("options", [{}, {"accumulate_in_buckets": True}], ids=str)
@pytest.mark.parametrize("do", WINDOWS)
def test_inside_a_window_the_ranks_with_gradients_warn(ranks, tmp_path, do, options):
    first, second = ranks(saved, do, str(tmp_path), options)
    assert [len(first), len(second)] == [do is inside, 1]
    assert "while a window of no_sync() is open: gradients have accumulated that no step has used" in second[0]


@pytest.mark.parametrize("do", OTHERS)
def test_elsewhere_nothing_is_said(ranks, tmp_path, do):
    assert ranks(saved, do, str(tmp_path)) == [[], []]
