"""Training loops that are right, though a careless check could take them for wrong. None of them gets a message."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.loops.nets import batch, batches, loss_of, mlp, seeded

__all__ = ["PROGRAMS"]

Loop = Callable[[int, int], None]  # gets rank and number of ranks
PROGRAMS: dict[str, Loop] = {}


def quiet(program: Loop) -> Loop:
    """Add a program that gets no message."""
    PROGRAMS[program.__name__] = program
    return program


# --- Accumulation ---


@quiet
def plain(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 30):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def nanogpt(rank, size):
    """The switch is set before the forward."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = batches(rank, 96)
    for _ in range(24):
        for micro_step in range(4):
            model.require_backward_grad_sync = micro_step == 3
            x, y = next(loader)
            (loss_of(model(x), y) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@quiet
def no_sync_with_zeros_kept(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index, (x, y) in enumerate(batches(rank, 60)):
        with model.no_sync(enabled=(index + 1) % 3 != 0):
            loss_of(model(x), y).backward()
        if (index + 1) % 3 == 0:
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@quiet
def two_backwards_that_both_synchronise(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        outputs = model(x)
        loss_of(outputs, y).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()


@quiet
def in_buckets(rank, size):
    model = dpfuse.DataParallel(mlp(), accumulate_in_buckets=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            model.zero_grad()


@quiet
def scaler_that_skips_steps(rank, size):
    """A loss of infinity in window 3: the scaler skips that step, on all ranks."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            loss = loss_of(model(x), y) * (torch.inf if index == 7 else 1)
            scaler.scale(loss).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=index % 3 == 0)


# --- Local backwards on purpose ---


@quiet
def gradients_read_for_a_log(rank, size):
    """A local backward between steps shows what this rank's gradient is."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(batches(rank, 20)):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.zero_grad(set_to_none=number % 2 == 0)


@quiet
def penalty_in_no_sync_outside_the_wrapper(rank, size):
    """It is the same on each rank."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        with model.no_sync():
            (0.01 * sum(param.square().sum() for param in model.parameters())).backward()
        optimizer.step()


@quiet
def penalty_in_no_sync_before(rank, size):
    """R1 of a discriminator: the penalty is averaged with the loss behind it."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        with model.no_sync():
            inputs = x.requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            slope.square().sum().backward()
        loss_of(model(x.detach()), y).backward()
        optimizer.step()


@quiet
def gan_whose_generator_step_writes_the_discriminator(rank, size):
    generator = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for number, (x, y) in enumerate(batches(rank, 20)):
        critic.zero_grad(set_to_none=number % 2 == 0)
        critic(y).mean().backward()
        (-critic(generator(x).detach()).mean()).backward()
        of_critic.step()
        generator.zero_grad()
        with critic.no_sync():
            critic(generator(x)).mean().backward()
        of_generator.step()


@quiet
def dcgan_with_one_backward_of_the_critic_in_no_sync(rank, size):
    generator = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for x, y in batches(rank, 20):
        critic.zero_grad()
        with critic.no_sync():
            critic(y).mean().backward()
        (-critic(generator(x).detach()).mean()).backward()
        of_critic.step()
        generator.zero_grad()
        critic(generator(x)).mean().backward()
        of_generator.step()


@quiet
def sam_of_each_rank(rank, size):
    """Sharpness-aware minimisation: the first backward is local and zeroed, the second is averaged."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        with model.no_sync():
            loss_of(model(x), y).backward()
        with torch.no_grad():
            shifts = [0.01 * param.grad / (param.grad.norm() + 1e-12) for param in model.parameters()]
            for param, shift in zip(model.parameters(), shifts, strict=True):
                param += shift
        model.zero_grad()
        loss_of(model(x), y).backward()
        with torch.no_grad():
            for param, shift in zip(model.parameters(), shifts, strict=True):
                param -= shift
        optimizer.step()
        optimizer.zero_grad()


@quiet
def average_by_hand_after_a_mixed_window(rank, size):
    """The first forward was outside of no_sync(), but the gradients of all are averaged by hand in the end."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 1):
            loss_of(model(x), y).backward()
        if index % 2:
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= size
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@quiet
def fused_average_by_hand_after_a_mixed_window(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 1):
            loss_of(model(x), y).backward()
        if index % 2:
            dpfuse.fused_allreduce_gradients(model.parameters())
            optimizer.step()
            optimizer.zero_grad()


@quiet
def lbfgs(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for number, (x, y) in enumerate(batches(rank, 6)):

        def closure(x=x, y=y, number=number):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@quiet
def optimizers_of_different_cadence(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    often = torch.optim.SGD(model.module[0].parameters(), lr=0.01)
    seldom = torch.optim.SGD(model.module[2].parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        loss_of(model(x), y).backward()
        often.step()
        often.zero_grad()
        if index % 4 == 3:
            seldom.step()
            seldom.zero_grad()


@quiet
def fisher_information(rank, size):
    """Backwards for their gradients alone, with no step at all."""
    model = dpfuse.DistributedDataParallel(mlp())
    fisher = [torch.zeros_like(param) for param in model.parameters()]
    for x, y in batches(rank, 30):
        model.zero_grad()
        loss_of(model(x), y).backward()
        for total, param in zip(fisher, model.parameters(), strict=True):
            total += param.grad.square()


@quiet
def an_exception_in_a_window(rank, size):
    """Every rank drops the window in which a backward has raised."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def broken(_grad):
        raise ValueError("a broken batch")

    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            outputs = model(x)
            if index == 10:
                outputs.register_hook(broken)
            try:
                loss_of(outputs, y).backward()
            except ValueError:
                optimizer.zero_grad()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def ema_and_evaluation(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, param in zip(average.parameters(), model.module.parameters(), strict=True):
                kept.lerp_(param, 0.1)
        with torch.no_grad():
            model(x)
        average(x)


@quiet
def one_batch_overfitted_on_purpose(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch(seeded(0))
    for _ in range(24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
