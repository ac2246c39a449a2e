"""What is seen of one gradient between backwards: which were counted, and whether other code zeroed it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfuse.engine.sample import values_of
from dpfuse.loop.watched_gradient import WatchedGradient


class Late(WatchedGradient):
    """As on a GPU."""

    @staticmethod
    def _is_readable(grad):
        return False


class Watching:
    """A parameter, its watched gradient, and backwards of it; `late` as on a GPU, whose values are not read."""

    def __init__(self, late=False):
        self.param, self.averages = nn.Parameter(torch.arange(12.0).view(3, 4)), 0
        self.watched = (Late if late else WatchedGradient)(self.param, "weight", 0)

    def backward(self, *, sync=False, announced=True):
        self.watched.backward_begins(announced=announced)
        self.param.square().sum().backward()
        self.averages += sync
        if sync:
            self.watched.mean_ends(self.averages)
        else:
            self.watched.local_ends(announced=announced)

    def step(self):
        self.watched.has_stepped = True

    @property
    def counts(self):
        watched = self.watched
        return watched.has_mean, watched.locals, watched.rest, watched.length


@pytest.fixture(params=[False, True], ids=["read", "late"])
def late(request):
    return request.param


def test_backwards_are_counted_since_the_gradient_was_zero(late):
    seen = Watching(late)
    seen.backward()
    seen.backward(sync=True)
    seen.backward()
    assert seen.counts == (True, 2, 1, 3)
    seen.backward(sync=True)
    assert seen.counts == (True, 2, 0, 4)


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_begins_again_behind_a_step(late, to_none):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.step()
    seen.param.grad = None if to_none else seen.param.grad.zero_()
    seen.backward()
    assert seen.counts == (False, 1, 0, 1)


def test_a_gradient_that_is_not_zeroed_keeps_its_mean():
    seen = Watching()
    seen.backward(sync=True)
    seen.step()
    seen.backward()
    assert seen.counts == (True, 1, 1, 1)


def test_zeros_that_torch_does_not_count_begin_again_behind_a_step(late):
    """`grad.data.zero_()`. On a GPU, where values are not read, each gradient that was stepped on begins again."""
    seen = Watching(late)
    seen.backward(sync=True)
    seen.step()
    seen.param.grad.data.zero_()
    seen.backward()
    assert seen.counts == (False, 1, 0, 1)


def test_another_tensor_begins_again(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.param.grad = seen.param.grad * 0.5
    seen.backward()
    assert seen.counts == (False, 1, 0, 1)


def test_a_backward_that_no_output_announced_is_no_change_of_other_code(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.param.square().sum().backward()  # before it is opened
    seen.watched.backward_begins(announced=False)
    seen.watched.local_ends(announced=False)
    assert seen.counts == (True, 0, 0, 2)


def test_a_backward_that_does_not_write_it_does_not_count(late):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.watched.backward_begins(announced=True)
    seen.watched.local_ends(announced=True)
    assert seen.counts == (True, 0, 0, 1)


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


def test_a_gradient_of_another_dtype_than_its_parameter_has_a_sample_of_its_own_bytes():
    param = nn.Parameter(torch.arange(12.0).view(3, 4))
    param.grad_dtype = torch.bfloat16
    watched = WatchedGradient(param, "weight", 0)
    for sync in (True, False):
        watched.backward_begins(announced=True)
        param.square().sum().backward()
        watched.mean_ends(1) if sync else watched.local_ends(announced=True)
    assert param.grad.dtype is torch.bfloat16
    assert torch.equal(values_of(watched.bits), param.grad.flatten())
    assert watched.was_kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_conversion_between_two_backwards_is_no_change_and_no_error(late, dtype):
    seen = Watching(late)
    seen.backward(sync=True)
    seen.backward()
    seen.param.data, seen.param.grad.data = seen.param.data.to(dtype), seen.param.grad.data.to(dtype)
    assert not seen.watched.was_kept  # which is not known
    seen.backward(sync=True)
    seen.backward()
    assert seen.watched.bits.dtype is dtype
    assert len(values_of(seen.watched.bits)) == 12


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_averages_that_were_not_told_are_caught_up_with(late, steps, zeroed):
    """Before the first local backward. On a GPU it is unknown what other code has done, and nothing is suspected."""
    seen = Watching(late)
    seen.backward(sync=True)
    seen.param.square().sum().backward()
    seen.watched.averages += steps
    if zeroed:
        seen.param.grad.zero_()
    seen.watched.catch_up(2, announced=True)
    seen.backward()
    begins_again = late or zeroed
    assert seen.counts[:3] == (not begins_again, 1, int(not begins_again))
