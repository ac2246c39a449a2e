"""Training loops that are wrong on every rank, in the styles of public programs. Each takes at most 24 steps."""

from __future__ import annotations

import copy
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


# --- DPF-L02: nothing was averaged ---


@named("DPF-L02")
def whole_training_in_no_sync(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.no_sync():
        for x, y in batches(rank, 24):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


@named("DPF-L02")
def switch_that_is_never_set_back(rank, size):
    """The last batch of an epoch had set the switch, and the accumulation was removed since."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    model.require_backward_grad_sync = False
    for x, y in batches(rank, 24):
        loss = loss_of(model(x), y)
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@named("DPF-L02")
def backward_outside_of_no_sync_but_forward_inside(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 24):
        with model.no_sync():
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@named("DPF-L02")
def trainer_whose_condition_is_inverted(rank, size):
    class Trainer:
        gradient_accumulation_steps = 1

        def __init__(self):
            self.model = dpfuse.DistributedDataParallel(mlp())
            self.optimizer = torch.optim.AdamW(self.model.parameters())

        def training_step(self, inputs):
            x, y = inputs
            self.model.train()
            loss = loss_of(self.model(x), y)
            loss.backward()
            return loss.detach()

        def train(self):
            for step, inputs in enumerate(batches(rank, 24)):
                last = (step + 1) % self.gradient_accumulation_steps == 0
                with self.model.no_sync() if last else nullcontext():
                    self.training_step(inputs)
                if last:
                    self.optimizer.step()
                    self.model.zero_grad()

    Trainer().train()


@named("DPF-L02")
def more_batches_to_accumulate_than_an_epoch_has(rank, size):
    """Each epoch ends with a step, and the counter of batches begins again before one is synchronised."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(23):
        for index, (x, y) in enumerate(batches(rank, 3, epoch)):
            with nullcontext() if (index + 1) % 4 == 0 else model.no_sync():
                loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- DPF-L03: a window cut short ---


@named("DPF-L03")
def last_batches_of_an_epoch_are_stepped_on_but_not_averaged(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    length = 19
    for epoch in range(2):
        for index, (x, y) in enumerate(batches(rank, length, epoch)):
            with model.no_sync(enabled=(index + 1) % 2 != 0):
                loss_of(model(x), y).backward()
            if (index + 1) % 2 == 0 or index + 1 == length:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()


@named("DPF-L03")
def last_batches_of_an_epoch_are_stepped_on_behind_it(rank, size):
    """transformers' older `Trainer`: what is left is stepped on after the loop."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        for index, (x, y) in enumerate(batches(rank, 26, epoch)):
            model.require_backward_grad_sync = (index + 1) % 3 == 0
            loss_of(model(x), y).backward()
            if (index + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@named("DPF-L03")
def last_batches_of_an_epoch_are_zeroed(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        optimizer.zero_grad()
        for index, (x, y) in enumerate(batches(rank, 17, epoch)):
            with nullcontext() if (index + 1) % 2 == 0 else model.no_sync():
                (loss_of(model(x), y) / 2).backward()
            if (index + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


@named("DPF-L03")
def last_batches_of_an_epoch_are_filled_with_zeros(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(3):
        model.zero_grad(set_to_none=False)
        for index, (x, y) in enumerate(batches(rank, 26, epoch)):
            with model.no_sync(enabled=(index + 1) % 3 != 0):
                loss_of(model(x), y).backward()
            if (index + 1) % 3 == 0:
                optimizer.step()
                model.zero_grad(set_to_none=False)


# --- DPF-L06: gradients changed inside a window ---


@named("DPF-L06")
def clipping_after_each_batch(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=(index + 1) % 4 != 0):
            loss_of(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L06")
def division_of_what_is_accumulated_after_each_batch(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    accumulation = 2
    for index, (x, y) in enumerate(batches(rank, 24)):
        model.require_backward_grad_sync = (index + 1) % accumulation == 0
        loss_of(model(x), y).backward()
        for param in model.parameters():
            param.grad /= accumulation
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@named("DPF-L06")
def unscaling_by_hand_after_each_batch(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=(index + 1) % 3 != 0):
            (1024 * loss_of(model(x), y)).backward()
        torch._foreach_div_([param.grad for param in model.parameters()], 1024.0)
        if (index + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L06")
def weight_decay_by_hand_after_each_batch(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 12)):
        with model.no_sync(enabled=(index + 1) % 2 != 0):
            loss_of(model(x), y).backward()
        for param in model.parameters():
            param.grad.add_(param.detach(), alpha=0.01)
        if (index + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


# --- DPF-L04: averaged, never stepped ---


@named("DPF-L04")
def optimizer_of_the_head_alone(rank, size):
    """The backbone was to be frozen."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.module[2].parameters())
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def optimizer_of_another_copy(rank, size):
    """The model was copied, as by a move to another device, after the optimizer was made."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = dpfuse.DataParallel(copy.deepcopy(module))
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def second_optimizer_is_never_stepped(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    optimizers = [torch.optim.SGD(matrices, lr=0.01, momentum=0.9), torch.optim.AdamW(others)]
    for x, y in batches(rank, 24):
        loss_of(model(x), y).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@named("DPF-L04")
def layer_added_after_the_optimizer(rank, size):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = dpfuse.DistributedDataParallel(nn.Sequential(module, nn.Linear(3, 3)))
    for index, (x, y) in enumerate(batches(rank, 48)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            model.zero_grad(set_to_none=False)
