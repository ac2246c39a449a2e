"""What is seen of one gradient between backwards: which were counted, and what other code did to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfuse.loop.watched_gradient import WatchedGradient, sample_of, values_of


class Watching:
    """A parameter, its watched gradient, and backwards of it; `late` as on a GPU, whose values are not read."""

    def __init__(self, late=False):
        self.param = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.watched = WatchedGradient(self.param, "weight")
        if late:
            self.watched._nbytes = 0

    def backward(self, *, sync=False, announced=True):
        self.watched.backward_begins(announced=announced)
        self.param.square().sum().backward()
        if sync:
            self.watched.mean_ends()
        else:
            self.watched.local_ends(announced=announced)

    def step(self):
        self.watched.stepped()

    @property
    def counts(self):
        watched = self.watched
        return watched.means, watched.locals, watched.rest, watched.length


@pytest.fixture(params=[False, True], ids=["read", "late"])
def late(request):
    return request.param


def test_backwards_are_counted_since_the_gradient_was_zero(late):
    seen = Watching(late)
    seen.backward()
    seen.backward(sync=True)
    seen.backward()
    assert seen.counts == (1, 2, 1, 3)
    seen.backward(sync=True)
    assert seen.counts == (2, 2, 0, 4)


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_begins_again_behind_a_step(late, to_none):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.step()
    seen.param.grad = None if to_none else seen.param.grad.zero_()
    seen.backward()
    assert seen.counts == (0, 1, 0, 1)
    assert seen.watched.dropped == []


def test_a_gradient_that_is_not_zeroed_keeps_its_mean(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.step()
    seen.backward()
    assert seen.counts == (1, 1, 1, 1)


def test_a_window_that_is_zeroed_without_a_step_is_noted_until_the_step():
    seen = Watching()
    seen.backward()
    seen.backward()
    seen.param.grad = None
    seen.backward()
    seen.param.grad.zero_()
    seen.backward(sync=True)
    assert seen.watched.dropped == [2, 1]
    seen.step()
    assert seen.watched.dropped == []


def test_a_change_inside_a_window_is_counted_at_once_where_values_can_be_read():
    seen = Watching()
    seen.backward()
    seen.param.grad *= 0.5
    seen.backward(sync=True)
    seen.param.grad *= 0.5  # behind the last backward
    assert seen.watched.changes == 1
    seen.step()
    seen.backward()
    assert seen.watched.changes == 0


def test_a_change_inside_a_window_is_counted_a_step_later_where_they_cannot():
    seen = Watching(late=True)
    seen.backward()
    seen.param.grad *= 0.5
    seen.backward(sync=True)
    assert seen.watched.changes == 0
    seen.step()
    assert seen.watched.changes == 1


def test_zeros_inside_a_window_are_no_change_where_they_are_read_later():
    seen = Watching(late=True)
    seen.backward()
    seen.param.grad.zero_()
    seen.backward(sync=True)
    seen.step()
    assert seen.watched.changes == 0
    assert seen.watched.dropped == []


def test_another_tensor_begins_again(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.param.grad = seen.param.grad * 0.5
    seen.backward()
    assert seen.counts == (0, 1, 0, 1)
    assert seen.watched.changes == 0


def test_a_backward_that_no_output_announced_is_no_change_of_other_code(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.param.square().sum().backward()  # before it is opened
    seen.watched.backward_begins(announced=False)
    seen.watched.local_ends(announced=False)
    assert seen.counts == (1, 0, 0, 2)
    assert seen.watched.changes == 0


def test_a_backward_that_does_not_write_it_does_not_count(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.watched.backward_begins(announced=True)
    seen.watched.local_ends(announced=True)
    assert seen.counts == (1, 0, 0, 1)


def test_what_was_added_behind_a_mean_was_kept_unless_it_was_averaged(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.backward()
    assert seen.watched.rest_line.startswith("test_watched_gradient.py:")
    assert seen.watched.was_kept
    seen.param.grad *= 0.25
    assert seen.watched.was_kept
    seen.param.grad += torch.linspace(-1, 1, 12).view(3, 4)
    assert not seen.watched.was_kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sample_has_the_values_of_a_tensor_in_any_layout(dtype):
    tensor = torch.arange(200.0).view(20, 10).to(dtype)
    assert torch.equal(values_of(sample_of(tensor), dtype), tensor.flatten()[:64])
    turned = values_of(sample_of(tensor.T), dtype)
    assert len(turned) == 64
    assert torch.equal(turned, tensor.T.flatten()[::3][:64])
