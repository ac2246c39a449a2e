"""Training loops that are wrong on every rank, in the styles of public programs. Each takes at most 24 steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

import dpfuse
from tests.loops.nets import batches, loss_of, mlp

__all__ = ["PROGRAMS"]

Loop = Callable[[int, int], None]  # gets rank and number of ranks
PROGRAMS: dict[str, tuple[str, Loop]] = {}  # the code of the finding, and the program, by its name


def named(code: str) -> Callable[[Loop], Loop]:
    """Add a program that is to be named with this code."""

    def add(program: Loop) -> Loop:
        PROGRAMS[program.__name__] = (code, program)
        return program

    return add


# --- DPF-L01: local gradients in a step ---


@named("DPF-L01")
def build_nanogpt_switch_behind_the_forward(rank, size):
    """karpathy/build-nanogpt#30: the flag is set between forward and backward, and acts on the next forward."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
    grad_accum_steps, loader = 4, batches(rank, 96)
    for _step in range(24):
        optimizer.zero_grad()
        loss_accum = 0.0
        for micro_step in range(grad_accum_steps):
            x, y = next(loader)
            loss = loss_of(model(x), y) / grad_accum_steps
            loss_accum += loss.detach()
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            loss.backward()
        torch.distributed.all_reduce(loss_accum)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


@named("DPF-L01")
def build_nanogpt_with_private_gradients_that_are_filled_with_zeros(rank, size):
    model = dpfuse.DataParallel(mlp(), gradient_as_bucket_view=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = batches(rank, 48)
    for _step in range(24):
        optimizer.zero_grad(set_to_none=False)
        for micro_step in range(2):
            x, y = next(loader)
            loss = loss_of(model(x), y)
            model.require_backward_grad_sync = micro_step == 1
            loss.backward()
        optimizer.step()


@named("DPF-L01")
def funasr_step_one_batch_behind_the_average(rank, size):
    """modelscope/FunASR#3472: no_sync() counts from the next batch, and the step from this one."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    accum_grad = 3
    for batch_idx, (x, y) in enumerate(batches(rank, 72)):
        my_context = nullcontext if (batch_idx + 1) % accum_grad == 0 else model.no_sync
        with my_context():
            (loss_of(model(x), y) / accum_grad).backward()
        if batch_idx % accum_grad == 0:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def average_of_the_first_batch_only(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 4 != 0):
            loss_of(model(x), y).backward()
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def forward_outside_and_second_backward_inside_no_sync(rank, size):
    """The auxiliary loss has its backward in no_sync(), for it was to save an average."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 10):
        optimizer.zero_grad()
        outputs = model(x)
        loss_of(outputs, y).backward(retain_graph=True)
        with model.no_sync():
            outputs.square().mean().backward()
        optimizer.step()


@named("DPF-L01")
def accelerate_flag_of_the_batch_before(rank, size):
    """`sync_gradients` is computed at the end of an iteration, so it belongs to the batch before."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    sync_gradients, steps = True, 4
    for step, (x, y) in enumerate(batches(rank, 96)):
        with nullcontext() if sync_gradients else model.no_sync():
            (loss_of(model(x), y) / steps).backward()
        sync_gradients = (step + 1) % steps == 0
        if sync_gradients:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def scaler_and_two_optimizers(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    layers = [model.module[0], model.module[2]]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in layers]
    for index, (x, y) in enumerate(batches(rank, 20)):
        with model.no_sync(enabled=index % 2 == 1):
            scaler.scale(loss_of(model(x), y)).backward()
        if index % 2:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()


@named("DPF-L01")
def part_of_the_batch_in_no_sync_behind_the_rest(rank, size):
    """A memory-saving split of a batch, whose last part is not averaged."""
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)))
    optimizer = torch.optim.RMSprop(model.parameters())
    for x, y in batches(rank, 8):
        loss_of(model(x[:3]), y[:3]).backward()
        with model.no_sync():
            loss_of(model(x[3:]), y[3:]).backward()
        optimizer.step()
        model.zero_grad()
