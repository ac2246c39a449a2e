"""Ranks that run different numbers of backwards or forwards: every rank raises, in the backward where it matters."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfuse

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x, blow=False):
        if blow:
            raise KeyError("planted")
        return self.layers(x)


def wrapped(face, **options):
    torch.manual_seed(0)
    return FACES[face](Net(), **options)


def batch(rank, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def step(model, rank, number, micro=1, **arguments):
    """One optimizer step's backwards: all but the last inside no_sync()."""
    for index in range(micro):
        with model.no_sync() if index < micro - 1 else nullcontext():
            model(batch(rank, 100 * number + index), **arguments).square().sum().backward()


def right_steps(model, rank, size, micro=1, numbers=(0, 1)):
    for number in numbers:
        model.zero_grad()
        step(model, rank, number, micro)
        bare = Net()
        bare.load_state_dict(model.module.state_dict())
        for index in range(micro):
            bare(batch(rank, 100 * number + index)).square().sum().backward()
        for got, local in zip(model.module.parameters(), bare.parameters(), strict=True):
            mean = local.grad / size
            dist.all_reduce(mean)
            torch.testing.assert_close(got.grad, mean)


def no_sync_on_one(model, rank):
    if rank == 1:
        with model.no_sync():
            step(model, rank, 5)
        model.zero_grad()
    step(model, rank, 6)


def one_micro_batch_more(model, rank):
    step(model, rank, 5, micro=4 + (rank == 1))


def micro_batch_skipped(model, rank):
    with model.no_sync():
        for index in range(3):
            if rank == 0 or index != 1:
                model(batch(rank, index)).sum().backward()
    step(model, rank, 6)


def no_backward_after_forward(model, rank):
    output = model(batch(rank, 5))
    if rank == 0:
        output.sum().backward()
    else:
        model(batch(rank, 6)).sum().backward()


BACKWARDS = r"rank 1 has run {} backwards? since the last averaged one, rank 0 {}; expected the same on every rank"
FORWARDS = r"rank 1 has run 1 forward without a backward, rank 0 has run 0 forwards without a backward; expected"
CASES = {
    no_sync_on_one: BACKWARDS.format(2, "has run 1 backward since .*"),
    one_micro_batch_more: BACKWARDS.format(5, "has run 4 backwards since .*"),
    micro_batch_skipped: BACKWARDS.format(3, "has run 4 backwards since .*"),
    no_backward_after_forward: FORWARDS,
}


def strays(rank, size, fault, message, face, before, options):
    model = wrapped(face, **options)
    for _ in range(before):
        right_steps(model, rank, size)
    model.zero_grad()
    with pytest.raises(dpfuse.DPFuseError, match=rf"^rank {rank}: {message}") as error:
        fault(model, rank)
    assert "No rank's gradients of this backward are averaged" in str(error.value)
    # Where ranks 0 and 1 are one backward apart by then, the other has a gradient of a batch that it must not keep.
    for micro in (1, 3):
        right_steps(model, rank, size, micro)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["default", "private"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.__name__)
def test_every_rank_raises(ranks, fault, face, options):
    for before in (0, 1):
        ranks(strays, fault, CASES[fault], face, before, options)


@pytest.mark.parametrize("face", FACES)
def test_a_rank_that_skips_a_batch_after_its_forward_raised_goes_on_with_the_next(rank, size, face):
    model = wrapped(face)
    for first in (0, 10):
        if rank == 1:
            with pytest.raises(KeyError, match="planted"):
                step(model, rank, first, blow=True)
        own = [first + index + rank for index in range(2)]  # rank 1 is one batch ahead
        right_steps(model, rank, size, numbers=own)


@pytest.mark.ranks(size=3)
def test_the_first_rank_that_differs_is_named(rank, size):
    model = wrapped("dp")
    with pytest.raises(dpfuse.DPFuseError, match=rf"^rank {rank}: rank 2 has run 3 backwards .* rank 0 has run 2 "):
        step(model, rank, 1, micro=3 if rank == 2 else 2)
    right_steps(model, rank, size)


SWAPPED = r"rank 1 averages the gradients of the wrapped model number (\d+) of its group, rank 0 .* number (\d+) of"


def test_the_backwards_of_two_equal_models_in_another_order_are_noticed(rank, size):
    models = [wrapped("dp"), wrapped("dp")]
    losses = [model(batch(rank, 1)).sum() for model in models]
    with pytest.raises(dpfuse.DPFuseError, match=SWAPPED) as error:
        losses[rank].backward()
    numbers = re.search(SWAPPED, str(error.value))
    assert numbers is not None
    assert int(numbers[1]) - int(numbers[2]) == 1


