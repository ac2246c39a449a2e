"""A checkpoint holds no gradients: inside a window of `no_sync()` it is refused, and nowhere else."""

from __future__ import annotations

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


WRONG = (inside, inside_on_rank_1)
RIGHT = (
    after_a_synchronised_backward, after_a_step, gradients_were_zeroed, gradients_were_dropped, averaged_by_hand,
    weights_averaged_in_place_of_gradients, no_optimizer_of_torch,
)  # fmt: skip


def saved(rank, size, do, folder, options=None):
    one = Program(**options or {})
    do(one)
    try:
        return dpfuse.save_checkpoint(folder, one.model, one.optimizer, step=1).name
    except dpfuse.DPFuseError as error:
        return str(error)


@pytest.mark.parametrize("do", WRONG)
def test_inside_a_window_all_ranks_raise_an_error_that_names_it(ranks, tmp_path, do):
    results = ranks(saved, do, str(tmp_path))
    assert all("save_checkpoint() was called inside a window of no_sync()" in text for text in results), results
    assert ("rank 0: save" in results[0]) == (do is inside)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("do", RIGHT)
def test_elsewhere_it_saves(ranks, tmp_path, do):
    assert ranks(saved, do, str(tmp_path)) == ["step-0000000001.pt"] * 2


def test_gradients_in_buckets_are_refused_too(ranks, tmp_path):
    results = ranks(saved, inside, str(tmp_path), {"accumulate_in_buckets": True})
    assert all("lie in its bucket" in text for text in results)
