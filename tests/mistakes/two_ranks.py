"""Mistakes that need two ranks. Each function makes one, and raises what a user would see on that rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import dpfuse


class SharedMistake(NamedTuple):
    """A mistake on two ranks; both raise.

    Args:
        action: makes the mistake; called with the rank.
        what: words of every rank's text that say what is wrong.
        got, expected, remedy: words of every rank's text.
    """

    action: Callable[[int], object]
    what: str
    got: str
    expected: str
    remedy: str


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def other_model(rank: int) -> None:
    dpfuse.DataParallel(nn.Linear(4, 2 + rank))


def other_dtype(rank: int) -> None:
    dpfuse.DataParallel(nn.Linear(4, 2, dtype=torch.float64 if rank else torch.float32))


def other_option(rank: int) -> None:
    dpfuse.DataParallel(net(), comm_buffer_size=25 - 15 * rank)


def frozen_before_wrapping(rank: int) -> None:
    module = net()
    module[0].weight.requires_grad = rank == 0
    dpfuse.DataParallel(module)


def frozen_after_wrapping(rank: int) -> None:
    model = dpfuse.DataParallel(net())
    step(model)
    model.module[0].weight.requires_grad = rank == 0
    step(model)


def no_sync_on_one_rank(rank: int) -> None:
    model = dpfuse.DataParallel(net())
    for _ in range(2):
        with model.no_sync(enabled=rank == 1):
            step(model)
        step(model)


def one_forward_more(rank: int) -> None:
    model = dpfuse.DataParallel(net())
    if rank:
        model(torch.ones(2, 4))
    step(model)


def one_batch_dropped(rank: int) -> None:
    model = dpfuse.DataParallel(net())
    for value in (torch.nan, 1.0):
        output = model(torch.full((2, 4), value if rank else 1.0))
        if output.isfinite().all():
            output.sum().backward()


def weight_on_one_rank(rank: int) -> None:
    model = dpfuse.DataParallel(net())
    if rank:
        model.set_gradient_weight(3)
    step(model)


def weights_of_zero(rank: int) -> None:
    model = dpfuse.DataParallel(net())
    model.set_gradient_weight(0)
    step(model)


def parameter_on_one_rank(rank: int) -> None:
    model = dpfuse.DataParallel(net())
    step(model)
    if rank:
        model.module.append(nn.Linear(2, 2))
    step(model)


def order_of_models(rank: int) -> None:
    models = [dpfuse.DataParallel(net()) for _ in range(2)]
    for number in (0, 1) if rank else (1, 0):
        step(models[number])


def gradients_by_hand(rank: int) -> None:
    module = net()
    step(module)
    if rank:
        module[1].bias.grad = None
    dpfuse.fused_allreduce_gradients(module.parameters())


SAME = "expected the same on every rank"
BUILD = "Build the same model with the same options everywhere"
MISTAKES = {
    "another model": SharedMistake(
        other_model, "the wrapped module differs", "rank 1 has 'parameter weight", SAME, BUILD
    ),
    "another dtype": SharedMistake(other_dtype, "the wrapped module differs", "dtype=float64", SAME, BUILD),
    "another option": SharedMistake(
        other_option, "the wrapped module differs", "rank 1 has 'option comm_buffer_size = 10.0'", SAME, BUILD
    ),
    "frozen before wrapping": SharedMistake(
        frozen_before_wrapping, "the wrapped module differs", "requires_grad=False", SAME, BUILD
    ),
    "frozen after wrapping": SharedMistake(
        frozen_after_wrapping,
        "have frozen different parameters",
        "(0, 1 of them, by rank)",
        "expected the same requires_grad on every rank",
        "Freeze and unfreeze the same parameters everywhere",
    ),
    "no_sync on one rank": SharedMistake(
        no_sync_on_one_rank,
        "backwards since the last averaged one",
        "rank 1 has run 2 backwards",
        SAME,
        "Enter no_sync() on all ranks or on none",
    ),
    "one forward more": SharedMistake(
        one_forward_more,
        "without a backward",
        "rank 1 has run 1 forward",
        SAME,
        "If the forward was only for a log or an evaluation, run it under torch.no_grad(), or in eval mode",
    ),
    "one batch dropped": SharedMistake(
        one_batch_dropped,
        "without a backward",
        "rank 1 has run 1 forward",
        SAME,
        "run the backward of a loss that is multiplied by 0",
    ),
    "a weight on one rank": SharedMistake(
        weight_on_one_rank,
        "weighs its gradients",
        "rank 1 weighs its gradients, rank 0 averages",
        SAME,
        "call set_gradient_weight() on all ranks",
    ),
    "weights of zero": SharedMistake(
        weights_of_zero,
        "gave their gradients the weights",
        "the weights 0, 0",
        "expected finite ones, 0 or more, and one above 0",
        "zero them before the next backward",
    ),
    "a parameter on one rank": SharedMistake(
        parameter_on_one_rank,
        "the module was changed on rank 1 of 2",
        "and not on rank 0",
        "expected the same change on every rank",
        "Make it on all of them, or undo it",
    ),
    "another order of models": SharedMistake(
        order_of_models,
        "averages the gradients of the wrapped model number",
        "rank 1 averages the gradients",
        SAME,
        "Run the backwards of several wrapped models in the same order everywhere",
    ),
    "other gradients by hand": SharedMistake(
        gradients_by_hand,
        "the set of gradients of fused_allreduce_gradients differs",
        "rank 1 has '3 gradients",
        SAME,
        "Call it on every rank with the same parameters",
    ),
}