def blow_once():
    blown = []

    def blow(grad):
        if not blown:
            blown.append(True)
            raise KeyError("planted")

    return blow


def test_what_is_no_difference_raises_nothing(rank, size):
    """What ranks may do differently."""
    model = wrapped("dp")
    right_steps(model, rank, size)
    with torch.no_grad():
        for index in range(rank):
            model(batch(rank, index))
    model.eval()
    for index in range(rank):
        model(batch(rank, index))
    model.train()
    right_steps(model, rank, size)
    # A gradient of its own, of a forward that is not to be averaged.
    with model.no_sync():
        if rank == 1:
            torch.autograd.grad(model(batch(rank, 3)).sum(), list(model.module.parameters()))
    right_steps(model, rank, size)
    # A loop that calls the model until it is done, and one backward through all of it.
    model.zero_grad()
    state = batch(rank, 4)
    total = torch.zeros(())
    for _ in range(2 + rank):
        state = torch.nn.functional.pad(model(state), (0, 1))
        total = total + state.sum()
    total.backward()
    right_steps(model, rank, size)
    # A window that one rank had to begin again.
    model.zero_grad()
    if rank == 1:
        with model.no_sync(), suppress(KeyError):
            step(model, rank, 7)
            output = model(batch(rank, 8))
            model.module.layers[0].weight.register_hook(blow_once())
            output.sum().backward()
        model.zero_grad()
    right_steps(model, rank, size, micro=3)


@pytest.mark.parametrize("face", FACES)
def test_a_loss_of_all_parameters_stands_for_the_outputs(rank, size, face):
    """Now one rank, now the other replaces its loss by all parameters times 0: it has taken part nonetheless."""
    model = wrapped(face)
    for number in range(4):
        model.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                loss = model(batch(rank, number)).sum()
                if rank == number % 2 and micro == number // 2:
                    loss = sum(param.sum() for param in model.parameters()) * 0
                loss.backward()
        assert not torch.equal(model.module.layers[0].weight.grad, torch.zeros(3, 3))
        right_steps(model, rank, size)


def test_a_loss_of_all_parameters_hides_no_later_difference(rank, size):
    model = wrapped("dp")
    if rank == 1:
        with model.no_sync():
            (sum(param.sum() for param in model.parameters()) * 0).backward()
            model(batch(rank, 1))
    with pytest.raises(dpfuse.DPFuseError, match=r"rank 1 has run 2 backwards"):
        step(model, rank, 2)
    right_steps(model, rank, size)
    # It stands for the forwards before it, and not for those after it.
    with model.no_sync():
        (sum(param.sum() for param in model.parameters()) * 0).backward()
    if rank == 1:
        model(batch(rank, 1))
    with pytest.raises(dpfuse.DPFuseError, match=FORWARDS):
        step(model, rank, 2)
    right_steps(model, rank, size)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_recomputes_is_no_forward_without_a_backward(rank, size, use_reentrant):
    """The wrapper inside a checkpoint: what backward recomputes may stop half-way, and is no batch of its own."""
    model = wrapped("dp")
    for number in range(2):
        model.zero_grad()
        states = [batch(rank, number).requires_grad_()]
        for _ in range(2 + (0 if use_reentrant else rank)):
            output = checkpoint(model, states[-1], use_reentrant=use_reentrant)
            states.append(nn.functional.pad(output, (0, 1)))
        sync = model.no_sync() if use_reentrant and number == 0 else nullcontext()
        with sync:
            states[-1].sum().backward()
    right_steps(model, rank, size)


def test_ranks_may_use_different_outputs_if_that_is_announced(rank, size):
    model = wrapped("dp", find_unused_parameters=True)
    for _ in range(2):
        first, second = model(batch(rank, 1)), model(batch(rank, 2))
        (first if rank == 0 else first + second).sum().backward()
    right_steps(model, rank, size)


def test_a_copy_on_one_rank_counts_as_its_original(rank, size):
    import copy

    model = wrapped("dp")
    average = copy.deepcopy(model) if rank == 0 else None  # as a moving average of the weights has it
    another = wrapped("dp")
    for one in (model, another):
        right_steps(one, rank, size)
    assert average is None or average._number == model._number
