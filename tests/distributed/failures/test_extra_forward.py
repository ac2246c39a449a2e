"""A training forward without a backward on one rank only: all ranks raise, and the remedies in the error train."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpfuse
from dpfuse import DPFuseError

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
STEPS = 4
MARKED = 2  # the step in which rank 0 does something else


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def expected(skipping: bool) -> list[list[Tensor]]:
    """The mean gradients of each step, computed in one process; a rank that skips a batch counts with zero."""
    module, means = net(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            if not (skipping and step == MARKED and rank == 0):
                (loss_of(module, rank, step) / 2).backward()
        means.append([param.grad.clone() for param in module.parameters()])
        optimizer.step()
    return means


def fails_midway(model: nn.Module) -> None:
    handle = model.module[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0, MARKED)
    handle.remove()


# What rank 0 does in the marked step; None goes on with its batch, a loss takes the place of that batch's.
def logs_in_no_grad(model: nn.Module, printed: Any) -> Tensor | None:
    with torch.no_grad():
        model(torch.ones(2, 5)).mean().item()
    return None


def logs_in_eval_mode(model: nn.Module, printed: Any) -> Tensor | None:
    model.eval()
    model(torch.ones(2, 5)).mean().item()
    model.train()
    return None


def logs_twice(model: nn.Module, printed: Any) -> Tensor | None:
    return logs_in_no_grad(model, printed) or logs_in_no_grad(model, printed)


def zero_times_the_loss(model: nn.Module, printed: Any) -> Tensor | None:
    return 0 * loss_of(model, 0, MARKED)


def printed_loss(model: nn.Module, printed: Any) -> Tensor | None:
    return printed(model)


def printed_loss_after_a_rejected_loss(model: nn.Module, printed: Any) -> Tensor | None:
    assert not (loss_of(model, 0, MARKED) * torch.nan).isfinite()
    return printed(model)


def printed_loss_after_an_exception(model: nn.Module, printed: Any) -> Tensor | None:
    fails_midway(model)
    return printed(model)


REMEDIES: dict[Callable[..., Tensor | None], bool] = {  # and whether rank 0's batch is skipped
    logs_in_no_grad: False,
    logs_in_eval_mode: False,
    logs_twice: False,
    zero_times_the_loss: True,
    printed_loss: True,
    printed_loss_after_a_rejected_loss: True,
    printed_loss_after_an_exception: True,
}


def provoked_error(rank: int, face: str, extra: Callable[[nn.Module], object]) -> str:
    model = FACES[face](net())
    loss_of(model, rank, 0).backward()
    if rank == 0:
        extra(model)
    with pytest.raises(DPFuseError) as caught:
        loss_of(model, rank, 1).backward()
    model.zero_grad()
    loss_of(model, rank, 0).backward()  # the next step is a normal one
    for param, mean in zip(model.parameters(), expected(skipping=False)[0], strict=True):
        torch.testing.assert_close(param.grad, mean)
    return str(caught.value)


@pytest.mark.parametrize("face", FACES)
def test_every_rank_raises_and_is_told_both_things_that_it_may_be(rank: int, size: int, face: str) -> None:
    told = provoked_error(rank, face, lambda model: model(torch.ones(2, 5)).mean().item())
    assert told.startswith(f"rank {rank}: rank 1 has run 0 forwards without a backward, rank 0 has run 1 forward")
    for part in ("only for a log", "torch.no_grad()", "eval mode", "rank dropped a batch", "multiplied by 0"):
        assert part in told


@pytest.mark.parametrize("face", FACES)
def test_the_remedies_in_the_error_train_and_give_the_means(rank: int, size: int, face: str) -> None:
    told = provoked_error(rank, face, lambda model: model(torch.ones(2, 5)))
    (code,) = re.findall("`(.*?)`", told)

    def printed(model: nn.Module) -> Tensor:
        loss: Tensor = eval(code, {"model": model})
        return loss

    for remedy, skipping in REMEDIES.items():
        model = FACES[face](net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step, means in enumerate(expected(skipping)):
            optimizer.zero_grad()
            loss = remedy(model, printed) if rank == 0 and step == MARKED else None
            (loss_of(model, rank, step) if loss is None else loss).backward()
            for param, mean in zip(model.parameters(), means, strict=True):
                torch.testing.assert_close(param.grad, mean, msg=f"{remedy.__name__}, step {step}, rank {rank}")
            optimizer.step()


@pytest.mark.parametrize("face", FACES)
def test_the_option_that_the_error_names_lets_ranks_differ(rank: int, size: int, face: str) -> None:
    model = FACES[face](net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, means in enumerate(expected(skipping=False)):
        optimizer.zero_grad()
        if rank == 0 and step == MARKED:
            model(torch.ones(2, 5))
        loss_of(model, rank, step).backward()
        for param, mean in zip(model.parameters(), means, strict=True):
            torch.testing.assert_close(param.grad, mean)
        optimizer.step()
