"""A step that is begun again after a loop broke off: the bits are those of a training without a break."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.same_bits.program import digest, state_of

COUNT = 7
STEPS = 4
WHEN = 1  # the step that is begun again, from 0


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blow):
        ctx.blow = blow
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.blow:
            raise KeyError("planted")
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, blow=False):
        return self.last(Fuse.apply(self.dropout(torch.tanh(self.first(x))), blow))


class Training:
    """One training, in which a step may break off; each of its micro-batches draws random numbers."""

    def __init__(self, **options):
        torch.manual_seed(3)
        self.model = dpfuse.DataParallel(Net(), fixed_micro_batches=COUNT, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def backward(self, number, blow=False):
        self.model(torch.full((2, 3), 1.0 + number), blow).square().sum().backward()

    def loop(self):
        for number in self.model.micro_batches():
            self.backward(number)

    def run(self, broken=None):
        for step in range(STEPS):
            if broken is not None and step == WHEN:
                broken(self)
            self.loop()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return digest(state_of(self.model.module))


def left(training):
    """The loop is left after its first micro-batch."""
    for number in training.model.micro_batches():
        training.backward(number)
        break
    training.model.discard_accumulated()


def left_at_the_last(training):
    """The loop is left at its last micro-batch, before the backward."""
    numbers = training.model.micro_batches()
    own = training.model._sync.micro_loop.deal.of(training.model._sync.grads.group.rank())
    for number in numbers:
        if number == own[-1]:
            break
        training.backward(number)
    training.model.discard_accumulated()


def left_after_the_last_forward(training):
    """The forward of the last micro-batch has asked for a backward that synchronises, and gets none."""
    own = training.model._sync.micro_loop.deal.of(training.model._sync.grads.group.rank())
    for number in training.model.micro_batches():
        if number == own[-1]:
            training.model(torch.full((2, 3), 1.0 + number), False)
            break
        training.backward(number)
    training.model.discard_accumulated()


def zeroed(training):
    """As `left`, where the wrapper's zero_grad() throws the sums away."""
    for number in training.model.micro_batches():
        training.backward(number)
        break
    training.model.zero_grad()


def raised_in_a_forward(training):
    with pytest.raises(RuntimeError, match="shapes"):
        for number in training.model.micro_batches():
            training.backward(number)
            training.model(torch.ones(2, 5))
    training.model.discard_accumulated()


def raised_in_a_backward(training):
    """In the second of the rank's backwards, which does not synchronise where the rank has three or more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyError, match="planted"):
            for place, number in enumerate(training.model.micro_batches()):
                training.backward(number, blow=place == 1)
        training.model.discard_accumulated()


BREAKS = (left, left_at_the_last, left_after_the_last_forward, zeroed, raised_in_a_forward, raised_in_a_backward)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("of_all", [True, False], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.ranks(size=2)
def test_a_step_that_is_begun_again_has_the_bits_of_an_undisturbed_one(rank, size, broken, of_all):
    options = {"comm_buffer_size": 0, "last_comm_buffer_size": 0}
    expected = Training(**options).run()
    assert Training(**options).run(broken if of_all or rank == 1 else None) == expected


def failed_backward(training, rank):
    """The last backward of rank 1 fails, which synchronises."""
    own = training.model._sync.micro_loop.deal.of(rank)
    with pytest.raises(KeyError, match="planted"):
        for number in training.model.micro_batches():
            training.backward(number, blow=number == own[-1])


def lost_sums(training, rank):
    """An earlier backward of rank 1 fails, which loses the sums of those before. The program goes on with the loop."""
    with pytest.raises(dpfuse.DPFuseError, match="gradients of micro-batches of this step were lost"):
        for place, number in enumerate(training.model.micro_batches()):
            if place == 1:
                with pytest.raises(KeyError, match="planted"):
                    training.backward(number, blow=True)
            training.backward(number)


def tried_again(training, rank):
    """A backward of rank 1 fails, of which a part is in `.grad`. The program tries the same micro-batch once more."""
    own = training.model._sync.micro_loop.deal.of(rank)
    for number in training.model.micro_batches():
        if number == own[0]:
            with pytest.raises(KeyError, match="planted"):
                training.backward(number, blow=True)
        if number == own[-1]:
            with pytest.raises(dpfuse.DPFuseError, match="were lost"):
                training.backward(number)
            break
        training.backward(number)


@pytest.mark.parametrize("broken", [failed_backward, lost_sums, tried_again])
@pytest.mark.ranks(size=2)
def test_a_loop_that_has_no_mean_is_named_on_both_ranks_which_can_begin_it_again(rank, size, broken):
    expected = Training().run()
    training = Training()

    def on_both(training):
        # Rank 0 hears of it in its last backward, and rank 1 lets it know at its next forward.
        if rank == 1:
            broken(training, rank)
        else:
            with pytest.raises(dpfuse.DPFuseError, match=r"failed on rank 1"):
                training.loop()
        training.model.zero_grad()  # its buckets, too

    assert training.run(on_both) == expected


@pytest.mark.ranks(size=2)
def test_the_last_micro_batch_is_not_tried_again_alone(rank, size):
    """Its backward has failed on rank 1, and the sums of the others are gone. Both ranks begin the step again."""
    expected = Training().run()

    def on_both(training):
        own = training.model._sync.micro_loop.deal.of(rank)
        for number in training.model.micro_batches():
            if number != own[-1]:
                training.backward(number)
                continue
            if rank == 1:
                with pytest.raises(KeyError, match="planted"):
                    training.backward(number, blow=True)
            else:
                with pytest.raises(dpfuse.DPFuseError, match=r"failed on rank 1"):
                    training.backward(number)
            with pytest.raises(dpfuse.DPFuseError, match="were lost"):
                training.backward(number)
            break
        training.model.zero_grad()

    assert Training().run(on_both) == expected
